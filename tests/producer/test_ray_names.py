"""Names of actors."""

from __future__ import annotations

import doctest

from producer import ray_names


def test_the_worked_examples_hold():
    assert doctest.testmod(ray_names).failed == 0
