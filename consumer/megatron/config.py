"""The [megatron] section: how a model is cut over ranks. Imports neither torch nor megatron-core."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from protocol.config import Section


class MegatronConfig(Section):
    """Ranks = tp x pp x dp: what tp and pp leave of the ranks is data-parallel."""

    tp: int = Field(1, ge=1, description="Tensor parallelism: ranks that share every layer. They belong in one machine.")
    pp: int = Field(1, ge=1, description="Pipeline parallelism: stages that the layers are cut into. For models too large for the tensor-parallel ranks.")
    sp: bool = Field(
        False, description="Sequence parallelism: between layers, tensor-parallel ranks hold a part of the sequence each. Saves memory; needs tp > 1."
    )
    distributed_optimizer: bool = Field(True, description="Data-parallel ranks hold a part of the optimizer's state each.")
    recompute: Literal["none", "full"] = Field(
        "none", description="full: activations are computed again in the backward pass, layer by layer. Slower, less memory."
    )

    @model_validator(mode="after")
    def _sequences_have_ranks(self) -> MegatronConfig:
        if self.sp and self.tp == 1:
            raise ValueError("sp with tp 1: sequence parallelism shares a sequence among tensor-parallel ranks; set tp above 1, or sp = false")
        return self

    def data_parallel(self, ranks: int) -> int:
        """How many replicas of the model `ranks` ranks hold. Raises: `ValueError` when they do not fill the layout."""
        if ranks % (self.tp * self.pp):
            raise ValueError(f"{ranks} ranks with megatron.tp {self.tp} and megatron.pp {self.pp}: use a multiple of {self.tp * self.pp} ranks")
        return ranks // (self.tp * self.pp)
