from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.difference import judge, stored, trainer_logprobs


def sample(versions: str, edge: str = "", *, logprob: float = -1.0) -> dict[str, Any]:
    """A character of `versions` for each token, its version's number; of `edge`, an x where it is one."""
    edges = [mark == "x" for mark in edge.ljust(len(versions))]
    return {
        "prompt": [3, 4, 5],
        "ids": [6 + at for at in range(len(versions))],
        "versions": [f"1:{n}" for n in versions],
        "logprobs": [logprob] * len(versions),
        "edge": edges,
    }


def test_tokens_before_and_after_an_update_are_told_apart():
    crossed, whole = sample("11222", "  x  "), sample("222")
    trainer = {"1:1": [np.full(5, -1.1), None], "1:2": [np.full(5, -1.4), np.full(3, -1.2)]}
    told = judge([crossed, whole], trainer)
    assert {name: told[name]["tokens"] for name in ("before", "edge", "after", "moved")} == {"before": 5, "edge": 1, "after": 2, "moved": 2}
    assert told["before"]["mean"] == pytest.approx((2 * 0.1 + 3 * 0.2) / 5)
    assert told["after"]["mean"] == pytest.approx(0.4)
    assert told["after"]["signed_mean"] == pytest.approx(0.4), "engine minus trainer"
    assert told["moved"]["mean"] == pytest.approx(0.3), "the two versions are so far apart"
    assert told["tokens_of_lost_versions"] == 0


def test_tokens_of_a_version_that_is_gone_are_counted_and_not_judged():
    told = judge([sample("1122")], {"1:2": [np.full(4, -1.0)]})
    assert told["tokens_of_lost_versions"] == 2
    assert told["before"] == {"tokens": 0}
    assert told["after"]["tokens"] == 2
    assert told["moved"] == {"tokens": 0}, "without the older version nothing is known of it"


def test_the_trainers_logprobs_do_not_depend_on_padding_or_company(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "v1-1")
    folders = stored(tmp_path)
    assert set(folders) == {"1:1"}
    together = [sample("1" * 9), sample("2"), sample("11")]
    (told,) = trainer_logprobs(together, folders, "cpu").values()
    assert told[1] is None, "the version does not occur in it"
    for one, values in zip(together, told, strict=True):
        if values is not None:
            ids = torch.tensor([one["prompt"] + one["ids"]])
            with torch.no_grad():
                alone = model(ids).logits[0].log_softmax(-1)
            wanted = [float(alone[at - 1, ids[0, at]]) for at in range(len(one["prompt"]), ids.shape[1])]
            assert values.tolist() == pytest.approx(wanted, abs=1e-5)


def test_only_whole_versions_are_found_in_a_store(tmp_path: Path):
    for name, files in {"v1-7": ("config.json", "model.safetensors"), "v1-8": ("delta.safetensors", "config.json"), "assets-1": ("config.json",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert stored(tmp_path) == {"1:7": tmp_path / "v1-7"}
