"""The transport `ipc`: a weight server on the engine's own GPU has the version there already, and the engine copies it within that GPU's memory.

Only SGLang on the same host, where one such server may run: which of several is on its GPU an engine is not told. The endpoint reads pickle, which the server
makes (rule W10). While an engine copies, the server keeps the memory as it is;
the hold ends when the engine has decoded a token afterwards, which it does only once its copies are done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable
from protocol.messages import Manifest
from weightsync.buckets import Bucket
from weightsync.finish import left
from weightsync.transports.served import ServedTransport
from weightsync.transports.server_line import ServerLine

_RELEASE_S = 5.0


class IpcTransport(ServedTransport[tuple[str, ...]]):
    """Wire time is hidden: what `apply` does is one call with all tensors."""

    _same_host = True
    _reads_later = True
    _settling: asyncio.Task[None] | None = None

    async def _enter(self, line: ServerLine, end: float) -> None:
        """Raises: `TransportFailed` where the server is known to be on another GPU."""
        await line.ask("near", deadline_s=left(end), gpus=self._gpus)

    async def _make_ready(self, line: ServerLine, manifest: Manifest, buckets: Sequence[Bucket], end: float) -> tuple[str, ...]:
        """One payload for each rank of the engine."""
        del buckets
        answer = await line.ask("handles", deadline_s=left(end), version=str(manifest.version), ranks=self._ranks)
        return tuple(str(payload) for payload in answer["payloads"])

    async def _move(self, line: ServerLine, manifest: Manifest, ready: tuple[str, ...], end: float) -> None:
        del line
        await self._control.update_from_tensor(ready, load_format=None, version=str(manifest.version), deadline_s=left(end))

    async def _given(self, line: ServerLine, manifest: Manifest) -> None:
        await self._stop_settling()
        self._settling = asyncio.create_task(self._settle(line, manifest), name="transport:settle")

    async def _settle(self, line: ServerLine, manifest: Manifest) -> None:
        """Give the memory back once the engine has decoded. If it never does the hold lasts until the line ends, which it does with the engine."""
        with contextlib.suppress(ApplyFailed, EngineUnavailable, DecodeError):
            await self._control.probe(deadline_s=self._config.apply_deadline_s)
            await line.ask("release", deadline_s=_RELEASE_S, version=str(manifest.version))

    async def _leave(self, limit_s: float) -> None:
        await self._stop_settling()
        with contextlib.suppress(ApplyFailed, EngineUnavailable, DecodeError):
            await self._control.close_session(deadline_s=limit_s)

    async def _stop_settling(self) -> None:
        task, self._settling = self._settling, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
