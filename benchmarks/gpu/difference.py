"""`python -m benchmarks.gpu.difference SAMPLES VERSIONS DEVICE`: how far the engine's logprobs are from the trainer's, each token under its own version.

SAMPLES is what `streams` saved, VERSIONS the run's store, which has its newest versions. The forward pass is the trainer's: float32 weights, in bfloat16
arithmetic where the trainer has that. Prints one JSON object:

    before      tokens of the version that their response began with: nothing was updated before them
    after       tokens after an update in the same response: with the keys and values it had (in_place), or computed anew (retract, abort)
    edge        the first tokens after an update, which either version may have sampled
    moved       how far the trainer's own logprobs of the tokens `after` are apart under both versions: what cannot be told from an error smaller than this

Units: nats. Mean and 99th percentile of absolute differences, and the mean of signed ones (engine minus trainer).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BATCH_TOKENS = 16384


def spread(differences: Floats) -> dict[str, float | int]:
    """Of differences engine minus trainer.

    >>> spread(np.array([0.1, -0.3]))
    {'tokens': 2, 'mean': 0.2, 'p99': 0.298, 'signed_mean': -0.1}
    """
    if not len(differences):
        return {"tokens": 0}
    size = np.abs(differences)
    figures = {"mean": size.mean(), "p99": np.percentile(size, 99), "signed_mean": differences.mean()}
    return {"tokens": len(differences)} | {name: round(float(value), 6) for name, value in figures.items()}


def judge(samples: Sequence[Mapping[str, Any]], trainer: Mapping[str, Sequence[Floats | None]]) -> dict[str, Any]:
    """The figures. `trainer[version][i]`: the trainer's logprobs of every token of sample i under that version; None where it does not occur in it, and no
    `trainer[version]` for a version that is not there any more.
    """
    found: dict[str, list[float]] = {"before": [], "after": [], "edge": [], "moved": []}
    lost = 0
    for i, sample in enumerate(samples):
        first = sample["versions"][0] if sample["versions"] else ""
        base = trainer[first][i] if first in trainer else None
        for at, (logprob, version, edge) in enumerate(zip(sample["logprobs"], sample["versions"], sample["edge"], strict=True)):
            known = trainer[version][i] if version in trainer else None
            if known is None:
                lost += 1
                continue
            kind = "edge" if edge else "before" if version == first else "after"
            found[kind].append(logprob - known[at])
            if kind == "after" and base is not None:
                found["moved"].append(base[at] - known[at])
    return {name: spread(np.array(values)) for name, values in found.items()} | {"tokens_of_lost_versions": lost}


def trainer_logprobs(samples: Sequence[Mapping[str, Any]], folders: Mapping[str, Path], device: str) -> dict[str, list[Floats | None]]:
    """See `judge`. `folders`: versions that are there, as Hugging Face models."""
    import torch
    import transformers

    told: dict[str, list[Floats | None]] = {}
    for version, folder in folders.items():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        model.to(device).eval()
        one: list[Floats | None] = [None] * len(samples)
        for batch in _batches(samples, version):
            for i, values in zip(batch, _forward(model, [samples[i] for i in batch], device), strict=True):
                one[i] = values
        told[version] = one
    return told


def _batches(samples: Sequence[Mapping[str, Any]], version: str) -> Iterator[list[int]]:
    """Of samples that have the version, cut by padded tokens."""
    chosen = sorted((i for i, sample in enumerate(samples) if version in sample["versions"]), key=lambda i: _length(samples[i]))
    batch: list[int] = []
    for i in chosen:
        if batch and (len(batch) + 1) * _length(samples[i]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _length(sample: Mapping[str, Any]) -> int:
    return len(sample["prompt"]) + len(sample["ids"])


def _forward(model: Any, samples: Sequence[Mapping[str, Any]], device: str) -> list[Floats]:
    """The logprob of each token of each response. Padding stands at the end, where causal attention does not see it."""
    import torch

    rows = torch.zeros(len(samples), max(map(_length, samples)), dtype=torch.long)
    for row, sample in zip(rows, samples, strict=True):
        row[: _length(sample)] = torch.tensor(sample["prompt"] + sample["ids"])
    rows = rows.to(device)
    with torch.no_grad(), torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=device != "cpu"):
        logits = model(input_ids=rows, use_cache=False).logits
    found = []
    for logit, row, sample in zip(logits, rows, samples, strict=True):
        start, end = len(sample["prompt"]), _length(sample)
        logprobs = torch.log_softmax(logit[start - 1 : end - 1].float(), -1)
        found.append(logprobs.gather(1, row[start:end, None])[:, 0].double().cpu().numpy())
    return found


def stored(versions: Path) -> dict[str, Path]:
    """The whole versions in a store by name: folder v1-7 is version 1:7."""
    found = {}
    for folder in versions.glob("v*-*"):
        incarnation, _, number = folder.name[1:].partition("-")
        if incarnation.isdecimal() and number.isdecimal() and (folder / "config.json").exists() and any(folder.glob("model*.safetensors")):
            found[f"{incarnation}:{number}"] = folder
    return found


def main(samples_file: str, versions: str, device: str) -> int:
    samples = [sample for sample in orjson.loads(Path(samples_file).read_bytes()) if sample["ids"]]
    named = {version for sample in samples for version in sample["versions"]}
    folders = {version: folder for version, folder in stored(Path(versions)).items() if version in named}
    there = [sample for sample in samples if set(sample["versions"]) & folders.keys()]
    told = judge(there, trainer_logprobs(there, folders, device))
    sys.stdout.write(orjson.dumps(told | {"samples": len(there), "versions": len(folders)}).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
