"""What a user writes and reads: flags and dotted options, and lines on the terminal of the process that speaks.

Nothing is done here; the files of the verbs call it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from tracegrad import config
from tracegrad.errors import shown

SHORT = {
    "seed": "train.seed",
    "epochs": "train.epochs",
    "stop_below_ess": "train.stop_below_ess",
    "tensorboard": "train.tensorboard",
    "objective": "objective",
    "on_error": "data.on_error",
    "logprob_kind": "data.logprob_kind",
    "text_only": "data.text_only",
    "lenient": "data.lenient",
}


class Parser(argparse.ArgumentParser):
    """argparse, whose errors name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tracegrad: error: {shown(message)}\nSee {self.prog} --help.\n")


def command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("traces", help="JSONL of traces, plain, .gz or .zst; - for standard input")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of model and tokenizer")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    data = parser.add_argument_group("reading and aligning")
    choices = ("raise", "skip", "quarantine")
    data.add_argument("--on-error", choices=choices, help="a bad record: stop, leave it out, write it aside")
    data.add_argument("--logprob-kind", choices=("raw", "processed", "unknown"), help="what the logprobs are of")
    data.add_argument("--text-only", action="store_const", const=True, help="train text that has no logprobs")
    data.add_argument("--lenient", action="store_const", const=True, help="go on, untrained, after an unknown id")
    return parser


def joined(arguments: list[str]) -> list[str]:
    """`--a.b value` as `--a.b=value`, so that the value is not taken for an argument that has no flag.

    >>> joined(["record", "--online.turns", "3", "a.py:b", "--out", "o"])
    ['record', '--online.turns=3', 'a.py:b', '--out', 'o']
    """
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        alone = word.startswith("--") and "." in word and "=" not in word
        value = next(words, None) if alone else None
        found.append(word if value is None else f"{word}={value}")
    return found


def dotted(rest: list[str], parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Names and values of `--a.b=value`."""
    found: list[tuple[str, str]] = []
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            flags = [flag for action in parser._actions for flag in action.option_strings if "." not in flag]
            cure = config.nearest(f"--{name}", [*flags, *(f"--{option}" for option in config.options())])
            parser.error(f"{word} is no option here. {cure}")
        if not equals:
            parser.error(f"{word} has no value. Write {word} VALUE.")
        found.append((name, value))
    return found


def first() -> bool:
    """Whether this process is the one that speaks: torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str) -> None:
    """Prints lines, where this process is the one that speaks."""
    for line in lines if first() else ():
        print(shown(line), flush=True)
