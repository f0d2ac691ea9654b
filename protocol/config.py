"""Configuration: one TOML file a run, then the environment, then `--set a.b=c`; resolved once, every key checked, printable.

A daemon declares a tree of the sections it needs, validates those fully and knows the others by name:

    class ProducerDaemonConfig(Tree):
        run: RunConfig
        redis: RedisConfig
        producer: ProducerConfig = ProducerConfig()

    config = load(ProducerDaemonConfig, "run.toml", sets=["producer.max_inflight_groups=8"])

The environment overrides a key as `ROLLSTREAM__SECTION__KEY`. Values of the environment and of `--set` are read as TOML, and as plain text where they
are not TOML. Relative paths are relative to the working directory of the process.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigError
from protocol.explain import explain, suggest, where

SECTIONS = (
    "run",
    "redis",
    "model",
    "data",
    "rollout",
    "reward",
    "teacher",
    "eval",
    "buffer",
    "weights",
    "engine",
    "producer",
    "trainer",
    "loss",
    "critic",
    "lora",
    "megatron",
    "trackers",
    "checkpoint",
    "stop",
    "http",
    "placement",
    "ray",
)
_ENVIRONMENT = "ROLLSTREAM__"


class Section(BaseModel):
    """One table of the file. Frozen; unknown keys, wrong types and numbers that are not finite are errors. Each field has a unit in its name, a default, and
    one line of help.
    """

    moved: ClassVar[Mapping[str, str]] = {}
    """Keys that were here once, and what they are called now, with their section."""
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class Tree(BaseModel):
    """The sections a daemon reads. Sections without required keys get a default here."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class RunConfig(Section):
    name: str = Field(description="Name of the run: with redis.url, the only address a process needs.")
    seed: int = Field(0, ge=0, description="Seeds the order of prompts, the sampling and the trainer.")
    dir: str = Field("", description="Folder for checkpoints, metrics and the audit. Default: runs/<name>.")
    stall_seconds: float = Field(60.0, gt=0, description="Seconds an edge may block the run before log, status and metrics call it a stall.")

    @property
    def folder(self) -> Path:
        return Path(self.dir or f"runs/{self.name}").absolute()


class RedisConfig(Section):
    url: str = Field("", description="redis://, rediss:// or unix://. Empty: `rollstream up` starts a server in run.dir.")
    deadline_s: float = Field(30.0, gt=0, description="Seconds a command is retried while Redis is away, before the process gives up.")
    replicas_acked: int = Field(0, ge=0, description="Replicas that must have an attachment or a checkpoint before training goes on; waits 5 s at most.")
    appendfsync: Literal["always", "everysec", "no"] = Field("everysec", description="fsync policy of a server that we start; `always` survives a power cut.")


class ModelConfig(Section):
    path: str = Field(description="Folder of a Hugging Face causal LM with its tokenizer: the starting weights.")


class DataConfig(Section):
    path: str = Field(description="JSONL file of prompts; a slice may follow: data.jsonl[:1000], [100:200], [::2].")
    prompt_key: str = Field("prompt", description="Key of the prompt: text, or a list of chat messages.")
    label_key: str = Field("label", description="Key of the reference answer that rewards compare with.")
    metadata_key: str = Field("metadata", description="Key of an object that rewards and rollout functions receive.")


class RolloutConfig(Section):
    group_size: int = Field(8, ge=1, description="G: rollouts of each prompt.")
    max_prompt_tokens: int = Field(1024, ge=1, description="A longer prompt is an error that names its line.")
    max_new_tokens: int = Field(1024, ge=1, description="Upper bound of sampled tokens of one rollout.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature. 0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; training wants 1.")
    top_k: int = Field(-1, ge=-1, description="Sample among the k likeliest tokens; -1: all. Training wants -1.")
    stop: tuple[str, ...] = Field((), strict=False, description="Strings that end a rollout.")


class PlacementConfig(Section):
    moved = MappingProxyType({"trainer_ranks": "trainer.ranks", "engine_nodes": "engine.nodes"})
    layout: Literal["disaggregated", "colocated", "external", "trainer_only", "rollout_only"] = Field(
        "disaggregated",
        description="disaggregated: trainer and engines run at once, on Ray on devices of their own, on one machine on those that trainer.device and "
        "engine.gpu name. colocated: they take turns on the same ones, with buffer.pipeline_depth 0. "
        "external: engines run elsewhere, at engine.urls. trainer_only, rollout_only: on Ray, the other half is not started.",
    )
    gpus_per_node: int = Field(8, ge=1, description="GPUs of one machine of the cluster; an engine's GPUs must lie on one, or on engine.nodes.")
    nodes: int = Field(0, ge=0, description="Machines that the run may take. 0: as many as it needs.")
    trainer_gpus: int = Field(0, ge=0, description="GPUs of each of the trainer.ranks. 0: one if trainer.device is a GPU, else none.")
    engine_gpus: int = Field(
        0, ge=0, description="GPUs of one engine, over all of its nodes. 0: what engine.tp and engine.args take with SGLang on GPUs, else none."
    )
    reward_engines: int = Field(0, ge=0, description="Engines of reward models that room is kept for.")
    reward_gpus: int = Field(1, ge=0, description="GPUs of one reward engine.")
    wait_seconds: float = Field(120.0, gt=0, description="On Ray: how long the cluster may take to give what was asked for.")


class RayConfig(Section):
    address: str = Field("", description="The Ray cluster to run on: auto, or host:port of its head. Empty: this machine, without Ray.")
    producer_cpus: float = Field(1.0, ge=0, description="CPUs of one producer.")
    engine_cpus: float = Field(1.0, ge=0, description="CPUs of an engine, for each of its GPUs; or of one that has none.")
    trainer_cpus: float = Field(1.0, ge=0, description="CPUs of a trainer's process, for each of its GPUs; or of one that has none.")


T = TypeVar("T", bound=Tree)


def load(tree: type[T], path: str | os.PathLike[str], *, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> T:
    """The daemon's configuration from file, environment and `--set`, in that order.

    Raises: `ConfigError` naming file, line or origin, key, what was seen and what to do.
    """
    source = Path(path)
    try:
        text = source.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{source}: cannot be read ({problem}); give -c the path of a TOML file") from problem
    try:
        merged: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{source}: not valid TOML: {problem}") from problem
    origins: dict[str, str] = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(_ENVIRONMENT):
            _override(merged, origins, name.removeprefix(_ENVIRONMENT).lower().replace("__", "."), value, f"environment variable {name}")
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected section.key=value")
        _override(merged, origins, key.strip(), value, f"--set {item}")
    return validate(tree, merged, source=str(source), text=text, origins=origins)


def validate(tree: type[T], values: Mapping[str, Any], *, source: str, text: str = "", origins: Mapping[str, str] | None = None) -> T:
    """`values` as `tree`; errors name `source` and, where `text` has it, the line."""
    origins = origins or {}
    for section in values:
        if section not in SECTIONS:
            raise ConfigError(f"{where(source, text, origins, section)}: unknown section [{section}]{suggest(section, SECTIONS)}")
    try:
        return tree.model_validate(dict(values))
    except ValidationError as problem:
        raise ConfigError("\n".join(explain(tree, error, source, text, origins) for error in problem.errors())) from problem


def _override(merged: dict[str, Any], origins: dict[str, str], dotted: str, value: str, origin: str) -> None:
    section, dot, key = dotted.partition(".")
    if not dot or not section or not key or "." in key:
        raise ConfigError(f"{origin}: expected section.key, got {dotted!r}")
    table = merged.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{origin}: {section} is not a section")
    table[key] = _parsed(value)
    origins[dotted] = origin


def _parsed(value: str) -> object:
    """The value as TOML, or as text where it is not exactly one TOML value."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return parsed["value"] if parsed.keys() == {"value"} else value
