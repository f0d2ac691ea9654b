"""A server of SGLang that the host starts: one life of it is one process tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import orjson
import xxhash

from producer.engine.client import open_session
from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault, Figures, Meeting, Misfit
from producer.engine.key import admin_key, engine_key
from producer.engine.sglang.arguments import Half, Place, check_arguments, server_arguments
from producer.engine.sglang.child import Child
from producer.engine.sglang.context import known_context
from producer.engine.sglang.figures import capacity
from producer.engine.sglang.halves import Halves
from producer.engine.sglang.pair import Pair
from producer.engine.sglang.ports import held_port
from producer.engine.sglang.watch import Watch
from protocol.errors import ApplyFailed, ConfigError, DecodeError, EngineUnavailable
from weightsync.dialect import ended_by_updates
from weightsync.lora import LoraConfig

_NO_LORA = LoraConfig()
_GRACE_S = 10.0
"""SGLang takes about six seconds to end in good order."""
_NODE_GRACE_S = 0.5
"""A node that is not the first waits for the first one's word, whatever signal it gets."""
_HERE = "127.0.0.1"
_HALVES: tuple[Half, Half] = ("prefill", "decode")
_KNOCK_S = 0.5
_ASK_S = 5.0
_WITHHELD = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_RETURN_ORIGINAL_LOGPROB"})
"""What a server must not inherit: where this host's modules lie, and a wish for logprobs before temperature, which nothing was sampled from."""
_CORES, _MOST_RANKS = "SGLANG_CPU_OMP_THREADS_BIND", 16
_NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""Ranks compile how they share the embedding at the first request: C++ by g++, which a machine need not have, and which takes longer than it saves."""
_USAGE = 2
"""The exit code of a command line that was not understood."""
_REFUSALS = (ApplyFailed, EngineUnavailable, DecodeError)


class SGLangServer:
    """`Kind` of a server on this machine, which ends with the host, however that ends."""

    name = "sglang"
    lives_on = True
    start_tries = 3

    def __init__(
        self,
        settings: EngineConfig,
        *,
        index: int,
        model: str,
        longest: int,
        seed: Callable[[str], int],
        log: Path,
        shares_device: bool = False,
        lora: LoraConfig = _NO_LORA,
    ) -> None:
        """`longest`: tokens of the longest request. `seed`: of the noise of a boot. Raises: `ConfigError`: arguments or an interpreter that cannot work."""
        check_arguments(settings)
        if admin_key() and not engine_key():
            raise ConfigError(
                "ROLLSTREAM_ENGINE_ADMIN_KEY is set and ROLLSTREAM_ENGINE_KEY is not: SGLang shows its admin key in /server_info, which is open to all then"
            )
        self._settings, self._index, self._model, self._longest, self._seed, self._log = settings, index, model, longest, seed, log
        self._shares_device, self._lora = shares_device, lora
        self._python = _interpreter(settings.python)

    @contextlib.asynccontextmanager
    async def life(self, boot_nonce: str, desk: Desk, /) -> AsyncIterator[ServerLife]:
        settings = self._settings
        wanted = settings.port + self._index if settings.port else 0
        with (
            held_port(settings.host, wanted, key=f"engine.port {wanted}") as port,
            held_port(settings.host, key="engine.host") as rendezvous,
        ):
            if settings.prefill:
                async with self._two_halves(boot_nonce, desk, port) as life:
                    yield life
                return
            meeting = Meeting(address=_address(settings.host, rendezvous), nodes=settings.nodes, alike=self.alike) if settings.nodes > 1 else None
            place = self._place(boot_nonce, port, rendezvous, meeting=meeting.address if meeting else "")
            child = self._start(settings, place)
            life = ServerLife(child, settings, desk, port=port, boot_nonce=boot_nonce, meeting=meeting)
            try:
                yield life
            finally:
                await asyncio.shield(child.end(_GRACE_S))

    @contextlib.asynccontextmanager
    async def _two_halves(self, boot_nonce: str, desk: Desk, port: int) -> AsyncIterator[ServerLife]:
        """One server that reads prompts and one that writes, which only this machine reaches, and their one address."""
        settings = self._settings.model_copy(update={"host": _HERE})
        halves: list[Child] = []
        with contextlib.ExitStack() as held:
            handover, *ports = (held.enter_context(held_port(_HERE, key="a port of this machine")) for _ in range(5))
            try:
                for half, own, rendezvous in zip(_HALVES, ports[:2], ports[2:], strict=True):
                    place = replace(self._place(boot_nonce, own, rendezvous, meeting=""), half=half, bootstrap_port=handover)
                    log = self._log if half == "decode" else self._log.with_stem(f"{self._log.stem}-{half}")
                    halves.append(self._start(settings, place, log=log))
                prefill, decode = (f"http://{_HERE}:{own}" for own in ports[:2])
                async with open_session() as session:
                    pair = Pair(session, prefill=prefill, decode=decode, bootstrap=(_HERE, handover), most=settings.slots + settings.max_queued)
                    async with pair.serve(self._settings.host, port):
                        yield ServerLife(Halves(*halves), self._settings, desk, port=port, boot_nonce=boot_nonce)
            finally:
                await asyncio.shield(asyncio.gather(*(half.end(_GRACE_S) for half in halves)))

    @contextlib.asynccontextmanager
    async def node(self, boot_nonce: str, rank: int, meeting: str, /) -> AsyncIterator[Child]:
        """The part of node `rank`, 1 or above, in a life whose node 0 has `meeting` as its address: a process that answers nobody.

        It cannot end by itself in good order, as node 0 tells its ranks to: it is killed when the context closes.
        """
        settings = self._settings.model_copy(update={"host": _HERE})
        with held_port(_HERE, key="a port of this machine") as port, held_port(_HERE, key="a port of this machine") as spare:
            child = self._start(settings, self._place(boot_nonce, port, spare, node_rank=rank, meeting=meeting))
            try:
                yield child
            finally:
                await asyncio.shield(child.end(_NODE_GRACE_S))

    @property
    def alike(self) -> str:
        """Digest of what all nodes must be started with alike: the model's shape, and every argument but where each listens and which GPUs it has."""
        settings = self._settings.model_copy(update={"host": "", "gpu": 0})
        argv = self._arguments(settings, Place(index=0, port=0, rendezvous_port=0, boot_nonce="", seed=0), model="")
        return xxhash.xxh3_64_hexdigest(orjson.dumps((argv[1:], _config(self._model)), option=orjson.OPT_SORT_KEYS))

    def _place(self, boot_nonce: str, port: int, rendezvous: int, *, meeting: str, node_rank: int = 0) -> Place:
        return Place(
            index=self._index,
            port=port,
            rendezvous_port=rendezvous,
            boot_nonce=boot_nonce,
            seed=self._seed(boot_nonce),
            node_rank=node_rank,
            meeting=meeting,
        )

    def _start(self, settings: EngineConfig, place: Place, *, log: Path | None = None) -> Child:
        """Raises: `EngineFault`."""
        argv = self._arguments(settings, place, model=self._model)
        try:
            return Child.start((self._python, *argv), log=log or self._log, env=_environment(settings))
        except OSError as problem:
            raise EngineFault(f"SGLang cannot be started: {problem}") from problem

    def _arguments(self, settings: EngineConfig, place: Place, *, model: str) -> tuple[str, ...]:
        return server_arguments(
            settings, place, model=model, longest=self._longest, context=known_context(self._model), shares_device=self._shares_device, lora=self._lora
        )


class ServerLife:
    """`Hosted` for one process tree, or for two that are one engine."""

    def __init__(self, child: Child | Halves, settings: EngineConfig, desk: Desk, *, port: int, boot_nonce: str, meeting: Meeting | None = None) -> None:
        self._child, self._settings, self._desk, self._nonce = child, settings, desk, boot_nonce
        self.meeting = meeting
        self.url = f"http://{_address(settings.host, port)}"
        self._began = time.monotonic()
        self._watch: Watch | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def trouble(self) -> str:
        return "" if self._watch is not None else f"SGLang starts ({time.monotonic() - self._began:.0f} s; {self._child.log})"

    @property
    def figures(self) -> Figures:
        return Figures(capacity=self._settings.slots) if self._watch is None else self._watch.figures

    @property
    def idle(self) -> bool:
        return self._watch is not None and self._watch.idle

    async def ready(self) -> None:
        """It has written a token under the name that we gave its weights. `/health` is never asked: it takes a second, and fails in a pause."""
        ended = asyncio.create_task(self._child.ended(), name="engine:child")
        written = asyncio.create_task(self._first_token(), name="engine:first-token")
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await asyncio.wait({ended, written}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise self._ended(ended.result())
            self._watch = Watch(self.url, self._desk, self._settings, capacity=await written)
        except TimeoutError as problem:
            raise EngineFault(
                f"SGLang wrote no token within engine.start_seconds = {self._settings.start_seconds:g}; its last words are\n{self._child.last_words()}"
            ) from problem
        finally:
            for task in (ended, written):
                task.cancel()
            await asyncio.gather(ended, written, return_exceptions=True)

    async def _first_token(self) -> int:
        """Returns how many requests it decodes at once. Raises: `EngineFault`: another server answers at this port."""
        control = self._desk.control(self.url)
        while True:
            try:
                served = await control.weight_version(deadline_s=_ASK_S)
                if served != f"boot:{self._nonce}":
                    raise EngineFault(f"{self.url} is another server's: it serves {served!r}")
                about = await control.server_info(deadline_s=_ASK_S)
                if why := ended_by_updates(about):
                    raise Misfit(f"{self.url} {why}; nothing is loaded or generated there")
                await control.probe(deadline_s=self._settings.start_seconds)
                return capacity(about) or self._settings.slots
            except _REFUSALS:
                await asyncio.sleep(_KNOCK_S)

    async def failed(self) -> Never:
        """Raises: `EngineFault` when the server ends, hangs, or serves what it was not given."""
        assert self._watch is not None, "`ready` comes first"
        watching = asyncio.create_task(self._watch.run(), name="engine:watch")
        ended = asyncio.create_task(self._child.ended(), name="engine:child")
        try:
            await asyncio.wait({watching, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._ended(ended.result())
            await watching
            raise AssertionError
        finally:
            for task in (watching, ended):
                task.cancel()
            await asyncio.gather(watching, ended, return_exceptions=True)

    async def until_idle(self) -> None:
        if self._watch is not None:
            await self._watch.until_idle()

    def _ended(self, code: int) -> EngineFault | ConfigError:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = f"SGLang {how}; its last words ({self._child.log}) are\n{self._child.last_words()}"
        if code == _USAGE and self._watch is None:
            return ConfigError(f"engine.args: {said}")
        return EngineFault(said)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _interpreter(python: str) -> str:
    found = shutil.which(python or sys.executable)
    if found is None:
        raise ConfigError(f"engine.python {python}: there is no such program; give the interpreter of an environment that has SGLang")
    return str(Path(found).absolute())  # not resolved: a virtual environment is known by the link


def _environment(settings: EngineConfig) -> Mapping[str, str]:
    threads = str(settings.torch_threads)
    ours = {
        "ROLLSTREAM_ENGINE_HOST_PID": str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.device == "cpu":
        ours |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        ours |= {_CORES: os.environ.get(_CORES) or _cores(_MOST_RANKS), _NO_COMPILER: os.environ.get(_NO_COMPILER, "1")}
    return {name: value for name, value in os.environ.items() if name not in _WITHHELD} | ours


def _cores(ranks: int) -> str:
    """One for each rank, in turns. SGLang refuses more ranks than the machine has NUMA nodes unless it is told; where it has no kernels it binds nobody.

    >>> _cores(0)
    ''
    """
    mine = sorted(os.sched_getaffinity(0))
    return "|".join(str(mine[rank % len(mine)]) for rank in range(ranks))


def _config(model: str) -> dict[str, Any]:
    try:
        found = orjson.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
