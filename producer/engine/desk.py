"""What a host lends to a life of its engine: connections, keys, and who is talking to the engine now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from weightsync.adapter_control import AdapterControl
from weightsync.control import EngineControl

_PAUSE, _RESUME = "/pause_generation", "/continue_generation"


class Desk:
    """One life's. The session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, *, api_key: str = "", admin_key: str = "") -> None:
        self.session = session
        self._api_key, self._admin_key = api_key, admin_key
        self.calls_open = 0
        """Calls of the reconciler that the engine has not answered yet."""
        self.paused = False
        """Told to pause, and not told to go on."""
        self.told: list[str] = []
        """The versions it was given in this life, and what its weights were called, in the order in which each was last told."""
        self.proven = ""
        """The newest of them that it has written a token with."""

    @property
    def busy_with_weights(self) -> bool:
        """The engine may write nothing now for a good reason. Every call has a deadline, so this comes to an end."""
        return self.paused or self.calls_open > 0

    @property
    def headers(self) -> dict[str, str]:
        """For what everybody may ask who has the key."""
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    def control(self, url: str) -> EngineControl:
        """To look at the engine; keeps no account."""
        return EngineControl(self.session, url, api_key=self._api_key, admin_key=self._admin_key)

    def reconciling(self, url: str, *, adapters: str = "") -> EngineControl:
        """For the reconciler: what it does is known here. `adapters`: what the names of versions begin with, where these are adapters."""
        if not adapters:
            return _Accounted(self, url, self._api_key, self._admin_key)
        control = _AccountedAdapters(self, url, self._api_key, self._admin_key)
        control.prefix = adapters
        return control


class _Accounted(EngineControl):
    def __init__(self, desk: Desk, url: str, api_key: str, admin_key: str) -> None:
        super().__init__(desk.session, url, api_key=api_key, admin_key=admin_key)
        self._desk = desk

    async def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, once: bool = False
    ) -> tuple[int, Mapping[str, Any]]:
        desk = self._desk
        version = (body or {}).get("weight_version", (body or {}).get("new_version"))
        if isinstance(version, str) and desk.told[-1:] != [version]:
            desk.told = [*(one for one in desk.told if one != version), version]
        if path == _PAUSE:
            desk.paused = True
        desk.calls_open += 1
        try:
            status, answer = await super()._answer(method, path, body, deadline_s, once=once)
        finally:
            desk.calls_open -= 1
        if path == _RESUME and status < 400:
            desk.paused = False
        wrote = answer.get("meta_info")
        if isinstance(wrote, dict) and wrote.get("weight_version") in desk.told:
            desk.proven = wrote["weight_version"]
        return status, answer


class _AccountedAdapters(_Accounted, AdapterControl):
    pass
