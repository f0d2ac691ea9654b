"""The witness file: one fsynced line for every optimizer step, written by the trainer beside its weights.

The audit stream can lose a tail together with Redis; this file cannot. Tests and the summary compare the two (rule R3).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from protocol.durable import append
from protocol.errors import DecodeError


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessLine:
    """One optimizer step as the trainer did it."""

    incarnation: int
    parent: int
    """Of this incarnation, as it attached."""
    fork_step: int
    """The step it resumed after."""
    step: int
    seqs: tuple[int, ...]
    tokens: int
    """That entered the loss."""
    masked: int
    max_staleness: int
    digest: str
    """Of the weights after the step."""
    at: float
    """Unix seconds."""


class Witness:
    """Appends lines; each is on the disk when `append` returns. Call it off the event loop, an fsync takes milliseconds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: WitnessLine) -> None:
        drop_torn_line(self._path)
        append(self._path, orjson.dumps(asdict(line)) + b"\n")


def read_witness(path: Path) -> list[WitnessLine]:
    """All lines, oldest first; none if there is no file. A last line torn by a crash is not a line. Raises: `DecodeError` for a damaged one before it."""
    lines = []
    for number, raw in enumerate(whole_lines(path), 1):
        try:
            fields = orjson.loads(raw)
            lines.append(WitnessLine(**{**fields, "seqs": tuple(fields["seqs"])}))
        except (ValueError, TypeError, KeyError) as problem:
            raise DecodeError(f"{path}:{number}", str(problem)) from problem
    return lines


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that an append may have torn at its end."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return text.split(b"\n")[:-1]


def drop_torn_line(path: Path) -> None:
    """Cut what a crash left after the last newline, so that the next line starts as one."""
    try:
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            at, tail = end, b""
            while at > 0 and b"\n" not in tail:
                at = max(0, at - 4096)
                file.seek(at)
                tail = file.read(end - at)
            keep = at + tail.rfind(b"\n") + 1
            if keep < end:
                file.truncate(keep)
    except FileNotFoundError:
        return
