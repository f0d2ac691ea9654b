"""How many there are to be: who comes and who leaves, how each is started, and what the command and a running `up` say to each other."""

from __future__ import annotations

import argparse
import doctest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import scaling
from deploy.config import UpConfig
from deploy.ray.crew import Crew
from deploy.ray.scale import change
from deploy.scale import NotScaled, Slow, _scale_here, reached
from deploy.scaling import LAUNCHER, change_to, forget, wish, wishes
from deploy.up.plan import Plan, plan
from deploy.up.supervisor import Child, Role
from producer.ray_actor import About
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import ConfigError, RollstreamError
from protocol.keys import Keys
from protocol.messages import LauncherStatus
from protocol.presence import Presence

INDICES = st.sets(st.integers(0, 12), max_size=8)


def test_the_examples_in_the_docstring_run():
    assert doctest.testmod(scaling).failed == 0


@given(st.integers(0, 10), INDICES, INDICES)
def test_there_are_as_many_as_were_wished_for_and_nobody_else_is_touched(count: int, there: set[int], reserved: set[int]):
    change = change_to(count, there=there, reserved=reserved)
    mine = there - reserved
    after = mine - set(change.gone) | set(change.added)
    assert len(after) == count
    assert set(change.gone) <= mine
    assert not set(change.added) & (there | reserved)
    assert not (change.added and change.gone)
    assert max(mine - set(change.gone), default=-1) < min(change.gone, default=99), "the highest leave"
    assert change_to(count, there=after, reserved=reserved) == scaling.Change((), ())


def planned(**sections: dict[str, object]) -> Plan:
    values = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}, "redis": {"url": "redis://h"}} | sections
    return plan(validate(UpConfig, values, source="test"), Path("run.toml"), (), redis=None)


def test_an_engine_that_is_added_comes_after_the_evaluations_and_is_none_of_them():
    made = planned(engine={"count": 2}, eval={"engines": 1})
    assert made.reserved == {Child(Role.ENGINE, 2)}
    assert "engine.count=4" in made.argv(Child(Role.ENGINE, 3))
    assert not [word for word in made.argv(Child(Role.ENGINE, 1)) if word.startswith("engine.count")]
    assert made.refuses(Child(Role.ENGINE, 3)) == made.refuses(Child(Role.PRODUCER, 30)) == ""


@pytest.mark.parametrize(
    ("engine", "index", "why"),
    [
        ({"kind": "external", "urls": ["http://a:1", "http://b:1"], "count": 1}, 2, "engine.urls has 2, and engine-2 needs one of its own"),
        ({"kind": "external", "urls": ["http://a:1", "http://b:1"], "count": 1}, 1, ""),
        ({"port": 65530}, 6, "engine.port 65530 leaves no port for engine-6"),
        ({"port": 65530}, 5, ""),
    ],
)
def test_an_engine_that_there_is_no_place_for_is_refused(engine: dict[str, object], index: int, why: str):
    assert planned(engine=engine).refuses(Child(Role.ENGINE, index)).startswith(why)
    assert bool(planned(engine=engine).refuses(Child(Role.ENGINE, index))) is bool(why)


class Staged:
    """A crew and its fleet on a cluster where whoever is started has ended at once, if it is in `ends`."""

    def __init__(self, ends: dict[str, int], **sections: dict[str, object]) -> None:
        values = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d"}, "placement": {"wait_seconds": 60.0}} | sections
        self.config, self.fleet, self.ends = validate(UpConfig, values, source="test"), self, ends
        self.there, self.started = ["engine-0"], list[str]()

    async def names(self, _role: str) -> list[str]:
        return list(self.there)

    async def start(self, name: str) -> None:
        self.there.append(name)
        self.started.append(name)

    members = Crew.members

    async def stop(self, *names: str) -> None:
        for name in names:
            self.there.remove(name)

    async def wait_started(self, _names: object, *, within_s: float) -> None:
        assert within_s

    async def about(self, name: str, *, timeout_s: float) -> About:
        assert timeout_s
        return About(name=name, digest="", node="n", address="a", host="h", pid=1, gpus="", moved=False, code=self.ends.get(name), message="no such folder")


async def scaled(crew: Staged, count: int, *, late: str = "") -> None:
    async def announced(name: str) -> bool:
        return name != late

    await change(crew, "engine", count, announced=announced)


async def test_on_ray_an_engine_that_there_is_no_place_for_is_refused_before_anything_starts():
    crew = Staged({}, engine={"kind": "external", "urls": ["http://a:1", "http://b:1"], "count": 1})
    with pytest.raises(ConfigError, match=r"engine\.urls has 2, and engine-2 needs one"):
        await scaled(crew, 3)
    assert crew.started == []
    await scaled(crew, 2)
    assert crew.there == ["engine-0", "engine-1"]


async def test_on_ray_who_has_ended_instead_is_told_and_gone_and_the_others_stay():
    crew = Staged({"engine-2": 2})
    with pytest.raises(NotScaled, match=r"engine-2 ended on h with exit code 2: no such folder$"):
        await scaled(crew, 3)
    assert crew.there == ["engine-0", "engine-1"]


async def test_on_ray_an_engine_over_several_nodes_comes_and_leaves_whole():
    crew = Staged({"engine-2-node-1": 2}, engine={"kind": "sglang", "tp": 2, "nodes": 2})
    crew.there.append("engine-0-node-1")
    await scaled(crew, 2)
    assert crew.there == ["engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1"]
    with pytest.raises(NotScaled, match=r"^engine-2-node-1 ended on h with exit code 2: no such folder$"):
        await scaled(crew, 3)
    assert crew.there == ["engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1"]
    await scaled(crew, 1)
    assert crew.there == ["engine-0", "engine-0-node-1"]


async def test_on_ray_who_has_not_announced_itself_in_time_is_told_and_stays():
    crew = Staged({}, placement={"wait_seconds": 0.3})
    with pytest.raises(Slow, match=r"^engine-1: not announced within placement\.wait_seconds = 0\.3"):
        await scaled(crew, 2, late="engine-1")
    assert crew.there == ["engine-0", "engine-1"]


async def test_wishes_are_numbered_and_the_last_of_each_role_counts(redis: Client, keys: Keys):
    assert await wishes(redis, keys) == (0, {})
    assert await wish(redis, keys, "producer", 3) == 1
    await wish(redis, keys, "engine", 0)
    assert await wish(redis, keys, "producer", 5) == 3
    assert await wishes(redis, keys) == (3, {"producer": 5, "engine": 0})
    await forget(redis, keys)
    assert await wishes(redis, keys) == (0, {})


def told(**changes: object) -> LauncherStatus:
    return LauncherStatus(**({"launcher_id": "h:/r", "wanted": {"producer": 2, "engine": 1}, "running": ("producer-0", "producer-1"), "wish": 1} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, True),
        ({"running": ("producer-0", "engine-0")}, False),
        ({"leaving": ("producer-2",)}, False),
        ({"leaving": ("engine-2",), "given_up": {"engine-0": "x"}, "refused": {"engine": "x"}}, True),
    ],
    ids=["all are there", "one is missing", "one leaves still", "engines are no producers"],
)
def test_a_wish_is_done_once_all_are_there_and_nobody_leaves_any_more(changes: dict[str, object], there: bool):
    assert reached(told(**changes), "producer", 2) is there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"refused": {"producer": "the run is ending"}}, "does not do it: the run is ending"),
        ({"wanted": {"producer": 4}}, "somebody else has wished for 4 meanwhile"),
        ({"running": ("producer-0",), "given_up": {"producer-1": "producer-1 cannot run like this (exit 2):\nno data"}}, "(?s)1 of 2 are there: .*no data"),
    ],
)
def test_a_wish_that_nothing_comes_of_is_told_with_the_reason(changes: dict[str, object], message: str):
    with pytest.raises(RollstreamError, match=message):
        reached(told(**changes), "producer", 2)


async def test_without_an_up_the_command_says_how_to_do_it_by_hand(redis: Client, keys: Keys, redis_url: str):
    values = {"run": {"name": keys.run}, "model": {"path": "m"}, "data": {"path": "d"}, "redis": {"url": redis_url}}
    config = validate(UpConfig, values, source="test")
    options = argparse.Namespace(config="run.toml", what="engines", count=2, ray=None)
    with pytest.raises(ConfigError, match=r"no `rollstream up` of this run is there: .* `rollstream engine -c run\.toml --index I`"):
        await _scale_here(options, config)
    presence = Presence(redis, keys, LAUNCHER, LauncherStatus)
    for name in ("h:/a", "h:/b"):
        await presence.beat(name, LauncherStatus(launcher_id=name), ttl_s=600.0)
    with pytest.raises(ConfigError, match=r"several `rollstream up` have this run \(h:/a, h:/b\)"):
        await _scale_here(options, config)
