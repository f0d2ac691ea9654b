"""A run at maxmemory drains only while its engines live and take versions (rule L1)."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from deploy.redis_server import redis_server
from protocol.connection import connect
from protocol.keys import Keys
from protocol.messages import EngineState
from protocol.versions import Version
from protocol.wakeups import wakeups
from weightsync.store import DirectoryStore

from .conftest import Rig

pytestmark = pytest.mark.redis


async def test_at_maxmemory_versions_are_published_and_engines_live_and_take_them(tmp_path: Path, store: DirectoryStore) -> None:
    keys = Keys("full")
    async with redis_server(tmp_path / "redis") as url, aiohttp.ClientSession() as session:
        client = connect(url, deadline_s=60.0)
        async with wakeups(client, keys) as wakes:
            rig = Rig(client, keys, store, wakes, session)
            await rig.attach(1, 9)
            await client.config_set("maxmemory", 1)
            manifests = [store.write(rig.snapshot(1, n)) for n in range(3)]
            await rig.channel.publish(manifests[0], 1)
            assert await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
            claim = rig.channel.claim("e0", "b1")
            assert (await claim.look(None)).newest == Version(1, 0)
            assert await claim.pause(Version(1, 0), most=1, valid_s=60, idle=False)
            await claim.resumed()
            assert await rig.registry.ack("e0", "b1", Version(1, 0), reconciler=claim.owner)
            assert await rig.registry.mark_unfit("e0", "b1", "why")
            await rig.registry.prepare_failed("e0", Version(1, 0), "why")
            assert [engine.state for engine in await rig.registry.engines()] == [EngineState.UNFIT]
            for manifest in manifests[1:]:
                await rig.channel.publish(manifest, 1)
            assert await rig.channel.newest_version() == Version(1, 2)
            assert await rig.channel.collect(store, keep=1) == (Version(1, 1),)
            await claim.release()
            await rig.registry.leave("e0", "b1")
        await client.aclose()
