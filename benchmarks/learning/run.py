"""One cell, run through `rollstream up` in a process of its own, and what came of it as one JSON object."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.learning.cell import LEARNING_RATE, Cell, configuration, toml
from benchmarks.learning.lockstep import RUN, URL
from deploy.demo import task
from deploy.demo.warm_start import warm_start
from deploy.redis_server import socket_path
from deploy.summary import WINDOW, read_summary, window_means
from protocol.errors import RollstreamError

_ROOT = Path(__file__).parents[2]
_STOP_S = 60.0
_PR_SET_PDEATHSIG = 1
COLLAPSE = 0.2
"""A run has collapsed if its last 20-step mean of the reward is so far below its best one, or if it met a number that is not finite."""
_NOT_FINITE = b"the gradient's norm is "
Json = dict[str, Any]


def prepare(work: Path, seed: int) -> None:
    """Data and starting model of a seed, which all its runs share; what is there stays."""
    model = work / f"model-{seed}"
    if not model.exists():
        making = work / f"model-{seed}.making"
        shutil.rmtree(making, ignore_errors=True)
        warm_start(making, seed)
        task.write_data(making, seed)
        making.rename(model)


async def run(cell: Cell, *, steps: int, work: Path, minutes: float) -> Json:
    """What came of the cell. Raises: `RollstreamError` if the run failed otherwise than by its numbers; its logs stay."""
    folder, model = work / cell.name, work / f"model-{cell.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file, log = folder.with_suffix(".toml"), folder.with_suffix(".log")
    sections = configuration(cell, steps=steps, folder=folder, model=model, train=model / "train.jsonl", held_out=model / "heldout.jsonl")
    file.write_text(toml(sections), "utf-8")
    code = await _up(file, log, {URL: f"unix://{socket_path(folder / 'redis')}", RUN: cell.name}, minutes * 60)
    finite = not any(_NOT_FINITE in path.read_bytes() for path in (folder / "logs").glob("trainer*"))
    if code and finite:
        raise RollstreamError(f"{cell.name}: rollstream up ended with {code}, see {log} and {folder / 'logs'}: …{log.read_text('utf-8', 'replace')[-600:]}")
    lines = {line["step"]: line for line in map(orjson.loads, (folder / "metrics.jsonl").read_bytes().splitlines())}
    result = about(cell, steps) | told([lines[step] for step in sorted(lines)], finite=finite) | _summary(folder)
    shutil.rmtree(folder)
    for path in (file, log):
        path.unlink()
    return result


async def _up(file: Path, log: Path, told_by_environment: dict[str, str], limit_s: float) -> int:
    environment = {
        **os.environ,
        **told_by_environment,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
    }
    argv = [sys.executable, "-m", "deploy.cli", "up", "-c", str(file), "--new", "--no-live"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=_ROOT, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, preexec_fn=_end_with_us
        )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        return -int(signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.shield(asyncio.wait_for(process.wait(), _STOP_S))
            if process.returncode is None:
                process.kill()


def _end_with_us() -> None:
    """In the child: a run whose result nobody waits for any more ends in good order, also after kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def about(cell: Cell, steps: int) -> Json:
    return {"loss": cell.loss, "staleness": cell.staleness, "seed": cell.seed, "steps": steps, "lr": LEARNING_RATE}


def told(lines: Sequence[Json], *, finite: bool = True) -> Json:
    """What the lines of metrics.jsonl say, the steps in order. Figures named `last` are means over the last 20 steps."""
    rewards = [line["reward"] for line in lines]
    means = window_means(rewards)
    final, best = (means[-1], max(means)) if means else (0.0, 0.0)
    ages: Counter[int] = Counter()
    for line in lines:
        ages.update({int(age): tokens for age, tokens in line["staleness"].items()})
    last = lines[-WINDOW:]
    return {
        "reward": [round(reward, 5) for reward in rewards],
        "final": final,
        "best": best,
        "finite": finite,
        "collapsed": not finite or final < best - COLLAPSE,
        "age_mean": sum(age * tokens for age, tokens in ages.items()) / max(1, ages.total()),
        "age_tokens": {str(age): tokens for age, tokens in sorted(ages.items())},
        "masked": sum(line["masked"] for line in lines),
        **{
            f"{name}_last": statistics.fmean(line[name] for line in last) if last else 0.0
            for name in ("ess", "ess_tokens", "entropy", "logprob_diff_mean", "clip_fraction", "grad_norm")
        },
    }


def _summary(folder: Path) -> Json:
    try:
        summary = read_summary(folder)
    except OSError:
        return {}
    names = ("heldout", "publish_lag", "groups_lost", "groups_duplicated", "seconds", "wall_seconds", "cpu_seconds")
    return {name: summary[name] for name in names}
