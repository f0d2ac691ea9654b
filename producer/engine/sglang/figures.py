"""What SGLang tells of itself, as an engine's figures: pure. Where it speaks of several ranks or replicas, loads are summed and shares are the largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import DecodeError

_PREFIX = "sglang:"
_WAITING = ("num_queue_reqs", "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs")
"""The half that writes counts those of whose prompts it waits for apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at `/metrics`. Counters are since the server's start; None: it does not tell."""

    running: int = 0
    queued: int = 0
    generated_tokens: int = 0
    kv_usage: float = 0.0
    idle_s: float | None = None
    """Seconds in which it had nothing to compute."""
    told: bool = False
    """Whether it told how many requests run: without that it is never known to be idle."""
    sign: tuple[float, ...] = ()
    """Differs from the last one if anything was computed between them."""


def parse(exposition: str) -> Sample:
    """Raises: `DecodeError` for what is not Prometheus' text format."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(exposition):
            if family.name.startswith(_PREFIX):
                for sample in family.samples:
                    found.setdefault(sample.name.removeprefix(_PREFIX), []).append((sample.labels, float(sample.value)))
    except (ValueError, KeyError, IndexError) as problem:
        raise DecodeError("/metrics", f"not Prometheus' text format ({problem})") from problem

    def total(name: str, **labels: str) -> float:
        return sum(value for had, value in found.get(name, ()) if labels.items() <= had.items())

    decoded, finished = total("realtime_tokens_total", mode="decode"), total("generation_tokens_total")
    idle = [value for _, value in found.get("scheduler_idle_seconds_total", ())]
    return Sample(
        running=int(total("num_running_reqs")),
        queued=int(sum(map(total, _WAITING))),
        generated_tokens=int(max(decoded, finished)),  # the first counts as they come, but not the first token of a request; the second when a request is over
        kv_usage=min(1.0, max((value for _, value in found.get("token_usage", ())), default=0.0)),
        idle_s=sum(idle) / len(idle) if idle else None,
        told="num_running_reqs" in found,
        sign=(decoded, finished, total("realtime_tokens_total"), total("num_used_tokens"), total("num_requests_total")),
    )


def capacity(about: Mapping[str, Any]) -> int:
    """Requests decoded at once, from `/server_info`; 0 if it does not tell."""
    states = about.get("internal_states")
    each = states[0].get("effective_max_running_requests_per_dp") if isinstance(states, list) and states and isinstance(states[0], dict) else None
    replicas = about.get("dp_size")
    if type(each) is int:
        return each * (replicas if type(replicas) is int and replicas > 0 else 1)
    most = about.get("max_running_requests")
    return most if type(most) is int else 0
