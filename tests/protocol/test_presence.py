from __future__ import annotations

from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence


async def test_members_are_seen_with_their_newest_status(redis: Client, keys: Keys) -> None:
    here = Presence(redis, keys, "producer", ProducerStatus)
    assert await here.members() == []
    for member, groups in (("a", 1), ("b", 2), ("a", 3)):
        await here.beat(member, ProducerStatus(producer_id=member, groups_put=groups), ttl_s=600)
    assert {status.producer_id: status.groups_put for status in await here.members()} == {"a": 3, "b": 2}


async def test_who_leaves_is_gone_at_once(redis: Client, keys: Keys) -> None:
    here = Presence(redis, keys, "producer", ProducerStatus)
    await here.beat("a", ProducerStatus(producer_id="a"), ttl_s=600)
    await here.leave("a")
    await here.leave("never here")
    assert await here.members() == []
    assert not await redis.exists(keys.presence("producer"), keys.presence_deadline("producer"))


async def test_who_does_not_renew_expires_and_the_others_stay(redis: Client, keys: Keys) -> None:
    here = Presence(redis, keys, "producer", ProducerStatus)
    await here.beat("dies", ProducerStatus(producer_id="dies"), ttl_s=0.001)
    await here.beat("lives", ProducerStatus(producer_id="lives"), ttl_s=600)
    while len(members := await here.members()) > 1:
        pass
    assert [status.producer_id for status in members] == ["lives"]
    assert await redis.hlen(keys.presence("producer")) == 1


async def test_a_renewal_in_time_keeps_a_member(redis: Client, keys: Keys) -> None:
    here = Presence(redis, keys, "producer", ProducerStatus)
    await here.beat("a", ProducerStatus(producer_id="a"), ttl_s=0.001)
    await here.beat("a", ProducerStatus(producer_id="a"), ttl_s=600)
    assert len(await here.members()) == 1


async def test_roles_are_apart(redis: Client, keys: Keys) -> None:
    await Presence(redis, keys, "producer", ProducerStatus).beat("a", ProducerStatus(producer_id="a"), ttl_s=600)
    assert await Presence(redis, keys, "evaluator", ProducerStatus).members() == []


async def test_a_status_of_another_language_does_not_hide_the_others(redis: Client, keys: Keys) -> None:
    producers = Presence(redis, keys, "producer", ProducerStatus)
    await producers.beat("p", ProducerStatus(producer_id="p"), ttl_s=600)
    await redis.hset(keys.presence("producer"), "ghost", b"\xc1garbage")
    await redis.zadd(keys.presence_deadline("producer"), {"ghost": 1e15})
    assert [status.producer_id for status in await producers.members()] == ["p"]


async def test_a_role_remembers_when_it_was_last_heard_of(redis: Client, keys: Keys) -> None:
    here = Presence(redis, keys, "producer", ProducerStatus)
    assert await here.last_seen() is None
    await here.leave("never here")
    assert await here.last_seen() is None
    await here.beat("a", ProducerStatus(producer_id="a"), ttl_s=0.001)
    beaten = await here.last_seen()
    seconds, _ = await redis.time()
    assert beaten is not None
    assert seconds - 600 < beaten < seconds + 2
    while await here.members():
        pass
    assert await here.last_seen() == beaten, "who expires was last heard of at its last beat"
    await here.beat("b", ProducerStatus(producer_id="b"), ttl_s=600)
    await redis.set(keys.presence_seen("producer"), 1000)
    await here.leave("b")
    assert (await here.last_seen() or 0.0) >= beaten
