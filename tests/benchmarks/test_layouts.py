from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu.layouts import DRY, FULL, Layout, Measured, configuration, toml, visible
from consumer.config import check_sections, check_turns
from deploy.config import UpConfig
from deploy.placement import Part, demand_of, place
from producer.engine.sglang.arguments import Place, server_arguments
from protocol.config import validate

HERE = Path("/somewhere/else")


def measured(layout: Layout, **changes: object) -> Measured:
    run = Measured(
        name="run",
        layout=layout,
        pause="in_place",
        transport="store",
        engine="sglang",
        device="cuda",
        engine_python="/usr/bin/python3",
        flags=("--a-wish",),
        lr=1e-5,
        steps=0,
        train_seconds=100.0,
        scale=FULL,
        folder=HERE / "run",
        store=HERE / "store",
        model=HERE / "model",
        train=HERE / "train.jsonl",
        held_out=HERE / "heldout.jsonl",
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def read(run: Measured) -> UpConfig:
    """As `rollstream up` reads the file."""
    config = validate(UpConfig, tomllib.loads(toml(configuration(run))), source="run.toml")
    check_sections(buffer=config.buffer, weights=config.weights, rollout=config.rollout, checkpoint=config.checkpoint)
    check_turns(config.placement, config.buffer)
    return config


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("engine", "device", "scale"), [("sglang", "cuda", FULL), ("sglang", "cpu", DRY), ("embedded", "cpu", DRY)])
def test_every_layout_is_a_configuration_that_up_takes(layout: Layout, engine: str, device: str, scale: object):
    config = read(measured(layout, engine=engine, device=device, scale=scale))
    assert config.engine.kind == engine
    assert config.trainer.device.startswith(device)


def test_engine_and_trainer_have_the_gpus_of_their_layout():
    apart, neighbours, turns = (read(measured(layout)) for layout in (Layout.APART, Layout.NEIGHBOURS, Layout.TURNS))
    assert (apart.trainer.device, apart.engine.gpu) == ("cuda:0", 1)
    assert [(one.trainer.device, one.engine.gpu) for one in (neighbours, turns)] == [("cuda:0", 0)] * 2
    placed = place(demand_of(turns))
    assert placed.units[Part.TRAINER] == placed.units[Part.ENGINE]
    assert turns.buffer.pipeline_depth == 0


def test_a_server_on_a_gpu_gets_our_flags_and_then_those_that_were_asked_for():
    settings = read(measured(Layout.APART)).engine
    argv = server_arguments(settings, Place(index=0, port=1, rendezvous_port=2, boot_nonce="n", seed=3), model="m", longest=10, context=0)
    assert argv[-1] == "--a-wish"
    assert "--disable-radix-cache" in argv
    assert argv[argv.index("--cuda-graph-max-bs-decode") + 1] == str(settings.slots)


def test_a_layout_wants_its_number_of_gpus():
    assert visible(Layout.APART, (1, 0)) == "1,0"
    assert visible(Layout.TURNS, (1,)) == "1"
    for layout, gpus in ((Layout.APART, (0,)), (Layout.APART, (0, 0)), (Layout.NEIGHBOURS, (0, 1))):
        with pytest.raises(ValueError, match="needs"):
            visible(layout, gpus)
