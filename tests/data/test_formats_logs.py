"""What loggers and evaluation harnesses wrote (tests/golden/make_logs.py), and what of it is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data import infer_fields
from tracegrad.data.formats import registry

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"
SHARED = [folder / "shared" / "data" / "logprobs" / "llama_stack_recordings" for folder in Path(__file__).parents]
RECORDINGS = next((folder for folder in SHARED if folder.exists()), None)


def talk(trace):
    """The roles and texts of a trace; sampled messages have a star."""
    sampled = {each.message for each in trace.generations}
    return [
        f"{each['role']}{'*' * (at in sampled)} {each['content'] or ''}".strip()
        for at, each in enumerate(trace.messages)
    ]


def test_a_trace_of_langfuse_is_its_input_and_the_answer_of_its_output():
    stream = tg.stream(GOLDEN / "langfuse_traces.jsonl", map={"reward": "metadata.grade"}, on_error="skip")
    traces = {trace.id: trace for part in stream for trace in part}
    steps = ["user 2+2?", "assistant*", "tool 4", "assistant* 4"]
    assert {name: talk(trace) for name, trace in traces.items()} == {
        "message": ["system Add.", "user 2+2?", "assistant* 4"],
        "text": ["user 2+2?", "assistant 4", "user 3+3?", "assistant* 6"],
        "steps": steps,
        "repeated": steps,
        "response": ["user 2+2?", "assistant* 4"],
        "graph": ["user 2+2?", "assistant* 4"],
    }
    assert traces["steps"].tools[0]["function"]["name"] == "add"
    assert {trace.reward for trace in traces.values()} == {0.5}
    assert stream.read_report.bad == 5
    # Records of a session are calls or states of one conversation.
    rows = [json.loads(line) for line in (GOLDEN / "langfuse_traces.jsonl").read_text().splitlines()]
    for row in rows[6:]:
        with pytest.raises(tg.TracegradError, match=r"TG-DATA-043: .*:1: the (in|out)put of a Langfuse trace is "):
            tg.read([row])
    first = {key: value for key, value in rows[0].items() if key not in ("htmlPath", "observations", "scores")}
    assert len(tg.read([first])[0].messages) == 3
    one = {**rows[1], "input": rows[1]["input"]["messages"][:1], "output": "4", "id": "first"}
    [joined] = tg.read([one, rows[1]], map={"session": "sessionId"})
    assert talk(joined) == ["user 2+2?", "assistant* 4", "user 3+3?", "assistant* 6"]
    marks = [{"name": "reward", "value": 1}, {"name": "tone", "value": 0.5}, {"name": "word", "value": "up"}]
    [marked] = tg.read([{**rows[0], "observations": [], "scores": marks}])
    assert (marked.reward, marked.rewards) == (1.0, {"tone": 0.5})


def test_an_output_that_repeats_its_prompt_is_not_read_twice():
    asked = [{"role": "user", "content": "2+2?"}]
    [trace] = tg.read([{"input": asked, "output": [*asked, {"role": "assistant", "content": "4"}]}])
    assert talk(trace) == ["user 2+2?", "assistant* 4"]


@pytest.mark.parametrize("name", ["adk.session.json", "adk_snake.json.gz"])
def test_a_session_of_googles_adk_is_the_calls_of_its_first_agent(name):
    stream = tg.stream(GOLDEN / name, map={"reward": "state.grade"})
    [trace] = tg.data.concatenate(stream)
    assert talk(trace) == [
        "user How many files?",
        "assistant* I look.",
        'tool {"files":2}',
        "assistant* There are two.",
        "user The other agent, please.",
        "assistant*",
    ]
    look, told, passed = trace.generations
    assert trace.messages[1]["tool_calls"][0]["function"]["name"] == "count"
    assert trace.messages[1]["reasoning_content"] == "Let me look."
    assert (told.token_ids.tolist(), told.logprobs.tolist()) == ([7, 8, 9, 2], [-0.5, -0.25, -1.0, -0.125])
    assert (look.token_ids, passed.token_ids, told.finish_reason, trace.reward) == (None, None, "stop", 0.5)
    assert (trace.id, look.temperature) == ("s", None)
    lines = " ".join(stream.lines())
    assert "1 answers of other agents than the first one" in lines
    assert "1 answers after turns of other agents, whose form in the prompt is not stored" in lines
    # Other answers that were not sampled from this prompt by this model, and histories that were changed.
    data = (GOLDEN / name).read_bytes()
    session = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    answers = [event for event in session["events"] if (event.get("content") or {}).get("role") == "model"]
    first, second = answers[:2]
    model, error, rewind = (
        ("model_version", "error_code", "rewind_before_invocation_id")
        if "snake" in name
        else ("modelVersion", "errorCode", "rewindBeforeInvocationId")
    )
    for target, fields, turns in (
        (second, {model: "desk-2"}, 2),
        (second, {error: "SAFETY"}, 2),
        (second, {"partial": True}, 2),
        (second["actions"], {rewind: "e-1"}, None),
        (second["actions"], {"compaction": {"start_timestamp": 1}}, None),
        (first["content"]["parts"][0], {"inline_data": {"data": "AA=="}}, None),
    ):
        kept = dict(target)
        target.update(fields)
        if turns is None:
            with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*events\[\d\] (compacts|has parts)"):
                tg.read([session])
        else:
            assert len(tg.read([session])[0].generations) == turns
        target.clear()
        target.update(kept)
    assert len(tg.read([session])[0].generations) == 3


def test_an_attempt_of_garak_is_a_group_whose_rewards_say_what_resisted():
    stream = tg.stream(GOLDEN / "garak.report.jsonl")
    traces = tg.data.concatenate(stream)
    assert [(trace.id, trace.group, talk(trace)[2], trace.rewards) for trace in traces] == [
        ("attempt-0-0", "attempt-0", "assistant* It.", {"dan.DAN.resisted": 0.0, "mitigation.Bypass.resisted": 0.75}),
        ("attempt-0-1", "attempt-0", "assistant* No.", {"dan.DAN.resisted": 1.0}),
        ("attempt-1-0", "attempt-1", "assistant* It.", {}),
    ]
    assert talk(traces[0])[:2] == ["system Be kind.", "user Say it."]
    lines = " ".join(stream.lines())
    assert "2 attempts before their detectors" in lines
    assert "1 generations without an answer" in lines
    rows = [json.loads(line) for line in (GOLDEN / "garak.report.jsonl").read_text().splitlines()]
    done = next(row for row in rows if row.get("status") == 2)
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*dan\.DAN.*2 generations"):
        tg.read([{**done, "detector_results": {"dan.DAN": [1.0]}}])
    stream = tg.stream([done, {**done, "prompt": {"turns": [{"role": "user", "content": {"text": "Other."}}]}}])
    assert len(tg.data.concatenate(stream)) == 2
    assert "2 conversations that do not continue their prompt" in " ".join(stream.lines())
    done["conversations"][0]["turns"][1]["content"]["data_path"] = done["prompt"]["turns"][1]["content"][
        "data_path"
    ] = "a"
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*no.*text"):
        tg.read([done])


def test_a_row_of_lighteval_is_a_group_and_its_mean_is_the_reward_of_no_text():
    path = GOLDEN / "lighteval_details.jsonl"
    stream = tg.stream(path)
    traces = tg.data.concatenate(stream)
    assert [(trace.id, trace.group, talk(trace), trace.rewards) for trace in traces] == [
        ("two-7-0", "two-7", ["user 2+2?", "assistant* 4"], {}),
        ("two-7-1", "two-7", ["user 2+2?", "assistant* 5"], {}),
        ("one-7-0", "one-7", ["user 2+2?", "assistant* 4"], {"exact": 1.0, "f1": 0.5}),
    ]
    lines = " ".join(stream.lines())
    assert "1 rows with metrics of all their texts" in lines
    assert "1 rows without a generated text" in lines
    two, _, _ = (json.loads(line) for line in path.read_text().splitlines())
    assert infer_fields.infer([two, two], names=["reward"]).guesses == ()
    two["model_response"]["input"] = "2+2?"
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*input.*text.*messages"):
        tg.read([two])
    assert registry.adapt({"config_general": {}, "results": {}}) == []


def test_calls_and_results_in_the_parts_of_haystacks_messages_are_read():
    [trace] = tg.read(GOLDEN / "haystack.json", map={"reward": "mark"})
    roles = ["system Add.", "user 2+2?", "assistant* I add.", "tool 0", "tool 1", "assistant* 4"]
    assert (talk(trace), trace.reward) == (roles, 0.5)
    calls = [call["function"] for call in trace.messages[2]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("add", {"a": 0}), ("add", {"a": 1})]
    assert [each["tool_call_id"] for each in trace.messages[3:5]] == ["c0", "c1"]
    assert trace.messages[2]["reasoning_content"] == "Twice."
    record = json.loads((GOLDEN / "haystack.json").read_text())
    record["messages"][3]["content"][0]["tool_call_result"]["result"] = [{"text": "0"}, {"text": "!"}]
    assert talk(tg.read([record])[0])[3] == "tool 0!"
    record["messages"][3]["content"][0]["tool_call_result"]["result"] = [{"image": {"base64_image": "AA=="}}]
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*kind.*image.*result"):
        tg.read([record])
    record["messages"][1]["content"].append({"image": {"base64_image": "AA=="}})
    with pytest.raises(tg.TracegradError, match=r"TG-DATA-043.*kind.*image"):
        tg.read([record])


def test_recordings_of_llama_stack_are_calls_with_all_their_tokens():
    stream = tg.stream(GOLDEN / "llama_stack.jsonl", on_error="skip")
    traces = [trace for part in stream for trace in part]
    assert [talk(trace) for trace in traces] == [
        ["user 2+2?", "assistant 4", "user 3+3?", "assistant* It is 6"],
        ["user 2+2?", "assistant*"],
        ["user 2+2?", "assistant* 4"],
    ]
    assert [len(trace.generations[0].logprobs) for trace in traces] == [3, 3, 1]
    [called] = traces[1].messages[1]["tool_calls"]
    assert (called["id"], called["function"]) == ("c", {"name": "add", "arguments": '{"a": 2}'})
    assert [bool(trace.tools) for trace in traces] == [False, True, False]
    assert [trace.generations[0].temperature for trace in traces] == [1.0, 1.0, 0.5]
    assert stream.read_report.bad == 1
    assert "its response (keys body, is_streaming, is_exception" in stream.read_report.errors[0]


@pytest.mark.skipif(not RECORDINGS, reason="shared/data/logprobs is not there")
def test_recordings_of_others_have_the_tokens_that_json_alone_counts_in_them():
    counts = {}
    for path in RECORDINGS.glob("*.json"):
        chunks = [each["__data__"] for each in json.loads(path.read_text())["response"]["body"]]
        choices = [choice for each in chunks for choice in each["choices"]]
        listed = [each for choice in choices for each in (choice["logprobs"] or {}).get("content") or ()]
        deltas = [choice["delta"] for choice in choices]
        called = [call["function"]["arguments"] for each in deltas for call in each.get("tool_calls") or ()]
        text, known = "".join(each["content"] or "" for each in deltas), [each["logprob"] for each in listed]
        counts[path.name] = (text, "".join(called), len(listed), sum(each for each in known if each > -9999))
    traces = {Path(trace.location[0]).name: trace for trace in tg.read(RECORDINGS)}
    assert (len(traces), sum(count[2] for count in counts.values())) == (16, 747)
    for name, trace in traces.items():
        [turn] = trace.generations
        said = trace.messages[turn.message]
        called = "".join(call["function"]["arguments"] for call in said.get("tool_calls") or ())
        text, arguments, count, total = counts[name]
        assert (said["content"] or "", called, len(turn.logprobs)) == (text, arguments, count)
        assert float(np.nansum(turn.logprobs)) == pytest.approx(total, rel=1e-4)
