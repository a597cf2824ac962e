"""Messages name only flags that the verb has, library errors name options, and no message has measured figures."""

import argparse
import ast
import re
from pathlib import Path

import pytest

import error_codes
import sources
from tracegrad.cli import build_parser
from tracegrad.cli.args import as_flags, known_options, without_missing_flags

ROOT = Path(__file__).parents[2]
(COMMANDS,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
FLAGS = {
    verb: {*parser._option_string_actions, *(f"--{name}" for name in parser.dotted_names())}
    for verb, parser in COMMANDS.choices.items()
}
OURS = set.union(*FLAGS.values()) | {f"--{name}" for name in known_options()}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
OF_VERBS = {
    "cli/args.py": ("train", "online"),
    "cli/init.py": ("init",),
    "cli/merge.py": ("merge",),
    "cli/online.py": ("online",),
    "cli/prepare.py": ("prepare",),
    "cli/record.py": ("record", "proxy"),
    "cli/receive.py": ("receive",),
    "receive/folder.py": ("receive", "pull"),
    "receive/pull.py": ("pull",),
    "receive/": ("receive",),
    "cli/run_file.py": ("online",),
    "cli/score.py": ("score",),
    "cli/train.py": ("train",),
    "cli/view.py": ("view",),
    "doctor/rescore.py": ("doctor",),
    "missing_logprobs/": ("fill",),
    "rewards/recorded.py": ("score",),
    "recipes/config_file.py": ("train", "online"),
    "prepare/ray_backend.py": ("prepare",),
    "trainer/lora.py": ("merge",),
    "view/": ("view",),
}
"""Verbs that reach the errors of a file; the file, or the folder that holds it."""
OF_OTHER_PROGRAMS = {"--api-key", "--middleware", "--logprobs-mode", "--served-model-name", "--tokenizer", "--to"}


def causes():
    return [cause for cause in error_codes.causes() if cause.path.startswith("python/")]


def flags_in(text):
    """The flags that a text names for this command; not those of a command that it spells, such as tracegrad doctor."""
    text = re.sub(r"tracegrad \w+[^.;]*", "", text)
    return set(FLAG.findall(text)) - OF_OTHER_PROGRAMS


def test_every_flag_of_an_error_is_one_of_the_verbs_that_raise_it():
    wrong, seen = [], set()
    for cause in causes():
        place = cause.path.removeprefix("python/tracegrad/")
        verbs = next((verbs for start, verbs in OF_VERBS.items() if place.startswith(start)), None)
        for flag in flags_in(cause.message):
            seen.add(cause.code)
            if verbs is None or not any(flag in FLAGS[verb] for verb in verbs):
                wrong.append((cause.code, place, flag))
    assert wrong == [], "library errors name options, and as_flags makes flags of them"
    assert len(seen) > 20


def test_flags_of_commands_that_a_message_spells_exist():
    found = 0
    for cause in causes():
        for verb, rest in re.findall(r"`?tracegrad (\w+)`?([^.;]*)", cause.message):
            for flag in FLAG.findall(rest) if verb in FLAGS else ():
                found += 1
                assert flag in FLAGS[verb], (cause.code, flag)
    assert found >= 3


def test_what_the_command_line_makes_of_an_error_are_flags_that_exist():
    for cause in causes():
        flags = set(FLAG.findall(as_flags(cause.message))) - OF_OTHER_PROGRAMS
        assert {flag for flag in flags if flag != "--map"} <= OURS, cause.code


@pytest.mark.parametrize(
    ("verb", "text", "note"),
    [
        ("train", "Free space, and continue with --resume.", ""),
        ("replay", "Free space, and continue with --resume.", " (replay has no --resume.)"),
        ("online", "Set --data.holdout 0, or leave it out with --on-error skip.", None),
        ("view", "Run tracegrad prepare --resume.", ""),
        ("online", "Start vLLM with --served-model-name x.", ""),
        ("view", "Traceback (most recent call last)\n --resume", ""),
    ],
)
def test_a_flag_that_the_verb_does_not_have_is_said_to_be_missing(verb, text, note):
    note = " (online has no --data.holdout and no --on-error.)" if note is None else note
    assert without_missing_flags(text, COMMANDS.choices[verb]) == text + note


MEASURED = re.compile(
    r"\d[\d.,]*\s?(?:%|percent\b|points?\b|GB/s)|\b\d[\d.]* against \d|\b(?:78\.5|46\.1)\b|\b92 (?:%|against)",
    re.IGNORECASE,
)
DEFINED = ("95 % interval", "0 to 100 %")
"""Shares that a definition has."""


def literals():
    """Strings of the package that are not docstrings, and those of the core without its tests."""
    for path in sources.package_files():
        nodes = sources.nodes(path)
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                yield path, node.value
    for path in (ROOT / "rust").rglob("*.rs"):
        if "test" not in str(path.relative_to(ROOT)):
            for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text(encoding="utf-8")):
                yield path, text


def test_no_message_has_figures_of_somebody_elses_run():
    assert MEASURED.search("the default: 92 against 82 % with one for all")
    found = []
    for path, text in literals():
        for definition in DEFINED:
            text = text.replace(definition, "")
        if " " in text and (match := MEASURED.search(text)):
            found.append((path.name, match[0], text[:80]))
    assert found == []
