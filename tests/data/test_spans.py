"""Spans of OpenTelemetry and OpenInference in every container: what producers wrote, against an independent count.

The files of tests/data/spans are of one agent (tests/golden/make_spans.py): four questions, each asked twice, with
three calls of a model in each of the eight traces. One of them is of the tool's own model, inside the tool's span.
"""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from test_inputs_adapters import spoiled

import tracegrad as tg
from tracegrad.data import infer_fields
from tracegrad.data.formats import span_calls, span_containers
from tracegrad.prepare.split import split_inputs

FILES = Path(__file__).parent / "spans"
STRANGERS = FILES.parent / "strangers" / "fifth"
NAMES = sorted(path.name for path in FILES.iterdir() if not path.name.startswith(("README", "semconv_logs")))
REWARDS = {
    "openinference": "attributes.eval.right.score",
    "semconv": "scores.right",
    "openllmetry": "attributes.traceloop.association.properties.score",
}
SESSIONS = {
    "openinference": "attributes.session.id",
    "semconv": "attributes.gen_ai.conversation.id",
    "openllmetry": "attributes.traceloop.association.properties.session_id",
}


def lines_of(name):
    return gzip.decompress((FILES / name).read_bytes()).decode().splitlines()


def main_and_side(traces):
    """The conversations of the agent, and those of the tool's model."""
    return [each for each in traces if "#" not in each.id], [each for each in traces if "#" in each.id]


@pytest.mark.parametrize("name", NAMES)
def test_every_container_has_the_same_conversations_and_offers_the_same_flags(name):
    path, producer = FILES / name, name.split("_")[0]
    if name.endswith(".gz"):
        # Counted without any reader: the ids of the responses that the scripted server gave.
        assert len(set(re.findall(r"chatcmpl-\d+", "\n".join(lines_of(name))))) == 24
    guesses = infer_fields.infer(path, names=("reward", "group", "session", "sampling"))
    assert guesses.best(["reward"])[0].flags() == ["--map.reward", REWARDS[producer]]
    assert guesses.best(["group"])[0].flags() == ["--map.group", "prompt"]
    assert not guesses.of("session")
    assert not guesses.of("sampling")
    assert np.isnan(tg.read(path).reward).all(), "a score is offered, and never taken silently"
    stream = tg.stream(path, map={"reward": REWARDS[producer], "group": "prompt"})
    traces = [trace for part in stream for trace in part]
    said = "\n".join(stream.lines())
    assert stream.read_report.bad == 0
    assert "24 records are 8 conversations, whose calls share context.trace_id" in said
    assert "32 records without a call add" in said
    assert "8 calls are split off their conversation" in said
    main, side = main_and_side(traces)
    assert (len(main), len(side)) == (8, 8)
    assert len({each.id for each in main}) == 8
    assert sorted(each.reward for each in main) == [0.0] * 4 + [1.0] * 4
    assert all(each.reward is None for each in side)
    for trace in main:
        system, asked, call, result, last = trace.messages
        assert [each["role"] for each in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert (len(trace.generations), len(trace.rewards)) == (2, 0)
        assert system["content"] == "Look it up, then say it."
        [tool_call] = call["tool_calls"]
        assert json.loads(tool_call["function"]["arguments"])["city"] in asked["content"]
        assert result == {"role": "tool", "tool_call_id": tool_call["id"], "content": "short: Shorten: rai"}
        # The first answer of each question is the right one, and has the score 1.
        assert (
            last["content"] in ("14 C and cloudy.", "Yes, it rains.", "Yes, 29 C.", "Very, 20 m/s.")
        ) == trace.reward
        assert [each.finish_reason for each in trace.generations] == ["tool_calls", "stop"]
        assert all((each.temperature, each.top_p) == (np.float32(0.7), np.float32(0.9)) for each in trace.generations)
        assert trace.model == "agent-7b"
        if producer != "semconv":  # That instrumentation does not record tools.
            assert trace.tools[0]["function"]["parameters"]["required"] == ["city"]
        if producer == "openinference":  # Its raw response has the logprobs: -0.25, -0.5 and so on, one for each word.
            count = len(last["content"].split())
            assert trace.generations[1].logprobs.tolist() == [-0.25 * (at + 1) for at in range(count)]
    for trace in side:
        assert [each["content"] for each in trace.messages] == ["Shorten: rain, wind, 14 C", "short: Shorten: rai"]
        assert trace.model == "summary-1b"
    # Each group has the two attempts at one question; the calls of the tool's model are a group of their own.
    assert sorted(map([each.group for each in traces].count, {each.group for each in traces})) == [2] * 4 + [8]


@pytest.mark.parametrize("producer", SESSIONS)
def test_a_session_joins_traces_and_calls_without_the_key_have_that_of_their_trace(producer):
    # Only the root span has the key. Two runs of one session are two turns, in the order of their start.
    traces = tg.read(
        FILES / f"{producer}_otlp.jsonl.gz", map={"session": SESSIONS[producer], "reward": REWARDS[producer]}
    )
    main, side = main_and_side(traces)
    assert sorted(each.id for each in main) == ["s0", "s1", "s2", "s3"]
    assert [len(each.generations) for each in main] == [4] * 4
    assert len(side) == 8
    assert [each.reward for each in main] == [0.0] * 4, "the last reward of a conversation counts"


def test_log_records_are_calls_and_belong_to_their_spans():
    assert sum(len(trace.generations) for trace in tg.read(FILES / "semconv_logs.jsonl.gz")) == 24
    both = [FILES / "semconv_logs.jsonl.gz", FILES / "semconv_otlp.jsonl.gz"]
    stream = tg.stream(both, map={"reward": "scores.right"})
    main, side = main_and_side([trace for part in stream for trace in part])
    assert (len(main), len(side)) == (8, 8)
    assert sum(len(trace.generations) for trace in (*main, *side)) == 24
    assert "24 calls are left out, because another span records them too" in "\n".join(stream.lines())
    assert sorted(each.reward for each in main) == [0.0] * 4 + [1.0] * 4
    graded = {"gen_ai.evaluation.name": "tone", "gen_ai.evaluation.score.label": "pass"}
    values = [{"key": key, "value": {"stringValue": value}} for key, value in graded.items()]
    of_span = {"traceId": "ab" * 16, "spanId": "61" * 8, "eventName": "gen_ai.evaluation.result", "attributes": values}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{**of_span, "timeUnixNano": "5"}]}]}]}
    assert [each.reward for each in tg.read([chat("a", ["q"], "4"), logs], map={"reward": "scores.tone"})] == [1.0]


@pytest.mark.parametrize("has_span", [True, False])
def test_messages_as_log_records_of_their_own_are_the_call_of_their_span(has_span):
    bodies = [
        ("gen_ai.system.message", {"content": "be"}),
        ("gen_ai.user.message", {"content": "q"}),
        ("gen_ai.assistant.message", {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]}),
        ("gen_ai.tool.message", {"id": "x", "content": "14"}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}),
    ]
    ids = {"traceId": "ab" * 16, "spanId": "a" * 8}
    logs = [{**ids, "eventName": name, "body": otlp_value(body), "timeUnixNano": "5"} for name, body in bodies]
    split = [{"resourceLogs": [{"scopeLogs": [{"logRecords": [each]}]}]} for each in logs]
    bare = span("a", gen_ai__operation__name="chat", gen_ai__request__temperature=0.5)
    for records in ([*split, bare], [bare, *split]) if has_span else (split,):
        trace, generation = generation_of(*records)
        assert [each["role"] for each in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert trace.messages[3]["tool_call_id"] == trace.messages[2]["tool_calls"][0]["id"] == "x"
        assert (trace.messages[-1]["content"], generation.finish_reason) == ("4", "stop")
        assert generation.temperature == (0.5 if has_span else None)


def test_spans_without_a_call_are_refused_and_say_what_lacks(tmp_path):
    path = tmp_path / "spans.jsonl"
    rows = [chat("a", ["q"], "4", kind="invoke_agent"), span("t", "a", gen_ai__operation__name="execute_tool")]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-045: .*spans.jsonl: none of the 2 spans is a model call"):
        tg.read(path)


def test_spans_of_a_trace_can_be_in_any_order_and_in_any_files(tmp_path):
    rows = lines_of("semconv_otlp_split.jsonl.gz")
    random.Random(1).shuffle(rows)
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows[number::4]) + "\n")
    one, other = (
        sorted(
            (trace.id, json.dumps(trace.messages), trace.reward or 0.0)
            for trace in tg.read(path, map={"reward": "scores.right"})
        )
        for path in (FILES / "semconv_otlp.jsonl.gz", tmp_path)
    )
    assert [each[1:] for each in other if "#" not in each[0]] == [each[1:] for each in one if "#" not in each[0]]
    assert len(one) == len(other) == 16
    parts, reason = split_inputs([str(tmp_path)], part_bytes=4096)
    assert (len(parts), reason) == (1, "the spans of a trace can be in any of its files")
    assert len(tg.read(tmp_path, limit=3)) == 3


def span(name, parent=None, trace="ab" * 16, start=1.0, **attributes):
    """A span as the Python SDK writes it."""
    context = {"trace_id": f"0x{trace}", "span_id": f"0x{name * 8}"}
    start_time = f"2026-01-01T00:00:{start:09.6f}Z"
    fields = {"name": name, "context": context, "parent_id": parent and f"0x{parent * 8}", "start_time": start_time}
    return {**fields, "attributes": {key.replace("__", "."): value for key, value in attributes.items()}, "events": []}


def chat(name, asked, answer, parent=None, model="m", kind="chat", **attributes):
    """A span of a model call. `asked` are texts of the user and the model, by turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "parts": [{"type": "text", "content": text}]} for at, text in enumerate(asked)]
    output = [{"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "stop"}]
    content = {"gen_ai__input__messages": json.dumps(said), "gen_ai__output__messages": json.dumps(output)}
    content |= {"gen_ai__operation__name": kind, "gen_ai__request__model": model, **attributes}
    return span(name, parent, start=len(asked), **content)


def test_a_call_that_is_recorded_twice_counts_once():
    agent = chat("a", ["q"], "4", kind="invoke_agent")
    outer, inner = chat("b", ["q"], "4", "a"), chat("c", ["q"], "4", "b", tracegrad__policy_version=7)
    beside = [chat(name, ["q", "4", "r"], "5", "a", gen_ai__response__id="x") for name in "de"]
    again = [chat(name, ["q", "4", "r", "5", "s"], "6", "a", gen_ai__response__id=name) for name in "fg"]
    stream = tg.stream([outer, inner, inner, agent, *beside, *again])
    [trace] = [trace for part in stream for trace in part]
    # The inner span counts, one of the spans with one response id, and two samples that only look alike.
    assert trace.generations[0].policy_version == 7
    assert len(trace.generations) == 4
    assert "3 calls are left out, because another span records them too" in "\n".join(stream.lines())


def test_the_calls_of_another_agent_of_the_same_model_stand_apart():
    tool = span("t", "a", gen_ai__operation__name="execute_tool", mark=0.1)
    inner = span("s", "t", gen_ai__operation__name="invoke_agent")
    root = span("a", gen_ai__operation__name="invoke_agent", mark=0.5, reward=0.25)
    calls = [chat("b", ["q"], "4", "a"), chat("c", ["plan"], "x", "s"), chat("d", ["plan", "x", "y"], "z", "s")]
    for spans in ([*calls, tool, inner, root], [root, tool, inner, *calls]):
        main, side = tg.read(spans, map={"reward": "attributes.mark"})
        assert [each["content"] for each in main.messages] == ["q", "4"]
        assert [each["content"] for each in side.messages] == ["plan", "x", "y", "z"]
        assert (main.reward, side.reward) == (0.5, None), "of several scores that of the outermost span"
        assert tg.read(spans)[0].reward == 0.25, "a reward by that name is one"


def test_a_prefix_joins_the_calls_of_several_traces_that_continue_one_another():
    root = span("a", trace="12" * 16, mark=0.5)
    rows = [{**chat("b", ["q"], "4"), "context": {"trace_id": "1", "span_id": "2"}}, root]
    rows.append({**chat("c", ["q", "4", "r"], "5", "a"), "context": {"trace_id": "12" * 16, "span_id": "3"}})
    [trace] = tg.read(rows, map={"session": "prefix", "reward": "attributes.mark"})
    assert [each["content"] for each in trace.messages] == ["q", "4", "r", "5"]
    assert trace.reward == 0.5
    for number, row in enumerate(rows[::2]):
        row["attributes"]["session.id"] = "s"
        row["attributes"]["session.number"] = number
    assert infer_fields.infer(rows).best(["session"])[0].flags() == ["--map.session", "attributes.session.id"]


def test_calls_without_messages_and_failed_calls_are_refused_at_their_line(tmp_path):
    bare = span("a", gen_ai__operation__name="chat", gen_ai__request__model="m")
    failed = {**span("b", gen_ai__operation__name="chat"), "status": {"status_code": "ERROR", "description": "503"}}
    raised = {**failed, "events": [{"name": "exception", "attributes": {"exception.message": "no route"}}]}
    raised["context"] = {"trace_id": "1", "span_id": "2"}
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (chat("c", ["q"], "4"), bare, failed, raised)))
    report = tg.read(path, on_error="skip").read_report
    assert (report.traces, report.bad) == (1, 3)
    assert report.reasons == {"failed_call": 2, "wrong_type": 1}
    assert re.search(r"spans.jsonl:3.*503", report.errors[0])
    assert re.search(r"spans.jsonl:4.*no route", report.errors[1])
    assert re.search(
        r"spans.jsonl:2: the span a{8} is a model call without the content of its messages.*CAPTURE_MESSAGE",
        report.errors[2],
    )
    with pytest.raises(tg.TracegradError, match="TG-FORMAT-005"):
        tg.read(path)


UNCAPTURED = [
    ([{"role": "user"}], [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}], {}),
    ([{"role": "user", "content": "q"}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], {}),
    ([{"role": "user", "content": "q"}], [{"role": "assistant", "parts": [{"type": "text"}]}], {}),
    ([{"role": "user", "parts": [{"type": "text"}]}], [{"role": "assistant", "content": "4"}], {}),
    ([{"role": "system", "content": "s"}, {"role": "user"}], [{"role": "assistant", "content": "4"}], {}),
    ([{"role": "user", "content": ""}], [{"role": "assistant", "content": "4"}], {}),
    ([], [{"role": "assistant", "content": "4"}], {}),
    ([{"role": "user", "content": "q"}], [{"role": "assistant", "content": "__REDACTED__"}], {}),
    ([{"role": "user", "content": "q"}], [], {"gen_ai.usage.output_tokens": 3}),
    ([{"role": "user", "content": "q"}], [], {"gen_ai.response.finish_reasons": ["stop"]}),
]


@pytest.mark.parametrize(("inputs", "outputs", "more"), UNCAPTURED)
def test_a_call_that_lacks_the_content_of_a_message_is_refused_with_that_reason(inputs, outputs, more):
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": inputs, "gen_ai.output.messages": outputs}
    report = tg.read(
        [chat("b", ["q"], "4"), {**span("a"), "attributes": attributes | more}], on_error="skip"
    ).read_report
    assert (report.traces, report.reasons) == (1, {"wrong_type": 1})
    assert "without the content of its messages" in report.errors[0]
    assert "CAPTURE_MESSAGE_CONTENT=true" in report.errors[0]


def test_contents_that_were_not_captured_are_told_from_empty_ones():
    path = STRANGERS / "openai_v2_uncaptured.jsonl.gz"
    report = tg.read(path, on_error="skip").read_report
    assert (report.traces, report.reasons) == (0, {"wrong_type": 9}), "9 calls, none of which failed"
    # The tool has no parameters, its result is empty, and so is the last answer.
    tool = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    call = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}
    inputs = [{"role": "user", "content": "q"}, call, {"role": "tool", "tool_call_id": "x"}]
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": inputs, "gen_ai.tool.definitions": tool}
    attributes["gen_ai.output.messages"] = [{"role": "assistant", "content": ""}]
    trace, _ = generation_of({**span("a"), "attributes": attributes})
    assert trace.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    # Without its messages, a call has the ids that it was sent and those that it sampled.
    ids = {"gen_ai.operation.name": "chat", "prompt_token_ids": [1, 2], "response_token_ids": [3]}
    assert generation_of({**span("a"), "attributes": ids})[1].token_ids.tolist() == [3]


def test_a_system_prompt_that_is_recorded_twice_counts_once():
    traces = tg.read(STRANGERS / "openlit.jsonl.gz", map={"group": "prompt"})
    # Counted in the file: three traces with 13 response ids, the system prompt in both attributes.
    assert (len(traces), sum(len(each.generations) for each in traces)) == (3, 13)
    systems = [[each["content"] for each in trace.messages if each["role"] == "system"] for trace in traces]
    assert systems == [["You are a helpful desk agent."]] * 3
    messages = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *MESSAGES[:1]]
    for instructions, expected in (("a\n", ["a"]), ("c", ["c", "a"]), (["a", "b"], ["a", "b"]), (["b"], None)):
        listed = messages if isinstance(instructions, list) else [messages[0], messages[2]]
        parts = [{"type": "text", "content": text} for text in instructions]
        said = instructions if isinstance(instructions, str) else json.dumps(parts)
        record = chat("a", [], "4", gen_ai__input__messages=json.dumps(listed), gen_ai__system_instructions=said)
        if expected is None:
            with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*repeats a part of the system messages"):
                tg.read([record])
        else:
            trace, _ = generation_of(record)
            assert [each["content"] for each in trace.messages if each["role"] == "system"] == expected


def test_a_span_with_only_an_output_is_no_call():
    whole = {**span("b"), "attributes": {"gen_ai.output.messages": "the last answer"}}
    traces = tg.read([chat("a", ["q"], "4"), whole])
    assert [len(each.generations) for each in traces] == [1]
    with pytest.raises(tg.TracegradError, match="TG-DATA-045"):
        tg.read([whole])


def generation_of(*records, **options):
    [trace] = tg.read(list(records), **options)
    [generation] = trace.generations
    return trace, generation


def test_token_ids_and_logprobs_are_read_as_the_proposal_and_as_recorders_name_them():
    rows = {"token_ids": [[7, 7, 9], [8, 5, 8]], "logprobs": [[-0.5, -0.5, -2.0], [-0.25, -0.125, -0.25]]}
    rows |= {"decoded_tokens": [["4", "4", "5"], ["!", "?", "!"]]}
    named = {f"gen_ai.response.candidate.per_position_{kind}": json.dumps(each) for kind, each in rows.items()}
    call = chat("a", ["q"], "4!")
    structured = {**call, "attributes": {**call["attributes"], **named, "prompt_token_ids": "[1, 2]"}}
    events = [
        {
            "name": "gen_ai.token.generated",
            "attributes": {f"gen_ai.response.candidate.{kind}": each[at] for kind, each in rows.items()},
        }
        for at in (0, 1)
    ]
    lightning = {
        "response_token_ids": [7, 8],
        "logprobs.content": json.dumps([{"token": "4", "logprob": -0.5}, {"token": "!", "logprob": -0.25}]),
    }
    for each in (structured, {**call, "events": events}, {**call, "attributes": {**call["attributes"], **lightning}}):
        _, generation = generation_of(each)
        assert generation.token_ids.tolist() == [7, 8]
        assert generation.logprobs.tolist() == [-0.5, -0.25]
        assert generation.has_texts
    assert generation_of(structured)[1].prompt_token_ids.tolist() == [1, 2]
    two = {**structured, "attributes": {**structured["attributes"]}}
    answers = json.loads(two["attributes"]["gen_ai.output.messages"]) * 2
    two["attributes"]["gen_ai.output.messages"] = json.dumps(answers)
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*ids or logprobs of one answer, and 2 answers"):
        tg.read([two])
    del two["attributes"]["prompt_token_ids"]
    two["attributes"] = {key: value for key, value in two["attributes"].items() if "per_position" not in key}
    assert len(tg.read([two])) == 2


SCORE = [
    {"key": "gen_ai.evaluation.name", "value": "tone"},
    {"key": "gen_ai.evaluation.score.value", "value": 1.0},
]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "4"}]
CONTENT = [
    {"name": "gen_ai.content.prompt", "attributes": {"gen_ai.prompt": json.dumps(MESSAGES[:1])}},
    {"name": "gen_ai.content.completion", "attributes": {"gen_ai.completion": json.dumps(MESSAGES[1:])}},
]
NAMED = [
    {"name": "gen_ai.user.message", "attributes": {"content": "q"}},
    {"name": "gen_ai.choice", "attributes": {"index": 0, "message": json.dumps(MESSAGES[1])}},
]
BODIES = [
    {"name": "gen_ai.user.message", "attributes": {"gen_ai.event.content": json.dumps(MESSAGES[0])}},
    {"name": "gen_ai.choice", "attributes": {"gen_ai.event.content": json.dumps({"message": MESSAGES[1]})}},
]
LISTED = json.dumps([{"event.name": each["name"], **each["attributes"]} for each in NAMED])
PARTS = {
    "gen_ai.system_instructions": [{"type": "text", "content": "be"}],
    "gen_ai.input.messages": [
        {
            "role": "user",
            "parts": [{"type": "text", "content": "see"}, {"type": "uri", "modality": "image", "uri": "https://x/a"}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": each, "response": {"a": 1}} for each in "xy"]},
    ],
    "gen_ai.output.messages": [
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "so"}, {"type": "text", "content": "4"}]}
    ],
    "gen_ai.tool.definitions": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "gen_ai.request.top_k": 40.0,
    "gen_ai.request.frequency_penalty": 0.5,
    "gen_ai.openai.request.logit_bias": {"50": -100},
}


@pytest.mark.parametrize(
    "part",
    [
        {"events": CONTENT},
        {"events": NAMED},
        {"events": BODIES},
        {"attributes": {"events": LISTED, "gen_ai.operation.name": "chat"}},
    ],
)
def test_messages_in_events_are_read(part):
    trace, generation = generation_of({**span("a", gen_ai__operation__name="chat"), **part})
    assert [(each["role"], each["content"]) for each in trace.messages] == [("user", "q"), ("assistant", "4")]
    assert generation.temperature is None


def test_blocks_of_the_converse_api_in_events_are_read():
    def event(name, key, blocks, **fields):
        return {"name": f"gen_ai.{name}", "attributes": {key: json.dumps(blocks), **fields}}

    use = {"toolUse": {"toolUseId": "c1", "name": "look", "input": {"at": 1}}}
    results = [{"text": "3 "}, {"json": {"unit": "m"}}]
    thought = {"reasoningContent": {"reasoningText": {"text": "Hm"}}}
    events = [
        event("system.message", "content", [{"text": "Be brief."}]),
        event("user.message", "content", [{"text": "How "}, {"text": "deep?"}]),
        event("assistant.message", "content", [use]),
        event("tool.message", "content", [{"toolResult": {"toolUseId": "c1", "content": results}}]),
        event("choice", "message", [thought, {"text": "3 m"}], finish_reason="end_turn"),
    ]
    call = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    trace, generation = generation_of({**span("a", gen_ai__operation__name="chat"), "events": events})
    assert trace.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '3 {"unit": "m"}', "tool_call_id": "c1"},
        {"role": "assistant", "content": "3 m", "reasoning_content": "Hm"},
    ]
    assert generation.finish_reason == "stop"
    # Text that looks like blocks is text if other messages are not such lists.
    for last in ({"text": "3 m", "at": 1}, {"other": "3 m"}, "3 m"):
        blocks = [event("user.message", "content", [{"text": "q"}]), event("choice", "message", [last])]
        trace, _ = generation_of({**span("a", gen_ai__operation__name="chat"), "events": blocks})
        assert trace.messages[0]["content"] == '[{"text": "q"}]'


def otlp_value(value):
    """OTLP's typed value, written anew here: lists and objects at any depth."""
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": otlp_value(each)} for key, each in value.items()]}}
    if isinstance(value, list):
        return {"arrayValue": {"values": list(map(otlp_value, value))}}
    return (
        {"doubleValue": value}
        if isinstance(value, float)
        else {"intValue": str(value)}
        if isinstance(value, int)
        else {"stringValue": value}
    )


def test_structured_values_parts_and_options_are_read():
    attributes = [{"key": key, "value": otlp_value(value)} for key, value in PARTS.items()]
    attributes.append({"key": "blob", "value": {"bytesValue": "AAE="}})
    ids = {"traceId": base64.b64encode(b"t" * 16).decode(), "spanId": base64.b64encode(b"s" * 8).decode()}
    record = {"resourceSpans": [{"scopeSpans": [{"spans": [{**ids, "attributes": attributes}]}]}]}
    [converted] = span_containers.spans_of(record)
    assert converted["context"] == {"trace_id": (b"t" * 16).hex(), "span_id": (b"s" * 8).hex()}
    assert converted["attributes"]["blob"] == "AAE="
    trace, generation = generation_of(record)
    system, asked, first, second, said = trace.messages
    assert (system["content"], said["content"], said["reasoning_content"]) == ("be", "4", "so")
    assert asked["content"][1] == {"type": "image_url", "image_url": {"url": "https://x/a"}}
    assert [(each["tool_call_id"], each["content"]) for each in (first, second)] == [
        ("x", '{"a": 1}'),
        ("y", '{"a": 1}'),
    ]
    assert trace.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    roles = [{"role": role, "parts": [{"type": "text", "content": role}]} for role in ("human", "model", "user")]
    named = generation_of(chat("a", [], "4", gen_ai__input__messages=json.dumps(roles)))[0]
    assert [each["role"] for each in named.messages] == ["user", "assistant", "user", "assistant"]
    assert generation.sampling == {"top_k": 40, "frequency_penalty": 0.5, "logit_bias": {"50": -100}}
    bad = [
        {"key": "gen_ai.input.messages", "value": otlp_value(MESSAGES[:1])},
        {"key": "gen_ai.output.messages", "value": otlp_value([{"role": "assistant", "parts": [{"type": "video"}]}])},
    ]
    record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"] = bad
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*:1: .*a part of a message is of the type 'video'"):
        tg.read([record])


def otlp_span(plain, *, snake=False):
    """A span in OTLP's JSON, or with the field names of protobuf."""
    pairs = [{"key": key, "value": otlp_value(value)} for key, value in plain["attributes"].items()]
    if snake:
        pairs = json.loads(json.dumps(pairs).replace("stringValue", "string_value"))
        return {"trace_id": "ab", "span_id": "1", "start_time_unix_nano": 5, "attributes": pairs}
    return {"traceId": "ab", "spanId": "1", "startTimeUnixNano": "5", "attributes": pairs}


CALL = chat("a", ["q"], "4", gen_ai__response__finish_reasons='["length"]')
WRAPPED = {
    "snake case": {"resource_spans": [{"scope_spans": [{"spans": [otlp_span(CALL, snake=True)]}]}]},
    "old OTLP": {"resourceSpans": [{"instrumentationLibrarySpans": [{"spans": [otlp_span(CALL)]}]}]},
    "Tempo": {"batches": [{"scopeSpans": [{"spans": [otlp_span(CALL)]}]}]},
    "a list in a line": [{"traceId": "ab", "spanId": "2"}, otlp_span(CALL)],
    "a record": {
        "spans": [otlp_span(CALL), {"traceId": "ab", "spanId": "2"}],
        "id": "talk",
        "reward": 0.5,
        "group": "g",
    },
    "a Jaeger trace": {
        "traceID": "ab",
        "spans": [
            {
                "spanID": "1",
                "tags": [{"key": key, "type": "string", "value": value} for key, value in CALL["attributes"].items()],
                "logs": [{"fields": [{"key": "event", "value": "gen_ai.evaluation.result"}, *SCORE]}],
            }
        ],
    },
    "ClickHouse events": {
        "TraceId": "ab",
        "SpanId": "1",
        "SpanAttributes": CALL["attributes"],
        "Events.Name": ["gen_ai.evaluation.result"],
        "Events.Attributes": [{each["key"]: each["value"] for each in SCORE}],
    },
}


@pytest.mark.parametrize("name", WRAPPED)
def test_other_containers_are_read(name, tmp_path):
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(WRAPPED[name]) + "\n")
    has_score = name in ("a Jaeger trace", "ClickHouse events")
    [trace] = tg.read(path, map={"reward": "scores.tone"} if has_score else {})
    assert [(each["role"], each["content"]) for each in trace.messages] == [("user", "q"), ("assistant", "4")]
    assert trace.generations[0].finish_reason == "stop"
    assert trace.id == ("talk" if name == "a record" else "ab")
    assert (trace.reward, trace.group) == ((0.5, "g") if name == "a record" else (1.0 if has_score else None, None))


def test_what_single_recorders_do_is_read():
    said = {"request": {"model": "m", "messages": MESSAGES[:1], "temperature": 0.5}}
    said["response"] = {"choices": [{"index": 0, "message": MESSAGES[1], "token_ids": [7]}]}
    mlflow = {"mlflow.spanType": '"CHAT_MODEL"', "mlflow.spanInputs": json.dumps(said["request"])}
    mlflow["mlflow.spanOutputs"] = json.dumps(said["response"])
    _, generation = generation_of({**span("a"), "attributes": mlflow})
    assert (generation.token_ids.tolist(), generation.temperature) == ([7], 0.5)
    # A call under names of no convention is searched for.
    [trace] = tg.read(
        [{**span("a"), "attributes": {"asked": mlflow["mlflow.spanInputs"], "got": mlflow["mlflow.spanOutputs"]}}]
    )
    assert trace.generations[0].token_ids.tolist() == [7]
    listed = json.dumps([{"role": "assistant", "content": "4"}])
    old = {
        "llm.request.type": "chat",
        "gen_ai.prompt": "q",
        "gen_ai.completion": listed,
        "gen_ai.response.finish_reasons": '["length"]',
    }
    grade = {"agentops.task.output": json.dumps({"type": "reward", "value": 0.25})}
    trace, generation = generation_of({**span("a"), "attributes": old}, {**span("b", "a"), "attributes": grade})
    assert (generation.finish_reason, trace.reward) == ("length", 0.25)
    called = {"llm.output_messages.0.message.function_call_name": "f", "llm.model_name": "m"}
    called |= {"llm.output_messages.0.message.function_call_arguments_json": "{}", "openinference.span.kind": "LLM"}
    called["llm.input_messages.0.message.content"] = "q"
    trace, _ = generation_of({**span("a"), "attributes": called})
    assert trace.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_completions_of_texts_have_no_roles_and_prompts_without_an_answer_failed():
    texts = {"gen_ai.operation.name": "text_completion", "gen_ai.prompt.0.content": "2+2=", "gen_ai.request.top_p": 0.5}
    texts |= {"gen_ai.completion.0.content": "4", "gen_ai.completion.0.finish_reason": "length"}
    texts |= {"gen_ai.response.candidate.per_position_token_ids": "[[7]]"}
    listed = {"openinference.span.kind": "LLM", "llm.prompts.0.prompt.text": "2+2=", "llm.finish_reason": "length"}
    listed |= {"llm.choices.0.completion.text": "4", "llm.invocation_parameters": '{"top_p": 0.5}'}
    response = {"choices": [{"index": 0, "text": "4", "finish_reason": "length"}]}
    raw = {"openinference.span.kind": "LLM", "output.value": json.dumps(response)}
    raw["input.value"] = json.dumps({"model": "m", "prompt": "2+2=", "top_p": 0.5})
    for attributes in (texts, listed, raw):
        stream = tg.stream([{**span("a"), "attributes": attributes}])
        [trace] = [trace for part in stream for trace in part]
        assert list(stream.read_report.formats) == ["completions"]
        assert [each["content"] for each in trace.messages][-1] == "4"
        assert (trace.generations[0].finish_reason, trace.generations[0].top_p) == ("length", 0.5)
        assert (trace.generations[0].token_ids is None) == (attributes is not texts)
    # With a system message it is a chat, whatever the name of its operation.
    several = {**texts, "gen_ai.prompt.0.role": "system", "gen_ai.prompt.1.content": "q"}
    assert [each["role"] for each in tg.read([{**span("a"), "attributes": several}])[0].messages] == [
        "system",
        "user",
        "assistant",
    ]
    asked = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(MESSAGES[:1])}
    with pytest.raises(tg.TracegradError, match=r"TG-FORMAT-005.*a prompt and no answer"):
        tg.read([{**span("a"), "attributes": asked}])


@pytest.mark.parametrize("form", ["REST", "table", "columns", "columns before"])
def test_evaluations_of_spans_by_their_ids_and_as_columns_are_found(form, tmp_path):
    rows = [chat("a", [f"q{number}"], "4", trace=f"{number}" * 32) for number in range(4)]
    for number, row in enumerate(rows):
        row["context"]["span_id"] = str(number)
    # get_span_annotations, get_span_annotations_dataframe, and evaluations that were joined to the table of spans.
    results = [{"score": number % 2, "label": "x"} for number in range(4)] + [{"score": 1.0}]
    named = [
        {"name": "tone", "annotator_kind": "LLM", "span_id": str(at), "result": each} for at, each in enumerate(results)
    ]
    table = [
        {"annotation_name": "tone", "annotator_kind": "LLM", "span_id": str(at), "result.score": each["score"]}
        for at, each in enumerate(results)
    ]
    others = {"REST": [{"data": named, "next_cursor": None}], "table": table}.get(form, [])
    if form == "columns":
        rows = [{**row, "eval.tone.score": result["score"]} for row, result in zip(rows, results, strict=False)]
    ordered = [*table, *rows] if form == "columns before" else [*rows, *others]
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
    path = "eval.tone.score" if form == "columns" else "scores.tone"
    assert infer_fields.infer(tmp_path).best(["reward"])[0].flags() == ["--map.reward", path]
    stream = tg.stream(tmp_path, map={"reward": path})
    assert [trace.reward for part in stream for trace in part] == [0.0, 1.0, 0.0, 1.0]
    assert ("1 annotations are left out" in "\n".join(stream.lines())) == (form != "columns")


def test_an_annotation_of_a_span_id_that_two_traces_have_is_left_out():
    rows = [chat("a", [name], "4", trace=name * 32) for name in "12"]
    result = {"name": "tone", "annotator_kind": "LLM", "span_id": rows[0]["context"]["span_id"], "result": {"score": 1}}
    stream = tg.stream([*rows, result], map={"reward": "scores.tone"})
    assert [trace.reward for part in stream for trace in part] == [None, None]
    assert "1 annotations are left out: none or several of the traces have their span" in "\n".join(stream.lines())


def test_openinference_messages_without_the_raw_call_are_read():
    image = {"message_content.type": "image", "message_content.image.image.url": "https://x/a"}
    text = {"message_content.type": "text", "message_content.text": "see"}
    said = {"tool_call.id": "x", "tool_call.function.name": "f", "tool_call.function.arguments": "{}"}
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.input_messages": [{"message.role": "user", "message.contents": [text, image]}],
        "llm.output_messages": [{"message.role": "assistant", "message.tool_calls": [said]}],
        "llm.invocation_parameters": '{"temperature": 0.5, "top_k": 5}',
        "annotations.0.annotation.name": "kind",
        "annotations.0.annotation.score": 0.25,
    }
    columns = {f"attributes.{key}": value for key, value in attributes.items()}
    row = {"context.trace_id": "1", "context.span_id": "2", "parent_id": None, "name": "llm", **columns}
    nested = {"openinference": {"span": {"kind": "LLM"}}, **{key: attributes[key] for key in list(attributes)[1:]}}
    ids = {"trace_id": "1", "span_id": "2"}
    others = [json.dumps(attributes), [[key, value] for key, value in attributes.items()], nested]
    for each in (row, *({"context": ids, "attributes": other} for other in others)):
        trace, generation = generation_of(each, map={"reward": "scores.kind"})
        assert trace.messages[0]["content"][1]["image_url"]["url"] == "https://x/a"
        assert trace.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert (generation.temperature, generation.sampling, trace.reward) == (0.5, {"top_k": 5}, 0.25)


def test_a_call_of_which_the_sdk_dropped_attributes_is_refused():
    said = {f"llm.input_messages.{at}.message.{key}": value for at in (0, 1) for key, value in MESSAGES[0].items()}
    said |= {f"llm.output_messages.0.message.{key}": value for key, value in MESSAGES[1].items()}
    whole = span("a", openinference__span__kind="LLM", **said)
    assert len(tg.read([whole])[0].messages) == 3
    del said["llm.input_messages.0.message.role"], said["llm.input_messages.0.message.content"]
    for each in ({**whole, "droppedAttributesCount": 2}, span("a", openinference__span__kind="LLM", **said)):
        with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
            tg.read([each])
        raw = {"input.value": json.dumps({"model": "m", "messages": MESSAGES[:1] * 2})}
        raw["output.value"] = json.dumps({"choices": [{"index": 0, "message": MESSAGES[1]}]})
        assert len(tg.read([{**each, "attributes": {**each["attributes"], **raw}}])[0].messages) == 3


def test_a_value_that_zipkin_cut_is_refused():
    tags = {key: "x" * 128 if "output" in key else value for key, value in chat("a", ["q"], "4")["attributes"].items()}
    tags["gen_ai.output.messages"] = json.dumps([{"role": "assistant", "content": "4"}])
    row = {"traceId": "1", "id": "2", "name": "chat", "timestamp": 1, "tags": tags}
    assert len(tg.read([row])) == 1
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*128 characters, to which Zipkin"):
        tg.read([{**row, "tags": {**tags, "cut": "x" * 128}}])


def test_a_spoiled_span_is_at_most_a_bad_record():
    record = json.loads(lines_of("semconv_otlp_split.jsonl.gz")[2])
    for row in spoiled(record):
        report = tg.read([chat("a", ["q"], "4"), row], on_error="skip").read_report
        assert report.traces >= 1
        infer_fields.infer([row])
    deep = {"stringValue": "x"}
    for _ in range(60):
        deep = {"arrayValue": {"values": [deep]}}
    assert span_containers.plain(deep) is not None
    for start in ("inf", float("inf"), "-inf", "nan", True, 10**400):
        assert span_containers.spans_of({**span("a"), "start_time": start})[0]["start_time"] == 0
    assert span_calls.convert(span_containers.spans_of(span("a", x=deep))[0])[0] == span_calls.STEP


def test_what_is_written_as_spans_is_read_again_as_it_was(tmp_path):
    rows = [
        json.loads(line)
        for line in (Path(__file__).parents[1] / "golden" / "dumps" / "art.jsonl").read_text().splitlines()
    ]
    tool = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    sampled = {
        "token_ids": [5, 6],
        "logprobs": [-0.5, None],
        "finish_reason": "length",
        "temperature": 0.7,
        "policy_version": 3,
    }
    messages = [
        {"role": "system", "content": "be"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "https://x/a"}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [tool], "generation": sampled},
        {"role": "tool", "tool_call_id": "x", "content": "14"},
        {"role": "assistant", "content": "", "generation": {**sampled, "logprob_kind": "processed", "top_k": 4}},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    rows.append(
        {"messages": messages, "tools": tools, "reward": 0.5, "rewards": {"tone": 1}, "group": "g", "model": "m"}
    )
    traces = tg.Traces.from_records(rows)
    tg.write_spans(traces, tmp_path / "spans.jsonl")
    names = {"reward": "scores", "group": "attributes.tracegrad.group", "session": "attributes.gen_ai.conversation.id"}
    again = tg.read(tmp_path / "spans.jsonl", map={**names, "id": "attributes.gen_ai.conversation.id"})
    assert len(again) == len(traces) == 3
    for one, other in zip(traces, again, strict=True):
        assert [{**each, "content": each.get("content")} for each in one.pool] == other.pool
        assert (one.id, one.group, one.model, one.tools) == (other.id, other.group, other.model, other.tools)
        wanted = {**one.rewards, **({} if one.reward is None else {"reward": one.reward})}
        assert other.rewards == pytest.approx(wanted)
        for left, right in zip(one.generations, other.generations, strict=True):
            for name in ("token_ids", "prompt_token_ids", "logprobs"):
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
            for name in (
                "finish_reason",
                "temperature",
                "top_p",
                "sampling",
                "policy_version",
                "logprob_kind",
                "context",
            ):
                assert getattr(left, name) == getattr(right, name), name
    heard = [{"role": "user", "content": [{"type": "input_audio"}]}, {"role": "assistant", "content": "4"}]
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-044.*'input_audio'"):
        tg.write_spans([tg.Trace.from_messages(heard)], tmp_path / "spans.jsonl")
