"""First records are parsed in Python only where the core does not read them, or where one has a key of a producer."""

import gzip
import json
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import _core
from tracegrad.data.field_map import parse_record
from tracegrad.data.formats import openai, registry

HERE = Path(__file__).parents[1]
TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
LANGCHAIN = [{"type": name, "content": "4", "additional_kwargs": {}} for name in ("human", "ai")]
PART = {"part_kind": "text", "content": "4"}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
CHOICES = [{"index": at, "message": {"role": "assistant", "content": "4"}} for at in range(2)]
KEPT = {**CHOICES[0], "token_ids": [5]}
HAYSTACK_CALL = {"tool_name": "add", "arguments": {}, "id": "c"}
# What the core reads as a conversation, and what beside it makes it the record of a producer.
CALL = {"request": {"messages": TALK[:1]}, "response": {"choices": CHOICES[:1]}}
BOTH = {
    "langsmith": {"run_type": "llm", "inputs": {}, "messages": TALK},
    "haystack": {"messages": [*TALK, {"role": "assistant", "content": [{"tool_call": HAYSTACK_CALL}]}]},
    "garak": {"entry_type": "eval", "messages": TALK},
    "lighteval": {"doc": {}, "metric": {}, "model_response": {}, "messages": TALK},
    "google_adk": {"appName": "a", "userId": "u", "events": [{"author": "user"}], "messages": TALK},
    "langfuse_trace": {"id": "a", "timestamp": "", "input": TALK[:1], "output": "4", "htmlPath": "/", "messages": TALK},
    "langchain": {"messages": TALK, "history": LANGCHAIN},
    "inspect_ai sample": {"epoch": 1, "input": "2+2?", "output": {}, "messages": TALK},
    "inspect_ai log": {"eval": {}, "samples": [], "messages": TALK},
    "nemo_gym": {"responses_create_params": {"input": "2+2?"}, "response": {"output": [ITEM]}},
    "pydantic_ai": {"messages": TALK, "log": [{"kind": "response", "parts": [PART]}]},
    "lm_eval": {"doc_id": 1, "arguments": [], "resps": [], "messages": TALK},
    "sharegpt": {"conversations": [{"from": "gpt", "value": "4"}], "messages": TALK},
    "preference_pair": {"chosen": TALK, "rejected": TALK, "messages": TALK},
    "kept_responses": {"messages": [TALK[0], {**TALK[1], "extra": {"response": {"choices": [KEPT]}}}]},
    "anthropic_talk": {"messages": [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
    "choices": {"request": {"messages": TALK[:1]}, "response": {"choices": CHOICES}, "scores": [1, 0]},
    "claude_code": {"session_file": "claude_code", "lines": [], **CALL},
    "message_lines": {"session_file": "message_lines", "lines": TALK, **CALL},
    "codex": {"session_file": "codex", "lines": [], **CALL},
    "openhands": {"session_file": "openhands", "lines": [], **CALL},
    "autogen": {"type": "ToolCall", "agent_id": "a", "messages": TALK},
    "ag2": {"wrapper_id": 1, "thread_id": 1, "messages": TALK},
    "nemo_gym_chat": {"messages": [TALK[0], {**TALK[1], "generation_token_ids": [1]}]},
    "atropos": {"tokens": [[5, 1]], "masks": [[-100, 1]], "scores": [1], **CALL},
    "nemo_rl": {"content": [["a"]], "idx": 0, "rewards": [1.0], "token_ids": [], **CALL},
    "prime_rl": {"export_sequence_idx": 0, "token_ids": [5, 1], "loss_mask": [0, 1], **CALL},
    "harbor_trial": {"trial_name": "t", "agent_info": {}, "agent_result": {"rollout_details": []}, **CALL},
}


def plain(record):
    return _core.Traces.plain([json.dumps(record).encode()], registry._KEYS)[0]


@pytest.mark.parametrize("name", BOTH)
def test_a_record_that_the_core_would_read_too_goes_to_the_adapter_that_knows_it(name):
    record = BOTH[name]
    found = registry.convert_first_match(record)
    assert found is not None
    assert found.name == name.split(" ")[0]
    assert not any(each.weak for each in registry.ADAPTERS if each.name == found.name)
    assert registry._core_reads(record)
    assert registry.needs_adapter([json.dumps(record).encode()], "x")


def test_what_the_core_never_reads_needs_no_key():
    strong = {each.name for each in registry.ADAPTERS if not each.weak}
    assert strong - {"chunk_list", "message_parts"} == {name.split(" ")[0] for name in BOTH}
    said = {"key": "gen_ai.output.messages", "value": {"stringValue": '[{"role": "assistant", "content": "4"}]'}}
    spans = [{"traceId": name, "attributes": [said]} for name in "ab"]
    export = [{"resourceSpans": [{"scopeSpans": [{"spans": some}]}]} for some in (spans, spans[:1])]
    assert [plain(each) for each in (*export, {"spans": spans[:1]}, {"name": "chat", **spans[0]})] == [False] * 4
    items = [TALK[0], {"role": "assistant", "items": [PART | {"text": "4"}]}]
    assert not plain({"messages": items})
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "4"}}]}
    assert openai.is_chunk(chunk)
    assert [plain(chunk), plain([chunk])] == [False, False]


def recorded():
    for path in sorted([*(HERE / "data" / "strangers").iterdir(), *(HERE / "golden" / "inputs").iterdir()]):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            data = path.read_bytes()
            yield from (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def test_what_producers_wrote_is_read_as_it_stands_only_where_no_adapter_knows_it():
    lines = list(recorded())
    assert len(lines) > 300
    is_plain = _core.Traces.plain(lines, registry._KEYS)
    assert not [
        line for line, alone in zip(lines, is_plain, strict=True) if alone and registry._is_ours(parse_record(line))
    ]


def test_calls_and_conversations_are_not_parsed_in_python(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "parse_record", None)
    call = {"request": {"messages": TALK[:1]}, "response": {"choices": CHOICES[:1]}}
    for record in ({"messages": TALK, "reward": 1.0}, call, {"calls": [call]}):
        path = tmp_path / "traces.jsonl"
        path.write_text(json.dumps(record) + "\n")
        assert len(tg.read(path)) == 1


def test_records_that_were_looked_at_first_are_counted_once_and_come_in_whole_batches(tmp_path):
    path = tmp_path / "traces.jsonl"
    lines = [json.dumps({"id": str(number), "messages": TALK}) for number in range(40)]
    path.write_text("\n".join(lines) + "\n")
    stream = tg.stream(path, batch=15)
    assert [[int(trace.id) for trace in part] for part in stream] == [
        list(range(15)),
        list(range(15, 30)),
        list(range(30, 40)),
    ]
    report = stream.read_report
    assert (report.records, report.traces, report.bytes) == (40, 40, sum(map(len, lines)))
