"""What a user names as `file.py:name`: the file is run, as Python runs a script, and what it calls so is taken.

Tasks may also be a file of JSON lines. Nothing here knows what the things are for but to say early where one of another
kind is named. Called by `online` and `record`.
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
from tracegrad.user_code import located, module_of

NAMED = re.compile(r"(?P<place>.+\.py|[A-Za-z_][A-Za-z0-9_.]*):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
MOST_EVALUATED = 100_000


def find(named: str, base: Path) -> Any:
    """What `file.py:name` or `module:name` names; files are looked for in `base`.

    Raises:
        ArgumentError: if there is no such file, running it raises, or it has no such name.
    """
    told = NAMED.fullmatch(named) if isinstance(named, str) else None
    if told is None:
        raise ArgumentError(f"{named!r:.200} names nothing. Write file.py:name, or module:name of what is installed.")
    module = _module(told["place"], base, named)
    try:
        return getattr(module, told["name"])
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ArgumentError(f"{named}: there is no {told['name']} in it. {nearest(told['name'], names)}") from None


def _module(place: str, base: Path, named: str) -> ModuleType:
    path = base / place
    if place.endswith(".py") and not path.is_file():
        raise ArgumentError(f"{named}: there is no file {path}. Nothing of it could be played. Correct the path.")
    try:
        return module_of(path) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ArgumentError(
            f"{named}: it cannot be imported: {located(error)}. Nothing of it could be played. Run it by Python alone."
        ) from error


def tasks(named: str, base: Path) -> Any:
    """Tasks: the values of a file of JSON lines, or what `file.py:name` names: a list, or what can be iterated once;
    or a function without arguments that gives one.

    Raises:
        ArgumentError: if there is none, with the line of the file that is no JSON.
    """
    if not isinstance(named, str):
        raise ArgumentError(f"tasks is {named!r:.100}. Write a file of JSON lines, or file.py:name.")
    if not NAMED.fullmatch(named):
        return _lines(base / named)
    found = find(named, base)
    if inspect.isfunction(found):
        try:
            found = found()
        except Exception as error:
            raise ArgumentError(f"{named}: it gives no tasks: {located(error)}. Nothing could be played.") from error
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        raise ArgumentError(
            f"{named} is a {type(found).__name__}. Each of its entries would be played. Name a list, or a function "
            "without arguments that gives one."
        )
    if isinstance(found, Sequence) and not found:
        raise ArgumentError(f"{named} is empty. There is nothing to play. Put at least one task into it.")
    return found if isinstance(found, Sequence) else _iterated(found, named)


def _iterated(found: Iterable[Any], named: str) -> Iterator[Any]:
    """The same, with its failures located."""
    try:
        yield from found
    except Exception as error:
        raise ArgumentError(
            f"{named}: it failed while it gave tasks: {located(error)}. No more can be played."
        ) from error


def evaluated(named: str, base: Path) -> list[Any]:
    """Tasks that end, as those of an evaluation must."""
    found = list(islice(tasks(named, base), MOST_EVALUATED + 1))
    if len(found) > MOST_EVALUATED:
        raise ArgumentError(
            f"evaluation: {named} has more than {MOST_EVALUATED:,} tasks. All are played each time. Name fewer."
        )
    return found


def _lines(path: Path) -> list[Any]:
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_value(line, path, number))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error.reason})"
        raise ArgumentError(f"{path}: {why}. There are no tasks to play. Name a file of JSON lines.") from error
    if not found:
        raise ArgumentError(f"{path} has no line. There is nothing to play. Write a task into each line.")
    return found


def _value(line: str, path: Path, number: int) -> Any:
    try:
        value = json.loads(line)
        if isinstance(value, (str, list, dict)):
            return value
        why = f"it is {line.strip()[:60]}"
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
    raise ArgumentError(
        f"{path}:{number}: no task: {why}. Which task is which group's would change. Write a JSON text, list or object."
    )


def contract(named: str, base: Path, what: str) -> Any:
    """What plays: an agent, which is called with (task, policy), or a class of environments.

    Args:
        what: "agent", "environment", or "" for either.
    """
    found = find(named, base)
    a_class = isinstance(found, type) and hasattr(found, "reset")
    if what == "environment" and not (a_class or _takes(found, "task", "policy")):
        raise ArgumentError(
            f"{named} is {_kind(found)}. An environment is a class with reset. Name one, or call it an agent."
        )
    if not a_class and (isinstance(found, type) or not _takes(found, "task", "policy")):
        raise ArgumentError(
            f"{named} is {_kind(found)}. It would be called with (task, policy). Name a function of these two, or a "
            "class of environments."
        )
    return found


def functions(named: Any, base: Path, what: str) -> list[Callable[..., Any]]:
    """Functions, each by its name; a name may also be that of a list of them."""
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise ArgumentError(f'{what} is {named!r:.100}. Write {what} = ["file.py:name"].')
    found: list[Callable[..., Any]] = []
    for name in names:
        thing = find(name, base)
        several = list(thing) if isinstance(thing, (list, tuple)) else [thing]
        for one in several:
            if not callable(one) or isinstance(one, type):
                raise ArgumentError(f"{name} is {_kind(one)}. {what} are functions. Name one, or a list of them.")
        found += several
    return found


def tools(named: Any, base: Path) -> Any:
    """Tools; a single name may also be that of a function whose one argument is `task`, which gives them."""
    if isinstance(named, str):
        thing = find(named, base)
        if inspect.isfunction(thing) and list(inspect.signature(thing).parameters) == ["task"]:
            return thing
    found = functions(named, base, "tools")
    for one in found:
        schema(one)
    return found


def _takes(thing: Any, *names: str) -> bool:
    """Whether something can be called with so many arguments."""
    if not callable(thing):
        return False
    try:
        inspect.signature(thing).bind(*names)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
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
