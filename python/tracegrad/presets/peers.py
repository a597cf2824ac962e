"""What other trainers do by default, and under their own names, as values: to compare with, or to move from.

The gradient is theirs for the same advantages; PARITY.md says how that was shown.
"""

from dataclasses import replace

from tracegrad.algebra import (
    Clamp,
    Clip,
    Gate,
    Importance,
    Level,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Weight,
    Window,
)

_OLD = Ratio("theta", "old")
_ROLLOUT = Ratio("theta", "rollout")
_MISMATCH = Ratio("old", "rollout")
_PRODUCT = Level("trace", "sum")
_GEOMETRIC = Level("trace", "mean")

TRL_DEFAULT = Objective(
    Clip(0.2, 0.2), _OLD, weights=(Weight(_MISMATCH, _PRODUCT, Window(0.0, 3.0)),), reduce=Reduce("token")
)
"""TRL 1.16 GRPOConfig with vLLM: loss_type "dapo", sequence_mask at 3.0: traces whose product of old/rollout exceeds 3
weigh 0.

Use with group_mean(scale="std", ddof=1). Paper: Yu et al. 2025, arXiv 2503.14476. The product shrinks or explodes with
length: long traces are the first to go. TRL takes an unknown rollout logprob as a ratio of 1 (missing="neutral").
"""

SKYRL_849 = Objective(
    Clip(0.2, 0.2),
    _OLD,
    weights=(Weight(_MISMATCH, shape=Clamp(0.0, 2.0)),),
    gates=(
        Gate(_MISMATCH, low=1e-4, high=100.0, scope="trace"),
        Gate(_MISMATCH, level=_GEOMETRIC, low=0.99, high=1.01, over="kept"),
    ),
    reduce=Reduce("token"),
)
"""SkyRL's off-policy correction of PR 849 and after: outlier veto, token TIS at 2, geometric mask, on its regular loss.

Paper: as TIS and GEO_RS. The denominator counts the terms before the masks, as SkyRL scales advantages first.
"""

ART_467 = Objective(PolicyGradient(), weights=(Weight(_ROLLOUT, shape=Clamp(0.0, 5.0)),), reduce=Reduce("token"))
"""ART's default loss: -clip(theta/rollout, 0, 5) A log theta, the loss whose three metrics PR 467 asked for.

Use with group_mean(scale="std", ddof=0, eps=1e-6). Paper: MiniMax-M1, arXiv 2506.13585. ART takes an unknown logprob as
a ratio of 1, and divides by hidden means of its weights; both are refused here.
"""

PRIME_RL_DEFAULT = Objective(
    Importance(),
    _ROLLOUT,
    gates=(Gate(_ROLLOUT, "dprob", high=0.2, when="A>0"), Gate(_ROLLOUT, "dprob", low=-0.2, when="A<=0")),
    penalties=(Penalty(_ROLLOUT, "square", 1e-3, gated=False, weighted=False),),
    reduce=Reduce("token"),
)
"""prime-rl's default: -A theta/rollout within a total variation of 0.2 in A's direction, plus 1e-3 (log ratio)^2.

Use with group_mean(scale="none"). Paper: arXiv 2602.04879; the square: Kimi K2.5, arXiv 2602.02276. The ratio is not
clamped there.
"""

SLIME_MIS = Objective(
    Clip(0.2, 0.28),
    _OLD,
    weights=(Weight(_MISMATCH, shape=Clamp(0.5, 2.0)),),
    gates=(Gate(_MISMATCH, low=1e-4, scope="trace"),),
    reduce=Reduce("trace", "mean"),
)
"""slime's train_infer_mismatch_helper: token weights truncated to [1/2, 2], traces with a ratio under 1e-4 vetoed.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Denominators stay those of all terms.
"""

_VANILLA = Clip(0.2, 0.2, dual=3.0)
_VERL_MEAN = Reduce("token", denominator="kept")
_TOKEN_TIS = Weight(_MISMATCH, shape=Clamp(0.0, 2.0))
_TRACE_TIS = Weight(_MISMATCH, _PRODUCT, Clamp(0.0, 2.0))
_GEO = Gate(_MISMATCH, level=_GEOMETRIC, low=1 / 1.001, high=1 / 0.999)
_K3 = Gate(_MISMATCH, "k3", _GEOMETRIC, high=0.01)

VERL_DEFAULT = Objective(_VANILLA, _OLD, reduce=_VERL_MEAN)
"""verl's vanilla loss as its configuration ships: dual clip, token-mean, no rollout correction (`disabled`).

Use with group_mean(scale="std", ddof=1, eps=1e-6). Paper: Schulman et al. 2017, arXiv 1707.06347. verl counts the terms
that rejection left; with global batch information it counts all.
"""

VERL_DECOUPLED_TOKEN_IS = replace(VERL_DEFAULT, weights=(_TOKEN_TIS,))
"""verl's decoupled_token_is: min(old/rollout, 2) at each token. Paper: Yao et al. 2025 (TIS)."""

VERL_DECOUPLED_SEQ_IS = replace(VERL_DEFAULT, weights=(_TRACE_TIS,))
"""verl's decoupled_seq_is, its dataclass default: min(product of old/rollout, 2).

Paper: "When Speed Kills Stability".
"""

VERL_DECOUPLED_TOKEN_ICEPOP = replace(VERL_DEFAULT, weights=(Weight(_MISMATCH, shape=Window(0.5, 5.0)),))
"""verl's decoupled_token_icepop, "0.5_5.0". Paper: Ring-1T, arXiv 2510.18855."""

VERL_DECOUPLED_SEQ_IS_RS = replace(
    VERL_DECOUPLED_SEQ_IS, gates=(Gate(_MISMATCH, level=_PRODUCT, low=1 / 2.0, high=1 / 0.5),)
)
"""verl's decoupled_seq_is_rs: the product's weight, and rejection by the product in [0.5, 2].

Paper: "When Speed Kills Stability". verl's bounds are of rollout/old; here they are inverted.
"""

VERL_DECOUPLED_GEO_RS = replace(VERL_DEFAULT, gates=(_GEO,))
"""verl's decoupled_geo_rs, "0.999_1.001" on rollout/old. Paper: "When Speed Kills Stability"."""

VERL_DECOUPLED_GEO_RS_SEQ_TIS = replace(VERL_DECOUPLED_GEO_RS, weights=(_TRACE_TIS,))
"""verl's decoupled_geo_rs_seq_tis. Paper: "When Speed Kills Stability"."""

VERL_DECOUPLED_GEO_RS_TOKEN_TIS = replace(VERL_DECOUPLED_GEO_RS, weights=(_TOKEN_TIS,))
"""verl's decoupled_geo_rs_token_tis. Paper: "When Speed Kills Stability"."""

VERL_DECOUPLED_K3_RS = replace(VERL_DEFAULT, gates=(_K3,))
"""verl's decoupled_k3_rs: traces with a mean k3 of old/rollout above 0.01 are rejected. Paper: Schulman 2020 (k3)."""

VERL_DECOUPLED_K3_RS_SEQ_TIS = replace(VERL_DECOUPLED_K3_RS, weights=(_TRACE_TIS,))
"""verl's decoupled_k3_rs_seq_tis. Paper: Schulman 2020 (k3)."""

VERL_DECOUPLED_K3_RS_TOKEN_TIS = replace(VERL_DECOUPLED_K3_RS, weights=(_TOKEN_TIS,))
"""verl's decoupled_k3_rs_token_tis. Paper: Schulman 2020 (k3)."""

VERL_BYPASS_PPO_CLIP = Objective(_VANILLA, _ROLLOUT, reduce=Reduce("token"))
"""verl's bypass_ppo_clip: the clip of theta/rollout. Paper: Schulman et al. 2017, arXiv 1707.06347.

In bypass mode verl rejects by the policy being trained, inside the loss, and divides by the terms of the batch.
"""

_GEO_THETA = Gate(_ROLLOUT, level=_GEOMETRIC, low=1 / 1.001, high=1 / 0.999)

VERL_BYPASS_PPO_CLIP_GEO_RS = replace(VERL_BYPASS_PPO_CLIP, gates=(_GEO_THETA,))
"""verl's bypass_ppo_clip_geo_rs, rejection by theta/rollout. Paper: "When Speed Kills Stability"."""

VERL_BYPASS_PPO_CLIP_K3_RS = replace(VERL_BYPASS_PPO_CLIP, gates=(Gate(_ROLLOUT, "k3", _GEOMETRIC, high=0.01),))
"""verl's bypass_ppo_clip_k3_rs. Paper: Schulman 2020 (k3)."""

VERL_BYPASS_PG_IS = Objective(
    PolicyGradient(), weights=(Weight(_ROLLOUT, _PRODUCT, Clamp(0.0, 2.0)),), reduce=Reduce("token")
)
"""verl's bypass_pg_is: -min(product of theta/rollout, 2) A log theta. Paper: "When Speed Kills Stability"."""

VERL_BYPASS_PG_TOKEN_ICEPOP = Objective(
    PolicyGradient(), weights=(Weight(_ROLLOUT, shape=Window(0.5, 5.0)),), reduce=Reduce("token")
)
"""verl's bypass_pg_token_icepop. Paper: Ring-1T, arXiv 2510.18855."""

VERL_BYPASS_PG_GEO_RS = Objective(PolicyGradient(), gates=(_GEO_THETA,), reduce=Reduce("token"))
"""verl's bypass_pg_geo_rs: -A log theta within the geometric band, no weight. Paper: "When Speed Kills Stability"."""

VERL_BYPASS_PG_GEO_RS_SEQ_TIS = replace(VERL_BYPASS_PG_IS, gates=(_GEO_THETA,))
"""verl's bypass_pg_geo_rs_seq_tis. Paper: "When Speed Kills Stability"."""

VERL_BYPASS_PG_GEO_RS_TOKEN_TIS = replace(VERL_BYPASS_PG_GEO_RS, weights=(Weight(_ROLLOUT, shape=Clamp(0.0, 2.0)),))
"""verl's bypass_pg_geo_rs_token_tis. Paper: "When Speed Kills Stability"."""
