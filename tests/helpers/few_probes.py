"""Fewer tokens of each server at each check of its weights; a module that imports `few` has it for all its tests."""

import pytest

from tracegrad.weight_sync import probe_requests


@pytest.fixture(autouse=True, scope="module")
def few():
    """The policy server of the tests samples one request after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_requests, "TOKENS", 16)
        patch.setattr(probe_requests, "AT_ONCE", 2)
        yield
