"""`rollstream relay`: keeps the newest version whole in this machine's memory, so that its engines find it there when they look for it.

pointer ──wake-up──► mirror (from deltas, or fetched whole; checked) ──► `weights.relay` folder ◄── engines of the machine load from there
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import tempfile
from pathlib import Path

from protocol.audit import emit
from protocol.config import RedisConfig, RunConfig, Tree
from protocol.connection import Client, check_server, connect
from protocol.durable import make_folder
from protocol.errors import ConfigError, ManifestError, RollstreamError, VersionGone
from protocol.keys import Keys
from protocol.messages import Manifest, RelayStatus
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.mirror import Mirror
from weightsync.pointer import Pointer
from weightsync.roles import RELAY
from weightsync.store import VersionStore, open_store

_LOG = logging.getLogger(__name__)
ROLE = RELAY
"""Under which relays announce themselves."""
BEAT_S = 2.5
_COPY_S = 600.0
"""A copy that takes longer is given up and begun anew."""
_PAUSES_S = (RECHECK_S, 2.0, 5.0, 10.0, 30.0)
"""Between attempts at one version that cannot be copied."""
_CLOSE_S = 2.0
_SAID = 500
"""Characters of a reason that are passed on."""


class RelayConfig(Tree):
    """The sections a relay reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()


async def run_relay(config: RelayConfig, stop: asyncio.Event) -> None:
    """Follow the run's weight pointer until `stop`. Order of stopping: a copy under way is given up, the pin is given back, the relay leaves the list.

    Raises: `ConfigError` for a store that is not there, or a folder that cannot be written to; `RedisUnavailable`.
    """
    if not config.redis.url:
        raise ConfigError("redis.url is empty: a relay needs the URL of the run's Redis (--set redis.url=unix:///path/to/redis.sock)")
    await asyncio.to_thread(_check_folder, relay_folder(config.weights, config.run))
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        await check_server(client, url=config.redis.url)
        store = await asyncio.to_thread(open_store, config.weights, config.run)
        async with wakeups(client, Keys(config.run.name)) as waker:
            await _Relay(config, client, store, waker).run(stop)
    finally:
        await client.aclose()


def _check_folder(folder: Path) -> None:
    """Make it, and a file in it. Raises: `ConfigError`: copies fail for ever where these cannot be made."""
    try:
        make_folder(folder, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise ConfigError(f"weights.relay: nothing can be written to {folder} ({problem}); choose another folder, or make it writable") from problem


class _Relay:
    def __init__(self, config: RelayConfig, client: Client, store: VersionStore, waker: Wakeups) -> None:
        keys = Keys(config.run.name)
        self._client, self._keys = client, keys
        self._id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._waker = waker
        self._pointer = Pointer(client, keys, f"{ROLE}:{self._id}")
        self._presence = Presence(client, keys, ROLE, RelayStatus)
        weights = config.weights
        folder = relay_folder(weights, config.run)
        self._mirror = Mirror(folder, store, Channel(client, keys), keep=weights.keep, bucket_bytes=weights.bucket_mb << 20)
        self._changed = asyncio.Event()
        self._trouble = ""

    async def run(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._follow(), name="relay:follow"), group.create_task(self._beat(), name="relay:beat")]
                await stop.wait()
                for task in tasks:
                    task.cancel()
        finally:
            with contextlib.suppress(TimeoutError, RollstreamError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._presence.leave(self._id)
                    await self._pointer.release()

    async def _follow(self) -> None:
        """Consumes: the pointer. Produces: whole copies. Waits for: a newer version. Unblocked by: wake-ups, and a look every second."""
        done: Version | None = None
        failing, failures = None, 0
        while True:
            mark = self._waker.mark(Topic.WEIGHTS)
            manifest = await self._pointer.look(done)
            pause_s = RECHECK_S
            if manifest is not None:
                failures = failures if failing == manifest.version else 0
                if await self._copy(manifest, quiet=failures > 0):
                    done = manifest.version
                    continue
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                failing, failures = manifest.version, failures + 1
            await self._waker.wait(Topic.WEIGHTS, since=mark, timeout_s=pause_s)

    async def _copy(self, manifest: Manifest, *, quiet: bool) -> bool:
        """False: try again, or a newer one. The version is held in the store meanwhile (rule W5), and never given up for a newer one (rule W2)."""
        try:
            async with self._pointer.holding(manifest.version):
                path = await self._mirror.ensure(manifest, deadline_s=_COPY_S)
        except (ManifestError, OSError) as problem:
            if isinstance(problem, VersionGone):  # a newer one is there
                return False
            reason = str(problem) or type(problem).__name__
            self._trouble = f"version {manifest.version}: {reason}"[:_SAID]
            self._changed.set()
            if not quiet:
                _LOG.warning("version %s is not copied to %s: %s", manifest.version, self._mirror.folder, reason)
                fields = {"relay_id": self._id, "folder": str(self._mirror.folder), "version": str(manifest.version), "reason": reason[:_SAID]}
                await emit(self._client, self._keys, "copy_failed", fields)
            return False
        _LOG.info("version %s is whole in %s", manifest.version, path)
        self._trouble = ""
        self._changed.set()
        return True

    async def _beat(self) -> None:
        """Announced again at once when there is a newer copy, or trouble with one."""
        while True:
            self._changed.clear()
            await self._presence.beat(self._id, self._status())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._changed.wait()

    def _status(self) -> RelayStatus:
        mirror = self._mirror
        return RelayStatus(
            relay_id=self._id,
            folder=str(mirror.folder),
            version=mirror.newest,
            fetched_bytes=mirror.totals.fetched_bytes,
            deltas=mirror.totals.deltas,
            fulls=mirror.totals.fulls,
            host=socket.gethostname(),
            pid=os.getpid(),
            trouble=self._trouble,
        )
