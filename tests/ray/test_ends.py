"""What does not need a cluster: what an end means, what is counted, what is made absolute."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.config import UpConfig
from deploy.ray.crew import placement_of
from deploy.ray.main import Verdict, weigh
from producer import ray_actor
from producer.engine.host import EngineHostConfig
from producer.engine.node import RankTaken
from producer.ray_actor import MAX_FAILURES, About, EngineActor, Failures, Settings
from producer.ray_fleet import Left, absolute_paths, unless
from protocol.errors import EXIT_TRY_AGAIN, ConfigError, RollstreamError


def left(name: str, code: int | None = None, *, killed: bool = False, answered: bool = False) -> Left:
    about = None if code is None else About(name=name, digest="", node="n", address="a", host="h", pid=1, gpus="", moved=False, code=code, message="why")
    return Left(name=name, about=about, killed=killed, answered=answered)


@pytest.mark.parametrize(
    ("how", "code", "replaced"),
    [
        (left("trainer-0", 0), 0, False),
        (left("trainer-0"), 0, False),
        (left("trainer-0", killed=True, answered=True), 1, False),
        (left("trainer-0", killed=True), 1, False),
        (left("trainer-0", 1), 1, False),
        (left("trainer-0", 75), 75, False),
        (left("trainer-0", 3), 1, True),
        (left("producer-0", killed=True, answered=True), 1, False),
        (left("producer-0", killed=True), 0, False),
        (left("engine-0", 1), 1, False),
        (left("engine-0", 3), 0, False),
        (left("producer-0", 75), 0, False),
    ],
    ids=lambda value: f"{value.name} {value.how}" if isinstance(value, Left) else str(value),
)
def test_a_forced_end_is_never_a_drained_one(how: Left, code: int, replaced: bool):
    verdict = weigh(Verdict(code=0, cut_short=True), how)
    assert (verdict.code, verdict.replaced, verdict.cut_short) == (code, replaced, True)
    assert bool(verdict.message) == bool(code)
    assert weigh(Verdict(code=2, message="first"), how).code == 2, "what was bad already is told first"


def test_faults_in_a_row_are_counted_anew_after_a_healthy_life_and_trying_again_is_none():
    past = Failures()
    for _ in range(MAX_FAILURES):
        past = past.and_one(1, 2.0, "no such device").and_one(75, 2.0, "Redis is away")
    assert (past.in_a_row, past.times, past.message) == (MAX_FAILURES, 2 * MAX_FAILURES, "Redis is away")
    assert past.and_one(1, 2.0, "").in_a_row == MAX_FAILURES + 1
    assert past.and_one(1, 30.0, "").in_a_row == 1


def test_the_interpreter_of_an_engine_is_absolute_where_it_is_a_path_and_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to("/usr/bin/env")
    found = [absolute_paths(SimpleNamespace(engine=SimpleNamespace(python=python))).get("engine.python") for python in ("./python", "python3", "")]
    assert found == [str(tmp_path / "python"), None, None]


def test_a_trainer_of_several_gpus_is_refused():
    config = UpConfig.model_validate({
        "run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}, "placement": {"trainer_gpus": 2},
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"^placement\.trainer_gpus = 2"):
        placement_of(config)


class Here(EngineActor):
    """On a machine of that address, without a process of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.address, self.settings = name, "10.0.0.9", Settings(run="r", text="")


async def test_each_node_of_an_engine_begins_at_its_first_gpu_and_is_met_where_ray_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[tuple[object, ...]] = []

    async def host(config: EngineHostConfig, index: int, _stop: asyncio.Event) -> None:
        begun.append((index, 0, config.engine.host, config.engine.gpu))

    async def node(config: EngineHostConfig, index: int, rank: int, _stop: asyncio.Event) -> None:
        begun.append((index, rank, config.engine.host, config.engine.gpu))

    monkeypatch.setattr(ray_actor, "run_host", host)
    monkeypatch.setattr(ray_actor, "run_node", node)
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "r"\n[model]\npath = "m"\n[engine]\nkind = "sglang"\ntp = 8\nnodes = 2\n')
    for name in ("engine-3", "engine-3-node-1"):
        await Here(name).body(str(file), asyncio.Event())
    assert begun == [(3, rank, "10.0.0.9", -3 * 4) for rank in (0, 1)], "the server adds three times its four GPUs, and its actor sees four"

    async def taken(*_: object) -> None:
        raise RankTaken("node 1 is run by another process")

    monkeypatch.setattr(ray_actor, "run_node", taken)
    with pytest.raises(RollstreamError) as problem:
        await Here("engine-3-node-1").body(str(file), asyncio.Event())
    assert problem.value.exit_code == EXIT_TRY_AGAIN, "its own last process, on a machine that Ray has given up, is no fault of the file"


async def test_what_waits_is_left_at_once_when_the_end_is_asked_for_and_has_cleaned_up():
    stop, cleaned = asyncio.Event(), []

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)
        return 1

    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless(stop, wait()) is None
    assert cleaned == [True]
    assert await unless(asyncio.Event(), asyncio.sleep(0, result=7)) == 7
