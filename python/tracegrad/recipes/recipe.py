"""Recipes: a loss with all other options that its paper specifies (`Recipe`), and the recipes of papers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracegrad import _html, config
from tracegrad.config import Advantage, Config
from tracegrad.config.dotted_keys import Value
from tracegrad.errors import ArgumentError
from tracegrad.objective import MissingLogprobs, Objective, Ratio, presets, with_beta, with_kl
from tracegrad.objective.serialize import to_source

Options = tuple[tuple[str, Value], ...]
_DEPENDENT_OPTIONS = {"objective": ("objective", "train.missing_logprobs"), "advantage.baseline": ("advantage.",)}
"""Options that have no effect without another one (the key), by their prefixes."""


@dataclass(frozen=True)
class Recipe:
    """An objective, and all other options of a run that its source specifies.

    Args:
        objective: the loss.
        advantage: how advantages are computed from rewards; None if the source does not specify it.
        missing_logprobs: the treatment of trained tokens without a recorded logprob; None if it is not specified.
        config: further options of a run, by their dotted names.
        rollout: options of the rollouts of an online run, such as ("rollout.top_p", 0.9). Training from a file does
            not use them.
        imported_options: for an imported config, each of its options and the equivalent here.
        differences: for an imported config, intended differences from the other trainer: name and description.
        unsupported: for an imported config, its run-only options that have no counterpart. `resolve` raises an
            error for them. They do not affect the objective.
        ignored_options: for an imported config, its options that have no effect here: name and warning. The warning is
            empty for an option that only affects how the other trainer runs.
        set_elsewhere: for an imported config, its options that a run sets in another way: name, and the option or flag.
        default_options: for an imported config, its options that have the other trainer's default.
        batch: for an imported config, the size of its steps. A run has `train.groups_per_step`.
        temperature: for an imported config, its sampling temperature. A run uses the recorded one.
        source: where it comes from, for messages: the name of a recipe, "trl" for a config of TRL, or "trl:FILE".

    Raises:
        ArgumentError: for an option that does not exist or that is a field of the recipe, and for `missing_logprobs`
            that the objective does not allow.

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
    missing_logprobs: MissingLogprobs | None = None
    config: Options = ()
    rollout: Options = ()
    imported_options: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    differences: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    unsupported: tuple[str, ...] = field(default=(), compare=False)
    ignored_options: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    set_elsewhere: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    default_options: tuple[str, ...] = field(default=(), compare=False)
    batch: str = field(default="", compare=False)
    temperature: float | None = field(default=None, compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, _ in self.config:
            if name.startswith(("objective", "advantage.")) or name == "train.missing_logprobs":
                raise ArgumentError(
                    f"TG-RECIPE-010: Recipe.config has {name}, which is a field of Recipe. Set the field instead."
                )
        config.update(Config(), self.config, where="Recipe.config")
        if self.missing_logprobs is not None:
            self.objective.check_missing(self.missing_logprobs)

    @property
    def options(self) -> Options:
        """The specified options of a run by their dotted names, the objective first.

        >>> Recipe(presets.GRPO, missing_logprobs="mask").options
        (('objective', 'GRPO'), ('train.missing_logprobs', 'mask'))
        """
        options = [*objective_options(self.objective)]
        if self.advantage is not None:
            has_scale = self.advantage.scale != "none"
            options += [("advantage.baseline", self.advantage.baseline), ("advantage.scale", self.advantage.scale)]
            options += [("advantage.ddof", self.advantage.ddof)] if has_scale else []
            if self.advantage.multi_objective_aggregation != "sum_then_normalize":
                options.append(("advantage.multi_objective_aggregation", self.advantage.multi_objective_aggregation))
            if self.advantage.single_sample_group != "error":
                options.append(("advantage.single_sample_group", self.advantage.single_sample_group))
        if self.missing_logprobs is not None:
            options.append(("train.missing_logprobs", self.missing_logprobs))
        return (*options, *self.config)

    def resolve(
        self, path: Path | None = None, overrides: Iterable[tuple[str, Any]] = (), *, start: Config | None = None
    ) -> tuple[Config, tuple[str, ...]]:
        """Return the config of a run with this recipe, and the options that override the recipe.

        The file and the overrides win over the recipe. If they set another objective or another baseline, the recipe's
        options of its own objective or advantage are left out.

        Args:
            path: a TOML file of options.
            overrides: dotted names and values.
            start: the config to start from; default `Config()`.

        Raises:
            ArgumentError: for all options in `unsupported` at once.

        >>> chosen, otherwise = Recipe(presets.GRPO, Advantage(scale="std")).resolve(overrides=[("advantage.ddof", 0)])
        >>> chosen.advantage.scale, otherwise
        ('std', ('advantage.ddof = 0 (not 1)',))
        """
        if self.unsupported:
            raise ArgumentError(
                f"TG-RECIPE-011: {unsupported_message(self.unsupported)}. recipe.objective has the objective."
            )
        start, overrides, own_options = start or Config(), tuple(overrides), self.options
        chosen = config.load(path, overrides, start=_with_options(start, own_options))
        for key, members in _DEPENDENT_OPTIONS.items():
            if _values_by_name(chosen).get(key) != dict(own_options).get(key, _values_by_name(chosen).get(key)):
                own_options = tuple(option for option in own_options if not option[0].startswith(members))
        chosen = config.load(path, overrides, start=_with_options(start, own_options))
        values, specified = _values_by_name(chosen), dict(self.options)
        otherwise = [
            f"{name} = {values[name]} (not {value})" for name, value in specified.items() if values.get(name) != value
        ]
        otherwise += [
            f"{name} = {values[name]}" for name in values if name.startswith("objective.") and name not in specified
        ]
        return chosen, tuple(otherwise)

    @property
    def import_notes(self) -> list[str]:
        """Lines about an imported config: the effect of each option, ignored options and intended differences."""
        width = max((len(name) for name, _ in self.imported_options), default=0)
        lines = [f"{name:<{width}} is {equivalent}" for name, equivalent in self.imported_options]
        lines += (
            [f"default, as in the other trainer: {', '.join(self.default_options)}"] if self.default_options else []
        )
        lines += [f"size of a step in the config: {self.batch}"] if self.batch else []
        lines += [f"instead of {name}: {here}" for name, here in self.set_elsewhere]
        lines += [f"ignored {name}: {warning}" for name, warning in self.ignored_options if warning]
        unread = [name for name, warning in self.ignored_options if not warning]
        lines += [f"ignored, without effect here: {', '.join(unread)}"] if unread else []
        lines += [f"differs on purpose, {name}: {description}" for name, description in self.differences]
        return [*lines, *(f"refused by a run: {option}" for option in self.unsupported)]

    def __str__(self) -> str:
        options = (
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in (*self.options, *self.rollout)
        )
        return "\n".join([str(self.objective), *options, *(f"# {line}" for line in self.import_notes)])

    def _repr_html_(self) -> str:
        return _html.text(str(self))


def unsupported_message(refused: Sequence[str]) -> str:
    """Return the message about all options that are not supported."""
    more = f"; and {len(refused) - 8} more" if len(refused) > 8 else ""
    return (
        f"{len(refused)} of the options cannot be imported, and a run without them may be another method: "
        f"{'; '.join(refused[:8])}{more}"
    )


def objective_options(objective: Objective) -> Options:
    """Return an objective as options: the name of a preset, with `kl` or `beta` for a reference penalty, or its code.

    >>> objective_options(presets.with_kl(presets.GRPO, 0.04))
    (('objective', 'GRPO'), ('objective.kl', 0.04))
    """
    if preset := _preset(objective):
        return (("objective", preset),)
    bare = replace(objective, penalties=tuple(p for p in objective.penalties if p.ratio != Ratio("theta", "ref")))
    for penalty in objective.penalties:
        for name, add in (("kl", with_kl), ("beta", with_beta)):
            if (preset := _preset(bare)) and add(bare, penalty.coef) == objective:
                return (("objective", preset), (f"objective.{name}", penalty.coef))
    return (("objective", to_source(objective)),)


def _preset(objective: Objective) -> str | None:
    """Return the name of the preset that equals an objective; None if there is none."""
    return next((name for name in presets.__all__ if getattr(presets, name) == objective), None)


def _with_options(start: Config, options: Options) -> Config:
    """Return a config with changed options. A new objective also discards earlier overrides of the objective."""
    if options and options[0][0] == "objective":
        start = replace(start, objective=replace(start.objective, overrides=()))
    return config.update(start, options)


def _values_by_name(chosen: Config) -> dict[str, Value]:
    """Return the values of a config by dotted name, the preset as `objective`."""
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
_DYNAMIC = (("filter.drop_zero_std_groups", True),)

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
