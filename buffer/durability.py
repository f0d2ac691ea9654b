"""Waiting until Redis would not forget: after an attachment, a checkpoint or a re-assertion (rule R1).

    mark (a write after all others) ──► WAITAOF 1 0 (on this server's disk) ──► WAIT n (with n replicas)

All three go over one connection, since a server counts what *this* connection wrote; the mark comes after everything acknowledged before, whoever wrote it.
A miss is logged and no error: the run goes on, for a trainer that finds the loss re-asserts it.
"""

from __future__ import annotations

import logging
import secrets

from protocol.connection import Client, Script, ServerFacts, asking
from protocol.keys import Keys

_LOG = logging.getLogger(__name__)
_MARK = Script("buffer", "lua/mark.lua", flags="allow-oom")
_WAIT_S = 4.8
"""For disk and replicas together: under the least an attempt at a command may take. With `everysec` a disk that keeps up needs one or two."""
_WAITAOF_SINCE = (7, 2)


class Durability:
    """`await durability("checkpoint 40")`. `replicas`: how many must have it in memory. On a cluster it speaks of the node that holds the run's small state;
    payloads lie on others.
    """

    def __init__(self, client: Client, keys: Keys, facts: ServerFacts, *, replicas: int = 0) -> None:
        self._client, self._state = client, keys.state
        version = tuple(int(part) for part in facts.version.split(".")[:2])
        self._disk = facts.appendonly and facts.appendfsync != "no" and version >= _WAITAOF_SINCE
        self._replicas = replicas

    async def __call__(self, what: str) -> bool:
        """Whether `what`, which was acknowledged just now, is as durable as was asked. Raises: `RedisUnavailable`."""
        if not (self._disk or self._replicas):
            return True
        limit_ms = int(_WAIT_S * 1000) // (self._disk + bool(self._replicas))
        waits: list[list[str | int]] = []
        if self._disk:
            waits.append(["WAITAOF", 1, 0, limit_ms])
        if self._replicas:
            waits.append(["WAIT", self._replicas, limit_ms])
        with asking("durability"):
            _, *replies = await self._client.on_owner(self._state, ["EVAL", _MARK.source, 1, self._state, secrets.token_hex(4)], *waits)
        on_disk = not self._disk or replies[0][0] >= 1
        copies = replies[-1] if self._replicas else 0
        if not on_disk:
            _LOG.warning("%s is not on the disk of Redis after %.1f s: a crash of the server may lose it; look at its disk", what, _WAIT_S)
        if copies < self._replicas:
            _LOG.warning(
                "%s is with %d replicas after %.1f s, redis.replicas_acked asks for %d: a failover may lose it; start replicas, or lower the setting",
                *(what, copies, _WAIT_S, self._replicas),
            )
        return on_disk and copies >= self._replicas
