"""Calls that failed: counted and said, never a trace, and no obstacle for the others of their file and session."""

import json
import shlex
from pathlib import Path

import pytest

import tracegrad as tg
from messages import said, user
from tracegrad.cli import main
from tracegrad.data import infer_fields
from tracegrad.data.formats import adapt, is_failed
from tracegrad.errors import FormatError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def whole(text):
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": said(text)}]}


ASKED = {"model": "m", "messages": [user("a")]}
LATER = {"model": "m", "messages": [user("a"), said("b"), user("c")]}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "b"}], "stop_reason": "stop"}
ERROR = {"error": {"message": "Slow down", "type": "requests", "code": None}}


@pytest.mark.parametrize("asked", [ASKED, LATER])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"response": ERROR}, "Slow down"),
        ({"response": json.dumps(ERROR), "status": 429}, "Slow down"),
        ({"response": {"object": "error", "message": "No such model", "code": 404}}, "No such model"),
        ({"response": {"status_code": 503, "body": "<html>"}}, "its status_code is 503"),
        ({"response": {"status_code": 429, "body": ERROR}}, "Slow down"),
        ({"response": {"message": "bad gateway"}, "http_status": "502"}, "its http_status is 502"),
        ({"response": "upstream connect error", "statusCode": 503}, "its statusCode is 503"),
        ({"response": "upstream connect error"}, "`response` is a text"),
        ({"response": None, "error": {"type": "APITimeoutError"}}, "APITimeoutError"),
        ({"response": {}, "error_str": "No route."}, "No route"),
        ({"error": "timed out"}, "timed out"),
        ({"status": 500}, "its status is 500"),
        ({"completion": None}, "`completion` is null"),
        ({"response": {"choices": []}}, "`response` is empty"),
    ],
)
def test_a_failed_call_is_no_trace_and_its_own_words_are_said(asked, more, says):
    for request in (asked, json.dumps(asked)):
        [made] = adapt({"request": request, **more}) or []
        assert is_failed(made)
        traces = tg.read([{"requestBody": request, **more}, {"req": ASKED, "res": whole("b")}], on_error="skip")
        report = traces.read_report
        assert (len(traces), report.bad) == (1, 1)
        assert f": <records>:1: the call failed: {says}" in report.errors[0]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": LATER["messages"], "output": json.dumps(ERROR)}, "Slow down"),
        ({"messages": LATER["messages"], "output": "bad gateway", "status": 502}, "its status is 502"),
        ({"messages": LATER["messages"], "completion": None, "error": "timed out"}, "timed out"),
        ({"messages": ASKED["messages"], "response": "oops", "status": 500}, "its status is 500"),
        ({"prompt": "a", "response": "oops", "status": 500}, "its status is 500"),
        ({"prompt": "a", "output": "", "error": "timed out"}, "timed out"),
        ({"prompt": "a", "output": None, "passed": 3}, "`output` is null, so there is no answer in it"),
    ],
)
def test_messages_and_prompts_without_an_answer_are_failed_calls_too(record, says):
    with pytest.raises(FormatError, match=rf"TG-FORMAT-005.*{says}"):
        tg.read([record])


@pytest.mark.parametrize(
    ("record", "last"),
    [
        ({"request": ASKED, "response": whole("b"), "error": None, "status": 200}, "b"),
        ({"req": ASKED, "res": {**whole("b"), "error": {"message": "a tool's"}}}, "b"),
        ({"prompt": "a", "output": "b", "error": "its code does not run"}, "b"),
        ({"messages": [user("a"), said("b"), user("c")], "error": "out of turns"}, "c"),
        ({"messages": [user("a"), said("b")], "response": None, "error": "later"}, "b"),
        ({"req": ASKED, "res": whole("b"), "status": 404}, "b"),
        ({"messages": [user("a")], "output": MESSAGE, "status": 404}, "b"),
        ({"input": {"messages": [user("a"), said("b")]}, "output": None}, "b"),
        ({"input": ASKED, "output": None, "final": said("b")}, "b"),
        ({"input": ASKED, "error": "out of turns", "conversation": [user("a"), said("b")]}, "b"),
        ({"question": "a", "error": "out of turns", "conversation": [user("a"), said("b")]}, "b"),
    ],
)
def test_an_answer_beside_an_error_is_still_read(record, last):
    [trace] = tg.read([record])
    assert trace.messages[-1]["content"] == last
    assert len(trace.generations) == 1


def test_failed_calls_in_an_export_take_none_of_the_others_along():
    rows = [{"requestBody": ASKED, "responseBody": each} for each in (whole("b"), ERROR, whole("d"))]
    stream = tg.stream([{"rows": rows, "page": 1}], on_error="skip")
    assert [trace.messages[-1]["content"] for part in stream for trace in part] == ["b", "d"]
    assert stream.lines() == ["convert  1 records of export", "         1 call failed: no answer in it"]


def logged(session, messages, answer, score, at):
    """A call of a proxy's log, bodies as text: an answer, or the status of an error."""
    body, status = (whole(answer), 200) if isinstance(answer, str) else (ERROR, answer)
    told = {"conversation_id": session, "status": status, "eval": {"score": score}, "time": at}
    return {**told, "request": json.dumps({"messages": messages}), "response": json.dumps(body)}


def log():
    """Four conversations of two calls, two prompts; the first fails once between, the second with its last call."""
    rows = []
    for number in range(4):
        first = [user(f"{number % 2}?")]
        later = [*first, said(f"b{number}"), user("c")]
        rows.append(logged(f"s{number}", first, f"b{number}", number / 4, 10 * number))
        if number < 2:
            rows.append(logged(f"s{number}", later, 429 + 71 * number, 0.9, 10 * number + 1))
        if number != 1:
            rows.append(logged(f"s{number}", later, "d", number / 4, 10 * number + 2))
    return [*rows, logged("s4", [user("0?")], 500, 1, 50)]


def test_failed_calls_hide_nothing_of_what_is_found_about_the_others():
    found = infer_fields.infer(log())
    assert found.records == 7
    good = [row for row in log() if row["status"] == 200]
    assert found == infer_fields.infer(good)
    assert found.flags(["session"]) == ["--map.session", "conversation_id", "--map.order", "time"]
    assert (
        found.of("reward")[0].evidence == '7 of 7 records have a number "eval.score" (0 to 0.75, mean 0.393, 4 values)'
    )
    assert found.of("group")[0].evidence == "4 conversations begin with one of 2 prompts that others share"


def test_what_failed_calls_alone_say_is_no_reward():
    rows = [{**row, "eval": {"score": at} if row["status"] != 200 else {}} for at, row in enumerate(log()[:5])]
    assert len({row["conversation_id"] for row in rows if row["status"] != 200}) == 2
    assert not infer_fields.infer(rows[:5], names=["reward"]).guesses


@pytest.mark.parametrize("session", ["conversation_id", "prefix"])
def test_a_failed_call_takes_no_good_call_of_its_session_along(session):
    stream = tg.stream(log(), map={"session": session, "reward": "eval.score"}, on_error="skip")
    traces = [trace for part in stream for trace in part]
    assert [len(trace.generations) for trace in traces] == [2, 1, 2, 2]
    assert [message["content"] for message in traces[0].messages] == ["0?", "b0", "c", "d"]
    assert [trace.reward for trace in traces] == [0, 0.25, 0.5, 0.75], "a failed call says nothing of its session"
    assert stream.read_report.bad == 3
    how = "continue one another" if session == "prefix" else "share conversation_id"
    assert stream.lines() == [
        "convert  7 records of logged_call",
        "         3 calls failed: no answer in them",
        "map      reward is eval.score: a number in 7 of 7 records, 0 to 0.75",
        f"map      session: 7 records are 4 conversations, whose calls {how}",
    ]


def test_what_is_no_call_or_is_refused_is_left_out_of_its_session_alone(tmp_path):
    calls = [{"s": 1, "reward": 0, "request": ASKED, "response": whole("b")}]
    calls.append({"s": 1, "reward": 1, "request": LATER, "response": whole("d")})
    odd = [{"s": 1, "tokens": [5]}, {"s": 1, "request": LATER, "response": {"choices": [{"index": 0, "message": 3}]}}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (calls[0], *odd, calls[1])))
    stream = tg.stream(path, map={"session": "s"}, on_error="quarantine")
    [traces] = [part for part in stream if len(part)]
    line = "1 rewards differ from an earlier one of their conversation: the last one counts"
    assert stream.lines()[1:] == [f"         {line}"]
    report = stream.read_report
    assert [[message["content"] for message in trace.messages] for trace in traces] == [["a", "b", "c", "d"]]
    assert report.reasons == {"wrong_type": 2}
    assert [error.split(":")[2] for error in report.errors] == ["2", "3"]
    [aside] = tmp_path.glob("*.quarantine.raw")
    assert aside.read_text() == "".join(json.dumps(each) + "\n" for each in odd)
    path.write_text("".join(json.dumps(each) + "\n" for each in (odd[1], odd[1])))
    report = tg.read(path, map={"session": "s"}, on_error="skip").read_report
    assert (report.traces, [error.split(":")[2] for error in report.errors]) == (0, ["1", "2"])


def test_the_command_that_scores_leaves_failed_calls_out(tmp_path, capsys, monkeypatch):
    asked = {"temperature": 1.0, "messages": [user("2+2?")]}
    rows = [{"request": asked, "response": whole(str(number))} for number in range(4)]
    rows.append({"request": asked, "response": ERROR})
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def right(prompts, completions, **columns):\n    return [1.0, 0.0, 0.0, 1.0]\n")
    monkeypatch.chdir(tmp_path)
    main(["doctor", "calls.jsonl", "--model", str(MODEL)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next ")]
    _, _, verb, *told = shlex.split(line)
    assert (verb, told[-2:]) == ("score", ["--on-error", "skip"])
    assert main([verb, *told]) == 0
    assert [trace.reward for trace in tg.read("scored.jsonl")] == [1.0, 0.0, 0.0, 1.0]
