"""Arrow tables, Parquet files and datasets: the same traces as the same rows written as JSONL."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Data
from tracegrad.data import read
from tracegrad.data.arrow import from_arrow
from tracegrad.data.arrow_files import ParquetStream
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.prepare import prepare

ROWS = [
    {
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.25],
        "reward": 1.0,
        "index": 7,
        "group_index": None,
    },
    {"tokens": [5, 6, 7], "response_length": 1, "rollout_log_probs": [-1.0], "index": 8, "group_index": 3},
    {"tokens": [9], "response_length": 1, "rollout_log_probs": [float("nan")], "reward": -1.0, "index": 9},
]


def parts(traces):
    """What a trace says, without its bytes."""
    return [
        (t.id, t.group, t.reward, [(g.token_ids.tolist(), g.prompt_token_ids.tolist()) for g in t.generations])
        for t in traces
    ], [g.logprobs.tolist() for t in traces for g in t.generations]


def same(left, right):
    (heads, logprobs), (other_heads, other_logprobs) = parts(left), parts(right)
    assert heads == other_heads
    for one, other in zip(logprobs, other_logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    "table",
    [
        lambda: pa.Table.from_pylist(ROWS),
        lambda: pa.Table.from_pylist([ROWS[0], *ROWS]).slice(1),
        lambda: pa.Table.from_pylist(ROWS).combine_chunks().to_batches()[0],
        lambda: dataset(ROWS),
        lambda: dataset([ROWS[0], *reversed(ROWS)]).select([3, 2, 1]),
        lambda: dataset(ROWS).with_format("torch"),
    ],
    ids=["table", "slice", "batch", "dataset", "selection", "formatted"],
)
def test_rows_are_read_as_the_same_rows_in_json(table):
    same(from_arrow(table()), Traces.from_records(ROWS))


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint32()])
@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list])
@pytest.mark.parametrize("real", [pa.float32(), pa.float64()])
def test_every_width_of_column_gives_the_same_numbers(kind, wrap, real):
    table = pa.table(
        {
            "tokens": pa.array([row["tokens"] for row in ROWS], wrap(kind)),
            "response_length": [row["response_length"] for row in ROWS],
            "rollout_log_probs": pa.array([row["rollout_log_probs"] for row in ROWS], wrap(real)),
        }
    )
    ours = [g for trace in from_arrow(table) for g in trace.generations]
    assert [g.token_ids.tolist() for g in ours] == [[3, 4], [7], [9]]
    assert [g.logprobs.dtype for g in ours] == [np.float32] * 3
    np.testing.assert_array_equal(np.concatenate([g.logprobs for g in ours]), np.float32([-0.5, -0.25, -1, np.nan]))


def test_a_fixed_width_and_a_half_precision_column_are_read():
    logprobs = pa.array([np.float16([-0.5, -0.25])], pa.list_(pa.float16()))
    table = pa.table({"tokens": pa.array([[1, 2]], pa.list_(pa.int32(), 2)), "response_length": [2]})
    trace = from_arrow(table.append_column("rollout_log_probs", logprobs))[0]
    assert trace.generations[0].token_ids.tolist() == [1, 2]
    assert trace.generations[0].logprobs.tolist() == [-0.5, -0.25]


def test_messages_lose_the_keys_that_arrow_fills_with_null():
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": []}]
    trace = from_arrow(pa.Table.from_pylist([{"messages": messages}]))[0]
    assert trace.messages == [{"role": "user", "content": "?"}, {"role": "assistant", "content": None}]


def test_a_parquet_file_is_streamed_in_batches(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    stream = ParquetStream(path, batch=2)
    batches = list(stream)
    assert [len(batch) for batch in batches] == [2, 1]
    same(Traces.concatenate(batches), Traces.from_records(ROWS))
    assert (stream.read_report.records, stream.read_report.formats["slime"][0]) == (3, 3)
    write(Traces.concatenate(batches), tmp_path / "rows.jsonl")
    same(read(tmp_path / "rows.jsonl"), Traces.from_records(ROWS))


def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path):
    path = tmp_path / "rows.parquet"
    bad = {**ROWS[0], "response_length": 9}
    pq.write_table(pa.Table.from_pylist([ROWS[1], bad, ROWS[2]]), path)
    with pytest.raises(FormatError, match=r"TG-FORMAT-075.*rows\.parquet:2.*9"):
        list(ParquetStream(path))
    stream = ParquetStream(path, on_error="skip")
    assert [trace.id for part in stream for trace in part] == ["8", "9"]
    assert (stream.read_report.bad, stream.read_report.traces) == (1, 2)
    assert "rows.parquet:2" in stream.read_report.errors[0]
    with pytest.raises(ArgumentError, match="TG-DATA-001"):
        ParquetStream(path, on_error="quarantine")


def test_a_file_that_only_begins_as_parquet_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ReadError, match="TG-DATA-010"):
        list(ParquetStream(path))
    with pytest.raises(ReadError, match=r"TG-DATA-010.*rows\.parquet"):
        read(path)


def test_what_is_no_table_is_refused():
    with pytest.raises(ArgumentError, match="TG-DATA-009"):
        from_arrow(ROWS)


def test_prepare_takes_a_parquet_file_and_gives_the_same_tokens(tmp_path, example):
    tokenizer = Tokenizer.from_pretrained(example / "model")
    traces = read(example / "traces.jsonl.zst", limit=64)
    single = align(traces[[i for i, trace in enumerate(traces) if len(trace.generations) == 1]], tokenizer)
    rows = [slime_row(single, branch) for branch in range(single.branches)]
    pq.write_table(pa.Table.from_pylist([row for row in rows if row]), tmp_path / "rows.parquet")
    account = prepare(str(tmp_path / "rows.parquet"), example / "model", Data(), tmp_path / "out")
    assert account.traces == len([row for row in rows if row]) > 10
    assert account.exact == account.recorded > 100
    again = Sequences.load(tmp_path / "out")
    assert again.ids.tolist() == [i for row in rows if row for i in row["tokens"]]
    assert again.rollout_logprobs[again.trainable].tolist() == [
        x for row in rows if row for x in row["rollout_log_probs"]
    ]


def slime_row(sequences, branch):
    """A branch as slime would keep it, where its sampled tokens stand at its end and all are known."""
    here = slice(sequences.cu_seqlens[branch], sequences.cu_seqlens[branch + 1])
    trainable = sequences.trainable[here]
    count = int(trainable.sum())
    if count == 0 or not trainable[-count:].all():
        return None
    return {
        "tokens": sequences.ids[here].tolist(),
        "response_length": count,
        "rollout_log_probs": sequences.rollout_logprobs[here][-count:].tolist(),
        "index": branch,
    }
