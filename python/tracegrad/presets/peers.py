"""What other trainers do by default, and under their own names, as values: to compare with, or to move from.

The gradient is theirs for the same advantages; PARITY.md says how that was shown.
"""

from tracegrad.algebra import Clamp, Gate, Level, Objective, Penalty, Ratio, Reduce, Weight, Window
from tracegrad.algebra.surrogate import Clip, Importance, PolicyGradient

__all__ = ["ART_467", "PRIME_RL_DEFAULT", "SKYRL_849", "SLIME_MIS", "TRL_DEFAULT", "VERL_DEFAULT"]

_OLD, _ROLLOUT, _MISMATCH = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("old", "rollout")
_PRODUCT, _GEOMETRIC = Level("trace", "sum"), Level("trace", "mean")

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
        Gate(_MISMATCH, low=1e-4, high=100.0, drops="trace"),
        Gate(_MISMATCH, level=_GEOMETRIC, low=0.99, high=1.01, terms="kept"),
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
    gates=(Gate(_MISMATCH, low=1e-4, drops="trace"),),
    reduce=Reduce("trace", "mean"),
)
"""slime's train_infer_mismatch_helper: token weights truncated to [1/2, 2], traces with a ratio under 1e-4 vetoed.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Denominators stay those of all terms.
"""

VERL_DEFAULT = Objective(Clip(0.2, 0.2, dual=3.0), _OLD, reduce=Reduce("token", denominator="kept"))
"""verl's vanilla loss as its configuration ships: dual clip, token-mean, no rollout correction (`disabled`).

Use with group_mean(scale="std", ddof=1, eps=1e-6). Paper: Schulman et al. 2017, arXiv 1707.06347. verl counts the terms
that rejection left; with global batch information it counts all. Its eighteen
corrections are recipes, `recipes.find("VERL_DECOUPLED_TOKEN_IS")`.
"""
