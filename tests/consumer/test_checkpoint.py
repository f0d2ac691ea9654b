"""Checkpoints on disk: exact, whole or not there, loadable by others, without pickle."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from buffer.contract import CheckpointRef, StepRecord
from consumer.advantages import group_std
from consumer.batch import collate
from consumer.checkpoint import Checkpoint, CheckpointDamaged, Progress, read_checkpoint, sweep, write_checkpoint
from consumer.config import CheckpointConfig, TrainerConfig
from consumer.journal import JournalTail
from consumer.keeper import Keeper
from consumer.torch_backend import TorchBackend
from protocol.errors import RollstreamError
from weightsync.snapshot import weights_digest

Make = Callable[..., TorchBackend]


@pytest.fixture
def trained_backend(sampler: Any, make_backend: Make, make_record: Callable[..., StepRecord]) -> TorchBackend:
    backend = make_backend()
    for step in (1, 2):
        batch = collate(make_record(step), [sampler.headed(seq) for seq in range(2)], group_std)
        backend.accumulate(batch)
        backend.finish_step(step, batch.tokens)
    return backend


def checkpoint_of(backend: TorchBackend, *, step: int = 2, incarnation: int = 1) -> Checkpoint:
    state = backend.capture()
    progress = Progress(step=step, tokens=77, elapsed_s=1.5, rewards=(0.25, 1 / 3))
    return Checkpoint(
        progress=progress,
        incarnation=incarnation,
        state=state,
        journal=JournalTail().dump(),
        schedule={"lr": 1e-2, "warmup_steps": 2.0},
    )


def test_a_checkpoint_comes_back_bit_by_bit(trained_backend: TorchBackend, make_backend: Make, model_path: Path, tmp_path: Path):
    written = checkpoint_of(trained_backend)
    reference = write_checkpoint(tmp_path, written, model_path=model_path)
    assert Path(reference.path).name == "step-000002-1"
    found = read_checkpoint(reference, folder=tmp_path)
    assert (found.progress, found.incarnation, found.schedule) == (written.progress, 1, written.schedule)
    for kind in ("weights", "optimizer"):
        before, after = getattr(written.state, kind), getattr(found.state, kind)
        assert before.keys() == after.keys()
        assert all(bytes(before[name].data) == bytes(after[name].data) and before[name].shape == after[name].shape for name in before)
    assert found.state.rng == written.state.rng
    restored = make_backend()
    restored.restore(found.state)
    assert weights_digest(restored.capture().optimizer) == weights_digest(written.state.optimizer)


def test_the_model_in_a_checkpoint_loads_with_transformers(trained_backend: TorchBackend, model_path: Path, tmp_path: Path):
    path = Path(write_checkpoint(tmp_path, checkpoint_of(trained_backend), model_path=model_path).path) / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert all(bool((p == trained_backend._parameters[name]).all()) for name, p in model.named_parameters())
    assert len(transformers.AutoTokenizer.from_pretrained(path)) == 17


def test_a_moved_folder_is_found_and_a_lost_or_damaged_one_is_refused(trained_backend: TorchBackend, model_path: Path, tmp_path: Path):
    written = checkpoint_of(trained_backend)
    reference = write_checkpoint(tmp_path / "a", written, model_path=model_path)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert read_checkpoint(reference, folder=tmp_path / "b").progress == written.progress
    with pytest.raises(CheckpointDamaged, match=r"state\.json"):
        read_checkpoint(reference, folder=tmp_path)
    moved = tmp_path / "b" / Path(reference.path).name
    for name in ("model/model.safetensors", "optimizer.safetensors", "journal.msgpack", "index.json"):
        whole = (moved / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-1 if name != "index.json" else whole.index(b"F32") + 1] ^= 1
        for damaged, message in ((bytes(flipped), "damaged|registered were|cannot be read"), (whole[:-5], "torn|cannot be read")):
            (moved / name).write_bytes(damaged)
            with pytest.raises(CheckpointDamaged, match=message):
                read_checkpoint(reference, folder=tmp_path / "b")
        (moved / name).write_bytes(whole)
    assert read_checkpoint(reference, folder=tmp_path / "b").progress == written.progress


def test_a_write_that_fails_leaves_nothing(trained_backend: TorchBackend, tmp_path: Path):
    with pytest.raises(OSError, match="no-model"):
        write_checkpoint(tmp_path / "c", checkpoint_of(trained_backend), model_path=tmp_path / "no-model")
    assert list((tmp_path / "c").iterdir()) == []


def test_an_unregistered_folder_of_the_same_name_is_replaced(trained_backend: TorchBackend, model_path: Path, tmp_path: Path):
    (tmp_path / "step-000002-1").mkdir()
    (tmp_path / ".tmp-step-000002-1" / "model").mkdir(parents=True)
    written = checkpoint_of(trained_backend)
    reference = write_checkpoint(tmp_path, written, model_path=model_path)
    assert read_checkpoint(reference, folder=tmp_path).progress == written.progress


def test_sweeping_deletes_only_half_written_and_unkept_checkpoints(tmp_path: Path):
    names = ["step-000001-1", "step-000002-1", "step-000004-1", "step-000003-2", ".tmp-step-000009-1", "mine", "step-notes"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step-000001-9").write_text("a file")
    kept = [CheckpointRef(step=2, incarnation=1, digest="", path=str(tmp_path / "step-000002-1"))]
    assert sweep(tmp_path, kept, incarnation=2, below=(3, 2)) == ["step-000001-1"]
    assert sweep(tmp_path, kept, incarnation=2) == [".tmp-step-000009-1", "step-000003-2", "step-000004-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-000001-9", "step-000002-1", "step-notes"]
    assert sweep(tmp_path / "not-there", kept, incarnation=2) == []


class Registry:
    """The one call of a ledger that a keeper makes; it waits until it may answer."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.registered: list[CheckpointRef] = []

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        assert incarnation == checkpoint.incarnation
        await self.may_answer.wait()
        self.registered.append(checkpoint)
        return tuple(self.registered[-keep:])


async def test_one_checkpoint_is_in_flight_and_due_by_steps_time_or_wish(trained_backend: TorchBackend, model_path: Path, tmp_path: Path):
    now, ledger = [0.0], Registry()
    keeper = Keeper(
        ledger,  # type: ignore[arg-type]
        1,
        config=CheckpointConfig(every_seconds=10.0, every_steps=3),
        trainer=TrainerConfig(),
        folder=tmp_path,
        model_path=model_path,
        journal=JournalTail(),
        last=None,
        clock=lambda: now[0],
    )
    assert [keeper.due(step, wanted=False) for step in (1, 2, 3)] == [False, False, True]
    assert keeper.due(1, wanted=True)
    now[0] = 10.0
    assert keeper.due(1, wanted=False)
    async with asyncio.TaskGroup() as group:
        for step in (1, 2, 3):
            one = checkpoint_of(trained_backend, step=step)
            keeper.begin(group, one.progress, one.state)
            assert not keeper.due(step, wanted=True), "it has one"
            now[0] += 100.0
            assert not keeper.due(step + 1, wanted=True), "one is in flight"
            ledger.may_answer.set()
            await keeper.settle()
            ledger.may_answer.clear()
            assert keeper.due(step + 1, wanted=False)
    assert [one.step for one in ledger.registered] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002-1", "step-000003-1"]


async def test_a_full_disk_names_the_folder_and_what_to_do(trained_backend: TorchBackend, model_path: Path, tmp_path: Path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    keeper = Keeper(
        Registry(),  # type: ignore[arg-type]
        1,
        config=CheckpointConfig(),
        trainer=TrainerConfig(),
        folder=tmp_path / "blocked",
        model_path=model_path,
        journal=JournalTail(),
        last=None,
    )
    one = checkpoint_of(trained_backend)

    async def write() -> None:
        async with asyncio.TaskGroup() as group:
            keeper.begin(group, one.progress, one.state)

    with pytest.raises(BaseExceptionGroup) as raised:
        await write()
    (problem,) = raised.value.exceptions
    assert isinstance(problem, RollstreamError)
    assert "checkpoint.dir" in str(problem)


def test_a_checkpoint_s_folder_is_on_the_disk_with_the_names_above_it(
    trained_backend: TorchBackend, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[Path] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_checkpoint(tmp_path / "a" / "b", checkpoint_of(trained_backend), model_path=model_path)
    assert synced[:2] == [tmp_path, tmp_path / "a"]
    assert synced[-1] == tmp_path / "a" / "b"


def test_a_replaced_trainer_does_not_sweep_what_its_successor_wrote(tmp_path: Path) -> None:
    for name in ("step-000001-1", "step-000004-2", ".tmp-step-000005-2", ".tmp-step-000003-1"):
        (tmp_path / name).mkdir()
    assert sweep(tmp_path, (), incarnation=1) == [".tmp-step-000003-1", "step-000001-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-step-000005-2", "step-000004-2"]
