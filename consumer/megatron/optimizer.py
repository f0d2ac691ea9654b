"""megatron-core's AdamW over a stage: clip, step, and its float32 state by parameter, wherever data-parallel ranks hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from consumer.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""The float32 weights that are stepped; in float32 training the weights themselves."""


class Optimizer:
    """Weight decay spares norms and biases, as everywhere.

    Without a distributed optimizer each data-parallel rank has the whole state of its parameters; with one it has one piece of some of them.
    """

    def __init__(self, stage: Any, parameters: Mapping[str, Tensor], config: TrainerConfig, *, dtype: torch.dtype, distributed: bool) -> None:
        """`stage` is wrapped in megatron-core's DistributedDataParallel, `parameters` are its own."""
        self._parameters = parameters
        self._clip = config.grad_clip
        self.distributed = distributed
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=1e-8,
            weight_decay=config.weight_decay,
            clip_grad=config.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        chained = get_megatron_optimizer(settings, [stage], use_gloo_process_groups=False)
        (self._inner,) = chained.chained_optimizers
        for group in self._inner.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]  # megatron-core leaves that to its own schedule
        self.steps = 0

    def clip(self) -> float:
        """Takes the gradients, whole and scaled, from the stage and clips them; the norm of all ranks' before."""
        self._inner.prepare_grads()
        return float(self._inner.clip_grad_norm(self._clip))

    def step(self, rate: float) -> None:
        """With the gradients of `clip`."""
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step_with_ready_grads()
        self.steps += 1

    def forget_gradients(self) -> None:
        self._inner.zero_grad()

    # -- its state -----------------------------------------------------------------------------------------------------------------------------

    def lay(self, key: str, name: str, place: Tensor) -> None:
        """Copy what this rank has of a moment, or of `MASTER`, where it lies in the parameter."""
        held = self._held(name)
        if held is not None:
            stepped, piece = held
            source = stepped if key == MASTER else self._inner.optimizer.state[stepped][key]
            place.view(-1)[piece].copy_(source.view(-1))

    def put(self, key: str, name: str, value: Tensor) -> None:
        """The reverse, from the whole of the parameter's part on this rank."""
        held = self._held(name)
        if held is not None:
            stepped, piece = held
            source = value.reshape(-1)[piece].to(stepped.device, torch.float32)
            if key == MASTER:
                stepped.detach().view(-1).copy_(source)
            else:
                self._inner.optimizer.state[stepped][key] = source.view(stepped.shape).clone()

    def forget_state(self) -> None:
        """As before the first step."""
        self._inner.optimizer.state.clear()
        self._count(0)

    def counted(self, steps: int) -> None:
        """The moments that were put are those after so many steps."""
        self._count(steps)

    def _count(self, steps: int) -> None:
        self.steps = steps
        adam = self._inner.optimizer
        if isinstance(adam, torch.optim.AdamW):
            for state in adam.state.values():
                state["step"] = torch.tensor(float(steps))
        else:  # that of apex or Transformer Engine, which megatron-core prefers where they are installed
            for group in adam.param_groups:
                group["step"] = steps

    def _held(self, name: str) -> tuple[Tensor, slice] | None:
        """The float32 tensor that is stepped here, and which part it is of the flattened parameter."""
        parameter = self._parameters[name]
        if not self.distributed:
            stepped = getattr(parameter, "main_param", None)
            return (parameter if stepped is None else stepped), slice(0, parameter.numel())
        if parameter not in self._inner.model_param_gbuf_map:
            return None
        group, order = self._inner.model_param_group_index_map[parameter]
        span = self._inner._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - megatron-core has no public name for it
        return self._inner.optimizer.param_groups[group]["params"][order], slice(span.start, span.end)
