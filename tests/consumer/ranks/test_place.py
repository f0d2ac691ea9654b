"""Where a process stands among ranks, by its environment."""

from __future__ import annotations

import pytest

from consumer.ranks.place import Place, own_place, place_of
from protocol.errors import ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-3", "MASTER_PORT": "29500"}


def test_a_process_is_where_its_environment_says():
    assert place_of({}, 1) is None
    assert place_of({}, 4) is None, "it starts the others itself"
    assert place_of(TORCHRUN, 1) == place_of(TORCHRUN, 4) == Place(rank=1, ranks=4, local_rank=1, host="node-3", port=29500)
    assert place_of(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, 1) is None
    assert place_of({"MASTER_ADDR": "node-3"}, 1) is None


@pytest.mark.parametrize(
    ("environ", "ranks", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1, "not MASTER_ADDR, MASTER_PORT"),
        (TORCHRUN, 2, "trainer.ranks 2, but 4 processes"),
        (TORCHRUN | {"RANK": "4"}, 1, "0 <= RANK < WORLD_SIZE"),
        (TORCHRUN | {"RANK": "one"}, 1, "must be numbers"),
        (TORCHRUN | {"MASTER_PORT": "0"}, 1, "and a port"),
    ],
)
def test_a_place_that_is_none_is_refused(environ: dict[str, str], ranks: int, says: str):
    with pytest.raises(ConfigError, match=says):
        place_of(environ, ranks)


def test_ranks_started_here_find_themselves():
    here = own_place(3).at(4711)
    assert (here.rank, here.own_store, here.listen_at) == (0, True, "127.0.0.1")
    other = place_of(here.environment(2), 3)
    assert other == Place(rank=2, ranks=3, local_rank=2, host="127.0.0.1", port=4711)
    assert other is not None
    assert (other.share.rank, other.share.ranks) == (2, 3)
    assert Place(rank=0, ranks=2, local_rank=0, host="node-3", port=1).listen_at == ""
