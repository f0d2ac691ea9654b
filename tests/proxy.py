"""A TCP proxy on this machine that makes a network bad: slow, narrow, silent, or cut in the middle of a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE = 16 << 10


@dataclass(eq=False)
class Proxy:
    """Between whoever connects to `url` and a server on `target`. Everything below may be changed while it runs."""

    target: int
    delay_s: float = 0.0
    """Added to each piece, each way."""
    bytes_per_s: float = 0.0
    """Of one connection, each way; 0: as fast as it goes."""
    reset_after: int = 0
    """The next connection that has sent so many bytes in all is cut, once; 0: none is."""
    resets: int = 0
    """Connections that were cut so."""
    forwarded: int = 0
    """Bytes towards the server."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """From now on nothing passes; connections stay open, and new ones are accepted."""
        self._open.clear()

    def speak(self) -> None:
        self._open.set()

    async def start(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):  # asyncio prints what a connection handler raises
            pass
        finally:
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(writer.transport.abort)
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.target)
            stack.callback(upstream_writer.transport.abort)
            both = [
                asyncio.create_task(self._pass(reader, upstream_writer, up=True), name="proxy:up"),
                asyncio.create_task(self._pass(upstream_reader, writer, up=False), name="proxy:down"),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        sent = 0
        while piece := await reader.read(_PIECE):
            await self._open.wait()
            pause_s = self.delay_s + (len(piece) / self.bytes_per_s if self.bytes_per_s else 0.0)
            if pause_s:
                await asyncio.sleep(pause_s)
            sent += len(piece)
            if up and self.reset_after and sent >= self.reset_after:
                self.reset_after, self.resets = 0, self.resets + 1
                return
            self.forwarded += len(piece) if up else 0
            writer.write(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def proxy(target: int) -> AsyncIterator[Proxy]:
    made = Proxy(target)
    await made.start()
    try:
        yield made
    finally:
        await made.close()
