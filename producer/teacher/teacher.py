"""Scores finished rollouts at the teacher's servers. A server that fails rests and is asked again; a group waits for its scores as long as it takes.

consumes: rollouts   produces: `teacher_logprobs`   waits for: a server (edge no teacher)   unblocked by: a server that answers

Groups that wait keep their slots, so nothing is lost, and no more is generated than `producer.max_inflight_groups`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from producer.teacher.config import TeacherConfig
from producer.teacher.scoring import BadAnswer, asked, check_vocabulary, probes, sampled_range, scored
from protocol.arrays import FloatArray
from protocol.errors import ConfigError, SampleFailed
from protocol.messages import Rollout

_LOG = logging.getLogger(__name__)
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 10.0
_START_S = 10.0
"""At the start a server is waited for so long; one that answers later is checked then."""
_TELLS = 300
_WRONG_REQUEST = frozenset({400, 413, 422})
_BAD_ANSWERS = 3
"""So many of no use to one rollout are its fault, not the servers'."""


class _Unavailable(Exception):
    """The server is not to be asked for a while."""


class _Rejected(Exception):
    """The server does not take this request."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    running: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """By the monotonic clock."""
    problem: str = ""
    proven: bool = False
    """Its vocabulary is the policy's; asked again of one that was away, as another may have come back."""
    proving: asyncio.Lock = field(default_factory=asyncio.Lock)


class Teacher:
    """The teacher's servers, as one producer sees them."""

    def __init__(self, session: aiohttp.ClientSession, config: TeacherConfig, *, texts: Mapping[int, str], key: str = "") -> None:
        """`texts`: what some tokens of the policy's vocabulary are called (`scoring.spread`)."""
        self._session = session
        self._texts = texts
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout_s = config.timeout_seconds
        self._room = asyncio.Semaphore(config.concurrency)
        self._servers = [_Server(url) for url in config.urls]
        self._asking = 0
        """Rollouts under way."""
        self._away_since = 0.0

    @property
    def waiting_since(self) -> float:
        """Unix seconds since when every server has failed whoever asked; 0: none waits."""
        return self._away_since if self._asking else 0.0

    @property
    def resting(self) -> dict[str, str]:
        """Why servers are left alone for now, by URL."""
        now = time.monotonic()
        return {f"teacher {server.url}": server.problem for server in self._servers if server.rests_until > now}

    async def check(self) -> None:
        """Whether every server has the policy's vocabulary; one that is away is checked when it is first asked. Raises: `ConfigError`."""
        await asyncio.gather(*map(self._check, self._servers))

    async def _check(self, server: _Server) -> None:
        try:
            async with asyncio.timeout(_START_S):
                await self._prove(server)
        except (TimeoutError, _Unavailable) as problem:
            _LOG.warning("teacher %s does not answer yet (%s); groups will wait for it", server.url, str(problem) or f"nothing for {_START_S:.0f} s")

    async def score(self, rollouts: Sequence[Rollout]) -> FloatArray:
        """Of a group's rollouts, end to end.

        Shapes: [T] float32 of all their tokens: nats, 0 where the policy did not sample.
        Raises: `SampleFailed` where a server refuses a rollout, or servers give it answers of no use again and again; `ConfigError` where one
        has another vocabulary.
        """
        worst: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(rollout), name="producer:teacher") for rollout in rollouts]
        except* (SampleFailed, ConfigError) as problems:
            worst = _worst(problems)
        if worst is not None:
            raise worst
        return np.concatenate([task.result() for task in tasks])

    async def _score(self, rollout: Rollout) -> FloatArray:
        if sampled_range(rollout) == (0, 0):
            return np.zeros(len(rollout.tokens), dtype=np.float32)
        body = orjson.dumps(asked(rollout))
        self._asking += 1
        try:
            async with self._room:
                bad = 0
                while True:
                    try:
                        if (told := await self._try(rollout, body)) is not None:
                            return told
                    except BadAnswer as problem:
                        bad += 1
                        if bad == _BAD_ANSWERS:
                            raise SampleFailed(f"teachers gave {bad} answers of no use to a rollout of {len(rollout.tokens)} tokens: {problem}") from problem
        finally:
            self._asking -= 1

    async def _try(self, rollout: Rollout, body: bytes) -> FloatArray | None:
        """None: the server that was asked failed, and rests. Raises: `BadAnswer` (it rests too), `SampleFailed`, `ConfigError`."""
        server = await self._free()
        server.running += 1
        try:
            await self._prove(server)
            told = scored(rollout, await self._post(server.url, body))
        except _Rejected as problem:
            raise SampleFailed(f"teacher {server.url} refuses a rollout of {len(rollout.tokens)} tokens: {problem}") from problem
        except _Unavailable as problem:
            self._rest(server, str(problem))
            return None
        except BadAnswer as problem:
            self._rest(server, str(problem))
            raise
        finally:
            server.running -= 1
        self._well(server)
        return told

    async def _free(self) -> _Server:
        """The least busy server that does not rest, once there is one."""
        while True:
            now = time.monotonic()
            if awake := [server for server in self._servers if server.rests_until <= now]:
                return min(awake, key=lambda server: server.running)
            self._away_since = self._away_since or time.time()
            await asyncio.sleep(min(server.rests_until for server in self._servers) - now)

    def _rest(self, server: _Server, problem: str) -> None:
        if not server.failures:
            _LOG.warning("teacher %s: %s; asking again", server.url, problem)
        if server.rests_until <= time.monotonic():  # several requests that fail together are one failure
            server.failures += 1
            pause_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(server.failures - 1, 10))
            server.rests_until = time.monotonic() + pause_s * (0.5 + random.random())
        server.problem, server.proven = problem[:_TELLS], False

    def _well(self, server: _Server) -> None:
        if server.failures:
            _LOG.info("teacher %s answers again", server.url)
        server.failures, server.rests_until, server.problem = 0, 0.0, ""
        self._away_since = 0.0

    async def _prove(self, server: _Server) -> None:
        """Raises: `ConfigError` for another vocabulary; `_Unavailable`."""
        async with server.proving:
            if server.proven:
                return
            for body, ids in probes(self._texts):
                try:
                    check_vocabulary(server.url, self._texts, ids, await self._post(server.url, orjson.dumps(body)))
                except _Rejected as problem:
                    raise ConfigError(
                        f"teacher.urls {server.url}: refuses tokens of model.path's vocabulary ({problem}): use a teacher that has the policy's vocabulary"
                    ) from problem
                except BadAnswer as problem:
                    raise _Unavailable(str(problem)) from problem
            server.proven = True

    async def _post(self, url: str, body: bytes) -> Any:
        """Raises: `_Rejected`, `_Unavailable`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._session.post(f"{url}/generate", data=body, headers=self._headers) as reply:
                    data = await reply.read()
        except TimeoutError as problem:
            raise _Unavailable(f"no answer within {self._timeout_s:g} s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise _Unavailable(f"cannot be reached ({type(problem).__name__}: {problem})") from problem
        if reply.status != 200:
            said = f"{reply.status}: {data[:_TELLS].decode(errors='replace')}"
            raise _Rejected(said) if reply.status in _WRONG_REQUEST else _Unavailable(f"answered {said}")
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as problem:
            raise _Unavailable(f"answered no JSON ({problem})") from problem


def _worst(problems: BaseExceptionGroup[Exception]) -> Exception:
    """What a person must mend, if that is among them; `problems` are of single tasks."""
    found = [one for one in problems.exceptions if isinstance(one, SampleFailed | ConfigError)]
    return next((one for one in found if isinstance(one, ConfigError)), found[0])
