"""What a step's summed token losses are divided by: a weight for each rollout's tokens, and each chunk's share of the divisor.

    step's loss = sum over its tokens of weight * loss / sum over its chunks of divisor

Invariant: a weight depends on nothing outside its rollout and divisors add up, so chunks, micro-batches and ranks change the step's loss by rounding only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumer.losses.config import Normaliser
from protocol.arrays import FloatArray


def normalise(kept: NDArray[np.int64], normaliser: Normaliser, *, max_new_tokens: int) -> tuple[FloatArray | None, float]:
    """The weight of each rollout's tokens (None: 1 each), and what these rollouts add to the step's divisor.

    token_mean      weight 1            divisor: tokens in the loss             every token counts the same
    rollout_mean    weight 1 / tokens   divisor: rollouts with such a token     every rollout counts the same
    constant        weight 1            divisor: rollouts * max_new_tokens      the same for every step, whatever was sampled

    Shapes: kept [R], tokens of each rollout that the staleness guard left in the loss; weights [R] float32.
    Source: token mean, Yu et al., "DAPO" (arXiv 2503.14476), section 3.3. Rollout mean, Shao et al., "DeepSeekMath" (arXiv 2402.03300), equation 3. Constant,
    Liu et al., "Understanding R1-Zero-like training" (arXiv 2503.20783), section 3.2. Popular code often takes the token mean within each micro-batch or each
    rank, then the mean of these, which weighs tokens by how a step happened to be cut; and where tokens are rejected it may go on counting them in the divisor.
    Raises: `ValueError` for constant without a `max_new_tokens`.
    """
    if normaliser == "token_mean":
        return None, float(kept.sum())
    if normaliser == "rollout_mean":
        return (1 / np.maximum(kept, 1)).astype(np.float32), float(np.count_nonzero(kept))
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: loss.normaliser constant divides by it; pass rollout.max_new_tokens")
    return None, float(len(kept) * max_new_tokens)
