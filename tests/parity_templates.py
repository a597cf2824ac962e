"""Writes the template rows of PARITY.md: `python tests/parity_templates.py PARITY.md`.

Every template of the installed trl and, where the folder is there, of shared/data/templates/llamacpp, times the
conversations of `test_template`, beside transformers. Every case that differs is listed.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers.utils import chat_template_utils

from test_template import CONVERSATIONS, TEMPLATES, TOKENS, TOOLS, _as_servers_do
from tracegrad.errors import TracegradError
from tracegrad.tokenizer import Template

BEGIN, END = "<!-- made by tests/parity_templates.py -->", "<!-- end of what it made -->"
# DeepSeek's, Llama's and others print a date: pinned on both sides.
DATE = "2025-03-07"
OUTCOMES = ("identical", "both refuse", "only ours renders", "only theirs renders", "different")


def _folders() -> dict[str, list[Path]]:
    roots = [Path(__file__).parents[up] / "shared/data/templates/llamacpp" for up in (2, 3)]
    other = next((sorted(root.glob("*.jinja")) for root in roots if root.is_dir()), [])
    return {"trl": TEMPLATES} | ({"llama.cpp": other} if other else {})


class _Pinned(datetime.datetime):
    """The clock that transformers reads."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Pinned:
        return cls.fromisoformat(DATE)


def _theirs(hf: Any, source: str, messages: Any, options: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return hf.apply_chat_template(_as_servers_do(messages), chat_template=source, tokenize=False, **options), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _ours(template: Template, messages: Any, options: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return template.render_text(messages, strftime_now=DATE, **options), ""
    except TracegradError as error:
        return None, str(error)


def _outcome(ours: str | None, theirs: str | None) -> str:
    if ours is None or theirs is None:
        kinds = {(True, True): "both refuse", (False, True): "only ours renders", (True, False): "only theirs renders"}
        return kinds[ours is None, theirs is None]
    return "identical" if ours == theirs else "different"


def _reason(outcome: str, ours: tuple[str | None, str], theirs: tuple[str | None, str]) -> str:
    if outcome == "only ours renders":
        return f"transformers: {theirs[1]}"
    if outcome == "only theirs renders":
        return f"ours: {ours[1]}"
    a, b = ours[0] or "", theirs[0] or ""
    at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"ours {a[at : at + 24]!r}, transformers {b[at : at + 24]!r}"


def compare(paths: list[Path]) -> tuple[Counter[str], list[tuple[str, str, int, str]]]:
    """Outcomes of all cases, and (template, outcome, cases, first reason) where they differ."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **TOKENS)
    counts: Counter[str] = Counter()
    differing: dict[tuple[str, str], list[str]] = {}
    options = [
        {"tools": tools, "add_generation_prompt": prompt, **thought}
        for tools, (prompt, thought) in itertools.product(
            (None, TOOLS), ((False, {}), (True, {}), (True, {"enable_thinking": False}))
        )
    ]
    for path in paths:
        source = path.read_text(encoding="utf-8")
        template = None
        with contextlib.suppress(TracegradError):
            template = Template(source, TOKENS)
        for messages, option in itertools.product(CONVERSATIONS.values(), options):
            ours = _ours(template, messages, option) if template else (None, "does not compile")
            theirs = _theirs(hf, source, messages, option)
            outcome = _outcome(ours[0], theirs[0])
            counts[outcome] += 1
            if outcome not in ("identical", "both refuse"):
                differing.setdefault((path.stem, outcome), []).append(_reason(outcome, ours, theirs))
    return counts, [(*key, len(reasons), reasons[0]) for key, reasons in sorted(differing.items())]


def page() -> str:
    lines = ["| templates of | templates | cases | " + " | ".join(OUTCOMES) + " |", "|---" * 8 + "|"]
    rows: list[tuple[str, str, int, str]] = []
    for name, paths in _folders().items():
        counts, differing = compare(paths)
        cells = [name, len(paths), sum(counts.values()), *(counts[outcome] for outcome in OUTCOMES)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        rows += differing
    lines += ["", "Every template with a case that differs, and its first reason:", ""]
    lines += ["| template | outcome | cases | first reason |", "|---|---|---|---|"]
    for template, outcome, cases, reason in rows:
        short = " ".join(reason.split()).replace("|", "\\|")
        lines.append(f"| {template} | {outcome} | {cases} | {short[:200]} |")
    return "\n".join(lines)


def main(path: Path) -> None:
    chat_template_utils.datetime = _Pinned
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
