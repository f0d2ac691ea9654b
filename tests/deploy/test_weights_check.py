"""`rollstream weights check` against a live engine, and one that was tampered with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from deploy import weights_check
from deploy.cli import main
from deploy.weights_check import Row
from producer.engine.host import EngineHostConfig, run_host
from producer.engine.key import ADMIN_VARIABLE, VARIABLE
from protocol.config import load
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import EngineId, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, wakeups
from tests.producer.engine.conftest import write_model
from weightsync.channel import Channel
from weightsync.control import EngineControl
from weightsync.equality import Finding, Verdict
from weightsync.publisher import Publisher
from weightsync.registry import Registry
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import open_store

pytestmark = pytest.mark.redis
_WAIT_S = 60.0


def write_run(folder: Path, url: str, keys: Keys, model: Path, **changes: str) -> Path:
    sections = {
        "run": f'name = "{keys.run}"\ndir = "{folder}/run"',
        "redis": f'url = "{url}"',
        "model": f'path = "{model}"',
        "rollout": "max_prompt_tokens = 8\nmax_new_tokens = 8",
        "engine": 'slots = 2\ndtype = "float32"',
        "weights": "",
    } | changes
    sections["weights"] += f'\nstore = "{folder}/store"\nrelay = "{folder}/relay"'
    path = folder / "run.toml"
    path.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
    return path


def changed(model: Path, *, elements: int) -> dict[str, TensorBytes]:
    """The model's weights with the first few elements of each tensor set to 3."""
    with open_tensors(model / "model.safetensors") as tensors:
        arrays = {name: (tensor.shape, np.frombuffer(bytes(tensor.data), dtype="<f4").copy()) for name, tensor in tensors.items()}
    for _, array in arrays.values():
        array[:elements] = 3.0
    return {name: TensorBytes(dtype="F32", shape=shape, data=array.tobytes()) for name, (shape, array) in arrays.items()}


@contextlib.asynccontextmanager
async def served(path: Path, client: Client, keys: Keys) -> AsyncIterator[EngineStatus]:
    """An engine host that serves 1:1, which differs from the model it started with in one element of each tensor."""
    config = load(EngineHostConfig, str(path))
    ledger, channel, registry = RedisLedger(client, keys), Channel(client, keys), Registry(client, keys)
    await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="d", tokenizer="t"), BufferConfig())
    incarnation = (await ledger.attach(None, trainer_id="t")).incarnation
    store = open_store(config.weights, config.run, config.model.path)
    stop = asyncio.Event()
    async with wakeups(client, keys) as waker, Publisher(channel, store, config=config.weights) as publisher:
        for n in range(2):
            await client.hset(keys.state, "trained", n)
            publisher.submit(Snapshot(version=Version(incarnation, n), tensors=changed(Path(config.model.path), elements=n)), incarnation)
            await publisher.drain(_WAIT_S)
        host = asyncio.create_task(run_host(config, 0, stop), name="host")
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    mark = waker.mark(Topic.ENGINES)
                    if host.done():
                        await host
                    if engines := [one for one in await registry.routable() if one.version == Version(incarnation, 1)]:
                        break
                    await waker.wait(Topic.ENGINES, since=mark)
            yield engines[0]
        finally:
            stop.set()
            await host


async def check(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, list[dict[str, Any]]]:
    code = await asyncio.to_thread(main, ["weights", "check", "--json", "-c", str(path)])
    return code, json.loads(capsys.readouterr().out)["engines"]


@pytest.mark.parametrize(
    ("weights", "dtype", "keys_of_engines"),
    [
        ("", "float32", ("", "")),
        ('transport = "delta"', "bfloat16", ("user", "")),
        ('transport = "delta"\ndtype = "bfloat16"', "float32", ("user", "admin")),
    ],
    ids=["as published", "a delta, in the engine's own type", "published in a smaller type"],
)
async def test_an_engine_is_compared_with_what_was_published_and_a_change_is_named(
    weights: str,
    dtype: str,
    keys_of_engines: tuple[str, str],
    redis: Client,
    redis_url: str,
    keys: Keys,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    user, admin = keys_of_engines
    monkeypatch.setenv(VARIABLE, user)
    monkeypatch.setenv(ADMIN_VARIABLE, admin)
    model = write_model(tmp_path / "model", seed=1)
    path = write_run(tmp_path, redis_url, keys, model, weights=weights, engine=f'slots = 2\ndtype = "{dtype}"')
    async with served(path, redis, keys) as engine, aiohttp.ClientSession() as session:
        capsys.readouterr()
        right = {"engine_id": engine.engine_id, "version": "1:1", "verdict": "same", "why": "", "lag_steps": 0, "trouble": ""}
        assert await check(capsys, path) == (0, [right])
        await EngineControl(session, engine.url, api_key=user, admin_key=admin).update_from_disk(str(model), "1:1", deadline_s=60.0)
        code, (found,) = await check(capsys, path)
        assert (code, found["verdict"]) == (1, "differs")
        assert "the first model." in found["why"]
        shutil.rmtree(tmp_path / "store")
        code, (found,) = await check(capsys, path)
        assert (code, found["verdict"]) == (0, "alone")
        assert found["why"].startswith("not compared: ")


@pytest.mark.parametrize(
    ("verdict", "trouble", "code"),
    [
        (Verdict.SAME, "", 0),
        (Verdict.AGREE, "", 0),
        (Verdict.ALONE, "", 0),
        (Verdict.DIFFERS, "", 1),
        (Verdict.UNKNOWN, "", 1),
        (Verdict.SAME, "No space left on device", 1),
    ],
)
def test_what_is_not_proven_is_said_and_only_what_is_wrong_fails(
    verdict: Verdict, trouble: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def found(_config: object, _url: str, told: Callable[[Row], None]) -> list[Row]:
        rows = [
            Row(finding=Finding(engine_id=EngineId("e0"), version="1:2", verdict=Verdict.SAME), lag_steps=0),
            Row(finding=Finding(engine_id=EngineId("e1"), version="1:2", verdict=verdict, why="as it is"), lag_steps=4, trouble=trouble),
        ]
        for row in rows:
            told(row)
        return rows

    monkeypatch.setattr(weights_check, "check_run", found)
    path = write_run(tmp_path, "unix:///nowhere", Keys("r"), tmp_path)
    assert main(["weights", "check", "-c", str(path)]) == code
    heading, first, second = (line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines())
    assert heading == ["engine", "version", "verdict", "behind", "why"]
    assert first == ["e0", "1:2", "same", "0", "-"]
    assert second == ["e1", "1:2", verdict.value, "4", f"as it is; trouble: {trouble}" if trouble else "as it is"]


@pytest.mark.parametrize(
    ("trained", "trouble", "code", "says"),
    [
        (1, "", 0, ""),
        (1, "prepare 1:9: No space left on device", 1, "prepare 1:9: No space left on device"),
        (9, "", 0, ""),
        (10, "", 1, "more than buffer.max_staleness 8 behind, and it reports no trouble: look at its log"),
    ],
)
async def test_an_engine_that_holds_what_it_says_and_is_left_behind_is_flagged(
    trained: int, trouble: str, code: int, says: str, redis: Client, redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It serves 1:1; K is 8: what it writes nine steps later is in no loss."""
    path = write_run(tmp_path, redis_url, keys, write_model(tmp_path / "model", seed=1))
    async with served(path, redis, keys) as engine:
        await redis.hset(keys.state, "trained", trained)
        registry = Registry(redis, keys)
        gone = dataclasses.replace(engine, engine_id=EngineId("z-copy"), boot_nonce="z", trouble=trouble)
        await registry.beat(gone, ttl_s=600.0)
        await registry.ack("z-copy", "z", Version(1, 1))
        capsys.readouterr()
        found, rows = await check(capsys, path)
    assert found == code
    assert [row["verdict"] for row in rows] == ["same", "same"]
    assert (rows[1]["lag_steps"], rows[1]["trouble"]) == (trained - 1, says)


async def test_without_engines_nothing_is_proven_and_without_a_run_it_says_so(
    redis: Client, redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_run(tmp_path, redis_url, keys, tmp_path)
    assert await asyncio.to_thread(main, ["weights", "check", "-c", str(path)]) == 2
    assert f"there is no run {keys.run!r}" in capsys.readouterr().err
    await RedisLedger(redis, keys).create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="d", tokenizer="t"), BufferConfig())
    assert await asyncio.to_thread(main, ["weights", "check", "-c", str(path)]) == 1
    assert "no engine is registered, so nothing was checked" in capsys.readouterr().err
    assert await check(capsys, path) == (1, [])


async def test_who_has_answered_is_told_while_another_is_waited_for_and_stays_told_when_the_asker_gives_up(
    redis: Client, redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_run(tmp_path, redis_url, keys, write_model(tmp_path / "model", seed=1))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nobody reads from them
        async with served(path, redis, keys) as engine:
            port = silent.getsockname()[1]
            last = dataclasses.replace(engine, engine_id=EngineId("z-silent"), boot_nonce="z", url=f"http://127.0.0.1:{port}")
            gone = dataclasses.replace(engine, engine_id=EngineId("a-gone"), boot_nonce="a", url="http://127.0.0.1:1")
            for one in (last, gone):
                await Registry(redis, keys).beat(one, ttl_s=600.0)
            capsys.readouterr()
            config = load(weights_check.WeightsCheckConfig, str(path))
            asked = asyncio.create_task(weights_check.check_run(config, redis_url, weights_check._Lines()))
            said = rows = ""
            async with asyncio.timeout(_WAIT_S):
                while f"asking http://127.0.0.1:{port}" not in said:
                    assert not asked.done()
                    await asyncio.sleep(0.01)
                    wrote = capsys.readouterr()
                    said, rows = said + wrote.err, rows + wrote.out
            verdicts = [line.split()[:3] for line in rows.splitlines()]
            assert verdicts == [["engine", "version", "verdict"], ["a-gone", "-", "unknown"], [engine.engine_id, "1:1", "same"]]
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            lines = [line for line in said.splitlines() if line.startswith(("a-gone", engine.engine_id, "z-silent"))]
            assert [line.split(" after ")[0].split(": asking")[0] for line in lines] == [
                "a-gone (1 of 3)",
                "a-gone: none",
                f"{engine.engine_id} (2 of 3)",
                f"{engine.engine_id}: checksums",
                "z-silent (3 of 3)",
            ]
