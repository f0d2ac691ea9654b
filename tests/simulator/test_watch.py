"""What the watch lays to whose account."""

from __future__ import annotations

import pytest

from benchmarks.simulator.engines import PAUSE_VALID_S, EngineHost
from benchmarks.simulator.faults import Bias
from benchmarks.simulator.kernel import Broken
from benchmarks.simulator.producers import Producer
from benchmarks.simulator.world import World
from protocol.messages import EngineState, Seq, SlotToken

SLOT_S = 4.0
QUIET = Bias(message_rate=0.0, settings={"slot_seconds": SLOT_S}, scenario={"producers": 1, "engines": 3, "max_paused": 1})
GROUP = Seq(10**6)


def world_at(now: float) -> World:
    """A world without faults, some time after its start."""
    world = World(0, without=frozenset(), only=frozenset(), bias=QUIET, tracing=False)
    world.kernel.run_until(now, lambda: False)
    return world


def producer_of(world: World) -> Producer:
    producer = world.places["p0"]
    assert isinstance(producer, Producer)
    return producer


def test_a_server_answered_all_the_time_but_for_its_pauses():
    server = world_at(5.0).server
    assert server.answered_s(2.0) == pytest.approx(3.0)
    server.pause(12.0)
    server.pause(3.0)
    assert server.paused_until == pytest.approx(17.0)
    server.kernel.now = 10.0
    server.pause(9.0)
    server.kernel.now = 21.0
    assert server.answered_s(2.0) == pytest.approx(5.0)
    assert server.answered_s(6.0) == pytest.approx(2.0)
    assert server.answered_s(20.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("cut_s", "blamed"), [(0.0, True), (5.0, False)], ids=["after a pause of the server", "after a cut and a pause"])
def test_a_slot_expires_on_a_producer_that_lives_only_if_the_server_gave_it_no_time_to_renew(cut_s: float, blamed: bool):
    """Cut off until the server pauses, and heard of by nobody until that is over: the slot may be gone. A pause alone expires nothing."""
    world = world_at(15.0)
    producer = producer_of(world)
    producer.held[GROUP] = SlotToken("t")
    producer.cut_until = 15.0 + cut_s if cut_s else 0.0
    world.kernel.now = 15.0 + cut_s
    world.server.pause(3 * SLOT_S)
    world.kernel.now = world.server.paused_until
    if blamed:
        with pytest.raises(Broken, match="S4: the slot of group"):
            world.watch.expired(GROUP)
    else:
        world.watch.expired(GROUP)
        world.kernel.now += 2 * SLOT_S + 0.1
        with pytest.raises(Broken, match="S4: the slot of group"):
            world.watch.expired(GROUP)


def hosts_of(world: World) -> list[EngineHost]:
    hosts = [world.places[name] for name in ("e0", "e1", "e2")]
    assert all(isinstance(host, EngineHost) for host in hosts)
    for host in hosts:
        world.watch.resumed(host)
        host.engine.pause(world.kernel.now)
        host.engine.running = 1
        world.server.channel.facts[host.name].state = EngineState.ROUTABLE
    return hosts


def test_a_request_that_comes_under_the_pause_of_an_idle_engine_makes_it_stand():
    world = world_at(5.0)
    first, second, third = hosts_of(world)
    until = world.kernel.now + PAUSE_VALID_S
    second.engine.running = 0
    world.watch.paused(first, until=until, was_idle=False)
    world.watch.paused(second, until=until, was_idle=True)
    second.engine.running = 1
    with pytest.raises(Broken, match="W8: e0, e1 are paused at once, 1 may be"):
        world.watch.arrives(second)
    world.watch.arrives(third)  # it is not paused
    world.watch.resumed(first)
    world.watch.arrives(second)


def test_an_idle_engine_off_the_routes_does_not_count_and_a_busy_one_does():
    world = world_at(5.0)
    first, second, third = hosts_of(world)
    until = world.kernel.now + PAUSE_VALID_S
    for host in (second, third):
        world.server.channel.facts[host.name].state = EngineState.UNFIT
    world.watch.paused(first, until=until, was_idle=False)
    world.watch.paused(second, until=until, was_idle=True)
    with pytest.raises(Broken, match="W8: e0, e2 are paused at once, 1 may be"):
        world.watch.paused(third, until=until, was_idle=False)


def test_a_right_to_pause_that_ran_out_is_no_right():
    world = world_at(5.0)
    host, *_ = hosts_of(world)
    with pytest.raises(Broken, match="W8: e0 is paused on a right that ran out"):
        world.watch.paused(host, until=world.kernel.now, was_idle=True)
