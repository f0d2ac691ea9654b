"""`rollstream eval`: a saved model on an engine of its own, with and without a run around it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import orjson
import pytest
import pytest_asyncio

from consumer.backend import TrainingState
from consumer.checkpoint import Checkpoint, Progress, write_checkpoint
from deploy import evaluate as evaluate_module
from deploy.cli import main
from deploy.evaluate import EvaluateConfig, evaluate_saved, record
from deploy.saved import Saved, saved_model
from producer.engine.hosted import EngineFault
from protocol.config import load
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import wakeups
from tests.contract.served import interpreter
from tests.producer.engine.conftest import write_model
from tests.producer.test_eval_fleet import ROWS, Run
from weightsync.config import store_folder
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / str(seed), seed=seed) for seed in (1, 2)]


def write_config(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """A run that nobody has started."""
    held_out = folder / "eval.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(6)))
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "dir": str(folder / "run")},
        "model": {"path": str(model)},
        "data": {"path": "nowhere.jsonl"},
        "rollout": {"max_prompt_tokens": 20, "max_new_tokens": 8},
        "reward": {"kind": "contains"},
        "eval": {"path": str(held_out)},
        "weights": {"store": str(folder / "store")},
        "engine": {"slots": 4},
    }
    lines: list[str] = []
    for name in {**values, **sections}:
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in (values.get(name, {}) | sections.get(name, {})).items()]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def save_checkpoint(config: EvaluateConfig, model: Path, step: int) -> Path:
    with open_tensors(model / "model.safetensors") as tensors:
        weights = {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=bytes(one.data)) for name, one in tensors.items()}
    state = TrainingState(weights=weights, optimizer={}, rng={})
    checkpoint = Checkpoint(progress=Progress(step=step), incarnation=1, state=state, journal=b"", schedule={})
    return Path(write_checkpoint(config.checkpoint.folder(config.run), checkpoint, model_path=model).path)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No URL of a Redis from the environment."""
    monkeypatch.delenv("ROLLSTREAM__REDIS__URL", raising=False)


def test_a_checkpoint_is_evaluated_with_no_redis_no_trainer_and_no_producer(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None
):
    path = write_config(tmp_path, models[0])
    config = load(EvaluateConfig, path)
    save_checkpoint(config, models[1], 30)
    responses = tmp_path / "responses.jsonl"
    assert main(["eval", "-c", str(path), "--checkpoint", "30", "--responses", str(responses)]) == 0
    out = capsys.readouterr().out
    assert "checkpoint 1:30" in out
    assert "not recorded in run r: it has no Redis now" in out
    written = orjson.loads((tmp_path / "run" / "evals" / "checkpoint-1-30.json").read_bytes())
    (result,) = written["results"]
    assert (written["version"], written["model"], written["digest"] != "") == ("1:30", "checkpoint 1:30", True)
    assert (result["phase"], result["set"], result["version"], result["pinned"], result["samples"], result["failed"]) == (
        *("checkpoint", "main", "1:30", True, 6, 0),
    )
    lines = [orjson.loads(line) for line in responses.read_bytes().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sum(len(line["output_ids"]) for line in lines) == result["tokens"]
    assert sum(line["exact"] for line in lines) / 6 == pytest.approx(result["exact"])


@pytest.mark.sglang
@pytest.mark.timeout(1200)
def test_a_checkpoint_is_evaluated_by_a_server_of_sglang(tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None):
    path = write_config(tmp_path, models[0], engine={"kind": "sglang", "device": "cpu", "python": interpreter(), "slots": 4})
    save_checkpoint(load(EvaluateConfig, path), models[1], 30)
    responses = tmp_path / "responses.jsonl"
    assert main(["eval", "-c", str(path), "--checkpoint", "30", "--responses", str(responses)]) == 0, capsys.readouterr().err
    (result,) = orjson.loads((tmp_path / "run" / "evals" / "checkpoint-1-30.json").read_bytes())["results"]
    assert (result["version"], result["pinned"], result["samples"], result["failed"]) == ("1:30", True, 6, 0)
    by_server = [orjson.loads(line)["output_ids"] for line in responses.read_bytes().splitlines()]

    embedded = tmp_path / "embedded"
    embedded.mkdir()
    path = write_config(embedded, models[0])
    save_checkpoint(load(EvaluateConfig, path), models[1], 30)
    assert main(["eval", "-c", str(path), "--checkpoint", "30", "--responses", str(responses)]) == 0
    assert by_server == [orjson.loads(line)["output_ids"] for line in responses.read_bytes().splitlines()], "greedy, and the checkpoint's weights in both"


def test_without_a_checkpoint_it_is_the_model_as_it_is_and_every_set_has_a_row(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None
):
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
    path = write_config(tmp_path, models[0])
    out = tmp_path / "deep" / "results.json"
    assert main(["eval", "-c", str(path), "--set", f'eval.sets={{few = "{few}"}}', "--out", str(out), "--json"]) == 0
    written = orjson.loads(capsys.readouterr().out)
    assert written == orjson.loads(out.read_bytes())
    assert [(one["set"], one["samples"], one["version"], one["versions"], one["model"]) for one in written["results"]] == [
        ("main", 6, None, [], models[0].name),
        ("few", 2, None, [], models[0].name),
    ]


def foreign_tokenizer(folder: Path, model: Path) -> Path:
    """Weights that know fewer tokens than the tokenizer beside them."""
    small = write_model(folder / "small", seed=5, vocab_size=8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, small / name)
    return small


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "7"], "--checkpoint 7: no such checkpoint in"),
        (["--checkpoint", "latest"], "nor a version in"),
        (["--checkpoint", "{folder}/nowhere"], "no such folder; give one, a step, a version such as 1:20, or latest"),
        (["--checkpoint", "{folder}"], "has no config.json"),
        (["--checkpoint", "{small}"], "its tokenizer has token"),
        (["--set", "eval.path={folder}/empty.jsonl"], "empty.jsonl: the file has no rows"),
        (["--set", "eval.path="], "name a JSONL file of held-out prompts"),
        (["--set", 'eval.sets={{hard = "{folder}/none.jsonl"}}'], "eval.sets.hard {folder}/none.jsonl: cannot be read"),
        (["--set", 'eval.sets={{main = "x.jsonl"}}'], "eval.path is the set 'main' already"),
        (["--set", "model.path={folder}/nowhere"], "has no config.json"),
        (["--out", "{folder}/taken/results.json"], "{folder}/taken: cannot be written (Not a directory)"),
        (["--responses", "{folder}/taken/deep/responses.jsonl"], "{folder}/taken/deep: cannot be written (Not a directory)"),
        (["--responses", "{folder}"], "--responses {folder}: is a folder"),
        (["--set", "engine.kind=external", "--set", 'engine.urls=["http://localhost:1"]'], "starts an engine of its own"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_do(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None, arguments: list[str], message: str
):
    path = write_config(tmp_path, models[0])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "taken").touch()
    places = {"folder": tmp_path, "small": foreign_tokenizer(tmp_path, models[0])}
    assert main(["eval", "-c", str(path), *(one.format(**places) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert message.format(**places) in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_an_evaluation_of_which_nothing_comes_is_a_fault_with_the_reason(tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None):
    path = write_config(tmp_path, models[0])
    arguments = ["--set", "reward.kind=function", "--set", f"reward.function={__name__}:refuse", "--set", "producer.sample_retries=0"]
    assert main(["eval", "-c", str(path), *arguments]) == 1
    assert "all 6 samples failed, the last one: 1 attempts failed" in capsys.readouterr().err


async def refuse(_: object) -> float:
    raise ValueError("no reward today")


async def refuse_odd(asked: Any) -> float:
    if asked.label == "odd":
        raise ValueError("no reward today")
    return 1.0


def test_a_set_of_which_nothing_comes_is_told_beside_the_others_and_is_a_fault(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None
):
    odd, out = tmp_path / "odd.jsonl", tmp_path / "results.json"
    odd.write_text('{"prompt": "1+1=", "label": "odd"}\n{"prompt": "2+2=", "label": "odd"}\n')
    path = write_config(tmp_path, models[0], reward={"kind": "function", "function": f"{__name__}:refuse_odd"}, producer={"sample_retries": 0})
    assert main(["eval", "-c", str(path), "--set", f'eval.sets={{odd = "{odd}"}}', "--out", str(out), "--json"]) == 1
    told = capsys.readouterr()
    written = orjson.loads(told.out)
    assert written == orjson.loads(out.read_bytes())
    assert [(one["set"], one["samples"], one["failed"], one.get("reward")) for one in written["results"]] == [("main", 6, 0, 1.0), ("odd", 0, 2, None)]
    assert "all samples of odd failed, the last one: 1 attempts failed" in told.err


def test_a_place_that_cannot_be_written_to_any_more_is_told_after_the_figures(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(evaluate_module, "write_atomically", full)
    assert main(["eval", "-c", str(write_config(tmp_path, models[0])), "--json"]) == 2
    told = capsys.readouterr()
    assert orjson.loads(told.out)["results"][0]["samples"] == 6
    assert "cannot be written (No space left on device)" in told.err


def test_sigterm_ends_an_evaluation_with_1_and_leaves_no_copy_of_the_model(
    tmp_path: Path, models: list[Path], capsys: pytest.CaptureFixture[str], quiet: None, monkeypatch: pytest.MonkeyPatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    path = write_config(tmp_path, models[0], weights={"store": str(tmp_path / "store"), "transport": "delta"})
    config = load(EvaluateConfig, path)
    store = DirectoryStore(store_folder(config.weights, config.run), models[0])
    with open_tensors(models[0] / "model.safetensors") as base, open_tensors(models[1] / "model.safetensors") as other:
        name = min(base, key=lambda one: len(base[one].data))
        parent = store.write(Snapshot(version=Version(1, 0), tensors=base))
        assert store.write_delta(Snapshot(version=Version(1, 1), tensors={**base, name: other[name]}), parent, base).kind == "delta"
    copies: list[Path] = []

    async def asked_to_leave(_: object, saved: Saved) -> NoReturn:
        copies.append(saved.folder)
        assert saved.folder.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(evaluate_module, "evaluate_saved", asked_to_leave)
    assert main(["eval", "-c", str(path), "--checkpoint", "1:1"]) == 1
    assert "rollstream eval: stopped before everything was evaluated" in capsys.readouterr().err
    assert [copy.is_relative_to(scratch) for copy in copies] == [True]
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "run").exists()


@pytest_asyncio.fixture
async def run(redis: Client, keys: Keys, redis_url: str, models: list[Path], tmp_path: Path) -> AsyncIterator[Run]:
    async with wakeups(redis, keys) as waker, aiohttp.ClientSession() as session:
        yield Run(client=redis, keys=keys, url=redis_url, models=models, folder=tmp_path, waker=waker, session=session)


@pytest.mark.redis
async def test_a_checkpoint_gives_the_very_tokens_that_an_engine_of_the_run_gives_and_is_recorded_in_it(run: Run, models: list[Path]):
    config = run.config(EvaluateConfig)
    async with run.evaluation(concurrency=8) as (evaluation, _), run.engines(1), asyncio.timeout(300):
        await run.publish(1)
        await run.serves(0, "1:1")
        (outcome,), problem = await evaluation._outcomes(evaluate_module.Phase.PERIODIC, None)
        assert problem == ""
        assert outcome.versions == (Version(1, 1),)
    await asyncio.to_thread(save_checkpoint, config, models[1], 1)
    found: dict[str, Any] = {}
    for what in ("1:1", str(config.weights.store) + f"/{run.keys.run}/v1-1", "", str(models[1])):
        async with saved_model(what, run=config.run, model=config.model, checkpoint=config.checkpoint, weights=config.weights) as saved:
            found[what] = await evaluate_saved(config, saved)
        (other,) = found[what].outcomes
        same = {index: answer.output_ids for index, answer in other.answers.items()} == {index: one.output_ids for index, one in outcome.answers.items()}
        assert same == (what != ""), what
        assert len(other.answers) == ROWS
    assert await record(config, found["1:1"]) == f"recorded in run {run.keys.run}"
    (event,) = await run.records()
    assert (event["phase"], event["version"], event["model"], event["samples"]) == ("checkpoint", "1:1", "checkpoint 1:1", ROWS)
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"name": "nobodys"})})
    assert (await record(elsewhere, found["1:1"])).startswith("not recorded: there is no run nobodys in ")


@pytest.mark.redis
async def test_a_redis_that_does_not_answer_costs_the_record_only(run: Run, models: list[Path]):
    config = run.config(EvaluateConfig, redis={"url": "unix:///nowhere/redis.sock"})
    async with saved_model("", run=config.run, model=config.model, checkpoint=config.checkpoint, weights=config.weights) as saved:
        evaluated = await evaluate_saved(config, saved)
    assert (await record(config, evaluated)).startswith(f"not recorded in run {run.keys.run}: ")


async def test_work_ends_with_the_engine_it_needs():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    alone = evaluate_module._Alone(EngineStatus(engine_id=EngineId("e"), boot_nonce="", url="", kind="embedded", state=EngineState.ROUTABLE))

    async def fault() -> None:
        await begun.wait()
        await alone.mark_unfit("e", "", "answers nonsense")
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        with pytest.raises(EngineFault, match="engine e answers nonsense"):
            await evaluate_module._unless(work(), fault(), alone.failed())
    assert cancelled.is_set()
