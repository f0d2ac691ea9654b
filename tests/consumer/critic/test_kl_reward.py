"""The penalty in the reward: against plain recursion and plain forwards, however a step is cut; what is refused, and what is told."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.advantages import STD_FLOOR, gae
from consumer.backend import StepReport
from consumer.batch import ChunkBatch, step_divisor
from consumer.config import TrainerConfig
from consumer.critic.actor_critic import with_critic
from consumer.critic.config import CriticConfig
from consumer.kl_reward import BY_TOKEN, check_kl_reward
from consumer.losses import LossConfig, make_loss
from consumer.losses.terms import Terms
from consumer.metric_names import metric_of
from consumer.token_returns import with_token_returns
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError

COEF = 0.3
GAMMA, LAM = 0.95, 0.9
Chunks = Callable[..., list[ChunkBatch]]
Make = Callable[..., Any]


@pytest.fixture
def make(model_path: Path) -> Make:
    def make(advantage: str, *, coef: float = COEF, **trainer: Any) -> Any:
        settings = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 0, "advantage": advantage} | trainer))
        policy = TorchBackend(model_path, settings, loss=LossConfig(kl_reward_coef=coef), temperature=0.8, seed=3)
        if advantage == "reinforce_pp_tokens":
            return with_token_returns(policy, coef)
        critic = CriticConfig(lr=1e-2, lr_warmup_steps=0, gamma=GAMMA, lam=LAM)
        return with_critic(policy, model_path, critic, settings, seed=3, sharded=False, shared=False, kl_reward_coef=coef)

    return make


def stepped(backend: Any, batches: list[ChunkBatch], step: int) -> StepReport:
    for batch in batches:
        backend.accumulate(batch)
    report: StepReport = backend.finish_step(step, step_divisor(batches))
    return report


def given_to(policy: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> list[ChunkBatch]:
    """What the policy is trained on from here on."""
    found: list[ChunkBatch] = []
    monkeypatch.setattr(policy, "accumulate", lambda batch: (found.append(batch), TorchBackend.accumulate(policy, batch)))
    return found


def each_rollout(batch: ChunkBatch) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]]:
    """Tokens, places of those in the loss, reward; those with a token in the loss."""
    found = []
    for group in batch.groups:
        for (start, end), reward in zip(itertools.pairwise(group.starts.tolist()), group.advantages.tolist(), strict=True):
            places = group.targets[(group.targets >= start) & (group.targets < end)] - start
            if len(places):
                found.append((group.tokens[start:end].astype(np.int64), places, reward))
    return found


def plain_logprobs(model: Any, tokens: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> list[float]:
    """Of these tokens at temperature 0.8, in float64."""
    with torch.no_grad():
        told = (model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0] / 0.8).log_softmax(-1)
    return [float(told[place - 1, tokens[place]]) for place in places.tolist()]


def recursion(rewards: list[float], values: list[float]) -> list[float]:
    found, following, carried = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + GAMMA * following - value + GAMMA * LAM * carried
        following = value
        found.append(carried)
    return found[::-1]


def test_gae_takes_penalties_off_the_reward_of_their_own_tokens():
    rng = np.random.default_rng(0)
    starts = np.array([0, 3, 3, 300, 301])
    rewards, values, penalties = rng.normal(size=4), rng.normal(size=301), rng.normal(size=301)
    advantages, returns = gae(rewards, values, starts, gamma=GAMMA, lam=LAM, penalties=penalties)
    expected: list[float] = []
    for reward, (start, end) in zip(rewards.tolist(), itertools.pairwise(starts.tolist()), strict=True):
        each = [-one for one in penalties[start:end].tolist()]
        if each:
            each[-1] += reward
        expected += recursion(each, values[start:end].tolist())
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-12)


@pytest.mark.parametrize("advantage", BY_TOKEN)
def test_advantages_are_those_of_penalised_rewards_of_each_rollout_by_itself(make: Make, chunks: Chunks, monkeypatch: pytest.MonkeyPatch, advantage: str):
    """Of the policy before the step, not of what sampled, nor of the policy that the step makes."""
    backend = make(advantage)
    policy: TorchBackend = backend._policy
    stepped(backend, chunks(12), 1)  # policy and reference are not the same any more, and values not 0
    pi, reference = (copy.deepcopy(model).double() for model in (policy._model, policy._reference))
    critic = None if advantage != "gae" else copy.deepcopy(backend._critic.backend._model).double()
    (whole,) = chunks(12)
    expected: list[float] = []
    away: list[float] = []
    for tokens, places, reward in each_rollout(whole):
        apart = [p - q for p, q in zip(*(plain_logprobs(model, tokens, places) for model in (pi, reference)), strict=True)]
        each = [-COEF * one for one in apart]
        each[-1] += reward
        away += apart
        if critic is None:
            expected += [math.fsum(each[t:]) for t in range(len(each))]
        else:
            with torch.no_grad():
                hidden = critic.trunk(input_ids=torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state[0]
                values = (hidden @ critic.head.weight[0] + critic.head.bias)[torch.from_numpy(places - 1)]
            expected += recursion(each, values.tolist())
    if critic is None:
        mean = math.fsum(expected) / len(expected)
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in expected) / (len(expected) - 1))
        expected = [(one - mean) / (deviation + STD_FLOOR) for one in expected]
    given = given_to(policy, monkeypatch)
    report = stepped(backend, chunks(5), 2)
    found = np.concatenate([group.advantage for batch in given for group in batch.groups])
    assert len(found) == len(expected) == whole.tokens > 90
    assert np.std(away) > 0.05
    np.testing.assert_allclose(found, expected, atol=2e-5)
    rollouts = len(each_rollout(whole))
    assert report.diagnostics["reward_kl"] == pytest.approx(math.fsum(away) / len(away), abs=1e-6)
    assert report.diagnostics["reward_penalty"] == pytest.approx(COEF * math.fsum(away) / rollouts, abs=1e-5)
    assert report.diagnostics["reference_kl"] == pytest.approx(math.fsum(math.expm1(-d) + d for d in away) / len(away), rel=1e-4)
    assert all(metric_of(name) is not None for name in report.diagnostics)


@pytest.mark.parametrize("advantage", BY_TOKEN)
def test_where_a_step_is_cut_changes_nothing(make: Make, chunks: Chunks, advantage: str):
    one, many = make(advantage), make(advantage, micro_batch_tokens=24)
    packed = make(advantage, packing="on", micro_batch_tokens=40)
    for step in (1, 2):
        first, *others = stepped(one, chunks(12), step), stepped(many, chunks(1 + step), step), stepped(packed, chunks(4), step)
        for other in others:
            assert other.grad_norm == pytest.approx(first.grad_norm, rel=1e-3)
            assert other.diagnostics == pytest.approx(dict(first.diagnostics), rel=1e-3, abs=1e-5)
    expected = {name: np.frombuffer(held.data, np.float32) for name, held in one.capture().weights.items()}
    for backend in (many, packed):
        for name, held in backend.capture().weights.items():
            np.testing.assert_allclose(np.frombuffer(held.data, np.float32), expected[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_on_the_reference_itself_equal_rewards_leave_nothing(make: Make, chunks: Chunks):
    (batch,) = chunks(12)
    level = dataclasses.replace(batch, groups=tuple(dataclasses.replace(one, advantages=np.ones_like(one.advantages)) for one in batch.groups))
    backend = make("reinforce_pp_tokens")
    assert stepped(backend, [level], 1).grad_norm == 0
    stepped(backend, [batch], 2)
    assert stepped(backend, [level], 3).grad_norm > 0


def test_without_a_penalty_returns_are_whitened_over_tokens_and_no_reference_is_loaded(make: Make, chunks: Chunks, monkeypatch: pytest.MonkeyPatch):
    backend = make("reinforce_pp_tokens", coef=0.0)
    assert backend._policy._reference is None
    given = given_to(backend._policy, monkeypatch)
    for batch in chunks(5):
        backend.accumulate(batch)
    assert not given, "the policy waits for the whole step"
    report = backend.finish_step(1, step_divisor(chunks(5)))
    found, rewards = (np.concatenate([group.advantage for batch in batches for group in batch.groups]) for batches in (given, chunks(5)))
    np.testing.assert_allclose(found, (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_FLOOR), rtol=1e-5)
    assert not {"reward_kl", "reward_penalty", "reference_kl"} & set(report.diagnostics)


@pytest.mark.parametrize("advantage", BY_TOKEN)
def test_an_abandoned_step_leaves_nothing_and_a_restored_state_goes_on_to_the_bit(make: Make, chunks: Chunks, advantage: str):
    straight, again = make(advantage), make(advantage)
    again.accumulate(chunks(6)[1])
    again.abandon_step()
    assert stepped(again, chunks(6), 1) == stepped(straight, chunks(6), 1)
    resumed = make(advantage)
    resumed.accumulate(chunks(6)[0])
    resumed.restore(straight.capture())
    assert stepped(resumed, chunks(6), 2) == stepped(straight, chunks(6), 2)
    assert resumed.digest() == straight.digest() == straight.snapshot().digest()


def test_a_step_without_tokens_moves_nothing(make: Make, chunks: Chunks):
    backend = make("reinforce_pp_tokens")
    before = backend.digest()
    nothing = dataclasses.replace(chunks(12)[0], groups=(), tokens=0)
    assert stepped(backend, [nothing], 1).grad_norm == 0
    assert backend.digest() == before


def test_off_policy_the_gradient_is_that_of_reward_less_divergence():
    """Exact, over three words: the sampling policy is another one, and only its ratio may show. With the penalty of the sampling policy it would be another."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference, rewards = torch.tensor([-1.0, 0.4, 0.1], dtype=torch.float64).log_softmax(0), torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    log_pi = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((log_pi.exp() * (rewards - COEF * (log_pi - reference))).sum(), logits, retain_graph=True)

    def found(log_penalised: torch.Tensor) -> torch.Tensor:
        terms = Terms(
            target=log_pi,
            behaviour=mu.log(),
            proximal=log_pi.detach(),
            advantage=rewards - COEF * (log_penalised - reference),
            rollout=torch.arange(3),
            age=torch.zeros(3, dtype=torch.int64),
        )
        told = make_loss(LossConfig(kind="truncated_is", ratio_cap=0.0))(terms)
        (gradient,) = torch.autograd.grad((mu * told.loss).sum(), logits, retain_graph=True)
        return -gradient

    torch.testing.assert_close(found(log_pi.detach()), wanted, rtol=1e-12, atol=1e-12)
    assert float((found(mu.log()) - wanted).norm() / wanted.norm()) > 0.02


@pytest.mark.parametrize(
    ("loss", "trainer", "words"),
    [
        (
            {"kl_reward_coef": 0.1},
            {"advantage": "group_std"},
            r"kl_reward_coef 0\.1 with trainer\.advantage group_std.*gae or reinforce_pp_tokens.*loss\.kl_coef",
        ),
        ({"kl_reward_coef": 0.1}, {"advantage": "reinforce_pp"}, r"with trainer\.advantage reinforce_pp: it gives a rollout one advantage"),
        ({"kl_reward_coef": 0.1, "kind": "sft"}, {"advantage": "gae"}, r"loss\.kind sft: it reads no advantage"),
        ({}, {"advantage": "reinforce_pp_tokens", "backend": "megatron"}, r"trainer\.backend megatron.*set trainer\.backend = torch"),
    ],
)
def test_what_cannot_take_a_penalty_by_token_is_refused(loss: dict[str, Any], trainer: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        check_kl_reward(LossConfig(**loss), TrainerConfig(**trainer))


def test_the_divergence_does_not_count_twice_and_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef 0\.1 and kl_reward_coef 0\.2: .*count twice"):
        LossConfig(kl_coef=0.1, kl_reward_coef=0.2)
    with pytest.raises(ConfigError, match="with a object: advantages by token are made beside the torch backend alone"):
        with_token_returns(object(), 0.0)
    check_kl_reward(LossConfig(kl_reward_coef=0.1), TrainerConfig(advantage="gae"))
