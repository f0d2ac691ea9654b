"""Two servers of SGLang as one engine: one reads prompts, one writes. Here both are asked, and what comes back is one engine's answer.

    /generate ──► a room of its own ──► prefill: keys, values and the first token ──► decode: the rest, and the answer
    what pauses, loads, flushes or aborts ──► both; done when both have done it
    what tells ──► decode; a version counts once both serve it

Only an update in a pause by `abort` is let through: the halves then hold no request of the older weights, nor keys and values on their way. (0.5.23: kept in
place, what is on its way is written on under a version that did not read it; `retract` keeps that too, and calls older tokens the new version's.)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NewType

import aiohttp
import orjson
from aiohttp import web

from protocol.errors import ConfigError

Url = NewType("Url", str)
_GENERATE = ("/generate", "/v1/completions", "/v1/chat/completions")
_PAUSE, _RESUME, _ABORT = "/pause_generation", "/continue_generation", "/abort_request"
_SERVER, _MODEL = ("/server_info", "/get_server_info"), ("/model_info", "/get_model_info")
_UPDATE = "/update_weights_from_disk"
_BOTH = (_RESUME, _ABORT, "/flush_cache", "/begin_weight_update", "/end_weight_update", "/weights_checker")
_TELLS = ("/metrics", "/v1/models", "/health", "/health_generate")
_WHOLE = {"disaggregation_mode": "null"}
"""For a router in front, an engine as any other."""
_MAX_BODY_BYTES = 1 << 30
_ROOMS = (1 << 63) - 1
_LAST_WORD_S = 2.0
"""A request that its prefill has given up is given up by its decode as well, if that was told; then it tells what it has."""
_ABORTED, _BUSY, _BROKEN, _REFUSED, _UNKNOWN, _FAULT = 499, 503, 502, 400, 404, 500
_CLOSE_S = 1.0
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""Whoever asks has a deadline, and goes away at it."""
_NETWORK = (aiohttp.ClientError, OSError)
_TORN = "its halves were given a version, and which of them took it differs or is not known: no token is written until both took one"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer that is read to its end."""

    status: int
    body: bytes
    kind: str = "application/json"

    @property
    def fields(self) -> dict[str, Any]:
        """Empty if it is no JSON object."""
        with contextlib.suppress(orjson.JSONDecodeError):
            found = orjson.loads(self.body)
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def well(self) -> bool:
        return self.status < _REFUSED and self.fields.get("success", True) is True

    def reply(self) -> web.Response:
        return web.Response(body=self.body, status=self.status, headers={"Content-Type": self.kind})


@dataclass(slots=True, eq=False)
class Asked:
    """One request that is under way."""

    rid: str
    task: asyncio.Task[Any]
    aborted: bool = False
    """Somebody has told the halves to end it."""
    begun: bool = False
    """What the decode writes is being passed on."""


class Pair:
    """Serves the two as one engine while the context is open.

    Invariant: no answer holds a token that was computed while the halves served different versions.
    """

    def __init__(self, session: aiohttp.ClientSession, *, prefill: str, decode: str, bootstrap: tuple[str, int], most: int) -> None:
        """`bootstrap`: where the prefill hands over. `most`: requests at once; SGLang has no bound of its own for halves. The session belongs to the caller."""
        self._session, self._prefill, self._decode, self._bootstrap, self._most = session, Url(prefill), Url(decode), bootstrap, most
        self._open: set[Asked] = set()
        self._paused, self._updating, self._torn = False, False, False
        self._served = ""

    @contextlib.asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[None]:
        """Raises: `ConfigError`: somebody else listens there."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_routes([web.post(path, self._generate) for path in _GENERATE])
        app.router.add_routes([web.post(path, self._on_both) for path in _BOTH])
        app.router.add_routes([web.get(path, self._tell) for path in _TELLS])
        app.router.add_post(_PAUSE, self._pause)
        app.router.add_post(_UPDATE, self._update)
        app.router.add_routes([web.get(path, self._model) for path in _MODEL])
        app.router.add_routes([web.get(path, self._server) for path in _SERVER])
        app.router.add_get("/ready", self._ready)
        app.router.add_route("*", "/{path:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port, backlog=1024, reuse_address=True).start()
            except OSError as problem:
                raise ConfigError(f"engine.port: cannot listen on {host}:{port} ({problem.strerror or problem})") from problem
            yield
        finally:
            await runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if len(self._open) >= self._most:
            return _refusal(f"{len(self._open)} requests are under way, and no more are taken", _BUSY)
        if self._torn:
            return _refusal(_TORN, _BUSY)
        try:
            asked = orjson.loads(await http.read())
        except orjson.JSONDecodeError as problem:
            return _refusal(f"the body is not JSON: {problem}", _REFUSED)
        if why := _not_for_two(asked):
            return _refusal(why, _REFUSED)
        host, port = self._bootstrap
        asked |= {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 1 + secrets.randbelow(_ROOMS)}
        mine = asyncio.current_task()
        assert mine is not None, "a handler runs in a task"
        self._open.add(one := Asked(str(asked.get("rid", "")), mine))
        try:
            return await self._through_both(http, asked, one)
        finally:
            self._open.discard(one)

    async def _through_both(self, http: web.Request, asked: dict[str, Any], one: Asked) -> web.StreamResponse:
        """The decode's answer; or, where the prefill gave the request up and the decode does not say so itself, why. Whoever is left is let go of, which ends
        the request there.
        """
        reading = asyncio.create_task(self._ask(self._prefill, http, orjson.dumps(asked | {"stream": False})), name="pair:prefill")
        writing = asyncio.create_task(self._write(http, orjson.dumps(asked), one), name="pair:decode")
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() and (gave_up := _gave_up(await reading, one)) is not None:
                await asyncio.wait({writing}, timeout=_LAST_WORD_S)
                if not writing.done() and not one.begun:
                    return gave_up
            return await writing
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _write(self, http: web.Request, body: bytes, one: Asked) -> web.StreamResponse:
        """What the decode answers, passed on as it comes. It calls the abort of a request that has no token yet a fault of its own, which it is not."""
        stream: web.StreamResponse | None = None
        try:
            async with self._session.post(self._decode + http.path, data=body, headers=_passed(http), timeout=_NO_TIMEOUT) as answer:
                if answer.content_type != "text/event-stream":
                    said = Said(answer.status, await answer.read(), answer.content_type)
                    return _refusal(_ended(said.body), _ABORTED) if one.aborted and said.status >= _FAULT else said.reply()
                begun = await answer.content.readany()
                if one.aborted and _is_fault(begun):
                    return _refusal(_ended(begun), _ABORTED)
                one.begun = True
                await (stream := web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})).prepare(http)
                await stream.write(begun)
                async for data in answer.content.iter_any():
                    await stream.write(data)
                return stream
        except _NETWORK as problem:
            if stream is None:
                return _refusal(f"the half that writes broke the connection: {str(problem) or type(problem).__name__}", _BROKEN)
            if http.transport is not None:
                http.transport.close()  # a stream that is not whole must not look so
            return stream

    async def _pause(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        mode = Said(200, body).fields.get("mode", "abort")
        if mode != "abort":
            return _refusal(
                f"mode {mode!r:.20}: an engine of two halves pauses by abort only, since keys and values may be on their way between them", _REFUSED
            )
        self._abort("")
        answer = await self._ask_both(http, body)
        self._paused = self._paused or answer.well
        return answer.reply()

    def _abort(self, rid: str) -> None:
        """SGLang takes `rid` as what the id begins with."""
        for one in self._open:
            one.aborted = one.aborted or one.rid.startswith(rid)

    async def _on_both(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        if http.path == _ABORT and (told := Said(200, body).fields) and (told.get("rid") or told.get("abort_all")):
            self._abort("" if told.get("abort_all") else str(told["rid"]))
        answer = await self._ask_both(http, body)
        if http.path == _RESUME and answer.well:
            self._paused = False
        return answer.reply()

    async def _update(self, http: web.Request) -> web.StreamResponse:
        """Both halves take the version, or refuse it and keep what they have; otherwise whatever is under way or comes is refused until both took one."""
        if not self._paused:
            return _refusal("an engine of two halves takes a version in a pause only", _REFUSED)
        body = await http.read()
        was_torn, self._updating, alike, took = self._torn, True, False, False
        try:
            reads, writes = await self._from_each(http, body)
            alike, took = reads.well == writes.well and _BROKEN not in (reads.status, writes.status), writes.well
            return (writes if reads.well else reads).reply()
        finally:
            self._updating, self._torn = False, not alike or (was_torn and not took)
            for one in self._open if self._torn else ():
                one.task.cancel()

    async def _model(self, http: web.Request) -> web.StreamResponse:
        reads, writes = await self._from_each(http)
        if not (reads.well and writes.well):
            return (writes if reads.well else reads).reply()
        ours, theirs = writes.fields.get("weight_version"), reads.fields.get("weight_version")
        if ours == theirs:
            self._served = str(ours)
        told = self._served if self._updating or self._torn or ours == theirs else f"{theirs} and {ours}"
        return _reply(writes.fields | _WHOLE | {"weight_version": told})

    async def _server(self, http: web.Request) -> web.StreamResponse:
        """As the decode describes itself, but whole: and with a cache of prefixes where either has one, which in general is the prefill."""
        reads, writes = await self._from_each(http)
        if not (reads.well and writes.well):
            return (writes if reads.well else reads).reply()
        without = all(half.fields.get("disable_radix_cache") is True for half in (reads, writes))
        return _reply(writes.fields | _WHOLE | {"disable_radix_cache": without, "halves": True})

    async def _ready(self, http: web.Request) -> web.StreamResponse:
        reads, writes = await self._from_each(http)
        if self._torn:
            return _refusal(_TORN, _BUSY)
        return (writes if reads.status < _REFUSED else reads).reply()

    async def _tell(self, http: web.Request) -> web.StreamResponse:
        return (await self._ask(self._decode, http, b"")).reply()

    async def _ask_both(self, http: web.Request, body: bytes) -> Said:
        """What the decode said, if the prefill did as it was told too; with the weights of both where they are asked for."""
        reads, writes = await self._from_each(http, body)
        if not reads.well:
            return reads
        ranks = [half.fields.get("ranks") for half in (reads, writes)]
        if writes.well and all(isinstance(one, list) for one in ranks):
            return Said(writes.status, orjson.dumps(writes.fields | {"ranks": [rank for one in ranks for rank in one or ()]}))
        return writes

    async def _from_each(self, http: web.Request, body: bytes = b"") -> tuple[Said, Said]:
        reads, writes = await asyncio.gather(self._ask(self._prefill, http, body), self._ask(self._decode, http, body))
        return reads, writes

    async def _ask(self, half: Url, http: web.Request, body: bytes) -> Said:
        """One half's answer; a half that cannot be reached gives one too."""
        try:
            async with self._session.request(http.method, half + http.path_qs, data=body, headers=_passed(http), timeout=_NO_TIMEOUT) as answer:
                return Said(answer.status, await answer.read(), answer.headers.get("Content-Type", "application/json"))
        except _NETWORK as problem:
            which = "reads" if half == self._prefill else "writes"
            return Said(_BROKEN, orjson.dumps({"error": {"message": f"the half that {which} cannot be reached: {str(problem) or type(problem).__name__}"}}))


def _not_for_two(asked: object) -> str:
    """Why this request cannot be answered by two halves; empty: it can."""
    if not isinstance(asked, dict):
        return f"the body must be a JSON object, got {type(asked).__name__}"
    params = asked.get("sampling_params")
    several = isinstance(params, list) or (isinstance(params, dict) and params.get("n", 1) != 1) or asked.get("n", 1) not in (None, 1)
    prompts = (asked.get(name) for name in ("input_ids", "text", "prompt"))
    if several or any(isinstance(one, list) and one and isinstance(one[0], list | str) for one in prompts):
        return "an engine of two halves takes one prompt and one sample a request"
    if asked.get("return_logprob") and asked.get("logprob_start_len", -1) not in (None, -1):
        return "logprobs of a prompt: the half that writes never sees them; ask an engine that is one server (without engine.prefill)"
    return ""


def _gave_up(prefill: Said, one: Asked) -> web.Response | None:
    """What to say of a request that the prefill did not hand over; None: it did."""
    if prefill.status >= _REFUSED:
        return _refusal(_ended(prefill.body), _ABORTED) if one.aborted and prefill.status >= _FAULT else prefill.reply()
    reason = (prefill.fields.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return _refusal(_ended(prefill.body), _ABORTED)
    return None


def _is_fault(begun: bytes) -> bool:
    """Whether a stream begins with its end, and that by a fault."""
    event = Said(200, begun.partition(b"\n")[0].removeprefix(b"data:")).fields
    reason = (event.get("meta_info") or {}).get("finish_reason") or {}
    return isinstance(reason.get("status_code"), int) and reason["status_code"] >= _FAULT


def _ended(words: bytes) -> str:
    return f"aborted before it wrote a token: {words[:300].decode(errors='replace')}"


def _passed(http: web.Request) -> Mapping[str, str]:
    """Keys are for the halves to judge."""
    return {name: http.headers[name] for name in ("Authorization", "Content-Type") if name in http.headers}


async def _unknown(http: web.Request) -> web.StreamResponse:
    return _refusal(f"{http.method} {http.path} is not for an engine of two halves", _UNKNOWN)


def _refusal(why: str, status: int) -> web.Response:
    return _reply({"success": False, "message": why, "error": {"message": why}}, status)


def _reply(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
