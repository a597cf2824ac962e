"""What a first look at what loggers and exports write must find: marks on some calls, JSON kept as text, no call."""

import json
from pathlib import Path

import pytest

from messages import written
from tracegrad.cli import main
from tracegrad.data import infer_fields
from tracegrad.data.formats import adapt

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def logged(opened):
    """Two calls a conversation, with a mark on the second alone; the response as an object, or as JSON text."""
    for number in range(8):
        messages = [{"role": "user", "content": f"{number % 4} × lamp?"}]
        for turn in range(2):
            answer = {"role": "assistant", "content": str(number + turn)}
            response = {"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]}
            yield {
                "conversation_id": f"c{number}",
                "request": {"messages": list(messages)},
                "response": response if opened else json.dumps(response),
                "thumbs_up": number < 3 if turn else None,
            }
            messages += [answer, {"role": "user", "content": "Sure?"}]


@pytest.mark.parametrize("opened", [True, False])
def test_a_mark_on_some_calls_and_conversations_are_found_where_responses_are_text(opened, tmp_path):
    found = infer_fields.infer([written(tmp_path / "calls.jsonl", logged(opened))])
    assert found.flags(infer_fields.FIELDS) == [
        *("--map.reward", "thumbs_up", "--map.group", "prompt", "--map.session", "conversation_id")
    ]
    assert '8 of 16 records have true or false "thumbs_up"' in found.lines(["reward"])[0]
    assert found.joined == 8


def runs():
    """A chain with its feedback and the call below it, as LangSmith's bulk export has them: objects as JSON text."""
    for number in range(8):
        said = {"type": "ai", "data": {"content": str(number)}}
        inputs = {"messages": [[{"type": "human", "data": {"content": f"{number % 4} × lamp?"}}]]}
        above = {"id": f"r{number}", "trace_id": f"r{number}", "parent_run_id": None}
        stats = {"correctness": {"n": 1, "avg": float(number < 3)}}
        yield {**above, "run_type": "chain", "inputs": "{}", "outputs": "{}", "feedback_stats": json.dumps(stats)}
        yield {
            **{"id": f"l{number}", "trace_id": f"r{number}", "parent_run_id": f"r{number}", "run_type": "llm"},
            **{"inputs": json.dumps(inputs), "feedback_stats": None},
            "outputs": json.dumps({"generations": [[{"text": str(number), "message": said}]]}),
        }


@pytest.mark.parametrize("users", [0, 3])
def test_runs_of_a_bulk_export_get_the_feedback_that_stands_on_their_chain(users, tmp_path, capsys):
    """Also where each run names its user's session too, which several conversations share."""
    all_runs = list(runs())
    for number, run in enumerate(all_runs if users else ()):
        run["extra"] = {"metadata": {"session_id": f"u{number // 2 % users}"}}
    path = written(tmp_path / "runs.jsonl", all_runs)
    assert main(["doctor", path, "--model", str(MODEL)]) == 1
    out = capsys.readouterr().out
    assert '8 calls share "trace_id" with records without a call: --map.session trace_id' in out
    flags = ["--map.reward", "feedback_stats.correctness.avg", "--map.group", "prompt", "--map.session", "trace_id"]
    assert " ".join(flags) in out
    main(["doctor", path, "--model", str(MODEL), *flags])
    out = capsys.readouterr().out
    assert "8 traces" in out
    assert "traces without a reward" not in out


def test_a_key_that_only_some_calls_share_with_records_beside_is_no_session(tmp_path):
    rows = [dict(row, trace_id="other") if row["id"] == "l0" else row for row in runs()]
    assert infer_fields.infer([written(tmp_path / "runs.jsonl", rows)]).of("session") == []


def test_a_file_of_records_without_a_call_is_not_clean(tmp_path, capsys):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "runs.parquet"
    parquet.write_table(arrow.Table.from_pylist([row for row in runs() if row["run_type"] == "chain"]), path)
    assert main(["doctor", str(path), "--model", str(MODEL)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "it contains no trace (convert 8 records of langsmith, 8 of them hold no call" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_pair_of_written_out_dialogues_is_two_answers_to_what_they_share():
    before = "\n\nHuman: Which shelf?\n\nAssistant: 14B\n\nHuman: Sure?"
    good, bad = adapt({"chosen": f"{before}\n\nAssistant: Yes.", "rejected": f"{before}\n\nAssistant: Human: no"}) or []
    assert [each["role"] for each in good["messages"]] == ["user", "assistant", "user", "assistant"]
    assert (good["messages"][1]["sampled"], good["messages"][3]["content"]) == (False, "Yes.")
    assert (good["group"], good["reward"], bad["reward"]) == (bad["group"], 1.0, 0.0)
    assert bad["messages"][3]["content"] == "Human: no"
    [plain] = adapt({"prompt": "Human: hi", "response": "So:\n\nHuman: hi"}) or []
    assert [each["content"] for each in plain["messages"]] == ["Human: hi", "So:\n\nHuman: hi"]
    [begun] = adapt({"prompt": "\n\nHuman: hi\n\nAssistant:", "output": " Hello."}) or []
    assert [each["role"] for each in begun["messages"]] == ["user", "assistant"]
