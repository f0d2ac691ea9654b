"""What is moved: rollout groups of 8 responses of L tokens, as objects and as payload bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from buffer.contract import Slot
from protocol.codec import digest, encode_group
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Span
from protocol.versions import Version

GROUP_SIZE = 8
LENGTHS = (512, 2048, 8192)
_VERSION = Version(1, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """Groups of 8 rollouts of `tokens` tokens each: ids int32, logprobs float32, mask uint8, spans."""

    tokens: int
    groups: tuple[RolloutGroup, ...]
    payloads: tuple[bytes, ...]

    @property
    def payload_bytes(self) -> int:
        return len(self.payloads[0])


def load(tokens: int, count: int) -> Load:
    """`count` distinct groups; the same bytes in every run."""
    rng = np.random.default_rng(tokens)
    groups = tuple(_group(rng, tokens) for _ in range(count))
    return Load(tokens=tokens, groups=groups, payloads=tuple(encode_group(group) for group in groups))


def _group(rng: np.random.Generator, tokens: int) -> RolloutGroup:
    prompt = min(64, tokens // 4)
    mask = np.ones(tokens, np.uint8)
    mask[:prompt] = 0
    middle = (prompt + tokens) // 2
    spans = (Span(version=_VERSION, start=prompt, end=middle), Span(version=_VERSION, start=middle, end=tokens))
    return RolloutGroup(
        rollouts=tuple(
            Rollout(
                tokens=rng.integers(0, 150_000, tokens, dtype=np.int32),
                mask=mask,
                logprobs=-rng.random(tokens, dtype=np.float32),
                spans=spans,
                reward=float(rng.integers(0, 2)),
            )
            for _ in range(GROUP_SIZE)
        )
    )


def header_of(slot: Slot, group: RolloutGroup, payload: bytes) -> GroupHeader:
    """The header a producer would write."""
    lengths = tuple(len(rollout.tokens) for rollout in group.rollouts)
    trained = sum(span.end - span.start for rollout in group.rollouts for span in rollout.spans)
    return GroupHeader(
        seq=slot.seq,
        attempt=slot.attempt,
        token=slot.token,
        prompt_id="train.jsonl:17",
        producer_id="producer-0",
        group_size=len(lengths),
        lengths=lengths,
        trainable={_VERSION: trained},
        oldest=_VERSION,
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )


def tiny(slot: Slot, size: int = 256, *, version: Version = _VERSION) -> tuple[GroupHeader, bytes]:
    """A header with a payload of `size` bytes, for what counts groups and not bytes."""
    payload = slot.token.encode().ljust(size, b".")
    empty = RolloutGroup(rollouts=())
    header = header_of(slot, empty, payload)
    return dataclasses.replace(header, group_size=1, lengths=(32,), trainable={version: 16}, oldest=version, rewards=(1.0,)), payload


def use(groups: Iterable[tuple[GroupHeader, RolloutGroup]]) -> None:
    """What a reader does at the least: every rollout is looked at, which makes the ones that are made on first look."""
    for _, group in groups:
        list(group.rollouts)
