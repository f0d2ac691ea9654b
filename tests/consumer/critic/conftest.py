"""Policies with a critic, and groups with masked tokens in the middle, single tokens and tokens that the guard takes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.contract import StepRecord
from consumer.advantages import find_advantage
from consumer.batch import ChunkBatch, collate
from consumer.config import TrainerConfig
from consumer.critic.actor_critic import ActorCritic, with_critic
from consumer.critic.config import CriticConfig
from consumer.losses import LossConfig
from consumer.torch_backend import TorchBackend
from protocol.messages import RolloutGroup, Span
from protocol.versions import Version


@pytest.fixture
def make(model_path: Path) -> Callable[..., ActorCritic]:
    def make(*, trainer: dict[str, Any] | None = None, path: Path | None = None, **critic: Any) -> ActorCritic:
        settings = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 2, "advantage": "gae"} | (trainer or {})))
        config = CriticConfig(**({"lr": 1e-2, "lr_warmup_steps": 0} | critic))
        policy = TorchBackend(model_path, settings, loss=LossConfig(), temperature=1.0, seed=3)
        return with_critic(policy, path or model_path, config, settings, seed=3, sharded=False, shared=False)

    return make


STEP = 10
NEW = Version(1, STEP - 1)


@pytest.fixture(scope="session")
def ragged_groups(sampler: Any) -> list[RolloutGroup]:
    """Twelve of up to four rollouts: two turns with another's tokens between them, a single sampled token, none at all, and first tokens that are too old."""
    found = []
    for seq in range(12):
        rollouts = []
        for i, one in enumerate(sampler.group(seq, max_new=9, version=NEW).rollouts[: 1 + seq % 4]):
            mask, spans = one.mask.copy(), one.spans
            places = np.flatnonzero(mask)
            if i == 0:
                mask[places[2:4]] = 0
            elif i == 1:
                mask[places[1:]] = 0
            elif i == 2 and seq % 2:
                mask[:] = 0
            elif len(places) > 2:
                middle, end = int(places[2]), len(mask)
                spans = (Span(version=Version(1, 0), start=int(places[0]), end=middle), Span(version=NEW, start=middle, end=end))
            rollouts.append(dataclasses.replace(one, mask=mask, spans=spans, reward=float(seq % 3) - one.reward))
        found.append(RolloutGroup(rollouts=tuple(rollouts)))
    return found


@pytest.fixture
def chunks(ragged_groups: list[RolloutGroup], header_of: Any, make_record: Callable[..., StepRecord]) -> Callable[..., list[ChunkBatch]]:
    """All these groups in chunks of `size`, as `STEP` leases them."""

    def cut(size: int) -> list[ChunkBatch]:
        headed = [(header_of(group, seq=seq, attempt=1, token="t", payload=b""), group) for seq, group in enumerate(ragged_groups)]
        record = make_record(STEP, groups=len(headed), chunk=size)
        return [collate(record, headed[at : at + size], find_advantage("gae")) for at in range(0, len(headed), size)]

    return cut
