"""What must be true of a round that is over, however often somebody was killed.

Three judges who do not know of each other: the audit stream against the witness file, the witness file against the weights, and the keys in Redis against each
other. A fourth looks for what was left behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from buffer.audit import read_audit
from buffer.config import BufferConfig
from buffer.contract import LedgerStatus, RunState
from buffer.redis_ledger import RedisLedger
from buffer.report import surviving, totals
from buffer.storage import open_storage
from buffer.upkeep import sweeping
from buffer.witness import WitnessLine, read_witness
from consumer.checkpoint import checkpoint_name
from protocol.codec import digest
from protocol.keys import Keys
from protocol.messages import Event, Reason, TrainerStatus
from protocol.presence import Presence
from tests.buffer.conftest import redis_violations
from tests.faults.rounds import STEPS, B, Round, client_of
from tests.faults.synthetic import is_filtered
from weightsync.channel import Channel
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import weights_digest


async def judge(round_: Round) -> list[WitnessLine]:
    """The steps that made the weights. Raises: `RoundFailed` with everything that is wrong."""
    async with client_of(round_.url) as client:
        ledger = RedisLedger(client, round_.keys)
        await _expire_slots(client, round_.keys)
        status = await ledger.status()
        events = await read_audit(round_.run_folder / "audit.jsonl", client, round_.keys)
        witness = await asyncio.to_thread(read_witness, round_.run_folder / "witness.jsonl")
        line = [step for step in surviving(witness, events) if step.step <= status.trained]
        problems = [
            *_records(events, witness, line, status, whole=not round_.lose),
            *_steps(witness, line, whole=not round_.lose),
            *await _ledger_agrees(client, round_.keys, line),
            *_weights(line, round_, status),
            *await redis_violations(client, round_.keys),
            *await _slots_and_payloads(client, round_.keys, status),
            *await _storage(client, ledger, round_.keys, line),
            *_files(round_, status, await Channel(client, round_.keys).versions(), whole=not round_.lose),
        ]
        if await Presence(client, round_.keys, "trainer", TrainerStatus).members() and not _was_killed(round_):
            problems.append("a trainer that left is still announced")
    if problems:
        raise await round_.failure(problems)
    return line


def _was_killed(round_: Round) -> bool:
    return any(code != 0 for codes in round_.exits.values() for code in codes)


async def _expire_slots(client: Any, keys: Keys) -> None:
    """What a killed producer held is due: the ledger's clock is put forward, as time would."""
    await client.hincrby(keys.state, "clock", 3_600_000)


def _records(events: Sequence[Event], witness: Sequence[WitnessLine], line: Sequence[WitnessLine], status: LedgerStatus, *, whole: bool) -> list[str]:
    """Audit against witness, and both against what the run was to do. Where the server lost writes the audit is not `whole`, and the witness judges alone."""
    report = totals(events, witness, status)
    found = list(report.disagreements) if whole else []
    for name in (*(("groups_lost",) if whole else ()), "groups_duplicated", "steps_over_k"):
        if count := getattr(report, name):
            found.append(f"{name} is {count}")
    holes = 0 if whole else status.dead.get(Reason.PAYLOAD_LOST, 0)  # of steps that were trained, rewound, and replayed without what Redis had lost (rule P2)
    if (report.steps_trained, report.groups_trained + holes, status.trained) != (STEPS, STEPS * B, STEPS):
        found.append(f"trained {report.groups_trained} groups in {report.steps_trained} steps, the ledger counts {status.trained}, expected {STEPS} of {B}")
    if status.state is not RunState.DRAINING:
        found.append(f"the run is {status.state}")
    if filtered := [seq for step in line for seq in step.seqs if is_filtered(seq)]:
        found.append(f"groups {filtered} were set aside, and trained")
    return found


def _steps(witness: Sequence[WitnessLine], line: Sequence[WitnessLine], *, whole: bool) -> list[str]:
    """From the witness file alone: each group once, and a step that is replayed is masked as it was. A group that Redis lost may have been made anew."""
    counts = Counter(seq for step in line for seq in step.seqs)
    found = [f"group {seq} was trained {count} times" for seq, count in counts.items() if count > 1]
    if [step.step for step in line] != list(range(1, STEPS + 1)):
        found.append(f"the surviving steps are {[step.step for step in line]}")
    replayed: dict[tuple[int, tuple[int, ...]], set[tuple[int, int, int]]] = {}
    for one in witness if whole else ():
        replayed.setdefault((one.step, one.seqs), set()).add((one.tokens, one.masked, one.max_staleness))
    found += [f"step {step} of groups {seqs} was masked in {len(ways)} ways: {ways}" for (step, seqs), ways in replayed.items() if len(ways) > 1]
    return found


async def _ledger_agrees(client: Any, keys: Keys, line: Sequence[WitnessLine]) -> list[str]:
    """A group is TRAINED in the ledger if, and only if, the weights have learnt from it; and every group handed out is in some state (rule I1)."""
    state = {name.decode(): value.decode() for name, value in (await client.hgetall(keys.state)).items()}
    trained = {seq for step in line for seq in step.seqs}
    by_state: dict[int, str] = {}
    for seq, raw in (await client.hgetall(keys.key("groups"))).items():
        by_state[int(seq)] = "trained" if raw == b"T" else orjson.loads(raw)["s"]
    found = [
        f"group {seq} is {name} in the ledger, by the weights it is {'' if seq in trained else 'not '}trained"
        for seq, name in by_state.items()
        if (name == "trained") != (seq in trained)
    ]
    low, high = int(state.get("low_seq", 0)), int(state["next_seq"])
    if beyond := sorted(seq for seq in trained if seq >= high or (low <= seq and seq not in by_state)):
        found.append(f"groups {beyond} are trained, and the ledger, at {low} to {high}, does not know them")
    return found


def _weights(line: Sequence[WitnessLine], round_: Round, status: LedgerStatus) -> list[str]:
    """The weights on disk against what the surviving steps come to, computed anew from the groups alone."""
    newest = max(status.checkpoints, key=lambda one: one.step, default=None)
    if newest is None or newest.step != STEPS:
        return [f"no checkpoint of step {STEPS}: {status.checkpoints}"]
    with open_tensors(Path(newest.path) / "model" / "model.safetensors") as tensors:
        digest = weights_digest(tensors)
    expected = round_.expected(line)
    if digest != expected or line[-1].digest != expected:
        return [f"weights {digest}, by the last witness line {line[-1].digest}, by their groups {expected}"]
    return []


async def _slots_and_payloads(client: Any, keys: Keys, status: LedgerStatus) -> list[str]:
    """No slot is held by nobody; a payload that stays is a group's."""
    found = [f"{status.generating} slots are still held"] if status.generating else []
    if status.leased:
        found.append(f"{status.leased} groups are leased after the last step")
    owned = {keys.payload(seq, group["a"], group["t"]).encode() for seq, group in (await _held(client, keys)).items() if group["b"]}
    stored = {key async for key in client.scan_iter(match=keys.payload(0, 0, "").removesuffix("0:0:") + "*", count=1000)}
    found += [f"payload {key.decode()} belongs to nobody and stays for ever" for key in stored - owned if await client.ttl(key) == -1]
    found += [f"payload {key.decode()} is missing" for key in owned - stored]
    return found


async def _held(client: Any, keys: Keys) -> dict[int, dict[str, Any]]:
    """Groups whose payload the ledger has not let go of, as it describes them; one that is spilled has no bytes."""
    rows = {int(seq): orjson.loads(raw) for seq, raw in (await client.hgetall(keys.key("groups"))).items() if raw != b"T"}
    return {seq: row for seq, row in rows.items() if row["s"] in ("ready", "leased", "trained")}


async def _storage(client: Any, ledger: RedisLedger, keys: Keys, line: Sequence[WitnessLine]) -> list[str]:
    """What was spilled is what was trained, byte for byte; blobs are there for groups that are, or are recorded, and for no others."""
    storage = open_storage(BufferConfig.model_validate_json(await client.hget(keys.state, "settings")), keys.run)
    while await sweeping(ledger, storage)():
        pass
    found = []
    wanted = {(seq, row["a"], row["t"]) for seq, row in (await _held(client, keys)).items() if row.get("x")}
    by_step = {one.step: one for one in line}
    for step in storage.spill.steps() if storage.spill is not None else ():
        recorded = storage.spill.read_step(step)
        headers = [header for chunk in recorded.chunks for header in chunk.headers]
        payloads = [payload for chunk in recorded.payloads for payload in chunk]
        if (seqs := tuple(header.seq for header in headers)) != by_step[step].seqs or recorded.digest != by_step[step].digest:
            found.append(f"step {step} is spilled with groups {seqs} and weights {recorded.digest}, trained was {by_step[step]}")
        found += [
            f"group {header.seq} is spilled with other bytes"
            for header, payload in zip(headers, payloads, strict=True)
            if digest(payload) != header.payload_digest
        ]
        wanted |= {(header.seq, header.attempt, header.token) for header in headers if header.blobs}
    if storage.blobs is not None:
        folders = {path.parent.relative_to(Path(storage.blobs.url)).as_posix() + "/" for path in Path(storage.blobs.url).rglob("*/*/*") if path.is_file()}
        expected = {storage.blobs.folder(*one) for one in wanted}
        if folders != expected:
            found.append(f"blobs of nobody: {sorted(folders - expected)}; gone: {sorted(expected - folders)}")
    return found


def _files(round_: Round, status: LedgerStatus, versions: Sequence[Any], *, whole: bool) -> list[str]:
    """No half-written folder, no checkpoint that is not registered, no version that is not listed."""
    checkpoints, weights = round_.run_folder / "checkpoint", round_.folder / "weights" / round_.keys.run
    expected = {checkpoint_name(one.step, one.incarnation) for one in status.checkpoints}
    found = [f"checkpoints on disk are {seen}, registered {expected}" for seen in [{path.name for path in checkpoints.iterdir()}] if seen != expected]
    listed = {f"v{version.incarnation}-{version.n}" for version in versions}
    seen = {path.name for path in weights.iterdir() if not path.name.startswith("assets-")}
    if not whole:  # an old list names files that went long ago; those of earlier incarnations are swept when the next trainer starts
        newest = versions[-1]
        listed = {name for name in listed if name in seen} | {f"v{newest.incarnation}-{newest.n}"}
        seen = {name for name in seen if name in listed or name.startswith(f"v{newest.incarnation}-")}
    if seen != listed:
        found.append(f"versions on disk are {sorted(seen)}, listed {sorted(listed)}")
    if left := list(round_.folder.rglob(".tmp-*")):
        found.append(f"left behind: {left}")
    return found
