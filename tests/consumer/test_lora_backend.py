"""The torch backend with an adapter: what it trains, publishes and keeps, against the weights written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import group_std
from consumer.backend import digest_now
from consumer.batch import ChunkBatch, collate, micro_batches
from consumer.checkpoint import Checkpoint, Progress, read_checkpoint, write_checkpoint
from consumer.config import TrainerConfig, check_trains
from consumer.journal import JournalTail
from consumer.lora_backend import LoraBackend, Merged
from consumer.losses import LossConfig
from consumer.merging import MergedFiles, base_in
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError, RollstreamError
from protocol.versions import Version
from weightsync.adapter_store import AdapterStore
from weightsync.lora import LoraConfig
from weightsync.safetensors_file import open_model
from weightsync.snapshot import Snapshot, digest_of, weights_digest

Make = Callable[..., LoraBackend]
Record = Callable[..., StepRecord]
RANK, ALPHA = 4, 12.0


@pytest.fixture
def make_lora(model_path: Path) -> Make:
    def make(path: Path | None = None, *, loss: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **settings: Any) -> LoraBackend:
        lora = LoraConfig(**({"rank": RANK, "alpha": ALPHA} | settings))
        config = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 1} | (trainer or {})))
        return LoraBackend(path or model_path, config, loss=LossConfig(**(loss or {})), temperature=1.0, seed=3, lora=lora)

    return make


def batch_of(sampler: Any, record: StepRecord) -> ChunkBatch:
    return collate(record, [sampler.headed(seq) for seq in range(4)], group_std)


def trained(backend: TorchBackend, sampler: Any, make_record: Record, steps: int = 2) -> TorchBackend:
    for step in range(1, steps + 1):
        batch = batch_of(sampler, make_record())
        backend.accumulate(batch)
        backend.finish_step(step, batch.divisor)
    return backend


def arrays(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: torch.frombuffer(bytearray(one.data), dtype=torch.float32).view(one.shape) for name, one in tensors.items()}


def test_a_step_moves_the_adapter_and_nothing_else(sampler: Any, make_lora: Make, make_record: Record):
    backend = make_lora()
    base = {name: tensor.clone() for name, tensor in Merged(backend._model).parts()}
    before = {name: parameter.detach().clone() for name, parameter in backend._parameters.items()}
    batch = batch_of(sampler, make_record())
    backend.accumulate(batch)
    assert {name for name, p in backend._model.named_parameters() if p.grad is not None} == set(backend._parameters)
    assert len(before) == 2 * 2 * 7
    backend.finish_step(1, batch.divisor)
    assert set(backend._optimizer.state) == set(backend._parameters.values())
    for name, tensor in Merged(backend._model).parts():
        torch.testing.assert_close(tensor, base[name], rtol=0, atol=0)
    moved = {name for name, p in backend._parameters.items() if not torch.equal(p, before[name])}
    assert moved >= {name for name in before if ".lora_B." in name}  # B starts at zero, so A has no gradient yet


@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_published_merged_is_the_base_and_the_product(sampler: Any, make_lora: Make, make_record: Record, model_path: Path, rslora: bool):
    """By the formula, and by what the trainer itself says of the same tokens."""
    backend = trained(make_lora(use_rslora=rslora), sampler, make_record)
    published, adapter = arrays(backend.snapshot()), arrays(backend.capture().weights)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    scaling = ALPHA / (RANK**0.5 if rslora else RANK)
    changed = 0
    with torch.no_grad():
        assert set(published) == {name for name, _ in base.named_parameters()}
        for name, parameter in base.named_parameters():
            a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB")
            if a is not None and b is not None:
                changed += 1
                parameter.add_(scaling * (b @ a))
            torch.testing.assert_close(published[name], parameter.detach(), rtol=1e-6, atol=1e-7)
    assert changed == 14
    assert digest_now(backend) == digest_of(backend.snapshot())
    ids = torch.tensor([[1, 5, 7, 4, 9]])
    with torch.no_grad():
        own = backend._model(input_ids=ids).logits
        torch.testing.assert_close(base.eval()(input_ids=ids).logits, own, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_published_as_an_adapter_loads_into_peft_and_computes_the_same(
    sampler: Any, make_lora: Make, make_record: Record, model_path: Path, tmp_path: Path, rslora: bool
):
    settings = {"publish": "adapter", "use_rslora": rslora, "target_modules": ["q_proj", "down_proj"]}
    backend = trained(make_lora(**settings), sampler, make_record)
    store = AdapterStore(tmp_path, LoraConfig(rank=RANK, alpha=ALPHA, **settings).settings(str(model_path)))
    manifest = store.write(Snapshot(version=Version(1, 2), tensors=dict(backend.snapshot())))
    assert (manifest.kind, manifest.total_bytes < 20_000) == ("adapter", True)
    store.verify(manifest)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(store.locate(manifest))).eval()
    ids = torch.tensor([[1, 5, 7, 4, 9]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, backend._model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_model_without_the_adapter(sampler: Any, make_lora: Make, make_record: Record, make_backend: Callable[..., TorchBackend]):
    """And the gradient of a step with a KL term is that with a model of its own."""
    backend = trained(make_lora(loss={"kl_coef": 0.1}), sampler, make_record)
    part = next(micro_batches(batch_of(sampler, make_record()), max_tokens=8192, share_prompts=True))
    plain = make_backend()
    with torch.no_grad():
        without = backend._predicted(backend._reference, part)[0]
        torch.testing.assert_close(without, plain._predicted(plain._model, part)[0], rtol=1e-5, atol=1e-5)
        assert (backend._predicted(backend._model, part)[0] - without).abs().max() > 0.01
    gradients = []
    for reference in (backend._reference, plain._model):
        backend._reference = reference
        backend.accumulate(batch_of(sampler, make_record()))
        gradients.append({name: p.grad.clone() for name, p in backend._parameters.items() if p.grad is not None})
        backend.abandon_step()
    assert gradients[0].keys() == backend._parameters.keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7)


def test_a_resumed_adapter_goes_on_bitwise_and_its_checkpoint_holds_no_weights(
    sampler: Any, make_lora: Make, make_record: Record, model_path: Path, tmp_path: Path
):
    straight = trained(make_lora(), sampler, make_record, steps=2)
    state = straight.capture()
    saved = Checkpoint(progress=Progress(step=2), incarnation=1, state=state, journal=JournalTail().dump(), schedule={})
    reference = write_checkpoint(tmp_path, saved, model_path=model_path)
    folder = Path(reference.path)
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    found = read_checkpoint(reference, folder=tmp_path)
    resumed = make_lora()
    resumed.restore(found.state)
    trained(straight, sampler, make_record, steps=1)
    trained(resumed, sampler, make_record, steps=1)
    assert resumed.digest() == straight.digest()
    assert len(found.state.optimizer) == 3 * len(found.state.weights) == 3 * 28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_files_of_the_model_and_a_checkpoint_give_the_bits_that_were_published(
    sampler: Any, make_lora: Make, make_record: Record, model_path: Path, dtype: str
):
    backend = trained(make_lora(base_dtype=dtype), sampler, make_record)
    state = backend.capture()
    assert state.base is not None
    with open_model(model_path) as weights:
        merged = MergedFiles(weights, state.weights, base_in(model_path, state.base))
        assert {name: (merged.dtype(name), merged.shape(name)) for name in merged} == {name: (one.dtype, one.shape) for name, one in merged.items()}
        assert weights_digest(merged) == backend.digest()
        with pytest.raises(ConfigError, match=r"the adapter has layers\.7, and the weights"):
            MergedFiles(weights, {"base_model.model.layers.7.lora_A.weight": next(iter(state.weights.values()))}, state.base)


def test_a_checkpoint_of_other_weights_scaling_or_kind_is_refused(make_lora: Make, make_backend: Callable[..., TorchBackend], untied_model_path: Path):
    state = make_lora().capture()
    for wrong, message in (
        (make_lora(untied_model_path), "correct it"),
        (make_lora(alpha=5.0), "scaled by 3, lora.alpha and lora.rank say 1.25"),
        (make_lora(target_modules=["q_proj"]), "another model"),
        (make_lora(base_dtype="bfloat16"), "over weights in float32, lora.base_dtype says bfloat16"),
    ):
        with pytest.raises(RollstreamError, match=message):
            wrong.restore(state)
    with pytest.raises(RollstreamError, match=r"set lora\.rank = 0"):
        make_lora().restore(make_backend().capture())
    with pytest.raises(RollstreamError, match="holds an adapter"):
        make_backend().restore(state)


def test_a_bfloat16_base_is_published_in_bfloat16_and_the_adapter_is_float32(sampler: Any, make_lora: Make, make_record: Record):
    backend = trained(make_lora(base_dtype="bfloat16"), sampler, make_record)
    assert {one.dtype for one in backend.snapshot().values()} == {"BF16"}
    assert {one.dtype for one in backend.capture().weights.values()} == {"F32"}
    assert all(np.isfinite(p.detach().numpy()).all() for p in backend._parameters.values())


def test_modules_that_the_model_does_not_have_are_named(make_lora: Make):
    with pytest.raises(ConfigError, match=r"w1: linear layers of model\.path .* are down_proj, gate_proj"):
        make_lora(target_modules=["q_proj", "w1"])


def test_recomputed_activations_give_the_same_gradient(sampler: Any, make_lora: Make, make_record: Record):
    one, other = trained(make_lora(), sampler, make_record), trained(make_lora(trainer={"activation_checkpointing": True}), sampler, make_record)
    assert one.digest() == other.digest()


def test_what_trains_no_adapter_is_refused_before_anything_is_loaded():
    lora, torch_alone = LoraConfig(rank=4), TrainerConfig()
    check_trains(lora, torch_alone)
    with pytest.raises(ConfigError, match=r"trainer\.backend megatron"):
        check_trains(lora, TrainerConfig(backend="megatron"))
