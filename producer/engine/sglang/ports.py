"""Ports for a server that another process opens: held from when they are chosen until it has ended, so that nobody else is given them.

A socket that is bound, allows reuse and does not listen keeps the kernel from giving its port away, and lets a server that allows reuse, as all do, listen
there all the same. Only who asks for this very port can still take it first; the server then says so and ends, and the next start has another port.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from protocol.errors import ConfigError


@contextlib.contextmanager
def held_port(host: str, port: int = 0, *, key: str) -> Iterator[int]:
    """A port of `host`, `port` or any free one, ours while the context is open.

    Raises: `ConfigError` naming the setting `key` when somebody listens there already, or `host` is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, port))
            number = int(holder.getsockname()[1])
        except OSError as problem:
            raise ConfigError(
                f"{key}: cannot listen on {host}:{port} ({os.strerror(problem.errno) if problem.errno else problem}); "
                "end the process that has it, choose another engine.port, or use 0 for a free one"
            ) from problem
        yield number
