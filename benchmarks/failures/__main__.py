"""`python -m benchmarks.failures`: the same groups from the same engines, with no request that fails and with one in twenty.

The producer's own parts (pool, breaker, sampler, groups) over real HTTP and a real Redis; only the engines are by a clock, so that what is measured is what
failing costs, and not how fast this machine is. More requests are in flight than there are slots, as a producer has that keeps engines busy. Both sides run at
once, so that both see the same machine; the medians are compared. `whole`: without streams, where nothing of a response is known before its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

from benchmarks.failures.engine import ClockedEngine
from buffer.config import BufferConfig
from buffer.contract import Granted
from buffer.redis_ledger import RedisLedger
from deploy.redis_server import redis_server
from producer.config import GroupFilter, ProducerConfig
from producer.engine.client import EngineClient, Sampling, open_session
from producer.pool import EnginePool
from producer.rewards import Grader, Reward, RewardSample
from producer.rollout import Finished, GroupMaker
from producer.sampler import Sampler
from producer.source import Chosen, Row
from protocol.connection import connect
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus, Seq
from protocol.versions import Version
from protocol.wakeups import wakeups
from weightsync.registry import Registry

_CHOSEN = Chosen("row:1", Row(line=1, prompt="1+2=", label="3"), np.arange(2, 14, dtype=np.int32))


class _NoText:
    """The engines write no text, and nothing ends a response but its length."""

    eos_ids: frozenset[int] = frozenset()

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str:
        return ""


async def _alike(_sample: RewardSample) -> Reward:
    return Reward(0.0)


async def side(options: argparse.Namespace, url: str, *, share: float, stream: bool, seed: int) -> dict[str, float]:
    """One run: tokens of finished groups a second, and what it took."""
    keys, client = Keys(f"failures-{uuid.uuid4().hex[:8]}"), connect(url, deadline_s=30.0)
    ledger, registry = RedisLedger(client, keys), Registry(client, keys)
    config = ProducerConfig(sample_retries=3)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        await ledger.create(
            RunIdentity(schema_major=1, seed=0, group_size=options.group_size, dataset="d", tokenizer="t"),
            BufferConfig(groups_per_step=4, pipeline_depth=1000.0),
        )
        await ledger.attach(None, trainer_id="t")
        engines = [ClockedEngine(slots=options.slots, tick_s=options.tick_s, fail_share=share, seed=seed + i) for i in range(options.engines)]
        for number, engine in enumerate(engines):
            await stack.enter_async_context(engine.serving())
            status = EngineStatus(engine_id=EngineId(f"e{number}"), boot_nonce="b", url=engine.url, kind="embedded", state=EngineState.STARTING)
            await registry.beat(status, ttl_s=600.0)
            await registry.ack(status.engine_id, "b", Version(1, 0))
        waker = await stack.enter_async_context(wakeups(client, keys))
        session = await stack.enter_async_context(open_session())
        asked = EngineClient(session, stream=stream)
        pool = EnginePool(registry, ledger, waker, deadline_s=30.0, on_engines=asked.progress.heard)
        sampler = Sampler(pool=pool, client=asked, grader=Grader(score=_alike, label_fault=lambda _: ""), config=config, decode=_NoText())
        sampling = Sampling(max_new_tokens=options.tokens, ignore_eos=True)
        maker = GroupMaker(sampler, sampling, group_size=options.group_size, group_filter=GroupFilter.NONE, producer_id="p", owner="o" * 16)
        await pool.refresh()
        watch = asyncio.create_task(sampler.watch())
        stack.callback(watch.cancel)
        inflight = int(options.over * options.engines * options.slots) // options.group_size
        granted = await ledger.reserve("o" * 16, "r", 1, max_bytes=1 << 16)
        assert isinstance(granted, Granted)
        (slot,) = granted.slots
        slots = (dataclasses.replace(slot, seq=Seq(number)) for number in itertools.count())

        async def one_after_the_other() -> list[Any]:
            return [await maker.make(next(slots), _CHOSEN) for _ in range(options.groups)]

        began = time.monotonic()
        made = [group for groups in await asyncio.gather(*(one_after_the_other() for _ in range(inflight))) for group in groups]
        seconds = time.monotonic() - began
    kept = sum(group.new_tokens for group in made if isinstance(group, Finished))
    return {
        "tokens_per_s": kept / seconds,
        "groups_failed": sum(not isinstance(group, Finished) for group in made),
        "groups": len(made),
        "requests": sum(engine.requests for engine in engines),
        "requests_failed": sum(engine.failed for engine in engines),
        "tokens_written_over_kept": sum(engine.generated for engine in engines) / kept,
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        async with redis_server(Path(folder) / "redis", appendfsync="no") as url:
            for number in range(options.rounds):
                for stream in (True, False):
                    both = await asyncio.gather(*(side(options, url, share=share, stream=stream, seed=100 * number) for share in (0.0, options.share)))
                    for name, one in zip(("none fails", "some fail"), both, strict=True):
                        found[name if stream else f"whole, {name}"].append(one)
                        print(
                            f"  {'streamed' if stream else 'whole':<10}{name:<12}{one['tokens_per_s']:8.1f} tokens/s  {one['requests_failed']:.0f} of "
                            f"{one['requests']:.0f} requests failed, {one['groups_failed']:.0f} of {one['groups']:.0f} groups; "
                            f"written over kept {one['tokens_written_over_kept']:.3f}",
                            flush=True,
                        )
    rate = {name: statistics.median(one["tokens_per_s"] for one in of) for name, of in found.items()}
    return {
        "share": options.share,
        "cost": 1 - rate["some fail"] / rate["none fails"],
        "cost_whole": 1 - rate["whole, some fail"] / rate["whole, none fails"],
        "groups_failed": sum(one["groups_failed"] for of in found.values() for one in of),
        "written_over_kept": statistics.median(one["tokens_written_over_kept"] for one in found["some fail"]),
        "written_over_kept_whole": statistics.median(one["tokens_written_over_kept"] for one in found["whole, some fail"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__)
    parser.add_argument("--share", type=float, default=0.05, help="of requests that fail, at a random token or before any")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32, help="requests that an engine decodes at once")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=14, help="one after the other in each place in flight")
    parser.add_argument("--over", type=float, default=1.5, help="requests in flight for each slot")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--tick-s", type=float, default=0.05, help="the engines' token clock")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(parser.parse_args()))
    sys.stdout.write(orjson.dumps(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
