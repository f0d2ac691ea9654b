"""Row `kernels`: that what is measured computes the right thing on this device, and how fast the parts are by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.speed.workload import HEAD_SIZE, SHAPES, SIZES, tell
from consumer import token_logprobs as logprobs
from consumer.packed_attention import attend, kernel_difference, sequences_at


def seconds(call: Callable[[], Any], device: str) -> float:
    """The mean of ten calls after two."""
    for _ in range(2):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        call()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


def main(_: str, size: str, device: str) -> None:
    sizes, shape, head = SIZES[size], SHAPES[size], HEAD_SIZE[size]
    place = torch.device(device if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    for name, count in (("grouped", kv), ("all heads", heads)):
        try:
            tell("attention", heads=name, difference=kernel_difference(place, heads=heads, kv_heads=count, size=head))
        except Exception as problem:  # noqa: BLE001 - the others may work
            tell("attention-failed", heads=name, error=f"{type(problem).__name__}: {problem}"[:500])
    tokens = sizes.micro_batch
    ends = np.linspace(0, tokens, 8).astype(np.int32)
    query, key, value = (torch.randn((tokens, count, head), device=place, dtype=torch.bfloat16, requires_grad=True) for count in (heads, kv, kv))
    where = sequences_at(ends, place)
    tell("attention-speed", forward_s=seconds(lambda: attend(query, key, value, where), device), tokens=tokens)
    upstream = torch.randn_like(query)
    tell("attention-speed", both_s=seconds(lambda: torch.autograd.grad(attend(query, key, value, where), (query, key, value), upstream), device), tokens=tokens)
    logits = torch.randn((tokens, shape["vocab_size"]), device=place, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, shape["vocab_size"], (tokens,), device=place)
    ways: dict[str, Any] = {"as used": logprobs._kernels}
    if device != "cpu":
        tell("logprobs", triton=logprobs._kernels(place) is not None)
        ways["blocks"] = lambda _: None
    used = logprobs._kernels
    for name, way in ways.items():
        logprobs._kernels = way
        spent = seconds(lambda: torch.autograd.grad(logprobs.token_logprobs(logits, targets)[0].sum(), logits), device)
        tell("logprobs-speed", way=name, both_s=spent, tokens=tokens)
    logprobs._kernels = used
