"""A payload as stored against the header that describes it (rule P2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.codec import digest
from protocol.errors import PayloadLost
from protocol.messages import GroupHeader


def check_payload(header: GroupHeader, data: bytes | None) -> bytes:
    """Raises: `PayloadLost` if `data` is not what the header describes."""
    if data is None:
        raise PayloadLost(header.seq, "is gone")
    if digest(data) != header.payload_digest:
        raise PayloadLost(header.seq, f"{len(data)} bytes do not match digest {header.payload_digest}")
    return data


def by_bytes(headers: Sequence[GroupHeader], limit: int) -> Iterator[list[GroupHeader]]:
    """The headers in order, cut so that the payloads of a batch have about `limit` bytes: a larger one is a batch of its own."""
    batch: list[GroupHeader] = []
    size = 0
    for header in headers:
        if batch and size + header.payload_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(header)
        size += header.payload_bytes
    if batch:
        yield batch
