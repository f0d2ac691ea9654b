"""When a run is over."""

from __future__ import annotations

import statistics

from consumer.checkpoint import Progress
from consumer.config import StopConfig
from consumer.stats import REWARD_WINDOW


def stop_reason(progress: Progress, stop: StopConfig) -> str | None:
    """The first criterion that `progress` meets, in words; None to go on."""
    if stop.steps and progress.step >= stop.steps:
        return f"stop.steps {stop.steps}"
    if stop.tokens and progress.tokens >= stop.tokens:
        return f"stop.tokens {stop.tokens}"
    if stop.seconds and progress.elapsed_s >= stop.seconds:
        return f"stop.seconds {stop.seconds:g}"
    if stop.reward and len(progress.rewards) >= REWARD_WINDOW and statistics.fmean(progress.rewards[-REWARD_WINDOW:]) >= stop.reward:
        return f"stop.reward {stop.reward:g}"
    return None
