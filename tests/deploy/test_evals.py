"""What people and programs see of evaluations: HTTP, metrics, the status line, the summary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from buffer.witness import WitnessLine
from deploy.history import read_history
from deploy.http import evals, metrics
from deploy.look import _status, _toml
from deploy.snapshot import PictureSource
from deploy.summary import summarise
from protocol.audit import emit
from protocol.connection import Client
from protocol.keys import Keys

from .recorded import Recorder
from .test_http import service

Make = Callable[[], Awaitable[object]]


def result(phase: str, name: str, version: str | None, *, exact: float, **fields: Any) -> dict[str, Any]:
    versions = [version] if version else []
    base = {"phase": phase, "set": name, "version": version, "pinned": True, "mixed": 0, "versions": versions, "samples": 8, "failed": 1, "tokens": 40}
    return base | {"reward": exact / 2, "exact": exact, "seconds": 1.5} | fields


RESULTS = (
    result("first", "main", "1:0", exact=0.125, producer_id="p0"),
    result("first", "hard", "1:0", exact=0.0, producer_id="p0"),
    result("periodic", "main", "1:0", exact=0.5, pinned=False, mixed=3, versions=["1:0", "1:1"], producer_id="p1"),
    result("periodic", "hard", "1:0", exact=0.25, producer_id="p1"),
    result("checkpoint", "main", None, exact=1.0, model="elsewhere"),
)


@pytest.mark.redis
async def test_evals_are_listed_newest_first_and_the_newest_of_each_phase_and_set_is_a_gauge(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    for one in RESULTS:
        await emit(redis, keys, "eval", one)
    source = PictureSource(redis, keys)
    async with service(source) as get:
        status, body = await get("/v1/evals")
        _, text = await get("/metrics")
    assert status == 200
    listed = [(one["phase"], one["set"], one["version"], one["pinned"], one["by"]) for one in body["evals"]]
    assert listed == [
        ("checkpoint", "main", None, True, "elsewhere"),
        ("periodic", "hard", "1:0", True, "p1"),
        ("periodic", "main", "1:0", False, "p1"),
        ("first", "hard", "1:0", True, "p0"),
        ("first", "main", "1:0", True, "p0"),
    ]
    mixed = body["evals"][2]
    assert (mixed["mixed"], mixed["versions"], mixed["samples"], mixed["failed"], mixed["exact"], mixed["seconds"]) == (3, ["1:0", "1:1"], 8, 1, 0.5, 1.5)
    samples = {
        (sample.name, sample.labels.get("phase"), sample.labels.get("set")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["rollstream_eval_exact_ratio", "first", "main"] == 0.125
    assert samples["rollstream_eval_exact_ratio", "periodic", "main"] == 0.5
    assert samples["rollstream_eval_reward_mean", "periodic", "hard"] == 0.125
    assert samples["rollstream_eval_version_step", "periodic", "hard"] == 0
    assert samples["rollstream_eval_pinned", "periodic", "main"] == 0
    assert ("rollstream_eval_version_step", "checkpoint", "main") not in samples
    told = evals.line(await source.picture())
    assert told in _status(await source.picture())
    assert told == ("held out: hard exact 0.250, reward 0.125 at 1:0 (periodic, 8 samples); main exact 0.500, reward 0.250 at 1:0 to 1:1 (periodic, 8 samples)")


@pytest.mark.redis
async def test_the_list_is_bounded_and_empty_before_the_first(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    source = PictureSource(redis, keys)
    assert evals.line(await source.picture()) == ""
    assert b"rollstream_eval_exact_ratio{" not in metrics.exposition(await source.picture(), keys.run)
    for number in range(300):
        await emit(redis, keys, "eval", result("periodic", "main", f"1:{number}", exact=0.5))
    listed = evals.evals(await PictureSource(redis, keys).picture()).evals
    assert [one.version for one in listed] == [f"1:{number}" for number in range(299, 43, -1)]


def test_an_event_of_an_older_record_is_of_the_main_set_and_of_the_version_that_served_it():
    event = {"phase": "first", "versions": ["1:0"], "samples": 4, "reward": 0.5, "exact": 0.25, "seconds": 1.0, "producer_id": "p", "at": 1.0, "set": "main"}
    found = evals._eval(event)
    assert (found.version, found.pinned, found.mixed, found.tokens) == ("1:0", True, 0, None)
    several = evals._eval(event | {"versions": ["1:0", "1:1"]})
    assert (several.version, several.pinned) == (None, False)


def test_a_summary_keeps_sets_apart_and_leaves_saved_models_out():
    run = Recorder()
    run.begin()
    for at, one in enumerate(RESULTS, 1):
        run.event(at, "eval", **one)
    witness: list[WitnessLine] = run.witness
    summary = summarise(run.events, witness)
    assert summary["heldout"] == {"first": 0.125, "last": 0.5, "best": 0.5}
    assert summary["evaluations"] == {
        "main": {"exact": {"first": 0.125, "last": 0.5, "best": 0.5}, "reward": {"first": 0.0625, "last": 0.25, "best": 0.25}},
        "hard": {"exact": {"first": 0.0, "last": 0.25, "best": 0.25}, "reward": {"first": 0.0, "last": 0.125, "best": 0.125}},
    }
    assert list(read_history(run.events).held_out) == ["main", "hard"]


def test_a_table_of_sets_is_shown_as_toml():
    import tomllib

    sets = {"math": "math.jsonl", "a.b": 'quote".jsonl'}
    assert tomllib.loads(f"sets = {_toml(sets)}") == {"sets": sets}
    assert _toml({}) == "{}"
