"""Run the command line: one module for each verb, put together here.

The exit code is 0, 1 for an error in one line (and for `doctor` if training would be wrong), 2 for wrong usage, and
128 + signal. torch is imported when a verb needs it.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from tracegrad import _core
from tracegrad.cli import args, doctor, init, merge, online, prepare, record, score, train, unexpected, view
from tracegrad.cli.args import SHORT, Parser, as_flags, dotted, joined
from tracegrad.errors import TracegradError
from tracegrad.storage import cache

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["train", "traces.jsonl", "--model", "m", "--out", "o", "--optimizer.lrr", "1"])
    1
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _guarded(arguments)
    except SystemExit:  # of argparse, or of code of the user
        if (failure := unexpected.flush()) is not None:
            raise SystemExit(_output_failed(failure)) from None
        raise
    return code if (failure := unexpected.flush()) is None else _output_failed(failure)


def _guarded(arguments: list[str]) -> int:
    """Run a command; whatever it raises becomes one line and an exit code."""
    try:
        told, overrides = _parse(arguments)
        with contextlib.ExitStack() as stack:
            if told.json:
                stack.enter_context(args.kept())
            if told.no_cache:
                stack.enter_context(cache.unused())
            return told.run(told, overrides, arguments)
    except TracegradError as error:
        unexpected.say(f"tracegrad: error: {as_flags(str(error))}")
        return 1
    except KeyboardInterrupt:
        unexpected.say(
            "\ntracegrad: interrupted. --resume goes on from the last checkpoint, shard or group, if there is one."
        )
        return 130
    except SystemExit:
        raise
    except args.OutputFailed as error:
        return _output_failed(error.why)
    except BrokenPipeError:
        unexpected.flush()
        return 141
    except BaseException as error:  # a panic of the core is no Exception
        if isinstance(error, OSError) and (failure := unexpected.flush()) is not None:
            return _output_failed(failure)
        unexpected.say(f"tracegrad: error: {unexpected.line(error, arguments)}")
        return 1


def _output_failed(error: OSError) -> int:
    args.nowhere(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 141
    unexpected.say(f"tracegrad: error: {unexpected.of_output(error)}")
    return 1


def _parse(arguments: list[str]) -> tuple[Any, list[tuple[str, Any]]]:
    parser = Parser(
        prog="tracegrad",
        description="Train language models with GRPO on recorded LLM trajectories.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tracegrad {_core.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for each in (init, score, train, merge, prepare, doctor, view, online, record):
        each.add_to(commands)
    told, rest = parser.parse_known_args(joined(arguments))
    given = [(name, getattr(told, flag, None)) for flag, name in SHORT.items()]
    return told, [*((name, value) for name, value in given if value is not None), *dotted(rest, told.parser)]
