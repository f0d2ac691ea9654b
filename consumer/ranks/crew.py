"""Who fetches and trains a chunk: this process alone, or ranks. What the training loop asks of either. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from buffer.client import TrainerBuffer
from buffer.contract import ChunkRecord
from consumer.batch import ChunkBatch, ChunkFigures
from consumer.checkpoint import nobody
from consumer.shards import Told
from protocol.messages import Edge, GroupHeader, RolloutGroup

Groups: TypeAlias = "list[tuple[GroupHeader, RolloutGroup]]"


class Collated(NamedTuple):
    """A chunk, ready to be accumulated."""

    mine: ChunkBatch
    """For this process's backend."""
    told: ChunkFigures
    """Of all of it: for statistics, the witness and the step's divisor."""


class Crew(Protocol):
    """Every rank has its part of what `fetch` returned, and of what `collate` returned, before the backend is asked for anything."""

    async def fetch(self, chunk: ChunkRecord, on_blocked: Callable[[Edge], None]) -> tuple[ChunkRecord, Groups]:
        """As `buffer.client.TrainerBuffer.fetch`; of several ranks, this one's share."""

    def collate(self, chunks: Sequence[ChunkRecord], collate: Callable[[], list[ChunkBatch]], /) -> list[Collated]:
        """`collate()` makes a batch of what was fetched of each of these chunks, in order. In the backend's thread.

        A batch is accumulated before the next is: `backend.accumulate(one.mine)` for each, in order.
        """

    def write(self, folder: Path, /) -> Callable[[], Sequence[Told]]:
        """`consumer.checkpoint.Others`: of what the backend captured last. From a thread of its own; training goes on."""


class Alone:
    """One process is the trainer."""

    def __init__(self, buffer: TrainerBuffer) -> None:
        self._buffer = buffer

    async def fetch(self, chunk: ChunkRecord, on_blocked: Callable[[Edge], None]) -> tuple[ChunkRecord, Groups]:
        return await self._buffer.fetch(chunk, on_blocked)

    def collate(self, _chunks: Sequence[ChunkRecord], collate: Callable[[], list[ChunkBatch]], /) -> list[Collated]:
        return [Collated(batch, batch.figures) for batch in collate()]

    def write(self, folder: Path, /) -> Callable[[], Sequence[Told]]:
        return nobody(folder)
