"""The demo's run folder: claimed without harm to anybody else's files, then filled with data, starting model and `run.toml`."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deploy.config import HttpConfig, listen
from deploy.demo import task
from deploy.up.process import identity_of
from deploy.up.records import read_records
from protocol.errors import ConfigError

_MARKER = "demo.json"
STEPS = 400


class EngineKind(StrEnum):
    EMBEDDED = "embedded"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One demo."""

    folder: Path
    """Absolute."""
    seed: int = 0
    steps: int = STEPS
    appendfsync: str = "everysec"
    engine: EngineKind = EngineKind.EMBEDDED
    engine_python: str = ""
    """The interpreter that has SGLang."""

    @property
    def config(self) -> Path:
        return self.folder / "run.toml"

    @property
    def model(self) -> Path:
        return self.folder / "model"


def claim(demo: Demo) -> None:
    """Make the folder and mark it as a demo's. An earlier demo there is moved aside to `<name>.previous`, replacing the one before it.

    Raises: `ConfigError` if the folder holds something else, or a demo that still runs; nothing is changed then.
    """
    folder = demo.folder
    previous = folder.with_name(f"{folder.name}.previous")
    for path in (folder, previous):
        _refuse_strangers(path)
    if is_demo(folder):
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).write_text(json.dumps({"demo": "sort four digits", "seed": demo.seed, "steps": demo.steps}) + "\n", "utf-8")


def is_demo(folder: Path) -> bool:
    return (folder / _MARKER).is_file()


def _refuse_strangers(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (not is_demo(folder) and any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and is no demo's folder (it has no {_MARKER}): move it away, or choose another with --dir")
    running = [str(record.child) for record in read_records(folder) if identity_of(record.identity.pid) == record.identity]
    if running or _held(folder):
        raise ConfigError(
            f"a demo still runs in {folder} ({', '.join(running) or 'rollstream up'}): wait for its end or stop it, or choose another folder with --dir"
        )


def _held(folder: Path) -> bool:
    """Whether an `up` holds the folder."""
    try:
        with (folder / ".up.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def fill(demo: Demo) -> None:
    """Write the data files and `run.toml`; the model is the warm start's to write."""
    train, held_out = task.write_data(demo.folder, demo.seed)
    demo.config.write_text(_config(demo, train, held_out, http_port=_free_port()), "utf-8")


def _free_port() -> int:
    """The usual port of the HTTP service, or any free one if that is taken: a demo has no say in who uses it."""
    usual = HttpConfig()
    for port in (usual.port, 0):
        try:
            with listen(usual.host, port) as found:
                return int(found.getsockname()[1])
        except OSError:
            continue
    return 0


def _config(demo: Demo, train: Path, held_out: Path, *, http_port: int) -> str:
    """B = 32, G = 8 and a learning rate that ends well under a staleness of one to two steps (measured: 5e-4 ends better, 1e-3 learns faster)."""
    return f"""\
# The demo: sort four digits.
[run]
name = "demo"
seed = {demo.seed}
dir = {_text(demo.folder)}

[redis]
appendfsync = "{demo.appendfsync}"

[model]
path = {_text(demo.model)}

[data]
path = {_text(train)}

[rollout]
group_size = 8
max_prompt_tokens = 16
max_new_tokens = {task.MAX_NEW_TOKENS}
temperature = 1.0

[reward]
kind = "function"
function = "deploy.demo.task:reward"

[eval]
path = {_text(held_out)}
every_seconds = 15.0
samples = {task.HELD_OUT_ROWS}

[buffer]
groups_per_step = 32
pipeline_depth = 1.5
max_staleness = 8
chunk_groups = 8

[weights]
publish_every = 1

[engine]
{_engine(demo)}

[producer]
count = 2
max_inflight_groups = 40

[trainer]
lr = 5e-4
torch_threads = 1

[checkpoint]
every_seconds = 10.0

[stop]
steps = {demo.steps}

[http]
port = {http_port}
"""


def _engine(demo: Demo) -> str:
    """One real server does: each takes two gigabytes, and two cores are all there may be."""
    if demo.engine is EngineKind.EMBEDDED:
        return 'kind = "embedded"\ncount = 2\ntorch_threads = 1'
    return f'kind = "sglang"\ncount = 1\ndevice = "cpu"\npython = {_text(Path(demo.engine_python))}\nslots = 128\ntorch_threads = 1'


def _text(path: Path) -> str:
    """A TOML basic string; JSON strings are such."""
    return json.dumps(str(path), ensure_ascii=False)
