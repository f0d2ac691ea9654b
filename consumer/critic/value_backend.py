"""The torch backend with a value for each token instead of logprobs: the same cutting, optimizer, shards, devices and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.backend import OtherModel, TrainingState
from consumer.batch import ChunkBatch, MicroBatch
from consumer.config import TrainerConfig
from consumer.critic.model import load_value_model
from consumer.losses import LossConfig
from consumer.model_shaping import recompute_activations
from consumer.packed_rows import use_packed_rows
from consumer.packing import PackedBatch
from consumer.torch_backend import TorchBackend


class ValueBackend(TorchBackend):
    """Gradients are its caller's business: `cut` a chunk, take `values`, go backward; then `finish_step`, which divides, clips and steps as the policy's does.

    Every value is 0 at first: the advantage is then the discounted reward, and no token starts from noise.
    """

    _section, _folder_key = "critic", "critic.model_path"

    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int, shared: bool = False) -> None:
        """`config` is [trainer] with what [critic] says instead. `loss` and `temperature` are not read."""
        super().__init__(model_path, config, loss=loss, temperature=temperature, seed=seed, shared=shared)
        with torch.no_grad():  # only now: which rows it may take was tried with a head that sees something
            for parameter in self._model.head.parameters():
                parameter.zero_()

    def cut(self, batch: ChunkBatch) -> Iterable[MicroBatch | PackedBatch]:
        """The chunk in micro-batches; of several ranks, as many on each."""
        return self._micro_batches(batch)

    def values(self, part: MicroBatch | PackedBatch) -> Tensor:
        """[N] float32, with gradient: what the critic says before each token of the loss, of the tokens so far."""
        return self._logits(self._model, part)[:, 0]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """On its device."""
        return self._tensor(array)

    @property
    def device(self) -> torch.device:
        return self._device

    # -- what the policy's backend does otherwise ------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> Any:
        model = load_value_model(path, self._device)
        self._packed = use_packed_rows(model, self._config, self._target)
        if self._config.activation_checkpointing:
            recompute_activations(model)
        return model

    def _seen(self, part: MicroBatch) -> Tensor:
        return self.values(part)

    def _check_files(self, folder: Path) -> None:
        """No engine loads it."""

    def _check(self, state: TrainingState) -> None:
        if not state.weights:
            raise OtherModel(
                "the checkpoint has no critic: its run trained without one; go on with the trainer.advantage it had, or begin a run with model.path at the "
                "checkpoint's folder model"
            )
        super()._check(state)
