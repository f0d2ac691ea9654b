"""The ledger on Redis: every operation is one Lua script, so it happens whole or not at all.

Cost is O(log n) in the backlog: sorted sets order READY groups, retries and deadlines, hashes hold the records, and what one call sweeps or frees is
bounded.
All state shares the run's hash tag; payloads are keys of their own (rule P1).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import orjson

from buffer import redis_replies
from buffer.config import BufferConfig
from buffer.contract import (
    WHY_CHARS,
    Attachment,
    Blocked,
    CheckpointRef,
    ChunkRecord,
    DeadLetter,
    Granted,
    History,
    LedgerStatus,
    PutResult,
    StepRecord,
    TrainedReply,
    TrainedStep,
)
from buffer.durability import Durability
from buffer.ledger_rebuild import covered_step
from buffer.payloads import check_payload
from buffer.policy import Policy
from buffer.redis_put import PutPath, PutRequest
from buffer.scripts import ledger_script
from protocol.codec import decode, encode
from protocol.connection import Client, Script, asking
from protocol.errors import (
    LedgerRegressed,
    RunMissing,
    SlotLost,
)
from protocol.failpoints import Failpoint, failpoint
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Attempt, Edge, GroupHeader, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Version

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
    "ends",
    "letters",
    "letter_seqs",
    "letter_times",
    "readers",
    "doomed_blobs",
)
_CLUSTER_KEYS = ("to_persist", "doomed")
FORKED_KEYS = tuple(name for name in _OWN_KEYS if name not in ("requests", "request_times", "readers", "doomed_blobs"))
"""What a fork takes along, besides state and forks: no answers to requests and no readers, which are of the other run."""
_SWEEP_LIMIT = 256

_DRAINS = "allow-oom"
"""Scripts that work at maxmemory: they are how memory comes free, or let finished work through; what each adds is small and bounded (rule L1).
The payload's SET and `reserve` are what a full server refuses."""
_READS = "no-writes"
_CREATE = ledger_script("create", around="answer")
_RESERVE = ledger_script("reserve")
_BIND = ledger_script("bind", _DRAINS)
_RENEW = ledger_script("renew", _DRAINS)
_PUT = ledger_script("put", _DRAINS)
_RELEASE = ledger_script("release", _DRAINS)
_ATTACH = ledger_script("attach", _DRAINS)
_OPEN_STEP = ledger_script("open_step", _DRAINS, around="fence")
_LEASE = ledger_script("lease", _DRAINS, around="fence")
_PAYLOAD_LOST = ledger_script("payload_lost", _DRAINS, around="fence")
_TRAINED = ledger_script("trained", _DRAINS, around="fence")
_CHECKPOINT = ledger_script("checkpoint", _DRAINS, around="fence")
_REASSERT_BEGIN, _REASSERT_STEP, _REASSERT_END = (ledger_script(f"reassert_{part}", _DRAINS) for part in ("begin", "step", "end"))
_DRAIN = ledger_script("drain", _DRAINS, around="fence")
_STATUS = ledger_script("status", _DRAINS, around="answer")
_JOURNAL = ledger_script("journal", _READS, around="answer")
_ENDED = ledger_script("ended", _READS, around="answer")
_SET_ASIDE = ledger_script("set_aside", _DRAINS, around="fence")
_SPILLABLE = ledger_script("spillable", _READS, around="answer")
_SPILLED = ledger_script("spilled", _DRAINS, around="fence")
_DEAD_LETTERS = ledger_script("dead_letters", _READS, around="answer")
_REQUEUE = ledger_script("requeue")
_READY = ledger_script("ready", _READS, around="answer")
_FOLLOW = ledger_script("follow", _DRAINS, around="answer")
_SWEEP = ledger_script("sweep", _DRAINS)
_SWEPT = ledger_script("swept", _DRAINS, around="answer")


@dataclass(slots=True)
class _Attached:
    """What a trainer of this process remembers of its calls (rule R1)."""

    incarnation_id: str = ""
    seen: int = 0
    """Sequence of its last acknowledged call."""


class RedisLedger:
    """Satisfies `buffer.contract.Ledger`. Holds no state of the run but how far it has seen it come; any number of processes use their own.

    Calls of an attached trainer go one after the other, so that each presents what the one before was answered. One object makes all of them.
    `cluster`: payloads lie in other slots than the ledger. A put is then SET, script, PERSIST, and `sweep` finishes what a process that died left (rule P1).
    None: as the server says. `durable` is waited for after an attachment, a checkpoint and a re-assertion.
    """

    def __init__(self, client: Client, keys: Keys, *, cluster: bool | None = None, durable: Durability | None = None) -> None:
        self._client = client
        self._run = keys
        self._cluster = cluster
        self._durable = durable
        self._names: list[str] = []
        self._head: list[str | bytes] = [keys.wakeups, keys.payload(0, 0, "").removesuffix("0:0:")]
        self._puts = PutPath(client, _PUT, keys=self._keys, head=self._head, acknowledge=self._acknowledge)
        self._sequence = 0
        self._attached: dict[int, _Attached] = {}
        self._turn = asyncio.Lock()

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        fields: dict[str, str | float] = {
            "groups_per_step": settings.groups_per_step,
            "chunk": settings.chunk,
            "limit": settings.admission_limit,
            "on_policy": int(settings.pipeline_depth == 0),
            "max_staleness": settings.max_staleness,
            "guard": Policy(settings).guard.value,
            "selection": settings.selection.value,
            "min_kept_share": settings.min_kept_share,
            "budget": settings.byte_budget,
            "retention": settings.retention,
            "retention_bytes": settings.retention_bytes,
            "retention_ms": int(settings.retention_seconds * 1000),
            "spill": int(bool(settings.spill)),
            "blobs": int(bool(settings.blobs)),
            "slot_ms": int(settings.slot_seconds * 1000),
            "max_attempts": settings.max_attempts,
        }
        flat = [item for pair in fields.items() for item in pair]
        reply = await self._call(_CREATE, redis_replies.identity_json(identity), settings.model_dump_json(), *flat)
        return bool(reply[0])

    async def join(self, identity: RunIdentity) -> BufferConfig:
        of_run, settings = await self.about()
        of_run.check(identity, run=self._run.run)
        return settings

    async def about(self) -> tuple[RunIdentity, BufferConfig]:
        """What the run was created with, for who looks at it and joins nothing. Raises: `RunMissing`."""
        with asking("join"):
            raw = await self._client.hmget(self._run.state, ["identity", "settings"])
        if raw[0] is None or raw[1] is None:
            raise RunMissing(redis_replies.missing(self._run.run))
        settings = orjson.loads(raw[1])
        known = {name: value for name, value in settings.items() if name in BufferConfig.model_fields}
        return RunIdentity.read(raw[0], run=self._run.run), BufferConfig.model_validate(known)

    # producers --------------------------------------------------------------------------------------------------------------

    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int, served: Version | None = None) -> Granted | Blocked:
        if n < 1 or max_bytes < 1:
            raise ValueError(f"reserve of {n} slots of {max_bytes} bytes: both must be at least 1")
        tokens = [secrets.token_hex(8) for _ in range(n)]
        reply = await self._owned(_RESERVE, owner, request_id, n, max_bytes, "" if served is None else str(served), *tokens)
        if isinstance(reply, Blocked):
            return reply
        return redis_replies.granted(reply[0])

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        reply = await self._owned(_BIND, seq, token, prompt_id, about=f"group {seq}")
        return cast("bytes", reply[0]).decode()

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:  # noqa: ARG002 - a slot token says more than its owner's name
        return tuple(Seq(seq) for seq in await self._owned(_RENEW, *(item for slot in slots for item in slot)))

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        if len(payload) != header.payload_bytes:
            raise ValueError(f"group {header.seq}: header says {header.payload_bytes} bytes, the payload has {len(payload)}")
        tokens = {str(version): count for version, count in header.trainable.items()}
        event = {
            "seq": header.seq,
            "attempt": header.attempt,
            "producer_id": header.producer_id,
            "bytes": header.payload_bytes,
            "tokens": tokens,
            "rewards": header.rewards,
            "lengths": header.sampled,
        }
        group = (
            header.seq,
            header.attempt,
            header.token,
            header.payload_bytes,
            encode(header),
            tokens,
            orjson.dumps(event)[:-1],  # the ledger adds what only it knows
            bool(header.blobs),
        )
        known = self._sequence
        send = self._puts.cluster if await self._on_cluster() else self._puts.one_server
        request = PutRequest(key=self._run.payload(header.seq, header.attempt, header.token), payload=payload, group=msgpack.packb(group, use_bin_type=False))
        for _ in range(_PUT_TRIES):
            reply = await send(request)
            if reply[1][0] != b"PAYLOAD_MISSING":  # it expired between the two: both again
                about = f"group {header.seq}, {header.payload_bytes} bytes"
                return PutResult(self._read(reply, about, known, owner=True)[0].decode())
        raise SlotLost(f"group {header.seq}: something else than its {header.payload_bytes} bytes lies under its token; drop the group")

    async def release(self, seq: Seq, token: SlotToken, reason: Reason, *, why: str = "", lengths: Sequence[int] = ()) -> None:
        if reason not in (Reason.FAILED, Reason.FILTERED, Reason.GIVEN_BACK):
            raise ValueError(f"a producer releases a slot as failed, filtered or given_back, not {reason}")
        await self._owned(_RELEASE, seq, token, reason.value, why[:WHY_CHARS], orjson.dumps(list(lengths)) if lengths else "", about=f"group {seq}")

    # trainer ----------------------------------------------------------------------------------------------------------------

    async def attach(self, checkpoint: CheckpointRef | None, *, trainer_id: str, abandon: Sequence[Seq] | None = None, above: int = 0) -> Attachment:
        incarnation_id = secrets.token_hex(8)
        given_up = "" if abandon is None else orjson.dumps(list(abandon))
        at: list[str | int] = [] if checkpoint is None else [checkpoint.step, checkpoint.incarnation, checkpoint.digest, checkpoint.path]
        reply = await self._send(_ATTACH, incarnation_id, trainer_id, above, given_up, *at)
        incarnation, step, forks = self._read(reply, "the starting weights" if checkpoint is None else str(checkpoint), 0)
        self._attached[incarnation] = _Attached(incarnation_id, reply[0])
        await self._last(f"the attachment of incarnation {incarnation}")
        return Attachment(incarnation=incarnation, incarnation_id=incarnation_id, resume_step=step, lineage=redis_replies.lineage(forks, incarnation))

    async def open_step(self, incarnation: int, step: int) -> StepRecord:
        return redis_replies.step_record((await self._fenced(_OPEN_STEP, incarnation, step))[0])

    async def lease(self, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        reply = await self._fenced(_LEASE, incarnation, step, chunk)
        return reply if isinstance(reply, Blocked) else redis_replies.chunk(reply)

    async def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        reply = await self._fenced(_PAYLOAD_LOST, incarnation, step, chunk, seq)
        return reply if isinstance(reply, Blocked) else redis_replies.chunk(reply)

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue]) -> TrainedReply:
        trained, forks, wanted = await self._fenced(_TRAINED, incarnation, step, digest, orjson.dumps(dict(stats)))
        return TrainedReply(trained=trained, lineage=redis_replies.lineage(forks, incarnation), checkpoint_wanted=bool(wanted))

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        keep = max(_MIN_KEEP, keep)
        reply = await self._fenced(_CHECKPOINT, incarnation, checkpoint.step, checkpoint.incarnation, checkpoint.digest, checkpoint.path, keep)
        await self._last(f"the checkpoint of step {checkpoint.step}")
        return redis_replies.checkpoints(reply[0])

    async def reassert(self, incarnation: int, incarnation_id: str, history: History) -> None:
        async with self._turn:
            await self._reassert(incarnation, incarnation_id, history)
        await self._last("what was re-asserted")

    async def _reassert(self, incarnation: int, incarnation_id: str, history: History) -> None:
        """One script a step, in order; after each the ledger is whole."""
        me, seen = (incarnation, incarnation_id), (self._attached.get(incarnation) or _Attached()).seen
        dropped = (await self.status()).dropped
        steps = [past for past in history.steps if past.step > dropped]
        (covered,) = await self._call(
            _REASSERT_BEGIN,
            *me,
            orjson.dumps({str(one): fork for one, fork in history.incarnations.items()}),
            covered_step(history),
            orjson.dumps([(past.step, past.seqs, past.incarnation, past.digest) for past in steps]),
            orjson.dumps([redis_replies.checkpoint_row(one) for one in history.checkpoints]),
            seen,
        )
        for past in steps:
            failpoint(Failpoint.TRAINER_REASSERTING)
            if past.step > covered:
                gone = await self._gone([header for chunk in past.chunks for header in chunk.headers]) if await self._on_cluster() else ()
                await self._call(_REASSERT_STEP, *me, *redis_replies.past_step(past, history.checkpoints, gone))
        reply = await self._send(_REASSERT_END, *me, seen)
        self._read(reply, "", 0)
        self._attached[incarnation] = _Attached(incarnation_id, reply[0])

    async def _gone(self, headers: Sequence[GroupHeader]) -> list[Seq]:
        """Those whose payloads are not there: on a cluster no script can see them."""
        with asking("reassert"):
            sizes = await asyncio.gather(*(self._client.strlen(self._run.payload(h.seq, h.attempt, h.token)) for h in headers))
        return [header.seq for header, size in zip(headers, sizes, strict=True) if size != header.payload_bytes]

    async def drain(self, incarnation: int, reason: str) -> None:
        await self._fenced(_DRAIN, incarnation, reason)

    async def set_aside(self, incarnation: int, groups: Sequence[tuple[Seq, SlotToken]], *, lost: bool = False) -> int:
        reason = Reason.PAYLOAD_LOST if lost else Reason.RECORDED
        return int((await self._fenced(_SET_ASIDE, incarnation, reason, *(item for group in groups for item in group)))[0])

    async def spillable(self, limit: int) -> tuple[int, ...]:
        return tuple(await self._call(_SPILLABLE, limit))

    async def spilled(self, incarnation: int, step: int) -> None:
        await self._fenced(_SPILLED, incarnation, step)

    # people and readers -----------------------------------------------------------------------------------------------------

    async def dead_letters(self, after: Seq, count: int) -> tuple[DeadLetter, ...]:
        return redis_replies.letters(await self._call(_DEAD_LETTERS, after, count))

    async def requeue(self, seqs: Sequence[Seq]) -> tuple[Seq, ...]:
        return tuple(Seq(seq) for seq in await self._call(_REQUEUE, *seqs))

    async def ready(self, count: int) -> tuple[GroupHeader, ...]:
        return tuple(decode(GroupHeader, header) for header in await self._call(_READY, count))

    async def follow(self, reader: str, step: int, *, ttl_s: float) -> int:
        return int((await self._call(_FOLLOW, reader, step, int(ttl_s * 1000)))[0])

    async def sweep(self, delete_blobs: Callable[[Seq, Attempt, SlotToken], Awaitable[None]] | None = None) -> int:
        stays, goes, blobs = await self._call(_SWEEP, _SWEEP_LIMIT, int(delete_blobs is not None))
        with asking("sweep"):
            await asyncio.gather(*(self._client.persist(self._payload_key(name)) for name in stays))
            await asyncio.gather(*(self._client.unlink(self._payload_key(name)) for name in goes))
        if delete_blobs is not None:
            for name in blobs:
                seq, attempt, token = name.decode().split(":", 2)
                await delete_blobs(Seq(int(seq)), Attempt(int(attempt)), SlotToken(token))
        if done := len(stays) + len(goes) + len(blobs):
            await self._call(_SWEPT, *stays, "", *goes, "", *blobs)
        return done

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
        return redis_replies.step_record(records[0]) if records else None

    async def trained_step(self, step: int) -> TrainedStep | None:
        reply = await self._call(_ENDED, step)
        return redis_replies.trained_step(step, reply) if reply else None

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        _, chunks = await self._call(_JOURNAL, first_step, last_step)
        return tuple(redis_replies.chunk(chunk[1:]) for chunk in chunks)

    async def status(self) -> LedgerStatus:
        return redis_replies.status(await self._call(_STATUS))

    async def delete_run(self) -> int:
        """Delete every key of the run, payloads and those of other packages too; the number deleted. Walks the key space. The state goes first: whoever is
        still alive in the run is told that it is gone, and makes no key of the ledger again.
        """
        with asking("delete_run"):
            deleted = int(await self._client.unlink(self._run.state))
            for pattern in (self._run.key("*"), f"{self._head[1]!s}*"):
                async for key in self._client.scan_iter(match=pattern.replace("[", r"\["), count=1000):
                    deleted += await self._client.unlink(key)
        return deleted

    async def _last(self, what: str) -> None:
        if self._durable is not None:
            await self._durable(what)

    # the wire ---------------------------------------------------------------------------------------------------------------

    async def _on_cluster(self) -> bool:
        if self._cluster is None:
            with asking("ledger"):
                self._cluster = await self._client.is_cluster()
        return self._cluster

    async def _keys(self) -> list[str]:
        """What scripts are given, in their order."""
        if not self._names:
            keys, own = self._run, (*_OWN_KEYS, *(_CLUSTER_KEYS if await self._on_cluster() else ()))
            self._names = [keys.state, keys.forks, keys.audit, keys.routable, *(keys.key(name) for name in own)]
        return self._names

    async def _send(self, script: Script, *args: str | float | bytes) -> Any:
        return await script(self._client, keys=await self._keys(), args=[*self._head, *args])

    async def _call(self, script: Script, *args: str | float | bytes, about: str = "") -> Any:
        known = self._sequence
        return self._read(await self._send(script, *args), about, known)

    async def _owned(self, script: Script, *args: str | float | bytes, about: str = "") -> Any:
        """A call of a slot's owner. Raises: `LedgerRegressed`, once, if the ledger's number fell; asked again, the call goes through."""
        known = self._sequence
        return self._read(await self._send(script, *args), about, known, owner=True)

    async def _fenced(self, script: Script, incarnation: int, *args: str | float | bytes) -> Any:
        """A call of an attached trainer."""
        async with self._turn:
            me = self._attached.get(incarnation) or _Attached()
            reply = await self._send(script, incarnation, *args, me.incarnation_id, me.seen)
            if reply[1][0] not in (b"FENCED", b"REGRESSED"):
                me.seen = max(me.seen, reply[0])
        return self._read(reply, f"incarnation {incarnation}", 0)

    async def _acknowledge(self, payload_key: str) -> None:
        """A payload of our own is permanent: nobody need sweep it."""
        await self._call(_SWEPT, payload_key.removeprefix(str(self._head[1])))

    def _payload_key(self, name: bytes) -> str:
        return f"{self._head[1]!s}{name.decode()}"

    def _read(self, reply: Any, about: str, known: int, *, owner: bool = False) -> Any:
        """What the ledger answered. `known` is the newest sequence number this process had seen when it asked."""
        sequence, (code, *rest) = reply
        if code != b"RUN_MISSING":
            if owner and sequence <= known:  # the call itself was counted
                self._sequence = sequence
                raise LedgerRegressed(f"run {self._run.run!r} is at change {sequence}, {known} was seen: Redis lost writes it had acknowledged; ask again")
            self._sequence = max(self._sequence, sequence)
        if code == b"OK":
            return rest
        if code != b"BLOCKED":
            redis_replies.refuse(code.decode(), rest[0] if rest else None, about, self._run.run)
        return Blocked(edge=Edge(rest[0].decode()))
