from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from producer.engine.embedded import weights
from producer.engine.embedded.model import SlotModel, load
from protocol.errors import ConfigError, ManifestError

from .conftest import write_model


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_staging_touches_nothing_and_applying_changes_every_parameter(served: SlotModel, model_b: Path):
    before = {name: p.clone() for name, p in served.model.named_parameters()}
    staged = weights.stage(str(model_b), served.model)
    assert all(torch.equal(p, before[name]) for name, p in served.model.named_parameters())
    weights.apply(served.model, staged)
    wanted = load_file(model_b / "model.safetensors")
    assert all(torch.equal(p, wanted[name]) for name, p in served.model.named_parameters())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "model.extra.weight is not of this model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight has shape \[31\], the model \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}), "model.norm.weight has dtype I64"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_the_tensors_name(
    served: SlotModel, model_b: Path, tmp_path: Path, break_it: Callable[[dict[str, torch.Tensor]], object], message: str
):
    tensors = load_file(model_b / "model.safetensors")
    break_it(tensors)
    with pytest.raises(ManifestError, match=message):
        weights.stage(save(tmp_path / "bad", tensors), served.model)


def test_a_truncated_or_missing_file_is_refused(served: SlotModel, model_b: Path, tmp_path: Path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes((model_b / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ManifestError, match="cannot be read"):
        weights.stage(str(tmp_path / "cut"), served.model)
    with pytest.raises(ManifestError, match="no safetensors files"):
        weights.stage(str(tmp_path / "nowhere"), served.model)


def test_a_tied_head_may_be_there_and_other_floats_are_converted(served: SlotModel, model_b: Path, tmp_path: Path):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model_b / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    weights.apply(served.model, weights.stage(save(tmp_path / "half", tensors), served.model))
    for name, parameter in served.model.named_parameters():
        assert torch.equal(parameter, tensors[name].float())


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "has no config.json"), ("tokenizer.json", "has no tokenizer.json"), ("model.safetensors", "cannot be loaded")]
)
def test_a_folder_that_is_no_model_is_a_configuration_error(tmp_path: Path, name: str, message: str):
    folder = write_model(tmp_path / "m", seed=1)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=message):
        load(str(folder), slots=2)


def test_more_context_or_memory_than_there_is_is_a_configuration_error(model_a: Path):
    with pytest.raises(ConfigError, match=r"engine.max_length 513 exceeds the context of 512"):
        load(str(model_a), slots=1, max_length=513)
    with pytest.raises(ConfigError, match="GiB of KV cache"):
        load(str(model_a), slots=1 << 30)
    assert load(str(model_a), slots=1, wanted=4096).max_length == 512
    assert load(str(model_a), slots=1, wanted=100).max_length == 100


def test_layers_without_full_attention_are_a_configuration_error(tmp_path: Path):
    folder = write_model(
        tmp_path / "w", seed=1, use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=["full_attention", "sliding_attention"]
    )
    with pytest.raises(ConfigError, match="layers without full attention"):
        load(str(folder), slots=2)
