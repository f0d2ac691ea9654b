"""`rl-producer`: joins a run, generates and rewards rollout groups, and stops in good order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from buffer.client import ProducerBuffer
from buffer.config import BufferConfig
from buffer.contract import Ledger
from buffer.redis_ledger import RedisLedger
from buffer.storage import open_storage
from buffer.watchdog import EdgeLog
from producer.config import ProducerDaemonConfig, RolloutOnlyConfig
from producer.draft import Decode
from producer.election import Election
from producer.engine.client import EngineClient, Sampling, open_session
from producer.engine.key import admin_key, engine_key
from producer.evaluation import Evaluation
from producer.held_out import HeldOut, read_held_out
from producer.loop import BEAT_S, ProducerLoop
from producer.outage import through_outage
from producer.pinning import Pinning
from producer.pool import EnginePool
from producer.rewards import Grader, make_grader
from producer.rollout import GroupMaker
from producer.rollout_only import Owner
from producer.sampler import Sampler
from producer.source import PromptSet, PromptSource, read_rows
from producer.stopping import unless
from producer.teacher.config import teacher_key
from producer.teacher.scoring import spread
from producer.teacher.teacher import Teacher
from producer.template import PromptEncoder
from producer.work import GroupWork
from protocol.config import load
from protocol.connection import Client, check_server, connect
from protocol.daemon import arguments, run_daemon
from protocol.errors import RedisUnavailable, RunMissing
from protocol.groups import TEACHER_BYTES, payload_bound
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys
from protocol.messages import Edge, ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.registry import Registry

_LOG = logging.getLogger(__name__)
_LEAVE_S = 1.0


def main() -> int:
    parser = arguments("rl-producer", "Generates and rewards rollout groups for a run, until the run ends or SIGTERM.")
    parser.add_argument("--index", type=int, default=None, metavar="I", help="call this producer producer-I in status and metrics")
    parser.add_argument("--rollout-only", metavar="WHERE", help="without a trainer: make the run, record its groups in this folder or URL, train nothing")
    parser.add_argument("--groups", type=int, metavar="N", help="with --rollout-only: end once the run has recorded N groups, over restarts")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run producer.count producers, or the one of --index, as actors on a Ray cluster; default: ray.address, else auto",
    )
    options = parser.parse_args()
    if options.groups is not None and (options.rollout_only is None or options.groups < 1):
        parser.error("--groups goes with --rollout-only, and is at least 1")
    if options.ray is None:
        return run_daemon("rl-producer", lambda stop: produce(options, stop))
    if options.rollout_only is not None:
        parser.error("--rollout-only makes a run of its own, on one machine: leave out --ray")
    from producer.ray_fleet import produce_on_ray

    return run_daemon("rl-producer --ray", lambda stop: produce_on_ray(options, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that can be checked without Redis, checked."""

    identity: RunIdentity
    grader: Grader
    prompts: PromptSet
    held_out: tuple[HeldOut, ...]
    decode: Decode
    tokens: Mapping[int, str]
    """What some of the vocabulary are called: a teacher must call them so too."""


def prepare(config: ProducerDaemonConfig) -> Prepared:
    """Read and validate model folder, reward and data. Raises: `ConfigError` naming file, line or key."""
    config.teacher.check(config.rollout)
    identity = identify(config.run, config.model, config.data, config.rollout)
    grader = make_grader(config.reward)
    rows = read_rows("data.path", config.data.path, config.data, label_fault=grader.label_fault)
    encoder = PromptEncoder(config.model.path)
    most = config.rollout.max_prompt_tokens
    prompts = PromptSet("data.path", config.data.path, rows, encoder, max_tokens=most)
    held_out = read_held_out(config.eval, config.data, grader=grader, encoder=encoder, max_tokens=most)
    tokens = {token: encoder.decode([token], special=True) for token in spread(encoder.decode.vocabulary)}
    return Prepared(identity=identity, grader=grader, prompts=prompts, held_out=held_out, decode=encoder.decode, tokens=tokens)


async def produce(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """The daemon's body: check everything, reach Redis, wait for the run, join it, work until `stop` or the end of the run.

    Raises: `ConfigError` before anything is written; `RedisUnavailable` when Redis stays away later.
    """
    alone = load(RolloutOnlyConfig, options.config, sets=options.set) if options.rollout_only is not None else None
    config = alone or load(ProducerDaemonConfig, options.config, sets=options.set)
    keys = Keys(config.run.name)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        prepared = await asyncio.to_thread(prepare, config)
        facts = await check_server(client, url=config.redis.url)
        _LOG.info("redis %s: %s", facts.version, facts.durability)
        here = _here(options.index)
        async with wakeups(client, keys) as waker:
            member = _Member(config, prepared=prepared, here=here, client=client, keys=keys, waker=waker)
            if alone is None:
                await member.run(stop)
            else:
                owner = Owner(alone, identity=prepared.identity, client=client, keys=keys, waker=waker)
                await owner.run(stop, member.run, where=options.rollout_only, groups=options.groups)
    finally:
        await client.aclose()


def _here(index: int | None) -> ProducerStatus:
    host, pid = socket.gethostname(), os.getpid()
    return ProducerStatus(producer_id=f"{host}-{pid}" if index is None else f"producer-{index}", host=host, pid=pid)


class _Member:
    """A producer on its way into a run."""

    def __init__(self, config: ProducerDaemonConfig, *, prepared: Prepared, here: ProducerStatus, client: Client, keys: Keys, waker: Wakeups) -> None:
        self._config = config
        self._prepared = prepared
        self._here = here
        self._client = client
        self._keys = keys
        self._wakeups = waker
        self._presence = Presence(client, keys, "producer", ProducerStatus)

    async def run(self, stop: asyncio.Event) -> None:
        ledger = RedisLedger(self._client, self._keys)
        settings: BufferConfig | None = None

        async def join() -> None:
            nonlocal settings
            settings = await self._join(ledger)

        await unless(stop, join(), name="producer:join")
        if settings is not None:
            async with open_session() as session:
                await self._work(stop, ledger, settings, session)

    async def _join(self, ledger: Ledger) -> BufferConfig:
        """Settings of the run, once it exists (edge `no run`). Raises: `IdentityMismatch`."""
        since = time.time()
        waiting = False
        stalls = EdgeLog(_LOG, "joining", self._config.run.stall_seconds)
        try:
            while True:
                mark = self._wakeups.mark(Topic.RUN)
                try:
                    return await through_outage(lambda: ledger.join(self._prepared.identity), deadline_s=self._config.redis.deadline_s)
                except RunMissing as problem:
                    told, waiting, missing = waiting, True, str(problem)
                await self._presence.beat(self._here.producer_id, dataclasses.replace(self._here, waiting_for=Edge.NO_RUN, waiting_since=since))
                if not told:
                    _LOG.info("waiting: %s", missing)
                stalls.see(Edge.NO_RUN, since, time.time())
                await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=BEAT_S)
        except BaseException:
            if waiting:
                with contextlib.suppress(RedisUnavailable, TimeoutError):  # then it expires
                    async with asyncio.timeout(_LEAVE_S):
                        await self._presence.leave(self._here.producer_id)
            raise

    async def _work(self, stop: asyncio.Event, ledger: Ledger, settings: BufferConfig, session: aiohttp.ClientSession) -> None:
        config, prepared, owner = self._config, self._prepared, secrets.token_hex(8)
        deadline_s = config.redis.deadline_s
        teacher = Teacher(session, config.teacher, texts=prepared.tokens, key=teacher_key()) if config.teacher.urls else None
        if teacher is not None:
            await teacher.check()
        loop = ProducerLoop(
            config.producer,
            self._here,
            presence=self._presence,
            slot_s=settings.slot_seconds,
            redis_deadline_s=deadline_s,
            stall_s=config.run.stall_seconds,
            teacher=teacher,
        )
        client = EngineClient(session, engine_key(), admin_key=admin_key(), stream=config.producer.stream, progress_s=config.producer.progress_seconds)
        pool = EnginePool(
            Registry(self._client, self._keys),
            ledger,
            self._wakeups,
            deadline_s=deadline_s,
            router_url=config.producer.router_url,
            on_status=loop.on_status,
            on_engines=client.progress.heard,
        )
        sampler = Sampler(pool=pool, client=client, grader=prepared.grader, config=config.producer, decode=prepared.decode)
        rollout = config.rollout
        sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, stop=rollout.stop)
        blobs = open_storage(settings, config.run.name).blobs
        if blobs is not None:
            await asyncio.to_thread(blobs.check)
        maker = GroupMaker(
            sampler,
            sampling,
            group_size=rollout.group_size,
            group_filter=config.producer.filter,
            producer_id=self._here.producer_id,
            owner=owner,
            blobs=blobs,
            blob_bytes=settings.blob_bytes,
            teacher=teacher,
        )
        work = GroupWork(
            ProducerBuffer(ledger, self._wakeups, owner),
            PromptSource(prepared.prompts, seed=config.run.seed),
            maker,
            max_inflight=config.producer.max_inflight_groups,
            max_bytes=payload_bound(
                group_size=rollout.group_size,
                prompt_tokens=prepared.prompts.longest,
                new_tokens=rollout.max_new_tokens,
                extra_bytes=TEACHER_BYTES if teacher is not None else 0,
            ),
            redis_deadline_s=deadline_s,
            closing=loop.closing,
            on_run_ended=loop.on_run_ended,
        )
        evaluation = None
        if prepared.held_out:
            evaluation = Evaluation(
                config.eval,
                prepared.held_out,
                sampler=sampler,
                sampling=dataclasses.replace(sampling, temperature=0.0, max_new_tokens=config.eval.max_new_tokens or rollout.max_new_tokens),
                pinning=Pinning(
                    self._client,
                    self._keys,
                    holder=self._here.producer_id,
                    ledger=ledger,
                    pool=pool,
                    wakeups=self._wakeups,
                    separate=config.eval.engines > 0,
                    redis_deadline_s=deadline_s,
                ),
                election=Election(self._client, self._keys, every_s=config.eval.every_seconds),
                wakeups=self._wakeups,
                producer_id=self._here.producer_id,
                redis_deadline_s=deadline_s,
            )
        _LOG.info("%s joined run %s: %d prompts, G = %d", self._here.producer_id, self._keys.run, len(prepared.prompts), rollout.group_size)
        await loop.run(stop, ledger=ledger, pool=pool, work=work, sampler=sampler, evaluation=evaluation)


if __name__ == "__main__":
    sys.exit(main())
