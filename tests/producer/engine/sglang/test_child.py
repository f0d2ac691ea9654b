from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from producer.engine.sglang import child as module
from producer.engine.sglang.child import Child

FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"])
print(inner.pid, flush=True)
time.sleep(600)
"""


def start(code: str, log: Path) -> Child:
    return Child.start((sys.executable, "-c", code), log=log, env=os.environ)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_its_exit_code_and_last_words_are_known(tmp_path: Path):
    log = tmp_path / "logs" / "server.log"
    log.parent.mkdir()
    log.write_text("of an earlier server\n")
    child = start("print('x' * 5000); print('no memory left'); raise SystemExit(3)", log)
    assert await child.ended() == 3
    assert await child.ended() == 3
    words = child.last_words()
    assert words.endswith("no memory left")
    assert "earlier" not in words
    assert len(words) < 1000
    await child.end(1.0)


async def test_the_log_is_for_its_owner_alone(tmp_path: Path):
    child = start("pass", tmp_path / "server.log")
    await child.ended()
    assert stat.S_IMODE((tmp_path / "server.log").stat().st_mode) == 0o600


async def test_one_that_ends_when_asked_is_not_killed(tmp_path: Path):
    child = start("import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(5)); print('ready', flush=True); time.sleep(600)", tmp_path / "log")
    while "ready" not in child.last_words():
        await asyncio.sleep(0.01)
    await child.end(60.0)
    assert child.code == 5


async def test_one_that_does_not_is_killed_with_all_that_it_started(tmp_path: Path):
    child = start(FAMILY, tmp_path / "log")
    while "here" not in child.last_words():
        await asyncio.sleep(0.01)
    inner = int(child.last_words().split()[0])
    assert alive(inner)
    await child.end(0.05)
    assert child.code == -9
    while alive(inner):
        await asyncio.sleep(0.01)


async def test_what_it_leaves_behind_at_its_end_is_killed(tmp_path: Path):
    child = start(FAMILY.replace("time.sleep(600)\n", "time.sleep(0)\n").replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""), tmp_path / "log")
    await child.ended()
    inner = int(child.last_words().split()[0])
    while alive(inner):
        await asyncio.sleep(0.01)


async def test_one_that_the_kernel_does_not_let_go_is_given_up_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A driver that hangs cannot be staged: here the kill does not arrive."""
    child = start("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)", tmp_path / "log")
    while "ready" not in child.last_words():
        await asyncio.sleep(0.01)
    monkeypatch.setattr(child, "_kill", lambda: None)
    monkeypatch.setattr(module, "_REAP_S", 0.05)
    try:
        async with asyncio.timeout(100):
            await child.end(0.05)
            await child.end(0.05)
        assert child.code is None
        assert f"process {child.pid} was killed and has not ended within 0.05 s" in caplog.text
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child._popen.wait()
