"""A round: a whole run of real processes on a Redis of its own, with kills by plan, and somebody who starts again what died, as `rollstream up` does.

    Redis ◄── rl-trainer ── ChainBackend, or torch
      ▲ ◄──── rl-producer ×2 ── synthetic groups
      └ each killed by a failpoint, or at a time of chance; started again at once; the run goes to its end, then `verdict.py` judges what is left

Units: seconds, but where a name says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from buffer.witness import WitnessLine
from deploy.redis_server import server_command, wait_ready
from protocol.connection import connect
from protocol.daemon import SUPERVISED
from protocol.errors import EXIT_DRAINED, EXIT_TRY_AGAIN, RollstreamError, RunMissing
from protocol.failpoints import VARIABLE, VICTIM_VARIABLE, Failpoint
from protocol.keys import Keys
from tests.faults import nursery
from tests.faults.chain_backend import expected_digest
from tests.faults.synthetic import GROUP_SIZE, HELD_UNTIL, MAX_NEW_TOKENS, PROMPT, PROMPT_TOKENS

TRAINER, PRODUCERS, REDIS = "trainer", ("producer-0", "producer-1"), "redis"
STEPS, B, CHUNK = 12, 4, 2
SEED = 5
KILLED = -signal.SIGKILL
BUSY_POINTS = frozenset({
    Failpoint.PRODUCER_RESERVED, Failpoint.PRODUCER_MADE, Failpoint.PRODUCER_PUT, Failpoint.PRODUCER_BEFORE_RELEASE, Failpoint.PRODUCER_RELEASED,
    Failpoint.PRODUCER_RENEWED,
})  # fmt: skip
"""Passed only by a producer that gets its share of the work."""
_ROUND_S = 400.0
_KEPT_BYTES = 10_000
"""Of the log of Redis: a server that has lost the very run cannot be told about it."""
_TOLD_EVENTS, _TOLD_LINES = 40, 12


class Process(Protocol):
    """What a round needs of a process, started or forked."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One life of `role` is to end at its `nth` passing of `at`, or that of Redis in its place."""

    role: str
    at: Failpoint
    nth: int = 1
    redis: bool = False

    def __str__(self) -> str:
        return f"{'redis' if self.redis else self.role} at {self.at}:{self.nth}" + (f" of {self.role}" if self.redis else "")


class RoundFailed(AssertionError):
    """What was wrong, and everything one needs to see why."""


@dataclass(slots=True)
class Round:
    """`async with Round(folder, kills) as round: await round.run(); …`. Redis stays until the context ends.

    `kills`: by role, the first for its first life and so on; a life without one is left alone. `chance`: seeded kills of anybody at any time, so many.
    """

    folder: Path
    kills: Sequence[Kill] = ()
    chance: int = 0
    seed: int = 0
    lose: int = 0
    """Of what Redis acknowledged, so many bytes of its log are gone whenever it was killed, as after a failover."""
    must_kill: bool = True
    """A planned kill that never came makes the round worthless."""
    backend: str = "tests.faults.chain_backend:ChainBackend"
    model: Path | None = None
    appendfsync: str = "always"
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the run's configuration: section, key, value."""
    expected: Callable[[Sequence[WitnessLine]], str] = partial(expected_digest, SEED)
    """Digest of the weights that the backend has after these steps."""
    exits: dict[str, list[int]] = field(default_factory=dict)
    """Of every life, by role."""
    nursery: Path | None = None
    """Whose children the daemons are, but for a trainer with torch; None: each is started by its command line."""
    keys: Keys = field(default_factory=lambda: Keys("round"))
    _alive: dict[str, Process] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_run(self.folder, self.url, backend=self.backend, model=self.model, changes=self.changes)
        await self._start_redis()
        await wait_ready(self.url, timeout_s=120.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for role in list(self._alive):
            with contextlib.suppress(ProcessLookupError):
                self._alive[role].kill()
            await self._alive[role].wait()
        server_command(self._redis_folder).socket.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        return server_command(self._redis_folder).url

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def _killed_file(self) -> Path:
        """There once somebody has died."""
        return self.folder / "killed"

    @property
    def _redis_folder(self) -> Path:
        return self.folder / "redis"

    def __str__(self) -> str:
        lost = f"{self.lose} bytes of Redis lost with it" if self.lose else ""
        by_chance = f"{self.chance} by chance of seed {self.seed}" if self.chance else ""
        changed = [f"{section}.{key} = {value}" for section, values in self.changes.items() for key, value in values.items()]
        return ", ".join(filter(None, [*map(str, self.kills), lost, by_chance, *changed])) or "nobody killed"

    # -- the run -------------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Return once trainer and producers have drained. Raises: `RoundFailed` for any exit but a kill and "try again", or if it takes too long."""
        try:
            async with asyncio.timeout(_ROUND_S), asyncio.TaskGroup() as group:
                redis = group.create_task(self._keep_redis(), name="round:redis")
                daemons = [group.create_task(self._keep(role), name=f"round:{role}") for role in (TRAINER, *PRODUCERS)]
                chance = group.create_task(self._kill_by_chance(), name="round:chance")
                await asyncio.wait(daemons, return_when=asyncio.ALL_COMPLETED)
                chance.cancel()
                redis.cancel()
            if has_ended(self._alive[REDIS].pid):  # just now, and its keeper went too
                await self._alive[REDIS].wait()
                self._forget_writes()
                await self._start_redis()
            await wait_ready(self.url, timeout_s=120.0)
        except TimeoutError:
            raise await self.failure([f"not over after {_ROUND_S:g} s; still there: {', '.join(sorted(set(self._alive) - {REDIS}))}"]) from None
        except ExceptionGroup as problems:
            raise await self.failure([str(problem) for problem in problems.exceptions]) from problems
        missed = [str(kill) for kill, count in Counter(self.kills).items() if self._deaths(kill) < count]
        if missed and self.must_kill:
            raise await self.failure([f"never got to be killed: {', '.join(missed)}"])

    def _deaths(self, kill: Kill) -> int:
        return self.exits.get(REDIS if kill.redis else kill.role, []).count(KILLED)

    async def _keep(self, role: str) -> None:
        """Start `role` until it drains."""
        wanted = [kill for kill in self.kills if kill.role == role]
        for life in range(1000):
            kill = wanted[life] if life < len(wanted) else None
            process = await self._start(role, await self._command(role), kill)
            code = await process.wait()
            del self._alive[role]
            self.exits.setdefault(role, []).append(code)
            self._killed_file.touch()
            if code == EXIT_DRAINED:
                return
            if code not in (KILLED, EXIT_TRY_AGAIN):
                raise RoundFailed(f"{role} ended with exit code {code}")

    async def _command(self, role: str) -> list[str]:
        config = ["-c", str(self.folder / "run.toml")]
        if role != TRAINER:
            return ["tests.faults.synthetic_producer", *config, "--index", role[-1]]
        return ["consumer.main", *config, "--resume" if await self._is_there() else "--new"]

    async def _is_there(self) -> bool:
        client = connect(self.url, deadline_s=60.0)
        try:
            await RedisLedger(client, self.keys).status()
        except RunMissing:
            return False
        finally:
            await client.aclose()
        return True

    async def _start(self, role: str, command: list[str], kill: Kill | None) -> Process:
        environ = os.environ | {"OMP_NUM_THREADS": "1", SUPERVISED: "1"}
        if kill is not None:
            environ[VARIABLE] = f"{kill.at}:{kill.nth}"
            if kill.redis:
                environ[VICTIM_VARIABLE] = str(self._alive[REDIS].pid)
        if self._waits(role):
            environ[HELD_UNTIL] = str(self._killed_file)
        path = self.folder / f"{role}.log"
        if self.nursery is not None and not (role == TRAINER and self.backend == "torch"):  # its threads do not survive a fork
            self._alive[role] = await nursery.start(self.nursery, command[0], command[1:], environ=environ, log=path)
        else:
            with path.open("ab") as log:
                self._alive[role] = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", *command, cwd=nursery.ROOT, env=environ, stdin=subprocess.DEVNULL, stderr=log
                )
        return self._alive[role]

    def _waits(self, role: str) -> bool:
        """Whether it makes no group before somebody has died: by itself it could make all that the run needs before the other has come to its failpoint."""
        return self.must_kill and role in PRODUCERS and any(kill.role in PRODUCERS and kill.role != role and kill.at in BUSY_POINTS for kill in self.kills)

    # -- Redis ---------------------------------------------------------------------------------------------------------------------------------

    async def _start_redis(self) -> None:
        command = server_command(self._redis_folder, appendfsync=self.appendfsync)
        self._redis_folder.mkdir(exist_ok=True)
        with (self.folder / "redis.log").open("ab") as log:
            self._alive[REDIS] = await asyncio.create_subprocess_exec(*command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def _keep_redis(self) -> None:
        while True:
            code = await self._alive[REDIS].wait()
            self.exits.setdefault(REDIS, []).append(code)
            self._killed_file.touch()
            if code != KILLED:
                raise RoundFailed(f"redis ended with exit code {code}")
            self._forget_writes()
            await self._start_redis()

    def _forget_writes(self) -> None:
        for log in (self._redis_folder / "appendonlydir").glob("*.incr.aof") if self.lose else ():
            os.truncate(log, max(_KEPT_BYTES, log.stat().st_size - self.lose))

    # -- chance --------------------------------------------------------------------------------------------------------------------------------

    async def _kill_by_chance(self) -> None:
        """Kill who is alive, spaced by chance. The moments are not those of another machine, but who and how long are the seed's."""
        rng = random.Random(self.seed)
        for _ in range(self.chance):
            role, wait_s = rng.choice((TRAINER, TRAINER, *PRODUCERS, REDIS)), rng.uniform(0.2, 1.5)
            await asyncio.sleep(wait_s)
            if (process := self._alive.get(role)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    # -- what is told --------------------------------------------------------------------------------------------------------------------------

    async def failure(self, problems: Sequence[str]) -> RoundFailed:
        """The problems with the tail of events and of every log."""
        told = [f"round with {self}:", *(f"  * {problem}" for problem in problems), f"exits: {self.exits}", "last events:"]
        async with client_of(self.url, deadline_s=2.0) as client:
            try:
                told += [_event(one) for one in (await read_audit(self.run_folder / "audit.jsonl", client, self.keys))[-_TOLD_EVENTS:]]
            except (RollstreamError, OSError) as problem:
                told.append(f"  unreadable: {problem}")
        for log in sorted(self.folder.glob("*.log")):
            told += [f"{log.name}:", *(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TOLD_LINES:])]
        return RoundFailed("\n".join(told))


def has_ended(pid: int) -> bool:
    """Whether our child is gone, reaped or not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 0)[0])
    finally:
        os.close(handle)


@contextlib.asynccontextmanager
async def client_of(url: str, *, deadline_s: float = 60.0) -> AsyncIterator[Any]:
    client = connect(url, deadline_s=deadline_s)
    try:
        yield client
    finally:
        await client.aclose()


def _event(one: Any) -> str:
    fields = {name: value for name, value in one.fields.items() if name not in ("stats", "settings", "identity")}
    return f"  {one.id} {one.op} {json.dumps(fields)[:200]}"


# -- the run's files ---------------------------------------------------------------------------------------------------------------------------


def write_run(folder: Path, url: str, *, backend: str, model: Path | None, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """run.toml, the prompts, and a model folder as far as anybody reads it."""
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT, "label": "3"}) + "\n")
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "round", "dir": str(folder / "run"), "seed": SEED},
        "redis": {"url": url, "deadline_s": 60.0},
        "model": {"path": str(model or _write_model(folder / "model"))},
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {"group_size": GROUP_SIZE, "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS},
        "buffer": {"groups_per_step": B, "chunk_groups": CHUNK, "pipeline_depth": 1.0, "max_staleness": 4, "slot_seconds": 1.0},
        "weights": {"store": str(folder / "weights"), "apply_deadline_s": 5.0},
        "producer": {"max_inflight_groups": 4, "drain_seconds": 1.0, "filter": "zero_variance"},
        "trainer": {"backend": backend, "lr": 1e-3, "warmup_steps": 2},
        "checkpoint": {"every_seconds": 0.0, "every_steps": 3},
        "stop": {"steps": STEPS},
    }
    for section, values in changes.items():
        tables[section] = tables.get(section, {}) | dict(values)
    for key in ("spill", "blobs"):
        if where := tables["buffer"].get(key):
            tables["buffer"][key] = str(folder / where)
    text = "".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items())
    (folder / "run.toml").write_text(text)


def _write_model(folder: Path) -> Path:
    """A tokenizer of characters and no weights to speak of."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate("?_^0123456789>=+-")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "chain"}')
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder
