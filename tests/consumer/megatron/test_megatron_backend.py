"""The Megatron backend, in process groups on gloo with a stand-in for CUDA, against transformers, against the torch backend, and against itself cut otherwise.

Tolerances are for float32 and logits of a deviation of 1.5 to 2. Of the losses, gradient norms and moments they are some times what was measured. Weights are
judged by their mean: where a gradient is nothing but rounding (the bias of Qwen2's keys has no other), AdamW still makes a step of some size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.consumer.megatron.conftest import AGREED, DEADLINE_S, LOOKED_AT, TAUGHT, TRAINED
from tests.consumer.megatron.recorded import MODELS, STEPS, rows, sampled_logits
from weightsync.safetensors_file import open_tensors

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)
Found = Callable[[str], dict[str, Any]]
_LOGITS = 3e-5
"""Absolute. Measured: 0 on one rank and on two stages, 6.2e-6 over two tensor-parallel ranks."""
_LOSS = 5e-5
"""Absolute, of losses of 0.01 to 0.3. Measured: 5.1e-6."""
_NORM = 1e-4
"""Relative. Measured: 2.3e-5."""
_MOMENT = 1e-3
"""Relative, in the norm of a parameter, and `_NOISE` of the greatest parameter's: a gradient may be nothing but rounding. Measured: 1.6e-4."""
_NOISE = 1e-6
_MEAN = 2e-5
"""Absolute mean over a parameter, of weights of about 0.3 that move by about 5e-3 a step. Measured: 2.4e-6."""
_FIGURES = 2e-2
"""Relative, of the other figures. Measured: 3.5e-4; but one token more or less beyond a bound is 1e-2 of them."""
_BIN = 0.15
"""Relative, of a quantile, which is told as the edge of its bin."""


@pytest.mark.parametrize("layout", LOOKED_AT)
@pytest.mark.parametrize("model", MODELS)
def test_weights_come_back_bit_by_bit_under_the_names_they_had(found: Found, models: Path, model: str, layout: str):
    seen = found(f"look-{model}-{layout}")["weights"]
    with open_tensors(models / model / "model.safetensors") as tensors:
        assert seen.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (seen[name].dtype, tuple(seen[name].shape)) == (torch.float32, tensor.shape)
            assert seen[name].numpy().tobytes() == bytes(tensor.data), name


@pytest.mark.parametrize("layout", LOOKED_AT)
@pytest.mark.parametrize("model", MODELS)
def test_packed_logits_are_those_of_transformers_for_each_sequence_alone(found: Found, models: Path, model: str, layout: str):
    seen = found(f"look-{model}-{layout}")["logits"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([reference(input_ids=torch.tensor([row])).logits[0] for row in rows()]).numpy()
    assert expected.std() > 1
    np.testing.assert_allclose(seen, expected, atol=_LOGITS, rtol=0)


def test_scaled_rotary_positions_show_in_what_is_compared(models: Path):
    scaled = transformers.AutoModelForCausalLM.from_pretrained(models / "llama-tied", dtype=torch.float32).eval()
    config = transformers.AutoConfig.from_pretrained(models / "llama-tied")
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    plain = transformers.AutoModelForCausalLM.from_pretrained(models / "llama-tied", config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor([max(rows(), key=len)])
        assert float((scaled(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()) > 10 * _LOGITS


@pytest.mark.parametrize(("model", "loss"), AGREED)
def test_one_rank_trains_as_the_torch_backend_does(found: Found, model: str, loss: str):
    _agree(found(f"train-{model}-{loss}"), found(f"torch-{model}-{loss}"))


@pytest.mark.parametrize(("model", "layout"), TRAINED)
def test_two_ranks_train_as_one_does(found: Found, model: str, layout: str):
    _agree(found(f"train-{model}-all-{layout}"), found(f"train-{model}-all"))


@pytest.mark.parametrize("layout", TAUGHT)
def test_two_ranks_learn_from_a_teacher_as_one_does(found: Found, layout: str):
    one = found("torch-qwen3-tied-distillation")
    assert all(report["loss"] > 0.1 and report["clip_fraction"] > 0.05 for report in one["reports"]), "scores and cap show"
    _agree(found(f"train-qwen3-tied-distillation-{layout}"), one)


def test_each_layout_is_in_force(found: Found):
    """It would agree as well if its key were passed over."""
    seen = {layout: found(f"train-qwen3-tied-all-{layout}") for model, layout in TRAINED if model == "qwen3-tied"}
    assert seen["pp2-recompute"]["attended"] == 2 * seen["pp2"]["attended"] > 0
    assert 0.5 <= seen["tp2-sp"]["rows"] / seen["tp2"]["rows"] < 0.6
    assert seen["dp2"]["attended"] < seen["tp2"]["attended"] == found("train-qwen3-tied-all")["attended"]
    assert (seen["dp2"]["optimizer"], seen["dp2-distributed"]["optimizer"]) == ("FP32Optimizer", "DistributedOptimizer")


def _agree(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    """Step by step: the figures, the weights; and the moments after the last step, which are the gradients of all of them."""
    assert len(seen["reports"]) == len(expected["reports"]) == STEPS
    for step in range(STEPS):
        report, other = seen["reports"][step], expected["reports"][step]
        assert report.keys() == other.keys()
        assert report["loss"] == pytest.approx(other["loss"], abs=_LOSS)
        assert report["grad_norm"] == pytest.approx(other["grad_norm"], rel=_NORM)
        for name, value in other.items():
            assert report[name] == pytest.approx(value, rel=_BIN if "_p99" in name else _FIGURES, abs=1e-4), name
        weights, others = seen["weights"][step], expected["weights"][step]
        assert weights.keys() == others.keys()
        for name, tensor in others.items():
            assert float((weights[name] - tensor).abs().mean()) < _MEAN, name
    assert seen["moments"].keys() == expected["moments"].keys()
    for moment in ("exp_avg.", "exp_avg_sq."):
        moments = {name: tensor for name, tensor in expected["moments"].items() if name.startswith(moment)}
        noise = _NOISE * max(float(tensor.norm()) for tensor in moments.values())
        for name, tensor in moments.items():
            assert float((seen["moments"][name] - tensor).norm()) <= _MOMENT * float(tensor.norm()) + noise, name


def test_bfloat16_trains_near_float32_and_publishes_bfloat16(found: Found):
    """Roughly: three digits of a weight are no more."""
    exact = found("train-qwen3-tied-ppo_clip")
    for name in ("train-qwen3-tied-ppo_clip-bf16", "train-qwen3-tied-ppo_clip-bf16-tp2"):
        seen = found(name)
        assert {tensor.dtype for tensor in seen["weights"][-1].values()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in seen["moments"].values()} == {torch.float32}
        for report, other in zip(seen["reports"], exact["reports"], strict=True):
            assert report["loss"] == pytest.approx(other["loss"], abs=0.02)
            assert report["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)


@pytest.mark.parametrize("name", ["resume-dp2", "resume-tp2", "resume-pp2-bf16"])
def test_what_is_captured_goes_on_bit_by_bit_and_anywhere(found: Found, name: str):
    """In the same layout the same bits; in another, and in the torch backend, the same state."""
    seen = found(name)
    assert seen["idle"] == {"grad_norm": 0.0, "same": True}, "a step without a divisor, and one that is abandoned, leave no trace"
    _same(seen["again"], seen["straight"])
    assert {tensor.dtype for tensor in seen["state"].values()} == {torch.float32}
    _same(seen["other_layout"], seen["state"])
    _same(seen["torch"], seen["state"])
    _same(seen["from_torch"], seen["state"])
    assert 0.3 < seen["share"] < 0.7, "each rank captures its part"
    assert seen["refused"].startswith("the checkpoint belongs to another model: parameter model.embed_tokens.weight")
    assert seen["critic"].startswith("the checkpoint has a critic beside the policy: go on with the trainer.advantage it had")


def _same(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_a_published_snapshot_loads_with_transformers(found: Found, models: Path, tmp_path: Path):
    trained = found("train-qwen3-tied-all-tp2")["weights"][-1]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(models / "qwen3-tied"))
    model.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    save_file(trained, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, trained[name]), name


def test_vocab_parallel_logprobs_and_entropy_are_those_of_the_whole_vocabulary(found: Found):
    """Value and gradient, against autograd in float64: also of logits that are far apart, large, and -inf."""
    seen = found("logprobs")
    logits, target, upstream = sampled_logits()
    wide = logits.double().requires_grad_()
    logprobs = wide.log_softmax(-1)
    logprob = logprobs.gather(1, target[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)
    (gradient,) = torch.autograd.grad((logprob, entropy), wide, tuple(upstream.double().unbind()))
    assert torch.isinf(logits).any()
    for name, expected in (("logprob", logprob), ("entropy", entropy), ("gradient", gradient)):
        np.testing.assert_allclose(seen[name].numpy(), expected.detach().numpy(), rtol=2e-6, atol=2e-3 if name == "logprob" else 5e-6, err_msg=name)
    assert seen["unchanged"]
    assert seen["empty"] == [(0,), (0,)]


def test_what_is_not_supported_is_refused_on_every_rank(found: Found):
    assert found("refuse-experts")["refused"].endswith(
        "does not support mixtures of experts (qwen3_moe), nor expert parallelism; use another model, or trainer.backend torch"
    )
    assert found("refuse-ranks")["refused"] == "trainer.backend megatron: 2 ranks with megatron.tp 2 and megatron.pp 2: use a multiple of 4 ranks"


def test_a_process_without_a_gpu_is_refused_with_what_to_do(found: Found):
    """Where nothing stands in for CUDA."""
    assert found("refuse-cpu")["refused"].startswith("trainer.backend megatron needs a GPU")
    assert found("refuse-cpu")["refused"].endswith("use trainer.backend torch here")
