"""What a run keeps outside Redis, as its settings say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buffer.blobs import BlobStore
from buffer.config import BufferConfig
from buffer.contract import ChunkRecord, Ledger
from buffer.payloads import by_bytes
from buffer.recording import Recording, RecordingAbout
from protocol.errors import ConfigError, PayloadLost, RunExists, StorageUnavailable
from protocol.messages import GroupHeader, Seq, SlotToken
from protocol.objects import object_store

_READ_BYTES = 2 << 20
"""At once: a pipeline of many large payloads is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """None: the run does not have it."""

    spill: Recording | None = None
    """Steps that have left Redis; a folder of the run's own below `buffer.spill`."""
    blobs: BlobStore | None = None
    """Large extras; shared by the runs that name it, each below its own name."""


def open_storage(settings: BufferConfig, run: str) -> Storage:
    """The stores that `buffer.spill` and `buffer.blobs` name; nothing is touched yet.

    Raises: `ConfigError` naming the key, for a scheme nobody knows or a driver that is not installed.
    """
    return Storage(
        spill=Recording(object_store(f"{settings.spill.rstrip('/')}/{run}", key="buffer.spill")) if settings.spill else None,
        blobs=BlobStore(object_store(settings.blobs, key="buffer.blobs"), run) if settings.blobs else None,
    )


def claim_storage(storage: Storage, about: RecordingAbout | None) -> None:
    """Reach the stores before the run depends on them, and say in each whose it is. `about`: a run that is being made; None: one that goes on. Blocks.

    Raises: `ConfigError` naming the key for a store that refuses; `RunExists` where a new run would write into the recording of an earlier one.
    """
    if storage.spill is not None:
        try:
            if about is None:
                storage.spill.steps()
            elif steps := storage.spill.steps():
                raise RunExists(f"{storage.spill.url} holds {len(steps)} steps of an earlier run: use another run.name or buffer.spill, or move it away")
            else:
                storage.spill.describe(about)
        except OSError as problem:
            raise ConfigError(f"buffer.spill: {problem}; correct it, or make it writable") from problem
    if storage.blobs is not None:
        try:
            storage.blobs.claim()
        except OSError as problem:
            raise ConfigError(f"buffer.blobs: {problem}; correct it, or make it writable") from problem


async def read_payloads(ledger: Ledger, storage: Storage, step: int, headers: Sequence[GroupHeader]) -> dict[tuple[Seq, SlotToken], bytes]:
    """What there is of these payloads of a step, verified: in Redis, else in the spill. One that is nowhere is left out; the caller bounds the bytes.

    Raises: `StorageUnavailable` if the spill does not say.
    """
    with contextlib.suppress(PayloadLost):
        return {(header.seq, header.token): payload for header, payload in zip(headers, await ledger.payloads(headers), strict=True)}
    found: dict[tuple[Seq, SlotToken], bytes] = {}
    if storage.spill is not None:
        with storage_answers():
            found = await asyncio.to_thread(storage.spill.find, step, headers)
    if len(headers) > 1:
        for header in headers:
            if (header.seq, header.token) not in found:
                with contextlib.suppress(PayloadLost):
                    found[header.seq, header.token] = await ledger.payload(header)
    return found


async def read_step(ledger: Ledger, storage: Storage, step: int, chunks: Sequence[ChunkRecord]) -> dict[tuple[Seq, SlotToken], bytes]:
    """`read_payloads` of all groups of a step, a few at a time."""
    found: dict[tuple[Seq, SlotToken], bytes] = {}
    for batch in by_bytes([header for chunk in chunks for header in chunk.headers], _READ_BYTES):
        found |= await read_payloads(ledger, storage, step, batch)
    return found


@contextlib.contextmanager
def storage_answers() -> Iterator[None]:
    """Raises: `StorageUnavailable` in place of what a store refused."""
    try:
        yield
    except OSError as problem:
        raise StorageUnavailable(f"{problem}: make buffer.spill and buffer.blobs reachable from here, then try again") from problem
