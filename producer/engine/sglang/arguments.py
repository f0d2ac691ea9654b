"""The command line of a server of SGLang: pure.

Ours come first and the user's after them, so the user's win where both name one. What would break the host, or be silently wrong, is refused with the reason.
Keys are never among them: every process list shows a command line (`launch.py` takes them from the environment).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from producer.engine.config import EngineConfig
from protocol.errors import ConfigError
from weightsync.gpus import name_of
from weightsync.lora import LoraConfig

Half: TypeAlias = Literal["both", "prefill", "decode"]
"""What of a request a server does."""
LAUNCH = Path(__file__).with_name("launch.py")
_NO_LORA = LoraConfig()
_SPARE = 8
"""Tokens of context beyond the longest request: SGLang cuts what comes within one token of its context, without a word."""
_PAGES = 1.25
"""KV cache on a CPU, over what all slots need at once. Without a bound SGLang takes most of the machine's memory."""
_KEYS = "it would be seen in files and process lists; set {} in the environment of hosts, producers and readers"
_REFUSED = {
    "--model-path": "the model is model.path",
    "--model": "the model is model.path",
    "--host": "use engine.host, which is registered too",
    "--port": "use engine.port, which is held free meanwhile",
    "--weight-version": "the host names the base weights after each start, to know a restarted server",
    "--api-key": _KEYS.format("ROLLSTREAM_ENGINE_KEY"),
    "--admin-api-key": _KEYS.format("ROLLSTREAM_ENGINE_ADMIN_KEY"),
    "--tp-size": "use engine.tp, by which weights are brought too",
    "--tensor-parallel-size": "use engine.tp, by which weights are brought too",
    "--tp": "use engine.tp, by which weights are brought too",
    "--nnodes": "use engine.nodes; the host tells the others where to meet",
    "--node-rank": "use engine.nodes, and start the others by `rollstream engine --node-rank K`",
    "--dist-init-addr": "use engine.nodes; the host chooses the place to meet, at engine.host, anew for each start",
    "--nccl-init-addr": "use engine.nodes; the host chooses the place to meet, at engine.host, anew for each start",
    "--base-gpu-id": "use engine.gpu, from which engines lie side by side",
    "--gpu-id-step": "engines lie side by side from engine.gpu; choose and order GPUs by CUDA_VISIBLE_DEVICES",
    "--disaggregation-bootstrap-port": "the host holds a free port for it, anew for each start",
    "--device": "use engine.device, which decides the other arguments too",
    "--config": "a file of arguments could hold any of those that are refused; write them into engine.args",
    "--skip-tokenizer-init": "answers would have no text, which rewards judge",
    "--is-embedding": "the server would not generate",
    "--encoder-only": "the server would not generate",
    "--grpc-mode": "the server would not speak HTTP",
    "--smg-grpc-mode": "the server would not speak HTTP",
    "--speculative-draft-model-path": "SGLang loads every version into the draft as well (0.5.23), which is another model, and ends over its shapes; use "
    "--speculative-algorithm NGRAM, which has no weights, or layers of the model's own checkpoint",
}
_ALLOWED = {
    "--disaggregation-mode": ("null", "neither half writes a token by itself, by which every update is proven; set engine.prefill, and the host starts both"),
    "--tokenizer-worker-num": ("1", "each of its processes names a version of the weights of its own, and an update reaches one of them (seen with 0.5.17)"),
    "--weight-cache-mode": ("off", "weights that processes share cannot be updated in place"),
}
_REPLICAS = ("--dp-size", "--data-parallel-size")
_REPLICAS_WITHIN = ("--enable-dp-attention",)
_STAGES = ("--pp-size", "--pipeline-parallel-size")
_FP8, _RELOADABLE = ("--quantization", "fp8"), ("--load-format", "flash_rl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What differs from one start to the next."""

    index: int
    port: int
    rendezvous_port: int
    """Where the ranks of this server find each other."""
    boot_nonce: str
    seed: int
    node_rank: int = 0
    """Of an engine over several nodes: 0 answers."""
    half: Half = "both"
    """Of an engine of two servers: which this is."""
    bootstrap_port: int = 0
    """Where its halves find each other."""
    meeting: str = ""
    """Where its nodes find each other, host:port; empty: it has one."""


def server_arguments(
    settings: EngineConfig, place: Place, *, model: str, longest: int, context: int, shares_device: bool = False, lora: LoraConfig = _NO_LORA
) -> tuple[str, ...]:
    """Everything after the interpreter. `longest`: tokens of the longest request; `context`: of the model, 0 if unknown. `shares_device`: its memory can be
    given back and taken again. `lora`: versions may be adapters.

    Raises: `ConfigError` for arguments of the user's that would break the host.
    """
    check_arguments(settings)
    dtype = () if settings.dtype == "auto" else ("--dtype", settings.dtype)
    slots, reads = settings.slots, place.half == "prefill"
    return (
        str(LAUNCH),
        *("--model-path", model, "--host", settings.host, "--port", str(place.port)),
        # Replicas are process groups of their own, and each would want the one port: SGLang chooses theirs then.
        *(() if _replicas(settings) > 1 else ("--nccl-port", str(place.rendezvous_port))),
        *("--weight-version", f"boot:{place.boot_nonce}", "--random-seed", str(place.seed % (1 << 31))),
        *(
            "--tp-size",
            str(settings.prefill if reads else settings.tp),
            "--max-running-requests",
            str(slots),
            "--max-queued-requests",
            str(settings.max_queued),
            *dtype,
        ),
        *(_for_nodes(settings, place) if settings.nodes > 1 else ()),
        *("--enable-metrics", "--skip-server-warmup", "--log-level-http", "warning"),
        *(_for_cpu(settings, longest, context) if settings.device == "cpu" else _for_cuda(settings, place)),
        *(("--enable-memory-saver",) if shares_device and settings.device == "cuda" else ()),
        *(_for_adapters(settings, lora) if lora.adapters else ()),
        *(_for_half(settings, place) if place.half != "both" else ()),
        *settings.args,
        *(settings.prefill_args if reads else ()),
    )


def _for_adapters(settings: EngineConfig, lora: LoraConfig) -> Iterator[str]:
    yield from lora.server_flags()
    if settings.device == "cpu":
        yield from ("--lora-backend", "torch_native")  # the others are kernels for GPUs


def _for_cpu(settings: EngineConfig, longest: int, context: int) -> Iterator[str]:
    """No kernels are compiled for it: torch's own attention and sampling, and a KV cache of what the slots need."""
    length = settings.max_length or longest + _SPARE
    length = min(length, context) if context else length
    yield from ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none")
    yield from (
        "--context-length",
        str(length),
        "--max-total-tokens",
        str(int(settings.slots * length * _PAGES)),
        "--mem-fraction-static",
        "0.2",
        "--sleep-on-idle",
    )


def _for_nodes(settings: EngineConfig, place: Place) -> Iterator[str]:
    yield from ("--nnodes", str(settings.nodes), "--node-rank", str(place.node_rank), "--dist-init-addr", place.meeting)


def _for_half(settings: EngineConfig, place: Place) -> Iterator[str]:
    yield from ("--disaggregation-mode", place.half, "--disaggregation-bootstrap-port", str(place.bootstrap_port))
    if settings.device == "cpu":
        yield from ("--disaggregation-transfer-backend", "nixl")  # alone has shared memory and TCP without a library of the system's
        if place.half == "prefill":
            yield "--disable-overlap-schedule"  # with it, what is sent early waits for an event of CUDA
        else:  # the cache has room for all slots whole: nothing is kept back, taken beyond them, or moved out for others
            yield from ("--num-reserved-decode-tokens", "1", "--disaggregation-decode-extra-slots", "0", "--disaggregation-decode-retraction-backup", "none")


def _for_cuda(settings: EngineConfig, place: Place) -> Iterator[str]:
    before = settings.tp if place.half == "prefill" else 0
    yield from ("--base-gpu-id", str(settings.gpu + place.index * gpus_here(settings) + before))
    if settings.max_length:
        yield from ("--context-length", str(settings.max_length))


def gpus_of_engine(settings: EngineConfig) -> int:
    """GPUs of one engine: engine.tp in each stage (`--pp-size`) of each replica (`--dp-size`, unless replicas share out the attention alone), and those of the
    half that reads prompts.

    0 where the engine has none. Raises: `ConfigError` for a size that is no number.
    """
    if settings.kind != "sglang" or settings.device != "cuda":
        return 0
    return settings.tp * _size(settings.args, _STAGES) * _replicas(settings) + settings.prefill


def gpus_here(settings: EngineConfig) -> int:
    """Those of them on each of its machines."""
    return gpus_of_engine(settings) // settings.nodes


def gpus_of(settings: EngineConfig, index: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What the GPUs of engine `index` on this machine are called (`weightsync.gpus`), as it is started with this environment; empty: that cannot be told."""
    size = gpus_here(settings)
    first = settings.gpu + index * size
    names = tuple(name_of(gpu, environment) for gpu in range(first, first + size))
    return names if all(names) else ()


def check_context(settings: EngineConfig, *, longest: int, context: int) -> None:
    """Whether a server has room for the longest request: what goes beyond it is refused, or cut, again and again, so that the run would learn from short
    responses alone. `context`: of the model, 0 if unknown.

    Raises: `ConfigError` naming what is too small.
    """
    wanted = f"tokens, and the longest request that [rollout] and [eval] allow has {longest}"
    lower = "or lower rollout.max_prompt_tokens or max_new_tokens"
    if context and context < longest + 1:
        raise ConfigError(f"model.path: the model's max_position_embeddings is {context} {wanted}, and one more is kept free: use another model, {lower}")
    given = next(reversed(_given(settings.args, ("--context-length",))), None) or ""
    for key, length in (("engine.max_length", settings.max_length), ("engine.args --context-length", int(given) if given.isdigit() else 0)):
        if length and length < longest + _SPARE:
            raise ConfigError(f"{key} {length} {wanted}, and {_SPARE} more are kept free: raise it, leave it out, {lower}")


def _replicas(settings: EngineConfig) -> int:
    """With GPUs of their own."""
    return 1 if _given(settings.args, _REPLICAS_WITHIN) else _size(settings.args, _REPLICAS)


def _size(args: Sequence[str], flags: Sequence[str]) -> int:
    value = next(reversed(_given(args, flags)), "1")
    if value is None or not value.isdigit() or not int(value):
        raise ConfigError(f"engine.args has {flags[0]} {value or ''}".rstrip() + ": give a whole number above 0")
    return int(value)


def _given(args: Sequence[str], flags: Sequence[str]) -> list[str | None]:
    """What follows each of these flags, which argparse takes by their beginnings too."""
    return [value for name, value in _named(args) if any(flag == name or (len(name) > len("--x") and flag.startswith(name)) for flag in flags)]


def check_arguments(settings: EngineConfig) -> None:
    """Raises: `ConfigError` naming the argument and why it cannot be."""
    gpus_of_engine(settings)
    named = list(_named(settings.args))
    _check_named("engine.args", named)
    _check_named("engine.prefill_args", list(_named(settings.prefill_args)))
    for flags in (_REPLICAS, _STAGES) if settings.prefill else ():
        if _size((*settings.args, *settings.prefill_args), flags) > 1:
            raise ConfigError(f"engine.prefill with {flags[0]}: only servers that share out weights alone are known to work as two halves; use engine.tp")
    given = dict(named)
    if settings.tp * _size(settings.args, _STAGES) % settings.nodes:
        raise ConfigError(f"engine.tp {settings.tp} over engine.nodes {settings.nodes}: each node must have as many of its GPUs; make tp a multiple of nodes")
    if given.get(_FP8[0]) == _FP8[1] and given.get(_RELOADABLE[0]) != _RELOADABLE[1]:
        raise ConfigError(
            f"engine.args has {' '.join(_FP8)} without {' '.join(_RELOADABLE)}: layers that were quantised at the start take no second version, and the first "
            "update would end the server (0.5.23); add it, for Qwen2 and Qwen3, or leave out --quantization"
        )


def _check_named(key: str, named: Sequence[tuple[str, str | None]]) -> None:
    for name, _ in named:
        refused = next((flag for flag in _REFUSED if flag == name or (len(name) > len("--x") and flag.startswith(name))), None)
        if refused is not None:
            raise ConfigError(f"{key} has {name}: {_REFUSED[refused]}")
    for name, value in named:
        bound = next((flag for flag in _ALLOWED if flag == name or (len(name) > len("--x") and flag.startswith(name))), None)
        if bound is not None and value != _ALLOWED[bound][0]:
            raise ConfigError(f"{key} has {name} {value or ''}".rstrip() + f": {_ALLOWED[bound][1]}")


def _named(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each `--name` with what follows it, if that is no further name."""
    for at, word in enumerate(args):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = args[at + 1] if at + 1 < len(args) and not args[at + 1].startswith("--") else None
            yield name.replace("_", "-"), value if equals else following
