"""`rollstream runs fork`: a new run in the same Redis that goes on from a checkpoint of another, with a folder of its own.

    checkpoint linked ──► ledger read ──► payloads copied ──► records cut at that moment ──► folder in place ──► ledger written, rewound to the checkpoint

The other run is only read. The new run's folder has its history up to the fork, so the new run's totals are right; its checkpoint is a hard link, or a copy,
so the other run may delete its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from buffer.audit import read_audit
from buffer.contract import CheckpointRef
from buffer.fork import Moved, RunCopy, copy_payloads, copy_stores, drop_payloads, read_run, write_run
from buffer.redis_ledger import RedisLedger
from buffer.witness import whole_lines
from deploy.config import ReaderConfig, reader_url
from deploy.runs import reached, run_names
from protocol.connection import Client
from protocol.durable import sync_folder, write_file
from protocol.errors import ConfigError, RunExists, RunMissing
from protocol.keys import Keys
from protocol.messages import Event

_TRIES = 5
_CHECKPOINTS = "checkpoint"
_FORKING_S = 3600
"""A fork that was killed keeps the name for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """What was made."""

    step: int
    incarnation: int
    folder: Path
    groups: int
    """Payloads copied."""


def fork_run(options: argparse.Namespace) -> int:
    """Fork and say what to do next. Raises: `RunMissing`, `RunExists`, `ConfigError`."""
    made, url = asyncio.run(_fork(options))
    again = [("redis.url", url), ("run.name", options.to), ("run.dir", str(made.folder))]
    words = ["rollstream", "up", "-c", options.config or f"FILE of {options.run}", "--resume"]
    words += [word for one in (*options.set, *(f"{key}={value}" for key, value in again)) for word in ("--set", one)]
    sys.stdout.write(
        f"{options.to}: goes on from step {made.step} of {options.run}, with {made.groups} groups of it; its folder is {made.folder}\n"
        f"it lives in the same Redis, which must stay; go on with: {shlex.join(words)}\n"
    )
    return 0


async def _fork(options: argparse.Namespace) -> tuple[Forked, str]:
    """What was made, and the URL of the Redis that it is in."""
    async with reached(options) as (client, config):
        url = options.redis if config is None else reader_url(config.run, config.redis)
        source, target = Keys(options.run), Keys(options.to)
        names = await run_names(client)
        if source.run not in names:
            raise RunMissing(f"run {source.run!r} is not in this Redis: see `rollstream runs list`")
        if target.run in names:
            raise RunExists(f"run {target.run!r} exists already: use another name, or `rollstream runs delete {target.run}`")
        old, new = folders(options, config)
        return await fork(client, source, target, old, new, step=options.step), url


def folders(options: argparse.Namespace, config: ReaderConfig | None) -> tuple[Path, Path]:
    """Of the run that is forked, and of the new one. Raises: `ConfigError`."""
    if options.from_dir:
        old = Path(options.from_dir).absolute()
    elif config is not None and config.run.name == options.run:
        old = config.run.folder
    else:
        old = Path("runs").absolute() / options.run
    return old, Path(options.dir).absolute() if options.dir else old.parent / options.to


async def fork(client: Client, source: Keys, target: Keys, old: Path, new: Path, *, step: int | None = None) -> Forked:
    """A run `target` that goes on from the checkpoint of `step`, or the newest; its folder is `new`, which must not be there, or be empty.

    Raises: `ConfigError`, `RunExists`.
    """
    if await asyncio.to_thread(_holds_something, new):
        raise RunExists(f"{new} is there already: name another with --dir, or move it away")
    attempt, mine = _Attempt(client, source, target, old, new), secrets.token_hex(8)
    if not await client.set(target.key("forking"), mine, nx=True, ex=_FORKING_S):
        raise RunExists(f"run {target.run!r} is being made by another fork just now: wait for it, or use another name")
    try:
        for _ in range(_TRIES):
            try:
                return await attempt.run(step)
            except Moved as problem:
                moved = problem
    except OSError as problem:
        raise ConfigError(f"run {target.run!r} is not made: {problem}; make the place readable and writable from here, then try again") from problem
    finally:
        await client.delete(target.key("forking"))
    raise ConfigError(f"{moved}, {_TRIES} times; fork from a newer step, set buffer.retention for the next run, or stop the trainer meanwhile")


def _holds_something(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


class _Attempt:
    """One try at a fork: nothing of it is left if it fails."""

    def __init__(self, client: Client, source: Keys, target: Keys, old: Path, new: Path) -> None:
        self._client, self._source, self._target = client, source, target
        self._old, self._new = old, new
        self._draft = new.parent / f".fork-{new.name}"

    async def run(self, step: int | None) -> Forked:
        """Raises: `Moved` if the run went on past what was being copied."""
        await asyncio.to_thread(shutil.rmtree, self._draft, ignore_errors=True)
        try:
            return await self._copy(step)
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)

    async def _copy(self, step: int | None) -> Forked:
        client, source = self._client, self._source
        chosen = _choose(source, (await RedisLedger(client, source).status()).checkpoints, step)
        place = await asyncio.to_thread(_link_checkpoint, chosen, self._old, self._draft)
        copy = await read_run(client, source)
        if chosen not in copy.checkpoints:
            raise Moved(f"run {source.run!r} no longer keeps the checkpoint of step {chosen.step}")
        payloads = await copy_payloads(client, copy, self._target)
        try:
            incarnation = await self._write(copy, replace(chosen, path=str(self._new / place)))
        except BaseException:
            await asyncio.shield(drop_payloads(client, payloads))
            raise
        return Forked(step=chosen.step, incarnation=incarnation, folder=self._new, groups=len(payloads))

    async def _write(self, copy: RunCopy, checkpoint: CheckpointRef) -> int:
        """Stores and records first, the folder in its place, then the ledger. The new run's incarnation."""
        changed = await asyncio.to_thread(copy_stores, copy, self._target)
        until = _order(copy.last_event)
        events = [event for event in await read_audit(self._old / "audit.jsonl", self._client, self._source) if _order(event.id) <= until]
        await asyncio.to_thread(_write_records, events, copy, checkpoint.step, self._old, self._draft)
        await asyncio.to_thread(_into_place, self._draft, self._new)
        try:
            return await write_run(self._client, copy, self._target, checkpoint, changed)
        except BaseException:
            shutil.rmtree(self._new, ignore_errors=True)
            raise


def _choose(source: Keys, registered: tuple[CheckpointRef, ...], step: int | None) -> CheckpointRef:
    if not registered:
        raise ConfigError(f"run {source.run!r} has no registered checkpoint yet: wait for one, or start a new run")
    if step is None:
        return max(registered, key=lambda one: one.step)
    for one in registered:
        if one.step == step:
            return one
    raise ConfigError(f"--step {step}: run {source.run!r} has no registered checkpoint of it; registered are {', '.join(str(one.step) for one in registered)}")


def _link_checkpoint(checkpoint: CheckpointRef, old: Path, draft: Path) -> Path:
    """The checkpoint in the draft, file by file a hard link where that can be; its path inside. Raises: `ConfigError`, `Moved`."""
    found = Path(checkpoint.path)
    if not found.is_dir():
        found = old / _CHECKPOINTS / found.name
    if not found.is_dir():
        raise ConfigError(
            f"checkpoint {checkpoint.path} of step {checkpoint.step} is not to be seen here: ask where the trainer runs, or name its folder with --from-dir"
        )
    place = Path(_CHECKPOINTS) / found.name
    try:
        shutil.copytree(found, draft / place, copy_function=_link)
    except (FileNotFoundError, shutil.Error) as problem:
        raise Moved(f"checkpoint {found} was deleted while it was linked") from problem
    return place


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copy2(source, target)


def _write_records(events: list[Event], copy: RunCopy, step: int, old: Path, draft: Path) -> None:
    """The run's history up to the moment of the copy. Raises: `ConfigError` if a part of it is not here."""
    if not any(event.op == "created" for event in events):
        raise ConfigError(f"{old / 'audit.jsonl'} does not tell run {copy.keys.run!r} from its beginning: name its folder with --from-dir")
    audited = {(event.fields["incarnation"], event.fields["step"]) for event in events if event.op == "trained"}
    write_file(draft / "audit.jsonl", b"".join(orjson.dumps({"id": event.id, "op": event.op, "d": event.fields}) + b"\n" for event in events))
    witnessed = [(line, orjson.loads(line)) for line in whole_lines(old / "witness.jsonl")]
    write_file(draft / "witness.jsonl", b"".join(line + b"\n" for line, fields in witnessed if (fields["incarnation"], fields["step"]) in audited))
    metrics = [line for line in whole_lines(old / "metrics.jsonl") if orjson.loads(line)["step"] <= step]
    write_file(draft / "metrics.jsonl", b"".join(line + b"\n" for line in metrics))


def _into_place(draft: Path, new: Path) -> None:
    sync_folder(draft)
    with contextlib.suppress(FileNotFoundError):
        new.rmdir()  # it is empty
    draft.rename(new)
    sync_folder(new.parent)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)
