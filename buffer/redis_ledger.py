"""The ledger on Redis: every operation is one Lua script, so it happens whole or not at all.

Cost is O(log n) in the backlog: sorted sets order READY groups, retries and deadlines, hashes hold the records, and what one call sweeps or frees is
bounded.
All state shares the run's hash tag; payloads are keys of their own (rule P1).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import orjson
from redis.exceptions import NoScriptError

from buffer.config import BufferConfig
from buffer.contract import (
    Attachment,
    Blocked,
    CheckpointRef,
    ChunkRecord,
    Granted,
    LedgerStatus,
    PutResult,
    RunState,
    Slot,
    StepRecord,
    TrainedReply,
)
from buffer.payloads import check_payload
from protocol.codec import decode, encode
from protocol.connection import Client, Script, asking
from protocol.errors import (
    ConfigError,
    DecodeError,
    Fenced,
    LedgerError,
    PayloadTooLarge,
    RunEnded,
    RunMissing,
    SlotLost,
    StepOrder,
)
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Attempt, Edge, GroupHeader, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Fork, Lineage, Version

PAYLOAD_TTL_S = 120
"""A payload whose put never reached the ledger expires after this; the script that follows it in the same round trip makes it stay."""
_PUT_TRIES = 3
_MIN_KEEP = 2
_OWN_KEYS = (
    "groups",
    "headers",
    "ready",
    "retry",
    "deadlines",
    "steps",
    "chunks",
    "digests",
    "requests",
    "request_times",
    "ready_versions",
)


def _script(name: str, flags: str = "") -> Script:
    return Script("buffer", f"lua/{name}.lua", prelude=("lua/common.lua",), flags=flags)


_DRAINS = "allow-oom"
"""Scripts that work at maxmemory: they are how memory comes free, or let finished work through; what each adds is small and bounded (rule L1).
The payload's SET and `reserve` are what a full server refuses."""
_READS = "no-writes"
_CREATE = _script("create")
_RESERVE = _script("reserve")
_BIND = _script("bind", _DRAINS)
_RENEW = _script("renew", _DRAINS)
_PUT = _script("put", _DRAINS)
_PUT_SHA = hashlib.sha1(_PUT.source.encode(), usedforsecurity=False).hexdigest()
_RELEASE = _script("release", _DRAINS)
_ATTACH = _script("attach", _DRAINS)
_OPEN_STEP = _script("open_step", _DRAINS)
_LEASE = _script("lease", _DRAINS)
_PAYLOAD_LOST = _script("payload_lost", _DRAINS)
_TRAINED = _script("trained", _DRAINS)
_CHECKPOINT = _script("checkpoint", _DRAINS)
_DRAIN = _script("drain", _DRAINS)
_STATUS = _script("status", _DRAINS)
_JOURNAL = _script("journal", _READS)


class RedisLedger:
    """Satisfies `buffer.contract.Ledger`. Holds no state of the run; any number of processes use their own."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._run = keys
        self._keys = [keys.state, keys.forks, keys.audit, keys.routable, *(keys.key(name) for name in _OWN_KEYS)]
        self._head: list[str | bytes] = [keys.wakeups, keys.payload(0, 0, "").removesuffix("0:0:")]

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        fields: dict[str, str | float] = {
            "groups_per_step": settings.groups_per_step,
            "chunk": settings.chunk,
            "limit": settings.admission_limit,
            "on_policy": int(settings.pipeline_depth == 0),
            "max_staleness": settings.max_staleness,
            "guard": settings.staleness_guard.value,
            "min_kept_share": settings.min_kept_share,
            "budget": settings.byte_budget,
            "retention": settings.retention,
            "slot_ms": int(settings.slot_seconds * 1000),
            "max_attempts": settings.max_attempts,
        }
        flat = [item for pair in fields.items() for item in pair]
        reply = await self._call(_CREATE, _identity_json(identity), settings.model_dump_json(), *flat)
        return bool(reply[0])

    async def join(self, identity: RunIdentity) -> BufferConfig:
        with asking("join"):
            raw = await self._client.hmget(self._run.state, ["identity", "settings"])
        if raw[0] is None or raw[1] is None:
            raise RunMissing(_missing(self._run.run))
        RunIdentity.read(raw[0], run=self._run.run).check(identity, run=self._run.run)
        settings = orjson.loads(raw[1])
        return BufferConfig.model_validate({name: value for name, value in settings.items() if name in BufferConfig.model_fields})

    # producers --------------------------------------------------------------------------------------------------------------

    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int) -> Granted | Blocked:
        if n < 1 or max_bytes < 1:
            raise ValueError(f"reserve of {n} slots of {max_bytes} bytes: both must be at least 1")
        tokens = [secrets.token_hex(8) for _ in range(n)]
        reply = await self._call(_RESERVE, owner, request_id, n, max_bytes, *tokens)
        if isinstance(reply, Blocked):
            return reply
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
                for seq, attempt, token, version, prompt, charged in orjson.loads(reply[0])
            )
        )

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        reply = await self._call(_BIND, seq, token, prompt_id, about=f"group {seq}")
        return cast("bytes", reply[0]).decode()

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:  # noqa: ARG002 - a slot token says more than its owner's name
        return tuple(Seq(seq) for seq in await self._call(_RENEW, *(item for slot in slots for item in slot)))

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        if len(payload) != header.payload_bytes:
            raise ValueError(f"group {header.seq}: header says {header.payload_bytes} bytes, the payload has {len(payload)}")
        key = self._run.payload(header.seq, header.attempt, header.token)
        args: list[str | int | bytes] = [
            header.seq,
            header.attempt,
            header.token,
            header.payload_bytes,
            encode(header),
            orjson.dumps({str(version): tokens for version, tokens in header.trainable.items()}),
            header.producer_id,
            orjson.dumps(header.rewards),
        ]
        for _ in range(_PUT_TRIES):
            reply = await self._set_and_call(key, payload, args)
            if reply[0] != b"PAYLOAD_MISSING":  # it expired between the two: both again
                return PutResult(self._read(reply, f"group {header.seq}, {header.payload_bytes} bytes")[0].decode())
        raise SlotLost(f"group {header.seq}: something else than its {header.payload_bytes} bytes lies under its token; drop the group")

    async def release(self, seq: Seq, token: SlotToken, reason: Reason) -> None:
        if reason not in (Reason.FAILED, Reason.FILTERED, Reason.GIVEN_BACK):
            raise ValueError(f"a producer releases a slot as failed, filtered or given_back, not {reason}")
        await self._call(_RELEASE, seq, token, reason.value, about=f"group {seq}")

    # trainer ----------------------------------------------------------------------------------------------------------------

    async def attach(self, checkpoint: CheckpointRef | None, *, trainer_id: str) -> Attachment:
        incarnation_id = secrets.token_hex(8)
        at: list[str | int] = [] if checkpoint is None else [checkpoint.step, checkpoint.incarnation, checkpoint.digest, checkpoint.path]
        reply = await self._call(_ATTACH, incarnation_id, trainer_id, *at, about="the starting weights" if checkpoint is None else str(checkpoint))
        incarnation, step, forks = reply
        return Attachment(incarnation=incarnation, incarnation_id=incarnation_id, resume_step=step, lineage=_lineage(forks, incarnation))

    async def open_step(self, incarnation: int, step: int) -> StepRecord:
        return _step_record((await self._call(_OPEN_STEP, incarnation, step))[0])

    async def lease(self, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        reply = await self._call(_LEASE, incarnation, step, chunk)
        return reply if isinstance(reply, Blocked) else _chunk(reply)

    async def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        reply = await self._call(_PAYLOAD_LOST, incarnation, step, chunk, seq)
        return reply if isinstance(reply, Blocked) else _chunk(reply)

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue]) -> TrainedReply:
        trained, forks, wanted = await self._call(_TRAINED, incarnation, step, digest, orjson.dumps(dict(stats)))
        return TrainedReply(trained=trained, lineage=_lineage(forks, incarnation), checkpoint_wanted=bool(wanted))

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        keep = max(_MIN_KEEP, keep)
        reply = await self._call(_CHECKPOINT, incarnation, checkpoint.step, checkpoint.incarnation, checkpoint.digest, checkpoint.path, keep)
        return _checkpoints(reply[0])

    async def drain(self, incarnation: int, reason: str) -> None:
        await self._call(_DRAIN, incarnation, reason)

    async def payload(self, header: GroupHeader) -> bytes:
        return (await self.payloads((header,)))[0]

    async def payloads(self, headers: Sequence[GroupHeader]) -> tuple[bytes, ...]:
        if not headers:
            return ()
        with asking("payloads"):
            found = cast("list[bytes | None]", await self._client.mget([self._run.payload(h.seq, h.attempt, h.token) for h in headers]))
        return tuple(check_payload(header, data) for header, data in zip(headers, found, strict=True))

    async def step_record(self, step: int) -> StepRecord | None:
        records, _ = await self._call(_JOURNAL, step, step)
        return _step_record(records[0]) if records else None

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        _, chunks = await self._call(_JOURNAL, first_step, last_step)
        return tuple(_chunk(chunk[1:]) for chunk in chunks)

    async def status(self) -> LedgerStatus:
        flat, generating, ready, released, forks, versions = await self._call(_STATUS)
        fields = {name.decode(): value.decode() for name, value in _pairs(flat)}

        def number(name: str) -> int:
            return int(fields.get(name, 0))

        def by_reason(prefix: str) -> dict[Reason, int]:
            return {Reason(name.removeprefix(prefix)): int(value) for name, value in fields.items() if name.startswith(prefix)}

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
            checkpoints=_checkpoints(fields.get("checkpoints", "[]").encode()),
            lineage=_lineage(forks, number("incarnation")),
            ready_versions={Version.parse(version.decode()): int(tokens) for version, tokens in _pairs(versions)},
        )

    async def delete_run(self) -> int:
        """Delete every key of the run, payloads and those of other packages too; the number deleted. For a run that has ended: walks the key space."""
        deleted = 0
        with asking("delete_run"):
            for pattern in (self._run.key("*"), f"{self._head[1]!s}*"):
                async for key in self._client.scan_iter(match=pattern.replace("[", r"\["), count=1000):
                    deleted += await self._client.unlink(key)
        return deleted

    # the wire ---------------------------------------------------------------------------------------------------------------

    async def _call(self, script: Script, *args: str | float | bytes, about: str = "") -> Any:
        return self._read(await script(self._client, keys=self._keys, args=[*self._head, *args]), about)

    async def _set_and_call(self, key: str, payload: bytes, args: Sequence[str | int | bytes]) -> Any:
        """SET and the put script in one round trip."""
        keys, argv = [*self._keys, key], [*self._head, *args]
        with asking("put"):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.set(key, payload, nx=True, px=PAYLOAD_TTL_S * 1000)
                pipe.evalsha(_PUT_SHA, len(keys), *keys, *argv)
                stored, reply = await pipe.execute(raise_on_error=False)
            if isinstance(stored, Exception):
                raise stored
            if isinstance(reply, NoScriptError):
                return await _PUT(self._client, keys=keys, args=argv)
            if isinstance(reply, Exception):
                raise reply
        return reply

    def _read(self, reply: Any, about: str) -> Any:
        code, *rest = reply
        if code == b"OK":
            return rest
        if code != b"BLOCKED":
            refuse(code.decode(), rest[0] if rest else None, about, self._run.run)
        return Blocked(edge=Edge(rest[0].decode()))


def refuse(code: str, detail: Any, about: str, run: str) -> NoReturn:
    """The error a refusal of the ledger stands for."""
    seen = detail.decode() if isinstance(detail, bytes) else str(detail)
    errors: dict[str, Exception] = {
        "RUN_MISSING": RunMissing(_missing(run)),
        "RUN_ENDED": RunEnded(f"run {run!r} is draining: nothing new is handed out"),
        "FENCED": Fenced(f"incarnation {seen} is attached: this trainer has been replaced and must stop"),
        "SLOT_LOST": SlotLost(f"{about}: the slot expired or was given away; drop what it made"),
        "TOO_LARGE": PayloadTooLarge(f"{about}: {seen} were charged at reserve; release it as failed, and reserve with the limit its tokens allow"),
        "BAD_VERSION": DecodeError("header.trainable", f"{about}: this run never trained version {seen}"),
        "STEP_ORDER": StepOrder(seen),
        "NO_CHECKPOINT": StepOrder(f"attach to {about}: not a registered checkpoint; registered are {seen}"),
        "BUDGET_TOO_SMALL": ConfigError(f"buffer.byte_budget {seen} is smaller than one group's upper bound: raise it, or lower rollout.max_new_tokens"),
    }
    raise errors.get(code, LedgerError(f"unknown refusal {code} {seen}"))


def _missing(run: str) -> str:
    return f"run {run!r} does not exist in this Redis: start its trainer with --new, or correct run.name"


def _identity_json(identity: RunIdentity) -> bytes:
    return orjson.dumps({name: getattr(identity, name) for name in identity.__dataclass_fields__})


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _lineage(forks: Sequence[bytes], head: int) -> Lineage:
    table = {}
    for incarnation, fork in _pairs(forks):
        parent, step, _ = fork.split(b":", 2)
        table[int(incarnation)] = Fork(int(parent), int(step))
    return Lineage(table or {0: Fork(0, 0)}, head)


def _step_record(raw: bytes) -> StepRecord:
    record = orjson.loads(raw)
    forks = {int(incarnation): Fork(*fork) for incarnation, fork in record.pop("forks").items()}
    return StepRecord(lineage=Lineage(forks, record.pop("head")), **record)


def _chunk(reply: Sequence[Any]) -> ChunkRecord:
    step, chunk, revision, last, record, *headers = reply
    return ChunkRecord(
        step=step,
        chunk=chunk,
        revision=revision,
        headers=tuple(decode(GroupHeader, header) for header in headers),
        last=bool(last),
        record=_step_record(record),
    )


def _checkpoints(raw: bytes) -> tuple[CheckpointRef, ...]:
    rows = orjson.loads(raw)
    return tuple(CheckpointRef(step=step, incarnation=incarnation, digest=digest, path=path) for step, incarnation, digest, path in rows or ())
