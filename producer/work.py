"""The groups of one producer: reserve, make, put, give back.

reserved ──made──► storing ──► put            a slot that is lost on the way is dropped, never stored
│                 └──────► failed         too large, or of a version the run does not have
├──refused──────────────► failed | filtered
└──stopped──────────────► given back
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffer.client import ProducerBuffer
from buffer.contract import Slot
from producer.outage import through_outage
from producer.pace import Load, Pace
from producer.rollout import Finished, GroupMaker, Refused
from producer.source import PromptSource
from producer.stopping import unless
from protocol.errors import DecodeError, PayloadTooLarge, RunEnded, SlotLost
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Edge, Reason, Seq

_LOG = logging.getLogger(__name__)
_GIVE_BACK_S = 5.0


@dataclass(slots=True, eq=False)
class _Group:
    slot: Slot
    task: asyncio.Task[None] | None = None
    storing: bool = False
    """The ledger decides about its slot now; a heartbeat that misses it says nothing."""


@dataclass(slots=True)
class Tally:
    """What this producer has done so far."""

    put: int = 0
    failed: int = 0
    filtered: int = 0
    lost: int = 0
    """Groups dropped because their slot had gone to somebody else."""
    new_tokens: int = 0


class _Closing(Exception):
    """No slot is wanted any more."""


class GroupWork:
    """Keeps up to `max_inflight` groups under way, or as many as the engines can hold (`adapt`), until `closing` is set.

    Invariant: every slot the buffer holds for this process belongs to a group here, from its reserve to its put or release.
    """

    def __init__(
        self,
        buffer: ProducerBuffer,
        source: PromptSource,
        maker: GroupMaker,
        *,
        max_inflight: int,
        max_bytes: int,
        redis_deadline_s: float,
        closing: asyncio.Event,
        on_run_ended: Callable[[], None],
    ) -> None:
        self._buffer = buffer
        self._source = source
        self._maker = maker
        self._pace = Pace(most=max_inflight)
        self._max_bytes = max_bytes
        self._deadline_s = redis_deadline_s
        self._closing = closing
        self._on_run_ended = on_run_ended
        self._groups: dict[Seq, _Group] = {}
        self._room = asyncio.Event()
        self.tally = Tally()
        self.waiting_for: Edge | None = None
        self.waiting_since = 0.0

    def __len__(self) -> int:
        return len(self._groups)

    async def run(self, drain_s: Callable[[], float]) -> None:
        """Work until `closing`, then stop taking slots, let groups under way finish for `drain_s()` seconds, and give back the slots of the rest.

        Raises: `RedisUnavailable` when Redis stays away; slots then expire by themselves.
        """
        async with asyncio.TaskGroup() as tasks:
            await self._intake(tasks)
            left = [group.task for group in self._groups.values() if group.task is not None]
            if left:
                await asyncio.wait(left, timeout=drain_s())
            for task in left:
                task.cancel()
        await self._give_back()

    # slots --------------------------------------------------------------------------------------------------------------------

    async def _intake(self, tasks: asyncio.TaskGroup) -> None:
        """Reserve whatever is free whenever it is. Waits for: room, slots. Unblocked by: finished groups, emptier engines, wake-ups, closing."""
        while not self._closing.is_set():
            free = self._pace.limit - len(self._groups)
            if free < 1:
                self._room.clear()
                await unless(self._closing, self._room.wait(), name="producer:room")
                continue
            for slot in await self._reserve(free):
                if (stale := self._groups.get(slot.seq)) is not None:  # it expired, and came back to us
                    self._stop_lost(stale)
                group = self._groups[slot.seq] = _Group(slot)
                failpoint(Failpoint.PRODUCER_RESERVED)
                group.task = tasks.create_task(self._group(group), name=f"producer:group-{slot.seq}")

    async def _reserve(self, n: int) -> tuple[Slot, ...]:
        """Up to `n` slots; none once the producer closes. A request that may have reached Redis is not cut short: its slots would have to expire."""
        try:
            through = functools.partial(through_outage, deadline_s=self._deadline_s)
            return await self._buffer.reserve(n, self._max_bytes, self._blocked, through=through)
        except RunEnded:
            self._on_run_ended()
        except _Closing:
            pass
        finally:
            self.waiting_for, self.waiting_since = None, 0.0
        return ()

    def _blocked(self, edge: Edge) -> None:
        """Called at least once a second while nothing is granted."""
        if self._closing.is_set():
            raise _Closing
        if edge is not self.waiting_for:
            self.waiting_for, self.waiting_since = edge, time.time()

    def adapt(self, loads: Sequence[Load]) -> None:
        """Look at how full the engines are, and have more or fewer groups under way from now on."""
        before = self._pace.limit
        if self._pace.seen(loads, inflight=len(self._groups)) > before:
            self._room.set()

    @property
    def inflight_limit(self) -> int:
        """Groups that the load of the engines allows; 0: not limited by it."""
        return 0 if self._pace.limit == self._pace.most else self._pace.limit

    async def renew(self) -> None:
        """One heartbeat of exactly the slots that are held (rule S2); groups whose slots are lost stop."""
        await through_outage(lambda: self._buffer.renew(self._lost), deadline_s=self._deadline_s)
        failpoint(Failpoint.PRODUCER_RENEWED)

    def _lost(self, seq: Seq) -> None:
        group = self._groups.get(seq)
        if group is not None and not group.storing:
            self._stop_lost(group)

    def _stop_lost(self, group: _Group) -> None:
        self._drop(group)
        if group.task is not None:
            group.task.cancel()

    def _drop(self, group: _Group) -> None:
        self.tally.lost += 1
        _LOG.warning("group %d: its slot was lost; dropped", group.slot.seq)
        self._over(group)

    def _over(self, group: _Group) -> None:
        if self._groups.get(group.slot.seq) is group:
            del self._groups[group.slot.seq]
        self._room.set()

    async def _give_back(self) -> None:
        """Hand every slot still held to the next producer, uncounted; what Redis does not hear in time expires."""
        failpoint(Failpoint.PRODUCER_BEFORE_GIVE_BACK)
        if held := len(self._buffer.held):
            _LOG.info("giving back %d slots", held)
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await through_outage(self._buffer.give_back, deadline_s=self._deadline_s)
        except TimeoutError:
            _LOG.warning("redis did not take all slots back in %g s; the rest expire", _GIVE_BACK_S)
        self._groups.clear()

    # one group ----------------------------------------------------------------------------------------------------------------

    async def _group(self, group: _Group) -> None:
        slot = group.slot
        outcome = await self._maker.make(slot, self._source.choose(slot.seq, slot.prompt_id))
        failpoint(Failpoint.PRODUCER_MADE)
        group.storing = True
        if isinstance(outcome, Finished):
            await self._put(group, outcome)
        else:
            _LOG.log(logging.WARNING if outcome.reason is Reason.FAILED else logging.DEBUG, "group %d is %s: %s", slot.seq, outcome.reason, outcome.why)
            await self._set_aside(group, outcome)
        self._over(group)

    async def _put(self, group: _Group, outcome: Finished) -> None:
        """Store the group, however long Redis is away: what is finished is held by its task, and no more than `max_inflight` of those exist. Its version may
        be one that the ledger forgot (rule R1), so not to know it is a failure of the group only once it has gone on for as long.
        """
        try:
            await through_outage(lambda: self._buffer.put(outcome.header, outcome.payload), deadline_s=self._deadline_s, forgotten=(DecodeError,))
        except SlotLost:
            self._drop(group)
        except (PayloadTooLarge, DecodeError) as problem:
            _LOG.warning("group %d cannot be stored: %s", group.slot.seq, problem)
            await self._set_aside(group, Refused(reason=Reason.FAILED, why=str(problem), lengths=outcome.header.sampled))
        else:
            failpoint(Failpoint.PRODUCER_PUT)
            self.tally.put += 1
            self.tally.new_tokens += outcome.new_tokens

    async def _set_aside(self, group: _Group, refused: Refused) -> None:
        if refused.reason is Reason.FILTERED:
            self.tally.filtered += 1
        else:
            self.tally.failed += 1
        failpoint(Failpoint.PRODUCER_BEFORE_RELEASE)
        await through_outage(lambda: self._buffer.release(group.slot, refused.reason, why=refused.why, lengths=refused.lengths), deadline_s=self._deadline_s)
        failpoint(Failpoint.PRODUCER_RELEASED)
