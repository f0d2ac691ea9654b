"""Which ways an engine has, by configuration."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

import aiohttp

from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineId, WeightServerStatus
from protocol.presence import Presence
from weightsync.adapter_control import AdapterControl
from weightsync.adapter_store import AdapterStore
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.fallback import Transports
from weightsync.lora import LoraConfig
from weightsync.roles import WEIGHT_SERVER
from weightsync.store import DirectoryStore, VersionStore
from weightsync.transports.adapter import AdapterTransport
from weightsync.transports.contract import Transport
from weightsync.transports.everywhere import EverywhereTransport, FromFolder, Seen
from weightsync.transports.store import StoreTransport

_NO_LORA = LoraConfig()
_BESIDE = "copies-"
"""Of a machine whose own folder cannot hold copies: what its folder in the store begins with."""


def make_transports(
    config: WeightsConfig,
    *,
    store: VersionStore,
    control: EngineControl,
    session: aiohttp.ClientSession,
    client: Client,
    keys: Keys,
    engine_id: EngineId,
    boot_nonce: str,
    folder: str | os.PathLike[str],
    ranks: int = 1,
    lora: LoraConfig = _NO_LORA,
    seen: Seen | None = None,
    fixed: bool = False,
    gpus: Collection[str] = (),
) -> Transports:
    """The configured way with the store behind it. Opens nothing.

    `ranks`: tensor-parallel ranks of the engine. `seen`: of an engine over several machines, whether all of them see what it is to load.
    `gpus`: what its GPUs are called (`weightsync.gpus`); empty: not known.
    `fixed`: it goes for what it is asked for and not for the newest: where a weight server is past that, the store is asked.
    `folder`: of this machine's whole copies, for versions that an engine cannot load from where they are: deltas, and a store behind a URL.
    """
    if isinstance(store, AdapterStore):
        assert isinstance(control, AdapterControl), "adapters are loaded by a control of their own"
        return Transports(None, AdapterTransport(store, control, keep=lora.keep_loaded, flags=" ".join(lora.server_flags())))
    last: Transport = (found := _from_store(config, store=store, control=control, client=client, keys=keys, folder=folder))
    if seen is not None:
        last = EverywhereTransport(found, seen)
    if config.transport in ("store", "delta"):
        return Transports(None, last)
    servers: Presence[WeightServerStatus] = Presence(client, keys, WEIGHT_SERVER, WeightServerStatus)
    from weightsync.transports.collective import CollectiveTransport
    from weightsync.transports.ipc import IpcTransport

    kind = IpcTransport if config.transport == "ipc" else CollectiveTransport
    fast = kind(control=control, session=session, presence=servers, config=config, engine_id=engine_id, boot_nonce=boot_nonce, ranks=ranks, gpus=gpus)
    return Transports(fast, last, fixed=fixed)


def _from_store(
    config: WeightsConfig, *, store: VersionStore, control: EngineControl, client: Client, keys: Keys, folder: str | os.PathLike[str]
) -> FromFolder:
    if config.transport != "delta" and isinstance(store, DirectoryStore):
        return StoreTransport(store, control)
    from weightsync.mirror import Mirror
    from weightsync.transports.relay import RelayTransport

    def mirror(where: str | os.PathLike[str]) -> Mirror:
        return Mirror(where, store, Channel(client, keys), keep=config.keep, bucket_bytes=config.bucket_mb << 20)

    spare = mirror(store.folder / f"{_BESIDE}{socket.gethostname()}") if isinstance(store, DirectoryStore) else None
    return RelayTransport(mirror(folder), control, name="delta" if config.transport == "delta" else "store", spare=spare)
