"""What is true, whatever the ledger says: who wrote which token, what the weights have learnt, which versions name which weights.

The judge sees what no process of a real run sees at once, and compares. It never asks the ledger what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulator.kernel import Broken, Kernel
from benchmarks.simulator.scenario import Scenario
from benchmarks.simulator.weights import START, Weights
from buffer.config import StalenessGuard
from buffer.contract import ChunkRecord
from buffer.ledger_state import payload_name
from buffer.witness import WitnessLine
from protocol.messages import GroupHeader
from protocol.versions import Version


@dataclass(frozen=True, slots=True)
class Written:
    """What a producer put under one slot token."""

    digest: str
    by: tuple[tuple[Version, Weights, int], ...]
    """What it says wrote them, what did, trainable tokens."""


@dataclass(frozen=True, slots=True)
class Line:
    """An optimizer step as it happened."""

    weights: Weights
    incarnation: int


class Judge:
    def __init__(self, kernel: Kernel, scenario: Scenario) -> None:
        self.kernel, self.scenario = kernel, scenario
        self.on_policy = scenario.settings.pipeline_depth == 0
        self.bound = 0 if self.on_policy else scenario.settings.max_staleness
        self.written: dict[str, Written] = {}
        self.versions: dict[Version, Weights] = {}
        self.attached: object = None
        """The life of the trainer that attached last."""
        self.steps = 0
        self.oldest_used = 0

    # versions -------------------------------------------------------------------------------------------------------------------------------

    def named(self, version: Version, weights: Weights) -> None:
        """A trainer calls its weights so. Raises: `Broken` if another has called other weights so."""
        known = self.versions.setdefault(version, weights)
        if known.digest != weights.digest:
            raise Broken(f"V1: version {version} names two weights, {known.digest} and {weights.digest}")

    def sampled(self, engine: str, spans: Sequence[tuple[Version | None, Weights, int]]) -> None:
        """A producer took an answer. Raises: `Broken` if the weights that wrote it are not those that it names."""
        for version, weights, tokens in spans:
            if version is None:
                raise Broken(f"W3: {tokens} tokens of {engine} under no version of the run were taken")
            named = self.versions.get(version)
            if named is None or named.digest != weights.digest:
                raise Broken(f"W3: {tokens} tokens of {engine} say {version} and were written by {weights.digest} of step {weights.step}")

    def put(self, header: GroupHeader, spans: Sequence[tuple[Version, Weights, int]]) -> None:
        self.written[payload_name(header.seq, header.attempt, header.token)] = Written(header.payload_digest, tuple(spans))

    # steps ----------------------------------------------------------------------------------------------------------------------------------

    def stepped(self, trainer: object, incarnation: int, chunks: Sequence[ChunkRecord], read: Sequence[tuple[int, str]], before: Weights) -> None:
        """An optimizer step is done. Raises: `Broken` for I2 and I3, if the trainer is the one that counts."""
        if trainer is not self.attached:
            return
        self.steps += 1
        seqs = [seq for seq, _ in read]
        if len(seqs) != len(set(seqs)) or before.learnt.intersection(seqs):
            raise Broken(f"I2: step {before.step + 1} learns {seqs}, of which {sorted(before.learnt.intersection(seqs)) or seqs} had an effect already")
        digests = dict(read)
        for chunk in chunks:
            for header in chunk.headers:
                self._used(incarnation, chunk, header, digests.get(header.seq, ""), before)

    def _used(self, incarnation: int, chunk: ChunkRecord, header: GroupHeader, read: str, before: Weights) -> None:
        written = self.written[payload_name(header.seq, header.attempt, header.token)]
        if read != written.digest:
            raise Broken(f"P2: group {header.seq} is trained with a payload that its producer did not write")
        record = chunk.record
        line = self.versions.get(Version(record.incarnation, before.step))
        repeated = record.incarnation == incarnation or (line is not None and line.digest == before.digest)
        for version, weights, tokens in written.by:
            if record.guard != StalenessGuard.CORRECT and record.lineage.shared(version) < record.cutoff:
                continue  # masked
            if record.guard == StalenessGuard.CORRECT and not self.on_policy:
                continue
            if not (repeated or self.on_policy):
                continue  # judged when it was journalled, on a line that was not repeated exactly
            age = before.step - weights.shared(before)
            self.oldest_used = max(self.oldest_used, age)
            if age > self.bound:
                raise Broken(
                    f"I3: {tokens} tokens of group {header.seq}, written by {version} ({weights.digest}), enter the loss of step {before.step + 1} "
                    f"with staleness {age}, the bound is {self.bound}"
                )

    # the end --------------------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def surviving(weights: Weights, witness: Sequence[WitnessLine], head: int, forks: Mapping[int, tuple[int, int]]) -> None:
        """The witness file tells how these weights came about. Raises: `Broken` where it does not."""
        at, limit, line = head, weights.step, []
        while at:
            parent, fork = forks[at]
            mine = {one.step: one for one in witness if one.incarnation == at and fork < one.step <= limit}
            line += [mine[step] for step in sorted(mine, reverse=True)]
            at, limit = parent, min(limit, fork)
        line.reverse()
        digests = (START.digest, *(one.digest for one in line))
        if digests != weights.line:
            raise Broken(f"R3: the witness file tells of {len(line)} steps {digests[-3:]}, the weights have {weights.step} {weights.line[-3:]}")
        seqs = [seq for one in line for seq in one.seqs]
        if len(seqs) != len(set(seqs)) or set(seqs) != weights.learnt:
            raise Broken("R3: the groups in the witness file are not those that the weights learnt")
