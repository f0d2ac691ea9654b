"""Logprobs and entropies without copies of the logits: values, gradients and memory against plain autograd in float64 and against finite differences."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from consumer import token_logprobs as module
from consumer.token_logprobs import token_logprobs


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Written out, in float64."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)


def sampled() -> tuple[Tensor, Tensor, Tensor]:
    """[N, V] of all sizes, one row far from 0, one with -inf; targets that can be sampled; [2, N] upstream gradients."""
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(9, 33, generator=rng) * torch.tensor([0.0, 0.1, 1, 3, 10, 30, 100, 1, 1])[:, None]
    logits[7] += 1e4
    logits[8, ::2] = -math.inf
    return logits, torch.tensor([0, 31, 15, 16, 5, 30, 17, 3, 1]), torch.randn(2, 9, generator=rng)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_float64(monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float):
    monkeypatch.setattr(module, "_BLOCK_BYTES", rows * 4 * 33)
    logits, targets, upstream = sampled()
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, expected = token_logprobs(mine, targets, temperature), reference(exact, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, atol=2e-3, rtol=1e-5)  # 1e4 is known to 1e-3 in float32
    torch.autograd.backward(found, tuple(upstream.unbind()))
    torch.autograd.backward(expected, tuple(upstream.double().unbind()))
    assert mine.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, atol=2e-3, rtol=1e-4)
    assert torch.equal(mine.detach(), logits), "logits are left as they are"


def test_gradients_are_finite_differences():
    logits, targets, _ = sampled()
    ordinary = logits[:6].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: token_logprobs(given, targets[:6], 0.7), ordinary)


def test_either_gradient_may_be_missing():
    logits, targets, upstream = sampled()
    for chosen in (0, 1):
        mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        token_logprobs(mine, targets)[chosen].backward(upstream[chosen])  # type: ignore[no-untyped-call]
        reference(exact, targets, 1.0)[chosen].backward(upstream[chosen].double())  # type: ignore[no-untyped-call]
        assert mine.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(mine.grad.double(), exact.grad, atol=2e-3, rtol=1e-4)


def test_a_token_that_cannot_be_sampled_costs_neither_entropy_nor_a_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprob, entropy = token_logprobs(logits, torch.tensor([2]))
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    assert entropy.item() == pytest.approx(math.log(2))
    assert logprob.item() == -math.inf
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_half_precision_logits_are_kept_once_and_get_a_gradient_in_their_own():
    logits, targets, upstream = sampled()
    half = logits.bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = token_logprobs(half, targets)
    assert sum(tensor.nbytes for tensor in kept) <= half.nbytes + len(half) * (8 + 3 * 4)
    torch.autograd.backward(found, tuple(upstream.unbind()))
    exact = half.detach().double().requires_grad_()
    torch.autograd.backward(reference(exact, targets, 1.0), tuple(upstream.double().unbind()))
    assert half.grad is not None
    assert exact.grad is not None
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.grad.double(), exact.grad, atol=2e-2, rtol=1e-2)


def test_no_tokens_have_no_logprobs():
    logits = torch.zeros((0, 5), requires_grad=True)
    logprob, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None


def test_kernels_that_cannot_be_had_or_are_wrong_are_done_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Here there is no GPU, and perhaps no Triton: stand-ins show what is asked of kernels before they are used."""
    look = module._kernels.__wrapped__
    caplog.set_level(logging.INFO, module.__name__)
    assert look(torch.device("cpu")) is None
    right = SimpleNamespace(forward=module.forward_blocks, backward=module.backward_blocks)
    wrong = SimpleNamespace(forward=module.forward_blocks, backward=lambda *given: module.backward_blocks(*given).mul_(1.01))
    for kernels, used in ((right, right), (wrong, None)):
        monkeypatch.setitem(sys.modules, "consumer.logprob_kernels", kernels)
        monkeypatch.setattr("consumer.logprob_kernels", kernels, raising=False)
        assert look(torch.device("cpu")) is used
    assert [record.message.partition(":")[0] for record in caplog.records] == ["logprobs are computed without Triton kernels"] * 2
