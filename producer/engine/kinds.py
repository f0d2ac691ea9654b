"""Which `Kind` of engine a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from producer.engine.config import EngineConfig
from producer.engine.external import ExternalServer
from producer.engine.hosted import Kind
from producer.engine.inprocess import Embedded
from producer.engine.sglang.arguments import check_context
from producer.engine.sglang.context import known_context
from producer.engine.sglang.engine import SGLangServer
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig
from weightsync.lora import LoraConfig

_NO_LORA = LoraConfig()
_BY_FILES = ("store", "delta")


def make_kind(
    settings: EngineConfig,
    weights: WeightsConfig,
    *,
    lora: LoraConfig = _NO_LORA,
    shares_device: bool = False,
    index: int,
    model: str,
    longest: int,
    seed: Callable[[str], int],
    log: Path,
) -> Kind:
    """`lora`: what adapters it must be able to take, where versions are adapters. `shares_device`: it frees its memory in the trainer's turns. `longest`:
    tokens of the longest request. `seed`: of the noise of a boot, by its nonce. `log`: what a server of its own writes.

    Raises: `ConfigError` for what can never work. Looks at files, opens nothing.
    """
    if settings.kind == "embedded":
        return Embedded(settings, lora=lora, index=index, model=model, longest=longest, seed=seed, group_deadline_s=weights.group_deadline_s)
    if settings.kind == "sglang":
        check_context(settings, longest=longest, context=known_context(model))
        if settings.prefill and (weights.transport not in _BY_FILES or lora.adapters or shares_device):
            raise ConfigError(
                "engine.prefill: an engine of two servers takes versions by files, keeps its memory, and has no adapters: "
                'use weights.transport "store" or "delta", another placement.layout than "colocated", and lora.publish "merged"'
            )
        return SGLangServer(settings, lora=lora, shares_device=shares_device, index=index, model=model, longest=longest, seed=seed, log=log)
    if weights.transport not in _BY_FILES:
        raise ConfigError(
            f'weights.transport = "{weights.transport}": an update that breaks half-way may be mended only by ending the engine, and '
            'external ones are not ours to end; use "store" or "delta"'
        )
    return ExternalServer(settings, lora=lora, index=index, model=model, longest=longest)
