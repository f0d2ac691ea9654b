from __future__ import annotations

import dataclasses
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from buffer.audit import read_audit
from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from deploy.summary import read_summary, spread, summarise, table, window_means, write_summary
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import JsonValue
from tests.deploy.recorded import Recorder, ledger_status, small_run


def test_every_promised_figure_is_there() -> None:
    run = small_run()
    summary = summarise(run.events, run.witness)
    promised = """steps groups_reserved groups_trained groups_released groups_lost groups_duplicated staleness reward tokens_generated tokens_trained seconds
        trainer_busy_fraction engine_busy_fraction weight_updates engine_pause_seconds"""
    assert set(promised.split()) <= set(summary)


def test_figures_of_a_small_run() -> None:
    run = small_run()
    summary = summarise(run.events, run.witness, status=ledger_status(), resources={"peak_pss_bytes": 5, "cpu_seconds": {"trainer": 2.0}, "restarts": {}})
    assert (summary["steps"], summary["groups_reserved"], summary["groups_trained"]) == (2, 4, 4)
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["over_k_tokens"], summary["steps_over_k"]) == (0, 0, 0, 0)
    assert summary["disagreements"] == []
    assert summary["staleness"] == {"mean": 0.625, "p50": 0, "p99": 2, "max": 2, "histogram": {"0": 20, "1": 15, "2": 5}}
    assert summary["heldout"] == {"first": 0.25, "last": 0.75, "best": 0.75}
    assert summary["engine_pause_seconds"] == {"mean": pytest.approx(0.02), "max": 0.03}
    assert (summary["trainer_busy_fraction"], summary["engine_busy_fraction"], summary["seconds"]) == (0.25, 0.25, 8.0)
    assert summary["engines"] == {"engine-0": {"version": "1:2", "at_final": True, "updates": 3, "boots": 1, "went_back": 0}}
    assert (summary["tokens_generated"], summary["tokens_trained"], summary["masked_tokens"]) == (40, 40, 2)
    assert summary["bias"]["ages"]["1"] == {"generated": 20, "trained": 15, "masked": 0, "dropped": {}, "outstanding": 0, "trained_share": 0.75}
    assert summary["bias"]["total"]["trained"] == 40
    assert (summary["weights_published"], summary["weight_updates"], summary["final_version"]) == (3, 3, "1:2")
    assert (summary["peak_pss_bytes"], summary["cpu_seconds"]) == (5, {"trainer": 2.0})


def test_updates_are_counted_by_what_brought_them() -> None:
    run = small_run()
    assert summarise(run.events, run.witness)["weight_updates_by_transport"] == {"unknown": 3}
    assert " by unknown" not in _text(summarise(run.events, run.witness))
    for at, way in ((11, "gloo"), (12, "gloo"), (13, "store")):
        run.event(at, "applied", engine_id="engine-0", boot_nonce="boot:a", version="1:2", pause_s=0.01, transport=way)
    summary = summarise(run.events, run.witness)
    assert (summary["weight_updates"], summary["weight_updates_by_transport"]) == (6, {"gloo": 2, "store": 1, "unknown": 3})
    assert "6 applied (2 by gloo, 1 by store, 3 by unknown), paused" in _text(summary)


def test_an_engine_that_goes_back_is_counted_and_one_that_starts_again_is_not() -> None:
    run = small_run()
    run.applied(11, "1:1")
    backward = summarise(run.events, run.witness)["engines"]["engine-0"]
    assert (backward["went_back"], backward["at_final"]) == (1, False)
    run.event(12, "engine_started", engine_id="engine-0", boot_nonce="boot:b")
    run.applied(13, "1:0", boot="boot:b")
    assert summarise(run.events, run.witness)["engines"]["engine-0"]["went_back"] == 1


def test_an_engine_that_started_again_and_took_nothing_is_not_at_the_final_version() -> None:
    run = small_run()
    run.event(12, "engine_started", engine_id="engine-0", boot_nonce="boot:b")
    assert not summarise(run.events, run.witness)["engines"]["engine-0"]["at_final"]


def test_tokens_over_k_are_found_in_every_incarnation() -> None:
    run = small_run()
    run.trained(11, 3, [4, 5], reward=0.5, staleness={"3": 1, "4": 7})
    summary = summarise(run.events, run.witness)
    assert (summary["over_k_tokens"], summary["steps_over_k"]) == (7, 1)


def test_on_policy_every_token_that_is_not_fresh_is_over_k() -> None:
    run = small_run()
    settings: dict[str, JsonValue] = {"groups_per_step": 2, "pipeline_depth": 0.0, "max_staleness": 3}
    run.events[0] = dataclasses.replace(run.events[0], fields={"identity": {}, "settings": settings})
    summary = summarise(run.events, run.witness)
    assert (summary["max_staleness"], summary["over_k_tokens"], summary["steps_over_k"]) == (0, 20, 1)


def test_a_group_that_nobody_has_is_lost_and_without_the_ledger_nobody_can_tell() -> None:
    run = small_run()
    run.event(11, "reserved", owner="p", slots=[[4, 1]])
    lost = [summarise(run.events, run.witness, status=status)["groups_lost"] for status in (ledger_status(), ledger_status(outstanding=1), None)]
    assert lost == [1, 0, None]
    assert "lost not known without Redis, 0 duplicated" in _text(summarise(run.events, run.witness))


def test_a_group_that_was_trained_twice_is_counted() -> None:
    run = small_run()
    run.trained(11, 3, [3], reward=0.5, staleness={"0": 1})
    assert summarise(run.events, run.witness)["groups_duplicated"] == 1


def test_a_witness_and_an_audit_that_contradict_each_other_are_told() -> None:
    run = small_run()
    assert "step 2 of incarnation 1" in summarise(run.events, run.witness[:1])["disagreements"][0]


async def test_the_summary_of_a_real_run_moves_what_is_still_in_redis_into_its_file(redis: Client, keys: Keys, tmp_path: Path) -> None:
    ledger = RedisLedger(redis, keys)
    await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="d", tokenizer="t"), BufferConfig(groups_per_step=1))
    await ledger.attach(None, trainer_id="t")
    (tmp_path / "resources.json").write_bytes(b'{"peak_pss_bytes": 7}')
    assert await write_summary(tmp_path, redis, keys) == read_summary(tmp_path)
    summary = read_summary(tmp_path)
    assert (summary["groups_lost"], summary["incarnations"], summary["max_staleness"], summary["peak_pss_bytes"]) == (0, 1, 8, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.jsonl", "resources.json", "summary.json"]
    assert [event.op for event in await read_audit(tmp_path / "audit.jsonl")] == ["created", "attached"]


def test_a_run_that_did_nothing_has_a_summary_and_a_table() -> None:
    run = Recorder()
    run.begin()
    summary = summarise(run.events, run.witness)
    assert (summary["steps"], summary["reward"]["first"], summary["trainer_busy_fraction"]) == (0, None, None)
    assert "none" in _text(summary)


def test_the_table_says_what_a_reader_asks_first() -> None:
    run = small_run()
    text = _text(summarise(run.events, run.witness, status=ledger_status()))
    for said in ("2 in 8 s", "4 reserved, 4 trained, 0 lost, 0 duplicated", "p99 2, max 2 of 3 steps", "engine-0 at 1:2"):
        assert said in text


def test_the_table_accounts_for_groups_that_were_still_under_way_or_died() -> None:
    run = small_run()
    summary = summarise(run.events, run.witness, status=ledger_status())
    assert "under way" not in _text(summary)
    text = _text({**summary, "groups_reserved": 10, "groups_dead": {"expired": 1}, "groups_outstanding": 5})
    assert "10 reserved, 4 trained, 0 lost, 0 duplicated, 1 dead, 5 still under way at the end (reserved - trained - dead)" in text


def test_reward_figures_are_means_over_twenty_steps() -> None:
    means = window_means([0.0] * 20 + [1.0] * 20)
    assert (len(means), means[0], means[10], means[-1]) == (21, 0.0, 0.5, 1.0)


def test_percentiles_are_by_tokens() -> None:
    found = spread(Counter({0: 98, 5: 2}))
    assert (found["mean"], found["p50"], found["p99"], found["max"]) == (0.1, 0, 5, 5)
    assert spread(Counter())["p99"] is None


def _text(summary: dict[str, object]) -> str:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(table(summary))
    return console.export_text()
