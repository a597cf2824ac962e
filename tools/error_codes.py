"""List the codes of errors, with their places in the code, classes and messages.

python tools/error_codes.py          # prints them
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sources

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"TG-[A-Z]+-\d{3}")
AREAS = {
    "READ": "Reading files",
    "FORMAT": "Records of servers and recorders",
    "DATA": "Inputs, fields and sessions",
    "STORE": "Files and folders",
    "IMAGE": "Images",
    "TOKENIZER": "Tokenizers",
    "TEMPLATE": "Chat templates",
    "ALIGN": "Alignment and its files",
    "ADV": "Advantages",
    "OBJ": "Objectives",
    "RATIO": "Ratios and masks",
    "PACK": "Packing",
    "METRIC": "Metrics and loggers",
    "MODEL": "The model and its forward pass",
    "TRAIN": "Training",
    "FILL": "`fill`",
    "PREPARE": "`prepare`",
    "DOCTOR": "`doctor`",
    "VIEW": "`view`",
    "REPORT": "`report.html`",
    "ROLLOUT": "Servers, sessions, tools and the proxy",
    "RECEIVE": "`receive` and `pull`",
    "REWARD": "Rewards and judges",
    "SYNC": "Weight sync",
    "ONLINE": "Online training",
    "INTEG": "Integrations",
    "RECIPE": "Recipes and other trainers' configs",
    "CONFIG": "Options",
    "CLI": "The command line",
    "CODE": "Users' functions",
    "ARGS": "Arguments of calls",
    "BORDER": "The border between Python and Rust",
    "CORE": "The core",
    "ERR": "Other errors",
}
"""Headings, by the middle part of a code."""
_KINDS = {
    "Io": "ReadError",
    "Format": "FormatError",
    "Template": "TemplateError",
    "Tokenizer": "TokenizerError",
    "Alignment": "AlignmentError",
    "Argument": "ArgumentError",
    "Fault": "TracegradError",
}
_RUST = re.compile(
    r"\b(?P<call>Error::new|reject|not_a_trace)\(\s*(?P<kind>[\w:.()]+,\s*)?\"(?P<code>TG-[A-Z]+-\d{3})\",\s*"
    r"(?:&?format!\(\s*)?(?P<text>\"(?:[^\"\\]|\\.)*\")?",
    re.DOTALL,
)
_WHY = re.compile(r"[^;]*?\.why\(\s*(?:format!\(\s*)?(\"(?:[^\"\\]|\\.)*\")", re.DOTALL)


@dataclass(frozen=True)
class Cause:
    """A cause of an error.

    Args:
        code: such as `TG-READ-001`.
        name: of the exception class; empty if the code only builds the message.
        message: with what varies in braces; empty if all of it varies.
        path: of the source file, from the root.
    """

    code: str
    name: str
    message: str
    path: str


@cache
def causes() -> list[Cause]:
    """Return every cause in the code, in the order of codes."""
    return sorted([*_python(), *_rust()], key=lambda cause: cause.code)


def _python() -> Iterator[Cause]:
    for path in sorted((ROOT / "python").rglob("*.py")):
        nodes = sources.nodes(path)
        names = {}
        for node in nodes:
            if isinstance(node, ast.Call):
                for each in node.args[:2]:
                    names[id(first_operand(each))] = getattr(node.func, "id", getattr(node.func, "attr", ""))
        inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            message = template(node) if id(node) not in inside else ""
            if match := CODE.match(message):
                text = message[match.end() :].removeprefix(": ")
                yield Cause(match[0], names.get(id(node), ""), text, str(path.relative_to(ROOT)))


def first_operand(node: ast.AST) -> ast.AST:
    """Return the leftmost operand of a sum of texts."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node


def template(node: ast.AST) -> str:
    """Return a text of the code with `{name}` for what varies; empty for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(
        part.value if isinstance(part, ast.Constant) else f"{{{_name(part.value)}}}"  # type: ignore[attr-defined]
        for part in node.values
    )


def _name(node: ast.AST) -> str:
    """Return a short name for an expression: its variable, attribute, key or function."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _name(node.args[0] if node.args else node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return "..."


def _rust() -> Iterator[Cause]:
    for path in sorted((ROOT / "rust").rglob("*.rs")):
        source = path.read_text(encoding="utf-8")
        for match in _RUST.finditer(source):
            if match["code"].startswith("TG-TEST"):
                continue
            kind = (match["kind"] or "").strip(", ").rpartition("::")[2]
            name = _KINDS.get(kind, "ReadError" if kind == "Stream" else "FormatError")
            text = _literal(match["text"]) or "{what}"
            if why := _WHY.match(source[match.end() : match.end() + 600]):
                text += f". {_literal(why[1])}"
            text = re.sub(r"\{(\w*)[^}]*\}", lambda part: f"{{{part[1] or '...'}}}", text)
            yield Cause(match["code"], name, text, str(path.relative_to(ROOT)))


def _literal(text: str | None) -> str:
    """Return the text of a string literal of Rust."""
    return re.sub(r"\\\n\s*", "", (text or '""')[1:-1]).replace('\\"', '"')


def page() -> str:
    """Return docs/reference/errors.md."""
    lines = [
        "# Errors",
        "",
        "Every error of tracegrad is a `tracegrad.TracegradError`, which is a `ValueError`. Its message begins",
        "with a code, such as `TG-READ-001`, which stays the same if the wording changes; `error.code` returns it. The",
        "message names the place, the problem, the consequence and the fix. `file`, `line`, `trace`, `turn` and",
        "`token` are attributes where they are known.",
        "",
        "The tables are made from the code by `python tools/generate_docs.py`. Names in braces vary.",
    ]
    found = causes()
    for area, title in AREAS.items():
        rows = [cause for cause in found if cause.code.split("-")[1] == area]
        if rows:
            lines += ["", f"## {title}", "", "| code | error | message |", "|---|---|---|"]
            lines += [f"| {row.code} | {_code(row.name)} | {_cell(row.message)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    """Return the name of an exception class as code; nothing for a function that only builds the message."""
    return f"`{name}`" if name[:1].isupper() else ""


def _cell(text: str) -> str:
    """Return the first sentences of a message, as text that Markdown shows as it is."""
    text = " ".join(text.split())
    shown = text if len(text) <= 200 else text[:200].rpartition(" ")[0] + " ..."
    return re.sub(r"([\\`*_<>\[\]|#~])", r"\\\1", shown)


if __name__ == "__main__":
    for each in causes():
        print(each.code, each.name or "-", each.message[:100], each.path, sep="\t")
