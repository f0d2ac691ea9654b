"""Pacing as one object: what is let in, what a step takes first, and what it refuses. Pure; `buffer/lua` computes the same.

    reserve ── limit, needed ──► put ── score ──► lease: ascending score, each if `accepts` ──► the step

Worked example, B = 4, D = 1, K = 2: `limit` is 8; with step 5 trained, the group admitted behind 7 others is for step 5 + 1 + 7 // 4 = 7, which takes
tokens of version 7 - 1 - 2 = 4 and newer, so `needed` is 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buffer.config import BufferConfig, Selection, StalenessGuard
from buffer.contract import StepRecord
from buffer.staleness import accepts
from protocol.messages import GroupHeader, JsonValue
from protocol.versions import Lineage

_PER_VERSION = 1 << 32
"""Scores of one version: room for that many groups, and for 2 ** 21 versions in the doubles that Redis sorts by."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Admission, selection and the guard of one run."""

    settings: BufferConfig

    @property
    def on_policy(self) -> bool:
        return self.settings.pipeline_depth == 0

    @property
    def limit(self) -> int:
        """Groups that may be outstanding."""
        return self.settings.admission_limit

    @property
    def bound(self) -> int:
        """Steps a token may be old: K, and 0 when on-policy."""
        return 0 if self.on_policy else self.settings.max_staleness

    @staticmethod
    def recorded_bound(settings: Mapping[str, JsonValue]) -> int | None:
        """`bound` of a run whose settings are known from its audit, perhaps as another release wrote them. None: they do not say."""
        depth, most = settings.get("pipeline_depth"), settings.get("max_staleness")
        if not isinstance(most, int):
            return None
        return 0 if depth == 0 else most

    @property
    def guard(self) -> StalenessGuard:
        """On-policy there is nothing that a loss could correct: what a rewind made old in the middle of a group is masked."""
        chosen = self.settings.staleness_guard
        return StalenessGuard.MASK if self.on_policy and chosen is StalenessGuard.CORRECT else chosen

    def needed(self, *, trained: int, outstanding: int) -> int:
        """Rule S3: the step that will use a group admitted behind `outstanding` others takes no token of an older version than this."""
        if self.on_policy:
            return trained
        return max(0, trained + outstanding // self.settings.groups_per_step - self.settings.max_staleness)

    def cutoff(self, step: int) -> int:
        """Tokens of versions below this are too old for `step`."""
        return step - 1 - self.bound

    def score(self, header: GroupHeader, lineage: Lineage, *, arrival: int) -> int:
        """What READY groups are ordered by, fixed when the group is put. `arrival` counts puts."""
        if self.settings.selection is Selection.FIFO:
            return arrival
        if self.settings.selection is Selection.FRESHEST:
            return header.seq - _PER_VERSION * min((lineage.shared(version) for version in header.trainable), default=0)
        return header.seq

    def lies_late(self, score: int, record: StepRecord) -> bool:
        """Freshest first, a group with a token over K lies where picks may never come: it is judged before its turn, so that its slot comes back."""
        return self.settings.selection is Selection.FRESHEST and score >= _PER_VERSION * (1 - record.cutoff)

    def accepts(self, header: GroupHeader, record: StepRecord) -> bool:
        """Whether a step takes the group. On-policy, a token must be of the line itself: an abandoned branch has the right number and other weights."""
        if self.on_policy and not all(record.lineage.contains(version) for version in header.trainable):
            return False
        return accepts(header, record, min_kept_share=self.settings.min_kept_share)
