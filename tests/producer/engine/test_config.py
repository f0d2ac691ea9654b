from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from producer.engine.config import EngineConfig


def test_the_defaults_are_an_embedded_engine_on_a_free_local_port():
    config = EngineConfig()
    assert (config.kind, config.host, config.port, config.dtype) == ("embedded", "127.0.0.1", 0, "auto")


def test_ports_of_all_engines_must_exist():
    with pytest.raises(ValidationError, match="port 65535 leaves no room for 2 engines"):
        EngineConfig(port=65535, count=2)
    assert EngineConfig(port=65535).port == 65535


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"torch_threads": 0}, {"dtype": "float8"}, {"kind": "vllm"}, {"slot": 3}, {"pace_s": -1}, {"apply_delay_factor": 0.5}]
)
def test_what_no_engine_could_do_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill": 1}, 'kind "embedded" is one server'),
        ({"kind": "sglang", "prefill": 1, "nodes": 2}, "on one machine"),
        ({"kind": "sglang", "prefill_args": ["--x"]}, "a server that is not there"),
    ],
)
def test_two_halves_are_of_one_machine_and_of_sglang(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**settings)


def test_there_are_as_many_external_engines_as_urls_unless_some_are_kept_for_evaluation():
    urls = ("http://a:1", "http://b:1", "http://c:1")
    assert EngineConfig(kind="external", urls=urls).count == 3
    assert EngineConfig(kind="external", urls=urls, count=2).count == 2
