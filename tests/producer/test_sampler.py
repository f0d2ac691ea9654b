from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from producer.engine.client import EngineClient, Sampling
from producer.pool import EnginePool
from producer.sampler import Sampled, Sampler
from producer.source import PromptSource
from producer.template import PromptEncoder
from protocol.errors import SampleFailed
from protocol.messages import EngineState, EngineStatus


async def sampler_of(stage: Any, **producer: Any) -> tuple[Sampler, EnginePool, Any]:
    config = stage.config(producer=producer)
    prepared = await stage.create(config)
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
    return sampler, pool, PromptSource(prepared.prompts, seed=0).choose(0)


async def sample(sampler: Sampler, chosen: Any, tokens: int = 8) -> Sampled:
    return await sampler.sample(chosen, chosen.ids.tolist(), min_version=None, sampling=Sampling(max_new_tokens=tokens), rid="r")


async def test_a_sample_that_was_ended_goes_on_from_its_tokens_on_any_engine(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage, sample_retries=0)
    engine = await stage.engine("a")
    engine.abort_at = [3, 0, 2]
    engine.texts = ["?"]
    await pool.refresh()

    made = await sample(sampler, chosen, tokens=12)

    prompt = chosen.ids.tolist()
    assert [request["input_ids"] for request in engine.requests] == [prompt, [*prompt, 2, 3, 4], [*prompt, 2, 3, 4], [*prompt, 2, 3, 4, 2, 3]]
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [12, 9, 9, 7]
    assert len({request["rid"] for request in engine.requests}) == 4
    rollout = made.rollout
    assert rollout.tokens.tolist() == [*prompt, 2, 3, 4, 2, 3, 2, 3, 4, 5]
    assert rollout.logprobs[len(prompt) :].tolist() == [-0.25] * 5 + [-0.5, -0.625, -0.75, -0.875]
    assert [(str(span.version), span.end - span.start) for span in rollout.spans] == [("1:0", 9)]
    assert made.reward.value == 0.0
    assert (sampler.retried, sampler.aborted, sampler.kept_tokens) == (3, 3, 5)


async def test_the_reward_sees_the_text_of_the_whole(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage)
    engine = await stage.engine("a")
    engine.versions, engine.texts, engine.abort_at = [("1:0", 2)], ["?"], [2]
    await pool.refresh()
    seen: list[str] = []
    score = sampler._grader.score

    async def look(request: Any) -> Any:
        seen.append(request.response)
        return await score(request)

    sampler._grader = dataclasses.replace(sampler._grader, score=look)
    await sample(sampler, chosen)
    assert seen == ["0 1 0 1"], "tokens 2 and 3 are the characters 0 and 1"


async def test_versions_of_two_engines_stay_with_their_tokens(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage)
    first, second = await stage.engine("a"), await stage.engine("b")
    await stage.redis.hset(stage.keys.state, "trained", 1)
    first.abort_at, second.versions = [3], [("1:1", 2)]
    await pool.refresh()
    made = await sample(sampler, chosen)
    assert (len(first.requests), len(second.requests)) == (1, 1)
    start = len(chosen.ids)
    assert [(str(span.version), span.start - start, span.end - start) for span in made.rollout.spans] == [("1:0", 0, 3), ("1:1", 3, 5)]
    assert made.rollout.engine_id == "b"


async def test_what_is_there_already_survives_a_failed_attempt(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage, sample_retries=1)
    engine = await stage.engine("a")
    engine.abort_at = [3]
    answers = iter(["ok", 500, "ok"])
    engine.behave = lambda _: next(answers)
    await pool.refresh()
    made = await sample(sampler, chosen)
    assert made.rollout.mask.sum() == 7
    assert [len(request["input_ids"]) - len(chosen.ids) for request in engine.requests] == [0, 3, 3]


async def test_a_sample_that_has_all_its_tokens_when_it_is_ended_asks_for_no_more(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage)
    engine = await stage.engine("a")
    engine.abort_at = [4]
    await pool.refresh()
    made = await sample(sampler, chosen, tokens=4)
    assert len(engine.requests) == 1
    assert (made.rollout.finish_reason, made.rollout.mask.sum()) == ("length", 4)


async def test_a_sample_that_is_complete_when_it_is_ended_asks_for_no_more(stage: Any) -> None:
    """Its end is among what the model's own files name."""
    (stage.folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 9]}))
    sampler, pool, chosen = await sampler_of(stage)
    engine = await stage.engine("a")
    engine.abort_at = [3]
    await pool.refresh()
    made = await sample(sampler, chosen)
    assert len(engine.requests) == 1
    assert made.rollout.tokens.tolist() == [*chosen.ids.tolist(), 2, 3, 4]
    assert made.rollout.finish_reason == "stop"


async def test_without_end_of_sequence_tokens_a_warning_says_so_and_no_sample_goes_on_past_its_end(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    (stage.folder / "model" / "tokenizer_config.json").unlink()
    sampler, pool, chosen = await sampler_of(stage)
    engine = await stage.engine("a")
    engine.abort_at = [3, 1]
    await pool.refresh()
    await sample(sampler, chosen)
    prompt = chosen.ids.tolist()
    assert [request["input_ids"] for request in engine.requests] == [prompt, [*prompt, 2, 3], [*prompt, 2, 3]]
    assert (sampler.aborted, sampler.kept_tokens) == (2, 2)
    assert [record.getMessage().count("names no end-of-sequence token") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 5}}, {1, 5}),
        ({"config.json": {"eos_token_id": [5, 6]}, "generation_config.json": {"eos_token_id": [6, 7]}}, {1, 5, 6, 7}),
        ({"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": {"content": "<s>"}}}, {0}),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}}, {1}),
        ({"tokenizer_config.json": {"eos_token": "not one of it"}}, set()),
    ],
)
def test_end_of_sequence_tokens_are_those_of_the_model_its_generation_settings_and_its_tokenizer(
    model: Path, files: dict[str, Any], expected: set[int]
) -> None:
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    assert PromptEncoder(str(model)).decode.eos_ids == expected


async def test_a_piece_of_a_version_that_is_none_of_the_runs_is_not_kept(stage: Any) -> None:
    sampler, pool, chosen = await sampler_of(stage, sample_retries=0)
    engine = await stage.engine("a")
    engine.versions, engine.abort_at = [("7:1", 4)], [3]
    await pool.refresh()
    with pytest.raises(SampleFailed, match="does not have"):
        await sample(sampler, chosen)
    [status] = await stage.registry.engines()
    assert status.state is EngineState.UNFIT


async def test_what_an_engine_says_of_itself_reaches_its_requests(stage: Any) -> None:
    """A SGLang has a prefix cache and may lag; its answers on older keys are asked for again, and cost no attempt."""
    sampler, pool, chosen = await sampler_of(stage, sample_retries=0)
    engine = await stage.engine("a")
    status = EngineStatus(engine_id="a", boot_nonce=engine.nonce, url=engine.url, kind="sglang", state=EngineState.STARTING, span_lag=1)
    await stage.registry.beat(status, ttl_s=60.0)
    await stage.ledger.open_step(1, 1)
    await stage.redis.hset(stage.keys.state, "trained", 1)
    engine.versions = [("1:1", 4)]
    answers = iter([[("1:1", 4)], [("1:0", 3), ("1:1", 1)]])

    def behave(_: dict[str, Any]) -> str:
        engine.versions = next(answers)
        return "ok"

    engine.behave = behave
    await pool.refresh()
    made = await sample(sampler, chosen)
    assert [request["extra_key"] for request in engine.requests] == ["1:0", "1:0"]
    assert (sampler.aborted, sampler.kept_tokens) == (1, 0)
    assert [(str(span.version), span.end - span.start) for span in made.rollout.spans] == [("1:0", 4)]
