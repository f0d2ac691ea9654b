"""What each daemon of a run has from being asked to stop until it is killed, on this machine and on Ray alike. Pure."""

from __future__ import annotations

from consumer.config import stop_seconds
from deploy.config import UpConfig
from producer.config import stop_seconds as producer_stop_seconds

TRAINER, PRODUCER, ENGINE = "trainer", "producer", "engine"
ENGINE_S = 20.0
_MARGIN_S = 10.0
_SERVER_S = 15.0
"""What an engine host needs beyond its own leaving to end a server of SGLang: that takes six seconds, and is bounded by ten."""


def stop_seconds_of(config: UpConfig, role: str) -> float:
    """More than the deadlines of its own that a daemon ends within. Raises: `KeyError` for a role that has none in the configuration."""
    return {
        TRAINER: stop_seconds(config.weights) + _MARGIN_S,
        PRODUCER: producer_stop_seconds(config.producer),
        ENGINE: ENGINE_S + (_SERVER_S if config.engine.kind == "sglang" else 0.0),
    }[role]
