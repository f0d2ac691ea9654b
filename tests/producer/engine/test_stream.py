"""What there is of a response after any number of its events, from servers that repeat themselves and from those that do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.engine.generation import Generation, Sampling, checked, parsed
from producer.engine.stream import EngineError, Growing, Lines
from protocol.errors import DecodeError
from protocol.versions import Version

SAMPLING = Sampling(max_new_tokens=100)
STOP = {"type": "stop", "matched": 1}


def entry(token: int) -> list[Any]:
    return [-0.01 * token - 0.01, token, None]


def events(chunks: Sequence[tuple[int, str]], *, cumulative: bool, finish: Any = STOP, text: str = "x") -> list[bytes]:
    """Of (tokens, version the server names) each; the last one is the end of the response, and has all spans as sampled: a version a chunk."""
    made, have, spans = [], 0, []
    for number, (count, version) in enumerate(chunks, 1):
        start, have = 0 if cumulative else have, have + count
        if count:
            spans.append({"version": version, "start": have - count, "end": have})
        last = number == len(chunks)
        meta: dict[str, Any] = {"completion_tokens": have, "cached_tokens": 0, "weight_version": version, "finish_reason": finish if last else None}
        meta["output_token_logprobs"] = [entry(token) for token in range(start, have)]
        if last:
            meta["weight_versions"] = spans
        made.append(json.dumps({"text": text * (have - start), "output_ids": list(range(start, have)), "meta_info": meta}).encode())
    return made


def grown(raw: Sequence[bytes], assumed: Version | None = None) -> Growing:
    growing = Growing(assumed)
    for one in raw:
        growing.plus(one)
    return growing


def spans_of(generation: Generation | None) -> list[tuple[str, int, int]]:
    assert generation is not None
    return [(str(span.version), span.start, span.end) for span in generation.spans]


def cut(growing: Growing, *, span_lag: int = 0, prefix_cache: bool = False) -> Generation | None:
    return growing.cut(SAMPLING, span_lag=span_lag, prefix_cache=prefix_cache)


chunks_of = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["1:1", "1:2", "1:3"])), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(chunks_of, st.booleans(), st.data())
def test_after_any_event_there_is_exactly_what_was_sent_and_no_token_is_called_fresher_than_it_may_be(
    chunks: list[tuple[int, str]], cumulative: bool, data: st.DataObject
) -> None:
    chunks = [(count, version) for (count, _), version in zip(chunks, sorted(version for _, version in chunks), strict=True)]
    raw = events([*chunks, (1, chunks[-1][1])], cumulative=cumulative)
    upto = data.draw(st.integers(0, len(chunks)))
    growing = grown(raw[:upto], Version(1, 1))
    total = sum(count for count, _ in chunks[:upto])
    piece = cut(growing)
    assert len(growing) == total
    assert growing.whole is None
    if not total:
        assert piece is None
        return
    assert piece is not None
    assert piece.output_ids.tolist() == list(range(total))
    assert piece.logprobs.tolist() == pytest.approx([entry(token)[0] for token in range(total)])
    assert piece.finish_reason == "abort"
    sampled = [Version.parse(version) for count, version in chunks[:upto] for _ in range(count)]
    told = [span.version for span in piece.spans for _ in range(span.start, span.end)]
    assert all(a <= b for a, b in zip(told, sampled, strict=True))


@pytest.mark.parametrize("cumulative", [True, False])
def test_the_last_event_makes_it_as_if_it_had_not_been_streamed(cumulative: bool) -> None:
    growing = grown(events([(2, "1:1"), (0, "1:1"), (3, "1:2")], cumulative=cumulative))
    growing.plus(b"[DONE]")
    assert growing.whole is not None
    whole = checked(growing.whole, SAMPLING, None, span_lag=0, prefix_cache=False)
    assert (whole.output_ids.tolist(), whole.text, whole.finish_reason, whole.matched) == ([0, 1, 2, 3, 4], "xxxxx", "stop", 1)
    assert spans_of(whole) == [("1:1", 0, 2), ("1:2", 2, 5)]


@pytest.mark.parametrize("cumulative", [True, False])
def test_tokens_of_an_event_that_names_another_version_are_the_older_ones(cumulative: bool) -> None:
    raw = events([(2, "1:1"), (2, "1:1"), (2, "1:2"), (2, "1:2"), (1, "1:2")], cumulative=cumulative)[:-1]
    assert spans_of(cut(grown(raw, Version(1, 1)))) == [("1:1", 0, 6), ("1:2", 6, 8)]
    assert spans_of(cut(grown(raw, Version(1, 0)))) == [("1:0", 0, 2), ("1:1", 2, 6), ("1:2", 6, 8)]
    assert spans_of(cut(grown(raw), span_lag=1)) == [("1:1", 0, 7), ("1:2", 7, 8)]


def test_without_a_version_in_its_events_it_is_the_one_acked_before() -> None:
    raw = [json.loads(one) for one in events([(2, "1:1"), (2, "1:2"), (1, "1:2")], cumulative=False)[:-1]]
    for one in raw:
        del one["meta_info"]["weight_version"]
    encoded = [json.dumps(one).encode() for one in raw]
    assert spans_of(cut(grown(encoded, Version(1, 1)))) == [("1:1", 0, 4)]
    with pytest.raises(DecodeError, match="no version was acked"):
        grown(encoded)


@pytest.mark.parametrize(("cached", "kept"), [(0, True), (5, False), (None, False)])
def test_what_may_rest_on_older_keys_is_not_kept(cached: Any, kept: bool) -> None:
    raw = [json.loads(one) for one in events([(2, "1:2"), (1, "1:2")], cumulative=False)[:-1]]
    raw[0]["meta_info"]["cached_tokens"] = cached
    growing = grown([json.dumps(raw[0]).encode()], Version(1, 1))
    assert (cut(growing, prefix_cache=True) is not None) is kept
    assert cut(growing, prefix_cache=False) is not None
    same = grown([json.dumps(raw[0]).encode()], Version(1, 2))
    assert cut(same, prefix_cache=True) is not None


def test_a_request_that_is_ended_while_it_waits_to_go_on_keeps_what_it_has() -> None:
    """An incremental SGLang then sends the last token again, and every logprob."""
    raw = events([(3, "1:1"), (2, "1:1"), (1, "1:1")], cumulative=False)[:-1]
    ended = {"type": "abort", "message": "Abort in waiting queue"}
    spans = [{"version": "1:1", "start": 0, "end": 5}]
    meta = {"finish_reason": ended, "completion_tokens": 5, "weight_versions": spans, "output_token_logprobs": [entry(token) for token in range(5)]}
    last = json.dumps({"text": "x" * 5, "output_ids": [4], "meta_info": meta}).encode()
    for seen in (raw, raw[:1]):
        growing = grown([*seen, last])
        assert growing.whole is not None
        assert checked(growing.whole, SAMPLING, None, span_lag=0, prefix_cache=False).output_ids.tolist() == [0, 1, 2, 3, 4]


def changed(**fields: Any) -> bytes:
    event = json.loads(events([(2, "1:1"), (1, "1:1")], cumulative=False)[0])
    for key, value in fields.items():
        (event if key in event else event["meta_info"])[key] = value
    return json.dumps(event).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "answer: expected dict"),
        (changed(output_ids=None), "output_ids: expected list"),
        (changed(output_token_logprobs=None), "output_token_logprobs: expected list, got nothing"),
        (changed(output_token_logprobs=[entry(0)]), "completion_tokens: 2 after 0 tokens, in an event of 2 with 1 logprobs"),
        (changed(completion_tokens=None), "completion_tokens: expected int"),
        (changed(completion_tokens=7), "7 after 0 tokens"),
        (changed(weight_version="default"), "version: got 'default'"),
    ],
)
def test_an_event_that_is_none_is_named(raw: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        grown([raw])


def test_tokens_that_are_lost_between_two_events_are_noticed() -> None:
    first, _, third = events([(2, "1:1"), (2, "1:1"), (2, "1:1")], cumulative=False)
    with pytest.raises(DecodeError, match="6 after 2 tokens"):
        grown([first, third])


def test_nothing_may_come_after_the_end() -> None:
    raw = events([(2, "1:1")], cumulative=False)
    with pytest.raises(DecodeError, match="after the last"):
        grown([*raw, *raw])


def test_of_events_that_repeat_what_came_before_few_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for cumulative in (True, False):
        seen: list[int] = []
        monkeypatch.setattr("producer.engine.stream.parsed", lambda raw, seen=seen: seen.append(len(raw)) or parsed(raw))
        growing = grown(events([(1, "1:1")] * 400, cumulative=cumulative))
        growing.settle()
        assert growing.whole is not None
        assert len(growing.whole["output_ids"]) == 400
        counts[cumulative] = len(seen)
        if cumulative:
            assert sum(seen) < 12 * max(seen), "in all, a few times the longest"
    assert counts[False] == 400
    assert counts[True] < 80


def test_an_error_after_events_that_were_not_parsed_is_seen() -> None:
    growing = grown(events([(1, "1:1")] * 51, cumulative=True)[:-1])
    with pytest.raises(EngineError, match="broke"):
        growing.plus(b'{"error": {"message": "broke", "code": 500}}')
    assert len(growing) == 50


def test_an_event_that_says_that_the_request_failed_has_its_code() -> None:
    with pytest.raises(EngineError, match="too long") as error:
        grown([b'{"error": {"message": "too long", "code": 400}}'])
    assert error.value.code == 400
    with pytest.raises(EngineError, match="odd") as error:
        grown([b'{"error": "odd"}'])
    assert error.value.code == 500


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([b'{"a":1}', b"[DONE]", b"x" * 40]), max_size=6), st.integers(1, 17), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n"]))
def test_lines_are_found_however_the_network_cuts_them(contents: list[bytes], size: int, end: bytes) -> None:
    wire = b": hello\n" + b"".join(b"data: " + content + end + b"event: x\n" for content in contents)
    lines = Lines(max_new_tokens=1)
    assert [line for at in range(0, len(wire), size) for line in lines.plus(wire[at : at + size])] == contents


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    lines = Lines(max_new_tokens=1)
    assert list(lines.plus(b"x" * (1 << 20))) == []
    with pytest.raises(DecodeError, match="without an end"):
        list(lines.plus(b"x" * (1 << 16)))
