"""The Megatron backend where there is no GPU, for a trainer's own process: `trainer.backend`, with its layout in the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from consumer.config import TrainerConfig
from consumer.losses import LossConfig
from consumer.megatron.backend import MegatronBackend
from consumer.megatron.config import MegatronConfig
from tests.consumer.megatron.shim import cpu_for_cuda

LAYOUT = "TEST_MEGATRON_LAYOUT"


class ShimmedMegatron(MegatronBackend):
    """Made, and called ever after, in one thread, which has the stand-in for CUDA from then on."""

    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int) -> None:
        self._shim = cpu_for_cuda()
        self._shim.__enter__()
        layout = MegatronConfig(**json.loads(os.environ[LAYOUT]))
        super().__init__(model_path, config, loss=loss, megatron=layout, temperature=temperature, seed=seed)
