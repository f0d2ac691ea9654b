"""How a finished group reaches Redis: its payload and the ledger's script (rule P1).

one server   SET, SET, … script(all)     puts that come together share a round trip and the script's fixed cost
a cluster    SET ► script ► PERSIST      each acknowledged before the next, for they go to different nodes; `RedisLedger.sweep` finishes what is cut short
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from redis.exceptions import NoScriptError

from buffer.group_commit import GroupCommit
from protocol.connection import Client, Script, asking
from protocol.failpoints import Failpoint, failpoint
from protocol.retry import CONNECTION_FAULTS

PAYLOAD_TTL_S = 120
"""A payload whose put never reached the ledger expires after this; the script that follows it makes it stay."""
MOST_BYTES, MOST_GROUPS, _AT_ONCE = 2 << 20, 32, 4
"""Of one round trip: a pipeline of many large payloads is slow, and a script holds the server."""
_MISSING = [b"PAYLOAD_MISSING"]
Argument: TypeAlias = "str | int | bytes"
Reply: TypeAlias = "tuple[int, list[Any]]"
"""The ledger's sequence number, and its answer: code, then what goes with it."""


class PutRequest(NamedTuple):
    """One put as the script takes it."""

    key: str
    """Of the payload."""
    payload: bytes
    group: bytes
    """What the script is told of it."""


class PutPath:
    """Stores payloads and calls the script; makes nothing of its answers. `call` runs a script of the ledger, `acknowledge` tells it of a permanent payload."""

    def __init__(
        self,
        client: Client,
        script: Script,
        *,
        keys: Callable[[], Awaitable[Sequence[str]]],
        head: Sequence[Argument],
        acknowledge: Callable[[str], Awaitable[object]],
    ) -> None:
        self._client, self._script, self._keys, self._head, self._acknowledge = client, script, keys, head, acknowledge
        self._together: GroupCommit[PutRequest, Reply] = GroupCommit(
            self._send,
            size=lambda request: len(request.payload),
            most_size=MOST_BYTES,
            most_items=MOST_GROUPS,
            at_once=_AT_ONCE,
            away=CONNECTION_FAULTS,
        )

    async def one_server(self, request: PutRequest) -> Reply:
        with asking("put"):
            return await self._together(request)

    async def cluster(self, request: PutRequest) -> Reply:
        with asking("put"):
            if not await self._client.set(request.key, request.payload, nx=True, px=PAYLOAD_TTL_S * 1000) and (
                await self._client.strlen(request.key) != len(request.payload)
            ):
                return 0, _MISSING
        failpoint(Failpoint.PRODUCER_SET)
        ((sequence, answer),) = _each(await self._script(self._client, keys=await self._keys(), args=[*self._head, request.group]), 1)
        if answer[0] == b"OK" and answer[2]:
            with asking("put"):
                if not (await self._client.persist(request.key) or await self._client.exists(request.key)):
                    return 0, _MISSING
            await self._acknowledge(request.key)
        return sequence, answer

    async def _send(self, batch: Sequence[PutRequest]) -> Sequence[Reply | Exception]:
        keys = await self._keys()
        argv = [*self._head, *(request.group for request in batch)]
        async with self._client.pipeline(transaction=False) as pipe:
            for request in batch:
                pipe.execute_command("SET", request.key, request.payload, "NX", "PX", PAYLOAD_TTL_S * 1000)
            pipe.evalsha(self._script.sha, len(keys), *keys, *argv)
            *stored, reply = await pipe.execute(raise_on_error=False)
        if isinstance(reply, NoScriptError):
            failpoint(Failpoint.PRODUCER_SET)
            reply = await self._script(self._client, keys=keys, args=argv)
        elif isinstance(reply, Exception):
            raise reply
        answers = _each(reply, len(batch))
        # A payload that the server did not take is that put's error alone; the script found it missing.
        return [problem if isinstance(problem, Exception) else answer for problem, answer in zip(stored, answers, strict=True)]


def _each(reply: Any, count: int) -> list[Reply]:
    """The answer to every request of one call."""
    sequence, (code, *rest) = reply
    if code != b"OK":  # of the call as a whole
        return [(sequence, [code, *rest])] * count
    return [(sequence, answer) for answer in cast("list[list[Any]]", rest)]
