"""The torch backend on several ranks: each holds a shard of weights, gradients and optimizer (FSDP2), and trains on its share of every chunk.

    forward, backward of a layer: its weights gathered, used, dropped │ its gradient summed over ranks, each keeps its shard
    chunk: as many micro-batches on every rank, the last ones empty where a share is small
    step: sums and the gradient's norm over all ranks, then AdamW on the shards

Gradients are summed, not averaged, so a step divides by its own divisor as one rank does: weights differ from one rank's by the rounding of sums alone.
A checkpoint holds whole tensors, the same files whatever the number of ranks: rank 0 gathers them to write and scatters them when read, a tensor at a time
beside what rank 0 has in memory. Sharded checkpoints, each rank writing its own part, are not there yet.

Source: PyTorch FSDP (arXiv 2304.11277), in its per-parameter form `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from consumer.backend import TrainingState
from consumer.batch import ChunkBatch, MicroBatch, empty_micro_batch
from consumer.config import TrainerConfig
from consumer.gather import whole
from consumer.losses import LossConfig
from consumer.packing import PackedBatch
from consumer.tensor_bytes import copy_in, copy_out
from consumer.torch_backend import MOMENTS, TorchBackend
from protocol.errors import ConfigError
from weightsync.snapshot import HeldWeights, TensorBytes

_LOG = logging.getLogger(__name__)


class ShardedBackend(TorchBackend):
    """See `consumer.backend.Backend`; made inside an initialised process group, on each of its ranks, which call every method in the same order.

    Whole weights are on rank 0 alone: `snapshot`, `digest` and `capture` give nothing on others, and `restore` takes nothing there.
    """

    scatters = True
    """For `consumer.ranks.handing_over`."""

    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int, shared: bool = False) -> None:
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
        super().__init__(model_path, config, loss=loss, temperature=temperature, seed=seed)

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
        _take_part(self._kept)
        return _Elsewhere()

    def digest(self) -> str:
        if self._leads:
            return super().digest()
        _take_part(self._kept)
        return ""

    def capture(self) -> TrainingState:
        moments = self._moments()
        if not self._leads:
            _take_part(self._kept)
            _take_part(moments)
            return TrainingState(weights={}, optimizer={}, rng={})
        return TrainingState(weights=_copied(self._kept), optimizer=_copied(moments), rng=self._random_state())

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        self.abandon_step()
        if self._leads:
            self._check(state)
        for name, tensor in self._kept.items():
            self._scatter(state.weights.get(name), tensor)
        there = torch.tensor([f"step.{name}" in state.optimizer for name in self._parameters], dtype=torch.uint8)
        dist.broadcast(there, 0)
        self._optimizer.state.clear()
        for (name, parameter), stepped in zip(self._parameters.items(), there.tolist(), strict=True):
            if stepped:
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS if moment != "step"}
                moments["step"] = torch.zeros((), dtype=torch.float32, device=_here(parameter).device)
                for moment, tensor in moments.items():
                    self._scatter(state.optimizer.get(f"{moment}.{name}"), tensor)
                self._optimizer.state[parameter] = moments
        if self._leads:  # the others' is not used for anything
            self._set_random_state(state)

    def _moments(self) -> dict[str, Tensor]:
        """By the names they have in a checkpoint."""
        state = self._optimizer.state
        return {f"{moment}.{name}": state[p][moment] for name, p in self._parameters.items() if p in state for moment in MOMENTS}

    def _scatter(self, source: TensorBytes | None, target: Tensor) -> None:
        """Rank 0's `source` into `target`, of which each rank has its shard."""
        device = torch.device(self._mesh.device_type, torch.cuda.current_device()) if self._mesh.device_type == "cuda" else torch.device("cpu")
        value = torch.empty(target.shape, dtype=target.dtype) if source is None else copy_in(source)
        value = value.to(device)
        if isinstance(target, DTensor):
            cut = distribute_tensor(value, self._mesh, target.placements)
            target.to_local().copy_(cut.to_local())
        else:
            dist.broadcast(value, 0)
            target.copy_(value)


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    return {name: copy_out(tensor) for part in whole(tensors) for name, tensor in part.items()}
