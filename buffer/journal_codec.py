"""Journalled chunks as frames: in checkpoints and in recordings. What a chunk was judged by is in it, so whoever reads it masks the same tokens (rule T2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer.contract import ChunkRecord, StepRecord
from protocol.codec import decode, encode
from protocol.errors import DecodeError
from protocol.frames import open_frame, write_frame
from protocol.messages import GroupHeader
from protocol.versions import Fork, Lineage

_CHUNK = "chunk_record"
_MAX_BYTES = 1 << 32


def encode_chunk(chunk: ChunkRecord) -> bytes:
    """The chunk as a frame, its record with it."""
    record = chunk.record
    return write_frame(
        _CHUNK,
        {
            "step": chunk.step,
            "chunk": chunk.chunk,
            "revision": chunk.revision,
            "last": chunk.last,
            "headers": [encode(header) for header in chunk.headers],
            "record": {name: getattr(record, name) for name in ("step", "incarnation", "groups", "chunk", "cutoff")} | {"guard": str(record.guard)},
            "head": record.lineage.head,
            "forks": [[incarnation, *fork] for incarnation, fork in sorted(record.lineage.forks.items())],
        },
    )


def decode_chunk(data: bytes | memoryview) -> ChunkRecord:
    """Raises: `DecodeError`."""
    body = open_frame(_CHUNK, data, _MAX_BYTES)
    try:
        return ChunkRecord(
            step=int(body["step"]),
            chunk=int(body["chunk"]),
            revision=int(body["revision"]),
            last=bool(body["last"]),
            headers=tuple(decode(GroupHeader, header) for header in body["headers"]),
            record=_record(body),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise DecodeError(_CHUNK, str(problem)) from problem


def _record(body: Mapping[str, Any]) -> StepRecord:
    forks = {int(incarnation): Fork(int(parent), int(step)) for incarnation, parent, step in body["forks"]}
    return StepRecord(**body["record"], lineage=Lineage(forks, int(body["head"])))
