"""Make the JSON schema of a plain Python function from its signature and docstring, as chat templates show it.

Equal to `transformers.utils.get_json_schema` where that gives one, but for `return`, which servers do not know. That
function is not called because it refuses an argument without a description, and recording needs no transformers.
"""

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tracegrad.errors import ArgumentError

_PLAIN = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = r"(?:Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):"
_DESCRIPTION = re.compile(rf"^(.*?)[\n\s]*(?:{_SECTION}|\Z)", re.DOTALL)
_ARGUMENTS = re.compile(rf"(?:^|\n)\s*(?:Args|Arguments):\n\s*(.*?)[\n\s]*(?:\n\s*{_SECTION}|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+)\s*(?:\([^\n)]*\))?:\s*(.*?)\s*(?=\n\s*\w+\s*(?:\([^\n)]*\))?:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool that a function is, as requests carry it.

    Args:
        function: with type hints; its docstring gives the descriptions, in Google's style.

    Raises:
        ArgumentError: for `*args`, `**kwargs`, and hints that no JSON value has.

    >>> def price(item: str, pieces: int = 1) -> int:
    ...     '''Price of one item.
    ...
    ...     Args:
    ...         item: its name
    ...     '''
    >>> schema(price)["function"]["parameters"]["properties"]
    {'item': {'type': 'string', 'description': 'its name'}, 'pieces': {'type': 'integer'}}
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, described = _docstring(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(function)
    except Exception as error:
        raise ArgumentError(f"tool {name}: its type hints cannot be read: {error}. Import what they name.") from None
    properties: dict[str, Any] = {}
    required = []
    for parameter in parameters(function):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"tool {name} takes {parameter}. A model is told each argument by its name. Name them in the signature."
            )
        properties[parameter.name] = _property(
            name, parameter.name, hints.get(parameter.name, Any), described.get(parameter.name)
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    told: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        told["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": told}}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a caller passes: `self` and `cls` left out where they have no hint."""
    found = list(inspect.signature(function).parameters.values())
    if found and found[0].name in ("self", "cls") and found[0].annotation is found[0].empty:
        return found[1:]
    return found


def _property(tool: str, name: str, hint: Any, description: str | None) -> dict[str, Any]:
    try:
        told = type_of(hint)
    except ArgumentError as error:
        raise ArgumentError(f"tool {tool}, argument {name}: {error}") from None
    if description is None:
        return told
    if choices := _CHOICES.search(description):
        try:
            values = json.loads(choices.group(1))
        except ValueError:
            raise ArgumentError(
                f"tool {tool}, argument {name}: choices {choices.group(1)!r} are not JSON. "
                'Write them as (choices: ["tea", "coffee"]).'
            ) from None
        told["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        description = description[: choices.start()].strip()
    told["description"] = description
    return told


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the sections, and that of each argument."""
    text = text.strip()
    found = _DESCRIPTION.search(text)
    arguments = _ARGUMENTS.search(text)
    lines = arguments.group(1).split("\n") if arguments else []
    body = "\n".join(line for line in lines if line.strip())
    described = {name: re.sub(r"\s*\n+\s*", " ", words.strip()) for name, words in _ARGUMENT.findall(body)}
    return (found.group(1).strip() if found else ""), described


def type_of(hint: Any) -> dict[str, Any]:
    """The schema of a type hint.

    >>> type_of(list[int] | None)
    {'type': 'array', 'items': {'type': 'integer'}, 'nullable': True}
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(_PLAIN.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is list:
        return {"type": "array", "items": type_of(args[0])} if args else {"type": "array"}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [type_of(arg) for arg in args]}
    if origin is dict:
        return {"type": "object", **({"additionalProperties": type_of(args[1])} if len(args) == 2 else {})}
    raise ArgumentError(
        f"the type hint {hint} has no JSON schema. Use str, int, float, bool, Literal, list, dict, a tuple of fixed "
        "length, or a union of these."
    )


def _union(args: tuple[Any, ...]) -> dict[str, Any]:
    each = [type_of(arg) for arg in args if arg is not type(None)]
    told: dict[str, Any]
    if len(each) == 1:
        told = each[0]
    elif all(one.keys() == {"type"} for one in each):
        names = sorted({one["type"] for one in each})
        told = {"type": names[0] if len(names) == 1 else names}
    else:
        told = {"anyOf": each}
    if type(None) in args:
        told["nullable"] = True
    return told


def _literal(args: tuple[Any, ...]) -> dict[str, Any]:
    names = []
    for arg in args:
        if type(arg) not in (int, float, str, bool, type(None)):
            raise ArgumentError(f"{arg!r} in a Literal is no JSON value. Use strings, numbers, booleans or None.")
        if (name := _PLAIN[type(arg)]["type"]) not in names:
            names.append(name)
    return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}


def misfit(value: Any, told: dict[str, Any]) -> str | None:
    """Why a value is not of a schema made here; None where it is.

    >>> misfit("3", {"type": "integer"})
    "'3' is not of type integer"
    """
    if value is None and told.get("nullable"):
        return None
    if "anyOf" in told:
        reasons = [misfit(value, one) for one in told["anyOf"]]
        return None if None in reasons else reasons[0]
    if "enum" in told and not any(type(value) is type(one) and value == one for one in told["enum"]):
        return f"{_short(value)} is none of {json.dumps(told['enum'], ensure_ascii=False)}"
    names = told.get("type")
    names = [names] if isinstance(names, str) else names
    if names and not any(_is(value, name) for name in names):
        return f"{_short(value)} is not of type {' or '.join(names)}"
    if isinstance(value, list):
        parts = zip(value, told.get("prefixItems") or [told.get("items", {})] * len(value), strict=False)
    elif isinstance(value, dict):
        parts = ((one, told.get("additionalProperties", {})) for one in value.values())
    else:
        return None
    return next((reason for one, schema in parts if (reason := misfit(one, schema))), None)


def _is(value: Any, name: str) -> bool:
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    kinds = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return isinstance(value, kinds.get(name, object))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
