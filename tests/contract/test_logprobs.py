"""Logprobs against a forward pass of transformers: what a trainer relies on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from producer.engine.client import EngineClient, Sampling
from producer.teacher.config import TeacherConfig
from producer.teacher.scoring import spread
from producer.teacher.teacher import Teacher
from protocol.errors import ConfigError
from protocol.messages import Rollout
from protocol.versions import Version

from .conftest import Models
from .engine import PROMPT, Engine, asking


def logged(answer: dict) -> torch.Tensor:
    values, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
    assert list(tokens) == answer["output_ids"]
    return torch.tensor(values)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.7, "top_k": 20, "temperature": 1.3}],
    ids=str,
)
async def test_they_are_the_models_own_after_temperature_and_before_any_cut(engine: Engine, models: Models, tolerance: float, sampling: dict[str, float]):
    """A cut decides what may be sampled, and never what its logprob is. Greedy ones are at temperature 1."""
    answers = await asyncio.gather(*(engine.generate(asking(40, ids=[10 + i, *PROMPT], sampling=sampling)) for i in range(4)))
    for i, answer in enumerate(answers):
        own = models.written(models.a, [10 + i, *PROMPT], answer["output_ids"], temperature=sampling.get("temperature", 1.0) or 1.0)
        torch.testing.assert_close(logged(answer), own, atol=tolerance, rtol=0)


async def test_a_cut_leaves_only_the_likeliest(engine: Engine, models: Models):
    answer = await engine.generate(asking(60, sampling={"top_k": 3, "temperature": 1.5}))
    ranks = models.logprobs(models.a, PROMPT, answer["output_ids"]).argsort(dim=-1, descending=True).argsort(dim=-1)
    chosen = ranks.gather(1, torch.tensor(answer["output_ids"])[:, None])
    assert chosen.max() <= 2
    assert chosen.float().mean() > 0


async def test_those_of_the_prompt_are_there_from_where_it_is_asked(engine: Engine, models: Models, tolerance: float):
    prompt = [60, 70, 80, 90, 100]
    answer = await engine.generate(asking(3, ids=prompt, logprob_start_len=0, top_logprobs_num=2))
    meta = answer["meta_info"]
    own = models.logprobs(models.a, prompt[:1], prompt[1:] + answer["output_ids"])
    first, *others = meta["input_token_logprobs"]
    assert first == [None, prompt[0], None]
    assert [entry[1] for entry in others] == prompt[1:]
    expected = own.gather(1, torch.tensor(prompt[1:] + answer["output_ids"])[:, None])[:, 0]
    written = torch.tensor([entry[0] for entry in others] + [entry[0] for entry in meta["output_token_logprobs"]])
    torch.testing.assert_close(written, expected, atol=tolerance, rtol=0)
    assert meta["input_top_logprobs"][0] is None
    tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    assert [[entry[1] for entry in top] for top in tops] == own.topk(2, dim=-1).indices.tolist()
    later = await engine.generate(asking(3, ids=prompt, logprob_start_len=3))
    assert [entry[1] for entry in later["meta_info"]["input_token_logprobs"]] == prompt[3:]
    assert later["meta_info"]["input_token_logprobs"][0][0] is None
    assert (await engine.generate(asking(3, ids=prompt)))["meta_info"]["input_token_logprobs"] == []


async def test_a_teachers_scores_are_what_its_model_says_of_each_sampled_token_and_its_vocabulary_is_known(engine: Engine, models: Models, tolerance: float):
    """Whatever is asked for is read, and nothing is written."""
    texts = {token: models.tokenizer.decode([token], skip_special_tokens=False) for token in spread(models.tokenizer.get_vocab_size())}
    teacher = Teacher(engine.session, TeacherConfig(urls=(engine.url,)), texts=texts, key=engine.setup.api_key)
    await teacher.check()
    assert not teacher.resting
    tokens, mask = np.array([*PROMPT, 60, 70, 80, 90, 100], dtype=np.int32), np.array([0] * len(PROMPT) + [1, 0, 1, 1, 0], dtype=np.uint8)
    rollout = Rollout(tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), dtype=np.float32), spans=(), reward=0.0)
    for _ in range(2):  # once more, with all of it in the server's cache
        told = torch.from_numpy(await teacher.score([rollout]))
        own = models.written(models.a, PROMPT, tokens[len(PROMPT) :].tolist(), temperature=1.0)
        torch.testing.assert_close(told[len(PROMPT) :], own * torch.from_numpy(mask[len(PROMPT) :]), atol=tolerance, rtol=0)
        assert not told[: len(PROMPT)].any()
    with pytest.raises(ConfigError, match="token 9 is"):
        await Teacher(engine.session, TeacherConfig(urls=(engine.url,)), texts={9: "nothing like it"}, key=engine.setup.api_key).check()


async def test_the_text_of_each_token_is_there_when_asked_for(engine: Engine, models: Models):
    answer = await engine.generate(asking(12, return_text_in_logprobs=True))
    for _, token, text in answer["meta_info"]["output_token_logprobs"]:
        assert text == models.tokenizer.decode([token], skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_projects_client_brings_what_the_model_says(engine: Engine, models: Models, tolerance: float, *, stream: bool):
    client = EngineClient(engine.session, engine.setup.api_key, stream=stream)
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    dialect = await engine.control.dialect()
    one = await client.generate(
        engine.url, PROMPT, sampling=sampling, rid="c", deadline_s=120, assumed=Version(1, 0), prefix_cache=dialect.prefix_cache, span_lag=1
    )
    own = models.written(models.a, PROMPT, one.output_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(one.logprobs.copy()), own, atol=tolerance, rtol=0)
    assert [(str(span.version), span.start, span.end) for span in one.spans] == [("1:0", 0, 30)]
    assert one.finish_reason == "length"
    stopped = await client.generate(
        engine.url, PROMPT, sampling=Sampling(max_new_tokens=300, stop_token_ids=tuple(range(100, 200))), rid="d", deadline_s=120, assumed=Version(1, 0)
    )
    assert (stopped.finish_reason, stopped.matched) == ("stop", int(stopped.output_ids[-1]))
