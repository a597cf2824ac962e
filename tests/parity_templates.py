"""Writes the template rows of PARITY.md: `python tests/parity_templates.py PARITY.md`.

Every template of the installed trl and, where the folder is there, of shared/data/templates/llamacpp, times the
conversations of `test_template`, beside transformers. Every case that differs is listed.
"""

import contextlib
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers.utils import chat_template_utils

from template_cases import CONVERSATIONS, TEMPLATES, TOKENS, TOOLS, _as_servers_do, pinned
from template_expressions import EXPRESSIONS
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TracegradError

BEGIN, END = "<!-- made by tests/parity_templates.py -->", "<!-- end of what it made -->"
# DeepSeek's, Llama's and others print a date: pinned on both sides.
DATE = "2025-03-07"
# Differences on purpose: outcome, a word of its first reason, and why.
REASONS = (
    (
        "only ours renders",
        "has no attribute 'content'",
        "content null, kept for a template that asks `content is not none`; transformers drops the key since 5.20",
    ),
)
OUTCOMES = ("identical", "both refuse", "only ours renders", "only theirs renders", "different")


def _folders() -> dict[str, list[Path]]:
    roots = [Path(__file__).parents[up] / "shared/data/templates/llamacpp" for up in (2, 3)]
    other = next((sorted(root.glob("*.jinja")) for root in roots if root.is_dir()), [])
    return {"trl": TEMPLATES} | ({"llama.cpp": other} if other else {})


def _why(outcome: str, reason: str) -> str:
    """Why a case differs on purpose; a difference without a reason ends the run."""
    for expected, word, why in REASONS:
        if outcome == expected and word in reason:
            return why
    raise SystemExit(f"no reason is known why a case is '{outcome}': {reason}")


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


def _tokenizer() -> Any:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **TOKENS)


def compare(paths: list[Path]) -> tuple[Counter[str], list[tuple[str, str, int, str]]]:
    """Outcomes of all cases, and (template, outcome, cases, first reason) where they differ."""
    hf = _tokenizer()
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


def _generation_ranges(path: Path) -> tuple[int, int]:
    """Conversations of which both render, and those whose ranges of `{% generation %}` are equal."""
    source, compared, equal = path.read_text(encoding="utf-8"), 0, 0
    if "generation %}" not in source and "generation -%}" not in source:
        return 0, 0
    compiled, template = chat_template_utils._compile_jinja_template(source), Template(source, TOKENS)
    for messages in CONVERSATIONS.values():
        # apply_chat_template takes null keys out before it renders; this is what it calls then.
        present = [{key: value for key, value in m.items() if value is not None} for m in _as_servers_do(messages)]
        chat = chat_template_utils._alias_reasoning_fields(present)
        with contextlib.suppress(Exception):
            text, ranges = chat_template_utils._render_with_assistant_indices(
                compiled, chat, None, None, False, **TOKENS
            )
            rendered = template.render(messages, strftime_now=DATE)
            data = rendered.text.encode()
            ours = [tuple(len(data[:at].decode()) for at in pair) for pair in rendered.generation]
            compared += 1
            equal += rendered.text == text and ours == ranges
    return compared, equal


def _expressions() -> str:
    hf = _tokenizer()
    outcomes = Counter[str]()
    for expression in EXPRESSIONS:
        source = f"{{{{ {expression} }}}}"
        template = None
        with contextlib.suppress(TracegradError):
            template = Template(source, TOKENS)
        ours = _ours(template, CONVERSATIONS["plain"], {})[0] if template else None
        outcomes[_outcome(ours, _theirs(hf, source, CONVERSATIONS["plain"], {})[0])] += 1
    counted = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome])
    return f"{len(EXPRESSIONS)} expressions (operators, formats, floats, JSON, what Python refuses): {counted}."


def page() -> str:
    lines = ["| templates of | templates | cases | " + " | ".join(OUTCOMES) + " |", "|---" * 8 + "|"]
    rows: list[tuple[str, str, int, str]] = []
    for name, paths in _folders().items():
        counts, differing = compare(paths)
        cells = [name, len(paths), sum(counts.values()), *(counts[outcome] for outcome in OUTCOMES)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        rows += differing
    pairs = [_generation_ranges(path) for paths in _folders().values() for path in paths]
    compared, equal = (sum(column) for column in zip(*pairs, strict=True))
    lines += ["", f"Ranges of `{{% generation %}}`: equal in {equal} of {compared} conversations that both render."]
    lines += ["", _expressions()]
    lines += ["", "Every template with a case that differs, and its first reason:", ""]
    lines += ["| template | outcome | cases | first reason | why |", "|---|---|---|---|---|"]
    for template, outcome, cases, reason in rows:
        short = " ".join(reason.split()).replace("|", "\\|")
        lines.append(f"| {template} | {outcome} | {cases} | {short[:200]} | {_why(outcome, reason)} |")
    return "\n".join(lines)


def main(path: Path) -> None:
    chat_template_utils.datetime = pinned(DATE)
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
