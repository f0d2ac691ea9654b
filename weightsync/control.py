"""SGLang's control calls over HTTP, as both kinds of engine answer them. One call, one deadline.

Updates never flush the cache and never abort requests by themselves: with requests alive a flush fails half-way on new SGLang and kills old ones (measured),
and `/update_weight_version` aborts all unless told not to. A version goes with the last bucket only: each call that carries one opens a span. Liveness is never
asked by `/health`, which takes a second and fails in every pause.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable
from weightsync.buckets import Bucket
from weightsync.dialect import Dialect, dialect

CALL_S = 10.0
_GONE = 404
_BUSY = 503
_OPEN_TO_USERS = frozenset({"/generate", "/model_info", "/server_info", "/get_server_info", "/v1/models"})


class EngineControl:
    """Control of one boot of the engine at `url`; what it can do is asked once. The session belongs to the caller."""

    stands_still = True
    """It does while it takes a version."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str = "", admin_key: str = "") -> None:
        """`admin_key`: a server that has one takes only that for what changes weights or pauses, and only the other for what generates or tells."""
        self._session = session
        self.url = url.rstrip("/")
        self._api_key, self._admin_key = api_key, admin_key or api_key
        self._about: Mapping[str, Any] | None = None
        self._sessions: bool | None = None
        self._spans: bool | None = None
        self.calls = 0
        """How often the engine was asked something."""
        self._heard = 0
        """The last of them that it answered."""

    def silent_since(self, calls: int) -> bool:
        """Whether the engine was asked more after so many `calls`, and did not answer the last time; a caller that gave up on it got no answer either."""
        return self.calls > max(calls, self._heard)

    async def pause(self, mode: str, *, deadline_s: float = CALL_S) -> None:
        """Stop decoding: `in_place` keeps running requests, `retract` drops their keys and values, `abort` ends them. New requests wait."""
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, *, deadline_s: float = CALL_S) -> None:
        """Decode again. Harmless when not paused."""
        await self._call("POST", "/continue_generation", {}, deadline_s)

    async def abort_all(self, *, deadline_s: float = CALL_S) -> None:
        """End every running request with what it has so far."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True}, deadline_s)

    async def flush_cache(self, *, deadline_s: float = CALL_S, patience_s: float = 0.0) -> bool:
        """Forget the keys and values of requests that are over. False: refused, because requests are alive, also after `patience_s`; nothing changed."""
        status, _ = await self._answer("POST", f"/flush_cache?timeout={patience_s:g}" if patience_s else "/flush_cache", {}, deadline_s)
        if status not in (200, 400):
            raise ApplyFailed(f"{self.url}/flush_cache answered {status}")
        return status == 200

    async def probe(self, *, deadline_s: float, adapter: str = "") -> tuple[str, ...]:
        """Generate a token, with `adapter` if it is named; every version the answer names. The proof that the engine decodes, and with what. Of two halves each
        writes one.
        """
        tokens = 2 if dialect(self._about or {}).halves else 1
        rid = f"probe-{uuid.uuid4().hex[:12]}"
        body = {
            "input_ids": [0],
            "rid": rid,
            "extra_key": rid,  # computed, not remembered
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        }
        answer = await self._call("POST", "/generate", body | ({"lora_path": adapter} if adapter else {}), deadline_s)
        meta = answer.get("meta_info")
        if not isinstance(meta, dict) or len(answer.get("output_ids") or ()) != tokens:
            raise ApplyFailed(f"{self.url}: a probe for {'one token' if tokens == 1 else f'{tokens} tokens'} came back without it: {answer!s:.300}")
        spans = meta.get("weight_versions")
        self._spans = spans is not None
        return (*(str(span.get("version")) for span in spans or []), str(meta.get("weight_version")))

    async def model_info(self, *, deadline_s: float = CALL_S) -> Mapping[str, Any]:
        return await self._call("GET", "/model_info", None, deadline_s)

    async def weight_version(self, *, deadline_s: float = CALL_S) -> str:
        """The version the engine says it serves; the boot nonce before the first update."""
        return str((await self.model_info(deadline_s=deadline_s)).get("weight_version", ""))

    async def server_info(self, *, deadline_s: float = CALL_S) -> Mapping[str, Any]:
        """The engine's own settings."""
        status, answer = await self._answer("GET", "/server_info", None, deadline_s)
        if status == _GONE:
            return await self._call("GET", "/get_server_info", None, deadline_s)
        return _accepted(self.url + "/server_info", status, answer)

    async def ready(self, *, deadline_s: float = CALL_S) -> bool:
        """Whether it takes requests and decodes; never waits for a pause. Old engines cannot tell, so they are not known to be ready: False."""
        status, _ = await self._answer("GET", "/ready", None, deadline_s)
        if status not in (200, _BUSY, _GONE):
            raise ApplyFailed(f"{self.url}/ready answered {status}")
        return status == 200

    async def dialect(self, *, deadline_s: float = CALL_S) -> Dialect:
        """What it can do, asked once. An engine that does not describe itself is taken for the most dangerous one."""
        if self._about is None:
            try:
                self._about = await self.server_info(deadline_s=deadline_s)
            except ApplyFailed:
                self._about = {}
        return dialect(self._about, sessions=self._sessions, spans=self._spans)

    async def weights_checksum(self, *, deadline_s: float) -> Mapping[str, Any]:
        """Checksums of every parameter as the engine holds it, by rank; takes seconds on a GPU."""
        return _taken(self.url, "a checksum", await self._call("POST", "/weights_checker", {"action": "checksum"}, deadline_s))

    async def update_from_disk(self, path: str, version: str, *, deadline_s: float) -> None:
        """Load the model folder `path` and call it `version`. Raises: `ApplyFailed` with the engine's own words.

        The format is that of the folder: without a word SGLang takes the one it was started with, and one started with flash_rl, which reads none twice, ends.
        """
        body = {"model_path": path, "load_format": "auto", "weight_version": version, "flush_cache": False, "abort_all_requests": False}
        _taken(self.url, version, await self._call("POST", "/update_weights_from_disk", body, deadline_s))

    async def load_adapter(self, name: str, path: str, *, deadline_s: float) -> None:
        """Load the adapter in folder `path`, to be asked for as `name`, while requests go on. It waits for an unload that waits.

        Raises: `ApplyFailed` with the engine's own words.
        """
        status, answer = await self._answer("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}, deadline_s, once=True)
        if status == _GONE:
            raise ApplyFailed(f"{self.url} knows no adapters")
        if answer.get("success") is not True:
            raise ApplyFailed(f"{self.url} did not take adapter {name}: {answer.get('error_message') or answer.get('message') or answer!s:.500}")

    async def unload_adapter(self, name: str, *, deadline_s: float) -> None:
        """Nobody may ask for it from now on; return once no request is on it and it is gone. A refusal says that there was none of that name."""
        await self._answer("POST", "/unload_lora_adapter", {"lora_name": name}, deadline_s, once=True)

    async def adapters(self, *, deadline_s: float = CALL_S) -> tuple[str, ...]:
        """Names of those that may be asked for."""
        answer = await self._call("GET", "/v1/models", None, deadline_s)
        models = answer.get("data")
        return tuple(str(one.get("id")) for one in models if isinstance(one, dict) and one.get("parent")) if isinstance(models, list) else ()

    def aside(self) -> EngineControl:
        """Control of the same engine with an account of its own, for calls that may take long beside others."""
        return EngineControl(self._session, self.url, api_key=self._api_key, admin_key=self._admin_key)

    async def begin_session(self, *, deadline_s: float = CALL_S) -> bool:
        """Open an update session; one that somebody left open is ended first. False: this engine has no sessions and needs none, which is asked once."""
        if self._sessions is False:
            return False
        status, answer = await self._answer("POST", "/begin_weight_update", {}, deadline_s)
        self._sessions = status != _GONE
        if status == 400:
            await self._answer("POST", "/end_weight_update", {}, deadline_s)
            status, answer = await self._answer("POST", "/begin_weight_update", {}, deadline_s)
        if self._sessions:
            _taken(self.url, "an update session", _accepted(self.url + "/begin_weight_update", status, answer))
        return self._sessions

    async def end_session(self, *, deadline_s: float = CALL_S) -> None:
        """Close the session: the engine finishes what it loaded. Engines without sessions have nothing to close.

        Raises: `ApplyFailed` when it refuses: the weights are not finished.
        """
        status, answer = await self._answer("POST", "/end_weight_update", {}, deadline_s)
        self._sessions = status != _GONE
        if self._sessions:
            _taken(self.url, "the end of an update session", _accepted(self.url + "/end_weight_update", status, answer))

    async def close_session(self, *, deadline_s: float = CALL_S) -> None:
        """Close a session that somebody may have left open; a refusal says that there was none."""
        status, _ = await self._answer("POST", "/end_weight_update", {}, deadline_s)
        self._sessions = status != _GONE

    async def rename(self, version: str, *, deadline_s: float = CALL_S) -> None:
        """What the engine has goes by another name from here on, also in answers under way."""
        body = {"new_version": version, "abort_all_requests": False}
        _taken(self.url, "another name", await self._call("POST", "/update_weight_version", body, deadline_s))

    async def release_memory(self, *, deadline_s: float = CALL_S) -> None:
        """Free what the engine has on its device: weights, keys and values, captured graphs. Only while it is paused, and once: SGLang dies of anything else.

        What the weights are after `resume_memory`, nobody knows. SGLang needs `--enable-memory-saver`; without it, it drops keys and values only.
        """
        await self._call("POST", "/release_memory_occupation", {}, deadline_s, once=True)

    async def resume_memory(self, *, deadline_s: float = CALL_S) -> None:
        """Have the memory again that was released. Only then: SGLang dies of a second time."""
        await self._call("POST", "/resume_memory_occupation", {}, deadline_s, once=True)

    async def init_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str, deadline_s: float
    ) -> None:
        """Join a process group. The engine decodes nothing until every rank has joined or its own timeout ends it.

        Raises: `ApplyFailed` before it is asked where a distributed update would end it, or no group would form.
        """
        found = await self.dialect(deadline_s=min(CALL_S, deadline_s))
        if found.replicas > 1:
            raise ApplyFailed(f"{self.url} has dp_size {found.replicas}, and takes distributed updates with 1 only: run one server a replica, or use the store")
        if found.stages > 1:
            raise ApplyFailed(f"{self.url} has pp_size {found.stages}, and its stages would take each other's ranks in the group: use the store, or delta")
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        answer = await self._call("POST", "/init_weights_update_group", body, deadline_s, once=True)
        _taken(self.url, f"group {group_name}", answer)

    async def destroy_group(self, name: str, *, deadline_s: float = CALL_S) -> None:
        """Leave a process group; a refusal says that it was in none of that name."""
        await self._answer("POST", "/destroy_weights_update_group", {"group_name": name}, deadline_s)

    async def update_from_distributed(self, bucket: Bucket, *, group: str, version: str | None, deadline_s: float) -> None:
        """Receive one bucket as one broadcast of bytes from rank 0. `version`: with the last bucket only.

        An answer proves that the engine took the call, not that bytes came: `probe` does.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": version,
            "load_format": "flattened_bucket",
        }
        answer = await self._call("POST", "/update_weights_from_distributed", body, deadline_s, once=True)
        _taken(self.url, version or f"bucket {bucket.digest}", answer)

    async def update_from_tensor(self, serialized: Sequence[str], *, load_format: str | None, version: str | None, deadline_s: float) -> None:
        """Take tensors from memory that the sender shares, one payload a rank. `version`: with the last call only.

        The sender keeps the memory as it is until the engine has answered something later, such as `probe`.
        """
        body = {
            "serialized_named_tensors": list(serialized),
            "load_format": load_format,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": version,
        }
        answer = await self._call("POST", "/update_weights_from_tensor", body, deadline_s, once=True)
        _taken(self.url, version or "a bucket of tensors", answer)

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, once: bool = False) -> Mapping[str, Any]:
        """Raises: `EngineUnavailable` (no answer in time), `ApplyFailed` (an answer that is a refusal)."""
        return _accepted(self.url + path, *await self._answer(method, path, body, deadline_s, once=once))

    async def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, once: bool = False
    ) -> tuple[int, Mapping[str, Any]]:
        """Status and body. `once`: a call that must not reach the engine twice, because each would wait for bytes of its own."""
        if deadline_s <= 0:
            raise EngineUnavailable(f"{self.url}{path}: no time left")
        data = None if body is None else orjson.dumps(body)
        key = self._api_key if path in _OPEN_TO_USERS else self._admin_key
        headers = ({"Authorization": f"Bearer {key}"} if key else {}) | ({} if body is None else {"Content-Type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        self.calls += 1
        call = self.calls
        for last in (once, True):
            try:
                async with self._session.request(method, self.url + path, data=data, headers=headers, timeout=timeout) as answer:
                    text = await answer.read()
                    self._heard = max(self._heard, call)
                    return answer.status, _read(self.url + path, text)
            except aiohttp.ServerDisconnectedError as problem:  # a kept connection that the server closed while idle
                if last:
                    raise EngineUnavailable(f"{self.url}{path}: the engine closed the connection ({problem})") from problem
            except TimeoutError as problem:
                raise EngineUnavailable(f"{self.url}{path}: no answer within {deadline_s:.1f} s") from problem
            except (aiohttp.ClientError, OSError) as problem:
                raise EngineUnavailable(f"{self.url}{path}: cannot be reached ({str(problem) or type(problem).__name__})") from problem
        raise AssertionError


def _read(url: str, text: bytes) -> Mapping[str, Any]:
    try:
        answer = (orjson.loads(text) if text.strip() else {}) or {}
    except ValueError:
        answer = {"message": text.decode(errors="replace")}
    if not isinstance(answer, dict):
        raise DecodeError(url, f"expected a JSON object, got {type(answer).__name__}")
    return answer


def _accepted(url: str, status: int, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if status >= 400:
        problem = answer.get("message") or answer.get("error") or answer
        if isinstance(problem, dict):  # in some answers the words lie one level down
            problem = problem.get("message") or problem
        raise ApplyFailed(f"{url} answered {status}: {problem!s:.300}")
    return answer


def _taken(url: str, what: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Update calls say how they went in the body also where the status is 200."""
    if answer.get("success") is not True:
        raise ApplyFailed(f"{url} did not take {what}: {answer.get('message', answer)!s:.300}")
    return answer
