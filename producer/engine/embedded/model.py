"""The model an engine serves: weights, tokenizer, limits, and the two forward passes of continuous batching."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import psutil
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from producer.engine.embedded.cache import SlotCache
from producer.engine.embedded.direct import DirectBody, direct_body
from producer.engine.embedded.lora_rows import Adapter, LoraRows
from protocol.errors import ConfigError

_LOADING = threading.Lock()
"""transformers changes state of the whole process while it builds a model; two at a time would leave weights out, also for those that come later."""
_TOLERANCE = 1e-3
"""How far logits computed over slots may be from the model's own forward, relative to their largest magnitude (float32; reduced types get 30 times that)."""
_TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens that end a response by what they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What the engine must know of the architecture."""

    model_type: str
    architectures: tuple[str, ...]
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_length: int


class SlotModel:
    """A causal LM whose requests live in the slots of one `SlotCache`. Synchronous; used by one thread.

    Raises: `ConfigError` from `load` when the folder cannot be served, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        geometry: Geometry,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        path: str,
        *,
        slots: int,
        max_length: int,
        lora_targets: Sequence[str] = (),
    ) -> None:
        """`lora_targets`: modules that adapters may be of, by their last names."""
        self.model = model
        self.geometry = geometry
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.path = path
        self.slots = slots
        self.max_length = max_length
        self._body: nn.Module = model.get_submodule(str(getattr(model, "base_model_prefix", "model")))
        self._head: nn.Module = cast("Any", model).get_output_embeddings()
        self._cache_key = "cache" if "cache" in inspect.signature(self._body.forward).parameters else "past_key_values"
        dtype = next(model.parameters()).dtype
        self.cache = SlotCache(layers=geometry.layers, slots=slots, kv_heads=geometry.kv_heads, max_length=max_length, head_dim=geometry.head_dim, dtype=dtype)
        self._steps = torch.arange(max_length)
        self.rows: LoraRows | None = LoraRows(model, lora_targets) if lora_targets else None
        self.direct: DirectBody | None = direct_body(model, self._body, max_length, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, rows=self.rows)
        if self.direct is not None and not self._error() <= self._bound:
            self.direct = None
        if self.direct is None:
            self._check()
            if self.rows is not None:
                self.rows.hook()

    def adapt(self, adapters: Sequence[Adapter | None]) -> None:
        """The next forward pass takes row i by `adapters[i]`."""
        if self.rows is not None:
            self.rows.take(adapters)

    @torch.inference_mode()
    def prefill(self, first: int, ids: Tensor, source: Tensor) -> Tensor:
        """Compute distinct prompts and put them into slots `first` …, slot `first + i` holding prompt `source[i]`. Returns hidden states.

        Shapes: ids [U, P] right-padded (padding is never seen: attention is causal), source [m] -> [U, P, H].
        """
        width = ids.shape[1]
        self.cache.prefill(first, source)
        steps = self._steps[:width]
        mask = (steps[:, None] >= steps[None, :])[None, None]
        return self._hidden(ids, steps[None].expand(len(ids), -1), mask)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """One token of every slot 0 .. n-1 at its own position. Returns hidden states.

        Shapes: tokens [n], positions [n], width = 1 + largest position -> [n, H].
        """
        self.cache.decode(positions, width)
        mask = (self._steps[:width][None, :] <= positions[:, None])[:, None, None]
        return self._hidden(tokens[:, None], positions[:, None], mask)[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits.float()

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        if self.direct is not None:
            return self.direct(ids, positions, mask, self.cache)
        output = self._body(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **{self._cache_key: self.cache})
        hidden: Tensor = output.last_hidden_state
        return hidden

    @property
    def _bound(self) -> float:
        return _TOLERANCE * (1 if next(self.model.parameters()).dtype == torch.float32 else 30)

    @torch.inference_mode()
    def _error(self) -> float:
        """How far logits over slots are from the model's own forward, relative to the largest: part of the tokens prefilled, the rest decoded."""
        length = min(8, self.max_length)
        ids = torch.arange(length)[None] % self.geometry.vocabulary
        own: Tensor = self.model(input_ids=ids).logits.float()[0]
        prompt = (length + 1) // 2
        rows = [self.logits(self.prefill(0, ids[:, :prompt], torch.zeros(1, dtype=torch.long)))[0]]
        rows += [self.logits(self.decode(ids[0, i : i + 1], torch.tensor([i]), i + 1)) for i in range(prompt, length)]
        self.cache.clear()
        return float(((torch.cat(rows) - own).abs().max() / own.abs().max().clamp(min=1.0)).item())

    def _check(self) -> None:
        """Raises: `ConfigError` for an architecture whose logits are not those of body and head over slots (soft caps, scaled logits, windows)."""
        error = self._error()
        if not error <= self._bound:
            raise ConfigError(
                f"model.path {self.path}: the embedded engine does not reproduce {self.geometry.model_type} "
                f"(logits differ by {error:.1e}, at most {self._bound:.0e} expected); choose a model of the Llama, Qwen2 or Qwen3 family"
            )


def load(path: str, *, slots: int, max_length: int = 0, wanted: int = 0, dtype: str = "float32", lora_targets: Sequence[str] = ()) -> SlotModel:
    """The model of the folder `path`, with its slots allocated.

    A slot has `max_length` tokens; 0: `wanted` as far as the model's context allows, or all of it.

    Raises: `ConfigError` naming `model.path` or the key of [engine], and the reason.
    """
    folder = Path(path)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model.path {path}: has no {name}; give a folder with config.json, tokenizer.json and safetensors weights")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        config = AutoConfig.from_pretrained(path)
        with _LOADING:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as problem:  # transformers raises almost anything for a bad folder, and the message is what helps
        raise ConfigError(f"model.path {path}: cannot be loaded ({type(problem).__name__}: {problem})") from problem
    geometry = _geometry(path, config)
    if max_length > geometry.context_length:
        raise ConfigError(f"engine.max_length {max_length} exceeds the context of {geometry.context_length} tokens of model.path {path}: lower it")
    length = max_length or min(wanted or geometry.context_length, geometry.context_length)
    _check_memory(geometry, slots=slots, length=length, dtype=getattr(torch, dtype))
    model.eval().requires_grad_(False)
    return SlotModel(model, geometry, tokenizer, _eos_ids(folder, config, tokenizer), path, slots=slots, max_length=length, lora_targets=lora_targets)


def _check_memory(geometry: Geometry, *, slots: int, length: int, dtype: torch.dtype) -> None:
    needed = 2 * geometry.layers * slots * geometry.kv_heads * length * geometry.head_dim * dtype.itemsize
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"engine.slots {slots} of {length} tokens need {needed / 2**30:.1f} GiB of KV cache, and {available / 2**30:.1f} GiB are free: "
            "lower engine.slots or engine.max_length"
        )


def _geometry(path: str, config: Any) -> Geometry:
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"model.path {path}: {config.model_type} has layers without full attention, which the embedded engine lacks; choose a model without such layers"
        )
    heads = int(config.num_attention_heads)
    return Geometry(
        model_type=str(config.model_type),
        architectures=tuple(config.architectures or ()),
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocabulary=int(config.vocab_size),
        context_length=int(config.max_position_embeddings),
    )


def _eos_ids(folder: Path, config: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence tokens as SGLang collects them: of the model, of its generation settings and of the tokenizer, and those that end every model's turn."""
    settings, generation = _json(folder / "tokenizer_config.json"), _json(folder / "generation_config.json")
    token = settings.get("eos_token", _json(folder / "special_tokens_map.json").get("eos_token"))
    text = token.get("content") if isinstance(token, dict) else token
    found: list[Any] = [config.eos_token_id, generation.get("eos_token_id"), tokenizer.token_to_id(text) if isinstance(text, str) else None]
    found += [number for number, added in tokenizer.get_added_tokens_decoder().items() if added.content in _TURN_ENDS]
    flat = [item for entry in found for item in (entry if isinstance(entry, list) else [entry])]
    return frozenset(int(item) for item in flat if item is not None)


def _json(file: Path) -> dict[str, Any]:
    found = orjson.loads(file.read_bytes()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
