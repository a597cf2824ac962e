"""Import the configuration of another trainer: read its options, and say which have no counterpart."""

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tracegrad.config import nearest
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective, with_beta, with_entropy, with_kl
from tracegrad.objective.serialize import spell
from tracegrad.recipes.recipe import Options, Recipe, refusal

_MOST, _DEEPEST = 2_000, 12


@dataclass(frozen=True)
class Without:
    """An option that has no counterpart.

    Args:
        harmless: its values that change nothing, the peer's default first.
        why: what it would do, and why it cannot here.
        cure: what does the same, or what to do.
        of_run: it says how a run goes, and the objective is what it is without it: only a run refuses it.
    """

    harmless: tuple[Any, ...]
    why: str
    cure: str
    of_run: bool = False


@dataclass(frozen=True)
class Peer:
    """Another trainer's options.

    Args:
        name: as a user calls it.
        version: of it, against which this is checked.
        options: what is read, by dotted names: the peer's default, then what else an option may say, which is shown on
            docs/coming-from.md and compared with the peer's own code.
        build: the recipe of all options, told or at their defaults.
        beside: what is told there with an option, or with one of its values, so that it does something.
        without: options that have no counterpart.
        own: patterns of options that say how it runs, not what it minimises.
        differs: where the numbers are not the peer's on purpose: names, and how, with {sizes} that `build` fills in.
    """

    name: str
    version: str
    options: Mapping[str, tuple[Any, ...]]
    build: "Callable[[Asked], Recipe]"
    beside: Mapping[str | tuple[str, Any], Mapping[str, Any]]
    without: Mapping[str, Without]
    own: str
    differs: Mapping[str, str]

    def cases(self) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """Each option with each value but its default, and what is told beside it."""
        for name, (_, *values) in self.options.items():
            yield from ((name, value, self.beside.get((name, value), self.beside.get(name, {}))) for value in values)

    def recipe(self, told: Mapping[str, Any], refused: Sequence[str] = ()) -> Recipe:
        """The recipe of what is told, without spellings.

        Raises:
            ArgumentError: for options without a counterpart, all of them at once, those in `refused` first.
        """
        values = {name: values[0] for name, values in self.options.items()} | {**told}
        asked = Asked(values, self.differs, [*refused])
        try:
            recipe = self.build(asked)
        except ArgumentError as error:
            self.refuse(asked.refused, asked.unmet)
            raise ArgumentError(f"{self.name}: {error}") from error
        self.refuse(asked.refused, asked.unmet)
        return replace(recipe, differs=tuple(asked.differences.items()), unmet=tuple(asked.unmet))

    def refuse(self, refused: list[str], unmet: Sequence[str] = ()) -> None:
        """Raises what was refused, together with what a run would refuse."""
        if refused:
            raise ArgumentError(f"{self.name}: {refusal([*refused, *unmet])}")


@dataclass
class Asked:
    """What a config says, as `build` reads it."""

    values: Mapping[str, Any]
    known: Mapping[str, str]
    refused: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    differences: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def among(self, name: str, known: Mapping[Any, Any], *, of_run: bool = False) -> Any:
        """What the value of an option stands for; where it is refused the first of `known`, or None of a run."""
        if self.values[name] in known:
            return known[self.values[name]]
        self.no(name, "it is not known here", f"known: {', '.join(map(str, known))}", of_run=of_run)
        return None if of_run else next(iter(known.values()))

    def no(self, name: str, why: str, cure: str, *, of_run: bool = False) -> None:
        """Refuses an option together with the others; one that says how a run goes, only where a run is asked for."""
        (self.unmet if of_run else self.refused).append(_refusal(name, self.values[name], why, cure))

    def differs(self, name: str, **sizes: Any) -> None:
        """Says one of the peer's differences of the config at hand."""
        self.differences[name] = self.known[name].format(**sizes)


def read(peer: Peer, given: Mapping[str, Any]) -> Recipe:
    """The recipe of a flat config."""
    told: dict[str, Any] = {}
    refused: list[str] = []
    unmet: list[str] = []
    for name, value in given.items():
        plain = value.value if isinstance(value, enum.Enum) else value
        if name in peer.options:
            told[name] = _typed(peer, name, plain)
        elif name in peer.without:
            other = peer.without[name]
            if plain not in other.harmless:
                (unmet if other.of_run else refused).append(_refusal(name, plain, other.why, other.cure))
        elif not any(fnmatchcase(name, pattern) for pattern in peer.own.split()):
            cure = nearest(str(name)[:80], [*peer.options, *peer.without])
            cure = cure if cure.startswith("Did") else "leave it out if it says how a run runs"
            refused.append(_refusal(str(name), plain, f"{peer.name} {peer.version} has no such option", cure))
    recipe = peer.recipe(told, [*refused, *unmet] if refused else ())
    return replace(recipe, told=tuple(_spelled(peer, told, recipe)), unmet=(*unmet, *recipe.unmet))


def flat(config: Any, prefix: str = "", deepest: int = _DEEPEST) -> dict[str, Any]:
    """Dotted names to values of mappings and dataclasses, nested ones too as far as `deepest`.

    >>> flat({"algorithm": {"adv_estimator": "grpo"}, "trainer.n": 1})
    {'algorithm.adv_estimator': 'grpo', 'trainer.n': 1}
    """
    if not isinstance(config, Mapping) and not (is_dataclass(config) and not isinstance(config, type)):
        raise ArgumentError(
            f"the config is {type(config).__name__}, and its options have no names. Pass its own class, or a dict."
        )
    given = dict(config) if isinstance(config, Mapping) else {f.name: getattr(config, f.name) for f in fields(config)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if deepest and (isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type))):
            values |= flat(value, f"{name}.", deepest - 1) or {name: None}
        elif key != "_target_":
            values[name] = value
        if len(values) > _MOST:
            raise ArgumentError(f"the config has more than {_MOST:,} options. It is none of a trainer's. Pass another.")
    return values


def _typed(peer: Peer, name: str, value: Any) -> Any:
    """A value of the default's kind; numbers may be written as YAML 1.1 leaves them, 1e-6 as a text."""
    default, *others = peer.options[name]
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if isinstance(value, str) and (number or default is None) and set(value) <= set("0123456789.eE+-"):
        with contextlib.suppress(ValueError):
            value = float(value)
    kinds: tuple[type, ...] = (bool,) if isinstance(default, bool) else (int, float) if number else (str,)
    if default is None:
        kinds = (int, float, str, bool)
    if isinstance(default, (list, tuple)):
        kinds = (list, tuple)
    kinds += tuple({type(each) for each in others if each is not None} - {*kinds})
    interpolated = isinstance(value, str) and "${" in value
    if value is None and None in (default, *others[:1]):
        return None
    if interpolated or not isinstance(value, kinds) or (number and isinstance(value, bool)):
        why = "it is an interpolation" if interpolated else f"it must be {' or '.join(k.__name__ for k in kinds)}"
        peer.refuse([_refusal(name, value, why, "resolve it, or leave it out")])
    if number and isinstance(value, (int, float)) and value == value // 1:
        return float(value) if isinstance(default, float) else int(value)
    return value


def _refusal(name: str, value: Any, why: str, cure: str) -> str:
    return f"{name[:100]} = {str(value)[:60]!r} ({why}; {cure})"


def _spelled(peer: Peer, told: Mapping[str, Any], whole: Recipe) -> list[tuple[str, str]]:
    """Each told option that is not at its default, and what of the recipe is due to it."""
    spelled = []
    for name, value in told.items():
        if value == peer.options[name][0]:
            continue
        try:
            without = peer.recipe({each: told[each] for each in told if each != name})
            effect = changes(without, whole) or "without effect beside the others"
            if without.unmet != whole.unmet:
                effect = "what the others need" if {*without.unmet} - {*whole.unmet} else "refused by a run"
        except ArgumentError:
            effect = "what the others need"
        spelled.append((f"{name} = {value}", effect))
    return spelled


def changes(before: Recipe, after: Recipe) -> str:
    """What makes one recipe the other, as a command line would say it where it can.

    >>> from tracegrad.objective import presets
    >>> changes(Recipe(presets.GRPO), Recipe(presets.DUAL_CLIP))
    'objective.surrogate.dual = 3.0, objective.reduce.per = token, objective.reduce.inner = None'
    """
    lines = _of_objectives(before.objective, after.objective)
    then, now = dict(_beside(before)), dict(_beside(after))
    lines += [f"{name} = {value}" for name, value in now.items() if then.get(name) != value]
    return ", ".join([*lines, *(f"no {name}" for name in then if name not in now)])


def _beside(recipe: Recipe) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in recipe.options if not name.startswith("objective")]


def _of_objectives(before: Objective, after: Objective) -> list[str]:
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
        return [line for place, one, other in pairs for line in _differences(f"{name}.{place}", one, other)]
    if is_dataclass(after) and type(before) is type(after):
        parts = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(after)]
        return [line for key, one, other in parts for line in _differences(f"{name}.{key}", one, other)]
    return [f"{name} = {spell(after) if isinstance(after, tuple) or is_dataclass(after) else after}"]


_NAMES = {"linear": "linear", "constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}


def rates(
    o: Asked, lr: str, scheduler: str, warmup: str, *, constant_warms: bool = False, per_unit: int = 1
) -> Options:
    """optimizer.lr and schedule.* of the options of these names.

    Args:
        constant_warms: whether the peer's "constant" rises first; transformers' does not.
        per_unit: optimizer steps in one of what the warm-up counts.
    """
    name, steps = o.among(scheduler, _NAMES, of_run=True) or "constant", max(o[warmup], 0) * per_unit
    if steps != int(steps):
        o.no(warmup, "warm-up is in steps here", "schedule.warmup_steps", of_run=True)
    if o[scheduler] == "constant" and not constant_warms:
        steps = 0
    options: list[tuple[str, str | int | float]] = [("optimizer.lr", float(o[lr])), ("schedule.name", name)]
    return (*options, ("schedule.warmup_steps", int(steps))) if steps else tuple(options)


def reward_kl(coef: float, kind: str, target: float | None, horizon: float) -> Options:
    """The section of KL in the reward: k3 is held within 10, the coefficient follows a target where there is one."""
    if not coef:
        return ()
    options: list[tuple[str, str | int | float]] = [("reward_kl.coef", float(coef))]
    options += [("reward_kl.kind", kind)] if kind != "k1" else []
    options += [("reward_kl.cap", 10.0)] if kind == "k3" else []
    if target is not None:
        options += [("reward_kl.target", float(target)), ("reward_kl.horizon", float(horizon))]
    return tuple(options)
