"""Which version an engine goes for: the newest, or, in the fleet that evaluates, the one it is asked for.

    evaluator: hold(version) ──► ask(version) ──► every engine of the fleet goes there and stays, whatever is published meanwhile ──► the next one is asked for

What is asked for stays asked for, so the fleet idles on the version it served last; an engine that starts goes there too, as long as the version is kept.
Whoever asks holds the version's files meanwhile (`weightsync.pointer.Pointer.holding`).
"""

from __future__ import annotations

from protocol.connection import Client, Script
from protocol.errors import VersionGone
from protocol.keys import Keys
from protocol.versions import Version
from weightsync.claim import FLAGS

EVAL_FLEET = "eval"
"""`EngineStatus.fleet` of the engines that take only what they are asked for."""
_ASK = Script("weightsync", "lua/aim.lua", flags=FLAGS)


class Aim:
    """What the evaluation fleet of a run is asked to serve."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def ask(self, version: Version) -> None:
        """Every engine of the fleet goes for `version` now; an engine that is past it, within an incarnation, never goes back and does not.

        Raises: `VersionGone` if it is not kept; `RedisUnavailable`.
        """
        answer = await _ASK(self._client, keys=[self._keys.eval_aim, self._keys.weights, self._keys.wakeups], args=[str(version)])
        if answer != b"OK":
            raise VersionGone(f"version {version} is collected: engines cannot be asked for it")
