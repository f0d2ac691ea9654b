"""The reconciler of one engine: brings it to the newest version, one engine at a time, and nobody waits for the slowest.

`weightsync.reconcile.Core` decides when, `weightsync.fallback` which way; this edge looks, talks to the engine, and tells Redis. It lives in the process that
owns the engine (rule W1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable, ManifestError, RedisUnavailable, TransportFailed, Unavailable, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import EngineId, EngineState, Manifest
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups
from weightsync.channel import Channel
from weightsync.claim import LOCK_S, Locked
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.dialect import Dialect, PauseMode
from weightsync.fallback import Transports
from weightsync.finish import finish
from weightsync.manifests import check_manifest
from weightsync.reconcile import Apply, Core, Pause, Prepare, Sight, Wait
from weightsync.registry import Registry, UpdateTimes

_LOG = logging.getLogger(__name__)
RESUME_S = 5.0
"""Time kept back, after the deadline of an update, to let the engine go on."""
_MARGIN_S = 2.0
_CLEANUP_S = RESUME_S + _MARGIN_S
RENEW_S = LOCK_S / 4
"""Between two renewals of the lock while a version is prepared."""
PREPARE_S = 300.0
"""Time to get a version ready while the engine serves; past it the version is looked for anew."""
WHOLE_S = 30.0
"""Of a machine that cannot make a version from a delta, how long it goes for whole versions before it tries again."""
_ASK_S = 2.0
_ALL = 1 << 30
"""As many as there are."""
_FLUSH_S = 2.0
_REFUSALS = (ApplyFailed, EngineUnavailable, DecodeError)


@dataclass(slots=True)
class Totals:
    """Counters since this reconciler started, for the engine's status."""

    updates: int = 0
    paused_s: float = 0.0
    failures: int = 0
    trouble: str = ""
    """Why the newest version is not served yet; empty while all is well."""
    transport: str = ""
    """What brought the version that is served; empty before the first."""
    silent: int = 0
    """Times in a row that the engine was to join a group or to take an update and answered no more, or wrote no token after it: it hangs, and whoever owns its
    process ends it (rule W6)."""


class Reconciler:
    """`await Reconciler(...).run()` in a task of the engine host, beside the heartbeat.

    consumes: the weight pointer / produces: an engine that serves it, acked / waits for: a newer version, a repair, a pause / unblocked by: wake-ups `weights`
    (for a pause also `engines`), and a look every second.
    """

    def __init__(
        self,
        engine_id: EngineId,
        boot_nonce: str,
        *,
        control: EngineControl,
        channel: Channel,
        registry: Registry,
        transports: Transports,
        config: WeightsConfig,
        wakeups: Wakeups,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`idle`: whether the engine has no request now, so that pausing it, off the routes, pauses nobody (rule W8)."""
        self._engine_id = engine_id
        self._boot_nonce = boot_nonce
        self._control = control
        self._registry = registry
        self._transports = transports
        self._config = config
        self._wakeups = wakeups
        self._idle = idle
        self._claim = channel.claim(engine_id, boot_nonce)
        self._core = Core(min_interval_s=config.min_interval_s)
        self._manifest: Manifest | None = None
        self._prepare_s = 0.0
        self._holds_pause = False
        self._whole_until = 0.0
        self._why_whole = ""
        self._published: Version | None = None
        """The newest version, which is not what this engine goes for while its machine can have whole ones only."""
        self._apply_until = 0.0
        """Counted from when the pause was asked for, as its validity is: a process that hangs in between applies nothing on a lock it has lost."""
        self._maybe_paused = False
        """The engine was paused, by us or by whoever had it before, and has not answered that it goes on."""
        self._dialect: Dialect | None = None
        self._warned = False
        self.totals = Totals()

    @property
    def span_lag(self) -> int:
        """For the engine's status: tokens after an update that its spans give to the new version although the old one sampled them."""
        return 0 if self._dialect is None else self._dialect.span_lag(self._config.pause_mode)

    async def run(self) -> None:
        """Follow the newest version until cancelled. Order of stopping: an update under way is broken off, the engine goes on, the lock is free.

        Raises: `Superseded` (another process has this engine now), `RedisUnavailable`.
        """
        mine, self._holds_pause = False, False
        self._core.lost()  # it may have run before, and been cancelled
        try:
            while True:
                mark = self._wakeups.mark(Topic.WEIGHTS, Topic.ENGINES)
                locked_until = time.monotonic() + LOCK_S
                seen = await self._claim.look(self._manifest.version if self._manifest else None, whole=time.monotonic() < self._whole_until)
                if isinstance(seen, Locked):
                    mine = False
                    self._core.lost()
                    await self._wakeups.wait(Topic.ENGINES, since=mark, timeout_s=min(seen.for_s, RECHECK_S))
                    continue
                if not mine and seen.state is not None:
                    mine = await self._take_over(seen.state, locked_until - _MARGIN_S)
                    continue
                if seen.manifest is not None:
                    self._manifest = seen.manifest
                self._published = seen.published
                self._core.seen(Sight(seen.newest, seen.state, seen.acked))
                if self._core.up_to_date:  # also where the pointer fell back to what is served (rule R1)
                    self._well(self._core.serving)
                if seen.published != seen.newest:
                    self.totals.trouble = self.totals.trouble or self._why_whole
                if self._maybe_paused:
                    await self._go_on(locked_until - _MARGIN_S)
                wait = await self._work()
                timeout_s = RECHECK_S if wait.until is None else min(RECHECK_S, max(0.0, wait.until - time.monotonic()))
                topics = (Topic.WEIGHTS, Topic.ENGINES) if wait.for_pause else (Topic.WEIGHTS,)
                await self._wakeups.wait(*topics, since=mark, timeout_s=timeout_s)
        finally:
            try:
                await _finish(self._transports.aclose(), "transports")
            finally:
                await _finish(self._claim.release(), "lock")

    async def _take_over(self, state: EngineState, end: float) -> bool:
        """Whoever had the engine before may have left it half-updated: off the routes until the newest version is applied in full (rule W1).

        False: so much of the lock was used up before the engine could be asked that it must be renewed first.
        """
        if state is EngineState.ROUTABLE:
            await self._registry.mark_unfit(self._engine_id, self._boot_nonce, "its reconciler was replaced")
        if _left(end) <= 0:
            return False
        self._maybe_paused = True
        with contextlib.suppress(*_REFUSALS):
            await self._control.close_session(deadline_s=min(_ASK_S, _left(end)))
            if await self._control.ready(deadline_s=min(_ASK_S, _left(end))):
                self._maybe_paused = False
            else:  # half-updated, perhaps: what would go on under weights nobody vouches for ends, then no pause outlives its owner
                await self._control.abort_all(deadline_s=min(_ASK_S, _left(end)))
                await self._go_on(end)
        return True

    async def _go_on(self, end: float) -> None:
        """Tell an engine that may still be paused, and is off the routes, to decode."""
        with contextlib.suppress(*_REFUSALS):
            await self._control.resume(deadline_s=min(_ASK_S, _left(end)))
            self._maybe_paused = False

    async def _work(self) -> Wait:
        """Do what the core says until it waits."""
        while True:
            command = self._core.next(time.monotonic())
            match command:
                case Wait():
                    return command
                case Prepare(version):
                    await self._prepare(version)
                case Pause(version):
                    await self._ask(version)
                case Apply(version):
                    await self._apply(version)

    async def _prepare(self, version: Version) -> None:
        started = time.monotonic()
        try:
            if self._manifest is None or self._manifest.version != version:
                raise VersionGone(f"version {version} has no manifest any more")
            await self._holding(self._get_ready(self._manifest))
        except (ManifestError, OSError, *_REFUSALS) as problem:
            await self._prepare_failed(version, problem)
            return
        self._prepare_s = time.monotonic() - started
        failpoint(Failpoint.ENGINE_PREPARED)
        self._core.prepared(version)

    async def _get_ready(self, manifest: Manifest) -> None:
        with contextlib.suppress(*_REFUSALS):  # asked again when it is needed
            self._dialect = await self._control.dialect(deadline_s=_ASK_S)
        check_manifest(manifest)
        asked = self._control.calls
        try:
            await self._transports.prepare(manifest, deadline_s=PREPARE_S)
        except asyncio.CancelledError:
            asked = self._control.calls  # whoever hears no answer here did not wait for one
            raise
        finally:
            if self._control.silent_since(asked):  # also where the store has it now; an answer proves little here, since the engine need not decode for it
                self.totals.silent += 1

    async def _holding(self, work: Coroutine[Any, Any, None]) -> None:
        """`work` while the lock is renewed, since it may take longer and may talk to the engine (rule W1).

        Raises: what `work` raises; `Superseded` when the lock is lost, and then `work` is cancelled.
        """
        task, renewal = asyncio.create_task(work, name="reconciler:prepare"), asyncio.create_task(self._renew(), name="reconciler:lock")
        try:
            await asyncio.wait({task, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await renewal  # which has failed
            await task
        finally:
            for one in (task, renewal):
                one.cancel()
            await asyncio.gather(task, renewal, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._claim.renew()

    async def _prepare_failed(self, version: Version, problem: Exception) -> None:
        """The engine was not touched and goes on. A version that is gone is ordinary: a newer one is there, or will be."""
        self._core.prepare_failed(time.monotonic())
        broken = isinstance(problem, TransportFailed | ManifestError) and not isinstance(problem, VersionGone)
        if broken and self._manifest is not None and self._manifest.kind == "delta":
            self._whole_until, self._why_whole = time.monotonic() + WHOLE_S, f"whole versions only, since {version} cannot be had: {problem}"
        if self._trouble(f"prepare {version}: {problem}") and not isinstance(problem, VersionGone):
            await self._registry.prepare_failed(self._engine_id, version, str(problem))

    async def _ask(self, version: Version) -> None:
        config = self._config
        valid_s = config.apply_deadline_s + RESUME_S + _MARGIN_S
        self._apply_until = time.monotonic() + config.apply_deadline_s
        most, share = (config.max_paused, config.min_serving_share) if self._control.stands_still else (_ALL, 0.0)
        if await self._claim.pause(version, most=most, valid_s=valid_s, idle=self._idle(), serving_share=share):
            self._holds_pause = True
            self._core.granted()
        else:
            self._core.refused()

    async def _give_pause(self) -> None:
        if self._holds_pause:
            self._holds_pause = False
            await self._claim.resumed()

    async def _apply(self, version: Version) -> None:
        """Pause, load, continue, verify, ack. Whatever happens, the engine is told to continue; if it did not take the version, it is unfit first."""
        end = self._apply_until
        manifest = self._manifest
        assert manifest is not None, "a version that is prepared has a manifest"
        if _left(end) <= 0:  # the process hung since it asked: others may have the pause by now, or the engine
            await self._give_pause()
            self._core.lapsed()
            return
        try:
            times = await self._update(manifest, end)
            failpoint(Failpoint.ENGINE_RESUMED)
            await self._give_pause()
            await self._verify(version, end)
        except VersionGone as problem:
            await self._give_pause()
            await self._prepare_failed(version, problem)
            return
        except (ManifestError, OSError, *_REFUSALS) as problem:
            await self._failed(version, problem)
            return
        self._transports.verified()
        if await self._registry.ack(self._engine_id, self._boot_nonce, version, reconciler=self._claim.owner, times=times):
            failpoint(Failpoint.ENGINE_ACKED)
            self._core.applied(version, time.monotonic())
            self.totals.updates += 1
            self.totals.transport = times.transport
            self._well(version)
        else:  # the registry forgot this boot in an outage: its next beat registers it anew, and it starts over
            self._core.apply_failed(time.monotonic())

    async def _update(self, manifest: Manifest, end: float) -> UpdateTimes:
        started = loading = loaded = time.monotonic()
        touched, mode, asked = False, self._config.pause_mode, self._control.calls
        try:
            speaks = self._dialect or await self._control.dialect(deadline_s=min(_ASK_S, _left(end)))
            mode = self._safe_mode(speaks)
            started, self._maybe_paused = time.monotonic(), True
            await self._control.pause(mode, deadline_s=_left(end))
            failpoint(Failpoint.ENGINE_PAUSED)
            loading, touched = time.monotonic(), True
            await self._transports.apply(manifest, deadline_s=_left(end))
            loaded = time.monotonic()
            failpoint(Failpoint.ENGINE_LOADED)
            if speaks.prefix_cache and mode != "in_place":
                await self._forget(end)
            touched = False
            await self._control.resume(deadline_s=_left(end))
            self._maybe_paused = False
        except BaseException as problem:
            if isinstance(problem, Exception):
                self._listen(asked)
            if isinstance(problem, VersionGone):
                await self._go_on(end)
            if self._maybe_paused:
                await _finish(self._let_go(_reason(manifest.version, problem), touched=touched), "let-go")
            raise
        finally:
            paused_s = time.monotonic() - started if self._control.stands_still else 0.0
            self.totals.paused_s += paused_s
        return UpdateTimes(pause_s=paused_s, apply_s=loaded - loading, prepare_s=self._prepare_s, transport=self._transports.name, pause_mode=mode)

    def _safe_mode(self, speaks: Dialect) -> PauseMode:
        wanted = self._config.pause_mode
        mode = speaks.pause_mode(wanted)
        if mode != wanted and not self._warned:
            self._warned = True
            why = "its prefix cache would mix keys of two versions; start it with --disable-radix-cache, or use SGLang 0.5.21"
            if speaks.halves:
                why = "what is on its way between its halves outlives any other pause"
            _LOG.warning("engine %s pauses by %s, not %s: %s", self._engine_id, mode, wanted, why)
        return mode

    async def _forget(self, end: float) -> None:
        """No request after this update reuses keys and values from before it. What is alive and in the way ends first; it goes on elsewhere.

        Raises: `ApplyFailed`.
        """
        if await self._control.flush_cache(deadline_s=_left(end)):
            return
        await self._control.abort_all(deadline_s=_left(end))
        if not await self._control.flush_cache(deadline_s=_left(end), patience_s=_FLUSH_S):
            raise ApplyFailed("the engine keeps the keys and values of its old weights: it refuses to empty its cache")

    async def _let_go(self, reason: str, *, touched: bool) -> None:
        """Never leave an engine paused. Requests that would go on over weights nobody vouches for end first; they are sampled again elsewhere.

        Raises: `Superseded` when this process hung for so long that another has the engine now, and may be loading it: it lets it go on.
        """
        until = self._apply_until + _MARGIN_S + RESUME_S
        with contextlib.suppress(Unavailable, TimeoutError):  # without Redis its route runs out by itself
            async with asyncio.timeout(RESUME_S / 4):
                await self._registry.mark_unfit(self._engine_id, self._boot_nonce, reason)
        if _left(until) < RESUME_S * 3 / 4:
            until = await self._lock_again()
        if touched:
            with contextlib.suppress(*_REFUSALS):
                await self._control.close_session(deadline_s=min(RESUME_S / 4, _left(until)))
            with contextlib.suppress(*_REFUSALS):
                await self._control.abort_all(deadline_s=min(RESUME_S / 4, _left(until)))
        with contextlib.suppress(*_REFUSALS):
            await self._control.resume(deadline_s=min(RESUME_S / 4, _left(until)))
            self._maybe_paused = False

    async def _lock_again(self) -> float:
        """Until when the lock, which may have run out, is surely held. Raises: `Superseded` (another has it), `RedisUnavailable`."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(RESUME_S / 4):
                await self._claim.renew()
        except TimeoutError as problem:
            raise RedisUnavailable("the lock of a reconciler that hung was not renewed in time") from problem
        return asked + LOCK_S

    async def _verify(self, version: Version, end: float) -> None:
        """The engine says so, and a token that it writes now says so: the answer to an update proves neither (rule W6)."""
        asked = self._control.calls
        try:
            if (served := await self._control.weight_version(deadline_s=_left(end))) != str(version):
                raise ApplyFailed(f"the engine took the update and says it serves {served!r}")
            written = await self._control.probe(deadline_s=_left(end))
        except _REFUSALS:
            self._listen(asked)
            raise
        self.totals.silent = 0
        self._dialect = await self._control.dialect(deadline_s=_left(end))
        if set(written) != {str(version)}:
            raise ApplyFailed(f"the engine says it serves {version}, and its next token says {', '.join(written)}")

    def _listen(self, asked: int) -> None:
        """An update failed, begun after so many calls: a refusal was answered by somebody, silence by nobody."""
        if self._control.silent_since(asked):
            self.totals.silent += 1
        elif self._control.calls > asked:
            self.totals.silent = 0

    async def _failed(self, version: Version, problem: Exception) -> None:
        reason = _reason(version, problem)
        self.totals.failures += 1
        self._transports.failed(problem)
        self._core.apply_failed(time.monotonic())
        self._trouble(reason)
        await self._registry.mark_unfit(self._engine_id, self._boot_nonce, reason)
        await self._give_pause()

    def _well(self, served: Version | None) -> None:
        """The engine serves it: where that is the newest, all is well."""
        if served == self._published:
            self.totals.trouble = ""

    def _trouble(self, reason: str) -> bool:
        """Report a problem once; False if it is the one reported last."""
        fresh = reason != self.totals.trouble
        if fresh:
            _LOG.warning("engine %s: %s", self._engine_id, reason)
        self.totals.trouble = reason
        return fresh


def _reason(version: Version, problem: BaseException) -> str:
    return f"apply {version}: {str(problem) or type(problem).__name__}"


def _left(end: float) -> float:
    return end - time.monotonic()


async def _finish(work: Coroutine[Any, Any, None], what: str) -> None:
    await finish(asyncio.create_task(work, name=f"reconciler:{what}"), limit_s=_CLEANUP_S)
