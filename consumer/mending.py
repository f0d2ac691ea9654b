"""Rule R1 at the trainer: what it knows for certain, and telling it to a ledger that forgot.

    call ──► LedgerRegressed ──► reassert(history) ──► the same call again
                                      ▲
    journal tail (memory, checkpoint), witness file (steps before it), fork table, kept checkpoints

A step that lost its leased chunks is leased again from its start; one whose weights were stepped already is part of the history, so nothing is trained twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from buffer.contract import Attachment, CheckpointRef, ChunkRecord, History, Ledger, LedgerStatus, PastStep, TrainedReply
from buffer.witness import WitnessLine, read_witness
from consumer.checkpoint import Checkpoint, Incarnations, checkpoints_on_disk
from consumer.journal import JournalTail, read_journal
from protocol.errors import LedgerRegressed
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import JsonValue, Seq
from protocol.versions import Fork, Lineage, Version
from weightsync.store import VersionStore

_LOG = logging.getLogger(__name__)
_TRIES = 5
"""How often in a row one call may find that the ledger forgot something before that is taken for a fault."""
T = TypeVar("T")


class Mender:
    """The calls of one attachment that outlive a loss of the server's, and the memory they are mended from.

    Invariant: `history` holds every step whose weights this trainer has, from the moment `stepped` is called.
    Raises: what the ledger raises, but `LedgerRegressed` only where re-asserting does not help.
    """

    def __init__(
        self, ledger: Ledger, attachment: Attachment, *, journal: JournalTail, witness: Path, kept: Sequence[CheckpointRef] = (), known: Incarnations
    ) -> None:
        self._ledger, self._attachment = ledger, attachment
        self._witness, self._known = witness, known
        self._kept = tuple(kept)
        self._lineage = attachment.lineage
        self._newest = attachment.resume_step
        self._mending = asyncio.Lock()
        self._mended = 0
        self.journal = journal

    @property
    def incarnations(self) -> Incarnations:
        """For the files of a checkpoint."""
        own = {self._attachment.incarnation: self._attachment.incarnation_id}
        ids = {number: fork[2] for number, fork in self._known.items()} | own
        return {number: (*fork, ids.get(number, "")) for number, fork in self._lineage.forks.items() if number}

    def stepped(self, step: int, chunks: Sequence[ChunkRecord]) -> None:
        """The weights have learnt from `step`, and its witness line is written."""
        self.journal.add(step, chunks)
        self._newest = step

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue], *, since: int) -> TrainedReply:
        """`since`: `mended` before the step's groups were taken. What the ledger was told later did not know that they are trained, and is told again."""
        if (told := await self.told()) != since:
            await self.mend(LedgerRegressed(f"step {step} was taken before the ledger was mended"), since=told)
        reply = await self.through(lambda: self._ledger.trained(incarnation, step, digest, stats))
        self._lineage = reply.lineage
        return reply

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        self._kept = await self.through(lambda: self._ledger.checkpoint(incarnation, checkpoint, keep=keep))
        return self._kept

    async def drain(self, incarnation: int, reason: str) -> None:
        await self.through(lambda: self._ledger.drain(incarnation, reason))

    async def mend(self, seen: LedgerRegressed, *, since: int) -> None:
        """Re-assert, unless somebody did `since` (see `mended`)."""
        async with self._mending:
            if self._mended != since:
                return
            _LOG.warning("%s; re-asserting up to step %d", seen, self._newest)
            history = await asyncio.to_thread(self.history)
            failpoint(Failpoint.TRAINER_BEFORE_REASSERT)
            await self._ledger.reassert(self._attachment.incarnation, self._attachment.incarnation_id, history)
            failpoint(Failpoint.TRAINER_REASSERTED)
            self._mended += 1

    @property
    def mended(self) -> int:
        """How often the ledger was told again."""
        return self._mended

    async def told(self) -> int:
        """`mended`, with what is under way: an answer that the ledger gave after it was told again is never taken for one from before."""
        async with self._mending:
            return self._mended

    def history(self) -> History:
        lines = read_witness(self._witness)
        journal = {step: chunks for step, chunks in read_journal(self.journal.dump()).items() if step <= self._newest}
        return history_of(lines, self._lineage, journal, self._newest, checkpoints=self._kept, incarnations=self.incarnations)

    async def through(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call`, and again once the ledger was told what it forgot."""
        for _ in range(_TRIES):
            since = self._mended
            try:
                return await call()
            except LedgerRegressed as problem:
                await self.mend(problem, since=since)
        return await call()


def history_of(
    lines: Iterable[WitnessLine],
    lineage: Lineage,
    journal: Mapping[int, tuple[ChunkRecord, ...]],
    newest: int,
    *,
    checkpoints: Sequence[CheckpointRef],
    incarnations: Incarnations,
) -> History:
    """Steps of the line up to `newest`: those of the journal with their chunks, earlier ones by the witness alone."""
    witnessed = line_of(lines, lineage, newest)
    steps = []
    for step in sorted({*witnessed, *journal}):
        line, chunks = witnessed.get(step), journal.get(step, ())
        steps.append(
            PastStep(
                step=step,
                incarnation=line.incarnation if line is not None else max(chunk.record.incarnation for chunk in chunks),
                digest=line.digest if line is not None else "",
                seqs=tuple(header.seq for chunk in chunks for header in chunk.headers) if chunks or line is None else tuple(map(Seq, line.seqs)),
                chunks=chunks,
            )
        )
    return History(incarnations=dict(incarnations), checkpoints=tuple(checkpoints), steps=tuple(steps))


def line_of(lines: Iterable[WitnessLine], lineage: Lineage, newest: int) -> dict[int, WitnessLine]:
    """By step, who trained it on the line of `lineage` last."""
    limits, found = lineage.limits(), {}
    for line in sorted(lines, key=lambda one: one.incarnation):
        limit = limits.get(line.incarnation, 0)
        if line.step <= (newest if limit is None else min(limit, newest)):
            found[line.step] = line
    return found


def swept(status: LedgerStatus, on_disk: Collection[CheckpointRef]) -> tuple[CheckpointRef, ...]:
    """Registered checkpoints whose files are gone, neither among those `on_disk` nor where they were registered. Blocks."""
    there = {(one.step, one.incarnation) for one in on_disk}
    return tuple(one for one in status.checkpoints if (one.step, one.incarnation) not in there and not Path(one.path).is_dir())


def beyond(status: LedgerStatus, on_disk: Iterable[CheckpointRef], gone: Collection[CheckpointRef] = ()) -> CheckpointRef | None:
    """A checkpoint on disk that proves that the ledger forgot: it is of a later incarnation than any it knows, or of a step of its line not trained there.
    The second is also what is left where a trainer died while it re-asserted: the ledger knows who it was, and not yet all that it did.
    `gone` (see `swept`) prove it too: files of a registered checkpoint are deleted once later ones are registered, so later ones on its line were.

    `trained` is acknowledged before a checkpoint's files are written, so without a loss there is none, provided that the disk was read before the ledger: what
    a replaced trainer leaves is of an older incarnation.
    """
    line = status.lineage
    known = max((one.step for one in status.checkpoints), default=0) if gone else status.trained

    def forgotten(one: CheckpointRef) -> bool:
        on_line = one.incarnation in line.limits() and line.contains(Version(one.incarnation, one.step))
        return one.incarnation > status.incarnation or (on_line and one.step > known)

    later = filter(forgotten, on_disk)
    return max(later, key=lambda one: (one.incarnation, one.step), default=None)


def history_on_disk(reference: CheckpointRef, found: Checkpoint, folder: Path, witness: Path) -> History:
    """What a checkpoint's files and the witness file know of the steps up to it."""
    lines, journal = read_witness(witness), read_journal(found.journal)
    incarnations = dict(found.incarnations)
    for line in lines:  # of a checkpoint whose files do not tell
        if line.incarnation <= reference.incarnation:
            incarnations.setdefault(line.incarnation, (line.parent, line.fork_step if line.parent else 0, ""))
    incarnations.setdefault(reference.incarnation, (0, 0, ""))
    lineage = Lineage({number: Fork(parent, step) for number, (parent, step, _) in incarnations.items()}, reference.incarnation)
    on_line = [one for one in checkpoints_on_line(folder, lineage) if one.step <= reference.step]
    return history_of(lines, lineage, journal, reference.step, checkpoints=on_line, incarnations=incarnations)


def checkpoints_on_line(folder: Path, lineage: Lineage) -> list[CheckpointRef]:
    """On disk, of the line that `lineage` ends; by step."""
    return [one for one in checkpoints_on_disk(folder) if one.incarnation in lineage.limits() and lineage.contains(Version(one.incarnation, one.step))]


def freed_groups(witness: Path, status: LedgerStatus, step: int) -> tuple[Seq, ...]:
    """Groups of the line's steps after `step` that have left the journal."""
    line = line_of(read_witness(witness), status.lineage, min(status.trained, status.dropped))
    return tuple(Seq(seq) for one in sorted(line) if one > step for seq in line[one].seqs)


def newest_incarnation(folder: Path, witness: Path, store: VersionStore) -> int:
    """That left anything on disk. An incarnation publishes before all else, so engines know of none that is newer: a number that comes twice would name two
    weights by one version.
    """
    left = [one.incarnation for one in checkpoints_on_disk(folder)]
    left += [version.incarnation for version in store.versions()]
    left += [line.incarnation for line in read_witness(witness)]
    return max(left, default=0)
