"""`data.path` and `eval.path`: a JSONL file, and perhaps a slice of its rows, as in Python: `train.jsonl[:1000]`, `train.jsonl[::2]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

_SLICED = re.compile(r"(?P<file>.*?)(?P<written>\[(?P<cut>[^\[\]]*)\])")
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*(?::\s*(-?\d+)?\s*)?")


@dataclass(frozen=True, slots=True)
class DataPath:
    """A file and which of its rows."""

    file: Path
    rows: slice
    written: str
    """The slice as it was written, with its brackets; "": none."""


def split_data_path(key: str, spec: str) -> DataPath:
    """File and slice of `spec`, the value of the configuration's `key`. Only brackets at the very end are a slice; a folder may have them in its name.

    Raises: `ConfigError` naming `key`.
    """
    if not (found := _SLICED.fullmatch(spec)):
        return DataPath(Path(spec), slice(None), "")
    bounds = _BOUNDS.fullmatch(found["cut"])
    step = int(bounds[3]) if bounds and bounds[3] else None
    if bounds is None or (step is not None and step < 1):
        raise ConfigError(f"{key} {spec}: {found['written']} is not a slice; use [start:stop] or [start:stop:step] with a step of 1 or more")
    rows = slice(int(bounds[1]) if bounds[1] else None, int(bounds[2]) if bounds[2] else None, step)
    return DataPath(Path(found["file"]), rows, found["written"])
