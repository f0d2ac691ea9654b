"""`start.sh py -m benchmarks.gpu.weights`: versions from a trainer on one GPU into real SGLang servers on another, under load, one way after the other.

A row is a run of its own: publisher, reconciler, and weight server where the way needs one, all anew; the SGLang server stays. Its first version warms
up and is not counted. Each result is written as soon as it is there, each row has its own deadline, and one that fails says why and leaves the rest alone.
`--dry` tries all of it on a CPU, with the embedded engine, a tiny model and gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.weights.calls import Calls
from benchmarks.weights.child import Child, Failed
from benchmarks.weights.following import Following
from benchmarks.weights.random_model import vocabulary
from benchmarks.weights.served import weight_server
from deploy.redis_server import redis_server
from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.sglang.engine import SGLangServer
from protocol.connection import connect
from protocol.keys import Keys
from protocol.versions import Version
from protocol.wakeups import wakeups
from weightsync.config import WeightsConfig

_HERE = Path(__file__).parent
_WAYS = ("nccl", "gloo", "ipc", "store", "delta")
_LIVE_S, _CHECK_TOKENS, _PORT = 90.0, 32, 31100
_START_S = 600.0
_ON_CPU = ("--disable-radix-cache",)  # as on GPUs: the same prompt is compared after each update
_AGREES = 0.15
"""Nats, the mean of absolute differences. SGLang and transformers in bfloat16 differ by 0.02 to 0.05, two random models by more than 5."""
_ROW_S = {"tiny": 120.0, "small": 150.0, "large": 240.0}


@dataclass(slots=True)
class Engine:
    """A server process: SGLang, or the embedded engine for a trial."""

    index: int
    url: str
    boot_nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    process: asyncio.subprocess.Process | None = None
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def name(self) -> str:
        return f"engine{self.index}"


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(os.environ.get("KIT_WORK") or Path(tempfile.gettempdir()) / "gpu-kit")
        self.work.mkdir(parents=True, exist_ok=True)
        self.shm = Path("/dev/shm/gpu-kit")
        self.model = self.shm / f"model-{options.size}"
        self.ends = time.monotonic() + options.minutes * 60
        self.engines: list[Engine] = []
        self.trainer: Child | None = None
        self.redis = ""
        self.rows: list[dict[str, Any]] = []

    @property
    def engine_gpus(self) -> range:
        return range(self.options.tp)

    @property
    def trainer_gpu(self) -> int:
        """Beside the first of the engine's where it has both."""
        given: int = self.options.trainer_gpu
        return given if given >= 0 else int(self.options.tp == 1)

    def note(self, **row: Any) -> None:
        row = {"size": self.options.size, **row}
        self.rows.append(row)
        with (self.out / "results.jsonl").open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")
        print(orjson.dumps(row).decode()[:600], flush=True)

    def log(self, name: str) -> Path:
        return self.work / f"{name}.log"

    # -- processes -----------------------------------------------------------------------------------------------------------------------------

    async def start_engine(self, index: int) -> Engine:
        options, port = self.options, _PORT + index
        engine = Engine(index, f"http://127.0.0.1:{port}")
        started = time.monotonic()
        if options.dry and options.python:
            await self._start_on_cpu(engine, port)
        elif options.dry:
            argv = [sys.executable, "-m", "benchmarks.weights.engine", str(self.model), str(port), engine.boot_nonce]
            with self.log(engine.name).open("ab") as log:
                engine.process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
            await _answers(engine.url, 60.0)
        else:
            memory = ["--mem-fraction-static", "0.4" if not index else "0.2", "--max-total-tokens", "65536"]
            flags = [*memory, "--weight-version", f"boot:{engine.boot_nonce}", "--tp-size", str(options.tp), *options.flags.split()]
            gpus = ",".join(map(str, self.engine_gpus))
            await _script("serve", engine.name, gpus, str(port), str(self.model), *flags, deadline_s=260.0)
        self.engines.append(engine)
        await self.warm_up(engine)
        self.note(row="start", engine=engine.name, seconds=time.monotonic() - started)
        return engine

    async def _start_on_cpu(self, engine: Engine, port: int) -> None:
        """SGLang as an engine host starts it on a CPU: as many ranks, by gloo."""
        options = self.options
        settings = EngineConfig(
            kind="sglang",
            device="cpu",
            python=options.python,
            port=port,
            slots=8,
            tp=options.tp,
            args=_ON_CPU + tuple(options.flags.split()),
            start_seconds=_START_S,
        )
        kind = SGLangServer(settings, index=0, model=str(self.model), longest=1024, seed=lambda _: 1, log=self.log(engine.name))
        session = await engine.stack.enter_async_context(aiohttp.ClientSession())
        life = await engine.stack.enter_async_context(kind.life(engine.boot_nonce, Desk(session)))
        await life.ready()

    async def warm_up(self, engine: Engine) -> None:
        """The first requests compile kernels."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
            await asyncio.gather(*(self.generate(session, engine, [5 + at, 6, 7], 8) for at in range(16)))

    async def stop_engine(self, engine: Engine) -> None:
        self.engines.remove(engine)
        if self.options.python:
            await engine.stack.aclose()
        elif engine.process is not None:
            engine.process.terminate()
            await engine.process.wait()
        else:
            with contextlib.suppress(Failed):
                await _script("stop", engine.name, deadline_s=30.0)

    async def revive(self) -> None:
        """A server that a row has broken is started again."""
        for engine in list(self.engines):
            try:
                async with asyncio.timeout(20), aiohttp.ClientSession() as session:
                    await session.post(engine.url + "/continue_generation", json={})
                    await self.generate(session, engine, [5, 6, 7], 2)
            except (aiohttp.ClientError, OSError, TimeoutError, KeyError) as problem:
                self.note(row="revive", engine=engine.name, why=repr(problem)[:200])
                await self.stop_engine(engine)
                await self.start_engine(engine.index)

    async def generate(self, session: aiohttp.ClientSession, engine: Engine, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and what the engine says of their logprobs."""
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        async with session.post(engine.url + "/generate", json={"input_ids": ids, "sampling_params": sampling, "return_logprob": True}) as answer:
            body = await answer.json()
            return body["output_ids"], [one[0] for one in body["meta_info"]["output_token_logprobs"]]

    @contextlib.asynccontextmanager
    async def child(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
        child = await Child.start(name, argv, log=self.log(name), env=env)
        try:
            yield child
        finally:
            await child.close(grace_s=5.0)

    @contextlib.asynccontextmanager
    async def load(self, engine: Engine) -> AsyncIterator[Child]:
        size, options = self.options.size, self.options
        streams, tokens = ("0", "64") if options.dry else ("2", "512")
        argv = ["benchmarks.weights.load", engine.url, "--streams", streams, "--tokens", tokens, "--vocabulary", str(vocabulary(size))]
        async with self.child(f"load-{engine.name}", argv) as child:
            yield child

    # -- rows ----------------------------------------------------------------------------------------------------------------------------------

    async def row(self, name: str) -> None:
        ways = {"many": "gloo" if self.options.dry else "nccl"}
        transport = ways.get(name, name)
        engines = self.engines if name == "many" else self.engines[:1]
        run = f"{self.options.size}-{name}-{uuid.uuid4().hex[:4]}"
        weights = {"store": str(self.shm / "store"), "relay": str(self.shm / "relay"), "transport": transport, "keep": 1, "bucket_mb": self.options.bucket_mb}
        assert self.trainer is not None
        calls = Calls()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, self.shm / "store" / run, ignore_errors=True)
            stack.callback(shutil.rmtree, self.shm / "relay" / f"{run}-relay", ignore_errors=True)
            client = connect(self.redis)
            stack.push_async_callback(client.aclose)
            keys = Keys(run)
            waker = await stack.enter_async_context(wakeups(client, keys))
            await self.trainer.ask("open", run=run, redis=self.redis, weights=weights, deadline_s=60)
            stack.push_async_callback(self.trainer.ask, "close", run=run, deadline_s=60)
            # On the trainer's GPU for a collective, on the engine's for handles.
            gpu = self.engine_gpus[0] if transport == "ipc" else self.trainer_gpu
            if transport == "nccl" and gpu in self.engine_gpus and not self.options.dry:
                raise Failed(f"NCCL refuses two ranks on one GPU, and {gpu} is the sender's and the engine's: give the trainer another by --trainer-gpu")
            env = {"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_CUMEM_ENABLE": "0"}
            await stack.enter_async_context(weight_server(run, self.redis, weights, client=client, log=self.log(f"weight-server-{name}"), env=env))
            following: dict[str, Following] = {}
            for engine in engines:
                session = await stack.enter_async_context(aiohttp.ClientSession(trace_configs=[calls.trace()]))
                one = Following(
                    run,
                    engine.name,
                    engine.boot_nonce,
                    engine.url,
                    client=client,
                    waker=waker,
                    session=session,
                    config=WeightsConfig(**weights),
                    kind="sglang",
                    ranks=self.options.tp,
                )
                following[engine.name] = await stack.enter_async_context(one)
            probe = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
            await self.publish(run, 0, "fresh", following)
            loads = {engine.name: await stack.enter_async_context(self.load(engine)) for engine in engines}
            await asyncio.sleep(3.0)
            for n in range(1, self.options.rounds + 1):
                last = n == self.options.rounds
                kind = ("sparse" if last else "adam") if transport == "delta" else "fresh"
                out = await self.publish(run, n, kind, following)
                await asyncio.sleep(0.5)
                for engine in engines:
                    told = await self.update(engine, out, following, calls, loads)
                    told["logprob_difference"] = await self.compare(probe, engine)
                    told["right"] = told["logprob_difference"] < self.options.agrees
                    self.note(row=name, engine=engine.name, round=n, step=kind, **told)
                await asyncio.sleep(1.5)
            for engine_name, load in loads.items():
                self.note(row=f"{name}-totals", engine=engine_name, **await load.ask("stop", deadline_s=120))

    async def publish(self, run: str, n: int, kind: str, following: Mapping[str, Following]) -> dict[str, Any]:
        """Change the weights, publish them, and return once every engine serves them."""
        assert self.trainer is not None
        await self.trainer.ask("step", kind=kind, seed=1000 + n, deadline_s=60)
        out = dict(await self.trainer.ask("publish", run=run, n=n, deadline_s=60))
        version = Version(1, n)
        published = asyncio.create_task(self.trainer.ask("published", run=run, deadline_s=250))
        live = await asyncio.gather(*(one.serves(version, deadline_s=_LIVE_S) for one in following.values()))
        out |= await published
        out["live"] = dict(zip(following, live, strict=True))
        return out

    async def update(
        self, engine: Engine, out: Mapping[str, Any], following: Mapping[str, Following], calls: Calls, loads: Mapping[str, Child]
    ) -> dict[str, Any]:
        pauses = calls.pauses(engine.url, since=out["submitted"])
        if not pauses:
            raise Failed(f"{engine.name} serves {out['version']} without a pause seen")
        pause, mine = pauses[-1], following[engine.name]
        applied = await mine.applied(Version.parse(out["version"]))
        seen = await loads[engine.name].ask("window", since=pause.began, until=pause.ended, deadline_s=30)
        told: dict[str, Any] = {
            "by": applied["transport"],
            "fell_back": mine.problem,
            "kind": out["kind"],
            "publish_to_live_s": out["live"][engine.name] - out["submitted"],
            "publish_s": out["publish_s"],
            "prepare_s": applied["prepare_s"],
            "pause_s": applied["pause_s"],
            "apply_s": applied["apply_s"],
            "engine_calls_s": pause.loading_s,
            "engine_calls": pause.updates,
            "pause_and_continue_s": pause.control_s,
            "pause_over_apply": pause.seconds / pause.loading_s if pause.loading_s else None,
            "gap_ms": seen["gap_ms"],
            "usual_gap_ms": seen["usual_gap_ms"],
            "longest_usual_gap_ms": seen["longest_usual_gap_ms"],
            "bytes": self.whole_bytes,
            "published_bytes": out["bytes"],
            "gb_per_s": self.whole_bytes / pause.loading_s / 1e9 if pause.loading_s else None,
            "trainer_blocked_ms": out["blocked_ms"],
            "digest_ms": out["digest_ms"],
            "changed_share": out["changed_elements"] / out["elements"] if out["elements"] and out["kind"] == "delta" else None,
        }
        spans = {"others_throughput": (out["submitted"], out["live"][engine.name]), "others_throughput_in_pause": (pause.began, pause.ended)}
        for name, (since, until) in spans.items():
            rates = [await load.ask("window", since=since, until=until, deadline_s=30) for other, load in loads.items() if other != engine.name]
            told[name] = _mean([one["tokens_per_s"] / one["tokens_per_s_before"] for one in rates if one["tokens_per_s_before"]])
        return told

    @property
    def whole_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors"))

    async def compare(self, session: aiohttp.ClientSession, engine: Engine) -> float:
        """Mean difference, in nats, between the engine's logprobs of its greedy tokens and those under the weights that the trainer holds."""
        assert self.trainer is not None
        prompt = [random.Random(7).randrange(4, vocabulary(self.options.size)) for _ in range(48)]
        ids, logprobs = await self.generate(session, engine, prompt, _CHECK_TOKENS)
        answer = await self.trainer.ask("logprobs", ids=prompt + ids, prompt=len(prompt), deadline_s=60)
        return float(statistics.fmean(abs(mine - its) for mine, its in zip(answer["logprobs"], logprobs, strict=True)))

    # -- all of it -----------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        options = self.options
        shutil.rmtree(self.shm / "store", ignore_errors=True)
        shutil.rmtree(self.shm / "relay", ignore_errors=True)
        try:
            async with contextlib.AsyncExitStack() as stack:
                self.redis = await stack.enter_async_context(redis_server(self.work / f"redis-{uuid.uuid4().hex[:6]}", appendfsync="no"))
                device = "cpu" if options.dry else f"cuda:{self.trainer_gpu}"
                self.trainer = await stack.enter_async_context(self.child("trainer", ["benchmarks.weights.trainer", device, options.size, str(self.model)]))
                started = time.monotonic()
                await self.trainer.ask("step", kind="fresh", seed=1, deadline_s=180)
                self.note(row="model", seconds=time.monotonic() - started, bytes=self.whole_bytes, host=socket.gethostname())
                try:
                    await self.start_engine(0)
                    for name in options.rows.split(","):
                        await self.guarded(name)
                finally:
                    for engine in list(self.engines):
                        await self.stop_engine(engine)
        finally:
            self.keep_logs()
            print(_table(self.rows), flush=True)

    async def guarded(self, name: str) -> None:
        left = self.ends - time.monotonic()
        started = time.monotonic()
        try:
            async with asyncio.timeout(min(left, _ROW_S[self.options.size])):
                if name == "many":
                    while len(self.engines) < 3:
                        await asyncio.gather(*(self.start_engine(index) for index in range(len(self.engines), 3)))
                await self.row(name)
        except Exception as problem:  # noqa: BLE001 - the next row may work
            self.note(row=f"{name}-failed", error=f"{type(problem).__name__}: {problem}"[:1500], after_s=time.monotonic() - started)
            if self.ends - time.monotonic() > 90:
                await self.revive()

    def keep_logs(self) -> None:
        """The end of every log, in one file to take home."""
        with (self.out / f"logs-{self.options.size}.txt").open("ab") as file:
            for path in sorted(self.work.glob("*.log")):
                text = path.read_bytes()
                file.write(f"\n==== {path.name} ({len(text)} bytes)\n".encode() + text[-120_000:])


async def _script(*argv: str, deadline_s: float) -> None:
    """Raises: `Failed` with what it printed."""
    process = await asyncio.create_subprocess_exec(str(_HERE / "start.sh"), *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        async with asyncio.timeout(deadline_s):
            printed, _ = await process.communicate()
    except TimeoutError as problem:
        process.kill()
        raise Failed(f"start.sh {argv[0]} {argv[1]}: not done within {deadline_s:.0f} s") from problem
    if process.returncode:
        raise Failed(f"start.sh {argv[0]} {argv[1]}: {printed.decode(errors='replace')[-1500:]}")


async def _answers(url: str, deadline_s: float) -> None:
    async with asyncio.timeout(deadline_s), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(url + "/model_info") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


_COLUMNS = {
    "publish_to_live_s": ("to live s", 1.0),
    "prepare_s": ("prepare s", 1.0),
    "pause_s": ("pause ms", 1e3),
    "engine_calls_s": ("engine ms", 1e3),
    "pause_over_apply": ("ratio", 1.0),
    "gap_ms": ("gap ms", 1.0),
    "gb_per_s": ("GB/s", 1.0),
    "trainer_blocked_ms": ("blocked ms", 1.0),
    "others_throughput": ("others", 1.0),
    "others_throughput_in_pause": ("in pause", 1.0),
    "logprob_difference": ("logprob", 1.0),
}


def _table(rows: list[dict[str, Any]]) -> str:
    """Medians of the rounds, a line a way."""
    lines = [f"{'row':<8}{'by':<8}" + "".join(f"{title:>12}" for title, _ in _COLUMNS.values()) + "   rounds, right"]
    for name in dict.fromkeys(row["row"] for row in rows if "round" in row):
        found = [row for row in rows if row["row"] == name and "round" in row]
        cells = []
        for key, (_, factor) in _COLUMNS.items():
            values = [row[key] * factor for row in found if row.get(key) is not None]
            cells.append(f"{statistics.median(values):>12.3f}" if values else f"{'':>12}")
        ways = ",".join(dict.fromkeys(str(row["by"]) for row in found))
        lines.append(f"{name:<8}{ways:<8}" + "".join(cells) + f"   {len(found)}, {sum(row['right'] for row in found)}")
    lines += [f"{row['row']}: {row['error']}" for row in rows if "error" in row]
    lines += [
        f"{row['row']} {row['engine']}: {row['finished']} requests, {row['tokens_lost']} tokens lost, {row['failed']} failed"
        for row in rows
        if "tokens_lost" in row
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.weights", description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small", "large"), default="small")
    parser.add_argument("--rows", default="nccl,ipc,store,delta,many")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=9.0, help="no row goes on past this")
    parser.add_argument("--flags", default="", help="more flags of the SGLang servers")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each engine, from the first on")
    parser.add_argument("--trainer-gpu", type=int, default=-1, help="default: the second, or the first where an engine has several")
    parser.add_argument("--agrees", type=float, default=_AGREES, help="nats up to which a round is right; quantised weights are further off")
    parser.add_argument("--python", default="", help="with --dry: the interpreter of an SGLang for CPUs, which then takes the embedded engine's place")
    parser.add_argument("--out", default=os.environ.get("OUT", "runs/gpu-weights"))
    parser.add_argument("--dry", action="store_true", help="on a CPU")
    options = parser.parse_args()
    asyncio.run(Bench(options).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
