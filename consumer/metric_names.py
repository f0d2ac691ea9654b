"""Every figure that training tells of a step: its name, unit and meaning. `docs/metrics.md` is this table (`python -m consumer.metric_names`).

The names are those of metrics.jsonl, and what trackers get. Prometheus has names of its own, see `deploy.http.metrics`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple


class AgeBucket(NamedTuple):
    """Tokens by staleness, in steps."""

    name: str
    least: int


AGE_BUCKETS = (AgeBucket("0", 0), AgeBucket("1", 1), AgeBucket("2_3", 2), AgeBucket("4_7", 4), AgeBucket("8_up", 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    unit: str
    """"" where it has none; `text` and `counts` are no number: trackers do not get them."""
    meaning: str
    ages: bool = False
    """It is there once more for each of `AGE_BUCKETS`."""


def by_age(name: str, bucket: AgeBucket) -> str:
    """Its name for the tokens of one age.

    >>> by_age("ratio_mean", AGE_BUCKETS[2])
    'ratio_mean/age_2_3'
    """
    return f"{name}/age_{bucket.name}"


def _m(name: str, unit: str, meaning: str, *, ages: bool = False) -> Metric:
    return Metric(name=name, unit=unit, meaning=meaning, ages=ages)


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Where the run is": (
        _m("step", "steps", "Optimizer step; after a resume the last line of a step stands."),
        _m("version", "text", "Incarnation and step: the version of the weights after it."),
        _m("at", "s", "Unix time."),
        _m("elapsed_s", "s", "Training time of all lives of the trainer so far."),
        _m("tokens_total", "tokens", "That entered a loss so far."),
        _m("published", "text", "Newest version that engines can see."),
        _m("publish_s", "s", "What publishing that took, beside training."),
        _m("digest", "text", "Of the weights; shadow, replay and recorded training only."),
        _m("recorded_digest", "text", "Of the weights that the run had after this step; the same modes only."),
    ),
    "The step's groups": (
        _m("reward", "", "Mean over the rollouts."),
        _m("reward_std", "", "Standard deviation over the rollouts."),
        _m("groups", "groups", "Trained."),
        _m("rollouts", "rollouts", "Trained."),
        _m("response_tokens_mean", "tokens", "Sampled tokens of a rollout."),
        _m("staleness", "counts", "Tokens in the loss, by staleness in steps."),
        _m("staleness_mean", "steps", "Mean over the tokens in the loss."),
        _m("staleness_max", "steps", "Of the oldest token in the loss."),
        _m("group_staleness", "counts", "Groups, by the staleness of their oldest trainable token."),
        _m("bias", "counts", "Tokens trained and masked by the length of their rollout, and masked ones by staleness."),
    ),
    "What became of its tokens": (
        _m("tokens", "tokens", "In the loss: tokens_effective + tokens_clipped + tokens_idle."),
        _m("tokens_effective", "tokens", "In the loss, with an advantage, and with the whole of its gradient."),
        _m("tokens_clipped", "tokens", "With an advantage, whose gradient clipping, truncation or masking changed."),
        _m("tokens_idle", "tokens", "In the loss with advantage 0, such as of groups whose rewards are all equal."),
        _m("masked", "tokens", "Kept out of the loss by the staleness guard."),
        _m("masked_fraction", "ratio", "masked / (tokens + masked)."),
        _m("clip_fraction", "ratio", "Share of the tokens in the loss whose gradient clipping, truncation or masking changed, advantage or none."),
    ),
    "The optimizer": (
        _m("loss", "", "Under loss.normaliser."),
        _m("grad_norm", "", "Of the gradient before clipping."),
        _m("lr", "", "Learning rate of the step, after warm-up and loss.lr_by_ess."),
        _m("entropy", "nats", "Of the policy, mean over the tokens in the loss."),
        _m("reference_kl", "nats", "k3 of the policy against the reference model, mean over tokens; only where there is one."),
        _m("reward_kl", "nats", "k1 of the same, mean over tokens, with loss.kl_reward_coef: what the penalty weighs. May be negative."),
        _m("reward_penalty", "", "What loss.kl_reward_coef takes off a rollout's reward, mean over the rollouts with a token in the loss."),
    ),
    "The critic, with trainer.advantage gae": (
        _m("value_loss", "", "Half the squared difference of value and return, mean over the tokens in the loss, before the step."),
        _m("value_mean", "", "Value of a token before the step, mean over the tokens in the loss."),
        _m("return_mean", "", "What values are to become, mean over the same tokens."),
        _m("value_explained_variance", "", "1 - Var(return - value) / Var(return): 1 foresees all, 0 nothing; not there where all returns are equal."),
        _m("value_clip_fraction", "ratio", "Share of tokens whose gradient critic.value_clip took in the last pass."),
        _m("critic_grad_norm", "", "Of the critic's gradient before clipping, in the last pass."),
        _m("critic_lr", "", "Learning rate of the critic's step, after warm-up."),
        _m("critic_only", "", "1 in critic.warmup_steps: the policy rests, and its figures are those of a step without tokens. 0 after."),
    ),
    "How far the policy is from the one that sampled (r: ratio of the two at a token)": (
        _m("ratio_dev", "", "Mean of |r - 1|."),
        _m("ratio_mean", "", "Mean of r; 1 in expectation.", ages=True),
        _m("ratio_max", "", "Greatest r.", ages=True),
        _m("ratio_outside", "ratio", "Share of tokens with r below 1/2 or above 2.", ages=True),
        _m("mismatch_kl_k1", "nats", "KL of the sampling policy against the trained one, as the mean of -log r; may be negative.", ages=True),
        _m("mismatch_kl_k3", "nats", "The same as the mean of r - 1 - log r: never negative, less noise.", ages=True),
        _m("ess", "ratio", "Effective sample size over the number of rollouts, each weighted by the ratio of the whole rollout."),
        _m("ess_tokens", "ratio", "Effective sample size over the number of tokens, each weighted by r.", ages=True),
        _m("logprob_diff_mean", "nats", "Mean of |log r|. At age 0 both have the same weights: the difference of trainer and engine.", ages=True),
        _m("logprob_diff_p99", "nats", "Its 99th percentile, up to 14 % too great.", ages=True),
    ),
    "Time": (
        _m("seconds", "s", "From opening the step to its end."),
        _m("wait_s", "s", "Of these, without work for the model."),
        _m("train_s", "s", "Of these, in the model."),
        _m("snapshot_s", "s", "Of train_s, copying the weights for publishing."),
        _m("digest_s", "s", "Of train_s, telling what the weights are known by."),
        _m(
            "checkpoint_blocked_s",
            "s",
            "After the step, training waited for a checkpoint: the copy to host memory, and one under way where payloads must be freed.",
        ),
    ),
}

_TRACKERS = {
    "tensorboard": "Event files in `tensorboard` of the run's folder, or by run in `trackers.tensorboard_dir`. A resume voids the steps it trains again.",
    "wandb": "`wandb` in the run's folder, for `wandb sync`; with `trackers.wandb_mode` online to the server. Every life of a run has the same id.",
}
METRICS: dict[str, Metric] = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}


def metric_of(name: str) -> Metric | None:
    """What `name` is; None: no figure of ours."""
    base, slash, age = name.partition("/age_")
    found = METRICS.get(base)
    if found is None or not slash:
        return found
    return found if found.ages and age in {bucket.name for bucket in AGE_BUCKETS} else None


def page() -> str:
    """The text of `docs/metrics.md`."""
    ages = ", ".join(f"`{by_age('', bucket)}`" for bucket in AGE_BUCKETS)
    lines = [
        "# What a step tells",
        "",
        "A line of `metrics.jsonl`, and its numbers in the trackers that `trackers.names` lists. This page is written by `python -m consumer.metric_names`.",
        f"With *by age* there is one more for the tokens of each staleness that occurs: the name with {ages} at its end.",
        "",
        "| tracker | installed by | writes |",
        "| --- | --- | --- |",
        *(f"| `{name}` | `pip install 'rollstream[{name}]'` | {written} |" for name, written in _TRACKERS.items()),
        "",
        "A tracker that fails, hangs or falls 1000 steps behind is left alone, which the log says once. Training does not wait for one.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{one.name}` | {one.unit} | {one.meaning.replace('|', chr(92) + '|')}{' *By age.*' if one.ages else ''} |" for one in metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
