"""The audit of a run, read incrementally: a look at a run costs the same on its first and on its last day.

The trainer moves the stream into `audit.jsonl` and trims it. A follower that can see this file reads both, stream first, so an entry on its way from one to
the other is found in at least one of them. One that cannot (another machine) counts from the oldest entry that was left when it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import orjson

from buffer.bias import BiasTally
from deploy.tally import Tally
from protocol.audit import event
from protocol.connection import Client
from protocol.errors import DecodeError
from protocol.keys import Keys
from protocol.messages import Event

_LOG = logging.getLogger(__name__)
_NOT_OURS = (DecodeError, ValueError, KeyError, TypeError, AttributeError)
_BATCH = 500
_FILE_BYTES = 4 << 20
_START = "0-0"


class AuditFollower:
    """Call `advance` now and then; read `tally`. Holds a few thousand steps at most."""

    def __init__(self, client: Client, keys: Keys, spill: Path | None = None) -> None:
        self._client = client
        self._keys = keys
        self._spill = spill
        self._offset = 0
        self._last = _START
        self.tally = Tally()
        self.bias = BiasTally()
        self.complete = True
        """False: it came late and could not read what was trimmed before."""

    async def advance(self) -> None:
        """Read on until there is nothing new. Raises: redis errors; then nothing is lost, the next call reads it."""
        if self._last == _START and (self._spill is None or not self._spill.exists()):
            first = await self._range("-", 1)
            self.complete = not first or first[0][1].get(b"op") == b"created"
        while True:
            batch = await self._range(f"({self._last}", _BATCH)
            await self._read_spill()
            for entry_id, entry in batch:
                self._take_raw(entry_id, entry)
            if len(batch) < _BATCH:
                return
            await asyncio.sleep(0)

    async def _range(self, low: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return cast("list[tuple[bytes, dict[bytes, bytes]]]", await self._client.xrange(self._keys.audit, min=low, count=count))

    async def _read_spill(self) -> None:
        """Whole new lines of the file; in parts, so that a long file does not hold up the loop."""
        while self._spill is not None:
            text = await asyncio.to_thread(_read_part, self._spill, self._offset)
            end = text.rfind(b"\n") + 1
            if not end:
                return
            self._offset += end
            for line in text[:end].splitlines():
                self._take_line(line)

    def _take_raw(self, entry_id: bytes, entry: Mapping[bytes, bytes]) -> None:
        try:
            self._take(event(entry_id, entry))
        except _NOT_OURS as problem:
            self._pass_over(entry_id.decode(), problem)

    def _take_line(self, line: bytes) -> None:
        try:
            wire = orjson.loads(line)
            self._take(Event(id=wire["id"], op=wire["op"], fields=wire["d"]))
        except _NOT_OURS as problem:
            self._pass_over(self._last, problem)

    def _take(self, entry: Event) -> None:
        if _order(entry.id) > _order(self._last):
            self._last = entry.id
            self.tally.take(entry)
            self.bias.take(entry)

    def _pass_over(self, entry_id: str, problem: Exception) -> None:
        """What somebody else wrote there must not end the view of everything after it."""
        self._last = max(self._last, entry_id, key=_order)
        _LOG.warning("audit entry %s is no event of rollstream and is passed over: %r", entry_id, problem)


def _read_part(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_FILE_BYTES)
    except FileNotFoundError:
        return b""


def _order(entry_id: str) -> tuple[int, int]:
    left, _, right = entry_id.partition("-")
    return int(left), int(right)
