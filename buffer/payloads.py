"""A payload as stored against the header that describes it (rule P2)."""

from __future__ import annotations

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
