"""Metrics that records bring with them: tool calls and what reward functions logged, by hand."""

import asyncio
import json

import pytest

import tracegrad as tg
from tracegrad.metrics import completions, tools
from tracegrad.online.rollout_metrics import add_logged_metrics, logged_metrics, tool_metrics
from tracegrad.online.rollout_workers import GroupScore
from tracegrad.rollout.run_agent import rollout_from_record


def traces(*metadata):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return tg.Traces.from_records([{"messages": said, "metadata": each} for each in metadata])


def test_calls_are_all_that_were_answered_and_failures_those_that_were_answered_by_an_error():
    # Two answered, one of them cut short; one unknown and one that raised; none called; none recorded.
    found = traces({"tools": {"called": 2, "cut": 1}}, {"tools": {"called": 0, "unknown": 1, "raised": 1}})
    assert tool_metrics(found) == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.5}
    assert tool_metrics(traces({"tools": {"called": 0}}, None)) == {
        "tools/call_frequency": 0.0,
        "tools/failure_frequency": 0.0,
    }
    assert tool_metrics(traces({}, None)) == {}


def test_the_mean_is_over_calls_of_log_metric_and_what_is_not_known_is_left_out():
    found = traces({"log_metric": {"accuracy": [1.0, 0.0], "seen": [None]}}, {}, {"log_metric": {"accuracy": [0.5]}})
    assert logged_metrics(found) == {"accuracy": 0.5}
    assert add_logged_metrics({"loss": 1.0}, {"loss": 2.0, "accuracy": 0.5}) == {
        "loss": 1.0,
        "log_metric/loss": 2.0,
        "accuracy": 0.5,
    }


def played(number, said):
    call = {
        "request": {"messages": [{"role": "user", "content": "2+2?"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]},
    }
    about = {"task": "2+2?", "ended": "done", "turns": 1, "seconds": 0.1}
    return rollout_from_record({"id": f"0-{number}", "calls": [call], "metadata": about}, "2+2?")


def test_what_functions_log_is_kept_in_the_records_of_their_group():
    def right(completions, log_metric, log_extra, **columns):
        log_metric("right", sum(text == "4" for text in completions))
        log_metric("right", 0.0)
        log_extra("object", [object if text == "4" else text for text in completions])
        return [1.0] * len(completions)

    score = GroupScore([right])
    group = [played(0, "4"), played(1, "five")]
    try:
        asyncio.run(score(group))
    finally:
        score.close()
    first, second = (json.loads(json.dumps(each.record["metadata"])) for each in group)
    assert first["log_metric"] == {"right": [1.0, 0.0]}
    assert "log_metric" not in second
    assert (first["log_extra"], second["log_extra"]) == ({"object": "<class 'object'>"}, {"object": "five"})
    assert first["ended"] == "done"


def test_a_column_of_another_length_fails_the_function_that_logged_it():
    def right(completions, log_extra, **columns):
        log_extra("said", completions[:1])
        return [1.0] * len(completions)

    score = GroupScore([right])
    group = [played(0, "4"), played(1, "five")]
    try:
        failures = asyncio.run(score(group))
    finally:
        score.close()
    assert "right logged 1 values of 'said' for 2 trajectories" in str(failures[0]["right"])
    assert group[0].record["reward"] is None


def test_lengths_by_hand():
    first = completions([3, 3, 5], [4, 10, 1], [False, True, False])
    second = completions([5], [9], [True])
    assert (first + second).values() == {
        "num_tokens": 40.0,
        "completions/mean_length": 6.0,
        "completions/min_length": 1.0,
        "completions/max_length": 10.0,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 2.5,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 4.0,
    }
    assert (tools([1, 2], [0, 1]) + tools([3], [0])).values()["tools/failure_frequency"] == pytest.approx(1 / 6)
    with pytest.raises(tg.errors.ArgumentError, match=r"TG-ARGS-002.*sampled"):
        completions([1], [1, 2], [False, False])
