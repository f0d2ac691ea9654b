"""`rollstream runs list` and `delete`: what is there, who is alive, and what a deletion leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from deploy.cli import main
from deploy.runs import _OfRun, look, run_names
from protocol.config import load
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import ProducerStatus, TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import relay_folder
from weightsync.registry import Registry

from .conftest import SETTINGS, manifest

pytestmark = pytest.mark.redis
Make = Callable[[], Awaitable[RedisLedger]]


@pytest.fixture
def ask(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """`rollstream runs …` on the test's Redis: exit code, output, errors."""

    async def run(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["runs", *words, "--redis", redis_url])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


async def leave(client: Client, keys: Keys) -> None:
    """Everybody leaves the run in good order."""
    await Presence(client, keys, "producer", ProducerStatus).leave("producer-0")
    await Presence(client, keys, "trainer", TrainerStatus).leave("trainer")
    for index in (0, 1):
        await Registry(client, keys).leave(f"engine-{index}", f"nonce-{index}")


async def test_the_list_has_every_run_with_who_is_alive_and_when_it_moved(redis: Client, keys: Keys, small_run: Make, ask: Any):
    await small_run()
    empty = Keys(f"{keys.run}.ended")
    await RedisLedger(redis, empty).create((await RedisLedger(redis, keys).about())[0], SETTINGS)
    code, said, _ = await ask("list", "--json")
    lines = {line["run"]: line for line in json.loads(said)}
    assert code == 0
    mine, other = lines[keys.run], lines[empty.run]
    assert (mine["state"], mine["trained"], mine["outstanding"]) == ("open", 1, 1)
    assert (mine["trainers"], mine["producers"], mine["engines"], mine["shadows"]) == (1, 1, 2, 0)
    assert mine["bytes"] == (await RedisLedger(redis, keys).status()).bytes_used > 0
    assert time.time() - 3600 < mine["moved_at"] <= time.time() + 2
    assert (other["trained"], other["trainers"], other["engines"]) == (0, 0, 0)
    code, said, _ = await ask("list")
    assert "1 trainer, 1 producer, 2 engines" in " ".join(said.split())


async def test_a_trimmed_stream_still_says_when_the_run_moved(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    moved = (await look(redis, keys)).moved_at
    await redis.xtrim(keys.audit, maxlen=0, approximate=False)
    assert (await look(redis, keys)).moved_at == moved is not None


async def test_a_run_that_cannot_be_read_hides_no_other(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    await redis.hset(keys.state, "run_state", "of a newer release")
    assert "cannot be read" in (await look(redis, keys)).problem
    assert keys.run in await run_names(redis)


async def test_a_live_run_is_not_deleted_unless_forced(redis: Client, keys: Keys, small_run: Make, ask: Any):
    await small_run()
    other = Keys(f"{keys.run}-other")
    await RedisLedger(redis, other).create((await RedisLedger(redis, keys).about())[0], SETTINGS)
    code, _, told = await ask("delete", keys.run)
    assert code == 2
    assert "1 trainer, 1 producer, 2 engines alive in it" in told
    assert await redis.exists(keys.state)
    code, said, _ = await ask("delete", keys.run, "--force")
    assert code == 0
    assert "keys deleted from Redis" in said
    assert [key async for key in redis.scan_iter(match=f"*{keys.run}[:}}]*")] == []
    assert other.run in await run_names(redis), "a run whose name begins alike is another"
    code, _, told = await ask("delete", keys.run)
    assert (code, "is not in this Redis" in told) == (2, True)


async def test_files_go_only_when_asked_for_and_never_the_runs_own_folder(redis: Client, keys: Keys, tmp_path: Path, small_run: Make, ask: Any):
    await small_run()
    await leave(redis, keys)
    store, foreign = tmp_path / "store" / keys.run, tmp_path / "precious"
    places = [store / "1-1", tmp_path / "spill" / keys.run / "steps", tmp_path / "blobs" / keys.run / "1-1-t", tmp_path / "blobs" / "other"]
    for place in (*places, foreign):
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"x")
    settings = SETTINGS.model_copy(update={"spill": str(tmp_path / "spill"), "blobs": str(tmp_path / "blobs")})
    await redis.hset(keys.state, "settings", settings.model_dump_json())
    newest = dataclasses.replace(manifest(Version(1, 1)), location=str(store / "1-1"))
    await redis.delete(keys.weights)
    await Channel(redis, keys).publish(newest, 1)

    kept = await redis.dump(keys.state), await redis.dump(keys.weights)
    code, said, _ = await ask("delete", keys.run)
    assert code == 0
    assert all(f"{where}: left (--files deletes it)" in said for where in (store, tmp_path / "spill" / keys.run, tmp_path / "blobs" / keys.run))
    assert all((place / "file").exists() for place in places)

    for key, value in zip((keys.state, keys.weights), kept, strict=True):
        await redis.restore(key, 0, value)
    code, said, _ = await ask("delete", keys.run, "--files")
    assert code == 0
    assert said.count("1 files deleted") == 3
    assert "its folder with checkpoints and records is left" in said
    assert [(place / "file").exists() for place in places] == [False, False, False, True]

    await redis.restore(keys.state, 0, kept[0])
    await redis.delete(keys.weights)
    await Channel(redis, keys).publish(dataclasses.replace(newest, location=str(foreign / "1-1")), 1)
    await ask("delete", keys.run, "--files")
    assert (foreign / "file").exists(), "a folder that is not named after the run is somebody else's"


@pytest.mark.parametrize("weights", ['relay = "{folder}/copies"', ""], ids=["chosen", "shared memory"])
async def test_this_machines_copies_go_with_the_files_and_what_is_behind_a_url_is_named(
    redis: Client, redis_url: str, keys: Keys, tmp_path: Path, small_run: Make, capsys: pytest.CaptureFixture[str], weights: str
):
    await small_run()
    await leave(redis, keys)
    await redis.delete(keys.weights)
    await Channel(redis, keys).publish(dataclasses.replace(manifest(Version(1, 1)), location=f"s3://bucket/weights/{keys.run}/v1-1"), 1)
    path = tmp_path / "run.toml"
    lines = weights.format(folder=tmp_path)
    path.write_text(f'[run]\nname = "{keys.run}"\ndir = "{tmp_path}/run"\n[redis]\nurl = "{redis_url}"\n[weights]\n{lines}\n')
    config = load(_OfRun, str(path))
    copies, others = relay_folder(config.weights, config.run), tmp_path / "copies" / "other-relay"
    for place in (copies, others):
        (place / "v1-1").mkdir(parents=True)
        (place / "v1-1" / "model.safetensors").write_bytes(b"x")
    kept = await redis.dump(keys.state), await redis.dump(keys.weights)
    stays = f"weights s3://bucket/weights/{keys.run}: left"

    async def again(*words: str) -> str:
        for key, value in zip((keys.state, keys.weights), kept, strict=True):
            await redis.restore(key, 0, value, replace=True)
        assert await asyncio.to_thread(main, ["runs", "delete", keys.run, *words]) == 0
        return capsys.readouterr().out

    try:
        said = await again("--files", "--redis", redis_url)
        assert stays in said
        assert "copies of weights on machines with engines: left" in said
        said = await again("-c", str(path))
        assert f"copies of weights on this machine {copies}: left (--files deletes it)" in said
        foreign = await again("--files", "-c", str(path), "--set", "run.name=other")
        assert "on machines with engines: left" in foreign, "the file of another run tells nothing of this one's"
        assert copies.is_dir()
        said = await again("--files", "-c", str(path))
        assert stays in said
        assert f"copies of weights on this machine {copies}: 1 files deleted" in said
        assert (copies.exists(), others.exists()) == (False, True)
    finally:
        shutil.rmtree(copies, ignore_errors=True)


async def test_what_a_run_has_left_without_its_state_can_be_deleted_too(redis: Client, keys: Keys, ask: Any):
    await redis.set(keys.payload(3, 1, "t"), b"left by a fork that was killed")
    code, said, _ = await ask("delete", keys.run)
    assert code == 0
    assert "1 keys that had been left of it are deleted" in said


def test_one_of_file_and_url_is_asked_for(capsys: pytest.CaptureFixture[str]):
    for words in (["list"], ["list", "-c", "x.toml", "--redis", "unix:///nowhere"]):
        with pytest.raises(SystemExit) as left:
            main(["runs", *words])
        assert left.value.code == 2
        assert "--redis" in capsys.readouterr().err


async def test_a_file_names_its_redis(redis_url: str, keys: Keys, tmp_path: Path, small_run: Make, capsys: pytest.CaptureFixture[str]):
    await small_run()
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{keys.run}"\n[redis]\nurl = "{redis_url}"\n')
    assert await asyncio.to_thread(main, ["runs", "list", "--json", "-c", str(path)]) == 0
    assert keys.run in [line["run"] for line in json.loads(capsys.readouterr().out)]
