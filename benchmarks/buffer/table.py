"""The tables, and the ratios that the aims are stated in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.buffer.meter import Cost
from benchmarks.buffer.tensors import Way

_PEERS = {
    "redis stream": "vs_redis_stream",
    "ray.util.queue": "vs_ray_queue",
    "ray actor deque": "vs_ray_deque",
    "TransferQueue": "vs_transferqueue",
    "TransferQueue x32": "vs_transferqueue_batched",
    "asyncio.Queue": "vs_in_process",
}


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}")


def print_costs(title: str, costs: Mapping[str, Mapping[str, Cost]]) -> None:
    print(f"\n{title}")
    print(f"{'side':<20}{'put/s':>9}{'get/s':>9}   {'put us: wall, client CPU, server CPU':<40}{'get us':<30}")
    for name, by in costs.items():
        put, get = by["put"], by["get"]
        figures = [f"{one.wall_us:8.0f}{one.client_us:8.0f}{one.server_us:8.0f}" for one in (put, get)]
        print(f"{name:<20}{put.groups_per_s:>9.0f}{get.groups_per_s:>9.0f}   {figures[0]:<40}{figures[1]:<30}")


def ratios(costs: Mapping[str, Mapping[str, Cost]]) -> dict[str, float]:
    """Ours from bytes to bytes against the ceiling, one command a call and batched as ours are; from arrays to arrays against the peers, the slower of put and
    get. Greater than 1: we are faster.
    """
    ours, objects = costs["rollstream bytes"], costs["rollstream"]
    found = {f"{what}_vs_ceiling": costs["ceiling"][what].wall_us / ours[what].wall_us for what in ("put", "get")}
    found |= {f"{what}_vs_ceiling_batched": costs["ceiling batched"][what].wall_us / ours[what].wall_us for what in ("put", "get")}
    for name, field in _PEERS.items():
        if name in costs:
            found[field] = min(costs[name][what].wall_us / objects[what].wall_us for what in ("put", "get"))
    return found


def by_length(found: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Each ratio over the lengths that have it.

    >>> by_length({512: {"vs_a": 1.0, "vs_b": 2.0}, 2048: {"vs_a": 3.0}})
    {'vs_a': {512: 1.0, 2048: 3.0}, 'vs_b': {512: 2.0}}
    """
    names = dict.fromkeys(name for one in found.values() for name in one)
    return {name: {tokens: one[name] for tokens, one in found.items() if name in one} for name in names}


def print_ways(ways: Iterable[Way]) -> None:
    print("\nlease to tensors              over GET: wall, CPU   over MGET: wall, CPU   us a group, wall and CPU: ours, GET, MGET")
    for way in ways:
        over = "".join(f"{one.wall:14.2f}{one.cpu:8.2f}" for one in (way.over_raw, way.over_batched))
        figures = "".join(f"{one.wall_us:9.0f}{one.client_us:7.0f}" for one in (way.ours, way.raw, way.batched))
        print(f"{way.groups:>4} groups of 8 x {way.tokens:<8}{over}   {figures}")


def print_facts(result: Mapping[str, Any]) -> None:
    backlog = result["backlog"]
    print("Redis microseconds by READY groups: " + ", ".join(f"{name} {value:.1f}" for name, value in backlog.items() if name != "ratio"))
    print(f"    most against least: {backlog['ratio']:.2f}")
    for tokens, ours in result["overhead_bytes_per_group"].items():
        print(f"memory beyond the payload, 8 x {tokens}: {ours:.0f} bytes a group ({result['bare_set_bytes_per_group'][tokens]:.0f} of them by a bare SET)")
    grown = result["growth"]
    print(f"{grown['groups']:.0f} groups through a small buffer: {grown['bytes_per_group']:+.2f} bytes of Redis memory a group")
    lag = result["loop_lag"]
    print(f"event-loop lag p99: idle {lag['idle_p99_ms']:.2f} ms, moving 1 MiB payloads {lag['busy_p99_ms']:.2f} ms")
