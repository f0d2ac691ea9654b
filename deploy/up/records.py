"""`processes.json`: who runs for this run, so that the next `up` can tell its own from strangers. Written as a whole, atomically, at every start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from deploy.up.process import Identity
from deploy.up.supervisor import Child, Role

_NAME = "processes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One process as it was started."""

    child: Child
    identity: Identity
    command: tuple[str, ...]
    settings: str
    """Digest of the configuration it was started with."""
    started_at: float
    """Unix seconds, for people."""

    def to_json(self) -> dict[str, object]:
        return {
            "role": self.child.role.value,
            "index": self.child.index,
            **asdict(self.identity),
            "command": list(self.command),
            "settings": self.settings,
            "started_at": self.started_at,
        }

    @classmethod
    def from_json(cls, wire: dict[str, Any]) -> Record:
        return cls(
            child=Child(Role(wire["role"]), int(wire["index"])),
            identity=Identity(pid=int(wire["pid"]), started=str(wire["started"])),
            command=tuple(str(part) for part in wire["command"]),
            settings=str(wire["settings"]),
            started_at=float(wire["started_at"]),
        )


def write_records(folder: Path, records: Sequence[Record], *, redis_url: str) -> None:
    write_atomically(folder / _NAME, orjson.dumps({"redis_url": redis_url, "processes": [record.to_json() for record in records]}, option=orjson.OPT_INDENT_2))


def read_records(folder: Path) -> list[Record]:
    """Records of the last `up`; none if there are none. A file that cannot be read is as good as none: whoever runs then is found by no one, and fenced out."""
    try:
        wire = orjson.loads((folder / _NAME).read_bytes())
        return [Record.from_json(item) for item in wire["processes"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return []


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)
