"""The divergence from the reference model as a penalty in the reward of each token, for advantages that are made token by token.

    r_t = (R at the last token in the loss) - loss.kl_reward_coef * log(pi / ref)

`pi` is the policy at the start of the step, the same for all of its chunks, passes and ranks; the log is held within ±20. Only tokens in the loss have a
penalty: what the policy did not sample, or the staleness guard took out, is passed over. No torch here.

Why pi, and not mu (the policy that sampled): a policy gradient with the ratio `pi / mu` on rewards `R - b log(pi / ref)` is that of `R - b KL(pi || ref)`.
With `log(mu / ref)` it is that of `R - b KL(pi || ref) + b KL(pi || mu)`: stale tokens would reward going away from mu. That costs one more forward without
gradient.
Source: Ouyang et al., "InstructGPT" (arXiv 2203.02155), section 3.5, equation 2; Ziegler et al. (arXiv 1909.08593), section 2, who adapt the weight too;
Hu et al., "REINFORCE++" (arXiv 2501.03262), equations 8 to 10. On policy, pi is mu in all of them.
Others: verl (`algorithm.use_kl_in_reward`) and OpenRLHF take log(pi / ref) of logprobs that the trainer computes before the first of a batch's updates, which
is this pi; verl then sums it over the rollout for group advantages, which are refused here. Its REINFORCE++ starts the sum anew at every token that is
masked, so in a rollout of several turns only the last one sees the reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from consumer.advantages import Starts
from consumer.critic.config import GAE
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from consumer.config import TrainerConfig
    from consumer.losses.config import LossConfig

TOKEN_RETURNS = "reinforce_pp_tokens"  # noqa: S105 - the name of an advantage
"""REINFORCE++ over tokens: `consumer.token_returns`."""
BY_TOKEN = (GAE, TOKEN_RETURNS)
"""Advantages that take a reward at each token."""
_NO_ADVANTAGE = frozenset({"sft", "distillation"})


def check_kl_reward(loss: LossConfig, trainer: TrainerConfig) -> None:
    """What `loss.kl_reward_coef` and advantages by token ask of [trainer]. Raises: `ConfigError`."""
    if trainer.advantage == TOKEN_RETURNS and trainer.backend != "torch":
        raise ConfigError(
            f"trainer.advantage {TOKEN_RETURNS} with trainer.backend {trainer.backend}: advantages by token are made beside the torch backend alone; set "
            "trainer.backend = torch, or trainer.advantage = reinforce_pp"
        )
    if not loss.kl_reward_coef:
        return
    if trainer.advantage not in BY_TOKEN:
        raise ConfigError(
            f"loss.kl_reward_coef {loss.kl_reward_coef:g} with trainer.advantage {trainer.advantage}: it gives a rollout one advantage, and the penalty is a "
            f"reward of each token; set trainer.advantage to {' or '.join(BY_TOKEN)}, or weigh the divergence in the loss (loss.kl_coef)"
        )
    if loss.kind in _NO_ADVANTAGE:
        raise ConfigError(
            f"loss.kl_reward_coef {loss.kl_reward_coef:g} with loss.kind {loss.kind}: it reads no advantage, so the penalty would change nothing; set "
            "loss.kl_coef instead, or loss.kl_reward_coef = 0"
        )


def divergence_sums(away: NDArray[np.float64], starts: Starts) -> NDArray[np.float64]:
    """[4] float64 that add up over chunks and ranks: tokens, k1, k3, and rollouts with a token. `away` [N] is `log(pi / ref)`."""
    return np.array([len(away), away.sum(), (np.expm1(-away) + away).sum(), np.count_nonzero(np.diff(starts))], dtype=np.float64)


def divergence_figures(sums: NDArray[np.float64], coef: float) -> dict[str, float]:
    """By name, see `consumer.metric_names`; none of no tokens."""
    tokens, k1, k3, rollouts = sums.tolist()
    if not tokens:
        return {}
    return {"reward_kl": k1 / tokens, "reward_penalty": coef * k1 / rollouts, "reference_kl": k3 / tokens}
