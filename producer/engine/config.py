"""The [engine] section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from protocol.config import Section


class EngineConfig(Section):
    kind: Literal["embedded", "sglang", "external"] = Field(
        "embedded",
        description="embedded: a transformers model in the engine host, for CPUs and tests. sglang: a server that the host starts. external: servers at urls.",
    )
    count: int = Field(1, ge=1, description="Engine hosts that `rollstream up` starts; with urls, as many as there are.")
    host: str = Field("127.0.0.1", description="Address the engine listens on and registers.")
    port: int = Field(0, ge=0, le=65535, description="Port of engine 0; engine i takes port + i. 0: a free one.")
    urls: tuple[str, ...] = Field((), strict=False, description="With kind external: http://host:port of each engine. One host follows one URL.")
    slots: int = Field(256, ge=1, description="Requests decoded at once; each holds max_length tokens of KV cache.")
    max_length: int = Field(0, ge=0, description="Tokens of prompt and response in one slot. 0: what [rollout] allows, at most the model's context.")
    max_queued: int = Field(8192, ge=1, description="Requests that may wait for a slot; one more is answered with 503.")
    torch_threads: int = Field(1, ge=1, description="CPU threads of the engine's torch.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of weights, activations and KV cache. auto: the model's own with sglang, float32 when embedded."
    )
    python: str = Field("", description="With kind sglang: the interpreter that has SGLang. Empty: the one that runs the host.")
    device: Literal["cuda", "cpu"] = Field("cuda", description="With kind sglang: what it computes on.")
    tp: int = Field(1, ge=1, description="With kind sglang: GPUs that share one engine (tensor parallel).")
    prefill: int = Field(
        0,
        ge=0,
        description="With kind sglang: GPUs of a second server of each engine, which reads the prompts, while that of tp writes. 0: one does both. "
        "See docs/engines.md.",
    )
    nodes: int = Field(1, ge=1, description="With kind sglang: machines that share one engine, with as many of its GPUs on each. See docs/engines.md.")
    gpu: int = Field(
        0, ge=0, description="With kind sglang: first GPU of engine 0; the others begin after its GPUs, side by side. CUDA_VISIBLE_DEVICES counts first."
    )
    args: tuple[str, ...] = Field((), strict=False, description="With kind sglang: further arguments of its server, which outrank ours. See docs/engines.md.")
    prefill_args: tuple[str, ...] = Field((), strict=False, description="With engine.prefill: further arguments of that server, which outrank engine.args.")
    start_seconds: float = Field(600.0, gt=0, description="With kind sglang: a server that has not written a token by then is ended and started again.")
    progress_seconds: float = Field(60.0, gt=0, description="An engine that has written no token for so long is asked for one; sglang and external.")
    probe_seconds: float = Field(30.0, gt=0, description="Time to write it. An engine that does not, hangs: it is ended and started again, or left alone.")
    pace_s: float = Field(0.0, ge=0, description="For benchmarks: a decode step begins every so many seconds at most. 0: as fast as it can.")
    apply_delay_factor: float = Field(1.0, ge=1, description="For benchmarks and tests: weights take so many times as long to load.")

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_urls(cls, values: Any) -> Any:
        if isinstance(values, dict) and "count" not in values and isinstance(values.get("urls"), list | tuple) and values["urls"]:
            return {**values, "count": len(values["urls"])}
        return values

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.port and self.port + self.count - 1 > 65535:
            raise ValueError(f"port {self.port} leaves no room for {self.count} engines: lower it, or use 0 for free ports")
        if self.kind == "external":
            self._check_urls()
        elif self.urls:
            raise ValueError(f'urls are of engines that run elsewhere, and kind is "{self.kind}": use kind = "external", or leave urls out')
        if self.args and self.kind != "sglang":
            raise ValueError(f'args are SGLang\'s, and kind is "{self.kind}": use kind = "sglang", or leave args out')
        if self.nodes > 1 and self.kind != "sglang":
            raise ValueError(f'nodes is {self.nodes}, and an engine of kind "{self.kind}" is on one machine: use kind = "sglang", or leave nodes out')
        self._check_halves()
        return self

    def _check_halves(self) -> None:
        if self.prefill and self.kind != "sglang":
            raise ValueError(f'prefill is {self.prefill}, and an engine of kind "{self.kind}" is one server: use kind = "sglang", or leave prefill out')
        if self.prefill and self.nodes > 1:
            raise ValueError(f"prefill is {self.prefill} and nodes is {self.nodes}: an engine of two servers is on one machine; leave one of them out")
        if self.prefill_args and not self.prefill:
            raise ValueError("prefill_args are of a server that is not there: set prefill to its GPUs, or write them into args")

    def _check_urls(self) -> None:
        if not self.urls:
            raise ValueError('urls is empty: kind = "external" needs the URL of each engine, urls = ["http://host:30000"]')
        if self.port:
            raise ValueError(f"port is {self.port}: external engines have the ports of their urls; leave port out")
        for url in self.urls:
            scheme, _, rest = url.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest.rstrip("/"):
                raise ValueError(f"urls has {url!r}: expected http://host:port, without a path")
        plain = [url.rstrip("/") for url in self.urls]
        if twice := sorted({url for url in plain if plain.count(url) > 1}):
            raise ValueError(f"urls has {', '.join(twice)} twice: one engine takes one host")
        if self.count > len(self.urls):
            raise ValueError(f"count {self.count} exceeds the {len(self.urls)} urls: lower it, or leave it out")
