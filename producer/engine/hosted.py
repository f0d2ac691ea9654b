"""One engine as its host sees it, whatever kind it is: `Hosted` for one life of it, `Kind` for how lives of it come about.

    kind = …                                           a `Kind`
    async with kind.life(boot_nonce, desk) as engine:  it has an address; it may still be starting
        await engine.ready()                           from here on it can be asked, and given weights
        await engine.failed()                          in a task beside all else: raises when this life is over

Knows no torch.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from producer.engine.desk import Desk
from protocol.errors import RollstreamError


class EngineFault(RollstreamError):
    """This life of the engine is over: its process ended, it hangs, or it is no longer the one we knew. The message is for people."""


class Misfit(EngineFault):
    """The engine works, and must not be used in this run: it has another model. Looking again later is right, as somebody may put the right one there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How an engine is, as far as it told; zero where it does not tell. Counters are of this life."""

    running: int = 0
    """Requests being decoded."""
    queued: int = 0
    capacity: int = 0
    """Requests decoded at once."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Seconds in which it had something to compute."""
    kv_usage: float = 0.0
    """Share of its KV cache in use, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the other nodes of an engine need to take part in one life of it."""

    address: str
    """host:port where its ranks meet."""
    nodes: int
    """All of them; the one that answers is node 0."""
    alike: str
    """Digest of what all nodes must be started with alike."""


class Hosted(Protocol):
    """One life of one engine. Invariant: what it says at one moment it may say by heart; nothing here but `ready`, `failed` and `until_idle` waits."""

    @property
    def url(self) -> str:
        """Where requests go. Known from the beginning of the life."""

    @property
    def figures(self) -> Figures: ...

    @property
    def idle(self) -> bool:
        """No request is running or waiting, as far as known; False in doubt."""

    @property
    def trouble(self) -> str:
        """What keeps it from being asked, for people; empty when nothing does."""

    @property
    def meeting(self) -> Meeting | None:
        """Where its other nodes meet it; None: it has no others."""

    async def ready(self) -> None:
        """Return once it answers and is fit for weights of this run. Raises: `EngineFault` (this life comes to nothing), `Misfit`."""

    async def failed(self) -> None:
        """Never returns. Raises: `EngineFault` when this life is over."""

    async def until_idle(self) -> None:
        """Return when no request is under way. Unbounded: the caller brings a deadline."""


class Kind(Protocol):
    """How an engine of one kind comes to be there."""

    name: str
    """embedded | sglang | external, as registered."""
    lives_on: bool
    """After an `EngineFault` the host begins another life. False: the engine is in the host's own process, which ends with it."""
    start_tries: int
    """Lives in a row that may end before they were ready; then the host gives up. 0: as many as it takes."""

    def life(self, boot_nonce: str, desk: Desk, /) -> AbstractAsyncContextManager[Hosted]:
        """A life under this nonce, which names its base weights if we load them (rule W3): `boot:<nonce>`.

        Raises on entering: `ConfigError` for what will never work, `EngineFault` for what may the next time.
        """
