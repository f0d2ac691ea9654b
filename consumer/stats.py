"""What a step is told as: the statistics in its audit event, and what its line of metrics.jsonl has besides. `consumer.metric_names` names all of it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from consumer.backend import StepReport
from consumer.batch import ChunkFigures
from protocol.messages import JsonValue

REWARD_WINDOW = 20
"""Reward figures are means over so many steps."""


def step_stats(
    batches: Sequence[ChunkFigures], report: StepReport, *, seconds: float, wait_s: float, train_s: float, snapshot_s: float = 0.0, digest_s: float = 0.0
) -> dict[str, JsonValue]:
    """One optimizer step. `seconds` from opening the step to its end, `wait_s` of them without work for the model, `train_s` of them in the model: `snapshot_s`
    of these copied the weights for publishing, `digest_s` told what they are known by.
    """
    rewards = [reward for batch in batches for reward in batch.rewards]
    staleness: Counter[int] = Counter()
    group_staleness: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    masked_age: Counter[int] = Counter()
    for batch in batches:
        staleness.update(batch.staleness)
        group_staleness.update(batch.group_staleness)
        trained.update(batch.lengths)
        masked.update(batch.masked_lengths)
        masked_age.update(batch.masked_staleness)
    return {
        "reward": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "groups": sum(len(batch.seqs) for batch in batches),
        "rollouts": len(rewards),
        "tokens": sum(batch.tokens for batch in batches),
        "masked": sum(batch.masked for batch in batches),
        "staleness": _histogram(staleness),
        "group_staleness": _histogram(group_staleness),
        "bias": {"trained": _histogram(trained), "masked": _histogram(masked), "masked_age": _histogram(masked_age)},
        "response_tokens_mean": sum(batch.response_tokens for batch in batches) / max(1, len(rewards)),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "entropy": report.entropy,
        "clip_fraction": report.clip_fraction,
        "ratio_dev": report.ratio_dev,
        "seconds": seconds,
        "wait_s": wait_s,
        "train_s": train_s,
        "snapshot_s": snapshot_s,
        "digest_s": digest_s,
    }


def step_diagnostics(batches: Sequence[ChunkFigures], report: StepReport) -> dict[str, JsonValue]:
    """What metrics.jsonl and trackers get beside `step_stats`; the audit event, which stays in Redis, does without."""
    staleness: Counter[int] = Counter()
    for batch in batches:
        staleness.update(batch.staleness)
    tokens, masked = staleness.total(), sum(batch.masked for batch in batches)
    return {
        **report.diagnostics,
        "staleness_mean": sum(steps * count for steps, count in staleness.items()) / max(1, tokens),
        "staleness_max": max(staleness, default=0),
        "masked_fraction": masked / max(1, tokens + masked),
    }


def _histogram(counts: Counter[int]) -> dict[str, JsonValue]:
    return {str(value): count for value, count in sorted(counts.items())}


class MetricsFile:
    """metrics.jsonl: one line a step, appended. A resumed run repeats the steps after its checkpoint: the last line of a step stands."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def append(self, line: Mapping[str, JsonValue]) -> None:
        self._file.write(orjson.dumps(dict(line), option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
