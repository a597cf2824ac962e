"""Traces in and out of files. Every accepted form and every kind of bad input is one small record here."""

import gzip
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_lines import USER, line, said, save
from tracegrad.data import read, stream
from tracegrad.data.trace import Trace, Traces, strip_logprobs, write
from tracegrad.errors import FormatError

ENTRIES = [
    {"token": "4", "logprob": -0.5, "bytes": [52], "top_logprobs": []},
    {"token": "", "logprob": -0.25, "bytes": []},
]
PLACEHOLDERS = [{**ENTRIES[0], "token": "token_id:19"}, {**ENTRIES[1], "token": "token_id:151645"}]
CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "stop_reason": None,
    "message": {"role": "assistant", "content": "4", "tool_calls": [], "reasoning_content": None},
    "logprobs": {"content": ENTRIES, "refusal": None},
    "token_ids": [19, 151645],
}
RESPONSE = {"object": "chat.completion", "model": "m", "prompt_token_ids": [1, 2, 3], "choices": [CHOICE]}


# name -> (record, ids, whether it has texts, whether it has bytes)
FORMS = {
    "native": (
        {
            "format": "tracegrad/1",
            "messages": [
                USER,
                said(
                    generation={
                        "token_ids": [19, 151645],
                        "tokens": ["4", ""],
                        "bytes": [[52], None],
                        "logprobs": [-0.5, -0.25],
                    }
                ),
            ],
        },
        True,
        True,
        True,
    ),
    "content": ({"messages": [USER, said(logprobs={"content": ENTRIES})]}, False, True, True),
    "refusal": ({"messages": [USER, said(logprobs={"content": None, "refusal": ENTRIES})]}, False, True, True),
    "entries": ({"messages": [USER, said(logprobs=ENTRIES)]}, False, True, True),
    "logprob only": (
        {"messages": [USER, said(logprobs={"content": [{"logprob": -0.5}, {"logprob": -0.25}]})]},
        False,
        False,
        False,
    ),
    "numbers": ({"messages": [USER, said(logprobs=[-0.5, -0.25])]}, False, False, False),
    "values": ({"messages": [USER, said(logprobs={"values": [-0.5, -0.25]})]}, False, False, False),
    "tokens": (
        {"messages": [USER, said(logprobs={"tokens": ["4", ""], "logprobs": [-0.5, -0.25]})]},
        False,
        True,
        False,
    ),
    "legacy": (
        {"messages": [USER, said(logprobs={"tokens": ["4", ""], "token_logprobs": [-0.5, -0.25]})]},
        False,
        True,
        False,
    ),
    "placeholders": ({"messages": [USER, said(logprobs={"content": PLACEHOLDERS})]}, True, False, True),
    "ids beside": ({"messages": [USER, said(token_ids=[19, 151645], logprobs={"content": ENTRIES})]}, True, True, True),
    "choice": ({"messages": [USER, CHOICE]}, True, True, True),
    "response in a list": ({"messages": [USER, RESPONSE]}, True, True, True),
    "calls": ({"calls": [{"request": {"messages": [USER]}, "response": RESPONSE}]}, True, True, True),
    "one call": ({"request": {"messages": [USER]}, "response": RESPONSE}, True, True, True),
    "bare response": (RESPONSE, True, True, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_generation(form):
    record, has_ids, has_texts, has_bytes = FORMS[form]
    trace = Trace.from_dict(record)
    (generation,) = trace.generations
    np.testing.assert_array_equal(generation.logprobs, np.float32([-0.5, -0.25]))
    assert generation.logprobs.dtype == np.float32
    assert (generation.has_texts, generation.has_bytes) == (has_texts, has_bytes)
    if has_ids:
        assert generation.token_ids.tolist() == [19, 151645]
        assert generation.token_ids.dtype == np.int32
    else:
        assert generation.token_ids is None
    assert trace.messages[-1] == {"role": "assistant", "content": "4"}
    assert [trace.pool[i] for i in generation.context] == ([] if form == "bare response" else [USER])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_without_logprobs_is_still_a_trace_and_has_no_token(form):
    record = FORMS[form][0]
    before = json.dumps(record)
    stripped = strip_logprobs(Trace.from_dict(record))
    assert [generation.tokens for generation in stripped.generations] == [0]
    assert stripped.generations[0].prompt_token_ids is None
    assert stripped.messages[-1]["content"] == "4"
    plain = json.dumps(strip_logprobs(record))
    for word in ("logprob", "token_ids", "151645", "bytes"):
        assert word not in plain
    assert json.dumps(record) == before


def test_strip_logprobs_leaves_words_and_schemas_alone():
    call = {"type": "function", "function": {"name": "f", "arguments": {"logprobs": 5, "token_ids": [1]}}}
    message = {"role": "assistant", "content": "logprobs", "tool_calls": [call], "logprobs": [-1.0]}
    record = {"messages": [message], "tools": [{"properties": {"logprobs": {}}}], "metadata": {"token_ids": "kept"}}
    stripped = strip_logprobs(record)
    assert stripped["messages"] == [{"role": "assistant", "content": "logprobs", "tool_calls": [call]}]
    assert (stripped["tools"], stripped["metadata"]) == (record["tools"], record["metadata"])
    assert strip_logprobs([message])[0] == stripped["messages"][0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_is_written_is_read_back_byte_for_byte(tmp_path, name):
    lines = [json.dumps({"unknown": [1.50, None], **record}).encode() for record, *_ in FORMS.values()]
    lines += [b'{"messages" : [ ], "messages": [{"role":"user"}], "x": NaN, "y": "\\u00e9"}', line("b") + b"  "]
    path = save(tmp_path, b"\n".join(lines))
    traces = read(path)
    write(traces, tmp_path / name)
    again = read(tmp_path / name)
    assert [trace.record for trace in again] == lines
    assert list(again) == list(traces)
    assert len(os.listdir(tmp_path)) == 2
    write((part for part in stream(path, batch=3)), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == b"\n".join(lines) + b"\n"


def test_the_suffix_decides_what_is_written_and_the_bytes_what_is_read(tmp_path):
    traces = Traces.from_records([json.loads(line("a"))])
    write(traces, tmp_path / "a.jsonl.gz")
    write(traces, tmp_path / "a.jsonl.zst")
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == traces[0].record + b"\n"
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress((tmp_path / "a.jsonl.zst").read_bytes()) == traces[0].record + b"\n"
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).rename(tmp_path / "a.txt")
        assert read(tmp_path / "a.txt")[0].id == "a"


def test_members_and_frames_follow_one_another(tmp_path):
    members = gzip.compress(line("a") + b"\n") + gzip.compress(line("b"))
    frames = b"".join(zstandard.ZstdCompressor().compress(line(name) + b"\n") for name in "ab")
    for data in (members, frames):
        assert [trace.id for trace in read(save(tmp_path, data))] == ["a", "b"]


def test_standard_input_is_read():
    code = "from tracegrad.data import read; print([trace.id for trace in read('-')])"
    data = gzip.compress(line("a") + b"\n" + line("b"))
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert result.stdout == b"['a', 'b']\n"


def test_a_trace_says_what_its_record_says():
    record = {
        "id": "a17",
        "group": 3,
        "reward": 0.5,
        "rewards": {"format": 1, "absent": None},
        "metadata": {"task": "sum"},
        "model": "m",
        "tools": [{"type": "function"}],
        "messages": [USER, {**said(), "reward": 0.25}],
    }
    trace = Trace.from_dict(record)
    assert (trace.id, trace.group, trace.reward, trace.model) == ("a17", "3", 0.5, "m")
    assert trace.rewards["format"] == 1.0
    assert math.isnan(trace.rewards["absent"])
    assert (trace.metadata, trace.tools) == ({"task": "sum"}, [{"type": "function"}])
    assert trace.message_rewards == [None, 0.25]
    assert trace.to_dict() == record
    assert repr(trace) == "Trace(id='a17', group='3', reward=0.5, messages=2, generations=1)"
    with pytest.raises(AttributeError):
        trace.index = 4  # type: ignore[misc]


def test_missing_and_invalid_logprobs_are_nan_and_counted_apart(tmp_path):
    values = 'null, NaN, -Infinity, "NaN", 0.3, -9999.0, 0.0, -0.0, -1.5'
    data = b'{"messages": [{"role": "assistant", "content": "x", "logprobs": [%s]}]}' % values.encode()
    traces = read(save(tmp_path, data))
    (generation,) = traces[0].generations
    assert np.isnan(generation.logprobs[:6]).all()
    assert generation.logprobs[6:].tolist() == [0.0, -0.0, -1.5]
    assert (generation.missing, generation.invalid) == (4, 2)
    assert (traces.read_report.missing_logprobs, traces.read_report.invalid_logprobs) == (4, 2)
    assert traces[0].record == data


def test_traces_slice_join_and_show_themselves():
    traces = Traces.from_records(
        [{"id": f"<b>{i}", "group": i // 2, "reward": i, "messages": [USER]} for i in range(4)]
    )
    assert [t.reward for t in traces[1:3]] == [1.0, 2.0]
    assert [t.reward for t in traces[::-1]] == [3.0, 2.0, 1.0, 0.0]
    assert traces[np.array([3, 0])].reward.tolist() == [3.0, 0.0]
    assert traces[traces.reward > 1].groups == ["1", "1"]
    assert traces[-1].reward == 3.0
    assert len(traces[:1] + traces) == 5
    with pytest.raises(IndexError):
        traces[4]
    assert repr(traces) == "Traces(4 traces, 2 groups)"
    page = traces._repr_html_()
    assert "&lt;b&gt;0" in page
    assert "<b>" not in page


def test_api_objects_become_records_by_model_dump():
    class Choice(SimpleNamespace):
        def model_dump(self):
            return dict(vars(self))

    class Completion(Choice):
        pass

    trace = Trace.from_messages([USER, Choice(**CHOICE)], reward=np.float32(0.5), policy_version=np.int64(3))
    assert trace.generations[0].token_ids.tolist() == [19, 151645]
    assert (trace.reward, trace.generations[0].policy_version) == (0.5, 3)
    completion = Completion(**{**RESPONSE, "choices": [Choice(**CHOICE)]})
    assert Trace.from_dict(completion).generations[0].prompt_token_ids.tolist() == [1, 2, 3]
    assert strip_logprobs([USER, Choice(**CHOICE)])[1]["message"]["content"] == "4"
    with pytest.raises(FormatError, match=r"TG-DATA-042.*<records>:1"):
        Trace.from_dict({"messages": [object()]})


def test_a_number_json_cannot_say_is_kept_in_the_record_and_a_word_in_a_message():
    trace = Trace.from_messages([{"role": "tool", "content": "x", "note": [math.inf, -math.inf]}])
    assert trace.messages[0]["note"] == ["Infinity", "-Infinity"]
    assert trace.to_dict()["messages"][0]["note"] == [math.inf, -math.inf]


def test_a_lone_surrogate_in_python_text_is_refused_and_not_replaced():
    with pytest.raises(FormatError, match="TG-FORMAT-032"):
        Trace.from_messages([{"role": "user", "content": "\ud83d"}])


def test_a_call_log_pools_its_messages_and_finds_a_rewritten_history():
    echo = {"role": "assistant", "content": "4", "refusal": None}
    rewritten = {"role": "assistant", "content": "four"}

    def call(*messages):
        return {"request": {"messages": list(messages), "temperature": 0.7}, "response": RESPONSE}

    trace = Trace.from_dict({"calls": [call(USER), call(USER, echo, USER), call(USER, rewritten, USER)]})
    assert [(g.context, g.message) for g in trace.generations] == [([0], 1), ([0, 1, 0], 2), ([0, 3, 0], 4)]
    assert [m["content"] for m in trace.messages] == ["¿2+2?", "four", "¿2+2?", "4"]
    assert trace.generations[0].temperature == pytest.approx(0.7)


def test_a_real_vllm_response_gives_the_sampled_ids():
    entries = [("token_id:9707", [72, 101, 108, 108, 111], -0.0017243054462596774), ("token_id:0", [33], 0.0)]
    content = [{"token": t, "bytes": b, "logprob": p, "top_logprobs": []} for t, b, p in entries]
    content.append({"token": "token_id:151645", "bytes": [], "logprob": -0.0083366259932518, "top_logprobs": []})
    response = {
        "object": "chat.completion",
        "prompt_logprobs": None,
        "choices": [{**CHOICE, "logprobs": {"content": content, "refusal": None}, "token_ids": None}],
    }
    (generation,) = Trace.from_dict({"request": {"messages": [USER]}, "response": response}).generations
    assert generation.token_ids.tolist() == [9707, 0, 151645]
    assert generation.logprobs[1] == 0.0
    assert generation.missing == generation.invalid == 0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(
    metadata=JSON,
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    logprobs=st.lists(st.floats(-50, 0, width=32), max_size=6),
    ascii_only=st.booleans(),
)
def test_nothing_in_a_record_is_lost(tmp_path_factory, metadata, texts, logprobs, ascii_only):
    messages = [{"role": "user", "content": text, "note": metadata} for text in texts]
    messages.append({"role": "assistant", "content": texts[0], "logprobs": logprobs})
    record = {"id": "r", "messages": messages, "anything": metadata}
    data = json.dumps(record, ensure_ascii=ascii_only).encode()
    folder = tmp_path_factory.mktemp("round")
    traces = read(save(folder, data))
    assert traces[0].to_dict() == record
    assert [m["content"] for m in traces[0].messages] == [*texts, texts[0]]
    assert [m["note"] for m in traces[0].messages[:-1]] == [metadata] * len(texts)
    recorded = traces[0].generations[0].logprobs
    assert ([] if recorded is None else recorded.tolist()) == logprobs
    write(traces, folder / "out.jsonl.zst")
    assert read(folder / "out.jsonl.zst")[0].record == data


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "bad"]), min_size=1, max_size=40),
    batch=st.integers(1, 9),
    chunk=st.integers(1, 900),
)
def test_batches_and_chunks_change_nothing(tmp_path_factory, kinds, batch, chunk):
    lines = [line(str(i)) if kind == "good" else b"hello" for i, kind in enumerate(kinds)]
    path = save(tmp_path_factory.mktemp("chunks"), b"\n".join(lines))
    parts = stream(path, batch=batch, chunk_bytes=chunk, on_error="skip")
    ids = [[trace.id for trace in part] for part in parts]
    assert [name for part in ids for name in part] == [str(i) for i, kind in enumerate(kinds) if kind == "good"]
    assert all(len(part) == batch for part in ids[:-1])
    assert parts.read_report.bad == kinds.count("bad")


def examples_of(page):
    """The JSON objects in the fenced blocks of a page."""
    blocks = re.findall(r"^```json\n(.*?)^```", page, flags=re.M | re.S)
    for block in (text.strip() for text in blocks if text.strip().startswith("{")):
        start = 0
        while start < len(block):
            example, start = json.JSONDecoder().raw_decode(block, start)
            start += len(block[start:]) - len(block[start:].lstrip())
            yield example


def test_every_example_of_the_documentation_is_read():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md").read_text()
    # test_formats_dumps.py and test_formats_servers.py read the others.
    page = re.sub(r"^## (?:Trajectory dumps|Servers).*?(?=^## )", "", page, flags=re.M | re.S)
    traces = Traces.from_records(examples_of(page))
    assert [[g.tokens for g in trace.generations] for trace in traces] == [
        [2],
        [2],
        [2],
        [2, 2],
        [1],
        [2],
        [2],
        [2],
        [2],
    ]
    assert [g.context for g in traces[3].generations] == [[2], [0]]
    cells = re.findall(r"^\| (?:chat|refusal|list|tokens|values|legacy|vLLM).*?\| (.*) \|$", page, re.MULTILINE)
    forms = [json.loads(form) for cell in cells for form in re.findall(r"`([{\[].*?)`", cell)]
    assert len(forms) == 9
    for form in forms:
        (generation,) = Trace.from_messages([said(logprobs=form)]).generations
        assert generation.tokens in (1, 2)


HELD = """
import pathlib, resource, sys
import tracegrad as tg
def held():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = held()
traces = tg.read(sys.argv[1])
print((held() - before) / pathlib.Path(sys.argv[1]).stat().st_size)
"""


@pytest.mark.nightly
def test_what_decoding_took_on_several_threads_is_given_back_when_a_file_has_ended(tmp_path):
    entries = [{"token": f"token_id:{n}", "logprob": -n / 7, "bytes": [120], "top_logprobs": []} for n in range(800)]
    choice = {"message": {"role": "assistant", "content": "x" * 800}, "logprobs": {"content": entries}}
    record = {"reward": 1.0, "messages": [{"role": "user", "content": "go on"}, {"finish_reason": "stop", **choice}]}
    path = tmp_path / "traces.jsonl"
    path.write_text((json.dumps(record) + "\n") * 2200)
    env = {**os.environ, "RAYON_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", HELD, path], env=env, capture_output=True, text=True, check=True)
    # 0.46 of 165 MB; 0.6 to 0.8 where they keep what they freed.
    assert float(done.stdout) < 0.55
