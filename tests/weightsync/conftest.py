"""An engine's control surface as a real HTTP server with staged failures, and the channel around it on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from protocol.audit import event
from protocol.errors import EngineUnavailable
from protocol.messages import EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync import claim as claim_module
from weightsync import reconciler as reconciler_module
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.dialect import dialect
from weightsync.fallback import Transports
from weightsync.reconciler import Reconciler
from weightsync.registry import Registry
from weightsync.safetensors_file import open_tensors, write_tensors
from weightsync.snapshot import Snapshot, TensorBytes, weights_digest
from weightsync.store import DirectoryStore
from weightsync.transports.contract import Transport
from weightsync.transports.store import StoreTransport


def make_snapshot(version: Version) -> Snapshot:
    rng = np.random.default_rng(version.n)
    tensors = {
        "model.embed.weight": TensorBytes(dtype="F32", shape=(4, 3), data=rng.standard_normal(12).astype("<f4").tobytes()),
        "model.norm.weight": TensorBytes(dtype="BF16", shape=(3,), data=rng.bytes(6)),
        "model.steps": TensorBytes(dtype="I64", shape=(), data=rng.bytes(8)),
    }
    return Snapshot(version=version, tensors=tensors)


class ControlServer:
    """What SGLang answers to the control calls, on real weights in files; the next update fails as `stage` says.

    refuse: 400, weights untouched. refuse_softly: 200 with success false. half: weights changed, 400. hang: never answers. drop: closes the connection.
    lie: success, nothing loaded. lie_token: success, but tokens carry the old version. silent: success, and no token ever after.
    """

    def __init__(self, boot_nonce: str, settings: dict[str, Any] | None = None) -> None:
        """`settings`: what `/server_info` says; its version decides on sessions and spans as SGLang's does."""
        self.boot_nonce = boot_nonce
        self.settings = settings or {"version": "embedded"}
        known = dialect(self.settings)
        self.sessions, self.spans = known.sessions or known.version == "embedded", known.spans
        self.session = False
        self.silent = False
        self.flushes: deque[bool] = deque()
        """Whether the next calls empty the cache; they do when nothing is staged."""
        self.version = self.token_version = f"boot:{boot_nonce}"
        self.digest = ""
        self.paused = False
        self.aborted = 0
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.versions: list[str] = []
        self.stage: deque[str] = deque()
        self.hold: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.hangs = asyncio.Event()
        """Set by a call that is never answered, once it is here."""
        self.closed = asyncio.Event()
        self.paused_count: Callable[[int], None] = lambda _: None
        self.before_continue: Callable[[], Awaitable[None]] | None = None
        self._going = asyncio.Event()
        self._going.set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ControlServer]:
        app = web.Application()
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._settings)
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/flush_cache", self._flush)
        if self.sessions:
            app.router.add_post("/begin_weight_update", self._begin)
            app.router.add_post("/end_weight_update", self._end)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.closed.set()
            await runner.cleanup()

    async def _note(self, request: web.Request) -> dict[str, Any]:
        self.calls.append(request.path.removeprefix("/"))
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        return body

    async def _pause(self, request: web.Request) -> web.Response:
        await self._note(request)
        if not self.paused:
            self.paused_count(1)
        self.paused = True
        self._going.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._note(request)
        if self.before_continue is not None:
            await self.before_continue()
        if self.paused:
            self.paused_count(-1)
        self.paused = False
        self._going.set()
        return web.json_response({"status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.aborted += 1
        return web.Response(status=200)

    async def _update(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        assert body["flush_cache"] is False
        assert body["abort_all_requests"] is False
        stage = self.stage.popleft() if self.stage else ""
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        if stage == "hang":
            self.hangs.set()
            await self.closed.wait()
            return web.Response(status=503)
        if stage == "drop":
            assert request.transport is not None
            request.transport.close()
        if stage == "refuse":
            return web.json_response({"success": False, "message": "no such weights"}, status=400)
        if stage == "refuse_softly":
            return web.json_response({"success": False, "message": "not now"})
        if stage != "lie":
            with open_tensors(Path(body["model_path"]) / "model.safetensors") as tensors:
                self.digest = weights_digest(tensors)
            self.version = body["weight_version"]
        if stage == "half":
            return web.json_response({"success": False, "message": "weights partially updated"}, status=400)
        self.silent = stage == "silent"
        if stage != "lie_token":
            self.token_version = self.version
        self.versions.append(self.version)
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        if self.silent:
            self.hangs.set()
        await (self.closed if self.silent else self._going).wait()
        count = body["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"weight_version": self.token_version, "finish_reason": {"type": "length", "length": count}}
        if self.spans:
            meta["weight_versions"] = [{"version": self.token_version, "start": 0, "end": count}]
        return web.json_response({"text": "", "output_ids": [1] * count, "meta_info": meta})

    async def _info(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response({"weight_version": self.version})

    async def _settings(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response(self.settings)

    async def _ready(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.Response(status=503 if self.paused else 200)

    async def _flush(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.Response(text="Cache flushed.") if not self.flushes or self.flushes.popleft() else web.Response(text="busy", status=400)

    async def _begin(self, request: web.Request) -> web.Response:
        await self._note(request)
        opened, self.session = not self.session, True
        message = "Success" if opened else "a weight update session is already open"
        return web.json_response({"success": opened, "message": message}, status=200 if opened else 400)

    async def _end(self, request: web.Request) -> web.Response:
        await self._note(request)
        closed, self.session = self.session, False
        message = "Success" if closed else "no weight update session is open"
        return web.json_response({"success": closed, "message": message}, status=200 if closed else 400)


class Hasty(EngineControl):
    """Gives up a call that is never answered as soon as the server has it, and is as patient as it is asked to be with all others: a machine that stands still
    for a while makes no difference.
    """

    def __init__(self, session: aiohttp.ClientSession, server: ControlServer) -> None:
        super().__init__(session, server.url)
        self._server = server

    async def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, once: bool = False
    ) -> tuple[int, Mapping[str, Any]]:
        self._server.hangs.clear()
        asked = asyncio.create_task(super()._answer(method, path, body, deadline_s, once=once), name="test:asked")
        hangs = asyncio.create_task(self._server.hangs.wait(), name="test:hangs")
        try:
            await asyncio.wait({asked, hangs}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EngineUnavailable(f"{self.url}{path}: no answer within 0.0 s")
            return asked.result()
        finally:
            for task in (asked, hangs):
                task.cancel()
            await asyncio.gather(asked, hangs, return_exceptions=True)


class Rig:
    """One run: its channel, store, registry and whatever engines a test starts."""

    def __init__(self, redis: Any, keys: Any, store: DirectoryStore, wakes: Wakeups, session: aiohttp.ClientSession) -> None:
        self.redis, self.keys, self.store, self.wakes, self.session = redis, keys, store, wakes, session
        self.channel, self.registry = Channel(redis, keys), Registry(redis, keys)
        self.tasks: list[asyncio.Task[None]] = []

    async def attach(self, incarnation: int, trained: int) -> None:
        """What the ledger writes."""
        await self.redis.hset(self.keys.state, mapping={"incarnation": incarnation, "trained": trained})

    async def publish(self, incarnation: int, n: int) -> str:
        await self.attach(incarnation, n)
        manifest = await asyncio.to_thread(self.store.write, make_snapshot(Version(incarnation, n)))
        await self.channel.publish(manifest, incarnation)
        return manifest.digest

    def status(self, engine_id: str, boot_nonce: str, url: str = "", state: EngineState = EngineState.STARTING) -> EngineStatus:
        return EngineStatus(engine_id=engine_id, boot_nonce=boot_nonce, url=url, kind="embedded", state=state)

    def snapshot(self, incarnation: int, n: int) -> Snapshot:
        return make_snapshot(Version(incarnation, n))

    def server(self, boot_nonce: str, settings: dict[str, Any] | None = None) -> contextlib.AbstractAsyncContextManager[ControlServer]:
        return ControlServer(boot_nonce, settings).serving()

    def reconciler(
        self, engine_id: str, server: ControlServer, *, idle: bool = False, hasty: bool = False, primary: Transport | None = None, **settings: Any
    ) -> Reconciler:
        """`primary`: a way to try before the store. `hasty`: with the control of that name."""
        control = Hasty(self.session, server) if hasty else EngineControl(self.session, server.url)
        return Reconciler(
            engine_id,
            server.boot_nonce,
            control=control,
            channel=self.channel,
            registry=self.registry,
            transports=Transports(primary, StoreTransport(DirectoryStore(self.store.folder), control)),
            config=WeightsConfig(**settings),
            wakeups=self.wakes,
            idle=lambda: idle,
        )

    @contextlib.asynccontextmanager
    async def engine(
        self, engine_id: str, boot: str = "b1", *, idle: bool = False, stage: tuple[str, ...] = (), about: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[ControlServer]:
        """An engine with its reconciler."""
        async with ControlServer(boot, about).serving() as server:
            server.stage.extend(stage)
            await self.registry.beat(self.status(engine_id, boot, server.url), ttl_s=600)
            async with self.running(self.reconciler(engine_id, server, idle=idle, **settings)):
                yield server

    @contextlib.asynccontextmanager
    async def running(self, reconciler: Reconciler) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(reconciler.run(), name="test:reconciler")
        self.tasks.append(task)
        try:
            yield task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def until(self, condition: Callable[[dict[str, EngineStatus]], bool]) -> dict[str, EngineStatus]:
        """The engines, once `condition` holds of them."""
        async with asyncio.timeout(60):
            while True:
                mark = self.wakes.mark(Topic.ENGINES)
                for task in self.tasks:
                    if task.done() and not task.cancelled():
                        task.result()
                engines = {status.engine_id: status for status in await self.registry.engines()}
                if condition(engines):
                    return engines
                await self.wakes.wait(Topic.ENGINES, since=mark)

    async def serves(self, engine_id: str, version: str) -> EngineStatus:
        found = await self.until(
            lambda all_: engine_id in all_ and all_[engine_id].state is EngineState.ROUTABLE and all_[engine_id].version == Version.parse(version)
        )
        return found[engine_id]

    async def events(self, op: str) -> list[dict[str, Any]]:
        lines = [event(entry_id, fields) for entry_id, fields in await self.redis.xrange(self.keys.audit)]
        return [dict(line.fields) for line in lines if line.op == op]


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    write_tensors(folder / "model.safetensors", make_snapshot(Version(1, 0)).tensors, durable=False)
    return folder


@pytest.fixture
def store(tmp_path: Path, model_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", model_path)


@pytest.fixture
def snapshot() -> Callable[[Version], Snapshot]:
    return make_snapshot


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds costs no reconciler its lock, and no engine the time in which it is asked or let go."""
    for where, name in ((claim_module, "LOCK_S"), (reconciler_module, "LOCK_S"), (reconciler_module, "RESUME_S"), (reconciler_module, "_ASK_S")):
        monkeypatch.setattr(where, name, 60.0)
    monkeypatch.setattr(reconciler_module, "_CLEANUP_S", 60.0)


@pytest_asyncio.fixture
async def rig(redis: Any, keys: Any, store: DirectoryStore) -> AsyncIterator[Rig]:
    async with aiohttp.ClientSession() as session, wakeups(redis, keys) as wakes:
        yield Rig(redis, keys, store, wakes, session)
