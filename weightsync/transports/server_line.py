"""An engine's end of its line to a weight server. As long as it is open the server keeps what it has for the engine; closing it gives all of it back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from protocol.errors import ManifestError, TransportFailed, VersionGone
from protocol.messages import WeightServerStatus
from protocol.versions import Version
from weightsync.roles import HEARTBEAT_S

_EARLIER_S = 0.5
"""The server is given so much less time, or a tenth less, that it can say itself what was not done."""
_CLOSE_S = 1.0
_ERRORS: Mapping[str, type[ManifestError]] = {"gone": VersionGone, "manifest": ManifestError}


class ServerLine:
    """Made by `ServerLine.open`. Any number of requests may be under way; when the line breaks all of them fail."""

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse, server: WeightServerStatus) -> None:
        self._socket = socket_
        self.server = server
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"transport:line:{server.server_id}")

    @classmethod
    async def open(cls, session: aiohttp.ClientSession, server: WeightServerStatus, engine_id: str, *, deadline_s: float) -> ServerLine:
        """Raises: `TransportFailed` if the server does not answer in time."""
        try:
            async with asyncio.timeout(deadline_s):
                # An own time limit for closing: the session's would wait ten seconds for a server that is gone.
                connection = await session.ws_connect(
                    f"{server.url}/line",
                    params={"engine": engine_id},
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            # The words of a refusal have the whole address in them, and with it the server's key.
            why = f"HTTP {problem.status}" if isinstance(problem, aiohttp.ClientResponseError) else str(problem) or type(problem).__name__
            raise TransportFailed(f"weight server {server.server_id} does not answer ({why})") from None
        return cls(connection, server)

    @property
    def alive(self) -> bool:
        return not self._reader.done() and not self._socket.closed

    async def ask(self, op: str, *, deadline_s: float, **fields: object) -> Mapping[str, Any]:
        """The server's answer.

        Raises: `VersionGone`, `ManifestError` in its words; `TransportFailed` if it refuses, breaks, or is late.
        """
        if not self.alive:
            raise TransportFailed(f"the line to weight server {self.server.server_id} is broken")
        if deadline_s <= 0:
            raise TransportFailed(f"{op}: no time left for weight server {self.server.server_id}")
        number = next(self._numbers)
        answered: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            async with asyncio.timeout(deadline_s):
                theirs_s = deadline_s - min(_EARLIER_S, deadline_s / 10)
                await self._socket.send_str(orjson.dumps({"id": number, "op": op, "deadline_s": theirs_s, **fields}).decode())
                answer = await answered
        except TimeoutError as problem:
            raise TransportFailed(f"{op}: weight server {self.server.server_id} was not done within {deadline_s:.1f} s") from problem
        except (aiohttp.ClientError, ConnectionError) as problem:
            raise TransportFailed(f"{op}: the line to weight server {self.server.server_id} broke ({problem})") from problem
        finally:
            del self._waiting[number]
        if error := answer.get("error"):
            raise _ERRORS.get(str(error), TransportFailed)(f"weight server {self.server.server_id}, {op}: {answer.get('message', '')!s:.500}")
        return answer

    async def aclose(self, *, limit_s: float = _CLOSE_S) -> None:
        """Within `limit_s`; never raises."""
        try:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._socket.close()
        finally:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        """Consumes: the server's answers. Produces: whoever waits for one. Ends with the connection."""
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                answer = orjson.loads(message.data)
                if (answered := self._waiting.get(answer["id"])) is not None and not answered.done():
                    answered.set_result(answer)
        except (ValueError, KeyError, TypeError):
            pass  # it does not speak our language: as good as gone
        finally:
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(TransportFailed(f"weight server {self.server.server_id} went away"))


def choose(servers: Sequence[WeightServerStatus], *, backend: str, version: Version, same_host: bool) -> WeightServerStatus:
    """The server to connect to: one that has the version rather than one that has not, then the one with the fewest engines.

    Raises: `TransportFailed` if there is none; with `same_host`, if there are several: memory of one GPU cannot be handed to an engine on another.
    """
    here = socket.gethostname()
    fit = [server for server in servers if server.backend == backend and (not same_host or server.host == here)]
    if not fit:
        where = f" on {here}" if same_host else ""
        raise TransportFailed(f"no weight server for {backend}{where}: start one with `rollstream weight-server`")
    if same_host and len(fit) > 1:
        names = ", ".join(sorted(f"{server.server_id} ({server.device})" for server in fit))
        raise TransportFailed(f"{len(fit)} weight servers for {backend} on {here}: {names}; engines cannot tell yet which is on their GPU: run one a host")
    return min(fit, key=lambda server: (server.staged != version, server.groups, server.server_id))
