"""A relay has the newest version whole on its machine soon after it is published, says so, and goes in good order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.relay import ROLE, RelayConfig, run_relay
from protocol.audit import event
from protocol.config import RedisConfig, RunConfig
from protocol.errors import ConfigError
from protocol.messages import Event, RelayStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.safetensors_file import open_model
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import VersionStore, open_store


def weights(n: int) -> Snapshot:
    """Each differs from the one before in one element."""
    content = bytearray(4000)
    for one in range(n):
        content[4 * one] = 1
    return Snapshot(version=Version(1, n), tensors={"w": TensorBytes(dtype="F32", shape=(1000,), data=bytes(content))})


class Stage:
    def __init__(self, redis: Any, keys: Any, redis_url: str, tmp_path: Path, store: str) -> None:
        self.redis, self.keys = redis, keys
        run = RunConfig(name=keys.run, dir=str(tmp_path / "run"))
        self.config = RelayConfig(run=run, redis=RedisConfig(url=redis_url), weights=WeightsConfig(store=store, relay=str(tmp_path), keep=1))
        self.channel = Channel(redis, keys)
        self.store: VersionStore = open_store(self.config.weights, run)
        self.folder = relay_folder(self.config.weights, run)
        self._presence = Presence(redis, keys, ROLE, RelayStatus)

    async def publish(self, n: int, *, on: int | None = None) -> None:
        await self.redis.hset(self.keys.state, mapping={"incarnation": 1, "trained": n})
        if on is None:
            manifest = await asyncio.to_thread(self.store.write, weights(n))
        else:
            manifest = await asyncio.to_thread(self.store.write_delta, weights(n), self.store.manifest(Version(1, on)), weights(on).tensors)
        await self.channel.publish(manifest, 1)

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[asyncio.Event]:
        stop = asyncio.Event()
        task = asyncio.create_task(run_relay(self.config, stop), name="test:relay")
        try:
            yield stop
        finally:
            stop.set()
            await task

    async def until(self, condition: Callable[[RelayStatus], bool]) -> RelayStatus:
        async with asyncio.timeout(100):
            while True:
                for status in await self._presence.members():
                    if condition(status):
                        return status
                await asyncio.sleep(0.01)

    async def has(self, n: int) -> RelayStatus:
        status = await self.until(lambda one: one.version == Version(1, n))
        with open_model(self.folder / f"v1-{n}") as tensors:
            assert bytes(tensors["w"].data) == weights(n).tensors["w"].data
        return status

    async def events(self) -> list[Event]:
        return [event(entry, fields) for entry, fields in await self.redis.xrange(self.keys.audit)]

    async def members(self) -> list[RelayStatus]:
        return await self._presence.members()


@pytest.fixture(params=["folder", "url"])
def stage(request: pytest.FixtureRequest, redis: Any, keys: Any, redis_url: str, tmp_path: Path) -> Stage:
    return Stage(redis, keys, redis_url, tmp_path, str(tmp_path / "store") if request.param == "folder" else f"memory://{keys.run}/weights")


async def test_it_follows_the_pointer_over_whole_versions_and_deltas_and_leaves_in_good_order(stage: Stage):
    await stage.publish(0)
    async with stage.relay() as stop:
        first = await stage.has(0)
        assert (first.fulls, first.deltas, first.folder) == (1, 0, str(stage.folder))
        await stage.publish(1, on=0)
        await stage.has(1)
        await stage.publish(2, on=1)
        last = await stage.has(2)
        assert (last.fulls, last.deltas) == (1, 2)
        assert last.fetched_bytes < 1.5 * 4000
        await stage.until(lambda _: {path.name for path in stage.folder.glob("v*")} == {"v1-2"})
        async with asyncio.timeout(100):
            while len(await stage.redis.hgetall(stage.keys.weight_pins)) != 1:  # what it copied is held no longer, only what is newest
                await asyncio.sleep(0.01)
        stop.set()
    assert await stage.members() == []
    assert await stage.redis.hgetall(stage.keys.weight_pins) == {}


async def test_a_version_that_cannot_be_copied_does_not_end_it(stage: Stage):
    async with stage.relay():
        await stage.publish(0)
        await stage.has(0)
        await stage.redis.hset(stage.keys.state, mapping={"trained": 1})
        manifest = await asyncio.to_thread(stage.store.write_delta, weights(1), stage.store.manifest(Version(1, 0)), weights(0).tensors)
        await asyncio.to_thread(stage.store.delete, Version(1, 1))
        await stage.channel.publish(manifest, 1)
        await stage.publish(2)
        assert (await stage.has(2)).fulls == 2


async def test_a_folder_that_fills_up_is_told_with_its_reason_and_copied_to_again_when_there_is_room(stage: Stage, tiny_disk: Path):
    weights_ = stage.config.weights.model_copy(update={"relay": str(tiny_disk)})
    stage.config = stage.config.model_copy(update={"weights": weights_})
    stage.folder = relay_folder(weights_, stage.config.run)
    stage.folder.mkdir(mode=0o700)
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(192 << 10))
    async with stage.relay():
        await stage.publish(0)
        async with asyncio.timeout(100):
            while not (failed := [one for one in await stage.events() if one.op == "copy_failed"]):
                await asyncio.sleep(0.01)
        assert (failed[0].fields["version"], failed[0].fields["folder"]) == ("1:0", str(stage.folder))
        assert "No space left" in str(failed[0].fields["reason"])
        async with asyncio.timeout(100):
            while not (troubles := [one.trouble for one in await stage.members() if one.trouble]):
                await asyncio.sleep(0.01)
        assert troubles[0].startswith("version 1:0: ")
        assert "No space left" in troubles[0]
        filler.unlink()
        assert (await stage.has(0)).trouble == ""
        assert len([one for one in await stage.events() if one.op == "copy_failed"]) == 1


async def test_what_is_held_for_its_copy_is_not_collected_meanwhile(stage: Stage):
    await stage.publish(0)
    async with stage.relay():
        await stage.has(0)
        assert await stage.channel.pinned() == {Version(1, 0)}


async def test_a_folder_that_cannot_be_written_to_ends_it_at_once(tmp_path: Path, redis_url: str):
    (tmp_path / "file").touch()
    config = RelayConfig(run=RunConfig(name="r"), redis=RedisConfig(url=redis_url), weights=WeightsConfig(relay=str(tmp_path / "file")))
    async with asyncio.timeout(100):
        with pytest.raises(ConfigError, match=r"weights\.relay: nothing can be written to .*file/r-relay"):
            await run_relay(config, asyncio.Event())


async def test_without_an_address_it_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"redis\.url"):
        await run_relay(RelayConfig(run=RunConfig(name="r")), asyncio.Event())
