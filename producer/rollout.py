"""One rollout group: G single requests at once, then header and payload; a failure is a value, never the end of the producer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.blobs import BlobStore
from buffer.contract import Slot
from producer.config import GroupFilter
from producer.engine.client import Sampling
from producer.sampler import Sampled, Sampler
from producer.source import Chosen
from producer.teacher.teacher import Teacher
from protocol.arrays import Array
from protocol.codec import digest, encode_group
from protocol.errors import SampleFailed
from protocol.groups import TEACHER_LOGPROBS
from protocol.messages import BlobRef, GroupHeader, GroupTimings, Reason, RolloutGroup
from protocol.versions import Version

_LOG = logging.getLogger(__name__)
_STORE_PAUSE_S = 1.0
_LONGEST_STORE_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that is ready to be put."""

    header: GroupHeader
    payload: bytes
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A group that is not put, and why."""

    reason: Reason
    why: str
    lengths: tuple[int, ...] = ()
    """Sampled tokens of each rollout that was finished."""


class GroupMaker:
    """Makes rollout groups: G single requests at once, then header and payload."""

    def __init__(
        self,
        sampler: Sampler,
        sampling: Sampling,
        *,
        group_size: int,
        group_filter: GroupFilter,
        producer_id: str,
        owner: str,
        blobs: BlobStore | None = None,
        blob_bytes: int = 1,
        teacher: Teacher | None = None,
    ) -> None:
        """`blobs`: where extras of at least `blob_bytes` go; None: all stay in the payload. `teacher`: scores what is put."""
        self._sampler = sampler
        self._sampling = sampling
        self._group_size = group_size
        self._filter = group_filter
        self._producer_id = producer_id
        self._owner = owner
        self._blobs = blobs
        self._blob_bytes = blob_bytes
        self._teacher = teacher

    async def make(self, slot: Slot, chosen: Chosen) -> Finished | Refused:
        """The group of `slot`. One sample that fails for good fails the group and stops its siblings."""
        prompt = chosen.ids.tolist()
        rid = f"{self._owner[:8]}-{slot.seq}-{slot.attempt}"
        failure = ""
        tasks: list[asyncio.Task[Sampled]] = []
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(
                        self._sampler.sample(chosen, prompt, min_version=slot.min_version, sampling=self._sampling, rid=f"{rid}-{i}", prefix=rid),
                        name=f"producer:sample-{slot.seq}-{i}",
                    )
                    for i in range(self._group_size)
                ]
        except* SampleFailed as problems:
            failure = str(problems.exceptions[0])
        if failure:
            done = [task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
            return Refused(reason=Reason.FAILED, why=failure, lengths=_sampled(done))
        samples = [task.result() for task in tasks]
        if self._filter is GroupFilter.ZERO_VARIANCE and len({sample.reward.value for sample in samples}) == 1:
            return Refused(reason=Reason.FILTERED, why=f"all rewards are {samples[0].reward.value:g}", lengths=_sampled(samples))
        scores: dict[str, Array] = {}
        if self._teacher is not None:
            try:
                scores[TEACHER_LOGPROBS] = await self._teacher.score([sample.rollout for sample in samples])
            except SampleFailed as problem:
                return Refused(reason=Reason.FAILED, why=str(problem), lengths=_sampled(samples))
        return await self._pack(slot, chosen, samples, scores)

    async def _pack(self, slot: Slot, chosen: Chosen, samples: Sequence[Sampled], scores: Mapping[str, Array]) -> Finished | Refused:
        began = time.monotonic()
        rollouts = tuple(sample.rollout for sample in samples)
        extras = {f"{name}/{i}": array for i, sample in enumerate(samples) for name, array in sample.reward.extras.items()} | dict(scores)
        group, blobs = await self._store_large(slot, RolloutGroup(rollouts=rollouts, extras=extras), self._blob_bytes)
        payload = encode_group(group)
        if len(payload) > slot.max_bytes and group.extras:  # what a slot is charged covers the tokens
            if self._blobs is None:
                inline = sum(array.nbytes for array in extras.values())
                return Refused(
                    reason=Reason.FAILED,
                    why=f"{inline} bytes of extras do not fit into a payload of {slot.max_bytes}: set buffer.blobs",
                    lengths=_sampled(samples),
                )
            group, others = await self._store_large(slot, group, 0)
            payload, blobs = encode_group(group), {**blobs, **others}
        trainable: dict[Version, int] = {}
        for rollout in rollouts:
            for span in rollout.spans:
                trainable[span.version] = trainable.get(span.version, 0) + span.end - span.start
        header = GroupHeader(
            seq=slot.seq,
            attempt=slot.attempt,
            token=slot.token,
            prompt_id=chosen.prompt_id,
            producer_id=self._producer_id,
            group_size=self._group_size,
            lengths=tuple(len(rollout.tokens) for rollout in rollouts),
            sampled=_sampled(samples),
            trainable=trainable,
            oldest=min(trainable),
            rewards=tuple(rollout.reward for rollout in rollouts),
            payload_bytes=len(payload),
            payload_digest=digest(payload),
            created_at=time.time(),
            timings=GroupTimings(
                queue_s=max(sample.queue_s for sample in samples),
                generate_s=max(sample.generate_s for sample in samples),
                reward_s=max(sample.reward_s for sample in samples),
                encode_s=time.monotonic() - began,
            ),
            blobs=blobs,
        )
        return Finished(header=header, payload=payload, new_tokens=sum(trainable.values()))

    async def _store_large(self, slot: Slot, group: RolloutGroup, least_bytes: int) -> tuple[RolloutGroup, Mapping[str, BlobRef]]:
        """The group with its large extras durable in the blob store. While that refuses, the group waits with its slot, as it does while Redis is away; if the
        slot is lost or given back, the ledger has whatever was written deleted.
        """
        blobs, pause_s = self._blobs, _STORE_PAUSE_S
        while blobs is not None and group.extras:
            try:
                return await asyncio.to_thread(blobs.put, slot.seq, slot.attempt, slot.token, group, least_bytes=least_bytes)
            except OSError as problem:
                _LOG.warning("group %d waits for buffer.blobs (%s); trying again in %.0f s", slot.seq, problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_STORE_PAUSE_S, 2 * pause_s)
        return group, {}


def _sampled(samples: Sequence[Sampled]) -> tuple[int, ...]:
    """Tokens of each that the policy sampled."""
    return tuple(int(sample.rollout.mask.sum()) for sample in samples)
