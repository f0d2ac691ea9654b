from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from deploy.redis_server import answers, redis_server, run_server, server_command, socket_path
from protocol.connection import check_server, connect
from protocol.errors import ConfigError, RedisUnavailable

pytestmark = pytest.mark.redis


async def test_a_server_of_ours_is_safe_for_a_run_and_keeps_its_data_over_a_restart(tmp_path: Path):
    async with redis_server(tmp_path / "data") as url:
        client = connect(url, deadline_s=60.0)
        facts = await check_server(client, url=url)
        assert facts.maxmemory_policy == "noeviction"
        assert facts.appendonly
        await client.set("kept", "1")
        await client.aclose()
    async with redis_server(tmp_path / "data") as url:
        client = connect(url, deadline_s=60.0)
        assert await client.get("kept") == b"1"
        await client.aclose()
    assert not socket_path(tmp_path / "data").exists()


def test_a_long_folder_gets_a_short_socket(tmp_path: Path):
    deep = tmp_path / ("x" * 120)
    assert len(os.fsencode(socket_path(deep))) <= 100
    assert socket_path(deep) != socket_path(tmp_path / ("y" * 120))
    assert server_command(deep).url.endswith(str(socket_path(deep)))


def test_the_command_alone_writes_nothing(tmp_path: Path):
    server_command(tmp_path / "data")
    assert not list(tmp_path.iterdir())


async def test_a_second_server_in_a_folder_is_refused_with_the_url_of_the_first(tmp_path: Path):
    said: list[str] = []
    async with redis_server(tmp_path) as url:
        with pytest.raises(ConfigError, match="runs here already") as refused:
            await run_server(tmp_path, asyncio.Event(), said.append)
        assert url in str(refused.value)
    assert not said


async def test_by_hand_it_announces_its_url_and_stops_when_told(tmp_path: Path):
    stop = asyncio.Event()
    said: list[str] = []

    def announce(url: str) -> None:
        said.append(url)
        stop.set()

    await run_server(tmp_path, stop, announce)
    assert said == [server_command(tmp_path).url]
    assert not await answers(said[0])


async def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    (tmp_path / "appendonlydir").write_text("not a folder")
    with pytest.raises(RedisUnavailable, match="ended at its start"):
        async with redis_server(tmp_path):
            pass
