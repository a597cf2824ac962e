"""What loggers and evaluation harnesses wrote (tests/golden/make_logs.py), and what of it is refused."""

import json
from pathlib import Path

import pytest

import tracegrad as tg

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"


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
