"""One engine's line to the weight server: a WebSocket that carries its requests, and whose end ends all that it had.

    connected ──join──► right held, group forms ──joined, give──► stage, take ──► right held, version held ──send …──► give
        └── closed, by whichever side, or silent for `HEARTBEAT_S`: right and holds are given back, the group is destroyed

An engine stands still while it waits for its group to meet, so whoever meets has the transfer right: no two engines of a server do at the same time (rule W6).

Every message is JSON `{"id", "op", …}` and gets one answer `{"id", …}`, or `{"id", "error", "message"}` with error = gone | manifest | failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import WSMsgType, web

from protocol.errors import ManifestError, TransportFailed, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.versions import Version
from weightsync.finish import finish, left
from weightsync.gpus import apart
from weightsync.server import handles
from weightsync.server.own_thread import OwnThread
from weightsync.server.process_group import ABORT_S, Group, end_process
from weightsync.server.right import TransferRight
from weightsync.server.shelf import Shelf, Staged

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_MAX_RANKS = 1024
_MOST_REQUESTS = 16
"""Of one line at the same time; an engine has two or three, so more come from something else, and its line ends."""
_EARLIER = 0.9
"""Of the time that an engine gives its group: this side ends first, and says what was not done."""
_GRACE_S = 1.0
"""For a group to say itself that it did not form in time."""
_END_S = 2 * ABORT_S + 2.0


@dataclass(slots=True, kw_only=True)
class Sender:
    """What all lines of a server share."""

    device: torch.device
    backend: str
    address: str
    """Where groups meet."""
    group_timeout_s: float
    shelf: Shelf
    right: TransferRight
    gpus: frozenset[str] = frozenset()
    """What its GPU is called (`weightsync.gpus`); empty: not known."""
    lines: int = 0
    """Engines that are connected, whether or not their way has groups."""
    sent_bytes: int = 0
    """Of versions that engines took: sent, or handed over once an engine had them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever `lines` changed."""


class Line:
    """Serves one connection. Requests of a line may run at the same time; sends come one by one, in its own thread."""

    def __init__(self, sender: Sender, engine_id: str) -> None:
        self._sender = sender
        self._engine_id = engine_id
        self._thread = OwnThread(f"line:{engine_id}")
        self._group: Group | None = None
        self._entered = False
        """A group was asked for: a line has one in its life."""
        self._joining: asyncio.Task[None] | None = None
        self._prepared: Version | None = None
        """Held while this line has the right."""
        self._reading: list[Version] = []
        """Held until the engine is known to have read them."""
        self._ops: Mapping[str, Callable[[Mapping[str, Any], float], Awaitable[Mapping[str, object]]]] = {
            "near": self._near,
            "join": self._join,
            "joined": self._joined,
            "stage": self._stage,
            "take": self._take,
            "send": self._send,
            "handles": self._handles,
            "give": self._give,
            "release": self._release,
        }

    async def serve(self, socket: web.WebSocketResponse) -> None:
        """Until the other side is gone. Everything it had is given back then."""
        tasks: set[asyncio.Task[None]] = set()
        self._count(1)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                if len(tasks) >= _MOST_REQUESTS:
                    _LOG.warning("engine %s asked for more than %d things at once: its line ends", self._engine_id, _MOST_REQUESTS)
                    break
                task = asyncio.create_task(self._answer(socket, message.data), name=f"line:{self._engine_id}")
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await finish(self._end(list(tasks)), limit_s=_END_S)

    def _count(self, change: int) -> None:
        self._sender.lines += change
        self._sender.changed.set()

    async def _answer(self, socket: web.WebSocketResponse, text: str) -> None:
        number: object = None
        try:
            request = orjson.loads(text)
            number = request["id"]
            answer = dict(await self._ops[request["op"]](request, float(request.get("deadline_s", 10.0))))
        except VersionGone as problem:
            answer = {"error": "gone", "message": str(problem)}
        except ManifestError as problem:
            answer = {"error": "manifest", "message": str(problem)}
        except (TransportFailed, TimeoutError, PermissionError) as problem:
            answer = {"error": "failed", "message": str(problem) or "no answer in time"}
        except (LookupError, TypeError, ValueError, ArithmeticError) as problem:
            answer = {"error": "failed", "message": f"not understood: {problem!r}"}
        with contextlib.suppress(ConnectionError, RuntimeError):  # it left meanwhile
            await socket.send_str(orjson.dumps({"id": number, **answer}).decode())

    async def _near(self, request: Mapping[str, Any], _: float) -> Mapping[str, object]:
        """Return unless the engine, on these GPUs, cannot read the memory of this server's."""
        if apart(self._sender.gpus, theirs := [str(gpu) for gpu in request["gpus"]]):
            ours = ", ".join(sorted(self._sender.gpus))
            raise TransportFailed(f"this server is on GPU {ours}, the engine on {', '.join(theirs)}: memory of one GPU is not handed to another")
        return {}

    async def _join(self, request: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        """Open a group and begin to wait for the engine in it; what the engine needs to come is the answer.

        Waits for the right, and has it in use from then on: until it is given, the group does not form, or the line ends.
        """
        ranks, end = int(request["ranks"]), time.monotonic() + deadline_s
        if not 1 <= ranks <= _MAX_RANKS:
            raise ValueError(f"ranks {ranks}: expected 1 to {_MAX_RANKS}")
        if self._entered:
            raise TransportFailed("this line has a group already; open another line")
        self._entered = True
        sender, timeout_s = self._sender, min(deadline_s, self._sender.group_timeout_s * _EARLIER)
        await sender.right.take(self, deadline_s=deadline_s)
        sender.right.use(self)

        def make() -> Group:
            return Group(backend=sender.backend, device=sender.device, address=sender.address, world_size=1 + ranks, timeout_s=timeout_s)

        try:
            group = await self._thread.call(make, deadline_s=left(end))
        except (OSError, RuntimeError) as problem:
            sender.right.give(self)
            raise TransportFailed(f"no group can be made on {sender.address}: {problem!s:.300}") from problem
        self._group = group
        self._joining = asyncio.create_task(self._thread.call(group.join, deadline_s=timeout_s + _GRACE_S), name=f"line:{self._engine_id}:join")
        self._joining.add_done_callback(self._met)
        return {"group": group.name, "address": group.address, "port": group.port, "world_size": group.world_size, "backend": sender.backend}

    def _met(self, joining: asyncio.Task[None]) -> None:
        """The engine says itself when it is in (`give`): with NCCL this side is at once. A group that did not form frees the others here."""
        if joining.cancelled() or joining.exception() is not None:
            self._sender.right.give(self)

    async def _joined(self, _: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        """Return once every rank is in the group."""
        if self._joining is None:
            raise TransportFailed("ask for a group first")
        async with asyncio.timeout(deadline_s):
            await asyncio.shield(self._joining)
        failpoint(Failpoint.SERVER_GROUPED)
        return {}

    async def _stage(self, request: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        staged = await self._sender.shelf.wait(Version.parse(request["version"]), deadline_s=deadline_s)
        if staged.digest != request["digest"]:
            raise TransportFailed(f"version {staged.version} here has digest {staged.digest}, not {request['digest']}")
        return {"buckets": [bucket.digest for bucket in staged.buckets]}

    async def _take(self, request: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        """The right to send, and the version held for it. With `use`: the engine is paused, and the right stays until it is given."""
        version = Version.parse(request["version"])
        use = bool(request.get("use"))
        if self._joining is not None and not self._joining.done():
            raise TransportFailed("the group of this line is still forming")
        await self._sender.right.take(self, deadline_s=deadline_s, urgent=use)
        try:
            self._sender.shelf.hold(version)
        except VersionGone:
            self._sender.right.give(self)
            raise
        self._forget_prepared()
        self._prepared = version
        if use:
            self._sender.right.use(self)
        return {}

    async def _send(self, request: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        """Buckets one after the other, if all are those that the engine will be told of; it takes each when it comes to it."""
        group, started = self._group, time.monotonic()
        staged = self._held(request["version"])
        named = [(int(index), digest) for index, digest in request["buckets"]]
        for index, _ in named:
            if not 0 <= index < len(staged.buckets):
                raise TransportFailed(f"bucket {index} of version {staged.version}: expected 0 to {len(staged.buckets) - 1}: nothing was sent")
        buckets = [(staged.buckets[index], staged.memory[index], digest) for index, digest in named]
        for (index, _), (bucket, _, digest) in zip(named, buckets, strict=True):
            if bucket.digest != digest:
                raise TransportFailed(f"bucket {index} of version {staged.version} is {bucket.digest} here, not {digest}: nothing was sent")
        if group is None or self._thread.busy:
            raise TransportFailed("the group of this line is not formed, or is busy")
        self._sender.right.use(self)
        failpoint(Failpoint.SERVER_SENDING)
        await self._thread.call(lambda: group.send([memory for _, memory, _ in buckets], deadline_s=deadline_s), deadline_s=deadline_s + 1.0)
        failpoint(Failpoint.SERVER_SENT)
        total = sum(bucket.nbytes for bucket, _, _ in buckets)
        self._sender.sent_bytes += total
        return {"bytes": total, "seconds": time.monotonic() - started}

    async def _handles(self, request: Mapping[str, Any], deadline_s: float) -> Mapping[str, object]:
        staged, ranks = self._held(request["version"]), int(request["ranks"])
        if self._sender.backend != "ipc":
            raise TransportFailed(f"this server sends by {self._sender.backend} and hands out no memory")
        if not 1 <= ranks <= _MAX_RANKS:
            raise ValueError(f"ranks {ranks}: expected 1 to {_MAX_RANKS}")
        if self._thread.busy:
            raise TransportFailed("handles are being made for this line already")

        def make() -> list[str]:
            handles.collect()
            return [handles.payload(staged) for _ in range(ranks)]

        try:
            payloads = await self._thread.call(make, deadline_s=deadline_s)
        except RuntimeError as problem:
            raise TransportFailed(f"no handles of {self._sender.device}: {problem!s:.300}") from problem
        return {"payloads": payloads}

    async def _give(self, request: Mapping[str, Any], _: float) -> Mapping[str, object]:
        """The right goes to whoever waits. With `reading`: the engine may still read the memory, which stays as it is until `release`."""
        if request.get("reading") and self._prepared is not None:
            self._sender.sent_bytes += sum(bucket.nbytes for bucket in self._sender.shelf.get(self._prepared).buckets)
            self._reading.append(self._prepared)
            self._prepared = None
        self._forget_prepared()
        self._sender.right.give(self)
        return {}

    async def _release(self, request: Mapping[str, Any], _: float) -> Mapping[str, object]:
        """The engine has answered something since it was given this version: it reads neither it nor what it was given before."""
        version = Version.parse(request["version"])
        for read in [one for one in self._reading if one <= version]:
            self._reading.remove(read)
            self._sender.shelf.release(read)
        return {}

    def lost(self) -> None:
        """Another engine has the right now; what was prepared is held no longer."""
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        version, self._prepared = self._prepared, None
        if version is not None:
            self._sender.shelf.release(version)

    def _held(self, version: str) -> Staged:
        if self._prepared is None or self._prepared != Version.parse(version):
            raise TransportFailed(f"version {version} was not taken by this line, or another has the right now")
        return self._sender.shelf.get(self._prepared)

    async def _end(self, asked: Sequence[asyncio.Task[None]]) -> None:
        """Order: the engine is freed, the next one may send, the group goes; then nothing reads the memory any more, and it is given back."""
        if asked:
            await asyncio.wait(asked)
        sender, group, self._group = self._sender, self._group, None
        if self._joining is not None:
            self._joining.cancel()
        try:
            if group is not None and self._thread.busy:
                await asyncio.to_thread(group.abort)
            sender.right.give(self)
            if group is not None:
                await self._leave(group)
        finally:
            sender.right.give(self)
            self._count(-1)
            self._thread.when_free(self._release_all)
            self._thread.close()

    def _release_all(self) -> None:
        """No call of this line runs any more, and with it none that reads the memory: also where one outlived its deadline."""
        self._forget_prepared()
        for version in self._reading:
            self._sender.shelf.release(version)
        self._reading.clear()

    async def _leave(self, group: Group) -> None:
        try:
            await self._thread.call(group.destroy, deadline_s=ABORT_S)
        except TimeoutError:
            if self._sender.backend == "nccl":
                end_process(f"the group of {self._engine_id} is stuck in a call to NCCL")
            _LOG.warning("the group of %s is left to its own timeout; until then its memory stays as it is", self._engine_id)
