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
    """Reach the stores before the run depends on them. A run that is being made, `about`, says in each that it is its own; one that goes on, None, must find
    it said there: an empty store in its place would make everything in the right one count as lost. Blocks.

    Raises: `ConfigError` naming the key for a store that refuses, or is not the run's; `RunExists` where a new run would write into the recording of an
    earlier one.
    """
    spill, blobs = storage.spill, storage.blobs
    if spill is not None:
        with _reached("buffer.spill"):
            if about is None and not spill.described():
                raise ConfigError(_not_the_runs("buffer.spill", f"{spill.url}/about.json"))
            if about is not None:
                if steps := spill.steps():
                    raise RunExists(f"{spill.url} holds {len(steps)} steps of an earlier run: use another run.name or buffer.spill, or move it away")
                spill.describe(about)
    if blobs is not None:
        with _reached("buffer.blobs"):
            if about is not None:
                blobs.claim()
            elif not blobs.claimed():
                raise ConfigError(_not_the_runs("buffer.blobs", blobs.mark))


@contextlib.contextmanager
def _reached(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"{key}: {problem}; correct it, or make it writable") from problem


def _not_the_runs(key: str, mark: str) -> str:
    return (
        f"{key} of the run is not here: there is no {mark}. A relative path is one of the folder that a process is started in: start this one where the run "
        "was made, or mount its storage here. If what lay there is lost for good, put an empty file of that name there"
    )


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
