"""The control channel between rank 0 and one other rank: messages in order, one connection, and its end known at once.

    rank 0 ──── Command ────► rank r        FETCH, COLLATE, ACCUMULATE, FINISH, …; one `number` for each
           ◄─── Answer ─────                DONE or REFUSED once; AGREE and BLOCKED any number of times before; FAILED: rank r ends

A command waits hours for the next one, so a line has no deadline for silence. What is dead is known all the same: a process that ends closes its
connection, and the kernels ask each other for a host that is gone (`DEAD_S`). A process that is stopped, or stuck, has a kernel that answers for it: whoever
waits for an answer gives it a deadline.

Why a socket and not torch's TCPStore, which the ranks meet at anyway: in the store a rank that was killed is silence (a waiting `get` ends at its own
deadline and at nothing else), a client has one call at a time (a `set` behind a waiting `get` of the same client came back only when the `get` timed out:
measured with torch 2.13), and under torchrun it lives in the launcher, so the death of rank 0 does not show in it. Store and process groups are for finding
each other and for tensors.

Frames are `protocol.codec` messages after their length in 4 bytes. There is no pickle: what arrives is checked field by field.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from protocol.codec import decode, encode
from protocol.errors import EXIT_FAULT, DecodeError, RollstreamError, Unavailable
from protocol.messages import JsonValue

DEAD_S = 9.0
"""After so long without a sign a host is taken for gone, and its ranks with it."""
MAX_FRAME_BYTES = 256 << 20
_LENGTH = 4
M = TypeVar("M")


class RankLost(Unavailable):
    """Another rank of this trainer is gone. Nothing is lost: the run goes on from the newest checkpoint when all ranks are started again."""


class RankFailed(RollstreamError):
    """Another rank of this trainer ended with an error of its own, which is the message; its exit code is ours."""

    def __init__(self, rank: int, problem: str, exit_code: int = EXIT_FAULT) -> None:
        super().__init__(f"rank {rank}: {problem}")
        self.exit_code = exit_code


class Call(StrEnum):
    """What rank 0 asks for."""

    WELCOME = "welcome"
    """The first: the rank is one of ours. A stranger hears nothing, and rank 0 of an earlier life is nobody's."""
    BEGIN = "begin"
    """This is the incarnation whose chunks follow."""
    FETCH = "fetch"
    """Read your share of `chunk`, and keep it."""
    AGREED = "agreed"
    """Of the fetch `number`: the lowest and the highest revision of all ranks."""
    COLLATE = "collate"
    """Make a batch of what was fetched of the step's chunks `first` to `chunk`."""
    ACCUMULATE = "accumulate"
    FINISH = "finish"
    ABANDON = "abandon"
    SNAPSHOT = "snapshot"
    DIGEST = "digest"
    CAPTURE = "capture"
    WRITE = "write"
    """Write what was captured last into the checkpoint folder `words`, while training goes on."""
    RESTORE = "restore"
    """From the checkpoint `words`; "": by broadcast."""
    STOP = "stop"
    """Leave in good order."""
    END = "end"
    """The trainer ends by `words`: leave at once."""


class Kind(StrEnum):
    """What another rank answers."""

    DONE = "done"
    AGREE = "agree"
    BLOCKED = "blocked"
    REFUSED = "refused"
    """The ledger refused what a fetch asked of it (`error`); this rank goes on."""
    FAILED = "failed"
    """This rank ends by `words`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a rank."""

    rank: int
    token: str
    """Whoever does not know it is none of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    number: int
    call: Call
    incarnation: int = 0
    step: int = 0
    first: int = 0
    chunk: int = 0
    record: bytes = b""
    """`buffer.journal_codec.encode_chunk`"""
    lowest: int = 0
    highest: int = 0
    divisor: float = 0.0
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int
    kind: Kind
    revision: int = 0
    edge: str = ""
    """BLOCKED: what is waited for."""
    share: int = 0
    """COLLATE: whose share of the chunk; two ranks that have the same one tell the same figures."""
    figures: tuple[Mapping[str, JsonValue], ...] = ()
    """COLLATE: `consumer.ranks.figures` of each chunk. WRITE: `consumer.shards.Told`; nothing where rank 0 has it all."""
    error: str = ""
    """Class name of an error of ours."""
    words: str = ""
    exit_code: int = EXIT_FAULT
    echo: bool = False
    """FAILED: seen in a collective, where the fault of any rank shows in all."""


class Line:
    """One end of the channel. Raises: `ConnectionError` once the other end is gone; `DecodeError` for what is no message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        _watch_the_host(writer.get_extra_info("socket"))

    def send(self, message: object) -> None:
        """Hand it to the kernel; what a dead end does not take is told by `receive`."""
        frame = encode(message)
        with contextlib.suppress(OSError, RuntimeError):  # uvloop's, of a transport that it has closed
            self._writer.write(len(frame).to_bytes(_LENGTH, "big") + frame)

    async def receive(self, kind: type[M]) -> M:
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            if size > MAX_FRAME_BYTES:
                raise DecodeError("channel", f"a frame of {size} bytes, over the limit of {MAX_FRAME_BYTES}")
            return decode(kind, await self._reader.readexactly(size))
        except asyncio.IncompleteReadError as problem:
            raise ConnectionResetError("the connection was closed") from problem
        except OSError as problem:
            raise ConnectionResetError(str(problem) or type(problem).__name__) from problem

    async def flush(self, deadline_s: float) -> None:
        """Return once the kernel has everything, or after `deadline_s`."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()


def _watch_the_host(connection: socket.socket) -> None:
    """The kernel asks after 3 s of silence, every 2 s; a host that answers none of 3 is gone. It answers for a process that is busy."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_S * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
