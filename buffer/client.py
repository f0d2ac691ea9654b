"""The two ends of the buffer: they wait by wake-ups where the ledger says `Blocked`, and keep track of what their process owns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeAlias

from buffer.contract import Blocked, ChunkRecord, Granted, Ledger, PutResult, Slot
from buffer.payloads import by_bytes
from buffer.shares import Share
from buffer.storage import Storage, read_payloads, storage_answers
from protocol.codec import decode_groups
from protocol.errors import ConfigError, DecodeError, PayloadLost, SlotLost
from protocol.messages import Edge, GroupHeader, Reason, RolloutGroup, Seq, SlotToken
from protocol.wakeups import Topic, Wakeups

_LOG = logging.getLogger(__name__)
FETCH_BYTES = 4 << 20
"""Payloads are read in batches of about so many bytes. Half of it takes about a tenth more CPU from a lease to tensors where groups are large; twice of it
gains nothing that could be measured, and all that is under way must come through a narrow network within a deadline.
"""
_FETCHES_AT_ONCE = 2
_DECODED_AT_ONCE = 64
"""Groups, about 3 ms: then it is the turn of others on the event loop."""
Agree: TypeAlias = Callable[[int], Awaitable[tuple[int, int]]]
"""A number of every rank in, the lowest and the highest of them out; all ranks call it the same number of times."""
Ask: TypeAlias = Callable[[], Awaitable[Granted | Blocked]]


async def _once(ask: Ask) -> Granted | Blocked:
    return await ask()


class ProducerBuffer:
    """A producer's end. `owner` names this process instance, not its host or role: a restarted producer is another owner (rule S1).

    Invariant: `held` is every slot this process may still put; what it does not name is not renewed (rule S2).
    """

    def __init__(self, ledger: Ledger, wakeups: Wakeups, owner: str) -> None:
        self._ledger, self._wakeups, self._owner = ledger, wakeups, owner
        self._held: dict[Seq, SlotToken] = {}
        self._pending: str | None = None
        self._reserving = asyncio.Lock()

    @property
    def held(self) -> dict[Seq, SlotToken]:
        """Slots reserved here and neither put, released nor lost."""
        return dict(self._held)

    async def reserve(
        self, n: int, max_bytes: int, on_blocked: Callable[[Edge], None] | None = None, *, through: Callable[[Ask], Awaitable[Granted | Blocked]] = _once
    ) -> tuple[Slot, ...]:
        """At least 1 and at most `n` slots, as soon as the ledger grants them. `on_blocked` hears every edge it waits on. `through` asks the ledger, each time
        anew: how long it bears with a Redis that is away has nothing to do with how long no slot was free.

        Raises: `RunEnded`. After any other error, or a cancellation, the next call asks again under the same request id, so that a grant whose reply was
        lost is not lost.
        """
        async with self._reserving:
            if self._pending is None:
                self._pending = uuid.uuid4().hex
            while True:
                mark = self._wakeups.mark(Topic.SLOT, Topic.RUN)
                answer = await through(functools.partial(self._ledger.reserve, self._owner, self._pending, n, max_bytes=max_bytes))
                if not isinstance(answer, Blocked):
                    self._pending = None
                    self._held.update({slot.seq: slot.token for slot in answer.slots})
                    return answer.slots
                if on_blocked is not None:
                    on_blocked(answer.edge)
                await self._wakeups.wait(Topic.SLOT, Topic.RUN, since=mark)

    async def bind(self, slot: Slot, prompt_id: str) -> str:
        """The prompt this `seq` has: `prompt_id`, unless an earlier attempt bound another (rule S5)."""
        with self._forget_if_lost(slot.seq):
            return await self._ledger.bind(slot.seq, slot.token, prompt_id)

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        """Raises: `SlotLost` (drop the group), `PayloadTooLarge` (the slot is kept: release it as failed)."""
        with self._forget_if_lost(header.seq):
            result = await self._ledger.put(header, payload)
        self._forget(header.seq, header.token)
        return result

    async def release(self, slot: Slot, reason: Reason, *, why: str = "", lengths: Sequence[int] = ()) -> None:
        """Give a slot up. One that is lost already is no error: somebody else has it. `why` and `lengths` as in `Ledger.release`."""
        with contextlib.suppress(SlotLost):
            await self._ledger.release(slot.seq, slot.token, reason, why=why, lengths=lengths)
        self._forget(slot.seq, slot.token)

    async def give_back(self) -> None:
        """Return everything still held, for a stop in good order."""
        for seq, token in list(self._held.items()):
            with contextlib.suppress(SlotLost):
                await self._ledger.release(seq, token, Reason.GIVEN_BACK)
            self._forget(seq, token)

    async def renew(self, on_lost: Callable[[Seq], None] | None = None) -> None:
        """One heartbeat of all that is held; `on_lost` hears each slot that was given to somebody else: cancel its work."""
        named = list(self._held.items())
        if not named:
            return
        tokens = dict(named)
        for seq in await self._ledger.renew(self._owner, named):
            if self._forget(seq, tokens[seq]) and on_lost is not None:
                on_lost(seq)

    def _forget(self, seq: Seq, token: SlotToken) -> bool:
        if self._held.get(seq) != token:
            return False
        del self._held[seq]
        return True

    @contextlib.contextmanager
    def _forget_if_lost(self, seq: Seq) -> Iterator[None]:
        token = self._held.get(seq)
        try:
            yield
        except SlotLost:
            if token is not None:
                self._forget(seq, token)
            raise


class TrainerBuffer:
    """A trainer's end, under one attachment.

    Example: the chunks of a step, and of the next while this one trains:

        chunk = await buffer.lease(step, 0)
        chunk, groups = await buffer.fetch(chunk)
    """

    def __init__(self, ledger: Ledger, wakeups: Wakeups, incarnation: int, storage: Storage | None = None) -> None:
        self._ledger, self._wakeups, self._incarnation = ledger, wakeups, incarnation
        self._storage = storage or Storage()

    async def lease(self, step: int, chunk: int, on_blocked: Callable[[Edge], None] | None = None) -> ChunkRecord:
        """The chunk, as soon as enough groups are READY. Raises: `Fenced`, `StepOrder`, `RunEnded`."""
        while True:
            mark = self._wakeups.mark(Topic.READY, Topic.RUN)
            answer = await self._ledger.lease(self._incarnation, step, chunk)
            if not isinstance(answer, Blocked):
                return answer
            if on_blocked is not None:
                on_blocked(answer.edge)
            await self._wakeups.wait(Topic.READY, Topic.RUN, since=mark)

    async def fetch(self, chunk: ChunkRecord, on_blocked: Callable[[Edge], None] | None = None) -> tuple[ChunkRecord, list[tuple[GroupHeader, RolloutGroup]]]:
        """The chunk as it is trained, and its groups in its order, verified and decoded: payloads from Redis or, of a step that has left it, from the spill;
        large extras from the blob store.

        A payload that is gone or damaged is reported; the chunk then comes back with another group in its place, or with a hole in a step that is
        replayed, and perhaps judged anew: the answer's headers, revision and record, not those of `chunk`, are what is trained.
        Raises: `StorageUnavailable` if spill or blob store do not say whether they have something; nothing is reported as lost then.
        """
        have: dict[tuple[Seq, SlotToken], RolloutGroup] = {}
        return await self._fetch(chunk, Share(0, 1), have, on_blocked)

    async def fetch_share(
        self, chunk: ChunkRecord, share: Share, agree: Agree, on_blocked: Callable[[Edge], None] | None = None
    ) -> tuple[ChunkRecord, list[tuple[GroupHeader, RolloutGroup]]]:
        """As `fetch`, of one rank's groups only; every rank leases the chunk for itself, so no rank reads for the others.

        `agree(revision)` gives the lowest and the highest revision of all ranks' calls (an all-reduce). Ranks go round until all of them hold the same
        revision: one that lost a payload changes the chunk, and with it the shares of all (rule P2). Every rank returns the same chunk.
        """
        have: dict[tuple[Seq, SlotToken], RolloutGroup] = {}
        while True:
            chunk, groups = await self._fetch(chunk, share, have, on_blocked)
            lowest, highest = await agree(chunk.revision)
            if lowest == highest:
                return chunk, groups
            if chunk.revision < highest:
                chunk = await self.lease(chunk.step, chunk.chunk, on_blocked)

    async def _fetch(
        self, chunk: ChunkRecord, share: Share, have: dict[tuple[Seq, SlotToken], RolloutGroup], on_blocked: Callable[[Edge], None] | None
    ) -> tuple[ChunkRecord, list[tuple[GroupHeader, RolloutGroup]]]:
        """`have` is what was read so far, and keeps what is read now."""
        while True:
            mine = share.of(chunk.headers)
            missing = [header for header in mine if (header.seq, header.token) not in have]
            have.update(await self._read(chunk.step, missing))
            lost = [header.seq for header in missing if (header.seq, header.token) not in have]
            if not lost:
                return chunk, [(header, have[header.seq, header.token]) for header in mine]
            for seq in lost:
                answer = await self._ledger.payload_lost(self._incarnation, chunk.step, chunk.chunk, seq)
                _LOG.warning("step %d: the payload of group %d is gone, or damaged", chunk.step, seq)
            if isinstance(answer, ChunkRecord) and len(answer.headers) < len(chunk.headers):
                _LOG.error("step %d is trained again without groups that it had (%s): this resume is not exact", chunk.step, ", ".join(map(str, lost)))
            if isinstance(answer, Blocked):
                # Where another trainer opened the step, and it was whole until now, what fills the gap is judged by a record of our own.
                await self._ledger.open_step(self._incarnation, chunk.step)
                answer = await self.lease(chunk.step, chunk.chunk, on_blocked)
            chunk = answer

    async def _read(self, step: int, headers: Sequence[GroupHeader]) -> dict[tuple[Seq, SlotToken], RolloutGroup]:
        """Those of the groups that are whole. While one batch is decoded, the server sends the next; a batch that fails ends the others."""
        found: dict[tuple[Seq, SlotToken], RolloutGroup] = {}
        batches = by_bytes(headers, FETCH_BYTES)

        async def read() -> None:
            for batch in batches:
                found.update(await self._read_batch(step, batch))

        try:
            async with asyncio.TaskGroup() as reading:
                for _ in range(_FETCHES_AT_ONCE):
                    reading.create_task(read(), name="trainer:read")
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        return found

    async def _read_batch(self, step: int, batch: Sequence[GroupHeader]) -> dict[tuple[Seq, SlotToken], RolloutGroup]:
        found: dict[tuple[Seq, SlotToken], RolloutGroup] = {}
        payloads = await read_payloads(self._ledger, self._storage, step, batch)
        whole = [header for header in batch if (header.seq, header.token) in payloads]
        for at in range(0, len(whole), _DECODED_AT_ONCE):
            if at:
                await asyncio.sleep(0)
            headers = whole[at : at + _DECODED_AT_ONCE]
            for header, group in zip(headers, decode_groups([payloads[header.seq, header.token] for header in headers]), strict=True):
                if isinstance(group, DecodeError):  # its bytes have the right digest, were written so, and no reader will ever understand them
                    _LOG.warning("step %d, group %d: %s", step, header.seq, group)
                    continue
                with contextlib.suppress(PayloadLost):
                    found[header.seq, header.token] = await self._with_blobs(header, group) if header.blobs else group
        return found

    async def _with_blobs(self, header: GroupHeader, group: RolloutGroup) -> RolloutGroup:
        if self._storage.blobs is None:
            raise ConfigError(f"group {header.seq} has extras in a blob store, and this process was given none: open the storage of the run's settings")
        with storage_answers():
            return await asyncio.to_thread(self._storage.blobs.restore, header, group)
