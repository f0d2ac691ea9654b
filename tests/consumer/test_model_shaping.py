"""What [trainer] changes about a model, apart from a model; `test_torch_backend` has it in one that trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consumer.model_shaping import float32_head, free_bytes, recompute_activations
from protocol.errors import ConfigError


class _Odd(torch.nn.Module):
    def get_output_embeddings(self) -> Any:
        return None


def test_a_model_that_cannot_be_changed_so_names_the_key():
    with pytest.raises(ConfigError, match=r"trainer\.head_float32: _Odd has no linear layer as its head; set it to false"):
        float32_head(_Odd())
    with pytest.raises(ConfigError, match=r"trainer\.activation_checkpointing: _Odd has no layers .* set it to false"):
        recompute_activations(_Odd())


def test_free_memory_is_some_of_this_machine():
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50
