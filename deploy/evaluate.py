"""`rollstream eval`: a saved model on the held-out sets, greedily, on an engine of its own; no trainer, no producer, no Redis.

saved model ──► engine of this process (`engine.kind`) ──► the pass that a run's evaluations make ──► table, JSON, and the run's audit if it can be reached

Exit codes: 0 every set has answers; 1 a set has none, or SIGTERM or Ctrl-C ended it, which leaves nothing behind; 2 bad configuration; 75 a store, or an
engine, does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from buffer.config import BufferConfig
from buffer.ledger import LocalLedger
from consumer.config import CheckpointConfig
from deploy.config import reader_url
from deploy.saved import Saved, saved_model
from deploy.up.records import write_atomically
from producer.config import EvalConfig, ProducerConfig, RewardConfig
from producer.election import Phase
from producer.engine.client import KEEP_ALIVE_S, EngineClient, Sampling
from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault, Hosted, Kind
from producer.engine.key import admin_key, engine_key
from producer.engine.kinds import make_kind
from producer.held_out import Demand, HeldOut, Outcome, answer_all, read_held_out
from producer.pool import EnginePool
from producer.rewards import Grader, make_grader
from producer.sampler import Sampler
from producer.template import PromptEncoder
from protocol.audit import emit
from protocol.codec import SCHEMA
from protocol.config import DataConfig, ModelConfig, RedisConfig, RolloutConfig, RunConfig, Tree, load
from protocol.connection import asking, connect
from protocol.daemon import run_daemon
from protocol.durable import make_folder
from protocol.errors import ConfigError, RedisUnavailable, RollstreamError, SampleFailed
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus, JsonValue
from protocol.versions import Version
from protocol.wakeups import Wakeups
from weightsync.config import WeightsConfig

T = TypeVar("T")
SERVED = Version(1, 0)
"""What the engine calls the model: answers carry a version. What it really is stands in the results."""
_REDIS_S = 1.0
_WIDTH = 200
"""Of tables that go to a file or a pipe."""
_OPTION = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class EvaluateConfig(Tree):
    """The sections that an evaluation of a saved model reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    producer: ProducerConfig = ProducerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A saved model on every set."""

    saved: Saved
    outcomes: tuple[Outcome, ...]
    seconds: float
    """Of the passes, without the loading of the model."""

    @property
    def results(self) -> list[dict[str, JsonValue]]:
        """As a run's audit has them, one a set."""
        version = None if self.saved.version is None else str(self.saved.version)
        served: dict[str, JsonValue] = {"version": version, "versions": [version] if version else []}
        return [
            {"phase": Phase.CHECKPOINT.value, **_fields(outcome), **served, "model": self.saved.label, "seconds": self.seconds} for outcome in self.outcomes
        ]


def _fields(outcome: Outcome) -> dict[str, JsonValue]:
    """A set without an answer has no reward, and is told all the same."""
    if outcome.answers:
        return outcome.fields()
    return {"set": outcome.held_out.name, "pinned": True, "mixed": 0, "samples": 0, "tokens": 0, "failed": outcome.failed}


def evaluate(options: argparse.Namespace) -> int:
    """The command. Raises: `ConfigError` for a file that cannot be read as the configuration."""
    config = load(EvaluateConfig, options.config, sets=options.set)
    return run_daemon("rollstream eval", lambda stop: _unless(_evaluate(config, options), _stopped(stop)))


async def _stopped(stop: asyncio.Event) -> None:
    """Never returns. Raises: `RollstreamError` once `stop` is set."""
    await stop.wait()
    raise RollstreamError("stopped before everything was evaluated and written; evaluate again")


async def _evaluate(config: EvaluateConfig, options: argparse.Namespace) -> None:
    """Raises: `ConfigError`; `Unavailable`; `SampleFailed` when a set was not answered at all, with the results of the others written."""
    folder = Path(options.out).parent if options.out else config.run.folder / "evals"
    await asyncio.to_thread(_check_places, folder, {"--out": options.out, "--responses": options.responses})
    saved = saved_model(options.checkpoint, run=config.run, model=config.model, checkpoint=config.checkpoint, weights=config.weights)
    async with saved as model:
        evaluated = await evaluate_saved(config, model)
    path = Path(options.out) if options.out else folder / f"{model.label.replace(' ', '-').replace(':', '-')}.json"
    written: dict[str, object] = {
        "run": config.run.name,
        "model": model.label,
        "folder": str(model.folder),
        "version": None if model.version is None else str(model.version),
        "digest": model.digest,
        "results": evaluated.results,
    }
    recorded = await record(config, evaluated)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(written, option=_OPTION))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
        console.print(table(evaluated))
    await asyncio.to_thread(_write, path, orjson.dumps(written, option=_OPTION))
    if options.responses:
        await asyncio.to_thread(_write, Path(options.responses), responses(evaluated))
    if not options.json:
        sys.stdout.write(f"{path}\n{recorded}\n")
    if silent := [outcome for outcome in evaluated.outcomes if not outcome.answers]:
        names = ", ".join(outcome.held_out.name for outcome in silent)
        raise SampleFailed(f"{model.label}: all samples of {names} failed, the last one: {silent[-1].problem}; what there is of the other sets is in {path}")


def _check_places(folder: Path, files: Mapping[str, str]) -> None:
    """Whether the results can be written to `folder`, and to those of `files` that are named, by option; nothing is made.

    Raises: `ConfigError` naming the place, before an evaluation is made in vain.
    """
    for option, name in files.items():
        if name and Path(name).is_dir():
            raise ConfigError(f"{option} {name}: is a folder; give the name of a file")
    for place in (folder.absolute(), *(Path(name).absolute().parent for name in files.values() if name)):
        try:
            with tempfile.TemporaryFile(dir=next(path for path in (place, *place.parents) if path.exists())):
                pass
        except OSError as problem:
            raise _unwritten(place, problem) from problem


def _write(path: Path, content: bytes) -> None:
    """Raises: `ConfigError`."""
    try:
        make_folder(path.absolute().parent)
        write_atomically(path, content)
    except OSError as problem:
        raise _unwritten(path, problem) from problem


def _unwritten(place: Path, problem: OSError) -> ConfigError:
    return ConfigError(f"{place}: cannot be written ({problem.strerror or problem}); choose other places with --out and --responses, or make room there")


async def evaluate_saved(config: EvaluateConfig, saved: Saved) -> Evaluated:
    """Every held-out set of `config` on `saved`, with its own tokenizer.

    Raises: `ConfigError` for sets, rewards or a model that cannot be used; `SampleFailed` when nothing was answered at all.
    """
    here = config.model_copy(update={"model": ModelConfig(path=str(saved.folder)), "engine": config.engine.model_copy(update={"port": 0})})
    prepared = await asyncio.to_thread(_prepare, here, saved)
    sampling = Sampling(
        max_new_tokens=here.eval.max_new_tokens or here.rollout.max_new_tokens,
        temperature=0.0,
        top_p=here.rollout.top_p,
        top_k=here.rollout.top_k,
        stop=here.rollout.stop,
    )
    async with _session() as session, _serving(here, saved) as (engine, life):
        alone = _Alone(engine)
        pool = await _pool(alone)
        sampler = Sampler(
            pool=pool,
            client=EngineClient(session, engine_key(), admin_key=admin_key()),
            grader=prepared.grader,
            config=here.producer,
            decode=prepared.encoder.decode,
        )
        demand, began = Demand(version=SERVED, pinned=True), time.monotonic()

        async def passes() -> list[Outcome]:
            return [
                await answer_all(held_out, demand, sampler=sampler, sampling=sampling, concurrency=here.eval.concurrency, rid=f"eval-{held_out.name}")
                for held_out in prepared.sets
            ]

        outcomes = await _unless(passes(), life.failed(), alone.failed())
        seconds = round(time.monotonic() - began, 3)
    if not any(outcome.answers for outcome in outcomes):
        problem = next(outcome.problem for outcome in outcomes)
        raise SampleFailed(f"{saved.label}: all {sum(outcome.failed for outcome in outcomes)} samples failed, the last one: {problem}")
    return Evaluated(saved=saved, outcomes=tuple(outcomes), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    grader: Grader
    encoder: PromptEncoder
    sets: tuple[HeldOut, ...]


def _prepare(config: EvaluateConfig, saved: Saved) -> _Prepared:
    if config.engine.kind == "external":
        raise ConfigError('engine.kind is "external": an evaluation of a saved model starts an engine of its own; --set engine.kind=embedded, or sglang')
    grader, encoder = make_grader(config.reward), PromptEncoder(config.model.path)
    sets = read_held_out(config.eval, config.data, grader=grader, encoder=encoder, max_tokens=config.rollout.max_prompt_tokens)
    if not sets:
        raise ConfigError("eval.path is empty, and so is eval.sets: name a JSONL file of held-out prompts, such as --set eval.path=eval.jsonl")
    _check_vocabulary(saved.folder, sets)
    return _Prepared(grader=grader, encoder=encoder, sets=sets)


def _check_vocabulary(folder: Path, sets: Sequence[HeldOut]) -> None:
    """Raises: `ConfigError` where the tokenizer has tokens that the model does not know."""
    try:
        size = orjson.loads((folder / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError) as problem:
        raise ConfigError(f"{folder / 'config.json'}: cannot be read ({problem}); save the model again") from problem
    highest = max(int(held_out.prompts.ids(index).max()) for held_out in sets for index in range(len(held_out.prompts)))
    if isinstance(size, int) and highest >= size:
        raise ConfigError(
            f"{folder}: its tokenizer has token {highest}, and its model a vocabulary of {size}: they are of two models; save the right tokenizer there"
        )


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=KEEP_ALIVE_S)) as session:
        yield session


@contextlib.asynccontextmanager
async def _serving(config: EvaluateConfig, saved: Saved) -> AsyncIterator[tuple[EngineStatus, Hosted]]:
    """An engine that serves `saved` as `SERVED`, while the context is open, and the life it has.

    Raises: `ConfigError`; `EngineFault`; `ApplyFailed` in the engine's own words.
    """
    async with aiohttp.ClientSession() as session:
        desk = Desk(session, api_key=engine_key(), admin_key=admin_key())
        async with _kind(config).life(uuid.uuid4().hex[:16], desk) as life:
            await life.ready()
            await desk.reconciling(life.url).update_from_disk(str(saved.folder), str(SERVED), deadline_s=config.engine.start_seconds)
            status = EngineStatus(
                engine_id=EngineId("eval"),
                boot_nonce="",
                url=life.url,
                kind=config.engine.kind,
                state=EngineState.ROUTABLE,
                version=SERVED,
                capacity=config.engine.slots,
            )
            yield status, life


def _kind(config: EvaluateConfig) -> Kind:
    longest = config.rollout.max_prompt_tokens + (config.eval.max_new_tokens or config.rollout.max_new_tokens)
    return make_kind(
        config.engine,
        config.weights,
        index=0,
        model=config.model.path,
        longest=longest,
        seed=lambda _: config.run.seed,
        log=config.run.folder / "logs" / "sglang-eval.log",
    )


class _Alone:
    """The registry of one engine."""

    def __init__(self, engine: EngineStatus) -> None:
        self._engine = engine
        self._unfit: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def routable(self) -> Sequence[EngineStatus]:
        return [self._engine]

    async def mark_unfit(self, engine_id: str, _boot_nonce: str, reason: str) -> None:
        """There is no other engine to go on with."""
        if not self._unfit.done():
            self._unfit.set_result(f"engine {engine_id} {reason}")

    async def failed(self) -> None:
        """Never returns. Raises: `EngineFault` once the engine is unfit."""
        raise EngineFault(await self._unfit)


async def _unless(work: Coroutine[Any, Any, T], *faults: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, which is cancelled when one of `faults` raises. Raises: what that one raises."""
    task = asyncio.create_task(work, name="eval:work")
    watches = [asyncio.create_task(fault, name="eval:watch") for fault in faults]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        for watch in watches:
            if watch.done() and not task.done():
                watch.result()
        return await task
    finally:
        for one in (task, *watches):
            one.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _pool(alone: _Alone) -> EnginePool:
    """The engine as a producer finds its own, in a run that is nowhere else."""
    ledger = LocalLedger()
    await ledger.create(RunIdentity(schema_major=SCHEMA[0], seed=0, group_size=1, dataset="", tokenizer=""), BufferConfig())
    await ledger.attach(None, trainer_id="eval")
    pool = EnginePool(alone, ledger, Wakeups(), deadline_s=_REDIS_S)
    await pool.refresh()
    return pool


async def record(config: EvaluateConfig, evaluated: Evaluated) -> str:
    """Put the results into the audit of the run, if it is there; how that went, in a sentence for people."""
    run = config.run.name
    try:
        url = reader_url(config.run, config.redis)
    except ConfigError:
        return f"not recorded in run {run}: it has no Redis now"
    client = connect(url, deadline_s=_REDIS_S)
    try:
        with asking("the run"):
            there = await client.exists(Keys(run).state)
        if not there:
            return f"not recorded: there is no run {run} in {url}"
        for result in evaluated.results:
            await emit(client, Keys(run), "eval", result)
    except RedisUnavailable as problem:
        return f"not recorded in run {run}: {problem}"
    finally:
        await client.aclose()
    return f"recorded in run {run}"


def responses(evaluated: Evaluated) -> bytes:
    """One JSON object a line and sample: set, line of its file, output ids, reward."""
    lines = []
    for outcome in evaluated.outcomes:
        for _, answer in sorted(outcome.answers.items()):
            line = {
                "set": outcome.held_out.name,
                "line": answer.line,
                "output_ids": answer.output_ids,
                "finish_reason": answer.finish_reason,
                "reward": answer.reward.value,
                "exact": answer.reward.is_exact,
            }
            lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    return b"".join(lines)


def table(evaluated: Evaluated) -> Table:
    """One row a set."""
    found = Table(title=f"{evaluated.saved.label} ({evaluated.saved.folder})", title_justify="left", box=None, padding=(0, 2), header_style="bold")
    for name in ("set", "samples", "failed", "reward", "exact", "tokens", "seconds"):
        found.add_column(name, justify="left" if name == "set" else "right")
    for outcome in evaluated.outcomes:
        if not outcome.answers:
            found.add_row(outcome.held_out.name, "0", str(outcome.failed), "-", "-", "-", "-")
            continue
        fields = outcome.fields()
        figures = (f"{fields[name]:.3f}" for name in ("reward", "exact"))
        found.add_row(str(fields["set"]), str(fields["samples"]), str(fields["failed"]), *figures, str(fields["tokens"]), f"{evaluated.seconds:.1f}")
    return found
