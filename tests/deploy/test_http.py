from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from buffer.redis_ledger import RedisLedger
from deploy import snapshot
from deploy.config import HttpConfig, ReaderConfig, bind, listen
from deploy.http import app as http
from deploy.snapshot import PictureSource, picture_source
from producer.engine.sglang.ports import held_port
from protocol.config import RedisConfig, RunConfig
from protocol.connection import Client
from protocol.errors import ConfigError
from protocol.keys import Keys
from protocol.messages import TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version

from .conftest import engine

pytestmark = pytest.mark.redis
Make = Callable[[], Awaitable[object]]


@contextlib.asynccontextmanager
async def service(source: PictureSource) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, Any]]]]:
    listener = listen("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with http.running(source, listener), aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, Any]:
                async with session.get(base + path) as answer:
                    return answer.status, (await answer.json() if answer.content_type == "application/json" else await answer.text())

            yield get
    finally:
        listener.close()


async def test_staleness_is_by_token_of_what_was_trained_and_names_the_lag_of_each_engine(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    async with service(PictureSource(redis, keys)) as get:
        status, body = await get("/v1/staleness")
    assert status == 200
    assert body["total"] == {"count": 18, "mean": pytest.approx(1 / 3), "p50": 0, "p99": 1, "max": 1, "histogram": {"0": 12, "1": 6}}
    assert body["recent"] == body["total"]
    assert body["ready"]["histogram"] == {"1": 10}, "one READY group by 1:0, and step 1 is trained"
    assert body["publish_lag"]["histogram"] == {"0": 30}
    assert body["masked_tokens"] == 2
    assert body["complete"] is True
    assert body["engines"] == [
        {"engine_id": "engine-0", "version": "1:0", "lag_steps": 1},
        {"engine_id": "engine-1", "version": "1:1", "lag_steps": 0},
    ]


async def test_buffer_is_the_ledger_as_it_is(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    async with service(PictureSource(redis, keys)) as get:
        status, body = await get("/v1/buffer")
    assert status == 200
    assert (body["generating"], body["ready"], body["leased"], body["trained_groups"], body["trained"]) == (0, 1, 0, 2, 1)
    assert body["admission_limit"] == 4
    assert body["state"] == "open"


async def test_buffer_and_journal_say_what_is_set_aside_spilled_and_read(redis: Client, keys: Keys, small_run: Make):
    ledger = await small_run()
    assert isinstance(ledger, RedisLedger)
    await ledger.follow("export", 1, ttl_s=60.0)
    trainer = TrainerStatus(trainer_id="trainer", incarnation=1, step=2, trained=1, spill_problem="No space left on device")
    await Presence(redis, keys, "trainer", TrainerStatus).beat("trainer", trainer, ttl_s=600.0)
    await Presence(redis, keys, "shadow", TrainerStatus).beat("shadow-b", TrainerStatus(trainer_id="shadow-b", trained=0), ttl_s=600.0)
    async with service(PictureSource(redis, keys)) as get:
        buffer, journal = [(await get(f"/v1/{name}"))[1] for name in ("buffer", "journal")]
        _, text = await get("/metrics")
    assert (buffer["selection"], buffer["letters"], buffer["to_spill"], buffer["spill_problem"]) == ("oldest", 0, 0, "No space left on device")
    assert (journal["first"], journal["last"], journal["dropped"], journal["retention"], journal["spill"]) == (1, 1, 0, 0, "")
    assert journal["readers"] == [{"reader": "export", "wants": 1, "lag_steps": 1}]
    assert [shadow["trainer_id"] for shadow in journal["shadows"]] == ["shadow-b"]
    assert f'rollstream_reader_lag_steps{{reader="export",run="{keys.run}"}} 1.0' in text
    assert f'rollstream_journal_steps{{run="{keys.run}"}} 1.0' in text
    assert f'rollstream_spill_failing{{run="{keys.run}"}} 1.0' in text


async def test_bias_says_what_became_of_every_token(redis: Client, keys: Keys, small_run: Make):
    """Three groups of one rollout with 10 sampled tokens: two were trained, with 2 of their 20 tokens masked, one is READY."""
    await small_run()
    async with service(PictureSource(redis, keys)) as get:
        status, body = await get("/v1/bias")
        _, text = await get("/metrics")
    assert (status, body["complete"], body["unaccounted_tokens"], body["dropped_groups"]) == (200, True, 0, {})
    assert body["total"] == {"generated": 30, "trained": 18, "masked": 2, "dropped": {}, "outstanding": 10, "trained_share": 0.6}
    assert list(body["lengths"]) == ["16"]
    assert body["ages"]["1"] == {"generated": 0, "trained": 6, "masked": 2, "dropped": {}, "outstanding": 10, "trained_share": None}
    assert f'rollstream_tokens_by_length{{fate="masked",length="16",run="{keys.run}"}} 2.0' in text


async def test_members_say_what_they_report(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    async with service(PictureSource(redis, keys)) as get:
        engines, producers, trainers, weights = [(await get(f"/v1/{name}"))[1] for name in ("engines", "producers", "trainers", "weights")]
    assert [(engine["engine_id"], engine["state"], engine["version"], engine["lag_steps"]) for engine in engines["members"]] == [
        ("engine-0", "routable", "1:0", 1),
        ("engine-1", "routable", "1:1", 0),
    ]
    assert producers["members"][0]["waiting_for"] == "no slot"
    assert trainers["members"][0]["trained"] == 1
    assert (weights["newest"], weights["publish_lag_steps"], weights["published"], weights["applied"]) == ("1:1", 0, 2, 3)


async def test_metrics_are_prometheus_text_with_the_figures(redis: Client, keys: Keys, small_run: Make):
    await small_run()
    async with service(PictureSource(redis, keys)) as get:
        status, text = await get("/metrics")
    assert status == 200
    samples = {(sample.name, *sorted(sample.labels.items())): sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    run = ("run", keys.run)
    assert samples["rollstream_redis_up", run] == 1
    assert samples["rollstream_buffer_groups", run, ("state", "ready")] == 1
    assert samples["rollstream_trained_staleness_steps_bucket", ("le", "0.0"), run] == 12
    assert samples["rollstream_trained_staleness_steps_count", run] == 18
    assert samples["rollstream_trained_staleness_steps_sum", run] == 6
    assert samples["rollstream_engine_lag_steps", ("engine", "engine-0"), run] == 1
    assert samples["rollstream_waiting_seconds", ("edge", "no slot"), ("member", "producer-0"), run] >= 3
    assert samples["rollstream_trained_tokens_total", run] == 18


def test_a_rate_needs_a_second_look_however_much_later_it_comes(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rate = snapshot._Rate()
    status = engine(0, Version(1, 0))
    assert rate.see([status]) is None
    now[0] = 30.0
    assert rate.see([dataclasses.replace(status, generated_tokens=status.generated_tokens + 600)]) == 20.0


async def test_without_a_run_the_answer_says_so_and_metrics_still_answer(redis: Client, keys: Keys):
    async with service(PictureSource(redis, keys)) as get:
        status, body = await get("/v1/staleness")
        assert status == 404
        assert keys.run in body["error"]
        assert "--new" in body["what_to_do"]
        status, text = await get("/metrics")
    assert status == 200
    assert f'rollstream_run_present{{run="{keys.run}"}} 0.0' in text


async def test_health_is_of_the_process_and_readiness_of_redis(redis: Client, keys: Keys, tmp_path: Path):
    async with service(PictureSource(redis, keys)) as get:
        assert await get("/healthz") == (200, {"status": "ok"})
        assert await get("/readyz") == (200, {"status": "ready", "stalls": []})
    async with picture_source(f"unix://{tmp_path}/nobody.sock", "r", deadline_s=0.2) as away, service(away) as get:
        assert (await get("/healthz"))[0] == 200
        for path in ("/readyz", "/v1/buffer"):
            status, body = await get(path)
            assert status == 503
            assert "Redis" in body["error"]
        status, text = await get("/metrics")
        assert status == 200
        assert 'rollstream_redis_up{run="r"} 0.0' in text


async def test_an_unknown_path_names_the_known_ones(redis: Client, keys: Keys):
    async with service(PictureSource(redis, keys)) as get:
        status, body = await get("/v1/stalenes")
    assert status == 404
    assert "/v1/staleness" in body["what_to_do"]


async def test_only_get_is_answered(redis: Client, keys: Keys):
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/buffer"
    async with http.running(PictureSource(redis, keys), listener), aiohttp.ClientSession() as session, session.post(url) as answer:
        assert answer.status == 405
        assert (await answer.json())["what_to_do"] == "use GET"
    listener.close()


def test_a_taken_port_is_a_configuration_error_that_names_the_key():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http\.port {port}.*choose another"):
            bind(HttpConfig(port=port))


def test_port_0_means_no_service():
    assert bind(HttpConfig(port=0)) is None


async def test_serve_says_where_it_listens(redis: Client, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url = f"unix://{redis.connection_pool.connection_kwargs['path']}"
    stop = asyncio.Event()
    stop.set()
    with held_port("127.0.0.1", key="port") as port:
        config = ReaderConfig(run=RunConfig(name=keys.run, dir=str(tmp_path)), redis=RedisConfig(url=url), http=HttpConfig(port=port))
        await http.serve(config, stop)
    said = capsys.readouterr().out
    assert f"listening on http://127.0.0.1:{port}: " in said
    assert all(path in said for path in http.PATHS)


async def test_serve_refuses_without_a_port(tmp_path: Path):
    config = ReaderConfig(run=RunConfig(name="r"), redis=RedisConfig(url="redis://127.0.0.1:1"), http=HttpConfig(port=0))
    with pytest.raises(ConfigError, match=r"http\.port 0"):
        await http.serve(config, asyncio.Event())
