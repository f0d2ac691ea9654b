"""Groups to micro-batches: the mask is the guard's, nothing over K passes, nothing is lost or trimmed, whatever the cut."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer.contract import StepRecord
from consumer import siblings as siblings_module
from consumer.advantages import group_mean, group_std
from consumer.batch import ChunkBatch, collate, empty_micro_batch, micro_batches
from protocol.codec import decode_group, encode_group
from protocol.errors import RollstreamError
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Span
from protocol.versions import Version

Record = Callable[..., StepRecord]


def random_group(seq: int, header_of: Callable[..., GroupHeader], *, size: int = 3, newest: int = 4) -> tuple[GroupHeader, RolloutGroup]:
    """Ragged siblings of one prompt, with context in the middle (a tool's answer) and a version change in every response."""
    rng = random.Random(seq)
    prompt = [rng.randrange(50) for _ in range(rng.randint(1, 6))]
    rollouts = []
    for _ in range(size):
        length = rng.randint(1, 9)
        tokens = np.array(prompt + [rng.randrange(50) for _ in range(length)], dtype=np.int32)
        mask = np.array([0] * len(prompt) + [int(rng.random() < 0.8) for _ in range(length)], dtype=np.uint8)
        mask[-1] = 1
        cut = rng.randint(len(prompt), len(tokens))
        old, new = sorted(rng.randint(0, newest) for _ in range(2))
        spans = tuple(Span(version=Version(1, n), start=start, end=end) for n, start, end in ((old, len(prompt), cut), (new, cut, len(tokens))) if start < end)
        logprobs = np.where(mask, np.array([-rng.random() for _ in tokens]), 0).astype(np.float32)
        rollouts.append(Rollout(tokens=tokens, mask=mask, logprobs=logprobs, spans=spans, reward=rng.random()))
    group = RolloutGroup(rollouts=tuple(rollouts))
    header = header_of(group, seq=seq, attempt=1, token="t", payload=encode_group(group))
    return dataclasses.replace(header, trainable={v: n for v, n in header.trainable.items() if n}), group


def expected_entries(groups: list[tuple[GroupHeader, RolloutGroup]], record: StepRecord) -> list[tuple[Any, ...]]:
    """(context before it, token, behaviour, advantage, weight in the mean over rollouts, age) of every token in the loss, by plain loops."""
    entries = []
    for _, group in groups:
        mean = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
        for rollout in group.rollouts:
            inside = [
                (t, record.step - 1 - span.version.n)
                for span in rollout.spans
                for t in range(span.start, span.end)
                if rollout.mask[t] and span.version.n >= record.cutoff
            ]
            for t, age in inside:
                context = tuple(rollout.tokens[:t].tolist())
                told = (round(rollout.reward - mean, 5), round(1 / len(inside), 5), age)
                entries.append((context, int(rollout.tokens[t]), float(rollout.logprobs[t]), *told))
    return sorted(entries)


def laid_entries(batch: ChunkBatch, *, max_tokens: int, share: bool) -> list[tuple[Any, ...]]:
    """The same, read back from the micro-batches: the context is what attention and positions let the predicting column see."""
    entries = []
    for part in micro_batches(batch, max_tokens=max_tokens, share_prompts=share):
        first, last = part.columns
        rows, columns = np.divmod(part.logit_index, last - first)
        assert part.logit_index.dtype == part.targets.dtype == np.int64  # as torch indexes
        per_token = zip(part.targets, part.behaviour, part.advantage, part.weight, part.age, strict=True)
        contexts = list[tuple[Any, ...]]()
        for row, column, (token, behaviour, advantage, weight, age) in zip(rows, columns + first, per_token, strict=True):
            if part.attention is None or part.position_ids is None:
                context = part.input_ids[row, : column + 1]
            else:
                seen = np.flatnonzero(part.attention[row, 0, column])
                assert part.position_ids[row, seen].tolist() == list(range(len(seen)))
                context = part.input_ids[row, seen]
            contexts.append(tuple(context.tolist()))
            entries.append((contexts[-1], int(token), float(behaviour), round(float(advantage), 5), round(float(weight), 5), int(age)))
        check_rollouts(part.rollout.tolist(), [(*context, int(token)) for context, token in zip(contexts, part.targets, strict=True)])
    return sorted(entries)


def check_rollouts(rollout: list[int], read: list[tuple[Any, ...]]) -> None:
    """`read` ends with the token: within a rollout each token's goes on from the one before it, and rollouts are numbered without gaps."""
    assert [one for one, _ in itertools.groupby(rollout)] == list(range(max(rollout) + 1))
    for (one, before), (other, after) in itertools.pairwise(zip(rollout, read, strict=True)):
        if one == other:
            assert len(after) > len(before)
            assert after[: len(before)] == before


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_every_token_in_the_loss_is_laid_once_with_its_own_context(make_record: Record, header_of: Callable[..., GroupHeader], share: bool, max_tokens: int):
    record = make_record(step=6, bound=3)
    groups = [random_group(seq, header_of, size=1 + seq % 4) for seq in range(40)]  # siblings may have failed
    batch = collate(record, groups, group_mean, normaliser="rollout_mean")
    expected = expected_entries(groups, record)
    assert batch.tokens == len(expected)
    assert batch.masked > 0
    assert laid_entries(batch, max_tokens=max_tokens, share=share) == expected


@pytest.mark.parametrize("offset", range(4))
def test_groups_are_trained_from_their_payloads_at_any_address(make_record: Record, header_of: Callable[..., GroupHeader], offset: int):
    """Nothing of a payload is copied before there are micro-batches, and they are the same bytes."""
    record, groups = make_record(step=6, bound=3), [random_group(seq, header_of) for seq in range(20)]
    payloads = [bytes(offset) + encode_group(group) for _, group in groups]
    decoded = [decode_group(memoryview(payload)[offset:]) for payload in payloads]
    batch = collate(record, [(header, group) for (header, _), group in zip(groups, decoded, strict=True)], group_mean)
    for payload, group in zip(payloads, batch.groups, strict=True):
        whole = np.frombuffer(payload, dtype=np.uint8)
        assert np.shares_memory(whole, group.tokens)
        assert np.shares_memory(whole, group.logprobs)
    expected = collate(record, groups, group_mean)
    for share in (False, True):
        both = (micro_batches(one, max_tokens=40, share_prompts=share) for one in (batch, expected))
        for part, other in zip(*both, strict=True):
            for name in ("input_ids", "logit_index", "targets", "behaviour", "advantage", "weight", "rollout", "age"):
                mine, its = getattr(part, name), getattr(other, name)
                assert (mine.dtype, mine.tobytes()) == (its.dtype, its.tobytes())
                assert mine.flags.aligned


def test_the_counts_are_those_of_the_tokens(make_record: Record, header_of: Callable[..., GroupHeader]):
    record = make_record(step=6, bound=3)
    groups = [random_group(seq, header_of) for seq in range(40)]
    batch = collate(record, groups, group_std)
    assert max(batch.staleness) <= 3
    assert sum(batch.staleness.values()) == batch.tokens
    assert batch.tokens + batch.masked == batch.response_tokens == sum(int(r.mask.sum()) for _, g in groups for r in g.rollouts)
    assert sum(batch.group_staleness.values()) == 40
    assert batch.seqs == tuple(range(40))
    assert batch.rewards == tuple(rollout.reward for _, group in groups for rollout in group.rollouts)


def test_a_guard_that_lets_an_old_token_through_stops_the_trainer(make_record: Record, header_of: Callable[..., GroupHeader], monkeypatch: pytest.MonkeyPatch):
    record = make_record(step=6, bound=3)

    def broken(versions: list[Version], _: StepRecord) -> list[tuple[int, bool]]:
        return [(4, True) for _ in versions]

    monkeypatch.setattr(siblings_module, "judge", broken)
    groups = [random_group(7, header_of)]
    with pytest.raises(RollstreamError, match=r"group 7: a token of staleness 4 .* the bound is 3"):
        collate(record, groups, group_std)
    assert collate(dataclasses.replace(record, guard="correct"), groups, group_std).staleness.keys() == {4}


def test_groups_that_cannot_be_trained_are_named(make_record: Record, header_of: Callable[..., GroupHeader]):
    header, group = random_group(3, header_of)
    first = group.rollouts[0]
    bare = dataclasses.replace(first, mask=np.ones_like(first.mask), spans=(Span(version=Version(1, 0), start=0, end=len(first.tokens)),))
    with pytest.raises(RollstreamError, match=r"group 3: the first token of a rollout is trainable"):
        collate(make_record(step=6), [(header, RolloutGroup(rollouts=(bare, *group.rollouts[1:])))], group_std)


def test_a_chunk_with_only_holes_is_empty(make_record: Record):
    batch = collate(make_record(), [], group_std)
    assert (batch.tokens, batch.seqs) == (0, ())
    assert list(micro_batches(batch, max_tokens=10, share_prompts=True)) == []


def test_a_sibling_that_is_all_prompt_shares_a_row_and_adds_nothing(make_record: Record, header_of: Callable[..., GroupHeader]):
    """It failed before its first token."""
    header, group = random_group(5, header_of)
    prompt = int(np.flatnonzero(group.rollouts[0].mask)[0])
    one = group.rollouts[0]
    bare = dataclasses.replace(one, tokens=one.tokens[:prompt], mask=one.mask[:prompt], logprobs=one.logprobs[:prompt], spans=())
    other = RolloutGroup(rollouts=(bare, *group.rollouts[1:]))
    batch = collate(make_record(step=6), [(header, other)], group_mean, normaliser="rollout_mean")
    (part,) = micro_batches(batch, max_tokens=10_000, share_prompts=True)
    assert part.attention is not None
    expected = expected_entries([(header, other)], make_record(step=6))
    assert expected == laid_entries(batch, max_tokens=10_000, share=True) == laid_entries(batch, max_tokens=10_000, share=False)


def test_an_empty_micro_batch_has_a_token_and_none_in_the_loss():
    part = empty_micro_batch()
    assert part.input_ids.shape == (1, 1)
    assert {len(getattr(part, name)) for name in ("logit_index", "targets", "behaviour", "advantage", "weight", "rollout", "age")} == {0}


@pytest.mark.parametrize("values", [[0.0], [0.0, float("nan"), 1.0], [[0.0], [0.0], [0.0]]])
def test_an_advantage_that_is_not_one_number_a_rollout_is_refused(make_record: Record, header_of: Callable[..., GroupHeader], values: list[Any]):
    with pytest.raises(RollstreamError, match=r"trainer\.advantage gave"):
        collate(make_record(step=6), [random_group(1, header_of)], lambda *_: np.array(values, dtype=np.float32))


def test_siblings_with_different_prompts_or_long_ones_take_a_row_each(make_record: Record, header_of: Callable[..., GroupHeader]):
    header, group = random_group(5, header_of)
    changed = group.rollouts[0].tokens.copy()
    changed[0] += 1
    other = RolloutGroup(rollouts=(dataclasses.replace(group.rollouts[0], tokens=changed), *group.rollouts[1:]))
    (part,) = micro_batches(collate(make_record(step=6), [(header, other)], group_std), max_tokens=10_000, share_prompts=True)
    assert part.attention is None
    assert part.input_ids.shape[0] == 3


def test_siblings_that_together_exceed_a_micro_batch_do_not_share_a_row(make_record: Record, header_of: Callable[..., GroupHeader]):
    groups = [random_group(5, header_of, size=6)]
    batch = collate(make_record(step=6), groups, group_std)
    longest = max(len(rollout.tokens) for rollout in groups[0][1].rollouts)
    (together,) = micro_batches(batch, max_tokens=10_000, share_prompts=True)
    assert together.input_ids.shape[1] > longest
    for limit in (longest, together.input_ids.shape[1] - 1):
        assert all(part.input_ids.size <= limit for part in micro_batches(batch, max_tokens=limit, share_prompts=True))
