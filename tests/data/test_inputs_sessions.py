"""Calls that are joined to a conversation, calls that become separate traces, and rows that have only a reward."""

import json

import pytest

import tracegrad as tg
from messages import call, said, user, written
from tracegrad import config
from tracegrad.data import infer_fields, sessions

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
    told = config.FieldMap(session="sid", reward="score")
    stream = tg.data.stream(rows, map=told)
    traces = tg.data.concatenate(stream)
    assert [trace.id for trace in traces] == ["1", "1#2", "2"]
    assert [len(trace.generations) for trace in traces] == [2, 2, 1]
    assert [trace.reward for trace in traces] == [0, None, 1]
    assert [each["content"] for each in traces[0].messages] == ["a", "b", "c", "d"]
    [line] = [line.strip() for line in stream.lines() if "split off" in line]
    differs = "their model or tools differ, and so do their first messages"
    assert line == f"2 calls are split off their conversation: {differs}. They have no reward"


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
    found = infer_fields.infer(rows)
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
    with pytest.raises(tg.TracegradError, match="TG-FORMAT-044"):
        tg.read([row])


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
    found = infer_fields.infer(rows)
    assert [each.path for each in found.of("session")][:2] == ["trace_id", "parent_run_id"]
    assert found.flags(["reward", "session"])[-1] == "trace_id"
    assert tg.read(rows, map={"reward": found.of("reward")[0].path, "session": "trace_id"}).reward.tolist() == [0, 1, 0]


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
    with pytest.raises(tg.TracegradError, match=r"TG-READ-006.*previous_response_id"):
        tg.read(rows, map={"session": "sid"})
    assert len(tg.read(rows[:3], map={"session": "sid"})) == 1
    monkeypatch.setattr(sessions, "MAX_RECORD_BYTES", 1000)
    with pytest.raises(tg.TracegradError, match=r"TG-READ-006: <records>:1: the calls of conversation '1' have 3,\d+ "):
        tg.read(rows, map={"session": "sid"})


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
    with pytest.raises(tg.TracegradError, match=r"TG-(READ-006|FORMAT-044).*:2: "):
        tg.read([{**call([user("a")], "b"), "sid": "s"}, row], map={"session": "sid"})


def test_sessions_that_are_numbers_are_linked_and_the_name_of_a_model_is_none():
    rows = [{**call([user(str(at))], "b"), "session_id": at % 6, "model": "gpt-4o-mini"} for at in range(12)]
    rows += [{"session_id": at, "grade": at % 2, "model": "gpt-4o-mini"} for at in range(6)]
    assert infer_fields.infer(rows).flags(["reward", "session"])[:4] == [
        "--map.reward",
        "grade",
        "--map.session",
        "session_id",
    ]
    models = ["gpt-4o-mini", "gpt-4o-large"]
    rows = [{**call([user(str(at))], "b"), "engine": models[at % 2]} for at in range(12)]
    rows += [{"grade": at % 2, "engine": models[at % 2]} for at in range(6)]
    assert infer_fields.infer(rows).of("session") == []


@pytest.mark.parametrize(
    "row", [{"messages": [user("a"), {**said("b"), "generation": "t"}]}, {"calls": [{"request": None, "response": {}}]}]
)
def test_odd_values_of_calls_end_no_reading(row):
    rows = [{**row, "sid": 1}, {**row, "sid": 1}, {**call([user("a")], "b"), "sid": 2}]
    assert len(tg.read(rows, map={"session": "sid"}, on_error="skip")) >= 1
    assert infer_fields.infer(rows).records == 3


def states(*texts, **more):
    """Return a record whose only content is the messages so far: user, assistant, user and so on."""
    return {"messages": [(said if at % 2 else user)(text) for at, text in enumerate(texts)], **more}


def test_records_of_all_messages_so_far_are_one_conversation():
    rows = [
        states("a"),
        states("a", "b"),
        states("a", "b", "c"),
        states("a", "b", "c", "d"),
        states("a", "b", "c", "d", rating=0.5),
        states("x", "b"),
        states("x", "b", "c", rating=1),
        states("y", "b"),
        states("y", "b", "c", "d", "e"),
        states("z", "b", "c"),
    ]
    stream = tg.data.stream(rows, map={"session": "prefix", "reward": "rating"})
    traces = tg.data.concatenate(stream)
    texts = [[each["content"] for each in trace.messages] for trace in traces]
    assert texts == [["a", "b", "c", "d"], ["x", "b"], ["y", "b", "c", "d"], ["z", "b", "c"]]
    assert [(len(trace.generations), trace.reward) for trace in traces] == [(2, 0.5), (1, 1.0), (2, None), (1, None)]
    assert "4 records are not calls, because another record has all their messages" in " ".join(stream.lines())


def test_states_that_differ_in_their_reward_or_tokens_or_file_stay_apart(tmp_path):
    twice = [states("a", "b", rating=0), states("a", "b", rating=1)]
    assert [trace.reward for trace in tg.read(twice, map={"session": "prefix", "reward": "rating"})] == [0, 1]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in files:
        path.write_text(json.dumps(states("a", "b")))
    assert len(tg.read(files, map={"session": "prefix"})) == 2
    for fields in ({"token_ids": [1]}, {"generation": {"token_ids": [1]}}):
        with_ids = states("a", "b")
        with_ids["messages"][1] |= fields
        assert len(tg.read([with_ids, with_ids], map={"session": "prefix"})) == 2
    calls = [call([user("a")], "b"), call([user("a")], "b")]
    assert len(tg.read(calls, map={"session": "prefix"})) == 2
    # It is unknown which of two conversations the reward of their common beginning belongs to.
    rows = [states("a", rating=1), states("a", "b"), states("a", "c")]
    traces = tg.read(rows, map={"session": "prefix", "reward": "rating"})
    assert [(len(trace.generations), trace.reward) for trace in traces] == [(0, 1.0), (1, None), (1, None)]
    assert [trace.reward for trace in tg.read(rows[:2], map={"session": "prefix", "reward": "rating"})] == [1.0]


@pytest.mark.parametrize("order", [{}, {"order": "at"}])
def test_records_of_all_messages_so_far_are_one_conversation_by_their_key_too(tmp_path, order):
    rows = [
        states("a", sid=1, at=0, rating=0.25),
        states("x", "b", sid=2, at=0),
        states("a", "b", sid=1, at=1),
        states("a", "b", "c", sid=1, at=2),
        states("a", "b", "c", "d", sid=1, at=3, reward=0.75),
        states("a", "b", "c", "d", sid=1, at=4, rating=0.5),
        states("x", "b", "c", sid=2, at=1, rating=1),
        states("y", "b", "c", "d", "e", sid=3, at=1),
        states("y", "b", sid=3, at=0),
        states("x", "b", sid=4, at=0),
    ]
    # Copies in another file are copies too, because they have the same key.
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path, part in zip(files, (rows[:4], rows[4:]), strict=True):
        path.write_text("\n".join(map(json.dumps, part)))
    for source in (rows, files):
        stream = tg.data.stream(source, map={"session": "sid", "reward": "rating", **order})
        traces = tg.data.concatenate(stream)
        texts = [[each["content"] for each in trace.messages] for trace in traces]
        assert texts == [["a", "b", "c", "d"], ["x", "b"], ["y", "b", "c", "d"], ["x", "b"]]
        assert [trace.id for trace in traces] == ["1", "2", "3", "4"]
        assert [len(trace.generations) for trace in traces] == [2, 1, 2, 1]
        assert [trace.reward for trace in traces] == [0.5, 1.0, None, None]
        lines = " ".join(stream.lines())
        assert "4 records are not calls, because another record has all their messages" in lines
        assert "2 rewards differ from an earlier one" in lines
        assert "several files" not in lines


@pytest.mark.parametrize(
    ("rows", "one_file", "two_files"),
    [
        ([states("a", "b"), states("x")], None, None),
        ([states("a", "b"), states("x", "b", "c")], None, None),
        ([states("a", "b"), states("x", "b")], 2, None),
        ([states("a", score=1), states("a", "b"), states("a", "c")], 2, None),
        ([call([user("a")], "b"), states("a", "b", "c", score=1)], 1, 1),
        ([states("a", score=1), call([user("a")], "b")], 1, 1),
        ([call([user("a")], "b"), states("x", "b")], 2, None),
        ([call([user("a")], "b"), call([user("x")], "b")], 2, 2),
        ([call([user("a")], "b"), call([user("a"), said("b"), user("c")], "d")], 2, 2),
    ],
)
def test_states_with_one_key_that_do_not_continue_one_another_are_refused(tmp_path, rows, one_file, two_files):
    rows = [{**row, "sid": "s"} for row in rows]
    ok = states("k", "b", sid="t")
    files = [written(tmp_path / f"{name}.jsonl", part) for name, part in (("a", [ok, *rows[:-1]]), ("b", rows[-1:]))]
    for source, turns in (([ok, *rows], one_file), (files, two_files)):
        options = {"map": {"session": "sid", "reward": "score"} if "score" in str(rows) else {"session": "sid"}}
        if turns is None:
            with pytest.raises(tg.TracegradError, match=r"TG-READ-006.*:2: its messages do not continue .* sid 's'"):
                tg.read(source, **options)
            traces = tg.read(source, **options, on_error="skip")
            assert (traces.read_report.bad, [trace.id for trace in traces]) == (len(rows), ["t"])
            continue
        stream = tg.data.stream(source, **options)
        [_, trace] = tg.data.concatenate(stream)
        assert (len(trace.generations), trace.reward) == (turns, 1.0 if "score" in str(rows) else None)
        is_mixed = "1 conversations have calls of several files that do not continue" in " ".join(stream.lines())
        assert is_mixed == (source is files and "'x'" in str(rows))


def test_values_without_a_conversation_and_values_that_differ_are_counted():
    rows = [
        {**call([user("a")], "b"), "sid": 1, "score": 0},
        {"sid": 1, "score": 1},
        {"sid": 2, "score": 1},
        {**states("x", "b"), "sid": 3, "reward": 1},
        {**states("x", "b"), "sid": 3},
    ]
    stream = tg.data.stream(rows, map={"session": "sid", "reward": "score"})
    assert [trace.reward for trace in tg.data.concatenate(stream)] == [1.0, 1.0]
    lines = [line.strip() for line in stream.lines()]
    assert "1 rewards are left out, because no call has their sid" in lines
    assert "1 rewards differ from an earlier one of their conversation: the last one counts" in lines


def test_the_own_reward_of_a_repeated_state_is_not_lost():
    rows = [states("a", "b"), states("a", "b", reward=1), states("x", "b", reward=0), states("x", "b", reward=1)]
    assert [trace.reward for trace in tg.read(rows, map={"session": "prefix"})] == [1.0, 0.0, 1.0]
    # An assistant message of the prompt is no answer.
    rows = [states("a", "b", "c"), {"messages": [*states("a", "b", "c", "d", "e")["messages"]]}]
    rows[1]["messages"][3]["sampled"] = False
    [trace] = tg.read(rows, map={"session": "prefix"})
    assert [trace.messages[each.message]["content"] for each in trace.generations] == ["b"]
