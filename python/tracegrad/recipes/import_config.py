"""Import the configuration of another trainer: map its options to a recipe, and report those without a counterpart."""

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tracegrad.config import nearest
from tracegrad.data.sampling import is_truncated
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective, with_beta, with_entropy, with_kl
from tracegrad.objective.serialize import to_source
from tracegrad.recipes.recipe import Options, Recipe, unsupported_message

_MOST, _DEEPEST = 2_000, 12
NO_EFFECT = "no effect with the other options"


@dataclass(frozen=True)
class UnsupportedOption:
    """An option that has no counterpart.

    Args:
        harmless: values that change nothing, the peer's default first.
        why: the effect of the option, and the reason why it is not supported.
        fix: an equivalent option, or another fix.
        run_only: whether the option affects only the run and not the objective. Then only a run rejects it.
    """

    harmless: tuple[Any, ...]
    why: str
    fix: str
    run_only: bool = False


@dataclass(frozen=True)
class Peer:
    """The options of another trainer.

    Args:
        name: the name of the trainer, as users write it.
        version: the tested version of the trainer.
        options: the supported options by dotted name: the peer's default, then other values. The values appear on
            docs/how-to/coming-from.md and are compared with the peer's own code.
        build: builds the recipe from the values of all options.
        with_options: other options that must be set, so that an option or one of its values has an effect.
        unsupported: options that have no counterpart.
        ignored: patterns of options that affect how the peer runs, not what it minimises.
        differs: intended differences from the peer's numbers, by name, with {sizes} that `build` fills in.
        warnings: options, or patterns of options, that users may expect to have an effect here: values that need no
            warning, and the warning.
        correction: the setting, as in a YAML file, with which the loss uses recorded logprobs.
        truncation: the options that truncate what rollouts sample: their counterpart in `[rollout]`, and the peer's
            default, then other values that mean that it is not set.
        instead: the option or flag of a run that replaces an ignored option, by the option's name or pattern.
        batch: options of the size of a step.
        describe_batch: describes the size of a step from the values of `batch` that are set.
        temperature: the option with the sampling temperature, or empty.
    """

    name: str
    version: str
    options: Mapping[str, tuple[Any, ...]]
    build: "Callable[[PeerConfig], Recipe]"
    with_options: Mapping[str | tuple[str, Any], Mapping[str, Any]]
    unsupported: Mapping[str, UnsupportedOption]
    ignored: str
    differs: Mapping[str, str]
    correction: str
    warnings: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    truncation: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    batch: tuple[str, ...] = ()
    describe_batch: Callable[[Mapping[str, Any]], str] = lambda values: ""
    temperature: str = ""

    def cases(self) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """Yield (option, value, other options to set) for each value of each option except its default."""
        for name, (_, *values) in self.options.items():
            yield from (
                (name, value, self.with_options.get((name, value), self.with_options.get(name, {}))) for value in values
            )

    def recipe(self, values: Mapping[str, Any], refused: Sequence[str] = ()) -> Recipe:
        """Build the recipe of these options, without the effect of each option.

        Args:
            values: values of options; other options have their default.
            refused: messages about rejected options.

        Raises:
            ArgumentError: for all options without a counterpart at once, those in `refused` first.
        """
        values = {name: values[0] for name, values in self.options.items()} | {**values}
        config = PeerConfig(values, self.differs, [*refused])
        try:
            recipe = self.build(config)
        except ArgumentError as error:
            self.refuse(config.refused, config.unmet)
            raise ArgumentError(f"{self.name}: {error}") from error
        self.refuse(config.refused, config.unmet)
        return replace(recipe, differences=tuple(config.differences.items()), unsupported=tuple(config.unmet))

    def refuse(self, refused: list[str], unmet: Sequence[str] = ()) -> None:
        """Raise an ArgumentError about all refused options, if any, and about the options that a run would reject."""
        if refused:
            raise ArgumentError(f"TG-RECIPE-015: {self.name}: {unsupported_message([*refused, *unmet])}")


@dataclass
class PeerConfig:
    """The values of a config, and the problems that `build` finds in them."""

    values: Mapping[str, Any]
    known: Mapping[str, str]
    refused: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    differences: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def lookup(self, name: str, known: Mapping[Any, Any], *, of_run: bool = False) -> Any:
        """Return the counterpart of an option's value. An unknown value is refused.

        Args:
            name: of the option.
            known: counterparts by value.
            of_run: whether the option affects only the run.

        Returns:
            the counterpart; for an unknown value None with `of_run`, else the first counterpart.
        """
        if self.values[name] in known:
            return known[self.values[name]]
        self.refuse(name, "this value is not supported", f"one of {', '.join(map(str, known))}", of_run=of_run)
        return None if of_run else next(iter(known.values()))

    def refuse(self, name: str, why: str, cure: str, *, of_run: bool = False) -> None:
        """Record that an option is refused. With `of_run`, only a run raises the error."""
        (self.unmet if of_run else self.refused).append(_refusal_message(name, self.values[name], why, cure))

    def differs(self, name: str, **sizes: Any) -> None:
        """Record that one of the peer's differences applies to this config."""
        self.differences[name] = self.known[name].format(**sizes)


def read(peer: Peer, config: Mapping[str, Any]) -> Recipe:
    """Convert a flat config of a peer to a recipe.

    Raises:
        ArgumentError: for options without a counterpart, unknown options and values of another type.
    """
    values: dict[str, Any] = {}
    refused: list[str] = []
    unmet: list[str] = []
    ignored: list[tuple[str, str]] = []
    replaced: list[tuple[str, str]] = []
    defaults: list[str] = []
    batch: dict[str, Any] = {}
    truncation: dict[str, Any] = {}
    known = [*peer.options, *peer.unsupported]
    for name, value in config.items():
        raw = value.value if isinstance(value, enum.Enum) else value
        if name in peer.truncation and _truncates(peer, name, raw, truncation):
            continue
        warning = _warning(peer, name, raw)
        is_ignored = name not in peer.unsupported and any(fnmatchcase(name, each) for each in peer.ignored.split())
        instead = next((here for pattern, here in peer.instead.items() if fnmatchcase(name, pattern)), "")
        if name in peer.batch and isinstance(raw, int) and raw > 0:
            batch[name] = raw
        elif instead and not warning:
            replaced.append((name, instead))
        elif warning or ((is_ignored or name in peer.truncation) and name not in peer.options):
            ignored.append((name, warning))
        if name in peer.options:
            values[name] = _convert(peer, name, raw, peer.options[name])
            defaults += [name] if values[name] == peer.options[name][0] and name not in batch else []
        elif name in peer.unsupported:
            counterpart = peer.unsupported[name]
            if raw in counterpart.harmless:
                defaults.append(name)
            else:
                (unmet if counterpart.run_only else refused).append(
                    _refusal_message(name, raw, counterpart.why, counterpart.fix)
                )
        elif not is_ignored and name not in peer.truncation:
            fix, hint = "remove it if it does not change the method", nearest(str(name)[:80], known)
            fix = f"{hint} If not, {fix}" if hint.startswith("Did") else fix
            refused.append(_refusal_message(str(name), raw, f"{peer.name} {peer.version} has no such option", fix))
    recipe = peer.recipe(values, [*refused, *unmet] if refused else ())
    return replace(
        recipe,
        rollout=_rollout_options(peer, truncation),
        imported_options=(*_effects(peer, values, recipe), *_truncation_effects(peer, truncation)),
        unsupported=(*unmet, *recipe.unsupported),
        ignored_options=tuple(ignored),
        set_elsewhere=tuple(replaced),
        default_options=tuple(defaults),
        batch=peer.describe_batch(batch) if batch else "",
        temperature=_temperature(config.get(peer.temperature)),
        source=peer.name,
    )


LISTED_IDS = 64
"""Number of ids that servers list with each token for an imported config with top_p or min_p, but without top_k."""


def _temperature(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _truncates(peer: Peer, name: str, value: Any, truncation: dict[str, Any]) -> bool:
    """Return whether an option truncates at a value, and add it to `truncation` then."""
    counterpart, defaults = peer.truncation[name]
    converted = _convert(peer, name, value, defaults)
    if not is_truncated({counterpart: converted}):
        return False
    truncation[name] = converted
    return True


def _rollout_options(peer: Peer, truncation: Mapping[str, Any]) -> Options:
    """Return the options of `[rollout]` for the truncation of a config. Servers then list the ids that it keeps."""
    options = {peer.truncation[name][0]: value for name, value in truncation.items()}
    if not options:
        return ()
    # One id more than top_k keeps shows that no further id is as probable as the last.
    options["top_logprobs"] = options["top_k"] + 1 if "top_k" in options else LISTED_IDS
    return tuple((f"rollout.{name}", value) for name, value in options.items())


def _truncation_effects(peer: Peer, truncation: Mapping[str, Any]) -> list[tuple[str, str]]:
    listed = dict(_rollout_options(peer, truncation)).get("rollout.top_logprobs")
    return [
        (
            f"{name} = {value}",
            f"rollout.{peer.truncation[name][0]} = {value} and rollout.top_logprobs = {listed} "
            "of tracegrad online; recorded tokens are compared over their support if the record shows it",
        )
        for name, value in truncation.items()
    ]


def _warning(peer: Peer, name: str, value: Any) -> str:
    """Return the warning about an option that has no effect here; empty if its value needs none."""
    for pattern, (harmless, warning) in peer.warnings.items():
        if fnmatchcase(name, pattern) and value not in harmless:
            return warning
    return ""


def flat(config: Any, prefix: str = "", max_depth: int = _DEEPEST) -> dict[str, Any]:
    """Flatten mappings and dataclasses to values by dotted name, up to `max_depth` levels.

    >>> flat({"algorithm": {"adv_estimator": "grpo"}, "trainer.n": 1})
    {'algorithm.adv_estimator': 'grpo', 'trainer.n': 1}
    """
    if not isinstance(config, Mapping) and not (is_dataclass(config) and not isinstance(config, type)):
        raise ArgumentError(
            f"TG-RECIPE-008: the config is {type(config).__name__}, which has no named options. Pass the trainer's "
            f"config class, or a dict."
        )
    items = dict(config) if isinstance(config, Mapping) else {f.name: getattr(config, f.name) for f in fields(config)}
    values: dict[str, Any] = {}
    for key, value in items.items():
        name = f"{prefix}{key}"
        if max_depth and (isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type))):
            values |= flat(value, f"{name}.", max_depth - 1) or {name: None}
        elif key != "_target_":
            values[name] = value
        if len(values) > _MOST:
            raise ArgumentError(
                f"TG-RECIPE-009: the config has more than {_MOST:,} options, too many for a trainer. Pass another."
            )
    return values


def _convert(peer: Peer, name: str, value: Any, values: tuple[Any, ...]) -> Any:
    """Convert a value to the type of the default, the first of `values`. YAML 1.1 reads a number like 1e-6 as text."""
    default, *choices = values
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if isinstance(value, str) and (is_number or default is None) and set(value) <= set("0123456789.eE+-"):
        with contextlib.suppress(ValueError):
            value = float(value)
    types: tuple[type, ...] = (bool,) if isinstance(default, bool) else (int, float) if is_number else (str,)
    if default is None:
        types = (int, float, str, bool)
    if isinstance(default, (list, tuple)):
        types = (list, tuple)
    types += tuple({type(choice) for choice in choices if choice is not None} - {*types})
    is_interpolation = isinstance(value, str) and "${" in value
    if value is None and None in (default, *choices[:1]):
        return None
    if is_interpolation or not isinstance(value, types) or (is_number and isinstance(value, bool)):
        reason = (
            "it is an interpolation" if is_interpolation else f"it must be {' or '.join(k.__name__ for k in types)}"
        )
        peer.refuse([_refusal_message(name, value, reason, "resolve it, or remove it")])
    if is_number and isinstance(value, (int, float)) and value == value // 1:
        return float(value) if isinstance(default, float) else int(value)
    return value


def _refusal_message(name: str, value: Any, reason: str, fix: str) -> str:
    return f"{name[:100]} = {str(value)[:60]!r} ({reason}; {fix})"


def _effects(peer: Peer, values: Mapping[str, Any], complete: Recipe) -> list[tuple[str, str]]:
    """Return (option = value, its effect on the recipe) for each option that is not at its default."""
    effects = []
    for name, value in values.items():
        if value == peer.options[name][0]:
            continue
        try:
            without = peer.recipe({other: values[other] for other in values if other != name})
            effect = changes(without, complete) or NO_EFFECT
            if without.unsupported != complete.unsupported:
                effect = (
                    "required by the others" if {*without.unsupported} - {*complete.unsupported} else "refused by a run"
                )
        except ArgumentError:
            effect = "required by the others"
        if effect != NO_EFFECT or name not in peer.batch:
            effects.append((f"{name} = {value}", effect))
    return effects


def changes(before: Recipe, after: Recipe) -> str:
    """Describe the changes from one recipe to another, as command-line options if possible.

    >>> from tracegrad.objective import presets
    >>> changes(Recipe(presets.GRPO), Recipe(presets.DUAL_CLIP))
    'objective.surrogate.dual = 3.0, objective.reduce.per = token, objective.reduce.inner = None'
    """
    lines = _objective_changes(before.objective, after.objective)
    old_options, new_options = dict(_other_options(before)), dict(_other_options(after))
    lines += [f"{name} = {value}" for name, value in new_options.items() if old_options.get(name) != value]
    return ", ".join([*lines, *(f"no {name}" for name in old_options if name not in new_options)])


def _other_options(recipe: Recipe) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in recipe.options if not name.startswith("objective")]


def _objective_changes(before: Objective, after: Objective) -> list[str]:
    if before == after:
        return []
    for name, add in (("kl", with_kl), ("beta", with_beta)):
        for penalty in after.penalties:
            if penalty.ratio.den == "ref" and replace(before, penalties=add(before, penalty.coef).penalties) == after:
                return [f"objective.{name} = {penalty.coef:g}"]
    if after.entropy is not None and with_entropy(before, after.entropy.coef) == after:
        return [f"objective.entropy = {after.entropy.coef:g}"]
    return _differences("objective", before, after)


def _differences(name: str, before: Any, after: Any) -> list[str]:
    if before == after:
        return []
    if isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
        pairs = zip(range(len(after)), before, after, strict=True)
        return [line for index, old, new in pairs for line in _differences(f"{name}.{index}", old, new)]
    if is_dataclass(after) and type(before) is type(after):
        parts = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(after)]
        return [line for key, old, new in parts for line in _differences(f"{name}.{key}", old, new)]
    return [f"{name} = {to_source(after) if isinstance(after, tuple) or is_dataclass(after) else after}"]


_NAMES = {"linear": "linear", "constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}


def schedule_options(
    o: PeerConfig, lr: str, scheduler: str, warmup: str, *, constant_warms: bool = False, per_unit: int = 1
) -> Options:
    """Return optimizer.lr and schedule.* from the options with these names.

    Args:
        o: the values of the config.
        lr, scheduler, warmup: names of the options.
        constant_warms: whether the peer's "constant" schedule has a warm-up; transformers' has none.
        per_unit: optimizer steps per unit of the warm-up.
    """
    name, steps = o.lookup(scheduler, _NAMES, of_run=True) or "constant", max(o[warmup], 0) * per_unit
    if steps != int(steps):
        o.refuse(warmup, "the warm-up is set in steps here", "schedule.warmup_steps", of_run=True)
    if o[scheduler] == "constant" and not constant_warms:
        steps = 0
    options: list[tuple[str, str | int | float]] = [("optimizer.lr", float(o[lr])), ("schedule.name", name)]
    return (*options, ("schedule.warmup_steps", int(steps))) if steps else tuple(options)


def reward_kl(coef: float, kind: str, target: float | None, horizon: float) -> Options:
    """Return the options of KL in the reward: k3 is capped at 10, and a target makes the coefficient adaptive."""
    if not coef:
        return ()
    options: list[tuple[str, str | int | float]] = [("reward_kl.coef", float(coef))]
    options += [("reward_kl.kind", kind)] if kind != "k1" else []
    options += [("reward_kl.cap", 10.0)] if kind == "k3" else []
    if target is not None:
        options += [("reward_kl.target_kl", float(target)), ("reward_kl.horizon", float(horizon))]
    return tuple(options)
