"""Engines by URL: what an engine host makes of servers that are not its own. The embedded engine plays them, as what is tested is the host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from producer.engine import external, host, key
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from producer.engine.embedded.worker import Worker
from producer.engine.external import checks_ids, difference
from producer.engine.sglang import watch
from producer.engine.sglang.ports import held_port
from protocol.errors import ConfigError
from protocol.messages import EngineState, EngineStatus, ProducerStatus
from protocol.presence import Presence
from protocol.versions import Version

from .conftest import write_model
from .hosting import WAIT_S, Run, ask

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def server(model: Path, *, port: int = 0, version: str = "default", api_key: str = "") -> AsyncIterator[EmbeddedEngine]:
    slots = await asyncio.to_thread(load, str(model), slots=4, max_length=64, wanted=64)
    async with EmbeddedEngine(slots, weight_version=version, port=port, api_key=api_key) as engine:
        yield engine


def at(*urls: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"kind": "external", "urls": list(urls), "slots": 4} | more}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    for where, name in ((host, "_MISFIT_S"), (host, "_REST_S"), (external, "_FIRST_KNOCK_S"), (external, "_LAST_KNOCK_S"), (watch, "_LOOK_S")):
        monkeypatch.setattr(where, name, 0.05)


def only(state: EngineState, words: str = "") -> Any:
    return lambda engines: len(engines) == 1 and engines[0].state is state and words in engines[0].trouble + engines[0].reason


async def test_one_is_followed_given_every_version_and_never_ended(run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path):
    await run.create()
    async with server(model_b) as engine:
        async with run.hosted(asyncio.Event(), **at(engine.url)):
            first = await run.publish(model_a)
            status = await run.serving(first)
            assert (status.kind, status.url, status.capacity, status.fleet) == ("external", engine.url, 4, "rollout")
            second = await run.publish(model_b)
            assert (await ask(session, await run.serving(second), "one")).weight_version == second
        assert await run.registry.engines() == []
        assert (await ask(session, status, "after the host")).weight_version == second


async def test_an_unknown_url_is_told_and_waited_for(run: Run, model_a: Path):
    await run.create()
    version = await run.publish(model_a)
    with held_port(HOST, key="port") as port:
        async with run.hosted(asyncio.Event(), **at(f"http://{HOST}:{port}")):
            (away,) = await run.until(only(EngineState.STARTING, "cannot be reached"))
            assert f"http://{HOST}:{port}/model_info" in away.trouble
            assert away.version is None
            async with server(model_a, port=port):
                assert (await run.serving(version)).trouble == ""


async def test_a_wrong_key_is_told_with_the_variable_to_set_and_engines_beside_it_go_on(
    run: Run, session: aiohttp.ClientSession, model_a: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(key.VARIABLE, "mine")
    await run.create()
    version = await run.publish(model_a)
    async with server(model_a, api_key="theirs") as locked, server(model_a, api_key="mine") as opened:
        urls = at(locked.url, opened.url)
        async with run.hosted(asyncio.Event(), **urls), run.hosted(asyncio.Event(), index=1, **urls):
            engines = await run.until(
                lambda engines: [e.state for e in engines] == [EngineState.STARTING, EngineState.ROUTABLE] and "answered 401" in engines[0].trouble
            )
            assert f"it wants another key; set {key.VARIABLE}" in engines[0].trouble
            assert engines[1].version == version


async def test_one_that_comes_back_with_base_weights_is_a_new_engine_and_gets_the_newest_again(
    run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path
):
    await run.create()
    with held_port(HOST, key="port") as port:
        async with contextlib.AsyncExitStack() as first_life:
            await first_life.enter_async_context(server(model_b, port=port))
            async with run.hosted(asyncio.Event(), **at(f"http://{HOST}:{port}")):
                version = await run.publish(model_a)
                before = await run.serving(version)
                await first_life.aclose()
                await run.until(lambda engines: not [e for e in engines if e.state is EngineState.ROUTABLE])
                async with server(model_b, port=port):
                    after = await run.serving(version)
                    assert after.boot_nonce != before.boot_nonce
                    assert (await ask(session, after, "again")).weight_version == version


async def test_a_host_whose_engine_went_away_while_the_run_ended_leaves_with_the_others(run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_DRAINED_S", 0.1)
    await run.create()
    with held_port(HOST, key="port") as port:
        async with contextlib.AsyncExitStack() as first_life:
            await first_life.enter_async_context(server(model_a, port=port))
            async with run.hosted(asyncio.Event(), **at(f"http://{HOST}:{port}")) as task:
                version = await run.publish(model_a)
                before = await run.serving(version)
                producers = Presence(run.client, run.keys, "producer", ProducerStatus)
                await producers.beat("p", ProducerStatus(producer_id="p"), ttl_s=600.0)
                await run.ledger.drain(version.incarnation, "steps")
                await first_life.aclose()
                await run.until(lambda engines: any(engine.boot_nonce != before.boot_nonce for engine in engines))
                await producers.leave("p")
                async with asyncio.timeout(WAIT_S):
                    await task


async def test_settings_that_stop_working_later_cost_a_life_and_not_the_host(run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch):
    await run.create()
    version = await run.publish(model_a)
    lives = 0
    life = external.ExternalServer.life

    def flaky(kind: external.ExternalServer, nonce: str, desk: Any) -> Any:
        nonlocal lives
        lives += 1
        if lives == 2:
            raise ConfigError("port 9 is taken")
        return life(kind, nonce, desk)

    monkeypatch.setattr(external.ExternalServer, "life", flaky)
    with held_port(HOST, key="port") as port:
        async with contextlib.AsyncExitStack() as first_life:
            await first_life.enter_async_context(server(model_a, port=port))
            async with run.hosted(asyncio.Event(), **at(f"http://{HOST}:{port}")):
                before = await run.serving(version)
                await first_life.aclose()
                async with server(model_a, port=port):
                    (after,) = await run.until(
                        lambda engines: [e for e in engines if e.state is EngineState.ROUTABLE and e.boot_nonce != before.boot_nonce] != []
                    )
                    assert (after.version, lives) == (version, 3)


async def test_weights_that_somebody_else_gave_it_are_noticed_while_it_answers_all_the_time(
    run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path
):
    await run.create()
    async with server(model_b) as engine, run.hosted(asyncio.Event(), **at(engine.url)):
        version = await run.publish(model_a)
        before = await run.serving(version)
        async with asyncio.timeout(WAIT_S):
            while True:  # what the host has not seen it serve, it cannot miss
                body = {"model_path": str(model_b), "weight_version": "9:9"}
                async with session.post(engine.url + "/update_weights_from_disk", json=body) as answer:
                    assert answer.status == 200
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await run.until(lambda engines: any(engine.boot_nonce != before.boot_nonce for engine in engines))
                        break
        after = await run.serving(version)
        assert (await ask(session, after, "again")).weight_version == version


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"vocab_size": 40}, "vocab_size 40, and the run has 21"),
        ({"hidden_size": 64}, "hidden_size 64, and the run has 32"),
        ({"family": "llama"}, r"architectures ['LlamaForCausalLM'], and the run has ['Qwen3ForCausalLM']"),
    ],
)
async def test_one_of_another_model_is_quarantined_until_the_right_one_is_there(run: Run, model_a: Path, tmp_path: Path, other: dict[str, Any], why: str):
    await run.create()
    version = await run.publish(model_a)
    stranger = write_model(tmp_path / "stranger", seed=3, **other)
    with held_port(HOST, key="port") as port:
        urls = at(f"http://{HOST}:{port}")
        async with run.hosted(asyncio.Event(), **urls):
            async with server(stranger, port=port) as engine:
                (left,) = await run.until(only(EngineState.UNFIT, why))
                assert "put one that fits there" in left.reason
                assert engine.counters.updates == engine.counters.generated_tokens == 0
            async with server(model_a, port=port):
                assert (await run.serving(version)).trouble == ""


@pytest.mark.parametrize(("size", "why"), [(20, "smaller vocabulary"), (22, "larger vocabulary")])
async def test_a_vocabulary_that_is_told_nowhere_is_found_by_asking(
    run: Run, model_a: Path, tmp_path: Path, size: int, why: str, monkeypatch: pytest.MonkeyPatch
):
    """As on another machine, where its files cannot be looked at."""
    stranger = write_model(tmp_path / "stranger", seed=3, vocab_size=size)
    theirs, look = str(stranger), external._config
    monkeypatch.setattr(external, "_config", lambda folder: {} if folder == theirs else look(folder))
    await run.create()
    await run.publish(model_a)
    async with server(stranger) as engine, run.hosted(asyncio.Event(), **at(engine.url)):
        await run.until(only(EngineState.UNFIT, f"{why} than the run's model, which has 21 ids"))


async def test_a_context_that_is_too_short_for_the_run_is_told(run: Run, model_a: Path):
    await run.create()
    async with server(model_a) as engine:
        urls = at(engine.url) | {"rollout": {"max_prompt_tokens": 40, "max_new_tokens": 40}}
        async with run.hosted(asyncio.Event(), **urls):
            await run.until(only(EngineState.UNFIT, "context of 64 tokens, below the 80"))


async def test_one_that_answers_garbage_is_never_asked_for_tokens_and_stops_nothing(run: Run, model_a: Path):
    await run.create()
    version = await run.publish(model_a)

    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text="[<html>", content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", garbage)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        async with server(model_a) as good:
            urls = at(f"http://{HOST}:{runner.addresses[0][1]}", good.url)
            async with run.hosted(asyncio.Event(), **urls), run.hosted(asyncio.Event(), index=1, **urls):
                _, fine = await run.until(
                    lambda engines: [e.state for e in engines] == [EngineState.STARTING, EngineState.ROUTABLE] and "came back without it" in engines[0].trouble
                )
                assert fine.version == version
    finally:
        await runner.cleanup()


async def test_of_bad_engines_each_is_out_with_its_reason_and_a_good_one_beside_them_goes_on(
    run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody at its URL, another key, another model by shape and by vocabulary, one that came back with base weights; all of them at once."""
    monkeypatch.setenv(key.VARIABLE, "mine")
    await run.create()
    shapes, words = (write_model(tmp_path / name, seed=3, **other) for name, other in (("shapes", {"hidden_size": 64}), ("words", {"vocab_size": 40})))
    async with contextlib.AsyncExitStack() as stack:
        nowhere = stack.enter_context(held_port(HOST, key="port"))
        back = stack.enter_context(held_port(HOST, key="port"))
        good, locked, other, strange = [
            await stack.enter_async_context(server(model, api_key=theirs))
            for model, theirs in ((model_b, "mine"), (model_b, "theirs"), (shapes, "mine"), (words, "mine"))
        ]
        again = contextlib.AsyncExitStack()
        await again.enter_async_context(server(model_b, port=back, api_key="mine"))
        urls = at(good.url, f"http://{HOST}:{nowhere}", locked.url, other.url, strange.url, f"http://{HOST}:{back}")
        for index in range(6):
            await stack.enter_async_context(run.hosted(asyncio.Event(), index=index, **urls))
        first = await run.publish(model_a)

        def reasons(engines: list[EngineStatus], version: Version) -> bool:
            told = [(one.state, one.trouble + one.reason) for one in sorted(engines, key=lambda one: one.engine_id)]
            wanted = [
                (EngineState.ROUTABLE, ""),
                (EngineState.STARTING, "cannot be reached"),
                (EngineState.STARTING, f"it wants another key; set {key.VARIABLE}"),
                (EngineState.UNFIT, "hidden_size 64, and the run has 32"),
                (EngineState.UNFIT, "vocab_size 40, and the run has 21"),
                (EngineState.ROUTABLE, ""),
            ]
            fits = len(told) == 6 and all(state is found and word in why for (found, why), (state, word) in zip(told, wanted, strict=True))
            return fits and {one.version for one in engines if one.state is EngineState.ROUTABLE} == {version}

        engines = {one.engine_id[-1]: one for one in await run.until(lambda engines: reasons(engines, first))}
        await again.aclose()
        await run.until(lambda engines: [one.engine_id[-1] for one in engines if one.state is EngineState.ROUTABLE] == ["0"])
        assert (await ask(session, engines["0"], "meanwhile", key="mine")).weight_version == first
        await stack.enter_async_context(server(model_b, port=back, api_key="mine"))
        second = await run.publish(model_a)
        after = {one.engine_id[-1]: one for one in await run.until(lambda engines: reasons(engines, second))}
        assert after["0"].boot_nonce == engines["0"].boot_nonce, "it was never out"
        assert after["5"].boot_nonce != engines["5"].boot_nonce, "another boot, which got the newest in full"
        assert (await ask(session, after["5"], "again", key="mine")).weight_version == second


async def test_one_that_hangs_leaves_the_routes_and_is_back_when_it_writes_again(run: Run, model_a: Path, monkeypatch: pytest.MonkeyPatch):
    await run.create()
    work, hung = Worker._work, asyncio.Event()

    def stuck(worker: Worker) -> None:
        if not hung.is_set():
            work(worker)

    monkeypatch.setattr(Worker, "_work", stuck)
    async with server(model_a) as engine, run.hosted(asyncio.Event(), **at(engine.url, progress_seconds=0.5, probe_seconds=0.5)):
        version = await run.publish(model_a)
        before = await run.serving(version)
        hung.set()
        await run.until(only(EngineState.STARTING, "/generate: no answer"))
        assert await run.registry.routable() == []
        hung.clear()
        after = await run.serving(version)
        assert after.boot_nonce != before.boot_nonce


async def test_engines_beyond_the_count_are_of_the_evaluation(run: Run, model_a: Path):
    await run.create()
    async with server(model_a) as engine:
        urls = at("http://127.0.0.1:9", engine.url, count=1) | {"eval": {"engines": 1}}
        async with run.hosted(asyncio.Event(), index=1, **urls):
            (status,) = await run.until(lambda engines: len(engines) == 1)
            assert status.fleet == "eval"


@pytest.mark.parametrize(
    ("sections", "index", "message"),
    [
        (at("http://h:1"), 1, r"engine index 1: engine\.urls has 1"),
        (at("http://h:1") | {"weights": {"transport": "nccl"}}, 0, r'weights\.transport = "nccl": an update that breaks'),
        (at(), 0, "urls is empty"),
        (at("h:1"), 0, "expected http://host:port"),
        (at("http://h:1/v1"), 0, "without a path"),
        (at("http://h:1", "http://h:1/"), 0, "http://h:1 twice"),
        (at("http://h:1", count=2), 0, "count 2 exceeds the 1 urls"),
        (at("http://h:1", port=3), 0, "leave port out"),
        ({"engine": {"slots": 4, "urls": ["http://h:1"]}}, 0, 'use kind = "external"'),
        ({"engine": {"slots": 4, "args": ["--x"]}}, 0, 'use kind = "sglang"'),
    ],
)
async def test_settings_that_cannot_be_are_named(run: Run, sections: dict[str, Any], index: int, message: str):
    with pytest.raises(ConfigError, match=message):
        await host.run_host(run.config(**sections), index, asyncio.Event())


def test_models_differ_only_by_what_both_are_known_to_have():
    assert difference({"hidden_size": 1, "head_dim": 2}, {"hidden_size": 1, "num_hidden_layers": 3}) is None
    assert difference({}, {"hidden_size": 1}) is None
    assert difference({"vocab_size": 1}, {"vocab_size": 2}) == "has another model: vocab_size 2, and the run has 1"


@pytest.mark.parametrize(("version", "known"), [("embedded", True), ("0.5.23", True), ("0.6.0", True), ("0.5.17", False), ("", False), ("None", False)])
def test_an_id_that_may_not_be_there_is_asked_for_only_where_that_is_known_to_be_harmless(version: str, known: bool):
    assert checks_ids({"version": version}) is known
