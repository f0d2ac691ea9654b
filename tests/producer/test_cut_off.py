"""Engines that die, freeze or answer nonsense in the middle of responses: what they wrote is kept, others go on, and no group fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from producer import breaker
from producer.engine.client import EngineClient, Sampling, open_session
from producer.pool import EnginePool
from producer.rollout import Finished, GroupMaker
from producer.sampler import Sampled, Sampler
from producer.source import PromptSource
from protocol.errors import SampleFailed
from protocol.messages import EngineState
from tests.producer.streaming import Ill, StreamingEngine, process, register, response

TOKENS = 12


class Bench:
    """A sampler of a run, and the engines it finds."""

    def __init__(self, stage: Any, config: Any, prepared: Any, client: EngineClient) -> None:
        self.stage, self.config, self.client = stage, config, client
        self.pool = EnginePool(
            stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0, router_url=config.producer.router_url, on_engines=client.progress.heard
        )
        self.sampler = Sampler(pool=self.pool, client=client, grader=prepared.grader, config=config.producer, decode=prepared.decode)
        self.chosen = PromptSource(prepared.prompts, seed=0).choose(0)

    async def sample(self, tokens: int = TOKENS, **options: Any) -> Sampled:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        return await self.sampler.sample(self.chosen, self.chosen.ids.tolist(), min_version=None, sampling=sampling, rid="r", **options)

    async def add(self, name: str, engine: StreamingEngine, **fields: Any) -> None:
        await register(self.stage.registry, name, engine.url, **fields)
        await self.pool.refresh()

    async def status(self, name: str) -> Any:
        return {one.engine_id: one for one in await self.stage.registry.engines()}[name]

    def is_whole(self, made: Sampled, tokens: int = TOKENS) -> bool:
        prompt = self.chosen.ids.tolist()
        rollout = made.rollout
        expected: list[int] = [*prompt, *response(prompt, tokens)]
        spans = [(str(span.version), span.start, span.end) for span in rollout.spans]
        return (
            rollout.tokens.tolist() == expected
            and spans == [("1:0", len(prompt), len(expected))]
            and rollout.logprobs[len(prompt) :].tolist() == [-0.5] * tokens
        )


@contextlib.asynccontextmanager
async def bench(stage: Any, *, progress_s: float = 30.0, stream: bool = True, **producer: Any) -> AsyncIterator[Bench]:
    config = stage.config(producer={"sample_retries": 0, "sample_deadline_seconds": 60.0, "group_deadline_seconds": 300.0} | producer)
    prepared = await stage.create(config)
    async with open_session() as session:
        made = Bench(stage, config, prepared, EngineClient(session, stream=stream, progress_s=progress_s))
        watch = asyncio.create_task(made.sampler.watch(), name="progress")
        try:
            yield made
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def once(ill: Ill) -> Any:
    """The first request goes wrong, no other."""
    ills = iter([ill])
    return lambda _: next(ills, None)


@pytest.mark.parametrize("how", ["drop", "end"])
async def test_a_response_that_is_cut_off_goes_on_elsewhere_from_its_tokens_and_costs_no_attempt(stage: Any, how: str) -> None:
    """With no retry allowed at all."""
    first, second = StreamingEngine(behave=once(Ill(after=5, how=how))), StreamingEngine()
    async with bench(stage) as at, first.serving(), second.serving():
        await at.add("a", first)
        await at.add("b", second)
        made = await at.sample()
        assert at.is_whole(made)
        assert made.rollout.engine_id == "b"
        assert [len(request["input_ids"]) - len(at.chosen.ids) for request in (*first.requests, *second.requests)] == [0, 5]
        assert second.requests[0]["sampling_params"]["max_new_tokens"] == TOKENS - 5
        assert (at.sampler.retried, at.sampler.aborted, at.sampler.kept_tokens) == (1, 0, 5)
        assert first.generated + second.generated == TOKENS, "nothing is sampled twice"


async def test_one_that_has_all_its_tokens_when_it_is_cut_off_asks_for_no_more(stage: Any) -> None:
    engine = StreamingEngine(step=5, behave=once(Ill(after=10)))
    async with bench(stage) as at, engine.serving():
        await at.add("a", engine)
        assert at.is_whole(await at.sample(10), 10)
        assert len(engine.requests) == 1


async def test_a_response_that_fails_without_a_token_costs_an_attempt(stage: Any) -> None:
    engine = StreamingEngine(behave=once(Ill(after=0, how="drop")))
    async with bench(stage) as at, engine.serving():
        await at.add("a", engine)
        with pytest.raises(SampleFailed, match=r"1 attempts failed, the last one: engine .* broke the connection"):
            await at.sample()


async def test_a_request_that_an_update_aborts_before_it_began_is_asked_again_and_is_nobodys_fault(stage: Any) -> None:
    """As SGLang 0.5.17 aborts what its HTTP process still holds, by the hundred where requests are short; no retry is allowed here."""
    ills = iter([Ill(how="499")] * 5)
    engine = StreamingEngine(behave=lambda _: next(ills, None))
    async with bench(stage) as at, engine.serving():
        await at.add("a", engine)
        assert at.is_whole(await at.sample())
        assert (at.sampler.aborted, len(engine.requests)) == (5, 6)
        assert at.pool.resting == {}
        assert (await at.status("a")).state is EngineState.ROUTABLE


async def test_what_an_engine_calls_failed_is_not_kept(stage: Any) -> None:
    engine = StreamingEngine(behave=once(Ill(after=5, how="error")))
    async with bench(stage, sample_retries=1) as at, engine.serving():
        await at.add("a", engine)
        assert at.is_whole(await at.sample())
        assert [len(request["input_ids"]) - len(at.chosen.ids) for request in engine.requests] == [0, 0]


async def test_tokens_survive_the_deadline_of_a_request(stage: Any) -> None:
    first, second = StreamingEngine(behave=lambda _: Ill(after=5, how="hang")), StreamingEngine()
    async with bench(stage, sample_deadline_seconds=5.0) as at, first.serving(), second.serving():
        await at.add("a", first)
        await at.add("b", second)
        assert at.is_whole(await at.sample())
        assert first.aborted == ["r.0."]
        assert at.pool.resting == {}, "it was slow, which is no fault"


@pytest.mark.parametrize("deed", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_process_that_is_killed_or_frozen_does_not_hold_its_requests(stage: Any, deed: signal.Signals) -> None:
    second = StreamingEngine()
    async with bench(stage, progress_s=1.0, sample_deadline_seconds=60.0) as at, process(5) as (running, url), second.serving():
        await register(stage.registry, "a", url)
        await at.pool.refresh()
        sign = asyncio.Event()
        at.client.progress.moved = lambda _url: sign.set()  # type: ignore[method-assign]
        sampling = asyncio.create_task(at.sample(), name="sample")
        await sign.wait()
        del at.client.progress.moved
        await asyncio.sleep(0)
        await at.add("b", second)
        os.kill(running.pid, deed)
        made = await sampling
        assert at.is_whole(made)
        assert made.rollout.engine_id == "b"
        assert second.generated < TOKENS
        if deed is signal.SIGSTOP:
            assert "answers nothing any more" in at.pool.resting["a"]


async def test_a_wedged_engine_is_told_from_a_paused_one(stage: Any) -> None:
    paused, wedged = StreamingEngine(ready=503, behave=once(Ill(after=5, how="hang"))), StreamingEngine(behave=once(Ill(after=5, how="hang")))
    async with bench(stage, progress_s=1.0, sample_deadline_seconds=60.0) as at, paused.serving(), wedged.serving():
        await at.add("paused", paused)
        held = asyncio.create_task(at.sample(), name="held")
        async with asyncio.timeout(100):
            while not paused.looks:
                await asyncio.sleep(0.01)
        assert not held.done()
        await at.add("wedged", wedged)
        paused.behave = lambda _: None
        assert at.is_whole(await at.sample())
        assert len(wedged.requests) == 1
        assert "generates nothing" in (await at.status("wedged")).reason
        assert (await at.status("paused")).state is EngineState.ROUTABLE
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("401", "answered 401"),
        ("403", "answered 403"),
        ("404", "answered 404"),
        ("garbage", "of no use"),
        ("no logprobs", "output_token_logprobs"),
        ("400", "rejects what others take"),
    ],
)
async def test_an_engine_whose_answers_are_of_no_use_is_out_with_its_reason_and_nothing_else_stops(
    stage: Any, how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong key, no engine, no engine of ours, another model: no group fails for it."""
    for name in ("FIRST_REST_S", "LONGEST_REST_S", "FIRST_EXILE_S", "LONGEST_EXILE_S"):
        monkeypatch.setattr(breaker, name, 3600.0)
    bad, good = StreamingEngine(), StreamingEngine()
    if how.isdigit():
        bad.behave = lambda _: Ill(how=how)
    else:
        whole = bad._event

        def event(*what: Any, last: bool) -> Any:
            made = whole(*what, last=last)
            if how == "no logprobs":
                made["meta_info"]["output_token_logprobs"] = None
            return made if how == "no logprobs" else {"hello": "world"}

        bad._event = event  # type: ignore[method-assign]
    async with bench(stage, sample_retries=3) as at, bad.serving(), good.serving():
        await at.add("bad", bad)
        await at.add("good", good)
        made = [await at.sample() for _ in range(8)]
        assert all(at.is_whole(one) for one in made)
        status = await at.status("bad")
        assert status.state is EngineState.UNFIT
        assert reason in status.reason
        assert reason in at.pool.resting.get("bad", reason)
        asked = len(bad.requests)
        assert asked <= 3
        await at.stage.registry.ack("bad", "boot:1", status.version)
        await at.pool.refresh()
        again = [await at.sample() for _ in range(3)]
        assert all(at.is_whole(one) for one in again)
        assert len(bad.requests) == asked, "new weights do not make it well before its rest is over"


async def test_with_nobody_but_an_engine_that_refuses_samples_wait_and_fail_no_group(stage: Any) -> None:
    bad, good = StreamingEngine(behave=lambda _: Ill(how="401")), StreamingEngine()
    async with bench(stage, sample_retries=1) as at, bad.serving(), good.serving():
        await at.add("bad", bad)
        waiting = asyncio.gather(*(at.sample() for _ in range(4)))
        async with asyncio.timeout(100):
            while (await at.status("bad")).state is not EngineState.UNFIT or len(at.pool._waiting) < 4:
                await asyncio.sleep(0.01)
        assert at.pool.waiting_since > 0
        await at.add("good", good)
        assert all(at.is_whole(one) for one in await waiting)
    assert at.pool.waiting_since == 0


@pytest.mark.parametrize(("stream", "most"), [(True, 1.01), (False, 1.06)])
async def test_a_request_in_twenty_that_fails_costs_few_tokens_and_no_group(stage: Any, stream: bool, most: float) -> None:
    """Counted and not timed: tokens that engines sampled, over tokens that rollouts have."""
    chance, groups, size, tokens = random.Random(5), 40, 8, 40
    hows = itertools.cycle(["drop", "end", "500", "503"])

    def behave(_: dict[str, Any]) -> Ill | None:
        return Ill(after=chance.randrange(tokens), how=next(hows)) if chance.random() < 0.05 else None

    engines = [StreamingEngine(behave=behave) for _ in range(2)]
    async with bench(stage, stream=stream, sample_retries=3) as at, engines[0].serving(), engines[1].serving():
        for number, engine in enumerate(engines):
            await at.add(str(number), engine)
        maker = GroupMaker(
            at.sampler,
            Sampling(max_new_tokens=tokens, ignore_eos=True),
            group_size=size,
            group_filter=at.config.producer.filter,
            producer_id="p",
            owner="o" * 16,
        )
        granted = await stage.ledger.reserve("o" * 16, "r", 1, max_bytes=1 << 20)
        (slot,) = granted.slots
        made = [await maker.make(slot, at.chosen) for _ in range(groups)]
        assert all(isinstance(one, Finished) for one in made)
        kept = sum(one.new_tokens for one in made if isinstance(one, Finished))
        assert kept == groups * size * tokens
        requests = sum(len(engine.requests) for engine in engines)
        assert requests - groups * size >= 8, "some should have failed"
        assert 1.0 <= sum(engine.generated for engine in engines) / kept < most
