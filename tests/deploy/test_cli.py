from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from buffer.audit import AuditSpill
from deploy import live
from deploy.cli import main
from deploy.look import show_config
from deploy.snapshot import PictureSource
from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.messages import Edge, Event, TrainerStatus
from protocol.presence import Presence

ROOT = Path(__file__).parents[2]


def config_file(folder: Path, url: str, run: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f'[run]\nname = "{run}"\ndir = "{folder}/run"\n[redis]\nurl = "{url}"\n')
    return path


def test_every_command_of_the_design_has_help(capsys: pytest.CaptureFixture[str]):
    for words in (
        ["up"],
        ["engine"],
        ["relay"],
        ["weight-server"],
        ["bench"],
        ["serve"],
        ["redis"],
        ["status"],
        ["groups"],
        ["engines"],
        ["weights"],
        ["summary"],
        ["letters", "list"],
        ["letters", "show"],
        ["letters", "requeue"],
        ["bias"],
        ["runs", "list"],
        ["runs", "delete"],
        ["runs", "fork"],
        ["config", "check"],
        ["config", "show"],
        ["demo"],
    ):
        with pytest.raises(SystemExit) as left:
            main([*words, "--help"])
        assert left.value.code == 0
        assert words[-1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required"),
        (["uup"], "invalid choice"),
        (["up", "-c", "x.toml"], "--new --resume is required"),
        (["up", "-c", "x.toml", "--new", "--resume"], "not allowed with"),
        (["status"], "-c/--config"),
        (["engine", "-c", "x.toml", "--index", "-1"], "expected 0 or more"),
        (["weight-server", "-c", "x.toml", "--port", "99999"], "99999: expected 0 to 65535"),
        (["weight-server", "-c", "x.toml", "--port", "-1"], "-1: expected 0 to 65535"),
    ],
)
def test_a_bad_command_line_exits_2_and_says_why(capsys: pytest.CaptureFixture[str], words: list[str], told: str):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["up", "--new"], ["engine"], ["serve"], ["summary"], ["config", "check"], ["config", "show"]])
def test_a_missing_file_exits_2_and_is_named(capsys: pytest.CaptureFixture[str], command: list[str], tmp_path: Path):
    assert main([*command, "-c", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: cannot be read" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("rollstream ")


@pytest.mark.parametrize(("command", "told"), [("up", "Ctrl-C stops it"), ("serve", "/metrics"), ("demo", "fewer than about 300")])
def test_help_says_what_to_expect_and_the_exit_codes(capsys: pytest.CaptureFixture[str], command: str, told: str):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert told in said
    assert "Exit codes: 0" in said


def test_help_and_engine_commands_import_nothing_heavy():
    code = "import sys, deploy.cli as c; c._parser(demo_wanted=False); print(sorted({'torch', 'redis', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_look_at_a_run_that_is_not_up_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "t"\ndir = "{tmp_path}/run"\n')
    assert main(["status", "-c", str(path)]) == 2
    assert "start the run" in capsys.readouterr().err


def test_a_look_at_a_run_that_has_ended_points_to_its_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert main(["status", "-c", str(config_file(tmp_path, "", "t"))]) == 2
    said = capsys.readouterr().err
    assert "has ended" in said
    assert "summary.json" in said
    assert f"rollstream redis --dir {tmp_path}/run/redis" in said


def test_a_look_without_redis_is_to_be_tried_again(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["engines", "-c", str(config_file(tmp_path, f"unix://{tmp_path}/nobody.sock", "t"))]) == 75
    assert "no answer" in capsys.readouterr().err


@pytest.mark.redis
def test_a_run_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], redis_url: str, tmp_path: Path):
    assert main(["weights", "-c", str(config_file(tmp_path, redis_url, "nobody"))]) == 2
    assert "'nobody'" in capsys.readouterr().err


@pytest.mark.redis
async def test_looks_are_tables_for_people_and_json_for_programs(
    capsys: pytest.CaptureFixture[str], redis_url: str, keys: Keys, tmp_path: Path, small_run: Callable[[], Awaitable[object]]
):
    await small_run()
    path = str(config_file(tmp_path, redis_url, keys.run))

    async def look(*words: str) -> str:
        assert await asyncio.to_thread(main, [*words, "-c", path]) == 0
        return capsys.readouterr().out

    status = await look("status")
    assert "step 1" in status
    assert " - tokens/s" in status, "one look tells no rate"
    assert "admission limit" in await look("groups")
    engines = await look("engines")
    assert "engine-0" in engines
    assert "http://127.0.0.1:9000" in engines, "a table that goes to a pipe is not cut"
    assert "newest 1:1" in await look("weights")
    found = json.loads(await look("status", "--json"))
    assert found["buffer"]["ready"] == 1
    assert found["staleness"]["total"]["max"] == 1
    assert json.loads(await look("weights", "--json"))["weights"]["newest"] == "1:1"


def test_the_shown_configuration_reads_back_as_the_same(tmp_path: Path):
    from deploy.config import UpConfig
    from protocol.config import load

    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "t"\n[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[rollout]\nstop = ["\\n", "end \\"x\\""]\n')
    config = load(UpConfig, path, environ={})
    shown = show_config(config, as_json=False)
    (tmp_path / "shown.toml").write_text(shown)
    assert load(UpConfig, tmp_path / "shown.toml", environ={}) == config
    assert set(tomllib.loads(shown)) == set(UpConfig.model_fields)
    assert json.loads(show_config(config, as_json=True))["run"]["name"] == "t"


@pytest.mark.redis
async def test_the_live_view_shows_who_waits_for_whom(redis: Client, keys: Keys, small_run: Callable[[], Awaitable[object]]):
    from rich.console import Console

    from deploy.up.supervisor import Child, Life, Phase, Role

    source = PictureSource(redis, keys)
    console = Console(width=150, record=True, file=io.StringIO())
    lives = {Child(Role.TRAINER): Life(phase=Phase.RUNNING), Child(Role.PRODUCER): Life(phase=Phase.WAITING, restarts=2)}
    console.print(live.render(await source.picture(), lives, []))
    assert "waiting for the trainer to create the run" in console.export_text()
    await small_run()
    picture = await PictureSource(redis, keys).picture()
    console.print(live.render(picture, lives, [(picture.at, "engine-0 ended (signal 9)")], "Redis does not answer: gone"))
    text = console.export_text()
    for part in ("producer-0: no slot for 3 s", "0.750", "producer-0 ↻2", "engine-1", "1:1", "signal 9", "Redis does not answer", "1 ready"):
        assert part in text, text
    assert "incarnation:step" in text
    assert "producer-0 no slot 3s" in live.line(picture)
    assert "step 1 of 60" in live.line(picture, last_step=60)
    assert "failed" not in live.line(picture)
    trainer = dataclasses.replace(picture.trainers[0], waiting_for=Edge.NO_GROUP, waiting_since=picture.at - 2.0)
    producer = dataclasses.replace(picture.producers[0], groups_failed=7, samples_retried=21)
    trouble = dataclasses.replace(picture, trainers=(trainer,), producers=(producer,))
    assert "trainer no group 2s" in live.line(trouble)
    assert "7 groups failed, 21 samples asked again (why: log of producer-0)" in live.line(trouble)
    wide = Console(width=150, record=True, file=io.StringIO())
    wide.print(live.render(trouble, lives, [], last_step=60))
    shown = wide.export_text()
    for part in ("1 of 60", "trainer: no group", "7 groups failed, 21 samples asked again"):
        assert part in shown, shown
    narrow = Console(width=80, record=True, file=io.StringIO())
    long = Event(id="1700000000000-0", op="eval", fields={"phase": "periodic", "boot_nonce": "c80847", "reward": 0.29345703125, "who": "x" * 90})
    assert live.describe(long).startswith("eval: phase periodic, reward 0.293, who")
    narrow.print(live.render(picture, lives, [(picture.at, live.describe(long))]))
    assert re.search(r"\d\d:\d\d:\d\d", narrow.export_text()), "a long line does not squeeze the time away"


@pytest.mark.redis
async def test_the_summary_of_a_run_by_hand_is_written_beside_its_record_and_moves_no_record_elsewhere(
    capsys: pytest.CaptureFixture[str], redis: Client, keys: Keys, tmp_path: Path, small_run: Callable[[], Awaitable[object]]
):
    await small_run()
    url = f"unix://{redis.connection_pool.connection_kwargs['path']}"
    path, folder = str(config_file(tmp_path, url, keys.run)), tmp_path / "run"
    kept = await redis.xlen(keys.audit)

    async def summarise(*words: str) -> int:
        return await asyncio.to_thread(main, ["summary", *words, "-c", path])

    assert await summarise() == 2
    assert "no audit.jsonl" in capsys.readouterr().err
    assert not folder.exists()
    folder.mkdir()
    (folder / "audit.jsonl").touch()
    assert await summarise("--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["groups_reserved"]) == (0, 3), "no witness file: nothing was trained"
    assert await redis.xlen(keys.audit) == kept, "a trainer is there: its record is its own"
    await Presence(redis, keys, "trainer", TrainerStatus).leave("trainer")
    assert await summarise() == 0
    assert "3 reserved" in capsys.readouterr().out
    assert await redis.xlen(keys.audit) == 0
    assert json.loads((folder / "summary.json").read_bytes())["groups_reserved"] == 3
    assert await asyncio.to_thread(main, ["summary", "-c", path, "--set", f"redis.url=unix://{tmp_path}/nobody.sock"]) == 0
    assert "3 reserved" in capsys.readouterr().out


@pytest.mark.redis
async def test_bias_is_a_table_for_people_and_json_for_programs_of_a_live_run_and_of_one_that_ended(
    capsys: pytest.CaptureFixture[str], redis: Client, keys: Keys, tmp_path: Path, small_run: Callable[[], Awaitable[object]]
):
    await small_run()
    url = f"unix://{redis.connection_pool.connection_kwargs['path']}"
    path, folder = str(config_file(tmp_path, url, keys.run)), tmp_path / "run"

    async def ask(*words: str) -> str:
        assert await asyncio.to_thread(main, ["bias", *words, "-c", path]) == 0
        return capsys.readouterr().out

    assert await asyncio.to_thread(main, ["bias", "-c", path]) == 2
    assert "no audit.jsonl" in capsys.readouterr().err
    folder.mkdir()
    (folder / "audit.jsonl").touch()
    live_body = json.loads(await ask("--json"))
    assert (live_body["total"]["generated"], live_body["lengths"]["16"]["trained_share"]) == (30, 0.6)
    async with AuditSpill(redis, keys, folder / "audit.jsonl") as spill:
        await spill.flush()
    ended = json.loads(await ask("--json", "--set", f"redis.url=unix://{tmp_path}/nobody.sock"))
    assert ended == live_body
    rows = [line.split() for line in (await ask()).splitlines()]
    assert ["16", "30", "2", "10", "18", "60.0%"] in rows
    assert ["1", "0", "2", "10", "6"] in rows, "no share by age: tokens are stored at one and trained at another"


def test_doctests_of_the_view_hold():
    import doctest

    assert doctest.testmod(live).failed == 0


async def test_a_redis_by_hand_prints_its_url_and_leaves_with_exit_0(tmp_path: Path):
    command = [sys.executable, "-m", "deploy.cli", "redis", "--dir", str(tmp_path / "data")]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, env={**os.environ, "ROLLSTREAM_LOG": "ERROR"})
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    client = connect(url, deadline_s=60.0)
    assert await client.ping()
    await client.aclose()
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


def test_a_benchmark_outside_a_checkout_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "buffer"]) == 2
    assert "in the root of a checkout" in capsys.readouterr().err


def test_a_benchmark_gets_its_own_options(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    assert main(["bench", "weights", "--help"]) == 0
    assert "benchmarks.weights" in capfd.readouterr().out
