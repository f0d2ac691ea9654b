from __future__ import annotations

import math
import mmap

import pytest
import torch

from producer.engine.embedded import landing
from producer.engine.embedded.landing import Landing
from protocol.errors import ManifestError

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def arrive(where: Landing, at: int, data: torch.Tensor) -> None:
    raw = data.flatten().view(torch.uint8)
    where.windows()[at][: len(raw)] = raw


@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_weight_may_be_the_last(kind: torch.dtype):
    for value in (0.0, -0.0, 1.0, -1.0, -1e-30, -6.0e4, 6.0e4):
        place, data = Landing([3 * kind.itemsize]), torch.full((3,), value, dtype=kind)
        arrive(place, 0, data)
        place.check()
        assert torch.equal(place.run(0).view(kind), data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 11])
def test_bytes_that_did_not_come_are_noticed(kind: torch.dtype, cut: int):
    place = Landing([12 * kind.itemsize])
    arrive(place, 0, torch.ones(12, dtype=kind).view(torch.uint8)[:-cut])
    with pytest.raises(ManifestError, match=f"fewer than the {12 * kind.itemsize} bytes"):
        place.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_weight_that_is_not_finite_is_refused(kind: torch.dtype):
    place = Landing([2 * kind.itemsize])
    arrive(place, 0, torch.tensor([1.0, -math.inf], dtype=kind))
    place.run(0)[-1] = 0xFF  # the widest type's infinity ends in 0xf0 of its byte before
    with pytest.raises(ManifestError, match="not finite"):
        place.check()


def test_bytes_beyond_the_end_are_noticed_also_when_the_next_run_covers_them():
    place = Landing([8, 0, 8])
    arrive(place, 0, torch.ones(3, dtype=torch.float64))
    for at in (0, 2):
        arrive(place, at, torch.ones(1, dtype=torch.float64))
    with pytest.raises(ManifestError, match="more than the 8 bytes"):
        place.check()


def test_runs_start_where_any_type_may_and_the_window_is_far_larger_than_the_run():
    place = Landing([2, 6, 0, 8])
    for at in range(4):
        assert place.run(at).data_ptr() % 8 == 0
        assert len(place.windows()[at]) > 1 << 30


def test_a_machine_that_grants_no_large_range_gets_a_smaller_one_or_refuses_the_bucket(monkeypatch: pytest.MonkeyPatch):
    real, most = mmap.mmap, 1 << 31

    def strict(fd: int, size: int, **options: int) -> mmap.mmap:
        if size > most:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, size, **options)

    monkeypatch.setattr(landing.mmap, "mmap", strict)
    assert len(Landing([8]).windows()[0]) == 1 << 31
    most = 0
    with pytest.raises(ManifestError, match="no address space for a bucket"):
        Landing([8])
