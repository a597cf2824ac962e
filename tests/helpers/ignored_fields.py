"""Find the fields of an objective that change no number."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@contextmanager
def ignored(cls: type, name: str, value: Any) -> Iterator[None]:
    """`cls.name` reads as `value`, whatever an instance was made with."""
    before = cls.__dict__.get(name)
    setattr(cls, name, property(lambda self: value, lambda self, given: None))
    try:
        yield
    finally:
        delattr(cls, name)
        if before is not None:
            setattr(cls, name, before)
