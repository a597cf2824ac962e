"""Metrics have a definition each, sums have denominators, and rows reach their sinks."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from tracegrad import metrics
from tracegrad.errors import ArgumentError, TracegradError

ROW = {"step": 1, "loss": 0.5, "value": 0.4, "value_low": 0.3, "value_high": 0.5, "value_known": 1}


def test_the_names_peers_use_are_there_with_their_ratio():
    table = {metric.name: metric for metric in metrics.METRICS}
    assert len(table) == len(metrics.METRICS)
    assert table["mean_importance_ratio"].ratio == "theta / rollout"
    assert table["frac_old_logprobs_valid"].per == "terms"
    assert table["frac_old_logprobs_valid_all"].per == "tokens"
    assert "clip_fraction" in table


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert metrics.table() in page


def test_a_mean_is_taken_over_all_parts_and_not_of_their_means():
    tally = metrics.Tally()
    tally.add("entropy", 1.0, 1)
    tally.add("entropy", 1.0, 3)  # (1 + 1) / 4, where the mean of the means would be 2/3
    tally.maximum("ratio_max", 2.0)
    tally.maximum("ratio_max", 1.5)
    assert tally.means() == {"entropy": 0.5, "ratio_max": 2.0}


def test_a_mean_over_nothing_is_nan():
    tally = metrics.Tally()
    tally.add("entropy", 0.0, 0)
    assert math.isnan(tally.means()["entropy"])


def test_a_number_without_definition_is_refused():
    with pytest.raises(ArgumentError, match="not in the table"):
        metrics.Tally().add("vibes", 1.0, 1)


def test_each_row_is_on_disk_at_once_and_valid_json(tmp_path):
    sink = metrics.JsonLines(tmp_path / "metrics.jsonl")
    sink.log({"step": 1, "kl": math.nan, "ratio_max": math.inf, "loss": -0.25})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "kl": null, "ratio_max": null, "loss": -0.25}\n'


def test_a_resumed_run_drops_the_rows_it_will_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = metrics.JsonLines(path)
    for step in range(5):
        sink.log({"step": step})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    metrics.JsonLines(path, keep_to_step=3).log({"step": 4})
    assert [row["step"] for row in metrics.read_rows(path)] == [0, 1, 2, 3, 4]


def test_a_new_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n')
    metrics.JsonLines(path).log({"step": 1})
    assert metrics.read_rows(path) == [{"step": 1}]


def test_a_full_disk_is_one_error_with_its_cure():
    sink = metrics.JsonLines.__new__(metrics.JsonLines)
    sink.path, sink._file = Path("/dev/full"), open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(TracegradError, match=r"No space left.*--resume"):
        sink.log({"step": 1})


def test_the_live_line_keeps_the_last_value_and_ends_in_a_newline():
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = metrics.Progress(3, stream=stream)
    progress.log(ROW)
    progress.log({"step": 2, "loss": 0.25, "ratio_mean": 1.5, "clip_fraction": 0.25, "tokens_per_s": 10.0})
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    assert "2/3" in last
    assert "loss 0.2500  value 0.400 (0.300-0.500)  ratio 1.500  clip 25.0%  10 tok/s" in last
    assert last.endswith("\n")


def test_where_there_is_no_terminal_progress_comes_in_lines():
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    progress = metrics.Progress(2, stream=stream)
    for step in (1, 2):
        progress.log({**ROW, "step": step})
    progress.close()
    assert stream.getvalue() == "step 2/2  loss 0.5000  value 0.400 (0.300-0.500)\n"  # within 10 s, the last alone


def test_where_the_effective_sample_is_too_small_the_line_says_so():
    assert "value no longer known" in metrics.progress_line({**ROW, "value_known": 0})
    assert "value no longer known" in metrics.progress_line({"value": 0.1, "value_known": 0})  # one group: no interval


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = metrics.TensorBoard(tmp_path)
    sink.log({**ROW, "kl": math.nan})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "kl" not in events.Tags()["scalars"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5)]


def test_rows_are_plain_json(tmp_path):
    sink = metrics.JsonLines(tmp_path / "m.jsonl")
    sink.log(ROW)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == ROW
