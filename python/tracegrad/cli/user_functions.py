"""Import objects that a user names as `file.py:name`. The file is executed, like a script.

Tasks may also be a JSON Lines file. An object of the wrong kind is an error at the start.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from tracegrad.config import nearest
from tracegrad.errors import ArgumentError
from tracegrad.rollout import schema
from tracegrad.user_code import failure_of, load_module

NAMED = re.compile(r"(?P<place>.+\.py|[A-Za-z_][A-Za-z0-9_.]*):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
MOST_EVALUATED = 100_000


def find(named: str, base: Path) -> Any:
    """Return the object that `file.py:name` or `module:name` names. Files are relative to `base`.

    Raises:
        ArgumentError: if there is no such file, running it raises, or it does not define the name.
    """
    match = NAMED.fullmatch(named) if isinstance(named, str) else None
    if match is None:
        raise ArgumentError(
            f"TG-CLI-036: {named!r:.200} is not a reference to Python code. Write file.py:name, or module:name for an "
            "installed module."
        )
    module = _module(match["place"], base, named)
    try:
        return getattr(module, match["name"])
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ArgumentError(
            f"TG-CLI-037: {named}: the file does not define {match['name']}. {nearest(match['name'], names)}"
        ) from None


def _module(place: str, base: Path, named: str) -> ModuleType:
    path = base / place
    if place.endswith(".py") and not path.is_file():
        raise ArgumentError(f"TG-CLI-038: {named}: the file {path} does not exist. Correct the path.")
    try:
        return load_module(path) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ArgumentError(
            f"TG-CLI-039: {named} cannot be imported: {failure_of(error)}. Run the file with Python to find the cause."
        ) from error


def tasks(named: str, base: Path) -> Any:
    """Return the tasks: entries of a JSON Lines file, or the tasks of an object `file.py:name`.

    The object is a list, an iterable, or a function without arguments that returns one.

    Raises:
        ArgumentError: if there are no tasks, or a line is not valid JSON.
    """
    if not isinstance(named, str):
        raise ArgumentError(f"TG-CLI-040: tasks is {named!r:.100}. It must be a JSON Lines file, or file.py:name.")
    if not NAMED.fullmatch(named):
        return _lines(base / named)
    source = find(named, base)
    if inspect.isfunction(source):
        try:
            source = source()
        except Exception as error:
            raise ArgumentError(
                f"TG-CLI-041: {named}() raised an error and returned no tasks: {failure_of(error)}"
            ) from error
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, Iterable):
        raise ArgumentError(
            f"TG-CLI-042: {named} is a {type(source).__name__}, which is not a list of tasks. Name a list, another "
            "iterable, or a function without arguments that returns one."
        )
    if isinstance(source, Sequence) and not source:
        raise ArgumentError(f"TG-CLI-043: {named} is empty. Add at least one task.")
    return source if isinstance(source, Sequence) else _iterated(source, named)


def _iterated(task_source: Iterable[Any], named: str) -> Iterator[Any]:
    """Yield the same tasks, with the location of an exception in its message."""
    try:
        yield from task_source
    except Exception as error:
        raise ArgumentError(
            f"TG-CLI-044: {named} raised an error while tasks were read from it: {failure_of(error)}"
        ) from error


def evaluation_tasks(named: str, base: Path) -> list[Any]:
    """Return the tasks of an evaluation as a list.

    Raises:
        ArgumentError: as for `tasks`, or if there are more than `MOST_EVALUATED`.
    """
    task_list = list(islice(tasks(named, base), MOST_EVALUATED + 1))
    if len(task_list) > MOST_EVALUATED:
        raise ArgumentError(
            f"TG-CLI-045: eval_tasks: {named} has more than {MOST_EVALUATED:,} tasks, and every evaluation rolls out "
            "all of them. Name fewer."
        )
    return task_list


def _lines(path: Path) -> list[Any]:
    values = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    values.append(_value(line, path, number))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise ArgumentError(
            f"TG-CLI-046: {path}: {reason}. Tasks must be a JSON Lines file that can be read."
        ) from error
    if not values:
        raise ArgumentError(f"TG-CLI-047: {path} is empty. Write one task per line.")
    return values


def _value(line: str, path: Path, number: int) -> Any:
    try:
        value = json.loads(line)
        if isinstance(value, (str, list, dict)):
            return value
        reason = f"the line is {line.strip()[:60]}"
    except (ValueError, RecursionError) as error:
        reason = str(error)[:100]
    raise ArgumentError(
        f"TG-CLI-048: {path}:{number}: not a task: {reason}. Skipping the line would renumber the groups. Write a JSON "
        "string, list or object."
    )


def agent_or_environment(named: str, base: Path, what: str) -> Any:
    """Return the agent, a function of (task, policy), or the environment class.

    Args:
        what: "agent", "environment", or "" for either.

    Raises:
        ArgumentError: for an object of another kind.
    """
    thing = find(named, base)
    is_class = isinstance(thing, type) and hasattr(thing, "reset")
    if what == "environment" and not (is_class or _takes(thing, "task", "policy")):
        raise ArgumentError(
            f"TG-CLI-049: {named} is {_kind(thing)}. An environment is a class with a reset method. Name one, or use "
            "the key agent."
        )
    if not is_class and (isinstance(thing, type) or not _takes(thing, "task", "policy")):
        raise ArgumentError(
            f"TG-CLI-050: {named} is {_kind(thing)}. An agent is called with (task, policy). Name a function with "
            "these two arguments, or an environment class."
        )
    return thing


def functions(named: Any, base: Path, what: str) -> list[Callable[..., Any]]:
    """Return functions by name. A name may also refer to a list of functions.

    Raises:
        ArgumentError: if a name refers to something else.
    """
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise ArgumentError(
            f'TG-CLI-051: {what} is {named!r:.100}. It must be a list such as {what} = ["file.py:name"].'
        )
    result: list[Callable[..., Any]] = []
    for name in names:
        thing = find(name, base)
        members = list(thing) if isinstance(thing, (list, tuple)) else [thing]
        for function in members:
            if not callable(function) or isinstance(function, type):
                raise ArgumentError(
                    f"TG-CLI-052: {name} is {_kind(function)}. {what} must be functions. Name a function, or a list of "
                    "functions."
                )
        result += members
    return result


def tools(named: Any, base: Path) -> Any:
    """Return the tools. A single name may also refer to a function of `task` that returns the tools.

    Raises:
        ArgumentError: if a name refers to something else.
    """
    if isinstance(named, str):
        thing = find(named, base)
        if inspect.isfunction(thing) and list(inspect.signature(thing).parameters) == ["task"]:
            return thing
    tool_functions = functions(named, base, "tools")
    for function in tool_functions:
        schema(function)
    return tool_functions


def _takes(thing: Any, *names: str) -> bool:
    """Return whether an object can be called with this number of arguments."""
    if not callable(thing):
        return False
    try:
        inspect.signature(thing).bind(*names)
    except TypeError:
        return False
    except ValueError:  # A builtin without a signature.
        return True
    return True


def _kind(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if callable(thing):
        try:
            return f"a function of {inspect.signature(thing)}"
        except (TypeError, ValueError):
            return "a function"
    return f"a {type(thing).__name__}"
