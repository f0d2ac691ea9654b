"""A teacher behind the embedded engine: what it says is what its model says, and what happens while it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from producer.config import GroupFilter
from producer.engine.client import EngineClient, Sampling, open_session
from producer.engine.sglang.ports import held_port
from producer.pool import EnginePool
from producer.rollout import Finished, GroupMaker
from producer.sampler import Sampler
from producer.source import PromptSource
from producer.teacher.config import TeacherConfig
from producer.teacher.scoring import BadAnswer, asked, scored, spread
from producer.teacher.teacher import Teacher
from protocol.codec import decode_group
from protocol.config import RolloutConfig
from protocol.errors import ConfigError, SampleFailed
from protocol.groups import TEACHER_BYTES, TEACHER_LOGPROBS, payload_bound
from protocol.messages import Rollout

from .conftest import StartEngine, full_logprobs, write_model

SAMPLED = [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]
"""Two turns, with somebody else's words between them and after them."""


def rollout(mask: list[int] = SAMPLED, *, seed: int = 0) -> Rollout:
    tokens = np.random.default_rng(seed).integers(4, 20, len(mask), dtype=np.int32)
    return Rollout(tokens=tokens, mask=np.array(mask, dtype=np.uint8), logprobs=np.zeros(len(mask), dtype=np.float32), spans=(), reward=0.0)


def texts_of(folder: Path) -> dict[int, str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {token: tokenizer.decode([token], skip_special_tokens=False) for token in spread(tokenizer.get_vocab_size())}


def teacher_at(session: aiohttp.ClientSession, *urls: str, texts: dict[int, str] | None = None, **settings: Any) -> Teacher:
    return Teacher(session, TeacherConfig(urls=urls, **settings), texts=texts or {})


async def test_the_scores_of_a_group_are_the_logprobs_of_the_teachers_own_model(start_engine: StartEngine, model_a: Path, model_b: Path):
    rollouts = [rollout(), rollout([0, 1, 1, 1], seed=1), rollout([0, 0, 0], seed=2)]
    async with start_engine(path=model_b, api_key="sesame") as engine, open_session() as session:
        teacher = Teacher(session, TeacherConfig(urls=(engine.url + "/",)), texts=texts_of(model_a), key="sesame")
        await teacher.check()
        told = await teacher.score(rollouts)
    model = AutoModelForCausalLM.from_pretrained(model_b)
    expected = []
    for one in rollouts:
        ids = one.tokens.tolist()
        rows = full_logprobs(model, ids)
        expected += [rows[at - 1, token].item() if one.mask[at] else 0.0 for at, token in enumerate(ids)]
    assert told.dtype == np.float32
    np.testing.assert_allclose(told, expected, atol=1e-4)
    assert (teacher.waiting_since, teacher.resting) == (0.0, {})


@pytest.mark.parametrize(
    ("texts", "said"),
    [({5: "1", 7: "x"}, r"token 7 is '3' there and 'x' in model.path"), ({5: "1", 999: "y"}, "refuses tokens of model.path's vocabulary")],
)
async def test_a_teacher_with_another_vocabulary_is_refused_at_the_start_and_later(start_engine: StartEngine, texts: dict[int, str], said: str):
    async with start_engine() as engine, open_session() as session:
        teacher = teacher_at(session, engine.url, texts=texts)
        with pytest.raises(ConfigError, match=said):
            await teacher.check()
        with pytest.raises(ConfigError, match=said):
            await teacher.score([rollout()])


async def test_while_the_teacher_is_away_groups_wait_and_it_is_named_and_then_they_go_on(start_engine: StartEngine, model_a: Path):
    with held_port("127.0.0.1", key="port") as port:
        async with open_session() as session:
            teacher = teacher_at(session, f"http://127.0.0.1:{port}", texts=texts_of(model_a))
            await teacher.check()  # it is only told
            waiting = asyncio.create_task(teacher.score([rollout(), rollout(seed=1)]))
            async with asyncio.timeout(60):
                while not teacher.waiting_since:
                    await asyncio.sleep(0.01)
            ((name, why),) = teacher.resting.items()
            assert name == f"teacher http://127.0.0.1:{port}"
            assert "cannot be reached" in why
            gone = asyncio.create_task(teacher.score([rollout(seed=2)]))
            await asyncio.sleep(0)
            gone.cancel()
            async with start_engine(port=port):
                async with asyncio.timeout(60):
                    assert np.count_nonzero(await waiting) == 2 * sum(SAMPLED)
                assert (teacher.waiting_since, teacher.resting) == (0.0, {})


async def test_one_server_that_is_away_holds_nobody_up(start_engine: StartEngine):
    async with start_engine() as engine, open_session() as session:
        teacher = teacher_at(session, "http://127.0.0.1:9", engine.url)
        assert np.count_nonzero(await teacher.score([rollout(seed=seed) for seed in range(4)])) == 4 * sum(SAMPLED)
        assert not teacher.waiting_since


async def test_a_rollout_that_the_teacher_cannot_take_is_a_failure_of_its_group(start_engine: StartEngine):
    async with start_engine() as engine, open_session() as session:
        with pytest.raises(SampleFailed, match="refuses a rollout of 600 tokens: 400"):
            await teacher_at(session, engine.url).score([rollout([0] * 300 + [1] * 300), rollout()])


async def test_a_rollout_that_is_answered_badly_again_and_again_is_a_failure_of_its_group():
    async def nothing(_: web.Request) -> web.Response:
        return web.json_response(answer([[None, 5, None], [None, 6, None]]))

    app = web.Application()
    app.router.add_post("/generate", nothing)
    async with TestServer(app) as server, open_session() as session:
        with pytest.raises(SampleFailed, match="3 answers of no use to a rollout of 11 tokens"):
            await teacher_at(session, str(server.make_url("")).rstrip("/")).score([rollout()])


def answer(entries: list[Any]) -> dict[str, Any]:
    return {"meta_info": {"input_token_logprobs": entries}}


@pytest.mark.parametrize(
    "spoiled", [{}, {"meta_info": {}}, answer([[-1.0, 5, None]]), answer([[None, 5, None], [-1.0, 9, None]]), answer([[None, 5, None], [None, 6, None]])]
    + [answer([[None, 5, None], [value, 6, None]]) for value in (float("nan"), float("inf"), 0.5, "-1", True)],
)  # fmt: skip
def test_an_answer_that_is_not_one_logprob_for_each_token_is_not_believed(spoiled: Any):
    one = Rollout(
        tokens=np.array([4, 5, 6], dtype=np.int32), mask=np.array([0, 0, 1], dtype=np.uint8), logprobs=np.zeros(3, dtype=np.float32), spans=(), reward=0.0
    )
    assert asked(one)["logprob_start_len"] == 1
    assert scored(one, answer([[None, 5, None], [-0.5, 6, None]])).tolist() == [0.0, 0.0, -0.5]
    assert scored(one, answer([[None, 5, None], [-3.4e38, 6, None]])).tolist() == [0.0, 0.0, -1e6]
    with pytest.raises(BadAnswer):
        scored(one, spoiled)


async def test_scores_travel_in_the_payload_within_what_its_slot_is_charged(stage: Any, start_engine: StartEngine, tmp_path: Path):
    config = stage.config()
    prepared = await stage.create(config)
    await stage.engine("a")
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    await pool.refresh()
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
    bound = payload_bound(group_size=2, prompt_tokens=8, new_tokens=8, extra_bytes=TEACHER_BYTES)
    assert bound - payload_bound(group_size=2, prompt_tokens=8, new_tokens=8) == 2 * 16 * TEACHER_BYTES
    (slot,) = (await stage.ledger.reserve("o" * 16, "r1", 1, max_bytes=bound)).slots
    model = write_model(tmp_path / "teacher", seed=3, vocab_size=64)
    async with start_engine(path=model) as engine:
        teacher = teacher_at(stage.session, engine.url)
        options = {"group_size": 2, "group_filter": GroupFilter.NONE, "producer_id": "p", "owner": "o" * 16, "teacher": teacher}
        made = await GroupMaker(sampler, Sampling(max_new_tokens=8), **options).make(slot, PromptSource(prepared.prompts, seed=0).choose(slot.seq))
        assert isinstance(made, Finished), made
        group = decode_group(made.payload)
        expected = await teacher.score(group.rollouts)
    np.testing.assert_array_equal(group.extras[TEACHER_LOGPROBS], expected)
    assert np.count_nonzero(expected) == made.new_tokens


def test_what_cannot_be_compared_is_refused_before_anything_is_asked():
    with pytest.raises(ConfigError, match=r"rollout.temperature 0.7: .* set rollout.temperature = 1"):
        TeacherConfig(urls=("http://here:1",)).check(RolloutConfig(temperature=0.7))
    TeacherConfig().check(RolloutConfig(temperature=0.7))
    with pytest.raises(ValueError, match="names a server twice"):
        TeacherConfig(urls=("http://here:1", "http://here:1/"))
