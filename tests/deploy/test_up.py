"""What `rollstream up` refuses, before it has written or started anything."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.config import listen
from deploy.demo import tokenizer
from deploy.redis_server import redis_server
from deploy.snapshot import PictureSource
from deploy.up import main as up_main
from deploy.up.main import UpOptions, up
from deploy.up.supervisor import Child, Role
from protocol.connection import Client, connect
from protocol.errors import ConfigError, RedisUnreachable, RunExists, RunMissing, UnsafeRedis
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence

ROWS = [{"prompt": "3142=", "label": "1234"}, {"prompt": "2211=", "label": "1122"}]


def write_config(folder: Path, **changes: str) -> Path:
    """A good configuration of folder/run, with other lines for the sections in `changes`."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        tokenizer.save(model)
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        (model / "model.safetensors").write_bytes(b"")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sections = {
        "run": f'name = "t"\ndir = "{folder}/run"',
        "model": f'path = "{model}"',
        "data": f'path = "{folder}/rows.jsonl"',
        "rollout": "group_size = 2\nmax_prompt_tokens = 16\nmax_new_tokens = 8",
        "http": "port = 0",
        **changes,
    }
    path = folder / "run.toml"
    path.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
    return path


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


BAD = [
    ("unknown key", {"producer": "cuont = 2"}, ["run.toml:", "producer.cuont", "did you mean producer.count?"]),
    ("wrong type", {"producer": 'count = "two"'}, ["run.toml:", "producer.count", "'two'"]),
    ("model path missing", {"model": 'path = "nowhere"'}, ["model.path", "no such folder"]),
    ("on-policy with a publish interval", {"buffer": "pipeline_depth = 0.0", "weights": "publish_every = 2"}, ["pipeline_depth 0", "weights.publish_every 2"]),
    ("budget too small", {"buffer": "byte_budget = 1000"}, ["buffer.byte_budget 1000", "too small"]),
    ("no such data set", {"data": 'path = "no.jsonl"'}, ["data.path no.jsonl"]),
    ("no such held-out set", {"eval": 'path = "held.jsonl"'}, ["eval.path held.jsonl"]),
    ("no such reward", {"reward": 'kind = "function"\nfunction = "deploy.nothing:here"'}, ["reward.function", "deploy.nothing"]),
    ("bad run name", {"run": 'name = "a/b"'}, ["run.name", "a/b"]),
]


@pytest.mark.parametrize(("changes", "told"), [pytest.param(changes, told, id=name) for name, changes, told in BAD])
def test_a_bad_configuration_exits_2_names_the_key_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, str], told: list[str]
):
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, **changes)
    before = contents(tmp_path)
    for command in (["up", "--new"], ["config", "check"]):
        assert main([*command, "-c", str(path)]) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in told), said
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param('{"prompt": "1=", "label": "1"}\n{"prompt": \n', ["rows.jsonl:2", "not valid JSON"], id="malformed line"),
        pytest.param("", ["rows.jsonl", "no rows"], id="empty"),
        pytest.param('{"prompt": "1=", "label": "1"}\n{"prompt": "2="}\n', ["rows.jsonl:2", '"label"'], id="missing label"),
    ],
)
def test_a_bad_data_set_exits_2_names_file_and_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: list[str]):
    path = write_config(tmp_path)
    (tmp_path / "rows.jsonl").write_text(text)
    before = contents(tmp_path)
    assert main(["up", "-c", str(path), "--new"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in told), said
    assert contents(tmp_path) == before


async def test_a_taken_port_is_refused_before_anything_is_written(tmp_path: Path):
    with listen("127.0.0.1", 0) as taken:
        path = write_config(tmp_path, http=f"port = {taken.getsockname()[1]}")
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=r"http\.port"):
            await up(UpOptions(config=str(path), resume=False))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("trace", ["processes.json", "audit.jsonl", "checkpoint", "redis"])
async def test_new_refuses_a_folder_that_holds_a_run(tmp_path: Path, trace: str):
    path = write_config(tmp_path)
    (tmp_path / "run" / trace).mkdir(parents=True)
    before = contents(tmp_path)
    with pytest.raises(RunExists, match="--resume"):
        await up(UpOptions(config=str(path), resume=False))
    assert contents(tmp_path) == before


async def test_resume_refuses_a_folder_without_a_run(tmp_path: Path):
    path = write_config(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RunMissing, match="--new"):
        await up(UpOptions(config=str(path), resume=True))
    assert contents(tmp_path) == before


async def test_a_redis_that_is_not_there_is_a_configuration_error(tmp_path: Path):
    path = write_config(tmp_path, redis=f'url = "unix://{tmp_path}/nobody.sock"')
    with pytest.raises(RedisUnreachable, match=r"nobody\.sock"):
        await up(UpOptions(config=str(path), resume=False))
    assert not (tmp_path / "run").exists()


@pytest.mark.redis
async def test_a_given_redis_is_asked_whether_it_can_evict_and_whether_the_run_is_there(tmp_path: Path):
    async with redis_server(tmp_path / "r") as url:
        path = write_config(tmp_path, redis=f'url = "{url}"')
        with pytest.raises(RunMissing, match="no run 't'"):
            await up(UpOptions(config=str(path), resume=True))
        client = connect(url, deadline_s=5.0)
        await client.hset(Keys("t").state, "state", "open")
        with pytest.raises(RunExists, match="'t'"):
            await up(UpOptions(config=str(path), resume=False))
        await client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(UnsafeRedis, match="allkeys-lru"):
            await up(UpOptions(config=str(path), resume=True))
        await client.aclose()
    assert not (tmp_path / "run").exists()


@pytest.mark.redis
async def test_healthy_is_who_announces_itself_from_the_process_we_found(
    redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch, small_run: Callable[[], Awaitable[object]]
):
    monkeypatch.setattr(up_main, "_HEALTH_S", 1.0)
    await small_run()
    await Presence(redis, keys, "producer", ProducerStatus).beat("producer-0", ProducerStatus(producer_id="producer-0", pid=4242))
    source = PictureSource(redis, keys)
    found = {Child(Role.PRODUCER, 0): 4242, Child(Role.PRODUCER, 1): 4243, Child(Role.REDIS): 1}
    assert await up_main._healthy(source, found) == {Child(Role.PRODUCER, 0)}


async def test_one_up_a_folder(tmp_path: Path):
    import fcntl

    path = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".up.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `rollstream up` holds"):
            await up(UpOptions(config=str(path), resume=False))
