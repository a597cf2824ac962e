"""What is not told is looked for and printed as the flag to type; nothing is taken that was not told."""

import json
import random
from pathlib import Path

import pytest

import tracegrad as tg
from messages import user, written
from tracegrad import config, prepare
from tracegrad.cli import main
from tracegrad.data import infer_fields, json_path
from tracegrad.metrics import Stopwatch

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def said(text):
    listed = {"content": [{"token": text, "logprob": -0.5, "bytes": list(text.encode())}]}
    return {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}, "logprobs": listed}


def calls(sessions=8):
    """Two calls a session, four prompts; a reward, a task, a session and a time under names of theirs."""
    rows = []
    for number in range(sessions):
        more = {"metadata": {"score": number % 3 / 2, "task": f"q{number % 4}", "latency_ms": number / 9}, "user": "me"}
        for turn in range(2):
            messages = [user(f"{number % 4} × lamp")] + [{"role": "assistant", "content": "3"}, user("?")] * turn
            request = {"messages": messages, "temperature": 1}
            at = f"2026-01-01T00:00:{2 * number + turn:02d}Z"
            row = {"session_id": f"s{number}", "started": at, "request": request, "response": {"choices": [said("3")]}}
            rows.append({**row, **more, "seed": random.random()})
    return rows


def test_candidates_are_named_by_type_coverage_and_spread():
    found = infer_fields.infer(calls())
    assert found.records == 16
    assert [(each.field, each.path) for each in found.guesses if each.field == "reward"] == [
        ("reward", "metadata.score")
    ]
    assert (
        found.of("reward")[0].evidence
        == '16 of 16 records have a number "metadata.score" (0 to 1, mean 0.438, 3 values)'
    )
    assert {each.path for each in found.of("group")} == {"metadata.task", "prompt"}
    assert "8 conversations begin with one of 4 prompts that others share" in [
        each.evidence for each in found.of("group")
    ]
    assert found.of("session")[0].flags() == ["--map.session", "session_id", "--map.order", "started"]
    assert found.of("session")[1].evidence == "8 of 16 calls go on an earlier one"
    assert not infer_fields.infer(calls(), config.FieldMap(reward="x", group="y", session="z")).guesses


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"reward_text": "0.5"}, None),  # constant
        ({"passed": "N"}, None),  # no number
        ({"usage": {"total_tokens": 1}}, None),
        ({"scores": {"a": 1, "b": 0.5}}, '4 of 4 records have an object "scores" of numbers: --map.reward scores'),
    ],
)
def test_what_cannot_be_a_reward_is_not_named(more, line):
    rows = [{"messages": [user("a"), {"role": "assistant", "content": "b"}], **more} for _ in range(4)]
    lines = infer_fields.infer(rows).lines(["reward"])
    assert lines == ([] if line is None else [f"guess    {line}"])


@pytest.mark.parametrize(
    "path",
    [
        *("preference_price_per_example", "token_usage.total", "score_latency", "name.perturbation.robustness"),
        *("settings.strict", "generationConfig.useCache", "accuracy_cost", "reward_tokens.value"),
    ],
)
def test_settings_and_measurements_are_no_rewards(path):
    def row(n, path):
        value = n % 2 == 0
        for key in reversed(path.split(".")):
            value = {key: value}
        return {"messages": [user("a"), {"role": "assistant", "content": "b"}], **value}

    assert infer_fields.infer([row(n, path) for n in range(4)]).of("reward") == []
    assert [each.path for each in infer_fields.infer([row(n, "length_reward") for n in range(4)]).of("reward")]
    assert not json_path.REWARD.search("generating")
    assert json_path.REWARD.search("userRating")


def test_names_are_whole_words():
    names = ["session_id", "conversationId", "parent_run_id", "threadID", "episodes", "Conversation Completeness"]
    names += ["session_score", "threading", "runtime_id", "trace_id", "dialogue"]
    assert [infer_fields.is_session_name(f"meta.{name}") for name in names] == [True] * 5 + [False] * 4 + [True] * 2


def test_records_that_cannot_be_read_give_no_guesses():
    rows = [{"question_id": n // 2, "score": n % 2, "text": "a\nb", "session_id": n // 2} for n in range(8)]
    assert infer_fields.infer([{**row, "turns": [["x"]]} for row in rows]).guesses == ()


def test_an_order_is_only_offered_if_each_call_of_a_session_has_it():
    rows = calls()
    rows[0] = {"created_at": "2026-11-01T12:00:00", **rows[0]}
    assert infer_fields.infer(rows).of("session")[0].also == (("order", "started"),)


def test_booleans_and_numbers_as_text_are_found():
    rows = [{"messages": [user("a")], "success": n % 2 == 0, "grade": str(n)} for n in range(4)]
    lines = "\n".join(infer_fields.infer(rows).lines(["reward"]))
    assert '4 of 4 records have true or false "success" (0 to 1, mean 0.5, 2 values): --map.reward success' in lines
    assert '4 of 4 records have a number as text "grade" (0 to 3, mean 1.5, 4 values): --map.reward grade' in lines


def test_measurements_templates_and_another_field_than_the_recorded_group_are_no_groups():
    halves = [("instance_cost", 1, 2), ("item_tokens", 5, 7), ("case_value", 0, 0.25), ("case_value_text", "1", "1.5")]
    halves += [("task_success", 1, 0), ("instance_template", "Do {{a}}.", "Do {{a}} now.")]
    for name, *values in [*halves, ("problem_id", "1.5", "b"), ("item_probe", 1, 2)]:
        rows = [
            {"messages": [user(str(n)), {"role": "assistant", "content": "b"}], "stats": {name: values[n % 2]}}
            for n in range(6)
        ]
        expected = [f"stats.{name}"] if name in ("problem_id", "item_probe") else []
        assert [each.path for each in infer_fields.infer(rows).of("group")] == expected, name
        assert infer_fields.infer([{**row, "group": "g"} for row in rows]).of("group") == []
        some = [*rows[2:], *({**row, "group": "g"} for row in rows[:2])]
        assert [each.path for each in infer_fields.infer(some).of("group")] == expected


def runs():
    """A project's runs as LangSmith lists them: the feedback is on the root; a row beside the call has none."""
    for n in range(4):
        shared = {"session_id": "project", "trace_id": f"t{n}"}
        score = {"feedback_stats": {"correctness": {"n": 1, "avg": float(n % 2)}}}
        times = [f"2026-11-0{n + 1}T12:00:0{second}" for second in range(3)]
        yield {"id": f"t{n}", "run_type": "chain", "inputs": {}, "start_time": times[0], **shared, **score}
        below = {"parent_run_id": f"t{n}", **shared}
        yield {"id": f"p{n}", "run_type": "prompt", "inputs": {}, "start_time": times[1], **below}
        out = {"generations": [[{"message": {"type": "ai", "content": f"{n}"}}]]}
        asked = {"messages": [[{"type": "human", "content": "a"}]]}
        yield {"id": f"c{n}", "run_type": "llm", "inputs": asked, "outputs": out, "start_time": times[2], **below}


def test_the_key_that_joins_is_one_of_the_rows_that_say_the_reward():
    found = infer_fields.infer(list(runs()))
    assert found.of("session")[0].flags() == ["--map.session", "trace_id", "--map.order", "start_time"]
    told = {"reward": "feedback_stats.correctness.avg", "session": "trace_id", "order": "start_time"}
    assert tg.read(list(runs()), map=told).reward.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("prompts", "names"), [(["a", "b"], False), (["a", "b", "c", "d"], True)])
def test_a_name_of_the_prompt_is_no_conversation(prompts, names):
    rows = [
        {"conversation_name": "ab"[n % 2], "prompt": prompts[n % len(prompts)], "response": str(n)} for n in range(8)
    ]
    found = infer_fields.infer(rows).of("session")
    assert bool(found) == names
    assert all(each.evidence.endswith("though no call goes on another") for each in found)


def test_reading_says_what_it_found_and_takes_nothing_of_it(tmp_path):
    path = written(tmp_path / "t.jsonl", calls())
    sequences, account = prepare.load(path, MODEL, config.Data(), tmp_path, Stopwatch())
    assert (sequences.traces, account.groups, account.rewards) == (16, 16, [])
    lines = "\n".join(account.lines())
    for flag in ("--map.reward metadata.score", "--map.group prompt", "--map.session session_id --map.order started"):
        assert flag in lines
    told = config.FieldMap(reward="metadata.score", group="prompt", session="session_id", order="started")
    sequences, account = prepare.load(path, MODEL, config.Data(), tmp_path, Stopwatch(), map=told)
    assert (sequences.traces, account.groups, account.rewards) == (8, 4, ["reward"])
    assert not account.candidate_lines
    assert "16 records are 8 conversations" in "\n".join(account.lines())


def test_which_of_several_rewards_is_trained_on_is_said(tmp_path, capsys):
    rows = [
        {
            "messages": [user("2+2?"), {"role": "assistant", "content": str(at)}],
            "reward": at / 4,
            "rewards": {"tone": at},
        }
        for at in range(4)
    ]
    path = written(tmp_path / "t.jsonl", rows)
    main(["doctor", str(path), "--model", str(MODEL)])
    says = 'trained on is "reward", the total of each record, not "tone": --data.reward tone chooses that'
    assert says in " ".join(capsys.readouterr().out.split())
    _, account = prepare.load(path, MODEL, config.Data(), tmp_path, Stopwatch())
    assert f"reward   {says}" in account.lines()
    _, account = prepare.load(path, MODEL, config.Data(reward=("tone",)), tmp_path, Stopwatch())
    assert any('"tone", as --data.reward says' in line for line in account.lines())


def test_doctor_prints_the_flags(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", calls())
    assert main(["doctor", path, "--model", str(MODEL)]) == 1
    out = capsys.readouterr().out
    assert "--map.reward metadata.score" in out
    assert "--map.group prompt" in out
    told = ["--map.reward", "metadata.score", "--map.group", "prompt", "--map.session", "prefix"]
    main(["doctor", path, "--model", str(MODEL), *told, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["traces"] == 8
    assert found["found"] == []
    assert "8 conversations" in "\n".join(found["mapped"])
    assert "no_rewards" not in [each["name"] for each in found["findings"]]


def test_a_file_without_a_token_to_train_is_wrong_with_its_cause(tmp_path, capsys):
    chunks = [
        {"id": "c", "choices": [{"index": 0, "delta": {"content": "3"}, "logprobs": said("3")["logprobs"]}]},
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    bare = written(
        tmp_path / "bare.jsonl", [{"response": chunks, "reward": number % 2, "group": "g"} for number in (0, 1)]
    )
    assert main(["doctor", bare, "--model", str(MODEL)]) == 1
    assert "the prompts were not recorded: record the request or prompt_token_ids" in capsys.readouterr().out
    text = written(tmp_path / "text.jsonl", [{"prompt": "a", "response": str(n), "score": n} for n in range(3)])
    assert main(["doctor", text, "--model", str(MODEL), "--map.reward", "score", "--map.group", "prompt"]) == 1
    out = capsys.readouterr().out
    assert "turns without logprobs: 3 of 3 turns" in out
    assert "no token can be trained" not in out
    assert "--objective TOPR_POSITIVE --text-only" in " ".join(out.split())
    assert "on rewards of 0 and more, --objective WEIGHTED_SFT --advantage.baseline none" in " ".join(out.split())


def test_init_writes_a_config_that_trains_what_it_found(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", calls())
    out = tmp_path / "run.toml"
    assert main(["init", path, "--model", str(MODEL), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"tracegrad train {path} --model {MODEL} --config {out} --out runs/first" in said
    told = config.load(out)
    assert told.map.paths() == {
        "reward": "metadata.score",
        "group": "metadata.task",
        "session": "session_id",
        "order": "started",
    }
    assert '# group = "prompt"  # 8 conversations begin' in out.read_text()
    assert main(["init", path, "--out", str(out)]) == 1
    assert "TG-CLI-008" in capsys.readouterr().err
    assert main(["init", "-", "--out", str(tmp_path / "stdin.toml")]) == 1
    assert "TG-CLI-007" in capsys.readouterr().err
    text = written(tmp_path / "text.jsonl", [{"prompt": "a", "response": str(n), "score": n} for n in range(3)])
    assert main(["init", text, "--out", str(tmp_path / "text.toml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert ("reward", "score") in [(each["field"], each["path"]) for each in found]
    told = config.load(tmp_path / "text.toml")
    assert (told.data.text_only, told.objective.preset) == (True, "TOPR_POSITIVE")


def test_which_answer_it_is_and_whether_the_call_failed_are_no_rewards():
    rows = []
    for number in range(4):
        gains = [{"choice": at, "gain": (number + at) % 3} for at in range(3)]
        response = {"choices": [{**said(f"e{at + 2}"), "index": at} for at in range(3)]}
        row = {"request": {"messages": [user(f"{number}. move?")]}, "response": response, "grades": gains}
        rows.append({**row, "status": ["success", "failure"][number % 2], "scores": [0, 1, 2]})
    found = infer_fields.infer(rows, names=["reward"])
    assert [each.path for each in found.of("reward")] == ["grades.gain", "grades"]
    first_is_best = [{**row, "scores": [1, 0, 0]} for row in rows]
    assert {each.path for each in infer_fields.infer(first_is_best, names=["reward"]).guesses} == {
        "grades.gain",
        "grades",
        "scores",
    }


def test_a_duration_does_not_order_the_calls_of_a_session():
    for name, flags in (("time_to_first_token", []), ("end_time", []), ("timestamp", ["--map.order", "timestamp"])):
        rows = [{**call, name: 0.1 * number} for number, call in enumerate(calls())]
        rows = [{key: value for key, value in row.items() if key != "started"} for row in rows]
        found = infer_fields.infer(rows, names=["session"])
        assert found.of("session")[0].flags() == ["--map.session", "session_id", *flags]


def test_states_that_other_records_continue_are_joined_by_prefix():
    def talk(number, *texts):
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[at % 2], "content": f"{text}{number}"} for at, text in enumerate(texts)]}

    states = [talk(number, "a", "b", "c") for number in range(4)]
    continued = [talk(number, "a", "b", "c", "d") for number in range(4)]
    [guess] = infer_fields.infer([*states, *continued], names=["session"]).of("session")
    assert (guess.path, guess.evidence) == ("prefix", "4 of 4 calls go on an earlier one")
    answered = [talk(number, "a", "b") for number in range(4)]
    assert not infer_fields.infer([*states, *answered], names=["session"]).guesses
    # Fewer than half of them are continued.
    assert not infer_fields.infer([*states, continued[0]], names=["session"]).guesses


def test_answers_and_their_scores_in_another_file_are_joined_by_the_key_that_is_printed(tmp_path):
    """8 of evalscope's predictions, and the reviews of the same samples in another order: 5 of them are right."""
    folder = Path(__file__).parent / "strangers" / "evalscope"
    found = infer_fields.infer(folder, names=["reward", "session", "logprobs"])
    flags = found.flags(["reward", "session", "logprobs"])
    assert flags[2:4] == ["--map.session", "index"]
    told = dict(zip([each.removeprefix("--map.") for each in flags[::2]], flags[1::2], strict=True))
    for source in (folder, sorted(folder.glob("*/*"), reverse=True)):
        traces = tg.read(source, map=told)
        assert (len(traces), traces.reward.sum(), traces.read_report.bad) == (8, 5.0, 0)
        assert [len(trace.generations) for trace in traces] == [1] * 8
        assert sum(len(trace.generations[0].logprobs) for trace in traces) == 198
    # The whole object of scores.
    traces = tg.read(folder, map={**told, "reward": "sample_score.score.value"})
    assert sorted(trace.rewards["acc"] for trace in traces) == [0.0] * 3 + [1.0] * 5

    def asked(at, answer="b", **fields):
        return {"messages": [user(f"{at}?"), {"role": "assistant", "content": answer}], **fields}

    def sessions(**files):
        return [
            each.flags()[1]
            for each in infer_fields.infer(
                [written(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()]
            ).of("session")
        ]

    one = [asked(at, n=at, model="m", half=at / 2) for at in range(4)]
    two = [asked(at, n=at, model="m", half=at / 2, score=at) for at in range(4)]
    assert sessions(a=one, b=two) == ["n"]
    assert sessions(a=one, b=[asked(at, n=3 - at) for at in range(4)]) == []  # Equal values have other messages.
    assert sessions(a=one, b=[*two[:1], *(asked(at, n=at) for at in range(9, 12))]) == []  # Most have none.
    assert sessions(a=one, b=[*two, asked(9, n=3)]) == []  # Two of one file have a value.
    marks = [{"id": at, "score": at % 2, "note": "ok"} for at in range(4)]
    talks = [asked(at, id=at) for at in range(4)]
    assert sessions(a=talks, b=marks) == ["id"]
    assert sessions(a=talks, b=[{**mark, "row_index": 9 - at} for at, mark in enumerate(marks)]) == []
    nested = [{"id": at, "mark": {"value": {"acc": at % 2}}} for at in range(4)]
    files = [written(tmp_path / f"{name}.jsonl", rows) for name, rows in (("t", talks), ("m", nested))]
    traces = tg.read(files, map={"session": "id", "reward": "mark.value"})
    assert [trace.rewards["acc"] for trace in traces] == [0, 1, 0, 1]
    with pytest.raises(tg.TracegradError, match=r"TG-(READ-006|FORMAT-044)"):
        tg.read(files, map={"session": "id"})
    # Each of a few files gets a share of the first records.
    many = [asked(at, n=at) for at in range(infer_fields.RECORDS)]
    assert sessions(a=many, b=many) == ["n"]
