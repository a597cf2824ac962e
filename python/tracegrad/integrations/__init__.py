"""Use tracegrad inside other trainers. Each module imports its trainer on use.

docs/trainers.md says what each does and with which versions it was run. `peer` imports a trainer or says what is
missing.
"""

import importlib
from typing import Any

from tracegrad.errors import ArgumentError


def peer(module: str, versions: str, *attributes: str) -> Any:
    """A module of another trainer, if it is installed and has what an integration takes of it.

    Args:
        module: its full name.
        versions: those the integration was run against, as pip takes them.
        attributes: dotted names within the module.

    Raises:
        ArgumentError: if it cannot be imported, or is of another shape.

    >>> peer("json", "python>=3.10", "JSONDecoder.decode").__name__
    'json'
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"{module} cannot be imported: {error}. This integration works inside that trainer. "
            f"pip install '{versions}', which it was run against."
        ) from error
    for attribute in attributes:
        here = found
        for part in attribute.split("."):
            here = getattr(here, part, None)
        if here is None:
            raise ArgumentError(
                f"{module} has no {attribute}, which this integration calls or replaces. This version is of another "
                f"shape, and training would go on without us. pip install '{versions}', which it was run against."
            )
    return found
