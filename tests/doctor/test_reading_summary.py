"""The totals of what was read equal counts of the file that do not use the readers."""

import gzip
import json
from pathlib import Path

import pytest

from messages import said, user, written
from tracegrad.cli import main
from tracegrad.doctor import diagnose

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "examples" / "quickstart" / "model"
GOLDEN = TESTS / "golden"
STRANGERS = TESTS / "data" / "strangers"
TRUTHS = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*.truth.json"))


def totals(path, **options):
    return diagnose(path, MODEL, **options).summary.as_dict()


def added(producers):
    return {name: sum(each[name] for each in producers.values()) for name in next(iter(producers.values()))}


@pytest.mark.parametrize("name", TRUTHS)
def test_totals_of_golden_files_are_those_of_their_truths(name):
    truths = json.loads((GOLDEN / name).read_text())
    turns = [turn for truth in truths for turn in truth.get("generations", [truth])]
    counts = added(totals(GOLDEN / name.replace(".truth.json", ".jsonl"))["producers"])
    # The core alone reads the first choice; the other choices of a response are conversations too.
    others = sum(truth.get("unused_choices", 0) for truth in truths)
    assert (counts["conversations"], counts["calls"]) == (len(truths) + others, len(turns) + others)
    if not others:
        assert counts["with_logprobs"] == sum(each is not None for turn in turns for each in turn.get("logprobs") or ())


def records(path):
    """The records of a file of JSON, or the items of its only list."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        return [json.loads(line) for line in lines if line.strip()] if lines[0] != "[" else None
    return whole if isinstance(whole, list) else next(each for each in whole.values() if isinstance(each, list))


def entries(value):
    """The number of objects with a token and its logprob, also in JSON and events as text, without alternatives."""
    if isinstance(value, str):
        texts = (
            [value] if value[:1] in ("{", "[") else [line[6:] for line in value.splitlines() if line[:7] == "data: {"]
        )
        try:
            return sum(entries(json.loads(text)) for text in texts)
        except ValueError:
            return 0
    if isinstance(value, dict):
        below = sum(entries(each) for key, each in value.items() if key != "top_logprobs")
        return below + ("logprob" in value and "token" in value)
    return sum(map(entries, value)) if isinstance(value, list) else 0


def roles(*names):
    """A count of the objects of a record whose role, type or speaker is one of these."""

    def count(value):
        if isinstance(value, dict):
            is_one = any(value.get(key) in names for key in ("role", "type", "from") if isinstance(value.get(key), str))
            return 1 if is_one else sum(map(count, value.values()))
        return sum(map(count, value)) if isinstance(value, list) else 0

    return count


ONE = lambda record: 1  # noqa: E731
COUNTS = {
    # name: (conversations of a record, calls of a record, records without a call)
    "camel_sharegpt.jsonl.gz": (ONE, roles("gpt"), None),
    "distilabel_dpo.json.gz": (lambda record: 2, lambda record: 2, None),
    "dspy_history.jsonl.gz": (ONE, ONE, None),
    "http_wire.jsonl.gz": (ONE, ONE, None),
    "langchain_app.jsonl.gz": (ONE, roles("ai"), None),
    "langsmith.jsonl.gz": (
        lambda record: record["run_type"] == "llm",
        lambda record: record["run_type"] == "llm",
        ("records of langsmith without a call", lambda record: record["run_type"] != "llm"),
    ),
    "litellm.jsonl.gz": (ONE, ONE, None),
    "litellm_callback.json.gz": (ONE, ONE, None),
    "llamaindex_events.jsonl.gz": (
        lambda record: "response" in record,
        lambda record: "response" in record,
        ("records of span without a call", lambda record: "response" not in record),
    ),
    "openai_calls.jsonl.gz": (ONE, ONE, None),
    "openai_choices.jsonl.gz": (
        lambda record: len(record["response"]["choices"]),
        lambda record: len(record["response"]["choices"]),
        None,
    ),
    "pydantic_ai.jsonl.gz": (ONE, ONE, None),
    "sse_wire.jsonl.gz": (ONE, ONE, None),
    "texts.json.gz": (ONE, roles("assistant"), None),
    "fifth/curator.jsonl.gz": (ONE, ONE, None),
    "fourth/lc_threads.jsonl.gz": (ONE, roles("ai"), None),
    "fourth/rated_pairs.jsonl.gz": (lambda record: 2, lambda record: 2, None),
    "third/camel_sharegpt.json.gz": (ONE, roles("gpt", "function_call"), None),
    "third/langgraph_threads.jsonl.gz": (ONE, roles("ai"), None),
    "third/langsmith_runs.jsonl.gz": (
        lambda record: record["run_type"] == "llm",
        lambda record: record["run_type"] == "llm",
        ("records of langsmith without a call", lambda record: record["run_type"] != "llm"),
    ),
    "third/litellm.jsonl.gz": (ONE, ONE, None),
    "third/openai_calls.jsonl.gz": (
        lambda record: len(record["response"]["choices"]),
        lambda record: len(record["response"]["choices"]),
        None,
    ),
    "third/streams.jsonl.gz": (ONE, ONE, None),
}
SAMPLED = {"langsmith.jsonl.gz": lambda record: record["outputs"]["generations"][0][0]["generation_info"]}
"""The part of a call with its own answer, if a record repeats those of earlier calls."""


@pytest.mark.parametrize("name", COUNTS)
def test_totals_of_files_of_producers_are_those_of_their_json(name):
    conversations, calls, without_call = COUNTS[name]
    found, rows = totals(STRANGERS / name), records(STRANGERS / name)
    counts = added(found["producers"])
    assert counts["conversations"] == sum(map(conversations, rows))
    assert counts["calls"] == sum(map(calls, rows))
    sampled = SAMPLED.get(name, lambda record: record)
    assert counts["with_logprobs"] == sum(entries(sampled(row)) for row in rows if conversations(row))
    assert found["left_out"] == ({} if without_call is None else {without_call[0]: sum(map(without_call[1], rows))})


def test_requests_without_an_answer_are_said_to_be_only_that(tmp_path):
    rows = [{"messages": [user("a")]}, {"messages": [user("b")]}, {"messages": [user("a"), said("b")]}]
    lines = diagnose(written(tmp_path / "chat.jsonl", [*rows, {"prompt": "a", "response": "b"}]), MODEL).summary.lines()
    assert "2 of the conversations are only requests: they have no answer to train" in lines[2]
    assert sum("only requests" in line for line in lines) == 1


def test_rewards_groups_temperatures_and_what_is_left_out_are_counted(tmp_path, capsys):
    turn = {**said("b"), "token_ids": [5, 2], "logprobs": [-0.5, None]}
    call = {"request": {"messages": [user("a")], "temperature": 0.5}, "response": {"choices": [{"message": turn}]}}
    rows = [
        {"messages": [user("a"), turn], "reward": 0.5, "group": "g"},
        {"messages": [user("a"), said("b")], "rewards": {"x": None}, "group": "h"},
        {"messages": [user("a"), said("b")], "rewards": {"x": 1}, "group": "g"},
    ]
    path = written(tmp_path / "chat.jsonl", rows)
    assert totals(path) == {
        "producers": {
            "chat": {
                "conversations": 3,
                "calls": 3,
                "without_answer": 0,
                "sampled_tokens": 2,
                "with_ids": 2,
                "with_logprobs": 1,
                "calls_without_tokens": 2,
                "sampling_known": 0,
                "rewards": 2,
                "groups": 2,
            }
        },
        "left_out": {},
    }
    assert not diagnose(path, MODEL).summary.lines(), "a file in a form of tracegrad has no summary"
    mixed = totals(written(tmp_path / "mixed.jsonl", [*rows, {"prompt": "a", "response": "b"}, call]))["producers"]
    conversations = {name: each["conversations"] for name, each in mixed.items()}
    assert conversations == {"chat": 3, "prompt_response": 1, "call": 1}
    other = written(tmp_path / "runs.jsonl", [{**call, "x": 1}, {"run_type": "chain", "inputs": {}}, {"messages": []}])
    assert main(["doctor", str(path), str(other), "--model", str(MODEL), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)["summary"]
    assert added(found["producers"])["sampling_known"] == 1
    assert found["left_out"] == {"bad records (incomplete)": 1, "records of langsmith without a call": 1}
    main(["doctor", str(path), str(other), "--model", str(MODEL)])
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "summary chat: 3 conversations (2 with a reward) in 2 groups, 3 calls (0 with a temperature), 2 recorded" in out
    )
    assert "tokens (100% with ids, 50% with logprobs), 2 calls are text only" in out
    assert "left out: 1 bad records (incomplete), 1 records of langsmith without a call" in out
