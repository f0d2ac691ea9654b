"""`python -m benchmarks.weights`: every engine updated by itself against all of them stopped for it, by each transport that a CPU has, in one run.

Real Redis, publisher, reconcilers, weight server and embedded engines, each engine in a process of its own under load and with a token clock. Both sides share
engines and trainer and take turns. Prints tables for people and, as its last line, one JSON object. Runs from a checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.buffer.meter import machine
from benchmarks.weights.child import Answer, Child
from benchmarks.weights.fleet import Fleet
from benchmarks.weights.random_model import vocabulary
from benchmarks.weights.sides import OneByOne, StopTheWorld, Update, median
from deploy.redis_server import redis_server

_TRANSPORTS = ("store", "gloo", "delta")
_COUNT, _SLOW = 4, 20.0
_LONG = 128
"""Tokens of a request where rates are measured: few requests begin in a window, and a beginning costs a prefill."""
_SETTLE_S = 1.0
Json = dict[str, Any]


class Bench:
    def __init__(self, options: argparse.Namespace, work: Path, shm: Path, trainer: Child, redis: str) -> None:
        self._options, self._work, self._shm = options, work, shm
        self._trainer, self._redis = trainer, redis

    def weights(self, transport: str) -> Json:
        return {
            "store": str(self._shm / "store"),
            "relay": str(self._shm / "relay"),
            "transport": transport,
            "keep": 1,
            "full_every": 1000,
            "bucket_mb": 64,
        }

    def fleet(self, slow: list[float], *, tokens: int) -> Fleet:
        options = self._options
        return Fleet(
            self._shm / "model",
            self._work,
            count=_COUNT,
            pace_s=options.pace_s,
            vocabulary=vocabulary(options.size),
            requests=options.requests,
            tokens=tokens,
            slow=slow,
        )

    async def compare(self, transport: str) -> Json:
        """Both sides in turn, the order turned each round; what comes first of each is not counted."""
        kind = "adam" if transport == "delta" else "fresh"
        ours: list[Update] = []
        theirs: list[Update] = []
        about: Json = {"trainer": self._trainer, "redis": self._redis, "work": self._work}
        async with contextlib.AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(self.fleet([1.0] * _COUNT, tokens=self._options.tokens))
            one_by_one = await stack.enter_async_context(OneByOne("one", self.weights(transport), fleet=fleet, **about))
            stop = await stack.enter_async_context(StopTheWorld("all", self.weights(transport), fleet=fleet, **about))
            await one_by_one.update("fresh")
            await stop.update("fresh")
            for number in range(self._options.rounds):
                sides: list[tuple[OneByOne | StopTheWorld, list[Update]]] = [(one_by_one, ours), (stop, theirs)]
                for side, updates in sides if number % 2 else reversed(sides):
                    await asyncio.sleep(_SETTLE_S)
                    updates.append(await side.update(kind))
            seen = await fleet.settle()
        return _compared(ours, theirs, seen)

    async def others(self, transport: str) -> Json:
        """The first engine takes `_SLOW` times as long to load: the rate of the others while it is paused, over theirs before the version came."""
        shares: list[float] = []
        slow_s: list[float] = []
        async with contextlib.AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(self.fleet([_SLOW, *[1.0] * (_COUNT - 1)], tokens=_LONG))
            side = await stack.enter_async_context(
                OneByOne("slow", self.weights(transport), trainer=self._trainer, fleet=fleet, redis=self._redis, work=self._work)
            )
            await side.update("fresh")
            for _ in range(self._options.rounds):
                await asyncio.sleep(self._options.quiet_s)
                update = await side.update("fresh")
                began, ended = update.pauses[0]
                submitted = update.published["submitted"]
                slow_s.append(ended - began)
                for index, engine in enumerate(fleet.engines[1:], start=1):
                    own_began, own_ended = update.pauses[index]
                    assert own_ended <= began or own_began >= ended, "max_paused is 1: no two engines are paused at once"
                    before = engine.rate(submitted - self._options.quiet_s + _SETTLE_S, submitted)
                    shares.append(engine.rate(began, ended) / before)
            seen = await fleet.settle()
        lost = sum(one["tokens_lost"] for one in seen)
        return {"share": median(shares), "shares": shares, "slow_pause_seconds": median(slow_s), "tokens_lost": lost}


def _compared(ours: list[Update], theirs: list[Update], seen: list[Answer]) -> Json:
    pause_s = [one for update in ours for one in update.pause_s]
    apply_s = [one for update in ours for one in update.apply_s]
    ratios = [pause / apply for update in ours for pause, apply in zip(update.pause_s, update.apply_s, strict=True)]
    published = ours[-1].published
    stopped = median([sum(update.pause_s) for update in theirs])
    return {
        "pause_seconds": median(pause_s),
        "pause_seconds_by_engine": [median([update.pause_s[index] for update in ours]) for index in range(len(ours[0].pause_s))],
        "apply_seconds": median(apply_s),
        "pause_over_apply": median(ratios),
        "publish_to_live_seconds": [median([update.live_s[index] for update in ours]) for index in range(len(ours[0].live_s))],
        "bytes": published["whole_bytes"],
        "published_bytes": published["bytes"],
        "gb_per_s": median([published["whole_bytes"] / one / 1e9 for one in apply_s]),
        "trainer_blocked_seconds": median([update.published["blocked_ms"] / 1e3 for update in ours + theirs]),
        "changed_share": published["changed_elements"] / published["elements"] if published["elements"] and published["kind"] == "delta" else None,
        "delta_fraction": published["bytes"] / published["whole_bytes"] if published["kind"] == "delta" else None,
        "stop_the_world_pause_seconds": median([one for update in theirs for one in update.pause_s]),
        "stop_the_world_live_seconds": median([update.live_s[0] for update in theirs]),
        "vs_stop_the_world": stopped / median([sum(update.pause_s) for update in ours]),
        "tokens_lost": sum(one["tokens_lost"] for one in seen),
        "requests": sum(one["finished"] for one in seen),
        "by": sorted({way for update in ours for way in update.by}),
    }


async def run(options: argparse.Namespace) -> Json:
    transports = [one for one in options.transports.split(",") if one]
    result: Json = {"machine": machine(), "rounds": options.rounds, "engines": _COUNT}
    shm = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()) / f"rs-bench-weights-{os.getpid()}"
    shm.mkdir()
    try:
        with tempfile.TemporaryDirectory(prefix="rs-bench-") as folder:
            work = Path(options.logs or folder)
            await asyncio.to_thread(work.mkdir, parents=True, exist_ok=True)
            async with redis_server(Path(folder) / "redis", appendfsync="no") as redis, contextlib.AsyncExitStack() as stack:
                trainer = await Child.start("trainer", ["benchmarks.weights.trainer", "cpu", options.size, str(shm / "model")], log=work / "trainer.log")
                stack.push_async_callback(trainer.close)
                await trainer.ask("step", kind="fresh", seed=0, deadline_s=120)
                bench = Bench(options, work, shm, trainer, redis)
                print(f"weights: {result['machine']}; {_COUNT} engines, a decode step every {options.pace_s} s, {options.rounds} rounds", flush=True)
                for transport in transports:
                    result[transport] = await bench.compare(transport)
                    _print(transport, result[transport])
                found = await bench.others("store")
                result["others"] = found
                result["others_throughput_during_update"] = found["share"]
                print(
                    f"\nothers' rate while an engine {_SLOW:.0f} times as slow loads for {found['slow_pause_seconds']:.1f} s: {found['share']:.3f}", flush=True
                )
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    blocked = [result[one]["trainer_blocked_seconds"] for one in transports]
    result["trainer_blocked_seconds"] = median(blocked)
    result["delta_fraction"] = result["delta"]["delta_fraction"] if "delta" in result else None
    result["load_after"] = os.getloadavg()[0]
    return result


def _print(transport: str, found: Json) -> None:
    live = found["publish_to_live_seconds"]
    print(f"\n{transport} (by {', '.join(found['by'])})")
    rows = [
        ("pause of an engine", f"{found['pause_seconds'] * 1e3:.0f} ms; by engine {', '.join(f'{one * 1e3:.0f}' for one in found['pause_seconds_by_engine'])}"),
        ("of it the engine's own calls", f"{found['apply_seconds'] * 1e3:.0f} ms, ratio {found['pause_over_apply']:.2f}"),
        ("published to live, by engine", ", ".join(f"{one:.2f}" for one in live) + " s"),
        ("bytes", f"{found['bytes']:,} in an engine, {found['published_bytes']:,} published; {found['gb_per_s']:.2f} GB/s"),
        ("trainer stood still", f"{found['trainer_blocked_seconds'] * 1e3:.1f} ms"),
        ("stop the world", f"{found['stop_the_world_pause_seconds'] * 1e3:.0f} ms for every engine, live after {found['stop_the_world_live_seconds']:.2f} s"),
        ("its engine seconds paused over ours", f"{found['vs_stop_the_world']:.2f}"),
        ("tokens lost", f"{found['tokens_lost']} of {found['requests']} requests"),
    ]
    if found["delta_fraction"] is not None:
        rows.append(("delta", f"{found['delta_fraction']:.4f} of the bytes, {found['changed_share']:.4f} of the elements changed"))
    for name, text in rows:
        print(f"  {name:<38}{text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted updates of either side; medians are shown")
    parser.add_argument("--size", choices=("tiny", "cpu"), default="cpu", help="of the model")
    parser.add_argument("--transports", default=",".join(_TRANSPORTS))
    parser.add_argument("--pace-s", type=float, default=0.4, help="the engines' token clock")
    parser.add_argument("--requests", type=int, default=4, help="under way on every engine")
    parser.add_argument("--tokens", type=int, default=32, help="of a request")
    parser.add_argument("--quiet-s", type=float, default=8.0, help="between two updates where the others' rate is measured")
    parser.add_argument("--logs", default="", help="folder for what the processes print; empty: not kept")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(parser.parse_args()))
    sys.stdout.write(orjson.dumps(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
