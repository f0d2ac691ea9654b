"""The torch backend against a plain forward of the same model, and against itself cut differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import group_std
from consumer.backend import digest_now
from consumer.batch import ChunkBatch, collate, micro_batches
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError, RollstreamError
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import weights_digest

Make = Callable[..., TorchBackend]
Record = Callable[..., StepRecord]


def collated(sampler: Any, record: StepRecord, seqs: range, **options: Any) -> ChunkBatch:
    return collate(record, [sampler.headed(seq, **options) for seq in seqs], group_std)


def gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in backend._parameters.items() if p.grad is not None}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_tokens", [16, 64, 8192])
def test_logprobs_equal_a_full_forward_and_the_behaviour_logprobs(sampler: Any, make_backend: Make, make_record: Record, share: bool, max_tokens: int):
    backend = make_backend(temperature=0.7)
    groups = [sampler.headed(seq, temperature=0.7) for seq in range(5)]
    expected: list[tuple[int, float]] = []
    for _, group in groups:
        for rollout in group.rollouts:
            ids = torch.from_numpy(rollout.tokens.astype(np.int64))[None]
            with torch.no_grad():
                full = (sampler.model(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
            expected += [(int(rollout.tokens[t]), float(full[t - 1, rollout.tokens[t]])) for t in np.flatnonzero(rollout.mask)]
    batch = collate(make_record(), groups, group_std)
    seen: list[tuple[int, float]] = []
    for part in micro_batches(batch, max_tokens=max_tokens, share_prompts=share):
        assert part.input_ids.shape[0] == 1 or part.input_ids.size <= max_tokens
        with torch.no_grad():
            values = backend._logprobs(part).gather(1, torch.from_numpy(part.targets)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(values, part.behaviour, atol=2e-5)
        seen += list(zip(part.targets.tolist(), values.tolist(), strict=True))
    assert len(seen) == batch.tokens
    for (token, value), (expected_token, expected_value) in zip(sorted(seen), sorted(expected), strict=True):
        assert token == expected_token
        assert value == pytest.approx(expected_value, abs=2e-5)


def test_siblings_share_their_prompt_on_this_architecture(make_backend: Make):
    assert make_backend()._share_prompts


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("share", [False, True])
def test_chunked_accumulation_gives_the_gradient_of_the_whole_batch(sampler: Any, make_backend: Make, make_record: Record, cut: int, share: bool):
    whole, chunked = make_backend(), make_backend(micro_batch_tokens=40)
    whole._share_prompts, chunked._share_prompts = False, share
    whole.accumulate(collated(sampler, make_record(), range(6)))
    for start in range(0, 6, cut):
        chunked.accumulate(collated(sampler, make_record(), range(start, start + cut)))
    expected, seen = gradients(whole), gradients(chunked)
    assert expected.keys() == seen.keys() == whole._parameters.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=2e-5 * float(gradient.abs().max()) + 1e-7, rtol=1e-4)


def test_the_step_divides_by_the_tokens_of_the_whole_step(sampler: Any, make_backend: Make, make_record: Record):
    """Against autograd of the token mean written out over plain forwards."""
    backend = make_backend(grad_clip=1e9)
    batch = collated(sampler, make_record(), range(3))
    model = transformers.AutoModelForCausalLM.from_pretrained(backend_path := Path(sampler.model.name_or_path), dtype=torch.float32)
    assert backend_path.is_dir()
    terms = []
    for group in batch.groups:
        for start, end in zip(group.starts[:-1], group.starts[1:], strict=True):
            logprobs = model(input_ids=torch.from_numpy(group.tokens[start:end].astype(np.int64))[None]).logits[0].log_softmax(-1)
            for t, behaviour, advantage in zip(group.targets, group.behaviour, group.advantage, strict=True):
                if start <= t < end:
                    ratio = (logprobs[t - start - 1, group.tokens[t]] - behaviour).exp()
                    terms.append(-torch.minimum(ratio * float(advantage), ratio.clamp(0.8, 1.28) * float(advantage)))
    torch.stack(terms).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    backend.accumulate(batch)
    report = backend.finish_step(1, batch.tokens)
    assert len(terms) == batch.tokens
    assert report.grad_norm == pytest.approx(float(expected.norm()), rel=1e-3)
    assert report.lr == pytest.approx(5e-3)
    assert report.ratio_dev < 1e-4


def test_training_raises_the_reward_weighted_probability(sampler: Any, make_backend: Make, make_record: Record):
    for loss in ("ppo_clip", "trust_region"):
        backend = make_backend(loss=loss, lr=3e-3, warmup_steps=0)
        losses = []
        for step in range(1, 6):
            batch = collated(sampler, make_record(step), range(4))
            backend.accumulate(batch)
            losses.append(backend.finish_step(step, batch.tokens).loss)
        assert losses[-1] < losses[0] - 0.05, loss


def test_the_same_chunks_give_the_same_bits(sampler: Any, make_backend: Make, make_record: Record):
    digests = []
    for _ in range(2):
        backend = make_backend()
        for step in (1, 2, 3):
            batches = [collated(sampler, make_record(step), range(2 * step + half, 2 * step + half + 1)) for half in (0, 1)]
            for batch in batches:
                backend.accumulate(batch)
            backend.finish_step(step, sum(batch.tokens for batch in batches))
        digests.append(weights_digest(backend.snapshot()))
    assert digests[0] == digests[1]


def test_capture_and_restore_continue_bit_by_bit(sampler: Any, make_backend: Make, make_record: Record):
    def train(backend: TorchBackend, steps: range) -> None:
        for step in steps:
            batch = collated(sampler, make_record(step), range(step, step + 2))
            backend.accumulate(batch)
            backend.finish_step(step, batch.tokens)

    straight, first, second = make_backend(), make_backend(), make_backend()
    train(straight, range(1, 7))
    train(first, range(1, 4))
    state = first.capture()
    before = weights_digest(state.weights)
    train(first, range(4, 7))
    assert weights_digest(state.weights) == before, "a capture must not change with the model"
    second.accumulate(collated(sampler, make_record(), range(2)))  # half a step that restoring must forget
    second.restore(state)
    train(second, range(4, 7))
    assert weights_digest(second.snapshot()) == weights_digest(straight.snapshot()) == weights_digest(first.snapshot())


def test_an_abandoned_step_leaves_no_trace(sampler: Any, make_backend: Make, make_record: Record):
    with_trace, without = make_backend(), make_backend()
    with_trace.accumulate(collated(sampler, make_record(), range(2)))
    with_trace.abandon_step()
    for backend in (with_trace, without):
        batch = collated(sampler, make_record(), range(2, 4))
        backend.accumulate(batch)
        backend.finish_step(1, batch.tokens)
    assert weights_digest(with_trace.snapshot()) == weights_digest(without.snapshot())


def test_a_step_without_tokens_leaves_the_weights(make_backend: Make, make_record: Record, sampler: Any):
    backend = make_backend()
    before = weights_digest(backend.snapshot())
    batch = collated(sampler, make_record(step=9, bound=-1), range(2))
    assert batch.tokens == 0
    assert batch.masked > 0
    backend.accumulate(batch)
    report = backend.finish_step(1, 0)
    assert (report.loss, report.grad_norm) == (0.0, 0.0)
    assert weights_digest(backend.snapshot()) == before


def test_a_gradient_that_is_no_number_stops_the_trainer(make_backend: Make, make_record: Record, sampler: Any):
    backend = make_backend()
    backend.accumulate(collated(sampler, make_record(), range(1)))
    next(iter(backend._parameters.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RollstreamError, match="norm is nan"):
        backend.finish_step(1, 5)


def test_the_snapshot_has_exactly_the_names_of_the_saved_model(make_backend: Make, model_path: Path, untied_model_path: Path):
    for path in (model_path, untied_model_path):
        backend = make_backend(path)
        with open_tensors(path / "model.safetensors") as tensors:
            assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {name: (t.dtype, t.shape) for name, t in backend.snapshot().items()}
            assert weights_digest(tensors) == weights_digest(backend.snapshot())


def test_weights_are_known_by_the_same_digest_copied_or_not(make_backend: Make, untied_model_path: Path):
    for backend in (make_backend(), make_backend(untied_model_path)):
        held = backend.snapshot()
        assert backend.digest() == digest_now(backend) == held.digest() == weights_digest(held) == weights_digest(backend.capture().weights)
        before = held.digest()
        with torch.no_grad():
            next(iter(backend._parameters.values()))[0, 0] += 1
        assert backend.digest() != before
        assert weights_digest(held) == before


class _Plain:
    """A backend of somebody's own that has only what it must."""

    def __init__(self, inner: TorchBackend) -> None:
        self.snapshot = inner.snapshot


def test_a_backend_without_a_digest_of_its_own_is_known_by_its_copy_which_is_given_back(make_backend: Make):
    inner = make_backend()
    assert digest_now(cast("Any", _Plain(inner))) == inner.digest()
    assert inner._buffers is not None
    assert len(inner._buffers._free) == 1


def test_a_checkpoint_of_another_model_is_refused(make_backend: Make, untied_model_path: Path):
    state = make_backend(untied_model_path).capture()
    with pytest.raises(RollstreamError, match=r"lm_head\.weight"):
        make_backend().restore(state)


def test_a_folder_transformers_cannot_load_names_the_key(make_backend: Make, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match=r"model\.path"):
        make_backend(tmp_path)
