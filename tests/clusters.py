"""Real server processes for tests: one, or a cluster of several, over TCP on this machine, which tests kill, stop, restart and move slots between.

The cluster is made by commands alone: `CLUSTER ADDSLOTSRANGE`, `MEET`, `REPLICATE`. Nobody waits by the clock: each step ends when the nodes say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from deploy.redis_server import server_binary

_NODE_TIMEOUT_MS = 60_000
"""A node that is silent for so long is failed over: one that the machine holds up is not."""
_DEAD_TIMEOUT_MS = 1000
"""The same, for as long as a dead one is waited for."""
_PORTS = range(10_000, 22_000)
"""Below those that outgoing connections take, so that a server which is killed finds its own free again."""
_PATIENCE_S = 60.0
_LOOK_S = 0.02


def free_ports(count: int, *, shift: int = 0) -> list[int]:
    """Ports nobody listens on now; with a `shift`, neither on the port so much higher."""
    held: list[socket.socket] = []
    found: list[int] = []
    try:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                for one in sorted({port, port + shift}):
                    held.append(socket.socket())
                    held[-1].bind(("127.0.0.1", one))
                found.append(port)
    finally:
        for one in held:
            one.close()
    return found


async def until(true: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return once `await true()` says so: another server tells nobody when its state changes."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not await true():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"not within {_PATIENCE_S:.0f} s: {what}") from None


@dataclass(eq=False)
class Server:
    """One server process, with its data in `folder`. Started by `start`, which returns once it answers and has loaded its data."""

    folder: Path
    port: int
    options: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    async def ask(self, *command: Any) -> Any:
        """Straight to this server over a connection of its own; while it does not answer, again and again."""
        retry = Retry(ConstantBackoff(_LOOK_S), int(_PATIENCE_S / _LOOK_S))
        client = redis.Redis(host="127.0.0.1", port=self.port, retry=retry, protocol=2)
        try:
            return await client.execute_command(*command)
        finally:
            await client.aclose()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        defaults = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
            "logfile": str(self.folder / "server.log"),
        }
        await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
        argv = [str(server_binary())]
        for key, value in (defaults | dict(self.options)).items():
            argv += [f"--{key}", value]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await self.ask("PING")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def write_out(self) -> None:
        """What it has acknowledged is in the append-only file, and nothing more is acknowledged: for a server that is killed next. With `everysec` it keeps
        writes in memory for as long as the disk is busy, two seconds at most.
        """
        await self.ask("CLIENT PAUSE", 1000 * int(_PATIENCE_S), "WRITE")

        async def empty() -> bool:
            return (await self.ask("INFO", "persistence"))["aof_buffer_length"] == 0

        await until(empty, "the append-only file has everything")

    async def stop(self, number: int = signal.SIGKILL) -> None:
        """Send the signal and return once the process is gone."""
        if self.process is not None:
            if self.process.poll() is None:
                self.send(number)
            await asyncio.to_thread(self.process.wait, _PATIENCE_S)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP while the context is open: its sockets stay open and say nothing."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)


class Cluster:
    """Nodes of one cluster; the first `masters` of them began as such."""

    def __init__(self, nodes: Sequence[Server], masters: int) -> None:
        self.nodes = list(nodes)
        self.masters = self.nodes[:masters]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def live(self) -> list[Server]:
        return [node for node in self.nodes if node.running]

    async def owner(self, key: str) -> Server:
        """The node that takes writes of `key` now, by what a live node thinks."""
        slot = key_slot(key.encode())
        for low, high, master, *_ in await self.live()[0].ask("CLUSTER SLOTS"):
            if low <= slot <= high:
                return next(node for node in self.nodes if node.port == master[1])
        raise LookupError(f"nobody serves slot {slot}")

    async def settled(self) -> None:
        """Every live node says that all slots are served, and agrees by whom."""

        async def agree() -> bool:
            views = set()
            for node in self.live():
                if (await node.ask("CLUSTER INFO"))["cluster_state"] != "ok":
                    return False
                views.add(str([row[:3] for row in sorted(await node.ask("CLUSTER SLOTS"))]))
            return len(views) == 1

        await until(agree, "the nodes agree")

    async def replicas_follow(self, master: Server) -> None:
        """Every live replica of `master` has all it wrote until now."""

        goal = (await master.ask("INFO", "replication"))["master_repl_offset"]

        async def even() -> bool:
            told = await master.ask("INFO", "replication")
            links = [told[f"slave{i}"] for i in range(told["connected_slaves"])]
            mine = [node for node in self.live() if node.port in {link["port"] for link in links}]
            up = [(await node.ask("INFO", "replication")).get("master_link_status") == "up" for node in mine]
            return bool(links) and all(up) and all(link["state"] == "online" and link["offset"] >= goal for link in links)

        await until(even, "its replicas have all of it")

    @contextlib.asynccontextmanager
    async def impatient(self) -> AsyncIterator[None]:
        """While the context is open a dead node is soon given up, and its replica takes over."""
        live = self.live()
        for node in live:
            await node.ask("CONFIG SET", "cluster-node-timeout", _DEAD_TIMEOUT_MS)
        try:
            yield
        finally:
            for node in live:
                await node.ask("CONFIG SET", "cluster-node-timeout", _NODE_TIMEOUT_MS)

    async def node_id(self, node: Server) -> str:
        return (await node.ask("CLUSTER MYID")).decode()

    async def begin_move(self, slot: int, source: Server, target: Server) -> None:
        """Begin to move a slot: from now on the source answers ASK for what it no longer has."""
        await target.ask("CLUSTER SETSLOT", slot, "IMPORTING", await self.node_id(source))
        await source.ask("CLUSTER SETSLOT", slot, "MIGRATING", await self.node_id(target))

    async def move_keys(self, slot: int, source: Server, target: Server) -> int:
        """Move what the slot holds now; the number of keys."""
        moved = 0
        while found := await source.ask("CLUSTER GETKEYSINSLOT", slot, 100):
            await source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", *found)
            moved += len(found)
        return moved

    async def end_move(self, slot: int, target: Server) -> None:
        """The slot is the target's: everybody else answers MOVED."""
        name = await self.node_id(target)
        for node in [target, *(node for node in self.live() if node is not target)]:
            with contextlib.suppress(redis.ResponseError):  # a replica is told by its master
                await node.ask("CLUSTER SETSLOT", slot, "NODE", name)

    async def move(self, slot: int, source: Server, target: Server) -> None:
        """Move a slot whole."""
        await self.begin_move(slot, source, target)
        await self.move_keys(slot, source, target)
        await self.end_move(slot, target)

    async def replicate(self, replica: Server, master: Server) -> None:
        """Make a node the replica of another; return once it has everything."""
        name = await self.node_id(master)

        async def told() -> bool:
            try:
                await replica.ask("CLUSTER REPLICATE", name)
            except redis.ResponseError:  # it has not heard of that node yet
                return False
            return True

        await until(told, "a replica knows its master")
        await self.replicas_follow(master)

    async def close(self) -> None:
        for node in self.nodes:
            if node.running:
                node.send(signal.SIGCONT)
            await node.stop()


async def start_cluster(folder: Path, *, masters: int = 3, replicas: Sequence[int] = (), options: Mapping[str, str] | None = None) -> Cluster:
    """A cluster of `masters`, which share the slots evenly, and a replica for each master that `replicas` names by number. Close it."""
    ports = free_ports(masters + len(replicas), shift=10_000)
    wanted = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": str(_NODE_TIMEOUT_MS),
        "cluster-replica-validity-factor": "0",
        "cluster-allow-replica-migration": "no",
        "repl-diskless-sync-delay": "0",
        **(options or {}),
    }
    made = Cluster([Server(folder / f"node-{i}", port, wanted) for i, port in enumerate(ports)], masters)
    try:
        await asyncio.gather(*(node.start() for node in made.nodes))
        share = -(-REDIS_CLUSTER_HASH_SLOTS // masters)
        for i, node in enumerate(made.masters):
            await node.ask("CLUSTER SET-CONFIG-EPOCH", i + 1)
            await node.ask("CLUSTER ADDSLOTSRANGE", i * share, min(REDIS_CLUSTER_HASH_SLOTS, (i + 1) * share) - 1)
        for node in made.nodes[1:]:
            await node.ask("CLUSTER MEET", "127.0.0.1", made.nodes[0].port)
        await made.settled()
        for replica, number in zip(made.nodes[masters:], replicas, strict=True):
            await made.replicate(replica, made.masters[number])
        await made.settled()
    except BaseException:
        await made.close()
        raise
    return made


@contextlib.asynccontextmanager
async def cluster(folder: Path, *, masters: int = 3, replicas: Sequence[int] = (), options: Mapping[str, str] | None = None) -> AsyncIterator[Cluster]:
    """As `start_cluster`, while the context is open."""
    made = await start_cluster(folder, masters=masters, replicas=replicas, options=options)
    try:
        yield made
    finally:
        await made.close()
