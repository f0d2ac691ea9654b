from __future__ import annotations

import asyncio
import socket

import pytest

from producer.engine.sglang.ports import held_port
from protocol.errors import ConfigError

HOST = "127.0.0.1"


async def test_a_server_that_allows_reuse_listens_on_a_held_port():
    with held_port(HOST, key="k") as port:
        async with await asyncio.start_server(lambda _, writer: writer.close(), HOST, port):
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


def test_the_kernel_gives_a_held_port_to_nobody():
    with held_port(HOST, key="k") as port:
        others = [socket.socket() for _ in range(2000)]
        try:
            for other in others:
                other.bind((HOST, 0))
            assert port not in {other.getsockname()[1] for other in others}
        finally:
            for other in others:
                other.close()


def test_two_that_are_held_are_two():
    with held_port(HOST, key="k") as one, held_port(HOST, key="k") as other:
        assert one != other


def test_a_port_where_somebody_listens_and_an_address_of_another_machine_are_named_with_their_key():
    with (
        socket.create_server((HOST, 0)) as taken,
        pytest.raises(ConfigError, match=r"engine\.port 7: cannot listen on 127\.0\.0\.1"),
        held_port(HOST, taken.getsockname()[1], key="engine.port 7"),
    ):
        pass
    with pytest.raises(ConfigError, match=r"engine\.host: cannot listen on 192\.0\.2\.1"), held_port("192.0.2.1", key="engine.host"):
        pass
