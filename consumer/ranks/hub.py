"""Rank 0's end of the control channel: one command to all other ranks, and the first thing that goes wrong on any of them.

gathering ──all said hello──► open ──a rank fails or is gone──► failed: every wait raises what it was, the others are told to end
└──stop──► left
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from consumer.ranks.channel import Answer, Call, Command, Hello, Kind, Line, RankFailed, RankLost
from protocol.errors import EXIT_FAULT, Fenced, LedgerRegressed, RollstreamError, StepOrder, WireError
from protocol.messages import Edge

_LOG = logging.getLogger(__name__)
_HELLO_S = 10.0
_ROOT_S = 1.0
"""A fault that shows in a collective may be another rank's: so long its own word is waited for."""
_HOW_S = 0.5
"""A connection ends before anybody knows how its process did, and what that said last is read before."""
_REFUSALS: Mapping[str, type[RollstreamError]] = {kind.__name__: kind for kind in (LedgerRegressed, StepOrder, Fenced)}
Blocked = Callable[[Edge], None]


class Talk:
    """One command, and what the others say to it. Raises: the failure of any rank; what the ledger refused one of them."""

    def __init__(self, hub: Hub, number: int, ranks: list[int], blocked: Blocked | None) -> None:
        self._hub, self._number, self._blocked = hub, number, blocked
        loop = asyncio.get_running_loop()
        self._done: dict[int, asyncio.Future[Answer]] = {rank: loop.create_future() for rank in ranks}
        self._values: dict[int, asyncio.Queue[int]] = {rank: asyncio.Queue() for rank in ranks}
        """Bounded by 1: no rank says a second value before it has heard of the first."""
        self._agreeing: set[int] = set()
        """Ranks that have said a value, and wait for those of the others."""
        self._heard = dict.fromkeys(ranks, loop.time())
        """When each last said something of this, or was told what all had to agree on."""

    async def agree(self, revision: int) -> tuple[int, int]:
        """`buffer.client.Agree`: as often as every other rank calls its own."""
        values = [revision, *[await queue.get() for queue in self._values.values()]]
        lowest, highest = min(values), max(values)
        self._agreeing.clear()
        self._hub.tell(Command(number=self._number, call=Call.AGREED, lowest=lowest, highest=highest))
        self._heard = dict.fromkeys(self._heard, asyncio.get_running_loop().time())
        return lowest, highest

    async def done(self) -> dict[int, Answer]:
        """What every other rank answered."""
        await asyncio.wait(self._done.values(), return_when=asyncio.FIRST_EXCEPTION)
        for future in self._done.values():
            if future.done():
                future.result()
        return {rank: future.result() for rank, future in self._done.items()}

    async def silent(self, seconds: float) -> int:
        """Return once a rank that has to say something has said nothing for so long: which. One that waits to hear what all agree on has said its value."""
        loop = asyncio.get_running_loop()
        while True:
            owing = {rank: heard for rank, heard in self._heard.items() if not self._done[rank].done() and rank not in self._agreeing}
            first = min(owing, key=lambda rank: owing[rank], default=None)
            until = loop.time() if first is None else owing[first]
            if first is not None and loop.time() >= until + seconds:
                return first
            await asyncio.sleep(until + seconds - loop.time())

    def hear(self, rank: int, answer: Answer) -> None:
        self._heard[rank] = asyncio.get_running_loop().time()
        future = self._done[rank]
        if future.done():
            return
        if answer.kind is Kind.DONE:
            future.set_result(answer)
        elif answer.kind is Kind.AGREE:
            self._agreeing.add(rank)
            self._values[rank].put_nowait(answer.revision)
        elif answer.kind is Kind.REFUSED:
            future.set_exception(_REFUSALS.get(answer.error, RollstreamError)(f"rank {rank}: {answer.words}"))
        elif answer.kind is Kind.BLOCKED and self._blocked is not None:
            with contextlib.suppress(ValueError):
                self._blocked(Edge(answer.edge))

    def fail(self, problem: RollstreamError) -> None:
        for future in self._done.values():
            if not future.done():
                future.set_exception(problem)

    def forget(self) -> None:
        """Nobody waits any more: what nobody took is no fault."""
        for future in self._done.values():
            if not future.cancel() and not future.cancelled():
                future.exception()


class Hub:
    """`async with Hub(ranks, host) as hub`, then `gather`. `host`: the address it listens at; "": any.

    Invariant: after the first failure no command goes out but END.
    """

    def __init__(self, ranks: int, host: str) -> None:
        self._expected, self._host = sorted(range(1, ranks)), host
        self.token = secrets.token_hex(16)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._lines: dict[int, Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """One a connection, and one for each failure that may have a better explanation."""
        self._talks: dict[int, Talk] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._stopping = False
        self._failure: RollstreamError | None = None
        self._failed = threading.Event()

    async def __aenter__(self) -> Self:
        both = not self._host and socket.has_dualstack_ipv6()  # one port for both families, since only one can be told
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = await asyncio.start_server(self._accept, sock=socket.create_server((self._host, 0), family=family, dualstack_ipv6=both))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        """Whoever is still there is told to end."""
        assert self._server is not None
        self._server.close()
        self.end(problem)
        for line in self._lines.values():
            await line.flush(1.0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in self._lines.values():
            await line.close()
        await self._server.wait_closed()

    # -- what rank 0 does with it ----------------------------------------------------------------------------------------------------------------

    async def gather(self, deadline_s: float) -> None:
        """Return once every rank is here. Raises: `RankLost` naming those that are not; the failure of one that was."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: len(self._lines) == len(self._expected))
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in self._expected if rank not in self._lines)
            raise RankLost(f"rank {missing} did not come within {deadline_s:.0f} s: see its log, and whether it reaches port {self.port} here") from None
        if self._failure is not None:
            raise self._failure

    @contextlib.asynccontextmanager
    async def talk(self, call: Call, *, blocked: Blocked | None = None, silence_s: float = 0.0, **fields: Any) -> AsyncIterator[Talk]:
        """Tell all others, and hear them while the context is open; `blocked` hears what they wait for. A rank that owes an answer and says nothing for
        `silence_s` is lost; 0: whoever waits has a deadline of its own. Raises: the failure there was; `RankLost` once rank 0 ends.
        """
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise RankLost("rank 0 ends")
        number = next(self._numbers)
        talk = self._talks[number] = Talk(self, number, self._expected, blocked)
        watch = asyncio.create_task(self._hear_out(talk, call, silence_s), name="trainer:silence") if silence_s else None
        try:
            self.tell(Command(number=number, call=call, **fields))
            yield talk
        finally:
            if watch is not None:
                watch.cancel()
            del self._talks[number]
            talk.forget()

    async def ask(self, call: Call, *, silence_s: float = 0.0, **fields: Any) -> dict[int, Answer]:
        """What every other rank answers. See `talk`."""
        async with self.talk(call, silence_s=silence_s, **fields) as talk:
            return await talk.done()

    def tell(self, command: Command) -> None:
        for line in self._lines.values():
            line.send(command)

    async def stop(self, deadline_s: float) -> None:
        """All others leave in good order, or after `deadline_s` are left to end as they may. No failure is one any more."""
        if self._failure is not None:
            return
        self._stopping = True
        self.tell(Command(number=0, call=Call.STOP))
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: not self._lines)
        except TimeoutError:
            _LOG.warning("rank %s did not leave within %.0f s", ", ".join(map(str, sorted(self._lines))), deadline_s)

    def end(self, problem: BaseException | None) -> None:
        """Rank 0 ends by `problem`: so do all others. What they do then is no failure."""
        if self._failure is None and not self._stopping:
            self._stopping = True
            self._end(f"rank 0 ends: {_words(problem)}")
        for talk in list(self._talks.values()):  # nobody will answer any more
            talk.fail(RankLost(f"rank 0 ends: {_words(problem)}"))

    async def failure(self) -> RollstreamError:
        """Return when there is one: what it was."""
        await self._until(lambda: self._failure is not None)
        assert self._failure is not None
        return self._failure

    def failed_within(self, seconds: float) -> RollstreamError | None:
        """The failure, if there is one by then. Blocks: for other threads."""
        self._failed.wait(seconds)
        return self._failure

    def lost(self, rank: int, code: int) -> None:
        """Somebody saw its process end, with this exit code, or by this signal if it is negative."""
        if code < 0:
            self._fail(RankLost(f"rank {rank} is gone: killed by {signal.Signals(-code).name}"))
        else:
            self._fail(RankFailed(rank, f"ended with exit code {code}, see its log", code or EXIT_FAULT), unless_within_s=_HOW_S / 2)

    # -- parts -----------------------------------------------------------------------------------------------------------------------------------

    async def _until(self, come: Callable[[], bool]) -> None:
        while not (come() or (self._failure is not None)):
            self._changed.clear()
            await self._changed.wait()

    async def _hear_out(self, talk: Talk, call: Call, seconds: float) -> None:
        rank = await talk.silent(seconds)
        self._fail(RankLost(f"rank {rank} hangs: asked to {call}, it has said nothing for {seconds:g} s, and its connection is open"))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            line = Line(reader, writer)
            rank = await self._greeted(line)
            if rank is None:
                await line.close()
            else:
                await self._listen(rank, line)
        except asyncio.CancelledError:  # by `__aexit__`; a stream's server takes a cancelled task for a fault
            return
        finally:
            self._tasks.discard(task)

    async def _greeted(self, line: Line) -> int | None:
        """The rank at the other end; None for a stranger."""
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await line.receive(Hello)
        except (ConnectionError, TimeoutError, WireError) as problem:
            _LOG.warning("somebody who is no rank of this trainer knocked at the control channel: %s", problem)
            return None
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()) or hello.rank not in self._expected or hello.rank in self._lines:
            _LOG.warning("a process that calls itself rank %d of this trainer was turned away", hello.rank)
            return None
        return hello.rank

    async def _listen(self, rank: int, line: Line) -> None:
        self._lines[rank] = line
        line.send(Command(number=0, call=Call.WELCOME))
        self._changed.set()
        try:
            while True:
                answer = await line.receive(Answer)
                if answer.kind is Kind.FAILED:
                    self._fail(RankFailed(rank, answer.words, answer.exit_code), unless_within_s=_ROOT_S if answer.echo else 0.0)
                elif answer.number in self._talks:
                    self._talks[answer.number].hear(rank, answer)
        except (ConnectionError, WireError) as problem:
            if self._stopping:
                del self._lines[rank]
                self._changed.set()
                await line.close()
            else:
                self._fail(RankLost(f"rank {rank} is gone: {problem}"), unless_within_s=_HOW_S)

    def _fail(self, problem: RollstreamError, *, unless_within_s: float = 0.0) -> None:
        """The first failure counts; this one only if none comes `unless_within_s` that says better what it was."""
        if self._failure is not None or self._stopping:
            return
        if unless_within_s:
            task = asyncio.create_task(self._later(problem, unless_within_s), name="trainer:suspect")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self._failure = problem
        self._failed.set()
        for talk in self._talks.values():
            talk.fail(problem)
        self._changed.set()
        self._end(str(problem))

    async def _later(self, problem: RollstreamError, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._fail(problem)

    def _end(self, words: str) -> None:
        self.tell(Command(number=0, call=Call.END, words=words))


def _words(problem: BaseException | None) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return "it leaves" if problem is None else f"{type(problem).__name__}: {problem}"
