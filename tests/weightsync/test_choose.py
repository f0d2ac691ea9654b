from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from protocol.config import RunConfig
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.fallback import Transports
from weightsync.store import open_store
from weightsync.transports.choose import make_transports
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.relay import RelayTransport
from weightsync.transports.store import StoreTransport


@pytest.mark.parametrize(
    ("transport", "url", "primary", "last", "name"),
    [
        ("store", False, type(None), StoreTransport, "store"),
        ("store", True, type(None), RelayTransport, "store"),
        ("delta", False, type(None), RelayTransport, "delta"),
        ("delta", True, type(None), RelayTransport, "delta"),
        ("gloo", False, CollectiveTransport, StoreTransport, "store"),
        ("nccl", True, CollectiveTransport, RelayTransport, "store"),
        ("ipc", False, IpcTransport, StoreTransport, "store"),
    ],
)
async def test_every_way_has_the_store_behind_it(rig: Any, tmp_path: Path, transport: Any, url: bool, primary: type, last: type, name: str):
    config = WeightsConfig(store="memory://weights" if url else str(tmp_path / "versions"), transport=transport, bucket_mb=512 if transport == "nccl" else 64)
    ways = make_transports(
        config,
        store=open_store(config, RunConfig(name="r", dir=str(tmp_path / "run"))),
        control=EngineControl(rig.session, "http://127.0.0.1:1"),
        session=rig.session,
        client=rig.redis,
        keys=rig.keys,
        engine_id="e0",
        boot_nonce="b1",
        folder=tmp_path / "mirror",
        gpus=("GPU-aa",),
    )
    assert isinstance(ways, Transports)
    assert type(ways._primary) is primary
    assert type(ways._store) is last
    assert ways._store.name == name
    if isinstance(ways._store, RelayTransport):
        assert ways._store._mirror._bucket_bytes == config.bucket_mb << 20 != 256 << 20
        beside = ways._store._spare
        assert (beside is None) == url, "only a folder has room beside it"
        assert beside is None or (beside.folder.parent, beside.folder.name) == (ways._store._mirror.store.folder, f"copies-{socket.gethostname()}")
    if ways._primary is not None:
        assert ways._primary.name == transport
        assert ways._primary._gpus == ("GPU-aa",)
    await asyncio.wait_for(ways.aclose(), 10)
