"""The sharded backend on two real processes that talk by gloo, against one process that has it all."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from buffer.contract import ChunkRecord, StepRecord
from buffer.shares import Share
from consumer.advantages import find_advantage
from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch, collate_step
from consumer.config import TrainerConfig, TrainerDaemonConfig
from consumer.losses import LossConfig
from consumer.shards import SavedTensors, merged, read_index, write_shards
from consumer.torch_backend import TorchBackend
from protocol.config import validate
from protocol.errors import ConfigError
from protocol.versions import Fork, Lineage
from tests.ranked import answers_of
from weightsync.snapshot import TensorBytes

RANKS = 2
STEPS = 3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 2, "micro_batch_tokens": 64}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    # [trainer], [loss], tied embeddings
    "plain": ({}, {}, True),
    "untied": ({"activation_checkpointing": True}, {"kl_coef": 0.1, "normaliser": "rollout_mean"}, False),
    "offloaded": ({"cpu_offload": True, "grad_clip": 1e-2}, {"entropy_coef": 0.01}, True),
    "packed": ({"packing": "on", "micro_batch_tokens": 40}, {"kl_coef": 0.1}, True),
    "half": ({"dtype": "bfloat16", "head_float32": True}, {}, True),
}


class Trained(NamedTuple):
    """By step, and the state after the last."""

    reports: list[StepReport]
    digests: list[str]
    state: TrainingState


def chunks_of(groups: list[Any], step: int) -> list[ChunkRecord]:
    """Two chunks of the step: of two groups, the least that two ranks share, and of one, which leaves a rank without any."""
    record = StepRecord(step=step, incarnation=1, groups=3, chunk=2, guard="mask", cutoff=step - 1 - 8, lineage=Lineage({1: Fork(0, 0)}, head=1))
    mine = [header for header, _ in groups[3 * step : 3 * step + 3]]
    return [
        ChunkRecord(step=step, chunk=0, revision=0, headers=tuple(mine[:2]), last=False, record=record),
        ChunkRecord(step=step, chunk=1, revision=0, headers=tuple(mine[2:]), last=True, record=record),
    ]


PENALISED = {"kl_reward_coef": 0.2}
BY_TOKEN = {"packing": "on", "micro_batch_tokens": 40}
CRITIC = {"lr": 1e-2, "lr_warmup_steps": 2, "warmup_steps": 1, "epochs": 2, "value_clip": 0.2, "lam": 0.9, "whiten": True}


def with_critic(policy: TorchBackend, folder: Path, *, sharded: bool) -> Any:
    from consumer.critic import actor_critic
    from consumer.critic.config import CriticConfig

    trainer = TrainerConfig(**(SETTINGS | {"advantage": "gae"}))
    return actor_critic.with_critic(policy, folder, CriticConfig(**CRITIC), trainer, seed=3, sharded=sharded, shared=False)


def penalised(policy: Callable[..., TorchBackend], folder: Path, advantage: str, *, sharded: bool) -> Any:
    """On packed rows, a critic too."""
    from consumer.critic import actor_critic
    from consumer.critic.config import CriticConfig
    from consumer.token_returns import with_token_returns

    trainer, coef = TrainerConfig(**(SETTINGS | BY_TOKEN | {"advantage": advantage})), PENALISED["kl_reward_coef"]
    backend = policy(folder, trainer, loss=LossConfig(**PENALISED), temperature=1.0, seed=3)
    if advantage != "gae":
        return with_token_returns(backend, coef)
    critic = CriticConfig(lr=1e-2, lr_warmup_steps=2, lam=0.9)
    return actor_critic.with_critic(backend, folder, critic, trainer, seed=3, sharded=sharded, shared=False, kl_reward_coef=coef)


def train(backend: TorchBackend, groups: list[Any], share: Share, normaliser: Any, steps: range, *, advantage: str = "group_std") -> Trained:
    reports, digests = [], []
    for step in steps:
        divisor = 0.0
        for chunk in chunks_of(groups, step):
            (whole,) = collated(chunk, groups, Share(0, 1), normaliser, advantage)
            divisor += whole.divisor
            backend.accumulate(*collated(chunk, groups, share, normaliser, advantage))
        reports.append(backend.finish_step(step, divisor))
        held = backend.snapshot()
        digests.append(held.digest())
        assert backend.digest() == digests[-1]
        held.release()
    return Trained(reports, digests, backend.capture())


def collated(chunk: ChunkRecord, groups: list[Any], share: Share, normaliser: Any, advantage: str = "group_std") -> list[ChunkBatch]:
    own = {header.seq for header in share.of(chunk.headers)}
    mine = [group for group in groups if group[0].seq in own and group[0] in chunk.headers]
    return collate_step([(chunk, mine)], find_advantage(advantage), normaliser=normaliser)


def member(rank: int, rendezvous: str, folders: dict[bool, Path], groups: list[Any], answers: Any) -> None:
    try:
        found = sharded(rank, rendezvous, folders, groups)
        if rank == 0:
            found["alone"] = alone(folders[True], groups)
        answers.put((rank, found))
    except BaseException:  # noqa: BLE001 - told to the test
        answers.put((rank, traceback.format_exc()))


def sharded(rank: int, rendezvous: str, folders: dict[bool, Path], groups: list[Any]) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from consumer.ranks.handing_over import broadcast_state
    from consumer.ranks.sharded import ShardedBackend

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=500))
    found: dict[str, Any] = {}
    try:
        folder = Path(rendezvous).parent
        for name, (trainer, loss, tied) in CASES.items():
            config, losses = TrainerConfig(**(SETTINGS | trainer)), LossConfig(**loss)
            backend = ShardedBackend(folders[tied], config, loss=losses, temperature=1.0, seed=3)
            assert all(isinstance(parameter, DTensor) for parameter in backend._model.parameters()), "nothing is left whole after the probe"
            assert backend._packed == (name == "packed")
            if name == "packed":
                found["cut"] = cut(backend, groups, Share(rank, RANKS))
            own = train(backend, groups, Share(rank, RANKS), losses.normaliser, range(1, STEPS + 1))
            state = own._replace(state=through_files(own.state, folder / name))
            found[name] = plain(state)
            if name == "plain":
                held = sum(tensor.nbytes for tensor in own.state.weights.values()) / sum(tensor.nbytes for tensor in state.state.weights.values())
                found["share"] = held
                other = ShardedBackend(folders[tied], config, loss=losses, temperature=1.0, seed=4)
                whole = TrainingState(weights=dict(state.state.weights), optimizer=dict(state.state.optimizer), rng=own.state.rng)
                other.restore(whole)
                found["from one rank's"] = plain(Trained([], [], through_files(other.capture(), folder / "whole")))
                other.restore(state.state)
                after = range(STEPS + 1, STEPS + 2)
                for key, one in (("restored", other), ("straight on", backend)):
                    more = train(one, groups, Share(rank, RANKS), losses.normaliser, after)
                    found[key] = plain(more._replace(state=through_files(more.state, folder / key)))
                backend.accumulate(collated(chunks_of(groups, 2)[0], groups, Share(rank, RANKS), losses.normaliser)[0])
                before = backend.digest()
                assert backend.finish_step(5, 0.0).loss == 0.0
                assert backend.digest() == before, "without a divisor the weights stay"
                handed = broadcast_state(state.state if rank == 0 else None)
                found["handed over"] = plain(Trained([], [], handed))
        found |= with_critics(
            lambda: ShardedBackend(folders[True], TrainerConfig(**SETTINGS), loss=LossConfig(), temperature=1.0, seed=3), folder, folders[True], groups, rank
        )
        for advantage in ("gae", "reinforce_pp_tokens"):
            judging = penalised(ShardedBackend, folders[True], advantage, sharded=True)
            own = train(judging, groups, Share(rank, RANKS), "token_mean", range(1, 3), advantage=advantage)
            found[advantage] = plain(own._replace(state=through_files(own.state, folder / advantage)))
        return found
    finally:
        dist.destroy_process_group()


def alone(folder: Path, groups: list[Any]) -> Any:
    """One rank whose weights lie in host memory, made as a run's configuration says, without a process group so far."""
    import torch.distributed as dist

    from consumer.ranks.making import make_backend
    from consumer.ranks.process_group import leave
    from consumer.ranks.sharded import ShardedBackend

    trainer, loss, _ = CASES["offloaded"]
    tables = {
        "run": {"name": "alone", "dir": str(folder.parent), "seed": 3},
        "model": {"path": str(folder)},
        "data": {"path": str(folder / "none.jsonl")},
        "trainer": SETTINGS | trainer,
        "loss": loss,
    }
    backend = make_backend(validate(TrainerDaemonConfig, tables, source="test"))
    assert isinstance(backend, ShardedBackend)
    assert dist.get_world_size() == 1
    found = plain(train(backend, groups, Share(0, 1), "token_mean", range(1, STEPS + 1)))
    leave()
    return found


def cut(backend: TorchBackend, groups: list[Any], share: Share) -> list[tuple[int, int]]:
    """Of every chunk of the first step: micro-batches, and tokens of the loss in all of them."""
    batches = [one for chunk in chunks_of(groups, 1) for one in collated(chunk, groups, share, "token_mean")]
    parts = [list(backend._micro_batches(batch)) for batch in batches]
    assert [sum(len(part.targets) for part in one) for one in parts] == [batch.tokens for batch in batches]
    return [(len(one), sum(len(part.targets) for part in one)) for one in parts]


def with_critics(policy: Callable[[], TorchBackend], folder: Path, model: Path, groups: list[Any], rank: int) -> dict[str, Any]:
    def on(backend: Any, steps: range, name: str) -> Trained:
        trained = train(backend, groups, Share(rank, RANKS), "token_mean", steps, advantage="gae")
        return trained._replace(state=through_files(trained.state, folder / name))

    first, second = (with_critic(policy(), model, sharded=True) for _ in range(2))
    trained, after = on(first, range(1, STEPS + 1), "critic"), range(STEPS + 1, STEPS + 2)
    second.restore(trained.state)
    found = {"critic": trained, "critic restored": on(second, after, "restored critic"), "critic straight on": on(first, after, "critic straight on")}
    return {name: plain(one) for name, one in found.items()}


def through_files(state: TrainingState, folder: Path) -> TrainingState:
    """What all ranks captured, as each reads it."""
    import torch.distributed as dist

    folder.mkdir(exist_ok=True)
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, write_shards(folder, state))
    index = read_index(merged(told))
    others = {group: SavedTensors(folder, entries) for group, entries in index.groups.items()}
    return TrainingState(weights=others.pop("weights"), optimizer=others.pop("optimizer"), others=others, rng=state.rng, base=state.base)


def plain(trained: Trained) -> Any:
    """To go through a queue."""
    reports = [(report.loss, report.grad_norm, report.lr, report.entropy, dict(report.diagnostics)) for report in trained.reports]
    state = trained.state
    states = [{name: (one.dtype, one.shape, bytes(one.data)) for name, one in part.items()} for part in state.groups.values()]
    return reports, trained.digests, states


@pytest.fixture(scope="module")
def groups(sampler: Any) -> list[Any]:
    return [sampler.headed(seq) for seq in range(3 * (STEPS + 3))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_path: Path, untied_model_path: Path, groups: list[Any]) -> tuple[Any, Any]:
    """What ranks 0 and 1 found."""
    folders = {True: model_path, False: untied_model_path}
    rendezvous = str(tmp_path_factory.mktemp("ranks") / "rendezvous")
    found = answers_of(member, rendezvous, folders, groups, ranks=RANKS, timeout_s=560)
    for rank in range(RANKS):
        assert isinstance(found[rank], dict), found[rank]
    return found[0], found[1]


@pytest.fixture
def one_rank(model_path: Path, untied_model_path: Path, groups: list[Any]) -> Callable[..., tuple[TorchBackend, Callable[..., Any]]]:
    def make(name: str) -> tuple[TorchBackend, Callable[..., Any]]:
        trainer, loss, tied = CASES[name]
        losses = LossConfig(**loss)
        backend = TorchBackend(model_path if tied else untied_model_path, TrainerConfig(**(SETTINGS | trainer)), loss=losses, temperature=1.0, seed=3)
        return backend, lambda steps: plain(train(backend, groups, Share(0, 1), losses.normaliser, steps))

    return make


def assert_near(found: Any, expected: Any, *, weights: float, figures: float) -> None:
    (reports, _, states), (expected_reports, _, expected_states) = found, expected
    for report, one in zip(reports, expected_reports, strict=True):
        np.testing.assert_allclose(report[:4], one[:4], rtol=figures, atol=figures)
        assert report[4].keys() == one[4].keys()
        for name, value in one[4].items():
            assert report[4][name] == pytest.approx(value, rel=10 * figures, abs=10 * figures), name
    for tensors, others in zip(states, expected_states, strict=True):
        assert tensors.keys() == others.keys()
        for name, (dtype, shape, data) in others.items():
            assert tensors[name][:2] == (dtype, shape)
            np.testing.assert_allclose(np.frombuffer(tensors[name][2], np.float32), np.frombuffer(data, np.float32), rtol=1e-3, atol=weights, err_msg=name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain", "untied", "offloaded", "packed"])
def test_two_ranks_train_as_one_does_step_by_step(pair: tuple[Any, Any], one_rank: Callable[..., Any], name: str):
    """float32: they differ by the order of sums. A step moves a weight by up to 1e-2."""
    _, expected = one_rank(name)
    assert_near(pair[0][name], expected(range(1, STEPS + 1)), weights=5e-6, figures=1e-5)


@pytest.mark.timeout(600)
def test_one_rank_keeps_its_weights_in_host_memory_and_trains_as_without(pair: tuple[Any, Any], one_rank: Callable[..., Any]):
    _, expected = one_rank("offloaded")
    assert_near(pair[0]["alone"], expected(range(1, STEPS + 1)), weights=5e-6, figures=1e-5)


def test_shards_do_not_take_turns_on_a_device(model_path: Path):
    from consumer.ranks.sharded import ShardedBackend

    with pytest.raises(ConfigError, match=r"placement\.layout colocated with trainer\.ranks above 1 or trainer\.cpu_offload"):
        ShardedBackend(model_path, TrainerConfig(cpu_offload=True), loss=LossConfig(), temperature=1.0, seed=1, shared=True)


@pytest.mark.timeout(600)
def test_ranks_cut_packed_rows_as_often_as_each_other_and_trim_nothing(pair: tuple[Any, Any], groups: list[Any]):
    cuts = [found["cut"] for found in pair]
    for chunk, *shares in zip(chunks_of(groups, 1), *cuts, strict=True):
        assert len({count for count, _ in shares}) == 1
        assert sum(tokens for _, tokens in shares) == sum(sum(header.trainable.values()) for header in chunk.headers)
    assert any(0 in {tokens for _, tokens in shares} for shares in zip(*cuts, strict=True)), "a rank without rollouts runs as many"
    assert any(count > 1 for count, _ in cuts[0])


@pytest.mark.timeout(600)
def test_bfloat16_is_near(pair: tuple[Any, Any], one_rank: Callable[..., Any]):
    """Weights are rounded to bfloat16 before they are used, and activations between layers, where one rank rounds only what goes into a product."""
    _, expected = one_rank("half")
    (reports, _, _), (expected_reports, _, _) = pair[0]["half"], expected(range(1, 2))
    np.testing.assert_allclose(reports[0][:2], expected_reports[0][:2], rtol=0.1, atol=0.02)


@pytest.mark.timeout(600)
def test_all_ranks_report_the_same_step_and_whole_weights_are_on_rank_0_alone(pair: tuple[Any, Any]):
    first, second = pair
    for name in CASES:
        assert first[name][0] == second[name][0], name
        assert second[name][1:] == ([""] * STEPS, first[name][2]), "read by either"
        assert len(set(first[name][1])) == STEPS, "every step has other weights"


@pytest.mark.timeout(600)
def test_a_checkpoint_of_two_ranks_resumes_on_two_to_the_bit_and_on_one(pair: tuple[Any, Any], one_rank: Callable[..., Any]):
    assert pair[0]["restored"] == pair[0]["straight on"]
    assert pair[0]["from one rank's"][2] == pair[0]["plain"][2]
    assert all(0.4 < one["share"] < 0.6 for one in pair), "each rank captures its part"
    backend, on = one_rank("plain")
    backend.restore(state_of(pair[0]["plain"]))
    assert backend.digest() == pair[0]["plain"][1][-1]
    assert_near(on(range(STEPS + 1, STEPS + 2)), pair[0]["straight on"], weights=5e-6, figures=1e-5)


@pytest.mark.timeout(600)
def test_two_ranks_train_a_critic_as_one_does_and_resume_to_the_bit(pair: tuple[Any, Any], model_path: Path, groups: list[Any]):
    policy = TorchBackend(model_path, TrainerConfig(**SETTINGS), loss=LossConfig(), temperature=1.0, seed=3)
    backend = with_critic(policy, model_path, sharded=False)
    expected = train(backend, groups, Share(0, 1), "token_mean", range(1, STEPS + 1), advantage="gae")
    assert_near(pair[0]["critic"], plain(expected), weights=2e-5, figures=1e-5)
    assert pair[0]["critic"][1][0] != pair[0]["critic"][1][1], "the policy moves, after a step in which the critic warms up"
    assert pair[0]["critic"][0] == pair[1]["critic"][0]
    assert pair[0]["critic restored"] == pair[0]["critic straight on"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp_tokens"])
def test_two_ranks_penalise_the_reward_as_one_does(pair: tuple[Any, Any], model_path: Path, groups: list[Any], advantage: str):
    backend = penalised(TorchBackend, model_path, advantage, sharded=False)
    expected = train(backend, groups, Share(0, 1), "token_mean", range(1, 3), advantage=advantage)
    assert expected.reports[-1].diagnostics["reference_kl"] > 1e-3
    assert_near(pair[0][advantage], plain(expected), weights=2e-5, figures=1e-5)
    assert pair[0][advantage][0] == pair[1][advantage][0]


@pytest.mark.timeout(600)
def test_a_state_is_handed_over_whole(pair: tuple[Any, Any]):
    assert pair[1]["handed over"] == pair[0]["handed over"] == ([], [], pair[0]["plain"][2])


def state_of(found: Any) -> TrainingState:
    weights, optimizer = ({name: TensorBytes(dtype=dtype, shape=shape, data=data) for name, (dtype, shape, data) in part.items()} for part in found[2])
    import torch

    return TrainingState(weights=weights, optimizer=optimizer, rng={"torch": bytes(torch.get_rng_state().numpy())})


assert os.environ.get("OMP_NUM_THREADS"), "set by tests/conftest.py: several processes would take all cores from each other"
