"""The traces of a group side by side, with what differs from the first one marked."""

from __future__ import annotations

from difflib import SequenceMatcher

from tracegrad.report.text import escape, number
from tracegrad.trace import Trace
from tracegrad.view.features import message_text, tool_calls

MOST = 16
"""Traces shown at once."""
_MOST_WORDS = 1200


def beside(traces: list[tuple[int, str, Trace]]) -> str:
    """Columns of answers."""
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
    text = "\n\n".join(parts)[:40_000]
    words, here = [], ""
    for char in text:
        here += char
        if char.isspace() or not char.isalnum():
            words.append(here)
            here = ""
    return [*words, *([here] if here else [])][:_MOST_WORDS]


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
