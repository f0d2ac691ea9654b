"""Who evaluates: one producer at a time, by a lock in Redis that expires, and each evaluation once, by a record beside it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from protocol.connection import Client, Script
from protocol.errors import RedisUnavailable
from protocol.keys import Keys
from protocol.messages import JsonValue

T = TypeVar("T")
TTL_S = 10.0
_RENEW_S = TTL_S / 4
_GIVE_BACK_S = 1.0
_CLAIM = Script("producer", "lua/eval_claim.lua", flags="allow-oom")
_END = Script("producer", "lua/eval_end.lua", flags="allow-oom")


class Phase(StrEnum):
    """When an evaluation happens."""

    FIRST = "first"
    """Before anything is trained, once a run."""
    PERIODIC = "periodic"
    FINAL = "final"
    """After the run has ended, once for each version it ended with."""
    CHECKPOINT = "checkpoint"
    """By hand, of a model that was saved; nobody is elected for it."""


class Turn(StrEnum):
    MINE = "mine"
    """This process evaluates now."""
    DONE = "done"
    """It has been recorded."""
    EARLY = "early"
    """Not due yet."""
    HELD = "held"
    """Another process is at it."""


class Election:
    """One process's part in the elections of a run."""

    def __init__(self, client: Client, keys: Keys, *, every_s: float) -> None:
        self._client = client
        self._keys = keys
        self._records, self._lock = keys.key("eval"), keys.key("eval:lock")
        self._every_ms = int(every_s * 1000)
        self._token = secrets.token_hex(8)

    async def claim(self, phase: Phase, version: str = "") -> tuple[Turn, float]:
        """The answer, and seconds until asking again may give another. Raises: `RedisUnavailable`."""
        answer, wait_ms = await _CLAIM(self._client, keys=[self._records, self._lock], args=[phase, version, self._token, int(TTL_S * 1000), self._every_ms])
        return Turn(answer.decode()), int(wait_ms) / 1000

    async def record(self, phase: Phase, version: str, results: Sequence[Mapping[str, JsonValue]]) -> bool:
        """Put the results, one of each set, into the audit stream and give the lock back; False if the lock was lost meanwhile, and nothing was recorded."""
        return await self._end(phase, version, "eval", *results)

    async def record_failure(self, phase: Phase, version: str, fields: Mapping[str, JsonValue]) -> bool:
        """As `record`, for an evaluation that is given up: the audit event is `eval_failed`, which has no figure that a reader could take for a result."""
        return await self._end(phase, version, "eval_failed", fields)

    async def holding(self, phase: Phase, version: str, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, with the lock that `claim` gave renewed meanwhile; None if it went to another process, and `work` was cancelled.

        The lock is given back unless `record` did so.
        """
        try:
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._renew(phase, version), name="producer:eval-lock")
                task = group.create_task(work, name=f"producer:eval-{phase}")
                task.add_done_callback(lambda _: renewal.cancel())
            return task.result()
        except* _ElectionLost:
            pass
        finally:
            with contextlib.suppress(RedisUnavailable, TimeoutError):  # it expires by itself
                async with asyncio.timeout(_GIVE_BACK_S):
                    await self._end("", "", "")
        return None

    async def _renew(self, phase: Phase, version: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(RedisUnavailable):  # then it expires, and the next claim tells
                answer, _ = await self.claim(phase, version)
                if answer is not Turn.MINE:
                    raise _ElectionLost

    async def _end(self, phase: str, version: str, op: str, *events: Mapping[str, JsonValue]) -> bool:
        keys = [self._records, self._lock, self._keys.audit, self._keys.wakeups]
        return bool(await _END(self._client, keys=keys, args=[phase, version, self._token, op, *(orjson.dumps(dict(fields)) for fields in events)]))


class _ElectionLost(Exception):
    """The lock expired under us and another process has it."""
