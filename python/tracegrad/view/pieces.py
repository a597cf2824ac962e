"""Build the parts of the page about one trace, for the server and for the export."""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tracegrad._html import escape, number
from tracegrad.data.codes import LEVELS
from tracegrad.data.trace import Trace
from tracegrad.errors import ArgumentError, redact
from tracegrad.report.token_map import Thumbnails
from tracegrad.view import detail
from tracegrad.view.features import message_parts, message_text, tool_calls
from tracegrad.view.loaded import Viewer
from tracegrad.view.meanings import COLUMN_TEXT, level_text
from tracegrad.view.tokens import TraceTokens

MOST = 16
"""Maximum number of traces of a group that are shown together."""
_MOST_WORDS = 1200


def trace(
    session: Viewer,
    n: int,
    *,
    run: str = "",
    step: int = -1,
    whole: int = detail.FOLD,
    drawn: Thumbnails | None = None,
) -> dict[str, Any]:
    """Return all parts of one trace: pieces of HTML, and Python code that loads the same.

    Args:
        n: row of the index.
        run: name of the run whose steps are shown. Default: the newest one.
        step: index of the step among those that trained the trace. Default: the last.
        whole: number of characters of a message that are shown at first.
        drawn: thumbnails of the page. Default: new ones for this trace.

    Raises:
        ArgumentError: if there is no such row.
    """
    drawn = drawn or Thumbnails(drawn=session.thumbnail_cache)
    name, group_name, source, place = session.locate(n)
    record = session.trace(n)
    sets = session.sets.of(name, next((path for path in session.runs if path.name == run), None))
    reason = ""
    if sets:
        shown: TraceTokens | None = session.sets.trace_tokens(sets[0], name)
    elif record is not None and session.tokenizer is not None:
        shown, reason = detail.align_trace(record, session.tokenizer)
    else:
        shown, reason = (
            None,
            "Pass --model DIR to see the tokens. Its tokenizer decodes and aligns the ids.",
        )
    step_index = len(shown.steps) - 1 if shown and not 0 <= step < len(shown.steps) else step
    values = session.columns()
    numbers = {key: float(column[n]) for key, column in values.items() if key not in ("group", "source")}
    facts = detail.of_trace(record) if record is not None else [("group", group_name or "none")]
    facts += [(key, _fact(key, value)) for key, value in numbers.items() if key in _MORE and value == value]
    path = "" if source.kind != "file" else redact(source.place.path if source.place else source.path)
    run_path = sets[0].source.run if sets else None
    code = {"model": session.model, "run": None if run_path is None else str(run_path), "token": None}
    return {
        "n": n,
        "id": name,
        "group": group_name,
        "source": source.name,
        "facts": detail.facts([("source", source.name), *facts], _tooltips(numbers["level"])),
        "messages": detail.messages(record, whole, drawn) if record is not None else "",
        "tokens": detail.tokens(shown, session.token_bytes, step_index, drawn) if shown else "",
        "mismatches": detail.mismatches(shown.sequences) if shown else "",
        "why": escape(reason),
        "history": detail.history(shown) if shown and shown.steps else "",
        "steps": len(shown.steps) if shown else 0,
        "step": step_index,
        "runs": list(dict.fromkeys(token_set.source.run.name for token_set in sets if token_set.source.run)),
        "python": detail.python(path, place, name, **code),
        "python_token": detail.python(path, place, name, **{**code, "token": 987654321}),
        "shell": detail.shell(session.paths, session.model),
    }


_MORE = ("length", "advantage", "level", "mismatches", "staleness", "gradient", "clipped", "masked")


def _fact(name: str, value: float) -> str:
    return LEVELS[int(value)] if name == "level" else number(value)


def _tooltips(level: float) -> dict[str, str]:
    """Return the sentence of each column, and in place of that of the level column the one of the trace's level."""
    own = {"level": level_text(LEVELS[int(level)])} if level == level else {}
    return {**COLUMN_TEXT, "source": "", **own}


def message(session: Viewer, n: int, index: int, start: int) -> str:
    """Return more of a message that was shortened.

    Raises:
        ArgumentError: if there is no such row or message.
    """
    record = session.trace(n)
    if record is None or not 0 <= index < len(record.pool) or start < 0:
        raise ArgumentError(f"TG-VIEW-009: row {n} has no message {index}. There is nothing more to show.")
    picture_html = detail.pictures(record, Thumbnails(drawn=session.thumbnail_cache))
    return detail.message_html(message_parts(record.pool[index]), index, start, detail.PART, picture_html)


def group_html(session: Viewer, n: int) -> str:
    """Return the traces of a row's group side by side."""
    return side_by_side(session, {row: row for row in session.group(n, MOST)})


def side_by_side(session: Viewer, rows: Mapping[int, int]) -> str:
    """Return the answers of rows in columns, with words marked that differ from the first.

    Args:
        rows: index row to the number used in links.
    """
    all_traces = [(number, session.locate(row)[0], session.trace(row)) for row, number in rows.items()]
    traces = [(row, name, trace) for row, name, trace in all_traces if trace is not None]
    answers = [_words(trace) for _, _, trace in traces]
    columns = []
    for (row, name, trace), words in zip(traces, answers, strict=True):
        reward = "no reward" if trace.reward is None else f"reward {number(trace.reward)}"
        head = f'<h3><a href="#trace-{row}">{escape(name[:80])}</a> <small>{reward}</small></h3>'
        columns.append(
            f'<article class="beside">{head}<div class="content">{_mark_differences(answers[0], words)}</div></article>'
        )
    return f'<div class="columns">{"".join(columns)}</div>'


def _words(trace: Trace) -> list[str]:
    """Return the sampled text of a trace split into words, with tool calls written like function calls."""
    parts = []
    for generation in trace.generations:
        message = trace.pool[generation.message]
        calls = [f"{name}({arguments})" for name, arguments in tool_calls(message)]
        parts.append("\n".join([message_text(message), *calls]))
    return re.findall(r"[^\W_]*[\W_]|[^\W_]+", "\n\n".join(parts)[:40_000])[:_MOST_WORDS]


def _mark_differences(first: list[str], words: list[str]) -> str:
    """Return words with those that the first text lacks in `<mark>`. A sign stands for missing words."""
    out = []
    for kind, _, _, start, stop in SequenceMatcher(None, first, words, autojunk=False).get_opcodes():
        text = escape("".join(words[start:stop]))
        if kind == "equal":
            out.append(text)
        else:
            out.append(f"<mark>{text}</mark>" if text else '<mark class="gone">⌫</mark>')
    return "".join(out) + (" …" if len(words) >= _MOST_WORDS else "")


def read(name: str) -> str:
    """Return a script or style file of the page."""
    return (Path(__file__).parent / "static" / name).read_text("utf-8")
