"""Places where a process dies on demand, so that tests kill it at every edge of its state and not only where chance would.

    ROLLSTREAM_FAILPOINT=trainer.witnessed      SIGKILL to itself when it first gets there
    ROLLSTREAM_FAILPOINT=producer.put:3         … the third time
    ROLLSTREAM_FAILPOINT_PID=4711               the SIGKILL goes to that process instead, say the Redis server; this one waits for its end, and goes on

Nothing runs after the kill: no `finally`, no flush, no last heartbeat. Without the variable a failpoint costs one comparison.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import ConfigError

VARIABLE = "ROLLSTREAM_FAILPOINT"
VICTIM_VARIABLE = "ROLLSTREAM_FAILPOINT_PID"


class Failpoint(StrEnum):
    """Every edge that a process can be killed at: `before_x` means x was not asked for yet, a participle that it is done and nobody has acted on it."""

    PRODUCER_RESERVED = "producer.reserved"
    PRODUCER_MADE = "producer.made"
    PRODUCER_SET = "producer.set"
    """The payload lies in Redis, the ledger has not heard of it. On a single node both go in one round trip, but for the first put after a server's start."""
    PRODUCER_PUT = "producer.put"
    PRODUCER_BEFORE_RELEASE = "producer.before_release"
    PRODUCER_RELEASED = "producer.released"
    PRODUCER_BEFORE_GIVE_BACK = "producer.before_give_back"
    PRODUCER_RENEWED = "producer.renewed"

    TRAINER_CREATED = "trainer.created"
    TRAINER_BEFORE_ATTACH = "trainer.before_attach"
    TRAINER_ATTACHED = "trainer.attached"
    TRAINER_STEP_OPENED = "trainer.step_opened"
    TRAINER_CHUNK_LEASED = "trainer.chunk_leased"
    TRAINER_CHUNK_FETCHED = "trainer.chunk_fetched"
    TRAINER_ACCUMULATED = "trainer.accumulated"
    TRAINER_BEFORE_OPTIMIZER = "trainer.before_optimizer"
    TRAINER_STEPPED = "trainer.stepped"
    TRAINER_WITNESSED = "trainer.witnessed"
    TRAINER_TRAINED = "trainer.trained"
    TRAINER_BEFORE_REASSERT = "trainer.before_reassert"
    TRAINER_REASSERTING = "trainer.reasserting"
    """Before each step of the history; what was told before it is in the ledger."""
    TRAINER_REASSERTED = "trainer.reasserted"
    TRAINER_BEFORE_DRAIN = "trainer.before_drain"
    TRAINER_DRAINED = "trainer.drained"

    VERSION_PART_WRITTEN = "version.part_written"
    """One of its files is whole, under a temporary name or without a manifest; others may not be."""
    VERSION_WRITTEN = "version.written"
    """Its files are whole under a temporary name."""
    VERSION_RENAMED = "version.renamed"
    VERSION_PUBLISHED = "version.published"
    VERSION_DELETED = "version.deleted"
    """Files of versions that nobody needs are gone, the channel still lists them as dying."""

    ENGINE_PREPARED = "engine.prepared"
    ENGINE_PAUSED = "engine.paused"
    ENGINE_LOADED = "engine.loaded"
    """The engine has the version and is still paused."""
    ENGINE_RESUMED = "engine.resumed"
    """It decodes, and nobody has verified with what."""
    ENGINE_ACKED = "engine.acked"

    SERVER_STAGED = "server.staged"
    SERVER_GROUPED = "server.grouped"
    """An engine and the weight server have a process group."""
    SERVER_SENDING = "server.sending"
    """A bucket is on its way."""
    SERVER_SENT = "server.sent"

    RELAY_READ = "relay.read"
    """What the store has of a version is read, nothing is written."""
    RELAY_WRITTEN = "relay.written"
    RELAY_RENAMED = "relay.renamed"

    CHECKPOINT_PART_WRITTEN = "checkpoint.part_written"
    """This rank's files are durable, and nobody has heard of it."""
    CHECKPOINT_WRITTEN = "checkpoint.written"
    """Its files are whole under a temporary name."""
    CHECKPOINT_RENAMED = "checkpoint.renamed"
    CHECKPOINT_REGISTERED = "checkpoint.registered"

    SPILL_WRITTEN = "spill.written"
    SPILL_SPILLED = "spill.spilled"
    AUDIT_APPENDED = "audit.appended"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Armed:
    at: Failpoint
    nth: int
    passings: Iterator[int]
    victim: int | None
    """A descriptor of the process to kill in our place: unlike its number it never comes to mean another."""


_armed: _Armed | None = None


def arm(environ: Mapping[str, str]) -> None:
    """Take what `environ` asks for; nothing, without the variable. A daemon calls it at its start.

    Raises: `ConfigError` for a name that is no failpoint, a count below 1, or a process that is not there.
    """
    global _armed  # noqa: PLW0603 - a property of the process, like a signal handler
    if _armed is not None and _armed.victim is not None:
        os.close(_armed.victim)
    _armed = None
    if not (wanted := environ.get(VARIABLE, "")):
        return
    name, _, count = wanted.partition(":")
    if name not in set(Failpoint):
        raise ConfigError(f"{VARIABLE}={wanted}: no such failpoint; expected name or name:nth, with a name of {', '.join(Failpoint)}")
    if count and not (count.isdecimal() and int(count) >= 1):
        raise ConfigError(f"{VARIABLE}={wanted}: {count!r} is no count; expected {name}:nth with nth at least 1")
    _armed = _Armed(at=Failpoint(name), nth=int(count or 1), passings=itertools.count(1), victim=_victim(environ.get(VICTIM_VARIABLE, "")))


def failpoint(at: Failpoint) -> None:
    """Here the process may be told to die."""
    if _armed is not None and at is _armed.at and next(_armed.passings) == _armed.nth:
        _kill(_armed.victim)


def _victim(pid: str) -> int | None:
    if not pid:
        return None
    try:
        return os.pidfd_open(int(pid))
    except (ValueError, OSError) as problem:
        raise ConfigError(f"{VICTIM_VARIABLE}={pid}: cannot be killed ({problem}); give the number of a process of yours, or unset it") from problem


def _kill(victim: int | None) -> None:
    if victim is None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # another thread took the signal; no instruction of ours runs before it ends the process
    else:
        with contextlib.suppress(ProcessLookupError):  # somebody else was faster
            signal.pidfd_send_signal(victim, signal.SIGKILL)
        ended = select.poll()
        ended.register(victim, select.POLLIN)
        ended.poll()
