"""Weights from a real weight server into real receivers by gloo: what arrives is right, and what breaks breaks alone."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protocol.errors import ManifestError, TransportFailed, VersionGone
from protocol.versions import Version
from tests.weightsync.served_rig import ServedRig, checksums, served_rig

pytestmark = pytest.mark.timeout(600)


@pytest_asyncio.fixture
async def served(rig: Any, redis_url: str, tmp_path: Path) -> AsyncIterator[ServedRig]:
    async with served_rig(rig, redis_url, tmp_path) as started:
        yield started


async def test_versions_arrive_whole_in_both_dialects_over_one_group_each(served: ServedRig) -> None:
    first = await served.publish(0)
    (old, new), _ = await asyncio.gather(_one_of_each(served), served.start_server())
    ways = [served.transport(engine) for engine in (old, new)]
    assert [way.name for way in ways] == ["gloo", "gloo"]
    for way in ways:
        await way.prepare(first, deadline_s=100)
        await way.apply(first, deadline_s=100)
    second = await served.publish(1)
    for way in reversed(ways):
        await way.prepare(second, deadline_s=100)
        await way.apply(second, deadline_s=100)
    for engine in (old, new):
        seen = await engine.seen()
        assert seen["version"] == "1:1"
        assert seen["checksums"] == checksums(second)
        assert seen["calls"].count("init") == 1, "the group of the first version served the second"
        assert not seen["in_session"]
    assert (await new.seen())["calls"].count("begin") == 2
    status = await served.server_status(lambda status: status.groups == 2)
    assert (status.staged, status.backend, status.device) == (Version(1, 1), "gloo", "cpu")
    assert status.sent_bytes == 2 * (first.total_bytes + second.total_bytes)


async def _one_of_each(served: ServedRig) -> tuple[Any, Any]:
    old, new = await asyncio.gather(served.start_engine(), served.start_engine("--sessions"))
    return old, new


async def test_an_engine_that_dies_or_leaves_costs_the_other_nothing_and_may_come_back(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engines, _ = await asyncio.gather(served.start_engines(2), served.start_server())
    doomed, steady = engines
    ways = {engine.url: served.transport(engine) for engine in engines}
    for way in ways.values():
        await way.prepare(manifest, deadline_s=100)
        await way.apply(manifest, deadline_s=100)

    second = await served.publish(1)
    await ways[doomed.url].prepare(second, deadline_s=100)
    await doomed.stage("die")
    with pytest.raises(TransportFailed):
        await ways[doomed.url].apply(second, deadline_s=20)
    await ways[steady.url].prepare(second, deadline_s=100)
    await ways[steady.url].apply(second, deadline_s=100)
    seen = await steady.seen()
    assert (seen["version"], seen["checksums"]) == ("1:1", checksums(second))
    assert seen["calls"].count("init") == 1, "its group was not touched"
    await served.server_status(lambda status: status.groups == 1)

    again = await served.start_engine()
    way = served.transport(again)
    await way.prepare(second, deadline_s=100)
    await way.apply(second, deadline_s=100)
    assert (await again.seen())["checksums"] == checksums(second)
    await way.aclose()
    await served.server_status(lambda status: status.groups == 1)
    assert (await again.seen())["groups"] == [], "it left its group, too"


async def test_a_server_that_is_killed_in_a_transfer_fails_it_in_time_and_frees_the_engine(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, server = await asyncio.gather(served.start_engine("--sessions"), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    server.send_signal(signal.SIGSTOP)  # the engine joins a broadcast that nobody sends
    applying = asyncio.create_task(way.apply(manifest, deadline_s=20))  # of which it waits a quarter for a server
    with pytest.raises(VersionGone):  # a server that does not answer costs the engine nothing: it was not touched
        await applying
    assert "update" not in (await engine.seen())["calls"]

    server.send_signal(signal.SIGCONT)
    await way.prepare(manifest, deadline_s=100)
    await engine.stage("never_post")
    applying = asyncio.create_task(way.apply(manifest, deadline_s=100))
    await engine.until("update")
    server.kill()
    with pytest.raises(TransportFailed, match="went away"):
        await applying
    seen = await engine.seen()
    assert seen["groups"] == []
    assert not seen["in_session"]
    with pytest.raises(TransportFailed):
        await way.prepare(manifest, deadline_s=5)


async def test_an_engine_that_waits_in_a_broadcast_is_freed_when_the_server_dies(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, server = await asyncio.gather(served.start_engine(), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    # A bucket that only the engine hears of: it waits for bytes, and the server has nothing to send.
    bucket = way._ready[1][0]
    call = asyncio.create_task(engine.control.update_from_distributed(bucket, group=way._group, version=None, deadline_s=100))
    await engine.until("update")
    server.kill()
    with pytest.raises(Exception, match="400"):
        await call
    assert (await engine.seen())["failures"], "its collective ended with an error"


async def test_an_engine_that_takes_the_call_and_joins_nothing_ends_at_the_deadline(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine(), served.start_server(group_deadline_s=8.0))
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    await engine.stage("never_post")
    with pytest.raises(TransportFailed, match="send"):
        await way.apply(manifest, deadline_s=100)
    await served.server_status(lambda status: status.groups == 0)
    await way.prepare(manifest, deadline_s=100)
    await way.apply(manifest, deadline_s=100)
    seen = await engine.seen()
    assert seen["checksums"] == checksums(manifest)
    assert seen["calls"].count("init") == 2, "a broken group is never used again"


async def test_a_refusal_of_the_engine_fails_the_update_in_its_words_and_leaves_nothing_open(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine("--sessions"), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    await engine.stage("refuse")
    with pytest.raises(TransportFailed, match="not these weights"):
        await way.apply(manifest, deadline_s=100)
    seen = await engine.seen()
    assert (seen["groups"], seen["in_session"], seen["version"]) == ([], False, "boot")


async def test_buckets_that_differ_are_refused_before_the_engine_is_told_anything(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine(), served.start_server())
    way = served.transport(engine, bucket_mb=2)
    with pytest.raises(TransportFailed, match=r"has 4 buckets, expected 2; the first that differs begins with tensor steps"):
        await way.prepare(manifest, deadline_s=100)
    other = dataclasses.replace(manifest, digest="0" * 32)
    with pytest.raises(TransportFailed, match="digest"):
        await served.transport(engine).prepare(other, deadline_s=100)
    assert "update" not in (await engine.seen())["calls"]


async def test_a_server_refuses_a_bucket_that_it_was_not_asked_to_prepare_or_that_is_called_otherwise(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine(), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    line = way._line
    with pytest.raises(TransportFailed, match="nothing was sent"):
        await line.ask("send", deadline_s=60, version="1:0", buckets=[[0, "0" * 16]])
    for index in (-1, 4):
        with pytest.raises(TransportFailed, match=rf"bucket {index} of version 1:0: expected 0 to 3: nothing was sent"):
            await line.ask("send", deadline_s=60, version="1:0", buckets=[[index, way._ready[1][-1].digest]])
    with pytest.raises(TransportFailed, match="was not taken"):
        await line.ask("send", deadline_s=60, version="1:7", buckets=[[0, "0" * 16]])
    with pytest.raises(TransportFailed, match="not understood"):
        await line.ask("dance", deadline_s=60)
    await way.apply(manifest, deadline_s=100)
    assert (await engine.seen())["checksums"] == checksums(manifest)


async def test_the_second_engine_waits_for_the_right_and_has_it_when_the_holder_is_gone(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engines, _ = await asyncio.gather(served.start_engines(2), served.start_server())
    holder, waiter = (served.transport(engine) for engine in engines)
    await waiter._connected(manifest, time.monotonic() + 100)
    await holder.prepare(manifest, deadline_s=100)
    await holder._line.ask("take", deadline_s=60, version="1:0", use=True)  # as at the start of an apply that goes no further
    with pytest.raises(TransportFailed, match="take"):
        await waiter.prepare(manifest, deadline_s=2)
    waiting = asyncio.create_task(waiter.prepare(manifest, deadline_s=100))
    await _asking(waiter)
    assert (await engines[1].seen())["calls"].count("init") == 1, "it enters a new group only when nothing is sent to another"
    assert not waiting.done()
    await _cut(holder)
    await waiting
    await waiter.apply(manifest, deadline_s=100)
    assert (await engines[1].seen())["checksums"] == checksums(manifest)


async def _asking(way: Any) -> None:
    """Once it waits for an answer of its server."""
    async with asyncio.timeout(100):
        while way._line is None or not way._line._waiting:
            await asyncio.sleep(0.01)


async def _cut(way: Any) -> None:
    """As the system does for a process that is killed: no goodbye."""
    way._line._socket._response.connection.transport.abort()
    await asyncio.wait([way._line._reader])


async def test_damage_and_missing_servers_are_told_apart(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine = await served.start_engine()
    with pytest.raises(TransportFailed, match=r"no weight server for gloo: start one with `rollstream weight-server`"):
        await served.transport(engine).prepare(manifest, deadline_s=5)
    file = served.store.path(manifest.version) / manifest.tensors[-1].file
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    await served.start_server()
    way = served.transport(engine)
    with pytest.raises(ManifestError, match=r"tensor norm\.weight has checksum"):
        await way.prepare(manifest, deadline_s=100)
    second = await served.publish(1)
    await way.prepare(second, deadline_s=100)
    await way.apply(second, deadline_s=100)
    assert (await engine.seen())["version"] == "1:1"
    with pytest.raises(VersionGone, match="went on to 1:1"):
        await way.prepare(manifest, deadline_s=100)


async def test_the_newest_version_stays_pinned_while_a_server_lives(served: ServedRig) -> None:
    await served.publish(0)
    server = await served.start_server()
    await served.server_status(lambda status: status.staged == Version(1, 0))
    pins = await served.rig.redis.hgetall(served.rig.keys.weight_pins)
    assert [value.startswith(b"1:0:") for value in pins.values()] == [True]
    server.terminate()
    assert await asyncio.to_thread(server.wait, 100) == 0
    assert await served.rig.redis.hgetall(served.rig.keys.weight_pins) == {}
    assert await served.presence.members() == []


async def test_an_engine_that_is_paused_goes_before_one_that_only_prepared(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engines, _ = await asyncio.gather(served.start_engines(2), served.start_server())
    first, second = (served.transport(engine) for engine in engines)
    await second._connected(manifest, time.monotonic() + 100)
    await first.prepare(manifest, deadline_s=100)
    waiting = asyncio.create_task(second.prepare(manifest, deadline_s=100))
    await _asking(second)
    await first.apply(manifest, deadline_s=100)
    await waiting
    await first._line.ask("take", deadline_s=60, version="1:0", use=True)  # at once, although the second has the right
    await first._line.ask("give", deadline_s=60)
    await second.apply(manifest, deadline_s=100)
    assert [(await engine.seen())["version"] for engine in engines] == ["1:0", "1:0"]


async def test_two_engines_of_one_server_never_stand_still_for_their_groups_together(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engines, _ = await asyncio.gather(served.start_engines(2), served.start_server(group_deadline_s=100.0))
    first, second = (served.transport(engine, group_deadline_s=100.0) for engine in engines)
    await engines[0].stage("wait")
    preparing = [asyncio.create_task(first.prepare(manifest, deadline_s=100))]
    await engines[0].until("init")
    preparing.append(asyncio.create_task(second.prepare(manifest, deadline_s=100)))
    await served.server_status(lambda status: status.groups == 2)
    await _asking(second)
    assert "init" not in (await engines[1].seen())["calls"]
    await engines[0].stage("post")
    await preparing[0]
    await first.apply(manifest, deadline_s=100)
    await preparing[1]
    await second.apply(manifest, deadline_s=100)
    assert [(await engine.seen())["checksums"] for engine in engines] == [checksums(manifest)] * 2


async def test_a_transport_that_is_cancelled_while_it_leaves_leaves_both_sides_first(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine("--sessions"), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    leaving = asyncio.create_task(way.aclose())
    while way._line is not None:
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await engine.seen())["groups"] == []
    await served.server_status(lambda status: status.groups == 0)


async def test_a_failure_is_cleaned_up_also_when_the_cancellation_comes_in_the_middle_of_it(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine("--sessions"), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    await engine.stage("refuse")
    applying = asyncio.create_task(way.apply(manifest, deadline_s=100))
    while way._line is not None:
        await asyncio.sleep(0)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    seen = await engine.seen()
    assert (seen["groups"], seen["in_session"]) == ([], False)
    await served.server_status(lambda status: status.groups == 0)


async def test_an_update_that_is_cancelled_at_its_very_end_keeps_no_other_engine_waiting(served: ServedRig) -> None:
    manifest = await served.publish(0)
    engine, _ = await asyncio.gather(served.start_engine(), served.start_server())
    way = served.transport(engine)
    await way.prepare(manifest, deadline_s=100)
    giving, ask = asyncio.Event(), way._line.ask

    async def slow(op: str, **fields: Any) -> Any:
        if op == "give":
            giving.set()
            await asyncio.Event().wait()
        return await ask(op, **fields)

    way._line.ask = slow
    applying = asyncio.create_task(way.apply(manifest, deadline_s=100))
    await giving.wait()
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    await served.server_status(lambda status: status.groups == 0)
