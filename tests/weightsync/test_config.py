from __future__ import annotations

import sys
from subprocess import run
from typing import Any

import pytest

from protocol.config import Tree, validate
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig


class Weights(Tree):
    weights: WeightsConfig = WeightsConfig()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pause_mode": "stop"}, "weights.pause_mode: got 'stop' .*'in_place', 'retract' or 'abort'"),
        ({"max_paused": 0}, "weights.max_paused: got 0"),
        ({"publish_every": 0}, "weights.publish_every: got 0"),
        ({"keep": 0}, "weights.keep: got 0"),
        ({"transport": "nccl", "bucket_mb": 255}, r'bucket_mb 255 is below 256, which transport = "nccl" needs: raise weights\.bucket_mb'),
        ({"pause_moode": "abort"}, r"did you mean weights\.pause_mode"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate(Weights, {"weights": values}, source="run.toml")


@pytest.mark.parametrize("values", [{"transport": "nccl"}, {"transport": "nccl", "bucket_mb": 256}, {"transport": "gloo", "bucket_mb": 1}])
def test_small_buckets_are_refused_only_where_they_cost(values: dict[str, Any]):
    assert validate(Weights, {"weights": values}, source="run.toml").weights.transport == values["transport"]


def test_the_package_is_imported_without_a_tensor_library():
    code = (
        "import sys, weightsync.publisher, weightsync.reconciler, weightsync.registry; "
        "sys.exit(bool({'torch', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0
