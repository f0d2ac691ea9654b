"""What a step is told as: sums that agree with what entered the loss, down to lengths and ages."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer.audit import read_audit
from buffer.bias import length_bucket, read_bias
from buffer.contract import Granted, StepRecord
from buffer.redis_ledger import RedisLedger
from buffer.witness import read_witness
from consumer.advantages import group_mean
from consumer.backend import StepReport
from consumer.batch import collate
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.metric_names import metric_of
from consumer.stats import step_stats
from protocol.codec import encode_group
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import GroupHeader, Reason, Rollout, RolloutGroup, Span
from protocol.versions import Version
from tests.consumer.trackers.event_files import scalars

REPORT = StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)


def rollout(prompt: int, *spans: tuple[int, int]) -> Rollout:
    """`spans`: (n, tokens) in order."""
    length = prompt + sum(tokens for _, tokens in spans)
    at, found = prompt, []
    for n, tokens in spans:
        found.append(Span(version=Version(1, n), start=at, end=at + tokens))
        at += tokens
    mask = np.array([0] * prompt + [1] * (length - prompt), dtype=np.uint8)
    return Rollout(tokens=np.arange(length, dtype=np.int32), mask=mask, logprobs=np.zeros(length, dtype=np.float32), spans=tuple(found), reward=1.0)


def test_lengths_and_ages_are_of_the_sampled_tokens_in_the_loss_and_out_of_it(make_record: Callable[..., StepRecord], header_of: Callable[..., GroupHeader]):
    group = RolloutGroup(rollouts=(rollout(3, (5, 2)), rollout(3, (0, 5), (4, 4)), rollout(3, (1, 3))))
    header = header_of(group, seq=0, attempt=1, token="t", payload=encode_group(group))
    batch = collate(make_record(step=6, bound=3), [(header, group)], group_mean)
    stats = step_stats([batch, batch], REPORT, seconds=1.0, wait_s=0.0, train_s=1.0)
    assert (stats["tokens"], stats["masked"]) == (12, 16)
    assert stats["staleness"] == {"0": 4, "1": 8}
    assert stats["bias"] == {"trained": {"2": 4, "16": 8}, "masked": {"4": 6, "16": 10}, "masked_age": {"4": 6, "5": 10}}


@pytest.mark.redis
async def test_every_token_of_a_real_run_is_trained_masked_dropped_or_under_way(
    redis: Client, keys: Keys, make_config: Callable[..., dict[str, dict[str, Any]]], producing: Callable[..., Any]
):
    """Steps of a run that stops and resumes from an earlier checkpoint, with filtered, failed and READY groups in between."""
    config = validate(TrainerDaemonConfig, make_config(stop__steps=6, trackers__names=["tensorboard"]), source="test")
    again = validate(TrainerDaemonConfig, make_config(stop__steps=9, trackers__names=["tensorboard"]), source="test")
    ledger, identity = RedisLedger(redis, keys), identify(config.run, config.model, config.data, config.rollout)
    producing(keys, limit=9 * 4 + 2)

    async def train(how: TrainerDaemonConfig, *, new: bool, from_step: int | None = None) -> None:
        await run_trainer(how, RedisLedger(redis, keys), redis, keys, asyncio.Event(), new_as=identity if new else None, from_step=from_step)

    await train(config, new=True)
    await train(again, new=False, from_step=4)
    attached = await ledger.attach((await ledger.status()).checkpoints[-1], trainer_id="test")
    sampled = {Reason.FILTERED: [3, 6, 6, 1], Reason.FAILED: [5]}
    for reason, lengths in sampled.items():
        granted = await ledger.reserve("other", f"ask {reason}", 1, max_bytes=100)
        assert isinstance(granted, Granted)
        await ledger.release(granted.slots[0].seq, granted.slots[0].token, reason, lengths=lengths)
    await ledger.drain(attached.incarnation, "over")

    events = await read_audit(config.run.folder / "audit.jsonl", redis, keys)
    found = read_bias(events)
    line = {one.step: one for one in read_witness(config.run.folder / "witness.jsonl")}
    assert sorted(line) == list(range(1, 10))
    assert found.total.trained == sum(one.tokens for one in line.values())
    assert found.total.masked == sum(one.masked for one in line.values())
    assert found.total.dropped == {"failed": 5, "filtered": 16}
    ready = sum((await ledger.status()).ready_versions.values())
    assert found.total.outstanding == ready > 0
    generated: Counter[int] = Counter()
    for event in events:
        if event.op == "put":
            lengths = event.fields["lengths"]
            assert isinstance(lengths, list)
            assert sum(lengths) == sum(event.fields["tokens"].values())
            for length in lengths:
                generated[length_bucket(length)] += length
    for lengths in sampled.values():
        for length in lengths:
            generated[length_bucket(length)] += length
    assert {bucket: flow.generated for bucket, flow in found.lengths.items()} == dict(generated)
    assert all(flow.generated == flow.trained + flow.masked + sum(flow.dropped.values()) + flow.outstanding for flow in found.lengths.values())
    assert found.unaccounted == 0

    told = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [name for name in told[-1] if metric_of(name) is None] == [], "every figure has a name"
    for step in told:
        assert step["tokens"] == step["tokens_effective"] + step["tokens_clipped"] + step["tokens_idle"]
    tracked = scalars(config.run.folder / "tensorboard")
    assert [(step, value) for step, name, value in tracked if name == "tokens"] == [(one["step"], one["tokens"]) for one in told]
    trained = next(event for event in events if event.op == "trained")
    assert "mismatch_kl_k3" in told[-1]
    assert "mismatch_kl_k3" not in trained.fields["stats"], "what stays in Redis is small"
