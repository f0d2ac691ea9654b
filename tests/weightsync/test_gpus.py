from __future__ import annotations

import doctest

from weightsync import gpus


def test_the_worked_examples_hold():
    assert doctest.testmod(gpus).failed == 0
