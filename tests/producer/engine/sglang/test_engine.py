"""Lives of a server that the host starts. In SGLang's place is a program that answers as it does: the embedded engine, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from producer.engine import host, key
from producer.engine.host import run_host
from producer.engine.hosted import EngineFault
from producer.engine.sglang import engine, watch
from protocol.errors import ConfigError
from protocol.messages import EngineState
from tests.producer.engine.hosting import Run, ask

STAND_IN = f"""#!{sys.executable}
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
given = dict(zip(sys.argv[2::1], sys.argv[3::1]))
async def main():
    from producer.engine.embedded.model import load
    from producer.engine.embedded.server import EmbeddedEngine
    model = load(given["--model-path"], slots=4, max_length=64, wanted=64, dtype="float32")
    async with EmbeddedEngine(model, weight_version=given["--weight-version"], port=int(given["--port"]), seed=1):
        print("server", os.getpid(), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def started(run: Run, half: str = "") -> list[int]:
    """The pids of the servers so far, in their order."""
    log = run.config().run.folder / "logs" / f"sglang-0{half}.log"
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("server ")]


def sglang(python: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"kind": "sglang", "device": "cpu", "python": python, "slots": 4} | more}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    for where, name, value in ((host, "_REST_S", 0.05), (watch, "_LOOK_S", 0.1), (engine, "_KNOCK_S", 0.05), (engine, "_GRACE_S", 1.0)):
        monkeypatch.setattr(where, name, value)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_server_that_is_gone_is_started_again_and_routable_at_the_newest_version(
    run: Run, session: aiohttp.ClientSession, model_b: Path, tmp_path: Path, how: signal.Signals
):
    await run.create()
    async with run.hosted(asyncio.Event(), **sglang(program(tmp_path, STAND_IN), progress_seconds=2.0, probe_seconds=2.0)):
        version = await run.publish(model_b)
        before = await run.serving(version)
        assert (before.kind, before.pid, before.capacity) == ("sglang", os.getpid(), 4)
        assert (await ask(session, before, "one")).weight_version == version
        os.kill(started(run)[-1], how)
        await run.until(lambda engines: before.boot_nonce not in {engine.boot_nonce for engine in engines})
        after = await run.serving(version)
        assert after.engine_id == before.engine_id
        assert after.boot_nonce != before.boot_nonce
        assert (await ask(session, after, "two")).weight_version == version
        first, second = started(run)
        assert not Path(f"/proc/{first}").exists()
    assert not Path(f"/proc/{second}").exists(), "it ends with its host"
    assert await run.registry.engines() == []


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", [0, 1], ids=["the one that reads", "the one that writes"])
async def test_the_end_of_one_half_is_the_end_of_both_and_another_pair_serves_the_newest_version(
    run: Run, session: aiohttp.ClientSession, model_b: Path, tmp_path: Path, which: int
):
    """In place of each half is an engine that does all itself."""
    await run.create()
    alone = STAND_IN.replace("    model = load", "    from producer.engine.embedded import request\n    request._NEUTRAL.clear()\n    model = load")
    async with run.hosted(asyncio.Event(), **sglang(program(tmp_path, alone), prefill=1)):
        version = await run.publish(model_b)
        before = await run.serving(version)
        assert (await ask(session, before, "one")).weight_version == version
        halves = started(run, "-prefill")[-1], started(run)[-1]
        os.kill(halves[which], signal.SIGKILL)
        await run.until(lambda engines: before.boot_nonce not in {engine.boot_nonce for engine in engines})
        after = await run.serving(version)
        assert (await ask(session, after, "two")).weight_version == version
        assert not [pid for pid in halves if Path(f"/proc/{pid}").exists()]
        again = started(run, "-prefill")[-1], started(run)[-1]
    assert not [pid for pid in again if Path(f"/proc/{pid}").exists()], "they end with their host"


async def test_while_it_starts_status_says_so(run: Run, tmp_path: Path):
    async with run.hosted(asyncio.Event(), **sglang(program(tmp_path, "#!/bin/sh\nexec sleep 600\n"))):
        (starting,) = await run.until(lambda engines: len(engines) == 1)
        assert starting.state is EngineState.STARTING
        assert starting.trouble.startswith("SGLang starts (")
        assert "logs/sglang-0.log" in starting.trouble


async def test_one_that_never_comes_to_its_first_token_is_given_up_after_three_starts(run: Run, tmp_path: Path):
    with pytest.raises(EngineFault, match=r"(?s)SGLang ended with exit code 3; its last words .*no memory left"):
        await run_host(run.config(**sglang(program(tmp_path, "#!/bin/sh\necho no memory left\nexit 3\n"))), 0, asyncio.Event())
    log = run.config().run.folder / "logs" / "sglang-0.log"
    assert log.read_text().count("no memory left") == 3
    assert await run.registry.engines() == []


async def test_one_that_takes_too_long_is_ended(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.SGLangServer, "start_tries", 1)
    with pytest.raises(EngineFault, match=r"(?s)wrote no token within engine\.start_seconds = 4; its last words are.*loading"):
        await run_host(run.config(**sglang(program(tmp_path, "#!/bin/sh\necho loading\nexec sleep 600\n"), start_seconds=4.0)), 0, asyncio.Event())


async def test_a_command_line_that_is_not_understood_is_a_configuration_error(run: Run, tmp_path: Path):
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r"(?s)engine\.args: .*unrecognized arguments: --no-such-flag"), flatten_subgroups=True):
        await run_host(
            run.config(**sglang(program(tmp_path, "#!/bin/sh\necho unrecognized arguments: --no-such-flag\nexit 2\n"), args=["--no-such-flag"])),
            0,
            asyncio.Event(),
        )


async def test_a_usage_error_after_a_life_that_began_costs_a_life_as_any_other_end(run: Run, tmp_path: Path):
    """An interpreter that does not find its script for a moment ends in the same way."""
    text = f"#!/bin/sh\necho again >> {tmp_path}/starts\n[ $(wc -l < {tmp_path}/starts) = 2 ] && exit 2\nexit 3\n"
    with pytest.raises(EngineFault, match="SGLang ended with exit code 3"):
        await run_host(run.config(**sglang(program(tmp_path, text))), 0, asyncio.Event())
    assert (tmp_path / "starts").read_text().count("again") == 3


async def test_what_cannot_be_started_is_a_configuration_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"engine\.python /nowhere/python: there is no such program"):
        await run_host(run.config(**sglang("/nowhere/python")), 0, asyncio.Event())
    with pytest.raises(ConfigError, match=r"engine\.args has --port: use engine\.port"):
        await run_host(run.config(**sglang("", args=["--port", "1"])), 0, asyncio.Event())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine\.port {port}: cannot listen on 127\.0\.0\.1:{port}"):
            await run_host(run.config(**sglang("", port=port)), 0, asyncio.Event())
    monkeypatch.setenv(key.ADMIN_VARIABLE, "secret")
    with pytest.raises(ConfigError, match="SGLang shows its admin key in /server_info"):
        await run_host(run.config(**sglang("")), 0, asyncio.Event())
