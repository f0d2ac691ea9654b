"""Operating system processes: started in a session of their own, told apart from whoever gets their pid later, waited for by pidfd.

A child is waited for the same way whether we started it or an earlier `up` did; only of our own do we learn the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process for ever: pids return, the moment of the start within a boot of the machine does not."""

    pid: int
    started: str
    """Boot id and clock ticks since boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What /proc/<pid>/stat says."""

    state: str
    parent: int
    session: int
    cpu_s: float
    """Of the process and of its children that were waited for."""
    started: str


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def stat_of(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command, in parentheses, may hold anything
    cpu = sum(int(part) for part in fields[11:15]) / _TICK
    return Stat(state=fields[0].decode(), parent=int(fields[1]), session=int(fields[3]), cpu_s=cpu, started=f"{_boot()}:{int(fields[19])}")


def identity_of(pid: int) -> Identity | None:
    """None if it is gone or only waits to be reaped."""
    stat = stat_of(pid)
    return None if stat is None or stat.state in "ZX" else Identity(pid=pid, started=stat.started)


class ChildProcess:
    """One process. Close it (or wait to its end) to give its descriptor back."""

    def __init__(self, identity: Identity, pidfd: int, popen: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._popen = popen
        self.cpu_s = 0.0
        """Known once it has ended: what it used in its life."""

    @classmethod
    def start(cls, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> ChildProcess:
        """Start `argv` in a session of its own, so that a Ctrl-C at the terminal does not reach it; its output goes to the end of `log`.

        Raises: `OSError`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            popen = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=None if env is None else dict(env)
            )
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:  # no descriptor left: what cannot be watched must not run on
            popen.kill()
            popen.wait()
            raise
        stat = stat_of(popen.pid)
        assert stat is not None, "a child that was not waited for is in /proc"
        return cls(Identity(pid=popen.pid, started=stat.started), pidfd, popen)

    @classmethod
    def adopt(cls, identity: Identity) -> ChildProcess | None:
        """The process an earlier `up` started, or None if it is gone."""
        try:
            pidfd = os.pidfd_open(identity.pid)
        except (ProcessLookupError, OSError):
            return None
        if identity_of(identity.pid) != identity:  # asked after the descriptor is open: from here on it cannot become another process
            os.close(pidfd)
            return None
        return cls(identity, pidfd, None)

    @property
    def adopted(self) -> bool:
        return self._popen is None

    @property
    def open(self) -> bool:
        """Not yet waited for to its end."""
        return self._pidfd >= 0

    async def wait(self) -> int | None:
        """Its exit code (negative: a signal), None if it is not our own child. Descendants that outlived it are killed."""
        await self.ended()
        return self._reap()

    async def ended(self) -> None:
        """Return once it has ended; it is not reaped yet."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def on_end() -> None:
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self._pidfd, on_end)
        try:
            await ended
        finally:
            loop.remove_reader(self._pidfd)

    def _reap(self) -> int | None:
        code: int | None = None
        if self._popen is not None:
            if (stat := stat_of(self.identity.pid)) is not None:
                self.cpu_s = stat.cpu_s
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            code = self._popen.wait()
        self.close()
        return code

    def terminate(self) -> None:
        """SIGTERM to the process itself: it knows how to end what it started."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its whole session."""
        if self._pidfd >= 0 and identity_of(self.identity.pid) == self.identity:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, signal.SIGKILL)
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Give the descriptor back; the process goes on."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
