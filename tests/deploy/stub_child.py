"""A child for the launcher's tests: says on a datagram socket what happens to it. `stub_child.py SOCKET NAME BEHAVIOUR`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> int:
    journal, name, behaviour = sys.argv[1:4]
    voice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def say(what: str) -> None:
        voice.sendto(f"{name} {what} {os.getpid()}".encode(), journal)

    def drain(_number: int, _frame: object) -> None:
        if behaviour == "stubborn":
            say("ignores")
            return
        if name.startswith("trainer"):
            (Path(journal).parent / "drained").touch()
        say("drains")
        os._exit(0)

    signal.signal(signal.SIGTERM, drain)
    if behaviour == "refuses":
        sys.stderr.write("rl-producer: run.toml:7: unknown key producer.cuont; did you mean producer.count?\n")
        return 2
    if behaviour == "replaced":
        sys.stderr.write("rl-trainer: incarnation 2 is attached: this trainer has been replaced and must stop\n")
        return 3
    if behaviour == "parent":
        grandchild = subprocess.Popen(["sleep", "1000"])
        say(f"has {grandchild.pid}")
    say(f"starts {sys.argv[-1]}")
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
