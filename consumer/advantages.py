"""Advantages: what a rollout was better by than others. Pure functions on the rewards of ragged groups, in the order of the rollouts.

    rewards   0.5 1.0 0.0 │ 1.0 │ 0.2 0.4        starts   0 3 4 6        a group that lost siblings has fewer

Shapes: rewards `[M]` float64 of all rollouts end to end, starts `[N + 1]` int64: group i is `rewards[starts[i] : starts[i + 1]]`. Result `[M]` float32.
Notation: `R_i` a rollout's reward, `G` the size of its group; `std` has Bessel's correction (divides by G - 1).
Invariant: those that subtract the group's mean do not mix groups, so a step may be cut into chunks anywhere, and give exactly 0 to a group of one and to one
whose rewards are all equal. Those marked `whole_step` compare with all rollouts of the step. Every result is finite for rewards up to 1e30.
The same advantages serve losses by token and by rollout: GSPO (Zheng et al., arXiv 2507.18071, equation 5) takes `group_std` as GRPO does, and Dr. GRPO is
`group_mean` with `loss.normaliser` constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from protocol.dotted import load_dotted

Rewards: TypeAlias = NDArray[np.float64]
Starts: TypeAlias = NDArray[np.int64]
Advantages: TypeAlias = NDArray[np.float32]
Advantage: TypeAlias = Callable[[Rewards, Starts], Advantages]
Sums: TypeAlias = NDArray[np.float64]
"""[3]: count, sum and sum of squares."""
STD_FLOOR = 1e-4
"""Added to every standard deviation, so that nearly equal rewards do not explode."""
_NOISE = 2.0**-44
"""A variance below this share of the mean square is what rounding leaves of equal numbers."""
_Marked = TypeVar("_Marked", bound=Advantage)


def whole_step(advantage: _Marked) -> _Marked:
    """Marks an advantage, also one of your own, that is to be given all rollouts of a step at once. Chunks are then trained when the last has come."""
    cast("Any", advantage).whole_step = True
    return advantage


def needs_whole_step(advantage: Advantage) -> bool:
    return getattr(advantage, "whole_step", False)


# -- by group --------------------------------------------------------------------------------------------------------------------------------------


def group_mean(rewards: Rewards, starts: Starts) -> Advantages:
    """`A_i = R_i - mean(R)`: Dr. GRPO, and GRPO without the deviation.

    Source: Liu et al., "Understanding R1-Zero-like training" (arXiv 2503.20783), section 3.2: dividing by the deviation favours prompts that are nearly
    always or nearly never solved. Its other half, no division by a rollout's length, is `loss.normaliser` constant, which popular code leaves out at times.
    """
    return _centred(rewards, starts).astype(np.float32)


def group_std(rewards: Rewards, starts: Starts) -> Advantages:
    """`A_i = (R_i - mean(R)) / (std(R) + 1e-4)`: GRPO.

    Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2 (outcome supervision). The paper has no floor, and does not say which deviation;
    popular code takes Bessel's correction too, and adds between 1e-9 and 1e-4. Some of it gives a group of one its bare reward, where here it is 0.
    """
    centred = _centred(rewards, starts)
    found = np.zeros(len(rewards), dtype=np.float32)
    for rows in _by_size(starts):
        if rows.shape[1] > 1:
            group = centred[rows]
            deviation = np.sqrt(np.square(group).sum(1, keepdims=True) / (rows.shape[1] - 1))
            found[rows] = group / (deviation + STD_FLOOR)
    return found


def rloo(rewards: Rewards, starts: Starts) -> Advantages:
    """`A_i = R_i - mean of the siblings' R`, which is `(R_i - mean(R)) * G / (G - 1)`: leave-one-out, whatever the size of the group.

    Source: Ahmadian et al., "Back to basics" (arXiv 2402.14740), section 3.2; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free" (2019). Popular
    code takes G from the configuration, which is wrong for a group that lost siblings.
    """
    centred = _centred(rewards, starts)
    found = np.zeros(len(rewards), dtype=np.float32)
    for rows in _by_size(starts):
        size = rows.shape[1]
        if size > 1:
            found[rows] = centred[rows] * (size / (size - 1))
    return found


def bare(rewards: Rewards, _: Starts) -> Advantages:
    """`A_i = R_i`: plain REINFORCE, for rewards that are advantages already, and what advantages by token (`gae`, `reinforce_pp_tokens`) start from.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992), without a baseline.
    """
    return rewards.astype(np.float32)


# -- by step ---------------------------------------------------------------------------------------------------------------------------------------


@whole_step
def reinforce_pp(rewards: Rewards, _: Starts) -> Advantages:
    """`A_i = (R_i - mean) / (std + 1e-4)`, both over all rollouts of the step: REINFORCE++.

    Source: Hu et al., "REINFORCE++" (arXiv 2501.03262), the global normalisation of rewards without a penalty. The paper's form with one, and with mean and
    deviation over tokens, so that long rollouts count more, is `reinforce_pp_tokens` (`consumer.token_returns`).
    """
    return whiten(rewards, moments(rewards)).astype(np.float32)


@whole_step
def reinforce_pp_baseline(rewards: Rewards, starts: Starts) -> Advantages:
    """`A_i = (R_i - mean(R of the group)) / (std + 1e-4)`, std over what that leaves of all rollouts of the step: REINFORCE++ with a baseline.

    The mean over the step of what is centred by group is 0, so nothing more is subtracted: equal siblings keep exactly 0.
    Source: Hu et al., "REINFORCE++" (arXiv 2501.03262), the baseline variant. Popular code differs as for `reinforce_pp`; over tokens the mean is not 0, and
    equal siblings then get an advantage.
    """
    centred = _centred(rewards, starts)
    return whiten(centred, moments(centred), centre=False).astype(np.float32)


def moments(values: NDArray[np.float64]) -> Sums:
    """[n] to [3]: count, sum and sum of squares. Those of several ranks add up to those of all (an all-reduce), so none needs the others' values."""
    return np.array([len(values), values.sum(), np.square(values).sum()], dtype=np.float64)


def whiten(values: NDArray[np.float64], sums: Sums, *, centre: bool = True) -> NDArray[np.float64]:
    """`(x - mean) / (std + 1e-4)`, mean and std of whatever `sums` (`moments`) are of; without `centre` the mean stays in. [n] to [n] float64.

    Exactly 0 with `centre`, whatever the values, where `sums` are of equal numbers; ones that differ by less than 2.4e-7 of their size count as equal.
    Popular code adds 1e-8 to the variance, which is about the same floor.
    """
    count, total, squares = sums.tolist()
    spread = squares - total * total / count if count else 0.0
    if count < 2 or spread <= _NOISE * squares:
        return np.zeros(len(values)) if centre else values / STD_FLOOR
    return (values - (total / count if centre else 0.0)) / (math.sqrt(spread / (count - 1)) + STD_FLOOR)


# -- by token, with a critic -------------------------------------------------------------------------------------------------------------------------

_BLOCK = 128
"""Tokens that one product takes."""


def gae(
    rewards: Rewards,
    values: NDArray[np.float64],
    starts: Starts,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    penalties: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Generalised advantages of T tokens, and the returns that the critic is to learn: `A_t = d_t + gamma lam A_(t+1)`, `d_t = r_t + gamma V_(t+1) - V_t`,
    return `A_t + V_t`. r is the rollout's reward at its last token and 0 before, less the token's penalty; V and A are 0 past the end.

    Blocks of tokens are taken at once from the end, as one product with powers of gamma lam; the result is the recursion's, but for rounding.

    Shapes: rewards [M]; values [T] float64, what the critic says before each token, end to end; starts [M + 1]: rollout i is values[starts[i] : starts[i + 1]];
    penalties [T], what is taken off the reward of each token (`consumer.kl_reward`), None: nothing.
    Results [T] and [T] float64. Tokens that the policy did not sample are left out by the caller: the next token is the next one sampled.
    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (arXiv 1506.02438), equations 11 to 16. Popular code
    whitens the result over the tokens of a micro-batch or a rank; `whiten` with the `moments` of all ranks does so over the step.
    """
    lengths = np.diff(starts)
    following = np.append(values[1:], 0.0)[: len(values)]
    ends = starts[1:][lengths > 0] - 1
    following[ends] = 0.0
    deltas = gamma * following - values
    deltas[ends] += rewards[lengths > 0]
    if penalties is not None:
        deltas -= penalties
    decay = gamma * lam
    apart = np.arange(_BLOCK)[:, None] - np.arange(_BLOCK)
    powers = np.where(apart >= 0, decay ** np.maximum(apart, 0), 0.0)
    found = np.zeros(len(values))
    order = np.argsort(-lengths, kind="stable")
    carried = np.zeros(len(order))
    for done in range(0, int(lengths.max(initial=0)), _BLOCK):
        rows = order[: np.count_nonzero(lengths > done)]
        places = starts[1:][rows, None] - done - _BLOCK + np.arange(_BLOCK)
        inside = places >= starts[:-1][rows, None]
        block = np.where(inside, deltas[np.maximum(places, 0)], 0.0) @ powers
        block += carried[: len(rows), None] * decay ** np.arange(_BLOCK, 0, -1)
        found[places[inside]] = block[inside]
        carried = block[:, 0]
    return found, found + values


# -- names -------------------------------------------------------------------------------------------------------------------------------------------

ADVANTAGES: dict[str, Advantage] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reinforce_pp_tokens": bare,  # made token by token in `consumer.token_returns`
    "gae": bare,  # what a critic makes advantages of, token by token: `consumer.critic`
    "none": bare,
}


def find_advantage(name: str) -> Advantage:
    """What `trainer.advantage` names: one of `ADVANTAGES`, or `package.module:function` of your own. Raises: `ConfigError`."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return cast("Advantage", load_dotted("trainer.advantage", name, define=f"def {name.partition(':')[2]}(rewards, starts)"))


def _centred(rewards: Rewards, starts: Starts) -> Rewards:
    """[M] each less its group's mean; exactly 0 where a group's rewards are all equal: the mean of equal numbers may round away from them."""
    found = np.zeros(len(rewards))
    for rows in _by_size(starts):
        group = rewards[rows]
        equal = group.max(1, keepdims=True) == group.min(1, keepdims=True)
        found[rows] = np.where(equal, 0.0, group - group.mean(1, keepdims=True))
    return found


def _by_size(starts: Starts) -> Iterator[NDArray[np.int64]]:
    """Groups of one size at a time, as places [n, G]: sums over a row do not depend on what other groups there are."""
    sizes = np.diff(starts)
    for size in np.unique(sizes[sizes > 0]).tolist():
        yield starts[:-1][sizes == size, None] + np.arange(size)
