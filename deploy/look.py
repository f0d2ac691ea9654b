"""`rollstream status / groups / engines / weights / summary` and `config show`: what is going on, for people, or as JSON for programs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType

import orjson
from pydantic import BaseModel
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from deploy.config import ReaderConfig, UpConfig, reader_url
from deploy.http import bodies, evals
from deploy.live import carriers, line
from deploy.snapshot import Picture, picture_source
from deploy.trouble import channel, rests, troubles
from protocol.config import load
from protocol.errors import RedisUnavailable, RunMissing
from weightsync.aim import EVAL_FLEET

_WIDTH = 200
"""Of tables that go to a file or a pipe."""
_OPTION = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


def look(what: str, path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Print one look. Raises: `RunMissing`, `RedisUnavailable`, `ConfigError`."""
    config = load(ReaderConfig, path, sets=sets)
    url = reader_url(config.run, config.redis)
    picture = asyncio.run(_take(url, config))
    if picture.ledger is None:
        raise RunMissing(f"there is no run {config.run.name!r} in {url}: start it, or correct run.name or redis.url")
    if as_json:
        sys.stdout.buffer.write(orjson.dumps({name: body(picture).model_dump() for name, body in _BODIES[what].items()}, option=_OPTION))
    else:
        console = _console()
        for part in _VIEWS[what](picture):
            console.print(part)
    return 0


def bias(path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Print what became of every sampled token, of a run that is live or has ended. Raises: `ConfigError` if the run's record is not here."""
    from deploy.bias import bias_by_hand, tables

    config = load(ReaderConfig, path, sets=sets)
    report = asyncio.run(bias_by_hand(config))
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(report.model_dump(), option=_OPTION))
    else:
        console = _console()
        for part in tables(report):
            console.print(part)
    return 0


def summarise(path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Write `summary.json` of a run and print it. Raises: `ConfigError` if the run's record is not here."""
    from deploy.summary import summary_by_hand, table

    config = load(ReaderConfig, path, sets=sets)
    summary = asyncio.run(summary_by_hand(config))
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(summary, option=_OPTION))
    else:
        _console().print(table(summary))
        sys.stdout.write(f"{config.run.folder / 'summary.json'}\n")
    return 0


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


async def _take(url: str, config: ReaderConfig) -> Picture:
    try:
        async with picture_source(
            url, config.run.name, folder=config.run.folder, deadline_s=1.0, patience_s=config.run.stall_seconds, transport=config.weights.transport
        ) as source:
            return await source.picture()
    except (RedisError, OSError) as problem:
        raise RedisUnavailable(f"redis.url {url}: no answer ({problem}); is the run up?") from problem


_BODIES: MappingProxyType[str, dict[str, Callable[[Picture], BaseModel]]] = MappingProxyType(
    {
        "status": {
            "watchdog": bodies.watchdog,
            "buffer": bodies.buffer,
            "staleness": bodies.staleness,
            "weights": bodies.weights,
            "engines": bodies.engines,
            "producers": bodies.producers,
            "trainers": bodies.trainers,
            "launchers": bodies.launchers,
            "journal": bodies.journal,
            "evals": evals.evals,
        },
        "groups": {"buffer": bodies.buffer},
        "engines": {"engines": bodies.engines},
        "weights": {"weights": bodies.weights},
    }
)


def _status(picture: Picture) -> list[Table | str]:
    parts = [line(picture), *_blocked(picture), *_troubles(picture), *_storage(picture), *carriers(picture), *_launchers(picture)]
    return [*parts, *_evaluated(picture), _engines_table(picture), _producers_table(picture)]


def _evaluated(picture: Picture) -> list[str]:
    told = evals.line(picture)
    return [told] if told else []


def _troubles(picture: Picture) -> list[str]:
    """In full, what keeps engines from the newest version, or from being asked."""
    return [f"trouble: {one}" for one in (*(trouble.sentence for trouble in troubles(picture)), *channel(picture), *rests(picture))]


def _launchers(picture: Picture) -> list[str]:
    """How many processes `rollstream up` is to have here, and has."""
    told = []
    for one in picture.launchers:
        counts = (f"{sum(name.startswith(f'{role}-') for name in one.running)} of {count} {role}s" for role, count in one.wanted.items())
        leaving = f", {', '.join(one.leaving)} leaving" if one.leaving else ""
        told.append(f"processes on {one.host}: {', '.join(counts)}{leaving}")
        told += [f"trouble: {why}" for why in one.given_up.values()]
    return told


def _blocked(picture: Picture) -> list[str]:
    """Edges that are blocked and have not lasted long enough to be in the line."""
    return [f"blocked: {stall.sentence(picture.at)}" for stall in picture.blocked if stall not in picture.stalls]


def _storage(picture: Picture) -> list[str]:
    """What is set aside, replayed and spilled; nothing where there is nothing to tell."""
    ledger, journal = picture.ledger, bodies.journal(picture)
    assert ledger is not None
    told = [f"{ledger.letters} dead letters: see `rollstream letters list`"] if ledger.letters else []
    told += [f"reader {one.reader} wants step {one.wants}, {one.lag_steps} behind" for one in journal.readers]
    told += [f"shadow {one.trainer_id} at step {one.trained}, {max(0, ledger.trained - one.trained)} behind" for one in picture.shadows]
    if ledger.to_spill or picture.spill_problem:
        told.append(f"{ledger.to_spill} steps wait for the spill" + (f", which fails: {picture.spill_problem}" if picture.spill_problem else ""))
    return told


def _groups(picture: Picture) -> list[Table | str]:
    body = bodies.buffer(picture)
    table = Table(box=None, show_header=False, padding=(0, 2))
    names = (
        "generating",
        "ready",
        "leased",
        "outstanding",
        "admission_limit",
        "selection",
        "released",
        "letters",
        "trained_groups",
        "to_spill",
        "next_seq",
        "low_seq",
    )
    for name in names:
        table.add_row(name.replace("_", " "), str(getattr(body, name)))
    table.add_row("bytes", f"{body.bytes_used} of {body.byte_budget}")
    for title, counts in (("releases", body.releases), ("dead", body.dead)):
        table.add_row(title, ", ".join(f"{count} {reason}" for reason, count in counts.items() if count) or "none")
    ages = ", ".join(f"{tokens} at {steps}" for steps, tokens in picture.ready_age.histogram.items())
    table.add_row("ready tokens by staleness", ages or "none")
    return [table]


def _engines(picture: Picture) -> list[Table | str]:
    return [_engines_table(picture), *_troubles(picture)]


def _weights(picture: Picture) -> list[Table | str]:
    body = bodies.weights(picture)
    newest = f"newest {body.newest}, {body.kind}, {body.total_bytes} bytes, digest {body.digest}" if body.newest else "nothing is published yet"
    deltas = f" ({body.deltas} as deltas)" if body.deltas else ""
    told = f"trained {body.trained}; {body.published} published{deltas}, {body.applied} applied"
    return [newest, told, *carriers(picture), _engines_table(picture), *_troubles(picture)]


def _engines_table(picture: Picture) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("engine", "state", "version", "by", "lag", "running", "queued", "updates", "tokens", "url"):
        table.add_column(title)
    for status in picture.engines:
        lag = picture.lag(status.version)
        served = (status.version or "-", status.transport or "-", "-" if lag is None else lag)
        figures = (status.engine_id, status.state.value + (" (eval)" if status.fleet == EVAL_FLEET else ""), *served, f"{status.running}/{status.capacity}")
        table.add_row(*(str(part) for part in (*figures, status.queued, status.updates, status.generated_tokens, status.url)))
    return table


def _producers_table(picture: Picture) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("producer", "in flight", "put", "failed", "retried", "waiting for"):
        table.add_column(title)
    for status in picture.producers:
        waits = status.waiting_for.value if status.waiting_for else "-"
        figures = (status.producer_id, status.inflight_groups, status.groups_put, status.groups_failed, status.samples_retried, waits)
        table.add_row(*(str(part) for part in figures))
    return table


_VIEWS: MappingProxyType[str, Callable[[Picture], list[Table | str]]] = MappingProxyType(
    {"status": _status, "groups": _groups, "engines": _engines, "weights": _weights}
)


def show_config(config: UpConfig, *, as_json: bool) -> str:
    """Every key with the value in force and its line of help, as TOML that can be read back; or as JSON."""
    if as_json:
        return orjson.dumps(config.model_dump(mode="json"), option=_OPTION).decode()
    lines: list[str] = []
    for section, field in UpConfig.model_fields.items():
        table = getattr(config, section)
        assert isinstance(table, BaseModel), field
        lines.append(f"[{section}]")
        for key, about in type(table).model_fields.items():
            value = table.model_dump(mode="json")[key]
            lines.append(f"{key} = {_toml(value)}  # {about.description}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    """A value of the configuration as TOML spells it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{orjson.dumps(name).decode()} = {_toml(one)}" for name, one in value.items()) + "}"
    return orjson.dumps(value).decode()
