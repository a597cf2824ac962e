"""What the page asks for of one trace, put together from the session: used by the server and by the export."""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from tracegrad._html import escape, number
from tracegrad.data.trace import Trace
from tracegrad.errors import ArgumentError, redacted
from tracegrad.report.token_map import Thumbnails
from tracegrad.view import detail
from tracegrad.view.features import message_parts, message_text, tool_calls
from tracegrad.view.loaded import Session
from tracegrad.view.tokens import Shown

MOST = 16
"""Traces of a group that are shown at once."""
_MOST_WORDS = 1200


def trace(
    session: Session,
    n: int,
    *,
    run: str = "",
    step: int = -1,
    whole: int = detail.FOLD,
    drawn: Thumbnails | None = None,
) -> dict[str, Any]:
    """All of one trace: pieces of HTML, and the lines of Python that give the same.

    Args:
        n: row of the index.
        run: name of the run whose steps are shown; the newest one by default.
        step: which of the steps that had it, the last by default.
        whole: characters of a message that are given at once.
        drawn: what stands for pictures, of the page that the pieces are put into; default one for this trace.
    """
    drawn = drawn or Thumbnails(drawn=session.drawn)
    name, group_name, source, place = session.where(n)
    found = session.trace(n)
    sets = session.sets.of(name, next((path for path in session.runs if path.name == run), None))
    why = ""
    if sets:
        shown: Shown | None = session.sets.shown(sets[0], name)
    elif found is not None and session.tokenizer is not None:
        shown, why = detail.aligned(found, session.tokenizer)
    else:
        shown, why = None, "Give --model DIR to see its tokens: ids are spelled and aligned by the model's tokenizer."
    at = len(shown.steps) - 1 if shown and not 0 <= step < len(shown.steps) else step
    values = session.columns()
    numbers = {key: float(column[n]) for key, column in values.items() if key not in ("group", "source")}
    told = detail.of_trace(found) if found is not None else [("group", group_name or "alone")]
    told += [(key, number(value)) for key, value in numbers.items() if key in _MORE and value == value]
    path = "" if source.kind != "file" else redacted(source.place.path if source.place else source.path)
    of_run = sets[0].source.run if sets else None
    code = {"model": session.model, "run": None if of_run is None else str(of_run), "token": None}
    return {
        "n": n,
        "id": name,
        "group": group_name,
        "source": source.name,
        "facts": detail.facts([("source", source.name), *told]),
        "messages": detail.messages(found, whole, drawn) if found is not None else "",
        "tokens": detail.tokens(shown, session.token_bytes, at, drawn) if shown else "",
        "drift": detail.findings(shown.sequences) if shown else "",
        "why": escape(why),
        "history": detail.history(shown) if shown and shown.steps else "",
        "steps": len(shown.steps) if shown else 0,
        "step": at,
        "runs": list(dict.fromkeys(each.source.run.name for each in sets if each.source.run)),
        "python": detail.python(path, place, name, **code),
        "python_token": detail.python(path, place, name, **{**code, "token": 987654321}),
        "shell": detail.shell(session.paths, session.model),
    }


_MORE = ("advantage", "lag", "pull", "clipped", "masked")


def message(session: Session, n: int, index: int, start: int) -> str:
    """More of a message that was folded."""
    found = session.trace(n)
    if found is None or not 0 <= index < len(found.pool) or start < 0:
        raise ArgumentError(f"row {n} has no message {index}. There is nothing more to show.")
    show = detail.pictures(found, Thumbnails(drawn=session.drawn))
    return detail.folded(message_parts(found.pool[index]), index, start, detail.PART, show)


def beside(session: Session, n: int) -> str:
    """The traces of the group of a row side by side."""
    return side_by_side(session, {row: row for row in session.group(n, MOST)})


def side_by_side(session: Session, rows: Mapping[int, int]) -> str:
    """Columns of answers of rows, each with the number that it is linked by; what the first one has not is marked."""
    found = [(number, session.where(row)[0], session.trace(row)) for row, number in rows.items()]
    traces = [(row, name, trace) for row, name, trace in found if trace is not None]
    said = [_words(trace) for _, _, trace in traces]
    columns = []
    for (row, name, trace), words in zip(traces, said, strict=True):
        reward = "no reward" if trace.reward is None else f"reward {number(trace.reward)}"
        head = f'<h4><a href="#trace-{row}">{escape(name[:80])}</a> <small>{reward}</small></h4>'
        columns.append(f'<article class="beside">{head}<div class="said">{_marked(said[0], words)}</div></article>')
    return f'<div class="columns">{"".join(columns)}</div>'


def _words(trace: Trace) -> list[str]:
    """What was sampled, word by word, calls as calls."""
    parts = []
    for generation in trace.generations:
        message = trace.pool[generation.message]
        calls = [f"{name}({arguments})" for name, arguments in tool_calls(message)]
        parts.append("\n".join([message_text(message), *calls]))
    return re.findall(r"[^\W_]*[\W_]|[^\W_]+", "\n\n".join(parts)[:40_000])[:_MOST_WORDS]


def _marked(first: list[str], words: list[str]) -> str:
    """Words, those that the first has not in `<mark>`; what is lacking is a sign."""
    out = []
    for kind, _, _, start, stop in SequenceMatcher(None, first, words, autojunk=False).get_opcodes():
        text = escape("".join(words[start:stop]))
        if kind == "equal":
            out.append(text)
        else:
            out.append(f"<mark>{text}</mark>" if text else '<mark class="gone">⌫</mark>')
    return "".join(out) + (" …" if len(words) >= _MOST_WORDS else "")


def read(name: str) -> str:
    """A file of the page: scripts and styles, as they stand in the package."""
    return (Path(__file__).parent / "static" / name).read_text("utf-8")
