"""Policy gradients under a weight of the policy being trained: nothing is clipped away, everything is bounded.

-weight(theta/x) A log theta. CISPO and SAPO keep old apart from rollout; the others take theta/rollout in one.
"""

from tracegrad.algebra import Clamp, Gamma, Gate, Inverse, Level, Objective, Penalty, Ratio, Reduce, Weight, Window
from tracegrad.algebra.surrogate import PolicyGradient, Sigmoid

__all__ = ["AIPO", "ASPO", "CISPO", "DRO", "GLM5", "KIMI", "SAPO", "TOPR", "VESPO"]

_OLD, _ROLLOUT = Ratio("theta", "old"), Ratio("theta", "rollout")
_TIS = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
_PRODUCT = Level("trace", "sum")

CISPO = Objective(PolicyGradient(), weights=(_TIS, Weight(_OLD, shape=Clamp(0.0, 5.0))), reduce=Reduce("token"))
"""-min(theta/old, 5) A log theta: the weight is truncated, the gradient never cut.

Use with group_mean(scale="std", ddof=1). Paper: MiniMax-M1, arXiv 2506.13585, eq. 4; the bound: ScaleRL, arXiv
2510.13786. Peers: TRL's cispo takes epsilon_high as the bound itself (5.0, its default of 0.2 is no bound for it);
SkyRL's cispo_eps_clip_low 1, high 4 and ART's epsilon 1, epsilon_high 4 are distances from 1: [0, 5]. verl's default of
0.2 on both sides is not the paper's, which has no lower bound.
"""

ASPO = Objective(
    PolicyGradient(),
    weights=(_TIS, Weight(_OLD, shape=Inverse(3.0), when="A>0"), Weight(_OLD, shape=Clamp(0.0, 3.0), when="A<=0")),
    gates=(Gate(_OLD, high=1.2, when="A>0"), Gate(_OLD, low=0.8, when="A<0")),
    reduce=Reduce("token"),
)
"""-w A log theta within PPO's clip, w = min(theta/old, 3) for bad tokens, for good ones turned over: min(old/theta, 3).

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2510.06062: a good token that is still unlikely gains more.
Peers: its code (Archer2.0), which widens the bounds from 0.2 to 0.4 by a token's entropy. Terms beyond a bound are
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
    PolicyGradient(), weights=(Weight(_ROLLOUT, shape=Window(0.8, 1.2, strict=True)),), reduce=Reduce("token")
)
"""-r 1[0.8 < r < 1.2] A log theta with r = theta/rollout: a double-sided mask, bounds excluded.

Paper: GLM-5, arXiv 2602.15763. Peers: SkyRL's rollout_is. For asynchronous agents, where old is not kept.
"""

AIPO = Objective(PolicyGradient(), weights=(Weight(_ROLLOUT, shape=Clamp(0.0, 2.0)),), reduce=Reduce("token"))
"""-min(theta/rollout, 2) A log theta: truncated importance sampling of the whole way from the recorded policy.

Paper: LlamaRL, arXiv 2505.24034, eq. 3 (bounds of 2 to 10). Peers: earlier prime-rl; verl's bypass reinforce.
"""

TOPR = Objective(
    PolicyGradient(), weights=(Weight(_ROLLOUT, shape=Clamp(0.0, 1.0), when="A<=0"),), reduce=Reduce("token")
)
"""Good tokens at weight 1, bad ones at min(theta/rollout, 1): tapered, so that pushing down ends by itself.

Paper: Le Roux et al. 2025, arXiv 2503.14286, eq. 8. Peers: ROLL's topr, per token; the paper tapers whole traces
(`weights.0.level`). Built for records of any age.
"""

KIMI = Objective(
    PolicyGradient(), penalties=(Penalty(_ROLLOUT, "k2", 0.1, gated=True, weighted=False),), reduce=Reduce("token")
)
"""-A log theta + (tau / 2) (log theta/rollout)^2: a quadratic leash to the recorded policy, tau 0.1.

Paper: Kimi k1.5, arXiv 2501.12599, eq. 3. Peers: ROLL's kimi15, per token. The gradient is -(A - tau l).
"""

DRO = Objective(
    PolicyGradient(), penalties=(Penalty(_ROLLOUT, "k2", 0.05, gated=True, weighted=False),), reduce=Reduce("token")
)
"""-(A log theta - (beta / 2) (log theta/rollout)^2).

Paper: Richemond et al. 2024, arXiv 2405.19107, eq. 5. Peers: verl's dro takes theta/old and asks for dro_beta; Tinker's
dro sums over tokens (`Reduce("constant", norm=1.0)`).
"""
