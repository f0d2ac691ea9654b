"""Faults as they happen to a world: who is killed, hangs, is cut off, where, and what the server forgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.simulator.engines import EngineHost
from benchmarks.simulator.faults import Fault
from benchmarks.simulator.kernel import Process
from buffer.ledger_state import payload_name
from protocol.messages import GroupState, Seq

if TYPE_CHECKING:
    from benchmarks.simulator.engines import Reconciler
    from benchmarks.simulator.world import World

_FOR_EVER_S = 1e9
_TAKEN_FOR_DEAD_S = 1.5


class Mischief:
    def __init__(self, world: World) -> None:
        self.world = world
        self.go_back = False
        """The next trainer is told to resume from the older checkpoint."""
        self.clock_jumped_at = -1e9
        self.spoiled: set[str] = set()
        """Payloads that were lost or damaged."""
        self._traps: dict[str, float] = {}
        """Point → seconds to hang there, 0 to be killed."""

    def plan(self) -> None:
        """The timed faults of the seed, each at its time."""
        faults, kernel = self.world.faults, self.world.kernel
        for fault in faults.timed:
            if faults.only is None or str(fault) in faults.only:
                kernel.at(fault.at, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        if not self.world.faults.over and self.world.faults.due(fault):
            self.world.kernel.log("world", "fault: %s %s %.2f", fault.kind, fault.target, fault.amount)
            getattr(self, f"_{fault.kind.replace(' ', '_')}")(fault)

    # traps --------------------------------------------------------------------------------------------------------------------------------------

    def springs(self, process: Process, point: str) -> bool:
        """Whether a trap at `point` caught the process: it must then wait, and whether it comes back is seen."""
        seconds = self._sprung(point)
        if seconds is None:
            return False
        if seconds:
            self._hang(process, seconds)
        else:
            self._end(process)
        return True

    def springs_reconciler(self, reconciler: Reconciler, point: str) -> None:
        """As `springs`; an engine outlives its reconciler."""
        seconds = self._sprung(point)
        if seconds is not None:
            reconciler.host.stall(reconciler, seconds or _FOR_EVER_S)

    def _sprung(self, point: str) -> float | None:
        if point not in self._traps or self.world.faults.over:
            return None
        self.world.kernel.log("world", "the trap at %s springs", point)
        return self._traps.pop(point)

    def _kill_at(self, fault: Fault) -> None:
        self._traps[fault.target] = 0.0

    def _freeze_at(self, fault: Fault) -> None:
        self._traps[fault.target] = fault.amount

    # processes ----------------------------------------------------------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        self._end(self.world.places[fault.target])

    def _resume_older(self, fault: Fault) -> None:
        self.go_back = True
        self._kill(fault)

    def _freeze(self, fault: Fault) -> None:
        self._hang(self.world.places[fault.target], fault.amount)

    def _cut(self, fault: Fault) -> None:
        process = self.world.places[fault.target]
        process.cut_until = self.world.kernel.now + fault.amount
        process.trouble_until = max(process.trouble_until, process.cut_until + 2.0)

    def _engine_restarts(self, fault: Fault) -> None:
        host = self.world.places[fault.target]
        assert isinstance(host, EngineHost)
        host.engine.restart(self.world.kernel.now)

    def _reconciler_stalls(self, fault: Fault) -> None:
        host = self.world.places[fault.target]
        assert isinstance(host, EngineHost)
        if host.alive:
            host.stall(host.reconcilers[-1], fault.amount)

    def _letters_again(self, _fault: Fault) -> None:
        server = self.world.server
        server.pure.requeue([letter.seq for letter in server.pure.dead_letters(Seq(-1), 100)])
        server.publish("slot")

    def _end(self, process: Process) -> None:
        if process.alive and not self.world.faults.over:
            self.world.kernel.log("world", "%s.%d is killed", process.name, process.life)
            self.world.died(process)

    def _hang(self, process: Process, seconds: float) -> None:
        process.frozen_until = self.world.kernel.now + seconds
        process.trouble_until = max(process.trouble_until, process.frozen_until + 1.0)
        self.world.kernel.at(min(seconds / 2, _TAKEN_FOR_DEAD_S), self.world.start, process.name)

    # the server ---------------------------------------------------------------------------------------------------------------------------------

    def _redis_pauses(self, fault: Fault) -> None:
        self.world.server.pause(fault.amount)

    def _clock_jumps(self, fault: Fault) -> None:
        self.world.server.skew_s += fault.amount
        self.clock_jumped_at = self.world.kernel.now

    def _redis_falls_back(self, fault: Fault) -> None:
        self.world.server.keep_copy()
        self.world.kernel.at(fault.amount, self._fall_back)

    def _trainers_fall_with_redis(self, fault: Fault) -> None:
        """One dies, its successor attaches, works, and dies with the server, which forgets that it ever was."""
        kernel = self.world.kernel
        self.world.server.keep_copy()
        for after_s in (0.05, 3.0 + fault.amount):
            kernel.at(after_s, lambda: self._end(self.world.places["trainer"]))
        kernel.at(3.0 + fault.amount, self._fall_back)

    def _fall_back(self) -> None:
        if not self.world.faults.over and self.world.server.fall_back():
            self.world.kernel.log("world", "redis falls back")

    def _payload_gone(self, fault: Fault) -> None:
        if name := self._some_payload(fault):
            self.world.server.pure.state.payloads.pop(name, None)

    def _payload_damaged(self, fault: Fault) -> None:
        payloads = self.world.server.pure.state.payloads
        if (name := self._some_payload(fault)) in payloads:
            payloads[name] = b"?" * len(payloads[name])

    def _some_payload(self, fault: Fault) -> str:
        """Of a group in the state that the fault names; "": there is none."""
        kind = GroupState.READY if fault.target == "ready" else GroupState.LEASED
        headers = [group.header for group in self.world.server.pure.state.groups.values() if group.state is kind and group.header is not None]
        if not headers:
            return ""
        header = headers[int(fault.at * 1000) % len(headers)]
        self.world.kernel.log("world", "the payload of group %d is hit", header.seq)
        name = payload_name(header.seq, header.attempt, header.token)
        self.spoiled.add(name)
        return name
