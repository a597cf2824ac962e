"""Render runs as HTML: a list, differences of their configs, and curves of one or two runs."""

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from tracegrad import config, metrics, recipes
from tracegrad._html import escape, number, plural
from tracegrad.alignment.mismatch import describe_inexact
from tracegrad.errors import TracegradError
from tracegrad.report.charts import Rows, as_number, curves, is_online_step, overlay_curves
from tracegrad.report.outcome import measured_outcomes, success_outcome
from tracegrad.report.page import STOP_REASONS
from tracegrad.storage.run_dir import read_status
from tracegrad.view import detail

_QUIET_S = 180.0
_MOST_JSON = 16 << 20
_MOST_ROWS = 20_000
_MOST_FINDINGS = 40
_MOST_REASONS = 100
_MOST_COLUMNS = 6
_READ = ("metrics.jsonl", "summary.json", "config.toml", "doctor.json")
_ENDS = {"done": "done", "tasks": "ended: no tasks left", **STOP_REASONS}


def page(runs: Sequence[Path], chosen: Sequence[str] = ()) -> str:
    """Return the list of all runs, with curves of the chosen ones (at most two) or of the first."""
    if not runs:
        return "<h1>Runs</h1><p>No path is a run. Pass the --out folder of one: tracegrad view traces.jsonl out/</p>"
    names = _names(runs)
    selected = _selected(names, chosen)
    rows = {name: _rows(names[name]) for name in selected}
    configs = {name: _config(path) for name, path in names.items()}
    lines = [_line(name, path, configs[name], name in selected) for name, path in names.items()]
    heads = ("show", "run", "state", "recipe", "objective", "steps", "reward", "outcome")
    charts = overlay_curves(rows) if len(selected) > 1 else curves(rows[selected[0]])
    chosen_runs = {name: names[name] for name in selected}
    return (
        f"<h1>Runs</h1>{detail.table(heads, lines)}{_differences(configs, selected)}"
        f"<h2>{escape(' and '.join(selected))}</h2>"
        f'<div class="curves">{charts or "<p>No step was taken yet.</p>"}</div>{_mismatches(chosen_runs)}'
        f"{''.join(_doctor(run, name) for name, run in chosen_runs.items())}"
    )


def version(runs: Sequence[Path], chosen: Sequence[str] = ()) -> str:
    """Return a text that changes when `page` can change, without reading the files of the runs."""
    stats = [_stat(run / name) for run in runs for name in _READ]
    status = [(read_status(run), _is_recent(run, time.time())) for run in runs]
    return repr((stats, status, _selected(_names(runs), chosen)))


def state_of(run: Path, now: float | None = None) -> str:
    """Return "running", "done", "crashed", "ended", "stopped" (with the reason) or "not started".

    The lock file of the run has its status. If it has none, the summary and the age of the metrics decide.
    """
    status = read_status(run)
    if status.state == "running":
        return "running"
    if status.state in ("failed", "killed"):
        return f"crashed ({status.detail})" if status.detail else "crashed"
    if status.state == "ended":
        return _ENDS.get(status.detail, status.detail[:40]) or "ended"
    summary, changed = _json(run / "summary.json"), _changed(run / "metrics.jsonl")
    is_newer = changed > (_changed(run / "summary.json") if summary else 0.0) + _QUIET_S / 30
    if status.state == "unknown" and is_newer and _is_recent(run, time.time() if now is None else now):
        return "running"
    if status.detail == "running elsewhere":
        return "unknown (begun on another machine)"
    if status.state == "unknown" and (reason := summary.get("stopped")):
        return _ENDS.get(str(reason), str(reason)[:40])
    return "stopped" if changed else "not started"


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _changed(path: Path) -> float:
    """Return when a file was changed, in seconds since the epoch. 0 if there is none."""
    status = _stat(path)
    return status[1] / 1e9 if status else 0.0


def _is_recent(run: Path, now: float) -> bool:
    return now - _changed(run / "metrics.jsonl") < _QUIET_S


def _selected(names: Iterable[str], chosen: Sequence[str]) -> list[str]:
    names = list(names)
    return [name for name in names if name in chosen][:2] or names[:1]


def _names(runs: Sequence[Path]) -> dict[str, Path]:
    """Return runs by short name, or by path if short names collide."""
    short = [run.name for run in runs]
    return {run.name if short.count(run.name) == 1 else str(run): run for run in runs}


def _line(name: str, run: Path, options: Mapping[str, Any], is_selected: bool) -> str:
    rows, summary = _rows(run), _json(run / "summary.json")
    last = rows[-1] if rows else {}
    # Recorded rewards follow the order of the data: a change from step to step is no progress.
    rewards = [row["reward"] for row in rows if is_online_step(row) and as_number(row.get("reward")) is not None]
    cells = [
        state_of(run),
        recipe_of(options) or _recipe_source(summary),
        str(options.get("objective.preset", "?")),
        number(last["step"]) if isinstance(last.get("step"), (int, float)) else "0",
        f"{number(rewards[0])} → {number(rewards[-1])}" if rewards else "",
        _outcome(rows, summary),
    ]
    checked = " checked" * is_selected
    box = f'<input type="checkbox" data-run="{escape(name)}" aria-label="show {escape(name)}"{checked}>'
    return f"<td>{box}</td><td><b>{escape(name)}</b></td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}"


def recipe_of(settings: Mapping[str, Any]) -> str:
    """Return the recipe whose options a config has, or "". If several match, return the one with most options.

    A config that sets other objective options in addition does not match.

    >>> settings = config.as_dict(recipes.find("DR_GRPO").resolve()[0])
    >>> recipe_of(settings), recipe_of({**settings, "objective.surrogate.high": 0.5})
    ('DR_GRPO', '')
    """
    current = {**settings, "objective": settings.get("objective.preset")}
    changed = {name for name in current if name.startswith("objective.") and name != "objective.preset"}
    matches = [
        (len(recipe_options), name)
        for name, recipe_options in _recipe_options().items()
        if all(current.get(option) == value for option, value in recipe_options.items())
        and changed <= recipe_options.keys()
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else ""


def _recipe_source(summary: Mapping[str, Any]) -> str:
    """Return the imported config of a run that ended, such as "trl:grpo.yaml", or ""."""
    recipe = summary.get("recipe")
    return str(recipe.get("source", "")) if isinstance(recipe, dict) else ""


@cache
def _recipe_options() -> dict[str, dict[str, Any]]:
    """Return the options of each recipe. Recipes that set only a loss are left out."""
    recipes_by_name = {name: getattr(recipes, name) for name in recipes.__all__}
    options = {
        name: dict(value.options) for name, value in recipes_by_name.items() if isinstance(value, recipes.Recipe)
    }
    return {name: values for name, values in options.items() if len(values) > 1}


def _outcome(rows: Rows, summary: Mapping[str, Any]) -> str:
    """Return the first outcome of report.html in short: its values with 95 % intervals, or that it is unknown."""
    before, after = summary.get("before"), summary.get("after")
    if _is_success(before) and _is_success(after):
        outcome = success_outcome(before, after)
    elif rows:
        outcome = measured_outcomes(rows, groups=0)[0]  # the number of groups is only in the sentences
    else:
        return ""
    values = ", ".join(f"{bar.name} {bar.text}" for bar in outcome.bars)
    return f"{outcome.name}: {values or 'unknown'}"


def _is_success(rate: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value of a summary is a measured success rate as `success_outcome` reads it."""
    ends = rate.get("ci95") if isinstance(rate, Mapping) else None
    if not isinstance(ends, list) or len(ends) != 2:
        return False
    return None not in map(as_number, (rate.get("success"), rate.get("n"), *ends))


def _differences(configs: Mapping[str, Mapping[str, Any]], selected: Sequence[str]) -> str:
    """Return a table of all settings that differ between the configs. For a single run, compare with the defaults."""
    note = ""
    if len(configs) > 1:
        names = list(selected) if len(selected) > 1 else list(configs)[:_MOST_COLUMNS]
        title, columns = "Settings that differ", {name: configs[name] for name in names}
        if len(selected) == 1 and len(configs) > _MOST_COLUMNS:
            note = f"<p>The first {_MOST_COLUMNS} runs are compared. Select two runs to compare these.</p>"
    else:
        title = "Settings that differ from the defaults"
        columns = {"default": config.as_dict(config.Config()), selected[0]: configs[selected[0]]}
    all_options = dict.fromkeys(key for options in columns.values() for key in options)
    differing = [key for key in all_options if len({repr(options.get(key)) for options in columns.values()}) > 1]
    if not differing:
        return f"<h2>{title}</h2><p>None.</p>"
    cells = [[key, *(options.get(key, "") for options in columns.values())] for key in differing]
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    return f"<h2>{title}</h2>{note}{detail.table(('setting', *columns), rows)}"


def _mismatches(runs: Mapping[str, Path]) -> str:
    """Return the alignment mismatches in the summaries of runs as one table, with two columns for each run."""
    summaries = {name: _json(run / "summary.json") for name, run in runs.items()}
    reports = {name: report for name in runs if isinstance(report := summaries[name].get("alignment_report"), Mapping)}
    if not reports:
        return ""
    reasons = sorted({str(reason) for report in reports.values() for reason in report})[:_MOST_REASONS]
    rows = []
    for reason in reasons:
        counts = [report.get(reason) for report in reports.values()]
        cells = [_count(count, key) for count in counts for key in ("traces", "tokens")]
        rows.append(detail.reason_cell(reason) + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells))
    prefixes = [f"{name}: " if len(reports) > 1 else "" for name in reports]
    heads = ["mismatch", *(f"{prefix}{key}" for prefix in prefixes for key in ("traces", "tokens"))]
    shares = "".join(_inexact_share(name, summaries[name]) for name in reports)
    return f"<h2>Alignment mismatches</h2>{shares}{detail.table(heads, rows) if rows else '<p>None.</p>'}"


def _inexact_share(name: str, summary: Mapping[str, Any]) -> str:
    levels = summary.get("levels")
    rows = levels.items() if isinstance(levels, Mapping) else ()
    tokens = {
        name: {"tokens": int(as_number(row.get("tokens")) or 0)} for name, row in rows if isinstance(row, Mapping)
    }
    recorded, exact = as_number(summary.get("recorded")), as_number(summary.get("exact"))
    if not recorded or exact is None:
        return ""
    sentence = describe_inexact(int(recorded), int(exact), tokens)
    return f"<p>{escape(name)}: {sentence}</p>"


def _count(counts: Any, key: str) -> str:
    """Return a count of a mismatch reason: "0" for a run without this reason, "?" for a value that is no count."""
    if counts is None:
        return "0"
    value: Any = counts.get(key) if isinstance(counts, Mapping) else None
    return "?" if as_number(value) is None else number(value)


def _doctor(run: Path, name: str) -> str:
    """Return the doctor's findings from RUN/doctor.json, or the command that writes the file."""
    title, diagnosis = f"<h2>Findings of the doctor, {escape(name)}</h2>", _json(run / "doctor.json")
    findings = diagnosis.get("findings")
    if not isinstance(findings, list):
        command = _doctor_command(run)
        instruction = f'<p>No doctor.json. This command writes it:</p><pre class="call">{escape(command)}</pre>'
        return title + instruction if command else ""
    valid = [finding for finding in findings[:_MOST_FINDINGS] if isinstance(finding, dict)]
    rows = []
    for finding in valid:
        count, total, unit = (str(finding.get(key, "?"))[:40] for key in ("count", "of", "unit"))
        cells = (
            finding.get("severity", ""),
            finding.get("title", ""),
            f"{count} of {total} {unit}",
            finding.get("fix", ""),
        )
        rows.append("".join(f"<td>{escape(str(cell)[:500])}</td>" for cell in cells))
    verdict = f"<p>{plural(len(findings), 'finding')}, the worst: {escape(str(diagnosis.get('verdict'))[:40])}</p>"
    return title + verdict + (detail.table(("severity", "finding", "count", "fix"), rows) if rows else "")


def _doctor_command(run: Path) -> str:
    """Return the command that examines the data of a run, or "" if its summary does not name the data."""
    provenance = _json(run / "summary.json").get("provenance")
    traces, model = (
        (provenance.get("traces"), provenance.get("model")) if isinstance(provenance, dict) else (None, None)
    )
    if not isinstance(traces, list) or not traces or not isinstance(model, dict):  # no traces: records in memory
        return ""
    paths = [str(entry.get("path")) for entry in traces[:20] if isinstance(entry, dict)]
    command = shlex.join(["tracegrad", "doctor", *paths, "--model", str(model.get("path")), "--json"])
    return f"{command} > {shlex.quote(str(run / 'doctor.json'))}"


def _rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    try:
        rows = metrics.read_rows(path)[-_MOST_ROWS:] if path.is_file() else []
        finite = (
            {key: value for key, value in row.items() if not _numeric(value) or as_number(value) is not None}
            for row in rows
        )
        return [row for row in finite if "step" in row]
    except TracegradError:
        return []  # A line is being written. The next request will read it.


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
        contents = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size < _MOST_JSON else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}
