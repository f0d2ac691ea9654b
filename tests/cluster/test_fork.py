"""A fork on a real cluster, where the two runs lie on nodes of their own and payloads anywhere: the tests of the single server, again."""

from __future__ import annotations

import pytest

from tests.buffer.test_fork import (  # noqa: F401 - collected here, with this folder's server
    test_a_fork_replays_from_redis_spill_and_blobs_what_the_other_run_took_after_the_checkpoint,
    test_a_run_that_lets_go_of_what_is_copied_is_noticed_and_nothing_is_left,
    test_what_a_fork_trains_is_what_the_other_run_had,
    world,
)

pytestmark = pytest.mark.cluster
