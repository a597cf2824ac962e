"""Define `Recipe`: a method with everything its paper fixes beside the loss, and the recipes of papers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracegrad import _html, config
from tracegrad.config import Advantage, Config
from tracegrad.config.schema import Scalar
from tracegrad.errors import ArgumentError
from tracegrad.objective import Missing, Objective, Ratio, presets, with_beta, with_kl
from tracegrad.objective.serialize import spell

Options = tuple[tuple[str, Scalar], ...]
_TOGETHER = {"objective": ("objective", "train.missing"), "advantage.baseline": ("advantage.",)}
"""Options that mean nothing without the first of them."""


@dataclass(frozen=True)
class Recipe:
    """An objective, and what else of a run its source fixes; what it leaves open is not in here.

    Args:
        objective: the loss.
        advantage: from rewards to advantages; None where the source leaves it open.
        missing: what becomes of a term without a recorded logprob; None where open.
        config: further options of a run, by their dotted names.
        told: of a config from elsewhere, each option as it is written there and what it is here.
        differs: where the numbers of it are not those of elsewhere, on purpose: a name, and how and by how much.
        unmet: its options that say how a run goes and have no counterpart: `settle` refuses them, and the objective is
            what it is without them.

    Raises:
        ArgumentError: for an option that is none, or that has a place of its own in a recipe; for a policy for missing
            logprobs that the objective refuses.

    >>> print(Recipe(presets.DR_GRPO, Advantage(scale="none")))
    loss = sum of scale * keep * weight * S
      S = max(-A r, -A clip(r, 0.8, 1.2)); r = theta/old
      weight = clamp(w, 0, 2), w = old/rollout
      scale = 1 / (traces * 1024)
    objective = "DR_GRPO"
    advantage.baseline = "group_mean"
    advantage.scale = "none"
    """

    objective: Objective
    advantage: Advantage | None = None
    missing: Missing | None = None
    config: Options = ()
    told: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    differs: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    unmet: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name, _ in self.config:
            if name.startswith(("objective", "advantage.")) or name == "train.missing":
                raise ArgumentError(f"Recipe.config has {name}, which would be said twice. Write it as a field.")
        config.update(Config(), self.config, where="Recipe.config")
        if self.missing is not None:
            self.objective.check_missing(self.missing)

    @property
    def options(self) -> Options:
        """What it fixes, as options of a run by their dotted names, the objective first.

        >>> Recipe(presets.GRPO, missing="mask").options
        (('objective', 'GRPO'), ('train.missing', 'mask'))
        """
        found = [*named(self.objective)]
        if self.advantage is not None:
            scaled = self.advantage.scale != "none"
            found += [("advantage.baseline", self.advantage.baseline), ("advantage.scale", self.advantage.scale)]
            found += [("advantage.ddof", self.advantage.ddof)] if scaled else []
            if self.advantage.several != "sum_then_normalize":
                found.append(("advantage.several", self.advantage.several))
            if self.advantage.singleton != "refuse":
                found.append(("advantage.singleton", self.advantage.singleton))
        if self.missing is not None:
            found.append(("train.missing", self.missing))
        return (*found, *self.config)

    def settle(
        self, path: Path | None = None, overrides: Iterable[tuple[str, Any]] = (), *, start: Config | None = None
    ) -> tuple[Config, tuple[str, ...]]:
        """The config of a run that follows it, and where the file or the overrides told otherwise, which wins.

        Where they take another objective or another baseline, what the recipe says of its own is left out.

        Raises:
            ArgumentError: for what is `unmet`, all of it at once.

        >>> chosen, otherwise = Recipe(presets.GRPO, Advantage(scale="std")).settle(overrides=[("advantage.ddof", 0)])
        >>> chosen.advantage.scale, otherwise
        ('std', ('advantage.ddof = 0 (not 1)',))
        """
        if self.unmet:
            raise ArgumentError(f"{refusal(self.unmet)}. The objective alone is recipe.objective.")
        start, overrides, mine = start or Config(), tuple(overrides), self.options
        chosen = config.load(path, overrides, start=_over(start, mine))
        for head, members in _TOGETHER.items():
            if _of(chosen).get(head) != dict(mine).get(head, _of(chosen).get(head)):
                mine = tuple(each for each in mine if not each[0].startswith(members))
        chosen = config.load(path, overrides, start=_over(start, mine))
        now, fixed = _of(chosen), dict(self.options)
        otherwise = [f"{name} = {now[name]} (not {value})" for name, value in fixed.items() if now.get(name) != value]
        otherwise += [f"{name} = {now[name]}" for name in now if name.startswith("objective.") and name not in fixed]
        return chosen, tuple(otherwise)

    def __str__(self) -> str:
        lines = [
            str(self.objective),
            *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.options),
        ]
        width = max((len(name) for name, _ in self.told), default=0)
        lines += [f"# {name:<{width}} is {here}" for name, here in self.told]
        lines += [f"# differs on purpose, {name}: {words}" for name, words in self.differs]
        return "\n".join([*lines, *(f"# refused by a run: {each}" for each in self.unmet)])

    def _repr_html_(self) -> str:
        return _html.text(str(self))


def refusal(refused: Sequence[str]) -> str:
    """What is said of options that cannot be taken, together."""
    more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
    return (
        f"{len(refused)} of the options cannot be taken, and a run without them would be another method: "
        f"{'; '.join(refused[:8])}{more}"
    )


def named(objective: Objective) -> Options:
    """An objective as options: a preset by its name, with a reference penalty as `kl` or `beta` beside it, else code.

    >>> named(presets.with_kl(presets.GRPO, 0.04))
    (('objective', 'GRPO'), ('objective.kl', 0.04))
    """
    if preset := _preset(objective):
        return (("objective", preset),)
    bare = replace(objective, penalties=tuple(p for p in objective.penalties if p.ratio != Ratio("theta", "ref")))
    for penalty in objective.penalties:
        for name, add in (("kl", with_kl), ("beta", with_beta)):
            if _preset(bare) and add(bare, penalty.coef) == objective:
                return (("objective", _preset(bare)), (f"objective.{name}", penalty.coef))
    return (("objective", spell(objective)),)


def _preset(objective: Objective) -> str:
    """The name of the preset that it is; "" where it is none."""
    return next((name for name in presets.__all__ if getattr(presets, name) == objective), "")


def _over(start: Config, options: Options) -> Config:
    """A config with options changed; the objective's earlier overrides go with it."""
    if options and options[0][0] == "objective":
        start = replace(start, objective=replace(start.objective, overrides=()))
    return config.update(start, options)


def _of(chosen: Config) -> dict[str, Scalar]:
    """Dotted names to values, the preset as `objective`."""
    flat = config.as_dict(chosen)
    return {"objective": flat.pop("objective.preset"), **flat}


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
