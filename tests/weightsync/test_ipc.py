"""The ipc transport up to the handles themselves, which need a GPU: what is asked of whom and when, what is kept, and what the payload is made of."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import pickle
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from aiohttp import web
from torch.multiprocessing import reductions

from protocol.errors import TransportFailed
from protocol.messages import Manifest, WeightServerStatus
from protocol.versions import Version
from tests.weightsync.served_rig import Engine, ServedRig, big_snapshot, served_rig
from tests.weightsync.test_server import _manifest
from weightsync.server import handles, line
from weightsync.server.line import Line, Sender
from weightsync.server.right import TransferRight
from weightsync.server.shelf import Shelf, Staged
from weightsync.server.staging import Stager
from weightsync.transports.ipc import IpcTransport

pytestmark = pytest.mark.timeout(600)
V0, V1 = Version(1, 0), Version(1, 1)


class HandleServer:
    """The lines of a weight server in this process, without a GPU: its handles are texts. All else is what the real one does."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.sender = Sender(
            device=torch.device("cpu"), backend="ipc", address="127.0.0.1", group_timeout_s=5.0, shelf=self.shelf, right=TransferRight(idle_s=100.0)
        )

    def stage(self, version: Version) -> Manifest:
        tensors = big_snapshot(version).tensors
        manifest = _manifest(tensors, version)
        self.shelf.put(Stager(torch.device("cpu"), 1 << 20).stage(manifest, tensors, ()))
        return manifest

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        await Line(self.sender, request.query["engine"]).serve(response)
        return response

    @contextlib.asynccontextmanager
    async def serving(self, served: ServedRig) -> AsyncIterator[HandleServer]:
        app = web.Application()
        app.router.add_get("/line", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await served.presence.beat("s", WeightServerStatus(server_id="s", url=url, device="cuda:0", backend="ipc", host=socket.gethostname()), ttl_s=600)
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest_asyncio.fixture
async def served(rig: Any, redis_url: str, tmp_path: Path) -> AsyncIterator[ServedRig]:
    async with served_rig(rig, redis_url, tmp_path) as started:
        yield started


@pytest_asyncio.fixture
async def server(served: ServedRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HandleServer]:
    monkeypatch.setattr(line.handles, "payload", lambda staged: f"handles-of-{staged.version}")
    async with HandleServer().serving(served) as started:
        yield started


async def test_one_call_brings_all_tensors_and_the_memory_is_kept_until_the_engine_has_decoded(served: ServedRig, server: HandleServer):
    engine = await served.start_engine("--sessions")
    way = served.transport(engine, IpcTransport, transport="ipc")
    manifest = server.stage(V0)
    await way.prepare(manifest, deadline_s=100)
    assert _lines(server)
    assert (server.sender.lines, server.sender.sent_bytes) == (1, 0)
    await way.apply(manifest, deadline_s=100)
    assert not _lines(server), "others may go on"
    calls = (await engine.seen())["calls"]
    assert calls[:3] == ["begin", "tensor:handles-of-1:0:None", "end"]
    await engine.until("generate")
    await _until(lambda: not server.shelf._holds)
    assert server.sender.sent_bytes == sum(tensor.nbytes for tensor in big_snapshot(V0).tensors.values())
    await way.aclose()
    await _until(lambda: not server.sender.lines)


async def test_memory_that_an_engine_may_still_read_is_never_written_over(served: ServedRig, server: HandleServer):
    engine = await served.start_engine()
    way = served.transport(engine, IpcTransport, transport="ipc")
    decoded = asyncio.Event()

    async def probe(*, deadline_s: float) -> tuple[str, ...]:
        async with asyncio.timeout(deadline_s):
            await decoded.wait()
        return ("1:0",)

    engine.control.probe = probe
    first = server.stage(V0)
    await way.prepare(first, deadline_s=100)
    await way.apply(first, deadline_s=100)
    second = server.stage(V1)
    await way.prepare(second, deadline_s=100)  # the hold for this one does not end the other
    assert dict(server.shelf._holds) == {V0: 1, V1: 1}
    waiting = asyncio.create_task(server.shelf.room())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    decoded.set()
    memory = await waiting
    assert len(memory) == 4
    assert server.shelf.newest == V1
    assert dict(server.shelf._holds) == {V1: 1}


async def test_a_refusal_leaves_no_hold_no_right_and_no_line(served: ServedRig, server: HandleServer):
    engine = await served.start_engine("--sessions")
    way = served.transport(engine, IpcTransport, transport="ipc")
    manifest = server.stage(V0)
    await way.prepare(manifest, deadline_s=100)
    await engine.stage("refuse")
    with pytest.raises(TransportFailed, match="not these handles"):
        await way.apply(manifest, deadline_s=100)
    await _until(lambda: not server.shelf._holds and not _lines(server))
    assert not (await engine.seen())["in_session"]


async def test_a_server_on_another_host_is_no_server(served: ServedRig):
    status = WeightServerStatus(server_id="s", url="http://127.0.0.1:1", device="cuda:0", backend="ipc", host="elsewhere")
    await served.presence.beat("s", status, ttl_s=600)
    engine = Engine(None, "http://127.0.0.1:1", served.rig.session)  # type: ignore[arg-type]
    way = IpcTransport(
        control=engine.control, session=served.rig.session, presence=served.presence, config=served.config(transport="ipc"), engine_id="e", boot_nonce="b"
    )
    with pytest.raises(TransportFailed, match=f"no weight server for ipc on {socket.gethostname()}"):
        await way.prepare(_manifest(big_snapshot(V0).tensors), deadline_s=60)


async def test_two_servers_of_one_host_are_refused_since_an_engine_knows_not_which_is_on_its_gpu(served: ServedRig):
    for name, device in (("a", "cuda:0"), ("b", "cuda:1")):
        status = WeightServerStatus(server_id=name, url="http://127.0.0.1:1", device=device, backend="ipc", host=socket.gethostname())
        await served.presence.beat(name, status, ttl_s=600)
    await served.presence.beat("c", WeightServerStatus(server_id="c", url="http://127.0.0.1:1", device="cuda:0", backend="ipc", host="elsewhere"), ttl_s=600)
    engine = Engine(None, "http://127.0.0.1:1", served.rig.session)  # type: ignore[arg-type]
    way = IpcTransport(
        control=engine.control, session=served.rig.session, presence=served.presence, config=served.config(transport="ipc"), engine_id="e", boot_nonce="b"
    )
    with pytest.raises(TransportFailed, match=r"2 weight servers for ipc on .*: a \(cuda:0\), b \(cuda:1\); engines cannot tell yet .*: run one a host"):
        await way.prepare(_manifest(big_snapshot(V0).tensors), deadline_s=60)


async def test_a_server_that_is_known_to_be_on_another_gpu_is_no_server_either(served: ServedRig, server: HandleServer):
    manifest, engine = server.stage(V0), await served.start_engine("--sessions")
    server.sender.gpus = frozenset({"3", "GPU-aa"})
    way = served.transport(engine, IpcTransport, transport="ipc")
    way._gpus = ("2",)
    with pytest.raises(TransportFailed, match="this server is on GPU 3, GPU-aa, the engine on 2: memory of one GPU is not handed to another"):
        await way.prepare(manifest, deadline_s=100)
    await _until(lambda: not _lines(server))
    for own in ((), ("3",), ("2", "3")):
        way._gpus = own
        await way.prepare(manifest, deadline_s=100)
        await way.aclose()


async def test_a_line_that_asks_for_too_much_at_once_ends(served: ServedRig, server: HandleServer, caplog: pytest.LogCaptureFixture):
    [status] = await served.presence.members()
    async with served.rig.session.ws_connect(f"{status.url}/line", params={"engine": "e"}) as socket_:
        for number in range(17):
            await socket_.send_json({"id": number, "op": "stage", "deadline_s": 60, "version": "1:9", "digest": "d"})
        async with asyncio.timeout(100):
            while not (await socket_.receive()).type.name.startswith("CLOS"):
                continue
    await _until(lambda: not server.sender.lines)
    assert "more than 16 things at once" in caplog.text


NONSENSE = [
    "[]",
    "{",
    '{"id": 1}',
    '{"id": 1, "op": "handles", "version": "1:0", "ranks": []}',
    '{"id": 1, "op": "stage", "version": "1:0", "digest": "d", "deadline_s": "soon"}',
    '{"id": 1, "op": "send", "version": "1:0", "buckets": [[]]}',
    '{"id": 1, "op": "send", "version": "1:0", "buckets": [[99, "0"]]}',
]


@pytest.mark.parametrize("request_", NONSENSE)
async def test_a_request_that_makes_no_sense_is_answered_and_the_line_goes_on(served: ServedRig, server: HandleServer, request_: str):
    server.stage(V0)
    [status] = await served.presence.members()
    async with served.rig.session.ws_connect(f"{status.url}/line", params={"engine": "e"}) as socket_:
        for request in ('{"id": 0, "op": "take", "version": "1:0"}', request_, '{"id": 2, "op": "give"}'):
            await socket_.send_str(request)
        async with asyncio.timeout(100):
            answers = [await socket_.receive_json() for _ in range(3)]
    assert [answer.get("error") for answer in answers] == [None, "failed", None]


def _lines(server: HandleServer) -> list[Any]:
    holder = server.sender.right._holder
    return [] if holder is None else [holder]


async def _until(condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)


# the payload ------------------------------------------------------------------------------------------------------------------------------------


def _stage(version: Version) -> Staged:
    tensors = big_snapshot(version).tensors
    return Stager(torch.device("cpu"), 1 << 20).stage(_manifest(tensors, version), tensors, ())


def test_a_payload_is_made_of_views_of_the_staged_memory_and_owns_nothing():
    staged, expected = _stage(V0), big_snapshot(V0).tensors
    tensors = dict(handles.aliases(staged))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == expected[name].shape
        assert tensor.is_contiguous()
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(expected[name].data)
    whole = {(memory.data_ptr(), memory.numel()) for memory in staged.memory}
    assert {(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors.values()} == whole
    staged.memory[0].zero_()
    assert not tensors[staged.buckets[0].names[0]].any(), "the same memory"
    del tensors
    assert staged.memory[1].any(), "which is still the server's"


def test_a_payload_names_the_gpu_by_its_id_and_nothing_that_an_engine_refuses_to_load(monkeypatch: pytest.MonkeyPatch):
    """SGLang unpickles names of torch and of a few others only, and replaces a GPU's id by its own number of it."""

    class Properties:
        uuid = "GPU-1234"

    reduced: list[tuple[int, ...]] = []

    def reduce(tensor: torch.Tensor) -> Any:
        reduced.append(tuple(tensor.shape))
        kind = torch.storage.TypedStorage
        return reductions.rebuild_cuda_tensor, (
            torch.Tensor, tensor.size(), tensor.stride(), tensor.storage_offset(), kind, tensor.dtype, 3, b"handle", tensor.untyped_storage().nbytes(),
            0, False, b"counter", 0, b"event", False,
        )  # fmt: skip

    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties if device == 3 else None)
    staged = _stage(V0)
    raw = base64.b64decode(handles.payload(staged))
    rebuilt: list[tuple[Any, ...]] = []
    names: set[tuple[str, str]] = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            if name == "rebuild_cuda_tensor":
                return lambda *arguments: rebuilt.append(arguments)
            return super().find_class(module, name)

    loaded = Reader(io.BytesIO(raw)).load()
    assert [name for name, _ in loaded] == [name for bucket in staged.buckets for name in bucket.names]
    assert {arguments[6] for arguments in rebuilt} == {"GPU-1234"}
    assert [tuple(arguments[1]) for arguments in rebuilt] == reduced
    assert {module.split(".")[0] for module, _ in names} == {"torch"}
    assert ("torch.multiprocessing.reductions", "rebuild_cuda_tensor") in names
