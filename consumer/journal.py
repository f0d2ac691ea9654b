"""The journal's tail that goes into checkpoints (rule T5): what every step since the oldest kept checkpoint was made of, so that a ledger can be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.contract import ChunkRecord
from buffer.journal_codec import decode_chunk, encode_chunk
from protocol.errors import DecodeError
from protocol.frames import open_frame, write_frame

_TAIL = "checkpoint_journal"
_MAX_BYTES = 1 << 32


class JournalTail:
    """Encoded chunks by step, ascending. Encoded once, when the step is trained, so that a checkpoint costs little for a long tail."""

    def __init__(self) -> None:
        self._steps: dict[int, list[bytes]] = {}

    def add(self, step: int, chunks: Sequence[ChunkRecord]) -> None:
        self._steps[step] = [encode_chunk(chunk) for chunk in chunks]

    def forget(self, up_to: int) -> None:
        """Drop steps that the oldest kept checkpoint covers."""
        for step in [step for step in self._steps if step <= up_to]:
            del self._steps[step]

    def dump(self) -> bytes:
        return write_frame(_TAIL, {"steps": [[step, *chunks] for step, chunks in self._steps.items()]})

    @classmethod
    def load(cls, data: bytes) -> JournalTail:
        """Raises: `DecodeError`."""
        tail = cls()
        tail._steps = _open(data)
        return tail


def read_journal(data: bytes) -> dict[int, tuple[ChunkRecord, ...]]:
    """Every step of a checkpoint's journal with its chunks. Raises: `DecodeError`."""
    return {step: tuple(decode_chunk(chunk) for chunk in chunks) for step, chunks in _open(data).items()}


def _open(data: bytes) -> dict[int, list[bytes]]:
    entries = open_frame(_TAIL, data, _MAX_BYTES).get("steps")
    steps: dict[int, list[bytes]] = {}
    for entry in entries if isinstance(entries, list) else (None,):
        if not (isinstance(entry, list) and entry and isinstance(entry[0], int) and all(isinstance(chunk, bytes) for chunk in entry[1:])):
            raise DecodeError(f"{_TAIL}.steps", "expected [step, chunk, …] of each step")
        steps[entry[0]] = entry[1:]
    return steps
