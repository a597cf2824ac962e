"""Write report.html: facts of the run, its curves, its alignment report, and the traces with the largest gradient.

`write_report` assembles the page and limits its size. It computes no metrics. The trainer provides rows and per-token
arrays, and the sequences provide the tables.
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

from tracegrad._html import escape, number, percent
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import TIER_TEXT
from tracegrad.errors import ReadError
from tracegrad.report.charts import Rows, curves, interval, step_of
from tracegrad.report.token_map import PerToken, TermArrays, Thumbnails, select_examples, trace_html
from tracegrad.storage import files as outputs

__all__ = ["TermArrays", "TraceCounts", "add_success", "write_report"]

_MARKS = ("<!--success-->", "<!--/success-->")  # `add_success` writes between these. Escaped text cannot contain them.
_FIND = files("tracegrad.report").joinpath("find.js").read_text("utf-8")
_HASH = base64.b64encode(hashlib.sha256(_FIND.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
_DRAWN = "; img-src data:"
_MOST_TEXT = 200  # Limit of a name, in characters.
_MODES = (
    ("pull", "pull", "how hard, and which way, the token moves the policy"),
    ("ratio", "ratio", "theta over the policy that the surrogate compares with"),
    ("weight", "weight", "the detached correction"),
    ("advantage", "advantage", "what the trace earned above its group"),
    ("source", "source", "sampled, given or template"),
)


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
        tiers, drift: name to counts, as `Sequences.tiers` and `AlignmentReport.table` return them.
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
    tiers: Mapping[str, Mapping[str, int]]
    drift: Mapping[str, Mapping[str, int]]
    recorded: int
    exact: int

    @classmethod
    def of(cls, sequences: Sequences) -> "TraceCounts":
        """Return the counts of all traces in sequences."""
        drift, terms = sequences.alignment_report, int(sequences.trainable.sum())
        groups = len(set(sequences.group.tolist()))
        counts = (sequences.traces, groups, sequences.tokens, terms, sequences.tiers(), drift.table())
        return cls(*counts, drift.recorded, drift.exact)


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
            `seed`.
        title: title of the page.
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
    traces = _traces(sequences, values, tokenizer, max_traces, max_bytes, total_gradient)
    policy = _POLICY + _DRAWN * ("<img " in traces)  # "<" is escaped in third-party text.
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title[:_MOST_TEXT])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width&#61;device-width"><style>{style}</style></head><body>'
        f"{_opening(title, rows, counts, summary)}{_about(about, links)}{_curves(rows)}{_tables(counts)}"
        f"{traces}<script>{_FIND}</script></body></html>\n"
    )
    write_page(Path(path), page.encode())


def add_success(path: str | os.PathLike[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Insert success rates before and after training at the top of an existing page, or replace them.

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
    write_page(path, (head + start_mark + _success(before, after) + end_mark + tail).encode())


def _opening(title: str, rows: Rows, counts: TraceCounts, summary: Mapping[str, Any]) -> str:
    facts: list[tuple[str, str]] = [
        ("traces", f"{counts.traces:,}"),
        ("groups", f"{counts.groups:,}"),
        ("tokens", f"{counts.tokens:,}"),
        ("trained tokens", f"{counts.terms:,}"),
        ("steps", number(step_of(rows[-1], len(rows))) if rows else "0"),
    ]
    seconds = summary.get("seconds")
    if isinstance(seconds, Mapping) and seconds:
        facts.append(("seconds", number(round(sum(float(duration) for duration in seconds.values()), 1))))
    if "seed" in summary:
        facts.append(("seed", escape(str(summary["seed"])[:_MOST_TEXT])))
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    before, after = summary.get("before"), summary.get("after")
    success = _success(before, after) if before and after else ""
    head = f'<h1>{escape(title[:_MOST_TEXT])}</h1><dl class="tiles">{tiles}</dl>'
    return f"<header>{head}{_MARKS[0]}{success}{_MARKS[1]}</header>"


def _about(about: Sequence[tuple[str, object]], links: Sequence[str]) -> str:
    """Return a table of the run's settings, and links to files in the same folder."""
    rows = [[name, str(value)] for name, value in about]
    settings = f'<div class="tables">{_table(("what", "told"), rows, "nothing")}</div>' if rows else ""
    names = [name for name in links if re.fullmatch(r"[\w.-]+", name)]
    file_links = " · ".join(f'<a href="{name}">{name}</a>' for name in names)
    return (
        f"<section><h2>What it was told</h2>{settings}<p>{file_links}</p></section>" if settings or file_links else ""
    )


def _success(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return f"<h2>Success on fresh prompts</h2>{interval(before, after)}"


def _curves(rows: Rows) -> str:
    drawn = curves(rows)
    return f'<section><h2>The run</h2><div class="curves">{drawn}</div></section>' if drawn else ""


def _tables(counts: TraceCounts) -> str:
    tiers = [[name, TIER_TEXT.get(name, ""), *tier_counts.values()] for name, tier_counts in counts.tiers.items()]
    drift = [[reason, *tier_counts.values()] for reason, tier_counts in counts.drift.items()]
    rate = 1.0 - counts.exact / counts.recorded if counts.recorded else 0.0
    exact = (
        f"<p>{percent(rate)} of {counts.recorded:,} recorded tokens are without an exact id and logprob.</p>"
        if counts.recorded
        else ""
    )
    return (
        '<section><h2>How exactly it aligned</h2><div class="tables">'
        + _table(("tier", "meaning", "tokens", "trainable", "generations"), tiers, "no sampled token")
        + _table(("drift", "findings", "traces", "tokens"), drift, "nothing differs")
        + f"</div>{exact}</section>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str) -> str:
    def cell(value: Any) -> str:
        return (
            f'<td class="n">{value:,}</td>' if isinstance(value, int) else f"<td>{escape(str(value)[:_MOST_TEXT])}</td>"
        )

    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    lines = lines or f'<tr><td colspan="{len(heads)}">{nothing}</td></tr>'
    marks = ["" if head in ("tier", "meaning", "drift", "what", "told") else ' class="n"' for head in heads]
    titles = "".join(f"<th{mark}>{head}</th>" for mark, head in zip(marks, heads, strict=True))
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def _traces(
    sequences: Sequences, values: PerToken, tokenizer: Decoder, most: int, most_bytes: int, pull: float | None
) -> str:
    if not (chosen := select_examples(sequences, values, most, pull)):
        return ""
    cache: dict[int, bytes] = {}

    def token_bytes(token: int) -> bytes:
        if token not in cache:
            cache[token] = bytes_of(tokenizer, token)
        return cache[token]

    shown: list[str] = []
    size, drawn = 0, Thumbnails()
    for rank, (trace, share) in enumerate(chosen, 1):
        part = trace_html(sequences, values, token_bytes, trace, share, rank, chosen[0][1], drawn)
        size += len(part.encode())
        if size > most_bytes and shown:
            break
        shown.append(part)
    left_out = len(chosen) - len(shown)
    note = f"<p>{left_out} more would make this page larger than {most_bytes / 1e6:.0f} MB.</p>" if left_out else ""
    total_share = percent(sum(share for _, share in chosen[: len(shown)]))
    inputs = "".join(
        f'<input type="radio" name="mode" id="by-{key}"{" checked" * (key == "pull")}><label for="by-{key}"'
        f' title="{escape(meaning)}">{name}</label>'
        for key, name, meaning in _MODES
    )
    return (
        f"<section><h2>{len(shown)} traces, good and bad, that pulled hardest</h2>"
        f"<p>Together {total_share} of all pull, the sum over terms of |d loss / d logprob|, in the last pass over the"
        " data; of each side and as many groups as there are. Point at a token for its numbers.</p>"
        '<p><input type="search" id="find" aria-label="search these traces" placeholder="search these traces">'
        ' <output id="count"></output></p>'
        f'<div class="modes">{inputs}{_legend()}{"".join(shown)}</div>{note}</section>'
    )


def _legend() -> str:
    scale = "".join(f'<span class="t p{n} a{n} r{n} w{n}"> </span>' for n in range(17) if n != 8)
    return (
        '<p class="legend"><span class="scale pull">pushed down</span><span class="scale ratio">below 1/1.5</span>'
        '<span class="scale weight">below 1/1.5</span><span class="scale advantage">negative</span>'
        f'<span class="ramp">{scale}</span>'
        '<span class="scale pull">pushed up</span><span class="scale ratio">above 1.5</span>'
        '<span class="scale weight">above 1.5</span><span class="scale advantage">positive</span>'
        '<span class="g">given</span><span class="p">template</span><span class="s">sampled, not trained</span>'
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


_PAIRS = {"pull": ("down", "up"), "advantage": ("down", "up"), "ratio": ("less", "more"), "weight": ("less", "more")}


def colours(pairs: Mapping[str, tuple[str, str]]) -> str:
    """Return CSS rules for the classes p0 to w16, one colour scale per mode. Level 8 is neutral."""
    rules = []
    for mode, (below, above) in pairs.items():
        for level in (n for n in range(17) if n != 8):
            colour = f"color-mix(in srgb,var(--{below if level < 8 else above}) {8 * abs(level - 8)}%,transparent)"
            rules.append(f"#by-{mode}:checked~* .{mode[0]}{level}{{--c:{colour}}}")
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
