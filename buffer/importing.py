"""Importing exported groups: a producer that samples nothing. What it puts is admitted, judged and trained like any other group of the run.

    row ──► version kept, or named by the caller ──► reserve(served) ──► put        a slot of the run, with a seq of its own

An imported group takes the place of the prompt whose `seq` it gets. Versions are names within one run: those of another run are never taken for this run's
unless the caller says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from buffer.contract import Blocked, Ledger, LedgerStatus, Slot
from buffer.exchange import Export, ExportedGroup
from protocol.codec import decode_group, digest, encode_group
from protocol.errors import ConfigError, DecodeError, IdentityMismatch, SlotLost
from protocol.identity import RunIdentity
from protocol.messages import Edge, GroupHeader, Reason, RolloutGroup
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups

KEEP, NEWEST = "keep", "newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What an import does, known to be possible as far as that can be known before the first group is put."""

    groups: int
    as_version: Version | None
    """None: each group keeps its versions, and its payload's bytes."""
    newest: bool = False
    """`as_version` follows the run as it trains on."""


async def plan_import(export: Export, ledger: Ledger, *, run: str, identity: RunIdentity, as_version: str | None) -> ImportPlan:
    """Raises: `IdentityMismatch` for groups of another tokenizer or size; `ConfigError` for versions that this run does not have, and what to do."""
    theirs = export.about.identity
    wrong = [name for name in ("tokenizer", "group_size") if getattr(theirs, name) != getattr(identity, name)]
    if wrong:
        raise IdentityMismatch(f"{export.path} is of run {export.about.run!r}, which differs from run {run!r} in {' and '.join(wrong)}: it cannot be imported")
    status = await ledger.status()
    newest = Version(status.incarnation, status.trained)
    versions, groups = await asyncio.to_thread(_versions, export)
    if as_version is not None and as_version != KEEP:
        version = newest if as_version == NEWEST else _parsed(as_version)
        if not _knows(status, version):
            raise ConfigError(f"--as-version {version}: run {run!r} has no such version; its newest is {newest}")
        return ImportPlan(groups=groups, as_version=version, newest=as_version == NEWEST)
    unknown = sorted(version for version in versions if not _knows(status, version))
    advice = "give --as-version newest, or one of this run's versions, to have them trained as if that policy had written them"
    if unknown:
        raise ConfigError(f"{export.path} has groups of version {unknown[0]}, which run {run!r} does not have (its newest is {newest}): {advice}")
    if as_version is None and export.about.run != run:
        raise ConfigError(
            f"{export.path} is of run {export.about.run!r}: its versions name other weights than the same numbers in run {run!r}. Give --as-version keep if "
            f"the weights are the same, as after a fork; or {advice}"
        )
    return ImportPlan(groups=groups, as_version=None)


async def import_groups(
    export: Export,
    plan: ImportPlan,
    ledger: Ledger,
    wakeups: Wakeups,
    stop: asyncio.Event,
    *,
    on_blocked: Callable[[Edge], None],
) -> int:
    """Put every group; how many were, if `stop` came first. Waits for: slots (edges as a producer's). Unblocked by: the run's trainer, `stop`.

    Raises: `RunEnded`; `ConfigError` for a group that is too old for the run's guard by now. What was put before stays.
    """
    owner, put, version = f"import-{secrets.token_hex(8)}", 0, plan.as_version
    rows = export.groups()
    while (row := await asyncio.to_thread(next, rows, None)) is not None:
        header, payload = _prepared(row, version, export.about.run)
        while True:
            try:
                slot = await _reserve(ledger, header, owner=owner, wakeups=wakeups, stop=stop, on_blocked=on_blocked)
            except _TooOld as problem:
                status = await ledger.status()
                if not plan.newest or header.oldest == (version := Version(status.incarnation, status.trained)):
                    there = f"the {put} of {plan.groups} groups before it are in the run and stay, and the whole file again would put them twice"
                    raise ConfigError(f"{problem}; --as-version newest takes it anyway" + (f"; {there}" if put else "")) from problem
                header, payload = _prepared(row, version, export.about.run)
                continue
            if slot is None:
                return put
            placed = dataclasses.replace(header, seq=slot.seq, attempt=slot.attempt, token=slot.token)
            try:
                await ledger.put(placed, payload)
                break
            except SlotLost:  # this process stood still for longer than a slot lives
                continue
            except DecodeError:
                await ledger.release(slot.seq, slot.token, Reason.GIVEN_BACK)
                raise
        put += 1
    return put


class _TooOld(Exception):
    """The guard would not let the group into any step from now on."""


async def _reserve(
    ledger: Ledger, header: GroupHeader, *, owner: str, wakeups: Wakeups, stop: asyncio.Event, on_blocked: Callable[[Edge], None]
) -> Slot | None:
    """A slot for the group. None: `stop` came first. Raises: `_TooOld`."""
    request = secrets.token_hex(8)
    while not stop.is_set():
        mark = wakeups.mark(Topic.SLOT, Topic.RUN)
        answer = await ledger.reserve(owner, request, 1, max_bytes=header.payload_bytes, served=header.oldest)
        if not isinstance(answer, Blocked):
            return answer.slots[0]
        if answer.edge is Edge.NO_VERSION:
            raise _TooOld(f"group {header.metadata['imported']} was written by {header.oldest}, which is too old for the run by now")
        on_blocked(answer.edge)
        await wakeups.wait(Topic.SLOT, Topic.RUN, since=mark)
    return None


def _prepared(row: ExportedGroup, version: Version | None, run: str) -> tuple[GroupHeader, bytes]:
    """The group under the run's names, but for its slot's. Where it came from stays in its metadata."""
    header, payload = row.header, row.payload
    if version is not None:
        payload = encode_group(_written_by(decode_group(payload), version))
        header = dataclasses.replace(
            header, trainable={version: sum(header.trainable.values())}, oldest=version, payload_bytes=len(payload), payload_digest=digest(payload)
        )
    origin = {"imported": f"{run}:{header.seq}:{header.attempt}", "imported_producer": header.producer_id}
    return dataclasses.replace(header, producer_id="import", metadata={**header.metadata, **origin}), payload


def _written_by(group: RolloutGroup, version: Version) -> RolloutGroup:
    rollouts = tuple(
        dataclasses.replace(rollout, spans=tuple(dataclasses.replace(span, version=version) for span in rollout.spans)) for rollout in group.rollouts
    )
    return dataclasses.replace(group, rollouts=rollouts)


def _versions(export: Export) -> tuple[set[Version], int]:
    found: set[Version] = set()
    groups = 0
    for header in export.headers():
        found.update(header.trainable)
        groups += 1
    return found, groups


def _knows(status: LedgerStatus, version: Version) -> bool:
    try:
        status.lineage.shared(version)
    except DecodeError:
        return False
    return version.incarnation != status.incarnation or version.n <= status.trained


def _parsed(text: str) -> Version:
    try:
        return Version.parse(text)
    except DecodeError as problem:
        raise ConfigError(f"--as-version {text!r}: expected a version such as 1:0, newest, or keep") from problem
