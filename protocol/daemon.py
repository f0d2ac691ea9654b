"""What every daemon does the same way: arguments, logging, one event loop, signals, exit codes.

::

    def main() -> int:
        options = arguments("rl-producer", "Generates rollout groups.").parse_args()
        return run_daemon("rl-producer", lambda stop: produce(options, stop))
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from protocol.errors import EXIT_CONFIG, EXIT_DRAINED, EXIT_FAULT, EXIT_REPLACED, EXIT_TRY_AGAIN, ConfigError, RedisUnreachable, RollstreamError
from protocol.failpoints import arm

_LOG = logging.getLogger(__name__)
SUPERVISED = "ROLLSTREAM_SUPERVISED"
"""Set for a child whose parent knows that redis.url is right: a Redis that does not answer at its start is an outage then, not a wrong address."""


def arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options all daemons share."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    return parser


def run_daemon(role: str, body: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `body(stop)` under uvloop and return the exit code: 0 drained, 1 fault, 2 bad configuration, 3 replaced, 75 try again.

    SIGTERM and SIGINT set `stop`; the body then drains to its own deadline and returns. A second signal ends the process at once, with exit code 1. In another
    thread than the first, where no signal is ever heard, whoever started it must keep `stop` from the body and set it. A SIGTERM that comes when the body has
    ended changes nothing where a supervisor waits for the exit code: what was drained is not told as killed.
    """
    level = os.environ.get("ROLLSTREAM_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        return _report(role, ConfigError(f"ROLLSTREAM_LOG={level}: expected one of {', '.join(logging.getLevelNamesMapping())}"))
    try:
        arm(os.environ)
    except ConfigError as problem:
        return _report(role, problem)
    logging.basicConfig(level=level, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        uvloop.run(_with_signals(body))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_FAULT
    except (Exception, BaseExceptionGroup) as problem:  # noqa: BLE001 - the end of the process: reported, and made its exit code
        ours = _ours(problem)
        if ours is not None:
            return _report(role, ours)
        _LOG.exception("ended by a fault")
        return EXIT_FAULT
    finally:
        if os.environ.get(SUPERVISED):
            ignore(signal.SIGTERM)
    return EXIT_DRAINED


async def _with_signals(body: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FAULT)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
    await body(stop)


@contextlib.contextmanager
def hearing(number: signal.Signals, heard: Callable[[], None]) -> Iterator[None]:
    """`heard` is called at each such signal while the context is open; in another thread than the first, where none is heard, nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, heard)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, before)


def ignore(number: signal.Signals) -> None:
    """Nothing happens at such a signal, which by itself would end the process, before and after something is `hearing` it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_IGN)


def _report(role: str, problem: RollstreamError) -> int:
    sys.stderr.write(f"{role}: {problem}\n")
    _LOG.debug("traceback", exc_info=problem)
    if isinstance(problem, RedisUnreachable) and os.environ.get(SUPERVISED):
        return EXIT_TRY_AGAIN
    return problem.exit_code


def _ours(problem: BaseException) -> RollstreamError | None:
    """The error of ours that decides the exit code; None if there is a foreign fault, or none of ours at all.

    Of several it is the one a person must mend, then that another took our place, then a fault, then one that waiting may cure; cancellations beside it count
    for nothing.
    """
    leaves = _leaves(problem)
    ours = [leaf for leaf in leaves if isinstance(leaf, RollstreamError)]
    if any(not isinstance(leaf, RollstreamError | asyncio.CancelledError) for leaf in leaves):
        return None
    order = (EXIT_CONFIG, EXIT_REPLACED, EXIT_FAULT, EXIT_TRY_AGAIN)
    return min(ours, key=lambda leaf: order.index(leaf.exit_code), default=None)


def _leaves(problem: BaseException) -> list[BaseException]:
    if isinstance(problem, BaseExceptionGroup):
        return [leaf for part in problem.exceptions for leaf in _leaves(part)]
    return [problem]
