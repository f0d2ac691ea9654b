"""Samples of our own that live through updates, beside those of the producers: which version the engine named when it sent each token.

    POST /generate (stream) ──event──► tokens, all under the version that the event names
                            ──ended by the engine──► asked again from the tokens it has, as producers do

SGLang before 0.5.19 says nowhere else which version wrote a token. What it had sampled before an update may be sent after it, so the first tokens under another
version count for neither side. What an engine writes while its weights are nobody's (between turns) is thrown away.
"""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from producer.engine.stream import Lines
from protocol.connection import Client
from protocol.keys import Keys
from weightsync.registry import Registry

_VERSION = re.compile(r"\d+:\d+")
_EDGE = 4
"""Tokens under another version than those before, which count for neither; or all of their event, if that has more."""
_KEPT = 600
_REST_S = 0.2
_REQUEST_S = 120.0


class Odd(Exception):
    """The engine writes under no version of the run."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One response. `versions` and `edge` have an entry for each of `ids`."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    edge: list[bool] = field(default_factory=list)
    requests: int = 0
    """How often it was asked for: once more after each time that the engine ended it."""


class Story:
    """One request of a sample. `plus` takes its events in.

    >>> sample = Sample(prompt=[1])
    >>> story = Story(sample)
    >>> def event(ids, version, finish=None):
    ...     meta = {"completion_tokens": len(ids), "output_token_logprobs": [[-1.0, one, None] for one in ids], "weight_version": version}
    ...     return {"output_ids": ids, "meta_info": meta | {"finish_reason": finish}}
    >>> story.plus(event([7, 8], "1:3")), story.plus(event([7, 8, 9], "1:4")), story.plus(event([7, 8, 9, 5], "1:4", {"type": "length"}))
    (None, None, 'length')
    >>> sample.ids, sample.versions, sample.edge
    ([7, 8, 9, 5], ['1:3', '1:3', '1:4', '1:4'], [False, False, True, True])
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._had = 0
        """Tokens of this request so far."""
        self._edge_left = 0
        sample.requests += 1

    def plus(self, event: Mapping[str, Any]) -> str | None:
        """How the request finished, if this event is its last. Raises: `Odd`, and the event's tokens are not taken; `KeyError` for what is no event."""
        meta = event["meta_info"]
        fresh, finish = int(meta["completion_tokens"]) - self._had, meta.get("finish_reason")
        if fresh > 0:
            self._take(list(event["output_ids"])[-fresh:], list(meta["output_token_logprobs"])[-fresh:], str(meta.get("weight_version")))
            self._had += fresh
        return None if finish is None else str(finish["type"])

    def _take(self, ids: Sequence[int], logprobs: Sequence[Sequence[Any]], version: str) -> None:
        sample = self._sample
        if not _VERSION.fullmatch(version):
            raise Odd(version)
        if sample.versions and sample.versions[-1] != version:
            self._edge_left = max(_EDGE, len(ids))
        for token, (logprob, *_) in zip(ids, logprobs, strict=True):
            sample.ids.append(token)
            sample.logprobs.append(float(logprob))
            sample.versions.append(version)
            sample.edge.append(self._edge_left > 0)
            self._edge_left -= 1


class Streams:
    """`await run(...)` until it is cancelled; then `save`."""

    def __init__(self, prompts: Sequence[list[int]], *, count: int, tokens: int) -> None:
        """`count` samples at a time, of `tokens` tokens each."""
        self._prompts, self._count, self._tokens = prompts, count, tokens
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._random = random.Random(11)
        self.faults = 0
        """Requests that failed otherwise than by the engine's own will."""
        self.problem = ""
        """Why they ended before they were told to."""

    async def run(self, client: Client, run_name: str) -> None:
        registry = Registry(client, Keys(run_name))
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for index in range(self._count):
                group.create_task(self._one_after_the_other(session, registry), name=f"streams:{index}")

    async def _one_after_the_other(self, session: aiohttp.ClientSession, registry: Registry) -> None:
        while True:
            sample = Sample(prompt=self._random.choice(self._prompts))
            while len(sample.ids) < self._tokens:
                engines = await registry.routable()
                if not engines:
                    await asyncio.sleep(_REST_S)
                    continue
                try:
                    finish = await self._request(session, engines[0].url, sample)
                except Odd:
                    finish = None
                except (aiohttp.ClientError, OSError, TimeoutError, KeyError):
                    self.faults += 1
                    finish = None
                if finish is None:
                    await asyncio.sleep(_REST_S)
            self._samples.append(sample)

    async def _request(self, session: aiohttp.ClientSession, url: str, sample: Sample) -> str | None:
        left = self._tokens - len(sample.ids)
        body = {
            "input_ids": sample.prompt + sample.ids,
            "rid": f"stream-{uuid.uuid4().hex}.",
            "sampling_params": {"max_new_tokens": left, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        story, lines, finish = Story(sample), Lines(self._tokens), None
        async with session.post(f"{url}/generate", json=body) as answer:
            answer.raise_for_status()
            async for data in answer.content.iter_any():
                for line in lines.plus(data):
                    if line != b"[DONE]":
                        finish = story.plus(orjson.loads(line))
        return finish

    def save(self, path: Path) -> None:
        path.write_bytes(orjson.dumps([asdict(sample) for sample in self._samples]))

    @property
    def told(self) -> dict[str, Any]:
        crossed = sum(len(set(sample.versions)) > 1 for sample in self._samples)
        again = sum(sample.requests - 1 for sample in self._samples)
        return {"samples": len(self._samples), "through_an_update": crossed, "asked_again": again, "faults": self.faults, "problem": self.problem}
