"""The torch backend: a transformers causal LM and AdamW in this process.

    chunk ─► micro-batches ─► logits ─► Terms ─► loss ─► gradients add up │ … │ finish_step: ÷ divisor, clip, AdamW
                                          └────► diagnostics add up

Micro-batches are packed rows on a GPU, rows padded or shared by siblings elsewhere (`trainer.packing`).

The model runs without dropout: the ratio compares it with an engine that has none. Weights and optimizer are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from consumer.backend import Base, OtherModel, StepReport, TrainingState, check_contents
from consumer.batch import SHARED_ROW_LIMIT, ChunkBatch, MicroBatch, Siblings, micro_batches
from consumer.config import TrainerConfig
from consumer.diagnostics import Measured, Totals, measure, nothing
from consumer.gather import whole
from consumer.losses import LossConfig, make_loss
from consumer.losses.terms import Terms, log_ratio
from consumer.model_shaping import float32_head, free_bytes, placed, recompute_activations
from consumer.packed_rows import packed_inputs, quadratic_cost, use_packed_rows
from consumer.packing import PackedBatch, packed_batches
from consumer.row_digest import row_digest
from consumer.shards import shape_of
from consumer.snapshot_buffers import SnapshotBuffers, on_device
from consumer.teacher import check_teacher
from consumer.tensor_bytes import copy_in, copy_out, view_bytes
from consumer.token_advantages import numbered, token_count
from consumer.token_logprobs import token_logprobs
from protocol.errors import ConfigError, RollstreamError
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import HeldWeights, weights_digest

_LOG = logging.getLogger(__name__)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_PROBE_TOLERANCE = 1e-4
_DEFAULT_LOSS = LossConfig()
_TRAINING = 3
"""What gradients and AdamW's two moments take, in sizes of the weights."""


class TorchBackend:
    """See `consumer.backend.Backend`. A backend of several ranks overrides `_micro_batches`, `_total`, `_greatest`, `_gradient_norm`, `_load` and `_tensors`.

    Raises: `ConfigError` when the folder holds no causal LM that transformers can load, or one whose parameters go by other names than its files; when the
    loss needs a reference model and there is no room for it.
    """

    _section, _folder_key = "trainer", "model.path"
    """For messages."""
    passes = 1
    """Optimizer steps of a step of the run."""
    _weights_dtype = torch.float32
    _base: Base | None = None
    """Of the weights that stay as they are, where an adapter is trained."""
    _in_parts = False
    """The device never has all weights, so copies of them are made in host memory."""

    def __init__(
        self, model_path: Path, config: TrainerConfig, *, loss: LossConfig = _DEFAULT_LOSS, temperature: float, seed: int, shared: bool = False
    ) -> None:
        """`shared`: its device is not its own, see `consumer.backend.SharesDevice`."""
        torch.set_num_threads(config.torch_threads)
        torch.set_flush_denormal(True)  # moments of weights without gradient decay into them, and arithmetic on denormals is slow
        torch.manual_seed(seed)
        self._config = config
        self._loss_config, self._loss = loss, make_loss(loss)
        self._temperature = temperature
        self._target = torch.device(config.device)
        self._device = torch.device("cpu") if shared else self._target
        """Where everything lies now."""
        self._shared = shared
        self._packed = False
        self._model = self._load(model_path)
        self._quadratic = quadratic_cost(self._model) if self._packed else 0.0
        self._parameters: dict[str, Tensor] = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._kept = self._tensors()
        self._check_files(model_path)
        self._buffers: SnapshotBuffers | None = None
        """Made for the first version: who trains without publishing needs none."""
        parts: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters.values() if p.ndim >= 2]},
            {"params": [p for p in self._parameters.values() if p.ndim < 2], "weight_decay": 0.0},  # norms and biases do not decay
        ]
        self._optimizer = torch.optim.AdamW(
            parts,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._reference: Any = self._load_reference(model_path) if loss.loads_reference else None
        self._taken: int | None = 0
        """None: as the optimizer says, which is asked once: on a GPU training would wait for its answer."""
        self._measured: Measured | None = None
        """Of the step so far."""
        self._share_prompts = not self._packed and self._sharing_is_exact()

    # -- training ----------------------------------------------------------------------------------------------------------------------------

    def accumulate(self, batch: ChunkBatch) -> None:
        check_teacher(batch, self._loss_config)
        for part in self._micro_batches(batch):
            measured = self._backward(part)
            self._measured = measured if self._measured is None else self._measured.add(measured)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        totals = self._totals()
        rate = self._config.lr * min(1.0, (self.taken // self.passes + 1) / max(1, self._config.warmup_steps))
        if self._loss_config.lr_by_ess:
            rate *= totals.lr_scale
        if not divisor:
            self.abandon_step()
            return StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)
        if gradients := [p.grad for p in self._parameters.values() if p.grad is not None]:
            torch._foreach_div_(gradients, float(divisor))
        norm = self._gradient_norm()
        if not np.isfinite(norm):
            raise RollstreamError(f"step {step}: the gradient's norm is {norm}; look at the rewards and logprobs of its groups, or lower {self._section}.lr")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._taken = self.taken + 1
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the step is over here, not where the weights are first needed
        self.abandon_step()
        return totals.report(divisor, grad_norm=norm, lr=rate, reference=self._loss_config.needs_reference)

    @property
    def taken(self) -> int:
        """Optimizer steps so far, checkpoints included: a run's steps need not begin with this optimizer, and may leave the weights as they are."""
        if self._taken is None:
            state = next(iter(self._optimizer.state.values()), None)
            self._taken = int(state["step"]) if state else 0
        return self._taken

    def abandon_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._measured = None

    def _backward(self, part: MicroBatch | PackedBatch) -> Measured:
        target, entropy = self._predicted(self._model, part)
        terms = self._terms(part, target, entropy)
        told = self._loss(terms)
        total = (told.loss * self._tensor(part.weight)).sum()
        total.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return measure(terms, told, loss=total.detach(), entropy=entropy.detach())

    def _terms(self, part: MicroBatch | PackedBatch, target: Tensor, entropy: Tensor) -> Terms:
        """What the loss sees of these, [N] each. One optimizer step a batch: the policy at the start of the step is the one being optimised."""
        reference = None
        if self._loss_config.needs_reference:
            with torch.no_grad():
                reference, _ = self._predicted(self._reference, part)
        return Terms(
            target=target,
            behaviour=self._tensor(part.behaviour),
            proximal=target.detach(),
            advantage=self._tensor(part.advantage),
            rollout=self._tensor(part.rollout),
            age=self._tensor(part.age),
            reference=reference,
            teacher=None if part.teacher is None else self._tensor(part.teacher),
            entropy=entropy if self._loss_config.needs_entropy else None,
        )

    def _predicted(self, model: Any, part: MicroBatch | PackedBatch) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of the tokens of the loss after temperature, comparable with behaviour logprobs, and the entropy [N]."""
        return token_logprobs(self._logits(model, part), self._tensor(part.targets), self._temperature)

    def _logits(self, model: Any, part: MicroBatch | PackedBatch) -> Tensor:
        """[N, V] where the tokens of the loss are predicted."""
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            if isinstance(part, PackedBatch):
                row: Tensor = model(**packed_inputs(part, self._device)).logits
                return row[0]
            first, last = part.columns
            logits: Tensor = model(
                input_ids=self._tensor(part.input_ids),
                position_ids=None if part.position_ids is None else self._tensor(part.position_ids),
                attention_mask=None if part.attention is None else self._tensor(part.attention),
                logits_to_keep=torch.arange(first, last, device=self._device),
                use_cache=False,
            ).logits
        return logits.reshape(-1, logits.shape[-1]).index_select(0, self._tensor(part.logit_index))

    def _totals(self) -> Totals:
        measured = nothing(self._device) if self._measured is None else self._measured
        return Totals(Measured(self._total(measured.sums), self._greatest(measured.greatest)))

    @torch.no_grad()
    def against_reference(self, batch: ChunkBatch) -> NDArray[np.float64]:
        """[N] `log(pi / ref)` of the chunk's tokens in the loss, held within ±20, for a loss that loads a reference model; pi is the policy as it is."""
        found = np.zeros(token_count(batch))
        for part in self._micro_batches(numbered(batch)):
            (policy, _), (reference, _) = (self._predicted(model, part) for model in (self._model, self._reference))
            found[part.age] = log_ratio(policy.double(), reference.double()).cpu().numpy()
        return found

    def total(self, sums: Tensor) -> Tensor:
        """The sums of all ranks, added."""
        return self._total(sums)

    # -- what several ranks do otherwise -------------------------------------------------------------------------------------------------------

    def _micro_batches(self, batch: ChunkBatch) -> Iterable[MicroBatch | PackedBatch]:
        """The chunk, cut. One without tokens in the loss does nothing but take part."""
        if self._packed:
            return self._packed_batches(batch)
        return micro_batches(batch, max_tokens=self._config.micro_batch_tokens, share_prompts=self._share_prompts)

    def _packed_batches(self, batch: ChunkBatch, *, at_least: int = 0) -> list[PackedBatch]:
        return packed_batches(batch, max_tokens=self._config.micro_batch_tokens, quadratic=self._quadratic, at_least=at_least)

    def _total(self, sums: Tensor) -> Tensor:
        """The sums of all ranks, added."""
        return sums

    def _greatest(self, values: Tensor) -> Tensor:
        """The greatest of all ranks, each by itself."""
        return values

    def _gradient_norm(self) -> float:
        """Clips the gradient; its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip))

    def _load(self, path: Path) -> Any:
        """The model in `path`, on the device, shaped as [trainer] says; its parameters want gradients."""
        model = _load(path, self._device)
        self._packed = use_packed_rows(model, self._config, self._target)
        model.to(self._weights_dtype)  # only now: float32 tells another computation from another rounding
        if self._config.head_float32:
            float32_head(model)
        if self._config.activation_checkpointing:
            recompute_activations(model)
        return model

    def _published(self) -> Mapping[str, Tensor]:
        """What a version is made of."""
        return self._kept

    def _tensors(self) -> dict[str, Tensor]:
        """By Hugging Face name, tied weights once: what is published and kept."""
        return self._parameters | {name: b for name, b in self._model.named_buffers() if name in self._model.state_dict()}

    # -- parts -------------------------------------------------------------------------------------------------------------------------------

    def _load_reference(self, path: Path) -> Any:
        """The starting weights once more, whatever the policy is restored to. Raises: `ConfigError` where there will be no room for it all."""
        place = torch.device("cpu") if self._config.cpu_offload else self._device
        size, free = sum(map(_here, self._kept.values())), free_bytes(place)
        key = "kl_coef" if self._loss_config.needs_reference else "kl_reward_coef"
        if size + _TRAINING * size > free:
            raise ConfigError(
                f"loss.{key} {getattr(self._loss_config, key):g}: the reference model takes {_gib(size)} of memory on {place}, gradients and optimizer "
                f"{_gib(_TRAINING * size)} more, and {_gib(free)} are free; set loss.{key} = 0, take more memory there, or more devices"
            )
        return self._load(path).requires_grad_(False)

    def _models(self) -> Iterator[Any]:
        yield self._model
        if self._reference is not None:
            yield self._reference

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)  # pageable memory is read before this returns; the device need not be idle

    # -- turns on a device of several ---------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        self._move(torch.device("cpu"), whatever=True)  # also what an `onload` that failed half-way left there
        if self._target.type == "cuda":
            with torch.cuda.device(self._target):
                torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self._target)

    @torch.no_grad()
    def _move(self, device: torch.device, *, whatever: bool = False) -> None:
        if device == self._device and not whatever:
            return
        for model in self._models():
            model.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)
        self._device, self._kept = device, self._tensors()

    # -- state -------------------------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> HeldWeights:
        if self._buffers is None:
            self._buffers = SnapshotBuffers(self._published(), torch.device("cpu") if self._shared else self._device, on_host=self._in_parts)
        return self._buffers.take(self._published())

    def digest(self) -> str:
        if self._device.type == "cuda":
            return row_digest(on_device(whole(self._published()), self._device))
        return weights_digest({name: view_bytes(tensor) for part in whole(self._published()) for name, tensor in part.items()})

    def capture(self) -> TrainingState:
        moments = {name: copy_out(tensor) for name, tensor in self._moments().items()}
        weights = {name: copy_out(tensor) for name, tensor in self._kept.items()}
        return TrainingState(weights=weights, optimizer=moments, rng=self._random_state(), base=self._base)

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        self.abandon_step()
        self._check(state)
        for name, tensor in self._kept.items():
            tensor.copy_(copy_in(state.weights[name]))
        self._optimizer.state.clear()
        self._taken = None
        for name, parameter in self._parameters.items():
            if f"step.{name}" in state.optimizer:
                moments = {moment: copy_in(state.optimizer[f"{moment}.{name}"]).to(self._device) for moment in MOMENTS}
                self._optimizer.state[parameter] = moments
        self._set_random_state(state)

    def _moments(self) -> dict[str, Tensor]:
        """By the names they have in a checkpoint."""
        state = self._optimizer.state
        return {f"{moment}.{name}": state[p][moment] for name, p in self._parameters.items() if p in state for moment in MOMENTS}

    def _check(self, state: TrainingState) -> None:
        """Raises: `OtherModel` if it belongs to another model."""
        check_contents(state, adapted=self._base is not None)
        if set(state.weights) != set(self._kept):
            odd = sorted(set(state.weights) ^ set(self._kept))
            raise OtherModel(f"the checkpoint belongs to another model: parameter {odd[0]} is in only one of them; correct {self._folder_key}")
        for name, tensor in self._kept.items():
            if tuple(tensor.shape) != (found := shape_of(state.weights, name)):
                raise OtherModel(f"the checkpoint belongs to another model: {name} has shape {found}, expected {tuple(tensor.shape)}")

    def _random_state(self) -> dict[str, bytes]:
        rng = {"torch": bytes(torch.get_rng_state().numpy())}
        if self._target.type == "cuda":
            rng["cuda"] = bytes(torch.cuda.get_rng_state(self._target).numpy())
        return rng

    def _set_random_state(self, state: TrainingState) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state.rng["torch"]), dtype=torch.uint8))
        if self._target.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.rng["cuda"]), dtype=torch.uint8), self._target)

    def _check_files(self, folder: Path) -> None:
        """Engines load what is published by the names of the model's files, so both must agree. Raises: `ConfigError`."""
        check_names(folder, set(self._kept))

    # -- prompt sharing ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sharing_is_exact(self) -> bool:
        """Whether this architecture gives the same logprobs for siblings in one row: tried on a small group, so that an unknown one is never trusted."""
        settings = self._model.config.get_text_config()
        window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
        if settings._attn_implementation != "sdpa" or (window is not None and window <= SHARED_ROW_LIMIT):  # noqa: SLF001 - transformers has no public name for it
            return False
        rng = np.random.default_rng(0)
        prompt, *answers = (rng.integers(0, settings.vocab_size, n, dtype=np.int32) for n in (5, 4, 1, 6))
        alone, together = (self._seen(next(micro_batches(_probe(prompt, answers), max_tokens=64, share_prompts=share))) for share in (False, True))
        # Alone, rows are sorted by length; bring the shared one into that order: the sibling of 1 token, of 4, of 6.
        together = torch.cat([together[4:5], together[:4], together[5:]])
        exact = bool((alone - together).abs().max() < _PROBE_TOLERANCE)
        if not exact:
            _LOG.info("siblings do not share a row: this architecture attends in its own way")
        return exact

    def _seen(self, part: MicroBatch) -> Tensor:
        """What must be the same in a row of siblings as in rows of their own, by token."""
        return self._logits(self._model, part).float().log_softmax(-1)


def _probe(prompt: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]) -> ChunkBatch:
    """One group of these answers, all of them in the loss."""
    starts = np.array([0, *np.cumsum([len(prompt) + len(answer) for answer in answers])], dtype=np.int64)
    runs = np.stack((starts[:-1] + len(prompt), starts[1:]))
    count = int((runs[1] - runs[0]).sum())
    group = Siblings(
        tokens=np.concatenate([np.concatenate([prompt, answer]) for answer in answers]),
        logprobs=np.zeros(int(starts[-1]), dtype=np.float32),
        starts=starts,
        runs=runs,
        advantages=np.zeros(len(answers), dtype=np.float32),
        prefix=len(prompt),
    )
    return ChunkBatch(groups=(group,), seqs=(), rewards=(), tokens=count, masked=0, staleness={}, group_staleness={}, response_tokens=count)


def _here(tensor: Tensor) -> int:
    """Bytes of it that lie here: a sharded one has its part."""
    part = tensor if type(tensor) in {Tensor, torch.nn.Parameter} else cast("Any", tensor).to_local()
    return int(part.nbytes)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _load(path: Path, device: torch.device) -> Any:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except Exception as problem:  # transformers raises whatever the model's code raises
        raise ConfigError(f"model.path {path}: transformers cannot load it as a causal LM ({type(problem).__name__}: {str(problem)[:300]})") from problem
    return placed(model, device)


def check_names(folder: Path, names: set[str]) -> None:
    found: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with open_tensors(file) as tensors:
            found |= set(tensors)
    if odd := sorted(names - found):
        raise ConfigError(f"model.path {folder}: its files have no tensor {odd[0]}, which transformers trains; save the model with this transformers version")
