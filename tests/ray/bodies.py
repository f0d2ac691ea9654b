"""Daemons whose bodies do what a test needs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from producer.ray_actor import DaemonActor, EngineActor
from protocol.errors import ConfigError


class Blocking(DaemonActor):
    """Its body holds its loop up for a long time, again and again."""

    async def body(self, _path: str, stop: asyncio.Event) -> None:
        while not stop.is_set():
            time.sleep(1.0)
            await asyncio.sleep(0)


class Failing(DaemonActor):
    """Fails twice, then ends in good order; the tally is a file."""

    async def body(self, path: str, _stop: asyncio.Event) -> None:
        tally = Path(Path(path).read_text())
        lives = len(tally.read_text()) if tally.exists() else 0
        tally.write_text("x" * (lives + 1))
        if lives < 2:
            raise RuntimeError("not yet")


class Refusing(DaemonActor):
    async def body(self, _path: str, _stop: asyncio.Event) -> None:
        raise ConfigError("model.path: no such folder")


class Wide(EngineActor):
    """Has the GPUs of an engine, and no engine."""

    async def body(self, _path: str, stop: asyncio.Event) -> None:
        await stop.wait()


class Hopeless(DaemonActor):
    """Fails in each of its lives."""

    max_failures = 1

    async def body(self, _path: str, _stop: asyncio.Event) -> None:
        raise RuntimeError("no such device")


class Stubborn(DaemonActor):
    """Does not hear that it is to stop."""

    async def body(self, _path: str, _stop: asyncio.Event) -> None:
        await asyncio.Event().wait()


class Brief(DaemonActor):
    """Has ended as soon as it has begun, and leaves at once."""

    linger_s = 0.5

    async def body(self, _path: str, _stop: asyncio.Event) -> None:
        return
