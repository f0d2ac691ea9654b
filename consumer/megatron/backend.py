"""The Megatron backend: a dense megatron-core GPT over tensor-parallel, pipeline-parallel and data-parallel ranks.

    chunk ─► packed rows ─► pipeline schedule: logits ─► Terms ─► loss ─► gradients add up │ … │ finish_step: over ranks, ÷ divisor, clip, AdamW

Every rank makes the same calls. `accumulate` gets the share of the rank's replica, the same on all its ranks; `finish_step` the divisor of all replicas
together. A `snapshot` is whole on rank 0 and empty elsewhere; of a checkpoint every rank captures its part, and reads what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, set_tensor_model_parallel_attributes
from numpy.typing import NDArray
from torch import Tensor

from consumer.backend import OtherModel, StepReport, TrainingState, check_contents
from consumer.batch import ChunkBatch
from consumer.config import TrainerConfig
from consumer.diagnostics import Measured, Totals, measure, nothing
from consumer.losses import LossConfig, make_loss
from consumer.losses.terms import Terms
from consumer.megatron.architecture import read_architecture
from consumer.megatron.config import MegatronConfig
from consumer.megatron.folder import Slab, Where, open_folder
from consumer.megatron.grid import make_grid
from consumer.megatron.handing_out import whole
from consumer.megatron.mapping import Cut
from consumer.megatron.model import make_model, packed
from consumer.megatron.optimizer import MASTER, MOMENTS, Optimizer
from consumer.megatron.options import check_options
from consumer.megatron.own_parts import own_parts
from consumer.megatron.parallel_logprobs import parallel_logprobs
from consumer.packing import PackedBatch, attention_cost, packed_batches
from consumer.parts import Place
from consumer.shards import part_of, shape_of
from consumer.teacher import check_teacher
from consumer.tensor_bytes import copy_in, copy_out
from protocol.errors import RollstreamError
from weightsync.snapshot import TensorBytes

_DEFAULT_LOSS = LossConfig()
_DEFAULT_LAYOUT = MegatronConfig()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A micro-batch, with the logprobs of the reference model where it was asked."""

    batch: PackedBatch
    reference: Tensor | None = None


class MegatronBackend:
    """See `consumer.backend.Backend`.

    Alone in its process group, or without one, it is a replica of its own.
    Raises: `ConfigError` for a model or an option that is not supported here, and where ranks or sizes do not fit the layout.
    """

    reads_its_part = True

    def __init__(
        self,
        model_path: Path,
        config: TrainerConfig,
        *,
        loss: LossConfig = _DEFAULT_LOSS,
        megatron: MegatronConfig = _DEFAULT_LAYOUT,
        temperature: float,
        seed: int,
        shared: bool = False,
    ) -> None:
        check_options(config, shared=shared)
        architecture = read_architecture(model_path)
        architecture.check_layout(megatron)
        device = torch.device(config.device)
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.set_num_threads(config.torch_threads)
        torch.set_flush_denormal(True)  # moments of weights without gradient decay into them, and arithmetic on denormals is slow
        self._config, self._loss_config, self._temperature = config, loss, temperature
        self._loss = make_loss(loss)
        self._grid = make_grid(megatron, device)
        self._cut = Cut(model=architecture, tp=megatron.tp, pp=megatron.pp)
        self._dtype = _DTYPES[config.dtype]
        self._row_multiple = megatron.tp if megatron.sp else 1
        self._quadratic = attention_cost(parameters=self._cut.layer_parameters, layers=architecture.layers, width=architecture.heads * architecture.head_dim)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

        model = self._made(megatron)
        self._stage = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=megatron.distributed_optimizer),
            model,
        )
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._optimizer = Optimizer(self._stage, self._parameters, config, dtype=self._dtype, distributed=megatron.distributed_optimizer)
        self._reference: Any = self._made(megatron).requires_grad_(False) if loss.needs_reference else None
        with open_folder(model_path) as folder:
            self._fill(folder.slab)
            if self._reference is not None:
                reference = dict(self._reference.named_parameters())
                for name, part in self._parts(folder.slab):
                    reference[name].copy_(part)
        self._measured = nothing(device)
        self._open()

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica of the model this rank belongs to, and of how many: the share of every chunk that it is to be given."""
        return self._grid.dp_rank, self._grid.dp

    # -- training ----------------------------------------------------------------------------------------------------------------------------

    def accumulate(self, batch: ChunkBatch) -> None:
        """No replica waits for another here; one may have more to do, or nothing."""
        check_teacher(batch, self._loss_config)
        if not batch.tokens:
            return
        batches = packed_batches(batch, max_tokens=self._config.micro_batch_tokens, quadratic=self._quadratic)
        parts = [_Part(one) for one in batches]
        if self._reference is not None:
            logprobs = self._run(self._reference, parts, self._reference_logprobs, forward_only=True) or [None] * len(parts)
            parts = [_Part(one, found) for one, found in zip(batches, logprobs, strict=True)]
        for measured in self._run(self._stage, parts, self._loss_of, forward_only=False):
            self._measured = self._measured.add(measured)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        totals = self._totals()
        rate = self._config.lr * min(1.0, (self._optimizer.steps + 1) / max(1, self._config.warmup_steps))
        if self._loss_config.lr_by_ess:
            rate *= totals.lr_scale
        if not divisor:
            self.abandon_step()
            return StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)
        finalize_model_grads([self._stage])
        self._stage.scale_gradients(1.0 / divisor)
        norm = self._optimizer.clip()
        if not np.isfinite(norm):
            raise RollstreamError(f"step {step}: the gradient's norm is {norm}; look at the rewards and logprobs of its groups, or lower trainer.lr")
        self._optimizer.step(rate)
        if self._grid.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the step is over here, not where the weights are first needed
        self.abandon_step()
        return totals.report(divisor, grad_norm=norm, lr=rate, reference=self._reference is not None)

    def abandon_step(self) -> None:
        self._open()

    def _open(self) -> None:
        self._stage.zero_grad_buffer()
        self._optimizer.forget_gradients()
        self._measured = nothing(self._grid.device)

    def _made(self, layout: MegatronConfig) -> Any:
        """The stage of this rank, its weights not filled yet."""
        model = make_model(self._cut.model, layout, self._grid, self._dtype)
        expected = self._cut.stage(self._grid.pp_rank)
        parameters = dict(model.named_parameters())
        if {name: tuple(one.shape) for name, one in parameters.items()} != {name: one.shape for name, one in expected.items()}:
            odd = sorted({(n, tuple(p.shape)) for n, p in parameters.items()} ^ {(n, p.shape) for n, p in expected.items()})
            raise RollstreamError(
                f"megatron-core {megatron.core.__version__} builds the model otherwise than expected: {odd[0]}; use the version of constraints.txt"
            )
        for name, one in expected.items():
            # megatron-core marks what it initialises itself; unmarked, the parts of all ranks but the first would be left out of the gradient's norm.
            if one.axis is not None and not hasattr(parameters[name], "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameters[name], True, one.axis, 1)
        return model

    def _run(self, model: Any, parts: Sequence[_Part], end: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """What `end` says of each part on the last stage; nothing on the others."""

        def forward(coming: Iterator[_Part], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
            part = next(coming)
            ids, lengths = self._row(part.batch)
            output = stage(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed(lengths, self._grid.device))
            return output, functools.partial(end, part)

        told: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[model],
            num_microbatches=len(parts),
            seq_length=self._config.micro_batch_tokens,  # of no meaning: stages tell each other the length of every part
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return told

    def _row(self, batch: PackedBatch) -> tuple[Tensor, list[int]]:
        """[1, T] tokens and the lengths of its sequences. Under sequence parallelism a sequence of padding makes it divisible."""
        lengths: list[int] = np.diff(batch.cu_seqlens).tolist()
        ids = batch.input_ids
        if missing := -ids.shape[1] % self._row_multiple:
            ids = np.pad(ids, ((0, 0), (0, missing)))
            lengths.append(missing)
        return self._tensor(ids), lengths

    def _loss_of(self, part: _Part, logits: Tensor) -> tuple[Tensor, Tensor, Measured]:
        """The sum that is to be differentiated, a number of tokens that nobody reads, and what is to be told."""
        batch = part.batch
        target, entropy = self._logprobs(batch, logits)
        terms = Terms(
            target=target,
            behaviour=self._tensor(batch.behaviour),
            proximal=target.detach(),  # one optimizer step a batch: the policy at its start is the one being optimised
            advantage=self._tensor(batch.advantage),
            rollout=self._tensor(batch.rollout),
            age=self._tensor(batch.age),
            reference=part.reference,
            teacher=None if batch.teacher is None else self._tensor(batch.teacher),
            entropy=entropy if self._loss_config.needs_entropy else None,
        )
        told = self._loss(terms)
        total = (told.loss * self._tensor(batch.weight)).sum()
        measured = measure(terms, told, loss=total.detach(), entropy=entropy.detach())
        return total, torch.zeros((), dtype=torch.int, device=logits.device), measured

    def _reference_logprobs(self, part: _Part, logits: Tensor, *, non_loss_data: bool) -> Tensor:
        assert non_loss_data
        return self._logprobs(part.batch, logits)[0].detach()

    def _logprobs(self, batch: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of the tokens of the loss after temperature, comparable with behaviour logprobs, and the entropy [N]."""
        needed = logits[0].index_select(0, self._tensor(batch.logit_index))
        return parallel_logprobs(needed.float() / self._temperature, self._tensor(batch.targets), self._grid.tp_group)

    def _totals(self) -> Totals:
        """Of all ranks, the same on each."""
        sums, greatest = self._measured
        if self._grid.last_stage:
            dist.all_reduce(sums, group=self._grid.dp_group)
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self._grid.dp_group)
        return Totals(Measured(self._grid.from_last_stage(sums), self._grid.from_last_stage(greatest)))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._grid.device, non_blocking=True)

    # -- state -------------------------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, TensorBytes]:
        """In `trainer.dtype`: what this backend computes with."""
        return {name: copy_out(tensor) for part in whole(self._grid, self._cut, self._dtype, self._lay_weight) for name, tensor in part.items()}

    def capture(self) -> TrainingState:
        """Weights and optimizer are float32 whatever the arithmetic, by the names that the torch backend has: either goes on from the other's."""
        groups: dict[str, dict[str, TensorBytes]] = {"weights": {}, "optimizer": {}}
        places: dict[str, dict[str, Place]] = {"weights": {}, "optimizer": {}}
        keys = [("weights", MASTER, "")]
        if self._optimizer.steps:
            keys += [("optimizer", moment, f"{moment}.") for moment in MOMENTS]
        for group, key, prefix in keys:
            lay = functools.partial(self._optimizer.lay, key)
            for name, place, tensor in own_parts(self._grid, self._cut, lay, sharded=self._optimizer.distributed):
                groups[group][prefix + name], places[group][prefix + name] = copy_out(tensor), place
        if self._optimizer.steps and self._grid.leads:
            count = torch.tensor(float(self._optimizer.steps))
            groups["optimizer"] |= {f"step.{name}": copy_out(count) for name in self._names()}
        return TrainingState(
            weights=groups["weights"],
            optimizer=groups["optimizer"],
            rng={"torch": bytes(torch.get_rng_state().numpy())},
            part=(dist.get_rank(), dist.get_world_size()),
            places=places,
        )

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        """No random number is drawn in training, so `state.rng` is kept for other backends only."""
        self.abandon_step()
        check_contents(state)
        expected = self._names()
        if odd := sorted(set(state.weights) ^ expected):
            raise OtherModel(f"the checkpoint belongs to another model: parameter {odd[0]} is in only one of them; correct model.path")
        try:
            self._fill(functools.partial(_slab_of, state.weights, ""))
        except ValueError as problem:
            raise OtherModel(f"the checkpoint belongs to another model: {problem}; correct model.path") from problem
        self._optimizer.forget_state()
        counts = {float(copy_in(state.optimizer[f"step.{name}"])) for name in expected if f"step.{name}" in state.optimizer}
        if not counts:
            return
        if len(counts) > 1 or any(f"step.{name}" not in state.optimizer for name in expected):
            raise OtherModel("the checkpoint's optimizer has not stepped all parameters equally often; go on with trainer.backend torch")
        for moment in MOMENTS:
            for name, part in self._parts(functools.partial(_slab_of, state.optimizer, f"{moment}.")):
                self._optimizer.put(moment, name, part)
        self._optimizer.counted(round(counts.pop()))

    def _names(self) -> set[str]:
        """Of all stages."""
        return {name for stage in range(self._cut.pp) for one in self._cut.stage(stage).values() for name in one.names}

    def _fill(self, read: Slab) -> None:
        """The weights, and the float32 ones that are stepped."""
        for name, part in self._parts(read):
            with torch.no_grad():
                self._parameters[name].copy_(part)
            self._optimizer.put(MASTER, name, part)

    def _parts(self, read: Slab) -> Iterator[tuple[str, Tensor]]:
        for name, one in self._cut.stage(self._grid.pp_rank).items():
            where = functools.partial(self._cut.slab, one, rank=self._grid.tp_rank)
            yield name, self._cut.joined(one, [read(source, where) for source in one.names])

    def _lay_weight(self, name: str, place: Tensor) -> None:
        place.copy_(self._parameters[name])


def _slab_of(tensors: Mapping[str, TensorBytes], prefix: str, name: str, where: Where) -> Tensor:
    """Of a saved state."""
    return copy_in(part_of(tensors, prefix + name, *where(shape_of(tensors, prefix + name))))
