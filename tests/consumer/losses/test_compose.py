"""What holds for every loss that the [loss] section can name, with and without divergence and entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch

from consumer.losses import LossConfig, make_loss
from consumer.losses.config import KlKind, LossKind
from consumer.losses.divergence import entropy_bonus, kl_to_reference
from consumer.losses.terms import LOG_RATIO_BOUND, Terms, TokenLoss

KINDS: tuple[LossKind, ...] = get_args(LossKind)
POLICY_GRADIENTS = [kind for kind in KINDS if kind not in {"sft", "distillation"}]
EVERY = [LossConfig(kind=kind) for kind in KINDS] + [
    LossConfig(kind="ppo_clip", dual_clip=3.0),
    LossConfig(kind="trust_region", ratio_cap=0.0),
    LossConfig(kind="decoupled_ppo", proximal="loglinear", ratio_cap=0.0),
    LossConfig(kind="truncated_is", ratio_cap=0.0),
    LossConfig(kind="truncated_is", is_level="sequence", ratio_cap=0.0),
    LossConfig(kind="truncated_is", is_level="geometric", ratio_cap=0.0),
    LossConfig(kind="masked_is", is_level="sequence"),
    LossConfig(kind="masked_is", is_level="geometric", mask_low=0.999, mask_high=1.002),
    LossConfig(kind="cispo", ratio_floor=0.5, ratio_cap=0.0),
    LossConfig(kind="distillation", ratio_cap=0.0),
    *(LossConfig(kl_coef=0.1, kl_kind=kind, entropy_coef=0.01) for kind in get_args(KlKind)),
]


def told_by(config: LossConfig) -> str:
    return "-".join([config.kind, *(str(getattr(config, name)) for name in sorted(config.model_fields_set - {"kind"}))])


every_loss = pytest.mark.parametrize("config", EVERY, ids=told_by)


def cut(terms: Terms, start: int, end: int) -> Terms:
    """The rollouts numbered start to end, numbered from 0."""
    chosen = (terms.rollout >= start) & (terms.rollout < end)
    parts = {field.name: getattr(terms, field.name)[chosen].detach() for field in fields(Terms)}
    parts["rollout"] = parts["rollout"] - start
    return Terms(**(parts | {name: parts[name].requires_grad_() for name in ("target", "entropy")}))


def gradients(told: TokenLoss, terms: Terms) -> torch.Tensor:
    """[2, N]: by log pi, and by the entropy (0 where it is not used)."""
    found = torch.autograd.grad(told.loss.sum(), [terms.target, terms.entropy], allow_unused=True)  # type: ignore[list-item]
    return torch.stack([torch.zeros_like(terms.target) if slope is None else slope for slope in found])


@pytest.mark.parametrize("kind", POLICY_GRADIENTS)
def test_on_policy_every_policy_loss_has_the_plain_policy_gradient(terms: Terms, kind: LossKind):
    on_policy = replace(terms, behaviour=terms.target.detach(), proximal=terms.target.detach())
    told = make_loss(LossConfig(kind=kind))(on_policy)
    torch.testing.assert_close(gradients(told, on_policy)[0], -terms.advantage)
    assert not told.clipped.any()
    assert (told.ratio == 1).all()


@pytest.mark.parametrize("kind", POLICY_GRADIENTS)
def test_advantages_of_zero_give_no_gradient_but_the_pull_of_the_trust_region(terms: Terms, kind: LossKind):
    flat = replace(terms, advantage=torch.zeros_like(terms.advantage))
    assert gradients(make_loss(LossConfig(kind=kind, trust_pull=0.0))(flat), flat).abs().max() == 0


@every_loss
def test_where_rollouts_are_split_into_calls_changes_nothing(terms: Terms, config: LossConfig):
    loss = make_loss(config)
    whole = loss(terms)
    parts = [cut(terms, 0, 1), cut(terms, 1, 12), cut(terms, 12, 13), cut(terms, 13, 32)]
    told = [loss(part) for part in parts]
    torch.testing.assert_close(torch.cat([part.loss for part in told]), whole.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([gradients(t, part) for t, part in zip(told, parts, strict=True)], 1), gradients(whole, terms), rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.cat([part.clipped for part in told]), whole.clipped)


@every_loss
def test_the_order_of_rollouts_changes_nothing(make_terms: Callable[..., Terms], rollouts: Any, config: LossConfig):
    loss, order = make_loss(config), torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(5)).tolist()
    first, second = make_terms(rollouts), make_terms([rollouts[i] for i in order])
    starts = torch.tensor([0, *(len(rollout) for rollout in rollouts)]).cumsum(0).tolist()
    places = [t for i in order for t in range(starts[i], starts[i] + len(rollouts[i]))]
    one, two = loss(first), loss(second)
    torch.testing.assert_close(two.loss, one.loss[places], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients(two, second), gradients(one, first)[:, places], rtol=1e-12, atol=1e-14)
    assert torch.equal(two.clipped, one.clipped[places])


@every_loss
def test_no_tokens_give_no_loss_and_an_empty_gradient(make_terms: Callable[..., Terms], config: LossConfig):
    terms = make_terms([], torch.float32)
    told = make_loss(config)(terms)
    assert [tuple(part.shape) for part in told] == [(0,)] * 3
    assert gradients(told, terms).shape == (2, 0)


@every_loss
def test_float32_gives_what_float64_does(make_terms: Callable[..., Terms], rollouts: Any, config: LossConfig):
    wide, narrow = make_terms(rollouts), make_terms(rollouts, torch.float32)
    one, two = make_loss(config)(wide), make_loss(config)(narrow)
    assert two.loss.dtype == two.ratio.dtype == torch.float32
    torch.testing.assert_close(two.loss.double(), one.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(two, narrow).double(), gradients(one, wide), rtol=1e-4, atol=1e-5)
    assert torch.equal(two.clipped, one.clipped)


EXTREMES = (0.0, -1e-7, -1.0, -104.0, -300.0, -1e30, -math.inf)


@every_loss
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_values_and_gradients_are_finite_whatever_the_logprobs(config: LossConfig, advantage: float):
    """All pairs of extremes as target and behaviour, beside all extremes of the others; each token alone, then in rollouts of fourteen."""
    size = len(EXTREMES)
    target, behaviour = torch.cartesian_prod(torch.tensor(EXTREMES), torch.tensor(EXTREMES)).repeat(size, 1).T
    count = len(target)
    others = torch.tensor([EXTREMES[(i + i // size + i // size**2) % size] for i in range(count)])
    for rollout in (torch.arange(count), torch.arange(count) // (2 * size)):
        terms = Terms(
            target=target.clone().requires_grad_(),
            behaviour=behaviour,
            proximal=others,
            advantage=torch.full((count,), advantage),
            rollout=rollout,
            age=torch.arange(count) % 9,
            reference=others,
            teacher=others.flip(0),
            entropy=torch.zeros(count, requires_grad=True),
        )
        told = make_loss(config)(terms)
        assert told.loss.isfinite().all()
        assert told.loss.sum().isfinite()
        assert gradients(told, terms).isfinite().all()
        assert told.ratio.max() <= math.exp(LOG_RATIO_BOUND) * 1.001


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_entropy_are_added_with_their_weights(terms: Terms, kind: LossKind):
    config = LossConfig(kind=kind, kl_coef=0.3, kl_kind="k2", entropy_coef=0.05)
    alone, both = make_loss(LossConfig(kind=kind))(terms), make_loss(config)(terms)
    torch.testing.assert_close(both.loss, alone.loss + 0.3 * kl_to_reference(terms, "k2") + 0.05 * entropy_bonus(terms))
    torch.testing.assert_close(gradients(both, terms)[1], torch.full_like(terms.target, -0.05))
    assert torch.equal(both.clipped, alone.clipped)
    assert torch.equal(both.ratio, alone.ratio)


READ_BY: list[tuple[dict[str, Any], set[str]]] = [
    ({"clip_low": 0.05}, {"ppo_clip", "decoupled_ppo", "icepop", "opsm"}),
    ({"clip_high": 0.05}, {"ppo_clip", "decoupled_ppo", "icepop", "opsm"}),
    ({"dual_clip": 1.1}, {"ppo_clip"}),
    ({"proximal": "loglinear"}, {"decoupled_ppo"}),
    ({"tv_threshold": 0.01}, {"trust_region"}),
    ({"trust_pull": 0.1}, {"trust_region"}),
    ({"ratio_cap": 1.01}, {"trust_region", "decoupled_ppo", "truncated_is", "cispo", "distillation"}),
    ({"ratio_floor": 0.99}, {"cispo"}),
    ({"is_level": "sequence"}, {"truncated_is", "masked_is"}),
    ({"mask_low": 0.99}, {"masked_is", "icepop"}),
    ({"mask_high": 1.01}, {"masked_is", "icepop"}),
    ({"gspo_clip_low": 0.5}, {"gspo"}),
    ({"gspo_clip_high": 0.5}, {"gspo"}),
    ({"opsm_threshold": 0.2}, {"opsm"}),
    ({"m2_threshold": 1e-5}, {"m2po"}),
]


@pytest.mark.parametrize(("option", "readers"), READ_BY, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_an_option_changes_the_losses_that_its_description_names_and_no_other(terms: Terms, option: dict[str, Any], readers: set[str]):
    changed = {kind for kind in KINDS if not torch.equal(make_loss(LossConfig(kind=kind))(terms).loss, make_loss(LossConfig(kind=kind, **option))(terms).loss)}
    assert changed == readers


def test_every_option_of_a_policy_loss_is_in_that_table():
    shared = {"kind", "kl_coef", "kl_kind", "kl_reward_coef", "entropy_coef", "normaliser", "lr_by_ess"}
    assert {name for option, _ in READ_BY for name in option} == set(LossConfig.model_fields) - shared


@pytest.mark.parametrize(
    ("config", "missing"), [(LossConfig(kl_coef=0.1), "reference"), (LossConfig(entropy_coef=0.1), "entropy"), (LossConfig(kind="distillation"), "teacher")]
)
def test_a_term_that_is_needed_and_not_there_is_named(terms: Terms, config: LossConfig, missing: str):
    with pytest.raises(AssertionError, match=missing):
        make_loss(config)(replace(terms, **{missing: None}))


def test_nothing_is_needed_by_default(terms: Terms):
    told = make_loss(LossConfig())(replace(terms, reference=None, teacher=None, entropy=None))
    assert told.loss.isfinite().all()
