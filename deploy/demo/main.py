"""`rollstream demo`: everything from nothing. Folder, data and warm start, then `rollstream up`, then the result against the bars.

Exit codes: 0 every bar is met, 1 one is missed or something failed, 2 bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from rich.console import Console

from deploy.demo import folder as folders
from deploy.demo.bars import bars, bars_table
from deploy.demo.drill import Drill, DrillKind, cancel, drill_json, drill_table
from deploy.report import draw
from deploy.summary import read_summary, table
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, ConfigError, RollstreamError

_HAS_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
_ASK_S = 30.0
DESCRIPTION = (
    "Train a tiny model through every part of rollstream on this machine, print its result and judge it. "
    "Exit codes: 0 every bar is met, 1 one is missed or something failed, 2 bad configuration."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="run folder; an earlier demo there is moved aside (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data, starting model and sampling (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=folders.STEPS,
        help="optimizer steps (default: %(default)s); with fewer than about 300 the bars of learning are missed, and the exit code is 1",
    )
    parser.add_argument(
        "--drill",
        nargs="?",
        type=DrillKind,
        const=DrillKind.PROCESSES,
        choices=list(DrillKind),
        help="kill -9 a producer, an engine and the trainer, twice each, while it runs; `group`: and then everything, Redis included",
    )
    parser.add_argument(
        "--engine",
        type=folders.EngineKind,
        choices=list(folders.EngineKind),
        default=folders.EngineKind.EMBEDDED,
        help="what generates: the embedded engine, or a server of SGLang on the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-python",
        default=".venv-sglang/bin/python",
        metavar="PATH",
        help="with --engine sglang: the interpreter that has SGLang, as `make sglang-cpu` installs it (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """The whole demo; the exit code."""
    demo = folders.Demo(
        folder=options.dir.absolute(),
        seed=options.seed,
        steps=options.steps,
        appendfsync="always" if options.drill else "everysec",
        engine=options.engine,
        engine_python=os.path.abspath(options.engine_python),  # noqa: PTH100 - a virtual environment is known by the link, which must not be followed
    )
    console = Console(highlight=False)
    if demo.seed < 0 or demo.steps < 1:
        raise ConfigError(f"--seed {demo.seed} --steps {demo.steps}: expected a seed of 0 or more and at least one step")
    if demo.engine is folders.EngineKind.SGLANG:
        if options.drill:
            raise ConfigError("--drill kills engines faster than a server of SGLang starts: leave it out, or --engine sglang")
        _check_sglang(demo.engine_python)
    return asyncio.run(_demo(demo, options.drill, console))


def _check_sglang(python: str) -> None:
    """Raises: `ConfigError` if this interpreter does not have it."""
    try:
        found = subprocess.run([python, "-c", _HAS_SGLANG], check=False, timeout=_ASK_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        found = False
    if not found:
        raise ConfigError(f"--engine-python {python}: has no SGLang; `make sglang-cpu` installs it for CPUs into .venv-sglang, or name another interpreter")


async def _demo(demo: folders.Demo, kind: DrillKind | None, console: Console) -> int:
    folders.claim(demo)
    folders.fill(demo)
    where = _shown(demo.folder)
    console.print(f"demo in {where}: sort four digits, seed {demo.seed}, {demo.steps} steps, engine {demo.engine}")
    if code := await _warm_start(demo):
        return code
    drill = Drill(folder=demo.folder, kind=kind, steps=demo.steps) if kind is not None else None
    began = time.time()
    code = await _train(demo, drill)
    if drill is not None:
        (demo.folder / "drill.json").write_bytes(orjson.dumps(drill_json(drill), option=orjson.OPT_INDENT_2))
        console.print(drill_table(drill, began))
    if code:
        console.print(ended(demo, code))
        return code
    return await _verdict(demo, drill, console)


def ended(demo: folders.Demo, code: int) -> str:
    """What to look at after a run that did not drain, and how it goes on, if there is one."""
    where = _shown(demo.folder)
    again = f"; `rollstream up -c {where}/run.toml --resume` goes on from its last checkpoint" if (demo.folder / "redis").is_dir() else ""
    return f"the run ended with exit code {code}: see {where}/logs{again}"


async def _warm_start(demo: folders.Demo) -> int:
    """In a process of its own: this one stays free of torch."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.demo.warm_start", str(demo.model), "--seed", str(demo.seed), env=_environment()
    )
    return await process.wait()


async def _train(demo: folders.Demo, drill: Drill | None) -> int:
    """Run `up` to the end of the run, again with `--resume` where the drill has killed it; its exit code."""
    killer = asyncio.create_task(drill.run(), name="demo:drill") if drill is not None else None
    flag = "--new"
    try:
        while True:
            up = await _up(demo, flag)
            if drill is not None:
                drill.up_pid = up.pid
            with _signals_go_to(up.send_signal):
                code = await up.wait()
            if drill is None or not drill.has_killed(up.pid):
                return code
            flag = "--resume"
    finally:
        if killer is not None:
            await cancel(killer)


async def _up(demo: folders.Demo, flag: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "deploy.cli", "up", "-c", str(demo.config), flag, env=_environment())


async def _verdict(demo: folders.Demo, drill: Drill | None, console: Console) -> int:
    """Draw, print, judge."""
    summary = read_summary(demo.folder)
    console.print(table(summary))
    found = bars(summary, drill=drill is not None, real_engine=demo.engine is folders.EngineKind.SGLANG)
    console.print(bars_table(found))
    try:
        await draw(demo.folder)
    except ConfigError as problem:
        console.print(str(problem))
    where = _shown(demo.folder)
    console.print(f"look at {where}/report.png, summary.json, metrics.jsonl, checkpoint/ and logs/")
    if drill is not None and not drill.complete:
        console.print(f"[bold red]the run ended after {len(drill.killed)} of {len(drill.targets())} kills[/]: more --steps give the drill more room")
        return EXIT_FAULT
    if missed := [bar for bar in found if not bar.met]:
        console.print("[bold red]missed:[/] " + "; ".join(f"{bar.name} {bar.seen}, wanted {bar.wanted}" for bar in missed))
        return EXIT_FAULT
    console.print("[green]every bar is met[/]")
    return EXIT_DRAINED


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _shown(path: Path) -> str:
    """As a person at this prompt would write it."""
    shorter = os.path.relpath(path)
    return str(path) if shorter.startswith("..") else shorter


@contextmanager
def _signals_go_to(forward: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM goes on to the child. Ctrl-C reaches it by itself, as it is in our process group: here it must only not end us first."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, forward, signal.SIGTERM)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    """`python -m deploy.demo.main`, as `rollstream demo`."""
    parser = argparse.ArgumentParser(prog="rollstream demo", description=DESCRIPTION)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except RollstreamError as problem:
        sys.stderr.write(f"rollstream demo: {problem}\n")
        return problem.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
