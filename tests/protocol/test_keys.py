from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from protocol.errors import ConfigError
from protocol.keys import Keys

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)


def small(keys: Keys) -> list[str]:
    """Every key that is not a payload."""
    named = [getattr(keys, name) for name, member in vars(Keys).items() if isinstance(member, property)]
    return [*named, keys.presence("producer"), keys.presence_deadline("producer"), keys.presence_seen("producer"), keys.key("anything")]


@given(NAMES)
def test_small_state_of_a_run_lies_in_one_cluster_slot(name: str) -> None:
    assert len({key_slot(key.encode()) for key in small(Keys(name))}) == 1


@given(NAMES)
def test_no_two_names_of_a_run_are_the_same_key(name: str) -> None:
    keys = small(Keys(name))
    assert len(set(keys)) == len(keys)


def test_payloads_spread_over_the_cluster() -> None:
    keys = Keys("run")
    quarters = [key_slot(keys.payload(seq, 1, "token").encode()) * 4 // REDIS_CLUSTER_HASH_SLOTS for seq in range(400)]
    assert all(quarters.count(quarter) > 50 for quarter in range(4))


def test_a_payload_key_tells_group_attempt_and_token_apart() -> None:
    keys = Keys("run")
    assert len({keys.payload(1, 1, "a"), keys.payload(1, 1, "b"), keys.payload(1, 2, "a"), keys.payload(2, 1, "a"), Keys("run2").payload(1, 1, "a")}) == 5


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "../a", "a{b}", "a:b", "a\n", "ä", "a" * 64, "a*"])
def test_a_name_that_could_not_be_a_key_and_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run.name .*: use 1 to 63 letters"):
        Keys(name)
