from __future__ import annotations

import pytest
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import RedisError

from protocol.slots import read_map, slot_of, slot_of_key

LAST = REDIS_CLUSTER_HASH_SLOTS - 1


@pytest.mark.parametrize(
    "command",
    [
        ["GET", "{a}x"],
        ["SET", b"{a}y", b"value", "NX"],
        ["EVALSHA", "digest", 2, "{a}1", "{a}2", "other"],
        ["EVAL", "return 1", "1", "{a}"],
        ["XREAD", "COUNT", 5, "BLOCK", 100, b"STREAMS", "{a}stream", "$"],
        ["MEMORY USAGE", "{a}x"],
    ],
)
def test_a_command_belongs_to_the_slot_of_its_first_key(command: list[object]) -> None:
    assert slot_of(command) == slot_of_key("a")


@pytest.mark.parametrize("command", [["PING"], ["CONFIG GET", "maxmemory"], ["PUBLISH", "{a}channel", "x"], ["EVAL", "return 1", 0], ["SCRIPT FLUSH"]])
def test_a_command_without_a_key_may_go_anywhere(command: list[object]) -> None:
    assert slot_of(command) is None


@pytest.mark.parametrize("command", [["SCAN", 0], ["WAIT", 1, 100], ["DBSIZE"], ["FLUSHALL"]])
def test_what_one_node_would_answer_for_itself_is_refused(command: list[object]) -> None:
    with pytest.raises(RedisError, match=f"{command[0]} asks a single node"):
        slot_of(command)


def test_the_map_says_who_serves_what_and_who_stands_by() -> None:
    told = [[0, 99, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.2", 7001, b"id"]], [200, LAST, [b"", 7002, b"id"]]]
    found = read_map(told, "seed")
    assert found.owners[0] == found.owners[99] == ("10.0.0.1", 7000)
    assert found.owners[100] is None
    assert found.owners[LAST] == ("seed", 7002), "a node that does not know its own address is where it was asked"
    assert found.masters == (("10.0.0.1", 7000), ("seed", 7002))
    assert found.replicas == (("10.0.0.2", 7001),)


def test_a_slot_that_moved_is_its_new_owner_s_and_a_replica_becomes_a_master() -> None:
    found = read_map([[0, LAST, [b"a", 1, b"id"], [b"b", 2, b"id"]]], "seed")
    found.move(5, ("b", 2))
    assert (found.owners[5], found.owners[6]) == (("b", 2), ("a", 1))
    assert found.addresses == (("a", 1), ("b", 2))
