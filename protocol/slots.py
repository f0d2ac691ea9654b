"""Which slot of a Redis Cluster a command belongs to, and which node serves it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

Address: TypeAlias = tuple[str, int]
"""Host and port of a node."""
SPLIT = frozenset({"MGET", "DEL", "UNLINK", "EXISTS", "TOUCH"})
"""Commands on many keys that mean the same when each key is asked for alone."""
_SCRIPTS = frozenset({"EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL", "FCALL_RO"})
_STREAMS = frozenset({"XREAD", "XREADGROUP"})
_ANY_NODE = frozenset({"PING", "ECHO", "TIME", "INFO", "CONFIG", "PUBLISH", "SCRIPT", "CLIENT", "CLUSTER", "ACL", "COMMAND"})
_ONE_NODE = frozenset({"SCAN", "KEYS", "DBSIZE", "RANDOMKEY", "FLUSHALL", "FLUSHDB", "WAIT", "WAITAOF", "MULTI", "WATCH"})


def slot_of(args: Sequence[Any]) -> int | None:
    """The slot of a command, by its first key: that the others share it is the server's to check. None: any node will do.

    >>> slot_of(["GET", "rs:{demo}:state"]) == slot_of(["EVALSHA", "digest", 2, "rs:{demo}:audit", "rs:{demo}:state"])
    True
    >>> slot_of(["PING"]) is None
    True

    Raises: `RedisError` for a command that would be answered by one node for itself alone.
    """
    name = str(args[0]).upper().split(" ", 1)[0]
    if name in _ANY_NODE:
        return None
    if name in _ONE_NODE:
        raise RedisError(f"{name} asks a single node, and this server is a cluster: ask each of `Client.members()`")
    where = 1
    if name in _SCRIPTS:
        if not int(args[2]):
            return None
        where = 3
    elif name in _STREAMS:
        where = next(i for i, word in enumerate(args) if str(word).upper() in ("STREAMS", "B'STREAMS'")) + 1
    return slot_of_key(args[where])


def slot_of_key(key: str | bytes) -> int:
    return key_slot(key.encode() if isinstance(key, str) else key)


@dataclass(slots=True, eq=False)
class SlotMap:
    """Who serves which slot, as one node of the cluster told it."""

    owners: list[Address | None]
    """By slot; None where nobody does, as in the middle of a failover."""
    masters: tuple[Address, ...]
    replicas: tuple[Address, ...]

    @property
    def addresses(self) -> tuple[Address, ...]:
        return (*self.masters, *self.replicas)

    def move(self, slot: int, owner: Address) -> None:
        """A node said that the slot is this one's now."""
        self.owners[slot] = owner
        if owner not in self.masters:
            self.masters = (*self.masters, owner)
            self.replicas = tuple(one for one in self.replicas if one != owner)


def read_map(reply: Sequence[Sequence[Any]], asked: str) -> SlotMap:
    """The reply to CLUSTER SLOTS. A node that does not know its own address is at the one that was `asked`."""
    owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    masters: dict[Address, None] = {}
    replicas: dict[Address, None] = {}
    for low, high, master, *others in reply:
        (owner,) = _addresses([master], asked)
        masters[owner] = None
        owners[low : high + 1] = [owner] * (high + 1 - low)
        replicas |= dict.fromkeys(_addresses(others, asked))
    return SlotMap(owners=owners, masters=tuple(masters), replicas=tuple(replicas))


def _addresses(nodes: Sequence[Sequence[Any]], asked: str) -> Iterator[Address]:
    for host, port, *_ in nodes:
        name = host.decode() if isinstance(host, bytes) else host
        yield (name or asked, int(port))
