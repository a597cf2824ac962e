"""The command line: `tracegrad init`, `train`, `merge`, `prepare`, `doctor`, `online`, `replay`, `record`, `proxy`.

In come arguments; out go printed lines, files and an exit code: 0, 1 for an error of ours in one line, 2 for usage,
128 + signal; `doctor` gives 1 where training would be wrong. Each family of verbs is a file; here they are put
together. No torch until a verb needs it. Its files, each using those before it alone: `output`, `words` (flags,
lines), `key`, `named`, `runfile`, `recipe` (what verbs share); `files`, `init`, `merge`, `score`, `train`, `view`,
`online`, `record` (the verbs).
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from tracegrad import _core, cache
from tracegrad.cli import files, init, merge, online, output, record, score, train, view
from tracegrad.cli.words import SHORT, Parser, as_flags, dotted, joined
from tracegrad.errors import TracegradError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["train", "traces.jsonl", "--model", "m", "--out", "o", "--optimizer.lrr", "1"])
    1
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    told, overrides = _parse(arguments)
    try:
        with contextlib.ExitStack() as stack:
            if told.json:
                stack.enter_context(output.kept())
            if told.no_cache:
                stack.enter_context(cache.unused())
            return told.run(told, overrides, arguments)
    except TracegradError as error:
        print(f"tracegrad: error: {as_flags(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ntracegrad: interrupted. --resume goes on from the last checkpoint, shard or group, if there is one.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        return 141


def _parse(arguments: list[str]) -> tuple[Any, list[tuple[str, Any]]]:
    parser = Parser(prog="tracegrad", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tracegrad {_core.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for family in (init, score, train, merge, files, view, online, record):
        family.add_to(commands)
    told, rest = parser.parse_known_args(joined(arguments))
    given = [(name, getattr(told, flag, None)) for flag, name in SHORT.items()]
    return told, [*((name, value) for name, value in given if value is not None), *dotted(rest, told.parser)]
