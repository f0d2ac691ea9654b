from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.contract import StepRecord
from buffer.staleness import accepts, kept_tokens, token_mask
from protocol.messages import Attempt, GroupHeader, Rollout, RolloutGroup, Seq, SlotToken, Span
from protocol.versions import Fork, Lineage, Version

LINE = Lineage({1: Fork(0, 0), 2: Fork(1, 7)}, head=2)


def record(step: int, bound: int, guard: str = "mask", lineage: Lineage = LINE) -> StepRecord:
    return StepRecord(step=step, incarnation=lineage.head, groups=4, chunk=2, guard=guard, cutoff=step - 1 - bound, lineage=lineage)


def rollout(*spans: tuple[Version, int], prompt: int = 2) -> Rollout:
    """A prompt, then for each span so many tokens of its version."""
    total = prompt + sum(count for _, count in spans)
    mask = np.ones(total, dtype=np.uint8)
    mask[:prompt] = 0
    made, at = [], prompt
    for version, count in spans:
        made.append(Span(version=version, start=at, end=at + count))
        at += count
    return Rollout(tokens=np.zeros(total, np.int32), mask=mask, logprobs=np.zeros(total, np.float32), spans=tuple(made), reward=0.0)


def header(group: RolloutGroup) -> GroupHeader:
    trainable: dict[Version, int] = {}
    for one in group.rollouts:
        for span in one.spans:
            trainable[span.version] = trainable.get(span.version, 0) + int(one.mask[span.start : span.end].sum())
    return GroupHeader(
        seq=Seq(0), attempt=Attempt(1), token=SlotToken("t"), prompt_id="", producer_id="", group_size=len(group.rollouts), lengths=(),
        trainable=trainable, oldest=min(trainable), rewards=(), payload_bytes=0, payload_digest="",
    )  # fmt: skip


def test_tokens_over_k_leave_the_loss_and_the_rest_stays() -> None:
    group = RolloutGroup(rollouts=(rollout((Version(1, 9), 3), (Version(2, 8), 2), (Version(2, 10), 1)), rollout((Version(2, 10), 2))))
    (mask, ages), (other, other_ages) = token_mask(group, record(11, bound=2))
    assert ages.tolist() == [0, 0, 3, 3, 3, 2, 2, 0]
    assert mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (other.tolist(), other_ages.tolist()) == ([0, 0, 1, 1], [0, 0, 0, 0])
    assert mask.dtype == np.uint8
    assert ages.dtype == np.int32
    (all_of_it, _), _ = token_mask(group, record(11, bound=2, guard="correct"))
    assert all_of_it.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_token_from_the_future_is_a_bug_and_never_clipped() -> None:
    group = RolloutGroup(rollouts=(rollout((Version(2, 11), 1)),))
    with pytest.raises(ValueError, match="staleness -1"):
        token_mask(group, record(11, bound=8))
    with pytest.raises(ValueError, match="staleness -1"):
        accepts(header(group), record(11, bound=8), min_kept_share=0.5)


@pytest.mark.parametrize(
    ("guard", "counts", "taken"),
    [
        ("mask", {Version(2, 7): 51, Version(2, 10): 49}, False),
        ("mask", {Version(2, 7): 50, Version(2, 10): 50}, True),
        ("mask", {}, True),
        ("drop", {Version(2, 7): 1, Version(2, 10): 99}, False),
        ("drop", {Version(2, 8): 1, Version(2, 10): 99}, True),
        ("correct", {Version(1, 0): 100}, True),
    ],
)
def test_what_the_guard_takes(guard: str, counts: dict[Version, int], taken: bool) -> None:
    group = RolloutGroup(rollouts=(rollout(*counts.items()),))
    found = header(group) if counts else GroupHeader(
        seq=Seq(0), attempt=Attempt(1), token=SlotToken("t"), prompt_id="", producer_id="", group_size=1, lengths=(), trainable={}, oldest=Version(0, 0),
        rewards=(), payload_bytes=0, payload_digest="",
    )  # fmt: skip
    assert accepts(found, record(11, bound=2, guard=guard), min_kept_share=0.5) is taken


versions = st.one_of(st.tuples(st.just(1), st.integers(0, 12)), st.tuples(st.just(2), st.integers(7, 10))).map(lambda pair: Version(*pair))
rollouts = st.lists(st.tuples(versions, st.integers(1, 5)), min_size=1, max_size=6).map(lambda spans: rollout(*spans))


@given(st.lists(rollouts, min_size=1, max_size=4), st.integers(0, 12), st.sampled_from(["mask", "drop"]))
def test_no_token_over_k_enters_a_loss_and_header_and_mask_agree(parts: list[Rollout], bound: int, guard: str) -> None:
    group, step = RolloutGroup(rollouts=tuple(parts)), record(11, bound, guard)
    kept = 0
    for mask, ages in token_mask(group, step):
        assert not np.any((mask == 1) & (ages > bound))
        kept += int(mask.sum())
    assert kept == kept_tokens(header(group), step)
