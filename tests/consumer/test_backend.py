"""A backend of one's own, by dotted path; and a trainer that knows no torch until a backend brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from consumer.backend import find_backend
from consumer.config import TrainerConfig
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError
from tests.faults.chain_backend import ChainBackend


def test_torch_is_the_default_and_any_other_goes_by_its_path():
    assert find_backend(TrainerConfig().backend) is TorchBackend
    assert find_backend("tests.faults.chain_backend:ChainBackend") is ChainBackend


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Backend", ("cannot import no_such_module", "correct the path")),
        ("tests.faults.chain_backend:Other", ("has no Other", "define `class Other` there")),
        ("collections:OrderedDict", ("has no accumulate, finish_step, abandon_step, snapshot, capture, restore", "consumer.backend.Backend")),
    ],
)
def test_what_is_no_backend_is_refused_by_name(name: str, words: tuple[str, ...]):
    with pytest.raises(ConfigError) as problem:
        find_backend(name)
    assert str(problem.value).startswith(f"trainer.backend {name}: ")
    assert all(word in str(problem.value) for word in words)


@pytest.mark.parametrize("name", ["jax", "module:", ":Class", "a b:Class", "module.Class", "1a:B"])
def test_a_path_that_is_none_is_refused_with_the_file(name: str):
    with pytest.raises(ValueError, match=r"expected torch, megatron, or package\.module:Class"):
        TrainerConfig(backend=name)


def test_the_trainer_itself_imports_no_torch():
    code = "import sys, consumer.main, tests.faults.chain_backend; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_megatron_that_is_not_installed_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [one for one in sys.modules if one.startswith(("consumer.megatron", "megatron"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match=r"rollstream\[torch,megatron\]"):
        find_backend("megatron")
