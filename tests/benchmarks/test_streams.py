from __future__ import annotations

import pytest

from benchmarks.gpu.streams import Odd, Sample, Story


def event(tokens: int, version: str, *, finish: str | None = None, new: int | None = None) -> dict[str, object]:
    """Tokens 100, 101, … so far, or the `new` last of them."""
    ids = [100 + at for at in range(tokens)][-(tokens if new is None else new) :]
    meta = {
        "completion_tokens": tokens,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": version,
        "finish_reason": None if finish is None else {"type": finish},
    }
    return {"output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize("new", [None, 2])
def test_cumulative_and_incremental_events_give_the_same_tokens(new: int | None):
    sample = Sample(prompt=[1])
    story = Story(sample)
    for tokens in (2, 4, 6):
        story.plus(event(tokens, "1:1", new=new))
    assert sample.ids == [100, 101, 102, 103, 104, 105]
    assert len(sample.logprobs) == len(sample.versions) == len(sample.edge) == 6


def test_the_first_tokens_after_an_update_count_for_neither_version():
    sample = Sample(prompt=[1])
    story = Story(sample)
    for tokens, version in ((3, "1:1"), (4, "1:2"), (9, "1:2"), (20, "1:3"), (21, "1:3")):
        story.plus(event(tokens, version))
    assert sample.edge == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 11 + [False]


def test_a_sample_that_its_engine_ended_goes_on_as_another_request():
    sample = Sample(prompt=[1])
    assert Story(sample).plus(event(3, "1:1", finish="abort")) == "abort"
    again = Story(sample)
    assert again.plus(event(1, "1:2")) is None
    assert again.plus(event(6, "1:2", finish="length")) == "length"
    assert sample.requests == 2
    assert sample.versions == ["1:1"] * 3 + ["1:2"] * 6
    assert sample.edge == [False] * 3 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("version", ["boot:abc", "away:12ab", "None"])
def test_what_is_written_under_no_version_is_thrown_away(version: str):
    sample = Sample(prompt=[1])
    story = Story(sample)
    story.plus(event(2, "1:1"))
    with pytest.raises(Odd):
        story.plus(event(5, version))
    assert len(sample.ids) == len(sample.versions) == 2
