from __future__ import annotations

from typing import Any

import pytest

from buffer.contract import Granted, PutResult, Slot
from producer.config import GroupFilter
from producer.engine.client import EngineClient, Sampling
from producer.pool import EnginePool
from producer.rollout import Finished, GroupMaker, Refused
from producer.sampler import Sampler
from producer.source import PromptSource
from protocol.codec import decode_group, digest
from protocol.groups import payload_bound
from protocol.messages import EngineState, Reason, Span
from protocol.versions import Version


async def maker_of(stage: Any, config: Any, prepared: Any, group_filter: GroupFilter = GroupFilter.NONE) -> tuple[GroupMaker, Sampler]:
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=5.0)
    await pool.refresh()
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer)
    maker = GroupMaker(sampler, Sampling(max_new_tokens=8), group_size=2, group_filter=group_filter, producer_id="p", owner="o" * 16)
    return maker, sampler


async def slot_of(stage: Any) -> Slot:
    granted = await stage.ledger.reserve("o" * 16, "r1", 1, max_bytes=payload_bound(group_size=2, prompt_tokens=16, new_tokens=8))
    assert isinstance(granted, Granted), granted
    return granted.slots[0]


async def test_a_group_goes_from_prompt_to_ready_with_the_versions_that_wrote_it(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.versions = [("1:0", 3)]
    engine.texts = ["1234", "no"]
    maker, _ = await maker_of(stage, config, prepared)
    slot = await slot_of(stage)
    chosen = PromptSource(prepared.prompts, seed=0).choose(slot.seq)

    made = await maker.make(slot, chosen)

    assert isinstance(made, Finished), made
    assert await stage.ledger.put(made.header, made.payload) is PutResult.STORED
    header, group = made.header, decode_group(made.payload)
    assert header.payload_digest == digest(made.payload)
    assert header.prompt_id == f"train.jsonl:{chosen.row.line}"
    assert header.trainable == {Version(1, 0): 6}
    assert header.oldest == Version(1, 0)
    assert sorted(header.rewards) == [0.0, 1.0]
    prompt = chosen.ids.tolist()
    for rollout in group.rollouts:
        assert rollout.tokens.tolist() == [*prompt, 2, 3, 4]
        assert rollout.mask.tolist() == [0] * len(prompt) + [1, 1, 1]
        assert rollout.logprobs.tolist() == [0.0] * len(prompt) + [-0.5, -0.625, -0.75]
        assert rollout.spans == (Span(version=Version(1, 0), start=len(prompt), end=len(prompt) + 3),)
        assert rollout.engine_id == "a"
    assert all(request["input_ids"] == prompt for request in engine.requests)
    assert (await stage.ledger.status()).ready == 1


@pytest.mark.parametrize("behaviour", ["drop", 500])
async def test_a_sample_is_retried_alone_on_another_engine(stage: Any, behaviour: str | int) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    dying, healthy = await stage.engine("a"), await stage.engine("b")
    dying.behave = lambda _: behaviour
    maker, sampler = await maker_of(stage, config, prepared)
    slot = await slot_of(stage)

    made = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    assert isinstance(made, Finished)
    assert len(dying.requests) == 1
    assert len(healthy.requests) == 2
    assert (sampler.retried, sampler.aborted) == (1, 0)


async def test_a_sample_that_fails_everywhere_fails_its_group_as_a_value(stage: Any) -> None:
    config = stage.config(producer={"sample_retries": 2})
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.behave = lambda _: 400
    maker, _ = await maker_of(stage, config, prepared)
    slot = await slot_of(stage)

    refused = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.FAILED
    assert "3 attempts failed" in refused.why


@pytest.mark.parametrize("version", ["1:0", "boot:2", "7:1", "1:999"])
async def test_an_answer_outranks_the_registry_and_makes_the_engine_unfit(stage: Any, version: str) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    liar = await stage.engine("a")
    await stage.registry.ack("a", liar.nonce, Version(1, 1))
    liar.versions = [(version, 4)]
    healthy = await stage.engine("b")
    maker, _ = await maker_of(stage, config, prepared)
    slot = await slot_of(stage)

    made = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    assert isinstance(made, Finished), made
    assert len(healthy.requests) >= 2
    states = {engine.engine_id: engine.state for engine in await stage.registry.engines()}
    assert states == {"a": EngineState.UNFIT, "b": EngineState.ROUTABLE}


async def test_a_group_without_variance_is_filtered_when_asked(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    await stage.engine("a")
    maker, _ = await maker_of(stage, config, prepared, GroupFilter.ZERO_VARIANCE)
    slot = await slot_of(stage)

    refused = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    assert isinstance(refused, Refused)
    assert refused.reason is Reason.FILTERED
