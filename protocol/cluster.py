"""A client that is the same for a server and for a Redis Cluster.

redis-py has a client for clusters, `RedisCluster`. It is not used: it sends ASKING and the command that follows over two connections, so that commands fail
while a slot moves (14 of 50 concurrent GETs, redis-py 8.1); it retries by number and not by time; and where its connections are busy it fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.client import Pipeline, PubSub
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.retry import CONNECTION_FAULTS, backoff_s, refused
from protocol.slots import SPLIT, Address, SlotMap, read_map, slot_of, slot_of_key

_TELL_S = 2.0
"""A node that does not tell the slots within this is passed over."""
_REDIRECTS = 5
"""So many answers "it is elsewhere" in a row are followed at once, later ones after a pause."""
_BATCH = 500
T = TypeVar("T")


class Client(redis.Redis):
    """Commands to the server at one address or, if that belongs to a cluster, each to the node that serves its key.

    Which of the two, the server is asked before the first command. In a cluster MOVED, ASK, TRYAGAIN, a node that is gone and a failover are lived through
    until the deadline of the command, the connections of each node being made anew; then it is a connection error. Commands of `slots.SPLIT` may name keys of
    many nodes. A command that asks one node for itself (SCAN, WAIT) is refused; `scan_iter` walks them all, `members()` has them one by one.
    """

    def __init__(
        self, pool: redis.ConnectionPool, *, node_pool: Callable[[Address], redis.ConnectionPool], host: str, deadline_s: float, attempt_s: float
    ) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._node_pool = node_pool
        self._host = host
        self._deadline_s = deadline_s
        self._attempt_s = attempt_s
        self._clustered: bool | None = None
        self._map = SlotMap(owners=[], masters=(), replicas=())
        self._stale = True
        self._learning = asyncio.Lock()
        self._nodes: dict[Address, redis.Redis] = {}
        self._turn = random.randrange(1 << 16)

    async def is_cluster(self) -> bool:
        """Whether the server is a node of a cluster. It is asked once."""
        if self._clustered is None:
            try:
                told = await self._here("INFO", "cluster")
            except ResponseError:  # this user may not ask: `check_server` tells
                told = {}
            self._clustered = bool(told.get("cluster_enabled", 0))
        return self._clustered

    async def members(self) -> tuple[tuple[redis.Redis, ...], tuple[redis.Redis, ...]]:
        """A client of each master and of each replica; of a server that is none of a cluster, this one. Those of nodes do not try again."""
        if not await self.is_cluster():
            return (self,), ()
        await self._patiently(self._learn)
        return tuple(map(self._node, self._map.masters)), tuple(map(self._node, self._map.replicas))

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if not await self.is_cluster():
            return await self._here(*args, **options)
        name = str(args[0]).upper()
        if name in SPLIT:
            return await self._split(name, args[1:])
        return await self._routed(args, options)

    async def _here(self, *args: Any, **options: Any) -> Any:
        """The command to the server of the URL."""
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call, unused-ignore]

    async def on_owner(self, key: str, *commands: Sequence[Any]) -> list[Any]:
        """The replies to `commands`, over one connection to the server of `key`: for those that mean their connection, such as WAIT. Not tried again where a
        slot moves.
        """
        if not await self.is_cluster():
            return await self._together(self, commands)
        return await self._patiently(lambda: self._on_owner(slot_of_key(key), commands))

    async def scan_iter(self, *args: Any, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override, unused-ignore]
        """Keys of every master. One that moves meanwhile may be missed or told twice."""
        if not await self.is_cluster():
            async for key in super().scan_iter(*args, **options):
                yield key
            return
        for node in (await self.members())[0]:
            async for key in node.scan_iter(*args, **options):
                yield key

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Of a server that is none of a cluster."""
        if self._clustered:
            raise RedisError("a pipeline goes to a single node, and this server is a cluster: send the commands one by one, or `on_owner`")
        return super().pipeline(transaction, shard_hint)

    def pubsub(self, **options: Any) -> PubSub:
        """A subscription through one node, each time the next: the nodes of a cluster pass on what is published on any."""
        if not self._map.masters:
            return super().pubsub(**options)
        self._turn += 1
        addresses = sorted(self._map.addresses)
        return self._node(addresses[self._turn % len(addresses)]).pubsub(**options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        self._stale = True
        for node in nodes:
            await node.aclose()
        await super().aclose(close_connection_pool)

    # one command --------------------------------------------------------------------------------------------------------------

    async def _routed(self, args: Sequence[Any], options: dict[str, Any]) -> Any:
        slot = slot_of(args)
        return await self._patiently(lambda: self._once(slot, args, options))

    async def _patiently(self, do: Callable[[], Awaitable[T]]) -> T:
        """`do()` until it succeeds, whatever a cluster may answer while it changes."""
        clock = asyncio.get_running_loop().time
        until, failures, redirects = clock() + self._deadline_s, 0, 0
        while True:
            try:
                async with asyncio.timeout(self._attempt_s):
                    return await do()
            except MovedError as problem:
                self._map.move(problem.slot_id, (problem.host or self._host, problem.port))
                self._stale = True
                redirects += 1
                failure: Exception = problem
                if redirects <= _REDIRECTS:
                    continue
            except TryAgainError as problem:
                failure = problem
            except TimeoutError:
                self._stale = True
                failure = RedisTimeoutError(f"no reply within {self._attempt_s:g} s")
            except (*CONNECTION_FAULTS, ClusterDownError) as problem:
                if refused(problem):
                    raise
                self._stale = True
                failure = problem
            left_s = until - clock()
            if left_s <= 0:
                raise RedisConnectionError(f"the cluster: {failure}") from failure
            failures += 1
            await asyncio.sleep(min(left_s, backoff_s(failures)))

    async def _once(self, slot: int | None, args: Sequence[Any], options: dict[str, Any]) -> Any:
        node = await self._server(slot)
        try:
            return await node.execute_command(*args, **options)  # type: ignore[no-untyped-call, unused-ignore]
        except MovedError:
            raise
        except AskError as elsewhere:
            return await self._ask(elsewhere, args, options)

    async def _ask(self, elsewhere: AskError, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """This once at the node that takes the slot over: ASKING holds for the next command of the same connection."""
        node = self._node((elsewhere.host or self._host, elsewhere.port))
        async with node.pipeline(transaction=False) as pipe:
            pipe.execute_command("ASKING")
            pipe.execute_command(*args, **options)
            _, reply = await pipe.execute(raise_on_error=False)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _on_owner(self, slot: int, commands: Sequence[Sequence[Any]]) -> list[Any]:
        return await self._together(await self._server(slot), commands)

    @staticmethod
    async def _together(node: redis.Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
        async with node.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    # many keys ----------------------------------------------------------------------------------------------------------------

    async def _split(self, name: str, keys: Sequence[str | bytes]) -> Any:
        """Each node is asked for its keys in one go, all nodes at once; a key that could not be had so is asked for alone."""
        one = "GET" if name == "MGET" else name
        if self._stale:
            await self._patiently(self._learn)
        shares: dict[Address | None, list[int]] = {}
        for i, key in enumerate(keys):
            shares.setdefault(self._map.owners[slot_of_key(key)], []).append(i)
        batches = [(owner, share[at : at + _BATCH]) for owner, share in shares.items() for at in range(0, len(share), _BATCH)]
        replies: list[Any] = [None] * len(keys)
        try:
            async with asyncio.TaskGroup() as tasks:
                for owner, batch in batches:
                    tasks.create_task(self._share(owner, one, keys, batch, replies), name="redis:share")
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        return replies if name == "MGET" else sum(replies)

    async def _share(self, owner: Address | None, name: str, keys: Sequence[str | bytes], batch: Sequence[int], replies: list[Any]) -> None:
        found: Sequence[Any] = [RedisError("nobody serves it")] * len(batch)
        if owner is not None:
            try:
                async with asyncio.timeout(self._attempt_s), self._node(owner).pipeline(transaction=False) as pipe:
                    for i in batch:
                        pipe.execute_command(name, keys[i])
                    found = await pipe.execute(raise_on_error=False)
            except (TimeoutError, *CONNECTION_FAULTS) as problem:
                if refused(problem):
                    raise
                self._stale = True
        for i, reply in zip(batch, found, strict=True):
            replies[i] = await self._routed((name, keys[i]), {}) if isinstance(reply, Exception) else reply

    # the nodes ----------------------------------------------------------------------------------------------------------------

    def _node(self, address: Address) -> redis.Redis:
        if address not in self._nodes:
            self._nodes[address] = redis.Redis.from_pool(self._node_pool(address))
        return self._nodes[address]

    async def _server(self, slot: int | None) -> redis.Redis:
        """The node that serves the slot, by the newest map there is."""
        if self._stale:
            await self._learn()
        owner = random.choice(self._map.masters) if slot is None else self._map.owners[slot]
        if owner is None:
            self._stale = True
            raise ClusterDownError(f"nobody serves slot {slot}")
        return self._node(owner)

    async def _learn(self) -> None:
        """Ask nodes for the map until one tells it whole; where none does, the fullest. Raises: `RedisConnectionError` if nobody answers."""
        async with self._learning:
            if not self._stale:
                return
            known = list(dict.fromkeys(self._map.addresses))
            random.shuffle(known)
            best: SlotMap | None = None
            failure: BaseException | None = None
            for address in (*known, None):
                host = self._host if address is None else address[0]
                try:
                    async with asyncio.timeout(_TELL_S):
                        ask = self._here if address is None else self._node(address).execute_command
                        told = read_map(await ask("CLUSTER SLOTS"), host)
                except (TimeoutError, *CONNECTION_FAULTS, ClusterDownError) as problem:
                    if refused(problem):
                        raise
                    failure = problem
                    continue
                if told.masters and (best is None or told.owners.count(None) < best.owners.count(None)):
                    best = told
                if best is not None and None not in best.owners:
                    break
            if best is None:
                raise RedisConnectionError(f"no node of the cluster tells who serves what ({failure})") from failure
            self._map, self._stale = best, None in best.owners
            for address, node in list(self._nodes.items()):
                if address not in best.addresses:
                    await node.connection_pool.disconnect(inuse_connections=False)
