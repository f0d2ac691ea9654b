"""What every daemon does the same way: arguments, logging, one event loop, signals, exit codes.

def main() -> int:
options = arguments("rl-producer", "Generates rollout groups.").parse_args()
return run_daemon("rl-producer", lambda stop: produce(options, stop))
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from protocol.errors import EXIT_DRAINED, EXIT_FAULT, EXIT_TRY_AGAIN, RollstreamError

_LOG = logging.getLogger(__name__)


def arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options all daemons share."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    return parser


def run_daemon(role: str, body: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `body(stop)` under uvloop and return the exit code: 0 drained, 1 fault, 2 bad configuration, 75 try again.

    SIGTERM and SIGINT set `stop`; the body then drains to its own deadline and returns. A second signal ends the process at once, with exit code 1.
    """
    logging.basicConfig(
        level=os.environ.get("ROLLSTREAM_LOG", "INFO").upper(),
        format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        uvloop.run(_with_signals(body))
    except RollstreamError as problem:
        return _report(role, problem)
    except BaseExceptionGroup as group:
        ours = _ours(group)
        if ours is None:
            _LOG.exception("ended by a fault")
            return EXIT_FAULT
        return _report(role, ours)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_FAULT
    return EXIT_DRAINED


async def _with_signals(body: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FAULT)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await body(stop)


def _report(role: str, problem: RollstreamError) -> int:
    sys.stderr.write(f"{role}: {problem}\n")
    if problem.exit_code not in (EXIT_TRY_AGAIN,):
        _LOG.debug("traceback", exc_info=problem)
    return problem.exit_code


def _ours(group: BaseExceptionGroup[BaseException]) -> RollstreamError | None:
    """The one error of ours in a group that holds nothing else but cancellations; None if there is a foreign fault."""
    found: list[RollstreamError] = []
    for problem in group.exceptions:
        if isinstance(problem, BaseExceptionGroup):
            inner = _ours(problem)
            if inner is None:
                return None
            found.append(inner)
        elif isinstance(problem, RollstreamError):
            found.append(problem)
        elif not isinstance(problem, asyncio.CancelledError):
            return None
    return max(found, key=lambda problem: problem.exit_code, default=None)
