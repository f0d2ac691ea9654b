"""A process that shares a model's tensors with an engine on the same machine: `python sharing.py FOLDER` prints the payload, and ends when told anything.

Files share the memory, not descriptors: a server of SGLang that is handed a descriptor of a process it did not start ends.
"""

from __future__ import annotations

import base64
import io
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch.multiprocessing
from safetensors.torch import load_file


def main(folder: Path) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = list(load_file(folder / "model.safetensors").items())
    out = io.BytesIO()
    ForkingPickler(out).dump(tensors)
    print(base64.b64encode(out.getvalue()).decode(), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
