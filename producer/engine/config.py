"""The [engine] section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from protocol.config import Section


class EngineConfig(Section):
    kind: Literal["embedded"] = Field("embedded", description="embedded: a transformers model in the engine host, for CPUs and tests.")
    count: int = Field(1, ge=1, description="Engine hosts that `rollstream up` starts.")
    host: str = Field("127.0.0.1", description="Address the engine listens on and registers.")
    port: int = Field(0, ge=0, le=65535, description="Port of engine 0; engine i takes port + i. 0: a free one.")
    slots: int = Field(256, ge=1, description="Requests decoded at once; each holds max_length tokens of KV cache.")
    max_length: int = Field(0, ge=0, description="Tokens of prompt and response in one slot. 0: what [rollout] allows, at most the model's context.")
    max_queued: int = Field(8192, ge=1, description="Requests that may wait for a slot; one more is answered with 503.")
    torch_threads: int = Field(1, ge=1, description="CPU threads of the embedded engine's torch.")
    pace_s: float = Field(0.0, ge=0, description="For benchmarks: a decode step begins every so many seconds at most. 0: as fast as it can.")
    apply_delay_factor: float = Field(1.0, ge=1, description="For benchmarks and tests: weights take so many times as long to load.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of weights, activations and KV cache of the embedded engine.")

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.port and self.port + self.count - 1 > 65535:
            raise ValueError(f"port {self.port} leaves no room for {self.count} engines: lower it, or use 0 for free ports")
        return self
