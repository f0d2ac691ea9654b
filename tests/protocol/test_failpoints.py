"""A failpoint kills the right process, at the right passing, and nothing after it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from protocol.errors import EXIT_CONFIG, ConfigError
from protocol.failpoints import VARIABLE, VICTIM_VARIABLE, Failpoint, arm, failpoint

LOOP = """
import os
from protocol.failpoints import Failpoint, arm, failpoint
arm(os.environ)
try:
    for i in range(1, 6):
        print(i, flush=True)
        failpoint(Failpoint.TRAINER_WITNESSED)
        failpoint(Failpoint.PRODUCER_PUT)
finally:
    print("over", flush=True)
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm({})


def run(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOP], env=environ, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.faults
@pytest.mark.parametrize(("wanted", "passings"), [("producer.put", 1), ("producer.put:1", 1), ("trainer.witnessed:4", 4)])
def test_it_kills_its_process_at_the_nth_passing_and_nothing_more_runs(wanted: str, passings: int):
    ended = run({VARIABLE: wanted})
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")
    assert ended.stdout.split() == [str(i) for i in range(1, passings + 1)]


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}, {VARIABLE: "trainer.stepped"}, {VARIABLE: "producer.put:6"}])
def test_what_is_not_asked_for_or_never_reached_kills_nothing(environ: dict[str, str]):
    ended = run(environ)
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "2", "3", "4", "5", "over"])


@pytest.mark.faults
def test_it_kills_another_process_in_its_place_and_goes_on_once_that_is_gone():
    victim = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        arm({VARIABLE: "producer.put:2", VICTIM_VARIABLE: str(victim.pid)})
        failpoint(Failpoint.PRODUCER_PUT)
        assert victim.poll() is None
        failpoint(Failpoint.PRODUCER_PUT)
        assert victim.poll() == -signal.SIGKILL, "it has ended when the failpoint returns"
    finally:
        victim.kill()
        victim.wait(10)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({VARIABLE: "trainer.witnesed"}, ("trainer.witnesed: no such failpoint", "trainer.witnessed", "producer.put")),
        ({VARIABLE: "producer.put:0"}, ("'0' is no count", "at least 1")),
        ({VARIABLE: "producer.put:x"}, ("'x' is no count",)),
        ({VARIABLE: "producer.put", VICTIM_VARIABLE: "redis"}, (f"{VICTIM_VARIABLE}=redis", "cannot be killed")),
    ],
)
def test_a_wrong_name_or_count_is_an_error_that_says_what_is_there(environ: dict[str, str], words: tuple[str, ...]):
    with pytest.raises(ConfigError) as problem:
        arm(environ)
    assert all(word in str(problem.value) for word in words)


def test_a_daemon_with_a_wrong_name_does_not_start():
    ended = subprocess.run(
        [sys.executable, "-c", "import protocol.daemon as d; raise SystemExit(d.run_daemon('rl-x', lambda stop: 1 / 0))"],
        env={VARIABLE: "nowhere"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == EXIT_CONFIG
    assert ended.stderr.startswith("rl-x: ROLLSTREAM_FAILPOINT=nowhere: no such failpoint")
    assert len(ended.stderr.splitlines()) == 1
