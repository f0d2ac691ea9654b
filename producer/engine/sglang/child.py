"""A server as a process: a session of its own, its output in a log, waited for by pidfd, ended whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_LOG = logging.getLogger(__name__)
_REAP_S = 10.0
"""From SIGKILL to its end. What hangs in the kernel, in a driver of its device say, ends when that lets it go, which may be never."""
_TAIL_BYTES = 16384
_TAIL_LINES = 12
_LINE_CHARACTERS = 300
"""SGLang tells all of its five hundred settings in one line."""


class Child:
    """`await end(grace_s)` before it goes out of sight. Invariant: once `end` has returned, no process of its session is left, or the log names one that the
    kernel does not let go; it answers nobody any more.
    """

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int, log: Path, offset: int) -> None:
        self._popen, self._pidfd, self.log, self._offset = popen, pidfd, log, offset
        self._given_up = False
        self.code: int | None = None
        """Its exit code once it has ended and was waited for; negative: a signal."""

    @classmethod
    def start(cls, argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Self:
        """Start `argv`; its output goes to the end of `log`, for its owner alone to read. Raises: `OSError`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            offset = os.fstat(descriptor).st_size
            popen = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True, env=dict(env))
        finally:
            os.close(descriptor)
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:  # no descriptor left: what cannot be watched must not run on
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            raise
        return cls(popen, pidfd, log, offset)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def ended(self) -> int:
        """Its exit code, once it has ended. What it started and left behind is killed."""
        if self.code is None:
            loop = asyncio.get_running_loop()
            gone = loop.create_future()
            loop.add_reader(self._pidfd, lambda: None if gone.done() else gone.set_result(None))
            try:
                await gone
            finally:
                loop.remove_reader(self._pidfd)
            self._kill()  # not reaped yet, so the number is still its own
            self.code = self._popen.wait()
            os.close(self._pidfd)
        return self.code

    async def end(self, grace_s: float) -> None:
        """Ask it to end, and see to it after `grace_s`; `_REAP_S` later it has ended, or is given up. A second call, or one after its end, does nothing."""
        if self.code is not None or self._given_up:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            self._kill()
            try:
                async with asyncio.timeout(_REAP_S):
                    await self.ended()
            except TimeoutError:
                self._given_up = True
                os.close(self._pidfd)
                _LOG.error(
                    "process %d was killed and has not ended within %g s: the kernel holds it, and with it the memory of its device; a server that is started "
                    "there meanwhile may find no room",
                    self.pid,
                    _REAP_S,
                )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of what this child has written; empty if it wrote nothing."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._offset, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(line[:_LINE_CHARACTERS] for line in lines[-_TAIL_LINES:] if line.strip())
