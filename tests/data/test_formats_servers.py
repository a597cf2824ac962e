"""Responses of every server: the golden records through Python, files of mixed producers, and real recordings."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad import _core
from tracegrad.errors import FormatError

GOLDEN = Path(__file__).parents[1] / "golden" / "servers"
NAMES = sorted(path.name.removesuffix(".jsonl") for path in GOLDEN.glob("*.jsonl"))
REAL = Path(__file__).parents[3] / "shared" / "data" / "logprobs"
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md"
real = pytest.mark.skipif(not REAL.exists(), reason="the real recordings are not beside the project")


def read_by_the_core(name):
    """(traces, report): each record as it stands, one trace for each; `tg.read` makes one for each choice."""
    lines = (GOLDEN / f"{name}.jsonl").read_bytes().splitlines()
    core, report = _core.Traces.decode(lines, name, 1, "auto")
    return tg.Traces(core), report


def reasons(generation):
    return [name[:3] for name, _, _ in generation.notes]


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_file_reads_as_its_maker_filled_it_in(name):
    traces, report = read_by_the_core(name)
    truths = json.loads((GOLDEN / f"{name}.truth.json").read_text(encoding="utf-8"))
    forms = {form: count for form, (count, _) in report["formats"].items()}
    assert forms == {form: sum(t["form"] == form for t in truths) for form in {t["form"] for t in truths}}
    for trace, truth in zip(traces, truths, strict=True):
        generation = trace.generations[-1]
        ids = generation.token_ids
        assert (None if ids is None else ids.tolist()) == truth["ids"]
        if truth["logprobs"] is None:
            assert generation.logprobs is None
        else:
            theirs = np.array([math.nan if x is None else x for x in truth["logprobs"]], np.float32)
            np.testing.assert_allclose(generation.logprobs, theirs, rtol=2e-7)
        assert generation.finish_reason == truth["finish_reason"]
        assert reasons(generation) == truth.get("notes", [])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_was_read(name, tmp_path):
    traces, _ = read_by_the_core(name)
    tg.write(traces, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (GOLDEN / f"{name}.jsonl").read_bytes()


def test_a_file_of_many_producers_works_line_by_line(tmp_path):
    lines = [line for name in NAMES for line in (GOLDEN / f"{name}.jsonl").read_text("utf-8").splitlines()]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    report = tg.read(path).read_report
    assert (report.traces, report.bad) == (len(lines) + 1, 0)  # one of them is a stream of two choices
    assert set(report.formats) >= {"call", "stream", "sglang", "tgi", "responses", "gemini", "anthropic", "ollama"}


def test_a_form_that_is_named_must_be_the_records_own():
    record = json.loads((GOLDEN / "sglang.jsonl").read_text("utf-8").splitlines()[0])
    assert len(tg.Traces.from_records([record], format="sglang")) == 1
    with pytest.raises(FormatError, match="TG-FORMAT-017"):
        tg.Traces.from_records([record], format="tgi")


def chunk(text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    if text:
        choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5, "bytes": list(text.encode())}]}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def sse(*chunks):
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks)


def test_a_file_of_event_streams_is_one_record_a_stream_and_survives_writing(tmp_path):
    first = sse(chunk("Hi"), chunk(" you"), chunk("", "stop")) + "data: [DONE]\n\n"
    second = first.replace(" you", " all").replace("\n", "\r\n")
    third = ": keep-alive\n\nevent: message\n" + sse(chunk("Bye"), chunk("", "length"))
    path = tmp_path / "dump.sse"
    path.write_bytes((first + second + third).encode())
    traces = tg.read(path)
    assert [trace.messages[-1]["content"] for trace in traces] == ["Hi you", "Hi all", "Bye"]
    assert [trace.generations[0].finish_reason for trace in traces] == ["stop", "stop", "length"]
    assert [trace.location[1] for trace in traces] == [1, 9, 17]
    tg.write(traces, tmp_path / "dump.jsonl")
    again = tg.read(tmp_path / "dump.jsonl")
    assert [trace.messages for trace in again] == [trace.messages for trace in traces]
    kept = "".join(trace.to_dict()["response"] + "\n" for trace in again)
    assert kept.split() == (first + second + third).split()


def test_a_stream_whose_choices_are_interleaved_is_read_choice_by_choice():
    chunks = [chunk(text) for text in ("a", "A", "b", "B")] + [chunk("", "stop"), chunk("", "length")]
    for at, each in enumerate(chunks):
        each["choices"][0]["index"] = at % 2
    for choice, text, finish in ((0, "ab", "stop"), (1, "AB", "length")):
        trace = tg.Trace.from_dict({"response": chunks, "choice": choice})
        assert trace.messages[-1]["content"] == text
        assert trace.generations[0].tokens == 2
        assert trace.generations[0].finish_reason == finish


def test_a_recorder_that_kept_the_last_chunk_alone_is_found():
    listed = {"content": [{"token": " dog", "logprob": -0.5, "bytes": list(b" dog")}]}
    choice = {"message": {"role": "assistant", "content": "The quick brown dog"}, "logprobs": listed}
    call = {"request": {"messages": [{"role": "user", "content": "?"}]}, "response": {"choices": [choice]}}
    (name, _, detail) = tg.Trace.from_dict(call).generations[0].notes[0]
    assert name == "R28 stream_incomplete"
    assert "4 of the message's 19 bytes" in detail


def test_tool_calls_of_a_stream_are_put_together():
    deltas = [
        {"role": "assistant", "tool_calls": [{"index": 0, "id": "k", "function": {"name": "f", "arguments": '{"a'}}]},
        {"tool_calls": [{"index": 1, "id": "l", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '":1}'}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    message = tg.Trace.from_dict({"response": chunks}).messages[-1]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("k", "f", '{"a":1}'), ("l", "g", "{}")]


def test_every_example_of_the_docs_is_read_in_the_form_that_stands_before_it():
    section = DOCS.read_text("utf-8").split("## Servers", 1)[1].split("\n## ", 1)[0]
    parts = section.split("\n### ")[1:]
    assert len(parts) >= 14
    for part in parts:
        form = part.split("`")[1]
        blocks = re.findall(r"^```json\n(.*?)^```", part, flags=re.M | re.S)
        examples = [line for block in blocks for line in block.splitlines() if line.startswith("{")]
        assert examples, form
        for example in examples:
            report = tg.Traces.from_records([json.loads(example)]).read_report
            assert list(report.formats) == [form], example


def unwrapped(value):
    """Pydantic's wrappers of a recording taken off."""
    if isinstance(value, list):
        return [unwrapped(item) for item in value]
    return value.get("__data__", value) if isinstance(value, dict) else value


@real
def test_real_streams_spell_their_text_and_list_every_token_once():
    paths = sorted(REAL.glob("llama_stack_recordings/*.json"))
    assert paths
    for path in paths:
        recording = json.loads(path.read_text("utf-8"))
        call = {"request": recording["request"]["body"], "response": unwrapped(recording["response"]["body"])}
        trace = tg.Trace.from_dict(call)
        generation = trace.generations[-1]
        chunks = call["response"]
        entries = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in ((choice.get("logprobs") or {}).get("content") or [])
        ]
        assert generation.tokens == len(entries)
        assert generation.notes == [], path.name
        usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
        assert usage is None or 0 <= usage["completion_tokens"] - len(entries) <= 2
        content = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert (trace.messages[-1]["content"] or "") == content
        if "gpt-4o" in chunks[0]["model"] and content:
            assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content


@real
def test_the_real_responses_api_record_has_nine_tokens_that_spell_its_text():
    record = json.loads((REAL / "openai" / "responses_api_logprobs.json").read_text("utf-8"))
    trace = tg.Trace.from_dict(record)
    assert trace.generations[0].tokens == 9
    assert trace.messages[-1]["content"] == "The capital of Minas Gerais is Belo Horizonte."
    assert trace.generations[0].notes == []


@real
def test_every_real_tgi_snapshot_is_read_and_its_tokens_spell_its_text():
    read = spelled = 0
    for path in sorted(REAL.glob("tgi_snapshots/**/*.json")):
        found = json.loads(path.read_text("utf-8"))
        for response in found if isinstance(found, list) else [found]:
            if "generated_text" not in response:
                continue
            generation = tg.Trace.from_dict(response).generations[0]
            tokens = response["details"]["tokens"]
            assert generation.token_ids.tolist() == [token["id"] for token in tokens]
            np.testing.assert_allclose(generation.logprobs, np.array([t["logprob"] for t in tokens], np.float32))
            read += 1
            plain = "".join(token["text"] for token in tokens if not token["special"])
            spelled += plain.strip() in response["generated_text"] or response["generated_text"].strip() in plain
    assert read == 200
    assert spelled >= 150


@real
def test_the_real_vllm_records_give_ids():
    record = json.loads((REAL / "vllm" / "chat_token_id_placeholders.json").read_text("utf-8"))
    ids = tg.Trace.from_dict(record).generations[0].token_ids.tolist()
    assert ids == [9707, 0, 2585, 646, 358, 7789, 498, 3351, 30, 151645]
    trace = tg.read(REAL / "vllm" / "chat_stream_tool_call.sse")[0]
    assert trace.generations[0].token_ids.tolist() == [314, 3417]
    assert trace.messages[-1]["tool_calls"][0]["function"] == {"name": "get_current_weather", "arguments": "{}"}
    # The recording has no finish reason.
    assert reasons(trace.generations[0]) == ["R28"]


def test_stripped_of_numbers_a_response_holds_no_id_and_no_logprob():
    for path in sorted((Path(__file__).parents[1] / "golden" / "servers").glob("*.jsonl")):
        for trace in tg.read(path):
            bare = tg.data.trace.strip_logprobs(trace)
            assert (bare.id, bare.group, bare.reward) == (trace.id, trace.group, trace.reward)
            assert bare.messages == trace.messages, path.name
            for generation in bare.generations:
                assert generation.tokens == 0, path.name
                assert generation.token_ids is None
                assert generation.prompt_token_ids is None
