"""Rank 0: what its training loop asks is done by all ranks at once, and the failure of any of them is its own.

    loop ── fetch ───► every rank reads its share, until all hold the same revision of the chunk      (no collective, while another chunk trains)
         ── collate ─► every rank makes its batch and tells its figures; rank 0 has their union       (no collective)
         ── backend ─► every rank calls its own backend: collectives                                  (one at a time, in the backend's thread)

Nothing but a backend's calls talks in collectives, and one begins only when all ranks have answered the call before it: an error outside of them has reached
rank 0, and ended the trainer, before the next. One inside shows in all ranks; what the rank that began it says counts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from buffer.client import TrainerBuffer
from buffer.contract import ChunkRecord
from buffer.journal_codec import encode_chunk
from consumer.backend import Backend, StepReport, TrainingState, digest_now
from consumer.batch import ChunkBatch, ChunkFigures
from consumer.config import TrainerDaemonConfig
from consumer.ranks import figures, process_group
from consumer.ranks.channel import Answer, Call, RankLost
from consumer.ranks.children import StartOthers
from consumer.ranks.crew import Collated, Groups
from consumer.ranks.handing_over import broadcast_state, reads_its_part
from consumer.ranks.hub import Hub
from consumer.ranks.making import make_backend, share_of
from consumer.ranks.place import Place
from consumer.shards import SavedTensors, Told
from consumer.worker import Worker
from protocol.messages import Edge
from weightsync.snapshot import TensorBytes

_LOG = logging.getLogger(__name__)
_ANSWER_S = process_group.COLLECTIVE_S
"""Rank 0 has done its part of a call, and so must all others by then. Of a fetch, no longer silence: who waits for the ledger says so every second."""
_SAY_S = 5.0
"""A collective that failed here failed because of another rank: so long what that says, or its end, is waited for."""
_LEAVE_S = 15.0
_WRITE_S = 3600.0
"""A rank may take so long to write its part of a checkpoint; training goes on meanwhile."""
T = TypeVar("T")


class RankedBackend:
    """Rank 0's `consumer.backend.Backend`: every call goes to all ranks. From one thread, not that of the event loop.

    Raises: `RankLost`, `RankFailed` for what another rank ended by; what rank 0's own backend raises.
    """

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop, ranks: int) -> None:
        self._hub, self._loop, self._ranks = hub, loop, ranks
        self._inner: Backend | None = None
        self.free = threading.Event()
        """Nothing of ours may be waiting in a collective."""
        self.free.set()

    @property
    def inner(self) -> Backend:
        assert self._inner is not None
        return self._inner

    def make(self, made: Callable[[], Backend]) -> None:
        """The others make theirs meanwhile."""
        with self._together():
            self._inner = made()

    def accumulate(self, batch: ChunkBatch) -> None:
        self.ask(lambda: self.inner.accumulate(batch), Call.ACCUMULATE)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        return self.ask(lambda: self.inner.finish_step(step, divisor), Call.FINISH, step=step, divisor=divisor)[0]

    def abandon_step(self) -> None:
        self.ask(self.inner.abandon_step, Call.ABANDON)

    def snapshot(self) -> Mapping[str, TensorBytes]:
        return self.ask(self.inner.snapshot, Call.SNAPSHOT)[0]

    def digest(self) -> str:
        return self.ask(lambda: digest_now(self.inner), Call.DIGEST)[0]

    def capture(self) -> TrainingState:
        return self.ask(self.inner.capture, Call.CAPTURE)[0]

    @property
    def readers(self) -> int:
        """Ranks that read a checkpoint's files, and verify them together."""
        return self._ranks if reads_its_part(self.inner) else 1

    def restore(self, state: TrainingState) -> None:
        if reads_its_part(self.inner):
            assert isinstance(state.weights, SavedTensors), "what every rank reads is on disk"
            self.ask(lambda: self.inner.restore(state), Call.RESTORE, words=str(state.weights.folder))
        else:
            self.ask(lambda: self.inner.restore(broadcast_state(state)), Call.RESTORE)

    def write(self, folder: Path) -> Callable[[], Sequence[Told]]:
        """See `consumer.ranks.crew.Crew.write`. From any thread but the event loop's."""
        asking = asyncio.run_coroutine_threadsafe(self._hub.ask(Call.WRITE, words=str(folder)), self._loop)

        def told() -> list[Told]:
            try:
                answers = asking.result(_WRITE_S)
            except concurrent.futures.TimeoutError:
                raise RankLost(f"a rank has not written its part of {folder} for {_WRITE_S:.0f} s") from None
            finally:
                asking.cancel()
            return [figure for _, answer in sorted(answers.items()) for figure in answer.figures]

        return told

    def ask(self, local: Callable[[], T], call: Call, **fields: Any) -> tuple[T, dict[int, Answer]]:
        """What `local` gives here, and what the others answer to `call`."""
        asking = asyncio.run_coroutine_threadsafe(self._hub.ask(call, **fields), self._loop)
        try:
            with self._together():
                found = local()
            return found, asking.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            raise RankLost(f"a rank has not answered {call} for {_ANSWER_S:.0f} s after rank 0 was done with it") from None
        finally:
            asking.cancel()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self.free.clear()
        try:
            yield
        except Exception as problem:
            if process_group.echoes(problem) and (other := self._hub.failed_within(_SAY_S)) is not None:
                raise other from problem
            raise
        finally:
            self.free.set()


class RankedCrew:
    """`consumer.ranks.crew.Crew` of rank 0."""

    def __init__(self, buffer: TrainerBuffer, backend: RankedBackend, hub: Hub, place: Place) -> None:
        self._buffer, self._backend, self._hub, self._share = buffer, backend, hub, share_of(backend.inner, place)

    async def fetch(self, chunk: ChunkRecord, on_blocked: Callable[[Edge], None]) -> tuple[ChunkRecord, Groups]:
        about = {"step": chunk.step, "chunk": chunk.chunk, "record": encode_chunk(chunk)}
        async with self._hub.talk(Call.FETCH, blocked=on_blocked, silence_s=_ANSWER_S, **about) as talk:
            try:
                async with asyncio.TaskGroup() as group:
                    mine = group.create_task(self._buffer.fetch_share(chunk, self._share, talk.agree, on_blocked), name="trainer:share")
                    group.create_task(talk.done(), name="trainer:shares")
            except ExceptionGroup as problems:
                raise problems.exceptions[0] from None
        return mine.result()

    def collate(self, chunks: Sequence[ChunkRecord], collate: Callable[[], list[ChunkBatch]], /) -> list[Collated]:
        first, last = chunks[0], chunks[-1]
        mine, answers = self._backend.ask(collate, Call.COLLATE, step=first.step, first=first.chunk, chunk=last.chunk)
        shares: dict[int, Sequence[ChunkFigures]] = {self._share.rank: mine}
        for answer in answers.values():
            if answer.share not in shares:
                shares[answer.share] = [figures.heard(one) for one in answer.figures]
        return [
            Collated(batch, figures.union(chunk.headers, parts)) for chunk, batch, parts in zip(chunks, mine, zip(*shares.values(), strict=True), strict=True)
        ]

    def write(self, folder: Path, /) -> Callable[[], Sequence[Told]]:
        return self._backend.write(folder)


class Leading:
    """Rank 0 with all others there."""

    def __init__(self, place: Place, hub: Hub, backend: RankedBackend) -> None:
        self._place, self._hub, self.backend = place, hub, backend

    @property
    def shares(self) -> int:
        """Of a chunk: as many as there are replicas of the model."""
        return share_of(self.backend.inner, self._place).ranks

    async def begin(self, incarnation: int, buffer: TrainerBuffer) -> RankedCrew:
        """From here on the chunks of this attachment are fetched."""
        await self._hub.ask(Call.BEGIN, silence_s=_ANSWER_S, incarnation=incarnation)
        return RankedCrew(buffer, self.backend, self._hub, self._place)


@contextlib.asynccontextmanager
async def leading(config: TrainerDaemonConfig, place: Place, worker: Worker, start: StartOthers) -> AsyncIterator[Leading]:
    """Rank 0 once all ranks are there, each with its backend at the starting weights. `start` starts those that nobody else has started.

    While the context is open, a rank that fails or is gone ends it, with what that rank says: at once where rank 0 waits for something else, and where it is
    in a collective with it, within seconds; a thread that does not come back from there ends the process. Then, and where rank 0 fails, all others end too.
    Order of stopping: the others leave, their processes end, the process group is taken apart.
    Raises: `RankLost`, `RankFailed`, `ConfigError`.
    """
    store = await worker.call(process_group.open_store, place)
    place = place.at(store.port)
    async with Hub(place.ranks, place.listen_at) as hub:
        await worker.call(process_group.tell_channel, store, hub.port, hub.token)
        backend = RankedBackend(hub, asyncio.get_running_loop(), place.ranks)
        async with start(place, hub.lost) as others, asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(hub, backend), name="trainer:ranks")
            try:
                await hub.gather(process_group.JOIN_S)
                await worker.call(backend.make, lambda: _made(config, place, store, hub.token))
                _LOG.info("%d ranks are here", place.ranks)
                yield Leading(place, hub, backend)
                await hub.stop(_LEAVE_S)
                await others.ended(_LEAVE_S)
                await worker.call(process_group.leave)
            except BaseException as problem:
                hub.end(problem)
                if backend.free.is_set():  # who waits for us in a collective need not find out by a deadline
                    process_group.abort()
                raise
            finally:
                watch.cancel()


def _made(config: TrainerDaemonConfig, place: Place, store: Any, token: str) -> Backend:
    process_group.join(store, place, process_group.device_of(place, config.trainer.device), token=token)
    return make_backend(config, place)


async def _watch(hub: Hub, backend: RankedBackend) -> None:
    """Raises: the first failure of another rank, once the backend's thread waits for that rank no more."""
    failure = await hub.failure()
    await process_group.woken(backend.free, failure, role="rl-trainer")
    raise failure
