"""`python -m benchmarks.weights.load URL`: keeps requests running on one engine and says what its clients saw.

Some of the requests stream, so that a pause shows as the gap between two tokens; the others are single answers, as producers ask for them. Every request asks
for a fixed number of tokens whatever they are, so tokens that an update loses can be counted.

Commands: `window {since, until, before_s}`: gaps and rates of the streams; `totals`; `stop`: finish what runs, then the totals.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from typing import Any

import aiohttp
import orjson

from benchmarks.weights.child import Answer, answer_commands

_REQUEST_S = 300.0
_AGAIN_S = 0.2


class Load:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._stopping = False
        self._streams: list[list[tuple[float, int, int]]] = []
        """Of each stream: when a piece came, its request's number, and how many tokens that request has by then."""
        self._finished = self._tokens = self._lost = 0
        self._problems: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, session: aiohttp.ClientSession) -> None:
        for index in range(self._options.requests):
            times: list[tuple[float, int, int]] | None = None
            if index < self._options.streams:
                times = []
                self._streams.append(times)
            self._tasks.append(asyncio.create_task(self._ask_on(session, times)))

    async def handle(self, command: dict[str, Any]) -> Answer:
        if command["do"] == "window":
            return self._window(command["since"], command["until"], command.get("before_s", 2.0))
        if command["do"] == "stop":
            self._stopping = True
            await asyncio.wait(self._tasks, timeout=_REQUEST_S)
        return {"finished": self._finished, "tokens": self._tokens, "tokens_lost": self._lost, "problems": self._problems[:5], "failed": len(self._problems)}

    async def _ask_on(self, session: aiohttp.ClientSession, times: list[tuple[float, int, int]] | None) -> None:
        number = 0
        while not self._stopping:
            number += 1
            try:
                got, reason = await self._ask(session, times, number)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as problem:
                self._problems.append(f"{type(problem).__name__}: {problem}"[:300])
                self._lost += self._options.tokens
                await asyncio.sleep(_AGAIN_S)
                continue
            self._finished += 1
            self._tokens += got
            self._lost += self._options.tokens - got
            if reason != "length":
                self._problems.append(f"finished by {reason} after {got} tokens")

    async def _ask(self, session: aiohttp.ClientSession, times: list[tuple[float, int, int]] | None, number: int) -> tuple[int, str]:
        options = self._options
        body = {
            "input_ids": [self._random.randrange(4, options.vocabulary) for _ in range(options.prompt)],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": options.tokens, "ignore_eos": True},
            "return_logprob": times is None,
            "stream": times is not None,
        }
        meta: dict[str, Any] = {}
        async with session.post(options.url + "/generate", json=body) as answer:
            if times is None:
                meta = (await answer.json())["meta_info"]
            else:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        meta = orjson.loads(line[6:])["meta_info"]
                        times.append((time.monotonic(), number, meta["completion_tokens"]))
        return int(meta["completion_tokens"]), str((meta["finish_reason"] or {}).get("type"))

    def _window(self, since: float, until: float, before_s: float) -> Answer:
        """Gaps between two pieces of one request, in milliseconds: the longest that overlaps the window, and what is usual before it."""
        longest, usual = [], []
        tokens = tokens_before = 0
        for times in self._streams:
            at_update = [0.0]
            for (before, request, had), (at, same, has) in itertools.pairwise(times):
                if request == same:
                    if at >= since and before <= until:
                        at_update.append(at - before)
                    elif since - before_s <= before < since:
                        usual.append(at - before)
                    tokens += (has - had) * (since <= at < until)
                    tokens_before += (has - had) * (since - before_s <= at < since)
            longest.append(max(at_update))
        return {
            "gap_ms": max(longest, default=0.0) * 1e3,
            "usual_gap_ms": statistics.median(usual) * 1e3 if usual else None,
            "longest_usual_gap_ms": max(usual) * 1e3 if usual else None,
            "tokens_per_s": tokens / (until - since) if until > since else None,
            "tokens_per_s_before": tokens_before / before_s,
        }


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--streams", type=int, default=2, help="of the requests, so many stream")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--seed", type=int, default=0)
    load = Load(parser.parse_args())
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # servers close idle connections after seconds
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_REQUEST_S), read_bufsize=1 << 22) as session:
        load.start(session)
        await answer_commands(load.handle)


if __name__ == "__main__":
    asyncio.run(main())
