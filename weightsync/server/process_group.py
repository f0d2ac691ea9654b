"""A process group of one engine: made, used and destroyed without touching any other. Calls block; each has a deadline of its own.

Group() listens ──► join() ──► send() … ──► destroy()
                      │          └── any error: the group is dead, destroy() and make another under a new name and port
                      └── any error: likewise
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from protocol.errors import EXIT_TRY_AGAIN, TransportFailed

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_POLL_S = 0.0002
_NCCL_TIMEOUT = timedelta(hours=1)
"""NCCL's own watchdog never acts: `send` has the deadline, and ends what exceeds it."""
ABORT_S = 10.0
"""A communicator that is not gone so long after it was aborted never will be: the process ends instead, and takes no other process with it."""
_ENVIRONMENT = {
    "NCCL_CUMEM_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_used_ports: set[int] = set()


def prepare_environment() -> None:
    """What NCCL must find before CUDA is touched: engines set NCCL_CUMEM_ENABLE=0, and a sender without it hangs; torch's watchdog would kill the process."""
    os.environ.update(_ENVIRONMENT)


class Group:
    """Rank 0 of `world_size`, the others are the engine's. Name and port are never used again."""

    def __init__(self, *, backend: str, device: torch.device, address: str, world_size: int, timeout_s: float) -> None:
        self.name = f"rollstream-{uuid.uuid4().hex}"
        self.address = address
        self.world_size = world_size
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._store: Any = _listen(address, world_size, timeout_s)
        self.port: int = self._store.port

    def join(self) -> None:
        """Return once every rank is here; with NCCL, which meets at the first send, at once.

        Raises: `TransportFailed` at the timeout of the group.
        """
        import torch
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        nccl = self._backend == "nccl"
        try:
            if nccl:
                torch.cuda.set_device(self._device)
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call, unused-ignore]
            # The prefixes are those that SGLang's ranks use: the name around the store, and once more by the helper.
            group, _ = _new_process_group_helper(
                self.world_size,
                0,
                [],
                Backend(self._backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type, unused-ignore]
                timeout=_NCCL_TIMEOUT if nccl else timedelta(seconds=self._timeout_s),
            )
        except (RuntimeError, ValueError) as problem:
            raise TransportFailed(f"group {self.name}: did not form within {self._timeout_s:.0f} s ({problem!s:.300})") from problem
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        self._group = group

    def send(self, buffers: Sequence[torch.Tensor], *, deadline_s: float) -> None:
        """Broadcast the bytes of each buffer, in order. Raises: `TransportFailed`; the group is dead then."""
        from torch.distributed import BroadcastOptions

        if self._group is None:
            raise TransportFailed(f"group {self.name}: was never joined, or is destroyed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        end = time.monotonic() + deadline_s
        try:
            if self._stream is not None:
                self._send_on_stream(buffers, options, end)
                return
            for buffer in buffers:
                limit = timedelta(seconds=max(0.001, min(end - time.monotonic(), self._timeout_s)))
                options.timeout = limit
                self._group.broadcast([buffer], options).wait(limit)
        except RuntimeError as problem:
            raise TransportFailed(f"group {self.name}: its bytes were not taken within {deadline_s:.1f} s ({problem!s:.300})") from problem

    def _send_on_stream(self, buffers: Sequence[torch.Tensor], options: Any, end: float) -> None:
        """All are queued at once: between two of them the receiver waits for nobody but itself."""
        import torch

        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            for buffer in buffers:
                self._group.broadcast([buffer], options).wait()  # orders the stream behind it, and waits for nothing
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            sent.record(self._stream)
        while not sent.query():  # type: ignore[no-untyped-call, unused-ignore]
            if time.monotonic() > end:
                raise RuntimeError("the broadcast did not end in time")
            time.sleep(_POLL_S)

    def abort(self) -> None:
        """End what is under way, from another thread; whoever waits in `send` or `join` gets an error.

        With NCCL the process ends if that does not help: a wedged communicator is never left behind (rule W6).
        """
        group = self._group
        if self._backend != "nccl":
            self._abort_backend(group)
            return
        over = threading.Event()

        def end() -> None:
            self._abort_backend(group)
            over.set()

        threading.Thread(target=end, name=f"abort:{self.name}", daemon=True).start()
        if not over.wait(ABORT_S):
            end_process(f"group {self.name}: NCCL did not give up within {ABORT_S:.0f} s")

    def _abort_backend(self, group: Any) -> None:
        if group is not None and (abort := getattr(group._get_backend(self._device), "abort", None)) is not None:  # noqa: SLF001 - there is no public way
            abort()

    def destroy(self) -> None:
        """Leave. Nothing that this group holds is needed any more; never raises."""
        from torch.distributed.distributed_c10d import _abort_process_group, destroy_process_group

        group, self._group, self._store = self._group, None, None
        if group is None:
            return
        try:
            if self._backend == "nccl":
                _abort_process_group(group)  # unlike a shutdown it never waits for the other side
            else:
                destroy_process_group(group)
        except (RuntimeError, ValueError, KeyError) as problem:
            _LOG.info("group %s was broken when it was destroyed: %s", self.name, problem)


def end_process(why: str) -> None:
    """The last resort against a call into a driver that never returns; whoever supervises this process starts it again."""
    _LOG.critical("%s; this process ends", why)
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)


def _listen(address: str, world_size: int, timeout_s: float) -> Any:
    """A store on a port that no group of this process had before. It does not wait for the engine here: it must listen before the engine is told."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    taken = []
    try:
        while True:
            listener = socket.create_server((address, 0), family=family, backlog=128)
            port = listener.getsockname()[1]
            if port not in _used_ports:
                break
            taken.append(listener)
    finally:
        for other in taken:
            other.close()
    _used_ports.add(port)
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
