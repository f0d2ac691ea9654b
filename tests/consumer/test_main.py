"""What `rl-trainer` refuses, with which words and exit code, before it writes anything."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from consumer.config import PUBLISH_S, TrainerDaemonConfig, byte_budget_needed, stop_seconds
from consumer.main import main
from protocol.config import validate
from protocol.connection import connect
from protocol.errors import EXIT_CONFIG
from protocol.groups import payload_bound
from protocol.identity import identify
from protocol.keys import Keys
from weightsync.registry import ACK_ROUNDS

pytestmark = pytest.mark.redis
Tables = dict[str, dict[str, Any]]

BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"trainer__lrr": 1e-3}, ("trainer.lrr", "did you mean trainer.lr?")),
    "unknown section": ({"trainr__lr": 1e-3}, ("[trainr]", "did you mean trainer?")),
    "wrong type": ({"trainer__lr": "fast"}, ("trainer.lr", "'fast'")),
    "out of range": ({"checkpoint__keep": 1}, ("checkpoint.keep", "greater than or equal to 2")),
    "ranks that do not fill the layout": (
        {"trainer__backend": "megatron", "trainer__ranks": 3, "megatron__tp": 2},
        ("trainer.ranks", "3 ranks with megatron.tp 2", "use a multiple of 2 ranks"),
    ),
    "unknown backend": ({"trainer__backend": "jax"}, ("trainer", "backend 'jax'", "package.module:Class")),
    "unknown loss": ({"loss__kind": "tis"}, ("loss.kind", "'ppo_clip', 'trust_region'")),
    "loss in its old place": ({"trainer__loss": "trust_region"}, ("unknown key trainer.loss", "called loss.kind now")),
    "option of a loss in its old place": ({"trainer__clip_low": 0.1}, ("unknown key trainer.clip_low", "called loss.clip_low now")),
    "teacher at another temperature": (
        {"loss__kind": "distillation", "rollout__temperature": 0.7},
        ("loss.kind distillation", "rollout.temperature 0.7", "set rollout.temperature = 1"),
    ),
    "unknown advantage": ({"trainer__advantage": "grpo"}, ("advantage 'grpo'", "group_std", "package.module:function")),
    "gae without a critic": ({"trainer__advantage": "gae"}, ("trainer.advantage gae", "[critic]", "set critic.lr")),
    "gae on megatron": (
        {"trainer__advantage": "gae", "trainer__backend": "megatron", "critic__lr": 1e-5},
        ("trainer.backend megatron", "beside the torch backend alone", "trainer.backend = torch", "group_std"),
    ),
    "critic that clips nothing": ({"trainer__advantage": "gae", "critic__value_clip": 0.2}, ("critic.value_clip 0.2", "critic.epochs above 1")),
    "critic of ranks elsewhere": (
        {"trainer__advantage": "gae", "trainer__ranks": 2, "critic__device": "cpu"},
        ("critic.device cpu", "leave critic.device out"),
    ),
    "critic on an unknown device": ({"critic__device": "gpu"}, ("critic.device",)),
    "no model of the critic": ({"trainer__advantage": "gae", "critic__model_path": "/no/such/model"}, ("critic.model_path /no/such/model",)),
    "penalty of a token for a whole rollout": (
        {"loss__kl_reward_coef": 0.1},
        ("loss.kl_reward_coef 0.1", "trainer.advantage group_std", "gae or reinforce_pp_tokens"),
    ),
    "rank above the model's width": ({"lora__rank": 100_000}, ("lora.rank 100000", "hidden size is 32")),
    "unknown tracker": ({"trackers__names": ["mlflow"]}, ("trackers.names", "'mlflow'", "'tensorboard' or 'wandb'")),
    "beta of 1": ({"trainer__betas": [0.9, 1.0]}, ("betas", "below 1")),
    "greedy": ({"rollout__temperature": 0.0}, ("rollout.temperature 0",)),
    "on-policy and sparse": (
        {"buffer__pipeline_depth": 0.0, "weights__publish_every": 2},
        ("buffer.pipeline_depth 0", "weights.publish_every 2", "publish_every = 1"),
    ),
    "published too seldom": (
        {"buffer__max_staleness": 2, "weights__publish_every": 4},
        ("weights.publish_every 4", "buffer.max_staleness 2", "at most buffer.max_staleness + 1"),
    ),
    "small budget": ({"buffer__byte_budget": 1000}, ("buffer.byte_budget 1000", "raise it")),
    "no model": ({"model__path": "/no/such/model"}, ("model.path /no/such/model",)),
    "no data": ({"data__path": "/no/such.jsonl"}, ("data.path /no/such.jsonl",)),
    "no redis url": ({"redis__url": ""}, ("redis.url is empty",)),
    "bad redis url": ({"redis__url": "http://here"}, ("redis.url", "http://here")),
    "bad run name": ({"run__name": "a b"}, ("run.name", "'a b'")),
}


@pytest.fixture
def names() -> Keys:
    """Of a run that is never made."""
    return Keys("t-refused")


@pytest.fixture
def keys(names: Keys) -> Keys:
    """These tests run their own event loops, so they do without the fixture that looks after keys."""
    return names


@pytest.fixture
def write(make_config: Callable[..., Tables], as_file: Callable[..., Path]) -> Callable[..., Path]:
    """A configuration file with these keys changed."""
    return lambda **changes: as_file(make_config(**changes))


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == EXIT_CONFIG
    return capsys.readouterr().err


@pytest.mark.parametrize("case", sorted(BAD))
@pytest.mark.parametrize("how", ["--new", "--resume"])
def test_bad_input_names_the_key_and_writes_nothing(case: str, how: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    changes, words = BAD[case]
    file = write(**changes)
    before = sorted(tmp_path.rglob("*"))
    told = refused(capsys, ["-c", str(file), how])
    for word in words:
        assert word in told
    assert "Traceback" not in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("case", ["teacher at another temperature", "gae without a critic", "gae on megatron", "greedy", "no model of the critic", "no model"])
def test_a_recording_is_trained_by_a_checked_configuration_too(case: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    changes, words = BAD[case]
    told = refused(capsys, ["-c", str(write(**changes)), "--recorded", "/no/such/recording"])
    assert all(word in told for word in words)


def test_one_process_is_told_that_a_replica_of_the_model_needs_more(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    file = write(trainer__backend="megatron", trainer__ranks=4, megatron__tp=2, megatron__pp=2)
    told = refused(capsys, ["-c", str(file), "--recorded", "/no/such/recording"])
    assert "train in one process, and a replica of the model needs 4 ranks" in told


def test_ranks_that_would_stay_idle_are_refused(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    file = write(trainer__ranks=16, buffer__groups_per_step=64, buffer__chunk_groups=8)
    told = refused(capsys, ["-c", str(file), "--new"])
    assert "buffer.chunk_groups 8 for 16 data-parallel ranks" in told
    assert "set buffer.chunk_groups = 16 or more" in told


def test_either_new_or_resume_is_asked_for(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    for argv in ([], ["--new", "--resume"]):
        with pytest.raises(SystemExit) as raised:
            main(["-c", str(write()), *argv])
        assert raised.value.code == EXIT_CONFIG
        told = capsys.readouterr().err
        assert "--new" in told
        assert "--resume" in told


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert str(tmp_path / "no.toml") in refused(capsys, ["-c", str(tmp_path / "no.toml"), "--new"])
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "bad.toml: not valid TOML" in refused(capsys, ["-c", str(tmp_path / "bad.toml"), "--new"])


def test_resuming_a_run_that_is_not_there_is_refused(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    told = refused(capsys, ["-c", str(write()), "--resume"])
    assert "'t-refused' does not exist" in told
    assert "--new" in told


def test_redis_that_does_not_answer_is_named(write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    url = f"unix://{tmp_path}/no.sock"
    told = refused(capsys, ["-c", str(write(redis__url=url, redis__deadline_s=0.1)), "--resume"])
    assert f"redis.url {url}: no answer" in told


@pytest.mark.parametrize(
    "damage",
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_an_incomplete_model_folder_is_refused_before_torch(
    damage: tuple[Callable[[Path], None], str], model_path: Path, tmp_path: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    spoil, words = damage
    folder = shutil.copytree(model_path, tmp_path / "model")
    spoil(folder)
    told = refused(capsys, ["-c", str(write(model__path=str(folder))), "--new"])
    assert f"model.path {folder}" in told
    assert words in told


def test_an_existing_run_or_record_is_never_made_anew_and_another_identity_never_joins(
    redis_url: str, as_file: Callable[..., Path], make_config: Callable[..., Tables], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    run = Keys("t-existing")
    tables = make_config(run.run)
    config = validate(TrainerDaemonConfig, tables, source="test")

    async def with_run(create: bool) -> None:
        client = connect(redis_url)
        ledger = RedisLedger(client, run)
        if create:
            assert await ledger.create(identify(config.run, config.model, config.data, config.rollout), config.buffer)
        else:
            await ledger.delete_run()
        await client.aclose()

    asyncio.run(with_run(create=True))
    try:
        assert "exists already: use --resume" in refused(capsys, ["-c", str(as_file(tables)), "--new"])
        tables["rollout"]["group_size"] = 8
        assert "exists already, with other settings" in refused(capsys, ["-c", str(as_file(tables)), "--new"])
        told = refused(capsys, ["-c", str(as_file(tables)), "--resume"])
        assert "rollout.group_size: the run has 4, this process 8" in told
        assert not config.run.folder.exists()
    finally:
        asyncio.run(with_run(create=False))
    for record in ("witness.jsonl", "metrics.jsonl", "checkpoint/step-000001-1/state.json"):
        (config.run.folder / record).parent.mkdir(parents=True)
        (config.run.folder / record).write_text(json.dumps({}))
        assert "is of an earlier run" in refused(capsys, ["-c", str(as_file(tables)), "--new"])
        shutil.rmtree(config.run.folder)


@pytest.mark.parametrize(("spill", "told"), [("", "set buffer.spill"), ("spill", "(D + 2) * B groups")])
def test_the_budget_message_names_the_number_that_is_then_enough(
    spill: str, told: str, as_file: Callable[..., Path], make_config: Callable[..., Tables], capsys: pytest.CaptureFixture[str]
):
    tables = make_config(buffer__byte_budget=1, buffer__spill=spill)
    config = validate(TrainerDaemonConfig, tables, source="test")
    needed = byte_budget_needed(buffer=config.buffer, rollout=config.rollout, checkpoint=config.checkpoint)
    text = refused(capsys, ["-c", str(as_file(tables)), "--resume"])
    assert str(needed) in text
    assert told in text
    tables["buffer"]["byte_budget"] = needed
    assert "does not exist" in refused(capsys, ["-c", str(as_file(tables)), "--resume"])


def test_the_budget_holds_what_producers_reserve_and_what_is_retained(make_config: Callable[..., Tables]):
    config = validate(TrainerDaemonConfig, make_config(buffer__retention=3), source="test")
    rollout, checkpoint = config.rollout, config.checkpoint
    charged = payload_bound(group_size=rollout.group_size, prompt_tokens=rollout.max_prompt_tokens, new_tokens=rollout.max_new_tokens)
    groups = config.buffer.admission_limit + (checkpoint.keep * checkpoint.every_steps + 3) * config.buffer.groups_per_step
    assert byte_budget_needed(buffer=config.buffer, rollout=rollout, checkpoint=checkpoint) == groups * charged


def test_a_resumed_run_is_checked_by_the_settings_it_was_made_with(
    redis_url: str, as_file: Callable[..., Path], make_config: Callable[..., Tables], capsys: pytest.CaptureFixture[str]
):
    run = Keys("t-settings")
    made = validate(TrainerDaemonConfig, make_config(run.run, buffer__max_staleness=2), source="test")

    async def with_run(create: bool) -> None:
        client = connect(redis_url)
        ledger = RedisLedger(client, run)
        await (ledger.create(identify(made.run, made.model, made.data, made.rollout), made.buffer) if create else ledger.delete_run())
        await client.aclose()

    asyncio.run(with_run(create=True))
    try:
        told = refused(capsys, ["-c", str(as_file(make_config(run.run, buffer__max_staleness=9, weights__publish_every=4))), "--resume"])
        assert "weights.publish_every 4 with buffer.max_staleness 2" in told
    finally:
        asyncio.run(with_run(create=False))


def test_going_back_to_a_step_goes_with_resume(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as raised:
        main(["-c", str(write()), "--new", "--from-step", "4"])
    assert raised.value.code == EXIT_CONFIG
    assert "--from-step goes with --resume or --shadow" in capsys.readouterr().err


def test_runs_that_share_checkpoint_dir_have_folders_of_their_own(make_config: Callable[..., Tables], tmp_path: Path):
    one, other = (validate(TrainerDaemonConfig, make_config(name, checkpoint__dir=str(tmp_path / "all")), source="test") for name in ("a", "b"))
    assert one.checkpoint_folder.parent == other.checkpoint_folder.parent == tmp_path / "all"
    assert one.checkpoint_folder != other.checkpoint_folder


def test_a_stop_may_take_as_long_as_all_that_is_waited_for_in_it(make_config: Callable[..., Tables]):
    weights = validate(TrainerDaemonConfig, make_config(weights__apply_deadline_s=100.0), source="test").weights
    assert stop_seconds(weights) > PUBLISH_S + ACK_ROUNDS * 100.0
