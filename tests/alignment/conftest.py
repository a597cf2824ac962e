"""The bundled tokenizer, loaded once."""

import pytest

from vocabulary import EXAMPLE, load


@pytest.fixture(scope="session")
def tokenizer():
    return load(EXAMPLE)


@pytest.fixture(scope="session")
def chatml(tokenizer):
    return tokenizer
