"""From a teacher's scores to the gradient."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import find_advantage
from consumer.batch import collate, micro_batches
from consumer.packing import packed_batches
from consumer.torch_backend import TorchBackend
from producer.engine.client import open_session
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from producer.teacher.config import TeacherConfig
from producer.teacher.teacher import Teacher
from protocol.codec import decode_group, encode_group
from protocol.errors import ConfigError, RollstreamError
from protocol.groups import TEACHER_LOGPROBS
from protocol.messages import RolloutGroup

from .conftest import VOCAB, Sampler, save_model

NONE = find_advantage("none")
Make = Callable[..., TorchBackend]
Record = Callable[..., StepRecord]


def marked(group: RolloutGroup) -> RolloutGroup:
    """With scores that tell where each belongs: twice what the policy said."""
    return dataclasses.replace(group, extras={TEACHER_LOGPROBS: 2 * np.concatenate([rollout.logprobs for rollout in group.rollouts])})


@pytest.mark.parametrize("share", [False, True])
def test_each_token_of_the_loss_meets_its_own_score_in_every_layout(sampler: Sampler, make_record: Record, share: bool):
    groups = [(header, marked(group)) for header, group in (sampler.headed(seq) for seq in range(4))]
    batch = collate(make_record(), groups, NONE)
    seen = 0
    for part in [*micro_batches(batch, max_tokens=64, share_prompts=share), *packed_batches(batch, max_tokens=64)]:
        assert part.teacher is not None
        assert len(set(part.behaviour.tolist())) > 1
        np.testing.assert_array_equal(part.teacher, 2 * part.behaviour)
        seen += len(part.teacher)
    assert seen == 2 * batch.tokens


def test_distillation_without_scores_names_the_group_and_what_to_set(sampler: Sampler, make_backend: Make, make_record: Record):
    (header, scored), bare = sampler.headed(4), sampler.headed(7)
    batch = collate(make_record(), [(header, marked(scored)), bare], NONE)
    with pytest.raises(ConfigError, match=r"group 7 has no teacher's logprobs, which loss.kind distillation needs: set teacher.urls"):
        make_backend(loss={"kind": "distillation"}).accumulate(batch)
    make_backend().accumulate(batch)  # no other loss minds


@pytest.mark.parametrize("spoil", [lambda told: told[:-1], lambda told: told.astype(np.float64), lambda told: told * np.nan])
def test_scores_that_are_not_one_number_a_token_are_refused(sampler: Sampler, make_record: Record, spoil: Callable[[Any], Any]):
    header, group = sampler.headed(3)
    group = dataclasses.replace(group, extras={TEACHER_LOGPROBS: spoil(marked(group).extras[TEACHER_LOGPROBS])})
    with pytest.raises(RollstreamError, match="group 3: extra teacher_logprobs"):
        collate(make_record(), [(header, group)], NONE)


def divergence(policy: torch.nn.Module, teacher: torch.nn.Module) -> float:
    """Mean KL(policy || teacher) of the next token over fixed contexts, exact."""
    contexts = torch.randint(3, len(VOCAB), (64, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        p, q = (model(input_ids=contexts).logits.log_softmax(-1) for model in (policy, teacher))
    return float((p.exp() * (p - q)).sum(-1).mean())


async def test_training_on_the_scores_of_a_live_teacher_brings_the_policy_nearer_to_it(
    make_backend: Make, make_record: Record, model_path: Path, tmp_path: Path
):
    """Sampled by the policy, scored by an engine over HTTP, through the payload, into the optimizer."""
    teacher_path = save_model(tmp_path / "teacher", seed=5)
    teacher_model = transformers.AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32).eval()
    backend, sampler = make_backend(loss={"kind": "distillation"}, lr=1e-2), Sampler(model_path)
    sampler.model = backend._model
    before = divergence(backend._model, teacher_model)
    async with EmbeddedEngine(load(str(teacher_path), slots=64), weight_version="teacher", seed=1) as engine, open_session() as session:
        teacher = Teacher(session, TeacherConfig(urls=(engine.url,)), texts={})
        for step in range(1, 9):
            headers, groups = zip(*(sampler.headed(8 * step + i, size=6) for i in range(8)), strict=True)
            scores = await asyncio.gather(*(teacher.score(group.rollouts) for group in groups))
            scored = [dataclasses.replace(group, extras={TEACHER_LOGPROBS: told}) for group, told in zip(groups, scores, strict=True)]
            batch = collate(make_record(), [(header, decode_group(encode_group(group))) for header, group in zip(headers, scored, strict=True)], NONE)
            backend.accumulate(batch)
            report = backend.finish_step(step, batch.divisor)
            assert step > 1 or report.loss > 1.0  # the divergence as the samples tell it
    assert divergence(backend._model, teacher_model) < 0.85 * before
