from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.daemon import SUPERVISED

ROOT = Path(__file__).parents[2]
FRAME = """
import asyncio, os, sys
from protocol.daemon import run_daemon
from protocol.errors import *

async def body(stop):
{body}

sys.exit(run_daemon("rl-test", body))
"""


@contextmanager
def daemon(body: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A real process with this body."""
    code = FRAME.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={"PATH": "", "PYTHONPATH": str(ROOT), **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


GROUP = """
async def fails(problem):
    raise problem
async with asyncio.TaskGroup() as group:
    group.create_task(asyncio.Event().wait())
    for problem in ({problems},):
        group.create_task(fails(problem))
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return", 0, ""),
        ("raise ConfigError('run.name: is wrong')", 2, "rl-test: run.name: is wrong\n"),
        ("raise RedisUnavailable('no answer')", 75, "rl-test: no answer\n"),
        ("raise SchemaTooNew('upgrade')", 2, "rl-test: upgrade\n"),
        ("raise Fenced('a newer trainer')", 3, "rl-test: a newer trainer\n"),
        ("raise ZeroDivisionError('ours')", 1, "ZeroDivisionError: ours"),
        ("raise asyncio.CancelledError", 1, ""),
        ("raise KeyboardInterrupt", 1, ""),
        (GROUP.format(problems="ConfigError('mend it')"), 2, "rl-test: mend it\n"),
        (GROUP.format(problems="EngineUnavailable('later')"), 75, "rl-test: later\n"),
        (GROUP.format(problems="EngineUnavailable('later'), ConfigError('mend it')"), 2, "rl-test: mend it\n"),
        (GROUP.format(problems="EngineUnavailable('later'), Fenced('newer')"), 3, "rl-test: newer\n"),
        (GROUP.format(problems="ConfigError('mend it'), ZeroDivisionError('ours')"), 1, "ZeroDivisionError: ours"),
        ("raise BaseExceptionGroup('g', [ExceptionGroup('h', [ConfigError('deep')]), asyncio.CancelledError()])", 2, "rl-test: deep\n"),
        ("raise BaseExceptionGroup('g', [asyncio.CancelledError()])", 1, "ended by a fault"),
    ],
)
def test_the_exit_code_tells_what_ended_it(body: str, code: int, message: str) -> None:
    with daemon(body) as process:
        got, errors = ended(process)
    assert (got, message in errors) == (code, True), errors
    assert ("Traceback" in errors) == ("ZeroDivision" in message or "fault" in message), "a person's mistake is told in a sentence"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(number: signal.Signals) -> None:
    body = """
    print("ready", flush=True)
    await stop.wait()
    print("drained", flush=True)
    """
    with daemon(body) as process:
        assert said(process) == "ready"
        process.send_signal(number)
        assert said(process) == "drained"
        assert ended(process) == (0, "")


def test_a_second_signal_ends_it_at_once_and_never_with_0() -> None:
    body = """
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.Event().wait()
    """
    with daemon(body) as process:
        assert said(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert said(process) == "draining"
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 1


def test_a_signal_behind_the_end_does_not_make_what_has_drained_a_failure() -> None:
    late = "import atexit; atexit.register(lambda: (print('over', flush=True), sys.stdin.readline()))"
    code = FRAME.format(body="    return").replace("async def body", f"{late}\nasync def body")
    environ = {"PATH": "", "PYTHONPATH": str(ROOT), SUPERVISED: "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert said(process) == "over"
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    finally:
        process.kill()
        process.communicate()


def test_logs_carry_the_role_and_the_level_is_a_setting() -> None:
    body = """
    import logging
    logging.getLogger("x").debug("low")
    logging.getLogger("x").warning("high")
    """
    with daemon(body) as process:
        assert " rl-test WARNING x: high\n" in (errors := ended(process)[1])
        assert "low" not in errors
    with daemon(body, ROLLSTREAM_LOG="debug") as process:
        assert " rl-test DEBUG x: low\n" in ended(process)[1]


def test_a_redis_that_does_not_answer_is_an_outage_to_a_child_whose_parent_knows_the_address() -> None:
    for environ, expected in (({}, 2), ({SUPERVISED: "1"}, 75)):
        with daemon("raise RedisUnreachable('no reply')", **environ) as process:
            assert ended(process) == (expected, "rl-test: no reply\n")
    with daemon("raise UnsafeRedis('it evicts')", **{SUPERVISED: "1"}) as process:
        assert ended(process)[0] == 2


def test_an_unknown_log_level_is_a_configuration_error() -> None:
    with daemon("return", ROLLSTREAM_LOG="loud") as process:
        code, errors = ended(process)
    assert code == 2
    assert errors.startswith("rl-test: ROLLSTREAM_LOG=LOUD: expected one of CRITICAL")


def test_arguments_are_those_all_daemons_share() -> None:
    from protocol.daemon import arguments

    options = arguments("rl-test", "Tests.").parse_args(["-c", "run.toml", "--set", "a.b=1", "--set", "c.d=2"])
    assert (options.config, options.set) == ("run.toml", ["a.b=1", "c.d=2"])
    with pytest.raises(SystemExit) as caught:
        arguments("rl-test", "Tests.").parse_args([])
    assert caught.value.code == 2


def test_nothing_of_ours_needs_torch() -> None:
    code = """
import importlib, pkgutil, protocol, sys
for module in pkgutil.iter_modules(protocol.__path__):
    importlib.import_module(f"protocol.{module.name}")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
