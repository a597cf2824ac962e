"""Rewards, groups and conversations from where strangers keep them: by paths, counted and said, never guessed."""

import json

import numpy as np
import pytest

import tracegrad as tg
from messages import said, user
from tracegrad.config import FieldMap, load, to_toml
from tracegrad.doctor.checks_trace import prompt_hashes
from tracegrad.errors import ArgumentError, FormatError


def one(**more):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "token_ids": [19, 2]}]
    return {"messages": said, **more}


def mapped(*records, **told):
    stream = tg.stream(list(records), map=told)
    return tg.Traces.concatenate(list(stream)), "\n".join(stream.lines())


@pytest.mark.parametrize(
    ("value", "reward", "kind"),
    [
        (0.25, 0.25, "a number"),
        (True, 1.0, "true or false"),
        ("0.5", 0.5, "a number as text"),
        ("false", 0.0, "a number as text"),
        ('{"x": 1}', None, None),
    ],
)
def test_a_reward_is_a_number_a_boolean_or_a_number_as_text(value, reward, kind):
    if reward is None:
        with pytest.raises(FormatError, match=r"TG-DATA-043: <records>:1: metadata\.score .*map\.reward"):
            mapped(one(metadata={"score": value}), reward="metadata.score")
        return
    traces, said = mapped(one(metadata={"score": value}), one(), reward="metadata.score")
    assert traces[0].reward == reward
    assert traces[1].reward is None
    assert f"reward is metadata.score: {kind} in 1 of 2 records" in said


def test_an_object_is_a_reward_for_each_of_its_names():
    traces, said = mapped(one(scores={"style": "0.5", "right": True, "none": None}), reward="scores")
    assert {name: value for name, value in traces[0].rewards.items() if value == value} == {"style": 0.5, "right": 1.0}
    assert "an object in 1 of 1 records, 0.5 to 1, named none, right, style" in said
    with pytest.raises(FormatError, match=r"TG-DATA-043.*scores\.style"):
        mapped(one(scores={"style": [1]}), reward="scores")


def test_paths_go_through_keys_with_dots_lists_and_json_as_text():
    record = one(**{"a.b": [{"v": 1}, {"v": 2}], "extra": json.dumps({"score": 3})})
    assert mapped(record, reward="a.b.1.v")[0][0].reward == 2
    assert mapped(record, reward="extra.score")[0][0].reward == 3
    assert mapped(record, {**record, "a.b": [{"v": 1}] * 10}, reward="a.b.9.v")[0][0].reward is None


RIGHT = {
    "rewards": {"correct": 1.0, "tone": 0.5},
    "group": "g",
    "run": {"id": "a", "at": 1, "temp": 0.5},
    "empty": None,
}


@pytest.mark.parametrize(
    ("told", "near"),
    [
        ({"reward": "rewards.corect"}, "rewards.correct"),
        ({"reward": "reward"}, "rewards"),
        ({"group": "grup"}, "group"),
        ({"session": "run.idd"}, "run.id"),
        ({"id": "run.ID"}, "run.id"),
        ({"logprob_kind": "runs"}, "run"),
        ({"temperature": "run.tmp"}, "run.temp"),
        ({"version": "run.aat"}, "run.at"),
    ],
)
def test_a_path_that_matches_nothing_is_refused_with_the_nearest(tmp_path, told, near):
    [[name, path]] = told.items()
    with pytest.raises(ArgumentError, match=rf"TG-DATA-013.*{name}.*{path}.*{near}"):
        mapped(one(**RIGHT), one(**RIGHT), **told)
    (tmp_path / "t.jsonl").write_text(2 * (json.dumps(one(**RIGHT)) + "\n"))
    with pytest.raises(ArgumentError, match=rf"TG-DATA-013.*{near}"):
        tg.read(tmp_path / "t.jsonl", map=told)
    with pytest.raises(ArgumentError, match=rf"TG-DATA-013.*{near}"):
        tg.read(tmp_path / "t.jsonl", map=told, limit=1)


def test_a_path_that_one_record_has_or_has_null_is_taken():
    assert [trace.reward for trace in mapped(one(), one(x=1), reward="x")[0]] == [None, 1.0]
    assert mapped(one(**RIGHT), reward="empty")[0][0].reward is None
    with pytest.raises(ArgumentError, match=r"TG-DATA-013.*Did.*you.*mean"):
        mapped(one(), reward="massages")


@pytest.mark.parametrize("verb", ["train", "prepare", "doctor"])
def test_a_command_with_a_path_that_matches_nothing_ends_before_it_writes_anything(tmp_path, verb, capsys):
    from tracegrad.cli import main

    (tmp_path / "t.jsonl").write_text(4 * (json.dumps(one(**RIGHT)) + "\n"))
    out = [] if verb == "doctor" else ["--out", str(tmp_path / "out")]
    command = [verb, str(tmp_path / "t.jsonl"), "--model", "examples/quickstart/model", *out]
    assert main([*command, "--map.reward", "rewards.corect"]) == 1
    assert not list(tmp_path.glob("out/shard-*"))
    assert "Did you mean rewards.correct?" in capsys.readouterr().err


def test_the_other_fields_are_taken_from_their_paths():
    record = one(run={"id": 7, "t": "0.5", "v": "v12", "kind": "processed", "task": "add"})
    told = {"id": "run.id", "temperature": "run.t", "version": "run.v", "logprob_kind": "run.kind", "group": "run.task"}
    [trace], said = mapped(record, **told)
    [turn] = trace.generations
    assert (trace.id, trace.group) == ("7", "add")
    assert (turn.temperature, turn.policy_version, turn.logprob_kind) == (0.5, 12, "processed")
    assert said.count("of 1 records") == 5


@pytest.mark.parametrize(
    ("told", "value", "says"),
    [
        ("version", "abc", "a whole number from 0"),
        ("version", -1, "a whole number from 0"),
        ("temperature", True, "a number from 0"),
        ("temperature", -0.5, "a number from 0"),
        ("logprob_kind", "hot", "raw, processed or unknown"),
        ("group", ["a"], "a text or a number"),
        ("id", "", "a text or a number"),
        ("reward", "Infinity", "a number, a boolean"),
    ],
)
def test_a_value_that_is_none_of_its_field_is_located_and_settled_by_the_policy(tmp_path, told, value, says):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(one()) + "\n" + json.dumps(one(x=value)) + "\n")
    with pytest.raises(FormatError, match=rf"TG-READ-006.*{told}.*{says}"):
        tg.read(path, map={told: "x"})
    traces = tg.read(path, map={told: "x"}, on_error="quarantine")
    assert len(traces) == 1
    assert traces.read_report.reasons == {"wrong_type": 1}
    assert (tmp_path / "t.jsonl.quarantine.raw").read_text() == json.dumps(one(x=value)) + "\n"


def test_equal_first_messages_are_a_group():
    other = one()
    other["messages"] = [{"role": "user", "content": "3+3?"}, *other["messages"][1:]]
    traces, _ = mapped(one(), other, one(), group="prompt")
    assert traces.groups[0] == traces.groups[2] != traces.groups[1]
    assert traces[1].location[1] == 2


def test_ids_times_and_metadata_of_messages_do_not_split_a_group():
    base, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    same = [
        base,
        {**base, "id": "m1", "created_at": "2026-01-01T00:00:00Z", "metadata": {"run": 7}},
        {**base, "content": [{"type": "text", "text": "2+2?", "id": "p1", "cache_control": {}}]},
        {**base, "content": [{"text": "2+2?"}]},
    ]
    traces, _ = mapped(*({"messages": [each, answer]} for each in same), group="prompt")
    assert len(set(traces.groups)) == 1
    assert len(np.unique(prompt_hashes(traces))) == 1, "the check of held-out prompts has the same rule"
    picture = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhBQAHAAQAAA=="}}
    shown = [{**base, "content": [{**picture, **more}, {"type": "text", "text": "?"}]} for more in ({}, {"id": "p"})]
    few_shot = {"role": "assistant", "content": None, "tool_calls": [call], "sampled": False}
    other = [
        {**base, "content": "3+3?"},
        {**base, "role": "system"},
        {**base, "name": "Ann"},
        *shown[:1],
        {**few_shot, "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a": 3}'}}]},
        few_shot,
    ]
    traces, _ = mapped(*({"messages": [each, answer]} for each in [*other, *same[:1]]), group="prompt")
    assert len(set(traces.groups)) == len(other) + 1
    twin = {**few_shot, "tool_calls": [{**call, "id": "c2", "function": {"name": "add", "arguments": '{"a":2}'}}]}
    traces, _ = mapped(*({"messages": [each, answer]} for each in (few_shot, twin, *shown)), group="prompt")
    assert traces.groups[0] == traces.groups[1] != traces.groups[2] == traces.groups[3]
    pair = {"prompt": [{**base, "id": "x"}], "chosen": [said("4")], "rejected": [said("5")]}
    traces, _ = mapped(pair, {**pair, "prompt": [{**base, "id": "y"}]})
    assert len(set(traces.groups)) == 1, "groups that converters name have the same rule"


def test_the_bytes_of_a_record_stay_and_the_mapped_fields_stand_behind_them(tmp_path):
    text = '{"reward": "0.5",  "n": 1e400, "x": 12345678901234567890123, ' + json.dumps(one())[1:]
    (tmp_path / "t.jsonl").write_text(text + "\n")
    [trace] = tg.read(tmp_path / "t.jsonl", map={"reward": "reward"})
    assert trace.record.decode() == text[:-1] + ', "reward": 0.5}'


@pytest.mark.parametrize(
    "form",
    [
        {
            "request": {"messages": [{"role": "user", "content": "a"}]},
            "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}}]},
        },
        {"prompt_ids": [5, 6], "completion_ids": [7], "logprobs": [-0.5], "reward": 0.0},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"prompts": [5, 6], "responses": [7], "response_mask": [1], "rollout_log_probs": [-0.5], "uid": "p"},
        {
            "task_id": 4,
            "trial": 2,
            "reward": 0.0,
            "info": {},
            "traj": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        },
        {
            "prompt_token_ids": [1],
            "outputs": [
                {
                    "index": 0,
                    "text": "4",
                    "token_ids": [19],
                    "logprobs": None,
                    "cumulative_logprob": None,
                    "finish_reason": "stop",
                }
            ],
            "request_id": "r",
        },
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "logprobs": [0.0, -0.5], "rewards": [0.0, 1.0]},
        {
            "rollout_id": "r",
            "triplets": [{"prompt": {"token_ids": [5]}, "response": {"token_ids": [6]}}],
            "final_reward": 0,
        },
    ],
)
def test_a_mapping_counts_over_what_any_form_says(form):
    record = {**form, "my": {"score": 0.75, "task": "g"}}
    [trace], _ = mapped(record, reward="my.score", group="my.task", id="my.task")
    assert (trace.reward, trace.group, trace.id) == (0.75, "g", "g")


# --- conversations ---


def call(messages, answer, **more):
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "token_ids": [len(answer), 2]}
    return {"request": {"messages": messages}, "response": {"choices": [choice]}, **more}


A1 = call([user("a")], "b", s="one", at=1, metadata={"score": 0})
A2 = call([user("a"), said("b"), user("c")], "d", s="one", at=2, metadata={"score": 1})
B1 = call([user("x")], "y", s="two", at="2026-01-01T00:00:00Z")


def test_calls_of_one_session_are_one_conversation_in_their_order():
    traces, words = mapped(A2, B1, A1, session="s", reward="metadata.score")
    assert [trace.id for trace in traces] == ["one", "two"]
    one, two = traces
    assert [turn.tokens for turn in one.generations] == [2, 2]
    assert "3 records are 2 conversations, whose calls share s" in words
    assert len(two.generations) == 1
    # In the order of the file the second call is first, and its beginning is no answer of an earlier one.
    assert [message["content"] for message in one.messages] != ["a", "b", "c", "d"]
    ordered = tg.read([A2, A1], map={"session": "s", "order": "at", "reward": "metadata.score"})
    assert [message["content"] for message in ordered[0].messages] == ["a", "b", "c", "d"]
    assert ordered[0].reward == 1.0


def test_calls_that_go_on_one_another_are_joined_and_forks_kept_apart():
    other = call([user("a"), said("b"), user("z")], "w")
    elsewhere = call([user("a"), said("B"), user("c")], "d")
    traces, words = mapped(A1, B1, A2, other, elsewhere, session="prefix")
    assert [len(trace.generations) for trace in traces] == [3, 1, 1]
    assert "5 records are 3 conversations, whose calls continue one another" in words
    assert traces[0].location == ("<records>", 1)


def test_two_equal_conversations_are_each_gone_on_with():
    later = [call([user("a"), said("b"), user(text)], "d") for text in ("c", "e")]
    traces, _ = mapped(A1, A1, *later, session="prefix")
    assert [len(trace.generations) for trace in traces] == [2, 2]


def test_messages_with_their_answer_are_joined_as_calls():
    first = {"messages": [user("a"), {**said("b"), "token_ids": [7, 2], "logprobs": [-0.5, -0.25]}]}
    second = {"messages": [user("a"), said("b"), user("c"), {**said("d"), "token_ids": [8, 2]}], "reward": 1}
    [trace], _ = mapped(first, second, session="prefix")
    assert [turn.token_ids.tolist() for turn in trace.generations] == [[7, 2], [8, 2]]
    np.testing.assert_array_equal(trace.generations[0].logprobs, [-0.5, -0.25])
    assert trace.reward == 1


def test_sampling_parameters_stay_with_their_calls():
    told = [{**A1, "policy_version": 1}, {**A2, "policy_version": 2}]
    [trace], _ = mapped(*told, session="s", order="at")
    assert [turn.policy_version for turn in trace.generations] == [1, 2]


def test_rewards_of_one_conversation_that_differ_are_said_and_the_last_counts():
    [trace], words = mapped(A1, A2, session="s", reward="metadata.score")
    assert trace.reward == 1
    assert "1 rewards differ from an earlier one of their conversation: the last one counts" in words


def test_sessions_go_over_files_and_a_record_that_is_no_call_is_located(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps(A1) + "\n")
    (tmp_path / "2.jsonl").write_text(json.dumps(A2) + "\n" + json.dumps({"tokens": [5], "s": "one"}) + "\n")
    with pytest.raises(FormatError, match=r"TG-READ-006.*2\.jsonl:2: .*tokens, s .*\'one\'"):
        tg.read(tmp_path, map={"session": "s"})
    (tmp_path / "2.jsonl").write_text(json.dumps(A2) + "\n")
    [trace] = tg.read(tmp_path, map={"session": "s"})
    assert len(trace.generations) == 2
    assert trace.location == (str(tmp_path / "1.jsonl"), 1)


def test_an_order_that_is_no_time_is_refused():
    with pytest.raises(FormatError, match=r"TG-DATA-043.*map\.order"):
        mapped({**A1, "at": "yesterday"}, session="s", order="at")
    assert len(mapped(B1, session="s", order="at")[0]) == 1


# --- how it is told ---


def test_a_map_is_a_section_of_the_config(tmp_path):
    text = '[data]\nholdout = 0.1\n[map]\nreward = "metadata.score"\ngroup = "prompt"\n'
    (tmp_path / "run.toml").write_text(text)
    told = load(tmp_path / "run.toml", [("map.session", "prefix")])
    assert told.map == FieldMap(reward="metadata.score", group="prompt", session="prefix")
    (tmp_path / "again.toml").write_text(to_toml(told))
    assert load(tmp_path / "again.toml") == told
    assert "[map]" in to_toml(told)
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-001.*map\.reward"):
        load(overrides=[("map.rewards", "x")])


@pytest.mark.parametrize("told", [{"reward": "a..b"}, {"reward": 3}, {"order": "at"}, {"group": "." * 9}])
def test_a_map_that_names_nothing_is_refused(told):
    with pytest.raises(ArgumentError):
        FieldMap(**told)
