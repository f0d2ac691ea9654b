"""SGLang's control calls over HTTP, as both kinds of engine answer them. One call, one deadline.

Updates never flush the cache and never abort requests by themselves: with requests alive a flush fails half-way on new SGLang and kills old ones (measured).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable

CALL_S = 10.0


class EngineControl:
    """Control of the engine at `url`. The session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str = "") -> None:
        self._session = session
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def pause(self, mode: str, *, deadline_s: float = CALL_S) -> None:
        """Stop decoding: `in_place` keeps running requests, `abort` ends them. New requests wait."""
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, *, deadline_s: float = CALL_S) -> None:
        """Decode again. Harmless when not paused."""
        await self._call("POST", "/continue_generation", {}, deadline_s)

    async def update_from_disk(self, path: str, version: str, *, deadline_s: float) -> None:
        """Load the model folder `path` and call it `version`. Raises: `ApplyFailed` with the engine's own words."""
        body = {"model_path": path, "weight_version": version, "flush_cache": False, "abort_all_requests": False}
        answer = await self._call("POST", "/update_weights_from_disk", body, deadline_s)
        if answer.get("success") is not True:
            raise ApplyFailed(f"{self.url} did not take {version}: {answer.get('message', answer)!s:.300}")

    async def end_session(self, *, deadline_s: float = CALL_S) -> None:
        """End an update session that somebody left open; engines without sessions, or with none open, refuse, which is fine."""
        await self._call("POST", "/end_weight_update", {}, deadline_s, refusal_is_fine=True)

    async def model_info(self, *, deadline_s: float = CALL_S) -> Mapping[str, Any]:
        return await self._call("GET", "/model_info", None, deadline_s)

    async def weight_version(self, *, deadline_s: float = CALL_S) -> str:
        """The version the engine says it serves; the boot nonce before the first update."""
        return str((await self.model_info(deadline_s=deadline_s)).get("weight_version", ""))

    async def abort_all(self, *, deadline_s: float = CALL_S) -> None:
        """End every running request with what it has so far."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True}, deadline_s)

    async def probe(self, *, deadline_s: float) -> tuple[str, ...]:
        """Generate one token; every version the answer names. The proof that the engine decodes, and with what."""
        body = {
            "input_ids": [0],
            "rid": f"probe-{uuid.uuid4().hex[:12]}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        answer = await self._call("POST", "/generate", body, deadline_s)
        meta = answer.get("meta_info")
        if not isinstance(meta, dict) or len(answer.get("output_ids") or ()) != 1:
            raise ApplyFailed(f"{self.url}: a probe for one token came back without it: {answer!s:.300}")
        spans = meta.get("weight_versions") or []
        return (*(str(span.get("version")) for span in spans), str(meta.get("weight_version")))

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, refusal_is_fine: bool = False) -> Mapping[str, Any]:
        """Raises: `EngineUnavailable` (no answer in time), `ApplyFailed` (an answer that is a refusal)."""
        if deadline_s <= 0:
            raise EngineUnavailable(f"{self.url}{path}: no time left")
        data = None if body is None else orjson.dumps(body)
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        for attempt in (1, 2):
            try:
                async with self._session.request(method, self.url + path, data=data, headers=headers, timeout=timeout) as answer:
                    return _read(self.url + path, answer.status, await answer.read(), refusal_is_fine=refusal_is_fine)
            except aiohttp.ServerDisconnectedError as problem:  # a kept connection that the server closed while idle; every call here may be sent twice
                if attempt == 2:
                    raise EngineUnavailable(f"{self.url}{path}: the engine closed the connection ({problem})") from problem
            except (aiohttp.ClientError, OSError, TimeoutError) as problem:
                raise EngineUnavailable(f"{self.url}{path}: no answer within {deadline_s:.1f} s ({str(problem) or type(problem).__name__})") from problem
        raise AssertionError


def _read(url: str, status: int, text: bytes, *, refusal_is_fine: bool) -> Mapping[str, Any]:
    try:
        answer = orjson.loads(text) if text.strip() else {}
    except ValueError:
        answer = {"message": text.decode(errors="replace")}
    if not isinstance(answer, dict):
        raise DecodeError(url, f"expected a JSON object, got {type(answer).__name__}")
    if status >= 400 and not refusal_is_fine:
        problem = answer.get("message") or answer.get("error") or answer
        raise ApplyFailed(f"{url} answered {status}: {problem!s:.300}")
    return answer
