"""Convert an unexpected error, or unwritable standard output, to one line without a traceback.

An unexpected error is written to a report file for an issue. The report omits argument values, the values of secret
environment variables, and anything that looks like a credential.
"""

import errno
import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from tracegrad import _core
from tracegrad.cli import args
from tracegrad.errors import escape_terminal

_PACKAGES = ("numpy", "pyarrow", "torch", "transformers", "peft", "starlette", "uvicorn")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET = re.compile(
    r"\b(?:sk|hf|gh[opsu]|github_pat|xox[abp]|glpat)[-_][\w-]{8,}|\bA[KS]IA[0-9A-Z]{12,}|(?i:\bbearer)\s+\S+"
    r"|(?<=://)[^/\s@]+(?=@)|(?<=[?&])[^\s'\"]+|\beyJ[\w.-]{16,}"
)
_MOST = 256 << 10  # Limit of a traceback in characters. An error's text may quote an entire file.


def line(error: BaseException, arguments: Sequence[str]) -> str:
    """Write the report of an unexpected error, and return the line that names the error and the report."""
    message = without_secrets(_text(error).strip().split("\n")[0], [])[:200]
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    try:
        path = write(error, arguments)
    except Exception as failure:
        frames = traceback.extract_tb(error.__traceback__)
        location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        cause = getattr(failure, "strerror", None) or type(failure).__name__
        return escape_terminal(
            f"TG-CLI-053: unexpected {summary}{location}. No report could be written ({cause}). Set TMPDIR to a "
            "writable folder, run the command again, and attach the report to an issue of the project."
        )
    return escape_terminal(
        f"TG-CLI-031: unexpected {summary}. Report: {path}. Read it, then attach it to an issue of the project."
    )


def write(error: BaseException, arguments: Sequence[str]) -> str:
    """Write the report to the temporary folder, readable only by its owner, and return its path."""
    text = report(error, arguments)
    descriptor, path = tempfile.mkstemp(prefix="tracegrad-report-", suffix=".txt")
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path


def report(error: BaseException, arguments: Sequence[str]) -> str:
    """Return the report: version, platform, command without values, and traceback."""
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-60))
    except Exception as failure:  # The error's `__str__` raised, or the recursion is too deep.
        frames = "".join(traceback.format_tb(error.__traceback__, limit=-60))
        trace = f"{frames}{type(error).__name__} (its text raised {type(failure).__name__})\n"
    if len(trace) > _MOST:
        trace = f"{trace[: _MOST // 2]}\n[... {len(trace) - _MOST:,} characters left out ...]\n{trace[-_MOST // 2 :]}"
    lines = [
        f"tracegrad {_core.__version__}",
        f"python {platform.python_version()} ({platform.python_implementation()}), {platform.platform()}",
        ", ".join(f"{name} {package_version}" for name in _PACKAGES if (package_version := _version(name))),
        f"command: {' '.join(['tracegrad', *redacted(arguments)])}",
        "",
        without_secrets(trace, _values(arguments)),
    ]
    return "\n".join(lines)


def redacted(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command, with `VALUE` for anything but the verb, flags and numbers.

    >>> redacted(["train", "a.jsonl", "--model", "m", "--optimizer.lr=1e-6", "--epochs", "2", "--name=x y"])
    ['train', 'VALUE', '--model', 'VALUE', '--optimizer.lr=1e-6', '--epochs', '2', '--name=VALUE']
    """
    out = []
    for index, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if not re.fullmatch(r"--?[A-Za-z][\w.-]{0,80}", flag):
            flag, equals, value = "", "", word
        if value:
            verb = index == 0 and re.fullmatch("[a-z]{1,20}", value)
            value = value if verb or re.fullmatch(r"[-+.\deE]{1,24}", value) else "VALUE"
        out.append(f"{flag}{equals}{value}")
    return out


def without_secrets(text: str, values: Sequence[str]) -> str:
    """Return a text without these values, secret environment variables, and anything that looks like a credential.

    >>> without_secrets("https://me:pw@host/a?sig=1 Bearer abc, /data/x.jsonl", ["/data/x.jsonl"])
    'https://SECRET@host/a?SECRET SECRET VALUE'
    """
    secrets = [value for name, value in os.environ.items() if len(value) >= 6 and _SECRET_NAME.search(name)]
    for placeholder, texts in ("SECRET", secrets), ("VALUE", values):
        for value in sorted(texts, key=len, reverse=True):
            text = text.replace(value, placeholder)
    home = os.path.expanduser("~")
    text = _SECRET.sub("SECRET", text)
    return text.replace(home, "~") if len(home) > 1 else text


def flush() -> OSError | None:
    """Flush standard error and output. If output fails, redirect it to /dev/null and return the error."""
    try:
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.flush()
    except OSError:
        args.redirect_to_devnull(sys.stderr)
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        args.redirect_to_devnull(sys.stdout)
        return error
    return None


def say(line: str) -> None:
    """Print a line on standard error, if possible."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        args.redirect_to_devnull(sys.stderr)


def of_output(error: OSError) -> str:
    """Return the message for a standard output that cannot be written."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free space there, or redirect it elsewhere" if is_full else "Redirect it elsewhere"
    return f"standard output: {reason}. The output is incomplete. {remedy}."


def _values(arguments: Sequence[str]) -> list[str]:
    """Return the values of a command that are long enough to search for in a text."""
    words = [word.partition("=")[2] if word.startswith("-") else word for word in arguments[1:]]
    return [word for word in words if len(word) >= 4 and redacted(["", word])[1] == "VALUE"]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
