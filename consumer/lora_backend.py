"""The torch backend with an adapter: the weights stay as they are, two small matrices beside each chosen layer are trained.

    y = W x + scaling * B (A x)          W frozen, in lora.base_dtype │ A, B float32, with gradients and moments

What is published is either W + scaling * B A by Hugging Face names, or A and B by peft's. A checkpoint holds A, B and their moments, and says which weights
they belong to. The reference model of a KL term is the same model without the adapter: it takes no memory.

Source: LoRA (arXiv 2106.09685) 4.1; the layers are peft's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumer.backend import Base, OtherModel, TrainingState
from consumer.config import TrainerConfig
from consumer.gather import Derived, gathered
from consumer.losses import LossConfig
from consumer.merging import added, files_digest
from consumer.shards import shape_of
from consumer.torch_backend import TorchBackend, check_names
from protocol.errors import ConfigError
from weightsync.lora import PEFT_PREFIX, LoraConfig

_ADAPTER = "default"


class LoraBackend(TorchBackend):
    """See `consumer.backend.Backend`. Nothing but the adapter has a gradient.

    Raises: `ConfigError`, besides what `TorchBackend` does: where peft is not installed; for `lora.target_modules` that the model does not have.
    """

    def __init__(
        self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int, lora: LoraConfig, shared: bool = False
    ) -> None:
        self._lora = lora
        self._weights_dtype = getattr(torch, lora.base_dtype)
        self._base: Base = Base(
            path=str(model_path), digest=files_digest(model_path), scaling=lora.scaling, dtype=lora.base_dtype, settings=lora.settings(str(model_path))
        )
        super().__init__(model_path, config, loss=loss, temperature=temperature, seed=seed, shared=shared)

    # -- what an adapter changes ---------------------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> Any:
        try:
            import peft
        except ImportError as problem:
            raise ConfigError(f"lora.rank {self._lora.rank}: peft is not installed; pip install 'rollstream[torch]'") from problem
        model, lora = super()._load(path), self._lora
        there = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        if missing := sorted(set(lora.target_modules) - there):
            raise ConfigError(f"lora.target_modules has {', '.join(missing)}: linear layers of model.path {path} are {', '.join(sorted(there))}")
        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type, unused-ignore]  # a float is taken as it is
            use_rslora=lora.use_rslora,
            target_modules=list(lora.target_modules),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        adapted: Any = peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted.eval()

    def _load_reference(self, path: Path) -> Any:  # noqa: ARG002 - as the backend without an adapter has it
        return _Without(self._model)

    def _models(self) -> Iterator[Any]:
        yield self._model

    def _tensors(self) -> dict[str, Tensor]:
        """By peft's names."""
        return {_plain(name): parameter for name, parameter in self._parameters.items()}

    def _published(self) -> Mapping[str, Tensor]:
        return self._kept if self._lora.adapters else Merged(self._model)

    def _check_files(self, path: Path) -> None:
        check_names(path, {name for name, _ in Merged(self._model).parts()})

    # -- state ---------------------------------------------------------------------------------------------------------------------------------

    def _check(self, state: TrainingState) -> None:
        ours, theirs = self._base, state.base
        if theirs is None:
            raise OtherModel("the checkpoint holds all weights, and lora.rank asks for an adapter: set lora.rank = 0, or begin a run with --new")
        if theirs.digest != ours.digest:
            raise OtherModel(
                f"the checkpoint's adapter is of the weights {theirs.digest} that were in {theirs.path}, and model.path has {ours.digest}: correct it"
            )
        rank = next((shape_of(state.weights, name)[0] for name in state.weights if ".lora_A." in name), self._lora.rank)
        if rank != self._lora.rank:
            raise OtherModel(f"the checkpoint's adapter has rank {rank}, lora.rank says {self._lora.rank}: correct lora.rank")
        if theirs.scaling != ours.scaling:
            raise OtherModel(f"the checkpoint's adapter is scaled by {theirs.scaling:g}, lora.alpha and lora.rank say {ours.scaling:g}: correct lora.alpha")
        if theirs.dtype != ours.dtype:
            raise OtherModel(f"the checkpoint's adapter was trained over weights in {theirs.dtype}, lora.base_dtype says {ours.dtype}: correct lora.base_dtype")
        super()._check(state)


class Merged(Derived):
    """The weights by Hugging Face name, made ones with the adapter added: what a model without an adapter computes the same with.

    Sharded ones are gathered before they are added to, so that the sum is the same, bit by bit, on any number of ranks.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pairs = {_own(name): (module, module.scaling[_ADAPTER]) for name, module in model.named_modules() if hasattr(module, "lora_A")}
        self._weights = dict(self.parts())

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """What is not the adapter's."""
        kept = self._model.state_dict()
        for name, tensor in (*self._model.named_parameters(), *((name, buffer) for name, buffer in self._model.named_buffers() if name in kept)):
            if ".lora_" not in name:
                yield _own(name), tensor

    def made(self, name: str) -> Tensor:
        weight, pair = gathered(self._weights[name]), self._pairs.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return weight
        module, scaling = pair
        return added(weight, gathered(module.lora_A[_ADAPTER].weight), gathered(module.lora_B[_ADAPTER].weight), scaling)

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Without:
    """The model without its adapter, called as the model is."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **options: Any) -> Any:
        layers = [module for module in self._model.modules() if hasattr(module, "lora_A")]
        try:
            for layer in layers:
                layer.enable_adapters(False)
            return self._model(**options)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def _plain(name: str) -> str:
    """As peft's files name it."""
    return PEFT_PREFIX + name.replace(f".{_ADAPTER}.", ".")


def _own(name: str) -> str:
    """As the model names it."""
    return name.replace(".base_layer.", ".")
