from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from protocol.errors import Superseded, TransportFailed
from protocol.messages import EngineState, Manifest
from protocol.versions import Version
from weightsync import claim as claim_module
from weightsync import reconcile as reconcile_module
from weightsync import reconciler as reconciler_module
from weightsync.control import EngineControl
from weightsync.fallback import Transports
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore
from weightsync.transports.store import StoreTransport

from .recorded_sglang import RecordedSGLang


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_new_engine_is_brought_to_the_newest_version_and_becomes_routable(rig: Any):
    digest = await rig.publish(1, 4)
    async with rig.engine("e0") as server:
        status = await rig.serves("e0", "1:4")
        assert status.target is None
        assert server.digest == digest
        assert not server.paused
        assert server.calls[:3] == ["end_weight_update", "ready", "server_info"]
        assert server.calls[3:] == ["pause_generation", "update_weights_from_disk", "continue_generation", "model_info", "generate"]
    [applied] = await rig.events("applied")
    assert (applied["version"], applied["from"]) == ("1:4", "")
    assert 0 < applied["apply_s"] <= applied["pause_s"]


async def test_an_engine_that_waits_takes_the_first_version_when_it_comes(rig: Any):
    async with rig.engine("e0"):
        await rig.until(lambda all_: "e0" in all_)
        await rig.publish(1, 0)
        await rig.serves("e0", "1:0")


async def test_two_engines_serve_neighbouring_versions_at_the_same_time(rig: Any):
    """No barrier: one engine's update under way holds up neither the other engine nor anybody who asks it."""
    await rig.publish(1, 1)
    async with rig.engine("e0", max_paused=2) as slow, rig.engine("e1", max_paused=2) as quick:
        await rig.serves("e0", "1:1")
        await rig.serves("e1", "1:1")
        slow.entered.clear()
        slow.hold = asyncio.Event()
        await rig.publish(1, 2)
        await slow.entered.wait()
        await rig.serves("e1", "1:2")
        routable = {engine.engine_id: str(engine.version) for engine in await rig.registry.routable()}
        assert routable == {"e0": "1:1", "e1": "1:2"}
        assert set(await EngineControl(rig.session, quick.url).probe(deadline_s=60)) == {"1:2"}
        slow.hold.set()
        await rig.serves("e0", "1:2")


async def test_an_update_under_way_is_finished_then_the_newest_is_taken_and_those_between_are_skipped(rig: Any):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        server.entered.clear()
        server.hold = asyncio.Event()
        await rig.publish(1, 2)
        await server.entered.wait()
        for n in (3, 4, 5):
            await rig.publish(1, n)
        server.hold.set()
        await rig.serves("e0", "1:5")
        assert server.versions == ["1:1", "1:2", "1:5"]


async def test_a_higher_incarnation_may_bring_a_lower_n(rig: Any):
    await rig.publish(1, 9)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:9")
        await rig.publish(2, 7)
        await rig.serves("e0", "2:7")
        assert server.versions == ["1:9", "2:7"]


@pytest.mark.parametrize(
    ("stage", "words", "aborts"),
    [
        ("refuse", "no such weights", 1),
        ("refuse_softly", "not now", 1),
        ("half", "partially updated", 1),
        ("drop", "closed the connection", 1),
        ("hang", "no answer within", 1),
        ("lie", "says it serves", 0),
        ("lie_token", "next token says", 0),
    ],
)
async def test_an_engine_that_does_not_take_a_version_is_unfit_goes_on_and_recovers(
    rig: Any, stage: str, words: str, aborts: int, caplog: pytest.LogCaptureFixture
):
    await rig.publish(1, 1)
    async with rig.engine("e0", apply_deadline_s=1.0 if stage == "hang" else 60.0) as server:
        await rig.serves("e0", "1:1")
        server.stage.extend([stage, stage])  # a closed connection is tried once more
        if stage != "drop":
            server.stage.pop()
        digest = await rig.publish(1, 2)
        await rig.serves("e0", "1:2")
        assert server.digest == digest
        assert not server.paused
        assert server.aborted == aborts or (stage == "hang" and server.aborted > aborts)
        assert server.calls.count("continue_generation") >= 2
    reasons = [event["reason"] for event in await rig.events("unfit")]
    assert len(reasons) == 1 or stage == "hang", "of a deadline that short, a slow machine may need several"
    assert any(words in reason and "apply 1:2" in reason for reason in reasons)
    assert any(words in record.message for record in caplog.records)


async def test_an_unfit_engine_is_off_the_routes_before_it_goes_on(rig: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconcile_module, "BACKOFF_S", 3600.0)
    monkeypatch.setattr(reconcile_module, "MAX_BACKOFF_S", 3600.0)
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        routes: list[int] = []

        async def look() -> None:
            routes.append(await rig.redis.hlen(rig.keys.routable))

        server.before_continue = look
        server.stage.append("half")
        await rig.publish(1, 2)
        engines = await rig.until(lambda all_: all_["e0"].state is EngineState.UNFIT and bool(routes))
        assert routes == [0]
        assert "partially updated" in engines["e0"].reason
        assert engines["e0"].version == Version(1, 1)
        assert await rig.registry.routable() == []


async def test_others_keep_to_the_limit_of_paused_engines(rig: Any):
    await rig.publish(1, 0)
    now, peak = 0, 0

    def count(change: int) -> None:
        nonlocal now, peak
        now += change
        peak = max(peak, now)

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(rig.engine(f"e{i}", max_paused=2)) for i in range(4)]
        for i in range(4):
            await rig.serves(f"e{i}", "1:0")
        for server in servers:
            server.paused_count = count
        for n in range(1, 5):
            await rig.publish(1, n)
            for i in range(4):
                await rig.serves(f"e{i}", f"1:{n}")
    assert 1 <= peak <= 2
    assert now == 0


async def test_a_damaged_version_is_refused_before_the_engine_is_touched(rig: Any, store: DirectoryStore):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        await rig.attach(1, 2)
        manifest = await asyncio.to_thread(store.write, rig.snapshot(1, 2))
        path = Path(manifest.location) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        before = len(server.calls)
        await rig.channel.publish(manifest, 1)
        async with asyncio.timeout(100):
            while not (failed := await rig.events("prepare_failed")):
                await asyncio.sleep(0)
        assert "damaged" in failed[0]["reason"]
        assert "tensor model." in failed[0]["reason"]
        assert len(server.calls) == before
        [engine] = await rig.registry.routable()
        assert engine.version == Version(1, 1)
        await rig.publish(1, 3)
        await rig.serves("e0", "1:3")
    assert server.versions == ["1:1", "1:3"]
    assert await rig.events("unfit") == []


async def test_a_version_whose_files_are_gone_is_passed_over_for_the_next(rig: Any, store: DirectoryStore):
    await rig.publish(1, 1)
    async with rig.engine("e0"):
        await rig.serves("e0", "1:1")
        await rig.attach(1, 2)
        manifest = await asyncio.to_thread(store.write, rig.snapshot(1, 2))
        await asyncio.to_thread(store.delete, Version(1, 2))
        await rig.channel.publish(manifest, 1)
        await rig.publish(1, 3)
        await rig.serves("e0", "1:3")
    assert await rig.events("unfit") == []


async def test_a_producer_that_calls_an_engine_unfit_gets_it_back_with_the_newest_version_in_full(rig: Any):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        server.version = server.token_version = "boot:b9"
        assert await rig.registry.mark_unfit("e0", "b1", "an answer says boot:b9")
        await rig.serves("e0", "1:1")
        assert server.version == "1:1"
        assert server.versions == ["1:1", "1:1"]


async def test_taking_over_an_engine_applies_the_newest_in_full_whatever_the_registry_says(rig: Any):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
    async with rig.engine("e0", "b1") as server:
        await rig.serves("e0", "1:1")
        async with asyncio.timeout(100):
            while server.versions != ["1:1"]:
                await asyncio.sleep(0)
        await rig.serves("e0", "1:1")
    assert [event["reason"] for event in await rig.events("unfit")] == ["its reconciler was replaced"]


async def test_a_reconciler_that_is_cancelled_in_the_middle_leaves_the_engine_going_and_the_next_takes_over(rig: Any):
    await rig.publish(1, 1)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(rig.server("b1"))
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        server.hold = asyncio.Event()
        async with rig.running(rig.reconciler("e0", server)):
            await server.entered.wait()
            assert server.paused
        assert not server.paused
        assert server.aborted == 1
        [engine] = await rig.registry.engines()
        assert engine.state is EngineState.UNFIT
        server.hold.set()
        async with rig.running(rig.reconciler("e0", server)):
            await rig.serves("e0", "1:1")


async def test_a_reconciler_killed_in_the_middle_is_replaced_once_its_lock_has_run_out(rig: Any, monkeypatch: pytest.MonkeyPatch):
    """A kill gives no chance to clean up: the engine stays paused and the lock stays taken until it expires."""
    monkeypatch.setattr(claim_module, "LOCK_S", 0.2)
    await rig.publish(1, 1)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(rig.server("b1"))
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        dead = rig.channel.claim("e0", "b1")
        await dead.look(None)
        assert await dead.pause(Version(1, 1), most=1, valid_s=0.5, idle=False)
        await EngineControl(rig.session, server.url).pause("in_place")
        other = await stack.enter_async_context(rig.engine("e1"))
        await stack.enter_async_context(rig.running(rig.reconciler("e0", server)))
        await rig.serves("e0", "1:1")
        await rig.serves("e1", "1:1")
        assert not server.paused
        assert not other.paused
        with pytest.raises(Superseded):
            await rig.registry.ack("e0", "b1", Version(1, 1), reconciler=dead.owner)


async def test_a_reconciler_of_an_engine_that_was_restarted_stops(rig: Any):
    await rig.publish(1, 1)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(rig.server("b1"))
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        task = await stack.enter_async_context(rig.running(rig.reconciler("e0", server)))
        await rig.serves("e0", "1:1")
        await rig.registry.beat(rig.status("e0", "b2", server.url), ttl_s=600)
        with pytest.raises(Superseded):
            await asyncio.wait_for(asyncio.shield(task), 100)


async def test_an_engine_that_was_forgotten_in_an_outage_is_registered_and_brought_up_anew(rig: Any):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        await rig.redis.delete(rig.keys.engines, rig.keys.engine_facts, rig.keys.routable)
        assert await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600) is True
        await rig.serves("e0", "1:1")
        assert server.versions[-1] == "1:1"
        await rig.publish(1, 2)
        await rig.serves("e0", "1:2")


async def test_a_reconciler_that_hung_after_it_got_the_pause_applies_nothing_on_a_lock_it_may_have_lost(rig: Any, monkeypatch: pytest.MonkeyPatch):
    await rig.publish(1, 1)
    hung, ask = [0.0], claim_module.Claim.pause
    asked: list[list[str]] = []

    async def pause(self: claim_module.Claim, version: Version, **how: Any) -> bool:
        granted = await ask(self, version, **how)
        asked.append(list(server.calls))
        hung[0] = 3600.0
        return granted

    monkeypatch.setattr(claim_module.Claim, "pause", pause)
    monkeypatch.setattr(reconciler_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + hung[0]))
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        assert server.versions == ["1:1"]
    assert len(asked) == 2
    assert asked[0] == asked[1], "the engine heard nothing until it was asked for again"
    assert await rig.events("unfit") == []


@pytest.mark.parametrize("taken", [True, False], ids=["another has it", "nobody has it"])
async def test_a_reconciler_that_hung_in_an_update_lets_an_engine_go_on_only_if_no_other_has_it(rig: Any, monkeypatch: pytest.MonkeyPatch, taken: bool):
    hung = [0.0]
    monkeypatch.setattr(reconciler_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + hung[0]))
    failed, fails = asyncio.Event(), reconcile_module.Core.apply_failed
    monkeypatch.setattr(reconcile_module.Core, "apply_failed", lambda core, now: (fails(core, now), failed.set()))
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        server.entered.clear()
        server.hold = asyncio.Event()
        server.stage.append("half")
        server.calls.clear()
        await rig.publish(1, 2)
        await server.entered.wait()
        hung[0] = 3600.0
        if taken:
            await rig.redis.hset(rig.keys.reconcilers, "e0", f"b1|another|{int(time.time() * 1000) + 60_000}")
        server.hold.set()
        await failed.wait()
        assert server.calls == [
            "pause_generation",
            "update_weights_from_disk",
            *([] if taken else ["end_weight_update", "abort_request", "continue_generation"]),
        ]
        assert server.paused is taken
        await rig.redis.hdel(rig.keys.reconcilers, "e0")
        await rig.serves("e0", "1:2")
        assert not server.paused


async def test_an_idle_engine_that_may_be_asked_waits_until_the_others_decode_again(rig: Any):
    """A request may reach it before its pause does: two engines would stand, and one may."""
    await rig.publish(1, 1)
    async with rig.engine("e0") as busy, rig.engine("e1", idle=True) as idle:
        await rig.serves("e0", "1:1")
        await rig.serves("e1", "1:1")
        for server in (busy, idle):
            server.entered.clear()
            server.hold = asyncio.Event()
        entered = [asyncio.create_task(server.entered.wait(), name="test:entered") for server in (busy, idle)]
        await rig.publish(1, 2)
        await asyncio.wait(entered, return_when=asyncio.FIRST_COMPLETED)
        first, second, waits = (busy, idle, "e1") if busy.entered.is_set() else (idle, busy, "e0")
        async with asyncio.timeout(100):
            while not await rig.redis.hexists(rig.keys.pauses, f"claim:{waits}"):
                await asyncio.sleep(0)
        assert first.paused
        assert not second.paused
        assert set(await EngineControl(rig.session, second.url).probe(deadline_s=60)) == {"1:1"}
        first.hold.set()
        await asyncio.wait(entered)
        second.hold.set()
        await rig.serves("e0", "1:2")
        await rig.serves("e1", "1:2")


def _alike(n: int) -> Snapshot:
    """Versions that differ in one element."""
    numbers = np.zeros(4096, dtype="<f4")
    numbers[n] = 1.0
    return Snapshot(version=Version(1, n), tensors={"model.embed.weight": TensorBytes(dtype="F32", shape=(64, 64), data=numbers.tobytes())})


class NoRoom(StoreTransport):
    """Of a machine that has no room for copies, as long as it is not mended."""

    def __init__(self, rig: Any, control: EngineControl) -> None:
        super().__init__(rig.store, control)
        self._rig, self._engine = rig, control
        self.mended = False
        self.refused: list[str] = []

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        if manifest.kind == "full":
            await super().prepare(manifest, deadline_s=deadline_s)
        elif not self.mended:
            self.refused.append(str(manifest.version))
            raise TransportFailed("no space left on device")

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        if manifest.kind == "full":
            await super().apply(manifest, deadline_s=deadline_s)
            return
        copies = DirectoryStore(self._rig.store.folder / "copies")
        copy = await asyncio.to_thread(copies.write, _alike(manifest.version.n))
        await self._engine.update_from_disk(copy.location, str(manifest.version), deadline_s=deadline_s)


async def test_an_engine_that_can_have_no_deltas_goes_for_whole_versions_says_why_and_tries_again(rig: Any, monkeypatch: pytest.MonkeyPatch):
    async def publish(n: int, parent: Manifest | None = None) -> Manifest:
        await rig.attach(1, n)
        written: Manifest = rig.store.write(_alike(n)) if parent is None else rig.store.write_delta(_alike(n), parent, _alike(n - 1).tensors)
        assert written.kind == ("full" if parent is None else "delta")
        await rig.channel.publish(written, 1)
        return written

    monkeypatch.setattr(reconciler_module, "WHOLE_S", 3600.0)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler, control = rig.reconciler("e0", server), EngineControl(rig.session, server.url)
        transport = NoRoom(rig, control)
        reconciler._transports = Transports(None, transport)
        await publish(2, await publish(1, await publish(0)))
        async with rig.running(reconciler):
            await rig.serves("e0", "1:0")
            assert transport.refused == ["1:2"]
            assert reconciler.totals.trouble == "prepare 1:2: no space left on device"
            await publish(4, await publish(3))
            await rig.serves("e0", "1:3")
            assert transport.refused == ["1:2"], "whole versions are taken without another try"
            async with asyncio.timeout(100):
                while not reconciler.totals.trouble:  # until it has heard of 1:4
                    await asyncio.sleep(0)
            assert "1:2" in reconciler.totals.trouble
            assert "no space left" in reconciler.totals.trouble
            transport.mended, reconciler._whole_until = True, 0.0
            await rig.serves("e0", "1:4")
            assert server.versions == ["1:0", "1:3", "1:4"]
            async with asyncio.timeout(100):
                while reconciler.totals.trouble:
                    await asyncio.sleep(0)


async def test_trouble_is_told_until_the_newest_version_is_served_also_when_the_pointer_falls_back_to_it(rig: Any, store: DirectoryStore):
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)

        async def until(told: str) -> None:
            async with asyncio.timeout(100):
                while told not in reconciler.totals.trouble if told else reconciler.totals.trouble:
                    await asyncio.sleep(0)

        async with rig.running(reconciler):
            await rig.serves("e0", "1:1")
            assert reconciler.totals.trouble == ""
            await rig.attach(1, 2)
            manifest = await asyncio.to_thread(store.write, rig.snapshot(1, 2))
            await asyncio.to_thread(store.delete, Version(1, 2))
            await rig.channel.publish(manifest, 1)
            await until("prepare 1:2")
            await rig.redis.hset(rig.keys.weights, "newest", "1:1")
            await until("")
            await rig.publish(1, 3)
            await rig.serves("e0", "1:3")
            assert reconciler.totals.trouble == ""


@pytest.mark.parametrize("whole_only", [False, True])
async def test_an_engine_follows_the_pointer_back_out_of_an_incarnation_that_redis_lost(rig: Any, whole_only: bool):
    """Redis came back without the attachment of 3 and what it published; the engine's own ack came again with its host's next beat, or was never lost."""
    await rig.publish(2, 8)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        async with rig.running(reconciler):
            await rig.serves("e0", "2:8")
            await rig.publish(3, 7)
            await rig.serves("e0", "3:7")
            if whole_only:  # what the pointer names is a delta, which this machine cannot make
                reconciler._whole_until = math.inf
                await rig.redis.hset(rig.keys.weights, mapping={"parent:2:9": "2:8", "manifest:2:9": "not to be read"})
            await rig.redis.hset(rig.keys.weights, "newest", "2:9" if whole_only else "2:8")
            await rig.serves("e0", "2:8")
            await rig.publish(3, 8)
            await rig.serves("e0", "3:8")
    assert server.versions == ["2:8", "3:7", "2:8", "3:8"]
    assert await rig.events("unfit") == []


async def test_an_ack_that_redis_lost_is_made_again(rig: Any):
    await rig.publish(1, 1)
    async with rig.engine("e0"):
        await rig.serves("e0", "1:1")
        before = await rig.redis.hget(rig.keys.engine_facts, "e0")
        await rig.publish(1, 2)
        await rig.serves("e0", "1:2")
        await rig.redis.hset(rig.keys.engine_facts, "e0", before)
        await rig.serves("e0", "1:2")


async def test_many_versions_leave_no_keys_no_files_and_no_descriptors_behind(rig: Any, store: DirectoryStore):
    await rig.publish(1, 0)
    async with rig.engine("e0"), rig.engine("e1"):
        await rig.serves("e0", "1:0")
        await rig.serves("e1", "1:0")

        async def round_(n: int) -> None:
            await rig.publish(1, n)
            await rig.serves("e0", f"1:{n}")
            await rig.serves("e1", f"1:{n}")
            await rig.channel.collect(store, keep=2)

        for n in range(1, 4):
            await round_(n)
        before = _descriptors()
        sizes = [await rig.redis.hlen(key) for key in (rig.keys.weights, rig.keys.weight_pins, rig.keys.pauses, rig.keys.reconcilers)]
        for n in range(4, 14):
            await round_(n)
        assert [await rig.redis.hlen(key) for key in (rig.keys.weights, rig.keys.weight_pins, rig.keys.pauses, rig.keys.reconcilers)] == sizes
        assert _descriptors() <= before + 2  # a kept connection more or less
        assert store.versions() == (Version(1, 12), Version(1, 13))
    assert await rig.redis.hlen(rig.keys.reconcilers) == 0
    served = [event["version"] for event in await rig.events("applied") if event["engine_id"] == "e0"]
    assert served == [f"1:{n}" for n in range(14)]


async def test_a_take_over_asks_the_engine_only_while_the_lock_is_its_own(rig: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []

    async def close_session(self: EngineControl, *, deadline_s: float) -> None:
        asked.append(deadline_s)

    monkeypatch.setattr(EngineControl, "close_session", close_session)
    late, marked = [claim_module.LOCK_S], []
    unfit = rig.registry.mark_unfit

    async def mark_unfit(engine_id: str, boot_nonce: str, reason: str) -> bool:
        marked.append(reason)
        changed: bool = await unfit(engine_id, boot_nonce, reason)
        if late:
            slow = late.pop()
            monkeypatch.setattr(reconciler_module, "_left", lambda end: end - time.monotonic() - slow)
        return changed

    monkeypatch.setattr(rig.registry, "mark_unfit", mark_unfit)
    look = claim_module.Claim.look

    async def look_again(self: claim_module.Claim, at_hand: Version | None, **how: bool) -> object:
        if marked:
            monkeypatch.setattr(reconciler_module, "_left", lambda end: end - time.monotonic())
        return await look(self, at_hand, **how)

    monkeypatch.setattr(claim_module.Claim, "look", look_again)
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        await rig.registry.ack("e0", "b1", Version(1, 1))
        async with rig.running(rig.reconciler("e0", server)):
            await rig.until(lambda all_: bool(asked) and all_["e0"].state is EngineState.ROUTABLE)
    assert marked == ["its reconciler was replaced"]
    assert len(asked) == 1, "not with a lock that was used up; after renewing it"
    assert 0 < asked[0] < claim_module.LOCK_S


async def test_an_engine_that_would_not_go_on_is_told_again_also_when_no_version_can_be_had(rig: Any, store: DirectoryStore):
    await rig.publish(1, 1)
    async with rig.engine("e0") as server:
        await rig.serves("e0", "1:1")
        refusals = [True, True]

        async def refuse() -> None:
            if refusals:
                refusals.pop()
                await asyncio.to_thread(store.delete, Version(1, 2))
                raise web.HTTPInternalServerError

        server.before_continue = refuse
        server.stage.append("half")
        await rig.publish(1, 2)
        async with asyncio.timeout(100):
            while refusals or server.paused:
                await asyncio.sleep(0.01)
        assert await rig.registry.routable() == []
        server.before_continue = None
        await rig.publish(1, 3)
        await rig.serves("e0", "1:3")


async def test_a_restricted_number_of_engines_that_decode_goes_on_while_others_are_updated(rig: Any):
    """Of four that serve, three quarters go on, though four might be paused at once."""
    await rig.publish(1, 0)
    now, peak = 0, 0

    def count(change: int) -> None:
        nonlocal now, peak
        now += change
        peak = max(peak, now)

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(rig.engine(f"e{i}", max_paused=4, min_serving_share=0.75)) for i in range(4)]
        for i in range(4):
            await rig.serves(f"e{i}", "1:0")
        for server in servers:
            server.paused_count = count
        for n in (1, 2):
            await rig.publish(1, n)
            for i in range(4):
                await rig.serves(f"e{i}", f"1:{n}")
    assert (now, peak) == (0, 1)


@contextlib.contextmanager
def silences(rig: Any, monkeypatch: pytest.MonkeyPatch, reconciler: reconciler_module.Reconciler) -> Iterator[list[int]]:
    """`totals.silent` each time the engine is called unfit: twice an update, before and after it is let go."""
    seen: list[int] = []
    unfit = rig.registry.mark_unfit

    async def mark_unfit(engine_id: str, boot_nonce: str, reason: str) -> bool:
        seen.append(reconciler.totals.silent)
        changed: bool = await unfit(engine_id, boot_nonce, reason)
        return changed

    with monkeypatch.context() as patch:
        patch.setattr(rig.registry, "mark_unfit", mark_unfit)
        yield seen


async def test_updates_without_an_answer_are_counted_until_the_engine_gives_one_be_it_a_refusal(rig: Any, monkeypatch: pytest.MonkeyPatch):
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server, hasty=True)
        server.stage.extend(["hang", "hang", "refuse", "hang", "silent"])
        with silences(rig, monkeypatch, reconciler) as seen:
            async with rig.running(reconciler):
                await rig.serves("e0", "1:1")
                assert seen == [1, 1, 2, 2, 0, 0, 1, 1, 2]
                assert reconciler.totals.silent == 0


async def test_an_update_for_which_no_time_is_left_says_nothing_of_the_engine(rig: Any, monkeypatch: pytest.MonkeyPatch):
    await rig.publish(1, 1)
    late = [3600.0]
    update = reconciler_module.Reconciler._update

    async def too_late(self: reconciler_module.Reconciler, manifest: Manifest, end: float) -> Any:
        return await update(self, manifest, end - (late.pop() if late else 0.0))

    monkeypatch.setattr(reconciler_module.Reconciler, "_update", too_late)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        with silences(rig, monkeypatch, reconciler) as seen:
            async with rig.running(reconciler):
                await rig.serves("e0", "1:1")
        assert seen == [0, 0]


class Joining:
    """A way that has the engine join a group first."""

    name = "nccl"

    control: EngineControl

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        await self.control.init_group(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="nccl", deadline_s=2.0)

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        raise AssertionError

    async def aclose(self) -> None:
        pass


class Blocked(RecordedSGLang):
    """Joins a group whose peer never comes, and answers nothing from then on."""

    recovers = False

    async def _group(self, _: dict[str, Any]) -> web.Response:
        self.hung = not self.recovers
        await self._closed.wait()
        return web.Response(status=503)

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        if self.hung:
            await self._closed.wait()
        return await super()._pause(body)


@pytest.mark.parametrize("recovers", [False, True])
async def test_an_engine_that_hangs_in_joining_a_group_is_silent_though_the_store_has_the_version(rig: Any, recovers: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconcile_module, "BACKOFF_S", 3600.0)
    monkeypatch.setattr(reconcile_module, "MAX_BACKOFF_S", 3600.0)
    await rig.publish(1, 1)
    async with Blocked("b1", "0.5.23").serving() as server:
        server.recovers = recovers
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        joining = Joining()
        reconciler = rig.reconciler("e0", server, primary=joining, apply_deadline_s=60.0 if recovers else 5.0)
        joining.control = reconciler._control
        async with rig.running(reconciler):
            if recovers:
                await rig.serves("e0", "1:1")
                assert reconciler.totals.silent == 0
            else:
                await rig.until(lambda _: reconciler.totals.silent == 2)
                assert server.paths.count("/init_weights_update_group") == 1
                assert server.paths.count("/pause_generation") == 1
