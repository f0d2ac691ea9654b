"""What the GPU machine does with the parts of the kit, on parts of a few bytes; `mount` and `python3` are stood in for."""

from __future__ import annotations

import hashlib
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "benchmarks" / "gpu" / "start.sh"
MODEL = b"a model of few bytes" * 50


class Machine:
    def __init__(self, folder: Path) -> None:
        self.kit, self.work, self._programs = folder / "kit", folder / "work", folder / "bin"
        for made in (self.kit, self._programs):
            made.mkdir()
        self._program("mount", "exit 1")
        self._program("python3", 'if [ "$2" = benchmarks.gpu.smollm2 ]; then mkdir "$4"; cp "$6" "$4/as-read"; fi')

    def _program(self, name: str, script: str) -> None:
        (self._programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self._programs / name).chmod(0o755)

    def part(self, number: int, name: str, content: bytes) -> None:
        (self.kit / f"part{number}").mkdir(exist_ok=True)
        (self.kit / f"part{number}" / name).write_bytes(content)

    def archive(self, number: int, name: str, file: str) -> None:
        source = self.kit / file
        source.write_text(name)
        (self.kit / f"part{number}").mkdir(exist_ok=True)
        with tarfile.open(self.kit / f"part{number}" / name, "w:xz") as archive:
            archive.add(source, file)
        source.unlink()

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"KIT": str(self.kit), "KIT_WORK": str(self.work), "PATH": f"{self._programs}:{os.environ['PATH']}"}
        return subprocess.run([str(START), command], env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    packed = lzma.compress(MODEL)
    machine.archive(1, "site.tar.xz", "package")
    machine.archive(1, "tasks.tar.xz", "tasks")
    machine.archive(1, "shape.tar.xz", "config.json")
    machine.part(2, "smollm2.gguf.xz.0", packed[:50])
    machine.part(3, "smollm2.gguf.xz.1", packed[50:])
    machine.part(3, "smollm2.gguf.sha256", hashlib.sha256(MODEL).hexdigest().encode() + b"\n")
    return machine


def test_parts_that_come_one_by_one_are_each_unpacked_once(machine: Machine):
    later = machine.kit / "part3"
    later.rename(machine.kit / "not here yet")
    first = machine.run("unpack")
    assert first.returncode == 0, first.stderr
    assert "unpacked smollm2.gguf.xz.0" in first.stdout
    assert (machine.work / "site" / "package").is_file()
    assert (machine.work / "site" / "tasks").is_file()
    assert (machine.work / "shape" / "config.json").is_file()
    (machine.kit / "not here yet").rename(later)
    second = machine.run("unpack")
    assert second.stdout.count("unpacked") == 2, "the piece and the digest of the part that came"
    assert machine.run("unpack").stdout.count("unpacked") == 0


def test_the_model_is_made_from_both_pieces(machine: Machine):
    machine.run("unpack")
    made = machine.run("model")
    assert made.returncode == 0, made.stderr
    assert (machine.work / "smollm2" / "as-read").read_bytes() == MODEL


@pytest.mark.parametrize("content", [None, b"another piece of it"])
def test_a_model_that_lacks_a_piece_is_not_made(machine: Machine, content: bytes | None):
    machine.run("unpack")
    piece = machine.work / "kit" / "smollm2.gguf.xz.1"
    if content is None:
        piece.unlink()
    else:
        piece.write_bytes(content)
    assert machine.run("model").returncode == 1
    assert not (machine.work / "smollm2").exists()
