"""Who is here: producers and trainers announce themselves with a status that expires unless it is renewed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from protocol.codec import decode, encode
from protocol.connection import Client, Script, asking
from protocol.errors import WireError
from protocol.keys import Keys

_LOG = logging.getLogger(__name__)

Status = TypeVar("Status")
TTL_S = 10.0
"""A member that has not renewed for this long is gone; renew about four times as often."""
_BEAT = Script("protocol", "lua/presence_beat.lua", flags="allow-oom")
_LIST = Script("protocol", "lua/presence_list.lua", flags="allow-oom")


class Presence(Generic[Status]):
    """The members of one role of one run, for example `Presence(client, keys, "producer", ProducerStatus)`."""

    def __init__(self, client: Client, keys: Keys, role: str, status_type: type[Status]) -> None:
        self._client = client
        self._keys = [keys.presence(role), keys.presence_deadline(role), keys.presence_seen(role)]
        self._status_type = status_type

    async def beat(self, member: str, status: Status, *, ttl_s: float = TTL_S) -> None:
        """Announce or renew."""
        await _BEAT(self._client, keys=self._keys, args=[member, encode(status), max(1, int(ttl_s * 1000))])

    async def leave(self, member: str) -> None:
        await _BEAT(self._client, keys=self._keys, args=[member, b"", 0])

    async def members(self) -> list[Status]:
        """Everyone who is here now; but for who speaks another language."""
        return decode_known(self._status_type, await _LIST(self._client, keys=self._keys[:2]))

    async def last_seen(self) -> float | None:
        """Unix seconds by the clock of Redis: when any member announced itself, renewed or left last. None: there never was one."""
        with asking("presence"):
            raw = await self._client.get(self._keys[2])
        return None if raw is None else int(raw) / 1000


def decode_known(status_type: type[Status], frames: Sequence[bytes]) -> list[Status]:
    """The statuses that can be read. One that cannot (a newer schema, or not ours) must not stop those who only look around; it is told in the log."""
    found = []
    for raw in frames:
        try:
            found.append(decode(status_type, raw))
        except WireError as problem:
            _LOG.warning("passed over: %s", problem)
    return found
