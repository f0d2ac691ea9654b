"""What `rollstream up` refuses, before it has written or started anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from consumer.config import stop_seconds
from deploy import checks
from deploy import redis_server as redis_server_module
from deploy.checks import check_carrier, check_weights
from deploy.cli import main
from deploy.config import UpConfig, check_ports, listen
from deploy.demo import tokenizer
from deploy.ray.crew import Crew
from deploy.redis_server import ServerCommand, answers, redis_server, server_command
from deploy.snapshot import PictureSource
from deploy.stop_times import stop_seconds_of
from deploy.up import main as up_main
from deploy.up.main import UpOptions, up
from deploy.up.plan import plan
from deploy.up.process import ChildProcess, identity_of
from deploy.up.records import Record, read_records, write_records
from deploy.up.resources import sessions
from deploy.up.supervisor import Child, Role
from producer.engine import host
from producer.engine.sglang.engine import _GRACE_S
from producer.engine.sglang.ports import held_port
from producer.ray_actor import Settings
from producer.ray_fleet import Left
from protocol.config import RunConfig, load
from protocol.connection import Client, connect
from protocol.daemon import SUPERVISED
from protocol.errors import ConfigError, IdentityMismatch, RedisUnavailable, RedisUnreachable, RunExists, RunMissing, UnsafeRedis
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys
from protocol.messages import ProducerStatus, RelayStatus, WeightServerStatus
from protocol.presence import Presence
from weightsync.config import WeightsConfig
from weightsync.roles import RELAY, WEIGHT_SERVER
from weightsync.safetensors_file import write_tensors
from weightsync.snapshot import TensorBytes

ROWS = [{"prompt": "3142=", "label": "1234"}, {"prompt": "2211=", "label": "1122"}]


def write_config(folder: Path, **changes: str) -> Path:
    """A good configuration of folder/run, with other lines for the sections in `changes`."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        tokenizer.save(model)
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
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


def identity(path: Path, *, seed: int) -> RunIdentity:
    """Of the run that the file describes, with another seed."""
    config = load(UpConfig, str(path))
    return replace(identify(config.run, config.model, config.data, config.rollout), seed=seed)


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = connect(url, deadline_s=60.0)
    try:
        yield client
    finally:
        await client.aclose()


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
    ("a store that nobody knows", {"weights": 'store = "foo://x"'}, ["weights.store foo://x", "foo"]),
    ("a store in one process", {"weights": 'store = "simplecache::memory://x"'}, ["weights.store simplecache::memory://x", "memory of one process"]),
    ("a spill that nobody knows", {"buffer": 'spill = "foo://x"'}, ["buffer.spill foo://x", "foo"]),
    ("blobs in one process", {"buffer": 'blobs = "memory://x"'}, ["buffer.blobs memory://x", "memory of one process"]),
    ("copies behind a URL", {"weights": 'relay = "s3://bucket/x"'}, ["run.toml:", "weights.relay", "is a URL", "a folder of this machine"]),
    ("no port for the evaluation", {"engine": "port = 65534\ncount = 2", "eval": "engines = 1"}, ["engine.port 65534", "2 engines and the 1 of eval.engines"]),
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
        pytest.param("", ["rows.jsonl", "is empty"], id="empty"),
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


async def test_a_taken_port_of_an_engine_is_refused_before_anything_is_written(tmp_path: Path):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        path = write_config(tmp_path, engine=f"port = {port - 1}\ncount = 2")
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match=rf"engine\.port {port - 1}: engine [01] cannot listen"):
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
        client = connect(url, deadline_s=60.0)
        await client.hset(Keys("t").state, "state", "open")
        with pytest.raises(RunExists, match="'t'"):
            await up(UpOptions(config=str(path), resume=False))
        await client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(UnsafeRedis, match="allkeys-lru"):
            await up(UpOptions(config=str(path), resume=True))
        await client.aclose()
    assert not (tmp_path / "run").exists()


@pytest.mark.redis
async def test_resume_refuses_another_run_of_that_name_before_it_touches_anything(tmp_path: Path, redis_url: str, redis: Client, keys: Keys):
    path = write_config(tmp_path, run=f'name = "{keys.run}"\ndir = "{tmp_path}/run"\nseed = 1', redis=f'url = "{redis_url}"')
    await RedisLedger(redis, keys).create(identity(path, seed=0), BufferConfig())
    before = contents(tmp_path)
    with pytest.raises(IdentityMismatch, match=r"run\.seed: the run has 0, this process 1"):
        await up(UpOptions(config=str(path), resume=True))
    assert contents(tmp_path) == before


@pytest.mark.redis
async def test_resume_with_other_settings_leaves_the_processes_and_the_configuration_of_the_run_alone(tmp_path: Path):
    path = write_config(tmp_path, run=f'name = "t"\ndir = "{tmp_path}/run"\nseed = 1')
    folder = tmp_path / "run"
    async with redis_server(folder / "redis") as url, connected(url) as client:
        await RedisLedger(client, Keys("t")).create(identity(path, seed=0), BufferConfig())
    (folder / "run.toml").write_text("# as it was\n")
    child = ChildProcess.start(["sleep", "100"], log=folder / "logs" / "producer-0.log")
    try:
        record = Record(child=Child(Role.PRODUCER), identity=child.identity, command=("sleep", "100"), settings="those", started_at=0.0)
        write_records(folder, [record], redis_url="")
        with pytest.raises(IdentityMismatch, match=r"run\.seed"):
            await up(UpOptions(config=str(path), resume=True))
        assert identity_of(child.identity.pid) == child.identity, "a healthy process goes on"
        assert record in read_records(folder)
    finally:
        child.kill()
        await child.wait()
    assert (folder / "run.toml").read_text() == "# as it was\n"
    assert not await answers(server_command(folder / "redis").url), "the server that was started to ask is gone"


async def test_without_a_server_to_start_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none() -> Path:
        raise ConfigError("no Redis server to start")

    monkeypatch.setattr(redis_server_module, "server_binary", none)
    path = write_config(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="no Redis server"):
        await up(UpOptions(config=str(path), resume=False))
    assert contents(tmp_path) == before


@dataclass(frozen=True)
class Refusing:
    """A plan whose trainer refuses to start."""

    redis: ServerCommand
    children: tuple[Child, ...] = (Child(Role.REDIS), Child(Role.TRAINER))
    reserved: tuple[Child, ...] = ()

    def refuses(self, _child: Child) -> str:
        return ""

    def argv(self, child: Child) -> tuple[str, ...]:
        return self.redis.argv if child.role is Role.REDIS else ("sh", "-c", "echo 'model.path: no such architecture' >&2; exit 2")

    def environment(self, _child: Child) -> None:
        return None


@pytest.mark.redis
async def test_a_new_run_that_never_came_to_be_can_be_started_again_and_costs_the_user_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Refusing:
        return Refusing(redis)

    monkeypatch.setattr(up_main, "plan", refusing)
    path = write_config(tmp_path, weights=f'store = "{tmp_path}/data"')
    precious = tmp_path / "data" / "t" / "rows.parquet"
    precious.parent.mkdir(parents=True)
    precious.write_text("the user's own")
    for _ in range(2):
        with pytest.raises(up_main.UpFailed, match="no such architecture") as failed:
            await up(UpOptions(config=str(path), resume=False))
        assert failed.value.exit_code == 2
        assert {item.name for item in (tmp_path / "run").iterdir()} == {".up.lock", "run.toml", "logs"}
    assert precious.read_text() == "the user's own"


@pytest.mark.redis
async def test_a_run_with_its_store_behind_a_url_starts_and_ends_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Refusing:
        return Refusing(redis)

    copies = tmp_path / "shm" / "t-relay"
    copies.mkdir(parents=True)
    monkeypatch.setattr(up_main, "plan", refusing)
    monkeypatch.setattr(up_main, "relay_folder", lambda _weights, _run: copies)
    path = write_config(tmp_path, weights=f'store = "simplecache::file://{tmp_path}/away"')
    with pytest.raises(up_main.UpFailed, match="no such architecture"):
        await up(UpOptions(config=str(path), resume=False))
    assert not copies.exists(), "copies in shared memory go with the run"


@pytest.mark.redis
async def test_a_chosen_folder_of_copies_is_left_to_its_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Refusing:
        return Refusing(redis)

    monkeypatch.setattr(up_main, "plan", refusing)
    (tmp_path / "chosen" / "t-relay").mkdir(parents=True)
    path = write_config(tmp_path, weights=f'transport = "delta"\nrelay = "{tmp_path}/chosen"')
    with pytest.raises(up_main.UpFailed, match="no such architecture"):
        await up(UpOptions(config=str(path), resume=False))
    assert (tmp_path / "chosen" / "t-relay").is_dir()


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
@pytest.mark.parametrize(
    ("code", "told"),
    [("print(0)", "torch sees none"), ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"), ("import time; time.sleep(60)", "timed out")],
    ids=["none", "no torch", "no answer"],
)
def test_a_transport_from_a_gpu_is_refused_where_there_is_none_but_not_by_the_check_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], transport: str, code: str, told: str
):
    monkeypatch.setattr(checks, "_COUNT_GPUS", code)
    monkeypatch.setattr(checks, "_COUNT_S", 1.0 if "sleep" in code else 60.0)
    path = write_config(tmp_path, weights=f'transport = "{transport}"')
    before = contents(tmp_path)
    assert main(["up", "--new", "-c", str(path)]) == 2
    said = capsys.readouterr().err
    assert f'weights.transport = "{transport}" needs a GPU here' in said
    assert told in said
    assert contents(tmp_path) == before
    assert main(["config", "check", "-c", str(path)]) == 0, "a file may be for another machine"


def test_torch_itself_is_asked_for_gpus_in_another_process_and_only_where_one_is_needed(monkeypatch: pytest.MonkeyPatch):
    run = RunConfig(name="t")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(checks, "_COUNT_S", 350.0)
    with pytest.raises(ConfigError, match="torch sees none"):
        check_carrier(WeightsConfig(transport="nccl"), run)
    monkeypatch.setattr(checks, "_COUNT_GPUS", "print(1)")
    check_carrier(WeightsConfig(transport="ipc"), run)
    monkeypatch.setattr(checks, "_COUNT_GPUS", "raise SystemExit(1)")
    for transport in ("store", "delta", "gloo"):
        check_carrier(WeightsConfig(transport=transport), run)


@pytest.mark.parametrize("weights", ['transport = "delta"', 'store = "simplecache::file:///nowhere"'], ids=["delta", "url"])
def test_a_folder_of_copies_that_cannot_be_written_to_is_refused_before_the_run_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str):
    (tmp_path / "file").touch()
    path = write_config(tmp_path, weights=f'{weights}\nrelay = "{tmp_path}/file"')
    before = contents(tmp_path)
    assert main(["up", "--new", "-c", str(path)]) == 2
    assert f"weights.relay: nothing can be written to {tmp_path}/file/t-relay" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.redis
@pytest.mark.parametrize(("code", "kept"), [(2, False), (3, True)], ids=["refused", "replaced"])
async def test_weights_in_shared_memory_go_with_the_run_unless_another_trainer_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kept: bool):
    memory = tmp_path / "shm" / "t-12345678"

    @dataclass(frozen=True)
    class Leaving(Refusing):
        def argv(self, child: Child) -> tuple[str, ...]:
            script = f"mkdir -p {memory}; exit {code}"  # a version is published, then it ends
            return self.redis.argv if child.role is Role.REDIS else ("sh", "-c", script)

    def leaving(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Leaving:
        return Leaving(redis)

    monkeypatch.setattr(up_main, "plan", leaving)
    monkeypatch.setattr(up_main, "store_folder", lambda _weights, _run: memory)
    with pytest.raises(up_main.UpFailed):
        await up(UpOptions(config=str(write_config(tmp_path)), resume=False))
    assert memory.exists() == kept


@pytest.mark.redis
async def test_a_server_that_does_not_come_up_leaves_a_folder_for_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Broken(Refusing):
        def argv(self, _child: Child) -> tuple[str, ...]:
            return ("sh", "-c", "echo 'bad directive' >&2; exit 1")

    def broken(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Broken:
        return Broken(redis)

    monkeypatch.setattr(up_main, "plan", broken)
    path = write_config(tmp_path)
    for _ in range(2):
        with pytest.raises(RedisUnavailable, match="bad directive"):
            await up(UpOptions(config=str(path), resume=False))


@pytest.mark.redis
async def test_it_says_where_it_listens_and_that_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    here = tmp_path / "here"

    @dataclass(frozen=True)
    class Waiting(Refusing):
        def argv(self, child: Child) -> tuple[str, ...]:
            script = f"trap 'exit 0' TERM; touch {here}; while :; do sleep 0.05; done"
            return self.redis.argv if child.role is Role.REDIS else ("sh", "-c", script)

    def waiting(_config: object, _file: Path, _sets: object, *, redis: ServerCommand) -> Waiting:
        return Waiting(redis)

    monkeypatch.setattr(up_main, "plan", waiting)
    with held_port("127.0.0.1", key="port") as port:
        path = write_config(tmp_path, http=f"port = {port}")
        task = asyncio.create_task(up(UpOptions(config=str(path), resume=False)))
        async with asyncio.timeout(300.0):
            while not here.exists() and not task.done():
                await asyncio.sleep(0.01)
            if not task.done():  # then somebody handles it
                os.kill(os.getpid(), signal.SIGINT)
            await task
    said = capsys.readouterr().out
    assert said.count(f"listening on http://127.0.0.1:{port}: ") == 1
    assert "run t was stopped before it had begun" in said


def test_a_run_that_was_stopped_says_at_which_step_and_how_it_goes_on(tmp_path: Path):
    path = write_config(tmp_path)
    config = load(UpConfig, str(path))
    options = UpOptions(config=str(path), resume=False, sets=("run.seed=0",))
    config.run.folder.mkdir()
    (config.run.folder / "summary.json").write_text('{"steps": 24}')
    said = up_main._last_word(config, options, cut_short=True)
    assert "stopped at step 24" in said
    assert f"go on with: rollstream up -c {path} --set run.seed=0 --resume\n" in said
    assert "--resume" not in up_main._last_word(config, options, cut_short=False)


@pytest.mark.parametrize(
    ("settings", "role", "least"),
    [
        ({"weights.apply_deadline_s": 1000.0}, Role.TRAINER, stop_seconds(WeightsConfig(apply_deadline_s=1000.0))),
        ({"producer.drain_seconds": 60.0}, Role.PRODUCER, 60.0 + 5.0),
        ({"producer.drain_seconds": 0.0}, Role.PRODUCER, 10.0),
        ({"engine.kind": "sglang"}, Role.ENGINE, host._FINISH_S + 2 * host._LEAVE_S + _GRACE_S),
        ({"engine.kind": "embedded"}, Role.ENGINE, host._FINISH_S + 2 * host._LEAVE_S),
    ],
)
def test_whoever_is_stopped_is_given_the_time_that_its_own_deadlines_add_up_to(tmp_path: Path, settings: dict[str, object], role: Role, least: float):
    config = load(UpConfig, str(write_config(tmp_path)), sets=[f"{key}={value}" for key, value in settings.items()])
    assert least < stop_seconds_of(config, role) < least + 60.0
    assert up_main.policy_for(config).stop_s[role] == stop_seconds_of(config, role)


async def test_on_ray_as_on_one_machine(tmp_path: Path):
    class Stopped:
        async def stop(self, name: str, *, within_s: float) -> Left:
            given[name] = within_s
            return Left(name=name)

        async def names(self, role: str) -> list[str]:
            """Another node of the engine is there, so its GPUs are not given back to a cluster that this test has none of."""
            return [f"{role}-0-node-1"]

    given: dict[str, float] = {}
    config = load(UpConfig, str(write_config(tmp_path)), sets=["producer.drain_seconds=60.0", "engine.kind=sglang"])
    crew = Crew(config, Settings(run="r", text=""), Stopped(), dealt={"engine-0": (0,)})
    for role in (Role.TRAINER, Role.PRODUCER, Role.ENGINE):
        await crew.stop(f"{role}-0")
    assert given == {f"{role}-0": stop_seconds_of(config, role) for role in (Role.TRAINER, Role.PRODUCER, Role.ENGINE)}


def test_children_know_that_their_redis_is_right(tmp_path: Path):
    config = load(UpConfig, str(write_config(tmp_path)))
    found = plan(config, tmp_path / "run.toml", (), redis=None)
    assert all(found.environment(child)[SUPERVISED] for child in found.children)


def test_engines_of_the_evaluation_come_after_those_of_the_run(tmp_path: Path):
    config = load(UpConfig, str(write_config(tmp_path)), sets=["engine.count=2", "eval.engines=1"])
    children = plan(config, tmp_path / "run.toml", (), redis=None).children
    assert [child.index for child in children if child.role is Role.ENGINE] == [0, 1, 2]


@pytest.mark.parametrize(("layout", "instead"), [("trainer_only", "rl-trainer"), ("rollout_only", "--rollout-only"), ("external", "engine.kind")])
def test_a_layout_that_is_not_started_on_one_machine_is_refused_with_what_to_do_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, instead: str
):
    path = write_config(tmp_path, placement=f'layout = "{layout}"')
    before = contents(tmp_path)
    assert main(["up", "-c", str(path), "--new"]) == 2
    said = capsys.readouterr().err
    assert f'placement.layout "{layout}"' in said
    assert instead in said
    assert contents(tmp_path) == before


def test_ports_of_the_evaluations_engines_are_looked_at_too(tmp_path: Path):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        config = load(UpConfig, str(write_config(tmp_path)), sets=[f"engine.port={port - 1}", "eval.engines=1"])
        with pytest.raises(ConfigError, match=f"engine 1 cannot listen on 127.0.0.1:{port}"):
            check_ports(config.engine, evals=config.eval.engines)


def test_what_a_child_starts_in_a_session_of_its_own_is_counted_with_it(tmp_path: Path):
    inner = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (grandchild,) = psutil.Process(child.pid).children()
        members = sessions()
        assert set(members[child.pid]) == {child.pid, grandchild.pid}
        assert members[grandchild.pid] == [grandchild.pid]
        child.communicate(b"\n")
    grandchild.wait(60)


def test_weights_that_were_copied_half_are_named(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    for content in (b"", b"\x08", (8).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b"not JSON!"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors is no whole"):
            check_weights(tmp_path)
    tensor = {"x": TensorBytes(dtype="F32", shape=(4,), data=bytes(16))}
    path.unlink()
    write_tensors(path, tensor, durable=False)
    check_weights(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is no whole"):
        check_weights(tmp_path)


@pytest.mark.redis
async def test_healthy_is_who_announces_itself_from_the_process_we_found(
    redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch, small_run: Callable[[], Awaitable[object]]
):
    monkeypatch.setattr(up_main, "_HEALTH_S", 1.0)
    await small_run()
    await Presence(redis, keys, "producer", ProducerStatus).beat("producer-0", ProducerStatus(producer_id="producer-0", pid=4242), ttl_s=600.0)
    await Presence(redis, keys, RELAY, RelayStatus).beat("relay", RelayStatus(relay_id="relay", folder="", pid=4244), ttl_s=600.0)
    server = WeightServerStatus(server_id="server", url="", device="cpu", backend="gloo", pid=4245)
    await Presence(redis, keys, WEIGHT_SERVER, WeightServerStatus).beat("server", server, ttl_s=600.0)
    source = PictureSource(redis, keys)
    healthy = {Child(Role.PRODUCER, 0): 4242, Child(Role.RELAY): 4244, Child(Role.WEIGHT_SERVER): 4245}
    assert await up_main._healthy(source, {**healthy, Child(Role.PRODUCER, 1): 4243, Child(Role.REDIS): 1}) == set(healthy)


async def test_one_up_a_folder(tmp_path: Path):
    import fcntl

    path = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".up.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `rollstream up` holds"):
            await up(UpOptions(config=str(path), resume=False))
