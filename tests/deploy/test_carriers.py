"""Who moves versions to engines, as status, HTTP, metrics and the live view show it."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from deploy.http import bodies
from deploy.http.metrics import exposition
from deploy.live import line, render
from deploy.look import _weights
from deploy.snapshot import Picture, PictureSource
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import RelayStatus, WeightServerStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.registry import Registry

from .conftest import engine, manifest

pytestmark = pytest.mark.redis


@pytest_asyncio.fixture
async def picture(redis: Client, keys: Keys, small_run: Callable[[], Awaitable[object]]) -> AsyncIterator[Picture]:
    """Engine 0 had its version by gloo, engine 1 had to take the store; a delta is newest; one carrier of each kind is here."""
    await small_run()
    registry = Registry(redis, keys)
    for index, transport in enumerate(("gloo", "store")):
        await registry.beat(dataclasses.replace(engine(index, Version(1, 1)), transport=transport, updates=3, paused_s=0.5), ttl_s=600.0)
    await redis.hset(keys.state, "trained", 2)
    newest = manifest(Version(1, 2))
    await Channel(redis, keys).publish(
        dataclasses.replace(newest, kind="delta", parent="d1:1", parent_version=Version(1, 1), elements=400, changed_elements=3), 1, seconds=0.1
    )
    server = WeightServerStatus(server_id="s", url="http://h", device="cpu", backend="gloo", staged=Version(1, 2), groups=2, sent_bytes=3 << 20)
    relay = RelayStatus(relay_id="r", folder="/dev/shm/r", version=Version(1, 1), fetched_bytes=512, deltas=4, fulls=1)
    await Presence(redis, keys, "weight-server", WeightServerStatus).beat("s", server, ttl_s=600.0)
    await Presence(redis, keys, "relay", RelayStatus).beat("r", relay, ttl_s=600.0)
    yield await PictureSource(redis, keys).picture()


async def test_the_weights_body_tells_of_every_carrier_and_by_what_each_engine_was_served(picture: Picture):
    body = bodies.weights(picture)
    assert (body.newest, body.kind, body.changed_share) == ("1:2", "delta", 3 / 400)
    assert (body.published, body.deltas) == (3, 1)
    assert [(one.engine_id, one.transport, one.updates, one.paused_s) for one in body.engines] == [("engine-0", "gloo", 3, 0.5), ("engine-1", "store", 3, 0.5)]
    assert [(one["server_id"], one["staged"], one["groups"]) for one in body.weight_servers] == [("s", "1:2", 2)]
    assert [(one["relay_id"], one["version"], one["deltas"], one["fulls"]) for one in body.relays] == [("r", "1:1", 4, 1)]


async def test_a_version_that_was_published_whole_has_no_share(picture: Picture):
    assert picture.newest is not None
    whole = dataclasses.replace(picture, newest=dataclasses.replace(picture.newest, kind="full", elements=0, changed_elements=0))
    assert bodies.weights(whole).changed_share is None
    assert b'rollstream_newest_version_changed_ratio{run="' + picture.run.encode() + b'"} 1.0' in exposition(whole, picture.run)


async def test_metrics_say_how_far_each_carrier_is(picture: Picture):
    text = exposition(picture, picture.run).decode()
    families = text_string_to_metric_families(text)
    samples = {(one.name, *sorted(value for name, value in one.labels.items() if name != "run")): one.value for family in families for one in family.samples}
    assert samples["rollstream_newest_version_step",] == 2
    assert samples["rollstream_newest_version_changed_ratio",] == 3 / 400
    assert samples["rollstream_published_deltas_total",] == 1
    assert samples["rollstream_engine_transport", "engine-0", "gloo"] == samples["rollstream_engine_transport", "engine-1", "store"] == 1
    assert samples["rollstream_weight_server_staged_step", "gloo", "s"] == 2
    assert samples["rollstream_weight_server_engines", "gloo", "s"] == 2
    assert samples["rollstream_weight_server_sent_bytes", "gloo", "s"] == 3 << 20
    assert samples["rollstream_relay_version_step", "r"] == 1
    assert samples["rollstream_relay_versions", "delta", "r"] == 4
    assert samples["rollstream_relay_versions", "full", "r"] == 1
    assert samples["rollstream_relay_fetched_bytes", "r"] == 512


async def test_people_see_them_in_the_live_view_and_in_the_look(picture: Picture):
    def shown(*parts: object) -> str:
        screen = io.StringIO()
        Console(width=160, file=screen).print(*parts)
        return screen.getvalue()

    for text in (shown(render(picture, {}, [])), shown(*_weights(picture))):
        assert "weight server s on cpu by gloo: 1:2 staged, 2 engines, 3.0 MiB sent" in text
        assert "relay r: 1:1 whole (1 step behind the newest), 4 from deltas, 1 fetched whole, 512 B read" in text
        assert "newest 1:2: 0.75 % of its elements changed" in text
        assert "gloo" in next(row for row in text.splitlines() if "engine-0" in row)
    assert "weight server" not in line(picture), "one line stays one line"
