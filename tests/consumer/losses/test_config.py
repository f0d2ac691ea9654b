"""The [loss] section: what it needs, and what it refuses, with what to do about it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from consumer.losses import LossConfig

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": ({"kind": "grpo"}, "'ppo_clip'"),
    "unknown option": ({"clip": 0.2}, "Extra inputs"),
    "unknown estimate": ({"kl_kind": "k4"}, "'unbiased'"),
    "dual clip that cuts good ratios": ({"dual_clip": 0.9}, r"set it above 1 \(3 is usual\), or 0"),
    "floor over cap": ({"kind": "cispo", "ratio_floor": 5.0}, "lower ratio_floor"),
    "empty mask": ({"mask_low": 2.0, "mask_high": 1.5}, "lower mask_low"),
    "mask without on-policy": ({"kind": "icepop", "mask_low": 1.5}, "set mask_low to at most 1"),
    "geometric mask with the bounds of tokens": ({"kind": "masked_is", "is_level": "geometric"}, "set both, for example 0.999 and 1.002"),
    "geometric mask with one bound": ({"kind": "masked_is", "is_level": "geometric", "mask_low": 0.999}, "set both"),
    "learning rate by weights that are not there": ({"kind": "sft", "lr_by_ess": True}, "set lr_by_ess = false"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_with_what_to_do(given: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        LossConfig(**given)


def test_options_of_another_kind_are_no_error_so_kind_alone_can_be_set():
    assert LossConfig(kind="trust_region", clip_low=0.1, gspo_clip_low=0.1).kind == "trust_region"


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({}, (False, False, False)),
        ({"kl_coef": 1e-3}, (True, False, False)),
        ({"kl_reward_coef": 1e-3}, (False, False, False)),
        ({"entropy_coef": 1e-3}, (False, True, False)),
        ({"kind": "distillation"}, (False, False, True)),
    ],
)
def test_it_says_what_else_a_loss_needs(given: dict[str, Any], needs: tuple[bool, bool, bool]):
    config = LossConfig(**given)
    assert (config.needs_reference, config.needs_entropy, config.needs_teacher) == needs
    assert config.loads_reference == bool({"kl_coef", "kl_reward_coef"} & given.keys())


def test_the_default_is_ppo_with_the_higher_upper_clip_alone():
    config = LossConfig()
    assert (config.kind, config.clip_low, config.clip_high, config.dual_clip) == ("ppo_clip", 0.2, 0.28, 0.0)
    assert (config.kl_coef, config.entropy_coef, config.normaliser, config.lr_by_ess) == (0.0, 0.0, "token_mean", False)


def test_reading_the_section_imports_no_torch():
    code = "import sys; from consumer.losses import LossConfig, make_loss; LossConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
