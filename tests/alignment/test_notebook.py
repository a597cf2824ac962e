"""What a notebook shows of objects, and Sequences as tables of pyarrow and pandas."""

import html.parser
import json

import numpy as np
import pyarrow as pa
import pytest

import tracegrad as tg
from tracegrad.alignment.ragged import Ragged
from tracegrad.doctor.examination import Diagnosis
from tracegrad.errors import ArgumentError

NAN = float("nan")
EVIL = "<script>alert(1)</script>\x1b[2J\u202e"


@pytest.fixture
def sequences():
    """Trace 0 has two branches of three tokens and one of no trained one; trace 1 has one branch of two."""
    return tg.Sequences.from_arrays(
        [5, 6, 7, 5, 6, 8, 9, 4],
        [0, 3, 6, 8],
        [NAN, -0.5, -0.25, NAN, NAN, -1.0, NAN, NAN],
        [False, True, True, False, False, True, False, False],
        trace=[0, 0, 1],
        group=[1, 0],
        rewards=[[1.0, NAN], [0.0, 3.0]],
        reward_names=("correct", "short"),
        turn=[-1, 0, 0, -1, -1, 1, -1, -1],
        version=[-1, 4, 4, -1, -1, 5, -1, -1],
        extras={"share": np.arange(8), "wide": np.zeros((8, 2)), "mask": Ragged(np.arange(9), np.ones(8))},
    )


def test_one_row_a_trace(sequences):
    table = sequences.to_arrow()
    assert table.to_pylist() == [
        {
            "trace": "0",
            "group": "1",
            "correct": 1.0,
            "short": None,
            "branches": 2,
            "tokens": 6,
            "terms": 3,
            "turns": 2,
            "logprob_kind": "processed",
            "temperature": None,
            "ending": "unknown",
            "findings": 0,
        },
        {
            "trace": "1",
            "group": "0",
            "correct": 0.0,
            "short": 3.0,
            "branches": 1,
            "tokens": 2,
            "terms": 0,
            "turns": 0,
            "logprob_kind": "processed",
            "temperature": None,
            "ending": "unknown",
            "findings": 0,
        },
    ]
    assert table["branches"].type == pa.int64()


def test_one_row_a_token(sequences):
    table = sequences.to_arrow("token")
    assert table["trace"].to_pylist() == ["0"] * 6 + ["1"] * 2
    assert table["branch"].to_pylist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert table["position"].to_pylist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert table["id"].to_pylist() == [5, 6, 7, 5, 6, 8, 9, 4]
    assert table["source"].to_pylist() == [
        "prompt", "sampled", "sampled", "prompt", "prompt", "sampled", "prompt", "prompt",
    ]  # fmt: skip
    assert table["trainable"].to_pylist() == sequences.trainable.tolist()
    assert table["rollout_logprob"].to_pylist() == [None, -0.5, -0.25, None, None, -1.0, None, None]
    assert table["turn"].to_pylist() == [None, 0, 0, None, None, 1, None, None]
    assert table["version"].to_pylist() == [None, 4, 4, None, None, 5, None, None]
    assert table["inv_temperature"].to_pylist() == [1.0] * 8
    assert table["share"].to_pylist() == list(range(8))
    assert not {"wide", "mask"} & set(table.column_names)


def test_the_table_of_what_was_aligned(example):
    """Against the records themselves: ids, rewards, groups, logprobs."""
    traces = tg.read(example / "traces.jsonl.zst", limit=6)
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(example / "model"))
    rows = sequences.to_arrow().to_pylist()
    assert [row["trace"] for row in rows] == [trace.id for trace in traces]
    assert [row["group"] for row in rows] == [trace.group for trace in traces]
    assert [row["turns"] for row in rows] == [len(trace.generations) for trace in traces]
    tokens = sequences.to_pandas("token")
    for trace in traces:
        sampled = tokens[(tokens.trace == trace.id) & tokens.trainable]
        recorded = np.concatenate([one.logprobs for one in trace.generations])
        assert sampled.rollout_logprob.to_numpy() == pytest.approx(recorded)
        assert set(sampled.alignment_level) <= {"T0", "T1", "T2", "T3"}


def test_conversations_as_a_completions_table(example, tmp_path):
    import pyarrow.parquet

    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    record = {
        "id": "a",
        "group": "g",
        "reward": 1.0,
        "rewards": {"correct": 1.0, "short": 0.5},
        "messages": [
            {"role": "user", "content": "2 × 3?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "token_ids": [1, 2], "logprobs": [-1, -2]},
            {"role": "tool", "content": "6", "tool_call_id": "c"},
            {"role": "assistant", "content": "6", "token_ids": [3], "logprobs": [-1]},
        ],
    }
    parts = [{"type": "text", "text": "?"}]
    other = {"id": "b", "rewards": {"short": 0.25}, "messages": [{"role": "user", "content": parts}]}
    traces = tg.Traces.from_records([record, other])
    pyarrow.parquet.write_table(traces.to_arrow(), tmp_path / "completions.parquet")
    first, second = pyarrow.parquet.read_table(tmp_path / "completions.parquet").to_pylist()
    assert first["trace"] == "a"
    assert first["prompt"] == [{"role": "user", "content": "2 × 3?", "more": None}]
    assert [each["role"] for each in first["completion"]] == ["assistant", "tool", "assistant"]
    assert json.loads(first["completion"][0]["more"]) == {"tool_calls": traces[0].messages[1]["tool_calls"]}
    assert json.loads(first["completion"][1]["more"]) == {"tool_call_id": "c"}
    assert (first["turns"], first["sampled"]) == (2, 3)
    assert second["completion"] == []
    assert second["group"] is None
    assert json.loads(second["prompt"][0]["more"])["content"] == parts
    assert [row["rewards/short"] for row in (first, second)] == [0.5, 0.25]
    assert [row["rewards/correct"] for row in (first, second)] == [1.0, None]
    read = tg.read(example / "traces.jsonl.zst", limit=5).to_pandas()
    assert (read.turns >= 1).all()
    assert all(one[0]["role"] == "assistant" for one in read.completion)


def test_a_wrong_row_kind_and_a_missing_package_are_said(sequences, monkeypatch):
    with pytest.raises(ArgumentError, match="TG-ALIGN-014"):
        sequences.to_arrow("turn")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match="TG-DATA-040"):
        sequences.to_arrow()


class Parts(html.parser.HTMLParser):
    """Tags and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not attrs

    def handle_data(self, data):
        self.text.append(data)


def shown():
    record = {"id": EVIL, "group": EVIL, "reward": 1, "messages": [{"role": "user", "content": "?"}]}
    traces = tg.Traces.from_records([record])
    arrays = tg.Sequences.from_arrays([5, 6], [0, 2], [NAN, -0.5], [False, True], rewards=[1.0], group=[0])
    [step] = tg.pack(arrays, np.ones(1), tokens_per_row=8)
    found = Diagnosis(EVIL, 1, 2, 3, ())
    return {
        "Traces": (traces, "Traces(1 traces, 1 groups)"),
        "Sequences": (arrays, "Sequences(1 traces, 1 branches, 2 tokens, 1 trainable, 0.000% inexact)"),
        "AlignmentReport": (arrays.alignment_report, "AlignmentReport(0 findings, rate=0.000%, 0 traces left out)"),
        "Step": (step, "Step(1 trained tokens, 1 traces, 1 groups; here 1 rows of 2 tokens)"),
        "Objective": (tg.presets.DAPO, None),
        "Recipe": (tg.recipes.find("DAPO"), None),
        "Diagnosis": (found, "Diagnosis(clean: 0 findings in 1 traces, 3 tokens to train)"),
    }


@pytest.mark.parametrize("name", shown())
def test_a_notebook_shows_it_short_and_without_markup_of_strangers(name):
    one, short = shown()[name]
    page = Parts(one._repr_html_())
    assert page.tags <= {"p", "table", "tr", "th", "td", "pre"}
    assert not any(char in "".join(page.text) for char in "\x1b\u202e")
    if short is None:
        assert "".join(page.text) == str(one)
    else:
        assert repr(one) == short
        assert page.text[0] == short


def test_what_tracegrad_has_is_what_completion_shows():
    assert dir(tg) == sorted(tg.__all__)
    assert all(hasattr(tg, name) for name in dir(tg))
    assert json.dumps(sorted(tg.__all__)) == json.dumps(tg.__all__)
