"""Parts of tensors in files: any layout reads what any other wrote, of what is damaged nothing is believed, and old checkpoints are read."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.contract import CheckpointRef
from consumer.backend import TrainingState
from consumer.checkpoint import Checkpoint, CheckpointDamaged, Progress, read_checkpoint, saved_weights, write_checkpoint
from consumer.journal import JournalTail
from consumer.parts import Place, cut, join
from consumer.shards import SavedTensors, ShardsDamaged, Told, merged, part_of, read_index, write_shards
from protocol.errors import EXIT_CONFIG, DecodeError, RollstreamError
from weightsync.safetensors_file import write_tensors
from weightsync.snapshot import TensorBytes, weights_digest

RNG = np.random.default_rng(5)
WEIGHTS = {
    "matrix": TensorBytes(dtype="BF16", shape=(7, 4), data=RNG.bytes(56)),
    "wide": TensorBytes(dtype="F32", shape=(4, 8), data=RNG.bytes(128)),
    "row": TensorBytes(dtype="F32", shape=(3,), data=RNG.bytes(12)),
    "number": TensorBytes(dtype="F32", shape=(), data=RNG.bytes(4)),
    "none": TensorBytes(dtype="F32", shape=(0, 2), data=b""),
}


def part(rank: int, ranks: int, *, axis: int = 0) -> TrainingState:
    """As FSDP cuts, or along the last axis; rank 0 has what has no rows."""
    weights, places = {}, {}
    for name, tensor in WEIGHTS.items():
        if not tensor.nbytes or not tensor.shape:
            if rank == 0:
                weights[name] = tensor
            continue
        along = min(axis, len(tensor.shape) - 1)
        most = -(-tensor.shape[along] // ranks)
        start, shape = [0] * len(tensor.shape), list(tensor.shape)
        start[along] = min(shape[along], most * rank)
        shape[along] = min(shape[along], most * (rank + 1)) - start[along]
        weights[name] = cut(tensor, tuple(start), tuple(shape))
        places[name] = Place(start=tuple(start), whole=tensor.shape)
    critic = {"critic": {"value": TensorBytes(dtype="U8", shape=(1,), data=bytes([rank]))}}
    return TrainingState(
        weights=weights,
        optimizer={},
        rng={"torch": bytes([rank])},
        others=critic if rank == 0 else {},
        part=(rank, ranks),
        places={"weights": places},
    )


def written(folder: Path, model: Path, parts: list[TrainingState]) -> CheckpointRef:
    checkpoint = Checkpoint(progress=Progress(step=3), incarnation=1, state=parts[0], journal=JournalTail().dump(), schedule={})
    return write_checkpoint(folder, checkpoint, model_path=model, others=lambda place: lambda: [write_shards(place, one) for one in parts[1:]])


@pytest.mark.parametrize("wrote", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path, model_path: Path, wrote: int, axis: int):
    reference = written(tmp_path, model_path, [part(rank, wrote, axis=axis) for rank in range(wrote)])
    whole = read_checkpoint(reference, folder=tmp_path).state
    assert weights_digest(whole.weights) == weights_digest(WEIGHTS)
    assert bytes(whole.others["critic"]["value"].data) == b"\0", "a group that nobody here knows is kept"
    for reads, cuts in itertools.product((1, 2, 3, 4), (0, 1)):
        for rank in range(reads):
            found = read_checkpoint(reference, folder=tmp_path, share=(rank, reads)).state
            assert found.rng == {"torch": bytes([rank if rank < wrote else 0])}
            wanted = part(rank, reads, axis=cuts)
            for name, tensor in wanted.weights.items():
                place = wanted.places["weights"].get(name, Place(start=(0,) * len(tensor.shape), whole=tensor.shape))
                assert bytes(part_of(found.weights, name, place.start, tensor.shape).data) == bytes(tensor.data), name


@given(st.data())
def test_a_box_cut_out_of_parts_is_cut_out_of_the_whole(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    whole = TensorBytes(dtype="U16", shape=shape, data=np.arange(np.prod(shape), dtype="<u2").tobytes())
    edges = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = [tuple(zip(*box, strict=True)) for box in itertools.product(*(list(itertools.pairwise(ends)) for ends in edges))]
    parts = [(low, cut(whole, low, tuple(b - a for a, b in zip(low, high, strict=True)))) for low, high in boxes]
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(1, most - at)) for at, most in zip(start, shape, strict=True))
    assert bytes(join("U16", start, size, parts).data) == bytes(cut(whole, start, size).data)
    lacking = [one for one in parts if one[0] != (0,) * len(shape)]
    with pytest.raises(ValueError, match="its parts have"):
        join("U16", (0,) * len(shape), shape, lacking)


def test_ranks_that_do_not_make_up_whole_tensors_are_refused(tmp_path: Path):
    told: list[Told] = [write_shards(tmp_path, part(rank, 2)) for rank in range(2)]
    with pytest.raises(RollstreamError, match="the ranks have 16 elements of weights matrix, which has 28"):
        merged(told[:1])
    other = orjson.loads(orjson.dumps(told[1]))
    other["groups"]["weights"]["wide"]["dtype"] = "BF16"
    with pytest.raises(RollstreamError, match="do not agree on weights wide"):
        merged([told[0], other])
    index = orjson.loads(merged(told))
    for key, value in (("dtype", "F33"), ("shape", [4]), ("parts", [["../state.json", 0, [0, 0], [4, 8]]])):
        broken = orjson.loads(orjson.dumps(index))
        broken["groups"]["weights"]["wide"][key] = value
        with pytest.raises(DecodeError):
            read_index(orjson.dumps(broken))
    for content, words in (
        (b'{"files": {', "it is no JSON any more"),
        (b'{"files": {}}', "it has no 'groups'"),
        (b'{"files": [], "groups": {}}', "a value is not"),
    ):
        with pytest.raises(DecodeError, match=words) as raised:
            read_index(content)
        assert "Error" not in str(raised.value)


def test_a_rank_without_the_folder_and_a_folder_without_the_part_say_what_to_share(tmp_path: Path, model_path: Path):
    with pytest.raises(RollstreamError, match=r"is not to be seen by rank 1: set checkpoint\.dir"):
        write_shards(tmp_path / "elsewhere", part(1, 2))
    assert not (tmp_path / "elsewhere").exists()
    other = tmp_path / "other"
    other.mkdir()
    checkpoint = Checkpoint(progress=Progress(step=3), incarnation=1, state=part(0, 2), journal=JournalTail().dump(), schedule={})
    with pytest.raises(RollstreamError, match=r"rank 0 does not see it so .*: set checkpoint\.dir"):
        write_checkpoint(tmp_path / "own", checkpoint, model_path=model_path, others=lambda _: lambda: [write_shards(other, part(1, 2))])
    assert list((tmp_path / "own").iterdir()) == []


def test_a_checkpoint_of_the_first_schema_is_read_and_checked_by_its_weights(tmp_path: Path, model_path: Path):
    reference = written(tmp_path, model_path, [part(0, 1)])
    path, digest = Path(reference.path), weights_digest(WEIGHTS)
    moments = {"step.row": WEIGHTS["number"]}
    write_tensors(path / "optimizer.safetensors", moments, durable=False)
    (path / "index.json").unlink()
    state = orjson.loads((path / "state.json").read_bytes())
    (path / "state.json").write_bytes(orjson.dumps(state | {"schema": 1, "digest": digest}))
    old = CheckpointRef(step=3, incarnation=1, digest=digest, path=str(path))
    found = read_checkpoint(old, folder=tmp_path).state
    assert (weights_digest(found.weights), weights_digest(found.optimizer)) == (digest, weights_digest(moments))
    assert weights_digest(saved_weights(old)) == digest
    file = path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    for read in (lambda: read_checkpoint(old, folder=tmp_path), lambda: saved_weights(old)):
        with pytest.raises(CheckpointDamaged):
            read()


def test_a_checkpoint_that_was_deleted_meanwhile_is_exit_2(tmp_path: Path, model_path: Path):
    reference = written(tmp_path, model_path, [part(0, 1)])
    state = read_checkpoint(reference, folder=tmp_path).state
    shutil.rmtree(reference.path)
    with pytest.raises(ShardsDamaged, match="cannot be read any more") as raised:
        state.weights["matrix"]
    assert raised.value.exit_code == EXIT_CONFIG


def test_of_a_part_no_more_than_its_rows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index = read_index(merged([write_shards(tmp_path, part(rank, 2)) for rank in range(2)]))
    read: list[int] = []
    real = SavedTensors._read

    def counting(self: SavedTensors, *arguments: object) -> list[tuple[tuple[int, ...], TensorBytes]]:
        found = list(real(self, *arguments))  # type: ignore[arg-type]
        read.append(sum(tensor.nbytes for _, tensor in found))
        return found

    monkeypatch.setattr(SavedTensors, "_read", counting)
    SavedTensors(tmp_path, index.groups["weights"]).part("matrix", (3, 1), (2, 2))
    assert read == [2 * 4 * 2]
