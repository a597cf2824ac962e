"""Run the command line. Each verb is a module of this package.

Exit codes: 0 for success; 1 for an error, printed as one line, and for a `doctor` with a finding that makes training
wrong; 2 for wrong usage; 128 + N for signal N. With --json an error is also one JSON object on standard output.
torch is imported only by verbs that need it.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from tracegrad import _core
from tracegrad.cli import args, doctor, extras, init, merge, online, prepare, record, score, train, unexpected, view
from tracegrad.cli.args import SHORT, Parser, as_flags, dotted, join_dotted_values
from tracegrad.errors import CODE, TracegradError
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
            raise SystemExit(_output_failed(failure)) from None
        raise
    return code if (failure := unexpected.flush()) is None else _output_failed(failure)


def _guarded(arguments: list[str]) -> int:
    """Run a command, and convert any exception to one line of output and an exit code."""
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
        return _failed(as_flags(str(error)), arguments)
    except KeyboardInterrupt:
        hint = " --resume continues from what is already written in --out." if arguments[0] in RESUMABLE else ""
        unexpected.say(f"\ntracegrad: interrupted.{hint}")
        return _failed_json("interrupted", arguments, 130)
    except args.UsageError as error:
        _failed_json(error.message, arguments, 2)
        raise
    except SystemExit:
        raise
    except args.OutputFailed as error:
        return _output_failed(error.why)
    except BrokenPipeError:
        unexpected.flush()
        return 141
    except BaseException as error:  # A panic of the Rust core is not an Exception.
        if isinstance(error, OSError) and (failure := unexpected.flush()) is not None:
            return _output_failed(failure)
        return _failed(unexpected.line(error, arguments), arguments)


def _failed(message: str, arguments: Sequence[str]) -> int:
    """Print an error on standard error, and with --json also on standard output. Return the exit code."""
    unexpected.say(f"tracegrad: error: {message}")
    return _failed_json(message, arguments, 1)


def _failed_json(message: str, arguments: Sequence[str], code: int) -> int:
    """Print an error as one line of JSON if the command has --json, and return the exit code."""
    if "--json" in arguments:
        match = CODE.search(message)
        error = {"code": match[1] if match else None, "message": message}
        try:
            args.print_json({"error": error, "exit_code": code}, line=True)
        except args.OutputFailed as failure:
            return _output_failed(failure.why)
    return code


def _output_failed(error: OSError) -> int:
    args.redirect_to_devnull(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 141
    unexpected.say(f"tracegrad: error: {unexpected.of_output(error)}")
    return 1


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
    for module in (init, score, train, merge, prepare, doctor, view, online, record):
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
