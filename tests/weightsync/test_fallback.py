from __future__ import annotations

import asyncio
import doctest
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ApplyFailed, EngineUnavailable, ManifestError, Superseded, TransportFailed, VersionGone
from protocol.messages import EngineState, Manifest
from protocol.versions import Version
from weightsync import fallback
from weightsync.claim import Locked
from weightsync.fallback import FIRST_PAUSE_S, LONGEST_PAUSE_S, Choice, Transports, Way


class Staged:
    """A way that breaks as a test says, in turn; then it works."""

    def __init__(self, name: str, *, prepare: list[Exception | None] | None = None, apply: list[Exception | None] | None = None, then: Any = None) -> None:
        self.name = name
        self.prepares, self.applies = prepare or [], apply or []
        self.then = then
        self.calls: list[str] = []
        self.hangs = False

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        self.calls.append(f"prepare {manifest.version}")
        await self._do(self.prepares)
        if self.then is not None:
            await self.then.prepare(manifest, deadline_s=deadline_s)

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        self.calls.append(f"apply {manifest.version}")
        await self._do(self.applies)
        if self.then is not None:
            await self.then.apply(manifest, deadline_s=deadline_s)

    async def aclose(self) -> None:
        self.calls.append("aclose")

    async def _do(self, stages: list[Exception | None]) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if stages and (problem := stages.pop(0)) is not None:
            raise problem


def manifest(n: int = 1) -> Manifest:
    return Manifest(version=Version(1, n), kind="full", parent="", tensors=(), digest=f"d{n}", transport="store", location="/x", total_bytes=0)


def test_the_worked_example_holds():
    assert doctest.testmod(fallback).failed == 0


def test_pauses_double_to_a_bound_and_success_forgets_them():
    choice, now, pauses = Choice(), 0.0, []
    for _ in range(10):
        assert choice.way(now) is Way.PRIMARY
        choice.prepare_failed(now)
        pause = next(seconds for seconds in range(1, 1000) if choice.way(now + seconds) is Way.PRIMARY)
        pauses.append(pause)
        now += pause
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    choice.worked(Way.PRIMARY)
    choice.prepare_failed(now)
    assert choice.way(now + FIRST_PAUSE_S) is Way.PRIMARY


EVENTS = st.lists(st.tuples(st.sampled_from(["prepare", "apply", "worked"]), st.floats(0.0, 400.0)), max_size=40)


@given(EVENTS)
def test_any_history_gives_the_store_one_version_after_a_failed_apply_and_comes_back_to_the_primary(history: list[tuple[str, float]]):
    choice, now, owes = Choice(), 0.0, False
    for event, seconds in history:
        now += seconds
        way = choice.way(now)
        assert not (owes and way is Way.PRIMARY)
        if event == "worked":
            choice.worked(way)
            owes = False
        elif way is Way.PRIMARY:
            choice.prepare_failed(now) if event == "prepare" else choice.apply_failed(now)
            owes = owes or event == "apply"
            assert choice.way(now) is Way.STORE
    choice.worked(choice.way(now))
    assert choice.way(now + LONGEST_PAUSE_S) is Way.PRIMARY


@pytest.mark.parametrize("problem", [TransportFailed("no server"), EngineUnavailable("no answer"), ApplyFailed("refused"), ConnectionResetError("cut")])
async def test_a_primary_that_breaks_in_preparing_leaves_the_same_version_to_the_store_at_once(problem: Exception, caplog: pytest.LogCaptureFixture):
    fast, store = Staged("nccl", prepare=[problem]), Staged("store")
    ways = Transports(fast, store)
    await ways.prepare(manifest(), deadline_s=5)
    assert ways.name == "store"
    await ways.apply(manifest(), deadline_s=5)
    ways.verified()
    assert (fast.calls, store.calls) == (["prepare 1:1"], ["prepare 1:1", "apply 1:1"])
    assert str(problem) in ways.problem
    assert any("taking the store" in record.message for record in caplog.records if record.levelno == logging.WARNING)


async def test_whether_files_are_damaged_the_store_says():
    """A weight server reads them by a path, and on a machine, of its own."""
    fast, store = Staged("nccl", prepare=[ManifestError("tensor w"), ManifestError("tensor w")]), Staged("store", prepare=[None, ManifestError("tensor v")])
    ways = Transports(fast, store)
    await ways.prepare(manifest(), deadline_s=5)
    assert ways.name == "store"
    with pytest.raises(ManifestError, match="tensor v"):
        await ways.prepare(manifest(2), deadline_s=5)


async def test_a_version_that_is_gone_is_no_fault_of_the_way():
    fast, store = Staged("nccl", prepare=[VersionGone("gone")]), Staged("store")
    ways = Transports(fast, store)
    with pytest.raises(VersionGone):
        await ways.prepare(manifest(), deadline_s=5)
    await ways.prepare(manifest(2), deadline_s=5)
    assert ways.name == "nccl"
    assert store.calls == []


async def test_the_store_is_asked_for_a_version_that_the_way_is_past_where_no_other_will_do():
    fast, store = Staged("nccl", prepare=[VersionGone("it went on")]), Staged("store", prepare=[None, VersionGone("collected")])
    ways = Transports(fast, store, fixed=True)
    await ways.prepare(manifest(), deadline_s=5)
    assert ways.name == "store"
    await ways.prepare(manifest(2), deadline_s=5)
    assert ways.name == "nccl", "the way is fine"
    fast.prepares.append(VersionGone("it went on"))
    with pytest.raises(VersionGone, match="collected"):
        await ways.prepare(manifest(), deadline_s=5)


async def test_a_primary_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fallback, "_GRACE_S", 0.01)
    fast, store = Staged("nccl"), Staged("store")
    fast.hangs = True
    ways = Transports(fast, store)
    await ways.prepare(manifest(), deadline_s=0.01)
    assert ways.name == "store"
    store.hangs = True
    with pytest.raises(ApplyFailed, match=r"store: 1:1 was not there after 0.0 s"):
        await ways.apply(manifest(), deadline_s=0.01)


async def test_the_primary_has_a_minute_at_most_and_the_store_what_is_left(monkeypatch: pytest.MonkeyPatch):
    given: list[float] = []

    class Timed(Staged):
        async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
            given.append(deadline_s)
            now[0] += deadline_s / 2
            raise TransportFailed("no server")

    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(fallback, "time", clock)
    monkeypatch.setattr(fallback, "left", lambda end: end - now[0])
    for deadline_s, expected in ((300.0, [60.0, 270.0]), (10.0, [5.0, 7.5])):
        with pytest.raises(TransportFailed):
            await Transports(Timed("nccl"), Timed("store")).prepare(manifest(), deadline_s=deadline_s)
        assert given == expected
        given.clear()


async def test_after_a_failed_apply_the_next_version_comes_from_the_store_however_late(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(fallback, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fast, store = Staged("nccl", apply=[TransportFailed("died")]), Staged("store")
    ways = Transports(fast, store)
    await ways.prepare(manifest(), deadline_s=5)
    with pytest.raises(TransportFailed) as failure:
        await ways.apply(manifest(), deadline_s=5)
    ways.failed(failure.value)
    now[0] = 10_000.0
    await ways.prepare(manifest(2), deadline_s=5)
    assert ways.name == "store"
    ways.verified()
    await ways.prepare(manifest(3), deadline_s=5)
    assert ways.name == "nccl"
    ways.verified()
    assert ways.problem == ""


async def test_both_ways_are_closed():
    fast, store = Staged("nccl"), Staged("store")
    await Transports(fast, store).aclose()
    await Transports(None, store).aclose()
    assert (fast.calls, store.calls) == (["aclose"], ["aclose", "aclose"])


async def test_a_reconciler_takes_the_store_when_the_fast_way_is_broken_and_the_engine_stays_in_service(rig: Any):
    fast = Staged("gloo", prepare=[TransportFailed("no weight server")])
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server, primary=fast)
        async with rig.running(reconciler):
            await rig.serves("e0", "1:1")
            assert reconciler.totals.transport == "store"
            assert reconciler.totals.failures == 0
        assert fast.calls[-1] == "aclose"
    assert await rig.events("unfit") == []
    [applied] = await rig.events("applied")
    assert applied["transport"] == "store"


async def test_a_reconciler_whose_fast_way_broke_in_the_middle_brings_the_engine_back_in_full_by_the_store(rig: Any):
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        fast = Staged("gloo", apply=[None, TransportFailed("the sender died")], then=reconciler._transports._store)
        reconciler._transports._primary = fast
        async with rig.running(reconciler):
            await rig.serves("e0", "1:1")
            assert reconciler.totals.transport == "gloo"
            server.session = True
            digest = await rig.publish(1, 2)
            await rig.serves("e0", "1:2")
            assert (server.digest, server.session, server.paused) == (digest, False, False)
            assert server.aborted == 1
            assert reconciler.totals.transport == "store"
    [unfit] = await rig.events("unfit")
    assert "the sender died" in unfit["reason"]


async def test_a_version_that_went_before_anything_was_touched_costs_the_engine_nothing(rig: Any):
    fast = Staged("gloo", apply=[None, VersionGone("collected")])
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        fast.then = reconciler._transports._store
        reconciler._transports._primary = fast
        async with rig.running(reconciler):
            await rig.serves("e0", "1:1")
            await rig.publish(1, 2)
            await rig.serves("e0", "1:2")
            assert not server.paused
            assert server.aborted == 0
            assert reconciler.totals.transport == "gloo"
    assert await rig.events("unfit") == []


async def test_a_way_that_takes_long_to_prepare_keeps_the_lock(rig: Any, monkeypatch: pytest.MonkeyPatch):
    """The preparation may be talking to the engine: nobody else may have it meanwhile."""
    monkeypatch.setattr("weightsync.reconciler.RENEW_S", 0.02)
    await rig.publish(1, 1)
    fast, stranger = Staged("gloo"), rig.channel.claim("e0", "b1")

    async def lasts_until() -> int:
        return int((await rig.redis.hget(rig.keys.reconcilers, "e0")).rpartition(b"|")[2])

    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server, primary=fast)
        fast.then = reconciler._transports._store
        entered, gate = asyncio.Event(), asyncio.Event()

        async def wait(_: list[Exception | None]) -> None:
            entered.set()
            await gate.wait()

        fast._do = wait  # type: ignore[method-assign]
        async with rig.running(reconciler):
            await entered.wait()
            for _ in range(3):
                before = await lasts_until()
                while await lasts_until() <= before:
                    await asyncio.sleep(0)
            assert isinstance(await stranger.look(None), Locked)
            gate.set()
            await rig.serves("e0", "1:1")


async def test_a_lock_that_is_lost_in_preparing_ends_the_preparation(rig: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weightsync.reconciler.RENEW_S", 0.05)
    await rig.publish(1, 1)
    fast = Staged("gloo")
    fast.hangs = True
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        task = asyncio.create_task(rig.reconciler("e0", server, primary=fast).run())
        while not fast.calls:
            await asyncio.sleep(0)
        await rig.redis.hset(rig.keys.reconcilers, "e0", "b1|somebody|99999999999999")
        with pytest.raises(Superseded):
            await asyncio.wait_for(task, 100)
        assert fast.calls == ["prepare 1:1", "aclose"]
    assert await rig.registry.routable() == []
    [engine] = await rig.registry.engines()
    assert engine.state is EngineState.STARTING
