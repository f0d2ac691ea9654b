"""Looks at an engine behind a URL once a second, and says when its life is over.

produces: figures for the host / waits for: the next look / unblocked by: time. Ends by `EngineFault` only, for one of these:

- nobody listens there any more
- it has written no token for `engine.progress_seconds`, and does not write one that it is asked for
- it serves weights that this host did not give it: it was started again with others, or another run uses it
"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault, Figures
from producer.engine.sglang.figures import Sample, parse
from producer.engine.sglang.progress import Progress
from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable

_LOOK_S = 1.0
_ASK_S = 5.0
_FRESH_S = 3.0
"""A look older than this proves nothing about now."""
_REFUSED_LOOKS = 3
_IDLE_LOOK_S = 0.1
_REFUSALS = (ApplyFailed, EngineUnavailable, DecodeError)


class Watch:
    """One life's. `run` from when the engine is ready."""

    def __init__(self, url: str, desk: Desk, settings: EngineConfig, *, capacity: int) -> None:
        self._url, self._desk, self._settings, self._capacity = url, desk, settings, capacity
        self._control = desk.control(url)
        self._sample, self._sampled_at = Sample(), 0.0
        self._first: Sample | None = None
        self._began = time.monotonic()
        self._busy_s = 0.0
        self._refused = 0
        self._served = ""

    @property
    def figures(self) -> Figures:
        sample, first = self._sample, self._first or self._sample
        return Figures(
            running=sample.running,
            queued=sample.queued,
            capacity=self._capacity,
            generated_tokens=max(0, sample.generated_tokens - first.generated_tokens),
            busy_s=self._busy_s,
            kv_usage=sample.kv_usage,
        )

    @property
    def idle(self) -> bool:
        return self._sample.told and not self._sample.running + self._sample.queued and time.monotonic() - self._sampled_at < _FRESH_S

    async def until_idle(self) -> None:
        while True:
            await self._look()
            if self.idle:
                return
            await asyncio.sleep(_IDLE_LOOK_S)

    async def run(self) -> None:
        """Never returns. Raises: `EngineFault`."""
        progress = Progress(quiet_s=self._settings.progress_seconds, now=time.monotonic())
        while True:
            await self._look()
            now = time.monotonic()
            progress.seen(self._sample.sign, now=now)
            if self._desk.busy_with_weights:
                progress.excuse(now=now)
            await self._check_version()
            if progress.doubted(now=now):
                await self._doubt(progress)
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        try:
            async with self._desk.session.get(f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(total=_ASK_S), headers=self._desk.headers) as answer:
                text = await answer.text(errors="replace")
                sample = parse(text) if answer.status == 200 else Sample()
        except aiohttp.ClientConnectorError as problem:
            self._refused += 1
            if self._refused >= _REFUSED_LOOKS:
                raise EngineFault(f"{self._url}: nobody listens there any more ({problem.strerror or problem})") from problem
            return
        except (aiohttp.ClientError, TimeoutError, OSError, DecodeError):
            return  # what that means, progress tells
        self._refused = 0
        self._account(sample, time.monotonic())

    def _account(self, sample: Sample, now: float) -> None:
        if self._first is None:
            self._first = sample
        elif sample.idle_s is not None and self._sample.idle_s is not None:
            self._busy_s += min(now - self._sampled_at, max(0.0, now - self._sampled_at - (sample.idle_s - self._sample.idle_s)))
        elif sample.running:
            self._busy_s += now - self._sampled_at
        self._sample, self._sampled_at = sample, now

    async def _check_version(self) -> None:
        """Only an engine that was given a version, and was seen to serve it, here or by its reconciler, can be caught with another one."""
        told = self._desk.told
        if not told:
            return
        self._served = max(self._served, self._desk.proven, key=lambda version: told.index(version) if version else -1)
        try:
            served = await self._control.weight_version(deadline_s=_ASK_S)
        except _REFUSALS:
            return
        before, self._served = self._served, served if served in told else self._served
        if before and (served not in told or told.index(served) < told.index(before)):
            raise EngineFault(
                f"{self._url} served {before} and now says {served!r}, which it was not given here: it was started again with other weights, "
                "or another run gives it versions too"
            )

    async def _doubt(self, progress: Progress) -> None:
        """Ask for a token. Whatever else is new meanwhile speaks for it too: it may be busy with a long queue."""
        quiet_s, deadline_s = self._settings.progress_seconds, self._settings.probe_seconds
        asked = asyncio.create_task(self._control.probe(deadline_s=deadline_s), name="engine:probe")
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=_LOOK_S)
                await self._look()
                if progress.seen(self._sample.sign, now=time.monotonic()) or self._desk.busy_with_weights:
                    break
            else:
                await asked
        except _REFUSALS as problem:
            raise EngineFault(f"{self._url}: no new token for {quiet_s:g} s, and none within {deadline_s:g} s when asked for one: {problem}") from problem
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        progress.excuse(now=time.monotonic())
