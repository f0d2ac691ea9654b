"""Reading the journal again: any trained step that is still held, byte for byte, from Redis or from the spill (rule T7).

    ledger: chunks, digest, payloads ──┐
                                       ├──► JournalReader.read(step) ──► RecordedStep ──► replay, shadow, export
    spill: what retention let go ──────┘

A reader holds nothing back and takes nothing: the run never waits for one, and a step that has left both places is a `ReplayGap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from buffer.blobs import BlobStore
from buffer.config import BufferConfig, StalenessGuard
from buffer.contract import ChunkRecord, Ledger, LedgerStatus, RunState, StepRecord, TrainedStep
from buffer.recording import RecordedGroup, RecordedStep, Recording, step_ranges
from buffer.storage import Storage, read_step, storage_answers
from protocol.codec import decode_group, digest, encode_group
from protocol.errors import ConfigError, ReplayGap
from protocol.messages import GroupHeader, RolloutGroup, Seq, SlotToken
from protocol.versions import Fork, Lineage, Version
from protocol.wakeups import Topic, Wakeups

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CURSOR_S = 60.0
"""A reader that has not looked for so long is not one any more, in the eyes of `status`."""
_READS = 5
"""A step that changes under the reader so often is no rewind any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRange:
    """Which steps a replay is about. None: open at that end.

    >>> ReplayRange.parse("3:7"), ReplayRange.parse("3:").last, ReplayRange.parse("4").last
    (ReplayRange(first=3, last=7, since=None, until=None), None, 4)
    """

    first: int | None = None
    last: int | None = None
    """Inclusive."""
    since: float | None = None
    """Unix seconds: trained then or later, by the clock of Redis."""
    until: float | None = None

    @classmethod
    def parse(cls, text: str, *, flag: str = "--steps") -> ReplayRange:
        """`A:B` with both ends, `A:`, `:B`, or one number. Raises: `ConfigError` naming `flag`."""
        low, colon, high = text.partition(":")
        if not (low or high) or any(part and not part.isdecimal() for part in (low, high)):
            raise ConfigError(f"{flag} {text!r}: expected A:B with whole numbers, both ends included, such as 3:7, 3: or :7")
        first, last = int(low) if low else None, int(high) if high else None if colon else int(low)
        if first is not None and last is not None and first > last:
            raise ConfigError(f"{flag} {text!r}: begins after its end")
        return cls(first=first, last=last)

    @classmethod
    def of_versions(cls, text: str) -> ReplayRange:
        """The steps that trained policies `v(A)` to `v(B)`: step s trains v(s-1), so these are steps A+1 to B+1. Raises: `ConfigError`."""
        found = cls.parse(text, flag="--versions")
        return cls(first=None if found.first is None else found.first + 1, last=None if found.last is None else found.last + 1)


class JournalReader:
    """Reads one run. Holds no state; a run may have any number."""

    def __init__(self, ledger: Ledger, storage: Storage) -> None:
        self._ledger, self._storage = ledger, storage

    @property
    def blobs(self) -> BlobStore | None:
        """Where the large extras of its groups lie; None: the run keeps none outside its payloads."""
        return self._storage.blobs

    async def read(self, step: int) -> RecordedStep:
        """A trained step: its chunks as journalled, in order, and the bytes of every payload as put.

        A group that was lost from the journal is not in it. Raises: `ReplayGap` saying what is there.
        """
        for _ in range(_READS):
            outcome = await self._ledger.trained_step(step)
            if outcome is None:
                return await self._from_spill(step)
            chunks = await self._ledger.chunks(step, step)
            payloads = await read_step(self._ledger, self._storage, step, chunks)
            if await self._ledger.trained_step(step) == outcome:  # else it was rewound, dropped or trained again meanwhile
                return _recorded(outcome, chunks, payloads)
        raise ReplayGap(f"step {step} was trained again {_READS} times while it was read: try again")

    async def held(self) -> list[int]:
        """The trained steps that can be read now, ascending."""
        return await self._held(await self._ledger.status())

    async def steps(self, wanted: ReplayRange) -> list[int]:
        """The steps in `wanted`, ascending, each of them held. Raises: `ReplayGap` for a step that is not, or for none at all."""
        held = await self.held()
        if not held:
            raise ReplayGap("no trained step is held: the run has trained none yet, or all have left buffer.retention; buffer.spill keeps them")
        first, last = wanted.first if wanted.first is not None else held[0], wanted.last if wanted.last is not None else held[-1]
        if missing := sorted(set(range(first, last + 1)) - set(held)):
            raise ReplayGap(
                f"steps {step_ranges(missing)} are not held; held are {step_ranges(held)}: ask for these, or keep more with buffer.retention or buffer.spill"
            )
        chosen = list(range(first, last + 1))
        if wanted.since is not None:
            chosen = chosen[await self._bisect(chosen, wanted.since, after=False) :]
        if wanted.until is not None:
            chosen = chosen[: await self._bisect(chosen, wanted.until, after=True)]
        if not chosen:
            raise ReplayGap(f"no step of {step_ranges(range(first, last + 1))} was trained in that time: widen --since and --until")
        return chosen

    async def follow(self, reader: str, wakeups: Wakeups, start: int) -> AsyncGenerator[RecordedStep, None]:
        """Every step from `start` on, as soon as it is trained, until the run has drained; the stream of a shadow.

        Waits for: the next trained step. Unblocked by: wake-ups `slot` and `run`.
        A run that goes back to a checkpoint trains steps again: those that are not on its line any more come again, as the incarnation that trains them now
        does them, so a step that is not greater than the one before means: go back to it. Where the weights were equal bit by bit nothing comes again.
        Raises: `ReplayGap` when the reader is so slow that a step has left before it was read.
        """
        wanted, given = start, _Given()
        while True:
            mark = wakeups.mark(Topic.SLOT, Topic.RUN)
            with contextlib.suppress(ReplayGap):  # dropped from the journal; the spill may have it
                await self._ledger.follow(reader, wanted, ttl_s=_CURSOR_S)
            status = await self._ledger.status()
            if (back := given.back_to(status.lineage)) is not None:
                _LOG.info("incarnation %d went back: step %d is next again", status.incarnation, back)
                wanted = back
                continue
            if wanted <= status.trained:
                try:
                    step = await self._read_on(status, wanted)
                except ReplayGap:
                    now = await self._ledger.status()
                    if now.incarnation == status.incarnation and wanted <= now.trained:
                        raise
                    continue  # the run went back while it was read
                given.add(wanted, step.incarnation)
                wanted += 1
                yield step
            elif status.state is RunState.DRAINING:
                return
            else:
                await wakeups.wait(Topic.SLOT, Topic.RUN, since=mark)

    # parts ------------------------------------------------------------------------------------------------------------------

    async def _read_on(self, status: LedgerStatus, step: int) -> RecordedStep:
        """Raises: `ReplayGap`, also for what was given up before `status`: the step as the line has it was never recorded, and asking again changes nothing."""
        found = await self.read(step)
        if found.incarnation <= status.incarnation and not status.lineage.contains(Version(found.incarnation, step)):
            raise ReplayGap(f"step {step} is held only as incarnation {found.incarnation} trained it, which the run has given up: start after it")
        return found

    async def _held(self, status: LedgerStatus) -> list[int]:
        """Steps on the surviving line that can be read. The spill may also have some that were rewound: those are above what is trained."""
        with storage_answers():
            spilled = await asyncio.to_thread(self._storage.spill.steps) if self._storage.spill is not None else []
        return [step for step in spilled if step <= min(status.dropped, status.trained)] + list(range(status.dropped + 1, status.trained + 1))

    async def _bisect(self, steps: Sequence[int], moment: float, *, after: bool) -> int:
        """Index of the first step trained at `moment` or later (`after`: later). Steps are trained in order, so few of them are asked."""
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            at = await self._trained_at(steps[middle])
            if at < moment or (after and at == moment):
                low = middle + 1
            else:
                high = middle
        return low

    async def _trained_at(self, step: int) -> float:
        outcome = await self._ledger.trained_step(step)
        return outcome.at if outcome is not None else await self._spilled(step, lambda spill: spill.trained_at(step))

    async def _from_spill(self, step: int) -> RecordedStep:
        found = await self._spilled(step, lambda spill: spill.read_step(step))
        _refuse_holes(found)
        return found

    async def _spilled(self, step: int, read: Callable[[Recording], T]) -> T:
        """Raises: `ReplayGap` saying what is held."""
        status = await self._ledger.status()
        held = await self._held(status)
        if self._storage.spill is None or step > status.trained:
            raise ReplayGap(f"step {step} is not held; held are {step_ranges(held)}" + ("" if step <= status.trained else "; it is not trained yet"))
        try:
            with storage_answers():
                return await asyncio.to_thread(read, self._storage.spill)
        except ReplayGap as problem:
            raise ReplayGap(f"step {step} is neither in Redis nor in the spill; held are {step_ranges(held)}") from problem


class _Given:
    """Steps handed out, in runs of one incarnation each: which of them a line of history no longer has.

    >>> given = _Given()
    >>> for step in (3, 4, 5): given.add(step, 1)
    >>> given.back_to(Lineage({1: Fork(0, 0), 2: Fork(1, 4)}, head=2))
    5
    """

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, int]] = []
        """(incarnation, first, last), ascending."""

    def add(self, step: int, incarnation: int) -> None:
        if self._runs and self._runs[-1][0] == incarnation:
            self._runs[-1] = (incarnation, self._runs[-1][1], step)
        else:
            self._runs.append((incarnation, step, step))

    def back_to(self, lineage: Lineage) -> int | None:
        """The first step given that is not on the line; it and what follows are forgotten. None: all are."""
        for index, (incarnation, first, last) in enumerate(self._runs):
            shared = lineage.shared(Version(incarnation, last))
            if shared < last:
                back = max(first, shared + 1)
                kept = [(incarnation, first, back - 1)] if back > first else []
                self._runs[index:] = kept
                return back
        return None


def _refuse_holes(step: RecordedStep) -> None:
    """A payload that was lost before it was recorded is kept as no bytes: such a step is not the one that was trained. Raises: `ReplayGap`."""
    for chunk, payloads in zip(step.chunks, step.payloads, strict=True):
        for header, payload in zip(chunk.headers, payloads, strict=True):
            if not payload:
                raise ReplayGap(f"step {step.step}: the payload of group {header.seq} was lost before it was recorded: choose other steps")


def _recorded(outcome: TrainedStep, chunks: Sequence[ChunkRecord], payloads: dict[tuple[Seq, SlotToken], bytes]) -> RecordedStep:
    if absent := [header.seq for chunk in chunks for header in chunk.headers if (header.seq, header.token) not in payloads]:
        raise ReplayGap(f"step {outcome.step}: the payload of group {absent[0]} is neither in Redis nor in the spill")
    return RecordedStep(
        step=outcome.step,
        incarnation=outcome.incarnation,
        digest=outcome.digest,
        at=outcome.at,
        chunks=tuple(chunks),
        payloads=tuple(tuple(payloads[header.seq, header.token] for header in chunk.headers) for chunk in chunks),
    )


# -- recordings ----------------------------------------------------------------------------------------------------------------------------------


def decoded(step: RecordedStep, blobs: BlobStore | None) -> Iterator[tuple[ChunkRecord, list[tuple[GroupHeader, RolloutGroup]]]]:
    """Each chunk with its groups, extras put back: what a trainer is given. Raises: `DecodeError`, `PayloadLost` for an extra that is gone."""
    for chunk, payloads in zip(step.chunks, step.payloads, strict=True):
        yield chunk, [(header, _restored(header, payload, blobs)) for header, payload in zip(chunk.headers, payloads, strict=True)]


def _restored(header: GroupHeader, payload: bytes, blobs: BlobStore | None) -> RolloutGroup:
    group = decode_group(payload)
    if not header.blobs:
        return group
    if blobs is None:
        raise ConfigError(f"group {header.seq} has extras in a blob store: set buffer.blobs to that of its run")
    return blobs.restore(header, group)


def self_contained(group: RecordedGroup, blobs: BlobStore | None) -> RecordedGroup:
    """The group with its extras inside the payload, for what outlives the blobs of its run; the very same bytes where it has none outside."""
    if not group.header.blobs:
        return group
    payload = encode_group(_restored(group.header, group.payload, blobs))
    header = dataclasses.replace(group.header, blobs={}, payload_bytes=len(payload), payload_digest=digest(payload))
    return RecordedGroup(header=header, payload=payload)


def whole(step: RecordedStep, blobs: BlobStore | None) -> RecordedStep:
    """The step with `self_contained` groups."""
    if not any(header.blobs for chunk in step.chunks for header in chunk.headers):
        return step
    chunks: list[ChunkRecord] = []
    kept: list[tuple[bytes, ...]] = []
    for chunk, payloads in zip(step.chunks, step.payloads, strict=True):
        groups = [self_contained(RecordedGroup(header=header, payload=payload), blobs) for header, payload in zip(chunk.headers, payloads, strict=True)]
        chunks.append(dataclasses.replace(chunk, headers=tuple(group.header for group in groups)))
        kept.append(tuple(group.payload for group in groups))
    return dataclasses.replace(step, chunks=tuple(chunks), payloads=tuple(kept))


def recorded_steps(recording: Recording, settings: BufferConfig) -> Iterator[RecordedStep]:
    """The steps of a recording in order; one of loose groups is cut into steps of B by `settings`. Blocks.

    Raises: `ReplayGap` for a recording without either, or with a hole between two steps.
    """
    steps = recording.steps()
    if not steps:
        yield from cut_into_steps(recording.groups(), settings)
        return
    if missing := sorted(set(range(steps[0], steps[-1] + 1)) - set(steps)):
        raise ReplayGap(f"the recording has steps {step_ranges(steps)}, {step_ranges(missing)} are missing: record them again, or use a part without a hole")
    for step in steps:
        found = recording.read_step(step)
        _refuse_holes(found)
        yield found


def cut_into_steps(groups: Iterable[RecordedGroup], settings: BufferConfig) -> Iterator[RecordedStep]:
    """Loose groups as steps 1, 2, … of B groups each, in chunks; fewer than B at the end are left over.

    Nothing is known of the line of history they were sampled on, so nothing is masked or dropped (guard `correct`), and every token counts as written by the
    starting weights: staleness in step s is s - 1, its upper bound.
    """
    waiting: list[RecordedGroup] = []
    step = 0
    for group in groups:
        waiting.append(group)
        if len(waiting) == settings.groups_per_step:
            step += 1
            yield _step_of(step, waiting, settings.chunk)
            waiting = []
    if waiting:
        _LOG.info("%d groups are left over: a step has %d", len(waiting), settings.groups_per_step)


def _step_of(step: int, groups: Sequence[RecordedGroup], chunk: int) -> RecordedStep:
    known = sorted({version.incarnation for group in groups for version in group.header.trainable})
    head = (known[-1] if known else 0) + 1
    parents = dict(zip([*known, head], [0, *known], strict=True))
    lineage = Lineage({incarnation: Fork(parent, 0) for incarnation, parent in parents.items()}, head=head)
    record = StepRecord(step=step, incarnation=head, groups=len(groups), chunk=chunk, guard=StalenessGuard.CORRECT.value, cutoff=0, lineage=lineage)
    parts = [groups[start : start + chunk] for start in range(0, len(groups), chunk)]
    chunks = tuple(
        ChunkRecord(step=step, chunk=i, revision=0, headers=tuple(group.header for group in part), last=i == len(parts) - 1, record=record)
        for i, part in enumerate(parts)
    )
    return RecordedStep(step=step, incarnation=head, digest="", at=0.0, chunks=chunks, payloads=tuple(tuple(group.payload for group in part) for part in parts))
