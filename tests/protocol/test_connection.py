from __future__ import annotations

import asyncio
import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from deploy.redis_server import redis_server, server_command, wait_ready
from protocol import connection, retry
from protocol.audit import emit
from protocol.connection import Client, Script, ServerFacts, asking, check_server, connect
from protocol.errors import ConfigError, RedisUnavailable, RedisUnreachable, UnsafeRedis
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence

BEAT = Script("protocol", "lua/presence_beat.lua")


@contextlib.asynccontextmanager
async def client_of(url: str, *, deadline_s: float = 60.0) -> AsyncIterator[Client]:
    client = connect(url, deadline_s=deadline_s)
    try:
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def evicting_server(folder: Path) -> AsyncIterator[str]:
    command = server_command(folder, maxmemory_bytes=64 << 20)
    process = subprocess.Popen([*command.argv, "--maxmemory-policy", "allkeys-lru"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        await wait_ready(command.url)
        yield command.url
    finally:
        process.terminate()
        process.wait(60)


async def test_a_safe_server_tells_its_facts(redis: Client, redis_url: str) -> None:
    facts = await check_server(redis, url=redis_url)
    assert (facts.maxmemory_policy, facts.maxmemory_bytes, facts.appendonly, facts.cluster) == ("noeviction", 0, True, False)
    assert facts.durability == "up to a second of acknowledged writes may be lost"


@pytest.mark.parametrize(
    ("appendonly", "appendfsync", "cost"),
    [(False, "always", "memory only"), (True, "always", "every acknowledged write survives"), (True, "no", "operating system")],
)
def test_durability_is_told_for_people(appendonly: bool, appendfsync: str, cost: str) -> None:
    facts = ServerFacts(version="7.2", maxmemory_policy="noeviction", maxmemory_bytes=0, appendonly=appendonly, appendfsync=appendfsync, cluster=False)
    assert cost in facts.durability


async def test_a_server_that_may_evict_is_refused(tmp_path: Path) -> None:
    async with evicting_server(tmp_path) as url, client_of(url) as client:
        with pytest.raises(UnsafeRedis, match=r"redis.url unix://.* maxmemory-policy is allkeys-lru, .*; run `CONFIG SET maxmemory-policy noeviction`"):
            await check_server(client, url=url)


async def test_a_server_that_is_too_old_is_refused(redis: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MIN_REDIS", (99, 1))
    with pytest.raises(UnsafeRedis, match=r"is older than 99\.1; upgrade it"):
        await check_server(redis, url=redis_url)


async def test_a_wrong_password_is_a_configuration_error_at_once(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as url, client_of(url) as admin:
        await admin.config_set("requirepass", "secret")
        async with client_of(url, deadline_s=600.0) as client:
            with pytest.raises(ConfigError, match=r"redis.url unix://.*; correct the user and password") as caught:
                await check_server(client, url=url)
            assert not isinstance(caught.value, UnsafeRedis)


async def test_a_user_without_rights_is_told_which_commands_are_needed(redis: Client, redis_url: str) -> None:
    name = f"u-{uuid.uuid4().hex[:8]}"
    await redis.acl_setuser(name, enabled=True, passwords="+pw", keys=["*"], channels=["*"], categories=["+@all"], commands=["-config"])
    try:
        async with client_of(redis_url.replace("unix://", f"unix://{name}:pw@")) as client:
            with pytest.raises(UnsafeRedis, match=r"INFO or CONFIG GET was refused .*; allow both for this user"):
                await check_server(client, url=redis_url)
    finally:
        await redis.acl_deluser(name)


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1/0"])
async def test_nobody_there_at_the_start_is_an_error_of_configuration_once_the_deadline_has_passed(url: str) -> None:
    async with client_of(url, deadline_s=0.2) as client:
        with pytest.raises(RedisUnreachable, match=rf"redis.url {url}: no answer .*; start Redis there"):
            await check_server(client, url=url)


async def test_a_script_to_nobody_is_unavailable() -> None:
    async with client_of("unix:///nowhere/redis.sock", deadline_s=0.1) as client:
        with pytest.raises(RedisUnavailable, match=r"lua/presence_beat.lua: Redis did not answer in time"):
            await BEAT(client, keys=["a", "b"], args=["m", b"", 0])


async def test_a_server_that_accepts_and_never_answers_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(retry, "ATTEMPT_S", 0.1)
    over, handlers = asyncio.Event(), set[asyncio.Task[None] | None]()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        await over.wait()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"redis://127.0.0.1:{port}"
        async with client_of(url, deadline_s=0.1) as client:
            with pytest.raises(RedisUnreachable):
                await check_server(client, url=url)
        over.set()
        await asyncio.gather(*(handler for handler in handlers if handler is not None))


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://host:port"])
def test_an_address_of_another_kind_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect(url)


async def test_a_command_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    command = server_command(tmp_path)
    async with client_of(command.url, deadline_s=60.0) as client:
        async with redis_server(tmp_path, appendfsync="always"):
            await client.set("kept", "1")
        asked = asyncio.ensure_future(client.get("kept"))
        beaten = asyncio.create_task(BEAT(client, keys=["{a}s", "{a}d", "{a}l"], args=["m", b"x", 60_000]), name="test:beat")
        async with redis_server(tmp_path):
            assert await asked == b"1"
            assert await beaten == 1


async def test_a_script_is_sent_again_after_the_server_forgot_it(redis: Client, keys: Keys) -> None:
    beat = Script("protocol", "lua/presence_beat.lua")
    names = [keys.presence("r"), keys.presence_deadline("r"), keys.presence_seen("r")]
    for _ in range(2):
        assert await beat(redis, keys=names, args=["m", b"", 60_000]) == 1
        assert await beat(redis, keys=names, args=["m", b"", 60_000]) == 1
        await redis.script_flush()


async def test_a_script_may_begin_with_shared_files(redis: Client, keys: Keys) -> None:
    doubled = Script("protocol", "lua/presence_list.lua", prelude=["lua/presence_beat.lua"])
    assert doubled.source.startswith("-- KEYS: statuses, deadlines, last seen   ARGV")
    assert doubled.source.count("-- KEYS") == 2


async def test_more_commands_than_connections_wait_for_one(redis_url: str, keys: Keys) -> None:
    client = connect(redis_url, max_connections=2)
    try:
        await asyncio.gather(*(client.incr(keys.key("count")) for _ in range(50)))
        assert await client.get(keys.key("count")) == b"50"
    finally:
        await client.aclose()


@pytest.mark.parametrize("ticks", range(2, 40))
async def test_a_cancellation_is_never_swallowed(redis_url: str, keys: Keys, ticks: int) -> None:
    async with client_of(redis_url) as client:
        waiting = asyncio.ensure_future(client.blpop([keys.key("nothing")], timeout=0))
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=60)
        assert waiting.cancelled()


async def test_a_cancelled_command_leaves_the_client_usable(redis: Client, keys: Keys) -> None:
    waiting = asyncio.ensure_future(redis.blpop([keys.key("nothing")], timeout=0))
    while not int((await redis.info("clients"))["blocked_clients"]):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert [await redis.echo(str(i)) for i in range(3)] == [b"0", b"1", b"2"]


async def test_a_server_that_takes_no_writes_is_unavailable_with_its_reason(tmp_path: Path) -> None:
    write = Script("protocol", "lua/emit.lua")
    async with redis_server(tmp_path) as url, client_of(url, deadline_s=60.0) as client:
        await client.config_set("maxmemory", 1)
        with pytest.raises(RedisUnavailable, match="at maxmemory"):
            await write(client, keys=["k"], args=["op", "{}"])
        with pytest.raises(RedisUnavailable, match="at maxmemory"), asking("set"):
            await client.set("k", "1")
        await client.config_set("maxmemory", 0)
        await client.config_set("min-replicas-to-write", 1)
        with pytest.raises(RedisUnavailable, match="takes no writes now"):
            await write(client, keys=["k"], args=["op", "{}"])
        await client.config_set("min-replicas-to-write", 0)
        await client.set("k", "no stream")
        with pytest.raises(ResponseError, match=r"WRONGTYPE|wrong kind"):
            await write(client, keys=["k"], args=["op", "{}"])


async def test_at_maxmemory_everyone_still_announces_itself_and_events_are_kept(tmp_path: Path) -> None:
    keys = Keys("full")
    async with redis_server(tmp_path) as url, client_of(url, deadline_s=60.0) as client:
        await client.config_set("maxmemory", 1)
        here = Presence(client, keys, "producer", ProducerStatus)
        await here.beat("a", ProducerStatus(producer_id="a"), ttl_s=600)
        assert [one.producer_id for one in await here.members()] == ["a"]
        await emit(client, keys, "prepare_failed", {"engine_id": "e0"})
        assert await client.xlen(keys.audit) == 1
        await here.leave("a")


async def test_an_event_that_redis_does_not_take_is_unavailable(tmp_path: Path) -> None:
    async with client_of(f"unix://{tmp_path}/no.sock", deadline_s=0.1) as client:
        with pytest.raises(RedisUnavailable):
            await emit(client, Keys("none"), "prepare_failed", {})
