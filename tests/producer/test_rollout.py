from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.blobs import BlobStore
from buffer.client import TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import Granted, PutResult, Slot
from buffer.storage import open_storage
from producer.config import GroupFilter
from producer.engine.client import EngineClient, Sampling
from producer.pool import EnginePool
from producer.rewards import Grader, Reward, RewardSample
from producer.rollout import Finished, GroupMaker, Refused
from producer.sampler import Sampler
from producer.source import PromptSource
from protocol.codec import decode_group, digest
from protocol.groups import payload_bound
from protocol.messages import EngineState, Reason, Span
from protocol.objects import FolderStore
from protocol.versions import Version


async def maker_of(stage: Any, config: Any, prepared: Any, group_filter: GroupFilter = GroupFilter.NONE, **options: Any) -> tuple[GroupMaker, Sampler]:
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    await pool.refresh()
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
    maker = GroupMaker(sampler, Sampling(max_new_tokens=8), group_size=2, group_filter=group_filter, producer_id="p", owner="o" * 16, **options)
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


# -- extras ------------------------------------------------------------------------------------------------------------------------------------


def with_extras(prepared: Any, small: int, large: int) -> Any:
    """A grader whose rewards carry extras of so many bytes."""

    async def score(sample: RewardSample) -> Reward:
        size = len(sample.response_ids)
        return Reward(1.0, extras={"small": np.full(small, size, dtype="|u1"), "large": np.full(large // 4, size, dtype="<i4")})

    return dataclasses.replace(prepared, grader=Grader(score=score, label_fault=lambda _: ""))


async def test_large_extras_are_durable_before_the_put_and_come_back_to_the_trainer(stage: Any, tmp_path: Path) -> None:
    config = stage.config()
    settings = BufferConfig(groups_per_step=2, chunk_groups=1, blobs=str(tmp_path / "blobs"), blob_bytes=1000)
    prepared = with_extras(await stage.create(config, **settings.model_dump()), 100, 2000)
    storage = open_storage(settings, stage.keys.run)
    await stage.engine("a")
    maker, _ = await maker_of(stage, config, prepared, blobs=storage.blobs, blob_bytes=settings.blob_bytes)
    slot = await slot_of(stage)

    made = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    assert isinstance(made, Finished), made
    assert set(made.header.blobs) == {"large/0", "large/1"}
    assert set(decode_group(made.payload).extras) == {"small/0", "small/1"}
    assert await stage.ledger.put(made.header, made.payload) is PutResult.STORED
    await stage.ledger.open_step(1, 1)
    chunk = await stage.ledger.lease(1, 1, 0)
    _, [(header, group)] = await TrainerBuffer(stage.ledger, stage.wakeups, 1, storage).fetch(chunk)
    assert header == made.header
    sizes = [len(rollout.tokens) - int(np.argmax(rollout.mask)) for rollout in group.rollouts]
    assert {name: (array.dtype.str, array.shape, set(array.tolist())) for name, array in group.extras.items()} == {
        "small/0": ("|u1", (100,), {sizes[0]}),
        "small/1": ("|u1", (100,), {sizes[1]}),
        "large/0": ("<i4", (500,), {sizes[0]}),
        "large/1": ("<i4", (500,), {sizes[1]}),
    }


@pytest.mark.parametrize("blobs", [True, False])
async def test_small_extras_that_do_not_fit_into_the_payload_go_out_too_or_fail_the_group(stage: Any, tmp_path: Path, blobs: bool) -> None:
    config = stage.config()
    prepared = with_extras(await stage.create(config), 900, 2000)
    store = BlobStore(FolderStore(tmp_path / "blobs"), "demo")
    await stage.engine("a")
    maker, _ = await maker_of(stage, config, prepared, **({"blobs": store, "blob_bytes": 1000} if blobs else {}))
    slot = await slot_of(stage)

    made = await maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))

    if blobs:
        assert isinstance(made, Finished)
        assert set(made.header.blobs) == {"small/0", "small/1", "large/0", "large/1"}
        assert set(store.restore(made.header, decode_group(made.payload)).extras) == set(made.header.blobs)
        assert await stage.ledger.put(made.header, made.payload) is PutResult.STORED
    else:
        assert isinstance(made, Refused)
        assert made.why == f"5800 bytes of extras do not fit into a payload of {slot.max_bytes}: set buffer.blobs"


async def test_a_group_waits_for_a_blob_store_that_refuses(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.rollout._STORE_PAUSE_S", 0.001)
    config = stage.config()
    prepared = with_extras(await stage.create(config), 10, 2000)
    in_the_way = tmp_path / "blobs"
    in_the_way.write_bytes(b"")
    store = BlobStore(FolderStore(in_the_way), "demo")
    asked = asyncio.Event()
    put = store.put
    loop = asyncio.get_running_loop()

    def listening(*args: Any, **options: Any) -> Any:
        try:
            return put(*args, **options)
        except OSError:
            loop.call_soon_threadsafe(asked.set)
            raise

    monkeypatch.setattr(store, "put", listening)
    await stage.engine("a")
    maker, _ = await maker_of(stage, config, prepared, blobs=store, blob_bytes=1000)
    slot = await slot_of(stage)
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        making = tasks.create_task(maker.make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq)))
        await asked.wait()
        in_the_way.unlink()
    made = making.result()
    assert isinstance(made, Finished)
    assert set(made.header.blobs) == {"large/0", "large/1"}
