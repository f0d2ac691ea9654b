"""What ranks tell of their shares is, together, what one rank would tell of the chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from buffer.contract import ChunkRecord, StepRecord
from buffer.shares import Share
from consumer.advantages import find_advantage
from consumer.batch import ChunkBatch, collate_step
from consumer.ranks.figures import heard, told, union
from protocol.errors import DecodeError
from protocol.versions import Version

NAMES = [field.name for field in dataclasses.fields(ChunkBatch) if field.name != "groups"]


def chunk_of(make_record: Callable[..., StepRecord], sampler: Any) -> tuple[ChunkRecord, list[Any]]:
    """Groups of several sizes and ages, some of them over the bound."""
    groups = [sampler.headed(seq, size=2 + seq % 3, version=Version(1, seq % 4)) for seq in (5, 3, 8, 6, 11)]
    record = make_record(step=4, bound=2)
    return ChunkRecord(step=4, chunk=0, revision=0, headers=tuple(header for header, _ in groups), last=True, record=record), groups


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("normaliser", ["token_mean", "rollout_mean", "constant"])
def test_the_union_of_shares_is_the_chunk(make_record: Callable[..., StepRecord], sampler: Any, ranks: int, normaliser: Any):
    chunk, groups = chunk_of(make_record, sampler)

    def collated(mine: list[Any]) -> ChunkBatch:
        return collate_step([(chunk, mine)], find_advantage("group_std"), normaliser=normaliser, max_new_tokens=6)[0]

    whole = collated(groups)
    assert whole.masked > 0
    parts = []
    for rank in range(ranks):
        own = {header.seq for header in Share(rank, ranks).of(chunk.headers)}
        part = collated([group for group in groups if group[0].seq in own])
        wired = msgpack.unpackb(msgpack.packb(told(part)), strict_map_key=True)
        parts.append(heard(wired))
        assert {name: getattr(parts[-1], name) for name in NAMES} == {name: getattr(part, name) for name in NAMES}
    found = union(chunk.headers, parts)
    assert {name: getattr(found, name) for name in NAMES} == {name: getattr(whole, name) for name in NAMES}
    assert found.seqs == (5, 3, 8, 6, 11)


def test_figures_that_are_none_are_refused():
    with pytest.raises(DecodeError, match="figures"):
        heard({})
    with pytest.raises(DecodeError, match="figures"):
        heard(dict.fromkeys(NAMES))
