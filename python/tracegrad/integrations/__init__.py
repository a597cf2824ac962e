"""Use tracegrad inside other trainers. Each module imports its trainer on use.

docs/how-to/other-trainers.md names the page of each module. docs/reference/integrations.md lists the tested versions of
the trainers.
"""

import importlib
from typing import Any

from tracegrad.errors import ArgumentError


def peer(module: str, versions: str, *attributes: str) -> Any:
    """Import a module of another trainer, and check that it has the attributes that an integration uses.

    Args:
        module: its full name.
        versions: the tested versions, as a pip requirement.
        attributes: dotted names within the module.

    Raises:
        ArgumentError: if the module cannot be imported or lacks an attribute.

    >>> peer("json", "python>=3.10", "JSONDecoder.decode").__name__
    'json'
    """
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"TG-INTEG-001: {module} cannot be imported: {error}. This integration needs that trainer. Run "
            f"pip install '{versions}', the tested version."
        ) from error
    for attribute in attributes:
        value = imported
        for part in attribute.split("."):
            value = getattr(value, part, None)
        if value is None:
            raise ArgumentError(
                f"TG-INTEG-002: {module} has no {attribute}, which this integration calls or replaces. With this "
                f"version training would ignore the integration. Run pip install '{versions}', the tested version."
            )
    return imported
