"""Control of an engine whose versions are adapters, as the reconciler asks for it: nothing ever stands still, and nothing is ever half there.

The engine goes by the name of its base weights whatever adapters it has, so what it serves is what adapter may be asked for, and a token that it wrote.
"""

from __future__ import annotations

import dataclasses

from protocol.errors import ApplyFailed, DecodeError
from protocol.versions import Version
from weightsync.control import CALL_S, EngineControl
from weightsync.dialect import Dialect
from weightsync.lora import name_of


class AdapterControl(EngineControl):
    """See `EngineControl`. Requests under way end on the adapter they began with: no update reaches them, so none pauses, aborts or flushes."""

    stands_still = False
    prefix = ""
    """What the names of the run's adapters begin with."""
    serving: Version | None = None
    """What was loaded last."""
    _base: str | None = None
    """What the engine's own weights are called."""

    async def pause(self, mode: str, *, deadline_s: float = CALL_S) -> None:
        """Nothing to wait for."""

    async def resume(self, *, deadline_s: float = CALL_S) -> None:
        """Nothing stands still."""

    async def close_session(self, *, deadline_s: float = CALL_S) -> None:
        """None is ever open."""

    async def abort_all(self, *, deadline_s: float = CALL_S) -> None:
        """Whatever fails, requests under way are sound."""

    async def flush_cache(self, *, deadline_s: float = CALL_S, patience_s: float = 0.0) -> bool:  # noqa: ARG002 - as `EngineControl` has it
        """Keys and values are kept apart by adapter."""
        return True

    async def dialect(self, *, deadline_s: float = CALL_S) -> Dialect:
        found = await super().dialect(deadline_s=deadline_s)
        return dataclasses.replace(found, prefix_cache=False, overlap=False, spans=True)

    async def check_base(self, *, deadline_s: float) -> None:
        """Return if the engine's own weights are those it was started with.

        Raises: `ApplyFailed`: somebody gave it others, which the adapter does not belong to.
        """
        named = str((await self.model_info(deadline_s=deadline_s)).get("weight_version", ""))
        if _is_version(named) or (self._base is not None and named != self._base):
            before = "the model it was started with" if self._base is None else self._base
            raise ApplyFailed(f"{self.url} holds the weights {named}, and adapters are of {before}: start it again")
        self._base = named

    async def weight_version(self, *, deadline_s: float = CALL_S) -> str:
        """The version whose adapter may be asked for."""
        if self.serving is None or name_of(self.prefix, self.serving) not in await self.adapters(deadline_s=deadline_s):
            return f"without {self.serving}"
        await self.check_base(deadline_s=deadline_s)
        return str(self.serving)

    async def probe(self, *, deadline_s: float, adapter: str = "") -> tuple[str, ...]:
        """One token by the adapter that was loaded last: its version, as the engine refuses what it does not have."""
        if self.serving is None:
            return await super().probe(deadline_s=deadline_s, adapter=adapter)
        await super().probe(deadline_s=deadline_s, adapter=adapter or name_of(self.prefix, self.serving))
        return (str(self.serving),)


def _is_version(named: str) -> bool:
    try:
        Version.parse(named)
    except DecodeError:
        return False
    return True
