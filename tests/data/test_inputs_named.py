"""Scores in lists that name them, several rewards of several tasks, and what of a record was given and not sampled."""

import json
from pathlib import Path

import pytest

import tracegrad as tg
from messages import call, said, user
from tracegrad import config
from tracegrad.data import infer_fields, json_path
from tracegrad.errors import ArgumentError
from tracegrad.online.collector import GroupFilter
from tracegrad.trainer.steps import reward_column

SCORES = [
    {"name": "tone", "value": "good", "comment": "x"},
    {"name": "right", "score": 0, "valid": False},
    {"assessment_name": "right", "feedback": {"value": "correct"}, "valid": True},
    {"assessment_name": "wished", "expectation": {"value": "yes"}},
]


def test_a_list_of_scores_is_looked_into_by_their_names():
    assert json_path.scores_by_name(SCORES) == {"tone": "good", "right": "correct"}
    record = {"info": {"checks": SCORES}, "messages": [user("a"), said("b")]}
    assert json_path.get(record, "info.checks.right") == "correct"
    assert json_path.get(record, "info.checks.1.score") == 0
    assert dict(json_path.leaves({"info": record["info"]})) == {
        "info.checks.tone": "good",
        "info.checks.right": "correct",
    }
    found = infer_fields.infer(
        [record, {**record, "info": {"checks": [{**SCORES[2], "feedback": {"value": "wrong"}}]}}]
    )
    [reward] = [each for each in found.of("reward") if "right" in each.path]
    assert (reward.path, "mean 0.5, 2 values, 'correct' is 1, 'wrong' is 0" in reward.evidence) == (
        "info.checks.right",
        True,
    )
    assert tg.read([record], map={"reward": reward.path}).reward.tolist() == [1.0]


@pytest.mark.parametrize("value", [[1, 2], [{"name": "a"}], [{"name": "a", "value": {}}], ["name"], [], "name", None])
def test_other_lists_name_nothing(value):
    assert json_path.scores_by_name(value) is None


def rewarded(rows, names):
    told = {"rewards": rows, "reward_names": names}
    count = len(rows)
    cu = [2 * at for at in range(count + 1)]
    return tg.Sequences.from_arrays([5, 6] * count, cu, [float("nan"), -0.5] * count, [False, True] * count, **told)


def test_of_several_names_of_a_reward_each_trace_takes_the_first_that_it_has():
    none = float("nan")
    s = rewarded([[none, 1, none, 0.5], [none, none, 0.25, 1], [none, 0, 0.75, 1]], ("reward", "match", "rank", "a,b"))
    assert reward_column(s, ["match", "rank"]).tolist() == [1, 0.25, 0]
    assert reward_column(s, ["rank", "match"]).tolist() == [1, 0.25, 0.75]
    assert reward_column(s, ["a,b"]).tolist() == [0.5, 1, 1], "a name that has a comma"
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-001.*Did.*you.*mean.*match\?"):
        reward_column(s, ["mach"])
    assert reward_column(s, ["mach", "match"])[::2].tolist() == [1, 0], "a batch may lack one of them"
    records = [{"rewards": {"rank": 0.25, "a": 1}}, {"rewards": {"match": 1, "rank": 0}}, {"rewards": {"match": none}}]
    assert GroupFilter(("match", "rank")).rewards_of_records(records)[:2].tolist() == [0.25, 1]
    assert GroupFilter(("rank",)).rewards_of_traces(
        tg.read([{"messages": [user("a"), said("b")], **records[0]}])
    ).tolist() == [0.25]
    with pytest.raises(ArgumentError, match=r"TG-ONLINE-012.*match,rank"):
        GroupFilter(("match", "rank")).check([{"rewards": {"a": 1}}, {"rewards": {"a": none}}])


def diagnosed(records, tmp_path, **told):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return tg.doctor.diagnose(path, MODEL, **told)


MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


@pytest.mark.parametrize(
    ("scores", "flag"),
    [
        ([{"match": 1, "brief": 0.5}, {"match": 0, "brief": 0.25}, {"rank": 1, "brief": 1}, {"rank": 0}], "match,rank"),
        ([{"match": 1, "rank": 0.5}, {"match": 0}, {"rank": 1}, {"rank": 0.5}], "match"),
        ([{"a,b": 1}, {"a,b": 0}, {"rank": 1}, {"rank": 0}], '\'["a,b", "rank"]\''),
        ([{"match": 1, "rank": 1}, {"match": 1}, {"rank": 0}, {"rank": 0.5}], "rank"),
    ],
)
def test_traces_of_several_tasks_are_rewarded_each_by_its_own_score(scores, flag, tmp_path):
    rows = [{"messages": [user("a"), said(str(at))], "group": "g", "rewards": each} for at, each in enumerate(scores)]
    found = diagnosed(rows, tmp_path)
    assert f"--data.reward {flag} " in found.next_command + " "
    assert "--map.reward" not in found.next_command, "the records say it"
    assert found.rewards.endswith("; 1 groups of 4 traces")


def test_choices_that_are_a_group_hide_not_that_others_name_none(tmp_path):
    choices = [{"index": at, "finish_reason": "stop", "message": said(str(at))} for at in range(2)]
    several = {"request": {"messages": [user("a")]}, "response": {"choices": choices}, "score": [1, 0]}
    one = {"request": {"messages": [user("b")]}, "response": {"choices": choices[:1]}}
    rows = [several, *({**one, "score": at % 2} for at in range(4))]
    assert "--map.group prompt" in diagnosed(rows, tmp_path).next_command
    assert "--map.group" not in diagnosed([several, several, one], tmp_path).next_command


def test_a_null_among_answers_is_a_failed_call_and_the_others_stay():
    record = {"prompt": "2+2?", "completions": ["4", None, "5"], "rewards": [1, None, 0], "id": "r"}
    traces = tg.read([record], on_error="skip")
    assert [(trace.id, trace.reward, trace.messages[-1]["content"]) for trace in traces] == [
        ("r-0", 1.0, "4"),
        ("r-2", 0.0, "5"),
    ]
    assert traces.read_report.reasons == {"failed_call": 1}
    with pytest.raises(tg.TracegradError, match=r"TG-FORMAT-005.*null.*stands.*where.*an"):
        tg.read([record])


@pytest.mark.parametrize("prompt", [None, "a", [user("a")], [user("a"), said("b")]])
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "s"},)])
def test_what_both_sides_of_a_pair_begin_with_was_given(prompt, system):
    given = [*system, user("a"), said("b"), user("c")]
    record = {"prompt": prompt, "chosen": [*given, said("d")], "rejected": [*given, said("e"), user("f"), said("g")]}
    good, bad = tg.read([record])
    assert [each["content"] for each in good.messages] == [each["content"] for each in [*given, said("d")]]
    assert [each["content"] for each in bad.messages[len(given) :]] == ["e", "f", "g"]
    assert (len(good.generations), len(bad.generations)) == (1, 2)
    assert good.group == bad.group
    [same, _] = tg.read([{**record, "rejected": record["chosen"]}])
    assert (len(same.generations), same.reward) == (1, 0.5)


def test_a_system_message_of_both_sides_stands_before_a_prompt_that_they_do_not_hold():
    sides = {side: [{"role": "system", "content": "s"}, said(side)] for side in ("chosen", "rejected")}
    good, _ = tg.read([{"prompt": "a", **sides}])
    assert sorted(each["content"] for each in good.messages) == ["a", "chosen", "s"]


def span(name, parent, talk, answer):
    inputs, outputs = {"messages": talk}, {"choices": [{"index": 0, "finish_reason": "stop", "message": said(answer)}]}
    told = {"spanInputs": json.dumps(inputs), "spanOutputs": json.dumps(outputs)}
    return {"span_id": name, "parent_span_id": parent, "attributes": told}


def test_of_a_tree_of_spans_the_calls_below_a_tool_are_no_part_of_the_conversation():
    first, inner = [user("a")], [user("shorten it")]
    later = [*first, said("b"), user("c")]
    tool = {"span_id": "t", "parent_span_id": "r", "attributes": {}}
    spans = [span("1", "r", first, "b"), tool, span("2", "t", inner, "x"), span("3", "r", later, "d")]
    [trace] = tg.read([{"info": {"id": 1}, "data": {"spans": spans}}])
    assert [each["content"] for each in trace.messages] == ["a", "b", "c", "d"]
    assert len(trace.generations) == 2
    spans[2]["parent_span_id"] = "r"
    with pytest.raises(tg.TracegradError, match=r"TG-FORMAT-044.*info.*data"):
        tg.read([{"info": {"id": 1}, "data": {"spans": spans}}])


def test_words_of_another_tokenizer_that_usage_counts_otherwise_are_no_lost_chunks(tmp_path):
    content = [{"token": "\N{SNOWMAN}\N{SNOWMAN}", "logprob": -0.5, "bytes": None}]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": said("\N{SNOWMAN}\N{SNOWMAN}"),
        "logprobs": {"content": content},
    }
    response = {"choices": [choice], "usage": {"completion_tokens": 30}}
    rows = [{"request": {"messages": [user("a")]}, "response": response, "reward": at} for at in range(2)]
    found = diagnosed(rows, tmp_path, map=config.FieldMap(group="prompt"))
    names = {each.name for each in found.findings}
    assert "wrong_tokenizer" in names
    assert "lost_chunks" not in names
    assert found.next_command.startswith("tracegrad train ")


def test_the_name_of_a_reward_counts_more_than_where_it_stands():
    rows = [{**call([user(str(at))], "b"), "feedback": {"brief": at % 2, "correct": 1 - at % 2}} for at in range(4)]
    assert [each.path for each in infer_fields.infer(rows).of("reward")[:2]] == ["feedback.correct", "feedback.brief"]
    rows = [{**call([user(str(at))], "b"), "outcome": {"success": at % 2, "reward": at % 2}} for at in range(4)]
    assert infer_fields.infer(rows).of("reward")[0].path == "outcome.reward"


def model_event(span, text, asked="a", role=None):
    choice = {"message": {"role": "assistant", "content": text}, "stop_reason": "stop"}
    output = {"model": "m", "choices": [choice]}
    return {"event": "model", "span_id": span, "role": role, "input": [user(asked)], "output": output, "tools": []}


def test_what_a_scorer_or_a_tool_asks_of_a_model_is_no_part_of_a_sample():
    opened = [
        {"event": "span_begin", "id": "s", "type": "solver", "parent_id": None},
        {"event": "span_begin", "id": "t", "type": "tool", "parent_id": "s"},
        {"event": "span_begin", "id": "u", "type": None, "parent_id": "t"},
        {"event": "span_begin", "id": "g", "type": "scorer", "parent_id": None},
    ]
    asked = [("s", "b"), ("t", "w"), ("u", "x"), ("g", "y")]
    events = [*opened, *(model_event(span, text) for span, text in asked), model_event("s", "z", role="grader")]
    sample = {"id": 1, "epoch": 1, "input": "a", "messages": [], "output": {}, "scores": {"right": {"value": "C"}}}
    [trace] = tg.read([{**sample, "events": events}])
    assert [each["content"] for each in trace.messages] == ["a", "b"]
    [old] = tg.read([{**sample, "events": [model_event(None, "b")]}])
    assert [each["content"] for each in old.messages] == ["a", "b"], "logs of older versions name no span"


def test_a_request_that_no_answer_stands_beside_is_no_conversation():
    talk = [user("a"), said("b"), user("c")]
    choices = {"choices": [{"index": 0, "finish_reason": "stop", "message": said("d")}]}
    [trace] = tg.read([{"sent": {"model": "m", "messages": talk}, "got": choices}])
    assert len(trace.messages) == 4
    with pytest.raises(tg.TracegradError, match=r"TG-FORMAT-005.*503"):
        tg.read([{"sent": {"model": "m", "messages": talk}, "got": None, "error": "503"}])
    with pytest.raises(tg.TracegradError, match=r"TG-FORMAT-044.*asking.*error"):
        tg.read([{"asking": {"model": "m", "messages": talk}, "error": "503"}])
    assert len(tg.read([{"state": {"model": "m", "talk": [*talk, said("d")]}}])) == 1
    assert len(tg.read([{"model": "m", "talk": talk}])) == 1


@pytest.mark.parametrize("name", ["recompensa", "Bewertung", "оценка", "得分", "スコア"])
def test_a_reward_has_its_name_in_other_languages_too(name):
    rows = [{"messages": [user("a"), said("b")], name: at} for at in (-2.5, 1, 3)]
    assert [each.path for each in infer_fields.infer(rows).of("reward")] == [name]


def test_spans_whose_calls_go_on_one_another_are_one_conversation_whoever_began_them():
    talk = [user("a"), said("b"), user("c"), said("d"), user("e")]
    steps = [span(str(at), f"step{at}", talk[: 2 * at + 1], "bdf"[at]) for at in range(3)]
    [trace] = tg.read([{"data": {"spans": steps}}])
    assert len(trace.generations) == 3
    guard = span("g", "guard", [user("Is it safe: a")], "yes")
    agent = [span(str(at), "r", talk[: 2 * at + 1], "bdf"[at]) for at in range(3)]
    [trace] = tg.read([{"data": {"spans": [guard, *agent]}}])
    assert [each["content"] for each in trace.messages] == [*"abcdef"]
