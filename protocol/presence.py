"""Who is here: producers and trainers announce themselves with a status that expires unless it is renewed."""

from __future__ import annotations

from typing import Generic, TypeVar

from protocol.codec import decode, encode
from protocol.connection import Client, Script
from protocol.keys import Keys

Status = TypeVar("Status")
TTL_S = 10.0
"""A member that has not renewed for this long is gone; renew about four times as often."""
_BEAT = Script("protocol", "lua/presence_beat.lua")
_LIST = Script("protocol", "lua/presence_list.lua")


class Presence(Generic[Status]):
    """The members of one role of one run, for example `Presence(client, keys, "producer", ProducerStatus)`."""

    def __init__(self, client: Client, keys: Keys, role: str, status_type: type[Status]) -> None:
        self._client = client
        self._keys = [keys.presence(role), keys.presence_deadline(role)]
        self._status_type = status_type

    async def beat(self, member: str, status: Status, *, ttl_s: float = TTL_S) -> None:
        """Announce or renew."""
        await _BEAT(self._client, keys=self._keys, args=[member, encode(status), max(1, int(ttl_s * 1000))])

    async def leave(self, member: str) -> None:
        await _BEAT(self._client, keys=self._keys, args=[member, b"", 0])

    async def members(self) -> list[Status]:
        """Everyone who is here now."""
        return [decode(self._status_type, raw) for raw in await _LIST(self._client, keys=self._keys)]
