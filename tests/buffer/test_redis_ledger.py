"""What only the Redis ledger has: crashes between two commands, a full server, keys, cost, and the audit stream."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from buffer import redis_put
from buffer.contract import Blocked, ChunkRecord, PutResult
from buffer.redis_ledger import RedisLedger
from deploy.redis_server import redis_server
from protocol.connection import Client, connect
from protocol.errors import RedisUnavailable, RunMissing, SchemaTooNew, SlotLost
from protocol.keys import Keys
from protocol.messages import Edge, Reason
from protocol.versions import Version

from .conftest import IDENTITY, RedisHarness, redis_violations, reference, seqs_of, settings

pytestmark = pytest.mark.redis


# -- crashes -----------------------------------------------------------------------------------------------------------------------------------


async def test_a_producer_that_dies_between_payload_and_ledger_leaves_nothing_that_stays(on_redis: RedisHarness) -> None:
    await on_redis.start()
    (slot,) = await on_redis.reserve(1)
    key = on_redis.keys.payload(slot.seq, slot.attempt, slot.token)
    await on_redis.client.set(key, b"half a put", nx=True, px=redis_put.PAYLOAD_TTL_S * 1000)  # and here it dies
    assert 0 < await on_redis.client.ttl(key) <= redis_put.PAYLOAD_TTL_S
    await on_redis.advance(61)
    (again,) = await on_redis.reserve(1)
    assert (again.seq, again.attempt) == (slot.seq, 2)
    assert await on_redis.client.exists(key) == 0
    header = await on_redis.put(again, Version(1, 0))
    assert await on_redis.client.ttl(on_redis.keys.payload(again.seq, again.attempt, again.token)) == -1
    assert len(await on_redis.ledger.payload(header)) == 50


async def test_a_payload_that_expires_before_its_put_is_set_again(on_redis: RedisHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await on_redis.start()
    (slot,) = await on_redis.reserve(1)
    send = redis_put.PutPath.one_server
    sent: list[int] = []

    async def expires_first(self: redis_put.PutPath, request: redis_put.PutRequest) -> redis_put.Reply:
        sent.append(len(request.payload))
        if len(sent) == 1:
            await on_redis.client.set(request.key, b"", px=600_000)  # the ledger finds something else than was sent
            reply = await send(self, request)
            await on_redis.client.delete(request.key)
            return reply
        return await send(self, request)

    monkeypatch.setattr(redis_put.PutPath, "one_server", expires_first)
    await on_redis.put(slot, Version(1, 0))
    assert sent == [50, 50]
    assert (await on_redis.ledger.status()).ready == 1


async def test_a_put_that_finds_other_bytes_under_its_token_is_given_up(on_redis: RedisHarness) -> None:
    await on_redis.start()
    (slot,) = await on_redis.reserve(1)
    await on_redis.client.set(on_redis.keys.payload(slot.seq, slot.attempt, slot.token), b"of another length", px=60_000)
    async with asyncio.timeout(100):
        with pytest.raises(SlotLost, match="50 bytes"):
            await on_redis.put(slot, Version(1, 0))
    assert (await on_redis.ledger.status()).ready == 0


async def test_an_attach_whose_reply_was_lost_is_one_incarnation(on_redis: RedisHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await on_redis.ledger.create(IDENTITY, settings())
    monkeypatch.setattr(secrets, "token_hex", lambda _n: "the same request")  # what a retry of the connection sends
    first = await on_redis.ledger.attach(None, trainer_id="trainer")
    assert await on_redis.ledger.attach(None, trainer_id="trainer") == first
    assert (await on_redis.ledger.status()).incarnation == 1


async def test_a_late_put_of_a_trained_and_freed_group_leaves_no_payload(on_redis: RedisHarness) -> None:
    incarnation = await on_redis.start()
    slots = await on_redis.reserve(4)
    headers = [await on_redis.put(slot, Version(1, 0)) for slot in slots]
    payload = slots[0].token.encode().ljust(50, b".")
    await on_redis.train(incarnation, 1)
    assert await on_redis.ledger.put(headers[0], payload) is PutResult.DUPLICATE
    await on_redis.checkpoint(incarnation, 1)
    await on_redis.produce(4, Version(1, 0))
    await on_redis.train(incarnation, 2)
    await on_redis.checkpoint(incarnation, 2)
    with pytest.raises(SlotLost):
        await on_redis.ledger.put(headers[0], payload)
    assert await on_redis.payload_count() == 4


async def test_scripts_survive_a_server_that_forgot_them(on_redis: RedisHarness) -> None:
    await on_redis.start()
    (slot,) = await on_redis.reserve(1)
    await on_redis.client.script_flush()
    await on_redis.put(slot, Version(1, 0))
    assert (await on_redis.ledger.status()).ready == 1


# -- what a sweep finishes ---------------------------------------------------------------------------------------------------------------------


async def test_sweeps_delete_a_bounded_number_and_any_number_of_processes_may_do_them_at_once(on_cluster_terms: RedisHarness) -> None:
    harness = on_cluster_terms
    await harness.start(settings(groups_per_step=300, chunk_groups=300, max_attempts=1))
    headers = await harness.produce(300, Version(1, 0))
    assert await harness.ledger.set_aside(1, [(header.seq, header.token) for header in headers]) == 300
    assert await harness.client.scard(harness.keys.key("doomed")) == 300
    assert await harness.ledger.sweep() == 256
    others = [RedisLedger(harness.client, harness.keys, cluster=True) for _ in range(3)]
    assert sum(await asyncio.gather(*(other.sweep() for other in others))) >= 44
    assert await harness.ledger.sweep() == 0
    assert await harness.payload_count() == 0


async def test_a_payload_that_was_dropped_while_a_sweep_made_it_stay_is_deleted_by_the_next(
    on_cluster_terms: RedisHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = on_cluster_terms
    await harness.start()
    (slot,) = await harness.reserve(1)
    key = harness.keys.payload(slot.seq, slot.attempt, slot.token)
    persist, ledger = harness.client.persist, harness.ledger
    assert isinstance(ledger, RedisLedger)

    async def stops_there(_key: str) -> None:
        """A producer that is gone after its script."""

    with monkeypatch.context() as death:
        death.setattr(ledger._puts, "_acknowledge", stops_there)
        header = await harness.put(slot, Version(1, 0))
    await harness.client.expire(key, 100)

    async def meanwhile(name: str) -> object:
        await harness.ledger.set_aside(1, [(header.seq, header.token)])
        assert await RedisLedger(harness.client, harness.keys, cluster=True).sweep() == 1
        await harness.client.set(name, b"a put of the same attempt, sent again", px=100_000)
        return await persist(name)

    with monkeypatch.context() as race:
        race.setattr(harness.client, "persist", meanwhile)
        assert await harness.ledger.sweep() == 1
    assert await harness.client.ttl(key) == -1
    assert await harness.ledger.sweep() == 1
    assert await harness.client.exists(key) == 0


# -- a full server -----------------------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def own(tmp_path: Path) -> AsyncIterator[RedisHarness]:
    async with redis_server(tmp_path / "redis") as url:
        client = connect(url, deadline_s=1.0)
        try:
            yield RedisHarness(client, Keys("full"))
        finally:
            await client.aclose()


async def _fill(client: Client) -> None:
    await client.config_set("maxmemory", 1)


async def test_at_maxmemory_intake_stops_and_everything_that_drains_goes_on(own: RedisHarness) -> None:
    incarnation = await own.start()
    await own.produce(4, Version(1, 0))
    await own.train(incarnation, 1)
    await own.checkpoint(incarnation, 1)
    await own.produce(4, Version(1, 0))
    waiting, failing, kept = await own.reserve(3)
    await _fill(own.client)

    with pytest.raises(RedisUnavailable, match="maxmemory"):
        await own.ask(1)
    with pytest.raises(RedisUnavailable, match="maxmemory"):
        await own.put(waiting, Version(1, 0))
    assert await own.ledger.renew("p1", [(kept.seq, kept.token)]) == ()
    await own.ledger.release(waiting.seq, waiting.token, Reason.GIVEN_BACK)
    await own.ledger.release(failing.seq, failing.token, Reason.FAILED)
    await own.ledger.attach(reference(1, 1), trainer_id="next")
    chunks = await own.lease(2, 2)
    assert len(seqs_of(*chunks)) == 4
    await own.ledger.trained(2, 2, "w2", {})
    before = await own.payload_count()
    await own.checkpoint(2, 2)
    assert await own.payload_count() == before - 4
    await own.ledger.sweep()
    await own.ledger.drain(2, "full")
    status = await own.ledger.status()
    assert (status.trained, status.released, status.generating) == (2, 2, 1)
    assert await redis_violations(own.client, own.keys) == []


async def test_at_maxmemory_steps_are_spilled_and_recorded_groups_leave(own: RedisHarness) -> None:
    await own.start(settings(spill="spill", byte_budget=800))
    await own.produce(6, Version(1, 0))
    await own.train(1, 1)
    recorded = await own.ledger.ready(1)
    await _fill(own.client)
    await own.ledger.spilled(1, 1)
    assert await own.ledger.set_aside(1, [(header.seq, header.token) for header in recorded]) == 1
    assert await own.ledger.sweep() == 0
    assert await own.payload_count() == 1
    assert (await own.ledger.status()).bytes_used == 50
    assert await redis_violations(own.client, own.keys) == []


# -- keys and cost -----------------------------------------------------------------------------------------------------------------------------


async def test_every_ledger_key_shares_the_hash_tag_and_deleting_the_run_leaves_nothing(on_redis: RedisHarness) -> None:
    incarnation = await on_redis.start()
    await on_redis.produce(6, Version(1, 0))
    await on_redis.train(incarnation, 1)
    await on_redis.reserve(1)
    run = on_redis.keys.run
    found = {key.decode() async for key in on_redis.client.scan_iter(match=f"*{run}*")}
    payloads = {key for key in found if key.startswith(f"rs:payload:{run}:")}
    assert len(payloads) == 6
    assert all(key.startswith(f"rs:{{{run}}}:") for key in found - payloads)
    ledger = on_redis.ledger
    assert isinstance(ledger, RedisLedger)
    assert await ledger.delete_run() == len(found)
    assert not [key async for key in on_redis.client.scan_iter(match=f"*{run}*")]


async def test_whoever_is_alive_in_a_run_that_is_deleted_is_told_so_and_makes_no_key_of_it(on_redis: RedisHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    incarnation = await on_redis.start()
    await on_redis.produce(4, Version(incarnation, 0))
    ledger, client, scan = on_redis.ledger, on_redis.client, on_redis.client.scan_iter

    async def with_others_alive(**options: Any) -> AsyncIterator[bytes]:
        calls = (ledger.open_step(incarnation, 1), ledger.lease(incarnation, 1, 0), on_redis.ask(1), ledger.renew("p1", []), ledger.sweep(), ledger.status())
        for call in calls:
            with pytest.raises(RunMissing):
                await call
        async for key in scan(**options):
            yield key

    monkeypatch.setattr(client, "scan_iter", with_others_alive)
    assert isinstance(ledger, RedisLedger)
    await ledger.delete_run()
    monkeypatch.undo()
    assert [key async for key in client.scan_iter(match=f"*{on_redis.keys.run}*")] == []


async def _commands(client: Client) -> int:
    stats = await client.info("commandstats")
    return sum(one["calls"] for name, one in stats.items() if name not in ("cmdstat_info", "cmdstat_hset"))


async def test_the_cost_of_an_operation_does_not_grow_with_the_backlog(own: RedisHarness) -> None:
    await own.start(settings(groups_per_step=4, pipeline_depth=400.0, max_staleness=1000, byte_budget=1 << 20))

    async def cost() -> list[int]:
        marks = [await _commands(own.client)]
        (slot,) = await own.reserve(1)
        marks.append(await _commands(own.client))
        await own.put(slot, Version(1, 0))
        marks.append(await _commands(own.client))
        await own.ledger.renew("p1", [(slot.seq, slot.token)])
        marks.append(await _commands(own.client))
        await own.ledger.status()
        marks.append(await _commands(own.client))
        return [after - before for before, after in itertools.pairwise(marks)]

    await own.ledger.status()
    await cost()  # the first call of each script sends it whole
    small = await cost()
    slots = await own.reserve(900)
    for slot in slots[:400]:
        await own.put(slot, Version(1, 0))
    assert await cost() == small


# -- the audit stream --------------------------------------------------------------------------------------------------------------------------


async def _audit(harness: RedisHarness) -> list[tuple[str, dict[str, object]]]:
    entries = await harness.client.xrange(harness.keys.audit)
    return [(entry[b"op"].decode(), orjson.loads(entry[b"d"])) for _, entry in entries]


async def test_the_audit_stream_tells_every_change_once(on_redis: RedisHarness) -> None:
    incarnation = await on_redis.start(settings(groups_per_step=2, chunk_groups=2))
    first, second = await on_redis.reserve(2)
    await on_redis.ledger.bind(first.seq, first.token, 'row "7"')
    for slot in (first, second):
        await on_redis.put(slot, Version(1, 0))
    await on_redis.lease(incarnation, 1)
    await on_redis.lease(incarnation, 1)
    for _ in range(2):
        await on_redis.ledger.trained(incarnation, 1, "w1", {"loss": 0.25})
    await on_redis.checkpoint(incarnation, 1)
    (third,) = await on_redis.reserve(1)
    await on_redis.ledger.release(third.seq, third.token, Reason.FAILED)
    (third,) = await on_redis.reserve(1)
    await on_redis.ledger.release(third.seq, third.token, Reason.FILTERED)
    await on_redis.ledger.attach(None, trainer_id="next")
    await on_redis.lease(2, 1)
    await on_redis.ledger.drain(2, "end")
    events = await _audit(on_redis)
    assert [op for op, _ in events] == (
        [
            "created",
            "attached",
            "reserved",
            "bound",
            "put",
            "put",
            "opened",
            "leased",
            "trained",
            "checkpoint",
            "reserved",
            "released",
            "reserved",
            "dead",
            "attached",
            "leased",
            "drained",
        ]
    )
    found = dict(events)
    assert found["bound"] == {"seq": 0, "prompt_id": 'row "7"'}
    assert found["put"] == {
        "seq": 1, "attempt": 1, "producer_id": "producer", "bytes": 50, "tokens": {"1:0": 10}, "trained": 0, "lag": {"0": 10}, "rewards": [0.5, 1.0],
        "lengths": [3, 4],
    }  # fmt: skip
    assert found["trained"] == {"step": 1, "incarnation": 1, "digest": "w1", "groups": 2, "stats": {"loss": 0.25}}
    assert found["leased"] == {"step": 1, "chunk": 0, "revision": 0, "seqs": [0, 1], "incarnation": 2, "replay": True}
    assert found["dead"] == {"seq": 2, "attempt": 2, "reason": "filtered"}
    assert found["attached"]["parent"] == 1
    assert found["checkpoint"]["kept"] == [[1, 1]]


async def test_the_audit_stream_says_why_a_group_ended_and_how_long_its_rollouts_were(on_redis: RedisHarness) -> None:
    await on_redis.start(settings(max_attempts=1))
    first, second, third = await on_redis.reserve(3)
    await on_redis.ledger.release(first.seq, first.token, Reason.FAILED, why='engine "0" left', lengths=(7, 9))
    await on_redis.ledger.release(second.seq, second.token, Reason.GIVEN_BACK)
    header = await on_redis.put(third, Version(1, 0))
    await on_redis.ledger.set_aside(1, [(header.seq, header.token)])
    await on_redis.ledger.requeue([first.seq])
    events = [event for event in await _audit(on_redis) if event[0] in ("released", "dead", "requeued")]
    assert events == [
        ("dead", {"seq": 0, "attempt": 1, "reason": "failed", "why": 'engine "0" left', "lengths": [7, 9]}),
        ("released", {"seq": 1, "attempt": 1, "reason": "given_back"}),
        ("dead", {"seq": 2, "attempt": 1, "reason": "recorded"}),
        ("requeued", {"seqs": [0]}),
    ]


async def test_publish_lag_is_counted_by_tokens_when_a_group_is_put(on_redis: RedisHarness) -> None:
    incarnation = await on_redis.start(settings(groups_per_step=1, chunk_groups=1))
    await on_redis.produce(2, Version(1, 0))
    for step in (1, 2):
        await on_redis.train(incarnation, step)
    (slot,) = await on_redis.reserve(1)
    await on_redis.put(slot, {Version(1, 0): 3, Version(1, 2): 5})
    lag = [fields["lag"] for op, fields in await _audit(on_redis) if op == "put"][-1]
    assert lag == {"2": 3, "0": 5}


async def test_changes_that_somebody_may_wait_for_are_published(on_redis: RedisHarness) -> None:
    await on_redis.ledger.create(IDENTITY, settings(groups_per_step=1, chunk_groups=1))
    pubsub = on_redis.client.pubsub()
    await pubsub.subscribe(on_redis.keys.wakeups)
    try:

        async def heard() -> set[str]:
            await on_redis.client.publish(on_redis.keys.wakeups, "mark")
            topics: set[str] = set()
            async with asyncio.timeout(100):
                async for message in pubsub.listen():
                    if message["type"] == "message":
                        if message["data"] == b"mark":
                            break
                        topics.add(message["data"].decode())
            return topics

        await on_redis.ledger.attach(None, trainer_id="trainer")
        assert await heard() == {"run", "slot", "ready"}
        await on_redis.serve(Version(1, 0))
        await on_redis.produce(1, Version(1, 0))
        assert await heard() == {"ready"}
        await on_redis.train(1, 1)
        assert await heard() == {"slot"}
        (slot,) = await on_redis.reserve(1, max_bytes=99_900)
        await on_redis.put(slot, Version(1, 0))
        assert await heard() == {"ready", "slot"}  # bytes came free that a reserve may wait for
        await on_redis.ledger.drain(1, "end")
        assert await heard() == {"run", "slot", "ready"}
    finally:
        await pubsub.aclose()


async def test_a_lease_frees_the_slots_of_what_it_refuses(on_redis: RedisHarness) -> None:
    incarnation = await on_redis.start(settings(groups_per_step=1, chunk_groups=1, max_staleness=0))
    await on_redis.produce(1, Version(1, 0))
    await on_redis.train(incarnation, 1)
    await on_redis.serve(Version(1, 1))
    await on_redis.put((await on_redis.reserve(1))[0], Version(1, 0))
    await on_redis.ledger.open_step(incarnation, 2)
    assert await on_redis.ledger.lease(incarnation, 2, 0) == Blocked(edge=Edge.NO_GROUP)
    await on_redis.produce(1, Version(1, 1))
    chunk = await on_redis.ledger.lease(incarnation, 2, 0)
    assert isinstance(chunk, ChunkRecord)
    assert seqs_of(chunk) == [1]
    assert chunk.headers[0].attempt == 2


# -- schemas -----------------------------------------------------------------------------------------------------------------------------------


async def test_settings_that_a_newer_minor_schema_added_do_not_keep_a_process_out(on_redis: RedisHarness) -> None:
    await on_redis.start()
    state = on_redis.keys.state
    for field in ("identity", "settings"):
        raw = await on_redis.client.hget(state, field)
        assert raw is not None
        await on_redis.client.hset(state, field, orjson.dumps(orjson.loads(raw) | {"added_later": 1}))
    assert (await on_redis.ledger.join(IDENTITY)).groups_per_step == settings().groups_per_step


async def test_a_run_of_a_newer_major_schema_is_not_joined(on_redis: RedisHarness) -> None:
    await on_redis.start()
    await on_redis.client.hset(on_redis.keys.state, "identity", orjson.dumps({"schema_major": 2, "other": 1}))
    with pytest.raises(SchemaTooNew, match="upgrade rollstream here"):
        await on_redis.ledger.join(IDENTITY)
