"""How many producers and engines a run is to have: who is added and who leaves, pure; and what `rollstream scale` and a running `up` say to each other.

scale ──wish, numbered──► Redis ──wake-up──► up ──starts, or has leave──► processes
  ▲                                          │
  └──────────── LauncherStatus ◄─────────────┘     wanted, running, leaving, the number it knows of
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.config import LAST_PORT
from producer.engine.config import EngineConfig
from protocol.connection import Client, Script, asking
from protocol.keys import Keys

LAUNCHER = "launcher"
"""Under which role an `up` announces itself."""
ROLES: Mapping[str, str] = {"producers": "producer", "engines": "engine"}
"""What the command calls those whose number may change → their role."""
_NUMBER = "number"
_WISH = Script("deploy", "lua/wish.lua", flags="allow-oom")


@dataclass(frozen=True, slots=True)
class Change:
    """Indices, ascending."""

    added: tuple[int, ...]
    gone: tuple[int, ...]


def change_to(count: int, *, there: Collection[int], reserved: Collection[int] = ()) -> Change:
    """What makes `count` of those that are there: the highest leave, the lowest free ones come. `reserved` are others', counted by nobody and free for nobody.

    >>> change_to(4, there=[0, 2], reserved=[3])
    Change(added=(1, 4), gone=())
    >>> change_to(1, there=[0, 1, 4], reserved=[3])
    Change(added=(), gone=(1, 4))
    """
    mine = sorted(set(there) - set(reserved))
    taken = {*mine, *reserved}
    free = (index for index in range(len(taken) + count) if index not in taken)
    return Change(added=tuple(index for index, _ in zip(free, range(count - len(mine)), strict=False)), gone=tuple(mine[count:]))


def refuses(engine: EngineConfig, index: int) -> str:
    """Why there cannot be an engine of this index too, and what to do; empty: there can."""
    if engine.kind == "external" and index >= len(engine.urls):
        return f"engine.urls has {len(engine.urls)}, and engine-{index} needs one of its own: add it"
    if engine.port and engine.port + index > LAST_PORT:
        return f"engine.port {engine.port} leaves no port for engine-{index}: lower it, or use 0 for free ports"
    return ""


async def wish(client: Client, keys: Keys, role: str, count: int) -> int:
    """Wish for so many; the number of the wish. Raises: `RedisUnavailable`."""
    return int(await _WISH(client, keys=[keys.wishes, keys.wakeups], args=[role, count]))


async def wishes(client: Client, keys: Keys) -> tuple[int, dict[str, int]]:
    """The number of the newest wish, 0 if there is none; and how many of each role were wished for last. Raises: `RedisUnavailable`."""
    with asking("wishes"):
        raw: dict[Any, Any] = await client.hgetall(keys.wishes)
    found = {name.decode(): int(value) for name, value in raw.items()}
    return found.pop(_NUMBER, 0), found


async def forget(client: Client, keys: Keys) -> None:
    """Whoever starts begins with what its configuration says. Raises: `RedisUnavailable`."""
    with asking("wishes"):
        await client.delete(keys.wishes)
