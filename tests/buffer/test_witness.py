from __future__ import annotations

from pathlib import Path

import pytest

from buffer.witness import Witness, WitnessLine, read_witness
from protocol.errors import DecodeError


def line(step: int, incarnation: int = 1) -> WitnessLine:
    return WitnessLine(
        incarnation=incarnation, parent=0, fork_step=0, step=step, seqs=(step, step + 1), tokens=5, masked=1, max_staleness=2, digest=f"w{step}", at=1.5
    )


def test_lines_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "witness.jsonl"
    assert read_witness(path) == []
    witness = Witness(path)
    for step in (1, 2):
        witness.append(line(step))
    assert read_witness(path) == [line(1), line(2)]


def test_a_line_torn_by_a_crash_is_no_line_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "witness.jsonl"
    Witness(path).append(line(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:17])
    assert read_witness(path) == [line(1)]
    Witness(path).append(line(2))
    assert read_witness(path) == [line(1), line(2)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "witness.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(DecodeError, match=r"witness\.jsonl:1"):
        read_witness(path)
