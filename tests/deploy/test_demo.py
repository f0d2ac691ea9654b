from __future__ import annotations

import asyncio
import doctest
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest

from deploy import summary as summary_module
from deploy.checks import check_all
from deploy.config import UpConfig
from deploy.demo import drill as drill_module
from deploy.demo import folder as folders
from deploy.demo import task, tokenizer
from deploy.demo.bars import bars
from deploy.demo.drill import Drill, DrillKind, Plan
from deploy.demo.main import ended
from deploy.demo.main import main as demo_main
from deploy.summary import summarise
from producer.rewards import load_function
from protocol.config import load
from protocol.errors import ConfigError
from tests.deploy.recorded import ledger_status, small_run


# -- task --------------------------------------------------------------------------------------------------------------------------------------
def test_the_split_is_the_same_for_a_seed_and_shares_no_problem() -> None:
    first, again, other = task.problems(3), task.problems(3), task.problems(4)
    assert first == again
    assert first != other
    assert len(first.held_out) == 256
    assert not set(first.held_out) & set(first.train)
    assert len({*first.held_out, *first.train}) == 10_000


def test_data_files_hold_prompts_with_their_sorted_answers(tmp_path: Path) -> None:
    for path, rows in zip(task.write_data(tmp_path, seed=0), (9744, 256), strict=True):
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        assert len(lines) == rows
        assert all(line["prompt"] == f">{line['prompt'][1:5]}=" and line["label"] == "".join(sorted(line["prompt"][1:5])) for line in lines)


@pytest.mark.parametrize(
    ("response", "ids", "finish", "value", "exact"),
    [
        ("1234", [5, 6, 7, 8, 2], "stop", 1.0, True),
        ("1234", [5, 6, 7, 8], "stop", 1.0, True),
        ("1243", [5, 6, 8, 7, 2], "stop", 0.25, False),
        ("12345", [5, 6, 7, 8, 9, 2], "stop", 0.4, False),
        ("", [2], "stop", 0.0, False),
        ("1234", [5, 6, 0, 7, 8, 2], "stop", 0.0, False),
        ("123455", [5, 6, 7, 8, 9, 9], "length", 0.0, False),
    ],
)
async def test_the_reward(response: str, ids: list[int], finish: str, value: float, exact: bool) -> None:
    function = load_function("deploy.demo.task:reward")
    sample: Any = SimpleNamespace(response=response, response_ids=ids, label="1234", finish_reason=finish)
    reward = await function(sample)
    assert (reward.value, reward.exact) == (pytest.approx(value), exact)


@pytest.mark.parametrize("module", [task, tokenizer, drill_module, summary_module])
def test_the_examples_in_the_docstrings_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed


# -- tokenizer and warm start ------------------------------------------------------------------------------------------------------------------
def test_the_tokenizer_gives_transformers_the_same_ids(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.build().encode(">3142=").ids
    assert ids[0] == tokenizer.BOS
    assert loaded(">3142=").input_ids == ids
    chat = loaded.apply_chat_template([{"role": "user", "content": ">3142="}], add_generation_prompt=True, tokenize=False)
    assert loaded(chat, add_special_tokens=False).input_ids == ids
    assert loaded.decode([*ids, tokenizer.EOS], skip_special_tokens=True) == ">3142="
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.PAD, tokenizer.BOS, tokenizer.EOS)


def test_a_warm_start_is_the_same_for_a_seed_and_can_be_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from deploy.demo.warm_start import warm_start

    losses = [warm_start(tmp_path / name, seed=5, steps=2) for name in ("one", "two")]
    assert losses[0] == losses[1]
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert sum(parameter.numel() for parameter in model.parameters()) == 75_456
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (tokenizer.EOS, tokenizer.PAD, tokenizer.BOS)
    assert model.generation_config.eos_token_id == tokenizer.EOS


# -- folder ------------------------------------------------------------------------------------------------------------------------------------
def _demo(tmp_path: Path, **settings: Any) -> folders.Demo:
    return folders.Demo(folder=tmp_path / "demo", **settings)


def test_the_configuration_it_writes_is_valid_and_says_what_it_should(tmp_path: Path) -> None:
    demo = _demo(tmp_path, seed=7, steps=30, appendfsync="always")
    folders.claim(demo)
    folders.fill(demo)
    tokenizer.save(demo.model)
    (demo.model / "config.json").write_text('{"model_type": "qwen3"}')
    (demo.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = load(UpConfig, demo.config, environ={})
    check_all(config)
    with pytest.raises(ConfigError, match=r"loss.kind distillation without teacher.urls"):
        check_all(load(UpConfig, demo.config, sets=["loss.kind=distillation"], environ={}))
    check_all(load(UpConfig, demo.config, sets=["loss.kind=distillation", 'teacher.urls=["http://teacher:30000"]'], environ={}))
    assert (config.run.seed, config.run.folder, config.stop.steps, config.redis.appendfsync) == (7, demo.folder, 30, "always")
    assert (config.buffer.groups_per_step, config.buffer.chunk, config.buffer.max_staleness, config.buffer.pipeline_depth) == (32, 8, 8, 1.5)
    assert (config.engine.count, config.producer.count, config.rollout.group_size) == (2, 2, 8)
    assert Path(config.data.path).is_file()
    assert Path(config.eval.path).is_file()


def test_with_a_real_engine_there_is_one_server_on_the_cpu(tmp_path: Path) -> None:
    demo = _demo(tmp_path, engine=folders.EngineKind.SGLANG, engine_python=str(tmp_path / 'odd "bin"' / "python"))
    folders.claim(demo)
    folders.fill(demo)
    engine = load(UpConfig, demo.config, environ={}).engine
    assert (engine.kind, engine.count, engine.device, engine.python) == ("sglang", 1, "cpu", demo.engine_python)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine-python", "/nowhere/python"), "/nowhere/python: has no SGLang; `make sglang-cpu`"),
        (("--engine-python", sys.executable), "has no SGLang"),
        (("--drill",), "--drill kills engines faster"),
    ],
)
def test_a_real_engine_that_cannot_be_is_told_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert demo_main(["--dir", str(tmp_path / "demo"), "--engine", "sglang", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_folder_name_with_odd_characters_survives_the_configuration(tmp_path: Path) -> None:
    demo = folders.Demo(folder=tmp_path / 'a "b" \\ c é')
    folders.claim(demo)
    folders.fill(demo)
    assert tomllib.loads(demo.config.read_text("utf-8"))["run"]["dir"] == str(demo.folder)


def test_an_earlier_demo_is_moved_aside_and_the_one_before_it_replaced(tmp_path: Path) -> None:
    for seed in range(3):
        folders.claim(_demo(tmp_path, seed=seed))
        (tmp_path / "demo/summary.json").write_text(str(seed))
    assert (tmp_path / "demo.previous/summary.json").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.previous"]


@pytest.mark.parametrize("name", ["demo", "demo.previous"])
def test_a_folder_that_is_no_demo_is_left_alone(tmp_path: Path, name: str) -> None:
    if name != "demo":
        folders.claim(_demo(tmp_path))
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no demo's folder"):
        folders.claim(_demo(tmp_path))
    assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_a_demo_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    folders.claim(_demo(tmp_path))
    with (tmp_path / "demo/.up.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="still runs"):
            folders.claim(_demo(tmp_path))
    folders.claim(_demo(tmp_path))


# -- bars --------------------------------------------------------------------------------------------------------------------------------------
def _good() -> dict[str, Any]:
    run = small_run()
    summary = summarise(run.events, run.witness, status=ledger_status(), resources={"peak_pss_bytes": 1 << 30})
    summary["reward"] = {"first": 0.1, "last": 0.85, "best": 0.88}
    summary["heldout"] = {"first": 0.4, "last": 0.8, "best": 0.8}
    return summary


def test_a_good_run_meets_every_bar() -> None:
    assert [bar.name for bar in bars(_good()) if not bar.met] == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"reward": {"first": 0.3, "last": 0.9, "best": 0.9}}, "sampled reward at the start"),
        ({"reward": {"first": 0.1, "last": 0.7, "best": 0.79}}, "sampled reward at its best"),
        ({"heldout": {"first": 0.6, "last": 0.8, "best": 0.9}}, "rise of held-out exact"),
        ({"heldout": {"first": None, "last": None, "best": None}}, "rise of held-out exact"),
        ({"groups_lost": 1}, "groups lost"),
        ({"groups_duplicated": 1}, "groups duplicated"),
        ({"groups_lost": None}, "groups lost"),
        ({"disagreements": ["step 2"]}, "contradictions of witness and audit"),
        ({"over_k_tokens": 1}, "tokens over K in a loss"),
        ({"steps_over_k": 1}, "steps over K by the witness"),
        ({"engines": {}}, "engines at the final version"),
        ({"engines": {"e": {"at_final": False, "went_back": 0}}}, "engines at the final version"),
        ({"engines": {"e": {"at_final": True, "went_back": 1}}}, "times an engine went back"),
        ({"publish_lag": {"p99": 3}}, "publish lag, p99"),
        ({"peak_pss_bytes": 5 << 30}, "peak memory, GiB"),
    ],
)
def test_each_bar_is_missed_by_its_own_figure_alone(change: Mapping[str, Any], name: str) -> None:
    assert [bar.name for bar in bars({**_good(), **change}) if not bar.met] == [name]


def test_a_real_engine_may_take_the_memory_that_it_needs() -> None:
    missed = [[bar.name for bar in bars({**_good(), "peak_pss_bytes": size << 30}, real_engine=True) if not bar.met] for size in (5, 8)]
    assert missed == [[], ["peak memory, GiB"]]


def test_a_drill_is_not_judged_by_publish_lag() -> None:
    assert all(bar.met for bar in bars({**_good(), "publish_lag": {"p99": 9}}, drill=True))


# -- drill -------------------------------------------------------------------------------------------------------------------------------------
def test_the_drill_kills_each_role_twice_and_then_everything_spaced_over_the_run() -> None:
    drill = Drill(folder=Path("nowhere"), kind=DrillKind.GROUP, steps=400)
    targets = drill.targets()
    assert sorted(target.split("-")[0] for target in targets) == ["engine", "engine", "everything", "producer", "producer", "trainer", "trainer"]
    assert targets[-1] == "everything"
    plan = Plan(targets, steps=400)
    at = []
    for step in range(401):
        while plan.due(step):
            at.append(step)
            plan.done()
    assert at == [50, 100, 150, 200, 250, 300, 350]


async def test_the_drill_kills_the_process_on_record_and_nobody_who_got_its_number(tmp_path: Path) -> None:
    from deploy.demo.drill import kill
    from deploy.up.process import ChildProcess, Identity
    from deploy.up.records import Record, write_records
    from deploy.up.supervisor import Child, Role

    process = ChildProcess.start(("sleep", "60"), log=tmp_path / "log")

    def on_record(identity: Identity) -> None:
        record = Record(child=Child(Role.ENGINE, 1), identity=identity, command=("sleep",), settings="", started_at=0.0)
        write_records(tmp_path, [record], redis_url="")

    on_record(Identity(pid=os.getpid(), started="another boot"))
    assert kill(tmp_path, "engine-1") == ()
    on_record(process.identity)
    assert kill(tmp_path, "trainer-0") == ()
    assert kill(tmp_path, "engine-1") == (process.identity.pid,)
    assert await asyncio.wait_for(process.wait(), 60) == -9


def test_a_run_that_never_came_to_be_is_not_to_be_resumed(tmp_path: Path):
    demo = folders.Demo(folder=tmp_path, seed=0, steps=1)
    assert "--resume" not in ended(demo, 1)
    (tmp_path / "redis").mkdir()
    assert "--resume` goes on" in ended(demo, 1)
