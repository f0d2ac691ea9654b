"""Layouts as tables, with GPUs that are only counted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import UpConfig
from deploy.placement import Demand, Part, check_nodes, demand_of, place
from deploy.ray.crew import Crew, placement_of
from deploy.ray.placement_group import Bundle, deal
from deploy.ray.reach import check_reach
from producer.ray_actor import Settings
from producer.ray_fleet import Fleet
from protocol.config import validate
from protocol.errors import ConfigError

TABLE: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
    ("trainer, then engines", {"trainer_ranks": 4, "engines": 2, "engine_gpus": 2}, 8, {"trainer": "0 1 2 3", "engine": "4-5 6-7"}),
    ("ranks of several GPUs", {"trainer_ranks": 2, "trainer_gpus": 2, "engines": 4, "engine_gpus": 1}, 8, {"trainer": "0-1 2-3", "engine": "4 5 6 7"}),
    ("two nodes", {"trainer_ranks": 8, "engines": 2, "engine_gpus": 4}, 16, {"trainer": "0 1 2 3 4 5 6 7", "engine": "8-11 12-15"}),
    (
        "a critic on the trainer's",
        {"trainer_ranks": 2, "critic": True, "engines": 1, "engine_gpus": 2},
        4,
        {"trainer": "0 1", "critic": "0 1", "engine": "2-3"},
    ),
    (
        "eval and reward",
        {"trainer_ranks": 2, "engines": 1, "engine_gpus": 2, "eval_engines": 1, "reward_engines": 2, "reward_gpus": 1},
        8,
        {"trainer": "0 1", "engine": "2-3", "eval": "4-5", "reward": "6 7"},
    ),
    ("colocated, as many", {"layout": "colocated", "trainer_ranks": 4, "engines": 2, "engine_gpus": 2}, 4, {"trainer": "0 1 2 3", "engine": "0-1 2-3"}),
    ("colocated, more engines", {"layout": "colocated", "trainer_ranks": 2, "engines": 4, "engine_gpus": 1}, 4, {"trainer": "0 1", "engine": "0 1 2 3"}),
    ("colocated, more ranks", {"layout": "colocated", "trainer_ranks": 4, "engines": 1, "engine_gpus": 2}, 4, {"trainer": "0 1 2 3", "engine": "0-1"}),
    (
        "colocated with a critic, rewards and an evaluation",
        {"layout": "colocated", "trainer_ranks": 4, "critic": True, "engines": 2, "engine_gpus": 2, "reward_engines": 1, "reward_gpus": 4, "eval_engines": 1},
        6,
        {"trainer": "0 1 2 3", "critic": "0 1 2 3", "engine": "0-1 2-3", "reward": "0-3", "eval": "4-5"},
    ),
    ("external engines", {"layout": "external", "trainer_ranks": 4, "engines": 2, "engine_gpus": 2}, 4, {"trainer": "0 1 2 3", "engine": "4 5"}),
    ("trainer only", {"layout": "trainer_only", "trainer_ranks": 4, "engines": 2, "engine_gpus": 2, "eval_engines": 1}, 4, {"trainer": "0 1 2 3"}),
    (
        "rollout only",
        {"layout": "rollout_only", "trainer_ranks": 4, "critic": True, "engines": 2, "engine_gpus": 2, "eval_engines": 1},
        6,
        {"engine": "0-1 2-3", "eval": "4-5"},
    ),
    ("no GPUs at all", {"trainer_gpus": 0, "engines": 2}, 0, {"trainer": "0", "engine": "1 2"}),
    ("a trainer on CPUs comes last", {"trainer_gpus": 0, "engines": 2, "engine_gpus": 2}, 4, {"engine": "0-1 2-3", "trainer": "4"}),
]


@pytest.mark.parametrize(("asked", "gpus", "expected"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_each_layout_gives_every_unit_its_slice(asked: dict[str, Any], gpus: int, expected: Mapping[str, str]):
    placement = place(Demand(**({"trainer_gpus": 1} | asked)))
    assert placement.gpus == gpus
    assert {part.value: " ".join(map(str, units)) for part, units in placement.units.items()} == expected


ROOMS: list[tuple[str, dict[str, Any], dict[str, str], dict[str, str]]] = [
    (
        "an engine over two nodes",
        {"trainer_ranks": 8, "engine_gpus": 16, "engine_nodes": 2},
        {"trainer": "0 1 2 3 4 5 6 7"},
        {"engine": "(2 nodes of 8 GPUs)"},
    ),
    (
        "wherever the ranks before them end",
        {"trainer_ranks": 1, "engines": 2, "engine_gpus": 6, "engine_nodes": 3, "gpus_per_node": 2, "nodes": 7},
        {"trainer": "0"},
        {"engine": "(3 nodes of 2 GPUs) (3 nodes of 2 GPUs)"},
    ),
    (
        "an evaluation's as the others, beside rewards on one node",
        {"layout": "rollout_only", "engine_gpus": 8, "engine_nodes": 2, "eval_engines": 1, "reward_engines": 1, "reward_gpus": 2},
        {"reward": "0-1"},
        {"engine": "(2 nodes of 4 GPUs)", "eval": "(2 nodes of 4 GPUs)"},
    ),
    ("without GPUs", {"trainer_gpus": 0, "engine_nodes": 2}, {"trainer": "0"}, {"engine": "(2 nodes without GPU)"}),
]


@pytest.mark.parametrize(("asked", "units", "rooms"), [pytest.param(*row[1:], id=row[0]) for row in ROOMS])
def test_an_engine_over_several_nodes_has_a_room_of_its_own_and_no_slice(asked: dict[str, Any], units: Mapping[str, str], rooms: Mapping[str, str]):
    placement = place(Demand(**({"trainer_gpus": 1} | asked)))
    assert {part.value: " ".join(map(str, slices)) for part, slices in placement.units.items()} == units
    assert {part.value: " ".join(map(str, found)) for part, found in placement.rooms.items()} == rooms


def test_each_node_of_an_engine_has_an_actor_and_a_bundle():
    crew = Crew(
        config(engine={"kind": "sglang", "tp": 8, "nodes": 2, "count": 2}, eval={"engines": 1}, ray={"engine_cpus": 0.5}, producer={"count": 1}),
        Settings(run="t", text=""),
        Fleet("t"),
    )
    plan = placement_of(crew.config)
    assert crew.rooms(plan) == {f"engine-{index}": [{"GPU": 4.0, "CPU": 2.0}] * 2 for index in range(3)}
    engines = [f"engine-{index}{node}" for index in range(3) for node in ("", "-node-1")]
    assert crew.wanted(plan) == ["trainer-0", *engines, "producer-0"]
    assert plan.asked == "trainer 1 without GPU, engine 2 × (2 nodes of 4 GPUs), eval 1 × (2 nodes of 4 GPUs)"


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "an engine would be torn apart",
        {"trainer_ranks": 3, "trainer_gpus": 1, "engines": 1, "engine_gpus": 2, "gpus_per_node": 4},
        ["engine 0 needs its 2 GPUs on one node, and would have 1 on node 0, 1 on node 1", "trainer 3 × 1 GPUs", "placement.engine_gpus"],
    ),
    ("an engine wider than a node", {"engine_gpus": 16}, ["16 GPUs of one engine must lie on one node, and a node has 8", "engine.nodes = 2"]),
    (
        "an engine wider than its nodes",
        {"engine_gpus": 32, "engine_nodes": 2},
        ["16 GPUs of one engine must lie on one node, and a node has 8", "engine.nodes = 4"],
    ),
    ("nodes that do not share evenly", {"engine_gpus": 9, "engine_nodes": 2}, ["engine.nodes 2 with 9 GPUs an engine"]),
    (
        "fewer nodes than an engine has",
        {"trainer_ranks": 1, "engine_nodes": 3, "nodes": 2},
        ["1 × (3 nodes without GPU) are asked for", "placement.nodes 2 × placement.gpus_per_node 8 have room for 2 of these 3"],
    ),
    (
        "GPUs enough, on too few nodes",
        {"engines": 1, "engine_gpus": 6, "engine_nodes": 3, "gpus_per_node": 4, "nodes": 2},
        ["1 × (3 nodes of 2 GPUs) are asked for", "placement.nodes 2 × placement.gpus_per_node 4 have room for 2 of these 3"],
    ),
    (
        "too few GPUs, with those of rooms",
        {"trainer_ranks": 1, "trainer_gpus": 1, "engine_gpus": 4, "engine_nodes": 2, "gpus_per_node": 2, "nodes": 2},
        ["5 GPUs are asked for (trainer 1 × 1 GPUs, engine 1 × (2 nodes of 2 GPUs)), and there are 4"],
    ),
    ("turns over several nodes", {"layout": "colocated", "engine_gpus": 4, "engine_nodes": 2}, ['engine.nodes 2 with placement.layout "colocated"']),
    (
        "too few nodes",
        {"trainer_ranks": 8, "trainer_gpus": 1, "engines": 2, "engine_gpus": 4, "nodes": 1},
        ["16 GPUs are asked for (trainer 8 × 1 GPUs, engine 2 × 4 GPUs), and there are 8", "placement.nodes 1"],
    ),
    (
        "a reward engine would be torn apart",
        {"layout": "rollout_only", "engines": 1, "engine_gpus": 1, "reward_engines": 1, "reward_gpus": 2, "gpus_per_node": 2},
        ["reward 0 needs its 2 GPUs on one node", "placement.reward_gpus"],
    ),
]


@pytest.mark.parametrize(("asked", "told"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_what_cannot_be_placed_is_refused_with_what_was_asked_and_what_is_there(asked: dict[str, Any], told: list[str]):
    with pytest.raises(ConfigError) as refused:
        place(Demand(**asked))
    assert all(part in str(refused.value) for part in told), refused.value


@given(
    layout=st.sampled_from(["disaggregated", "colocated", "external", "trainer_only", "rollout_only"]),
    ranks=st.integers(1, 9),
    rank_gpus=st.integers(0, 2),
    engines=st.integers(1, 5),
    engine_gpus=st.integers(0, 4),
    evals=st.integers(0, 2),
    rewards=st.integers(0, 2),
)
def test_slices_cover_the_bundles_and_are_shared_by_none_but_those_who_take_turns(
    layout: Any, ranks: int, rank_gpus: int, engines: int, engine_gpus: int, evals: int, rewards: int
):
    demand = Demand(
        layout=layout,
        trainer_ranks=ranks,
        trainer_gpus=rank_gpus,
        engines=engines,
        engine_gpus=engine_gpus,
        eval_engines=evals,
        reward_engines=rewards,
        gpus_per_node=1000,
    )
    placement = place(demand)
    held = [bundle for part, units in placement.units.items() for unit in units for bundle in range(unit.start, unit.stop)]
    assert set(held) == set(range(placement.bundles))
    for part, units in placement.units.items():
        assert sum(len(unit) for unit in units) == len({bundle for unit in units for bundle in range(unit.start, unit.stop)}), "no two units of a part share"
        assert (len(units), {len(unit) for unit in units}) == (demand.units(part)[0], {demand.units(part)[1] or 1})
    if layout != "colocated":
        assert len(held) == len(set(held))


def bundles(*nodes: tuple[str, str, Sequence[int]], first: int = 0) -> list[Bundle]:
    """(node, address, its GPUs), in the order in which Ray would have numbered them: any."""
    found = [(node, address, gpu) for node, address, gpus in nodes for gpu in gpus]
    mixed = found[1::2] + found[::2]
    return [Bundle(index=first + index, node=node, address=address, gpu="" if gpu < 0 else str(gpu)) for index, (node, address, gpu) in enumerate(mixed)]


def test_bundles_are_dealt_in_the_order_of_nodes_and_gpus_whatever_their_numbers_are():
    placement = place(Demand(trainer_ranks=2, trainer_gpus=1, engines=2, engine_gpus=2, gpus_per_node=4))
    found = bundles(("b", "10.0.0.10", [0, 1]), ("a", "10.0.0.9", [10, 2, 1, 0]))
    where = {bundle.index: (bundle.address, bundle.gpu) for bundle in found}
    dealt = deal(placement, found, {Part.TRAINER: ["trainer-0", "trainer-1"], Part.ENGINE: ["engine-0", "engine-1"]})
    assert {name: [where[index] for index in indices] for name, indices in dealt.items()} == {
        "trainer-0": [("10.0.0.9", "0")],
        "trainer-1": [("10.0.0.9", "1")],
        "engine-0": [("10.0.0.9", "2"), ("10.0.0.9", "10")],
        "engine-1": [("10.0.0.10", "0"), ("10.0.0.10", "1")],
    }


def test_two_nodes_of_one_address_and_bundles_without_gpu_are_kept_apart():
    placement = place(Demand(trainer_gpus=0, engines=2, engine_gpus=1, gpus_per_node=1))
    found = bundles(("b", "127.0.0.1", [0]), ("a", "127.0.0.1", [-1]), ("a", "127.0.0.1", [0]))
    where = {bundle.index: (bundle.node, bundle.gpu) for bundle in found}
    dealt = deal(placement, found, {Part.TRAINER: ["trainer-0"], Part.ENGINE: ["engine-0", "engine-1"]})
    assert {name: where[index] for name, (index,) in dealt.items()} == {"engine-0": ("a", "0"), "engine-1": ("b", "0"), "trainer-0": ("a", "")}


def test_nodes_as_they_were_found_may_tear_an_engine_apart_that_was_planned_whole():
    placement = place(Demand(trainer_gpus=0, engines=2, engine_gpus=2, gpus_per_node=4))
    check_nodes(placement, ["a", "a", "b", "b"])
    with pytest.raises(ConfigError, match=r"engine 0 needs its 2 GPUs on one node, and would have 1 on a, 1 on b"):
        check_nodes(placement, ["a", "b", "b", "b"])


def config(**sections: dict[str, Any]) -> UpConfig:
    base: dict[str, Any] = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"path": "d"}}
    return validate(UpConfig, base | sections, source="test")


def test_what_placement_leaves_out_is_taken_from_the_sections_that_know():
    small = demand_of(config())
    assert (small.layout, small.trainer_ranks, small.trainer_gpus, small.engine_gpus, small.engines) == ("disaggregated", 1, 0, 0, 1)
    large = demand_of(config(trainer={"device": "cuda:0", "ranks": 4}, engine={"kind": "sglang", "tp": 2, "count": 3}, eval={"engines": 1}))
    assert (large.trainer_ranks, large.trainer_gpus, large.engine_gpus, large.engines, large.eval_engines) == (4, 1, 2, 3, 1)
    staged = {"kind": "sglang", "tp": 2, "args": ["--pp-size", "2"]}
    assert demand_of(config(engine=staged)).engine_gpus == 4
    assert demand_of(config(engine=staged, placement={"engine_gpus": 5})).engine_gpus == 5
    with pytest.raises(ConfigError, match=r"placement\.engine_gpus 2 is below the 4 GPUs"):
        demand_of(config(engine=staged, placement={"engine_gpus": 2}))
    external = demand_of(config(engine={"kind": "external", "urls": ["http://a:1", "http://b:1"]}))
    assert (external.layout, external.engines) == ("external", 2)
    assert place(external).gpus == 0


@pytest.mark.parametrize(("old", "new"), [("trainer_ranks", "trainer.ranks"), ("engine_nodes", "engine.nodes")])
def test_the_number_of_ranks_and_of_nodes_has_one_place(old: str, new: str):
    with pytest.raises(ConfigError, match=rf"placement\.{old}.*{re.escape(new)}"):
        config(placement={old: 2})


def test_a_critic_lies_with_its_trainer():
    plan = placement_of(config(trainer={"advantage": "gae", "ranks": 2}))
    assert plan.units[Part.CRITIC] == plan.units[Part.TRAINER]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"placement": {"layout": "external"}}, 'engine.kind "embedded"'),
        ({"placement": {"layout": "colocated"}, "engine": {"kind": "external", "urls": ["http://a:1"]}}, "share no GPU"),
    ],
)
def test_what_this_release_cannot_start_on_ray_is_refused(sections: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        placement_of(config(**sections))


ONE, MANY = ["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("addresses", "sections", "told"),
    [
        (ONE, {}, "redis.url is empty"),
        (MANY, {"redis": {"url": "unix:///run/redis.sock"}, "weights": {"store": "/shared"}}, "only one of the cluster's 2 machines"),
        (MANY, {"redis": {"url": "redis://localhost:6379"}, "weights": {"store": "/shared"}}, "only one of the cluster's 2 machines"),
        (MANY, {"redis": {"url": "redis://10.0.0.1:6379"}}, "weights.store is empty"),
    ],
)
def test_what_only_one_machine_reaches_is_refused(addresses: list[str], sections: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        check_reach(config(**sections), addresses)


def test_one_machine_reaches_itself_and_several_what_is_shared():
    check_reach(config(redis={"url": "unix:///run/redis.sock"}), ONE)
    check_reach(config(redis={"url": "redis://:secret@10.0.0.1:6379"}, weights={"store": "/shared"}), MANY)


def test_a_demand_can_be_told_from_another():
    placement = place(Demand(trainer_gpus=1, engines=2, engine_gpus=1))
    assert placement.asked == "trainer 1 × 1 GPUs, engine 2 × 1 GPUs"
    assert (str(placement.slice(Part.ENGINE)), placement.bundles) == ("1-2", 3)
    assert place(dataclasses.replace(placement.demand, engines=1)).asked != placement.asked
