"""The [loss] section. No torch here: what is wrong with it is said before torch is imported."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from protocol.config import Section

LossKind: TypeAlias = Literal[
    "ppo_clip",
    "trust_region",
    "decoupled_ppo",
    "truncated_is",
    "masked_is",
    "icepop",
    "cispo",
    "topr",
    "gspo",
    "opsm",
    "m2po",
    "sft",
    "distillation",
]
KlKind: TypeAlias = Literal["k1", "k2", "k3", "low_variance", "unbiased"]
IsLevel: TypeAlias = Literal["token", "sequence", "geometric"]
Normaliser: TypeAlias = Literal["token_mean", "rollout_mean", "constant"]


class LossConfig(Section):
    """Options that the chosen kind does not read change nothing, so `--set loss.kind=...` alone compares two losses. docs/losses.md explains each."""

    kind: LossKind = Field("ppo_clip", description="Policy loss. trust_region is the equal alternative to the default; docs/losses.md says when to use which.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="ppo_clip, decoupled_ppo, icepop, opsm: the ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.28, ge=0, description="Same: and above 1 + clip_high.")
    dual_clip: float = Field(0.0, ge=0, description="ppo_clip: bound of the ratio where the advantage is negative, above 1 (3 is usual); 0: none.")
    proximal: Literal["recompute", "loglinear"] = Field(
        "recompute",
        description="decoupled_ppo: the policy to stay near. recompute: that of the start of the step; loglinear: between behaviour and target, by age.",
    )
    tv_threshold: float = Field(
        0.2, gt=0, le=1, description="trust_region: a token whose probability moved further than this the way it should leaves the loss."
    )
    trust_pull: float = Field(1e-3, ge=0, description="trust_region: weight of the squared log-ratio, which pulls towards the behaviour policy.")
    ratio_cap: float = Field(
        5.0, ge=0, description="trust_region, decoupled_ppo, truncated_is, cispo, distillation: upper bound of the importance weight; 0: none."
    )
    ratio_floor: float = Field(0.0, ge=0, description="cispo: lower bound of the importance weight; 0: none.")
    is_level: IsLevel = Field(
        "token", description="truncated_is, masked_is: the ratio of the token, of the whole rollout (product), or its geometric mean over the rollout."
    )
    mask_low: float = Field(0.5, ge=0, description="masked_is, icepop: tokens (or rollouts) with a ratio below leave the loss.")
    mask_high: float = Field(5.0, gt=0, description="Same: and above.")
    gspo_clip_low: float = Field(3e-4, ge=0, lt=1, description="gspo: the geometric mean of a rollout's ratios is clipped below 1 - gspo_clip_low.")
    gspo_clip_high: float = Field(4e-4, ge=0, description="gspo: and above 1 + gspo_clip_high.")
    opsm_threshold: float = Field(
        1e-4, ge=0, description="opsm: a rollout with negative advantage leaves the loss where its mean log(behaviour / target) is higher."
    )
    m2_threshold: float = Field(0.04, gt=0, description="m2po: upper bound of the mean squared log-ratio of a rollout's tokens that stay in the loss.")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the divergence from the reference model, which is loaded only if above 0.")
    kl_kind: KlKind = Field("low_variance", description="Its estimate at a sampled token. unbiased has the right gradient also off policy.")
    kl_reward_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the divergence from the reference model in the reward of each token instead, for trainer.advantage gae and reinforce_pp_tokens.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    normaliser: Normaliser = Field(
        "token_mean",
        description="What a step's sum is divided by. token_mean: its tokens; rollout_mean: each rollout by its tokens, then by the rollouts; "
        "constant: the rollouts times rollout.max_new_tokens.",
    )
    lr_by_ess: bool = Field(False, description="Multiply the learning rate by the root of the effective share of samples, which falls with staleness.")

    @model_validator(mode="after")
    def _options_fit(self) -> LossConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip:g} would cut ratios that nothing is wrong with: set it above 1 (3 is usual), or 0 for none")
        if self.ratio_cap and self.kind == "cispo" and self.ratio_floor >= self.ratio_cap:
            raise ValueError(f"ratio_floor {self.ratio_floor:g} is not below ratio_cap {self.ratio_cap:g}: every weight would be the same; lower ratio_floor")
        if self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low {self.mask_low:g} is not below mask_high {self.mask_high:g}: nothing would be left to train on; lower mask_low")
        if self.kind in {"masked_is", "icepop"} and not self.mask_low <= 1 <= self.mask_high:
            raise ValueError(
                f"mask_low {self.mask_low:g} and mask_high {self.mask_high:g} leave out a ratio of 1, which is on-policy: set mask_low to at most 1 and "
                "mask_high to at least 1"
            )
        if self.kind == "masked_is" and self.is_level == "geometric" and not {"mask_low", "mask_high"} <= self.model_fields_set:
            raise ValueError(
                "is_level geometric needs mask_low and mask_high of its own: a mean over a rollout stays near 1, so the bounds of single tokens mask "
                "nothing; set both, for example 0.999 and 1.002"
            )
        if self.kl_coef and self.kl_reward_coef:
            raise ValueError(
                f"kl_coef {self.kl_coef:g} and kl_reward_coef {self.kl_reward_coef:g}: the divergence from the reference model would count twice; set one of "
                "them to 0"
            )
        if self.lr_by_ess and self.kind == "sft":
            raise ValueError("lr_by_ess goes by importance weights, and kind sft has none: set lr_by_ess = false, or another kind")
        return self

    @property
    def loads_reference(self) -> bool:
        """There must be a reference model."""
        return self.needs_reference or self.kl_reward_coef > 0

    @property
    def needs_reference(self) -> bool:
        """`Terms.reference` must be there."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """`Terms.entropy` must be there, with its gradient."""
        return self.entropy_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """`Terms.teacher` must be there."""
        return self.kind == "distillation"
