"""From the audit stream to a file of the run: the stream stays short, the file has everything (rule R3).

ledger scripts, emit() ──XADD──► stream ──AuditSpill──► audit.jsonl (fsync, then trim)
                                    └───── tail ───────────┴──► read_audit()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import orjson
from redis.exceptions import RedisError

from buffer.witness import drop_torn_line, whole_lines
from protocol.audit import event
from protocol.connection import Client, asking
from protocol.durable import append
from protocol.errors import DecodeError, RedisUnavailable
from protocol.failpoints import Failpoint, failpoint
from protocol.keys import Keys
from protocol.messages import Event, JsonValue

_LOG = logging.getLogger(__name__)
_BATCH = 1000
_EVERY_S = 1.0
"""An fsync at most once in so long."""
_CLOSE_S = 10.0


class AuditSpill:
    """Moves the audit stream of a run into `path` while the context is open, and what is left when it closes.

    Consumes: the stream. Produces: lines `{"id", "op", "d"}` in the order of the stream. Waits for: the next second. Unblocked by: leaving the context.
    Invariant: an entry leaves the stream only after its line is on the disk. Two spills of one run (a fenced trainer still alive) write an entry twice
    at worst; `read_audit` counts it once.
    """

    def __init__(self, client: Client, keys: Keys, path: Path) -> None:
        self._client, self._keys, self._path = client, keys, path
        self._last = "0-0"
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(drop_torn_line, self._path)
        self._last = await asyncio.to_thread(_last_id, self._path)
        self._task = asyncio.create_task(self._run(), name="audit:spill")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._stop.set()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._task
            except TimeoutError:
                _LOG.warning("the audit stream was not spilled within %.0f s; its tail stays in Redis", _CLOSE_S)

    async def flush(self) -> int:
        """Spill everything that is in the stream now; the number of entries. Raises: `RedisUnavailable`, `OSError`; nothing is lost then."""
        count = 0
        while entries := await _page(self._client, self._keys, f"({self._last}"):
            lines = b"".join(_line(one) for one in _events(entries))
            await asyncio.to_thread(append, self._path, lines)
            failpoint(Failpoint.AUDIT_APPENDED)
            self._last = entries[-1][0].decode()
            count += len(entries)
            with asking("audit"):
                await self._client.xtrim(self._keys.audit, minid=_next_id(self._last), approximate=False)
            if len(entries) < _BATCH:
                break
        return count

    async def _run(self) -> None:
        stopping = False
        while not stopping:  # one more round after the stop, for what came last
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._stop.wait()
            stopping = self._stop.is_set()
            try:
                await self.flush()
            except (RedisUnavailable, RedisError, OSError) as problem:  # the stream keeps what the file has not; the next round tries again
                _LOG.warning("audit stream not spilled: %s", problem)


async def read_audit(path: Path, client: Client | None = None, keys: Keys | None = None) -> list[Event]:
    """Every event of the run, each once, in order: the file, and the stream's tail if a client is given.

    Raises: `DecodeError` naming the line; `RedisUnavailable`.
    """
    events: dict[tuple[int, int], Event] = {}
    if client is not None and keys is not None:  # the tail first: what leaves it meanwhile is then found in the file
        low = "-"
        while entries := await _page(client, keys, low):
            for one in _events(entries):
                events[_order(one.id)] = one
            low = f"({entries[-1][0].decode()}"
    for number, raw in enumerate(await asyncio.to_thread(whole_lines, path), 1):
        one = _parse(raw, f"{path}:{number}")
        events[_order(one.id)] = one
    return [events[order] for order in sorted(events)]


async def _page(client: Client, keys: Keys, low: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    with asking("audit"):
        found = await client.xrange(keys.audit, min=low, max="+", count=_BATCH)
    return cast("list[tuple[bytes, dict[bytes, bytes]]]", found)


def _parse(raw: bytes, where: str) -> Event:
    try:
        line = orjson.loads(raw)
        return Event(id=line["id"], op=line["op"], fields=cast("Mapping[str, JsonValue]", line["d"]))
    except (ValueError, KeyError, TypeError) as problem:
        raise DecodeError(where, f"not an audit line ({problem})") from problem


def _events(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Event]:
    """What is an event of ours. An entry that somebody else wrote there must not keep the run from going on, and is told once."""
    for entry_id, entry in entries:
        try:
            yield event(entry_id, entry)
        except DecodeError as problem:
            _LOG.warning("passed over: %s", problem)


def _line(one: Event) -> bytes:
    return orjson.dumps({"id": one.id, "op": one.op, "d": one.fields}) + b"\n"


def _last_id(path: Path) -> str:
    ids: Sequence[Any] = [orjson.loads(raw)["id"] for raw in whole_lines(path)[-_BATCH:]]
    return max(ids, key=_order, default="0-0")


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)


def _next_id(entry_id: str) -> str:
    milliseconds, count = _order(entry_id)
    return f"{milliseconds}-{count + 1}"
