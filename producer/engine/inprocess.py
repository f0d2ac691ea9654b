"""The embedded engine as its host sees it: in the host's own process, which ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Never

from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import Figures, Meeting
from producer.engine.key import admin_key, engine_key
from protocol.errors import ConfigError
from weightsync.lora import LoraConfig

if TYPE_CHECKING:
    from producer.engine.embedded.server import EmbeddedEngine

_NO_LORA = LoraConfig()


class Embedded:
    """`Kind` of the engine that needs nothing but torch and transformers."""

    name = "embedded"
    lives_on = False
    start_tries = 1

    def __init__(
        self, settings: EngineConfig, *, index: int, model: str, longest: int, seed: Callable[[str], int], group_deadline_s: float, lora: LoraConfig = _NO_LORA
    ) -> None:
        """`longest`: tokens of the longest request. `seed`: of the noise of a boot. The peers of a process group are waited for `group_deadline_s`."""
        self._settings, self._index, self._model, self._longest, self._seed = settings, index, model, longest, seed
        self._group_deadline_s, self._lora = group_deadline_s, lora

    @contextlib.asynccontextmanager
    async def life(self, boot_nonce: str, _: Desk, /) -> AsyncIterator[InProcess]:
        """Imports torch here."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import torch

            from producer.engine.embedded.lora_rows import LoraLimits
            from producer.engine.embedded.model import load
            from producer.engine.embedded.server import EmbeddedEngine
        except ImportError as problem:
            raise ConfigError(f'engine.kind = "embedded" needs torch and transformers ({problem}): install the extra `rollstream[torch]`') from problem
        settings = self._settings
        torch.set_num_threads(settings.torch_threads)
        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        limits = LoraLimits(max_rank=self._lora.rank, targets=self._lora.target_modules) if self._lora.adapters else None
        targets = () if limits is None else limits.targets
        model = await asyncio.to_thread(
            load, self._model, slots=settings.slots, max_length=settings.max_length, wanted=self._longest, dtype=dtype, lora_targets=targets
        )
        async with EmbeddedEngine(
            model,
            weight_version=f"boot:{boot_nonce}",
            host=settings.host,
            port=settings.port + self._index if settings.port else 0,
            seed=self._seed(boot_nonce),
            max_queued=settings.max_queued,
            api_key=engine_key(),
            admin_key=admin_key(),
            incremental=True,
            group_timeout_s=self._group_deadline_s,
            pace_s=settings.pace_s,
            apply_delay_factor=settings.apply_delay_factor,
            lora=limits,
        ) as engine:
            yield InProcess(engine, settings.slots)


class InProcess:
    """`Hosted` for an embedded engine that listens already."""

    trouble = ""
    meeting: Meeting | None = None

    def __init__(self, engine: EmbeddedEngine, capacity: int) -> None:
        self._engine, self._capacity = engine, capacity

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def figures(self) -> Figures:
        counters = self._engine.counters
        return Figures(
            running=counters.running,
            queued=counters.queued,
            capacity=self._capacity,
            generated_tokens=counters.generated_tokens,
            busy_s=counters.busy_s,
        )

    @property
    def idle(self) -> bool:
        return self._engine.idle

    async def ready(self) -> None:
        pass

    async def failed(self) -> Never:
        await self._engine.failed()
        raise AssertionError

    async def until_idle(self) -> None:
        await self._engine.until_idle()
