"""Records of every producer with values that are not what they should be; and several answers of one record."""

import copy
import json
import sys
import tracemalloc

import pytest

import tracegrad as tg
from tracegrad.data import infer_fields
from tracegrad.data.formats import adapt, generic, record_fields, registry
from tracegrad.errors import FormatError

USER, SAID = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
LISTED = {"content": [{"token": "4", "logprob": -0.5}]}
FUNCTION = {"name": "add", "description": "d", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHOICES = [{"index": at, "message": SAID, "logprobs": LISTED, "finish_reason": "stop"} for at in range(2)]
REQUEST = {"messages": [USER], "temperature": 1.0, "tools": [{"type": "function", "function": FUNCTION}]}
CHUNK = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "4"}}]}
AI = {"content": [{"type": "text", "text": "4"}], "tool_calls": [{"id": "c", "name": "add", "args": {"a": 1}}]}
AI |= {"response_metadata": {"logprobs": LISTED, "finish_reason": "stop"}, "additional_kwargs": {"tool_calls": [CALL]}}
TALK = [{"type": "human", "data": {"content": "2+2?"}}, {"type": "ai", "data": AI}]
EVENT = {
    "event": "model",
    "input": [USER],
    "input_refs": [[0, 1]],
    "config": {"temperature": 1.0},
    "tools": [FUNCTION],
    "output": {"model": "m", "choices": [{"message": SAID, "stop_reason": "stop", "logprobs": LISTED}]},
}
SAMPLE = {"id": 1, "epoch": 1, "input": "2+2?", "messages": [USER, SAID], "output": {}, "metadata": {"a": 1}}
SAMPLE |= {"scores": {"match": {"value": "C"}}, "attachments": {"a": "b"}, "events_data": {"messages": [USER]}}
ITEMS = [
    {"type": "reasoning", "summary": [{"text": "so"}], "content": [{"text": "so"}]},
    {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": [{"text": "4"}]},
    {"type": "message", "role": "assistant", "content": [{"text": "4"}], "generation_token_ids": [1]},
]
EVENTS = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"
PARTS = [{"part_kind": "text", "content": "4"}, {"part_kind": "tool-call", "tool_name": "add", "args": {"a": 1}}]
HISTORY = [
    {"kind": "request", "instructions": "be", "parts": [{"part_kind": "user-prompt", "content": ["2+2?"]}]},
    {"kind": "response", "parts": PARTS, "provider_details": {"logprobs": LISTED["content"], "finish_reason": "stop"}},
    {"kind": "request", "parts": [{"part_kind": "tool-return", "tool_call_id": "c", "content": {"a": 4}}]},
]
LISTED = {"content": [{"token": "4", "logprob": -0.5, "bytes": [52]}]}
KEPT = {**SAID, "extra": {"response": {"choices": [{"message": SAID, "logprobs": LISTED}]}, "timestamp": 1}}


LINE = {"sessionId": "s", "isSidechain": False}
BLOCKS = {"model": "m", "content": [{"type": "text", "text": "4"}, {"type": "tool_use", "id": "t", "name": "n"}]}
RESULT = {"content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "5"}]}]}
GYM = {"prompt_token_ids": [5], "generation_token_ids": [1], "generation_log_probs": [-0.5]}


def of_trace(name):
    """A span of OTLP with a call, of a trace."""
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "4"}]}]
    value = {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(said)}}
    return {"traceId": name, "spanId": "1", "name": "chat", "attributes": [value]}


PART = {"id": "c", "name": "n", "input": "{}", "output": [{"text": "4"}], "text": "4"}
EXAMPLES = {
    "failed_call": [
        {"id": "f", "req": {"messages": [USER]}, "res": {"status": 429, "body": {"error": {"message": "x"}}}},
        {"messages": [USER], "model_parameters": {}, "call_type": "x", "response": {}, "error_str": "x"},
        {"status": 500, "request": {"messages": [USER]}, "response": "<html>", "error": {"error": {"code": 5}}},
        {"prompt": "q", "output": None},
        {"model": "m", "messages": [USER], "stream": False, "options": {"top_k": 5}},
    ],
    "langsmith": [
        {"run_type": "llm", "inputs": {"messages": [TALK[:1]]}, "outputs": {"generations": [[{"message": TALK[1]}]]}},
        {
            "run_type": "llm",
            "inputs": REQUEST,
            "outputs": {"choices": CHOICES},
            "extra": {"invocation_params": {"n": 1}},
        },
        {"run_type": "llm", "inputs": REQUEST, "outputs": {"messages": [SAID], "output": SAID}},
    ],
    "langchain": [{"messages": TALK, "id": "a"}, {"input": TALK[:1], "output": TALK[1:], "score": 1}, TALK],
    "inspect_ai": [
        {**SAMPLE, "events": [EVENT]},
        SAMPLE,
        {"eval": {}, "samples": [SAMPLE, {**SAMPLE, "events": [EVENT]}]},
    ],
    "anthropic_talk": [
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}], "reward": 1.0}
    ],
    "nemo_gym": [
        {
            "responses_create_params": {"input": [USER], "instructions": "be", "tools": [FUNCTION], "top_p": 1.0},
            "response": {"output": ITEMS},
            "reward": 1.0,
            "_ng_task_index": 3,
        }
    ],
    "sharegpt": [
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
                {"from": "gpt", "value": "4"},
            ],
            "system": "be",
            "tools": json.dumps([FUNCTION]),
        }
    ],
    "preference_pair": [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "system": "be", "id": 1, "score_chosen": 0.5},
        {"chosen": [USER, SAID], "rejected": [USER, {**SAID, "content": "5"}]},
    ],
    "kept_responses": [
        {"messages": [USER, KEPT], "info": {"config": {"model": {"model_kwargs": {"temperature": 0.5}}}}}
    ],
    "chunk_list": [[CHUNK, {**CHUNK, "id": "d"}]],
    "choices": [{"request": REQUEST, "response": {"id": "r", "choices": CHOICES, "usage": {}}, "rewards": [1, 0]}],
    "logged_call": [
        {"kwargs": REQUEST, "response_obj": {"choices": CHOICES[:1]}},
        {"requestBody": json.dumps(REQUEST), "responseBody": [CHUNK]},
    ],
    "prompt_response": [
        {"instruction": "add", "input": "2+2?", "output": "4", "system": "be", "token_ids": [1], "logprobs": [-0.5]},
        {"question": [USER], "response": [SAID]},
    ],
    "prompt_samples": [
        {
            "prompt": [USER],
            "completions": ["4", {"text": "5", "score": 1}, SAID],
            "id": 1,
            "system": "be",
            "rewards": [1, 0, None],
            "token_ids": [[1], [2], [3]],
            "logprobs": [[-0.5], [-0.5], [-0.5]],
            "finish_reason": ["stop", "length", "stop"],
            "prompt_token_ids": [7, 8],
        }
    ],
    "renamed_messages": [
        {"chatHistory": [USER, SAID], "meta": {"score": 1}},
        {"state": {"values": {"talk": TALK}}, "score": 1},
    ],
    "message_parts": [
        {"messages": [USER, {"role": "assistant", "content": [{**PART, "type": "tool_call"}, {**PART, "type": kind}]}]}
        for kind in ("tool_result", "text")
    ],
    "message_lines": [
        {
            "session_file": "message_lines",
            "lines": [
                {**USER, "id": 1, "timestamp": 1},
                {"role": "assistant", "content": "so\n@add(c): {}", "id": 2, "parent_id": 1, "timestamp": 2},
                {"role": "system", "content": "4", "call_id": "c"},
            ],
        }
    ],
    "pydantic_ai": [{"history": HISTORY, "score": 1}, HISTORY],
    "lm_eval": [
        {"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": "2+2?", "arg_1": {"temperature": 1}}}, "resps": [["4"]]},
        {"doc_id": 0, "arguments": [[[json.dumps([USER])], {}]], "resps": [["4", "5"]]},
    ],
    "nested_call": [
        {"request": {"url": "/", "body": json.dumps(REQUEST)}, "response": {"status": 200, "body": EVENTS}, "ok": True},
        {"span": {"input": [USER], "output": [SAID], "config": {"temperature": 1}}, "trace_id": "a", "parent_id": None},
        {"steps": [{"asked": [USER], "raw": {"choices": CHOICES[:1]}}, {"asked": [USER] * 2, "message": SAID}]},
    ],
    "parent_row": [{"run_id": "r", "kind": "chain", "inputs": {"q": "x"}}, {"summary": {"calls": 3}}],
    "span": [{"name": "chain", "context": {"trace_id": "a"}, "parent_id": None, "score": 1}, {"object": "trace"}],
    "claude_code": [
        {
            "session_file": "claude_code",
            "lines": [
                {**LINE, "type": "user", "uuid": "u", "parentUuid": None, "message": {"content": "2+2?"}},
                {**LINE, "type": "assistant", "uuid": "a", "parentUuid": "u", "message": {"id": "m", **BLOCKS}},
                {**LINE, "type": "user", "uuid": "r", "parentUuid": "a", "message": RESULT},
            ],
            "broken": [4],
        }
    ],
    "codex": [
        {
            "session_file": "codex",
            "lines": [
                {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "be"}}},
                *({"type": "response_item", "payload": {"role": "user", **item}} for item in ITEMS),
                {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}},
                {"type": "compacted", "payload": {"message": "m", "replacement_history": ITEMS[:1]}},
            ],
        }
    ],
    "openhands": [
        {
            "session_file": "openhands",
            "name": "c",
            "lines": [
                {"id": "1", "kind": "MessageEvent", "llm_message": {"role": "user", "content": [{"text": "2+2?"}]}},
                {"id": "2", "kind": "ActionEvent", "llm_response_id": "r", "thought": [], "tool_call": {"id": "c"}},
                {"id": "3", "kind": "ObservationEvent", "observation": {"content": [{"text": "4"}]}},
                {"id": "4", "kind": "Condensation", "forgotten_event_ids": ["2"], "summary": "s", "summary_offset": 1},
            ],
        }
    ],
    "autogen": [
        {"type": "LLMCall", "messages": [USER], "response": {"choices": CHOICES[:1]}, "tools": [], "agent_id": "a"},
        {
            "messages": [
                {"source": "user", "type": "TextMessage", "content": "2+2?", "models_usage": None},
                {"source": "a", "type": "ThoughtEvent", "content": "so", "models_usage": None},
                {
                    "source": "a",
                    "type": "ToolCallRequestEvent",
                    "content": [{"id": "c", "name": "n"}],
                    "models_usage": {"a": 1},
                },
                {"source": "a", "type": "ToolCallExecutionEvent", "content": [{"call_id": "c", "content": "4"}]},
            ]
        },
    ],
    "ag2": [
        {
            "chat_id": 1,
            "chat_history": [
                {"role": "assistant", "name": "p", "content": "2+2?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "name": "p", "tool_responses": [{"tool_call_id": "c", "content": "4"}]},
                {"role": "user", "name": "b", "content": "4"},
            ],
            "human_input": [],
        }
    ],
    "nemo_gym_chat": [{"messages": [USER, {**SAID, **GYM}]}, {"choices": [{"message": {**SAID, **GYM}}]}],
    "atropos": [
        {"tokens": [[5, 1], [5, 2]], "masks": [[-100, 1], [-100, 2]], "scores": [1, 0], "messages": [[USER, SAID]] * 2}
    ],
    "nemo_rl": [
        {
            "content": [["a", "b"]],
            "rewards": [1.0],
            "input_lengths": [2],
            "token_ids": [[5, 1, 0]],
            "token_loss_mask": [[0, 1, 0]],
            "generation_logprobs": [[0.0, -0.5, 0.0]],
            "idx": 0,
        }
    ],
    "prime_rl": [
        {"export_sequence_idx": 0, "step": 1, "token_ids": [5, 1], "loss_mask": [False, True], "rl_weights": [0.0, 1.0]}
    ],
    "harbor_trial": [
        {
            "trial_name": "t",
            "agent_info": {"model_info": {"name": "m"}},
            "config": {"agent": {"kwargs": {"temperature": 1.0}}},
            "verifier_result": {"rewards": {"reward": 1.0}},
            "agent_result": {
                "rollout_details": [{"prompt_token_ids": [[5]], "completion_token_ids": [[1]], "logprobs": [[-0.5]]}]
            },
        }
    ],
    "export": [{"version": 1, "entries": [{"messages": [USER], "answer": {"choices": CHOICES[:1]}}] * 2}],
}


def places(value, at=()):
    """Where values stand in a record."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


def spoiled(record):
    """The record with each of its values replaced."""
    for at in list(places(record))[1:]:
        for value in (5, None, "x", [], {}, [5], {"x": 5}, [None], 10**400):
            out = copy.deepcopy(record)
            inner = out
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = value
            yield out


@pytest.mark.parametrize(
    "name", dict.fromkeys(name for each in registry.ADAPTERS for name in (each.name, each.messages_name) if name)
)
@pytest.mark.first_cases(2)
def test_a_value_of_another_type_is_at_most_a_bad_record(name, tmp_path):
    for example in EXAMPLES[name]:
        found = registry.convert_first_match(example)
        assert found is not None
        assert found.name == name
        tg.read([example], on_error="skip" if name == "failed_call" else "raise")
        path = tmp_path / "x.jsonl"
        rows = [{"prompt": "q", "response": "a"}, example, *spoiled(example)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = tg.read(path, on_error="skip").read_report
        assert report.traces > 0 if name in ("span", "parent_row", "failed_call") else report.traces > 1
        for read in report.errors:
            assert f": {path}:" in read
        tg.read(path, on_error="skip", map={"session": "prefix"})
        for row in rows:
            infer_fields.infer([row])


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (
            {"responses_create_params": {"input": "q", "tools": 5}, "response": {"output": ITEMS}},
            r"TG-READ-006.*tools.*number",
        ),
        ({**SAMPLE, "messages": 5}, r"TG-READ-006.*messages.*number.*list"),
        ({**SAMPLE, "messages": [5]}, r"TG-READ-006.*cannot.*as.*inspect_ai.*AttributeError"),
    ],
)
def test_what_stumbles_an_adapter_is_located_and_put_aside(record, what, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "q", "response": "a"}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(FormatError, match=what) as found:
        tg.read(path)
    assert f": {path}:2" in str(found.value)
    report = tg.read(path, on_error="quarantine").read_report
    assert (report.traces, report.bad) == (1, 1)
    assert json.loads((tmp_path / "x.jsonl.quarantine.raw").read_text()) == record
    path.write_text(json.dumps(record))  # alone: the first record of a file is looked at apart
    assert tg.read(path, on_error="skip").read_report.bad == 1


def test_a_record_that_cannot_even_be_looked_at_is_bad(tmp_path, monkeypatch):
    def knows(record):
        return record["never"]

    monkeypatch.setattr(registry, "ADAPTERS", (registry.Adapter("odd", knows),))
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"question": 1}))
    with pytest.raises(FormatError, match=r"TG-READ-006.*cannot.*as.*odd.*KeyError") as found:
        tg.read(path)
    assert f": {path}:1" in str(found.value)


def test_no_depth_of_a_record_ends_the_reading(tmp_path):
    path = tmp_path / "x.jsonl"
    limit = sys.getrecursionlimit()
    for depth in [*range(limit - 200, limit, 5), 5 * limit, 100 * limit]:
        deep = '{"prompt": "q", "response": "a", "meta": ' + "[" * depth + "]" * depth + "}"
        path.write_text(json.dumps({"prompt": "q", "response": "a"}) + "\n" + deep + "\n")
        assert tg.read(path, on_error="skip").read_report.records == 2
        path.write_text(deep)
        assert tg.read(path, on_error="skip").read_report.records == 1


def test_an_answer_is_the_key_that_says_something():
    [trace] = tg.read([{"prompt": "q", "completions": [{"text": None, "content": "a"}]}])
    assert trace.messages[-1]["content"] == "a"


def test_reasoning_as_text_is_kept():
    output = [{"type": "reasoning", "content": "so"}, ITEMS[-1]]
    [trace] = tg.read([{"responses_create_params": {"input": "q"}, "response": {"output": output}}])
    assert trace.messages[-1]["reasoning_content"] == "so"


def test_each_answer_has_its_own_ids_logprobs_and_end():
    more = {"token_ids": [[1, 2], [3]], "logprobs": [[-0.1, -0.2], [-0.3]], "finish_reason": ["stop", "length"]}
    asked = {"prompt": "q", "completions": ["a", "b"], "prompt_token_ids": [7, 8], **more, "rewards": [1, 0]}
    logged = {
        "request": {"messages": [USER]},
        "response": {"choices": [{"message": SAID}] * 2},
        **more,
        "rewards": [1, 0],
    }
    for record in (asked, logged):
        one, two = (trace.generations[0] for trace in tg.read([record]))
        assert (one.token_ids.tolist(), two.token_ids.tolist()) == ([1, 2], [3])
        assert (one.logprobs.tolist(), two.logprobs.tolist()) == (pytest.approx([-0.1, -0.2]), pytest.approx([-0.3]))
        assert (one.finish_reason, two.finish_reason) == ("stop", "length")
    one, two = (trace.generations[0] for trace in tg.read([asked]))
    assert one.prompt_token_ids.tolist() == two.prompt_token_ids.tolist() == [7, 8]
    alone = tg.read([{"prompt": "q", "completions": ["a"], "token_ids": [1, 2], "finish_reason": "stop"}])
    assert alone[0].generations[0].token_ids.tolist() == [1, 2]
    assert alone[0].generations[0].finish_reason == "stop"
    assert tg.read([{"prompt": "q", "completions": ["a", "b"], "reward": [1, None]}]).reward[0] == 1


@pytest.mark.parametrize(
    "more",
    [
        {"token_ids": [[1, 2]]},
        {"token_ids": [1, 2]},
        {"logprobs": [[-0.1], [-0.2], [-0.3]]},
        {"logprobs": LISTED},
        {"logprobs": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.5}]},
        {"finish_reason": ["stop"]},
        {"prompt_token_ids": [[1]]},
        {"rewards": [1]},
    ],
)
def test_a_length_that_fits_no_answer_is_an_error(more):
    [name] = more
    with pytest.raises(FormatError, match=f"TG-DATA-043: <records>:1: `{name}` .*2"):
        tg.read([{"prompt": "q", "completions": ["a", "b"], **more}])


def test_answers_share_no_more_than_is_held():
    big = {"prompt": "q", "completions": ["a"] * 2000, "meta": {"text": "x" * 100_000}}
    calls = {"request": {"messages": [{**USER, "content": "x" * 100_000}]}, "rewards": [1] * 2000}
    calls |= {"response": {"choices": [{"message": SAID}] * 2000}}
    tracemalloc.start()
    for record in (big, calls):
        with pytest.raises(FormatError, match=r"TG-DATA-043.*2,000.*100,0[67]"):
            tg.read([record])
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert len(tg.read([{**big, "completions": ["a"] * 600}])) == 600


def test_no_adapter_makes_more_of_a_record_than_is_held(monkeypatch):
    monkeypatch.setattr(record_fields, "MOST_BYTES", 1000)
    pool = {"events_data": {"messages": [{**USER, "content": "x" * 1000}]}}
    event = {**EVENT, "input": [], "input_refs": [[0, 1]] * 100}
    with pytest.raises(FormatError, match=r"TG-DATA-043.*1,000"):
        tg.read([{**SAMPLE, **pool, "events": [event]}])


def test_much_that_is_made_of_few_records_is_decoded_in_parts(tmp_path):
    record = {"prompt": "q" * 30_000, "completions": ["a"] * 500}
    path = tmp_path / "x.jsonl"
    path.write_text((json.dumps(record) + "\n") * 10)
    tracemalloc.start()
    stream = tg.stream(path)
    assert sum(map(len, stream)) == 5000
    assert tracemalloc.get_traced_memory()[1] < 64 << 20, "150 MB are made of them"
    assert stream.read_report.bytes == 10 * len(json.dumps(record))
    tracemalloc.stop()


def test_the_bytes_of_a_record_are_not_held_again_for_each_of_its_answers(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completions": ["a" * 1000] * 500}))
    assert [len(part) for part in tg.stream(path)] == [500], "0.5 MB are decoded at once, 250 MB would be in parts"
    parts = [len(part) for part in tg.stream(path, on_error="quarantine")]
    assert (sum(parts), len(parts) > 20) == (500, True), "any of them may have to be put aside with its record"


def test_answers_without_an_id_have_one_each():
    two = {"prompt": "q", "completions": ["a", "b"]}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert [trace.id for trace in tg.read([two, two, pair, {**two, "id": 7}, {**two, "id": ["x", "y"]}])] == [
        *("<records>:1-0", "<records>:1-1", "<records>:2-0", "<records>:2-1", "<records>:3-0", "<records>:3-1"),
        *("7-0", "7-1", "x", "y"),
    ]
    logged = {"request": {"messages": [USER]}, "response": {"choices": [{"message": SAID}] * 2}, "rewards": [1, 0]}
    one, two = tg.read([logged])
    assert (one.id, two.id, b"None" in one.record) == ("<records>:1-0", "<records>:1-1", False)


def test_choices_of_a_question_were_not_sampled():
    asked = {"question": "q", "choices": ["A", "B"], "answer": 1}
    assert adapt(asked) is None
    assert [each["reward"] for each in adapt({**asked, "rewards": [1, 0]}) or []] == [1, 0]
    assert len(adapt({"question": "q", "choices": [{"answer": "A"}, {"answer": "B"}]}) or []) == 2


def test_messages_that_only_ask_are_no_trace():
    talk = [USER, SAID, USER]
    assert adapt({"prompt": talk, "label": 1}) is None
    assert adapt({"prompt": talk[:2], "label": 1}) is not None
    assert adapt({"chatHistory": talk}) is not None


def test_many_answers_are_looked_at_once_for_what_they_share(monkeypatch):
    prompts, values = [], []
    prompt_of, add = infer_fields.prompt_group, infer_fields._Column.add
    monkeypatch.setattr(infer_fields, "prompt_group", lambda trace: prompts.append(trace) or prompt_of(trace))
    monkeypatch.setattr(infer_fields._Column, "add", lambda *told: values.append(told[1]) or add(*told))
    record = {"prompt": "q" * 1000, "completions": ["y" * 1000] * 500, "rewards": [1, 0] * 250, "meta": {"score": 0.5}}
    tracemalloc.start()
    found = infer_fields.infer([record, {**record, "meta": {"score": 0.25}}])
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert (found.records, len(prompts), values.count(0.5), values.count(0.25)) == (1000, 2, 1, 1)
    whys = [each.evidence for each in found.of("reward")]
    assert '1,000 of 1,000 records have a number "reward" (0 to 1, mean 0.5, 2 values)' in whys
    assert '1,000 of 1,000 records have a number "meta.score" (0.25 to 0.5, mean 0.375, 2 values)' in whys
    values.clear()
    assert not infer_fields.infer([record], names=["session"]).guesses
    assert not values, "no name of them is that of a session"


def test_a_session_alone_needs_no_trace_of_each_record(monkeypatch):
    rows = [{"messages": [USER, {**SAID, "content": str(at)}], "score": at} for at in range(4)]
    monkeypatch.setattr(infer_fields, "prompt_group", lambda trace: pytest.fail("a prompt is only for groups"))
    assert not infer_fields.infer(rows, names=["session"]).guesses


@pytest.mark.parametrize(
    "said",
    [
        {"name": "add", "arguments": {"a": 1}},
        [{"name": "add", "parameters": {"a": 1}}],
        [{"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    ],
)
def test_a_call_in_sharegpt_is_a_call_in_any_of_its_spellings(said):
    talk = [{"from": "human", "value": "1+?"}, {"from": "function_call", "value": json.dumps(said)}]
    [made] = adapt({"conversations": talk})
    [call] = made["messages"][1]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    [made] = adapt({"conversations": [*talk[:1], {"from": "function_call", "value": '[{"id": 1}]'}]})
    assert made["messages"][1]["content"] == '[{"id": 1}]', "what is no call is a text"


def test_a_response_that_a_message_keeps_gives_it_its_logprobs():
    [trace] = tg.read([EXAMPLES["kept_responses"][0] | {"messages": [USER, KEPT, {**USER, "extra": {"a": 1}}, SAID]}])
    first, second = trace.generations
    assert (first.logprobs, first.temperature) == ([-0.5], 0.5)
    assert second.logprobs is None
    assert trace.messages == [USER, SAID, USER, SAID]
    bare = {**KEPT, "extra": {"response": {"choices": [{"message": SAID}]}}}
    assert adapt({"messages": [USER, bare]}) is None, "it says no more than its message"


def test_a_record_is_looked_through_once_by_its_shape(monkeypatch):
    looks = []
    look = generic._look
    monkeypatch.setattr(generic, "_look", lambda record: looks.append(record) or look(record))
    record = {"chatHistory": [USER, SAID], "score": 1}
    assert registry.convert_first_match(record).name == "renamed_messages"
    assert looks == [record]


def test_a_schema_of_a_tool_keeps_its_null_and_a_call_its_empty_arguments():
    said = [{"type": "message", "role": "assistant", "content": "4"}]
    asked = {"input": "2+2?", "tools": [{"type": "function", "name": "add", "description": None, "strict": True}]}
    made = adapt({"responses_create_params": asked, "response": {"output": said}})
    assert made[0]["tools"] == [{"type": "function", "function": {"name": "add", "description": None}}]
    given = {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "now?"}]}
    for args, written in (("", ""), (None, "{}"), ({"a": 1}, '{"a": 1}')):
        call = {"part_kind": "tool-call", "tool_name": "now", "args": args, "tool_call_id": "c"}
        made = adapt([given, {"kind": "response", "parts": [call]}])
        assert made[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == written
