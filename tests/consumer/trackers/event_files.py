"""TensorBoard's event files read back, record by record: the length in 8 bytes, its checksum in 4, the event, its checksum in 4."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of all files in `folder`, the oldest first."""
    return [(event.step, value.tag, value.simple_value) for event in _events(folder) for value in event.summary.value]


def begun(folder: Path) -> list[int]:
    """The steps at which lives of the writer said that what earlier ones wrote from there on is void."""
    return [event.step for event in _events(folder) if event.session_log.status == event.session_log.START]


def _events(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
