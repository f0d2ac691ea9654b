"""Sharded parameters, on a real mesh of two processes that talk by gloo."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.gather import Derived, whole
from consumer.snapshot_buffers import SnapshotBuffers
from tests.ranked import answers_of


def test_plain_tensors_come_as_they_are_in_order_and_in_buckets():
    tensors = {f"w{i}": torch.full((size,), float(i)) for i, size in enumerate((10, 10, 100, 1, 1, 62))}
    buckets = list(whole(tensors, bucket_bytes=250))
    assert [list(bucket) for bucket in buckets] == [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]
    assert all(bucket[name].data_ptr() == tensors[name].data_ptr() for bucket in buckets for name in bucket)
    assert list(whole({})) == []


class _Doubled(Derived):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.asked: list[str] = []

    def made(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self._tensors[name] * 2

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_what_is_made_of_others_is_made_once_a_snapshot():
    tensors = _Doubled({"a": torch.ones(3), "b": torch.ones(40), "c": torch.ones(2)})
    assert [sorted(bucket) for bucket in whole(tensors, bucket_bytes=20)] == [["a"], ["b"], ["c"]]
    assert tensors.asked == ["a", "b", "c"]
    buffers = SnapshotBuffers(tensors, torch.device("cpu"))
    held = buffers.take(tensors).host()
    assert held is not None
    assert bytes(held["c"].data) == torch.full((2,), 2.0).numpy().tobytes()
    assert tensors.asked == ["a", "b", "c"] * 2


def _make(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(7, 4, generator=rng),  # not divisible by two
        "columns": torch.randn(4, 6, generator=rng),
        "same": torch.randn(3, generator=rng),
        "bias": torch.randn(1, generator=rng),
        "half": torch.randn(8, 2, generator=rng).to(torch.bfloat16),
        "plain": torch.randn(5, generator=rng),
    }


def _member(rank: int, rendezvous: str, answers: Any) -> None:
    try:
        answers.put((rank, _sharded(rank, rendezvous)))
    except BaseException:  # noqa: BLE001 - told to the test
        answers.put((rank, traceback.format_exc()))


def _sharded(rank: int, rendezvous: str) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from consumer.row_digest import row_digest
    from weightsync.snapshot import weights_digest

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        placed = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "bias": Shard(0), "half": Shard(0)}
        source = _make(1)
        tensors: dict[str, torch.Tensor] = {
            name: torch.nn.Parameter(distribute_tensor(source[name], mesh, [placement]))
            if name != "same"
            else distribute_tensor(source[name], mesh, [placement])
            for name, placement in placed.items()
        }
        tensors["plain"] = source["plain"]
        assert tensors["rows"].to_local().shape[0] == 4 - rank
        buffers = SnapshotBuffers(tensors, torch.device("cpu"))
        for seed in (1, 2):
            expected = _make(seed)
            with torch.no_grad():
                for name, placement in placed.items():
                    tensors[name].copy_(distribute_tensor(expected[name], mesh, [placement]))
                tensors["plain"].copy_(expected["plain"])
            for bucket_bytes in (1, 100, 1 << 20):
                found = {name: tensor for part in whole(tensors, bucket_bytes=bucket_bytes) for name, tensor in part.items()}
                assert list(found) == list(tensors)
                assert not any(isinstance(tensor, DTensor) for tensor in found.values())
                assert all(torch.equal(found[name], expected[name]) for name in found)
            held = buffers.take(tensors)
            read = held.host()
            assert read is not None
            assert {name: bytes(one.data) for name, one in read.items()} == {
                name: bytes(one.reshape(-1).view(torch.uint8).numpy()) for name, one in expected.items()
            }
            assert row_digest(whole(tensors)) == row_digest([expected])
            digest = weights_digest(read)
            held.release()
        return digest
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(600)
def test_a_sharded_model_is_copied_and_known_as_if_it_were_whole(tmp_path: Path):
    found = answers_of(_member, str(tmp_path / "rendezvous"), timeout_s=500)
    assert found[0] == found[1]
    assert len(found[0]) == 32, found[0]
