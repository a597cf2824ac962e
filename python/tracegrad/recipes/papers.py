"""The field's methods as their papers run them: a preset, and how rewards become its advantages.

A recipe says what its paper says and nothing else: learning rates and sizes of steps are of a model, not of a method.
Corrections of a mismatch (TIS, ICEPOP, GEO_RS, ...) are objectives without a recipe, for they leave the rest open.
"""

from tracegrad import presets
from tracegrad.config import Advantage
from tracegrad.recipes.recipe import Recipe

__all__ = [
    "ASPO",
    "CISPO",
    "DAPO",
    "DAPO_DIRECT",
    "DR_GRPO",
    "DR_GRPO_DIRECT",
    "FIPO",
    "GMPO",
    "GRPO",
    "GRPO_DIRECT",
    "GSPO",
    "KIMI",
    "LUSPO",
    "MAX_RL",
    "OAPL",
    "RLOO",
    "SAPO",
]

_STD, _MEAN = Advantage(scale="std"), Advantage(scale="none")
_DYNAMIC = (("filter.even_groups", True),)

GRPO = Recipe(presets.with_kl(presets.GRPO, 0.04), _STD)
"""GRPO as published: the standard deviation of the group, and a penalty of 0.04 to the reference model.

Paper: Shao et al. 2024, arXiv 2402.03300. Few train with the penalty today: `--objective.kl 0` takes it out, and the
reference model with it.
"""

GRPO_DIRECT = Recipe(presets.with_kl(presets.GRPO_DIRECT, 0.04), _STD)
"""GRPO on theta/rollout, without a pass for old logprobs.

Paper: Shao et al. 2024, arXiv 2402.03300.
"""

DAPO = Recipe(presets.DAPO, _STD, config=_DYNAMIC)
"""DAPO's loss and advantages, without a reference; groups in which all rewards are equal are left out.

Paper: Yu et al. 2025, arXiv 2503.14476. Its dynamic sampling also refills what it leaves out, where traces are made.
Its punishment of long answers is `advantage.overlong`, to be added to the rewards that are recorded.
"""

DAPO_DIRECT = Recipe(presets.DAPO_DIRECT, _STD, config=_DYNAMIC)
"""DAPO on theta/rollout, without a pass for old logprobs.

Paper: Yu et al. 2025, arXiv 2503.14476.
"""

DR_GRPO = Recipe(presets.DR_GRPO, _MEAN)
"""Neither divided by the standard deviation nor by the length.

Paper: Liu et al. 2025, arXiv 2503.20783.
"""

DR_GRPO_DIRECT = Recipe(presets.DR_GRPO_DIRECT, _MEAN)
"""DR_GRPO on theta/rollout, without a pass for old logprobs.

Paper: Liu et al. 2025, arXiv 2503.20783.
"""

GSPO = Recipe(presets.GSPO, _STD)
"""Trace ratios, with the advantages of GRPO.

Paper: Zheng et al. 2025, arXiv 2507.18071, eq. 4 and 5.
"""

GMPO = Recipe(presets.GMPO, _STD)
"""Geometric means, with the advantages of GRPO.

Paper: Zhao et al. 2025, arXiv 2507.20673.
"""

CISPO = Recipe(presets.CISPO, _STD)
"""Truncated weights, with the advantages of GRPO.

Paper: MiniMax-M1, arXiv 2506.13585.
"""

ASPO = Recipe(presets.ASPO, _STD)
"""Turned-over weights of good tokens, with the advantages of GRPO.

Paper: arXiv 2510.06062.
"""

FIPO = Recipe(presets.FIPO, _STD)
"""DAPO's clip times what the rest of the trace has become, with the advantages of DAPO.

Paper: arXiv 2603.19835.
"""

SAPO = Recipe(presets.SAPO, _STD)
"""The soft clip, with the advantages of GRPO.

Paper: arXiv 2511.20347.
"""

LUSPO = Recipe(presets.LUSPO, _STD)
"""GSPO with traces counted by their length, with the advantages of GRPO.

Paper: arXiv 2602.05261.
"""

RLOO = Recipe(presets.WEIGHTED_SFT, Advantage(baseline="rloo"))
"""The policy gradient with the mean of the others as baseline, for traces of the policy itself: no ratio corrects it.

Paper: Ahmadian et al. 2024, arXiv 2402.14740.
"""

MAX_RL = Recipe(presets.WEIGHTED_SFT, Advantage(baseline="max_rl"))
"""The policy gradient of maximum likelihood: rewards less their mean, over their mean; for traces of the policy itself.

Paper: Maximum-likelihood RL, 2026, arXiv 2602.02710. Peers: prime-rl's max_rl, SkyRL's maxrl.
"""

KIMI = Recipe(presets.KIMI, _MEAN)
"""A mean as baseline and a leash to the recorded policy.

Paper: Kimi k1.5, arXiv 2501.12599, section 2.3.
"""

OAPL = Recipe(presets.OAPL, Advantage(baseline="a_star"))
"""The regression on R - V*, with V* of the group.

Paper: OAPL, arXiv 2602.19362; A*-PO, arXiv 2505.20686.
"""
