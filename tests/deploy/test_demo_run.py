"""The demo itself, short: every part of the service as real processes. What a few steps cannot reach is learning; everything else must hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.bars import bars
from deploy.redis_server import socket_path
from deploy.summary import read_summary
from deploy.up.process import identity_of
from deploy.up.records import read_records

LEARNING = {"sampled reward at its best", "rise of held-out exact"}
"""Bars that need hundreds of steps."""


LOOPBACK_ONLY = (
    "unshare",
    "--net",
    "--map-root-user",
    sys.executable,
    "-c",
    """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
print("interfaces:", *(name for _, name in socket.if_nameindex()), flush=True)
os.execvp(sys.argv[1], sys.argv[1:])
""",
)
"""Runs a command where there is no network but this machine's own loopback."""


def _can_leave_the_network() -> bool:
    try:
        return subprocess.run([*LOOPBACK_ONLY, "true"], capture_output=True, timeout=120, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _run(folder: Path, *options: str, within: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    command = [*within, sys.executable, "-m", "deploy.cli", "demo", "--dir", str(folder), *options]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, env=environment)
    assert (folder / "summary.json").exists(), done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr  # the bars of learning are missed
    return done.stdout, read_summary(folder)


def _nothing_is_left(folder: Path) -> None:
    assert [record.child for record in read_records(folder) if identity_of(record.identity.pid) == record.identity] == []
    assert not socket_path(folder / "redis").exists()


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Folder, output and summary of one short demo; without a network where that can be had."""
    folder = tmp_path_factory.mktemp("short") / "demo"
    said, summary = _run(folder, "--steps", "8", "--seed", "1", within=LOOPBACK_ONLY if _can_leave_the_network() else ())
    return folder, said, summary


@pytest.mark.demo
@pytest.mark.timeout(1500)
def test_a_short_demo_holds_everything_but_what_takes_learning(short_demo: tuple[Path, str, dict[str, Any]]) -> None:
    folder, said, summary = short_demo
    # A run this short has a publish lag of its start: every engine is behind while it loads.
    assert {bar.name for bar in bars(summary, drill=True) if not bar.met} <= LEARNING
    assert summary["steps"] == 8
    assert "missed: sampled reward at its best" in said
    assert {path.name for path in folder.iterdir()} >= {"audit.jsonl", "checkpoint", "metrics.jsonl", "report.png", "run.toml", "summary.json", "witness.jsonl"}
    _nothing_is_left(folder)


@pytest.mark.demo
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not _can_leave_the_network(), reason="this machine lets nobody make a network namespace")
def test_it_needs_no_network(short_demo: tuple[Path, str, dict[str, Any]]) -> None:
    _, said, summary = short_demo
    assert said.startswith("interfaces: lo\n"), said
    assert (summary["steps"], summary["groups_lost"]) == (8, 0)


@pytest.mark.faults
@pytest.mark.timeout(1500)
@pytest.mark.skipif(os.cpu_count() == 1, reason="a drill on one core takes longer than a test may")
def test_killed_processes_and_a_killed_group_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    said, summary = _run(folder, "--steps", "48", "--drill", "group")
    assert {bar.name for bar in bars(summary, drill=True) if not bar.met} <= LEARNING
    assert summary["steps"] == 48
    assert summary["incarnations"] >= 4  # the first, two kills of the trainer, one of everything
    assert all(target in said for target in ("producer-0", "engine-1", "trainer-0", "everything"))
    _nothing_is_left(folder)
