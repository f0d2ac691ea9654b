"""`python -m benchmarks.buffer`: the buffer against the ceiling of its own server and against other queues, all in one run, sides interleaved.

Prints tables for people and, as its last line, one JSON object. Runs from a checkout; the peers on Ray are measured where they are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import orjson
import uvloop

from benchmarks.buffer import scale
from benchmarks.buffer.loads import LENGTHS, Load, load
from benchmarks.buffer.meter import Cost, machine, measure, median
from benchmarks.buffer.sides import Ceiling, CeilingBatched, InProcess, RedisStream, Rollstream, Side
from benchmarks.buffer.table import by_length, heading, print_costs, print_facts, print_ways, ratios
from benchmarks.buffer.tensors import lease_to_tensors
from consumer.allocator import keep_freed_memory
from deploy.redis_server import redis_server
from protocol.connection import Client, connect

_GROUPS = {512: 256, 2048: 128, 8192: 48}
_TQ_BATCH = 32
Costs = dict[str, dict[str, Cost]]
"""Side → put, get → cost."""


async def compare(sides: list[Side], loads: Load, rounds: int) -> Costs:
    """Every side in turn, the order turned by one each round, after a warm-up that is not counted."""
    rows: dict[str, dict[str, list[Cost]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        turn = number % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            await side.prepare(loads)
            put = await measure(len(loads.groups), side.put(loads), side.server_cpu)
            get = await measure(len(loads.groups), side.get(loads), side.server_cpu)
            await side.clear()
            if number:
                rows[side.name]["put"].append(put)
                rows[side.name]["get"].append(get)
    return {name: {what: median(costs) for what, costs in by.items()} for name, by in rows.items()}


def on_redis(client: Client) -> list[Side]:
    return [Ceiling(client), CeilingBatched(client), Rollstream(client, objects=False), Rollstream(client, objects=True), RedisStream(client)]


@contextlib.contextmanager
def ray_sides():  # noqa: ANN201 - a list of sides, or none where Ray or TransferQueue is missing
    from benchmarks.buffer import peers

    if not (importlib.util.find_spec("ray") and importlib.util.find_spec("transfer_queue")):
        sys.stderr.write("ray or TransferQueue is not installed: their rows are left out (`make bench-buffer` installs them)\n")
        yield []
        return
    with peers.ray_session():
        peers.TransferQueue.start()
        try:
            yield [peers.RayQueue(), peers.RayDeque(), peers.TransferQueue(), peers.TransferQueue(batch=_TQ_BATCH)]
        finally:
            peers.TransferQueue.stop()


async def run(options: argparse.Namespace) -> dict[str, object]:
    loads = {tokens: load(tokens, max(8, _GROUPS[tokens] // options.divide)) for tokens in LENGTHS}
    result: dict[str, object] = {"machine": machine()}
    off: dict[int, dict[str, float]] = {}
    everysec: dict[int, dict[str, float]] = {}
    heading(f"buffer: {result['machine']}, {options.rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as folder:
        async with redis_server(Path(folder) / "aof") as logged, redis_server(Path(folder) / "memory") as memory:
            durable, client = connect(logged, deadline_s=120.0), connect(memory, deadline_s=120.0)
            await client.config_set("appendonly", "no")
            await client.config_set("save", "")
            if options.tensors_only:
                await _ways(client, loads, options, result)
                await durable.aclose()
                await client.aclose()
                return result
            with ray_sides() if not options.no_ray else contextlib.nullcontext([]) as peers:
                for tokens, one in loads.items():
                    costs = await compare([*on_redis(client), InProcess(), *peers], one, options.rounds)
                    print_costs(f"AOF off, 8 x {tokens} tokens, {one.payload_bytes} bytes a group", costs)
                    off[tokens] = ratios(costs)
            for tokens, one in loads.items():
                costs = await compare(on_redis(durable), one, max(2, options.rounds // 2))
                print_costs(f"AOF everysec, 8 x {tokens} tokens", costs)
                everysec[tokens] = ratios(costs)
            result |= {**by_length(off), "everysec": by_length(everysec)}
            await _ways(client, loads, options, result)
            await _scale(client, loads, options, result)
            await durable.aclose()
            await client.aclose()
    return result


async def _ways(client: Client, loads: dict[int, Load], options: argparse.Namespace, result: dict[str, object]) -> None:
    ways = [
        await lease_to_tensors(client, one, groups, chunk=64, rounds=options.rounds)
        for groups in (64, 512)
        for one in loads.values()
        if groups == 64 or options.divide == 1
    ]
    print_ways(ways)
    for name, groups in (("chunk64", 64), ("batch512", 512)):
        found = {way.tokens: way for way in ways if way.groups == groups}
        result[f"{name}_vs_raw_get"] = {tokens: way.over_raw.wall for tokens, way in found.items()}
        result[f"{name}_vs_raw_get_cpu"] = {tokens: way.over_raw.cpu for tokens, way in found.items()}
        result[f"{name}_vs_raw_mget_cpu"] = {tokens: way.over_batched.cpu for tokens, way in found.items()}


async def _scale(client: Client, loads: dict[int, Load], options: argparse.Namespace, result: dict[str, object]) -> None:
    result["backlog"] = backlog = await scale.backlog_cost(client, many=100_000 // options.divide)
    result["backlog_cost_ratio"] = backlog["ratio"]
    memory = {tokens: await scale.overhead(client, one) for tokens, one in loads.items()}
    result["overhead_bytes_per_group"] = {tokens: one["group"] for tokens, one in memory.items()}
    result["bare_set_bytes_per_group"] = {tokens: one["bare_set"] for tokens, one in memory.items()}
    result["growth"] = await scale.growth(client, 100_000 // options.divide)
    result["loop_lag"] = await scale.lag(client, load(14_563, 24))
    print_facts(result)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of every side; medians are shown")
    parser.add_argument("--divide", type=int, default=1, help="a quick look: so many times fewer groups")
    parser.add_argument("--no-ray", action="store_true", help="without the peers on Ray")
    parser.add_argument("--tensors-only", action="store_true", help="only the way from a lease to tensors")
    parser.add_argument(
        "--keep-freed", action="store_true", help="the C allocator of this process keeps what is freed, as that of rl-trainer does; for all sides"
    )
    options = parser.parse_args()
    if options.keep_freed and not keep_freed_memory():
        parser.error("--keep-freed: the C allocator of this system is not glibc's")
    result = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with result as runner:
        found = runner.run(run(options))
    sys.stdout.write(orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
