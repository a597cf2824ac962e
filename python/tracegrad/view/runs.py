"""Runs as a piece of HTML: a list, what their configs differ in, and curves, two runs over each other."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tracegrad import config, metrics, recipes
from tracegrad._html import escape, number, percent
from tracegrad.errors import TracegradError
from tracegrad.report.charts import curves, overlaid

_QUIET_S = 180.0
_MOST_JSON = 16 << 20
_MOST_ROWS = 20_000
_MOST_FINDINGS = 40


def page(runs: Sequence[Path], chosen: Sequence[str] = ()) -> str:
    """All runs; curves of the chosen ones, at most two, or of the first."""
    if not runs:
        return "<p>No run is among the paths. Name the --out of one: tracegrad view traces.jsonl out/</p>"
    names = _names(runs)
    picked = [name for name in names if name in chosen][:2] or list(names)[:1]
    rows = {name: _rows(names[name]) for name in picked}
    configs = {name: _config(path) for name, path in names.items()}
    lines = [_line(name, path, configs[name], name in picked) for name, path in names.items()]
    heads = "".join(
        f"<th>{head}</th>" for head in ("", "run", "state", "recipe", "objective", "steps", "reward", "outcome")
    )
    drawn = overlaid(rows) if len(picked) > 1 else curves(rows[picked[0]])
    return (
        f"<h1>Runs</h1>{_table(heads, lines)}{_differences(configs, picked)}<h2>{escape(' and '.join(picked))}</h2>"
        f'<div class="curves">{drawn or "<p>No step was taken yet.</p>"}</div>'
        f"{''.join(_found(names[name], name) + _doctor(names[name], name) for name in picked)}"
    )


def state_of(run: Path, now: float | None = None) -> str:
    """ "running", "done", or how it was stopped, by what stands in its folder."""
    summary = _json(run / "summary.json")
    lines = run / "metrics.jsonl"
    changed = lines.stat().st_mtime if lines.is_file() else 0.0
    there = (run / "summary.json").stat().st_mtime if summary else 0.0
    if changed > there + _QUIET_S / 30 and (time.time() if now is None else now) - changed < _QUIET_S:
        return "running"
    if stopped := summary.get("stopped"):
        return {"done": "done", "signal": "stopped on request", "ess": "stopped: too small a sample"}.get(
            str(stopped), str(stopped)[:40]
        )
    return "ended" if changed else "not begun"


def _names(runs: Sequence[Path]) -> dict[str, Path]:
    """Short names, and whole paths where short ones are equal."""
    short = [run.name for run in runs]
    return {run.name if short.count(run.name) == 1 else str(run): run for run in runs}


def _line(name: str, run: Path, told: Mapping[str, Any], picked: bool) -> str:
    rows, summary = _rows(run), _json(run / "summary.json")
    last = rows[-1] if rows else {}
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), (int, float))]
    cells = [
        state_of(run),
        recipe_of(told),
        str(told.get("objective.preset", "?")),
        number(last["step"]) if isinstance(last.get("step"), (int, float)) else "0",
        f"{number(rewards[0])} → {number(rewards[-1])}" if rewards else "",
        _outcome(rows, summary),
    ]
    marked = " checked" * picked
    box = f'<input type="checkbox" data-run="{escape(name)}" aria-label="show {escape(name)}"{marked}>'
    return f"<td>{box}</td><td><b>{escape(name)}</b></td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}"


def recipe_of(told: Mapping[str, Any]) -> str:
    """The recipe that a config follows in all that it fixes, the one that fixes most; "" where it follows none.

    >>> told = config.as_dict(recipes.find("DR_GRPO").settle()[0])
    >>> recipe_of(told), recipe_of({**told, "objective.surrogate.high": 0.5})
    ('DR_GRPO', '')
    """
    now = {**told, "objective": told.get("objective.preset")}
    changed = {name for name in now if name.startswith("objective.") and name != "objective.preset"}
    followed = [
        (len(fixed), name)
        for name, fixed in _fixed().items()
        if all(now.get(option) == value for option, value in fixed.items()) and changed <= fixed.keys()
    ]
    return max(followed, key=lambda each: each[0])[1] if followed else ""


@cache
def _fixed() -> dict[str, dict[str, Any]]:
    """What each recipe fixes, those that fix no more than a loss left out."""
    named = {name: getattr(recipes, name) for name in recipes.__all__}
    options = {name: dict(value.options) for name, value in named.items() if isinstance(value, recipes.Recipe)}
    return {name: fixed for name, fixed in options.items() if len(fixed) > 1}


def _outcome(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Success before and after, or value, with their intervals, or the last evaluation."""
    told: list[Any] = [summary.get("before"), summary.get("after")]
    if all(isinstance(each, Mapping) and _is_share(each) for each in told):
        spans = [f"{percent(each['success'])} [{' to '.join(percent(end) for end in each['ci95'])}]" for each in told]
        return f"success {' → '.join(spans)}"
    for key in ("eval_reward", "off_policy_value"):
        low, high = (
            ("eval_low", "eval_high") if key == "eval_reward" else ("off_policy_value_low", "off_policy_value_high")
        )
        last = next((row for row in reversed(rows) if isinstance(row.get(key), (int, float))), None)
        if last is not None and key == "off_policy_value" and metrics.off_policy_value_of(last) is None:
            return "off policy value not known"
        if last is not None:
            span = f" [{number(last[low])}, {number(last[high])}]" if _known(last, low, high) else ""
            return f"{key.replace('_', ' ')} {number(last[key])}{span}"
    return ""


def _is_share(told: Mapping[str, Any]) -> bool:
    ends = told.get("ci95")
    return isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, (told.get("success"), *ends)))


def _is_number(value: Any) -> bool:
    """Whether a value of a file is a number that can be shown and computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e30 < value < 1e30


def _known(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), (int, float)) for name in names)


def _differences(configs: Mapping[str, Mapping[str, Any]], picked: Sequence[str]) -> str:
    """What the configs differ in, or what the one run was told otherwise than the defaults."""
    if len(configs) > 1:
        shown = list(picked) if len(picked) > 1 else list(configs)[:6]
        title, columns = "What they were told differently", {name: configs[name] for name in shown}
    else:
        title = "What it was told otherwise than the defaults"
        columns = {"default": config.as_dict(config.Config()), picked[0]: configs[picked[0]]}
    every = dict.fromkeys(key for own in columns.values() for key in own)
    options = [key for key in every if len({repr(own.get(key)) for own in columns.values()}) > 1]
    if not options:
        return f"<h2>{title}</h2><p>Nothing.</p>"
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("option", *columns))
    cells = [[key, *(own.get(key, "") for own in columns.values())] for key in options[:60]]
    return f"<h2>{title}</h2>{_table(heads, [''.join(f'<td>{escape(cell)}</td>' for cell in row) for row in cells])}"


def _table(heads: str, rows: Sequence[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _found(run: Path, name: str) -> str:
    """What is known of its data: the drift account that reading left."""
    summary = _json(run / "summary.json")
    drift, recorded, exact = summary.get("drift"), summary.get("recorded"), summary.get("exact")
    if not isinstance(drift, Mapping):
        return ""
    text = (
        f"{percent(1 - exact / recorded)} of {recorded:,} recorded tokens"
        if recorded and _is_number(recorded) and _is_number(exact)
        else ""
    )
    told = f"<p>{text} are without an exact id and logprob.</p>" if text else ""
    found = [(str(reason).replace("_", " "), json.dumps(counts)) for reason, counts in list(drift.items())[:20]]
    lines = "".join(f"<li>{escape(reason)}: {escape(counts)}</li>" for reason, counts in found)
    return f"<h2>What reading found, {escape(name)}</h2>{told}<ul>{lines}</ul>"


def _doctor(run: Path, name: str) -> str:
    """What the doctor found of its data, where RUN/doctor.json holds it; else the command that puts it there."""
    title, said = f"<h2>What the doctor found, {escape(name)}</h2>", _json(run / "doctor.json")
    findings = said.get("findings")
    if not isinstance(findings, list):
        command = _asks_the_doctor(run)
        told = f'<p>It was not asked. This puts its answer here:</p><pre class="call">{escape(command)}</pre>'
        return title + told if command else ""
    known = [each for each in findings[:_MOST_FINDINGS] if isinstance(each, dict)]
    rows = []
    for each in known:
        count, of, unit = (str(each.get(key, "?"))[:40] for key in ("count", "of", "unit"))
        cells = (each.get("severity", ""), each.get("title", ""), f"{count} of {of} {unit}", each.get("cure", ""))
        rows.append("".join(f"<td>{escape(str(cell)[:500])}</td>" for cell in cells))
    heads = "".join(f"<th>{head}</th>" for head in ("severity", "what", "how many", "cure"))
    verdict = f"<p>{len(findings)} findings, the worst of them: {escape(str(said.get('verdict'))[:40])}</p>"
    return title + verdict + (_table(heads, rows) if rows else "")


def _asks_the_doctor(run: Path) -> str:
    """The command that examines what a run was made of; "" where its summary does not say."""
    made_of = _json(run / "summary.json").get("provenance")
    traces, model = (made_of.get("traces"), made_of.get("model")) if isinstance(made_of, dict) else (None, None)
    if not isinstance(traces, list) or not isinstance(model, dict):
        return ""
    paths = [str(each.get("path")) for each in traces[:20] if isinstance(each, dict)]
    command = shlex.join(["tracegrad", "doctor", *paths, "--model", str(model.get("path")), "--json"])
    return f"{command} > {shlex.quote(str(run / 'doctor.json'))}"


def _rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    try:
        found = metrics.read_rows(path)[-_MOST_ROWS:] if path.is_file() else []
        sane = ({key: value for key, value in row.items() if _is_number(value) or not _numeric(value)} for row in found)
        return [row for row in sane if "step" in row]
    except TracegradError:
        return []  # a line is being written; the next look has it


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _config(run: Path) -> dict[str, Any]:
    path = run / "config.toml"
    try:
        return config.as_dict(config.load(path)) if path.is_file() else {}
    except TracegradError as error:
        return {"config.toml": str(error)[:200]}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size < _MOST_JSON else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
