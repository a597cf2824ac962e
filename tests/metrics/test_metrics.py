"""Metrics have a definition each, sums have denominators, and rows reach their sinks."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

import generate_docs
from tracegrad import metrics
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.integrations import metrics as peers
from tracegrad.metrics import Rows, Sums

ROW = {"step": 1, "loss": 0.5, "ope": 0.4, "ope_low": 0.3, "ope_high": 0.5, "ope_reliable": 1}


def test_the_names_peers_use_are_there_with_their_ratio():
    table = {metric.name: metric for metric in metrics.METRICS}
    assert len(table) == len(metrics.METRICS)
    assert table["mean_importance_ratio"].ratio == "theta / rollout"
    assert table["rollout_logprob_coverage"].per == "tokens"
    assert {"reward_std", "frac_reward_zero_std", "entropy"} <= set(table)  # TRL's
    assert table["rollout_logprob_coverage_all"].per == "tokens"
    assert "clip_fraction" in table


def test_the_page_shows_the_tables():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert generate_docs.with_tables(page, generate_docs.TABLES) == page, "run: python tools/generate_docs.py"


def test_a_page_that_leaves_a_table_out_is_refused():
    with pytest.raises(ArgumentError, match="one, two"):
        generate_docs.with_tables("<!-- table: one --><!-- end -->", {"one": metrics.REWARDS, "two": metrics.REWARDS})


def test_no_two_rows_of_a_table_bear_one_name():
    for rows in (metrics.METRICS, *peers.PEERS.values()):
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)


def test_parts_of_two_definitions_do_not_add():
    rows, logprobs = Rows.of([0, 1]), np.array([-1.0, -2.0])
    token = peers.as_verl(logprobs, logprobs, rows, rollout_is="token")
    with pytest.raises(ArgumentError, match="TG-METRIC-003"):
        token + peers.as_verl(logprobs, logprobs, rows, rollout_is="sequence")
    with pytest.raises(ArgumentError, match=r"TG-METRIC-002.*m"):
        Sums.of(counts={"n": 1}) + Sums.of(counts={"m": 1})


def test_moments_are_those_of_numpy_and_merge():
    values = np.random.default_rng(0).normal(3.0, 0.5, 1000)
    first, rest = (metrics.moments("x", part, low=2.5, high=3.5) for part in (values[:300], values[300:]))
    found = metrics.Moments(first + rest, "x")
    assert found.n == 1000
    assert found.mean() == pytest.approx(values.mean(), rel=1e-14)
    assert found.deviation(1) == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert found.clamped_deviation() == pytest.approx(values.clip(2.5, 3.5).std(), rel=1e-12)
    assert (found.smallest, found.largest) == (values.min(), values.max())
    assert (found.share("above"), found.share("below")) == ((values > 3.5).mean(), (values < 2.5).mean())
    assert math.isnan(metrics.Moments(metrics.moments("x", [1.0]), "x").deviation(1))


def test_rewards_are_counted_by_group_and_merge():
    reward = np.array([1.0, 1.0, 0.0, math.nan, 0.5, 0.5, 0.5, 2.0])
    group = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    found = metrics.Rewards.of(reward[:4], group[:4]) + metrics.Rewards.of(reward[4:], group[4:])
    named = found.values()
    # known: 1, 1, 0, .5, .5, .5, 2: sum 5.5; groups 0 and 2 are flat, group 1 has one known reward: 4 of 8 traces
    assert named["reward"] == pytest.approx(5.5 / 7)
    assert named["reward_std"] == pytest.approx(np.nanstd(reward, ddof=1))
    assert (named["frac_reward_zero_std"], named["frac_no_reward"]) == (0.5, 1 / 8)
    assert found.all_reduce(lambda array, op: array).values() == named
    with pytest.raises(ArgumentError, match="TG-METRIC-011"):
        metrics.Rewards.of([1.0], [0, 1])


def test_rows_are_those_of_the_padded_array():
    rows = Rows.padded(np.array([[1, 0, 1], [0, 0, 0]], bool))
    assert (rows.count, rows.positions, rows.lengths.tolist()) == (2, 6, [2.0, 0.0])
    assert rows.mean(np.array([1.0, 3.0])).tolist() == [2.0, 0.0]
    assert rows.where(np.array([False, True])).lengths.tolist() == [1.0, 0.0]
    with pytest.raises(ArgumentError, match=r"TG-METRIC-001.*3.*2"):
        Rows.of([0, 3], rows=2)


def test_peers_refuse_what_they_have_no_number_for():
    rows, one = Rows.of([0]), np.array([-1.0])
    with pytest.raises(ArgumentError, match="TG-INTEG-012"):
        peers.as_verl(one, np.array([np.nan]), rows)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-013.*seq_max_k1"):
        peers.as_verl(one, one, rows, rollout_rs={"seq_max_k1": (None, 1.0)})
    with pytest.raises(ArgumentError, match="TG-INTEG-011"):
        peers.as_verl(one, one, rows, rollout_is="turn")
    with pytest.raises(ArgumentError, match="TG-INTEG-008"):
        peers.as_skyrl(one, np.array([np.nan]), rows)
    with pytest.raises(ArgumentError, match="TG-INTEG-007"):
        peers.as_art(one, np.zeros(2), rows, advantages=one)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-010.*2"):
        peers.as_trl_rewards([[1.0]], [0], names=["a", "b"])


def test_a_mean_is_taken_over_all_parts_and_not_of_their_means():
    tally = metrics.MetricAccumulator()
    tally.add("entropy", 1.0, 1)
    tally.add("entropy", 1.0, 3)  # (1 + 1) / 4, where the mean of the means would be 2/3
    tally.maximum("ratio_max", 2.0)
    tally.maximum("ratio_max", 1.5)
    assert tally.means() == {"entropy": 0.5, "ratio_max": 2.0}


def test_a_mean_over_nothing_is_nan():
    tally = metrics.MetricAccumulator()
    tally.add("entropy", 0.0, 0)
    assert math.isnan(tally.means()["entropy"])


def test_a_number_without_definition_is_refused():
    with pytest.raises(ArgumentError, match="TG-METRIC-012"):
        metrics.MetricAccumulator().add("vibes", 1.0, 1)


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


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"loss": 1}', '{"step": "1"}', "[" * 100_000, "\udcff"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(ReadError, match=r"TG-METRIC-005.*metrics\.jsonl:2"):
        metrics.read_rows(path)


def test_a_new_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7}\n')
    metrics.JsonLines(path).log({"step": 1})
    assert metrics.read_rows(path) == [{"step": 1}]


def test_a_full_disk_is_one_error_with_its_cure():
    sink = metrics.JsonLines.__new__(metrics.JsonLines)
    sink.path, sink._file = Path("/dev/full"), open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(TracegradError, match=r"TG-METRIC-004.*No.*left.*device.*1"):
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
    assert "loss 0.2500  ope 0.400 (0.300-0.500)  ratio_mean 1.500  clip_fraction 25.0%  tokens_per_s 10" in last
    assert last.endswith("\n")


def test_where_there_is_no_terminal_progress_comes_in_lines():
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    for total, printed in ((20, range(1, 21)), (21, [21])):  # within 10 s: each step of a short run, or the last alone
        progress = metrics.Progress(total, stream=stream, clock=lambda: 0.0)
        for step in range(total + 1):
            progress.log({**ROW, "step": step})
        progress.close()
        lines = stream.getvalue().splitlines()[-len(printed) :]
        assert [line.split("  ")[:3] for line in lines] == [
            [f"step {step}/{total}", "loss 0.5000", "ope 0.400 (0.300-0.500)"] for step in printed
        ]


def test_a_line_every_ten_seconds_has_the_time_left_and_long_stages_have_lines_too():
    pytest.importorskip("tqdm")
    now, stream = [0.0], io.StringIO()
    watch = metrics.Stopwatch(clock=lambda: now[0])
    progress = metrics.Progress(30, 10, stream=stream, clock=lambda: now[0])
    progress._watch = watch  # without the thread, which calls the same method
    with watch("old"):
        for second, done in ((9, 0), (12, 1), (21, 3), (25, 4)):
            now[0] = second
            watch.advance(done, 4)
            progress.report_stage()  # not at 9: shorter than ten seconds; not at 21: nine after the last line
    for second, step in ((30, 11), (36, 12), (40, 13), (47, 14)):
        now[0] = second
        progress.log({"step": step, "loss": 0.5})
    progress.report_stage()  # no stage runs
    assert stream.getvalue().splitlines() == [
        "step 10/30  computing old logprobs  25 %  1 of 4 steps  36 s left",
        "step 10/30  computing old logprobs  100 %  4 of 4 steps",
        "step 12/30  loss 0.5000  5 min 24 s left",  # 2 of 20 steps in 36 s leave 18 * 18 s = 324 s
        "step 14/30  loss 0.5000  3 min 8 s left",  # 47 / 4 * 16 = 188 s
    ]


def test_a_stage_that_is_followed_says_how_much_is_done():
    now, done = [0.0], [0]
    watch = metrics.Stopwatch(clock=lambda: now[0])
    with watch("align"):
        watch.follow(lambda: done[0], 400, "conversations")
        now[0], done[0] = 20.0, 100
        assert watch.line() == "aligning  25 %  100 of 400 conversations  60 s left"
    with watch("align"):
        now[0] = 50.0
        assert watch.line() == "aligning  30 s so far"


def test_stages_that_report_themselves_are_left_to_themselves():
    now = [0.0]
    watch = metrics.Stopwatch(clock=lambda: now[0])
    assert watch.line() is None
    with watch("read"):
        now[0] = 30.0
        assert watch.line(["read"]) is None
        assert watch.line() == "reading  30 s so far"
        with watch("checkpoint"):
            now[0] = 40.0
            assert watch.line() == "saving a checkpoint  10 s so far"
    assert (watch.line(), watch.seconds) == (None, {"checkpoint": 10.0, "read": 40.0})


def test_where_no_trace_has_a_ratio_no_effective_sample_is_told():
    assert "ope_ess_fraction" not in metrics.step_metrics_text({**ROW, "ope_ess_fraction": 0.0})
    assert "ope_ess_fraction 4%" in metrics.step_metrics_text({**ROW, "ope_ess_fraction": 0.04})


def test_where_the_effective_sample_is_too_small_the_line_says_so():
    assert "ope unreliable" in metrics.step_metrics_text({**ROW, "ope_reliable": 0})
    assert "ope unreliable" in metrics.step_metrics_text({"ope": 0.1, "ope_reliable": 0})  # one group: no interval


@pytest.mark.parametrize(("first", "said"), [(1, "ope no longer reliable"), (0, "ope unreliable")])
def test_a_value_is_no_longer_known_only_where_it_was(first, said):
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    progress = metrics.Progress(2, stream=stream)
    progress.log({**ROW, "step": 1, "ope_reliable": first})
    progress.log({**ROW, "step": 2, "ope_reliable": 0})
    progress.close()
    assert said in stream.getvalue()


def test_rows_are_plain_json(tmp_path):
    sink = metrics.JsonLines(tmp_path / "m.jsonl")
    sink.log(ROW)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == ROW
