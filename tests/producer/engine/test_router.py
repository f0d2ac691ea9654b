"""The router of SGLang in front of a fleet: each host has its engine behind it while that may be asked, with the real router and with one of ours."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from producer.engine.client import EngineClient, Sampling
from producer.engine.router import Router
from protocol.messages import EngineState
from tests.clusters import free_ports
from tests.contract.served import interpreter

from .hosting import WAIT_S, Run


class Stood:
    """`/workers` as release 0.3.2 answers it."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, object]] = {}
        self.asked: list[str] = []
        self.refuses = False

    async def get(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": list(self.workers.values()), "total": len(self.workers), "stats": {}})

    async def post(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.asked.append(f"POST {http.headers.get('Authorization')}")
        if self.refuses:
            return web.json_response({"error": "no"}, status=503)
        worker = uuid.uuid4().hex
        self.workers[worker] = body | {"id": worker}
        return web.json_response({"status": "accepted", "worker_id": worker, "url": body["url"], "location": f"/workers/{worker}"}, status=202)

    async def delete(self, http: web.Request) -> web.Response:
        self.asked.append("DELETE")
        del self.workers[http.match_info["worker"]]
        return web.json_response({"status": "accepted"}, status=202)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/workers", self.get), web.post("/workers", self.post), web.delete("/workers/{worker}", self.delete)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def test_an_engine_is_put_there_once_and_who_is_not_routable_is_taken_out_and_others_stay(session: aiohttp.ClientSession):
    stood = Stood()
    stood.workers |= {"x": {"id": "x", "url": "http://other:1", "model_id": "theirs"}, "y": {"id": "y", "url": "http://dead:1", "model_id": "r"}}
    async with stood.served() as url:
        router = Router(session, url + "/", "http://mine:2", model="r", api_key="secret")
        for _ in range(2):
            await router.tell({"http://mine:2", "http://next:3"})
        (mine,) = [worker for worker in stood.workers.values() if worker["id"] != "x"]
        assert {"url": "http://mine:2", "model_id": "r", "api_key": "secret", "disable_health_check": True}.items() <= mine.items()
        for _ in range(2):
            await router.tell({"http://next:3"})
        assert list(stood.workers) == ["x"]
        assert stood.asked == ["POST Bearer secret", "DELETE", "DELETE"]
        await router.tell({"http://mine:2"})
        await router.leave()
        assert list(stood.workers) == ["x"]


async def test_a_router_that_does_not_do_it_is_told_of_once_and_asked_again(session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture):
    stood = Stood()
    stood.refuses = True
    async with stood.served() as url:
        router = Router(session, url, "http://mine:2", model="r")
        for _ in range(2):
            await router.tell({"http://mine:2"})
        assert [record.message for record in caplog.records] == [
            f'the router at {url} does not take engine http://mine:2: POST /workers was answered with 503: {{"error": "no"}}'
        ]
        stood.refuses = False
        await router.tell({"http://mine:2"})
        assert len(stood.workers) == 1
    await Router(session, url, "http://mine:2", model="r").leave()


async def test_a_host_has_its_engine_behind_the_router_while_that_is_routable(run: Run, model_b: Path):
    stood = Stood()
    async with stood.served() as url:
        async with run.hosted(asyncio.Event(), producer={"router_url": url}):
            (engine,) = await run.until(lambda engines: len(engines) == 1)
            await run.create()
            assert stood.workers == {}
            version = await run.publish(model_b)
            await run.serving(version)
            await until(lambda: [worker["url"] for worker in stood.workers.values()] == [engine.url])
            await run.registry.mark_unfit(engine.engine_id, engine.boot_nonce, "a test")
            await run.serving(version)
            await until(lambda: len(stood.workers) == 1)
        assert stood.workers == {}


_REAL = """
import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()
"""
"""Its own launcher imports SGLang too, and with it torchvision, which loads in our launcher alone where there is no GPU."""


@pytest.mark.sglang
@pytest.mark.timeout(900)
async def test_the_real_router_sends_requests_to_engines_that_began_after_it_and_to_none_that_left(
    run: Run, session: aiohttp.ClientSession, model_b: Path, tmp_path: Path
):
    port, figures = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    words = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(figures), "--disable-retries", "--policy", "round_robin")
    with (tmp_path / "router.log").open("wb") as log, subprocess.Popen(
        (interpreter(), "-c", _REAL, *words), stdout=log, stderr=log
    ) as router:  # fmt: skip
        try:
            first, second = asyncio.Event(), asyncio.Event()
            run.values["producer"] = {"router_url": url}
            async with run.two_hosted(first, second) as (one, _):
                await run.create()
                version = await run.publish(model_b)
                await run.until(lambda engines: [engine.version for engine in engines if engine.state is EngineState.ROUTABLE] == [version] * 2)
                await until_workers(session, url, 2)
                for number in range(4):
                    assert await written(session, url, f"r-{number}") == 5
                tokens = [engine.generated_tokens for engine in await run.until(lambda engines: sum(e.generated_tokens for e in engines) >= 20)]
                assert min(tokens) > 0, "both were asked"
                first.set()
                await one
                await until_workers(session, url, 1)
                for number in range(3):
                    assert await written(session, url, f"s-{number}") == 5
            await until_workers(session, url, 0)
        finally:
            router.kill()


async def written(session: aiohttp.ClientSession, url: str, rid: str) -> int:
    sampling = Sampling(max_new_tokens=5, ignore_eos=True)
    return len((await EngineClient(session, stream=True).generate(url, [1, 7, 9], sampling=sampling, rid=rid, deadline_s=120)).output_ids)


async def until_workers(session: aiohttp.ClientSession, url: str, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/workers") as answer:
                    if (await answer.json())["total"] == count:
                        return
            await asyncio.sleep(0.2)


async def until(holds: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.05)
