"""One of two processes on gloo, `python -m tests.consumer.megatron.ranks <folder> <rank>`: first jobs of its own, then those that take two ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from consumer.backend import Backend, TrainingState
from consumer.config import TrainerConfig
from consumer.packing import PackedBatch
from consumer.shards import SavedTensors, merged, read_index, write_shards
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError, RollstreamError
from tests.consumer.megatron.recorded import LOSSES, Job, recorded_steps, rows, sampled_logits
from tests.consumer.megatron.shim import cpu_for_cuda

_TRAINER = {"lr": 1e-2, "warmup_steps": 2, "micro_batch_tokens": 48, "grad_clip": 0.5, "weight_decay": 0.1}


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    jobs = [Job(**job) for job in json.loads((folder / "jobs.json").read_text())]
    if rank:
        torch.save(_without_shim(), folder / "refuse-cpu.pt")
    with cpu_for_cuda():
        _group(folder, [job for job in jobs if job.ranks == 1 and (job.what == "torch") == bool(rank)], 0, 1)
        _group(folder, [job for job in jobs if job.ranks == 2], rank, 2)


def _group(folder: Path, jobs: list[Job], rank: int, ranks: int) -> None:
    """A process that is alone leaves making a group to the backend, or needs none."""
    from megatron.core import parallel_state

    if ranks > 1:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    for job in sorted(jobs, key=_sizes):  # a layout's groups take longer to make than most of these jobs
        if parallel_state.model_parallel_is_initialized() and _sizes(job) != (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ):
            parallel_state.destroy_model_parallel()
        found = _do(folder, job)
        if rank == 0:
            torch.save(found, folder / f"{job.name}.pt")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _sizes(job: Job) -> tuple[int, int]:
    return job.layout.get("tp", 1), job.layout.get("pp", 1)


def _without_shim() -> dict[str, Any]:
    from consumer.megatron.config import MegatronConfig
    from consumer.megatron.grid import make_grid

    try:
        make_grid(MegatronConfig(), torch.device("cpu"))
    except ConfigError as problem:
        return {"refused": str(problem)}
    return {"refused": ""}


def _do(folder: Path, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    match job.what:
        case "refuse":
            try:
                _megatron(folder, job)
            except ConfigError as problem:
                found = {"refused": str(problem)}
        case "torch":
            backend = TorchBackend(folder / job.model, TrainerConfig(**{**_TRAINER, **job.trainer}), loss=LOSSES[job.loss], temperature=0.8, seed=1)
            found = _train(folder, job, backend, (0, 1))
        case "logprobs":
            found = _parallel_logprobs()
        case "look":
            made = _megatron(folder, job)
            found = {"weights": _arrays(made.snapshot()), "logits": _logits(made)}
        case "resume":
            found = _resume(folder, job, _megatron(folder, job))
        case "train":
            made = _megatron(folder, job)
            watched = _watch(made)
            found = _train(folder, job, made, made.replica) | watched
    return found


def _megatron(folder: Path, job: Job) -> Any:
    from consumer.megatron.backend import MegatronBackend
    from consumer.megatron.config import MegatronConfig

    config = TrainerConfig(**{**_TRAINER, **job.trainer})
    return MegatronBackend(folder / job.model, config, loss=LOSSES[job.loss], megatron=MegatronConfig(**job.layout), temperature=0.8, seed=1)


def _watch(backend: Any) -> dict[str, Any]:
    """What shows that the layout is in force: how often a layer attends, and to how many rows of the sequence between layers."""
    found: dict[str, Any] = {"attended": 0, "rows": 0, "optimizer": type(backend._optimizer._inner).__name__}

    def attended(*_: object) -> None:
        found["attended"] += 1

    def rows_of(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        found["rows"] += inputs[0].shape[0]

    layer = backend._stage.module.decoder.layers[0]
    layer.self_attention.core_attention.register_forward_hook(attended)
    layer.pre_mlp_layernorm.register_forward_pre_hook(rows_of)
    return found


def _train(folder: Path, job: Job, backend: Backend, share: tuple[int, int]) -> dict[str, Any]:
    reports, weights = [], []
    for step, (chunks, divisor) in enumerate(recorded_steps(folder, job.model, LOSSES[job.loss], share), 1):
        for chunk in chunks:
            backend.accumulate(chunk)
        report = backend.finish_step(step, divisor)
        reports.append({"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "entropy": report.entropy, "ratio_dev": report.ratio_dev,
                        "clip_fraction": report.clip_fraction, **report.diagnostics})  # fmt: skip
        weights.append(_arrays(backend.snapshot()))
    state = _through_files(folder / f"moments-{job.name}", backend.capture())
    moments = {name: array for name, array in _arrays(state.optimizer).items() if not name.startswith("step.")}
    return {"reports": reports, "weights": weights, "moments": moments}


def _resume(folder: Path, job: Job, straight: Any) -> dict[str, Any]:
    """Three steps; and one, after which others go on from its state: a backend of the same layout, one of another, and the torch backend."""
    from megatron.core import parallel_state

    steps = recorded_steps(folder, job.model, LOSSES[job.loss], straight.replica)
    found: dict[str, Any] = {}

    def train(backend: Any, some: range) -> None:
        for step in some:
            chunks, divisor = steps[step - 1]
            for chunk in chunks:
                backend.accumulate(chunk)
            backend.finish_step(step, divisor)

    train(straight, range(1, 2))
    captured = straight.capture()
    whole = _through_files(folder / f"state-{job.name}", captured)
    train(straight, range(2, 4))
    again = _megatron(folder, job)
    again.accumulate(steps[2][0][0])  # half a step that restoring must forget
    again.restore(whole)
    found["state"] = _told(whole)
    found["share"] = sum(one.nbytes for one in captured.weights.values()) / sum(one.nbytes for one in whole.weights.values())
    before = again.snapshot()
    chunks, _ = steps[1]
    again.accumulate(chunks[0])
    again.abandon_step()
    report = again.finish_step(2, 0.0)
    found["idle"] = {"grad_norm": report.grad_norm, "same": _same(before, again.snapshot())}
    train(again, range(2, 4))
    found["straight"], found["again"] = _arrays(straight.snapshot()), _arrays(again.snapshot())
    for name, odd in {"refused": TrainingState(weights={}, optimizer={}, rng={}), "critic": dataclasses.replace(whole, others={"critic": {}})}.items():
        try:
            again.restore(odd)
        except RollstreamError as problem:
            found[name] = str(problem)
    parallel_state.destroy_model_parallel()
    other = _megatron(folder, dataclasses.replace(job, layout={"pp": 2} if job.layout.get("tp") else {"tp": 2, "distributed_optimizer": False}))
    other.restore(whole)
    found["other_layout"] = _told(_through_files(folder / f"other-{job.name}", other.capture()))
    found["torch"], found["from_torch"] = {}, {}
    plain = TorchBackend(folder / job.model, TrainerConfig(**_TRAINER), temperature=0.8, seed=1)
    plain.restore(dataclasses.replace(whole, rng={"torch": bytes(torch.get_rng_state().numpy())}))
    kept = plain.capture()
    other.restore(kept)
    back = _told(_through_files(folder / f"back-{job.name}", other.capture()))
    if dist.get_rank() == 0:
        found["torch"], found["from_torch"] = _told(kept), back
    return found


def _through_files(folder: Path, state: TrainingState) -> TrainingState:
    """What all ranks captured, as each reads it."""
    folder.mkdir(exist_ok=True)
    told: list[Any] = [write_shards(folder, state)]
    if state.part[1] > 1:
        every: list[Any] = [None] * state.part[1]
        dist.all_gather_object(every, told[0])
        told = every
    index = read_index(merged(told))
    return TrainingState(weights=SavedTensors(folder, index.groups["weights"]), optimizer=SavedTensors(folder, index.groups["optimizer"]), rng=state.rng)


def _told(state: TrainingState) -> dict[str, torch.Tensor]:
    return _arrays({**state.weights, **state.optimizer})


def _parallel_logprobs() -> dict[str, Any]:
    """Of logits that every rank makes and of which it keeps its part, values and gradients, whole."""
    from consumer.megatron.parallel_logprobs import parallel_logprobs

    logits, target, upstream = sampled_logits()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = logits.chunk(ranks, 1)[rank].clone().requires_grad_()
    before = mine.detach().clone()
    logprob, entropy = parallel_logprobs(mine, target, dist.group.WORLD)
    torch.autograd.backward((logprob, entropy), tuple(upstream.unbind()))
    parts = [torch.empty_like(before) for _ in range(ranks)]
    dist.all_gather(parts, mine.grad)
    empty = parallel_logprobs(mine[:0], target[:0], dist.group.WORLD)
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "gradient": torch.cat(parts, 1), "unchanged": torch.equal(before, mine.detach()),
            "empty": [tuple(one.shape) for one in empty]}  # fmt: skip


def _logits(backend: Any) -> np.ndarray[Any, Any] | None:
    """[T, V] of `rows` packed, whole on rank 0."""
    sequences = rows()
    nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    part = PackedBatch(
        input_ids=np.concatenate(sequences)[None], position_ids=np.concatenate([np.arange(len(one)) for one in sequences])[None],
        cu_seqlens=np.cumsum([0, *map(len, sequences)]).astype(np.int32), max_seqlen=max(map(len, sequences)),
        logit_index=nothing, targets=nothing, behaviour=none, advantage=none, weight=none, rollout=nothing, age=nothing,
    )  # fmt: skip
    from consumer.megatron.backend import _Part

    grid = backend._grid
    told = backend._run(backend._stage, [_Part(part)], lambda _, logits, **__: logits.detach()[0], forward_only=True)
    logits = torch.zeros(len(part.input_ids[0]) + -len(part.input_ids[0]) % backend._row_multiple, 32 // grid.tp)
    if told:
        logits.copy_(told[0])
    grid.from_last_stage(logits)
    parts = [torch.empty_like(logits) for _ in range(grid.tp)]
    dist.all_gather(parts, logits, group=grid.tp_group)
    return torch.cat(parts, 1)[: len(part.input_ids[0])].numpy()


def _arrays(tensors: Any) -> dict[str, torch.Tensor]:
    from consumer.tensor_bytes import copy_in

    return {name: copy_in(tensor) for name, tensor in tensors.items()}


def _same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(bytes(one[name].data) == bytes(other[name].data) for name in one)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
