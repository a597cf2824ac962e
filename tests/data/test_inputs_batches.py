"""The lines of a batch's input and output are joined by their ids; what has no other side is counted."""

import json
from pathlib import Path

import pytest

import tracegrad as tg
from messages import said, user, written
from tracegrad.data import infer_fields
from tracegrad.errors import FormatError
from tracegrad.prepare import split_inputs

CHAT = "/v1/chat/completions"


def asked(name, **body):
    body = {"model": "m", "temperature": 0.5, "messages": [user(f"{name}?")], **body}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def answered(name, **more):
    choice = {"index": 0, "finish_reason": "stop", "message": said(f"{name}!"), "token_ids": [5, 2]}
    body = {"id": f"chatcmpl-{name}", "object": "chat.completion", "choices": [choice]}
    return {
        "id": f"batch_{name}",
        "custom_id": name,
        "response": {"status_code": 200, "body": body},
        "error": None,
        **more,
    }


def read(paths, **options):
    stream = tg.stream(paths, **options)
    traces = [trace for part in stream for trace in part]
    texts = [[message["content"] for message in trace.messages] for trace in traces]
    return traces, texts, stream


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_answers_get_their_requests_in_any_order_and_stay_where_they_are(tmp_path, order):
    inputs = written(tmp_path / "in.jsonl", [asked("a"), asked("b", temperature=0.75), asked("c")])
    outputs = written(tmp_path / "out.jsonl", [answered("b"), answered("a"), answered("x")])
    traces, texts, stream = read([(inputs, outputs)[at] for at in order])
    assert texts == [["b?", "b!"], ["a?", "a!"], ["x!"]]
    assert [(trace.id, trace.location) for trace in traces] == [
        ("b", (outputs, 1)),
        ("a", (outputs, 2)),
        ("x", (outputs, 3)),
    ]
    assert [trace.generations[0].temperature for trace in traces] == [0.75, 0.5, None]
    assert stream.lines() == [
        "batch    2 answers have their request, by custom_id",
        "         1 requests without an answer are left out",
        "         1 answers have no request: their prompt is unknown",
    ]
    assert stream.read_report.traces == 3
    assert len(read([inputs, outputs], limit=1)[0]) == 1
    assert read(str(tmp_path))[1] == texts, "a folder names both"


def test_anthropics_results_get_their_parameters(tmp_path):
    params = {"model": "c", "max_tokens": 9, "temperature": 0.5, "system": "S", "messages": [user("a?")]}
    inputs = written(tmp_path / "in.jsonl", [{"custom_id": name, "params": params} for name in "ab"])
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "a!"}],
        "stop_reason": "end_turn",
    }
    results = [{"type": "succeeded", "message": text}, {"type": "errored", "error": {"type": "overloaded_error"}}]
    lines = [{"custom_id": name, "result": result} for name, result in zip("ab", results, strict=True)]
    outputs = written(tmp_path / "out.jsonl", lines)
    [trace], texts, stream = read([inputs, outputs], on_error="skip")
    assert texts == [["S", "a?", "a!"]]
    assert trace.generations[0].temperature == 0.5
    assert stream.read_report.reasons == {"failed_call": 1}
    with pytest.raises(FormatError, match=r"TG-FORMAT-005: .*out\.jsonl:2"):
        tg.read([inputs, outputs])


def test_one_file_alone_is_read_as_before(tmp_path):
    inputs, outputs = written(tmp_path / "in.jsonl", [asked("a")]), written(tmp_path / "out.jsonl", [answered("a")])
    with pytest.raises(FormatError, match=r"TG-FORMAT-072: .*in\.jsonl:1"):
        tg.read(inputs)
    assert read(outputs)[1] == [["a!"]]
    both = written(tmp_path / "both.jsonl", [{**asked("a"), **answered("a")}])
    assert read([both, outputs])[1] == [["a?", "a!"], ["a!"]]
    with pytest.raises(FormatError, match=r"TG-FORMAT-072: .*in\.jsonl:1"):
        tg.read([inputs, written(tmp_path / "other.jsonl", [asked("b")])])


@pytest.mark.parametrize("side", [asked, answered])
def test_a_second_line_of_an_id_is_refused_at_its_place(tmp_path, side):
    inputs = written(tmp_path / "in.jsonl", [asked("a"), *[side("a")] * (side is asked)])
    outputs = written(tmp_path / "out.jsonl", [answered("a"), *[side("a")] * (side is answered)])
    at = inputs if side is asked else outputs
    with pytest.raises(FormatError, match=rf"TG-READ-006: {at}:2: .*'a'; the first is at {at}:1"):
        tg.read([inputs, outputs])
    written(Path(inputs), [*map(json.loads, Path(inputs).read_text().splitlines()), asked("b")])
    written(Path(outputs), [*map(json.loads, Path(outputs).read_text().splitlines()), answered("b")])
    _, texts, stream = read([inputs, outputs], on_error="skip")
    assert texts == [["b?", "b!"]], "which of two requests an answer belongs to would be guessed"
    assert stream.read_report.bad == 1
    assert stream.lines() == [
        "batch    1 answers have their request, by custom_id",
        "         2 lines whose custom_id occurs again are left out",
    ]


def test_fields_of_both_sides_are_mapped_and_found_and_sessions_are_joined(tmp_path):
    later = asked("b", messages=[user("a?"), said("a!"), user("b?")])
    inputs = written(tmp_path / "in.jsonl", [{**asked("a"), "meta": {"task": 3}}, later])
    outputs = written(tmp_path / "out.jsonl", [answered("a", score=0.25), answered("b")])
    [trace], [texts], stream = read(
        [inputs, outputs], map={"session": "prefix", "reward": "score", "group": "meta.task"}
    )
    assert texts == ["a?", "a!", "b?", "b!"]
    assert (trace.reward, trace.group, len(trace.generations)) == (0.25, "3", 2)
    assert "2 records are 1 conversations" in " ".join(stream.lines())
    assert infer_fields.infer([inputs, outputs], names=["session"]).of("session")[0].path == "prefix"


def test_files_of_a_batch_stay_in_one_part(tmp_path):
    inputs, outputs = written(tmp_path / "in.jsonl", [asked("a")]), written(tmp_path / "out.jsonl", [answered("a")])
    parts, reason = split_inputs([inputs, outputs], part_bytes=1)
    assert (len(parts), "custom_id" in reason) == (1, True)
    plain = [written(tmp_path / f"{name}.jsonl", [{"messages": [user("a"), said("b")]}]) for name in "cd"]
    assert len(split_inputs(plain, part_bytes=1)[0]) == 2


def test_a_bad_line_is_written_to_the_quarantine_of_its_file(tmp_path):
    inputs = written(tmp_path / "in.jsonl", [asked("b"), asked("a"), asked("a")])
    outputs = written(tmp_path / "out.jsonl", [answered("a"), answered("b")])
    assert len(tg.read([inputs, outputs], on_error="quarantine")) == 1
    assert json.loads(Path(f"{inputs}.quarantine.raw").read_text()) == asked("a")
