"""Rows `same` and `half`: the torch backend against loops of transformers and AdamW alone, on the same packed micro-batches, by turns.

    ours    accumulate(ChunkBatch on the host) and finish_step: packing, copies, loss, ratios, diagnostics, entropy, clipping
    plain   row `same`: float32 weights, autocast to bfloat16, cross entropy of torch on float32 logits
    lean    row `same`: as plain, its cross entropy by the logprobs that ours uses
    half    row `half`: weights, gradients and moments in bfloat16, logprobs as lean

The loops get their tensors on the device, ready; all of them attend by the packed attention of this project, which is torch's variable-length kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional

from benchmarks.gpu.speed.workload import PEAK_FLOPS, SIZES, Sizes, chunk_of, model_folder, operations, tell
from consumer.batch import ChunkBatch
from consumer.config import TrainerConfig
from consumer.packed_attention import ATTENTION, register
from consumer.packed_rows import packed_inputs
from consumer.packing import PackedBatch
from consumer.token_logprobs import _kernels, token_logprobs
from consumer.torch_backend import TorchBackend

_LR = 1e-6


def settings(sizes: Sizes, device: str) -> TrainerConfig:
    return TrainerConfig(device=device, dtype="bfloat16", packing="on", micro_batch_tokens=sizes.micro_batch, lr=_LR, torch_threads=8 if device != "cpu" else 1)


class Ours:
    def __init__(self, sizes: Sizes, device: str) -> None:
        self.backend = TorchBackend(model_folder(sizes.model), settings(sizes, device), temperature=1.0, seed=1)
        self.model, self.optimizer = self.backend._model, self.backend._optimizer
        self.count = 0

    def step(self, batch: ChunkBatch, parts: list[dict[str, Any]]) -> float:
        self.count += 1
        self.backend.accumulate(batch)
        return self.backend.finish_step(self.count, batch.divisor).loss


class Bare:
    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        register()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder(sizes.model), dtype=dtype, local_files_only=True)
        model.to(device).eval().set_attn_implementation(ATTENTION)
        self.model, self.device, self.autocast = model, torch.device(device), dtype == torch.float32
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, batch: ChunkBatch, parts: list[dict[str, Any]], *, lean: bool) -> float:
        total = torch.zeros((), device=self.device)
        for part in parts:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
                logits = self.model(**part["inputs"]).logits[0]
            if lean:
                loss = -token_logprobs(logits, part["targets"])[0].sum() / batch.tokens
            else:
                loss = functional.cross_entropy(logits.float(), part["targets"], reduction="sum") / batch.tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)  # waits for the device


def on_device(parts: list[PackedBatch], device: torch.device) -> list[dict[str, Any]]:
    return [{"inputs": packed_inputs(part, device), "targets": torch.from_numpy(part.targets).to(device)} for part in parts]


def measure(row: str, sizes: Sizes, device: str, loops: dict[str, tuple[Any, Callable[..., float]]], ours: Ours) -> None:
    """By turns, each round on other rollouts, the first ones not counted."""
    cuda, found = device != "cpu", {name: [] for name in loops}  # type: dict[str, list[dict[str, float]]]
    for turn in range(-sizes.warm_up, sizes.rounds):
        batch = chunk_of(range(100 * (turn + 10), 100 * (turn + 10) + sizes.groups), sizes)
        packed = ours.backend._packed_batches(batch)
        lengths = [length for part in packed for length in part.cu_seqlens[1:] - part.cu_seqlens[:-1]]
        work = operations(sizes.model, [int(n) for n in lengths], sum(len(part.targets) for part in packed))
        parts = on_device(packed, torch.device(device))
        names = list(loops)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            owner, step = loops[name]
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            before = torch.cuda.memory_allocated() if cuda else 0
            began = time.perf_counter()
            try:
                loss = step(batch, parts)
            except torch.OutOfMemoryError as problem:
                tell(f"{row}-failed", loop=name, error=str(problem)[:500])
                del loops[name], found[name]
                owner.optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                continue
            if cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated() - before + _lasting(owner) if cuda else 0
            if turn >= 0:
                found[name].append({"seconds": seconds, "tokens": float(sum(lengths)), "work": work, "peak": float(peak), "loss": loss})
    medians: dict[str, float] = {}
    for name, rounds in found.items():
        rates = [one["tokens"] / one["seconds"] for one in rounds]
        medians[name] = statistics.median(rates)
        tell(
            row,
            loop=name,
            tokens_per_s=medians[name],
            tokens_per_s_rounds=rates,
            mfu=statistics.median(one["work"] / one["seconds"] for one in rounds) / PEAK_FLOPS,
            step_s=statistics.median(one["seconds"] for one in rounds),
            tokens=statistics.median(one["tokens"] for one in rounds),
            peak_bytes=max(one["peak"] for one in rounds),
            loss=rounds[-1]["loss"],
        )
    if "ours" not in found:
        return
    ratios = {name: [one["seconds"] / mine["seconds"] for one, mine in zip(found[name], found["ours"], strict=True)] for name in loops if name != "ours"}
    for name, values in ratios.items():
        tell(f"{row}-ratio", against=name, ours_over_it=statistics.median(values), rounds=values)


def _lasting(owner: Any) -> int:
    """Weights and moments."""
    moments = (value for state in owner.optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in (*owner.model.parameters(), *moments))


def main(row: str, size: str, device: str) -> None:
    sizes = SIZES[size]
    ours = Ours(sizes, device)
    if row == "same":
        bare = Bare(sizes, device, torch.float32)
        loops: dict[str, tuple[Any, Callable[..., float]]] = {
            "ours": (ours, ours.step),
            "lean": (bare, lambda batch, parts: bare.step(batch, parts, lean=True)),
            "plain": (bare, lambda batch, parts: bare.step(batch, parts, lean=False)),
        }
    else:
        half = Bare(sizes, device, torch.bfloat16)
        loops = {"ours": (ours, ours.step), "half": (half, lambda batch, parts: half.step(batch, parts, lean=True))}
    kernels = device != "cpu" and _kernels(torch.device("cuda", torch.cuda.current_device())) is not None
    tell(f"{row}-set", packed=ours.backend._packed, triton_logprobs=kernels, versions={"torch": torch.__version__, "transformers": transformers.__version__})
    measure(row, sizes, device, loops, ours)
