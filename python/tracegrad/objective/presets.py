"""Define the published methods as values of `Objective`, and find one by name.

Use a preset as it is, or change its fields by name: `override(DAPO, "surrogate.high", "0.3")`. On a command line, name
it by its attribute here or by `file.py:NAME` or `module:NAME`, or write the objective as source text.

    >>> from tracegrad.objective import presets
    >>> print(presets.DR_GRPO)
    loss = sum of scale * keep * weight * S
      S = max(-A r, -A clip(r, 0.8, 1.2)); r = theta/old
      weight = clamp(w, 0, 2), w = old/rollout
      scale = 1 / (traces * 1024)
    >>> presets.find("DAPO").surrogate.high, presets.with_kl(presets.GRPO, 0.04).penalties[0].coef
    (0.28, 0.04)
"""

import importlib
from dataclasses import replace
from typing import TypeVar

from tracegrad.config import nearest
from tracegrad.errors import ArgumentError
from tracegrad.objective.objective import Objective, with_beta, with_entropy, with_kl
from tracegrad.objective.penalty import Penalty
from tracegrad.objective.ratio import Aggregation, Ratio, Reduce
from tracegrad.objective.rejection import DropCovariance, Rejection, RejectionBudget, TopCovariance
from tracegrad.objective.serialize import from_source
from tracegrad.objective.surrogate import Clip, FutureClip, GeoClip, Importance, PolicyGradient, Regression, Sigmoid
from tracegrad.objective.weight import Gamma, Identity, Inverse, MaskOutside, Truncate, Weight
from tracegrad.user_code import load_module

__all__ = [
    "A3PO",
    "AIPO",
    "ART_467",
    "ASPO",
    "CISPO",
    "CLIP_COV",
    "DAPO",
    "DAPO_DIRECT",
    "DECOUPLED_PPO",
    "DPPO_KL",
    "DPPO_TV",
    "DRO",
    "DR_GRPO",
    "DR_GRPO_DIRECT",
    "DUAL_CLIP",
    "FIPO",
    "GEO_RS",
    "GLM5",
    "GMPO",
    "GRPO",
    "GRPO_DIRECT",
    "GSPO",
    "GSPO_TOKEN",
    "ICEPOP",
    "KIMI",
    "KL_COV",
    "LUSPO",
    "M2PO",
    "MIS",
    "OAPL",
    "OPSM",
    "PRIME_RL_DEFAULT",
    "SAPO",
    "SEQ_MASK_TIS",
    "SKYRL_849",
    "SLIME_MIS",
    "TIS",
    "TOPR",
    "TOPR_POSITIVE",
    "TRL_DEFAULT",
    "VERL_DEFAULT",
    "VESPO",
    "WEIGHTED_SFT",
    "find",
    "with_beta",
    "with_entropy",
    "with_kl",
]

_OLD, _ROLLOUT, _MISMATCH = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("old", "rollout")
_PRODUCT, _GEOMETRIC = Aggregation("trace", "sum"), Aggregation("trace", "mean")
_TIS = Weight(_MISMATCH, transform=Truncate(0.0, 2.0))
_DPPO_WEIGHT = Weight(_ROLLOUT, transform=Truncate(0.0, 20.0))

# --- GRPO and its relatives: a clipped surrogate on group-relative advantages, which differ by their reduction.
#
# Each is decoupled, theta/old clipped and weighted by the truncated old/rollout (token TIS), and _DIRECT,
# theta/rollout clipped, which needs no pass for old logprobs. Advantages are the caller's: `tracegrad.advantage`.

GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""min(old/rollout, 2) * clip(theta/old), mean over each trace's tokens, then over traces.

Use with group_mean(scale="std", ddof=1). Paper: Shao et al. 2024, arXiv 2402.03300; the weight: Yao et al. 2025 (TIS).
Peers: TRL's loss_type="grpo" with vllm_importance_sampling_mode="token_truncate" and clip_max 2 (its default is
sequence_mask, 3.0); verl's seq-mean-token-mean with rollout_is="token". `with_kl` adds the paper's k3 penalty (0.04),
`with_beta` TRL's.
"""

GRPO_DIRECT = replace(GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as GRPO.

Paper: Shao et al. 2024, arXiv 2402.03300. Peers: verl's bypass mode with ppo_clip, TRL's AsyncGRPO ratio, ART's PPO.
"""

DAPO = Objective(Clip(0.2, 0.28), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""Clip-higher and one mean over all tokens of the step, so that long traces count in full.

Use with group_mean(scale="std", ddof=1). Paper: Yu et al. 2025, arXiv 2503.14476. Peers: TRL's loss_type="dapo" with
epsilon_high 0.28, verl's token-mean. TRL's loss_type="bnpo" takes the mean within each micro-batch, so that its
gradient depends on how the step was split. Dynamic sampling and the overlong penalty belong to data and rewards.
"""

DAPO_DIRECT = replace(DAPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DAPO.

Paper: Yu et al. 2025, arXiv 2503.14476. Peers: slime without recomputed logprobs.
"""

DR_GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "sum", norm=1024.0))
"""The sum over a trace's tokens over a constant, then the mean over traces: no length bias.

Use with group_mean(scale="none"). Paper: Liu et al. 2025, arXiv 2503.20783. Peers: `reduce.norm` is the generation
budget in the paper, TRL's max_completion_length, verl's loss_scale_factor (seq-mean-token-sum-norm); it only scales the
loss.
"""

DR_GRPO_DIRECT = replace(DR_GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DR_GRPO.

Paper: Liu et al. 2025, arXiv 2503.20783.
"""

LUSPO = Objective(
    Clip(3e-4, 4e-4, level=Aggregation("trace", "mean")), _OLD, weights=(_TIS,), reduce=Reduce("trace", "sum", norm=1.0)
)
"""GSPO's trace ratio, each trace counted by its length: the sum over its tokens, then the mean over traces.

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2602.05261. Peers: TRL's loss_type="luspo" with
importance_sampling_level="sequence".
"""

DUAL_CLIP = Objective(Clip(0.2, 0.2, dual=3.0), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""The clip with a floor for bad tokens: for A < 0 the loss is at most 3 |A|.

Paper: Ye et al. 2019, arXiv 1912.09729. Peers: verl's vanilla (clip_ratio_c 3), SkyRL's dual_clip, ROLL (1 + 2 * clip).
TRL's `delta` bounds the same branch and is `Clip(delta=...)`.
"""

# --- Surrogates on the ratio of a trace: what papers call sequence-level policy optimisation.
#
# Their ratios are geometric means (`Aggregation("trace", "mean")`); a product is `Aggregation("trace", "sum")`.
# Papers and peers call either the "sequence ratio".

GSPO = Objective(
    Clip(3e-4, 4e-4, level=Aggregation("trace", "mean")), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean")
)
"""clip of (product of theta/old)^(1 / length), with gradient through the mean.

Use with group_mean(scale="std", ddof=1). Paper: Zheng et al. 2025, arXiv 2507.18071, eq. 5, bounds of section 5.1.
Peers: TRL's importance_sampling_level="sequence" with loss_type="grpo"; verl and SkyRL pass the gradient through each
token's own logprob (GSPO_TOKEN), and leave eps at 0.2 unless told.
"""

GSPO_TOKEN = replace(GSPO, surrogate=Clip(3e-4, 4e-4, level=Aggregation("trace", "mean", "token")))
"""GSPO's ratio with the gradient through each token's own logprob, which allows advantages per token.

Paper: Zheng et al. 2025, arXiv 2507.18071, eq. 13. Peers: verl's gspo (log-ratio held below 10), SkyRL's gspo. With one
advantage per trace its gradient equals GSPO's under Reduce("trace", "mean").
"""

FIPO = Objective(FutureClip(0.2, 0.28, 10.0, 32.0, 1.2), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""DAPO's clip times f: up to 1.2 where what follows a token has become likelier, with a half-life of 32 tokens.

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2603.19835, weights clipped above alone, as for its 32B model
(its 7B model has both sides). Peers: ms-swift's loss_type="fipo" with delta 10; its own code, a fork of verl, which
also drops traces with more than one token beyond `dual`, and counts tool results as places.
"""

GMPO = Objective(GeoClip(0.4, 0.4), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""-A times the geometric mean of ratios clipped token by token.

Paper: Zhao et al. 2025, arXiv 2507.20673, eq. 4. Peers: verl's geo_mean (clip_ratio as bounds of the log-ratio), TRL's
experimental GMPOTrainer. verl's mean counts rows without a token, and it averages truncated weights geometrically; here
empty traces do not count and each token has its own weight.
"""

# --- Policy gradients under a weight of the policy being trained: nothing is clipped away, everything is bounded.
#
# -weight(theta/x) A log theta. CISPO and SAPO keep old apart from rollout; the others take theta/rollout in one.

CISPO = Objective(PolicyGradient(), weights=(_TIS, Weight(_OLD, transform=Truncate(0.0, 5.0))), reduce=Reduce("token"))
"""-min(theta/old, 5) A log theta: the weight is truncated, the gradient is never clipped.

Use with group_mean(scale="std", ddof=1). Paper: MiniMax-M1, arXiv 2506.13585, eq. 4; the bound: ScaleRL, arXiv
2510.13786. Peers: TRL's cispo takes epsilon_high as the bound itself (5.0, its default of 0.2 is no bound for it);
SkyRL's cispo_eps_clip_low 1, high 4 and ART's epsilon 1, epsilon_high 4 are distances from 1: [0, 5]. verl's default of
0.2 on both sides is not the paper's, which has no lower bound.
"""

ASPO = Objective(
    PolicyGradient(),
    weights=(
        _TIS,
        Weight(_OLD, transform=Inverse(3.0), when="A>0"),
        Weight(_OLD, transform=Truncate(0.0, 3.0), when="A<=0"),
    ),
    rejections=(Rejection(_OLD, high=1.2, when="A>0"), Rejection(_OLD, low=0.8, when="A<0")),
    reduce=Reduce("token"),
)
"""-w A log theta within PPO's clip, w = min(theta/old, 3) for bad tokens, for good ones turned over: min(old/theta, 3).

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2510.06062: a good token that is still unlikely gains more.
Peers: its code (Archer2.0), which widens the bounds from 0.2 to 0.4 by a token's entropy. Tokens beyond a bound are
dropped here: same gradient, no constant in the loss.
"""

SAPO = Objective(Sigmoid(1.0, 1.05), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""-A (4 / tau) sigmoid(tau (theta/old - 1)): a soft clip, tighter for bad tokens.

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2511.20347, eq. 5. Peers: TRL's sapo, verl's sapo (always
seq-mean-token-mean), SkyRL's and AReaL's.
"""

VESPO = Objective(
    PolicyGradient(),
    weights=(
        Weight(_ROLLOUT, _PRODUCT, Gamma(2.0, 3.0), when="A>=0"),
        Weight(_ROLLOUT, _PRODUCT, Gamma(3.0, 2.0), when="A<0"),
    ),
    reduce=Reduce("token"),
)
"""-phi(W) A log theta with W the product of theta/rollout over the trace and phi(W) = e^b W^a e^(-b W).

Paper: arXiv 2602.10693, eq. 10. Peers: TRL's vespo takes W from theta/old times the truncated old/rollout; that is
Weight(theta/old, ..., absorbs=True) after a token weight.
"""

GLM5 = Objective(
    PolicyGradient(), weights=(Weight(_ROLLOUT, transform=MaskOutside(0.8, 1.2, strict=True)),), reduce=Reduce("token")
)
"""-r 1[0.8 < r < 1.2] A log theta with r = theta/rollout: a double-sided mask, bounds excluded.

Paper: GLM-5, arXiv 2602.15763. Peers: SkyRL's rollout_is. For asynchronous agents, where old is not kept.
"""

AIPO = Objective(PolicyGradient(), weights=(Weight(_ROLLOUT, transform=Truncate(0.0, 2.0)),), reduce=Reduce("token"))
"""-min(theta/rollout, 2) A log theta: truncated importance sampling from the recorded policy.

Paper: LlamaRL, arXiv 2505.24034, eq. 3 (bounds of 2 to 10). Peers: earlier prime-rl; verl's bypass reinforce.
"""

TOPR = Objective(
    PolicyGradient(), weights=(Weight(_ROLLOUT, transform=Truncate(0.0, 1.0), when="A<=0"),), reduce=Reduce("token")
)
"""Good tokens at weight 1, bad ones at min(theta/rollout, 1): tapered, so that pushing down ends by itself.

Paper: Le Roux et al. 2025, arXiv 2503.14286, eq. 8. Peers: ROLL's topr, per token; the paper tapers traces
(`weights.0.level`). Built for records of any age.
"""

KIMI = Objective(
    PolicyGradient(), penalties=(Penalty(_ROLLOUT, "k2", 0.1, masked=True, weighted=False),), reduce=Reduce("token")
)
"""-A log theta + (tau / 2) (log theta/rollout)^2: a quadratic leash to the recorded policy, tau 0.1.

Paper: Kimi k1.5, arXiv 2501.12599, eq. 3. Peers: ROLL's kimi15, per token. The gradient is -(A - tau l).
"""

DRO = Objective(
    PolicyGradient(), penalties=(Penalty(_ROLLOUT, "k2", 0.05, masked=True, weighted=False),), reduce=Reduce("token")
)
"""-(A log theta - (beta / 2) (log theta/rollout)^2).

Paper: Richemond et al. 2024, arXiv 2405.19107, eq. 5. Peers: verl's dro uses theta/old and requires dro_beta; Tinker's
dro sums over tokens (`Reduce("constant", norm=1.0)`).
"""

# --- Trust regions by rejections on the policy being trained: tokens or traces beyond them are dropped, not clipped.

OPSM = replace(
    GRPO, rejections=(Rejection(Ratio("rollout", "theta"), "k1", Aggregation("trace", "mean"), high=0.5, when="A<0"),)
)
"""GRPO without the bad traces whose mean of log rollout/theta exceeds 0.5.

Paper: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (off-policy sequence masking). Peers: TRL's
off_policy_mask_threshold, slime's --opsm-delta (theta/old, 1e-4), ms-swift. TRL counts an unknown rollout logprob as a
difference of 0, here it stands outside the mean.
"""

DPPO_TV = Objective(
    PolicyGradient(),
    weights=(_DPPO_WEIGHT,),
    rejections=(
        Rejection(_ROLLOUT, "dprob", high=0.2, when="A>0"),
        Rejection(_ROLLOUT, "dprob", low=-0.2, when="A<=0"),
    ),
    reduce=Reduce("token"),
)
"""-min(theta/rollout, 20) A log theta, dropped where the probability has moved by more than 0.2 in A's direction.

Paper: arXiv 2602.04879 (binary total variation). Peers: verl's dppo_tv (clip_ratio_c 20 in its docstring, 3 by its
config), SkyRL's dppo binary_tv with -r A in place of the weight, prime-rl's default. A = 0 goes to the low branch.
"""

DPPO_KL = replace(
    DPPO_TV,
    rejections=(
        Rejection(_ROLLOUT, "binary_kl", high=0.05, when="A>0"),
        Rejection(_ROLLOUT, "binary_kl", low=-0.05, when="A<=0"),
    ),
)
"""DPPO_TV with the binary KL of the recorded from the trained probability, bound 0.05, in A's direction.

Paper: arXiv 2602.04879 (binary KL). Peers: verl's dppo_kl, SkyRL's dppo binary_kl.
"""

CLIP_COV = Objective(
    Clip(0.2, 0.2), _OLD, rejections=(DropCovariance(2e-4, 1.0, 5.0, "microbatch"),), reduce=Reduce("token")
)
"""PPO's clip, and a random 0.02 % of the tokens with a high covariance of advantage and logprob dropped.

Paper: Cui et al. 2025, arXiv 2505.22617. Peers: verl's and SkyRL's clip_cov. Per micro-batch, as theirs.
"""

KL_COV = Objective(
    Importance(),
    _OLD,
    penalties=(Penalty(_OLD, "abs", 1.0, masked=True, weighted=False, where=TopCovariance(2e-4, "microbatch")),),
    reduce=Reduce("token"),
)
"""-A r, and |log theta/old| paid on the 0.02 % of tokens with the highest covariance of advantage and logprob.

Paper: Cui et al. 2025, arXiv 2505.22617. Peers: verl's kl_cov (ppo_kl_coef 0.1 by its config, 1 in its docstring),
SkyRL's (kl_cov_frac 0.2). Per micro-batch, as theirs.
"""

# --- Corrections of the mismatch between the recorded policy and the recomputed one, on PPO's clip of theta/old.

TIS = Objective(
    Clip(0.2, 0.2), _OLD, weights=(Weight(_MISMATCH, transform=Truncate(0.0, 2.0)),), reduce=Reduce("token")
)
"""min(old/rollout, 2) at each token: truncated importance sampling.

Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Peers: all: verl
rollout_is="token", TRL token_truncate, SkyRL tis_ratio_type="token", slime --use-tis. OpenRLHF and NeMo-RL truncate
below, too: Truncate(0.5, 5).
"""

MIS = replace(TIS, weights=(Weight(_MISMATCH, transform=MaskOutside(0.0, 2.0)),))
"""old/rollout if it is at most 2, else 0: masked importance sampling.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Peers: TRL token_mask, slime's mis mode="mask".
"""

ICEPOP = replace(TIS, weights=(Weight(_MISMATCH, transform=MaskOutside(0.5, 5.0)),))
"""old/rollout if it is in [0.5, 5], else 0: mismatched tokens do not train.

Paper: Ring-1T, arXiv 2510.18855. Peers: verl "0.5_5.0", slime, NeMo-RL, OpenRLHF. Denominators stay those of all
tokens; SkyRL's token_mask with the same bounds keeps weight and mask separate.
"""

GEO_RS = replace(TIS, weights=(), rejections=(Rejection(_MISMATCH, level=_GEOMETRIC, low=0.999, high=1.001),))
"""Traces are rejected unless the geometric mean of old/rollout is in [0.999, 1.001]; no weight.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Peers: verl's decoupled_geo_rs (its k1 is -log, so its bounds
are the inverse of these; at 0.1 % they agree to 1e-6), SkyRL's geometric mask (0.99, 1.01).
"""

SEQ_MASK_TIS = replace(
    TIS,
    weights=(Weight(_MISMATCH, transform=Truncate(0.0, 5.0)),),
    rejections=(Rejection(_MISMATCH, level=_GEOMETRIC, low=0.999, high=1.002),),
)
"""Traces are rejected by the geometric mean of old/rollout; kept tokens carry their own ratio, at most 5.

Paper: as NeMo-RL and OpenRLHF name it. Peers: NeMo-RL's seq-mask-tis with [0.999, 1.002], OpenRLHF's. Both leave the
kept tokens' ratios as they are; the mean of a trace may be 1 with a ratio of any size in it, and one such token would
be the whole step (OpenRLHF#1295, whose fix truncates them at the bound of its tis, 5). Theirs is `Identity()` in place
of the clamp.
"""

M2PO = replace(
    TIS,
    weights=(Weight(_MISMATCH, transform=Identity()),),
    rejections=(RejectionBudget(_MISMATCH, "square", 0.04, quadrants="active"),),
)
"""Of the tokens that an update moves further away, drops the largest (log old/rollout)^2 until their mean is 0.04.

An update moves a token further away if A > 0 and its ratio is above 1, or A < 0 and its ratio is below 1. The mean is
over the kept ones of these in the step; all other tokens stay. Ties stay or fall together; the smallest always stays.

Paper: arXiv 2510.01161, final version (ICLR 2026), Algorithm 1. Peers: Trinity-RFT#616; the authors' code finds its
threshold over the same tokens. AReaL's m2_threshold is the first version, over all tokens, and drops more:
`RejectionBudget(old/rollout, "square", 0.04)`.
"""

DECOUPLED_PPO = replace(TIS, weights=(Weight(_MISMATCH, transform=Identity()),))
"""old/rollout, untruncated, times PPO's clip of theta/old.

Paper: Hilton et al. 2021, arXiv 2110.00641, eq. 5. Peers: AReaL (which drops tokens with a ratio above 5:
`Rejection(old/rollout, high=5)`).
"""

A3PO = replace(
    DECOUPLED_PPO,
    ratio=Ratio("theta", "proximal"),
    weights=(Weight(Ratio("proximal", "rollout"), transform=Identity()),),
)
"""DECOUPLED_PPO with old interpolated between the recorded and the trained policy: no forward pass for old.

Use with `correction.proximal_alpha`, from the policy version of each token. Paper: A-3PO, arXiv 2512.06547. Peers:
AReaL's prox_logp_method="loglinear".
"""

# --- For records of any age: regression on the advantage; for records without logprobs: objectives that take no ratio.
#
# Those without a ratio correct for nothing, and claim nothing.

OAPL = Objective(Regression(1e-3), Ratio("theta", "rollout"), reduce=Reduce("trace", "mean"))
"""(beta * sum over the trace of log theta/rollout - A)^2: a regression whose optimum needs no importance ratio.

Use with `advantage.a_star`, R - V* with V* = b log mean exp(R / b) over the group. Paper: OAPL, arXiv 2602.19362;
A*-PO, arXiv 2505.20686, eq. 5. Peers: TRL's experimental a2po (beta 1e-3, b 0.5; against the reference model).
"""

WEIGHTED_SFT = Objective(PolicyGradient(), reduce=Reduce("token"))
"""-A log theta, mean over all tokens: fine-tuning weighted by the advantage; needs no logprob.

With advantages of at least 0 (rewards, or 1 for the good traces: rejection-sampling fine-tuning) it is a weighted
likelihood and safe to repeat. A negative advantage pushes a logprob down without bound. The first step of it on fresh
on-policy traces is REINFORCE. Paper: Williams 1992. Peers: verl's gpg loss, everyone's supervised trainer.
"""

TOPR_POSITIVE = Objective(PolicyGradient("A>0"), reduce=Reduce("token"))
"""The good half of TOPR: -A log theta where A > 0, nothing elsewhere; needs no logprob and is safe with baselines.

TOPR tapers bad tokens by theta/rollout, which records without logprobs cannot give: they are left out, and counted in
the denominator. Paper: Le Roux et al. 2025, arXiv 2503.14286, with the negative set left out. Peers: ROLL with negative
weight 0.
"""

# --- What other trainers do by default, and under their own names, as values: to compare with, or to move from.
#
# The gradient is theirs for the same advantages; PARITY.md shows how that was tested.

TRL_DEFAULT = Objective(
    Clip(0.2, 0.2), _OLD, weights=(Weight(_MISMATCH, _PRODUCT, MaskOutside(0.0, 3.0)),), reduce=Reduce("token")
)
"""TRL 1.16 GRPOConfig with vLLM: loss_type "dapo", sequence_mask at 3.0: traces whose product of old/rollout exceeds 3
weigh 0.

Use with group_mean(scale="std", ddof=1). Paper: Yu et al. 2025, arXiv 2503.14476. The product shrinks or explodes with
length: long traces are the first to go. TRL takes an unknown rollout logprob as a ratio of 1
(missing_logprobs="ratio_one").
"""

SKYRL_849 = Objective(
    Clip(0.2, 0.2),
    _OLD,
    weights=(Weight(_MISMATCH, transform=Truncate(0.0, 2.0)),),
    rejections=(
        Rejection(_MISMATCH, low=1e-4, high=100.0, drops="trace"),
        Rejection(_MISMATCH, level=_GEOMETRIC, low=0.99, high=1.01, terms="kept"),
    ),
    reduce=Reduce("token"),
)
"""SkyRL's off-policy correction of PR 849 and after: outlier veto, token TIS at 2, geometric mask, on its regular loss.

Paper: as TIS and GEO_RS. The denominator counts the tokens before the masks, as SkyRL scales advantages first.
"""

ART_467 = Objective(PolicyGradient(), weights=(Weight(_ROLLOUT, transform=Truncate(0.0, 5.0)),), reduce=Reduce("token"))
"""ART's default loss: -clip(theta/rollout, 0, 5) A log theta, the loss whose three metrics PR 467 asked for.

Use with group_mean(scale="std", ddof=0, eps=1e-6). Paper: MiniMax-M1, arXiv 2506.13585. ART takes an unknown logprob as
a ratio of 1, and divides by hidden means of its weights; both are refused here.
"""

PRIME_RL_DEFAULT = Objective(
    Importance(),
    _ROLLOUT,
    rejections=(
        Rejection(_ROLLOUT, "dprob", high=0.2, when="A>0"),
        Rejection(_ROLLOUT, "dprob", low=-0.2, when="A<=0"),
    ),
    penalties=(Penalty(_ROLLOUT, "square", 1e-3, masked=False, weighted=False),),
    reduce=Reduce("token"),
)
"""prime-rl's default: -A theta/rollout within a total variation of 0.2 in A's direction, plus 1e-3 (log ratio)^2.

Use with group_mean(scale="none"). Paper: arXiv 2602.04879; the square: Kimi K2.5, arXiv 2602.02276. The ratio is not
clamped there.
"""

SLIME_MIS = Objective(
    Clip(0.2, 0.28),
    _OLD,
    weights=(Weight(_MISMATCH, transform=Truncate(0.5, 2.0)),),
    rejections=(Rejection(_MISMATCH, low=1e-4, drops="trace"),),
    reduce=Reduce("trace", "mean"),
)
"""slime's train_infer_mismatch_helper: token weights truncated to [1/2, 2], traces with a ratio under 1e-4 vetoed.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Denominators stay those of all tokens.
"""

VERL_DEFAULT = Objective(Clip(0.2, 0.2, dual=3.0), _OLD, reduce=Reduce("token", denominator="kept"))
"""verl's vanilla loss as its configuration ships: dual clip, token-mean, no rollout correction (`disabled`).

Use with group_mean(scale="std", ddof=1, eps=1e-6). Paper: Schulman et al. 2017, arXiv 1707.06347. verl counts the
tokens that rejection left; with global batch information it counts all. Its eighteen
corrections are recipes, `recipes.find("VERL_DECOUPLED_TOKEN_IS")`.
"""


_T = TypeVar("_T")


def find(name: str) -> Objective:
    """Return an objective by name.

    The name is one of this module's, or `module:NAME` or `file.py:NAME`, or source text of an `Objective`.

    Raises:
        ArgumentError: if there is none, with the nearest name; if it is not an Objective.

    >>> find("DAPO").surrogate.high
    0.28
    >>> find('Objective(Clip(0.2, 0.3), Ratio("theta", "old"))').surrogate.high
    0.3
    """
    if name.lstrip().startswith("Objective("):
        return from_source(name, vars(importlib.import_module(__package__ or "")))
    return load_named(name, Objective, __name__, "objective")


def load_named(name: str, kind: type[_T], default_module: str, what: str) -> _T:
    """Return the value of type `kind` called `name` in module `default_module`, or `module:NAME` or `file.py:NAME`."""
    module, _, attribute = name.rpartition(":")
    try:
        namespace = vars(
            load_module(module) if module.endswith(".py") else importlib.import_module(module or default_module)
        )
    except Exception as error:
        raise ArgumentError(
            f"TG-OBJ-026: {what} {name!r}: {module!r} cannot be imported ({type(error).__name__}: {error}). Nothing is "
            "known of the loss. Write module:NAME, or file.py:NAME."
        ) from error
    value = namespace.get(attribute)
    if isinstance(value, kind):
        return value
    names = sorted(key for key, match in namespace.items() if isinstance(match, kind) and not key.startswith("_"))
    raise ArgumentError(f"TG-OBJ-027: no {what} is called {name!r}. {nearest(attribute, names)}")
