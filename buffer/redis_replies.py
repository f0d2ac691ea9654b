"""What the scripts of the ledger answer, as values of the contract; and the records that come back unchanged, as they are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import orjson

from buffer.contract import CheckpointRef, ChunkRecord, DeadLetter, Granted, LedgerStatus, PastStep, RunState, Slot, StepRecord, TrainedStep
from protocol.codec import decode, encode
from protocol.errors import (
    ConfigError,
    DecodeError,
    Fenced,
    LedgerError,
    LedgerRegressed,
    PayloadTooLarge,
    ReplayGap,
    RunEnded,
    RunMissing,
    SlotLost,
    StepOrder,
)
from protocol.identity import RunIdentity
from protocol.messages import Attempt, GroupHeader, Reason, Seq, SlotToken
from protocol.versions import Fork, Lineage, Version


def refuse(code: str, detail: Any, about: str, run: str) -> NoReturn:
    """The error a refusal of the ledger stands for."""
    seen = detail.decode() if isinstance(detail, bytes) else str(detail)
    errors: dict[str, Exception] = {
        "RUN_MISSING": RunMissing(missing(run)),
        "RUN_ENDED": RunEnded(f"run {run!r} is draining: nothing new is handed out"),
        "REGRESSED": LedgerRegressed(
            f"the ledger of run {run!r} is at incarnation {seen}: Redis lost writes it had acknowledged; its trainer re-asserts them, or resumes"
        ),
        "FENCED": Fenced(f"incarnation {seen} is attached: this trainer has been replaced and must stop"),
        "SLOT_LOST": SlotLost(f"{about}: the slot expired or was given away; drop what it made"),
        "TOO_LARGE": PayloadTooLarge(f"{about}: {seen} were charged at reserve; release it as failed, and reserve with the limit its tokens allow"),
        "BAD_VERSION": DecodeError("header.trainable", f"{about}: this run never trained version {seen}"),
        "STEP_ORDER": StepOrder(seen),
        "REPLAY_GAP": ReplayGap(f"{seen}: start there, keep more with buffer.retention, or read older steps from buffer.spill"),
        "NO_CHECKPOINT": StepOrder(f"attach to {about}: not a registered checkpoint; registered are {seen}"),
        "BUDGET_TOO_SMALL": ConfigError(f"buffer.byte_budget {seen} is smaller than one group's upper bound: raise it, or lower rollout.max_new_tokens"),
    }
    raise errors.get(code, LedgerError(f"unknown refusal {code} {seen}"))


def missing(run: str) -> str:
    return f"run {run!r} does not exist in this Redis: start its trainer with --new, or correct run.name"


def identity_json(identity: RunIdentity) -> bytes:
    return orjson.dumps({name: getattr(identity, name) for name in identity.__dataclass_fields__})


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def granted(raw: bytes) -> Granted:
    return Granted(
        slots=tuple(
            Slot(
                seq=Seq(seq),
                attempt=Attempt(attempt),
                token=SlotToken(token),
                min_version=Version.parse(version),
                prompt_id=prompt,
                max_bytes=charged,
            )
            for seq, attempt, token, version, prompt, charged in orjson.loads(raw)
        )
    )


def lineage(forks: Sequence[bytes], head: int) -> Lineage:
    table = {}
    for incarnation, fork in _pairs(forks):
        parent, step, _ = fork.split(b":", 2)
        table[int(incarnation)] = Fork(int(parent), int(step))
    return Lineage(table or {0: Fork(0, 0)}, head)


def step_record(raw: bytes) -> StepRecord:
    record = orjson.loads(raw)
    forks = {int(incarnation): Fork(*fork) for incarnation, fork in record.pop("forks").items()}
    return StepRecord(lineage=Lineage(forks, record.pop("head")), **record)


def checkpoint_row(one: CheckpointRef) -> list[int | str]:
    return [one.step, one.incarnation, one.digest, one.path]


def past_step(past: PastStep, checkpoints: Sequence[CheckpointRef], gone: Collection[Seq]) -> list[str | int | bytes]:
    """Arguments of the script, after who asks."""
    chunks, rest = [], []
    for chunk in past.chunks:
        groups = [
            (h.seq, h.attempt, h.token, 0 if h.seq in gone else h.payload_bytes, {str(version): n for version, n in h.trainable.items()}, bool(h.blobs))
            for h in chunk.headers
        ]
        chunks.append((chunk.chunk, chunk.revision, chunk.record.incarnation, groups))
        rest += [record_json(chunk.record), *(encode(header) for header in chunk.headers)]
    kept = [checkpoint_row(one) for one in checkpoints if one.step == past.step]
    return [past.step, past.digest, past.incarnation, orjson.dumps(kept), orjson.dumps(chunks), *rest]


def record_json(record: StepRecord) -> bytes:
    """As `open_step` writes it."""
    fields = {name: getattr(record, name) for name in ("step", "incarnation", "groups", "chunk", "guard", "cutoff")}
    forks = {str(incarnation): list(fork) for incarnation, fork in record.lineage.forks.items()}
    return orjson.dumps(fields | {"head": record.lineage.head, "forks": forks})


def chunk(reply: Sequence[Any]) -> ChunkRecord:
    step, chunk, revision, last, record, *headers = reply
    return ChunkRecord(
        step=step,
        chunk=chunk,
        revision=revision,
        headers=tuple(decode(GroupHeader, header) for header in headers),
        last=bool(last),
        record=step_record(record),
    )


def status(reply: Sequence[Any]) -> LedgerStatus:
    flat, generating, ready, released, forks, versions, letters, to_spill, readers = reply
    fields = {name.decode(): value.decode() for name, value in _pairs(flat)}

    def number(name: str) -> int:
        return int(fields.get(name, 0))

    def by_reason(prefix: str) -> dict[Reason, int]:
        return {Reason(name.removeprefix(prefix)): int(value) for name, value in fields.items() if name.startswith(prefix) and value != "0"}

    return LedgerStatus(
        state=RunState(fields["run_state"]),
        incarnation=number("incarnation"),
        trained=number("trained"),
        next_seq=number("next_seq"),
        low_seq=number("low_seq"),
        generating=generating,
        ready=ready,
        leased=number("leased"),
        released=released,
        trained_groups=number("trained_groups"),
        dead=by_reason("dead:"),
        releases=by_reason("releases:"),
        bytes_used=number("bytes"),
        byte_budget=number("budget"),
        admission_limit=number("limit"),
        checkpoints=checkpoints(fields.get("checkpoints", "[]").encode()),
        sequence=number("sequence"),
        lineage=lineage(forks, number("incarnation")),
        ready_versions={Version.parse(version.decode()): int(tokens) for version, tokens in _pairs(versions)},
        letters=letters,
        dropped=number("dropped"),
        to_spill=to_spill,
        readers={reader.decode(): int(step) for reader, step in _pairs(readers)},
    )


def trained_step(step: int, reply: Sequence[Any]) -> TrainedStep:
    incarnation, digest, at_ms = reply
    return TrainedStep(step=step, incarnation=incarnation, digest=digest.decode(), at=int(at_ms) / 1000)


def letters(flat: Sequence[Any]) -> tuple[DeadLetter, ...]:
    return tuple(_letter(seq, orjson.loads(raw)) for seq, raw in _pairs(flat))


def _letter(seq: int, row: Mapping[str, Any]) -> DeadLetter:
    return DeadLetter(
        seq=Seq(seq),
        attempt=Attempt(row["a"]),
        reason=Reason(row["r"]),
        failures=row["f"],
        prompt_id=row.get("p"),
        why=row["w"],
        at=row["at"] / 1000,
    )


def checkpoints(raw: bytes) -> tuple[CheckpointRef, ...]:
    rows = orjson.loads(raw)
    return tuple(CheckpointRef(step=step, incarnation=incarnation, digest=digest, path=path) for step, incarnation, digest, path in rows or ())
