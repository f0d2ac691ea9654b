"""One rollout group: G single requests at once, then header and payload; a failure is a value, never the end of the producer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from buffer.contract import Slot
from producer.config import GroupFilter
from producer.engine.client import Sampling
from producer.sampler import Sampled, Sampler
from producer.source import Chosen
from protocol.codec import digest, encode_group
from protocol.errors import SampleFailed
from protocol.messages import GroupHeader, GroupTimings, Reason, RolloutGroup
from protocol.versions import Version


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


class GroupMaker:
    """Makes rollout groups: G single requests at once, then header and payload."""

    def __init__(self, sampler: Sampler, sampling: Sampling, *, group_size: int, group_filter: GroupFilter, producer_id: str, owner: str) -> None:
        self._sampler = sampler
        self._sampling = sampling
        self._group_size = group_size
        self._filter = group_filter
        self._producer_id = producer_id
        self._owner = owner

    async def make(self, slot: Slot, chosen: Chosen) -> Finished | Refused:
        """The group of `slot`. One sample that fails for good fails the group and stops its siblings."""
        prompt = chosen.ids.tolist()
        rid = f"{self._owner[:8]}-{slot.seq}-{slot.attempt}"
        failure = ""
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(
                        self._sampler.sample(chosen, prompt, min_version=slot.min_version, sampling=self._sampling, rid=f"{rid}-{i}"),
                        name=f"producer:sample-{slot.seq}-{i}",
                    )
                    for i in range(self._group_size)
                ]
        except* SampleFailed as problems:
            failure = str(problems.exceptions[0])
        if failure:
            return Refused(reason=Reason.FAILED, why=failure)
        samples = [task.result() for task in tasks]
        if self._filter is GroupFilter.ZERO_VARIANCE and len({sample.reward.value for sample in samples}) == 1:
            return Refused(reason=Reason.FILTERED, why=f"all rewards are {samples[0].reward.value:g}")
        return self._pack(slot, chosen, samples)

    def _pack(self, slot: Slot, chosen: Chosen, samples: Sequence[Sampled]) -> Finished:
        began = time.monotonic()
        rollouts = tuple(sample.rollout for sample in samples)
        payload = encode_group(RolloutGroup(rollouts=rollouts))
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
        )
        return Finished(header=header, payload=payload, new_tokens=sum(trainable.values()))
