from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from producer.config import GroupFilter, ProducerDaemonConfig, RewardKind
from protocol.config import validate
from protocol.errors import ConfigError

LEAST: dict[str, Any] = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}}


def test_defaults_are_enough_and_words_of_a_file_become_choices() -> None:
    config = validate(ProducerDaemonConfig, LEAST | {"reward": {"kind": "contains"}, "producer": {"filter": "zero_variance"}}, source="run.toml")
    assert config.reward.kind is RewardKind.CONTAINS
    assert config.producer.filter is GroupFilter.ZERO_VARIANCE


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"reward": {"kind": "exact"}}, "reward.kind: got 'exact'"),
        ({"reward": {"kind": "function"}}, "with kind function, give package.module:name"),
        ({"reward": {"function": "a:b"}}, "set kind to function, or leave function out"),
        ({"producer": {"sample_deadline_seconds": 100.0, "group_deadline_seconds": 10.0}}, "sample_deadline_seconds 100 exceeds group_deadline_seconds 10"),
        ({"producer": {"max_inflight_groups": "8"}}, "producer.max_inflight_groups: got '8' (str)"),
        ({"producer": {"router_url": "router:30000"}}, "router_url is 'router:30000': give http://host:port"),
        ({"producer": {"progress_seconds": 0}}, "producer.progress_seconds"),
        ({"eval": {"evry_seconds": 1}}, "did you mean eval.every_seconds?"),
    ],
)
def test_what_does_not_fit_is_named(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(ProducerDaemonConfig, LEAST | section, source="run.toml")
    assert expected in str(refused.value)


def test_a_producer_imports_no_torch() -> None:
    code = "import sys, producer.main; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, timeout=60).returncode == 0
