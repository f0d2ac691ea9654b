"""A policy and its critic: advantages and gradients against a plain computation, however a step is cut; warm-up, learning, resume."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch, step_divisor
from consumer.critic.actor_critic import ActorCritic
from consumer.metric_names import metric_of
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError, RollstreamError
from protocol.messages import RolloutGroup

Make = Callable[..., ActorCritic]
Chunks = Callable[..., list[ChunkBatch]]


def stepped(backend: ActorCritic, batches: list[ChunkBatch], step: int) -> StepReport:
    for batch in batches:
        backend.accumulate(batch)
    return backend.finish_step(step, step_divisor(batches))


def seen(backend: ActorCritic, monkeypatch: pytest.MonkeyPatch) -> list[ChunkBatch]:
    """What the policy is given from here on."""
    found: list[ChunkBatch] = []
    inner = TorchBackend.accumulate

    def accumulate(self: TorchBackend, batch: ChunkBatch) -> None:
        found.append(batch)
        inner(self, batch)

    monkeypatch.setattr(TorchBackend, "accumulate", accumulate)
    return found


def weights(state: TrainingState) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.frombuffer(one.data, np.float32) for part in (state.weights, state.optimizer) for name, one in part.items()}


def rollouts_of(batches: list[ChunkBatch]) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Tokens of each rollout, and the places of those in the loss."""
    for batch in batches:
        for group in batch.groups:
            for start, end in itertools.pairwise(group.starts.tolist()):
                places = group.targets[(group.targets >= start) & (group.targets < end)] - start
                yield group.tokens[start:end], places


def plain_values(model: Any, tokens: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> torch.Tensor:
    hidden = model.trunk(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).last_hidden_state[0]
    return (hidden @ model.head.weight[0] + model.head.bias)[torch.from_numpy(places - 1)]


def by_recursion(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    found, following, carried = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        carried = (reward if t == len(values) - 1 else 0.0) + gamma * following - values[t] + gamma * lam * carried
        following = values[t]
        found.append(carried)
    return found[::-1]


@pytest.mark.parametrize("lam_policy", [0.0, 0.7])
def test_advantages_and_the_critics_gradient_are_those_of_each_rollout_by_itself(
    make: Make, chunks: Chunks, ragged_groups: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch, lam_policy: float
):
    gamma, lam = 0.95, 0.9
    backend = make(gamma=gamma, lam=lam, lam_policy=lam_policy)
    stepped(backend, chunks(12), 1)  # values are not 0 any more
    model = backend._critic.backend._model
    model.zero_grad()
    rewards = iter([one.reward for group in ragged_groups for one in group.rollouts])
    expected, total = [], torch.zeros(())
    for tokens, places in rollouts_of(chunks(12)):
        reward = next(rewards)
        if len(places):
            values = plain_values(model, tokens, places)
            own = by_recursion(reward, values.tolist(), gamma, lam)
            returns = torch.tensor(own) + values.detach()
            total = total + (values - returns).square().sum() / 2
            expected += by_recursion(reward, values.tolist(), gamma, lam_policy) if lam_policy else own
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    given = seen(backend, monkeypatch)
    for batch in chunks(5):
        backend.accumulate(batch)
    found = np.concatenate([group.advantage for batch in given for group in batch.groups])
    assert len(found) == len(expected) > 90
    np.testing.assert_allclose(found, expected, atol=2e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    told = backend.finish_step(2, step_divisor(chunks(5))).diagnostics
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients.values() if one is not None]))
    assert told["critic_grad_norm"] == pytest.approx(float(norm) / len(expected), rel=1e-4), "a mean over the step's tokens"
    assert told["value_loss"] == pytest.approx(float(total.detach()) / len(expected), rel=1e-4)


def test_the_ragged_groups_are_what_they_claim(chunks: Chunks):
    """Rollouts without a token in the loss, with one, with a gap, and tokens that the guard took out."""
    (batch,) = chunks(12)
    counts = [len(places) for _, places in rollouts_of([batch])]
    assert {0, 1} < set(counts)
    assert batch.masked > 0
    assert any((np.diff(places) > 1).any() for _, places in rollouts_of([batch]))


@pytest.mark.parametrize("critic", [{}, {"whiten": True, "epochs": 2, "value_clip": 0.05, "lam": 0.9}], ids=["streamed", "whitened"])
def test_where_a_step_is_cut_changes_nothing(make: Make, chunks: Chunks, critic: dict[str, Any]):
    one, many = make(**critic), make(**critic, trainer={"micro_batch_tokens": 24})
    for step in (1, 2):
        first, second = stepped(one, chunks(12), step), stepped(many, chunks(1 + step), step)
        assert first.diagnostics.keys() == second.diagnostics.keys()
        for name, value in first.diagnostics.items():
            assert metric_of(name) is not None
            assert second.diagnostics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    expected, found = weights(one.capture()), weights(many.capture())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=2e-5, err_msg=name)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_step(make: Make, chunks: Chunks, monkeypatch: pytest.MonkeyPatch):
    backend = make(whiten=True)
    given = seen(backend, monkeypatch)
    for batch in chunks(4):
        backend.accumulate(batch)
    assert not given, "the policy waits for the whole step"
    backend.finish_step(1, step_divisor(chunks(4)))
    found, rewards = (np.concatenate([group.advantage for batch in batches for group in batch.groups]) for batches in (given, chunks(4)))
    assert (found.mean(), found.std(ddof=1)) == pytest.approx((0, 1), abs=1e-3)
    np.testing.assert_allclose(np.corrcoef(found, rewards)[0, 1], 1, err_msg="a critic that says 0 leaves the reward")


def test_while_the_critic_warms_up_the_policy_does_not_move_and_then_begins_its_own_warm_up(make: Make, chunks: Chunks):
    backend = make(warmup_steps=2, epochs=2)
    before, reports = backend.digest(), []
    for step in (1, 2):
        reports.append(stepped(backend, chunks(6), step))
        assert backend.digest() == before
    state = backend.capture()
    assert not state.optimizer, "not even its moments"
    assert [(one.lr, one.grad_norm, one.diagnostics["critic_only"]) for one in reports] == [(0.0, 0.0, 1.0)] * 2
    assert reports[1].diagnostics["value_loss"] < reports[0].diagnostics["value_loss"]
    resumed = make(warmup_steps=2, epochs=2)
    resumed.restore(state)
    for one in (backend, resumed):
        report = stepped(one, chunks(6), 3)
        assert (report.lr, report.diagnostics["critic_only"]) == (0.005, 0.0)
        assert report.grad_norm > 0
    assert backend.digest() == resumed.digest() != before


def test_a_critic_learns_what_its_prompts_are_worth(make: Make, chunks: Chunks):
    """Every rollout of a prompt has the same reward, another for each prompt."""
    (batch,) = chunks(12)
    groups = (dataclasses.replace(group, advantages=np.full_like(group.advantages, i % 3)) for i, group in enumerate(batch.groups))
    batch = dataclasses.replace(batch, groups=tuple(groups))
    backend = make(warmup_steps=1000)
    for step in range(1, 41):
        report = stepped(backend, [batch], step)
    assert report.diagnostics["value_explained_variance"] > 0.95
    assert report.diagnostics["value_loss"] < 0.02


def test_further_passes_move_a_value_no_further_than_the_clip_lets_it(make: Make, chunks: Chunks):
    free, held = make(epochs=6), make(epochs=6, value_clip=0.01)
    reports = {id(one): [stepped(one, chunks(6), step) for step in (1, 2)][1].diagnostics for one in (free, held)}
    assert reports[id(free)]["value_clip_fraction"] == 0
    assert reports[id(held)]["value_clip_fraction"] > 0.2
    assert reports[id(free)]["value_loss"] < reports[id(held)]["value_loss"]


@pytest.mark.parametrize("critic", [{"whiten": True}, {"epochs": 2}])
def test_a_restored_state_goes_on_to_the_bit(make: Make, chunks: Chunks, critic: dict[str, Any]):
    straight = make(**critic)
    for step in (1, 2):
        stepped(straight, chunks(6), step)
    state = straight.capture()
    assert set(state.weights) == set(straight._policy._kept), "a model folder has the policy's weights alone"
    resumed = make(**critic)
    resumed.accumulate(chunks(6)[0])
    resumed.restore(state)
    for step in (3, 4):
        assert stepped(resumed, chunks(6), step) == stepped(straight, chunks(6), step)
    first, second = straight.capture(), resumed.capture()
    assert resumed.digest() == straight.digest()
    assert {name: bytes(one.data) for name, one in first.optimizer.items()} == {name: bytes(one.data) for name, one in second.optimizer.items()}


def test_a_checkpoint_without_a_critic_or_with_another_one_is_refused(make: Make):
    backend = make()
    state = backend.capture()
    without = dataclasses.replace(state, others={})
    with pytest.raises(RollstreamError, match=r"has no critic.*go on with the trainer\.advantage it had"):
        backend.restore(without)
    less = dataclasses.replace(state, others={**state.others, "critic": {name: one for name, one in state.others["critic"].items() if name != "head.bias"}})
    with pytest.raises(RollstreamError, match=r"head\.bias is in only one of them; correct critic\.model_path"):
        backend.restore(less)


def test_an_abandoned_step_leaves_nothing(make: Make, chunks: Chunks):
    straight, again = make(whiten=True, epochs=2), make(whiten=True, epochs=2)
    again.accumulate(chunks(6)[1])
    again.abandon_step()
    assert stepped(again, chunks(6), 1) == stepped(straight, chunks(6), 1)
    assert again.digest() == straight.digest()


def test_a_step_without_tokens_moves_neither(make: Make, chunks: Chunks):
    backend = make(epochs=2, whiten=True)
    before = {name: one.tobytes() for name, one in weights(backend.capture()).items()}
    (batch,) = chunks(12)
    nothing = dataclasses.replace(batch, groups=(), tokens=0)
    report = stepped(backend, [nothing], 1)
    assert report.grad_norm == report.diagnostics["critic_grad_norm"] == 0
    assert {name: one.tobytes() for name, one in weights(backend.capture()).items()} == before


def test_the_critic_may_start_from_another_model_and_leaves_bfloat16_to_its_layers(make: Make, chunks: Chunks, untied_model_path: Path):
    backend = make(path=untied_model_path, trainer={"dtype": "bfloat16", "activation_checkpointing": True})
    report = stepped(backend, chunks(6), 1)
    assert np.isfinite(list(report.diagnostics.values())).all()
    trunk = {name: one for name, one in backend._critic.backend._model.state_dict().items() if name.startswith("trunk.")}
    policy = backend._policy._model.state_dict()
    assert all(one.dtype == torch.float32 for one in trunk.values())
    assert not any(torch.equal(one, policy[name.replace("trunk.", "model.")]) for name, one in trunk.items() if "proj" in name)


def test_folders_without_a_transformer_and_devices_that_are_not_there_are_named(make: Make, tmp_path: Path, model_path: Path):
    with pytest.raises(ConfigError, match=r"critic\.model_path .*: transformers cannot load it"):
        make(path=tmp_path)
    with pytest.raises(ConfigError, match=r"critic\.device cuda:99: this host has \d+ devices"):
        make(device="cuda:99")
