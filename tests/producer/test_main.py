"""The daemon as a process: exit codes, messages, and what it leaves in Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from buffer.contract import RunState
from deploy.redis_server import server_command, wait_ready
from protocol.connection import connect
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, wakeups

ROOT = Path(__file__).parents[2]


async def start(config: Path, *arguments: str, piped: bool = False) -> asyncio.subprocess.Process:
    """A producer that logs into a file, or into a pipe to be read by `said`."""
    with config.with_suffix(".log").open("a") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "producer.main", "-c", str(config), *arguments),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE if piped else log,
        )


async def said(process: asyncio.subprocess.Process, words: str) -> None:
    """Returns once the producer has logged `words`."""
    assert process.stderr is not None
    async with asyncio.timeout(300):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, f"ended without saying {words!r}"


async def end(stage: Any, process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and messages."""
    log = stage.folder / "run.log"
    try:
        async with asyncio.timeout(300):
            code = await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        pytest.fail(f"did not end: {log.read_text()}")
    return code, log.read_text() if process.stderr is None else (await process.stderr.read()).decode()


async def until(stage: Any, condition: Any, *topics: Topic) -> Any:
    """The status of the ledger once `condition(status)` holds."""
    async with asyncio.timeout(300):
        while True:
            mark = stage.wakeups.mark(*topics)
            status = await stage.ledger.status()
            if condition(status):
                return status
            await stage.wakeups.wait(*topics, since=mark, timeout_s=0.2)


async def test_it_fills_the_buffer_and_on_sigterm_gives_back_what_it_cannot_finish(stage: Any) -> None:
    await stage.create(stage.config(), pipeline_depth=1.0)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang" if len(engine.requests) > 4 else "ok"
    process = await start(stage.file(producer={"drain_seconds": 0.2}), "--index", "3")

    await until(stage, lambda status: status.ready == 2 and status.generating == 2, Topic.READY)
    process.send_signal(signal.SIGTERM)
    code, messages = await end(stage, process)

    assert code == 0, messages
    status = await stage.ledger.status()
    assert (status.ready, status.generating, status.released) == (2, 0, 2)
    assert {event["reason"] for event in await stage.audit("released")} == {"given_back"}
    assert [event["producer_id"] for event in await stage.audit("put")] == ["producer-3"] * 2
    assert await Presence(stage.redis, stage.keys, "producer", ProducerStatus).members() == []


async def test_groups_under_way_at_sigterm_are_finished_within_the_drain(stage: Any) -> None:
    await stage.create(stage.config(), pipeline_depth=0.5)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    process = await start(stage.file(producer={"drain_seconds": 20.0}))

    await until(stage, lambda status: status.generating == 2, Topic.READY)
    await engine.arrived.wait()
    process.send_signal(signal.SIGTERM)
    engine.go.set()
    code, messages = await end(stage, process)

    assert code == 0, messages
    status = await stage.ledger.status()
    assert (status.generating, status.released) == (0, 0)
    assert status.ready >= 2


async def test_it_waits_for_the_run_and_ends_with_it(stage: Any) -> None:
    config = stage.config()
    engine = await stage.engine("a")
    process = await start(stage.file(), "--index", "0", piped=True)
    presence = Presence(stage.redis, stage.keys, "producer", ProducerStatus)
    await said(process, "waiting: ")
    assert [str(member.waiting_for) for member in await presence.members()] == ["no run"]

    await stage.create(config)
    await until(stage, lambda status: status.ready == 5, Topic.READY)
    await stage.ledger.drain(1, "test")
    code, messages = await end(stage, process)

    assert code == 0, messages
    assert len(engine.requests) == 10
    status = await stage.ledger.status()
    assert (status.state, status.generating) == (RunState.DRAINING, 0)
    assert await presence.members() == []


async def test_a_run_with_another_group_size_is_not_joined(stage: Any) -> None:
    await stage.create(stage.config())
    before = {key: await stage.redis.dump(key) async for key in stage.redis.scan_iter(match=stage.keys.key("*"))}
    code, messages = await end(stage, await start(stage.file(rollout={"group_size": 4})))

    assert code == 2
    assert "rollout.group_size: the run has 2, this process 4" in messages
    assert "Traceback" not in messages
    assert {key: await stage.redis.dump(key) async for key in stage.redis.scan_iter(match=stage.keys.key("*"))} == before


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"redis": {"url": "unix:///nowhere/redis.sock"}}, "redis.url unix:///nowhere/redis.sock: no answer"),
        ({"producer": {"max_inflight_group": 3}}, "did you mean producer.max_inflight_groups?"),
        ({"data": {"path": "missing.jsonl"}}, "data.path missing.jsonl"),
        ({"reward": {"kind": "function", "function": "nowhere:score"}}, "reward.function nowhere:score: cannot import nowhere"),
        ({"run": {"name": "a b"}}, "run.name 'a b'"),
    ],
)
async def test_bad_input_ends_with_2_and_a_message_and_writes_nothing(stage: Any, sections: Any, expected: str) -> None:
    code, messages = await end(stage, await start(stage.file(**sections)))
    assert code == 2, messages
    assert expected in messages
    assert "Traceback" not in messages
    assert [key async for key in stage.redis.scan_iter(match=f"*{stage.keys.run}*")] == []


async def test_the_first_evaluation_comes_before_any_group_and_the_final_one_after_the_end(stage: Any, tmp_path: Path) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"?{i}", "label": label}) + "\n" for i, label in enumerate(["1234", "no", "1234", "no"])))
    sections = {"eval": {"path": str(held_out), "every_seconds": 3600.0}}
    await stage.create(stage.config(**sections))
    engine = await stage.engine("a")
    first, second = await start(stage.file(**sections), "--index", "0"), await start(stage.file(**sections), "--index", "1")

    await until(stage, lambda status: status.ready == 5, Topic.READY)
    await stage.ledger.drain(1, "test")
    codes = [await end(stage, process) for process in (first, second)]

    assert [code for code, _ in codes] == [0, 0], codes
    evaluations = await stage.audit("eval")
    assert [(e["phase"], e["samples"], e["reward"], e["exact"], e["versions"]) for e in evaluations] == [
        ("first", 4, 0.5, 0.5, ["1:0"]),
        ("final", 4, 0.5, 0.5, ["1:0"]),
    ]
    temperatures = [request["sampling_params"]["temperature"] for request in engine.requests]
    assert temperatures == [0.0] * 4 + [1.0] * 10 + [0.0] * 4
    audit = [fields[b"op"].decode() for _, fields in await stage.redis.xrange(stage.keys.audit)]
    assert audit.index("eval") < audit.index("reserved")


class OwnRedis:
    """A server of the test's own, to be killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        self.command = server_command(folder)
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.process = subprocess.Popen(self.command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        await wait_ready(self.command.url)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None


@pytest_asyncio.fixture
async def own_redis() -> AsyncIterator[OwnRedis]:
    with tempfile.TemporaryDirectory(prefix="rs-own-") as folder:
        server = OwnRedis(Path(folder))
        await server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.faults
@pytest.mark.timeout(500)
async def test_groups_finished_while_redis_is_away_are_put_when_it_is_back_and_a_longer_outage_ends_the_process(own_redis: OwnRedis, make_stage: Any) -> None:
    url, keys = own_redis.command.url, Keys("outage")
    client = connect(url, deadline_s=60.0)
    async with wakeups(client, keys) as waker, aiohttp.ClientSession() as session:
        stage = make_stage(redis=client, keys=keys, url=url, waker=waker, session=session)
        try:
            await stage.create(stage.config(), pipeline_depth=1.0)
            engine = await stage.engine("a")
            engine.behave = lambda _: "hang"
            process = await start(stage.file(redis={"deadline_s": 15.0}))
            await until(stage, lambda status: status.generating == 2, Topic.READY)
            await engine.arrived.wait()

            own_redis.kill()
            engine.go.set()
            await own_redis.start()
            await until(stage, lambda status: status.ready == 4 and status.generating == 0, Topic.READY)
            assert sorted(event["seq"] for event in await stage.audit("put")) == [0, 1, 2, 3]
            assert await stage.audit("released") == []

            own_redis.kill()
            code, messages = await end(stage, process)
            assert code == 75, messages
            assert "Traceback" not in messages
        finally:
            await stage.close()
            await client.aclose()
