"""A run that goes on from a checkpoint of another: the ledger copied at one moment, payloads copied, then rewound to the checkpoint.

    read (one script) ──► payloads, blobs, spilled steps copied ──► written (one script) ──► attached at the checkpoint ──► slots of nobody expire

The other run is only read, and may go on meanwhile. What it frees before it is copied is noticed (`Moved`); the caller takes another copy.
Invariant: the new run is there, whole, or not at all; until it is, only payloads without an entry lie under its name, which a repeat replaces.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.config import BufferConfig
from buffer.contract import CheckpointRef
from buffer.payloads import by_bytes
from buffer.recording import RecordedStep, RecordingAbout
from buffer.redis_ledger import FORKED_KEYS, RedisLedger
from buffer.storage import claim_storage, open_storage
from protocol.codec import decode, encode
from protocol.connection import Client, Script, asking
from protocol.errors import LedgerError, RunExists, RunMissing
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import GroupHeader
from protocol.objects import object_store

_READ = Script("buffer", "lua/fork_read.lua", flags="no-writes")
_WRITE = Script("buffer", "lua/fork_write.lua")
_COPY_BYTES = 2 << 20


class Moved(LedgerError):
    """The run has moved on while it was copied. Take another copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunCopy:
    """A run's small state at one moment."""

    keys: Keys
    identity: RunIdentity
    settings: BufferConfig
    trained: int
    dropped: int
    checkpoints: tuple[CheckpointRef, ...]
    last_event: str
    """Id of the newest audit event it holds the effect of."""
    headers: tuple[GroupHeader, ...]
    """Groups that are READY, LEASED, or TRAINED and still in the journal."""
    spilled: frozenset[int]
    """Those of them whose payload has left Redis."""
    dumps: tuple[bytes, ...]


async def read_run(client: Client, keys: Keys) -> RunCopy:
    """Raises: `RunMissing`."""
    identity, settings = await RedisLedger(client, keys).about()
    names = [keys.state, keys.audit, keys.key("headers"), keys.key("groups"), keys.state, keys.forks, *map(keys.key, FORKED_KEYS)]
    answer = await _READ(client, keys=names)
    if not answer:
        raise RunMissing(f"run {keys.run!r} is gone")
    state, last, headers, groups, *dumps = answer
    fields = {name.decode(): value for name, value in _pairs(state)}
    rows = {int(seq): row for seq, row in _pairs(groups)}
    found = tuple(decode(GroupHeader, header) for _, header in _pairs(headers) if header)
    return RunCopy(
        keys=keys,
        identity=identity,
        settings=settings,
        trained=int(fields.get("trained", 0)),
        dropped=int(fields.get("dropped", 0)),
        checkpoints=tuple(
            CheckpointRef(step=step, incarnation=incarnation, digest=digest, path=path)
            for step, incarnation, digest, path in orjson.loads(fields.get("checkpoints", b"[]")) or ()
        ),
        last_event=last.decode(),
        headers=found,
        spilled=frozenset(header.seq for header in found if _stored(rows.get(header.seq)) == 0),
        dumps=tuple(dumps),
    )


async def copy_payloads(client: Client, copy: RunCopy, target: Keys) -> list[str]:
    """Every payload under the new run's name; the names. They stay until the new run, or `RedisLedger.delete_run`, deletes them. Raises: `Moved`."""
    wanted = [header for header in copy.headers if header.seq not in copy.spilled]
    written: list[str] = []
    try:
        for batch in by_bytes(wanted, _COPY_BYTES):
            written += await _copy_batch(client, copy, target, batch)
    except BaseException:
        await asyncio.shield(drop_payloads(client, written))
        raise
    return written


async def _copy_batch(client: Client, copy: RunCopy, target: Keys, batch: Sequence[GroupHeader]) -> list[str]:
    with asking("fork"):
        payloads = await client.mget([copy.keys.payload(one.seq, one.attempt, one.token) for one in batch])
        if gone := [header.seq for header, payload in zip(batch, payloads, strict=True) if payload is None]:
            raise Moved(f"run {copy.keys.run!r} has let go of group {gone[0]}, which the copy needs")
        found = {target.payload(one.seq, one.attempt, one.token): payload for one, payload in zip(batch, payloads, strict=True) if payload is not None}
        for name, payload in found.items():
            await client.set(name, payload)
    return list(found)


async def drop_payloads(client: Client, names: Sequence[str]) -> None:
    with asking("fork"):
        for name in names:
            await client.unlink(name)


def copy_stores(copy: RunCopy, target: Keys) -> dict[int, GroupHeader]:
    """Blobs, and spilled steps of the journal, under the new run's name; the headers whose blobs have moved, by `seq`. Blocks.

    Raises: `Moved` for a blob that is gone, `ConfigError` where the other run's stores are not to be seen, `ReplayGap`, `DecodeError`, `OSError`.
    """
    of_old, of_new = (open_storage(copy.settings, run) for run in (copy.keys.run, target.run))
    claim_storage(of_old, None)
    if of_old.spill is not None and of_new.spill is not None:
        of_new.spill.describe(RecordingAbout(run=target.run, identity=copy.identity, settings=copy.settings))
        for step in of_old.spill.steps():
            if copy.dropped < step <= copy.trained:
                of_new.spill.write_step(_renamed(of_old.spill.read_step(step), target))
    if of_new.blobs is None:
        return {}
    store = object_store(copy.settings.blobs, key="buffer.blobs")
    changed: dict[int, GroupHeader] = {}
    of_new.blobs.claim()
    for header in copy.headers:
        if not header.blobs:
            continue
        changed[header.seq] = moved = _moved(header, target)
        for name, blob in header.blobs.items():
            try:
                store.write(moved.blobs[name].name, [store.read(blob.name)])
            except FileNotFoundError as problem:
                raise Moved(f"run {copy.keys.run!r} has let go of blob {blob.name} of group {header.seq}, which the copy needs") from problem
    return changed


def _moved(header: GroupHeader, target: Keys) -> GroupHeader:
    """As the new run names its blobs."""
    return dataclasses.replace(
        header, blobs={name: dataclasses.replace(blob, name=f"{target.run}/{blob.name.partition('/')[2]}") for name, blob in header.blobs.items()}
    )


def _renamed(step: RecordedStep, target: Keys) -> RecordedStep:
    chunks = tuple(dataclasses.replace(chunk, headers=tuple(_moved(header, target) for header in chunk.headers)) for chunk in step.chunks)
    return dataclasses.replace(step, chunks=chunks)


async def write_run(client: Client, copy: RunCopy, target: Keys, checkpoint: CheckpointRef, changed: Mapping[int, GroupHeader]) -> int:
    """The new run, attached at `checkpoint` by nobody that trains: a trainer resumes it from there. Its incarnation.

    Raises: `RunExists`.
    """
    names = [target.state, target.audit, target.key("headers"), target.key("deadlines"), target.state, target.forks, *map(target.key, FORKED_KEYS)]
    milliseconds, _, count = copy.last_event.partition("-")
    args: list[str | bytes | int] = [
        json.dumps([[checkpoint.step, checkpoint.incarnation, checkpoint.digest, checkpoint.path]]),
        f"{milliseconds}-{int(count) + 1}",
        orjson.dumps({"from": copy.keys.run, "step": checkpoint.step, "incarnation": checkpoint.incarnation, "fork": secrets.token_hex(8)}),
        *copy.dumps,
    ]
    for seq, header in changed.items():
        args += [seq, encode(header)]
    if await _WRITE(client, keys=names, args=args) == 0:
        raise RunExists(f"run {target.run!r} exists already: use another name, or `rollstream runs delete {target.run}`")
    ledger = RedisLedger(client, target)
    try:
        attachment = await ledger.attach(checkpoint, trainer_id=f"fork of {copy.keys.run}")
        while (await ledger.status()).generating:  # a look expires a bounded number
            pass
    except BaseException:
        await asyncio.shield(ledger.delete_run())
        raise
    return attachment.incarnation


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _stored(row: bytes | None) -> int | None:
    """Bytes in Redis; 0: spilled. None: the row does not say."""
    if row is None or row == b"T":
        return None
    stored = orjson.loads(row).get("b")
    return None if stored is None else int(stored)
