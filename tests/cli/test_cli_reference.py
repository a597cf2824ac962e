"""docs/reference/cli.md has a row for each flag that `--help` shows."""

import re
from pathlib import Path

import pytest

from generate_docs import with_verbs
from tracegrad.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
VERBS = ("init", "score", "fill", "train", "merge", "prepare", "doctor", "view", "online", "replay", "record", "proxy")
VERBS += ("receive", "pull")


def help_of(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_tables_are_those_of_the_parsers(capsys):
    assert with_verbs(PAGE) == PAGE, "run: python tools/generate_docs.py"
    assert tuple(re.findall(r"^    ([a-z]+) ", help_of([], capsys), re.M)) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_each_flag_has_a_row(verb, capsys):
    section = PAGE.split(f"\n### {verb}\n")[1].split("\n## ")[0].split("\n### ")[0]
    rows = set(re.findall(r"^\| `(--[\w.-]+)", section, re.M))
    usage = help_of([verb], capsys).partition("\n\n")[0]
    flags = set(re.findall(r"--[\w.-]+", usage))
    assert len(flags) >= 4
    assert rows == flags
