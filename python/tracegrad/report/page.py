"""Write report.html: whether training helped, curves, settings, the alignment report, and traces with their tokens.

`write_report` assembles the page and limits its size. The trainer provides rows and per-token arrays, and the
sequences provide the tables. `outcome` decides what the rows show.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tracegrad._html import escape, number, percent, plural
from tracegrad.alignment.mismatch import describe_inexact
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import LEVEL_TEXT
from tracegrad.errors import ReadError
from tracegrad.report.charts import Rows, as_number, curves, intervals, step_of
from tracegrad.report.outcome import Outcome, measured_outcomes, success_outcome
from tracegrad.report.token_map import PerToken, TermArrays, Thumbnails, select_examples, trace_html
from tracegrad.storage import files as outputs

__all__ = ["TermArrays", "TraceCounts", "add_success", "write_report"]

_MARKS = ("<!--success-->", "<!--/success-->")  # `add_success` writes between these. Escaped text cannot contain them.
_FIND = files("tracegrad.report").joinpath("find.js").read_text("utf-8")
_HASH = base64.b64encode(hashlib.sha256(_FIND.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
_DRAWN = "; img-src data:"
_MOST_TEXT, _MOST_CELL = 200, 4_000  # Limits of a name and of a cell of a table, in characters.
_MODES = (
    ("gradient", "how strongly, and in which direction, the token changes the policy"),
    ("ratio", "the ratio that the surrogate uses: theta / old, or theta / rollout"),
    ("weight", "the importance weight after truncation or masking"),
    ("advantage", "the reward compared with its group"),
    ("source", "sampled, prompt or template"),
)
STOP_REASONS = {
    "ope_ess": "stopped: effective sample size too small",
    "ope_falls": "stopped: off-policy estimate falls",
    "signal": "stopped by a signal",
}
"""Reasons in summary.json why a run stopped before its last step."""


class Decoder(Protocol):
    """Converts token ids to bytes: `tracegrad.Tokenizer`, or any object with this method."""

    def decode_bytes(self, ids: Any, /) -> bytes:
        """Return the concatenated bytes of ids."""
        ...


@dataclass(frozen=True)
class TraceCounts:
    """Counts over all traces of a run.

    Args:
        traces, groups, tokens, terms: numbers of each. Terms are trained tokens.
        levels: alignment level to counts, as `Sequences.levels` returns them.
        mismatches: reason to counts, as `AlignmentReport.table` returns them.
        recorded, exact: as in `AlignmentReport`.

    >>> from tracegrad import Sequences
    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [nan, -0.5, -0.1], [False, True, True], rewards=[1.0])
    >>> counts = TraceCounts.of(sequences)
    >>> counts.traces, counts.tokens, counts.terms
    (1, 3, 2)
    """

    traces: int
    groups: int
    tokens: int
    terms: int
    levels: Mapping[str, Mapping[str, int]]
    mismatches: Mapping[str, Mapping[str, int]]
    recorded: int
    exact: int

    @classmethod
    def of(cls, sequences: Sequences) -> "TraceCounts":
        """Return the counts of all traces in sequences."""
        report, terms = sequences.alignment_report, int(sequences.trainable.sum())
        groups = len(set(sequences.group.tolist()))
        counts = (sequences.traces, groups, sequences.tokens, terms, sequences.levels(), report.table())
        return cls(*counts, report.recorded, report.exact)


def write_report(
    path: str | os.PathLike[str],
    *,
    rows: Rows,
    sequences: Sequences,
    tokenizer: Decoder,
    terms: Iterable[TermArrays] = (),
    counts: TraceCounts | None = None,
    total_gradient: float | None = None,
    summary: Mapping[str, Any] | None = None,
    title: str = "tracegrad",
    part: str | None = None,
    about: Sequence[tuple[str, object]] = (),
    links: Sequence[str] = (),
    max_traces: int = 20,
    max_bytes: int = 6_000_000,
) -> None:
    """Write one self-contained page. All external text is escaped.

    Args:
        path: path of the page.
        rows: rows of metrics.jsonl. Numbers that are not finite are left out of the curves.
        sequences: the trained sequences, or the part of them that may be shown.
        tokenizer: converts ids to bytes. An id unknown to it is shown as a number.
        terms: per-token arrays of the steps to show, such as `TrainResult.terms`. Without them no trace is shown.
        counts: counts of all traces. Default: those of `sequences`.
        total_gradient: sum of |d loss / d logprob| over all trained tokens, the denominator of shares. Default: the sum
            over `terms`.
        summary: content of summary.json: `before` and `after` ({"success", "ci95": [lo, hi], "n"}), `seconds` by stage,
            `seed`, `steps_planned`, `stopped`, and the counts `trained`, `held_out`, `dropped` and `truncated`.
        title: title of the page.
        part: part of the run that `sequences` covers, such as "step 3". Default: the whole run. Numbers of traces and
            tokens of the whole run are then sums over `rows`.
        about: names and values: recipe, options, versions, paths.
        links: names of files in the same folder.
        max_traces: maximum number of traces. Those with the largest share of the gradient are shown, with advantages
            of both signs and from many groups.
        max_bytes: limit for all traces. Traces beyond it are left out, with a note on the page. A trace has at most
            about 300 kB, and a token 256 bytes; shortened text has a note too. Images are shown as thumbnails, at most
            64 distinct ones and 2 MB, the others as boxes.

    Raises:
        ReadError: if the file cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> from tracegrad import Sequences, Tokenizer
    >>> sequences = Sequences.from_arrays([22, 2], [0, 2], [float("nan"), -0.5], [False, True], rewards=[1.0])
    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "report.html")
    ...     write_report(path, rows=rows, sequences=sequences, tokenizer=tokenizer, title="First run")
    ...     "First run" in path.read_text()
    True
    """
    values = PerToken.of(sequences.tokens, terms)
    summary, counts = summary or {}, counts or TraceCounts.of(sequences)
    style = files("tracegrad.report").joinpath("style.css").read_text("utf-8") + colours(_PAIRS)
    traces = _traces(sequences, values, tokenizer, max_traces, max_bytes, total_gradient, part)
    policy = _POLICY + _DRAWN * ("<img " in traces)  # "<" is escaped in third-party text.
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title[:_MOST_TEXT])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width&#61;device-width,initial-scale&#61;1">'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{escape(title[:_MOST_TEXT])}</h1></header><main>{_outcome(rows, counts, summary)}{_curves(rows)}"
        f"{_settings(rows, counts, summary, about, links, part)}{_alignment(counts, part)}{traces}</main>"
        f"<script>{_FIND}</script></body></html>\n"
    )
    write_page(Path(path), page.encode())


def add_success(path: str | os.PathLike[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Put success rates before and after training, and their verdict, at the top of an existing page.

    Args:
        path: a page from `write_report`.
        before, after: {"success", "ci95": [lo, hi], "n"}, as in summary.json.

    Raises:
        ReadError: if there is no such page, or it cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> from tracegrad import Sequences, Tokenizer
    >>> sequences = Sequences.from_arrays([22, 2], [0, 2], [float("nan"), -0.5], [False, True], rewards=[1.0])
    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "report.html")
    ...     write_report(path, rows=[{"step": 1, "loss": 0.5}], sequences=sequences, tokenizer=tokenizer)
    ...     before = {"success": 0.25, "ci95": [0.2, 0.3], "n": 100}
    ...     add_success(path, before, {"success": 0.5, "ci95": [0.4, 0.6], "n": 100})
    ...     "Success on fresh prompts" in path.read_text()
    True
    """
    path = Path(path)
    try:
        page = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ReadError(f"TG-REPORT-002: {path}: cannot be read ({error}). Write the report first.") from error
    head, start_mark, rest = page.partition(_MARKS[0])
    _, end_mark, tail = rest.partition(_MARKS[1])
    if not start_mark or not end_mark:
        raise ReadError(f"TG-REPORT-003: {path}: it is not a page of write_report. Write the report first.")
    write_page(path, (head + start_mark + _success(success_outcome(before, after)) + end_mark + tail).encode())


def _outcome(rows: Rows, counts: TraceCounts, summary: Mapping[str, Any]) -> str:
    """Return the verdict, then each measurement with its interval, or the reason why it is unknown."""
    before, after = summary.get("before"), summary.get("after")
    outcomes = measured_outcomes(rows, counts.groups)
    verdict = _success(success_outcome(before, after)) if before and after else _verdict(outcomes[0])
    return f'<section id="outcome">{_MARKS[0]}{verdict}{_MARKS[1]}{"".join(map(_measurement, outcomes))}</section>'


def _success(outcome: Outcome) -> str:
    return _verdict(outcome) + _measurement(outcome)


def _verdict(outcome: Outcome) -> str:
    return f'<h2 class="verdict {outcome.verdict}">{escape(outcome.headline)}</h2>'


def _measurement(outcome: Outcome) -> str:
    name = f"{outcome.name}: unknown" if outcome.is_unknown else outcome.name
    drawn = intervals(outcome.bars, outcome.unit) if outcome.bars else ""
    return f"<h3>{escape(name)}</h3><p>{escape(outcome.sentences)}</p>{drawn}"


def _facts(rows: Rows, counts: TraceCounts, summary: Mapping[str, Any], part: str | None) -> list[tuple[str, str]]:
    """Return names and values of the run's size, as HTML."""
    trained = summary.get("trained")
    numbers = {
        "traces": counts.traces,
        "groups": counts.groups,
        "tokens": counts.tokens,
        "trained tokens": trained["tokens"] if trained else counts.terms,
    }
    if part is not None:
        keys = {name: name.replace("trained tokens", "tokens_trained") for name in numbers}
        values = {name: [as_number(row.get(key)) for row in rows if key in row] for name, key in keys.items()}
        numbers = {name: int(sum(value or 0 for value in found)) for name, found in values.items() if found}
    steps = number(step_of(rows[-1], len(rows))) if rows else "0"
    planned = as_number(summary.get("steps_planned"))
    facts = [
        ("steps", steps if planned is None else f"{steps} of {planned:,.0f}"),
        *((name, f"{value:,}") for name, value in numbers.items()),
        *_uses(summary),
    ]
    if reason := STOP_REASONS.get(str(summary.get("stopped"))):
        facts.insert(1, ("end", reason))
    seconds = summary.get("seconds")
    if isinstance(seconds, Mapping) and seconds:
        facts.append(("seconds", number(round(sum(float(duration) for duration in seconds.values()), 1))))
    if "seed" in summary:
        facts.append(("seed", escape(str(summary["seed"])[:_MOST_TEXT])))
    return facts


def _uses(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts about the traces with a gradient, the held-out ones, and those that are too long."""
    names = {"held_out": "held out", "dropped": "left out, too long", "truncated": "cut, too long"}
    parts = {name: part for key, name in names.items() if (part := summary.get(key)) and part["traces"]}
    facts = [
        (name, f"{plural(part['traces'], 'trace')}, {plural(part['tokens'], 'token')}") for name, part in parts.items()
    ]
    if trained := summary.get("trained"):
        traces = f"{trained['traces_with_gradient']:,} of {plural(trained['traces'], 'trace')}"
        facts.insert(0, ("gradient from", f"{traces}, {plural(trained['tokens_with_gradient'], 'token')}"))
    return facts


def _settings(
    rows: Rows,
    counts: TraceCounts,
    summary: Mapping[str, Any],
    about: Sequence[tuple[str, object]],
    links: Sequence[str],
    part: str | None,
) -> str:
    """Return the size of the run, a table of its settings, and links to files in the same folder."""
    facts = _facts(rows, counts, summary, part)
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    lines = [[name, str(value)] for name, value in about]
    settings = f'<div class="tables">{_table("settings", ("setting", "value"), lines, "none")}</div>' if lines else ""
    names = [name for name in links if re.fullmatch(r"[\w.-]+", name)]
    file_links = " · ".join(f'<a href="{name}">{name}</a>' for name in names)
    more = f"<p>{file_links}</p>" if file_links else ""
    return f'<section id="settings"><h2>Data and settings</h2><dl class="tiles">{tiles}</dl>{settings}{more}</section>'


def _curves(rows: Rows) -> str:
    drawn = curves(rows)
    return f'<section id="curves"><h2>Curves</h2><div class="curves">{drawn}</div></section>' if drawn else ""


def _alignment(counts: TraceCounts, part: str | None) -> str:
    levels = [[name, LEVEL_TEXT.get(name, ""), *numbers.values()] for name, numbers in counts.levels.items()]
    mismatches = [[reason, *numbers.values()] for reason, numbers in counts.mismatches.items()]
    exact = f"<p>{describe_inexact(counts.recorded, counts.exact, counts.levels)}</p>" if counts.recorded else ""
    level_heads = ("alignment level", "meaning", "tokens", "trainable tokens", "turns")
    mismatch_heads = ("mismatch", "count", "traces", "tokens")
    return (
        f'<section id="alignment"><h2>{_of_part("Alignment", part)}</h2>{exact}<div class="tables">'
        + _table("alignment levels", level_heads, levels, "no sampled tokens")
        + _table("mismatches", mismatch_heads, mismatches, "no mismatches")
        + "</div></section>"
    )


def _of_part(heading: str, part: str | None) -> str:
    return heading if part is None else f"{heading} in {escape(part[:_MOST_TEXT])}"


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str) -> str:
    """Return a table. The first cell of a row is its heading, and columns of integers are aligned to the right."""

    def text(value: Any) -> str:
        whole = str(value)
        return escape(whole if len(whole) <= _MOST_CELL else f"{whole[:_MOST_CELL]} …")

    def cell(value: Any) -> str:
        return f'<td class="n">{value:,}</td>' if isinstance(value, int) else f"<td>{text(value)}</td>"

    lines = "".join(f'<tr><th scope="row">{text(first)}</th>{"".join(map(cell, rest))}</tr>' for first, *rest in rows)
    lines = lines or f'<tr><td colspan="{len(heads)}">{nothing}</td></tr>'
    texts = ("alignment level", "meaning", "mismatch", "setting", "value")
    marks = ["" if head in texts else ' class="n"' for head in heads]
    titles = "".join(f'<th scope="col"{mark}>{head}</th>' for mark, head in zip(marks, heads, strict=True))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _traces(
    sequences: Sequences,
    values: PerToken,
    tokenizer: Decoder,
    most: int,
    most_bytes: int,
    total: float | None,
    part: str | None,
) -> str:
    if not (chosen := select_examples(sequences, values, most, total)):
        return ""
    cache: dict[int, bytes] = {}

    def token_bytes(token: int) -> bytes:
        if token not in cache:
            cache[token] = bytes_of(tokenizer, token)
        return cache[token]

    shown: list[str] = []
    size, drawn = 0, Thumbnails()
    for rank, (trace, share) in enumerate(chosen, 1):
        example = trace_html(sequences, values, token_bytes, trace, share, rank, chosen[0][1], drawn)
        size += len(example.encode())
        if size > most_bytes and shown:
            break
        shown.append(example)
    left_out = len(chosen) - len(shown)
    note = f"<p>{left_out} more would make this page larger than {most_bytes / 1e6:.0f} MB.</p>" if left_out else ""
    total_share = percent(sum(share for _, share in chosen[: len(shown)]))
    subject = "The trace below has" if len(shown) == 1 else f"The {len(shown)} traces below have"
    inputs = "".join(
        f'<input type="radio" name="mode" id="by-{mode}" aria-describedby="colour-by"'
        f'{" checked" * (mode == "gradient")}><label for="by-{mode}">{mode}</label>'
        for mode, _ in _MODES
    )
    return (
        f'<section id="traces"><h2>{_of_part("Traces with the largest gradients", part)}</h2>'
        f"<p>{subject} {total_share} of the gradient: the sum of |d loss / d logprob| over the trained tokens, in the "
        f"last pass over the data. {_describe_examples(sequences, values, [n for n, _ in chosen[: len(shown)]])}Point "
        "at a token for its numbers.</p>"
        '<p><label for="find">Search these traces</label> <input type="search" id="find">'
        ' <output id="count"></output></p>'
        f'<div class="modes"><span id="colour-by">Colour tokens by</span> {inputs}{_legend()}{"".join(shown)}</div>'
        f"{note}</section>"
    )


def _describe_examples(sequences: Sequences, values: PerToken, traces: list[int]) -> str:
    """Return a sentence about the signs of the advantages of several traces, and their groups; "" for one trace."""
    if len(traces) < 2:
        return ""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    advantages = np.nan_to_num(values.advantages[np.isin(owner, traces)])
    signs = {
        (True, True): "advantages of both signs",
        (True, False): "positive advantages",
        (False, True): "negative advantages",
        (False, False): "advantage 0",
    }[bool((advantages > 0).any()), bool((advantages < 0).any())]
    groups = len(np.unique(sequences.group[traces]))
    return f"They have {signs} and come from {plural(groups, 'group')}. "


def _legend() -> str:
    scale = "".join(f'<span class="t p{n} a{n} r{n} w{n}"> </span>' for n in range(17) if n != 8)
    meanings = "".join(f'<span class="scale meaning {mode}">{escape(meaning)}</span>' for mode, meaning in _MODES)
    return (
        f'<p class="legend">{meanings}<span class="scale gradient">lowers the logprob</span>'
        '<span class="scale ratio">below 1/1.5</span>'
        '<span class="scale weight">below 1/1.5</span><span class="scale advantage">negative</span>'
        f'<span class="ramp">{scale}</span>'
        '<span class="scale gradient">raises the logprob</span><span class="scale ratio">above 1.5</span>'
        '<span class="scale weight">above 1.5</span><span class="scale advantage">positive</span>'
        '<span class="g">prompt</span><span class="p">template</span><span class="s">sampled, not trained</span>'
        '<span class="t">trained</span><span class="t m">masked</span><span class="t c">clipped</span>'
        "<span><i>F0·9F</i> part of a character</span></p>"
    )


def bytes_of(tokenizer: Decoder | None, token: int) -> bytes:
    """Return the bytes of a token id. An unknown id becomes its number in brackets."""
    try:
        if tokenizer is None:
            raise ValueError
        return tokenizer.decode_bytes([token])
    except ValueError:
        return f"⟨{token}⟩".encode()


_PAIRS = {
    "gradient": ("down", "up"),
    "advantage": ("down", "up"),
    "ratio": ("less", "more"),
    "weight": ("less", "more"),
}


def colours(pairs: Mapping[str, tuple[str, str]]) -> str:
    """Return CSS rules for the classes p0 to w16, one colour scale per mode. Level 8 is neutral."""
    rules = []
    for mode, (below, above) in pairs.items():
        letter = "p" if mode == "gradient" else mode[0]  # "g" is the class of prompt tokens.
        for level in (n for n in range(17) if n != 8):
            colour = f"color-mix(in srgb,var(--{below if level < 8 else above}) {8 * abs(level - 8)}%,transparent)"
            rules.append(f"#by-{mode}:checked~* .{letter}{level}{{--c:{colour}}}")
    return "\n".join(rules)


def write_page(path: Path, page: bytes) -> None:
    """Write a page, completely or not at all.

    Raises:
        ReadError: if it cannot be written.
    """
    try:
        with outputs.write_atomically(path) as file:
            file.write(page)
    except OSError as error:
        raise ReadError(
            f"TG-REPORT-004: {path}: cannot be written ({error.strerror}). Free space there or choose another."
        ) from error
