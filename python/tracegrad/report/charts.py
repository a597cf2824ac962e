"""Draw the curves and intervals of a run as inline SVG: no script, no plotting library, numbers on hover.

The panels of the page are defined here. Rows are those of metrics.jsonl.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracegrad._html import escape, number
from tracegrad.metrics import off_policy_estimate

Rows = Sequence[Mapping[str, Any]]

_WIDTH, _HEIGHT = 340, 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 22
_MOST_POINTS = 150


@dataclass(frozen=True)
class Panel:
    """One chart.

    Args:
        title: title of the chart.
        series: keys in the rows. The chart is drawn if any of them has values.
        note: one line below the title.
        band: keys of the lower and upper end of an interval around the first series.
        level: a key, or a number, drawn as a dashed line.
        floor: value that the axis reaches down to at least. None follows the data.
        online: draw it only for steps of an online run. The same number of recorded traces follows the order of the
            data, and shows no progress.
    """

    title: str
    series: tuple[str, ...]
    note: str
    band: tuple[str, str] | None = None
    level: str | float | None = None
    floor: float | None = None
    online: bool = False


PANELS = (
    Panel(
        "evaluation",
        ("eval_reward",),
        "mean reward of the evaluation tasks, 95 % interval",
        ("eval_low", "eval_high"),
    ),
    Panel(
        "off-policy estimate",
        ("ope",),
        "estimated reward on held-out groups, where reliable, 95 % interval; dashed: reward as recorded",
        ("ope_low", "ope_high"),
        "ope_recorded_reward",
    ),
    Panel("reward", ("reward",), "mean reward of the rollouts that a step trains on", online=True),
    Panel("loss", ("loss",), "the value that is minimised"),
    Panel("ratio", ("ratio_mean",), "mean ratio inside the surrogate; dashed: 1, no change", level=1.0),
    Panel(
        "clip fraction", ("clip_fraction",), "share of the trained tokens whose gradient the clip removed", floor=0.0
    ),
    Panel(
        "effective sample size",
        ("ope_ess_fraction", "token_ess"),
        "as a share of the held-out traces, and of the weighted tokens",
        floor=0.0,
    ),
    Panel(
        "good and bad traces",
        ("logprob_good", "logprob_bad"),
        "mean logprob of held-out traces with a reward above, and below, their group's mean",
    ),
    Panel("KL to the rollout policy", ("kl_rollout_theta",), "KL(rollout, theta), nats per token", floor=0.0),
    Panel("entropy", ("entropy",), "nats per token", floor=0.0),
    Panel(
        "logprobs of servers and trainer",
        ("weight_check/max", "weight_check/p99", "weight_check/p50"),
        "|theta - rollout| before an update, nats",
        floor=0.0,
    ),
    Panel(
        "time of a step",
        ("time/rollout_wait", "time/prepare", "time/train", "time/weight_sync"),
        "seconds",
        floor=0.0,
    ),
    Panel("staleness", ("staleness_mean", "staleness_max"), "policy versions between sampling and training", floor=0.0),
    Panel(
        "failures",
        ("branches_extra", "tokens_lost", "calls_retried", "trajectories_failed"),
        "extra branches and lost tokens of a step; retried calls and failed trajectories so far",
        floor=0.0,
    ),
    Panel("gradient norm", ("grad_norm",), "before clipping", floor=0.0),
    Panel("throughput", ("tokens_per_s",), "tokens per second through the update", floor=0.0),
)


class Point(NamedTuple):
    """One point: step, value, and ends of its interval (NaN without one)."""

    step: float
    value: float
    low: float
    high: float


def curves(rows: Rows) -> str:
    """Return all panels for which the rows have values, as HTML."""
    drawn = []
    for panel in PANELS:
        shown = _online(rows) if panel.online else rows
        if any(_points(shown, key, panel.band) for key in panel.series):
            drawn.append(chart(shown, panel))
    return "".join(drawn)


def is_online_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a step that trained on new rollouts, and not on recorded traces or in a replay.

    >>> is_online_step({"step": 1, "reward": 0.5}), is_online_step({"step": 1, "reward": 0.5, "trajectories": 64})
    (False, True)
    """
    return "trajectories" in row


def _online(rows: Rows) -> Rows:
    return [row for row in rows if is_online_step(row)]


def overlay_curves(runs: Mapping[str, Rows]) -> str:
    """Return the first series of each panel with one line per run over a common step axis, as HTML.

    A run has the same colour in all panels.

    >>> rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    >>> overlay_curves({"a": rows, "b": rows}).count("<polyline")
    2
    """
    drawn = []
    for panel in PANELS:
        key, rows = panel.series[0], []
        for name, run_rows in runs.items():
            shown = _online(run_rows) if panel.online else run_rows
            rows += [{"step": step_of(row, index), name: row[key]} for index, row in enumerate(shown) if key in row]
        level = panel.level if not isinstance(panel.level, str) else None
        if any(_points(rows, name, None) for name in runs):
            drawn.append(chart(rows, Panel(panel.title, tuple(runs), panel.note, None, level, panel.floor)))
    return "".join(drawn)


def chart(rows: Rows, panel: Panel) -> str:
    """Return one panel as HTML with an inline SVG."""
    all_series = [(index, key, _thinned(_points(rows, key, panel.band))) for index, key in enumerate(panel.series)]
    series = [(index, key, points) for index, key, points in all_series if points]
    level = _level(rows, panel.level)
    x = _Axis.steps(rows)
    values = [end for _, _, points in series for point in points for end in point[1:] if math.isfinite(end)]
    y = _Axis.of(values + ([level] if level is not None else []), panel.floor)
    parts = [_grid(x, y)]
    if level is not None:
        parts.append(f'<path class="level" d="M{_LEFT},{y.at(level, True):.1f}H{_WIDTH - _RIGHT}"/>')
    for index, _, points in series:
        parts.append(_line(points, x, y, index))
    for index, key, points in series:
        parts.append(_hover(points, x, y, index, key if len(series) > 1 else ""))
    keys = [f'<span class="key s{index}">{escape(key)}</span>' for index, key, _ in series]
    legend = "".join(keys) if len(panel.series) > 1 else ""
    last = " · ".join(number(points[-1].value) for _, _, points in series)
    return (
        f"<figure><figcaption><b>{escape(panel.title)}</b><output>{last}</output>"
        f"<small>{escape(panel.note)}{legend}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(panel.title)}, last value {last}">'
        f"{''.join(parts)}</svg></figure>"
    )


class Bar(NamedTuple):
    """One value of `intervals`, with the ends of its 95 % interval (NaN without one) and the text to print."""

    name: str
    value: float
    low: float
    high: float
    text: str


def intervals(bars: Sequence[Bar], unit: str = "") -> str:
    """Return an SVG of values with their 95 % intervals on a common scale, one below the other.

    The scale is 0 to 1 if all values are, and follows them otherwise.

    Args:
        bars: at most four values.
        unit: "%" prints the ends of the scale as percentages.
    """
    ends = [end for bar in bars for end in bar[1:4] if math.isfinite(end)]
    low, high = (0.0, 1.0) if min(ends) >= 0 and max(ends) <= 1 else _Axis.of(ends, None)[:2]

    def at(value: float) -> str:
        return f"{6 + (_WIDTH - 12) * (value - low) / (high - low):.1f}"

    parts = []
    for index, bar in enumerate(bars):
        y = 32 + 40 * index
        parts.append(
            f'<text class="bar" x="0" y="{y - 14}"><tspan>{escape(bar.name)}</tspan> {escape(bar.text)}</text>'
        )
        parts.append(f'<path class="rail" d="M6,{y}H{_WIDTH - 6}"/>')
        if math.isfinite(bar.low):
            parts.append(f'<path class="whisker s{index}" d="M{at(bar.low)},{y}H{at(bar.high)}"/>')
        parts.append(f'<circle class="dot s{index}" cx="{at(bar.value)}" cy="{y}" r="5"/>')
    height = 40 * len(bars) + 12
    scale = [f"{100 * end:g} %" if unit == "%" else number(end) for end in (low, high)]
    parts.append(f'<text x="0" y="{height - 2}">{scale[0]}</text>')
    parts.append(f'<text class="y" x="{_WIDTH}" y="{height - 2}">{scale[1]}</text>')
    label = "95 % intervals: " + "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return (
        f'<svg class="intervals" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], floor: float | None, intervals: int = 3) -> "_Axis":
        low, high = min(values), max(values)
        low = low if floor is None else min(low, floor)
        # Values that differ only by rounding count as one. Ticks between them would have equal labels.
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            margin = abs(low) * 0.1 or 0.5
            low, high = low - margin * (low != floor), high + margin
        raw = (high - low) / intervals
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
        first, last = math.floor(low / step + 1e-3), math.ceil(high / step - 1e-3)
        return cls(first * step, last * step, tuple(n * step for n in range(first, last + 1)))

    @classmethod
    def steps(cls, rows: Rows) -> "_Axis":
        """Return the axis from the first step to the last. It is the same for all panels."""
        steps = [step_of(row, index) for index, row in enumerate(rows)]
        low, high = min(steps), max(steps)
        ticks = cls.of([low, high], None, 4).ticks
        return cls(low, max(high, low + 1), tuple(tick for tick in ticks if low <= tick <= high))

    def at(self, value: float, vertical: bool = False) -> float:
        share = (value - self.low) / (self.high - self.low)
        if vertical:
            return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _points(rows: Rows, key: str, band: tuple[str, str] | None) -> list[Point]:
    out = []
    for index, row in enumerate(rows):
        value = as_number(row.get(key))
        if key == "ope_ess_fraction" and not row.get("ope_traces", 1):
            continue  # No held-out trace has a weight, so there is no sample.
        if value is not None and (key != "ope" or off_policy_estimate(row)):
            ends = [as_number(row.get(end)) for end in band] if band else [None, None]
            low, high = (math.nan if end is None else end for end in ends)
            out.append(Point(step_of(row, index), value, low, high))
    return out


def step_of(row: Mapping[str, Any], index: int) -> float:
    """Return the optimizer step of a row, or its index if the row has no step."""
    step = as_number(row.get("step"))
    return float(index) if step is None else step


def as_number(value: Any) -> float | None:
    """Return a value of a row as a float; None if it is not a finite number of at most 1e30."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return None
    return float(value) if abs(value) < 1e30 else None


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most about `_MOST_POINTS` points. Neighbours are averaged, except for the last point."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [Point(*(sum(column) / len(column) for column in zip(*part, strict=True))) for part in parts]
    return [*means, points[-1]]


def _level(rows: Rows, level: str | float | None) -> float | None:
    if not isinstance(level, str):
        return level
    values = [value for row in rows if (value := as_number(row.get(level))) is not None]
    return values[-1] if values else None


def _grid(x: _Axis, y: _Axis) -> str:
    rules = [f"M{_LEFT},{y.at(tick, True):.1f}H{_WIDTH - _RIGHT}" for tick in y.ticks]
    texts = [
        f'<text class="y" x="{_LEFT - 6}" y="{y.at(tick, True) + 3.5:.1f}">{_tick(tick, y)}</text>' for tick in y.ticks
    ]
    x_ticks = [tick for tick in x.ticks if tick == int(tick)]
    texts += [f'<text class="x" x="{x.at(tick):.1f}" y="{_HEIGHT - 6}">{number(tick)}</text>' for tick in x_ticks]
    return f'<path class="grid" d="{"".join(rules)}"/>{"".join(texts)}'


def _tick(value: float, axis: _Axis) -> str:
    """Return a label with the digits that tell neighbouring ticks apart."""
    step = axis.ticks[1] - axis.ticks[0]
    digits = max(0, 1 - math.floor(math.log10(step)))
    short = number(round(value, digits))
    largest = max(abs(tick) for tick in axis.ticks)
    # Four significant digits are enough unless the ticks are close together.
    if step >= 1e-3 * largest:
        return short
    is_whole = math.isclose(step * 10 ** (digits - 1), round(step * 10 ** (digits - 1)))
    return f"{value:,.{max(0, digits - is_whole)}f}"


def _line(points: list[Point], x: _Axis, y: _Axis, index: int) -> str:
    parts = []
    band = [point for point in points if math.isfinite(point.low) and math.isfinite(point.high)]
    if len(band) > 1:
        upper = " ".join(f"{x.at(p.step):.1f},{y.at(p.high, True):.1f}" for p in band)
        lower = " ".join(f"{x.at(p.step):.1f},{y.at(p.low, True):.1f}" for p in reversed(band))
        parts.append(f'<polygon class="band s{index}" points="{upper} {lower}"/>')
    path = " ".join(f"{x.at(point.step):.1f},{y.at(point.value, True):.1f}" for point in points)
    parts.append(f'<polyline class="line s{index}" points="{path}"/>')
    if len(points) == 1:
        parts.append(f'<circle class="dot s{index}" cx="{path.split(",")[0]}" cy="{path.split(",")[1]}" r="3.5"/>')
    return "".join(parts)


def _hover(points: list[Point], x: _Axis, y: _Axis, index: int, name: str) -> str:
    """Return invisible strips, each with the point and the numbers to show on hover."""
    parts = []
    half = (_WIDTH - _LEFT - _RIGHT) / max(len(points), 2) / 2
    for point in points:
        px, py = x.at(point.step), y.at(point.value, True)
        band = f" [{number(point.low)}, {number(point.high)}]" if math.isfinite(point.low) else ""
        text = f"step {number(round(point.step))}: {number(point.value)}{band}"
        anchor, text_x = ("start", px + 7) if px < _WIDTH / 2 else ("end", px - 7)
        top, height = (_TOP, _HEIGHT - _TOP - _BOTTOM) if not name else (py - 9, 18)
        parts.append(
            f'<g class="at"><rect x="{px - half:.1f}" y="{top:.1f}" width="{2 * half:.1f}" height="{height:.1f}"/>'
            f'<circle class="dot s{index}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>'
            f'<text class="tip" text-anchor="{anchor}" x="{text_x:.1f}" y="{max(py - 8, _TOP + 8):.1f}">'
            f"{escape(name + ' ' if name else '')}{text}</text></g>"
        )
    return "".join(parts)
