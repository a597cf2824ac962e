"""Turns of which a record lists a part: what is trained of them and behind them, and what the doctor says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.config import Config, Data
from tracegrad.data.codes import SAMPLED
from tracegrad.objective import presets
from tracegrad.trainer.steps import check_ratios

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
PIECES = ["L", "et", " ", "me", " ", "l", "ook", "."]
WORDS = "Let me look."
CALL = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "Order a pizza."}]


def answer(pieces=PIECES, content=WORDS, calls=None, finish="stop", usage=None):
    listed = [
        {"token": each, "logprob": -0.5 - at / 10, "bytes": list(each.encode())} for at, each in enumerate(pieces)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "finish_reason": finish, "message": message, "logprobs": {"content": listed}}
    return {"choices": [choice], "usage": {"completion_tokens": usage or len(pieces)}}


def call(response, messages=ASKED):
    return {"request": {"temperature": 1.0, "messages": messages, "tools": TOOLS}, "response": response}


def two(first):
    """A conversation of two calls: an answer, what was said of it, and a whole answer behind."""
    said = first["choices"][0]["message"]
    back = {"role": "tool", "tool_call_id": "c", "content": "3"} if said.get("tool_calls") else ASKED[0]
    return [call(first), call(answer(), [*ASKED, said, back])]


CALLING = {"calls": CALL, "finish": "tool_calls", "usage": 20}
IN_TEXT = ["L", "et", " ", "f", "i", "n", "d"]


def conversation(first, at=0):
    return {"calls": two(first), "reward": at % 2, "group": f"g{at // 4}"}


def trained(records, tokenizer, tmp_path):
    """Trained tokens by turn of the first trace."""
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    sequences = tg.align(tg.read(path), tokenizer)
    own = sequences.source == SAMPLED
    return [int(sequences.trainable[own & (sequences.turn == turn)].sum()) for turn in range(2)]


def test_behind_a_gap_nothing_is_trained_nor_the_turn_that_has_it(tokenizer, tmp_path):
    assert trained([conversation(answer())], tokenizer, tmp_path) == [8, 8]
    assert trained([conversation(answer(PIECES[:2] + PIECES[4:]))], tokenizer, tmp_path) == [0, 0]


def test_a_call_that_is_not_listed_leaves_its_words_and_takes_what_is_behind(tokenizer, tmp_path):
    assert trained([conversation(answer(**CALLING))], tokenizer, tmp_path) == [8, 0]
    assert trained(two(answer(**CALLING))[1:], tokenizer, tmp_path) == [8, 0], "alone it has its prompt whole"


def test_a_call_whose_text_is_listed_takes_nothing_away(tokenizer, tmp_path):
    first = answer(IN_TEXT, "Let ", calls=CALL, finish="tool_calls")
    assert trained([conversation(first)], tokenizer, tmp_path) == [7, 8]


def test_a_trace_that_is_left_out_moves_no_mask(tmp_path):
    (tmp_path / "model").mkdir()
    for file in MODEL.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "model" / "chat_template.jinja"
    refuse = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    template.write_text(refuse + template.read_text())
    path = tmp_path / "traces.jsonl"
    odd = call(answer(), [{"role": "user", "content": "no"}])
    records = [odd, conversation(answer(**CALLING)), call(answer())]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    sequences = tg.align(tg.read(path), tg.Tokenizer.from_pretrained(tmp_path / "model"), on_error="skip")
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    assert sequences.alignment_report.left_out == (0,)
    assert [int(sequences.trainable[owner == at].sum()) for at in (0, 1)] == [8, 8]


def diagnosed(records, tmp_path, **told):
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    found = tg.doctor.diagnose(path, MODEL, logprob_kind="processed", **told)
    return found, {finding.name: finding for finding in found.findings}


def scored(responses):
    return [{**call(each), "reward": at % 2, "group": f"g{at // 4}"} for at, each in enumerate(responses)]


def test_a_call_that_is_not_listed_is_named_and_the_command_stays(tmp_path):
    found, names = diagnosed(scored([answer(**CALLING)] * 5 + [answer()] * 15), tmp_path)
    assert "lost_chunks" not in names, "nothing was streamed"
    hits = names["unlisted_calls"].hits
    assert (hits.count, hits.total, names["unlisted_calls"].severity.name) == (5, 20, "COSTS")
    assert hits.description == "8 tokens listed, for the words but not for the call, usage counts 20"
    assert found.next_command.startswith("tracegrad train")


def test_a_listed_call_is_no_finding(tmp_path):
    _, names = diagnosed(scored([answer(IN_TEXT, "Let ", calls=CALL, finish="tool_calls")] * 20), tmp_path)
    assert "unlisted_calls" not in names


def aborted():
    chunks = [{"choices": [{"index": 0, "delta": {"content": "L"}, "logprobs": None}]}]
    for each in ("L", "et"):
        entry = {"token": each, "logprob": -0.5, "bytes": list(each.encode())}
        chunks.append({"choices": [{"index": 0, "delta": {"content": each}, "logprobs": {"content": [entry]}}]})
    return chunks[1:]


def test_an_aborted_stream_is_trained_as_far_as_it_goes(tokenizer, tmp_path):
    assert trained([call(aborted())], tokenizer, tmp_path) == [2, 0]


def test_a_gap_is_told_once(tmp_path):
    _, names = diagnosed(scored([answer(PIECES[:2] + PIECES[4:])] + [answer()] * 19), tmp_path)
    assert "lost_chunks" not in names
    assert names["broken_turns"].hits.description == "the listed tokens spell 9 of the message's 12 bytes"


@pytest.mark.parametrize(("broken", "severity"), [(1, "COSTS"), (9, "COSTS"), (10, "WRONG")])
def test_aborted_streams_take_the_command_only_where_they_are_half(tmp_path, broken, severity):
    found, names = diagnosed(scored([aborted()] * broken + [answer()] * (20 - broken)), tmp_path)
    assert names["broken_turns"].severity.name == severity
    assert names["broken_turns"].hits.count == broken
    assert "lost_chunks" not in names
    assert bool(found.next_command) == (severity == "COSTS")


@pytest.mark.parametrize(("short", "severity"), [(1, "COSTS"), (2, "WRONG")])
def test_where_usage_counts_more_and_no_call_says_why_a_tenth_is_wrong(tmp_path, short, severity):
    _, names = diagnosed(scored([answer(usage=20)] * short + [answer()] * (19 - short)), tmp_path)
    assert names["lost_chunks"].severity.name == severity


def test_what_a_run_says_of_turns_without_logprobs(tokenizer, tmp_path):
    bare = answer()
    del bare["choices"][0]["logprobs"]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [conversation(bare), call(bare), call(answer())]))
    sequences = replace(tg.align(tg.read(path), tokenizer), temperature=np.ones(3, np.float32))
    config = Config(data=Data(on_error="skip", logprob_kind="processed"))
    assert check_ratios(sequences, presets.TIS, config) == [
        "2 traces contain text without logprobs, or text of another model (level T6): such turns are left out, and 1 "
        "traces have nothing else to train."
    ]
