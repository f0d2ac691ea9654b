"""What the trainer asks of a backend, whatever holds the model. Every call comes from one thread.

A backend of your own is a class with these methods, named by its dotted path: `trainer.backend = "package.module:Class"`. It is made as a `BackendFactory`
says, and gets the whole [trainer] and [loss] sections; what it needs beyond that comes from its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from consumer.batch import ChunkBatch
from consumer.config import TrainerConfig
from consumer.losses.config import LossConfig
from consumer.parts import Place
from protocol.dotted import load_dotted
from protocol.errors import ConfigError
from weightsync.snapshot import HeldWeights, TensorBytes, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step; means over the tokens that entered the loss, but for the loss itself. All 0 for a step without any."""

    loss: float
    """Weighted sum over the tokens by the step's divisor."""
    grad_norm: float
    """Before clipping."""
    lr: float
    entropy: float
    """nats"""
    clip_fraction: float
    """Share of tokens whose gradient clipping, truncation or masking changed."""
    ratio_dev: float
    """Mean of |r - 1|, r the ratio to the behaviour policy."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name, see `consumer.metric_names`; a backend of your own may have names of its own. For metrics.jsonl, not for the audit event."""


class OtherModel(ConfigError):
    """A checkpoint is whole, and belongs to another configuration than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The weights that an adapter belongs to, which a checkpoint does not hold."""

    path: str
    digest: str
    """Of the files there."""
    scaling: float
    """What the adapter is multiplied by."""
    dtype: str = "float32"
    """What the weights were rounded to before they were trained under, torch's name."""
    settings: bytes = b""
    """`adapter_config.json` of a folder that holds the adapter; empty where it was read from one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """Everything that the next step depends on, copied: training goes on while it is written."""

    weights: Mapping[str, TensorBytes]
    optimizer: Mapping[str, TensorBytes]
    """`exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`."""
    rng: Mapping[str, bytes]
    base: Base | None = None
    """Where `weights` are an adapter's."""
    others: Mapping[str, Mapping[str, TensorBytes]] = field(default_factory=dict)
    """Further groups of tensors by name, which is that of a file: what is trained beside the policy."""
    part: tuple[int, int] = (0, 1)
    """(r, n): what rank r of n ranks has, which together have everything once; (0, 1): everything."""
    places: Mapping[str, Mapping[str, Place]] = field(default_factory=dict)
    """By group and name, where a tensor that is a part belongs; a tensor without a place is whole."""

    @property
    def groups(self) -> dict[str, Mapping[str, TensorBytes]]:
        """All tensors by the name of their group."""
        return {"weights": self.weights, "optimizer": self.optimizer, **self.others}


def check_contents(state: TrainingState, *, adapted: bool = False) -> None:
    """Whether there is nothing in it but a policy, of all weights or `adapted`: what else it holds would be lost. Raises: `OtherModel`."""
    if state.others:
        raise OtherModel(
            f"the checkpoint has a {min(state.others)} beside the policy: go on with the trainer.advantage it had, or begin a run with model.path at its "
            "folder model"
        )
    if state.base is not None and not adapted:
        raise OtherModel(f"the checkpoint holds an adapter of the weights in {state.base.path}: set lora.rank as it was, or begin a run with --new")


class Backend(Protocol):
    """OPEN: `accumulate(chunk)` any number of times → `finish_step` → OPEN.

    Invariant: chunks of one step, in order, give the gradient of the whole step; where the step is cut changes it by rounding only, and the same chunks
    give the same weights bit by bit (CPU, same number of threads).
    """

    def accumulate(self, batch: ChunkBatch) -> None:
        """Add the gradient of the chunk's token losses, summed with their weights."""

    def finish_step(self, step: int, divisor: float) -> StepReport:
        """Divide by `divisor`, the sum of the divisors of all chunks of the step, clip, and step the optimizer. 0: the weights stay."""

    def abandon_step(self) -> None:
        """Forget what was accumulated."""

    def snapshot(self) -> Mapping[str, TensorBytes]:
        """A consistent copy of the weights by Hugging Face name, tied weights once. `HeldWeights` where it is not in plain memory yet, or in memory that is
        used again: training waits for nothing but this.
        """

    def capture(self) -> TrainingState:
        """A copy of everything; of several ranks each may give its part. Only between steps: training waits for nothing of a checkpoint but this."""

    def restore(self, state: TrainingState) -> None:
        """Continue from `state`. Raises: `OtherModel` if it is not one of this configuration's (`check_contents`, of what it does not read)."""


@runtime_checkable
class SharesDevice(Protocol):
    """What a backend may have besides: it takes turns with engines on its device (`placement.layout` colocated). It is made off the device."""

    def offload(self) -> None:
        """Nothing of it lies on the device any more. Only between steps; everything but computing goes on working. Harmless when it is off already."""

    def onload(self) -> None:
        """Weights and optimizer are on the device. Harmless when they are."""


@runtime_checkable
class ReadsItsPart(Protocol):
    """What a backend of several ranks may have besides: `restore` takes, on every rank, a whole state that is on disk, and reads of it what that rank needs
    (`consumer.shards.part_of`). Any other gets what rank 0 read, by broadcast.
    """

    reads_its_part: bool


@runtime_checkable
class KnowsDigest(Protocol):
    """What a backend may have besides: for steps whose weights are not published, nothing is copied."""

    def digest(self) -> str:
        """`digest_of(snapshot())` of the weights as they are."""


def digest_now(backend: Backend) -> str:
    """What the weights are known by, as they are."""
    if isinstance(backend, KnowsDigest):
        return backend.digest()
    copied = backend.snapshot()
    try:
        return digest_of(copied)
    finally:
        if isinstance(copied, HeldWeights):
            copied.release()


class BackendFactory(Protocol):
    """Makes a backend with the starting weights of `model_path`, a Hugging Face model folder. The same seed makes the same backend."""

    def __call__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int) -> Backend: ...


def find_backend(name: str) -> BackendFactory:
    """What `trainer.backend` names. Imports it, which may take seconds. Raises: `ConfigError`."""
    if name == "torch":
        from consumer.torch_backend import TorchBackend

        return TorchBackend
    if name == "megatron":
        try:
            from consumer.megatron.backend import MegatronBackend
        except ModuleNotFoundError as problem:
            if not (problem.name or "").startswith("megatron"):
                raise
            raise ConfigError("trainer.backend megatron: megatron-core is not installed; pip install 'rollstream[torch,megatron]'") from problem
        return MegatronBackend
    found = load_dotted("trainer.backend", name, define=f"class {name.partition(':')[2]}")
    missing = [call for call in ("accumulate", "finish_step", "abandon_step", "snapshot", "capture", "restore") if not callable(getattr(found, call, None))]
    if missing:
        raise ConfigError(f"trainer.backend {name}: has no {', '.join(missing)}; give it every method of consumer.backend.Backend")
    return cast("BackendFactory", found)
