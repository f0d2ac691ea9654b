"""The torch backend on several ranks: each holds a shard of weights, gradients and optimizer (FSDP2), and trains on its share of every chunk.

    forward, backward of a layer: its weights gathered, used, dropped │ its gradient summed over ranks, each keeps its shard
    chunk: as many micro-batches on every rank, the last ones empty where a share is small
    step: sums and the gradient's norm over all ranks, then AdamW on the shards

Gradients are summed, not averaged, so a step divides by its own divisor as one rank does: weights differ from one rank's by the rounding of sums alone.
Of a checkpoint each rank captures its shard and reads what its shard is made of: nothing is gathered, and any number of ranks goes on from any other's.

Source: PyTorch FSDP (arXiv 2304.11277), in its per-parameter form `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from consumer.backend import TrainingState
from consumer.batch import ChunkBatch, MicroBatch, empty_micro_batch
from consumer.config import TrainerConfig
from consumer.gather import whole
from consumer.losses import LossConfig
from consumer.packing import PackedBatch
from consumer.parts import Place, Shape
from consumer.shards import part_of
from consumer.tensor_bytes import copy_in, copy_out
from consumer.torch_backend import MOMENTS, TorchBackend
from protocol.errors import ConfigError
from weightsync.snapshot import HeldWeights, TensorBytes

_LOG = logging.getLogger(__name__)


class ShardedBackend(TorchBackend):
    """See `consumer.backend.Backend`; made inside an initialised process group, on each of its ranks, which call every method in the same order.

    Whole weights are on rank 0 alone: `snapshot` and `digest` give nothing on others. `capture` gives each rank its part.
    """

    reads_its_part = True
    _in_parts = True

    def __init__(
        self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int, shared: bool = False, **further: Any
    ) -> None:
        """`further`: what the backend that is cut takes besides."""
        if shared:
            raise ConfigError(
                "placement.layout colocated with trainer.ranks above 1 or trainer.cpu_offload: shards keep their devices; use another layout, or one rank "
                "without cpu_offload"
            )
        device = torch.device(config.device)
        world = dist.group.WORLD
        if world is None:
            raise ConfigError(
                "trainer.backend torch on several ranks: this process is in no process group; start its ranks with torchrun, or set trainer.ranks"
            )
        self._mesh = DeviceMesh.from_group(world, device.type, mesh_dim_names=("data",))  # with the deadlines that it was given
        self._leads = dist.get_rank() == 0
        super().__init__(model_path, config, loss=loss, temperature=temperature, seed=seed, **further)

    # -- what several ranks do otherwise -------------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> Any:
        """Read whole into host memory, then cut and moved layer by layer."""
        device, self._device = self._device, torch.device("cpu")
        try:
            model = super()._load(path)
        finally:
            self._device = device
        return _sharded(model, self._mesh, self._config)

    def _micro_batches(self, batch: ChunkBatch) -> Iterator[MicroBatch | PackedBatch]:
        """As many as the rank with most has: every forward and backward gathers and reduces with all others."""
        parts = list(super()._micro_batches(batch))
        most = int(self._greatest(torch.tensor(len(parts))))
        if self._packed:
            yield from parts if len(parts) == most else self._packed_batches(batch, at_least=most)
            return
        yield from parts
        for _ in range(most - len(parts)):
            yield empty_micro_batch()

    def _total(self, sums: Tensor) -> Tensor:
        return _reduced(sums, dist.ReduceOp.SUM)

    def _greatest(self, values: Tensor) -> Tensor:
        return _reduced(values, dist.ReduceOp.MAX)

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        gradients = [_here(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = float(self._total(torch.nn.utils.get_total_norm(gradients).double().square()).sqrt())
        if norm > self._config.grad_clip:
            torch._foreach_mul_(gradients, self._config.grad_clip / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def _sharing_is_exact(self) -> bool:
        try:
            return super()._sharing_is_exact()
        finally:
            self._reshard()

    def against_reference(self, batch: ChunkBatch) -> NDArray[np.float64]:
        try:
            return super().against_reference(batch)
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """After a forward without a backward the root's parameters are whole: an optimizer or a reader of `named_parameters` would take those for its own."""
        for model in self._models():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # -- state -------------------------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> HeldWeights:
        if self._leads:
            return super().snapshot()
        _take_part(self._published())
        return _Elsewhere()

    def digest(self) -> str:
        if self._leads:
            return super().digest()
        _take_part(self._published())
        return ""

    def capture(self) -> TrainingState:
        weights, optimizer = self._own(self._kept), self._own(self._moments())
        return TrainingState(
            weights={name: copy_out(tensor) for name, (_, tensor) in weights.items()},
            optimizer={name: copy_out(tensor) for name, (_, tensor) in optimizer.items()},
            rng=self._random_state(),
            base=self._base,
            part=(dist.get_rank(), dist.get_world_size()),
            places={group: {name: place for name, (place, _) in own.items()} for group, own in (("weights", weights), ("optimizer", optimizer))},
        )

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Place, Tensor]]:
        """What is written here: this rank's shards, and on rank 0 what every rank has whole."""
        return {
            name: (Place(start=_start(tensor), whole=tuple(tensor.shape)), _here(tensor))
            for name, tensor in tensors.items()
            if isinstance(tensor, DTensor) or self._leads
        }

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        self.abandon_step()
        self._check(state)
        for name, tensor in self._kept.items():
            _fill(tensor, state.weights, name)
        self._optimizer.state.clear()
        self._taken = None
        for name, parameter in self._parameters.items():
            if f"step.{name}" in state.optimizer:
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS if moment != "step"}
                moments["step"] = torch.zeros((), dtype=torch.float32, device=_here(parameter).device)
                for moment, tensor in moments.items():
                    _fill(tensor, state.optimizer, f"{moment}.{name}")
                self._optimizer.state[parameter] = moments
        self._set_random_state(state)


class _Elsewhere(HeldWeights):
    """Of a rank that has no whole weights."""

    def digest(self) -> str:
        return ""

    def host(self, dtype: str = "") -> Mapping[str, TensorBytes]:  # noqa: ARG002
        return {}

    def release(self) -> None: ...


def _sharded(model: Any, mesh: Any, config: TrainerConfig) -> Any:
    """`model` cut over `mesh`: each of its layers by itself, and what is left (embedding, last norm, head) together.

    Raises: `ConfigError` for a model that does not say what its layers are.
    """
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if config.dtype == "bfloat16" else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy()
    layers = _layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=half, offload_policy=offload)
    # A head in float32 needs its weights so, and a tied embedding is the same weights.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy() if config.head_float32 else half, offload_policy=offload)
    for module in (*layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def _layers(model: Any) -> list[Any]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"trainer.ranks above 1: {type(model).__name__} does not say what its layers are (_no_split_modules); train it on one rank")
    return layers


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reduced(values: Tensor, how: Any) -> Tensor:
    found = values.detach().clone()
    dist.all_reduce(found, op=how)
    return found


def _take_part(tensors: Mapping[str, Tensor]) -> None:
    """In a gathering whose result is another's."""
    for _ in whole(tensors):
        pass


def _start(tensor: Tensor) -> Shape:
    """Where this rank's shard begins: FSDP gives the first ranks `ceil(rows / ranks)` rows each, and the last ones what is left, perhaps nothing."""
    zeros = (0,) * tensor.ndim
    if not isinstance(tensor, DTensor):
        return zeros
    assert tensor.placements == (Shard(0),)
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    return min(rows, -(-rows // ranks) * tensor.device_mesh.get_local_rank()), *zeros[1:]


def _fill(target: Tensor, source: Mapping[str, TensorBytes], name: str) -> None:
    """This rank's shard, or all of what every rank has whole."""
    here = _here(target)
    if here.numel():
        here.copy_(copy_in(part_of(source, name, _start(target), tuple(here.shape))))
