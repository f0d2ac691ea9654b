"""An engine that cannot take new weights is seen wherever people and programs look, before its tokens are too old to be trained on."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import live
from deploy.cli import main
from deploy.http import bodies, metrics
from deploy.scaling import LAUNCHER
from deploy.snapshot import Picture, PictureSource
from deploy.trouble import Trouble, channel, fallbacks, in_short, server_missing, trouble_of, troubles
from deploy.trouble import rests as rests_of
from producer.engine.turns import AWAY
from protocol.audit import emit
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, LauncherStatus, ProducerStatus, RelayStatus, WeightServerStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.registry import Registry, UpdateTimes
from weightsync.roles import RELAY, WEIGHT_SERVER

from .conftest import engine

pytestmark = pytest.mark.redis
Make = Callable[[], Awaitable[object]]
FULL = "prepare 1:1: version 1:1 cannot be copied to /dev/shm/r-relay: [Errno 28] No space left on device"


@pytest.fixture
async def picture(redis: Client, keys: Keys, small_run: Make) -> Callable[..., Awaitable[Picture]]:
    """Of a run where engine 0 is a step behind because its machine is full, and engine 1 is well."""
    await small_run()
    await Registry(redis, keys).beat(dataclasses.replace(engine(0, Version(1, 0)), trouble=FULL), ttl_s=600.0)

    async def take(**changes: Any) -> Picture:
        return await PictureSource(redis, keys, **changes).picture()

    return take


def drawn(what: Any) -> str:
    file = io.StringIO()
    Console(width=400, file=file).print(what)
    return file.getvalue()


@pytest.mark.parametrize(
    ("changes", "lag", "why"),
    [
        ({}, 0, None),
        ({"trouble": FULL}, 1, FULL),
        ({"state": EngineState.UNFIT, "reason": "apply 1:1: no such weights"}, 1, "apply 1:1: no such weights"),
        ({"state": EngineState.STARTING, "trouble": FULL, "version": None}, None, FULL),
        ({"state": EngineState.LEAVING, "trouble": FULL}, 1, None),
        ({}, 8, None),
        ({}, 9, "more than buffer.max_staleness 8 behind, and it reports no trouble: look at its log"),
        ({"fleet": "eval"}, 9, None),
        ({"reason": "a reason that is over"}, 0, None),
        ({"state": EngineState.UNFIT, "reason": AWAY}, 1, None),
    ],
)
def test_what_is_a_trouble(changes: dict[str, Any], lag: int | None, why: str | None):
    found = trouble_of(dataclasses.replace(engine(0, Version(1, 0)), **changes), lag, 8)
    assert (found and found.why) == why


def test_a_sentence_says_who_how_far_and_why_and_one_line_names_two():
    one = Trouble(engine_id=EngineId("e0"), version="1:3", lag_steps=4, why="x" * 200)
    assert one.sentence == f"e0 (1:3, 4 steps behind): {'x' * 200}"
    assert one.short == f"e0 (1:3, 4 steps behind): {'x' * 89}…"
    assert Trouble(engine_id=EngineId("e0"), version="", lag_steps=None, why="y").short == "e0 (no version yet): y"


async def test_the_line_the_live_view_and_the_status_of_a_run_say_it(
    picture: Callable[..., Awaitable[Picture]], redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    now = await picture()
    assert [trouble.sentence for trouble in troubles(now)] == [f"engine-0 (1:0, 1 steps behind): {FULL}"]
    assert f"trouble: {in_short(now)}" in live.line(now)
    assert f"engine-0 (1:0, 1 steps behind): {FULL}" in drawn(live.render(now, {}, []))
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{keys.run}"\ndir = "{tmp_path}"\n[redis]\nurl = "{redis_url}"\n')
    for view in ("status", "engines", "weights"):
        assert await asyncio.to_thread(main, [view, "-c", str(path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"trouble: engine-0 (1:0, 1 steps behind): {FULL}" in said, view
    assert await asyncio.to_thread(main, ["engines", "--json", "-c", str(path)]) == 0
    members = json.loads(capsys.readouterr().out)["engines"]["members"]
    assert [(one["trouble"], one["lag_steps"]) for one in members] == [(FULL, 1), ("", 0)]


async def test_programs_see_it_in_the_bodies_and_in_the_metrics(picture: Callable[..., Awaitable[Picture]], keys: Keys):
    now = await picture(transport="delta")
    assert [member["trouble"] for member in bodies.engines(now).members] == [FULL, ""]
    weights = bodies.weights(now)
    assert [one.trouble for one in weights.engines] == [FULL, ""]
    assert weights.troubles[0] == f"engine-0 (1:0, 1 steps behind): {FULL}"
    text = metrics.exposition(now, keys.run).decode()
    for line in (
        f'rollstream_engine_trouble{{engine="engine-0",run="{keys.run}"}} 1.0',
        f'rollstream_engine_trouble{{engine="engine-1",run="{keys.run}"}} 0.0',
        f'rollstream_engine_lag_steps{{engine="engine-0",run="{keys.run}"}} 1.0',
    ):
        assert line in text


async def test_updates_are_counted_by_what_brought_them_and_those_of_the_store_are_fallbacks_of_another_way(
    picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys
):
    registry = Registry(redis, keys)
    await registry.beat(dataclasses.replace(engine(1, Version(1, 1)), transport="store"), ttl_s=600.0)
    for way in ("gloo", "store", "store"):
        await registry.ack("engine-1", "nonce-1", Version(1, 1), times=UpdateTimes(transport=way))
    unknown, store, gloo = await picture(), await picture(transport="store"), await picture(transport="gloo")
    assert gloo.totals.by_transport == {"unknown": 3, "gloo": 1, "store": 2}
    assert [fallbacks(one) for one in (unknown, store, gloo)] == [None, 0, 2]
    body = bodies.weights(gloo)
    assert (body.transport, body.fallbacks, body.applied_by_transport) == ("gloo", 2, {"gloo": 1, "store": 2, "unknown": 3})
    text = metrics.exposition(gloo, keys.run).decode()
    assert f'rollstream_store_fallbacks_total{{run="{keys.run}"}} 2.0' in text
    assert f'rollstream_applied_versions_by_transport_total{{run="{keys.run}",transport="store"}} 2.0' in text
    assert "rollstream_store_fallbacks_total" not in metrics.exposition(unknown, keys.run).decode()


@pytest.mark.parametrize("transport", ["", "store", "delta", "gloo", "nccl", "ipc"])
async def test_a_weight_server_that_is_needed_and_missing_is_said_until_one_of_its_kind_comes(
    transport: str, picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys
):
    servers = Presence(redis, keys, WEIGHT_SERVER, WeightServerStatus)
    needed = transport in ("gloo", "nccl", "ipc")
    before = await picture(transport=transport)
    assert server_missing(before) is needed
    told = " ".join(channel(before))
    assert (f'weights.transport is "{transport}" and no weight server of that kind is registered' in told) is needed
    if transport:
        text = metrics.exposition(before, keys.run).decode()
        assert f'rollstream_weight_server_missing{{run="{keys.run}"}} {float(needed)}' in text
    await servers.beat("s0", WeightServerStatus(server_id="s0", url="u", device="cpu", backend="another"), ttl_s=600.0)
    assert server_missing(await picture(transport=transport)) is needed
    await servers.beat("s1", WeightServerStatus(server_id="s1", url="u", device="cpu", backend=transport), ttl_s=600.0)
    after = await picture(transport=transport)
    assert server_missing(after) is False
    assert channel(after) == []


async def test_an_engine_that_the_store_served_is_named_while_a_server_is_there(picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys):
    await Presence(redis, keys, WEIGHT_SERVER, WeightServerStatus).beat(
        "s", WeightServerStatus(server_id="s", url="u", device="cpu", backend="gloo"), ttl_s=600.0
    )
    await Registry(redis, keys).beat(dataclasses.replace(engine(1, Version(1, 1)), transport="store"), ttl_s=600.0)
    await Registry(redis, keys).ack("engine-1", "nonce-1", Version(1, 1), times=UpdateTimes(transport="store"))
    assert channel(await picture(transport="gloo")) == [
        'weights.transport is "gloo", but engine-1 took 1:1 by store; 1 of 4 updates came from the store: the logs of the engines say what broke'
    ]
    assert channel(await picture(transport="store")) == []
    await Registry(redis, keys).beat(dataclasses.replace(engine(1, Version(1, 1)), transport="store", fleet="eval"), ttl_s=600.0)
    assert channel(await picture(transport="gloo")) == [], "it is asked for what a server may be past"


async def test_a_relay_that_is_behind_and_what_it_could_not_copy_are_seen(picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys):
    relays = Presence(redis, keys, RELAY, RelayStatus)
    full = "version 1:1: No space left on device"
    await relays.beat("a", RelayStatus(relay_id="a", folder="/f", version=Version(1, 0), trouble=full), ttl_s=600.0)
    await relays.beat("b", RelayStatus(relay_id="b", folder="/f", version=Version(1, 1)), ttl_s=600.0)
    await emit(redis, keys, "copy_failed", {"relay_id": "a", "folder": "/f", "version": "1:1", "reason": "No space left on device"})
    now = await picture()
    behind, level = live.carriers(now)
    assert behind.startswith("relay a: 1:0 whole (1 step behind the newest), ")
    assert level.startswith("relay b: 1:1 whole, ")
    assert "copy failed: relay_id a, folder /f, version 1:1, reason No space left on device" in [live.describe(event) for event in now.events]
    text = metrics.exposition(now, keys.run).decode()
    assert f'rollstream_relay_lag_steps{{relay="a",run="{keys.run}"}} 1.0' in text
    assert [f'rollstream_relay_trouble{{relay="{one}",run="{keys.run}"}} {value}' in text for one, value in (("a", 1.0), ("b", 0.0))] == [True, True]
    assert channel(now) == [f"relay a (1:0): {full}"]
    assert f"relay a (1:0): {full}" in drawn(live.render(now, {}, []))
    assert bodies.weights(now).troubles[-1] == f"relay a (1:0): {full}"


async def test_engines_that_producers_leave_alone_are_seen_with_the_reason(
    picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    producers = Presence(redis, keys, "producer", ProducerStatus)
    for name, rests in (("p0", {"engine-1": "broke the connection"}), ("p1", {}), ("p2", {"engine-1": "answered 500"})):
        await producers.beat(name, ProducerStatus(producer_id=name, resting=rests), ttl_s=600.0)
    now = await picture()
    told = "engine-1 rests for p0, p2: broke the connection"
    assert rests_of(now) == [told]
    assert told in live.line(now)
    assert told in drawn(live.render(now, {}, []))
    assert [member["resting"] for member in bodies.engines(now).members] == [{}, {"p0": "broke the connection", "p2": "answered 500"}]
    by_producer = {member["producer_id"]: member["resting"] for member in bodies.producers(now).members}
    assert [by_producer[name] for name in ("p0", "p1", "p2")] == [{"engine-1": "broke the connection"}, {}, {"engine-1": "answered 500"}]
    text = metrics.exposition(now, keys.run).decode()
    assert f'rollstream_engine_resting_producers{{engine="engine-1",run="{keys.run}"}} 2.0' in text
    assert f'rollstream_engine_resting_producers{{engine="engine-0",run="{keys.run}"}} 0.0' in text
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{keys.run}"\ndir = "{tmp_path}"\n[redis]\nurl = "{redis_url}"\n')
    for view in ("status", "engines", "weights"):
        assert await asyncio.to_thread(main, [view, "-c", str(path)]) == 0
        assert f"trouble: {told}" in capsys.readouterr().out, view


async def test_how_many_processes_are_wanted_and_run_is_seen(
    picture: Callable[..., Awaitable[Picture]], redis: Client, keys: Keys, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    status = LauncherStatus(
        launcher_id="h:/r",
        wanted={"producer": 3, "engine": 2},
        running=("engine-0", "producer-0", "producer-1"),
        leaving=("engine-2",),
        given_up={"engine-1": "engine-1 cannot run like this (exit 2)"},
        host="h",
    )
    await Presence(redis, keys, LAUNCHER, LauncherStatus).beat("h:/r", status, ttl_s=600.0)
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{keys.run}"\ndir = "{tmp_path}"\n[redis]\nurl = "{redis_url}"\n')
    await picture()
    assert await asyncio.to_thread(main, ["status", "-c", str(path)]) == 0
    said = capsys.readouterr().out
    assert "processes on h: 2 of 3 producers, 1 of 2 engines, engine-2 leaving" in said
    assert "trouble: engine-1 cannot run like this (exit 2)" in said
    now = await picture()
    assert [member["wanted"] for member in bodies.launchers(now).members] == [{"producer": 3, "engine": 2}]
    text = metrics.exposition(now, keys.run).decode()
    for name, role, count in (("wanted", "producer", 3.0), ("running", "producer", 2.0), ("wanted", "engine", 2.0), ("running", "engine", 1.0)):
        assert f'rollstream_processes_{name}{{host="h",role="{role}",run="{keys.run}"}} {count}' in text
