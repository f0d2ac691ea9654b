"""The drill: kill -9 of the demo's processes while it runs, spaced by the run's own progress.

trained steps ──► Plan.due() ──► SIGKILL to the process of that role; `rollstream up` starts it again
                            └──► or to all of them, Redis and `up` itself included; then `up --resume`
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import cast

from rich.table import Table

from deploy.redis_server import socket_path
from deploy.up.process import ChildProcess
from deploy.up.records import read_records
from deploy.up.supervisor import Child, Role
from protocol.audit import event
from protocol.connection import Client, connect
from protocol.keys import Keys

_BLOCK_MS = 1000
_OUTAGE_S = 120.0
"""How long the drill looks for Redis: it has killed it itself."""


class DrillKind(StrEnum):
    PROCESSES = "processes"
    """A producer, an engine and the trainer, twice each."""
    GROUP = "group"
    """The same, then everything at once."""


ORDER = (
    Child(Role.PRODUCER, 0),
    Child(Role.ENGINE, 0),
    Child(Role.TRAINER),
    Child(Role.PRODUCER, 1),
    Child(Role.ENGINE, 1),
    Child(Role.TRAINER),
)
EVERYTHING = "everything"


@dataclass(slots=True)
class Plan:
    """Who is to be killed next, and from which step on. Pure.

    >>> plan = Plan(["a", "b"], steps=30)
    >>> plan.due(9), plan.due(10), plan.done(), plan.due(10), plan.due(20)
    (None, 'a', None, None, 'b')
    """

    targets: list[str]
    steps: int
    killed: int = 0

    def due(self, step: int) -> str | None:
        """The target to kill once `step` is trained."""
        if self.killed == len(self.targets) or step < (self.killed + 1) * self.steps // (len(self.targets) + 1):
            return None
        return self.targets[self.killed]

    def done(self) -> None:
        self.killed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """One kill. Units: unix seconds."""

    at: float
    step: int
    target: str
    pids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Drill:
    """Kills by plan. `run` ends when the plan is done; cancel it when the run is over before."""

    folder: Path
    kind: DrillKind
    steps: int
    run_name: str = "demo"
    up_pid: int = 0
    killed: list[Killed] = field(default_factory=list)

    def targets(self) -> list[str]:
        return [*map(str, ORDER), *([EVERYTHING] if self.kind is DrillKind.GROUP else [])]

    async def run(self) -> None:
        """Consumes `trained` events; produces SIGKILLs, `up_pid` included. Whoever started `up` finds it gone, asks `has_killed`, and resumes."""
        plan = Plan(self.targets(), self.steps)
        client = connect(f"unix://{socket_path((self.folder / 'redis').absolute())}", deadline_s=_OUTAGE_S)
        try:
            async for step in trained_steps(client, Keys(self.run_name)):
                target = plan.due(step)
                pids = () if target is None else kill_everything(self.folder, self.up_pid) if target == EVERYTHING else kill(self.folder, target)
                if target is not None and pids:
                    self.killed.append(Killed(at=time.time(), step=step, target=target, pids=pids))
                    plan.done()
                if plan.killed == len(plan.targets):
                    return
        finally:
            await client.aclose()

    def has_killed(self, pid: int) -> bool:
        return any(pid in one.pids for one in self.killed)

    @property
    def complete(self) -> bool:
        return len(self.killed) == len(self.targets())


async def trained_steps(client: Client, keys: Keys) -> AsyncIterator[int]:
    """The step of every `trained` event, as they come."""
    last: bytes | str = "0-0"
    while True:
        reply = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", await client.xread({keys.audit: last}, block=_BLOCK_MS, count=1000))
        for _, entries in reply or []:
            for entry_id, entry in entries:
                last = entry_id
                if entry.get(b"op") == b"trained":
                    yield int(str(event(entry_id, entry).fields["step"]))


def kill(folder: Path, target: str) -> tuple[int, ...]:
    """SIGKILL to the process that plays `target` now; its pid, or nothing if nobody does (it is being started again)."""
    for record in read_records(folder):
        if str(record.child) == target and (process := ChildProcess.adopt(record.identity)) is not None:
            process.kill()
            process.close()
            return (record.identity.pid,)
    return ()


def kill_everything(folder: Path, up_pid: int) -> tuple[int, ...]:
    """SIGKILL to `up`, which would start the others again, and then to all of them, Redis included. Does not give the event loop away in between."""
    os.kill(up_pid, signal.SIGKILL)
    return (up_pid, *(pid for record in read_records(folder) for pid in kill(folder, str(record.child))))


def drill_table(drill: Drill, began: float) -> Table:
    grid = Table(title="Drill: kill -9", title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for one in drill.killed:
        grid.add_row(f"{one.at - began:6.1f} s", f"step {one.step}", one.target, f"[dim]pid {', '.join(map(str, one.pids))}[/]")
    return grid


def drill_json(drill: Drill) -> list[Mapping[str, object]]:
    return [{"at": one.at, "step": one.step, "target": one.target, "pids": list(one.pids)} for one in drill.killed]


async def cancel(task: asyncio.Task[None]) -> None:
    """End `task` and raise what it raised, unless that is the cancellation we asked for."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (problem := task.exception()) is not None:
        raise problem
