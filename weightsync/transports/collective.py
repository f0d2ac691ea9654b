"""The transports `gloo` and `nccl`: a weight server broadcasts buckets into a process group of this one engine.

Invariant: no byte moves unless both sides have named the same bucket; a group that met any error is destroyed on both sides and never used again.
An answer of the engine is no proof of arrival: whoever calls probes a generation afterwards (rule W6).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable
from protocol.messages import Manifest
from weightsync.buckets import Bucket
from weightsync.finish import left
from weightsync.transports.served import ServedTransport, together
from weightsync.transports.server_line import ServerLine


class CollectiveTransport(ServedTransport[tuple[Bucket, ...]]):
    """One engine's group stays from one version to the next; other engines' groups know nothing of it."""

    _group = ""

    async def _enter(self, line: ServerLine, end: float) -> None:
        """The server listens before the engine is told, and no other engine of it meets meanwhile: an engine decodes nothing while it waits for a peer."""
        offer = await line.ask("join", deadline_s=left(end), ranks=self._ranks)
        self._group = str(offer["group"])
        wait_s = min(self._config.group_deadline_s, left(end))
        await together(
            line.ask("joined", deadline_s=wait_s),
            self._control.init_group(
                master_address=str(offer["address"]),
                master_port=int(offer["port"]),
                rank_offset=1,
                world_size=int(offer["world_size"]),
                group_name=self._group,
                backend=str(offer["backend"]),
                deadline_s=wait_s,
            ),
        )
        await line.ask("give", deadline_s=left(end))

    async def _make_ready(self, line: ServerLine, manifest: Manifest, buckets: Sequence[Bucket], end: float) -> tuple[Bucket, ...]:
        del line, manifest, end
        return tuple(buckets)

    async def _move(self, line: ServerLine, manifest: Manifest, ready: tuple[Bucket, ...], end: float) -> None:
        """The server sends all buckets in order, the engine is told of one after the other; the version goes with the last (rule W6)."""
        version = str(manifest.version)

        async def receive() -> None:
            for bucket in ready:
                named = version if bucket is ready[-1] else None
                await self._control.update_from_distributed(bucket, group=self._group, version=named, deadline_s=min(self._config.group_deadline_s, left(end)))

        named = [[index, bucket.digest] for index, bucket in enumerate(ready)]
        await together(receive(), line.ask("send", deadline_s=left(end), version=version, buckets=named))

    async def _leave(self, limit_s: float) -> None:
        """The server's side is gone, which frees an engine that waits for it; a session that is open would refuse whatever comes next."""
        group, self._group = self._group, ""
        if not group:
            return
        with contextlib.suppress(ApplyFailed, EngineUnavailable, DecodeError, TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._control.destroy_group(group, deadline_s=limit_s)
                await self._control.close_session(deadline_s=limit_s)
