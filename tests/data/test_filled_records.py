"""The key `tracegrad_filled` of a record: it is read in every form, kept unchanged, and refused if it is wrong."""

import json

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data.trace import without_token_data
from tracegrad.errors import FormatError

CALL = {"ids": [5, 6, 2], "logprobs": [None, -0.25, -0.5], "kind": "processed", "temperature": 1.0, "kept": None}
FILLED = {"model": "9f", "dtype": "float32", "engine": "tracegrad 0.1.0", "calls": [CALL]}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
RESPONSE = {"choices": [{"message": MESSAGES[1], "finish_reason": "stop"}]}
FORMS = {
    "messages": {"messages": MESSAGES},
    "native": {"format": "tracegrad/1", "messages": MESSAGES},
    "call": {"request": {"messages": MESSAGES[:1]}, "response": RESPONSE},
    "calls": {"calls": [{"request": {"messages": MESSAGES[:1]}, "response": RESPONSE}]},
    "response": RESPONSE,
    "sglang": {"text": "b", "output_ids": [5, 6, 2], "meta_info": {"finish_reason": {"type": "stop"}}},
    "slime": {"prompt": "a", "response": "b", "tokens": [1, 5, 6, 2], "response_length": 3, "loss_mask": [1, 1, 1]},
}


def of(trace, turn=0):
    """Return the filled logprobs of a turn, None for NaN."""
    logprobs = trace.generations[turn].filled_logprobs
    return None if logprobs is None else [None if np.isnan(value) else value for value in logprobs.tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_with_its_filled_logprobs(form, tmp_path):
    [trace] = tg.Traces.from_records([FORMS[form] | {"tracegrad_filled": FILLED}])
    assert of(trace) == [None, -0.25, -0.5]
    assert trace.generations[0].filled_logprobs.dtype == np.float32
    assert trace.to_dict()["tracegrad_filled"] == FILLED
    [bare] = tg.Traces.from_records([FORMS[form]])
    assert bare.generations[0].filled_logprobs is None
    assert (bare.generations[0].logprobs is None) == (trace.generations[0].logprobs is None)


def test_writing_keeps_the_bytes(tmp_path):
    line = json.dumps({"messages": MESSAGES, "tracegrad_filled": FILLED})
    (tmp_path / "a.jsonl").write_text(line + "\n")
    tg.write(tg.read(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == line + "\n"
    assert of(tg.read(tmp_path / "b.jsonl")[0]) == [None, -0.25, -0.5]


def test_bare_nan_is_not_filled(tmp_path):
    line = json.dumps(
        {"messages": MESSAGES, "tracegrad_filled": {"calls": [CALL | {"logprobs": [float("nan"), -1.0, 0.0]}]}}
    )
    (tmp_path / "a.jsonl").write_text(line + "\n")
    assert "NaN" in line
    assert of(tg.read(tmp_path / "a.jsonl")[0]) == [None, -1.0, 0.0]


def test_calls_follow_the_numbers_of_native_generations():
    """The second message was sampled first; `tracegrad_filled.calls` is in the order of the calls."""

    def answer(text, call):
        return {"role": "assistant", "content": text, "generation": {"call": call}}

    first = CALL | {"logprobs": [-1.0, -1.0, -1.0]}
    record = {"format": "tracegrad/1", "messages": [MESSAGES[0], answer("b", 1), MESSAGES[0], answer("c", 0)]}
    [trace] = tg.Traces.from_records([record | {"tracegrad_filled": {"calls": [first, CALL]}}])
    assert [turn.message for turn in trace.generations] == [3, 1]
    assert (of(trace, 0), of(trace, 1)) == ([-1.0] * 3, [None, -0.25, -0.5])


def test_null_and_a_shorter_list_fill_nothing():
    record = {"messages": [*MESSAGES, *MESSAGES, *MESSAGES], "tracegrad_filled": {"calls": [None, CALL]}}
    [trace] = tg.Traces.from_records([record])
    assert [of(trace, turn) for turn in range(3)] == [None, [None, -0.25, -0.5], None]
    for nothing in (None, {}, {"calls": None}, {"calls": []}):
        [trace] = tg.Traces.from_records([{"messages": MESSAGES, "tracegrad_filled": nothing}])
        assert of(trace) is None


WRONG = [
    ("TG-FORMAT-085", "contradiction", {"calls": [None, None]}),
    ("TG-FORMAT-086", "contradiction", {"calls": [CALL | {"logprobs": [-1.0]}]}),
    ("TG-FORMAT-086", "contradiction", {"calls": [{"logprobs": [-1.0], "kind": "raw"}]}),
    ("TG-FORMAT-087", "wrong_type", {"calls": [CALL | {"logprobs": [0.5, -1.0, -1.0]}]}),
    ("TG-FORMAT-087", "wrong_type", {"calls": [CALL | {"logprobs": [-1.0, -9999.0, -1.0]}]}),
    ("TG-FORMAT-088", "wrong_type", {"calls": [CALL | {"kind": "unknown"}]}),
    ("TG-FORMAT-088", "wrong_type", {"calls": [CALL | {"kind": None}]}),
    ("TG-FORMAT-089", "wrong_type", {"calls": [CALL | {"temperature": 0}]}),
    ("TG-FORMAT-089", "wrong_type", {"calls": [CALL | {"temperature": -1.0}]}),
    ("TG-FORMAT-022", "wrong_type", {"calls": [CALL | {"temperature": 1e300}]}),
    ("TG-FORMAT-090", "contradiction", {"calls": [CALL | {"kept": [None]}]}),
    ("TG-FORMAT-091", "contradiction", {"calls": [CALL | {"kept": [None, [], None]}]}),
    ("TG-FORMAT-084", "wrong_type", {"calls": [CALL | {"kept": [1, 2, 3]}]}),
    ("TG-FORMAT-084", "id_out_of_range", {"calls": [CALL | {"ids": [5, 6, -1]}]}),
    ("TG-FORMAT-084", "id_out_of_range", {"calls": [CALL | {"ids": [5, 6, 2**31]}]}),
    ("TG-FORMAT-084", "wrong_type", {"calls": [CALL | {"ids": "abc"}]}),
    ("TG-FORMAT-084", "wrong_type", {"calls": [CALL | {"logprobs": [-1.0, "x", -1.0]}]}),
    ("TG-FORMAT-040", "wrong_type", {"calls": [CALL | {"kind": 1}]}),
    ("TG-FORMAT-084", "wrong_type", {"calls": 5}),
    ("TG-FORMAT-039", "wrong_type", {"calls": [5]}),
    ("TG-FORMAT-039", "wrong_type", [CALL]),
]


@pytest.mark.parametrize(("code", "reason", "filled"), WRONG)
def test_a_wrong_filled_entry_is_a_located_rejection(code, reason, filled, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "t", "messages": MESSAGES, "tracegrad_filled": filled}) + "\n")
    with pytest.raises(FormatError) as error:
        tg.read(path)
    assert error.value.code == code
    assert f"{path}:1" in str(error.value)
    assert "filled" in str(error.value)
    assert tg.read(path, on_error="skip").read_report.reasons == {reason: 1}


def test_a_record_without_token_data_is_not_filled():
    assert "tracegrad_filled" not in without_token_data({"messages": MESSAGES, "tracegrad_filled": FILLED})
