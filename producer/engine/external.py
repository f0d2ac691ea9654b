"""An engine that somebody else runs, by its URL: followed and given weights, never started and never ended from here.

It may be away, come back with other weights, or turn out to be of another model; each is told, and looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Never

import aiohttp
import orjson

from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault, Figures, Meeting, Misfit
from producer.engine.key import ADMIN_VARIABLE, VARIABLE
from producer.engine.sglang.figures import capacity
from producer.engine.sglang.watch import Watch
from protocol.errors import ApplyFailed, ConfigError, DecodeError, EngineUnavailable
from weightsync.dialect import EMBEDDED, ended_by_updates
from weightsync.lora import LoraConfig

_NO_LORA = LoraConfig()
_ASK_S = 5.0
_FIRST_KNOCK_S, _LAST_KNOCK_S = 1.0, 15.0
_REFUSALS = (ApplyFailed, EngineUnavailable, DecodeError)
_SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
_CHECKS_IDS_SINCE = (0, 5, 23)
"""As far as tried: what an older one does with an id beyond its vocabulary is not known, and on a GPU it may end it."""


class ExternalServer:
    """`Kind` of an engine behind `engine.urls[index]`."""

    name = "external"
    lives_on = True
    start_tries = 0

    def __init__(self, settings: EngineConfig, *, index: int, model: str, longest: int, lora: LoraConfig = _NO_LORA) -> None:
        """`model`: folder of the run's model. `longest`: tokens of the longest request. Raises: `ConfigError` when there is no URL of this index."""
        if index >= len(settings.urls):
            raise ConfigError(f"engine index {index}: engine.urls has {len(settings.urls)}; add the URL of this engine, or start fewer hosts")
        self._settings, self._url, self._model, self._longest, self._lora = settings, settings.urls[index].rstrip("/"), model, longest, lora

    @contextlib.asynccontextmanager
    async def life(self, _: str, desk: Desk, /) -> AsyncIterator[ExternalLife]:
        yield ExternalLife(self._url, self._settings, desk, model=self._model, longest=self._longest, lora=self._lora)


class ExternalLife:
    """`Hosted` from one time that it was away to the next."""

    meeting: Meeting | None = None

    def __init__(self, url: str, settings: EngineConfig, desk: Desk, *, model: str, longest: int, lora: LoraConfig = _NO_LORA) -> None:
        self.url = url
        self._settings, self._desk, self._model, self._longest, self._lora = settings, desk, model, longest, lora
        self._watch: Watch | None = None
        self.trouble = f"{url} has not answered yet"

    @property
    def figures(self) -> Figures:
        return Figures() if self._watch is None else self._watch.figures

    @property
    def idle(self) -> bool:
        return self._watch is not None and self._watch.idle

    async def ready(self) -> None:
        """It answers, with our key, has our model, and writes a token; waited for without end. Raises: `Misfit`."""
        control = self._desk.control(self.url)
        knock_s = _FIRST_KNOCK_S
        while True:
            try:
                about = await control.model_info(deadline_s=_ASK_S)
                settings = await control.server_info(deadline_s=_ASK_S)
                if (why := await self._misfit(about, settings)) is not None:
                    raise Misfit(f"{self.url} {why}: put one that fits there, or take it out of engine.urls; nothing is loaded or generated there meanwhile")
                await control.probe(deadline_s=self._settings.probe_seconds)
                break
            except _REFUSALS as problem:
                self.trouble = _explained(str(problem))
            await asyncio.sleep(knock_s)
            knock_s = min(2 * knock_s, _LAST_KNOCK_S)
        self._watch = Watch(self.url, self._desk, self._settings, capacity=capacity(settings))
        self.trouble = ""

    async def _misfit(self, about: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
        ours = _config(self._model)
        if about.get("is_generation") is False:
            return "is no engine that generates"
        if why := difference(ours, _told(about)):
            return why
        if why := ended_by_updates(settings):
            return why
        if self._lora.adapters and (why := without_adapters(self._lora, settings)) is not None:
            return why
        length = settings.get("context_length")
        if type(length) is int and length < self._longest:
            return f"has a context of {length} tokens, below the {self._longest} of rollout.max_prompt_tokens and max_new_tokens"
        return await self._vocabulary(ours, settings)

    async def _vocabulary(self, ours: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
        """Not told anywhere, and the one thing that could be silently wrong. Engines that check ids refuse exactly those that they do not have; others are not
        asked, as an id that is not there may end them.
        """
        size = ours.get("vocab_size")
        if type(size) is not int or not checks_ids(settings):
            return None
        embedded = settings.get("version") == EMBEDDED
        if not await self._has(size - 1, embedded=embedded):
            return f"has a smaller vocabulary than the run's model, which has {size} ids"
        if await self._has(size, embedded=embedded):
            return f"has a larger vocabulary than the run's model, which has {size} ids"
        return None

    async def _has(self, token: int, *, embedded: bool) -> bool:
        """SGLang takes prompts with ids that it does not have, without a word; what it refuses is to tell their logprob. The embedded engine refuses them.

        Raises: `EngineUnavailable`.
        """
        body: dict[str, Any] = {"rid": f"probe-{uuid.uuid4().hex[:12]}", "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        body |= {"input_ids": [token]} if embedded else {"input_ids": [0], "return_logprob": True, "token_ids_logprob": [token]}
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_seconds)
        headers = self._desk.headers | {"Content-Type": "application/json"}
        try:
            async with self._desk.session.post(f"{self.url}/generate", data=orjson.dumps(body), headers=headers, timeout=timeout) as answer:
                text = (await answer.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise EngineUnavailable(f"{self.url}/generate: no answer ({str(problem) or type(problem).__name__})") from problem
        if answer.status == 400 and "vocabulary" in text:
            return False
        if answer.status != 200:
            raise EngineUnavailable(f"{self.url}/generate answered {answer.status}: {text:.300}")
        return True

    async def failed(self) -> Never:
        """Raises: `EngineFault` when it is away, hangs, or serves what it was not given."""
        assert self._watch is not None, "`ready` comes first"
        await self._watch.run()
        raise AssertionError

    async def until_idle(self) -> None:
        """Others may ask it too, so that it never is; the caller's deadline bounds this."""
        if self._watch is not None:
            with contextlib.suppress(EngineFault):
                await self._watch.until_idle()


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """How the engine's model differs from the run's, by what both are known to have; None: not at all.

    >>> difference({"model_type": "qwen3", "hidden_size": 64}, {"model_type": "qwen3", "hidden_size": 128})
    'has another model: hidden_size 128, and the run has 64'
    """
    for key in ("architectures", *_SHAPES):
        if key in ours and key in theirs and ours[key] != theirs[key]:
            return f"has another model: {key} {theirs[key]}, and the run has {ours[key]}"
    return None


def without_adapters(lora: LoraConfig, settings: Mapping[str, Any]) -> str | None:
    """Why an engine with these settings could not take the run's adapters, and how to start it; None: it can, as far as it tells.

    >>> without_adapters(LoraConfig(rank=8, publish="adapter", target_modules=["q_proj"]), {"enable_lora": True, "max_lora_rank": 4})
    'takes adapters up to rank 4, and lora.rank is 8: start it with --enable-lora --max-lora-rank 8 --lora-target-modules q_proj --max-loras-per-batch 6'
    """
    start = f": start it with {' '.join(lora.server_flags())}"
    rank, targets, places = settings.get("max_lora_rank"), settings.get("lora_target_modules"), settings.get("max_loras_per_batch")
    if not settings.get("enable_lora"):
        return f"takes no adapters{start}"
    if type(rank) is int and rank < lora.rank:
        return f"takes adapters up to rank {rank}, and lora.rank is {lora.rank}{start}"
    if isinstance(targets, list) and "all" not in targets and (missing := sorted(set(lora.target_modules) - set(targets))):
        return f"takes no adapters of {', '.join(missing)}, which lora.target_modules has{start}"
    if type(places) is int and places < lora.places:
        return f"computes with {places} adapters at once, and lora.keep_loaded {lora.keep_loaded} needs {lora.places}{start}"
    return None


def checks_ids(settings: Mapping[str, Any]) -> bool:
    """Whether it is known to refuse the ids of tokens that it does not have."""
    return str(settings.get("version")) == EMBEDDED or version_number(str(settings.get("version"))) >= _CHECKS_IDS_SINCE


def version_number(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _told(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its own account, and its model's configuration where that lies within reach."""
    told = {key: about[key] for key in ("model_type", "architectures") if about.get(key)}
    return _config(str(about.get("model_path") or "")) | told


def _config(folder: str) -> dict[str, Any]:
    try:
        found = orjson.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _explained(problem: str) -> str:
    if any(word in problem for word in ("answered 401", "answered 403", "Unauthorized")):
        return f"{problem}: it wants another key; set {VARIABLE} (and {ADMIN_VARIABLE}, if it has an admin key) where this host runs"
    return problem
