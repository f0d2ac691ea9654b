"""What the processes of a run cost this machine: peak memory of all together, CPU seconds by role. Kept in `resources.json`, summed over restarts and resumes.

Memory is PSS (shared pages counted once, divided among those who share them), so the sum over processes is what the machine gave.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from deploy.up.process import stat_of
from deploy.up.records import write_atomically

_NAME = "resources.json"


def pss_bytes(pid: int) -> int:
    """Proportional set size; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def sessions() -> dict[int, list[int]]:
    """Pids by session: a child of ours leads one, and its own children are in it, with the sessions that these lead (an engine host's server does)."""
    stats = {int(entry.name): stat for entry in Path("/proc").iterdir() if entry.name.isdigit() and (stat := stat_of(int(entry.name))) is not None}
    found: dict[int, list[int]] = defaultdict(list)
    for pid, stat in stats.items():
        found[stat.session].append(pid)
        leader = stats.get(stat.session)
        parent = stats.get(leader.parent) if leader is not None else None
        if parent is not None and parent.session != stat.session:
            found[parent.session].append(pid)
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at all processes: by leader of a session, its role, memory and CPU seconds so far."""

    usage: Mapping[int, tuple[str, int, float]]
    own_pss_bytes: int
    own_cpu_s: float


def measure(pids: Mapping[int, str]) -> Sample:
    """One look at `pids` (leader of a session → role) and at this process. Blocks for some milliseconds: run it in a thread."""
    members = sessions()
    usage: dict[int, tuple[str, int, float]] = {}
    for leader, role in pids.items():
        found = [(pid, stat) for pid in members.get(leader, []) if (stat := stat_of(pid)) is not None]
        usage[leader] = (role, sum(pss_bytes(pid) for pid, _ in found), sum(stat.cpu_s for _, stat in found))
    return Sample(usage, pss_bytes(os.getpid()), time.process_time())


class Resources:
    """Sums and peaks of one run folder."""

    def __init__(self, folder: Path, *, adopted: Collection[int] = ()) -> None:
        self._path = folder / _NAME
        self._began = time.monotonic()
        self._live: dict[int, tuple[str, float]] = {}
        earlier = self._read()
        self._wall_s = float(earlier.get("wall_seconds", 0.0))
        self._cpu_s: dict[str, float] = defaultdict(float, earlier.get("cpu_seconds", {}))
        self._peak = int(earlier.get("peak_pss_bytes", 0))
        self._peak_by_role: dict[str, int] = dict(earlier.get("peak_pss_bytes_by_role", {}))
        self._restarts: dict[str, int] = dict(earlier.get("restarts", {}))
        self._own_cpu_s = 0.0
        for pid, (role, seconds) in self._earlier_live(earlier).items():
            if pid in adopted:  # its next sample counts from its own start again
                self._cpu_s[role] -= seconds

    def record(self, sample: Sample, *, alive: Collection[int]) -> None:
        """Take `sample` in; of a process that has ended since (not in `alive`) more is known already."""
        by_role: dict[str, int] = defaultdict(int)
        for leader, (role, size, cpu_s) in sample.usage.items():
            by_role[role] += size
            if leader in alive:
                self._live[leader] = (role, max(cpu_s, self._live.get(leader, (role, 0.0))[1]))
        by_role["up"] += sample.own_pss_bytes
        self._own_cpu_s = sample.own_cpu_s
        self._peak = max(self._peak, sum(by_role.values()))
        for role, size in by_role.items():
            self._peak_by_role[role] = max(self._peak_by_role.get(role, 0), size)

    def ended(self, pid: int, role: str, cpu_s: float) -> None:
        """A process is gone; `cpu_s` is what it used, if that is known better than by the last sample."""
        _, seen = self._live.pop(pid, (role, 0.0))
        self._cpu_s[role] += max(seen, cpu_s)

    def restarted(self, role: str) -> None:
        self._restarts[role] = self._restarts.get(role, 0) + 1

    def write(self) -> None:
        cpu = dict(self._cpu_s)
        for role, seen in self._live.values():
            cpu[role] = cpu.get(role, 0.0) + seen
        cpu["up"] = cpu.get("up", 0.0) + self._own_cpu_s
        report = {
            "peak_pss_bytes": self._peak,
            "peak_pss_bytes_by_role": self._peak_by_role,
            "cpu_seconds": {role: round(seconds, 2) for role, seconds in sorted(cpu.items())},
            "cpu_seconds_total": round(sum(cpu.values()), 2),
            "wall_seconds": round(self._wall_s + time.monotonic() - self._began, 2),
            "restarts": self._restarts,
            "live": {str(pid): list(entry) for pid, entry in self._live.items()},
        }
        write_atomically(self._path, orjson.dumps(report, option=orjson.OPT_INDENT_2))

    def _read(self) -> dict[str, Any]:
        try:
            found = orjson.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def _earlier_live(earlier: Mapping[str, Any]) -> dict[int, tuple[str, float]]:
        return {int(pid): (str(role), float(seconds)) for pid, (role, seconds) in earlier.get("live", {}).items()}
