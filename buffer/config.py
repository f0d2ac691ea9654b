"""The [buffer] section."""

from __future__ import annotations

import math
from enum import StrEnum

from pydantic import Field, model_validator

from protocol.config import Section


class StalenessGuard(StrEnum):
    """What happens to tokens older than K when a step takes a group."""

    MASK = "mask"
    """They leave the loss and stay as context; a group with too little left is released."""
    DROP = "drop"
    """A group whose oldest trainable token is over K is released."""
    CORRECT = "correct"
    """Nothing: the loss corrects for it."""


class Selection(StrEnum):
    """Which READY groups a step takes first."""

    OLDEST = "oldest"
    """The one handed out first: by `seq`."""
    FRESHEST = "freshest"
    """The one whose oldest token is newest; what is passed over grows stale and is retried."""
    FIFO = "fifo"
    """The one that was put first."""


class BufferConfig(Section):
    groups_per_step: int = Field(64, ge=1, description="B: groups per optimizer step.")
    pipeline_depth: float = Field(1.5, ge=0, description="D: mean first-token staleness in steps, with weights live at once. 0: on-policy.")
    max_staleness: int = Field(8, ge=0, description="K: hard bound of staleness in steps for every token in a loss.")
    chunk_groups: int = Field(
        0, ge=0, description="Groups leased at a time, which the trainer's ranks share out. 0: an eighth of a step, or one a rank where those are more."
    )
    staleness_guard: StalenessGuard = Field(StalenessGuard.MASK, strict=False, description="mask, drop or correct: what happens to tokens over K.")
    min_kept_share: float = Field(0.5, ge=0, le=1, description="With mask: a group with a smaller share of its trainable tokens left is released for retry.")
    byte_budget: int = Field(4 << 30, ge=1, description="Bytes of payloads in Redis; reserve waits at the limit, nothing is evicted.")
    selection: Selection = Field(Selection.OLDEST, strict=False, description="oldest, freshest or fifo: which ready groups a step takes first.")
    retention: int = Field(0, ge=0, description="Steps whose payloads are kept for replay beyond what the oldest kept checkpoint needs.")
    retention_bytes: int = Field(0, ge=0, description="Of those, only as many as fit into so many bytes. 0: no such limit.")
    retention_seconds: float = Field(0.0, ge=0, description="Of those, only what was trained in the last so many seconds. 0: no such limit.")
    spill: str = Field("", description="Folder or fsspec URL that takes the payloads of steps that leave Redis, for replay. Empty: they are deleted.")
    blobs: str = Field("", description="Folder or fsspec URL for large extras (routed experts, multimodal); the payload says where. Empty: all in Redis.")
    blob_bytes: int = Field(65536, ge=1, description="With blobs: an extra of at least so many bytes goes there.")
    slot_seconds: float = Field(60.0, gt=0, description="A slot without a heartbeat for so long returns to the buffer.")
    max_attempts: int = Field(4, ge=1, description="Failed and stale attempts of one group before it is set aside as dead.")

    @model_validator(mode="after")
    def _chunk_fits(self) -> BufferConfig:
        if self.chunk_groups > self.groups_per_step:
            raise ValueError(f"chunk_groups {self.chunk_groups} exceeds groups_per_step {self.groups_per_step}: lower it, or use 0 for an eighth of a step")
        return self

    @property
    def chunk(self) -> int:
        """Groups in every chunk of a step but, perhaps, the last."""
        return self.chunk_groups or max(1, self.groups_per_step // 8)

    @property
    def admission_limit(self) -> int:
        """Groups that may be outstanding: `ceil((D + 1) * B)`."""
        return math.ceil((self.pipeline_depth + 1) * self.groups_per_step)

    def least_byte_budget(self, *, group_bytes: int, checkpoints_kept: int, checkpoint_steps: int) -> int:
        """The smallest budget that cannot stall the run: what may be outstanding, and what the kept checkpoints hold back (rule P3). With a spill they hold
        nothing back, and one step is room to train.

        Units: `group_bytes` is `payload_bound` by the token limits; a checkpoint is taken every `checkpoint_steps` at the latest.
        """
        steps = 1 if self.spill else checkpoints_kept * checkpoint_steps + self.retention
        retained = steps * self.groups_per_step
        return (self.admission_limit + retained) * group_bytes
