"""The weight server: stages the newest version on its device and hands it to engines, so that the trainer trains on and no engine reads a file.

pointer ──wake-up──► stage (checked) ──► shelf ──line of an engine──► bucket by bucket, one engine at a time
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from protocol.config import RedisConfig, RunConfig, Tree
from protocol.connection import check_server, connect
from protocol.errors import ConfigError, ManifestError, RollstreamError, TransportFailed, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.keys import Keys
from protocol.messages import Manifest, WeightServerStatus
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups, wakeups
from weightsync.config import WeightsConfig
from weightsync.gpus import name_of
from weightsync.manifests import check_manifest
from weightsync.pointer import Pointer
from weightsync.roles import HEARTBEAT_S, WEIGHT_SERVER
from weightsync.server.line import Line, Sender
from weightsync.server.process_group import prepare_environment
from weightsync.server.right import TransferRight
from weightsync.server.shelf import Shelf, Staged
from weightsync.server.staging import Stager
from weightsync.store import VersionStore, open_store

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
BEAT_S = 2.5
IDLE_S = 10.0
"""A right that its holder does not use for so long goes to whoever waits."""
_CLOSE_S = 2.0
_BACKENDS = ("gloo", "nccl", "ipc")


class WeightServerConfig(Tree):
    """The sections a weight server reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()


async def run_weight_server(config: WeightServerConfig, stop: asyncio.Event, *, device: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve until `stop`. `device`: torch's spelling; empty: cpu for gloo, else cuda:0. `host`: where it listens, and what engines are told.

    Order of stopping: it leaves the list of servers, lines end (their engines go on by store), groups are destroyed, the pin is given back.

    Raises: `ConfigError` for a transport or device that is not there; `RedisUnavailable`.
    """
    if not config.redis.url:
        raise ConfigError("redis.url is empty: a weight server needs the URL of the run's Redis (--set redis.url=unix:///path/to/redis.sock)")
    place = _device(config.weights.transport, device)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        await check_server(client, url=config.redis.url)
        keys = Keys(config.run.name)
        store = await asyncio.to_thread(open_store, config.weights, config.run)
        async with wakeups(client, keys) as waker:
            server_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
            server = _Server(
                config, server_id, device=place, host=host, port=port, store=store, waker=waker, pointer=Pointer(client, keys, f"{WEIGHT_SERVER}:{server_id}")
            )
            await server.run(stop, Presence(client, keys, WEIGHT_SERVER, WeightServerStatus))
    finally:
        await client.aclose()


def _device(transport: str, name: str) -> torch.device:
    """The device, usable. Imports torch here, after what NCCL must find is set."""
    if transport not in _BACKENDS:
        raise ConfigError(f'weights.transport = "{transport}" needs no weight server: it is for {", ".join(_BACKENDS)}')
    prepare_environment()
    try:
        import torch
    except ImportError as problem:
        raise ConfigError(f"a weight server needs torch ({problem}): install the extra `rollstream[torch]`") from problem
    try:
        device = torch.device(name or ("cpu" if transport == "gloo" else "cuda:0"))
    except RuntimeError as problem:
        raise ConfigError(f"device {name!r}: {problem!s:.200}") from problem
    if (device.type == "cuda") is (transport == "gloo") or device.type not in {"cpu", "cuda"}:
        raise ConfigError(f'device {device}: weights.transport = "{transport}" sends from {"cpu" if transport == "gloo" else "cuda:N"}')
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {device}: not there; torch sees {torch.cuda.device_count()} GPUs")
    return device


def _names(device: torch.device) -> frozenset[str]:
    """What other processes of this machine call the GPU."""
    import torch

    if device.type != "cuda":
        return frozenset()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return frozenset({name_of(device.index, os.environ), f"GPU-{uuid}" if uuid else ""} - {""})


class _Server:
    def __init__(
        self, config: WeightServerConfig, server_id: str, *, device: torch.device, host: str, port: int, store: VersionStore, waker: Wakeups, pointer: Pointer
    ) -> None:
        self._config = config
        self._id = server_id
        self._host = host
        self._port = port
        self._store = store
        self._waker = waker
        self._pointer = pointer
        self._stager = Stager(device, config.weights.bucket_mb << 20)
        self._sender = Sender(
            device=device,
            backend=config.weights.transport,
            address=host,
            group_timeout_s=config.weights.group_deadline_s,
            shelf=Shelf(),
            right=TransferRight(idle_s=IDLE_S),
            gpus=_names(device),
        )
        self._key = secrets.token_urlsafe(16)
        self._sockets: set[web.WebSocketResponse] = set()
        self._url = ""

    async def run(self, stop: asyncio.Event, presence: Presence[WeightServerStatus]) -> None:
        async with self._listening():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._follow(), name="weight-server:follow"),
                        group.create_task(self._beat(presence), name="weight-server:beat"),
                    ]
                    await stop.wait()
                    for task in tasks:
                        task.cancel()
            finally:
                with contextlib.suppress(TimeoutError, RollstreamError):
                    async with asyncio.timeout(_CLOSE_S):
                        await presence.leave(self._id)
                        await self._pointer.release()

    async def _follow(self) -> None:
        """Consumes: the pointer. Produces: staged versions. Waits for: a newer version, and a place for it. Unblocked by: wake-ups, and a look every second."""
        done: Version | None = None
        while True:
            mark = self._waker.mark(Topic.WEIGHTS)
            manifest = await self._pointer.look(done)
            if manifest is not None:
                memory = await self._sender.shelf.room()
                manifest = await self._pointer.look(done) or manifest  # a newer one may have come while there was no room
                if await self._stage(manifest, memory):
                    done = manifest.version
                    continue
            await self._waker.wait(Topic.WEIGHTS, since=mark, timeout_s=RECHECK_S)

    async def _stage(self, manifest: Manifest, memory: tuple[torch.Tensor, ...]) -> bool:
        """False: try again."""
        version, shelf = manifest.version, self._sender.shelf
        shelf.aim(version)
        try:
            async with self._pointer.holding(version):
                staged = await asyncio.to_thread(self._read, manifest, memory)
        except VersionGone:
            return False
        except (ManifestError, TransportFailed) as problem:
            _LOG.warning("%s; engines take it from the store, or the next one", problem)
            shelf.fail(version, problem)
            return True
        except OSError as problem:
            _LOG.warning("version %s cannot be read now: %s", version, problem)
            shelf.fail(version, TransportFailed(f"version {version} cannot be read by the weight server ({problem})"))
            return False
        shelf.put(staged)
        failpoint(Failpoint.SERVER_STAGED)
        _LOG.info("staged version %s on %s: %d bytes in %d buckets", version, self._sender.device, manifest.total_bytes, len(staged.buckets))
        return True

    def _read(self, manifest: Manifest, memory: tuple[torch.Tensor, ...]) -> Staged:
        check_manifest(manifest)
        if manifest.kind != "full":
            raise TransportFailed(f"version {manifest.version} holds only what changed: a weight server stages whole versions; publish with the same transport")
        with self._store.open(manifest) as tensors:
            return self._stager.stage(manifest, tensors, memory)

    async def _beat(self, presence: Presence[WeightServerStatus]) -> None:
        """Announced again at once when what it has has changed."""
        sender = self._sender
        while True:
            await presence.beat(self._id, self._status())
            sender.changed.clear()
            waits = {
                asyncio.create_task(sender.changed.wait(), name="weight-server:lines"),
                asyncio.create_task(sender.shelf.change(), name="weight-server:shelf"),
            }
            try:
                await asyncio.wait(waits, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.wait(waits)

    def _status(self) -> WeightServerStatus:
        sender = self._sender
        return WeightServerStatus(
            server_id=self._id,
            url=self._url,
            device=str(sender.device),
            backend=sender.backend,
            staged=sender.shelf.newest,
            groups=sender.lines,
            sent_bytes=sender.sent_bytes,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """The address carries a key of this process: whoever reads the run's Redis may connect, nobody else."""
        app = web.Application()
        app.router.add_get(f"/{self._key}/line", self._line)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, self._host, self._port).start()
            except OSError as problem:
                raise ConfigError(f"cannot listen on {self._host}:{self._port} ({problem}); give another --host or --port") from problem
            shown = f"[{self._host}]" if ":" in self._host else self._host
            self._url = f"http://{shown}:{runner.addresses[0][1]}/{self._key}"
            _LOG.info("weight server %s: %s from %s", self._id, self._sender.backend, self._sender.device)
            yield
        finally:
            for open_socket in list(self._sockets):
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(_CLOSE_S):
                        await open_socket.close()
            await runner.cleanup()

    async def _line(self, request: web.Request) -> web.WebSocketResponse:
        line_socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=1 << 20)
        await line_socket.prepare(request)
        engine_id = request.query.get("engine", "?")
        self._sockets.add(line_socket)
        _LOG.info("engine %s connected", engine_id)
        try:
            await Line(self._sender, engine_id).serve(line_socket)
        finally:
            self._sockets.discard(line_socket)
            _LOG.info("engine %s left", engine_id)
        return line_socket
