"""Draw the curves of a run as inline SVG: no script, no plotting library, numbers on hover.

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
    """

    title: str
    series: tuple[str, ...]
    note: str
    band: tuple[str, str] | None = None
    level: str | float | None = None
    floor: float | None = None


_EVAL = ("eval_low", "eval_high")
PANELS = (
    Panel("evaluation", ("eval_reward",), "mean reward of the tasks that are not trained on, 95 % interval", _EVAL),
    Panel("reward", ("reward",), "mean reward of the traces of a step"),
    Panel("loss", ("loss",), "what was minimised"),
    Panel(
        "value",
        ("ope",),
        "importance-weighted reward on held-out groups where it is known, 95 % interval; dashed: as recorded",
        ("ope_low", "ope_high"),
        "ope_recorded_reward",
    ),
    Panel(
        "ratio mean", ("ratio_mean",), "ratio inside the surrogate; dashed: 1, the policy it was taken from", level=1.0
    ),
    Panel("clip fraction", ("clip_fraction",), "share of terms whose gradient the clip removed", floor=0.0),
    Panel(
        "effective sample size",
        ("ope_ess_fraction", "token_ess"),
        "share of samples that still count: held-out traces, weighted terms",
        floor=0.0,
    ),
    Panel(
        "good and bad samples",
        ("logprob_good", "logprob_bad"),
        "mean logprob of held-out traces above and below their group",
    ),
    Panel("distance from the recording", ("kl_rollout_theta",), "KL(rollout, theta), nats a token", floor=0.0),
    Panel("entropy", ("entropy",), "nats a token", floor=0.0),
    Panel(
        "server and trainer",
        ("weight_check/max", "weight_check/p99", "weight_check/p50"),
        "|theta - rollout|, nats, before an update",
        floor=0.0,
    ),
    Panel(
        "where the time went",
        ("time/rollout_wait", "time/prepare", "time/train", "time/weight_sync"),
        "seconds of a step",
        floor=0.0,
    ),
    Panel("lag", ("staleness_mean", "staleness_max"), "updates that the trainer was ahead of what sampled", floor=0.0),
    Panel(
        "what went wrong",
        ("branches_extra", "tokens_lost", "calls_retried", "trajectories_failed"),
        "extra branches and lost tokens of a step; calls sent again and failed trajectories so far",
        floor=0.0,
    ),
    Panel("gradient norm", ("grad_norm",), "before clipping", floor=0.0),
    Panel("speed", ("tokens_per_s",), "tokens a second through the update", floor=0.0),
)


class Point(NamedTuple):
    """One point: step, value, and ends of its interval (NaN without one)."""

    step: float
    value: float
    low: float
    high: float


def curves(rows: Rows) -> str:
    """Return all panels for which the rows have values, as HTML."""
    drawn = [panel for panel in PANELS if any(_points(rows, key, panel.band) for key in panel.series)]
    return "".join(chart(rows, panel) for panel in drawn)


def overlay_curves(runs: Mapping[str, Rows]) -> str:
    """Return the first series of each panel with one line per run over a common step axis, as HTML.

    >>> rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    >>> overlay_curves({"a": rows, "b": rows}).count("<polyline")
    2
    """
    drawn = []
    for panel in PANELS:
        key, rows = panel.series[0], []
        for name, run_rows in runs.items():
            rows += [{"step": step_of(row, index), name: row[key]} for index, row in enumerate(run_rows) if key in row]
        level = panel.level if not isinstance(panel.level, str) else None
        if names := tuple(name for name in runs if _points(rows, name, None)):
            drawn.append(chart(rows, Panel(panel.title, names, panel.note, None, level, panel.floor)))
    return "".join(drawn)


def chart(rows: Rows, panel: Panel) -> str:
    """Return one panel as HTML with an inline SVG."""
    series = [(key, _thinned(_points(rows, key, panel.band))) for key in panel.series]
    series = [(key, points) for key, points in series if points]
    level = _level(rows, panel.level)
    x = _Axis.steps(rows)
    values = [end for _, points in series for point in points for end in point[1:] if math.isfinite(end)]
    y = _Axis.of(values + ([level] if level is not None else []), panel.floor)
    parts = [_grid(x, y)]
    if level is not None:
        parts.append(f'<path class="level" d="M{_LEFT},{y.at(level, True):.1f}H{_WIDTH - _RIGHT}"/>')
    for index, (_, points) in enumerate(series):
        parts.append(_line(points, x, y, index))
    for index, (key, points) in enumerate(series):
        parts.append(_hover(points, x, y, index, key if len(series) > 1 else ""))
    legend = "".join(f'<span class="key s{i}">{escape(key)}</span>' for i, (key, _) in enumerate(series)) * (
        len(series) > 1
    )
    last = " · ".join(number(points[-1].value) for _, points in series)
    return (
        f"<figure><figcaption><b>{escape(panel.title)}</b><output>{last}</output>"
        f"<small>{escape(panel.note)}{legend}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(panel.title)}, last value {last}">'
        f"{''.join(parts)}</svg></figure>"
    )


def interval(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return an SVG of the success before and after, with 95 % intervals, on a scale from 0 to 100 %."""
    lines = []
    for index, (name, estimate) in enumerate((("before", before), ("after", after))):
        low, high = (100 * float(end) for end in estimate["ci95"])
        share, y = 100 * float(estimate["success"]), 18 + 30 * index
        text = f"{share:.1f} % [{low:.1f}, {high:.1f}], n = {int(estimate['n']):,}"
        lines.append(
            f'<text x="0" y="{y + 4}">{name}</text><path class="rail" d="M60,{y}h300"/>'
            f'<path class="whisker s{index}" d="M{60 + 3 * low:.1f},{y}H{60 + 3 * high:.1f}"/>'
            f'<circle class="dot s{index}" cx="{60 + 3 * share:.1f}" cy="{y}" r="5"/>'
            f'<text x="374" y="{y + 4}">{text}</text>'
        )
    label = "success rate before and after, with 95 % intervals"
    return f'<svg class="success" viewBox="0 0 620 68" role="img" aria-label="{label}">{"".join(lines)}</svg>'


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
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
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
        value = _finite(row.get(key))
        if value is not None and (key != "ope" or off_policy_estimate(row)):
            ends = [_finite(row.get(end)) for end in band] if band else [None, None]
            low, high = (math.nan if end is None else end for end in ends)
            out.append(Point(step_of(row, index), value, low, high))
    return out


def step_of(row: Mapping[str, Any], index: int) -> float:
    """Return the optimizer step of a row, or its index if the row has no step."""
    step = _finite(row.get("step"))
    return float(index) if step is None else step


def _finite(value: Any) -> float | None:
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
    values = [value for row in rows if (value := _finite(row.get(level))) is not None]
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
    step = axis.ticks[1] - axis.ticks[0]
    return number(round(value, max(0, 1 - math.floor(math.log10(step)))))


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
