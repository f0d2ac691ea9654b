"""`rollstream replay / export / import`: what a run has trained, again: trained, dumped, or as files for other runs and tools."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.config import BufferConfig
from buffer.contract import Ledger
from buffer.exchange import Export, ExportedGroup, ExportWriter, check_format, rows_of
from buffer.importing import import_groups, plan_import
from buffer.payloads import by_bytes, check_payload
from buffer.recording import RecordedGroup, Recording, RecordingAbout
from buffer.redis_ledger import RedisLedger
from buffer.replay import JournalReader, ReplayRange, self_contained, whole
from buffer.storage import Storage, open_storage, read_payloads
from consumer.config import TrainerDaemonConfig
from deploy.config import reader_url
from protocol.config import load
from protocol.connection import Client, check_server, connect
from protocol.daemon import run_daemon
from protocol.errors import ConfigError, PayloadLost, ReplayGap, Unavailable
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys
from protocol.messages import Edge, Seq
from protocol.objects import object_store
from protocol.wakeups import wakeups

if TYPE_CHECKING:
    from consumer.offline import OfflineStep

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 8 << 20


def chosen_range(options: argparse.Namespace) -> ReplayRange:
    """What the options of `deploy.replay_arguments` say. Raises: `ConfigError`."""
    base = ReplayRange.of_versions(options.versions) if options.versions else ReplayRange.parse(options.steps) if options.steps else ReplayRange()
    return ReplayRange(first=base.first, last=base.last, since=_moment("--since", options.since), until=_moment("--until", options.until))


def _moment(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        return dt.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError as problem:
        raise ConfigError(f"{flag} {text!r}: expected a time such as 2026-11-30T12:00 (local) or 2026-11-30T12:00Z, or Unix seconds") from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run that is only read, or joined as a producer joins it."""

    config: TrainerDaemonConfig
    client: Client
    keys: Keys
    ledger: Ledger
    identity: RunIdentity
    settings: BufferConfig

    @property
    def about(self) -> RecordingAbout:
        return RecordingAbout(run=self.keys.run, identity=self.identity, settings=self.settings)

    @property
    def reader(self) -> JournalReader:
        return JournalReader(self.ledger, open_storage(self.settings, self.keys.run))


@contextlib.asynccontextmanager
async def _joined(options: argparse.Namespace) -> AsyncIterator[_Run]:
    """Raises: `ConfigError`, `RunMissing`, `IdentityMismatch`, `RedisUnreachable`."""
    config = load(TrainerDaemonConfig, options.config, sets=options.set)
    url = reader_url(config.run, config.redis)
    identity = await asyncio.to_thread(identify, config.run, config.model, config.data, config.rollout)
    keys = Keys(config.run.name)
    client = connect(url, deadline_s=config.redis.deadline_s)
    try:
        await check_server(client, url=url)
        ledger = RedisLedger(client, keys)
        settings = await ledger.join(identity)
        yield _Run(config=config, client=client, keys=keys, ledger=ledger, identity=identity, settings=settings)
    finally:
        await client.aclose()


# -- replay --------------------------------------------------------------------------------------------------------------------------------------


def replay(options: argparse.Namespace) -> int:
    if not options.train and (options.from_step is not None or options.dir):
        raise ConfigError("--from-step and --dir go with --train")
    wanted = chosen_range(options)
    return run_daemon("rollstream replay", lambda stop: _train_again(options, wanted, stop) if options.train else _dump(options, wanted, stop))


async def _dump(options: argparse.Namespace, wanted: ReplayRange, stop: asyncio.Event) -> None:
    recording = Recording(object_store(options.out, key="--out"))
    async with _joined(options) as run:
        steps = await run.reader.steps(wanted)
        await asyncio.to_thread(_describe, recording, run.about)
        written = 0
        for step in steps:
            if stop.is_set():
                break
            found = await run.reader.read(step)
            await asyncio.to_thread(recording.write_step, await asyncio.to_thread(whole, found, run.reader.blobs))
            written += 1
    _say(f"{written} of {len(steps)} steps, {steps[0]} to {steps[written - 1] if written else '-'}, are in {recording.url}\n")


def _describe(recording: Recording, about: RecordingAbout) -> None:
    """Raises: `ConfigError` for a recording of another run, as steps of two runs in one folder are no history, and for a place that takes no recording."""
    with contextlib.suppress(ReplayGap):
        found = recording.about()
        if (found.run, found.identity) != (about.run, about.identity):
            raise ConfigError(f"--out {recording.url} holds a recording of run {found.run!r}: choose another folder")
    try:
        recording.describe(about)
    except OSError as problem:
        raise ConfigError(f"--out {recording.url}: cannot be written ({problem.strerror or problem}); give a folder or a URL") from problem


async def _train_again(options: argparse.Namespace, wanted: ReplayRange, stop: asyncio.Event) -> None:
    from consumer.modes import ReplayPlan, RunHandle, run_replay

    async with _joined(options) as run:
        steps = await run.reader.steps(wanted)
        folder = Path(options.dir) if options.dir else run.config.run.folder / f"replay-{steps[0]}-{steps[-1]}"
        handle = RunHandle(client=run.client, keys=run.keys, ledger=run.ledger, settings=run.settings)
        done: list[OfflineStep] = []

        def told(step: OfflineStep) -> None:
            done.append(step)
            verdict = {True: "the run's weights, bit by bit", False: f"not the run's weights ({step.recorded_digest})", None: "the run's weights are not known"}
            _say(f"step {step.step}: {step.digest}: {verdict[step.same]}\n")

        plan = ReplayPlan(folder=folder.absolute(), from_step=options.from_step)
        reason = await run_replay(run.config, handle, steps, stop, plan=plan, on_step=told)
        same = sum(1 for step in done if step.same)
        _say(f"{same} of {len(done)} steps gave the run's weights; {reason}; see {folder}\n")


# -- export and import ---------------------------------------------------------------------------------------------------------------------------


def export(options: argparse.Namespace) -> int:
    wanted = chosen_range(options)
    if options.buffered and wanted != ReplayRange():
        raise ConfigError("--buffered: groups that are READY belong to no step; leave --steps, --versions, --since and --until out")
    check_format(Path(options.out))
    return run_daemon("rollstream export", lambda stop: _export_groups(options, wanted, stop))


async def _export_groups(options: argparse.Namespace, wanted: ReplayRange, stop: asyncio.Event) -> None:
    path, count = Path(options.out), 0
    gone: list[Seq] = []
    async with _joined(options) as run:
        source = _buffered(run, gone) if options.buffered else _journalled(run, await run.reader.steps(wanted))
        with ExportWriter(path, run.about) as sheet:
            async for groups in source:
                if stop.is_set():
                    raise Unavailable(f"stopped: {path} is not written; export again")
                await asyncio.to_thread(sheet.write, groups)
                count += len(groups)
    left_out = f"; {len(gone)} more were gone from the buffer before they were read" if gone else ""
    _say(f"{count} groups are in {path}{left_out}\n")


async def _journalled(run: _Run, steps: Sequence[int]) -> AsyncIterator[list[ExportedGroup]]:
    reader = run.reader
    for step in steps:
        yield list(rows_of(await asyncio.to_thread(whole, await reader.read(step), reader.blobs)))


async def _buffered(run: _Run, gone: list[Seq]) -> AsyncIterator[list[ExportedGroup]]:
    """What was READY at one moment. The run goes on meanwhile: what it trains and frees, or releases, before it is read is named in `gone`."""
    blobs = run.reader.blobs
    headers = await run.ledger.ready((await run.ledger.status()).ready)
    for batch in by_bytes(headers, _BATCH_BYTES):
        payloads = await read_payloads(run.ledger, Storage(), 0, batch)
        groups: list[ExportedGroup] = []
        for header in batch:
            try:
                payload = check_payload(header, payloads.get((header.seq, header.token)))
                row = await asyncio.to_thread(self_contained, RecordedGroup(header=header, payload=payload), blobs)
            except PayloadLost as problem:
                _LOG.info("left out: %s", problem)
                gone.append(header.seq)
                continue
            groups.append(ExportedGroup(header=row.header, payload=row.payload))
        yield groups


def import_file(options: argparse.Namespace) -> int:
    check_format(Path(options.file))
    return run_daemon("rollstream import", lambda stop: _import_groups(options, stop))


async def _import_groups(options: argparse.Namespace, stop: asyncio.Event) -> None:
    export = await asyncio.to_thread(Export, Path(options.file))
    async with _joined(options) as run, wakeups(run.client, run.keys) as waker:
        plan = await plan_import(export, run.ledger, run=run.keys.run, identity=run.identity, as_version=options.as_version)
        told: set[Edge] = set()

        def blocked(edge: Edge) -> None:
            if edge not in told:
                _LOG.info("waiting: %s", edge)
                told.add(edge)

        count = await import_groups(export, plan, run.ledger, waker, stop, on_blocked=blocked)
    _say(f"{count} of {plan.groups} groups are in run {run.keys.run!r}\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
