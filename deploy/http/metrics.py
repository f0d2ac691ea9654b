"""A picture of the run as Prometheus metrics. Names end in their unit; every metric has its run as a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from buffer.bias import UNKNOWN, Bias
from deploy.http import evals
from deploy.snapshot import Picture
from deploy.tally import Distribution
from deploy.trouble import fallbacks, resting, server_missing, troubles
from protocol.messages import Edge, EngineState, EngineStatus
from weightsync.aim import EVAL_FLEET

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Upper bounds of the buckets of staleness and lag."""


def exposition(picture: Picture | None, run: str) -> bytes:
    """The text Prometheus reads; None: Redis does not answer, which is a metric too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(picture, run))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, picture: Picture | None, run: str) -> None:
        self._picture = picture
        self._run = run

    def collect(self) -> Iterator[Metric]:
        picture = self._picture
        yield self._gauge("rollstream_redis_up", "1 if Redis answers.", float(picture is not None))
        yield self._gauge("rollstream_run_present", "1 if the run is there.", float(picture is not None and picture.ledger is not None))
        if picture is not None:
            yield from self._watchdog(picture)
        if picture is not None and picture.ledger is not None:
            yield from self._ledger(picture)
            yield from self._training(picture)
            yield from self._engines(picture)
            yield from self._weights(picture)
            yield from self._members(picture)
            yield from evals.gauges(picture, self._run)

    def _watchdog(self, picture: Picture) -> Iterator[Metric]:
        """Every edge is always there, so that an alarm on it has something to watch."""
        seconds = {stall.edge: stall.seconds(picture.at) for stall in reversed(picture.blocked)}
        blocked = self._family("rollstream_blocked_seconds", "For how long an edge has held the run up, at its root; 0: it does not.", "edge")
        for edge in Edge:
            blocked.add_metric([self._run, edge.value], seconds.get(edge, 0.0))
        yield blocked
        yield self._gauge("rollstream_stalled", "1 if an edge has been blocked for longer than run.stall_seconds.", float(bool(picture.stalls)))

    def _ledger(self, picture: Picture) -> Iterator[Metric]:
        ledger = picture.ledger
        assert ledger is not None
        groups = self._family("rollstream_buffer_groups", "Groups by state.", "state")
        for state, count in (("generating", ledger.generating), ("ready", ledger.ready), ("leased", ledger.leased), ("released", ledger.released)):
            groups.add_metric([self._run, state], count)
        yield groups
        yield self._gauge("rollstream_buffer_admission_limit_groups", "Groups that may be outstanding.", ledger.admission_limit)
        yield self._gauge("rollstream_buffer_bytes", "Bytes of payloads charged.", ledger.bytes_used)
        yield self._gauge("rollstream_buffer_budget_bytes", "Byte budget.", ledger.byte_budget)
        yield self._gauge("rollstream_dead_letters", "Groups that were set aside and can be queued again.", ledger.letters)
        yield self._gauge("rollstream_steps_to_spill", "Trained steps that wait to be spilled.", ledger.to_spill)
        yield self._gauge("rollstream_spill_failing", "1 if the trainer cannot spill.", float(bool(picture.spill_problem)))
        yield self._gauge("rollstream_journal_steps", "Steps in the journal.", ledger.trained - ledger.dropped)
        readers = self._family("rollstream_reader_lag_steps", "Trained steps that a reader of the journal has not had yet.", "reader")
        for name, step in ledger.readers.items():
            readers.add_metric([self._run, name], max(0, ledger.trained + 1 - step))
        yield readers
        yield self._gauge("rollstream_trained_step", "Newest trained step of the surviving line.", ledger.trained)
        yield self._gauge("rollstream_incarnation", "Attachment of a trainer.", ledger.incarnation)
        yield self._gauge("rollstream_draining", "1 once the run's end is decided.", float(ledger.state.value == "draining"))
        yield self._counts("rollstream_groups_released", "Groups released, by reason.", {str(one): count for one, count in ledger.releases.items()}, "reason")
        yield self._counts("rollstream_groups_dead", "Groups set aside for good, by reason.", {str(one): count for one, count in ledger.dead.items()}, "reason")

    def _training(self, picture: Picture) -> Iterator[Metric]:
        totals = picture.totals
        if picture.reward is not None:
            yield self._gauge("rollstream_reward_mean", "Mean sampled reward of the last 20 steps.", picture.reward)
        yield self._histogram("rollstream_trained_staleness_steps", "Staleness of tokens that entered a loss.", picture.staleness)
        yield self._histogram("rollstream_publish_lag_steps", "Publish lag of stored tokens.", picture.publish_lag)
        yield self._histogram("rollstream_ready_staleness_steps", "Staleness that READY tokens would have in the next step.", picture.ready_age)
        for name, text, value in (
            ("rollstream_trained_tokens", "Tokens that entered a loss.", totals.tokens),
            ("rollstream_masked_tokens", "Tokens over K, kept out of losses.", totals.masked),
            ("rollstream_put_groups", "Groups stored.", totals.put),
            ("rollstream_put_bytes", "Bytes of payloads stored.", totals.put_bytes),
            ("rollstream_put_tokens", "Trainable tokens stored.", totals.put_tokens),
            ("rollstream_published_versions", "Versions published.", totals.published),
            ("rollstream_published_bytes", "Bytes of weights published.", totals.published_bytes),
            ("rollstream_published_deltas", "Versions published that hold only what changed.", totals.deltas),
            ("rollstream_applied_versions", "Updates that engines took.", totals.applied),
            ("rollstream_engine_pause_seconds", "Seconds engines were paused for updates.", totals.pause_s),
        ):
            yield self._counter(name, text, value)
        if picture.bias is not None:
            yield from self._bias(picture.bias)

    def _bias(self, found: Bias) -> Iterator[Metric]:
        tokens = self._family("rollstream_tokens_by_length", "Sampled tokens by what became of them and the length of their rollout, up to.", "fate", "length")
        for bucket, flow in found.lengths.items():
            length = "unknown" if bucket == UNKNOWN else str(bucket)
            fates = {"generated": flow.generated, "trained": flow.trained, "masked": flow.masked, "outstanding": flow.outstanding, **flow.dropped}
            for fate, count in fates.items():
                tokens.add_metric([self._run, fate, length], count)
        yield tokens

    def _engines(self, picture: Picture) -> Iterator[Metric]:
        troubled = {trouble.engine_id for trouble in troubles(picture)}
        rests = resting(picture)
        if picture.tokens_per_s is not None:
            yield self._gauge("rollstream_generated_tokens_per_second", "Over all engines, since the look before.", picture.tokens_per_s)
        figures: dict[str, tuple[str, Callable[[EngineStatus], float | None]]] = {
            "rollstream_engine_routable": ("1 if it may be asked.", lambda status: float(status.state is EngineState.ROUTABLE)),
            "rollstream_engine_version_step": ("n of the version it serves.", lambda status: None if status.version is None else status.version.n),
            "rollstream_engine_lag_steps": ("Newest trained step minus its own; of engines that evaluate, none.", lambda status: _lag(picture, status)),
            "rollstream_engine_trouble": ("1 if something keeps it from the newest version.", lambda status: float(status.engine_id in troubled)),
            "rollstream_engine_resting_producers": ("Producers that leave it alone for a while.", lambda status: len(rests.get(status.engine_id, {}))),
            "rollstream_engine_running_requests": ("Requests being decoded.", lambda status: status.running),
            "rollstream_engine_queued_requests": ("Requests that wait.", lambda status: status.queued),
            "rollstream_engine_busy_seconds": ("Seconds spent computing since its boot.", lambda status: status.busy_s),
            "rollstream_engine_paused_seconds": ("Seconds paused since its boot.", lambda status: status.paused_s),
            "rollstream_engine_generated_tokens": ("Tokens since its boot.", lambda status: status.generated_tokens),
        }
        for name, (text, value_of) in figures.items():
            family = self._family(name, text, "engine")
            for status in picture.engines:
                if (value := value_of(status)) is not None:
                    family.add_metric([self._run, status.engine_id], value)
            yield family

    def _weights(self, picture: Picture) -> Iterator[Metric]:
        """How versions reach engines. An alarm: an engine whose transport is not the configured one, a carrier that is behind the pointer."""
        newest = picture.newest
        if newest is not None:
            yield self._gauge("rollstream_newest_version_step", "n of the newest version published.", newest.version.n)
            share = 1.0 if picture.changed_share is None else picture.changed_share
            yield self._gauge("rollstream_newest_version_changed_ratio", "Share of its elements that it was published with.", share)
        by = dict(sorted(picture.totals.by_transport.items()))
        yield self._counts("rollstream_applied_versions_by_transport", "Updates that engines took, by what brought them.", by, "transport")
        if (from_store := fallbacks(picture)) is not None:
            yield self._counter("rollstream_store_fallbacks", "Updates that the store brought although another transport is configured.", from_store)
            text = "1 if weights.transport needs a weight server and none of its kind is registered."
            yield self._gauge("rollstream_weight_server_missing", text, float(server_missing(picture)))
        transports = self._family("rollstream_engine_transport", "1 for what brought the version an engine serves.", "engine", "transport")
        for status in picture.engines:
            if status.transport:
                transports.add_metric([self._run, status.engine_id, status.transport], 1.0)
        yield transports
        staged = self._family("rollstream_weight_server_staged_step", "n of the newest version that it can send.", "server", "backend")
        groups = self._family("rollstream_weight_server_engines", "Engines that it is connected to.", "server", "backend")
        sent = self._family("rollstream_weight_server_sent_bytes", "Bytes sent to engines since its start.", "server", "backend")
        for server in picture.weight_servers:
            labels = [self._run, server.server_id, server.backend]
            if server.staged is not None:
                staged.add_metric(labels, server.staged.n)
            groups.add_metric(labels, server.groups)
            sent.add_metric(labels, server.sent_bytes)
        yield from (staged, groups, sent)
        whole = self._family("rollstream_relay_version_step", "n of the newest version that is whole there.", "relay")
        lags = self._family("rollstream_relay_lag_steps", "Newest trained step minus that of its newest version.", "relay")
        fetched = self._family("rollstream_relay_fetched_bytes", "Bytes read from the store since its start.", "relay")
        made = self._family("rollstream_relay_versions", "Versions since its start, by how they were made.", "relay", "kind")
        failing = self._family("rollstream_relay_trouble", "1 if it cannot make the newest version whole.", "relay")
        for relay in picture.relays:
            if relay.version is not None:
                whole.add_metric([self._run, relay.relay_id], relay.version.n)
            if (lag := picture.lag(relay.version)) is not None:
                lags.add_metric([self._run, relay.relay_id], lag)
            fetched.add_metric([self._run, relay.relay_id], relay.fetched_bytes)
            made.add_metric([self._run, relay.relay_id, "delta"], relay.deltas)
            made.add_metric([self._run, relay.relay_id, "full"], relay.fulls)
            failing.add_metric([self._run, relay.relay_id], float(bool(relay.trouble)))
        yield from (whole, lags, fetched, made, failing)

    def _members(self, picture: Picture) -> Iterator[Metric]:
        yield self._gauge("rollstream_producers", "Producers that are here.", len(picture.producers))
        yield self._gauge("rollstream_trainers", "Trainers that are here.", len(picture.trainers))
        wanted = self._family("rollstream_processes_wanted", "Processes that `rollstream up` is to have on its machine.", "role", "host")
        running = self._family("rollstream_processes_running", "Those of them that run and have announced themselves.", "role", "host")
        for launcher in picture.launchers:
            for role, count in launcher.wanted.items():
                wanted.add_metric([self._run, role, launcher.host], count)
                running.add_metric([self._run, role, launcher.host], sum(name.startswith(f"{role}-") for name in launcher.running))
        yield from (wanted, running)
        waits = self._family("rollstream_waiting_seconds", "For how long a member has been waiting.", "member", "edge")
        everyone = [(status.producer_id, status.waiting_for, status.waiting_since) for status in picture.producers]
        everyone += [(status.trainer_id, status.waiting_for, status.waiting_since) for status in picture.trainers]
        for member, edge, since in everyone:
            if edge is not None:
                waits.add_metric([self._run, member, edge.value], max(0.0, picture.at - since))
        yield waits
        lag = self._family("rollstream_producer_loop_lag_seconds", "Worst event-loop lag since the last heartbeat.", "producer")
        for status in picture.producers:
            lag.add_metric([self._run, status.producer_id], status.loop_lag_ms / 1000)
        yield lag

    def _family(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["run", *labels])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = self._family(name, text)
        family.add_metric([self._run], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["run"])
        family.add_metric([self._run], value)
        return family

    def _counts(self, name: str, text: str, counts: dict[str, int], label: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=["run", label])
        for value, count in counts.items():
            family.add_metric([self._run, value], count)
        return family

    def _histogram(self, name: str, text: str, found: Distribution) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["run"])
        buckets = [(str(float(bound)), float(sum(count for value, count in found.histogram.items() if value <= bound))) for bound in _STEPS]
        family.add_metric([self._run], [*buckets, ("+Inf", float(found.count))], found.mean * found.count)
        return family


def _lag(picture: Picture, status: EngineStatus) -> int | None:
    """An engine that only evaluates stays on a version on purpose: no alarm on lag is meant for it."""
    return None if status.fleet == EVAL_FLEET else picture.lag(status.version)
