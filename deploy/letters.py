"""`rollstream letters list | show | requeue`: groups that were set aside, what they died of, and how they come back."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

import orjson
from rich.console import Console
from rich.table import Table

from buffer.contract import DeadLetter, Ledger
from buffer.redis_ledger import RedisLedger
from deploy.config import ReaderConfig, reader_url
from protocol.config import load
from protocol.connection import check_server, connect
from protocol.errors import ConfigError
from protocol.keys import Keys
from protocol.messages import Seq

_PAGE = 500
_DEADLINE_S = 10.0
_WIDTH = 200
_WHY = 80
"""Characters of the reason that fit into a line."""


def list_letters(options: argparse.Namespace) -> int:
    """Print every letter, or those of one reason. Raises: `RunMissing`, `RedisUnavailable`, `ConfigError`."""
    letters = [letter for letter in asyncio.run(_letters(options)) if options.reason in (None, letter.reason)]
    if options.json:
        _write([asdict(letter) for letter in letters])
        return 0
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("group", "reason", "attempts", "prompt", "died", "why"):
        table.add_column(title)
    for letter in letters:
        table.add_row(str(letter.seq), letter.reason, str(letter.attempt), letter.prompt_id or "-", _ago(letter), _brief(letter.why))
    _console().print(table if letters else "no dead letters")
    return 0


def show_letters(options: argparse.Namespace) -> int:
    """Print the letters of the groups asked for, in full. Raises: as `list_letters`; `ConfigError` for a group without a letter."""
    by_seq = {letter.seq: letter for letter in asyncio.run(_letters(options))}
    _refuse_unknown([seq for seq in options.seqs if seq not in by_seq])
    letters = [by_seq[seq] for seq in options.seqs]
    if options.json:
        _write([asdict(letter) for letter in letters])
        return 0
    for letter in letters:
        rows = (
            ("group", letter.seq),
            ("reason", letter.reason),
            ("attempts", f"{letter.attempt}, {letter.failures} of them counted"),
            ("prompt", letter.prompt_id or "not recorded: its number, the seed and the data give it"),
            ("died", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(letter.at))}, {_ago(letter)}"),
            ("why", letter.why or "not told"),
        )
        sys.stdout.write("".join(f"{name:<10}{value}\n" for name, value in rows) + "\n")
    return 0


def requeue_letters(options: argparse.Namespace) -> int:
    """Hand the groups asked for out again. Raises: as `show_letters`; `ConfigError` unless it is said which."""
    if bool(options.seqs) == bool(options.all or options.reason):
        raise ConfigError("letters requeue: name groups, or give --all or --reason R for every letter or every one of a reason, but not both")
    queued = asyncio.run(_requeue(options))
    if options.json:
        _write({"requeued": queued})
    else:
        sys.stdout.write(f"{len(queued)} groups will be handed out again\n")
    return 0


async def _letters(options: argparse.Namespace) -> list[DeadLetter]:
    async with _ledger(options) as ledger:
        return await _read(ledger)


async def _requeue(options: argparse.Namespace) -> list[Seq]:
    async with _ledger(options) as ledger:
        letters = await _read(ledger)
        _refuse_unknown(sorted(set(options.seqs) - {letter.seq for letter in letters}))
        seqs = [letter.seq for letter in letters if (letter.seq in options.seqs or not options.seqs) and options.reason in (None, letter.reason)]
        queued: list[Seq] = []
        for start in range(0, len(seqs), _PAGE):
            queued += await ledger.requeue(seqs[start : start + _PAGE])
        return queued


async def _read(ledger: Ledger) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    while page := await ledger.dead_letters(letters[-1].seq if letters else Seq(-1), _PAGE):
        letters += page
    return letters


@contextlib.asynccontextmanager
async def _ledger(options: argparse.Namespace) -> AsyncIterator[Ledger]:
    """Of the run that the command line names."""
    config = load(ReaderConfig, options.config, sets=options.set)
    url = reader_url(config.run, config.redis)
    client = connect(url, deadline_s=_DEADLINE_S)
    try:
        await check_server(client, url=url)
        yield RedisLedger(client, Keys(config.run.name))
    finally:
        await client.aclose()


def _refuse_unknown(seqs: Sequence[int]) -> None:
    if seqs:
        raise ConfigError(f"no dead letter of group {', '.join(map(str, seqs))}: `rollstream letters list` shows all there are")


def _ago(letter: DeadLetter) -> str:
    return f"{max(0.0, time.time() - letter.at):.0f} s ago"


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WHY else f"{line[: _WHY - 1]}…"


def _write(value: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)
