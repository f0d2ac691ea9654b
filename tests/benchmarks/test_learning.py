from __future__ import annotations

import tomllib
from pathlib import Path

import orjson
import pytest

from benchmarks.learning.cell import LOSSES, Cell, configuration, toml
from benchmarks.learning.report import read, table
from benchmarks.learning.run import told
from consumer.config import check_sections
from deploy.config import UpConfig
from protocol.config import validate

HERE = Path("/somewhere/else")


def line(reward: float, ages: dict[str, int]) -> dict[str, object]:
    figures = dict.fromkeys(("ess", "ess_tokens", "entropy", "logprob_diff_mean", "clip_fraction", "grad_norm"), 0.5)
    return {"reward": reward, "staleness": ages, "masked": 0, **figures}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("staleness", [0, 2, 8])
def test_every_cell_is_a_configuration_that_up_takes_and_admits_only_groups_of_that_age(loss: str, staleness: int):
    cell = Cell(loss=loss, staleness=staleness, seed=0)
    sections = configuration(cell, steps=9, folder=HERE / "run", model=HERE / "model", train=HERE / "train.jsonl", held_out=HERE / "heldout.jsonl")
    config = validate(UpConfig, tomllib.loads(toml(sections)), source="run.toml")
    check_sections(buffer=config.buffer, weights=config.weights, rollout=config.rollout, checkpoint=config.checkpoint)
    assert config.buffer.admission_limit == (staleness + 1) * config.buffer.groups_per_step
    assert config.buffer.max_staleness == staleness
    assert config.producer.max_inflight_groups >= config.buffer.groups_per_step, "a step's slots are all reserved under the version that they come free with"


def test_naive_weighs_every_token_alike_whatever_its_ratio():
    torch = pytest.importorskip("torch")
    from consumer.losses import LossConfig, make_loss
    from consumer.losses.terms import Terms

    target = torch.tensor([-0.1, -3.0, -8.0], requires_grad=True)
    behaviour, advantage, whole = torch.tensor([-5.0, -3.0, -0.2]), torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3, dtype=torch.int64)
    loss = make_loss(LossConfig(**LOSSES["naive"]))
    loss(Terms(target=target, behaviour=behaviour, proximal=target.detach(), advantage=advantage, rollout=whole, age=whole)).loss.sum().backward()
    torch.testing.assert_close(target.grad, -advantage, rtol=2e-6, atol=0)


def test_a_run_has_collapsed_when_it_ends_far_below_its_best_or_met_what_is_no_number():
    rising, fallen = [line(0.5, {"2": 10})] * 30, [line(0.2, {"0": 5, "2": 5})] * 20
    assert not told(rising)["collapsed"]
    assert told(rising + fallen)["collapsed"]
    assert told(rising, finite=False)["collapsed"]
    assert told(rising + fallen)["age_mean"] == pytest.approx(1.6)


def test_the_table_has_a_row_for_each_cell_with_what_its_seeds_came_to(tmp_path: Path):
    for seed, reward in enumerate((0.4, 0.8)):
        run = {"loss": "tis", "staleness": 8, "seed": seed, "heldout": {"first": 0.25, "last": reward}} | told([line(reward, {"8": 1})] * 20)
        (tmp_path / f"tis-8-{seed}.json").write_bytes(orjson.dumps(run))
    assert table(read(tmp_path)).splitlines()[-1].startswith("| 8 | tis | 2 | 0.60 (0.40 to 0.80) | 0.60 | 0.25 → 0.60 | 0 of 2 | 8.00 |")
