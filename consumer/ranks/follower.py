"""What ranks 1 and up run: they wait for commands of rank 0, and read payloads. They end when rank 0 does.

Of the run they write their part of a checkpoint, and tell the ledger of a payload of their share that is gone, under rank 0's attachment (rule P2).

    hello ─► backend made ─► (FETCH ─ AGREED … ─► done)* in tasks of their own │ COLLATE, ACCUMULATE, FINISH, … one at a time, in the backend's thread ─► STOP
                                                                     ABANDON: what was fetched and collated is forgotten
                    CAPTURE: a copy of this rank's part of a checkpoint │ WRITE: it goes to the disk in another thread, and is told

Consumes: commands. Produces: answers. Waits for: rank 0, for hours; its end is seen at once (`consumer.ranks.channel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from buffer.client import TrainerBuffer
from buffer.contract import ChunkRecord
from buffer.journal_codec import decode_chunk
from buffer.redis_ledger import RedisLedger
from buffer.storage import open_storage
from consumer.advantages import find_advantage
from consumer.backend import Backend, TrainingState, digest_now
from consumer.batch import ChunkBatch, collate_step
from consumer.checkpoint import saved_state
from consumer.config import TrainerDaemonConfig
from consumer.ranks import figures, process_group
from consumer.ranks.channel import Answer, Call, Command, Hello, Kind, Line, RankLost
from consumer.ranks.crew import Groups
from consumer.ranks.handing_over import broadcast_state
from consumer.ranks.making import make_backend, share_of
from consumer.ranks.place import Place
from consumer.shards import Told, not_written, write_shards
from consumer.worker import Worker
from protocol.connection import Client, check_server, connect
from protocol.errors import EXIT_FAULT, Fenced, LedgerRegressed, RollstreamError, StepOrder, WireError
from protocol.failpoints import Failpoint, failpoint
from protocol.keys import Keys
from protocol.messages import Edge
from protocol.wakeups import Wakeups, wakeups
from weightsync.snapshot import HeldWeights

_LOG = logging.getLogger(__name__)
_REFUSED = (LedgerRegressed, StepOrder, Fenced)
"""What a fetch may meet when Redis lost writes, or another trainer came: rank 0 knows what to do."""
_SAY_S = 10.0
"""A collective that failed here failed because of another rank: so long rank 0's word on it is waited for."""
_AGAIN_S = 0.5
"""Nobody is at the channel that the store tells of: so long until it is asked again."""
T = TypeVar("T")


class Follower:
    """One rank at the commands of `line`, until STOP.

    Invariant: what it holds of a step is what rank 0 had it fetch and has not had it accumulate, or abandon, yet.
    Raises: `RankLost` when rank 0 is gone, or ends; what went wrong here, once rank 0 was told.
    """

    def __init__(
        self,
        place: Place,
        line: Line,
        worker: Worker,
        *,
        make: Callable[[], Backend],
        open_buffer: Callable[[int], Awaitable[TrainerBuffer]],
        collate: Callable[[Sequence[tuple[ChunkRecord, Groups]]], list[ChunkBatch]],
    ) -> None:
        """`make` is called in the thread of `worker`; `open_buffer` gets the incarnation whose chunks follow."""
        self._place, self._line, self._worker = place, line, worker
        self._make, self._open_buffer, self._collate = make, open_buffer, collate
        self._backend: Backend | None = None
        self._share = place.share
        self._buffer: TrainerBuffer | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        self._agreeing: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._fetched: dict[tuple[int, int], tuple[ChunkRecord, Groups]] = {}
        self._collated: list[ChunkBatch] = []
        self._captured: TrainingState | None = None
        self._free = threading.Event()
        """Its thread may not be waiting in a collective."""
        self._free.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._begin(), name="rank:backend")
                await self._obey(group)
                for task in self._fetching:
                    task.cancel()
        except BaseExceptionGroup as problems:
            problem = next((one for one in problems.exceptions if isinstance(one, RollstreamError)), None)
            await process_group.woken(self._free, problem or RankLost(str(problems)), role=f"rl-trainer rank {self._place.rank}")
            process_group.abort()  # who waits for us in a collective need not wait for the end of this process
            raise

    async def _begin(self) -> None:
        """Rank 0 makes its own backend meanwhile, and commands wait in the thread's queue."""
        try:
            await self._worker.call(self._in_thread, self._made)
        except Exception as problem:
            await self._failed(problem)
            raise

    def _made(self) -> None:
        """In the thread: the command that waits in its queue may begin before the event loop hears of this."""
        self._backend = self._make()
        self._share = share_of(self._backend, self._place)

    async def _obey(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                command = await self._line.receive(Command)
            except ConnectionError as problem:
                raise RankLost(f"rank 0 is gone: {problem}") from problem
            except WireError as problem:
                await self._failed(problem)
                raise
            if command.call is Call.STOP:
                return
            if command.call is Call.END:
                raise RankLost(command.words)
            if command.call is Call.AGREED:
                if (future := self._agreeing.pop(command.number, None)) is not None and not future.done():
                    future.set_result((command.lowest, command.highest))
            elif command.call is Call.FETCH:
                task = group.create_task(self._fetch(command), name="rank:fetch")
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
            elif command.call is Call.WRITE:
                group.create_task(self._write(command), name="rank:checkpoint")
            else:
                group.create_task(self._do(command), name=f"rank:{command.call}")

    # -- shares ----------------------------------------------------------------------------------------------------------------------------------

    async def _fetch(self, command: Command) -> None:
        assert self._buffer is not None

        async def agree(revision: int) -> tuple[int, int]:
            agreed: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
            self._agreeing[command.number] = agreed
            self._say(command, Kind.AGREE, revision=revision)
            return await agreed

        def blocked(edge: Edge) -> None:
            self._say(command, Kind.BLOCKED, edge=edge.value)

        try:
            found = await self._buffer.fetch_share(decode_chunk(command.record), self._share, agree, blocked)
        except _REFUSED as problem:
            self._say(command, Kind.REFUSED, error=type(problem).__name__, words=str(problem))
        except Exception as problem:
            await self._failed(problem)
            raise
        else:
            failpoint(Failpoint.TRAINER_CHUNK_FETCHED)
            self._fetched[command.step, command.chunk] = found
            self._say(command, Kind.DONE)
        finally:
            self._agreeing.pop(command.number, None)

    async def _forget(self) -> None:
        tasks = list(self._fetching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetched.clear()
        self._collated.clear()

    # -- checkpoints -----------------------------------------------------------------------------------------------------------------------------

    async def _write(self, command: Command) -> None:
        state, self._captured = self._captured, None
        assert state is not None, "rank 0 has a part captured before it is written"
        try:
            told = await asyncio.to_thread(_written, Path(command.words), state)
        except Exception as problem:
            await self._failed(problem)
            raise
        self._say(command, Kind.DONE, figures=told)

    # -- the backend -----------------------------------------------------------------------------------------------------------------------------

    async def _do(self, command: Command) -> None:
        try:
            if command.call is Call.BEGIN:
                self._buffer = await self._open_buffer(command.incarnation)
            if command.call is Call.ABANDON:
                await self._forget()
            told = await self._worker.call(self._in_thread, lambda: self._call(command))
        except Exception as problem:
            await self._failed(problem)
            raise
        self._say(command, Kind.DONE, share=self._share.rank, figures=told)

    def _in_thread(self, call: Callable[[], T]) -> T:
        self._free.clear()
        try:
            return call()
        finally:
            self._free.set()

    def _call(self, command: Command) -> tuple[dict[str, Any], ...]:
        backend = self._backend
        assert backend is not None
        match command.call:
            case Call.COLLATE:
                held = [self._fetched.pop((command.step, chunk)) for chunk in range(command.first, command.chunk + 1)]
                self._collated = self._collate(held)
                return tuple(figures.told(batch) for batch in self._collated)
            case Call.ACCUMULATE:
                backend.accumulate(self._collated.pop(0))
                failpoint(Failpoint.TRAINER_ACCUMULATED)
            case Call.FINISH:
                failpoint(Failpoint.TRAINER_BEFORE_OPTIMIZER)
                backend.finish_step(command.step, command.divisor)
                failpoint(Failpoint.TRAINER_STEPPED)
            case Call.ABANDON:
                backend.abandon_step()
            case Call.SNAPSHOT:
                weights = backend.snapshot()
                if isinstance(weights, HeldWeights):
                    weights.release()
            case Call.DIGEST:
                digest_now(backend)
            case Call.CAPTURE:
                self._captured = backend.capture()
            case Call.RESTORE:
                share = (self._place.rank, self._place.ranks)
                backend.restore(saved_state(Path(command.words), share) if command.words else broadcast_state(None))
        return ()

    # -- the channel -----------------------------------------------------------------------------------------------------------------------------

    def _say(self, command: Command, kind: Kind, **fields: Any) -> None:
        self._line.send(Answer(number=command.number, kind=kind, **fields))

    async def _failed(self, problem: Exception) -> None:
        """Tell rank 0, before this rank ends by it. An echo of another rank's end is told too; then that rank's own word is waited for, and ends this."""
        echo = process_group.echoes(problem)
        code = problem.exit_code if isinstance(problem, RollstreamError) else EXIT_FAULT
        what = str(problem) if isinstance(problem, RollstreamError) else f"{type(problem).__name__}: {problem}"
        self._line.send(Answer(number=0, kind=Kind.FAILED, words=what, exit_code=code, echo=echo))
        await self._line.flush(2.0)
        if echo:
            await asyncio.sleep(_SAY_S)


def _written(folder: Path, state: TrainingState) -> tuple[Told, ...]:
    """Nothing where rank 0 has everything."""
    if state.part == (0, 1):
        return ()
    try:
        return (write_shards(folder, state),)
    except OSError as problem:
        raise not_written(folder, problem) from problem


async def follow(config: TrainerDaemonConfig, place: Place) -> None:
    """Run rank `place.rank`, 1 or up, until rank 0 ends it. SIGTERM is for rank 0, which may have much to write: nothing is done about it here.

    Raises: as `Follower`; `ConfigError`, `RankLost` where it cannot begin.
    """
    client, keys = connect(config.redis.url, deadline_s=config.redis.deadline_s), Keys(config.run.name)
    try:
        await check_server(client, url=config.redis.url)
        async with Worker(on_cpu=config.trainer.device == "cpu") as worker, wakeups(client, keys) as waker:
            store = await worker.call(process_group.open_store, place)
            async with line_to_rank_0(place, store) as (line, token):
                follower = Follower(
                    place,
                    line,
                    worker,
                    make=functools.partial(_made, config, place, store, token),
                    open_buffer=functools.partial(_open_buffer, config, client, keys, waker),
                    collate=functools.partial(
                        collate_step,
                        advantage=find_advantage(config.trainer.advantage),
                        normaliser=config.loss.normaliser,
                        max_new_tokens=config.rollout.max_new_tokens,
                    ),
                )
                await follower.run()
                await worker.call(process_group.leave)
    finally:
        await client.aclose()


def _made(config: TrainerDaemonConfig, place: Place, store: Any, token: str) -> Backend:
    process_group.join(store, place, process_group.device_of(place, config.trainer.device), token=token)
    return make_backend(config, place)


async def _open_buffer(config: TrainerDaemonConfig, client: Client, keys: Keys, waker: Wakeups, incarnation: int) -> TrainerBuffer:
    """Of the run as it was made, which rank 0 has done, or found."""
    ledger = RedisLedger(client, keys)
    _, settings = await ledger.about()
    return TrainerBuffer(ledger, waker, incarnation, open_storage(settings, config.run.name))


@contextlib.asynccontextmanager
async def line_to_rank_0(place: Place, store: Any) -> AsyncIterator[tuple[Line, str]]:
    """The channel to rank 0 of this life of the ranks, and its token. What an earlier life left in the store is tried until rank 0 has replaced it.

    Raises: `RankLost` after `process_group.JOIN_S`.
    """
    port = 0
    try:
        async with asyncio.timeout(process_group.JOIN_S):
            while True:
                port, token = await asyncio.to_thread(process_group.find_channel, store, place)
                if (line := await knock(place, port, token)) is not None:
                    break
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError as problem:
        raise RankLost(f"rank {place.rank}: rank 0 does not answer at {place.host}:{port} within {process_group.JOIN_S:.0f} s; see its log") from problem
    try:
        yield line, token
    finally:
        await line.close()


async def knock(place: Place, port: int, token: str) -> Line | None:
    """The line to whoever listens there, if that is rank 0 and takes this rank for one of its own."""
    try:
        line = Line(*await asyncio.open_connection(place.host, port))
    except OSError:
        return None
    try:
        line.send(Hello(rank=place.rank, token=token))
        async with asyncio.timeout(_SAY_S):
            if (await line.receive(Command)).call is Call.WELCOME:
                return line
    except (ConnectionError, TimeoutError, WireError):
        pass
    except BaseException:
        await line.close()
        raise
    await line.close()
    return None
