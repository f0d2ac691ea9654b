"""The torch backend against a plain forward of the same model, and against itself cut differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import group_std
from consumer.backend import StepReport, digest_now
from consumer.batch import ChunkBatch, collate, micro_batches
from consumer.losses.config import KlKind, LossKind, Normaliser
from consumer.metric_names import metric_of
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError, RollstreamError
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import weights_digest

Make = Callable[..., TorchBackend]
Record = Callable[..., StepRecord]


def collated(sampler: Any, record: StepRecord, seqs: range, *, normaliser: Normaliser = "token_mean", **options: Any) -> ChunkBatch:
    return collate(record, [sampler.headed(seq, **options) for seq in seqs], group_std, normaliser=normaliser, max_new_tokens=6)


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
            values = backend._predicted(backend._model, part)[0].numpy()
        np.testing.assert_allclose(values, part.behaviour, atol=2e-5)
        seen += list(zip(part.targets.tolist(), values.tolist(), strict=True))
    assert len(seen) == batch.tokens
    for (token, value), (expected_token, expected_value) in zip(sorted(seen), sorted(expected), strict=True):
        assert token == expected_token
        assert value == pytest.approx(expected_value, abs=2e-5)


def test_siblings_share_their_prompt_on_this_architecture(make_backend: Make):
    assert make_backend()._share_prompts


NORMALISERS: tuple[Normaliser, ...] = get_args(Normaliser)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize(("cut", "max_tokens", "share"), [(1, 40, False), (3, 64, True), (6, 1, False)])
def test_a_streamed_step_has_the_gradient_of_the_whole_batch(
    sampler: Any, make_backend: Make, make_record: Record, normaliser: Normaliser, cut: int, max_tokens: int, share: bool
):
    whole, streamed = make_backend(grad_clip=1e9), make_backend(grad_clip=1e9, micro_batch_tokens=max_tokens)
    whole._share_prompts, streamed._share_prompts = False, share
    batch = collated(sampler, make_record(), range(6), normaliser=normaliser)
    whole.accumulate(batch)
    divisor = 0.0
    for start in range(0, 6, cut):
        chunk = collated(sampler, make_record(), range(start, start + cut), normaliser=normaliser)
        streamed.accumulate(chunk)
        divisor += chunk.divisor
    assert divisor == batch.divisor
    expected, seen = gradients(whole), gradients(streamed)
    assert expected.keys() == seen.keys() == whole._parameters.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=2e-5 * float(gradient.abs().max()) + 1e-7, rtol=1e-4)
    one, other = whole.finish_step(1, batch.divisor), streamed.finish_step(1, divisor)
    assert (other.loss, other.grad_norm, other.entropy) == pytest.approx((one.loss, one.grad_norm, one.entropy), rel=1e-4, abs=1e-6)
    assert other.diagnostics == pytest.approx(dict(one.diagnostics), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_the_step_is_normalised_as_the_section_says(sampler: Any, make_backend: Make, make_record: Record, normaliser: Normaliser):
    """Against autograd of the loss written out over plain forwards."""
    backend = make_backend(grad_clip=1e9, loss={"normaliser": normaliser})
    batch = collated(sampler, make_record(), range(3), normaliser=normaliser)
    model = transformers.AutoModelForCausalLM.from_pretrained(backend_path := Path(sampler.model.name_or_path), dtype=torch.float32)
    assert backend_path.is_dir()
    rollouts = []
    for group in batch.groups:
        for start, end in zip(group.starts[:-1], group.starts[1:], strict=True):
            terms = []
            logprobs = model(input_ids=torch.from_numpy(group.tokens[start:end].astype(np.int64))[None]).logits[0].log_softmax(-1)
            for t, behaviour, advantage in zip(group.targets, group.behaviour, group.advantage, strict=True):
                if start <= t < end:
                    ratio = (logprobs[t - start - 1, group.tokens[t]] - behaviour).exp()
                    terms.append(-torch.minimum(ratio * float(advantage), ratio.clamp(0.8, 1.28) * float(advantage)))
            rollouts.append(torch.stack(terms))
    loss = {
        "token_mean": torch.cat(rollouts).mean(),
        "rollout_mean": torch.stack([terms.mean() for terms in rollouts]).mean(),
        "constant": torch.cat(rollouts).sum() / (len(rollouts) * 6),
    }[normaliser]
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    backend.accumulate(batch)
    report = backend.finish_step(1, batch.divisor)
    assert sum(map(len, rollouts)) == batch.tokens
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-5)
    assert report.grad_norm == pytest.approx(float(expected.norm()), rel=1e-3)
    assert report.lr == pytest.approx(5e-3)
    assert report.ratio_dev < 1e-4


KINDS = [{"kind": kind} for kind in get_args(LossKind) if kind != "distillation"]  # these groups have no teacher's logprobs
WHOLE = [{"kl_coef": 0.1, "kl_kind": kind, "entropy_coef": 0.01} for kind in get_args(KlKind)]


@pytest.mark.parametrize("loss", [*KINDS, *WHOLE], ids=lambda loss: str(loss.get("kl_kind", loss.get("kind"))))
def test_every_loss_trains(sampler: Any, make_backend: Make, make_record: Record, loss: dict[str, Any]):
    backend = make_backend(loss=loss, warmup_steps=0)
    before = weights_digest(backend.snapshot())
    for step in (1, 2):
        batch = collated(sampler, make_record(step), range(3))
        backend.accumulate(batch)
        report = backend.finish_step(step, batch.divisor)
        assert np.isfinite([report.loss, report.grad_norm, report.entropy, report.clip_fraction, report.ratio_dev, *report.diagnostics.values()]).all()
        assert report.grad_norm > 0
        assert [name for name in report.diagnostics if metric_of(name) is None] == []
    assert weights_digest(backend.snapshot()) != before


def test_training_raises_the_reward_weighted_probability(sampler: Any, make_backend: Make, make_record: Record):
    for loss in ("ppo_clip", "trust_region"):
        backend = make_backend(loss={"kind": loss}, lr=3e-3, warmup_steps=0)
        losses = []
        for step in range(1, 6):
            batch = collated(sampler, make_record(step), range(4))
            backend.accumulate(batch)
            losses.append(backend.finish_step(step, batch.divisor).loss)
        assert losses[-1] < losses[0] - 0.05, loss


def test_the_same_chunks_give_the_same_bits(sampler: Any, make_backend: Make, make_record: Record):
    digests = []
    for _ in range(2):
        backend = make_backend()
        for step in (1, 2, 3):
            batches = [collated(sampler, make_record(step), range(2 * step + half, 2 * step + half + 1)) for half in (0, 1)]
            for batch in batches:
                backend.accumulate(batch)
            backend.finish_step(step, sum(batch.divisor for batch in batches))
        digests.append(weights_digest(backend.snapshot()))
    assert digests[0] == digests[1]


def test_capture_and_restore_continue_bit_by_bit(sampler: Any, make_backend: Make, make_record: Record):
    def train(backend: TorchBackend, steps: range) -> None:
        for step in steps:
            batch = collated(sampler, make_record(step), range(step, step + 2))
            backend.accumulate(batch)
            backend.finish_step(step, batch.divisor)

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
        backend.finish_step(1, batch.divisor)
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


# -- reference, entropy, learning rate ---------------------------------------------------------------------------------------------------------


def trained(backend: TorchBackend, sampler: Any, make_record: Record, steps: range) -> list[StepReport]:
    reports = []
    for step in steps:
        batch = collated(sampler, make_record(step), range(step, step + 2))
        backend.accumulate(batch)
        reports.append(backend.finish_step(step, batch.divisor))
    return reports


def test_warm_up_counts_the_steps_of_the_optimizer_whatever_their_number(sampler: Any, make_backend: Make, make_record: Record):
    backend, resumed = (make_backend(lr=1.0, warmup_steps=4) for _ in range(2))
    batch = collated(sampler, make_record(1), range(2))

    def rate(one: TorchBackend, step: int) -> float:
        one.accumulate(batch)
        return one.finish_step(step, batch.divisor).lr

    assert [rate(backend, step) for step in (41, 42)] == [0.25, 0.5]
    assert backend.finish_step(43, 0.0).lr == 0, "no step of the optimizer"
    resumed.restore(backend.capture())
    assert [rate(one, step) for one in (backend, resumed) for step in (44, 45, 46)] == [0.75, 1.0, 1.0] * 2


def test_room_for_a_reference_is_asked_of_host_memory_where_the_weights_lie_there(make_backend: Make, monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.device] = []

    def free(place: torch.device) -> int:
        asked.append(place)
        return 1 << 40

    monkeypatch.setattr("consumer.torch_backend.free_bytes", free)
    backend = make_backend(loss={"kl_coef": 0.1})
    backend._device = torch.device("cuda")
    backend._config = backend._config.model_copy(update={"cpu_offload": True})
    monkeypatch.setattr(backend, "_load", lambda _: backend._reference)
    backend._load_reference(Path())
    assert asked[-1] == torch.device("cpu")


def test_the_reference_stays_the_starting_weights_whatever_is_restored(sampler: Any, make_backend: Make, make_record: Record):
    backend, resumed = make_backend(loss={"kl_coef": 0.1}), make_backend(loss={"kl_coef": 0.1})
    first, *later = trained(backend, sampler, make_record, range(1, 4))
    assert first.diagnostics["reference_kl"] == 0
    assert all(report.diagnostics["reference_kl"] > 1e-6 for report in later)
    resumed.restore(backend.capture())
    (one,), (other,) = (trained(either, sampler, make_record, range(4, 5)) for either in (backend, resumed))
    assert one == other
    assert not any(p.requires_grad or p.grad is not None for p in backend._reference.parameters())
    assert make_backend()._reference is None


def test_a_reference_model_without_room_is_refused_with_the_memory_it_takes(make_backend: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("consumer.torch_backend.free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"loss\.kl_coef 0\.1: the reference model takes 0\.00 GiB of memory on cpu, .* are free; set loss\.kl_coef = 0"):
        make_backend(loss={"kl_coef": 0.1})
    make_backend()


def test_an_entropy_bonus_keeps_entropy_up(sampler: Any, make_backend: Make, make_record: Record):
    plain, bonus = (trained(make_backend(loss={"entropy_coef": weight}), sampler, make_record, range(1, 7))[-1] for weight in (0.0, 1.0))
    assert bonus.entropy > plain.entropy + 0.05


def test_the_learning_rate_falls_with_the_effective_sample_size(sampler: Any, make_backend: Make, make_record: Record):
    stale = trained(make_backend(loss={"lr_by_ess": True}, warmup_steps=0), sampler, make_record, range(1, 5))
    assert stale[0].lr == pytest.approx(1e-2, rel=1e-4), "the policy that sampled is the one that is trained"
    for report in stale:
        assert report.lr == pytest.approx(1e-2 * report.diagnostics["ess"] ** 0.5)
    assert stale[-1].lr < 0.95e-2


# -- memory and precision ----------------------------------------------------------------------------------------------------------------------


def test_recomputed_activations_give_the_same_bits_from_less_memory(sampler: Any, make_backend: Make, make_record: Record):
    found = []
    for recompute in (False, True):
        backend = make_backend(activation_checkpointing=recompute)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.accumulate(collated(sampler, make_record(), range(2)))
        found.append((kept, gradients(backend)))
    (plain, expected), (less, seen) = found
    assert less < plain / 2
    assert all(torch.equal(seen[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("head_float32", [False, True])
def test_a_float32_head_projects_in_float32_under_bfloat16(sampler: Any, make_backend: Make, make_record: Record, head_float32: bool):
    backend = make_backend(dtype="bfloat16", head_float32=head_float32)
    (part,) = micro_batches(collated(sampler, make_record(), range(4)), max_tokens=8192, share_prompts=False)
    seen: list[torch.Tensor] = []
    head = backend._model.get_output_embeddings()
    head.register_forward_hook(lambda _, given, logits: seen.extend((*given, logits)))
    with torch.no_grad():
        backend._logits(backend._model, part)
    hidden, logits = seen
    assert (logits.dtype == torch.float32) is head_float32
    assert torch.equal(logits.float(), torch.nn.functional.linear(hidden.float(), head.weight)) is head_float32
