"""`rollout.jsons`: what it reads and writes is what the standard library does, but for NaN."""

import json
import math
from dataclasses import dataclass
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.rollout import client

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(st.characters()), each, max_size=4),
)


@given(VALUES)
def test_both_ways_are_the_standard_librarys(value):
    line = client.dumps(value)
    assert b"\n" not in line
    assert json.loads(line) == value == client.loads(json.dumps(value).encode())


@pytest.mark.parametrize("beside", ["", "\ud83d"], ids=["by orjson", "by the standard library"])
def test_nan_and_the_infinities_are_null(beside):
    value = {"beside": beside, "numbers": [math.nan, math.inf, -math.inf, 1e-7]}
    assert json.loads(client.dumps(value)) == {"beside": beside, "numbers": [None, None, None, 1e-7]}


def test_what_servers_send_against_the_rules_is_read_as_before():
    assert client.loads(b'{"half": "\\ud800", "many": 1e999}') == {"half": "\ud800", "many": math.inf}
    assert math.isnan(client.loads(b"[NaN]")[0])
    assert client.loads(b"[" * 500 + b"]" * 500)
    with pytest.raises(ValueError, match="Expecting value"):
        client.loads(b"no JSON")


@dataclass
class Of:
    value: int


@pytest.mark.parametrize(
    "value", [Of(1), datetime.now(timezone.utc), {1, 2}, b"bytes"], ids=lambda it: type(it).__name__
)
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(TypeError):
        client.dumps({"metadata": value})


def test_a_ring_is_refused_and_deep_nesting_is_not():
    deep = []
    for _ in range(400):
        deep = [deep]
    assert client.dumps(deep) == b"[" * 401 + b"]" * 401
    deep[0] = deep
    with pytest.raises((ValueError, RecursionError)):
        client.dumps(deep)
