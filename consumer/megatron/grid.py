"""Where a rank stands among tensor-parallel, pipeline-parallel and data-parallel ranks, and the groups it talks to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from consumer.megatron.config import MegatronConfig
from protocol.errors import ConfigError

_DEADLINE_MINUTES = 10
"""Of every collective: a rank that is gone is noticed even where nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rank = (pp rank x dp + dp rank) x tp + tp rank: rank 0 is the first of everything."""

    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    device: torch.device

    @property
    def leads(self) -> bool:
        """Rank 0, which hands out what all hold together."""
        return self.tp_rank == self.pp_rank == self.dp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """What the last stage has, on every stage; in place."""
        dist.broadcast(tensor, dist.get_global_rank(self.pp_group, self.pp - 1), group=self.pp_group)
        return tensor


def make_grid(layout: MegatronConfig, device: torch.device) -> Grid:
    """Join the ranks of the default process group into the layout. Every rank calls it.

    A process in no group is one rank. Raises: `ConfigError` where megatron-core cannot compute, and where the ranks do not fill the layout.
    """
    _check_device(device)
    try:
        layout.data_parallel(dist.get_world_size() if dist.is_initialized() else 1)
    except ValueError as problem:
        raise ConfigError(f"trainer.backend megatron: {problem}") from problem
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.HashStore(),  # type: ignore[attr-defined, unused-ignore]
            rank=0,
            world_size=1,
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            distributed_timeout_minutes=_DEADLINE_MINUTES,
            create_gloo_process_groups=False,  # for checkpoints of megatron-core's own, which are not written
        )
    tp_group, pp_group, dp_group = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    found = (dist.get_world_size(tp_group), dist.get_world_size(pp_group))
    if found != (layout.tp, layout.pp):
        raise ConfigError(f"megatron.tp {layout.tp}, megatron.pp {layout.pp}: this process is in a layout of {found[0]} and {found[1]} already")
    return Grid(
        tp=layout.tp,
        pp=layout.pp,
        dp=dist.get_world_size(dp_group),
        tp_rank=dist.get_rank(tp_group),
        pp_rank=dist.get_rank(pp_group),
        dp_rank=dist.get_rank(dp_group),
        tp_group=tp_group,
        pp_group=pp_group,
        dp_group=dp_group,
        device=device,
    )


def _check_device(device: torch.device) -> None:
    """megatron-core puts buffers on the current CUDA device, whatever it is told."""
    try:
        here = torch.cuda.current_device()
    except (AssertionError, RuntimeError) as problem:
        raise ConfigError(f"trainer.backend megatron needs a GPU ({problem}); use trainer.backend torch here") from problem
    if torch.device(here).type != device.type:
        raise ConfigError(f"trainer.device {device}: trainer.backend megatron computes on a GPU; set trainer.device = cuda, or trainer.backend = torch")
