"""Plain forms of components, which the Rust core reads by the names of their fields."""

from typing import NamedTuple


class CoreRatio(NamedTuple):
    """`Ratio`: the names of two policies."""

    num: str
    den: str


class CoreAggregation(NamedTuple):
    """`Aggregation`. With `kept`, it runs over the tokens that all rejections so far kept."""

    over: str
    reduce: str | None
    kept: bool
    blend: str | None


class CoreShape(NamedTuple):
    """A function of a weight, by name, with up to two parameters; those that it does not use are 0."""

    name: str
    first: float = 0.0
    second: float = 0.0


class CoreWeight(NamedTuple):
    """`Weight`."""

    ratio: CoreRatio
    level: CoreAggregation
    shape: CoreShape
    when: str
    normalize: bool


class CoreRejection(NamedTuple):
    """`Rejection`, with the unit that it drops."""

    ratio: CoreRatio
    stat: str
    level: CoreAggregation
    low: float
    high: float
    when: str
    drops: str


class CoreRejectionBudget(NamedTuple):
    """`RejectionBudget`."""

    ratio: CoreRatio
    stat: str
    mean: float
    kept: bool
    active: bool


class CoreReduction(NamedTuple):
    """`Reduce`. With `mean`, the tokens of a unit are averaged; with `kept`, only kept tokens count."""

    per: str
    mean: bool
    norm: float
    kept: bool


class CoreTotals(NamedTuple):
    """`Totals`: counts of a step over all ranks."""

    terms: int
    traces: int
    groups: int
