"""An engine over several machines. In SGLang's place are programs that do nothing, or answer as it does; machines are hosts in this process."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from producer.engine import host, node, nodes
from producer.engine.host import EngineHostConfig
from producer.engine.hosted import Meeting
from producer.engine.node import run_node
from producer.engine.nodes import NodeCall, Nodes, NodeStatus, RollCall
from producer.engine.sglang import engine, watch
from protocol.config import validate
from protocol.errors import ConfigError, TransportFailed
from protocol.messages import EngineId, EngineState
from tests.producer.engine.hosting import Run

ENGINE = EngineId("e")
IDLE = '#!/bin/sh\necho part $$ "$@"\nexec sleep 600\n'
SERVER = f"""#!{sys.executable}
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
given = dict(zip(sys.argv[2::1], sys.argv[3::1]))
host, port = given["--dist-init-addr"].rsplit(":", 1)
print("part", os.getpid(), *sys.argv[2:], flush=True)
async def main():
    if given["--node-rank"] != "0":
        while True:
            try:
                await asyncio.open_connection(host, int(port))
                break
            except OSError:
                await asyncio.sleep(0.05)
        await asyncio.Event().wait()
    from producer.engine.embedded.model import load
    from producer.engine.embedded.server import EmbeddedEngine
    met = asyncio.Event()
    async with await asyncio.start_server(lambda *_: met.set(), host, int(port)):
        await met.wait()
        model = load(given["--model-path"], slots=4, max_length=64, wanted=64, dtype="float32")
        async with EmbeddedEngine(model, weight_version=given["--weight-version"], port=int(given["--port"]), seed=1):
            await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ((host, "_REST_S", 0.05), (watch, "_LOOK_S", 0.1), (engine, "_KNOCK_S", 0.05), (engine, "_GRACE_S", 1.0), (engine, "_NODE_GRACE_S", 0.1))
    for where, name, value in (*changes, (node, "_GONE_S", 0.2), (node, "BEAT_S", 0.05)):
        monkeypatch.setattr(where, name, value)


def test_the_worked_example_holds():
    assert doctest.testmod(nodes).failed == 0


def status(**changes: Any) -> NodeStatus:
    plain = NodeStatus(engine_id=ENGINE, rank=1, boot_nonce="b", ended="", look="", seen="", host="h", pid=1, started="s")
    return replace(plain, **changes)


def test_a_life_is_over_with_the_server_of_any_node_and_not_for_one_of_an_earlier_life():
    roll = RollCall(nodes=3, boot_nonce="b")
    assert roll.seen([status(boot_nonce="before", ended="killed"), status(rank=7, ended="killed")], now=0.0) == ""
    assert roll.missing == [1, 2]
    assert roll.seen([status(), status(rank=2, ended="SGLang ended")], now=1.0) == "node 2 (on h): SGLang ended"


def test_a_life_is_over_with_a_host_that_was_started_again_however_quickly():
    roll = RollCall(nodes=2, boot_nonce="b")
    assert [roll.seen([status()], now=now) for now in (0.0, 1.0)] == ["", ""]
    assert roll.seen([status(started="t")], now=2.0) == "node 1 (on h) was started again"


def test_time_in_which_nobody_could_look_is_no_nodes_silence():
    roll = RollCall(nodes=2, boot_nonce="b")
    assert roll.seen([status()], now=0.0) == ""
    assert roll.seen([], now=15.0) == "", "Redis was away until now"
    assert roll.seen([], now=17.0) == ""
    assert roll.seen([], now=18.1) == "node 1 (on h) has not been heard of"


def test_what_nodes_see_differs_by_names_and_sizes(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert nodes.mark(str(one)) == ""
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"12345")
    assert nodes.mark(str(one)) == nodes.mark(str(other)) != ""
    (other / "model.safetensors").write_bytes(b"1234")
    assert nodes.mark(str(one)) != nodes.mark(str(other))


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def two_nodes(python: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"kind": "sglang", "device": "cpu", "python": python, "slots": 4, "tp": 2, "nodes": 2} | more}


def parts(run: Run, name: str) -> list[list[str]]:
    """The words of each start so far: its pid first."""
    path = run.config().run.folder / "logs" / name
    return [line.split()[1:] for line in path.read_text().splitlines() if line.startswith("part ")] if path.exists() else []


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(100):
        while not (answer := found()):
            await asyncio.sleep(0.02)
    return answer


class Node0:
    """The other side of a host of node 1, by hand."""

    def __init__(self, run: Run, sections: dict[str, Any]) -> None:
        self._calls, self._statuses = nodes.calls(run.client, run.keys), nodes.statuses(run.client, run.keys)
        config = run.config(**sections)
        kind = host.kind_of(config, 0)
        assert isinstance(kind, engine.SGLangServer)
        self.id, self._alike = host.engine_id(config.run, 0), kind.alike

    async def call(self, boot_nonce: str, **changes: Any) -> None:
        plain = NodeCall(engine_id=self.id, boot_nonce=boot_nonce, address="127.0.0.1:9", nodes=2, alike=self._alike, look="", host=socket.gethostname())
        await self._calls.beat(self.id, replace(plain, **changes), ttl_s=600.0)

    async def told(self, found: Callable[[NodeStatus], bool]) -> NodeStatus:
        async with asyncio.timeout(100):
            while True:
                for one in await self._statuses.members():
                    if found(one):
                        return one
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def node_1(run: Run, sections: dict[str, Any], stop: asyncio.Event) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run_node(run.config(**sections), 0, 1, stop), name="node")
    try:
        yield task
    finally:
        stop.set()
        await task


def alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_node_has_one_server_for_each_life_and_tells_how_it_ended(run: Run, tmp_path: Path):
    sections, stop = two_nodes(program(tmp_path, IDLE)), asyncio.Event()
    node_0, log = Node0(run, sections), "sglang-0-node-1.log"
    await node_0.call("one")
    async with node_1(run, sections, stop):
        await node_0.told(lambda one: one.boot_nonce == "one")
        first, *words = (await until(lambda: parts(run, log)))[0]
        given = dict(zip(words, [*words[1:], ""], strict=True))
        assert {name: given[name] for name in ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size", "--weight-version")} == {
            "--nnodes": "2",
            "--node-rank": "1",
            "--dist-init-addr": "127.0.0.1:9",
            "--tp-size": "2",
            "--weight-version": "boot:one",
        }
        await node_0.call("two")
        second = (await until(lambda: len(found := parts(run, log)) == 2 and found))[1][0]
        assert not alive(first), "two lives would want the same GPUs"
        os.kill(int(second), signal.SIGKILL)
        told = await node_0.told(lambda one: one.boot_nonce == "two" and bool(one.ended))
        assert told.ended.startswith("SGLang was killed by signal 9")
        await asyncio.sleep(0.2)
        assert len(parts(run, log)) == 2, "a group takes nobody back: it waits for the next life"
        await node_0.call("three")
        third = (await until(lambda: len(found := parts(run, log)) == 3 and found))[2][0]
        stop.set()
        assert (await node_0.told(lambda one: one.boot_nonce == "three" and bool(one.ended))).ended == "its host was stopped"
    assert not alive(third)


async def test_a_version_is_not_loaded_before_every_node_sees_its_files(run: Run, tmp_path: Path):
    sections, shared = two_nodes(program(tmp_path, IDLE)), tmp_path / "1:1"
    node_0 = Node0(run, sections)
    meeting = Meeting(address="127.0.0.1:9", nodes=2, alike=node_0._alike)
    leader = Nodes(run.client, run.keys, engine_id=node_0.id, index=0, boot_nonce="one", meeting=meeting)
    await leader.beat()
    assert "run `rollstream engine --index 0 --node-rank 1` on its machine" in leader.trouble
    shared.mkdir()
    (shared / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(TransportFailed, match=r"node 1 of the engine does not see .*1:1 as node 0 does: set weights\.store"):
        await leader.see(shared, deadline_s=0.3)
    async with node_1(run, sections, asyncio.Event()):
        await leader.see(shared, deadline_s=60.0)
        await leader.beat()
        assert leader.trouble == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alike": "other"}, "another .engine., model or length of requests"),
        ({"host": "elsewhere", "address": "0.0.0.0:9"}, r"to be met at 0\.0\.0\.0:9, where no other machine finds it"),
        ({"host": "elsewhere"}, r"to be met at 127\.0\.0\.1:9, where no other machine finds it: set engine\.host"),
        ({"host": "elsewhere", "address": "10.0.0.9:9"}, r"weights\.store is empty"),
    ],
)
async def test_a_node_that_cannot_be_part_of_the_engine_says_why(run: Run, tmp_path: Path, changes: dict[str, str], message: str):
    sections = two_nodes(program(tmp_path, IDLE)) | {"weights": {"store": ""}}
    await Node0(run, sections).call("one", **changes)
    with pytest.raises(ConfigError, match=message):
        await run_node(run.config(**sections), 0, 1, asyncio.Event())
    assert parts(run, "sglang-0-node-1.log") == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"weights": {"transport": "ipc"}}, "memory of one machine"),
        ({"lora": {"rank": 4, "publish": "adapter"}}, "adapters are loaded by one machine alone"),
        ({"placement": {"layout": "colocated"}}, "take no turns"),
        ({"engine": {"kind": "sglang", "nodes": 2, "tp": 3}}, "each node must have as many"),
    ],
)
async def test_what_no_engine_over_several_machines_can_do_is_refused(run: Run, tmp_path: Path, sections: dict[str, Any], message: str):
    wanted = two_nodes(program(tmp_path, IDLE)) | sections
    merged = {name: run.values.get(name, {}) | wanted.get(name, {}) for name in (*run.values, *wanted)}
    with pytest.raises(ConfigError, match=message):
        host.kind_of(validate(EngineHostConfig, merged, source="test"), 0)


async def test_a_rank_that_there_is_not_is_refused(run: Run, tmp_path: Path):
    sections = two_nodes(program(tmp_path, IDLE))
    with pytest.raises(ConfigError, match=r"--node-rank 2: engine\.nodes is 2, so the others are 1 to 1"):
        await run_node(run.config(**sections), 0, 2, asyncio.Event())
    with pytest.raises(ConfigError, match=r"--node-rank 1: engine\.nodes is 1$"):
        await run_node(run.config(), 0, 1, asyncio.Event())


async def test_node_0_waits_for_another_however_long_it_takes(run: Run, tmp_path: Path):
    """A server that is not there three times in a row ends the host; one that had nobody to begin with does not."""
    async with run.hosted(asyncio.Event(), **two_nodes(program(tmp_path, IDLE), start_seconds=1.0)) as hosting:
        await until(lambda: len(parts(run, "sglang-0.log")) > 4)
        assert not hosting.done()


@pytest.mark.faults
@pytest.mark.timeout(300)
async def test_an_engine_that_lost_a_node_begins_again_on_all_and_serves_the_newest_version(run: Run, model_b: Path, tmp_path: Path):
    """The stand-ins notice nothing, as ranks that wait for each other in a collective do not."""
    sections = two_nodes(program(tmp_path, SERVER), progress_seconds=60.0)
    await run.create()
    async with run.hosted(asyncio.Event(), **sections):
        (starting,) = await run.until(lambda engines: len(engines) == 1)
        assert starting.trouble.startswith("node 1 of 2 has not joined at 127.0.0.1:")
        async with node_1(run, sections, asyncio.Event()):
            version = await run.publish(model_b)
            before = await run.serving(version)
            os.kill(int(parts(run, "sglang-0-node-1.log")[-1][0]), signal.SIGKILL)
            await run.until(lambda engines: before.boot_nonce not in {one.boot_nonce for one in engines})
            second = await run.serving(version)
            os.kill(int(parts(run, "sglang-0.log")[-1][0]), signal.SIGKILL)
            await run.until(lambda engines: second.boot_nonce not in {one.boot_nonce for one in engines})
            third = await run.serving(version)
            assert len({before.boot_nonce, second.boot_nonce, third.boot_nonce}) == 3
            met = [[words[words.index("--dist-init-addr") + 1] for words in parts(run, log)] for log in ("sglang-0.log", "sglang-0-node-1.log")]
            assert met[0] == met[1], "each life at its own address, both nodes in each"
        await run.until(lambda engines: third.boot_nonce not in {one.boot_nonce for one in engines})
        (waiting,) = await run.until(lambda engines: [one.state for one in engines] == [EngineState.STARTING])
        assert waiting.boot_nonce != third.boot_nonce, "nothing goes on without its other half"
