"""An adapter on two real processes that talk by gloo, against one process that has it all."""

from __future__ import annotations

import dataclasses
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.shares import Share
from consumer.backend import TrainingState
from consumer.config import TrainerConfig
from consumer.lora_backend import LoraBackend
from consumer.losses import LossConfig
from tests.consumer.ranks.test_sharded import RANKS, SETTINGS, STEPS, Trained, assert_near, plain, state_of, through_files, train
from tests.ranked import answers_of
from weightsync.lora import LoraConfig

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # [lora], [trainer], [loss]; of a rank of 3 the ranks have two rows and one, of a rank of 1 one has none
    "merged": ({"rank": 3}, {"activation_checkpointing": True}, {"kl_coef": 0.1}),
    "adapter": ({"rank": 4, "publish": "adapter", "use_rslora": True}, {"packing": "on", "micro_batch_tokens": 40}, {"kl_coef": 0.1}),
    "offloaded": ({"rank": 1, "target_modules": ["q_proj", "down_proj"]}, {"cpu_offload": True, "grad_clip": 1e-2}, {}),
    "half": ({"rank": 4, "base_dtype": "bfloat16"}, {"dtype": "bfloat16", "head_float32": True}, {}),
}
EXACT = [name for name in CASES if name != "half"]
AFTER = range(STEPS + 1, STEPS + 2)


def made(kind: type[LoraBackend], name: str, folder: Path, *, seed: int = 3) -> Any:
    lora, trainer, loss = CASES[name]
    config, losses = TrainerConfig(**(SETTINGS | trainer)), LossConfig(**loss)
    return kind(folder, config, loss=losses, temperature=1.0, seed=seed, lora=LoraConfig(**lora))


def member(rank: int, rendezvous: str, folder: Path, groups: list[Any], alone: dict[str, Any], answers: Any) -> None:
    try:
        answers.put((rank, sharded(rank, rendezvous, folder, groups, alone)))
    except BaseException:  # noqa: BLE001 - told to the test
        answers.put((rank, traceback.format_exc()))


def sharded(rank: int, rendezvous: str, folder: Path, groups: list[Any], alone: dict[str, Any]) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from consumer.ranks.sharded_lora import ShardedLoraBackend

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=500))
    files = Path(rendezvous).parent

    def on(backend: Any, name: str, steps: range) -> Trained:
        trained = train(backend, groups, Share(rank, RANKS), "token_mean", steps)
        return trained._replace(state=through_files(trained.state, files / f"{name}-{steps.start}"))

    found: dict[str, Any] = {}
    try:
        for name in CASES:
            backend, other = (made(ShardedLoraBackend, name, folder, seed=seed) for seed in (3, 4))
            assert all(isinstance(parameter, DTensor) for parameter in backend._model.parameters()), "the frozen ones are cut too"
            trained = on(backend, name, range(1, STEPS + 1))
            assert set(backend._optimizer.state) == set(backend._parameters.values())
            found[name] = plain(trained)
            other.restore(trained.state)
            found[name, "restored"], found[name, "straight on"] = (plain(on(one, f"{name}-{key}", AFTER)) for key, one in enumerate((other, backend)))
            other.restore(with_base(other, alone[name]))
            found[name, "one rank's"] = (other.digest(), plain(Trained([], [], through_files(other.capture(), files / f"{name}-alone")))[2])
            found[name, "after one rank"] = plain(on(other, f"{name}-after", AFTER))
        return found
    finally:
        dist.destroy_process_group()


def with_base(backend: Any, found: Any) -> TrainingState:
    return dataclasses.replace(state_of(found), base=backend._base)


@pytest.fixture(scope="module")
def groups(sampler: Any) -> list[Any]:
    return [sampler.headed(seq) for seq in range(3 * (STEPS + 2))]


@pytest.fixture(scope="module")
def alone(model_path: Path, groups: list[Any]) -> dict[str, Any]:
    """What one rank found, and then of one step more."""
    found: dict[str, Any] = {}
    for name in CASES:
        backend = made(LoraBackend, name, model_path)
        for key, steps in ((name, range(1, STEPS + 1)), ((name, "straight on"), AFTER)):
            found[key] = plain(train(backend, groups, Share(0, 1), "token_mean", steps))
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_path: Path, groups: list[Any], alone: dict[str, Any]) -> tuple[Any, Any]:
    """What ranks 0 and 1 found."""
    rendezvous = str(tmp_path_factory.mktemp("ranks") / "rendezvous")
    found = answers_of(member, rendezvous, model_path, groups, alone, ranks=RANKS, timeout_s=560)
    for rank in range(RANKS):
        assert isinstance(found[rank], dict), found[rank]
    return found[0], found[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_train_an_adapter_as_one_does_step_by_step(pair: tuple[Any, Any], alone: dict[str, Any], name: str):
    """Losses, adapter and moments. float32: they differ by the order of sums. A step moves a weight by up to 1e-2."""
    assert_near(pair[0][name], alone[name], weights=5e-6, figures=1e-5)
    weights, optimizer = pair[0][name][2]
    assert all(".lora_" in tensor for tensor in weights)
    assert len(optimizer) == 3 * len(weights)
    assert pair[0][name][0] == pair[1][name][0]
    assert pair[1][name][1:] == ([""] * STEPS, pair[0][name][2]), "whole weights are on rank 0 alone"
    assert len(set(pair[0][name][1])) == STEPS, "every step publishes other weights"


@pytest.mark.timeout(600)
def test_bfloat16_is_near_in_the_first_step(pair: tuple[Any, Any], alone: dict[str, Any]):
    """Then what rounding has changed is rounded again."""
    np.testing.assert_allclose(pair[0]["half"][0][0][:2], alone["half"][0][0][:2], rtol=0.1, atol=0.02)
    assert {dtype for dtype, *_ in pair[0]["half"][2][0].values()} == {"F32"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_on_two_and_publishes_the_same_bits(pair: tuple[Any, Any], model_path: Path, groups: list[Any], name: str):
    assert pair[0][name, "restored"] == pair[0][name, "straight on"]
    backend = made(LoraBackend, name, model_path, seed=5)
    backend.restore(with_base(backend, pair[0][name]))
    assert backend.digest() == pair[0][name][1][-1]
    after = plain(train(backend, groups, Share(0, 1), "token_mean", AFTER))
    if name in EXACT:
        assert_near(after, pair[0][name, "straight on"], weights=5e-6, figures=1e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_one_rank_goes_on_on_two_and_publishes_the_same_bits(pair: tuple[Any, Any], alone: dict[str, Any], name: str):
    digest, states = pair[0][name, "one rank's"]
    assert (digest, states) == (alone[name][1][-1], alone[name][2])
    if name in EXACT:
        assert_near(pair[0][name, "after one rank"], alone[name, "straight on"], weights=5e-6, figures=1e-5)
