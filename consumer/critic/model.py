"""A value model: the transformer of a causal LM under a head of one number, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor

from consumer.model_shaping import placed
from protocol.errors import ConfigError


class Valued(NamedTuple):
    """What a forward gives. A tuple, so that what wraps the model (FSDP2) sees the tensor in it."""

    logits: Tensor


class ValueModel(torch.nn.Module):
    """Called as a causal LM is, of a vocabulary of one word: `logits` [R, C, 1] float32 are the values after each of the tokens that were asked for.

    It has as much of a transformers model about it as packed rows and FSDP2 ask of one.
    """

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = torch.nn.Linear(trunk.config.get_text_config().hidden_size, 1)
        self._no_split_modules = trunk._no_split_modules  # noqa: SLF001 - its layers, by the name that a transformers model has for them

    @property
    def config(self) -> Any:
        return self.trunk.config

    def set_attn_implementation(self, name: str) -> None:
        self.trunk.set_attn_implementation(name)

    def get_input_embeddings(self) -> Any:
        return self.trunk.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """Its head is no embedding."""

    def forward(self, *, logits_to_keep: Tensor, **given: Any) -> Valued:
        """`logits_to_keep` [C]: columns; all else goes to the transformer."""
        hidden = self.trunk(**given).last_hidden_state.index_select(1, logits_to_keep)
        with torch.autocast(hidden.device.type, enabled=False):
            return Valued(self.head(hidden.float()).clone())  # no view of a product: FSDP2 hooks its gradient


def load_value_model(path: Path, device: torch.device) -> ValueModel:
    """That of the transformer in `path`, on `device`; its parameters want gradients, its head is random.

    Raises: `ConfigError` when the folder holds none that transformers can load, or lacks some of its weights.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # the head of the causal LM is left out on purpose
    try:
        trunk, told = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except Exception as problem:  # transformers raises whatever the model's code raises
        raise ConfigError(f"critic.model_path {path}: transformers cannot load it ({type(problem).__name__}: {str(problem)[:300]})") from problem
    finally:
        transformers.utils.logging.set_verbosity(level)
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(f"critic.model_path {path}: its files have no tensor {missing[0]}, which a {type(trunk).__name__} needs; give a causal LM's folder")
    return cast("ValueModel", placed(ValueModel(trunk), device))
