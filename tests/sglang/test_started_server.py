"""A server that we start has what its updates need, and none of what would break them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from producer.engine.config import EngineConfig
from producer.engine.sglang import engine
from producer.engine.sglang.arguments import LAUNCH, Place, server_arguments
from producer.engine.sglang.engine import SGLangServer
from protocol.errors import ConfigError
from weightsync.server import process_group

ROOT = Path(__file__).parents[2]
PLACE = Place(index=1, port=30001, rendezvous_port=30002, boot_nonce="abc", seed=7)


def settings(**changes: object) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "sglang", "slots": 4} | changes)


def arguments(**changes: object) -> dict[str, str]:
    """By name; without a value: empty."""
    words = server_arguments(settings(**changes), PLACE, model="/m", longest=40, context=4096)[1:]
    return {word: "" if at + 1 == len(words) or words[at + 1].startswith("--") else words[at + 1] for at, word in enumerate(words) if word.startswith("--")}


def test_its_base_weights_go_by_its_boot():
    """All servers call them "default" otherwise, and one that was restarted could not be told from the one before it."""
    assert arguments()["--weight-version"] == "boot:abc"


def test_on_a_cpu_its_memory_is_bounded_and_nothing_needs_a_compiled_kernel():
    """Left alone it takes seven tenths of the machine's memory for keys and values."""
    told = arguments(device="cpu")
    assert int(told["--max-total-tokens"]) <= 4 * 48 * 1.25
    assert int(told["--context-length"]) == 48, "a little more than the longest request, which is cut without a word where it reaches the end"
    assert (told["--attention-backend"], told["--sampling-backend"], told["--grammar-backend"]) == ("torch_native", "pytorch", "none")


def test_on_a_gpu_its_graphs_stay_on():
    """Without them it is 5 to 15 times slower."""
    assert not [name for name in arguments() if "graph" in name]


@pytest.mark.parametrize(
    "args", [["--weight-cache-mode", "client"], ["--skip-tokenizer-init"], ["--weight-version", "v1"], ["--api-key", "secret"], ["--tp-size", "2"]]
)
def test_what_would_break_updates_or_answers_is_refused_by_name(args: list[str]):
    with pytest.raises(ConfigError, match=re.escape(args[0])):
        arguments(args=args)


def test_an_admin_key_that_everybody_could_read_is_refused(monkeypatch: pytest.MonkeyPatch):
    """`/server_info` tells it, and is open to all where there is no other key."""
    monkeypatch.setenv("ROLLSTREAM_ENGINE_ADMIN_KEY", "admin")
    monkeypatch.delenv("ROLLSTREAM_ENGINE_KEY", raising=False)
    with pytest.raises(ConfigError, match="shows its admin key"):
        SGLangServer(settings(), index=0, model="/m", longest=40, seed=lambda _: 0, log=Path("/nowhere"))


def test_nothing_of_ours_is_on_its_import_path(monkeypatch: pytest.MonkeyPatch):
    """It runs in an environment of its own; a megatron or a transformers of ours would be found first."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    told = engine._environment(settings())
    assert "PYTHONPATH" not in told
    assert told["SGLANG_LOG_MS"] == "1", "what a user sets for the server reaches it"


def test_it_has_minutes_to_write_its_first_token():
    """A cold start took 67 s, and the first request compiled for 10 s more."""
    assert settings().start_seconds >= 2 * (67 + 10)


def test_it_has_time_to_end_by_itself():
    """That took it 6 s."""
    assert engine._GRACE_S > 6


def test_what_a_cpu_lacks_is_stood_in_for_in_every_process_that_it_starts():
    """Each of them imports the server's main file anew, under another name: what is done at its top holds there too."""
    program = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("__mp_main__", {str(LAUNCH)!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
import sgl_kernel.anything, torch
from sgl_kernel import scalar_type
scalar_type.uint4b8
torch.ops.torchvision.nms
try:
    sgl_kernel.anything.attend(1)
except NotImplementedError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"})
    assert "attend is a compiled kernel of SGLang" in done.stdout, done.stderr


def test_a_sender_has_the_setting_that_servers_have(monkeypatch: pytest.MonkeyPatch):
    """With another value the server refuses, and the sender hangs."""
    for name in process_group._ENVIRONMENT:
        monkeypatch.setenv(name, "as it was")
    process_group.prepare_environment()
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"


def _pins() -> dict[str, tuple[int, ...]]:
    text = (ROOT / "benchmarks" / "gpu" / "bundle.sh").read_text()
    return {name: tuple(int(part) for part in version.split(".") if part.isdigit()) for name, version in re.findall(r"([\w-]+)==([\d.]+)", text)}


def test_the_pins_of_the_gpu_benchmark_fit_each_other():
    pins = _pins()
    assert pins["sglang"] == (0, 5, 17), "the newest for torch 2.11"
    assert pins["transformers"] < (5, 13), "later ones have a model of the name that it registers"
    assert pins["tokenizers"] < (0, 23, 1), "which that transformers wants"
    assert pins["fastapi"] < (0, 165), "later ones import opentelemetry"
    assert pins["apache-tvm-ffi"] == (0, 1, 11)


def test_the_gpu_benchmark_starts_servers_that_need_no_flashinfer():
    """They import it also where they are told to do without."""
    start = (ROOT / "benchmarks" / "gpu" / "start.sh").read_text()
    assert "SGLANG_IS_FLASHINFER_AVAILABLE=false" in start
    assert "NCCL_CUMEM_ENABLE=0" in start
    assert (ROOT / "benchmarks" / "gpu" / "stand_ins" / "flashinfer" / "__init__.py").is_file()
