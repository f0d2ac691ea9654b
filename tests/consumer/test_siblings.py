"""What is laid from the columns of payloads is, bit by bit, what plain loops over rollouts and their spans give."""

from __future__ import annotations

import doctest
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.bias import length_bucket
from buffer.contract import StepRecord
from consumer import siblings as siblings_module
from consumer.advantages import ADVANTAGES, Advantage, group_std
from consumer.batch import ChunkBatch, collate
from consumer.losses.config import Normaliser
from consumer.siblings import positions, taken
from protocol.arrays import pack
from protocol.codec import decode_group, encode_group
from protocol.errors import RollstreamError
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Seq, Span
from protocol.versions import Fork, Lineage, Version

STEP = 9
LINEAGE = Lineage({1: Fork(0, 0), 2: Fork(1, 5), 3: Fork(2, 7)}, head=3)
VERSIONS = st.sampled_from([Version(1, 0), Version(1, 3), Version(1, 6), Version(2, 6), Version(2, 8), Version(3, 7), Version(3, 8)])
MAX_NEW_TOKENS = 7
Part = tuple[Version | None, list[int]]


@st.composite
def rollouts(draw: st.DrawFn, prompt: list[int], holes: bool) -> Rollout:
    """A prompt, then parts: of one version, all of it sampled or with holes in the mask, or context that no span covers. Perhaps nothing at all."""
    bits = st.integers(0, 1) if holes else st.just(1)
    parts: list[Part] = draw(st.lists(st.tuples(st.none() | VERSIONS, st.lists(bits, min_size=1, max_size=6)), max_size=12))
    spans: list[Span] = []
    mask = [0] * len(prompt)
    for version, part in parts:
        if version is not None:
            spans.append(Span(version=version, start=len(mask), end=len(mask) + len(part)))
        mask += part if version is not None else [0] * len(part)
    tokens = prompt + draw(st.lists(st.integers(0, 3), min_size=len(mask) - len(prompt), max_size=len(mask) - len(prompt)))
    logprobs = draw(st.lists(st.floats(-9, 0, width=32), min_size=len(mask), max_size=len(mask)))
    return Rollout(
        tokens=np.array(tokens, dtype=np.int32),
        mask=np.array(mask, dtype=np.uint8),
        logprobs=np.array(logprobs, dtype=np.float32),
        spans=tuple(spans),
        reward=draw(st.sampled_from([0.0, 0.25, 1.0])),
    )


@st.composite
def chunks(draw: st.DrawFn) -> list[RolloutGroup]:
    """Up to 4 groups, of one size or each of its own: siblings may have failed, even all of them."""
    sizes, found = draw(st.sampled_from([st.just(draw(st.integers(1, 4))), st.integers(0, 4)])), []
    for _ in range(draw(st.integers(0, 4))):
        prompt, holes = draw(st.lists(st.integers(0, 3), min_size=draw(st.sampled_from([0, 1, 1, 1])), max_size=4)), draw(st.booleans())
        siblings = [prompt if draw(st.integers(0, 5)) else prompt[::-1] for _ in range(draw(sizes))]
        found.append(RolloutGroup(rollouts=tuple(draw(rollouts(one, holes)) for one in siblings)))
    return found


def as_made(group: RolloutGroup, _: int) -> RolloutGroup:
    return group


def as_read(group: RolloutGroup, _: int) -> RolloutGroup:
    return decode_group(encode_group(group))


def with_spans_in_another_order(group: RolloutGroup, seed: int) -> RolloutGroup:
    """A payload may have the spans of its rollouts mixed; only those of one rollout ascend."""
    rows = [(i, span.version.incarnation, span.version.n, span.start, span.end) for i, one in enumerate(group.rollouts) for span in one.spans]
    place = np.random.default_rng(seed).permutation(len(group.rollouts))
    rows.sort(key=lambda row: (row[3], place[row[0]]))
    body = msgpack.unpackb(encode_group(group)) | {"spans": pack(np.array(rows, dtype="<i4").reshape(-1, 5))}
    return decode_group(cast("bytes", msgpack.packb(body)))


def header(seq: int, group: RolloutGroup) -> GroupHeader:
    trainable: Counter[Version] = Counter()
    for one in group.rollouts:
        for span in one.spans:
            trainable[span.version] += int(one.mask[span.start : span.end].sum())
    found = {version: count for version, count in trainable.items() if count}
    return GroupHeader(
        seq=Seq(seq),
        attempt=cast("Any", 1),
        token=cast("Any", "t"),
        prompt_id="",
        producer_id="",
        group_size=len(group.rollouts),
        lengths=tuple(len(one.tokens) for one in group.rollouts),
        trainable=found,
        oldest=min(found, default=Version(3, 8)),
        rewards=tuple(one.reward for one in group.rollouts),
        payload_bytes=0,
        payload_digest="",
    )


def by_rollouts(
    record: StepRecord, groups: Sequence[tuple[GroupHeader, RolloutGroup]], advantage: Advantage, normaliser: Normaliser = "token_mean"
) -> dict[str, Any]:
    """All that `collate` promises, by plain loops."""
    ages_in_loss, masked_ages, lengths, masked_lengths = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    oldest, laid, divisor = record.step - 1 - record.cutoff, [], 0.0
    rewards = [one.reward for _, group in groups for one in group.rollouts]
    sizes = [len(group.rollouts) for _, group in groups]
    values = iter(advantage(np.array(rewards, dtype=np.float64), np.cumsum([0, *sizes])))
    for head, group in groups:
        starts, targets, behaviour, weights = [0], list[int](), list[Any](), list[Any]()
        stretches, token_weights = list[tuple[int, int]](), list[float]()
        for one, weight in zip(group.rollouts, values, strict=False):
            ages = np.zeros(len(one.tokens), dtype=np.int32)
            for span in one.spans:
                ages[span.start : span.end] = record.lineage.staleness(span.version, record.step)
            bucket = length_bucket(int(one.mask.sum()))
            before = len(targets)
            for t in np.flatnonzero(one.mask).tolist():
                kept = record.guard == "correct" or ages[t] <= oldest
                (ages_in_loss if kept else masked_ages)[int(ages[t])] += 1
                (lengths if kept else masked_lengths)[bucket] += 1
                if kept:
                    targets.append(starts[-1] + t)
                    behaviour.append(one.logprobs[t])
                    weights.append(weight)
            for span in one.spans:
                count, age = int(one.mask[span.start : span.end].sum()), record.lineage.staleness(span.version, record.step)
                stretches += [(count, age)] if count and (record.guard == "correct" or age <= oldest) else []
            count = len(targets) - before
            token_weights.append(1 / count if count else 1.0)
            divisor += {"token_mean": count, "rollout_mean": count > 0, "constant": MAX_NEW_TOKENS}[normaliser]
            starts.append(starts[-1] + len(one.tokens))
        if set(starts[:-1]) & set(targets):
            raise RollstreamError(f"group {head.seq}: the first token of a rollout is trainable, but nothing predicts it; a prompt has at least one token")
        prefix = min((next((t for t, bit in enumerate(one.mask) if bit), len(one.mask)) for one in group.rollouts), default=0)
        alike = len({tuple(one.tokens[:prefix].tolist()) for one in group.rollouts}) == 1
        laid.append(
            {
                "tokens": np.concatenate([np.zeros(0, dtype=np.int32), *(one.tokens for one in group.rollouts)]),
                "starts": np.array(starts, dtype=np.int64),
                "targets": np.array(targets, dtype=np.int64),
                "behaviour": np.array(behaviour, dtype=np.float32),
                "advantage": np.array(weights, dtype=np.float32),
                "prefix": prefix if alike else 0,
                "weight": np.array(token_weights, dtype=np.float32) if normaliser == "rollout_mean" else None,
                "stretches": np.array(stretches, dtype=np.int64).reshape(-1, 2).T,
                "teacher": None,
            }
        )
    trainable = sum(int(one.mask.sum()) for _, group in groups for one in group.rollouts)
    return {
        "groups": laid,
        "seqs": tuple(head.seq for head, _ in groups),
        "rewards": tuple(rewards),
        "tokens": sum(ages_in_loss.values()),
        "masked": trainable - sum(ages_in_loss.values()),
        "staleness": dict(sorted(ages_in_loss.items())),
        "group_staleness": dict(sorted(Counter(record.lineage.staleness(head.oldest, record.step) for head, _ in groups).items())),
        "masked_staleness": dict(sorted(masked_ages.items())),
        "lengths": dict(sorted(lengths.items())),
        "masked_lengths": dict(sorted(masked_lengths.items())),
        "response_tokens": trainable,
        "divisor": float(divisor),
    }


def told(batch: ChunkBatch) -> dict[str, Any]:
    found = {name: getattr(batch, name) for name in ChunkBatch.__dataclass_fields__}
    names = ("tokens", "starts", "targets", "behaviour", "advantage", "prefix", "weight", "stretches", "teacher")
    return found | {"groups": [{name: getattr(one, name) for name in names} for one in batch.groups]}


def bits(value: Any) -> Any:
    """Comparable, to the bit, the type and the order."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, bits(one)) for key, one in value.items()]
    return [bits(one) for one in value] if isinstance(value, list) else (type(value), value)


@pytest.mark.parametrize("form", [as_made, as_read, with_spans_in_another_order])
@given(
    groups=chunks(),
    guard=st.sampled_from(["mask", "drop", "correct"]),
    bound=st.integers(0, 9),
    advantage=st.sampled_from(list(ADVANTAGES.values())),
    normaliser=st.sampled_from(["token_mean", "rollout_mean", "constant"]),
    seed=st.integers(0, 9),
)
def test_a_chunk_is_what_loops_over_its_rollouts_give(
    form: Callable[..., RolloutGroup], groups: list[RolloutGroup], guard: str, bound: int, advantage: Advantage, normaliser: Any, seed: int
) -> None:
    record = StepRecord(step=STEP, incarnation=1, groups=4, chunk=4, guard=guard, cutoff=STEP - 1 - bound, lineage=LINEAGE)
    plain = [(header(seq, group), group) for seq, group in enumerate(groups)]
    formed = [(head, form(group, seed)) for head, group in plain]
    try:
        expected = by_rollouts(record, plain, advantage, normaliser)
    except RollstreamError as problem:
        with pytest.raises(RollstreamError, match=re.escape(str(problem))):
            collate(record, formed, advantage)
        return
    found = told(collate(record, formed, advantage, normaliser=normaliser, max_new_tokens=MAX_NEW_TOKENS))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bits(found[name]) == bits(value), name


def test_a_token_from_the_future_is_a_bug_and_not_trained(make_record: Callable[..., StepRecord]) -> None:
    one = Rollout(
        tokens=np.arange(3, dtype=np.int32),
        mask=np.array([0, 1, 1], dtype=np.uint8),
        logprobs=np.zeros(3, dtype=np.float32),
        spans=(Span(version=Version(1, 4), start=1, end=3),),
        reward=1.0,
    )
    group = RolloutGroup(rollouts=(one,))
    with pytest.raises(ValueError, match=r"token of version 1:4 used in step 2"):
        collate(make_record(step=2), [(header(0, group), decode_group(encode_group(group)))], group_std)


def test_no_rollout_of_a_payload_becomes_an_object(make_record: Callable[..., StepRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rollout(
        tokens=np.arange(3, dtype=np.int32),
        mask=np.array([0, 1, 1], dtype=np.uint8),
        logprobs=np.zeros(3, dtype=np.float32),
        spans=(Span(version=Version(1, 0), start=1, end=3),),
        reward=1.0,
    )
    group = RolloutGroup(rollouts=(one, one))
    read = decode_group(encode_group(group))

    def never(_: object) -> None:
        raise AssertionError("a rollout was made")

    monkeypatch.setattr(type(read.rollouts), "_make", never)
    assert collate(make_record(), [(header(0, group), read)], group_std).tokens == 4
    with pytest.raises(AssertionError):
        read.rollouts[0]


@given(st.lists(st.integers(0, 99), unique=True).map(sorted))
def test_runs_name_the_places_they_were_made_of(places: list[int]) -> None:
    runs = siblings_module._joined(np.array(places, dtype=np.int64))
    assert positions(runs).tolist() == places
    assert (runs[0, 1:] > runs[1, :-1]).all(), "runs that touch are one"


@pytest.mark.parametrize("places", [[], [3], [3, 4, 5], [0, 2, 3, 9], list(range(0, 60, 2))])
def test_what_stands_in_runs_is_taken_from_any_address(places: list[int]) -> None:
    values = np.frombuffer(b"x" + np.arange(100, 170, dtype=np.float32).tobytes(), dtype=np.float32, offset=1)
    assert taken(values, siblings_module._joined(np.array(places, dtype=np.int64))).tolist() == [100.0 + place for place in places]


def test_examples_hold() -> None:
    assert doctest.testmod(siblings_module).failed == 0
