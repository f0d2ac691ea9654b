"""An engine over several machines, seen from node 0, whose host has its reconciler: who of the others is there, and when a life is over with one of them.

    awaited ── its server runs for this life ──► there ── its server ended, or it was not heard of for `LOST_S` ──► the life is over, on all nodes

Each other node has a host of its own (`producer.engine.node`), which looks up the call of node 0 in Redis and starts its part of the server. A process group
takes nobody back, so a life that lost one node begins anew on all of them, at another address.

What both tell each other is read by hosts of the same release alone, and is no part of the wire.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from producer.engine.hosted import EngineFault, Meeting
from protocol.connection import Client
from protocol.errors import TransportFailed
from protocol.keys import Keys
from protocol.messages import EngineId
from protocol.presence import Presence

BEAT_S = 1.0
LOST_S = 3.0
"""Beyond the time for which a host that says nothing counts as there."""
SEE_S = 60.0
"""For a new folder to be seen by all: a network file system may remember for half a minute that it was not there."""
_LOOK_S = 0.1
_CALL, _NODE = "engine-call", "engine-node"


class NodeMissing(EngineFault):
    """This life came to nothing as another node was not there to begin it; waiting on for that one is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """One life of an engine, for its other nodes to join."""

    engine_id: EngineId
    boot_nonce: str
    address: str
    nodes: int
    alike: str
    look: str
    """A folder that every node must see, as it is to be loaded from there; empty: none."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What the host of node `rank` tells of itself."""

    engine_id: EngineId
    rank: int
    boot_nonce: str
    """The life its server is, or was, a part of; empty: it has had none."""
    ended: str
    """How its server ended; empty: it runs, or there was none."""
    look: str
    """The folder it looked at last."""
    seen: str
    """`mark` of it; empty: it is not there."""
    host: str
    pid: int
    started: str
    """Another one for each start of the host, which host and pid need not be."""


def calls(client: Client, keys: Keys) -> Presence[NodeCall]:
    """By engine."""
    return Presence(client, keys, _CALL, NodeCall)


def statuses(client: Client, keys: Keys) -> Presence[NodeStatus]:
    """By `member`."""
    return Presence(client, keys, _NODE, NodeStatus)


def member(engine_id: str, rank: int) -> str:
    return f"{engine_id}:{rank}"


def mark(folder: str) -> str:
    """Names and sizes of what lies in a folder, as one word; empty if it cannot be read. Nodes that see the same folder say the same."""
    try:
        found = sorted((entry.name, entry.stat().st_size) for entry in Path(folder).iterdir() if entry.is_file())
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(repr(found).encode())


class RollCall:
    """Of one life: pure.

    >>> roll = RollCall(nodes=2, boot_nonce="b")
    >>> status = NodeStatus(engine_id=EngineId("e"), rank=1, boot_nonce="b", ended="", look="", seen="", host="h", pid=1, started="s")
    >>> roll.seen([], now=0.0), roll.missing, roll.seen([status], now=1.0), roll.missing
    ('', [1], '', [])
    >>> roll.seen([], now=2.0), roll.seen([], now=4.1)
    ('', 'node 1 (on h) has not been heard of')
    """

    def __init__(self, *, nodes: int, boot_nonce: str, lost_s: float = LOST_S) -> None:
        self._ranks, self._boot_nonce, self._lost_s = range(1, nodes), boot_nonce, lost_s
        self._there: dict[int, tuple[float, NodeStatus]] = {}
        self._looked = float("inf")

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined this life yet."""
        return [rank for rank in self._ranks if rank not in self._there]

    def seen(self, statuses: Iterable[NodeStatus], *, now: float) -> str:
        """Why this life is over; empty: it is not. Time in which nobody could look, as Redis was away, counts for no node's silence."""
        blind_s, self._looked = max(0.0, now - self._looked), now
        if blind_s > self._lost_s:
            self._there = {rank: (now, status) for rank, (_, status) in self._there.items()}
        for status in statuses:
            if status.boot_nonce != self._boot_nonce or status.rank not in self._ranks:
                continue
            if status.ended:
                return f"node {status.rank} (on {status.host}): {status.ended}"
            _, before = self._there.get(status.rank, (now, status))
            if before.started != status.started:
                return f"node {status.rank} (on {status.host}) was started again"
            self._there[status.rank] = (now, status)
        for rank, (last, status) in self._there.items():
            if now - last > self._lost_s:
                return f"node {rank} (on {status.host}) has not been heard of"
        return ""


class Nodes:
    """The other nodes of one life, for its host."""

    def __init__(self, client: Client, keys: Keys, *, engine_id: EngineId, index: int, boot_nonce: str, meeting: Meeting) -> None:
        self._calls, self._statuses = calls(client, keys), statuses(client, keys)
        self._id, self._index, self._boot_nonce, self._meeting = engine_id, index, boot_nonce, meeting
        self._roll = RollCall(nodes=meeting.nodes, boot_nonce=boot_nonce)
        self._look = ""

    @property
    def trouble(self) -> str:
        """Who is not there, and what to do, for people; empty: all are."""
        missing = self._roll.missing
        if not missing:
            return ""
        names = ", ".join(map(str, missing))
        return (
            f"node {names} of {self._meeting.nodes} has not joined at {self._meeting.address}: run `rollstream engine --index {self._index} "
            f"--node-rank {missing[0]}` on its machine; on Ray its actor does, once it has room"
        )

    async def beat(self) -> None:
        """Call, and see who is there. Raises: `EngineFault` when this life is over with one of them."""
        await self._say()
        if why := self._roll.seen(await self._mine(), now=time.monotonic()):
            raise EngineFault(f"{why}: all nodes of the engine begin again")

    async def see(self, folder: Path, *, deadline_s: float) -> None:
        """Return once every node sees the same files in `folder`: node 0 alone answers for all, also where another loaded nothing (SGLang 0.5.23).

        Raises: `TransportFailed` naming the node that does not.
        """
        self._look, wanted = str(folder), await asyncio.to_thread(mark, str(folder))
        end = time.monotonic() + min(deadline_s, SEE_S)
        await self._say()
        while True:
            found = {status.rank: status.seen for status in await self._mine() if status.look == self._look}
            blind = [rank for rank in range(1, self._meeting.nodes) if found.get(rank) != wanted]
            if not blind:
                return
            if time.monotonic() >= end:
                raise TransportFailed(
                    f"node {', '.join(map(str, blind))} of the engine does not see {folder} as node 0 does: set weights.store, and weights.relay where there "
                    "are copies, to a folder that all of its machines share under one path"
                )
            await asyncio.sleep(_LOOK_S)  # presence wakes nobody up; the engine serves meanwhile

    async def leave(self) -> None:
        await self._calls.leave(self._id)

    async def _say(self) -> None:
        meeting = self._meeting
        call = NodeCall(
            engine_id=self._id,
            boot_nonce=self._boot_nonce,
            address=meeting.address,
            nodes=meeting.nodes,
            alike=meeting.alike,
            look=self._look,
            host=socket.gethostname(),
        )
        await self._calls.beat(self._id, call)

    async def _mine(self) -> list[NodeStatus]:
        return [status for status in await self._statuses.members() if status.engine_id == self._id]
