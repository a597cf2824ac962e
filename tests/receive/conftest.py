"""The environment of trace stores."""

import pytest


@pytest.fixture
def stores_python(request):
    python = request.config.getoption("--stores-python")
    assert python, "pass --stores-python: the interpreter of an environment that holds arize-phoenix and mlflow"
    return python
