"""Process groups of this engine and one sender each: rank 0 sends, this engine is rank 1.

    join ── store at the sender's address, then the mesh ──► JOINED ── receive ──► JOINED
                                                             any error, or drop ──► gone

A group that met any error is dead on both sides (gloo closes its connections), and counters that were out of step stay so: it is freed, and the sender sees a
closed connection at once. Blocking calls run in threads of their own, which end by the group's timeout; nobody waits for them longer, and they keep nothing
alive. A name is compatible with what `torch.distributed` derives from it, but the group is not in its registry: any number of engines and senders may share a
process, and none needs a default group.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from protocol.errors import RollstreamError

_GRACE_S = 2.0
"""torch's own timeouts come somewhat late; past this much the thread is left to itself."""
_RETRY_S = 0.05
_MOST = 4
"""Groups kept: those of senders that died without a word make room for new ones, oldest first."""
RANK, WORLD_SIZE = 1, 2
T = TypeVar("T")


class GroupFailed(RollstreamError):
    """A group did not form, or what should come through it did not; it is gone."""


class Groups:
    """The groups by name. Used from one event loop."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: what a join or one bucket may take."""
        self._timeout_s = timeout_s
        self._joined: dict[str, dist.ProcessGroupGloo] = {}
        self._joining: set[str] = set()
        self._receiving: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._joined)

    async def join(self, name: str, host: str, port: int) -> None:
        """Returns once sender and engine are connected. Raises: `GroupFailed`."""
        if name in self._joined or name in self._joining or name in self._receiving:
            raise GroupFailed(f"group {name} exists already: destroy it, or use a name that was never used")
        self._joining.add(name)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                await self._until_listening(host, port)
                left = dt.timedelta(seconds=max(0.1, self._timeout_s - (time.monotonic() - started)))
                group = await _in_thread(f"engine:join:{name}", lambda: self._connect(name, host, port, left))
        except TimeoutError as problem:
            raise GroupFailed(f"nobody at {host}:{port} formed group {name} within {self._timeout_s:g} s") from problem
        except (RuntimeError, ValueError, OSError) as problem:
            raise GroupFailed(f"group {name} at {host}:{port}: {_first_line(problem)}") from problem
        finally:
            self._joining.discard(name)
        while len(self._joined) >= _MOST:
            self.drop(next(iter(self._joined)))
        self._joined[name] = group

    async def receive(self, name: str, windows: Sequence[Tensor]) -> None:
        """Fill `windows` with what rank 0 broadcasts, in this order. Raises: `GroupFailed`; the group is gone then, also when the caller is cancelled."""
        group = self._joined.get(name)
        if group is None:
            raise GroupFailed(f"Group {name} not in {self.names}. Please call `init_weights_update_group` first.")
        if name in self._receiving:
            raise GroupFailed(f"group {name} receives another bucket: send one at a time")
        self._receiving.add(name)
        whole = False
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                await _in_thread(f"engine:receive:{name}", lambda: _broadcasts(group, windows))
            whole = True
        except TimeoutError as problem:
            raise GroupFailed(f"group {name}: nothing came within {self._timeout_s:g} s") from problem
        except RuntimeError as problem:
            raise GroupFailed(f"group {name}: {_first_line(problem)}") from problem
        finally:
            self._receiving.discard(name)
            if not whole:
                self.drop(name)

    def drop(self, name: str) -> bool:
        """Forget the group, which closes its connections; False if there is none."""
        return self._joined.pop(name, None) is not None

    def close(self) -> None:
        self._joined.clear()

    async def _until_listening(self, host: str, port: int) -> None:
        """Waits where it can be cancelled: torch's own connect cannot."""
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(_RETRY_S)
            else:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                return

    def _connect(self, name: str, host: str, port: int, left: dt.timedelta) -> dist.ProcessGroupGloo:
        store = dist.TCPStore(host, port, WORLD_SIZE, False, left)  # type: ignore[attr-defined, unused-ignore]
        nested = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))  # type: ignore[attr-defined, unused-ignore]
        nested = dist.PrefixStore("cpu/", nested)  # type: ignore[attr-defined, unused-ignore]  # as `torch.distributed` nests them for a group of this name
        nested.set_timeout(left)
        return dist.ProcessGroupGloo(nested, RANK, WORLD_SIZE, dt.timedelta(seconds=self._timeout_s))


def _broadcasts(group: dist.ProcessGroupGloo, windows: Sequence[Tensor]) -> None:
    """All are posted before any is waited for, as senders do; all have ended when this returns or raises, so that freeing the group blocks nobody."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    works = [group.broadcast([window], options) for window in windows]  # type: ignore[attr-defined, unused-ignore]
    problems: list[RuntimeError] = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]


async def _in_thread(name: str, act: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, in a thread that neither the loop nor the process waits for at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, problem: BaseException | None) -> None:
        if done.done():
            return
        if problem is not None:
            done.set_exception(problem)
        else:
            done.set_result(value)  # type: ignore[arg-type]  # None only where T is

    def run() -> None:
        value: T | None = None
        problem: BaseException | None = None
        try:
            value = act()
        except Exception as raised:  # noqa: BLE001 - it is the caller's, who re-raises it
            problem = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def _first_line(problem: BaseException) -> str:
    return str(problem).partition("\n")[0][:300] or type(problem).__name__
