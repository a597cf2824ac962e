"""Where records stand: in arrays, in lists within a record, and behind the first records of a file."""

import json

import pytest

import tracegrad as tg
from spoil import MODEL
from tracegrad.doctor import diagnose
from tracegrad.errors import FormatError

GOOD = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "reward": 1.0}
BAD = {**GOOD, "reward": [1]}
FAILED = {
    "id": "f",
    "call_type": "acompletion",
    "model_parameters": {},
    "messages": GOOD["messages"][:1],
    "status": "failure",
    "error_str": "Error code: 429 - slow down",
    "response": {},
}


@pytest.fixture
def written(tmp_path):
    def write(value, name="runs.json"):
        path = tmp_path / name
        lines = value if name.endswith("jsonl") else [value]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return path

    return write


def test_a_record_of_an_array_on_one_line_is_named_by_its_number(written):
    path = written([GOOD, GOOD, BAD, GOOD])
    traces = tg.read(path, on_error="skip")
    assert [trace.id for trace in traces] == [f"{path}:1 record {at}" for at in (1, 2, 4)]
    assert traces[2].location == (str(path), 1)
    assert traces.read_report.errors[0].split(": ", 1)[1].startswith(f"{path}:1 record 3: ")
    with pytest.raises(FormatError, match=r"TG-FORMAT-021.*runs\.json:1.*record.*3"):
        tg.read(path)
    with pytest.raises(FormatError, match=r"TG-READ-006.*runs\.json:1.*3"):
        tg.read(path, map={"reward": "reward"})


def test_a_record_of_a_list_in_an_object_is_named_by_its_number(written):
    path = written({"project": "x", "rows": [GOOD, BAD, GOOD]})
    traces = tg.read(path, on_error="skip")
    assert [trace.id for trace in traces] == [f"{path}:1 record 1", f"{path}:1 record 3"]
    assert traces.read_report.errors[0].split(": ", 1)[1].startswith(f"{path}:1 record 2: ")


def test_the_doctor_and_what_is_put_aside_name_the_record_of_an_array(written, tmp_path):
    path = written([GOOD, GOOD, BAD])
    tg.read(path, on_error="quarantine", quarantine=tmp_path / "aside")
    (row,) = map(json.loads, (tmp_path / "aside.quarantine.jsonl").read_text().splitlines())
    assert (row["line"], row["record"]) == (1, 3)
    (bad,) = [each for each in diagnose(str(path), MODEL).findings if each.name == "bad_records"]
    assert str(bad.hits.first) == f"{path}:1 record 3"


def test_an_array_that_breaks_off_names_the_record_that_is_lost(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(json.dumps([GOOD, GOOD])[:-40])
    report = tg.read(path, on_error="skip").read_report
    assert (report.traces, report.errors[0].split(": ")[1]) == (1, f"{path}:1 record 2")


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize(
    ("record", "says"),
    [
        (FAILED, "the call failed: Error code: 429 - slow down"),
        ({"request": {"messages": GOOD["messages"][:1]}, "response": {"error": {"message": "busy"}}}, "busy"),
        ({"messages": GOOD["messages"][:1], "output": None, "error": "too many requests"}, "too many requests"),
        ({"custom_id": "r", "response": {"status_code": 500, "body": {"error": {"message": "late"}}}}, "late"),
    ],
)
def test_a_failed_call_is_counted_with_its_own_words_wherever_it_stands(written, first, record, says):
    rows = [GOOD] * 41
    rows[first] = record
    stream = tg.stream(written(rows, "log.jsonl"), on_error="skip")
    assert sum(map(len, stream)) == 40
    assert stream.read_report.reasons == {"failed_call": 1}
    assert says in stream.read_report.errors[0]
    assert "         1 call failed: no answer in it" in stream.lines()


def test_records_of_another_form_behind_the_first_ones_are_read_in_their_place(written):
    spoken = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "id": "s"}
    kept = {"messages": GOOD["messages"][:1], "output": "5", "id": "o"}
    rows = [*[GOOD] * 40, spoken, BAD, kept, GOOD]
    path = written(rows, "mixed.jsonl")
    traces = tg.read(path, on_error="skip")
    assert [trace.id for trace in traces][39:] == [f"{path}:40", "s", "o", f"{path}:44"]
    assert traces[41].messages[-1]["content"] == "5"
    assert traces.read_report.reasons == {"wrong_type": 1}
    with pytest.raises(FormatError, match=r"TG-FORMAT-021.*mixed\.jsonl:42"):
        tg.read(path)
    assert [trace.id for trace in tg.read(rows, on_error="skip")][40:42] == ["s", "o"]
