"""A tiny run as its audit and witness would record it: 2 groups a step, one engine, seconds apart."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.contract import LedgerStatus, RunState
from buffer.witness import WitnessLine
from protocol.messages import Event, JsonValue
from protocol.versions import Fork, Lineage

BEGAN_MS = 1_700_000_000_000


class Recorder:
    """Events in order; `at` is in seconds after the beginning."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.witness: list[WitnessLine] = []

    def event(self, at: float, op: str, **fields: JsonValue) -> None:
        self.events.append(Event(id=f"{BEGAN_MS + round(at * 1000)}-{len(self.events)}", op=op, fields=fields))

    def begin(self) -> None:
        self.event(0, "created", identity={}, settings={"groups_per_step": 2, "pipeline_depth": 1.0, "max_staleness": 3})
        self.event(0, "attached", incarnation=1, incarnation_id="a", parent=0, fork_step=0, trainer_id="t")
        self.published(0, "1:0")
        self.event(0, "engine_started", engine_id="engine-0", boot_nonce="boot:a")
        self.applied(0, "1:0")

    def published(self, at: float, version: str) -> None:
        self.event(at, "published", version=version, digest=version, bytes=10, seconds=0.01)

    def applied(self, at: float, version: str, *, boot: str = "boot:a", pause_s: float = 0.01) -> None:
        self.event(at, "applied", engine_id="engine-0", boot_nonce=boot, version=version, pause_s=pause_s)

    def generated(self, at: float, seqs: Sequence[int], *, version: str = "1:0", lag: int = 0) -> None:
        self.event(at, "reserved", owner="p", slots=[[seq, 1] for seq in seqs])
        for seq in seqs:
            self.event(at, "put", seq=seq, attempt=1, producer_id="p", bytes=100, tokens={version: 10}, trained=0, lag={str(lag): 10}, rewards=[0.0])

    def trained(
        self, at: float, step: int, seqs: Sequence[int], *, reward: float, staleness: dict[str, int], incarnation: int = 1, replay: bool = False
    ) -> None:
        tokens = sum(staleness.values())
        stats: dict[str, JsonValue] = {"reward": reward, "tokens": tokens, "masked": 1, "staleness": dict(staleness), "seconds": 1.0, "train_s": 0.25}
        self.event(at, "leased", step=step, chunk=0, revision=0, seqs=list(seqs), incarnation=incarnation, replay=replay)
        self.event(at, "trained", step=step, incarnation=incarnation, digest=f"{incarnation}:{step}", groups=len(seqs), stats=stats)
        line = WitnessLine(
            incarnation=incarnation,
            parent=incarnation - 1,
            fork_step=0 if incarnation == 1 else step - 1,
            step=step,
            seqs=tuple(seqs),
            tokens=tokens,
            masked=1,
            max_staleness=max(map(int, staleness)),
            digest=f"{incarnation}:{step}",
            at=BEGAN_MS / 1000 + at,
        )
        self.witness.append(line)

    def evaluated(self, at: float, phase: str, exact: float) -> None:
        self.event(at, "eval", phase=phase, versions=["1:0"], samples=4, reward=exact / 2, exact=exact)


def small_run() -> Recorder:
    """Two steps, the second with staleness; nothing goes wrong."""
    run = Recorder()
    run.begin()
    run.evaluated(1, "first", 0.25)
    run.generated(1, [0, 1])
    run.generated(2, [2, 3], lag=1)
    run.trained(3, 1, [0, 1], reward=0.2, staleness={"0": 20})
    run.published(3, "1:1")
    run.applied(4, "1:1", pause_s=0.03)
    run.trained(5, 2, [2, 3], reward=0.6, staleness={"1": 15, "2": 5})
    run.published(5, "1:2")
    run.applied(6, "1:2", pause_s=0.02)
    run.event(7, "checkpoint", step=2, incarnation=1, path="checkpoint/step-000002-1", kept=[[2, 1]], freed=0)
    run.event(8, "drained", reason="steps")
    run.evaluated(9, "final", 0.75)
    run.event(10, "engine_left", engine_id="engine-0", boot_nonce="boot:a", busy_s=3.0, uptime_s=12.0, generated_tokens=50, paused_s=0.06)
    return run


def ledger_status(*, outstanding: int = 0) -> LedgerStatus:
    """What the ledger says at the end of a run."""
    return LedgerStatus(
        state=RunState.DRAINING,
        incarnation=1,
        trained=2,
        next_seq=4,
        low_seq=4,
        generating=0,
        ready=outstanding,
        leased=0,
        released=0,
        trained_groups=4,
        dead={},
        releases={},
        bytes_used=0,
        byte_budget=1,
        admission_limit=4,
        checkpoints=(),
        lineage=Lineage({1: Fork(0, 0)}, 1),
        ready_versions={},
    )
