"""What survives every kill, and the server: checkpoints, the witness file, the spill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulator.weights import Weights
from buffer.contract import CheckpointRef, ChunkRecord, History, PastStep
from buffer.witness import WitnessLine
from protocol.errors import LedgerRegressed
from protocol.messages import Seq
from protocol.versions import Lineage, Version


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's files."""

    weights: Weights
    incarnation: int
    incarnation_id: str
    lineage: Lineage
    journal: Mapping[int, tuple[ChunkRecord, ...]]
    """Chunks of every step since the oldest kept checkpoint, as it was then."""

    @property
    def reference(self) -> CheckpointRef:
        step = self.weights.step
        return CheckpointRef(step=step, incarnation=self.incarnation, digest=self.weights.digest, path=f"{step}-{self.incarnation}")


@dataclass(slots=True)
class Disk:
    checkpoints: dict[tuple[int, int], Saved] = field(default_factory=dict)
    """By step and incarnation."""
    swept: dict[tuple[int, int], str] = field(default_factory=dict)
    """Checkpoint → id of the incarnation that deleted it."""
    witness: list[WitnessLine] = field(default_factory=list)
    published: dict[Version, Weights] = field(default_factory=dict)
    """Files of versions."""
    spill: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)
    """Step → incarnation → payload name → digest."""

    def spilled(self, step: int, name: str) -> str | None:
        """By whichever incarnation."""
        return next((names[name] for names in self.spill.get(step, {}).values() if name in names), None)

    def newest_incarnation(self) -> int:
        return max(
            [
                0,
                *(version.incarnation for version in self.published),
                *(incarnation for _, incarnation in self.checkpoints),
                *(line.incarnation for line in self.witness),
            ]
        )


def history_of(weights: Weights, journal: Mapping[int, tuple[ChunkRecord, ...]], lineage: Lineage, incarnation_id: str, disk: Disk) -> History:
    """The truth that a ledger is rebuilt from, for these weights, in the name of the head of `lineage`."""
    by_digest = {line.digest: line for line in disk.witness if line.step <= weights.step and weights.line[line.step] == line.digest}
    steps = []
    for step in range(1, weights.step + 1):
        line = by_digest.get(weights.line[step])
        if line is None:
            raise LedgerRegressed(f"the witness file has no line of step {step}: nothing can be told of it")
        steps.append(
            PastStep(
                step=step,
                incarnation=line.incarnation,
                digest=line.digest,
                seqs=tuple(Seq(seq) for seq in line.seqs),
                chunks=tuple(journal.get(step, ())),
            )
        )
    kept = [saved.reference for (step, _), saved in disk.checkpoints.items() if step <= weights.step and weights.line[step] == saved.weights.digest]
    by_step = {one.step: one for one in sorted(kept, key=lambda one: one.incarnation)}
    return History(
        incarnations={
            incarnation: (fork.parent, fork.step, incarnation_id if incarnation == lineage.head else "") for incarnation, fork in lineage.forks.items()
        },
        checkpoints=tuple(by_step[step] for step in sorted(by_step)),
        steps=tuple(steps),
    )
