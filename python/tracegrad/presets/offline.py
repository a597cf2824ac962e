"""For records of any age: regression on the advantage; for records without logprobs: objectives that take no ratio.

Those without a ratio correct for nothing, and claim nothing.
"""

from tracegrad.algebra import Objective, PolicyGradient, Ratio, Reduce, Regress

__all__ = ["OAPL", "TOPR_POSITIVE", "WEIGHTED_SFT"]

OAPL = Objective(Regress(1e-3), Ratio("theta", "rollout"), reduce=Reduce("trace", "mean"))
"""(beta * sum over the trace of log theta/rollout - A)^2: a regression whose optimum needs no importance ratio.

Use with `advantage.a_star`, R - V* with V* = b log mean exp(R / b) over the group. Paper: OAPL, arXiv 2602.19362;
A*-PO, arXiv 2505.20686, eq. 5. Peers: TRL's experimental a2po (beta 1e-3, b 0.5; against the reference model).
"""

WEIGHTED_SFT = Objective(PolicyGradient(), reduce=Reduce("token"))
"""-A log theta, mean over all terms: fine-tuning weighted by the advantage; needs no logprob.

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
