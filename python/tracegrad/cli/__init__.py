"""Run the command line. Each verb is a module of this package.

`errors.ExitCode` has the exit codes. An error is printed as one line, and with --json also as one JSON object on
standard output.
torch is imported only by verbs that need it.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from tracegrad import _core
from tracegrad.cli import (
    args,
    doctor,
    extras,
    fill,
    init,
    merge,
    online,
    prepare,
    receive,
    record,
    score,
    train,
    unexpected,
    view,
)
from tracegrad.cli.args import SHORT, Parser, as_flags, dotted, join_dotted_values
from tracegrad.errors import CODE, ExitCode, TracegradError
from tracegrad.storage import cache

__all__ = ["build_parser", "main", "parse"]

RESUMABLE = ("train", "prepare", "online", "record")
"""Verbs with --resume."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    >>> main(["train", "traces.jsonl", "--model", "m", "--out", "o", "--optimizer.lrr", "1"])
    1
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _guarded(arguments)
    except SystemExit:  # Raised by argparse or by user code.
        if (failure := unexpected.flush()) is not None:
            raise SystemExit(int(_output_failed(failure))) from None
        raise
    return int(code if (failure := unexpected.flush()) is None else _output_failed(failure))


def _guarded(arguments: list[str]) -> int:
    """Run a command, and convert any exception to one line of output and an exit code."""
    options = None
    try:
        options, overrides = parse(arguments)
        with contextlib.ExitStack() as stack:
            if options.json:
                stack.enter_context(args.reserve_stdout())
            if options.no_cache:
                stack.enter_context(cache.cache_disabled())
            extras.check(options, dict(overrides))
            return options.run(options, overrides, arguments)
    except TracegradError as error:
        message = as_flags(str(error))
        message = message if options is None else args.without_missing_flags(message, options.parser)
        return _failed(message, arguments, error)
    except KeyboardInterrupt:
        hint = " --resume continues from what is already written in --out." if arguments[0] in RESUMABLE else ""
        unexpected.say(f"\ntracegrad: interrupted.{hint}")
        return _failed_json("TG-CLI-029: interrupted.", arguments, ExitCode.INTERRUPTED)
    except args.UsageError as error:
        _failed_json(error.message, arguments, ExitCode.USAGE)
        raise
    except SystemExit as error:
        if options is None:  # --help or --version.
            raise
        return _failed(f"TG-CLI-055: Python code of yours called sys.exit({error.code!r:.200}).", arguments, error)
    except args.OutputFailed as error:
        return _output_failed(error.why)
    except BrokenPipeError:
        unexpected.flush()
        return ExitCode.OUTPUT_CLOSED
    except BaseException as error:  # A panic of the Rust core is not an Exception.
        if isinstance(error, OSError) and (failure := unexpected.flush()) is not None:
            return _output_failed(failure)
        return _failed(unexpected.line(error, arguments), arguments, error)


def _failed(message: str, arguments: Sequence[str], error: BaseException) -> int:
    """Print an error on standard error, and with --json also on standard output. Return the exit code."""
    unexpected.say(f"tracegrad: error: {message}")
    return _failed_json(message, arguments, ExitCode.ERROR, error)


def _failed_json(
    message: str, arguments: Sequence[str], code: ExitCode, error: BaseException | None = None
) -> ExitCode:
    """Print an error as one line of JSON if the command has --json, and return the exit code."""
    if "--json" in arguments:
        match = CODE.search(message)
        description = {"code": match[1] if match else None, "message": message, "location": location_of(error, message)}
        try:
            args.print_json({"error": description, "exit_code": code}, line=True)
        except args.OutputFailed as failure:
            return _output_failed(failure.why)
    return code


_PLACES = ("file", "line", "trace", "turn", "token")
_FLAG = re.compile(r"(?:argument |unknown flag )?(--[A-Za-z][\w.-]*\w)")
_OPTION = re.compile(r"([a-z_]+\.[a-z_]+)\b")
_FILE = re.compile(r"(.{1,4000}?)(?::(\d{1,18}))?: ")


def location_of(error: BaseException | None, message: str) -> dict[str, Any] | None:
    """Return where an error is: file, line, trace, turn and token; or the flag or option at the start of its message.

    >>> location_of(None, "TG-CLI-034: --price is '1'."), location_of(None, "TG-CONFIG-003: optimizer.lr is 'x'.")
    ({'flag': '--price'}, {'option': 'optimizer.lr'})
    >>> location_of(None, "interrupted.") is None
    True
    """
    places = {name: value for name in _PLACES if (value := getattr(error, name, None)) is not None}
    if isinstance(error, TracegradError) and places:
        return places
    text = CODE.sub("", message, count=1)
    if match := _FLAG.match(text):
        return {"flag": match[1]}
    if (match := _OPTION.match(text)) and match[1] in args.known_options():
        return {"option": match[1]}
    if (match := _FILE.match(text)) and os.path.lexists(match[1]):
        return {"file": match[1], **({"line": int(match[2])} if match[2] else {})}
    return None


def _output_failed(error: OSError) -> ExitCode:
    args.redirect_to_devnull(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return ExitCode.OUTPUT_CLOSED
    unexpected.say(f"tracegrad: error: {unexpected.of_output(error)}")
    return ExitCode.ERROR


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="tracegrad",
        description="Train language models with GRPO on recorded LLM trajectories, or online with vLLM.",
        epilog="`tracegrad COMMAND --help` lists the flags of a command and shows examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tracegrad {_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (init, score, fill, train, merge, prepare, doctor, view, online, record, receive):
        module.add_to(commands)
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, Any]]]:
    """Return the parsed flags of a command, and its `--section.option VALUE` as (name, value) pairs.

    Raises:
        args.UsageError: for an unknown command or flag, or a value that is not one of its choices.
        ArgumentError: for an option that the command does not have.
    """
    options, remaining = build_parser().parse_known_args(join_dotted_values(list(arguments)))
    overrides = dotted(remaining, options.parser)
    options.parser.check_options(name for name, _ in overrides)
    short_flags = [(name, getattr(options, flag, None)) for flag, name in SHORT.items()]
    return options, [*((name, value) for name, value in short_flags if value is not None), *overrides]
