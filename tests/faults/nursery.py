"""Daemons by fork from a process that has imported them: real processes that start in milliseconds, so that hundreds of rounds take minutes.

    async with Round(folder, nursery=nursery): …      ──"start", JSON──► nursery ──fork──► consumer.main.main()
                                                     ◄──pid, exit code──         ◄─waitpid─
A connection is a process: closing it kills that. The nursery ends with whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MODULES = ("consumer.main", "tests.faults.chain_backend", "tests.faults.synthetic_producer")
_SPAWNED_FDS = 4096


@contextlib.contextmanager
def nursery(folder: Path, modules: Sequence[str] = MODULES) -> Iterator[Path]:
    """The socket of a nursery that is ready. `modules`: imported once, for all of its children; importing them may start no thread."""
    path = folder / "nursery.sock"
    command = [sys.executable, "-m", "tests.faults.nursery", str(path), *modules]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield path
        finally:
            assert process.stdin is not None
            process.stdin.close()


class Forked:
    """A process of the nursery, with what the rounds use of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._ended = asyncio.create_task(self._read(reader, writer), name=f"nursery:{pid}")

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)

    @staticmethod
    async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        code = int(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return code


async def start(path: Path, module: str, arguments: Sequence[str], *, environ: Mapping[str, str], log: Path) -> Forked:
    """`python -m module arguments`, but forked. Its working directory is the nursery's."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(json.dumps({"module": module, "arguments": list(arguments), "environ": dict(environ), "log": str(log)}).encode() + b"\n")
    return Forked(int(await reader.readline()), reader, writer)


# -- the nursery itself: one thread, or a fork would copy locks that nobody opens again ------------------------------------------------------------


def serve(path: Path, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    children: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for pid, _ in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    with connection.makefile("rb") as asked:
                        request = json.loads(asked.readline())
                    if (pid := os.fork()) == 0:
                        _become(request)
                    connection.sendall(b"%d\n" % pid)
                    handle = os.pidfd_open(pid)
                    children[handle] = (pid, connection)
                    selector.register(handle, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, data=pid)
                elif key.data is not None:  # nobody waits for it any more
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
                else:
                    handle = key.fd
                    pid, connection = children.pop(handle)
                    selector.unregister(handle)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    os.close(handle)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % code)
                    connection.close()


def _become(request: Mapping[str, Any]) -> NoReturn:
    """The child, until its end. It never returns into the loop above, whose descriptors it closes under their objects."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDWR)
    for wanted, descriptor in ((null, 0), (null, 1), (log, 2)):
        os.dup2(wanted, descriptor)
    os.closerange(3, _SPAWNED_FDS)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = [request["module"], *request["arguments"]]
    code = 1
    try:
        code = importlib.import_module(request["module"]).main()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
