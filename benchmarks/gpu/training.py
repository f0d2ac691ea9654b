"""`start.sh py -m benchmarks.gpu.training LAYOUT`: the whole service trains SmolLM2-135M-Instruct on arithmetic through SGLang, and tells what it took.

`rollstream up` with its own Redis, real rewards, one engine. Beside it run a few streaming requests that live through updates (`streams`) and a look at the
GPUs' memory; afterwards the engine's logprobs are compared with the trainer's (`difference`). A JSON file and one of logs come out, and a table of all JSON
files that lie in the same folder. Everything is over after --minutes, whatever happens. `--dry --device cpu` tries all of it on a CPU, with either engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gpu import arithmetic
from benchmarks.gpu.device_memory import DeviceMemory, watched
from benchmarks.gpu.figures import figures, results, table
from benchmarks.gpu.layouts import DRY, FULL, Layout, Measured, configuration, toml, visible
from benchmarks.gpu.streams import Streams
from buffer.audit import read_audit
from deploy.config import reader_url
from deploy.history import read_history
from deploy.summary import read_summary
from deploy.up.process import identity_of
from deploy.up.records import read_records
from producer.template import PromptEncoder
from protocol.config import RedisConfig, RunConfig
from protocol.connection import connect
from protocol.errors import ConfigError, RollstreamError

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_TRAIN_S, _STOP_S, _KILL_S = 90.0, 40.0, 28.0
"""Before the end: when training stops by itself, when it is told to, when nobody is waited for any longer. The rest is for the comparison."""
_COMPARE_S = 20.0
"""It has at least so long, also where that is past the end."""
_LOG_BYTES = 150_000
_ROWS = 8192
_PROMPTS = 64
_KNOCK_S = 0.5


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.minutes * 60
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scale = DRY if options.dry else FULL
        self.gpus: tuple[int, ...] = tuple(int(gpu) for gpu in options.gpus.split(",")) if options.device == "cuda" else ()
        self.visible = visible(options.layout, self.gpus) if self.gpus else ""
        self.run = self._plan()
        self.failed: list[str] = []
        """What went wrong, in order; the JSON has what there is nevertheless."""
        self._streams = Streams([], count=0, tokens=0)

    def _plan(self) -> Measured:
        options = self.options
        work = Path(os.environ.get("KIT_WORK") or Path(tempfile.gettempdir()) / "gpu-kit").absolute()
        mark = "-".join(filter(None, (options.layout, options.pause, options.transport, options.label)))
        data = arithmetic.paths(work / "data" / mark)
        left_s = options.minutes * 60 - _TRAIN_S
        return Measured(
            name=mark,
            layout=options.layout,
            pause=options.pause,
            transport=options.transport,
            engine=options.engine,
            device=options.device,
            engine_python=options.engine_python or str(_HERE / "sglang_python.sh"),
            flags=tuple(options.flags.split()),
            lr=options.lr,
            steps=options.steps,
            train_seconds=max(20.0, left_s),
            scale=self.scale,
            folder=work / "runs" / mark,
            store=Path("/dev/shm/gpu-kit") / mark,
            model=Path(options.model or work / "smollm2").absolute(),
            train=data.train,
            held_out=data.held_out,
        )

    # -- the run ---------------------------------------------------------------------------------------------------------------------------------

    async def measure(self) -> dict[str, Any]:
        """The result, also of a run that failed."""
        run = self.run
        for folder in (run.folder, run.store):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        await asyncio.to_thread(arithmetic.write_rows, run.train.parent, rows=_ROWS, held_out=run.scale.held_out, seed=0)
        file = run.folder.with_suffix(".toml")
        file.write_text(toml(configuration(run)), "utf-8")
        memory = DeviceMemory()
        try:
            async with watched(run.folder, self.gpus) as memory, self._flowing():
                code = await self._up(file)
            if code:
                self.failed.append(f"rollstream up ended with {code}: {_tail(self._log, 1200)}")
        except Exception as problem:  # noqa: BLE001 - what there is is told
            self.failed.append(f"{type(problem).__name__}: {problem}")
        result = self._about() | await self._figures() | {"gpu_memory": memory.told, "streams": self._streams.told}
        result["logprob_difference"] = await self._difference()
        result["failed"] = "; ".join(self.failed)
        self._keep(result)
        shutil.rmtree(run.store, ignore_errors=True)
        return result

    @property
    def _log(self) -> Path:
        return self.run.folder.with_suffix(".log")

    async def _up(self, file: Path) -> int:
        """Its exit code. Everybody whom it started is gone afterwards."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT)))), "HF_HUB_OFFLINE": "1"}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.visible
        argv = [sys.executable, "-m", "deploy.cli", "up", "-c", str(file), "--new", "--no-live"]
        argv += [word for one in self.options.set for word in ("--set", one)]
        with self._log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=_ROOT, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            for left_s, number in ((_STOP_S, signal.SIGTERM), (_KILL_S, signal.SIGKILL)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self.ends - time.monotonic() - left_s)):
                        return await process.wait()
                self.failed.append(f"rollstream up was sent {number.name}")
                process.send_signal(number)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._end_the_rest()

    def _end_the_rest(self) -> None:
        for record in read_records(self.run.folder):
            if identity_of(record.identity.pid) == record.identity:
                self.failed.append(f"{record.child} had to be killed")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(record.identity.pid, signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def _flowing(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._stream(), name="streams")
        try:
            yield
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended, Exception):
                self._streams.problem = f"{type(ended).__name__}: {ended}"[:300]

    async def _stream(self) -> None:
        """From when the run's Redis is there."""
        run = self.run
        rows = [orjson.loads(line) for line in run.train.read_bytes().split(b"\n")[:_PROMPTS]]
        encoder = await asyncio.to_thread(PromptEncoder, str(run.model))
        self._streams = Streams([encoder.encode(row["prompt"]) for row in rows], count=run.scale.streams, tokens=run.scale.stream_tokens)
        while True:
            with contextlib.suppress(ConfigError):
                url = reader_url(RunConfig(name=run.name, dir=str(run.folder)), RedisConfig())
                break
            await asyncio.sleep(_KNOCK_S)
        client = connect(url)
        try:
            await self._streams.run(client, run.name)
        finally:
            await client.aclose()

    # -- what came of it -------------------------------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        run = self.run
        settings = {
            "lr": run.lr,
            "flags": list(run.flags),
            "set": self.options.set,
            "model": run.model.name,
            **{name: getattr(run.scale, name) for name in run.scale.__slots__},
        }
        return {
            "name": run.name,
            "layout": run.layout,
            "pause": run.pause,
            "transport": run.transport,
            "engine": run.engine,
            "device": run.device,
            "gpus": self.visible,
            "settings": settings,
            "versions": {package: version for package in ("torch", "transformers", "sglang", "triton") if (version := _version(package))},
        }

    async def _figures(self) -> dict[str, Any]:
        folder = self.run.folder
        try:
            history = read_history(await read_audit(folder / "audit.jsonl"))
            metrics = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
            return figures(history, metrics, read_summary(folder))
        except (OSError, RollstreamError, ValueError, KeyError) as problem:
            self.failed.append(f"no figures: {type(problem).__name__}: {problem}")
            return {}

    async def _difference(self) -> dict[str, Any]:
        """In a process of its own, on the trainer's device, which is free by now."""
        samples = self.run.folder / "samples.json"
        self._streams.save(samples)
        device = "cuda:0" if self.gpus else "cpu"
        argv = [sys.executable, "-m", "benchmarks.gpu.difference", str(samples), str(self.run.store / "versions" / self.run.name), device]
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": self.visible} if self.gpus else {})}
        process = await asyncio.create_subprocess_exec(*argv, cwd=_ROOT, env=environment, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(max(_COMPARE_S, self.ends - time.monotonic())):
                printed, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            self.failed.append("logprobs were not compared in time")
            return {}
        if process.returncode:
            self.failed.append(f"logprobs were not compared: {said.decode(errors='replace')[-800:]}")
            return {}
        told: dict[str, Any] = orjson.loads(printed.splitlines()[-1])
        return told

    def _keep(self, result: Mapping[str, Any]) -> None:
        """The result, and the end of every log in one file."""
        (self.out / f"{self.run.name}.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        with (self.out / f"{self.run.name}.log.txt").open("wb") as kept:
            for path in (self._log, *sorted((self.run.folder / "logs").glob("*.log"))):
                kept.write(f"\n==== {path.name}\n{_tail(path, _LOG_BYTES)}".encode())


def _tail(path: Path, most: int) -> str:
    try:
        return path.read_bytes()[-most:].decode(errors="replace")
    except OSError as problem:
        return f"({problem})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", type=Layout, choices=list(Layout))
    parser.add_argument("--pause", choices=("in_place", "retract", "abort"), default="in_place", help="how the engine pauses for a version")
    parser.add_argument("--transport", default="store", help="weights.transport (default: %(default)s)")
    parser.add_argument("--gpus", default="0", help="one, or two with `apart`: the trainer's, then the engine's (default: %(default)s)")
    parser.add_argument("--label", default="", help="tells runs of one layout apart, with other settings say")
    parser.add_argument("--minutes", type=float, default=5.0, help="everything is over by then (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps; 0, the default: by time alone")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine-python", default="", help="the interpreter that has SGLang; default: that of the kit")
    parser.add_argument("--flags", default="", help="more flags of the SGLang server")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the run's own; may be repeated")
    parser.add_argument("--model", default="", help="folder of the model; default: smollm2 in KIT_WORK")
    parser.add_argument("--dry", action="store_true", help="little of everything, for a CPU")
    parser.add_argument("--out", default=os.environ.get("OUT", "runs/gpu-training"))
    options = parser.parse_args(words)
    bench = Bench(options)
    result = asyncio.run(bench.measure())
    print(table(results(bench.out)), flush=True)
    return int(bool(result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
