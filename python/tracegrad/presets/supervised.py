"""Objectives that take no ratio: for traces of another model or another tokenizer, and for records without logprobs.

Nothing here corrects for how the tokens were sampled, and nothing claims to.
"""

from tracegrad.algebra import Objective, PolicyGradient, Reduce

WEIGHTED_SFT = Objective(PolicyGradient(), reduce=Reduce("token"))
"""-A * logp, mean over all terms: fine-tuning weighted by the advantage.

With advantages of at least 0 (rewards, or 1 for the good traces: rejection-sampling fine-tuning) it is a weighted
likelihood and safe to repeat. A negative advantage pushes a logprob down without bound. The first step of it on fresh
on-policy traces is REINFORCE (Williams 1992).
"""
