from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from producer.engine import host, key
from producer.engine.client import EngineClient, Sampling
from producer.engine.embedded import weights
from producer.engine.embedded.worker import Worker
from producer.engine.host import EngineHostConfig, run_host
from producer.engine.hosted import EngineFault
from protocol.config import validate
from protocol.errors import ApplyFailed, ConfigError, SampleFailed
from protocol.messages import EngineState, ProducerStatus
from protocol.presence import Presence
from tests.weightsync.served_rig import served_rig
from weightsync import config as config_of_weights
from weightsync.aim import EVAL_FLEET, Aim
from weightsync.config import relay_folder, store_folder
from weightsync.control import EngineControl

from .conftest import written_logprobs
from .hosting import WAIT_S, Run, ask, start_process


async def test_an_engine_becomes_routable_with_the_newest_version_follows_it_and_leaves(run: Run, session: aiohttp.ClientSession, model_b: Path):
    from transformers import AutoModelForCausalLM

    stop = asyncio.Event()
    async with run.hosted(stop) as task:
        (starting,) = await run.until(lambda engines: len(engines) == 1)
        assert (starting.state, starting.version, starting.engine_id) == (EngineState.STARTING, None, f"{run.keys.run}-engine-0")
        assert await run.registry.routable() == []
        await run.create()
        first = await run.publish(model_b)
        engine = await run.serving(first)
        assert (engine.kind, engine.capacity) == ("embedded", 4)
        generation = await ask(session, engine, "one")
        assert generation.weight_version == first
        own = written_logprobs(AutoModelForCausalLM.from_pretrained(model_b), [1, 7, 9], generation.output_ids.tolist())
        assert abs(generation.logprobs - own.numpy()).max() < 1e-4
        second = await run.publish(model_b)
        assert second > first
        assert (await ask(session, await run.serving(second), "two")).weight_version == second
        stop.set()
        await task
        assert await run.registry.engines() == []


async def test_engines_move_one_by_one_and_both_serve_what_they_have(run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path):
    """Engine 1 may not update again for an hour after its first version; engine 0 goes on alone, and both answer, each with its own version."""
    from transformers import AutoModelForCausalLM

    await run.create()
    stop = asyncio.Event()
    async with run.two_hosted(stop, stop, weights={"min_interval_s": 3600.0}):
        first = await run.publish(model_a)
        await run.until(lambda engines: [engine.version for engine in engines] == [first, first])
        second = await run.publish(model_b)
        engines = await run.until(lambda engines: {engine.version for engine in engines} == {first, second})
        assert {engine.engine_id: (engine.version, engine.state) for engine in engines} == {
            f"{run.keys.run}-engine-0": (second, EngineState.ROUTABLE),
            f"{run.keys.run}-engine-1": (first, EngineState.ROUTABLE),
        }
        ahead, behind = sorted(engines, key=lambda engine: engine.engine_id)
        for engine, version, weights in ((ahead, second, model_b), (behind, first, model_a)):
            answer = await ask(session, engine, engine.engine_id)
            assert {span.version for span in answer.spans} == {version}
            own = written_logprobs(AutoModelForCausalLM.from_pretrained(weights), [1, 7, 9], answer.output_ids.tolist())
            assert abs(answer.logprobs - own.numpy()).max() < 1e-4


async def test_requests_under_way_finish_before_the_engine_goes(run: Run, session: aiohttp.ClientSession, model_a: Path):
    await run.create()
    stop = asyncio.Event()
    async with run.hosted(stop):
        engine = await run.serving(await run.publish(model_a))
        under_way = [asyncio.ensure_future(ask(session, engine, f"r{i}", tokens=30)) for i in range(6)]
        known = 0
        while known < len(under_way):  # until the engine has read them all
            async with session.get(engine.url + "/server_info") as answer:
                (state,) = (await answer.json())["internal_states"]
            known = state["num_running_reqs"] + state["num_queue_reqs"] + sum(task.done() for task in under_way)
    assert [len(result.output_ids) for result in await asyncio.gather(*under_way)] == [30] * 6


async def test_it_ends_by_itself_once_the_run_drains_and_the_last_producer_has_left(run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_DRAINED_S", 0.0)
    await run.create()
    producers = Presence(run.client, run.keys, "producer", ProducerStatus)
    await producers.beat("p", ProducerStatus(producer_id="p"), ttl_s=600.0)
    async with run.hosted(asyncio.Event()) as task:
        version = await run.publish(model_a)
        await run.serving(version)
        await run.ledger.drain(version.incarnation, "steps")
        done, _ = await asyncio.wait({task}, timeout=1.5)
        assert not done, "a producer is still there"
        await producers.leave("p")
        async with asyncio.timeout(WAIT_S):
            await task
    assert await run.registry.engines() == []


@pytest.mark.parametrize("own_store", [False, True], ids=["shared memory", "a folder of the user's"])
async def test_the_last_engine_to_leave_a_drained_run_clears_shared_memory_and_nothing_else(
    run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_store: bool
):
    if own_store:
        run.values["weights"]["relay"] = str(tmp_path / "relay")
    else:
        run.values["weights"] = {"store": ""}
        monkeypatch.setattr(config_of_weights, "_SHARED_MEMORY", tmp_path / "shm")
        (tmp_path / "shm").mkdir()
    folder, relay = store_folder(run.config().weights, run.config().run), relay_folder(run.config().weights, run.config().run)
    (relay / "v1-0").mkdir(parents=True)
    monkeypatch.setattr(host, "_DRAINED_S", 0.0)
    await run.create()
    first, second = asyncio.Event(), asyncio.Event()
    async with run.two_hosted(first, second) as (one, other):
        version = await run.publish(model_a)
        await run.until(lambda engines: [engine.version for engine in engines] == [version, version])
        first.set()
        await one
        assert (folder / f"v{version}".replace(":", "-")).is_dir(), "the run goes on"
        await run.ledger.drain(version.incarnation, "steps")
        async with asyncio.timeout(WAIT_S):
            await other
    assert folder.exists() == relay.exists() == own_store


async def test_an_engine_that_leaves_a_drained_run_clears_nothing_that_another_one_serves(
    run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run.values["weights"] = {"store": ""}
    monkeypatch.setattr(config_of_weights, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    folder = store_folder(run.config().weights, run.config().run)
    monkeypatch.setattr(host, "_DRAINED_S", 3600.0)
    await run.create()
    first, second = asyncio.Event(), asyncio.Event()
    async with run.two_hosted(first, second) as (one, other):
        version = await run.publish(model_a)
        await run.until(lambda engines: [engine.version for engine in engines] == [version, version])
        await run.ledger.drain(version.incarnation, "steps")
        first.set()
        await one
        assert folder.exists()
        second.set()
        await other
    assert not folder.exists()


@pytest.mark.faults
@pytest.mark.timeout(500)
async def test_a_killed_host_is_gone_when_its_registration_expires_and_its_successor_is_a_new_engine(run: Run, model_a: Path, tmp_path: Path):
    await run.create()
    version = await run.publish(model_a)
    process = await start_process(run, tmp_path)
    try:
        killed = await run.serving(version)
        assert killed.pid == process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        await process.communicate()
    assert await run.until(lambda engines: not engines) == []
    assert await run.registry.routable() == []
    async with run.hosted(asyncio.Event()):
        successor = await run.serving(version)
        assert successor.engine_id == killed.engine_id
        assert successor.boot_nonce != killed.boot_nonce


async def test_a_process_told_to_stop_exits_0(run: Run, tmp_path: Path):
    process = await start_process(run, tmp_path)
    await run.until(lambda engines: len(engines) == 1)
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert await run.registry.engines() == []


async def test_a_process_with_a_wrong_setting_exits_2_and_says_which(run: Run, tmp_path: Path):
    run.values["model"] = {"path": "/nowhere/model"}
    process = await start_process(run, tmp_path)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert "model.path /nowhere/model: no such folder" in errors.decode()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"redis": {"url": ""}}, r"redis\.url is empty"),
        ({"redis": {"url": "unix:///nowhere/redis.sock"}}, r"redis\.url unix:///nowhere/redis\.sock: no answer"),
        ({"model": {"path": "/nowhere/model"}}, r"model\.path /nowhere/model: no such folder"),
        ({"engine": {"slots": 4, "max_length": 49}}, r"engine\.max_length 49 is below the 50 tokens"),
        ({"engine": {"slots": 4, "max_length": 513}}, r"engine\.max_length 513 exceeds the context of 512"),
    ],
)
async def test_what_cannot_run_is_a_configuration_error_that_says_what_to_do(run: Run, sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        await run_host(run.config(**sections), 0, asyncio.Event())
    assert await run.registry.engines() == []


async def test_a_model_that_cannot_be_loaded_and_a_taken_port_are_configuration_errors(run: Run, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        await run_host(run.config(model={"path": str(tmp_path / "empty")}), 0, asyncio.Event())
    async with await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await run_host(run.config(engine={"port": port}), 0, asyncio.Event())


async def test_each_boot_draws_noise_of_its_own(run: Run, session: aiohttp.ClientSession):
    seeds = []
    for _ in range(2):
        async with run.hosted(asyncio.Event()):
            (engine,) = await run.until(lambda engines: len(engines) == 1)
            async with session.get(engine.url + "/server_info") as answer:
                seeds.append((await answer.json())["random_seed"])
        await run.until(lambda engines: not engines)
    assert seeds[0] != seeds[1]


async def test_an_engine_with_a_key_follows_versions_and_answers_only_who_bears_it(
    run: Run, session: aiohttp.ClientSession, model_b: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(key.VARIABLE, "secret")
    await run.create()
    async with run.hosted(asyncio.Event()):
        version = await run.publish(model_b)
        engine = await run.serving(version)
        with pytest.raises(SampleFailed, match="401"):
            await ask(session, engine, "nobody")
        sampling = Sampling(max_new_tokens=5, ignore_eos=True)
        answer = await EngineClient(session, key.engine_key()).generate(engine.url, [1, 7, 9], sampling=sampling, rid="one", deadline_s=WAIT_S)
        assert answer.weight_version == version


async def test_an_engine_that_takes_updates_and_writes_nothing_ends_its_host_whatever_hangs_in_it(run: Run, model_b: Path, monkeypatch: pytest.MonkeyPatch):
    """Rule W6: an update that was answered proves nothing; a second one without a token after it, and the process goes."""
    ended: list[float] = []
    monkeypatch.setattr(host, "_end_by_force", ended.append)
    monkeypatch.setattr(Worker, "_work", lambda _: time.sleep(0.05))
    await run.create()
    task = asyncio.create_task(run_host(run.config(weights={"apply_deadline_s": 1.0}), 0, asyncio.Event()), name="host")
    await run.publish(model_b)
    with pytest.RaisesGroup(EngineFault, flatten_subgroups=True, allow_unwrapped=True):
        async with asyncio.timeout(WAIT_S):
            await task
    assert ended == [host._END_S], "and by force, if it does not end by itself"
    assert await run.registry.engines() == []


async def test_an_engine_that_hangs_in_an_update_ends_its_host(run: Run, model_b: Path, monkeypatch: pytest.MonkeyPatch):
    """Rule W6: the thread that decodes is stuck in the update itself, so that no call after it is answered."""
    ended: list[float] = []
    stuck, free = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(host, "_end_by_force", ended.append)
    apply = weights.apply

    def hang(*how: Any) -> None:
        stuck.release()
        free.wait()
        apply(*how)

    monkeypatch.setattr(weights, "apply", hang)
    await run.create()
    task = asyncio.create_task(run_host(run.config(weights={"apply_deadline_s": 1.0}), 0, asyncio.Event()), name="host")
    await run.publish(model_b)
    try:
        while not ended:
            await asyncio.wait({task}, timeout=0.05)
            assert not task.done() or ended
    finally:
        free.set()
    assert stuck.acquire(blocking=False)
    with pytest.RaisesGroup(EngineFault, flatten_subgroups=True, allow_unwrapped=True):
        async with asyncio.timeout(WAIT_S):
            await task


async def test_the_engine_waits_for_a_group_as_long_as_the_run_says(run: Run, session: aiohttp.ClientSession):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with run.hosted(asyncio.Event(), weights={"group_deadline_s": 0.25}):
            (engine,) = await run.until(lambda engines: len(engines) == 1)
            with pytest.raises(ApplyFailed, match=r"formed group g within 0\.25 s"):
                await EngineControl(session, engine.url).init_group(
                    master_address="127.0.0.1",
                    master_port=nobody.getsockname()[1],
                    rank_offset=1,
                    world_size=2,
                    group_name="g",
                    backend="gloo",
                    deadline_s=WAIT_S,
                )


async def test_an_engine_that_evaluates_gets_from_the_store_what_the_weight_server_is_past(
    run: Run, session: aiohttp.ClientSession, model_b: Path, redis_url: str
):
    """Whatever way is set: what it is asked for stays, and a server goes on with the newest."""
    await run.create()
    asked, newest = await run.publish(model_b), await run.publish(model_b)
    around = SimpleNamespace(keys=run.keys, redis=run.client, wakes=run.waker, session=session)
    async with served_rig(around, redis_url, run.folder / "store") as served:
        await served.start_server()
        await served.server_status(lambda status: status.staged == newest)
        await Aim(run.client, run.keys).ask(asked)
        async with run.hosted(asyncio.Event(), index=1, weights={"transport": "gloo", "bucket_mb": 1}, eval={"engines": 1}):
            assert (await run.serving(asked)).fleet == EVAL_FLEET
            await Aim(run.client, run.keys).ask(newest)
            await run.serving(newest)
            await run.until(lambda engines: [engine.transport for engine in engines] == ["gloo"])


async def test_a_redis_too_slow_to_say_goodbye_to_costs_a_host_that_stops_nothing(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Its registration runs out by itself; an exit as if by a fault would have it started again."""
    monkeypatch.setattr(host, "_LEAVE_S", 0.0)
    await run.create()
    stop = asyncio.Event()
    async with run.hosted(stop) as task:
        await run.until(lambda engines: len(engines) == 1)
        stop.set()
        await task


def test_the_noise_of_a_boot_follows_from_seed_index_and_nonce():
    seeds = {host._sampling_seed(seed, index, nonce) for seed in (0, 1) for index in (0, 1) for nonce in ("a", "b")}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert host._sampling_seed(7, 1, "a") == host._sampling_seed(7, 1, "a")


def test_a_slot_holds_the_longest_request_of_rollouts_and_evaluation(tmp_path: Path):
    values = {"run": {"name": "r"}, "model": {"path": str(tmp_path)}, "rollout": {"max_prompt_tokens": 10, "max_new_tokens": 5}, "eval": {"max_new_tokens": 9}}
    assert host._longest(validate(EngineHostConfig, values, source="test")) == 19
