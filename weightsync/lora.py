"""The [lora] section, and what an adapter is called wherever it goes: trainer, store, engine, producer.

>>> name_of(prefix_of("math"), Version(2, 7))
'rollstream-math-2-7'
>>> version_of(prefix_of("math"), "rollstream-math-2-7"), version_of(prefix_of("math"), "somebody-elses")
(Version(incarnation=2, n=7), None)
"""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Literal

import orjson
from pydantic import Field, model_validator

from protocol.config import Section
from protocol.versions import Version

OURS = "rollstream-"
"""Every adapter of any run of ours begins so; no other is ever unloaded."""
ADAPTER_FILE, ADAPTER_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""What peft puts before the name of a module of the model."""
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MODULE = re.compile(r"[A-Za-z0-9_]+")
_HEADS = MappingProxyType({"lm_head": "the vocabulary's layers", "embed_tokens": "the vocabulary's layers"})
_SPARE = 2
"""Of an engine's places: one for the adapter that comes while as many as are kept are there, one for requests without any."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0, description="Train an adapter of this rank in place of the weights. 0: all weights are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapter's product is scaled by alpha / rank.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rsLoRA), for ranks above 64.")
    target_modules: tuple[str, ...] = Field(_LINEAR, strict=False, description="Linear layers that get an adapter, by their last name.")
    base_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the weights that stay as they are; bfloat16 takes half the memory. The adapter is float32."
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="merged: whole weights with the adapter added, by any weights.transport. adapter: the adapter alone, a few megabytes, which engines load "
        "beside others without a pause; a request stays on the one it began with. SGLang and embedded engines.",
    )
    keep_loaded: int = Field(
        4, ge=2, description="With publish adapter: versions an engine holds. A request that is still on an older one is ended and goes on with the newest."
    )

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        if self.publish == "adapter" and not self.rank:
            raise ValueError("publish adapter with rank 0: there is none; set rank, such as 16")
        if not self.target_modules or len(set(self.target_modules)) < len(self.target_modules):
            raise ValueError(f"target_modules {list(self.target_modules)}: expected one or more names, each once")
        for name in self.target_modules:
            if name in _HEADS:
                raise ValueError(f"target_modules has {name}: {_HEADS[name]} stay as they are; name layers of attention and MLP")
            if not _MODULE.fullmatch(name):
                raise ValueError(f"target_modules has {name!r}: expected the last part of a module's name, such as q_proj")
        return self

    @property
    def adapters(self) -> bool:
        """Versions are adapters."""
        return self.rank > 0 and self.publish == "adapter"

    @property
    def scaling(self) -> float:
        """What the product of an adapter's two matrices is multiplied by. Source: LoRA (arXiv 2106.09685) 4.1; rsLoRA (arXiv 2312.03732) theorem 3.2."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def places(self) -> int:
        """Adapters that an engine must be able to compute with at once."""
        return self.keep_loaded + _SPARE

    def settings(self, base: str) -> bytes:
        """`adapter_config.json` as peft and SGLang read it. `base`: the model's folder, for people.

        SGLang scales by lora_alpha / r whatever use_rslora says, so the scaling is told by an alpha that gives it either way.
        """
        told = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.scaling * self.rank,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "use_dora": False,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": list(self.target_modules),
        }
        return orjson.dumps(told, option=orjson.OPT_INDENT_2)

    def server_flags(self) -> tuple[str, ...]:
        """What a server of SGLang must be started with."""
        return (
            *("--enable-lora", "--max-lora-rank", str(self.rank), "--lora-target-modules", *self.target_modules),
            *("--max-loras-per-batch", str(self.places)),
        )


def prefix_of(run: str) -> str:
    """What the names of a run's adapters begin with."""
    return f"{OURS}{run}-"


def name_of(prefix: str, version: Version) -> str:
    return f"{prefix}{version.incarnation}-{version.n}"


def version_of(prefix: str, name: str) -> Version | None:
    """None: it is no adapter of this run."""
    incarnation, _, n = name.removeprefix(prefix).partition("-")
    return Version(int(incarnation), int(n)) if name.startswith(prefix) and incarnation.isdecimal() and n.isdecimal() else None
