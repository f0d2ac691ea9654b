"""The routes that say what the engine is and how it is."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from producer.engine.embedded import metrics
from producer.engine.embedded.http import Routes, reply
from producer.engine.embedded.lora_rows import LoraLimits
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.updates import Updates
from producer.engine.embedded.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `/server_info` repeats."""

    host: str
    seed: int
    max_queued: int
    lora: LoraLimits | None = None


class StatusRoutes:
    def __init__(self, worker: Worker, model: SlotModel, updates: Updates, settings: Settings) -> None:
        self._worker, self._model, self._updates, self._settings = worker, model, updates, settings
        self._registry = metrics.registry(worker, model.path)
        self._tokenizer = model.path

    def gets(self) -> Routes:
        return {
            "/health": self._health,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/metrics": self._metrics,
        }

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._worker.failure is None else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._worker.paused or self._worker.failure is not None else 200)

    async def _model_info(self, _: web.Request) -> web.Response:
        geometry, path = self._model.geometry, self._updates.path  # the tokenizer stays that of the first folder
        return reply({
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": self._tokenizer,
            "is_generation": True,
            "weight_version": self._updates.version,
            "load_format": "auto",
            "model_type": geometry.model_type,
            "architectures": list(geometry.architectures),
            "has_image_understanding": False,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
        })  # fmt: skip

    async def _server_info(self, http: web.Request) -> web.Response:
        model, counters, settings = self._model, self._worker.counters, self._settings
        transport = http.transport
        return reply({
            "version": "embedded",
            "model_path": self._updates.path,
            "tokenizer_path": self._tokenizer,
            "weight_version": self._updates.version,
            "host": settings.host,
            "port": transport.get_extra_info("sockname")[1] if transport is not None else 0,
            "device": "cpu",
            "dtype": str(next(model.model.parameters()).dtype).removeprefix("torch."),
            "tp_size": 1,
            "random_seed": settings.seed,
            "context_length": model.max_length,
            "max_running_requests": model.slots,
            "max_queued_requests": settings.max_queued,
            "max_total_num_tokens": model.slots * model.max_length,
            "enable_lora": settings.lora is not None,
            "max_lora_rank": None if settings.lora is None else settings.lora.max_rank,
            "lora_target_modules": None if settings.lora is None else list(settings.lora.targets),
            "disable_radix_cache": True,
            "disable_overlap_schedule": True,
            "internal_states": [{
                "num_running_reqs": counters.running,
                "num_queue_reqs": counters.queued,
                "busy_s": counters.busy_s,
                "paused_s": counters.paused_s,
                "generated_tokens": counters.generated_tokens,
                "decode_steps": counters.decode_steps,
                "prefills": counters.prefills,
                "updates": counters.updates,
            }],
        })  # fmt: skip

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(self._registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
