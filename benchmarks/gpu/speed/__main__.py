"""`start.sh py -m benchmarks.gpu.speed`: what the trainer's backends make of a GPU, against loops of transformers alone.

Each row is a process with a time limit of its own; what it tells is written at once, one that fails says why and leaves the rest alone, and none goes on past
`--minutes`. `--dry` tries all of it on a CPU with a tiny model.

    kernels          attention and logprobs: right, and how fast alone
    same, half       one GPU against bare loops (`loops`)
    between          a real trainer on a real Redis: the gap between two steps (`between`)
    fsdp1, fsdp2     FSDP2 on one and two GPUs (`ranks`)
    tp1, tp2         Megatron, tensor-parallel on one and two GPUs; needs megatron-core
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_MODULES = {"kernels": "kernels", "same": "loops", "half": "loops", "between": "between", "fsdp1": "ranks", "fsdp2": "ranks", "tp1": "ranks", "tp2": "ranks"}
_LIMIT_S = {"model": 90.0, "kernels": 75.0, "same": 110.0, "half": 80.0, "between": 100.0, "fsdp1": 75.0, "fsdp2": 90.0, "tp1": 75.0, "tp2": 90.0}
_GPUS = {"fsdp2": 2, "tp2": 2}
_TOLD_BYTES = 3000


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size, self.device = ("tiny", "cpu") if options.dry else ("1b", "cuda")
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.ends = time.monotonic() + options.minutes * 60
        self.rows: list[dict[str, Any]] = []

    def note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        line = json.dumps(row)
        with (self.out / "speed.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line[:800], flush=True)

    def run(self) -> None:
        self.row("model")
        for name in self.options.rows.split(","):
            if not self.options.dry and _GPUS.get(name, 1) > self.gpus:
                self.note({"row": f"{name}-skipped", "why": f"{self.gpus} GPUs here"})
            else:
                self.row(name)
        print(table(self.rows), flush=True)

    @property
    def gpus(self) -> int:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        return listed.count("GPU ")

    def row(self, name: str) -> None:
        limit = min(self.ends - time.monotonic(), _LIMIT_S[name] * (4 if self.options.dry else 1))
        if limit < 5:
            self.note({"row": f"{name}-skipped", "why": f"--minutes {self.options.minutes:g} are over"})
            return
        argv = [sys.executable, "-m", "benchmarks.gpu.speed", "--child", f"{_MODULES.get(name, 'workload')}:main", name, self.size, self.device]
        began, seen = time.monotonic(), len(self.rows)
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
            late = threading.Timer(limit, _end, [child.pid])
            late.start()
            assert child.stdout is not None
            for line in child.stdout:
                try:
                    self.note(json.loads(line))
                except ValueError:
                    print(line, end="", flush=True)
            code = child.wait()
            over = not late.is_alive()
            late.cancel()
            _end(child.pid)  # what it left running
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        with (self.out / "speed-logs.txt").open("a") as file:
            file.write(f"\n==== {name}\n{text[-60_000:]}")
        spent = time.monotonic() - began
        if code or len(self.rows) == seen:
            why = f"ended after its {limit:.0f} s" if over else f"exit code {code}"
            self.note({"row": f"{name}-failed", "error": why, "after_s": spent, "log": text[-_TOLD_BYTES:]})
        else:
            self.note({"row": f"{name}-took", "seconds": spent})


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'row':<10}{'loop':<8}{'tokens/s':>12}{'MFU':>8}{'step s':>9}{'peak GiB':>10}"]
    rates: dict[str, float] = {}
    for row in rows:
        if "tokens_per_s" in row:
            rates[row["row"]] = row["tokens_per_s"]
            cells = f"{row['tokens_per_s']:>12.0f}{row['mfu']:>8.3f}{row['step_s']:>9.3f}{row['peak_bytes'] / 2**30:>10.1f}"
            lines.append(f"{row['row']:<10}{row.get('loop', ''):<8}{cells}")
    lines += [f"{row['row']}: {row['ours_over_it']:.3f} of {row['against']}" for row in rows if "ours_over_it" in row]
    lines += [f"{two}: {rates[two] / rates[one]:.2f} times {one}" for one, two in (("fsdp1", "fsdp2"), ("tp1", "tp2")) if one in rates and two in rates]
    for row in rows:
        if row["row"] == "between":
            lines.append(f"between steps: {row['gap_share']:.2%} of a step, median gap {sorted(row['gap_ms'])[len(row['gap_ms']) // 2]:.1f} ms")
            lines.append(f"lease to first kernel: {row['lease_share']:.2%}, {sorted(row['lease_to_kernel_ms'])[len(row['lease_to_kernel_ms']) // 2]:.1f} ms")
        elif row["row"].endswith(("-failed", "-skipped")):
            lines.append(f"{row['row']}: {row.get('error') or row.get('why')}: {row.get('log', '').strip().splitlines()[-1:]}")
    return "\n".join(lines)


def child(where: str, arguments: list[str]) -> int:
    if arguments[2] == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    module, _, name = where.partition(":")
    getattr(importlib.import_module(f"benchmarks.gpu.speed.{module}"), name)(*arguments)
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(_MODULES))
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing goes on past this")
    parser.add_argument("--out", default=os.environ.get("OUT", "runs/gpu-speed"))
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    Bench(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
