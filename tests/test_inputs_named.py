"""Scores in lists that name them, several rewards of several tasks, and what of a record was given and not sampled."""

import json
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import config
from tracegrad.errors import ArgumentError
from tracegrad.inputs import candidates, paths, sessions
from tracegrad.learner.feed import reward_column
from tracegrad.online.signal import Signal

SCORES = [
    {"name": "tone", "value": "good", "comment": "x"},
    {"name": "right", "score": 0, "valid": False},
    {"assessment_name": "right", "feedback": {"value": "correct"}, "valid": True},
    {"assessment_name": "wished", "expectation": {"value": "yes"}},
]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_a_list_of_scores_is_looked_into_by_their_names():
    assert paths.named(SCORES) == {"tone": "good", "right": "correct"}
    record = {"info": {"checks": SCORES}, "messages": [user("a"), said("b")]}
    assert paths.at(record, "info.checks.right") == "correct"
    assert paths.at(record, "info.checks.1.score") == 0
    assert dict(paths.leaves({"info": record["info"]})) == {"info.checks.tone": "good", "info.checks.right": "correct"}
    found = candidates.find([record, {**record, "info": {"checks": [{**SCORES[2], "feedback": {"value": "wrong"}}]}}])
    [reward] = [each for each in found.of("reward") if "right" in each.path]
    assert (reward.path, "mean 0.5, 2 values, 'correct' is 1, 'wrong' is 0" in reward.why) == (
        "info.checks.right",
        True,
    )
    assert tg.read([record], map={"reward": reward.path}).reward.tolist() == [1.0]


@pytest.mark.parametrize("value", [[1, 2], [{"name": "a"}], [{"name": "a", "value": {}}], ["name"], [], "name", None])
def test_other_lists_name_nothing(value):
    assert paths.named(value) is None


def rewarded(rows, names):
    told = {"rewards": rows, "reward_names": names}
    count = len(rows)
    cu = [2 * at for at in range(count + 1)]
    return tg.Sequences.from_arrays([5, 6] * count, cu, [float("nan"), -0.5] * count, [False, True] * count, **told)


def test_of_several_names_of_a_reward_each_trace_takes_the_first_that_it_has():
    none = float("nan")
    s = rewarded([[none, 1, none, 0.5], [none, none, 0.25, 1], [none, 0, 0.75, 1]], ("reward", "match", "rank", "a,b"))
    assert reward_column(s, "match, rank").tolist() == [1, 0.25, 0]
    assert reward_column(s, "rank,match").tolist() == [1, 0.25, 0.75]
    assert reward_column(s, "a,b").tolist() == [0.5, 1, 1], "a name that has a comma"
    with pytest.raises(ArgumentError, match=r"no trace has such a reward. Did you mean match\?"):
        reward_column(s, "mach")
    assert reward_column(s, "mach,match")[::2].tolist() == [1, 0], "a batch may lack one of them"
    records = [{"rewards": {"rank": 0.25, "a": 1}}, {"rewards": {"match": 1, "rank": 0}}, {"rewards": {"match": none}}]
    assert Signal("match,rank").of_records(records)[:2].tolist() == [0.25, 1]
    assert Signal("rank").of_traces(tg.read([{"messages": [user("a"), said("b")], **records[0]}])).tolist() == [0.25]
    with pytest.raises(ArgumentError, match=r"the rewards are a, and data.reward is 'match,rank'"):
        Signal("match,rank").check([{"rewards": {"a": 1}}, {"rewards": {"match": none, "rank": none}}])


def diagnosed(records, tmp_path, **told):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return tg.doctor.examine(path, MODEL, **told)


MODEL = Path(__file__).parents[1] / "examples" / "quickstart" / "model"


@pytest.mark.parametrize(
    ("scores", "flag"),
    [
        ([{"match": 1, "brief": 0.5}, {"match": 0, "brief": 0.25}, {"rank": 1, "brief": 1}, {"rank": 0}], "match,rank"),
        ([{"match": 1, "rank": 0.5}, {"match": 0}, {"rank": 1}, {"rank": 0.5}], "match"),
        ([{"match": 1, "rank": 1}, {"match": 1}, {"rank": 0}, {"rank": 0.5}], "rank"),
    ],
)
def test_traces_of_several_tasks_are_rewarded_each_by_its_own_score(scores, flag, tmp_path):
    rows = [{"messages": [user("a"), said(str(at))], "group": "g", "rewards": each} for at, each in enumerate(scores)]
    found = diagnosed(rows, tmp_path)
    assert f"--data.reward {flag} " in found.following + " "
    assert "--map.reward" not in found.following, "the records say it"
    assert found.rewards.endswith("; 1 groups of 4 traces")


def test_choices_that_are_a_group_hide_not_that_others_name_none(tmp_path):
    choices = [{"index": at, "finish_reason": "stop", "message": said(str(at))} for at in range(2)]
    several = {"request": {"messages": [user("a")]}, "response": {"choices": choices}, "score": [1, 0]}
    one = {"request": {"messages": [user("b")]}, "response": {"choices": choices[:1]}}
    rows = [several, *({**one, "score": at % 2} for at in range(4))]
    assert "--map.group prompt" in diagnosed(rows, tmp_path).following
    assert "--map.group" not in diagnosed([several, several, one], tmp_path).following


def test_a_null_among_answers_is_a_failed_call_and_the_others_stay():
    record = {"prompt": "2+2?", "completions": ["4", None, "5"], "rewards": [1, None, 0], "id": "r"}
    traces = tg.read([record], on_error="skip")
    assert [(trace.id, trace.reward, trace.messages[-1]["content"]) for trace in traces] == [
        ("r-0", 1.0, "4"),
        ("r-2", 0.0, "5"),
    ]
    assert traces.read_report.reasons == {"failed_call": 1}
    with pytest.raises(tg.TracegradError, match="null stands where an answer of the model should be"):
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
    with pytest.raises(tg.TracegradError, match="a record with the keys info, data"):
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
    found = diagnosed(rows, tmp_path, map=config.Map(group="prompt"))
    names = {each.name for each in found.findings}
    assert "wrong_tokenizer" in names
    assert "lost_chunks" not in names
    assert found.following.startswith("tracegrad train ")


def call(asked, answer, model="m", **more):
    request = {"model": model, "messages": asked, **more}
    choices = [{"index": 0, "finish_reason": "stop", "message": said(answer)}]
    return {"request": request, "response": {"model": model, "choices": choices}}


TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]}


@pytest.mark.parametrize("aside", [{"model": "guard"}, {"model": "m", "tools": None}])
def test_calls_of_a_session_that_are_none_of_its_conversation_stand_apart(aside):
    again = [user("a"), said("b"), user("c")]
    rows = [
        {**call([user("Is this safe: a")], "yes", **aside), "sid": 1, "score": 1},
        {**call([user("a")], "b", **TOOLS), "sid": 1, "score": None},
        {**call(again, "d", **TOOLS), "sid": 1, "score": 0},
        {**call([user("Is this safe: c")], "no", **aside), "sid": 1, "reward": 1},
        {**call([user("a")], "b"), "sid": 2, "score": 1},
    ]
    told = config.Map(session="sid", reward="score")
    stream = tg.inputs.stream(rows, map=told)
    traces = tg.inputs.together(stream)
    assert [trace.id for trace in traces] == ["1", "1#2", "2"]
    assert [len(trace.generations) for trace in traces] == [2, 2, 1]
    assert [trace.reward for trace in traces] == [0, None, 1]
    assert [each["content"] for each in traces[0].messages] == ["a", "b", "c", "d"]
    said_aside = "2 calls of another model, or with other tools, that begin otherwise than their conversation"
    assert [line.strip() for line in stream.lines() if said_aside in line] == [
        f"{said_aside} stand apart, without a reward"
    ]


def test_a_call_of_another_model_that_goes_on_is_of_the_conversation():
    again = [user("a"), said("b"), user("c")]
    rows = [{**call([user("a")], "b"), "sid": 1}, {**call(again, "d", "other"), "sid": 1}]
    [trace] = tg.read(rows, map={"session": "sid"})
    assert len(trace.generations) == 2
    # A clock in the system prompt makes no other conversation.
    for at, row in enumerate(rows):
        row["request"]["messages"].insert(0, {"role": "system", "content": f"It is {at} o'clock."})
        row["request"]["model"] = "m"
    [trace] = tg.read(rows, map={"session": "sid"})
    assert len(trace.generations) == 2


def test_choices_of_one_response_are_no_calls_of_one_conversation():
    choices = [{"index": at, "finish_reason": "stop", "message": said(str(at))} for at in range(3)]
    several = {"request": {"messages": [user("a")]}, "response": {"choices": choices}, "sid": "s", "score": [1, 0, 1]}
    again = {**call([user("a"), said("0"), user("b")], "c"), "sid": "s"}
    traces = tg.read([several, again, {**several, "sid": "t"}], map={"session": "sid", "reward": "score"})
    assert [(trace.id, trace.reward, len(trace.generations)) for trace in traces] == [
        *(("s", 1.0, 2), ("s-1", 0.0, 1), ("s-2", 1.0, 1)),
        *(("t", 1.0, 1), ("t-1", 0.0, 1), ("t-2", 1.0, 1)),
    ]


def responses(name, asked, text, previous=None, **more):
    output = [
        {"id": f"m{name}", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ]
    request = {"model": "m", "instructions": "be brief", "input": asked}
    request |= {"previous_response_id": previous} if previous else {}
    response = {"id": name, "object": "response", "status": "completed", "output": output, "model": "m"}
    return {"kind": "call", "req": request, "resp": response, **more}


def test_calls_of_the_responses_api_go_on_by_the_id_of_the_response_before():
    rows = [
        responses("r1", "a", "b", review="rv_000001", n=0),
        responses("x1", [{"role": "user", "content": "a"}], "z", review="rv_000002", n=0),
        responses("r2", [{"role": "user", "content": "c"}], "d", "r1", review="rv_000001", n=1),
        {"kind": "grade", "review": "rv_000001", "grade": 0.5, "by": {"name": "rubric"}},
        {"kind": "grade", "review": "rv_000002", "grade": 0.25, "by": {"name": "rubric"}},
    ]
    found = candidates.find(rows)
    assert found.flags(["reward", "session"]) == ["--map.reward", "grade", "--map.session", "review"]
    assert found.joined
    traces = tg.read(rows, map={"reward": "grade", "session": "review", "group": "prompt"})
    assert [trace.reward for trace in traces] == [0.5, 0.25]
    assert [each["content"] for each in traces[0].messages] == ["be brief", *"abcd"]
    assert [len(trace.generations) for trace in traces] == [2, 1]
    assert traces[0].group == traces[1].group
    by_id = tg.read(rows[:3], map={"session": "prefix"})
    assert [[each["content"] for each in trace.messages][1:] for trace in by_id] == [[*"abcd"], ["a", "z"]]
    # What it goes on is not in the file: the prompt is not known.
    [lone] = tg.read(rows[2:3])
    assert "a" not in [each["content"] for each in lone.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"sid": "a", "grade": "soon"},
        {"sid": "a", "note": 1},
        {"grade": 1, "prompt": "a"},
        {"grade": 1, "Messages": "a"},
        {"grade": 1, "steps": [{"a": 1}]},
        {"grade": 1, "info": {"steps": []}},
    ],
)
def test_what_may_hold_more_than_a_verdict_is_refused_by_its_keys(row):
    with pytest.raises(tg.TracegradError, match="a record with the keys"):
        tg.read([row])


def test_the_name_of_a_reward_counts_more_than_where_it_stands():
    rows = [{**call([user(str(at))], "b"), "feedback": {"brief": at % 2, "correct": 1 - at % 2}} for at in range(4)]
    assert [each.path for each in candidates.find(rows).of("reward")[:2]] == ["feedback.correct", "feedback.brief"]
    rows = [{**call([user(str(at))], "b"), "outcome": {"success": at % 2, "reward": at % 2}} for at in range(4)]
    assert candidates.find(rows).of("reward")[0].path == "outcome.reward"


def test_a_session_is_a_key_that_the_rows_with_the_rewards_have_too():
    rows = []
    for at in range(3):
        rows.append({"id": f"root{at}", "run_type": "chain", "trace_id": f"root{at}", "inputs": {}, "outputs": {}})
        rows[-1]["feedback_stats"] = {"right": {"avg": at % 2, "n": 1}}
        for turn in range(2):
            kinds = ("human", "ai", "human")[: 2 * turn + 1]
            inputs = {"messages": [[{"type": kind, "data": {"content": "b"}} for kind in kinds]]}
            outputs = {"generations": [[{"message": {"type": "ai", "data": {"content": "b"}}}]]}
            asked = {"id": f"llm{at}{turn}", "run_type": "llm", "parent_run_id": f"root{at}", "trace_id": f"root{at}"}
            rows.append({**asked, "inputs": inputs, "outputs": outputs})
    found = candidates.find(rows)
    assert [each.path for each in found.of("session")][:2] == ["trace_id", "parent_run_id"]
    assert found.flags(["reward", "session"])[-1] == "trace_id"
    assert tg.read(rows, map={"reward": found.of("reward")[0].path, "session": "trace_id"}).reward.tolist() == [0, 1, 0]


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
    with pytest.raises(tg.TracegradError, match="the call failed: 503"):
        tg.read([{"sent": {"model": "m", "messages": talk}, "got": None, "error": "503"}])
    with pytest.raises(tg.TracegradError, match="a record with the keys asking, error"):
        tg.read([{"asking": {"model": "m", "messages": talk}, "error": "503"}])
    assert len(tg.read([{"state": {"model": "m", "talk": [*talk, said("d")]}}])) == 1
    assert len(tg.read([{"model": "m", "talk": talk}])) == 1


@pytest.mark.parametrize("name", ["recompensa", "Bewertung", "оценка", "得分", "スコア"])
def test_a_reward_has_its_name_in_other_languages_too(name):
    rows = [{"messages": [user("a"), said("b")], name: at} for at in (-2.5, 1, 3)]
    assert [each.path for each in candidates.find(rows).of("reward")] == [name]


def test_what_tells_no_conversation_from_what_stands_beside_stays_together():
    rows = [{**call([user("Title: a")], "T", "t"), "sid": 1, "reward": 1}, {**call([user("a")], "b"), "sid": 1}]
    [trace] = tg.read(rows, map={"session": "sid"})
    assert (len(trace.generations), trace.reward) == (2, 1.0)
    # With a second turn it is told, and the reward is its own, wherever it stands.
    rows.append({**call([user("a"), said("b"), user("c")], "d"), "sid": 1})
    traces = tg.read(rows, map={"session": "sid"})
    assert [(trace.id, len(trace.generations), trace.reward) for trace in traces] == [("1", 2, 1.0), ("1#2", 1, None)]
    # A judge is asked with all that was said, and begins otherwise.
    judge = {**call([user("Rate:"), *rows[2]["request"]["messages"]], "5", "judge"), "sid": 1, "reward": 0.5}
    traces = tg.read([*rows[1:], judge], map={"session": "sid"})
    assert [(trace.id, len(trace.generations), trace.reward) for trace in traces] == [("1", 2, 0.5), ("1#2", 1, None)]


def test_the_model_beside_messages_and_a_system_beside_them_tell_calls_apart_too():
    def row(model, system, talk, answer):
        request = {"model": model, "system": system, "messages": talk}
        response = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": answer}]}
        return {"request": request, "response": {**response, "model": model, "stop_reason": "end_turn"}, "sid": 1}

    again = [user("a"), said("b"), user("c")]
    rows = [row("opus", "Agent", [user("a")], "b"), row("haiku", "Guard", [user("a")], "safe")]
    traces = tg.read([*rows, row("opus", "Agent", again, "d")], map={"session": "sid"})
    assert [len(trace.generations) for trace in traces] == [2, 1]
    rows = [{"messages": [user("T"), said("t")], "model": "title", "sid": 1}]
    rows += [
        {"messages": [*talk, said(text)], "model": "m", "sid": 1} for talk, text in ((again[:1], "b"), (again, "d"))
    ]
    assert [len(trace.generations) for trace in tg.read(rows, map={"session": "sid"})] == [2, 1]


def test_responses_without_an_id_go_on_nothing():
    def row(asked, text):
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        return {"request": {"input": asked}, "response": {"object": "response", "output": output}, "sid": 1}

    [trace] = tg.read([row([user("a")], "b"), row([user("a"), said("b"), user("c")], "d")], map={"session": "sid"})
    assert [each["content"] for each in trace.messages] == [*"abcd"]
    # A call that goes on is of the conversation, whatever its model and tools are.
    rows = [responses("r1", "a", "b", sid=1), responses("r2", "c", "d", "r1", sid=1)]
    rows[1]["req"]["model"] = "mini"
    for how in ("sid", "prefix"):
        [trace] = tg.read(rows, map={"session": how})
        assert [each["content"] for each in trace.messages] == ["be brief", *"abcd"]


def test_a_conversation_that_would_become_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_BYTES", 2000)
    rows = [responses(f"r{at}", "a" * 50, "b", f"r{at - 1}" if at else None, sid=1) for at in range(9)]
    with pytest.raises(tg.TracegradError, match="previous_response_id is more than"):
        tg.read(rows, map={"session": "sid"})
    assert len(tg.read(rows[:3], map={"session": "sid"})) == 1


def test_spans_whose_calls_go_on_one_another_are_one_conversation_whoever_began_them():
    talk = [user("a"), said("b"), user("c"), said("d"), user("e")]
    steps = [span(str(at), f"step{at}", talk[: 2 * at + 1], "bdf"[at]) for at in range(3)]
    [trace] = tg.read([{"data": {"spans": steps}}])
    assert len(trace.generations) == 3
    guard = span("g", "guard", [user("Is it safe: a")], "yes")
    agent = [span(str(at), "r", talk[: 2 * at + 1], "bdf"[at]) for at in range(3)]
    [trace] = tg.read([{"data": {"spans": [guard, *agent]}}])
    assert [each["content"] for each in trace.messages] == [*"abcdef"]


def test_choices_are_of_no_session_that_is_called_like_them():
    choices = [{"index": at, "finish_reason": "stop", "message": said(str(at))} for at in range(2)]
    several = {"request": {"messages": [user("a")]}, "response": {"choices": choices}, "sid": "s", "score": [1, 0]}
    traces = tg.read(
        [several, {**call([user("b")], "c"), "sid": "s-1", "score": 1}], map={"session": "sid", "reward": "score"}
    )
    assert [(len(trace.generations), trace.reward) for trace in traces] == [(1, 1.0), (1, 0.0), (1, 1.0)]


@pytest.mark.parametrize(
    "row",
    [
        {"sid": "s", "transcript": "User: a\nAssistant: b", "score": 1},
        {"sid": "s", "user": "hi", "assistant": "there", "score": 1},
        {"sid": "s", "answer": "b", "score": 1},
        {"sid": "s", "reward": float("nan")},
        {"sid": "s", "text": "a" * 300, "score": 1},
        {"score": 1, "other": "s"},
    ],
)
def test_what_may_be_said_is_no_verdict_and_refused_in_sessions_too(row):
    with pytest.raises(tg.TracegradError, match=r"a record with the keys|the call failed"):
        tg.read([{**call([user("a")], "b"), "sid": "s"}, row], map={"session": "sid"})


def test_sessions_that_are_numbers_are_linked_and_the_name_of_a_model_is_none():
    rows = [{**call([user(str(at))], "b"), "session_id": at % 6, "model": "gpt-4o-mini"} for at in range(12)]
    rows += [{"session_id": at, "grade": at % 2, "model": "gpt-4o-mini"} for at in range(6)]
    assert candidates.find(rows).flags(["reward", "session"])[:4] == [
        "--map.reward",
        "grade",
        "--map.session",
        "session_id",
    ]


@pytest.mark.parametrize(
    "row", [{"messages": [user("a"), {**said("b"), "generation": "t"}]}, {"calls": [{"request": None, "response": {}}]}]
)
def test_odd_values_of_calls_end_no_reading(row):
    rows = [{**row, "sid": 1}, {**row, "sid": 1}, {**call([user("a")], "b"), "sid": 2}]
    assert len(tg.read(rows, map={"session": "sid"}, on_error="skip")) >= 1
    assert candidates.find(rows).records == 3
