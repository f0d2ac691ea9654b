"""`/metrics` of the embedded engine: the numbers it has, under SGLang's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from producer.engine.embedded.worker import Worker


class _WorkerCollector(Collector):
    def __init__(self, worker: Worker, model_name: str) -> None:
        self._worker = worker
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        counters, model = self._worker.counters, self._worker.model
        capacity = model.slots * model.max_length
        used = self._worker.used_tokens
        yield self._gauge("num_running_reqs", "Requests being decoded.", counters.running)
        yield self._gauge("num_queue_reqs", "Requests waiting for a slot.", counters.queued)
        yield self._gauge("num_paused_reqs", "Requests held by a pause.", counters.running + counters.queued if self._worker.paused else 0)
        yield self._gauge("num_retracted_reqs", "Requests whose cache was dropped, waiting to be computed anew.", counters.retracted)
        yield self._gauge("num_used_tokens", "Tokens in the KV cache.", used)
        yield self._gauge("token_usage", "Share of the KV cache in use.", used / capacity)
        yield self._gauge("max_total_num_tokens", "Tokens the KV cache holds.", capacity)
        yield self._gauge("context_len", "Tokens of one request at most.", model.max_length)
        yield self._gauge("cache_hit_rate", "Share of prompt tokens taken from a prefix cache: there is none.", 0)
        yield self._gauge("gen_throughput", "Generated tokens a busy second since start.", counters.generated_tokens / max(counters.busy_s, 1e-9))
        yield self._counter("prompt_tokens", "Prompt tokens prefilled.", counters.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", counters.generated_tokens)
        yield self._counter("num_requests", "Requests finished.", counters.requests)
        yield self._counter("num_aborted_requests", "Requests finished by an abort.", counters.aborted)
        load = GaugeMetricFamily("sglang:weight_load_duration_seconds", "Seconds of the newest weight update.", labels=["model_name", "source"])
        load.add_metric([*self._label, counters.load_source], counters.load_s)
        yield load

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family


def registry(worker: Worker, model_name: str) -> CollectorRegistry:
    """A registry of this engine's own."""
    own = CollectorRegistry(auto_describe=False)
    own.register(_WorkerCollector(worker, model_name))
    return own


def exposition(own: CollectorRegistry) -> bytes:
    return generate_latest(own)
