"""The host of one more machine of an engine: `rollstream engine --node-rank K`. It starts its part of the server with each life that node 0 calls for.

    WAITING ── node 0 calls for a life that this node was not part of ──► RUNNING ── that life is over, or its own server ended ──► WAITING
       └── stop, or the run drains ──► gone                                 └── stop: node 0 is told, and begins another life

consumes: the call of node 0 / produces: a server process, and what became of it / waits for: a call, or the server's end / unblocked by: a wake-up of the
engines, or time. Node 0 alone answers requests and takes versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from dataclasses import replace

from buffer.contract import RunState
from buffer.redis_ledger import RedisLedger
from producer.engine.host import EngineHostConfig, engine_id, first_contact, kind_of
from producer.engine.nodes import BEAT_S, NodeCall, NodeStatus, calls, mark, member, statuses
from producer.engine.sglang.child import Child
from producer.engine.sglang.engine import SGLangServer
from protocol.connection import Client, connect
from protocol.errors import ConfigError, RollstreamError, RunMissing
from protocol.keys import Keys
from protocol.presence import TTL_S
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.config import is_url

_LOG = logging.getLogger(__name__)
_GONE_S = 3.0
"""Without a call for so long, on top of the time for which it counts, node 0 is gone."""
_DRAINED_S = 2.0
_SAY_S = 3.0
_LOOK_S = 0.25
_STOPPED = "its host was stopped"
_NOWHERE = ("127.", "localhost:", "[::1]:", "0.0.0.0:", "[::]:")
"""An address that begins so leads another machine to itself."""


class RankTaken(ConfigError):
    """Another host is this node, and is alive."""


async def run_node(config: EngineHostConfig, index: int, rank: int, stop: asyncio.Event) -> None:
    """Run node `rank` of engine `index` until `stop`, or until the run drains and node 0 has left.

    Raises: `ConfigError` for settings that cannot be, or are not those of node 0; `RankTaken`; `RedisUnavailable`; `EngineFault` where no server can be started
    at all.
    """
    kind = kind_of(config, index, node=rank)
    nodes = config.engine.nodes
    if not isinstance(kind, SGLangServer) or not 0 < rank < nodes:
        raise ConfigError(f"--node-rank {rank}: engine.nodes is {nodes}" + (f", so the others are 1 to {nodes - 1}" if nodes > 1 else ""))
    await first_contact(config.redis.url)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        async with wakeups(client, Keys(config.run.name)) as waker:
            await _Node(config, index, rank, kind=kind, client=client, waker=waker).run(stop)
    finally:
        await client.aclose()


class _Node:
    def __init__(self, config: EngineHostConfig, index: int, rank: int, *, kind: SGLangServer, client: Client, waker: Wakeups) -> None:
        keys = Keys(config.run.name)
        self._config, self._kind, self._waker = config, kind, waker
        self._calls, self._statuses, self._ledger = calls(client, keys), statuses(client, keys), RedisLedger(client, keys)
        self._status = NodeStatus(
            engine_id=engine_id(config.run, index),
            rank=rank,
            boot_nonce="",
            ended="",
            look="",
            seen="",
            host=socket.gethostname(),
            pid=os.getpid(),
            started=uuid.uuid4().hex[:16],
        )
        self._run_was_open = False

    async def run(self, stop: asyncio.Event) -> None:
        await self._take_the_rank(stop)
        try:
            while (call := await self._called(stop)) is not None:
                self._check(call)
                await self._life(call, stop)
        finally:
            if not self._status.ended:
                with contextlib.suppress(TimeoutError, RollstreamError):
                    async with asyncio.timeout(_SAY_S):
                        await self._statuses.leave(self._member)

    async def _life(self, call: NodeCall, stop: asyncio.Event) -> None:
        """From the start of this node's part to the end of the life. Whether to try again is node 0's to say, which is told why it ended here."""
        _LOG.info("node %d joins at %s", self._status.rank, call.address)
        async with self._kind.node(call.boot_nonce, self._status.rank, call.address) as child:
            self._status = replace(self._status, boot_nonce=call.boot_nonce, ended="", look="", seen="")
            ended = asyncio.create_task(child.ended(), name="node:child")
            try:
                while await self._goes_on(call) and not ended.done() and not stop.is_set():
                    await self._wait(stop, ended)
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)
            if child.code is not None:
                why = _words(child.code, child)
                _LOG.warning("%s", why)
                await self._tell(why)
            elif stop.is_set():
                await self._tell(_STOPPED)

    async def _goes_on(self, call: NodeCall) -> bool:
        """Whether node 0 still calls for this life; it is told that this node is there."""
        end = 0.0
        while (found := await self._call()) is None:
            end = end or time.monotonic() + _GONE_S  # from the first answer: how long Redis was away says nothing of node 0
            if time.monotonic() > end:
                _LOG.info("node 0 of %s is gone", self._status.engine_id)
                return False
            await asyncio.sleep(_LOOK_S)
        if found.boot_nonce != call.boot_nonce:
            return False
        await self._say(found)
        return True

    async def _called(self, stop: asyncio.Event) -> NodeCall | None:
        """The next life to join. None: `stop`, or the run is over."""
        deserted_at = 0.0
        while not stop.is_set():
            found = await self._call()
            if found is not None and found.boot_nonce != self._status.boot_nonce:
                return found
            await self._say(found)
            state = await self._run_state()
            self._run_was_open = self._run_was_open or state is RunState.OPEN
            now = time.monotonic()
            deserted_at = (deserted_at or now) if found is None and state is RunState.DRAINING and self._run_was_open else 0.0
            if deserted_at and now - deserted_at >= _DRAINED_S:
                return None
            await self._wait(stop)
        return None

    async def _wait(self, stop: asyncio.Event, *others: asyncio.Task[int]) -> None:
        """For a change among the engines, at most until the next beat; one that is missed costs no more than that."""
        waits = [
            asyncio.create_task(self._waker.wait(Topic.ENGINES, timeout_s=BEAT_S), name="node:wait"),
            asyncio.create_task(stop.wait(), name="node:stop"),
        ]
        try:
            await asyncio.wait({*waits, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _check(self, call: NodeCall) -> None:
        """Raises: `ConfigError` for a node 0 whose engine this cannot be a part of."""
        engine, weights = self._config.engine, self._config.weights
        if (call.nodes, call.alike) != (engine.nodes, self._kind.alike):
            raise ConfigError(
                f"node 0 of {call.engine_id} (on {call.host}) was started with another [engine], model or length of requests: give both the same file"
            )
        if call.host == self._status.host:
            return
        if call.address.startswith(_NOWHERE):
            raise ConfigError(
                f"node 0 of {call.engine_id} is to be met at {call.address}, where no other machine finds it: set engine.host there to an address that this "
                "machine reaches"
            )
        kept = {"weights.store": weights.store}
        if weights.transport == "delta" or is_url(weights.store):
            kept = {"weights.relay": weights.relay}
        for key, folder in kept.items():
            if not folder:
                raise ConfigError(
                    f"{key} is empty, which is a folder of one machine: an engine over several loads versions from where all of them see the same under one "
                    f"path; set {key} to such a folder on all"
                )

    async def _take_the_rank(self, stop: asyncio.Event) -> None:
        """Raises: `RankTaken`."""
        end = time.monotonic() + TTL_S + BEAT_S
        while not stop.is_set():
            mine = [one for one in await self._statuses.members() if (one.engine_id, one.rank) == (self._status.engine_id, self._status.rank)]
            if not mine or mine[0].ended == _STOPPED:
                break
            if time.monotonic() > end:
                raise RankTaken(
                    f"node {mine[0].rank} of {mine[0].engine_id} is run by process {mine[0].pid} on {mine[0].host}: end that one, or use another --node-rank"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await stop.wait()

    async def _call(self) -> NodeCall | None:
        return next((call for call in await self._calls.members() if call.engine_id == self._status.engine_id), None)

    async def _say(self, call: NodeCall | None) -> None:
        if call is not None and call.look:
            self._status = replace(self._status, look=call.look, seen=await asyncio.to_thread(mark, call.look))
        await self._statuses.beat(self._member, self._status)

    async def _tell(self, ended: str) -> None:
        self._status = replace(self._status, ended=ended)
        with contextlib.suppress(TimeoutError, RollstreamError):
            async with asyncio.timeout(_SAY_S):
                await self._statuses.beat(self._member, self._status)

    async def _run_state(self) -> RunState | None:
        try:
            return (await self._ledger.status()).state
        except RunMissing:
            return None

    @property
    def _member(self) -> str:
        return member(self._status.engine_id, self._status.rank)


def _words(code: int, child: Child) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"SGLang {how}; its last words are\n{child.last_words()}"
