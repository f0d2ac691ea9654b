"""The tests of the weight channel and the engine registry, on a cluster: all keys of a script lie in the slot of the run."""

from __future__ import annotations

import pytest

from tests.weightsync.conftest import *  # noqa: F403 - its fixtures
from tests.weightsync.test_channel import *  # noqa: F403
from tests.weightsync.test_registry import *  # noqa: F403

pytestmark = pytest.mark.cluster
