"""What [trainer] changes about a model, apart from a model; `test_torch_backend` has it in one that trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from consumer.model_shaping import entropy_alone, float32_head, free_bytes, recompute_activations, token_entropy
from protocol.errors import ConfigError


def test_entropy_is_that_of_the_distribution_over_more_rows_than_are_taken_at_once():
    logprobs = torch.randn(2500, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = torch.distributions.Categorical(logits=logprobs.double()).entropy().float()
    torch.testing.assert_close(token_entropy(logprobs), expected)
    torch.testing.assert_close(entropy_alone(logprobs), expected)
    assert token_entropy(logprobs[:0]).shape == entropy_alone(logprobs[:0]).shape == (0,)


def test_a_token_that_cannot_be_sampled_costs_neither_entropy_nor_a_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits.log_softmax(-1))
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    assert entropy.item() == pytest.approx(math.log(2))
    assert entropy_alone(logits.detach().log_softmax(-1)).item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


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
