from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from producer.engine.config import EngineConfig
from producer.engine.kinds import make_kind
from producer.engine.sglang.arguments import LAUNCH, Place, check_context, gpus_of, server_arguments
from producer.engine.sglang.context import known_context
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig
from weightsync.gpus import VISIBLE
from weightsync.lora import LoraConfig

PLACE = Place(index=2, port=31000, rendezvous_port=31001, boot_nonce="ab12", seed=(1 << 40) + 7)


def flags(argv: Sequence[str]) -> dict[str, str]:
    """The last value of each flag, as argparse takes it."""
    return {word: following for word, following in zip(argv, [*argv[1:], ""], strict=True) if word.startswith("--")}


def arguments(context: int = 0, **settings: object) -> dict[str, str]:
    argv = server_arguments(EngineConfig(kind="sglang", **settings), PLACE, model="/m", longest=24, context=context)  # type: ignore[arg-type]
    assert argv[0] == str(LAUNCH)
    assert LAUNCH.is_file()
    return flags(argv)


def test_base_weights_are_named_after_the_boot_and_ports_are_those_that_are_held():
    given = arguments()
    assert {name: given[name] for name in ("--model-path", "--weight-version", "--host", "--port", "--nccl-port", "--random-seed")} == {
        "--model-path": "/m",
        "--weight-version": "boot:ab12",
        "--host": "127.0.0.1",
        "--port": "31000",
        "--nccl-port": "31001",
        "--random-seed": "7",
    }
    assert "--enable-metrics" in given, "progress and load are seen there alone"


def test_each_engine_of_a_machine_has_gpus_of_its_own():
    assert arguments(tp=4, gpu=1)["--base-gpu-id"] == "9"
    assert arguments(tp=2, args=("--pp-size", "2", "--data-parallel-size=3"))["--base-gpu-id"] == "24"
    assert arguments(tp=2, args=("--dp-s", "2", "--enable-dp-attention"))["--base-gpu-id"] == "4", "replicas that share out the attention alone"
    assert "--device" not in arguments()
    assert "--base-gpu-id" not in arguments(device="cpu")


@pytest.mark.parametrize(
    ("settings", "visible", "names"),
    [
        ({"tp": 2, "gpu": 1}, None, ("5", "6")),
        ({"tp": 2}, "7,6,5,4,3,2", ("3", "2")),
        ({"gpu": 1}, "GPU-a,GPU-b,GPU-c,GPU-d", ("GPU-d",)),
        ({"tp": 2}, "0,1,2", ()),
        ({"args": ("--dp-size=2",)}, None, ("4", "5")),
        ({"device": "cpu"}, None, ()),
        ({"kind": "embedded"}, None, ()),
    ],
)
def test_its_gpus_are_named_as_its_server_sees_them_or_not_at_all(settings: dict[str, object], visible: str | None, names: tuple[str, ...]):
    config = EngineConfig(**({"kind": "sglang"} | settings))  # type: ignore[arg-type]
    assert gpus_of(config, PLACE.index, {} if visible is None else {VISIBLE: visible}) == names


@pytest.mark.parametrize(
    ("settings", "context", "length"),
    [({}, 0, 32), ({}, 4096, 32), ({}, 30, 30), ({"max_length": 100}, 0, 100), ({"max_length": 100}, 64, 64)],
)
def test_on_a_cpu_the_cache_is_what_the_slots_need(settings: dict[str, int], context: int, length: int):
    given = arguments(context, device="cpu", slots=10, **settings)
    assert given["--context-length"] == str(length)
    assert given["--max-total-tokens"] == str(int(12.5 * length))


def test_on_a_gpu_the_context_is_the_models_unless_it_is_chosen():
    assert "--context-length" not in arguments()
    assert arguments(max_length=4096)["--context-length"] == "4096"


def test_the_users_arguments_come_last_and_so_win():
    given = arguments(args=("--max-running-requests", "7", "--random-seed=9", "--disable-radix-cache"))
    assert given["--max-running-requests"] == "7"
    assert "--disable-radix-cache" in given
    assert "--random-seed=9" in given


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model-path", "x"), r"engine\.args has --model-path: the model is model\.path"),
        (("--model=x",), r"--model: the model is model\.path"),
        (("--port", "1"), r"use engine\.port"),
        (("--weight-version", "v"), "names the base weights"),
        (("--weight-ver", "v"), "names the base weights"),
        (("--api-key", "k"), "ROLLSTREAM_ENGINE_KEY"),
        (("--admin_api_key", "k"), "ROLLSTREAM_ENGINE_ADMIN_KEY"),
        (("--tp", "2"), r"use engine\.tp"),
        (("--base-gpu-id", "1"), r"use engine\.gpu"),
        (("--gpu-id-step", "2"), "CUDA_VISIBLE_DEVICES"),
        (("--pp-size", "two"), "--pp-size two: give a whole number"),
        (("--config", "f.yaml"), "a file of arguments"),
        (("--skip-tokenizer-init",), "no text"),
        (("--disaggregation-mode", "prefill"), r"--disaggregation-mode prefill: .*set engine\.prefill"),
        (("--disaggregation-bootstrap-port", "8998"), "holds a free port for it"),
        (("--node-rank", "1"), "start the others by `rollstream engine --node-rank K`"),
        (("--nnodes", "2"), r"use engine\.nodes"),
        (("--dist-init-addr=10.0.0.1:5000",), "anew for each start"),
        (("--weight-cache-mode", "daemon"), "cannot be updated in place"),
        (("--tokenizer-worker-num", "4"), "an update reaches one of them"),
        (("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/draft"), "into the draft as well"),
        (("--quantization", "fp8"), "--quantization fp8 without --load-format flash_rl"),
        (("--quantization=fp8", "--load-format=auto"), "take no second version"),
    ],
)
def test_what_would_break_the_host_is_refused_with_the_reason(args: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        arguments(args=args)


@pytest.mark.parametrize(
    "args",
    [
        ("--quantization", "fp8", "--load-format", "flash_rl"),
        ("--speculative-algorithm", "NGRAM"),
        ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        ("--dp-size", "2", "--enable-dp-attention"),
        ("--disaggregation-mode", "null"),
        ("--enable-memory-saver",),
    ],
)
def test_whatever_else_sglang_knows_passes_through(args: tuple[str, ...]):
    assert set(args) <= set(server_arguments(EngineConfig(kind="sglang", args=args), PLACE, model="/m", longest=24, context=0))


def test_replicas_that_are_groups_of_their_own_do_not_share_a_port():
    """The second one of them ended with EADDRINUSE."""
    assert "--nccl-port" not in arguments(args=("--dp-size", "2"))
    assert arguments(args=("--dp-size", "2", "--enable-dp-attention"))["--nccl-port"] == "31001", "one group of all"
    assert arguments(args=("--dp-size", "1"))["--nccl-port"] == "31001"


def test_each_machine_of_an_engine_is_told_its_rank_and_where_to_meet():
    def started(rank: int, **settings: object) -> dict[str, str]:
        place = dataclasses.replace(PLACE, node_rank=rank, meeting="10.0.0.1:5000")
        return flags(server_arguments(EngineConfig(kind="sglang", **settings), place, model="/m", longest=24, context=0))  # type: ignore[arg-type]

    for rank in (0, 1):
        given = started(rank, tp=8, nodes=2, gpu=1)
        told = {name: given[name] for name in ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size", "--base-gpu-id")}
        assert told == {"--nnodes": "2", "--node-rank": str(rank), "--dist-init-addr": "10.0.0.1:5000", "--tp-size": "8", "--base-gpu-id": "9"}
    assert "--nnodes" not in started(0, tp=8)
    assert "--nnodes" in started(0, nodes=2, args=("--pp-size", "2")), "a stage on each"
    with pytest.raises(ConfigError, match=r"engine\.tp 3 over engine\.nodes 2: each node must have as many"):
        started(0, tp=3, nodes=2)


def test_each_half_of_an_engine_has_its_own_gpus_ports_and_arguments():
    def started(half: str, **settings: object) -> dict[str, str]:
        place = dataclasses.replace(PLACE, half=half, bootstrap_port=31002)  # type: ignore[arg-type]
        engine = EngineConfig(kind="sglang", tp=4, prefill=2, gpu=1, **settings)  # type: ignore[arg-type]
        return flags(server_arguments(engine, place, model="/m", longest=24, context=0))

    own = {"args": ("--mem-fraction-static", "0.8"), "prefill_args": ("--mem-fraction-static", "0.6")}
    names = ("--disaggregation-mode", "--disaggregation-bootstrap-port", "--tp-size", "--base-gpu-id", "--mem-fraction-static")
    prefill, decode = ({name: started(half, **own)[name] for name in names} for half in ("prefill", "decode"))
    assert tuple(decode.values()) == ("decode", "31002", "4", "13", "0.8")
    assert tuple(prefill.values()) == ("prefill", "31002", "2", "17", "0.6"), "behind those of the half that writes"
    assert "--disaggregation-transfer-backend" not in started("prefill"), "SGLang's own choice on GPUs"
    on_cpu = started("decode", device="cpu")
    assert (on_cpu["--disaggregation-transfer-backend"], on_cpu["--num-reserved-decode-tokens"]) == ("nixl", "1")
    assert "--disaggregation-mode" not in arguments()
    assert gpus_of(EngineConfig(kind="sglang", tp=2, prefill=1), 1, {}) == ("3", "4", "5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": ("--dp-size", "2", "--enable-dp-attention")}, r"engine\.prefill with --dp-size"),
        ({"prefill_args": ("--pp-size=2",)}, r"engine\.prefill with --pp-size"),
        ({"prefill_args": ("--port", "1")}, r"engine\.prefill_args has --port"),
    ],
)
def test_what_would_break_one_of_two_halves_is_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        arguments(prefill=1, **settings)


@pytest.mark.parametrize(
    ("weights", "lora", "shares_device"),
    [({"transport": "nccl"}, {}, False), ({}, {"rank": 8, "publish": "adapter"}, False), ({}, {}, True)],
    ids=["group", "adapters", "turns"],
)
def test_what_two_halves_are_not_known_to_do_is_refused(tmp_path: Path, weights: dict[str, Any], lora: dict[str, Any], shares_device: bool):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"engine\.prefill: an engine of two servers"):
        make_kind(
            EngineConfig(kind="sglang", prefill=1),
            WeightsConfig(**weights),
            lora=LoraConfig(**lora),
            shares_device=shares_device,
            index=0,
            model=str(tmp_path),
            longest=24,
            seed=lambda _: 0,
            log=tmp_path / "sglang.log",
        )


def test_a_run_whose_versions_are_adapters_starts_servers_that_take_them():
    lora = LoraConfig(rank=8, publish="adapter", keep_loaded=3, target_modules=["q_proj", "down_proj"])

    def started(device: str, lora: LoraConfig) -> str:
        settings = EngineConfig(kind="sglang", device=device)  # type: ignore[arg-type]
        return " ".join(server_arguments(settings, PLACE, model="/m", longest=24, context=0, lora=lora))

    on_gpu, on_cpu = (started(device, lora) for device in ("cuda", "cpu"))
    flags = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj down_proj --max-loras-per-batch 5"
    assert flags in on_gpu
    assert f"{flags} --lora-backend torch_native" in on_cpu, "the others are kernels for GPUs"
    assert "--lora-backend" not in on_gpu
    assert "--enable-lora" not in started("cuda", lora.model_copy(update={"publish": "merged"}))


@pytest.mark.parametrize(
    ("settings", "context", "told"),
    [
        ({}, 0, ""),
        ({}, 25, ""),
        ({}, 24, r"model\.path: the model's max_position_embeddings is 24 tokens, and the longest request .* has 24, and one more"),
        ({"max_length": 32}, 0, ""),
        ({"max_length": 31}, 64, r"engine\.max_length 31 tokens"),
        ({"args": ("--context-length", "31")}, 64, r"engine\.args --context-length 31 tokens"),
        ({"args": ("--context-length=32",)}, 64, ""),
    ],
)
def test_a_server_without_room_for_the_longest_request_is_refused(settings: dict[str, object], context: int, told: str):
    engine = EngineConfig(kind="sglang", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        check_context(engine, longest=24, context=context)


@pytest.mark.parametrize(
    ("file", "context"),
    [
        ('{"max_position_embeddings": 64}', 64),
        ('{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}', 0),
        ('{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}', 64),
        ('{"model_type": "qwen3"}', 0),
        ("[]", 0),
    ],
)
def test_the_room_is_the_models_where_its_file_says_so(tmp_path: Path, file: str, context: int):
    (tmp_path / "config.json").write_text(file)
    assert known_context(str(tmp_path)) == context


def test_a_host_refuses_a_model_that_is_too_short_for_the_run(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(ConfigError, match=r"max_position_embeddings is 64 tokens, and the longest request .* has 1024"):
        make_kind(EngineConfig(kind="sglang"), WeightsConfig(), index=0, model=str(tmp_path), longest=1024, seed=lambda _: 0, log=tmp_path / "sglang.log")
