"""Derive the JSON schema of a plain Python function from its signature and docstring, for chat templates.

The schema equals that of `transformers.utils.get_json_schema`, except that `return` is omitted, which servers do not
support. That function is not used because it refuses arguments without a description, and recording works without
transformers.
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
    """Return the tool schema of a function, as in requests.

    Args:
        function: function with type hints; its docstring supplies the descriptions, in Google's style.

    Raises:
        ArgumentError: for `*args`, `**kwargs`, and type hints without a JSON schema.

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
    description, descriptions = _docstring(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(function)
    except Exception as error:
        raise ArgumentError(
            f"TG-ROLLOUT-042: tool {name}: cannot evaluate its type hints: {error}. Import the names that they use."
        ) from None
    properties: dict[str, Any] = {}
    required = []
    for parameter in parameters(function):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"TG-ROLLOUT-043: tool {name} has the parameter {parameter}, which a JSON schema cannot describe. "
                f"Write each argument by name in the signature."
            )
        properties[parameter.name] = _property(
            name, parameter.name, hints.get(parameter.name, Any), descriptions.get(parameter.name)
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameter_schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameter_schema["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameter_schema}}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes: without `self` and `cls`, unless they have a type hint."""
    result = list(inspect.signature(function).parameters.values())
    if result and result[0].name in ("self", "cls") and result[0].annotation is result[0].empty:
        return result[1:]
    return result


def _property(tool: str, name: str, hint: Any, description: str | None) -> dict[str, Any]:
    try:
        result = type_of(hint)
    except ArgumentError as error:
        raise ArgumentError(f"tool {tool}, argument {name}: {error}") from None
    if description is None:
        return result
    if choices := _CHOICES.search(description):
        try:
            values = json.loads(choices.group(1))
        except ValueError:
            raise ArgumentError(
                f"TG-ROLLOUT-044: tool {tool}, argument {name}: choices {choices.group(1)!r} are not JSON. "
                'Write them as (choices: ["tea", "coffee"]).'
            ) from None
        result["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        description = description[: choices.start()].strip()
    result["description"] = description
    return result


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description before the sections, and the description of each argument."""
    text = text.strip()
    match = _DESCRIPTION.search(text)
    arguments = _ARGUMENTS.search(text)
    lines = arguments.group(1).split("\n") if arguments else []
    body = "\n".join(line for line in lines if line.strip())
    descriptions = {name: re.sub(r"\s*\n+\s*", " ", words.strip()) for name, words in _ARGUMENT.findall(body)}
    return (match.group(1).strip() if match else ""), descriptions


def type_of(hint: Any) -> dict[str, Any]:
    """Return the schema of a type hint.

    >>> type_of(list[int] | None)
    {'type': 'array', 'items': {'type': 'integer'}, 'nullable': True}

    Raises:
        ArgumentError: if the hint has no JSON schema.
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
        f"TG-ROLLOUT-045: the type hint {hint} has no JSON schema. Use str, int, float, bool, Literal, list, dict, a "
        "tuple of fixed length, or a union of these."
    )


def _union(args: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [type_of(arg) for arg in args if arg is not type(None)]
    result: dict[str, Any]
    if len(schemas) == 1:
        result = schemas[0]
    elif all(item.keys() == {"type"} for item in schemas):
        names = sorted({item["type"] for item in schemas})
        result = {"type": names[0] if len(names) == 1 else names}
    else:
        result = {"anyOf": schemas}
    if type(None) in args:
        result["nullable"] = True
    return result


def _literal(args: tuple[Any, ...]) -> dict[str, Any]:
    names = []
    for arg in args:
        if type(arg) not in (int, float, str, bool, type(None)):
            raise ArgumentError(
                f"TG-ROLLOUT-046: {arg!r} in a Literal is not a JSON value. Use strings, numbers, booleans or None."
            )
        if (name := _PLAIN[type(arg)]["type"]) not in names:
            names.append(name)
    return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}


def mismatch_reason(value: Any, expected: dict[str, Any]) -> str | None:
    """Return why a value does not match a schema of this module; None if it does.

    >>> mismatch_reason("3", {"type": "integer"})
    "'3' is not of type integer"
    """
    if value is None and expected.get("nullable"):
        return None
    if "anyOf" in expected:
        reasons = [mismatch_reason(value, item) for item in expected["anyOf"]]
        return None if None in reasons else reasons[0]
    if "enum" in expected and not any(type(value) is type(item) and value == item for item in expected["enum"]):
        return f"{_shorten(value)} is none of {json.dumps(expected['enum'], ensure_ascii=False)}"
    names = expected.get("type")
    names = [names] if isinstance(names, str) else names
    if names and not any(_has_type(value, name) for name in names):
        return f"{_shorten(value)} is not of type {' or '.join(names)}"
    if isinstance(value, list):
        parts = zip(value, expected.get("prefixItems") or [expected.get("items", {})] * len(value), strict=False)
    elif isinstance(value, dict):
        parts = ((item, expected.get("additionalProperties", {})) for item in value.values())
    else:
        return None
    return next((reason for item, schema in parts if (reason := mismatch_reason(item, schema))), None)


def _has_type(value: Any, name: str) -> bool:
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    python_types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return isinstance(value, python_types.get(name, object))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
