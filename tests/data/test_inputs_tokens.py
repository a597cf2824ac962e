"""Lists of ids, logprobs and masks under any name: found, offered as flags, and put on the turns they belong to."""

import json
import shlex
from pathlib import Path

import pytest

import tracegrad as tg
from messages import said, user, written
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.cli import main
from tracegrad.config import FieldMap
from tracegrad.data import infer_fields, infer_tokens
from tracegrad.data.infer_tokens import number_lists
from tracegrad.errors import ArgumentError, FormatError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
A, B = {"lp": [-0.5, -0.25], "toks": [5, 2]}, {"lp": [-0.125, -1.0, -2.0], "toks": [6, 7, 2]}
TALK = [user("a"), said("b"), user("c"), said("d")]
ROW = {"ids": [1, 3, 5, 2, 8, 6, 7, 2], "used": [0, 0, 1, 1, 0, 1, 1, 1], "attention": [1] * 8}
SAMPLED = [*A["lp"], *B["lp"]]
TURNS = [(A["toks"], A["lp"]), (B["toks"], B["lp"])]

LAYOUTS = {
    "metadata of messages": (
        {"messages": [user("a"), {**said("b"), "meta": A}, user("c"), {**said("d"), "meta": B}]},
        {"logprobs": "messages.*.meta.lp", "token_ids": "messages.*.meta.toks"},
        TURNS,
    ),
    "a list for each turn": (
        {"messages": TALK, "said_lp": [A["lp"], B["lp"]], "said": {"tokens": [A["toks"], B["toks"]]}},
        {"logprobs": "said_lp", "token_ids": "said.tokens"},
        TURNS,
    ),
    "a list for each message, as JSON text": (
        {
            "messages": TALK,
            "x": json.dumps({"lp": [[], A["lp"], [], B["lp"]], "ids": [None, A["toks"], None, B["toks"]]}),
        },
        {"logprobs": "x.lp", "token_ids": "x.ids"},
        TURNS,
    ),
    "ids of a prompt under a known name": (
        {"prompt_ids": [1, 3], "out_ids": A["toks"], "lp": A["lp"]},
        {"logprobs": "lp", "token_ids": "out_ids"},
        TURNS[:1],
    ),
    "ids of a prompt under another name": (
        {"query_tokens": [1, 3], "out_ids": A["toks"], "lp": A["lp"]},
        {"logprobs": "lp", "token_ids": "out_ids", "prompt_token_ids": "query_tokens"},
        TURNS[:1],
    ),
    "a row with a number for each token": (
        {**ROW, "lp": [0.0, 0.0, *A["lp"], 0.0, *B["lp"]]},
        {"logprobs": "lp", "token_ids": "ids", "loss_mask": "used"},
        TURNS,
    ),
    "a row with a number for each sampled token": (
        {**ROW, "lp": SAMPLED, "messages": TALK},
        {"logprobs": "lp", "token_ids": "ids", "loss_mask": "used"},
        TURNS,
    ),
    "a row with a number for each token from the first sampled one": (
        {**ROW, "lp": [*A["lp"], 0.0, *B["lp"]]},
        {"logprobs": "lp", "token_ids": "ids", "loss_mask": "used"},
        TURNS,
    ),
    "calls": (
        {"calls": [{"request": {"messages": TALK[:1]}, "response": {"choices": [{"message": said("b")}]}, **A}]},
        {"logprobs": "calls.*.lp", "token_ids": "calls.*.toks"},
        TURNS[:1],
    ),
    "a choice": (
        {"request": {"messages": TALK[:1]}, "response": {"choices": [{"message": {**said("b"), "extra": {"own": A}}}]}},
        {
            "logprobs": "response.choices.*.message.extra.own.lp",
            "token_ids": "response.choices.*.message.extra.own.toks",
        },
        TURNS[:1],
    ),
    "sharegpt, whose conversion adds a system message": (
        {
            "system": "s",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", **A}],
        },
        {"logprobs": "conversations.*.lp", "token_ids": "conversations.*.toks"},
        TURNS[:1],
    ),
    "texts": ({"prompt": "a", "completion": "b", **A}, {"logprobs": "lp", "token_ids": "toks"}, TURNS[:1]),
    "messages in columns": (
        {"prompt": TALK[:3], "completion": TALK[3:], **B},
        {"logprobs": "lp", "token_ids": "toks"},
        TURNS[1:],
    ),
    "logprobs as entries, without ids": (
        {"messages": TALK[:2], "lps": [{"token": "b", "logprob": -0.5}]},
        {"logprobs": "lps"},
        [(None, [-0.5])],
    ),
    "answers of one prompt": (
        {"prompt": "a", "responses": ["b", "d"], "lps": [A["lp"], B["lp"]], "toks": [A["toks"], B["toks"]]},
        {"logprobs": "lps", "token_ids": "toks"},
        TURNS,
    ),
}


def read(record, **paths):
    turns = [turn for trace in tg.read([record], map=paths) for turn in trace.generations]
    return [
        tuple(None if part is None else part.tolist() for part in (turn.token_ids, turn.logprobs)) for turn in turns
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_lists_under_any_name_are_found_and_read_with_the_flags_that_are_offered(name):
    record, paths, turns = LAYOUTS[name]
    found = infer_fields.infer([record, record], names=["logprobs", "token_ids"]).guesses
    assert dict(zip(found[0].flags()[::2], found[0].flags()[1::2], strict=True)) == {
        f"--map.{field}": path for field, path in paths.items()
    }
    assert read(record, **paths) == turns


def test_the_evidence_is_counted():
    record = LAYOUTS["a list for each turn"][0]
    [line] = infer_fields.infer([record, record, {"messages": TALK}], names=["logprobs", "token_ids"]).lines(
        ["logprobs"]
    )
    assert line == (
        'guess    2 of 3 records have lists of numbers "said_lp" (4 lists, -2 to -0.125), as long as the ids '
        '"said.tokens": --map.logprobs said_lp --map.token_ids said.tokens'
    )


@pytest.mark.parametrize(
    "more",
    [
        {"probabilities": [0.5, 0.25]},
        {"ratings": [-1, -1]},
        {"lp": [[-0.5], [-0.5], [-0.5]]},  # One more list than turns.
        {"lp": [-0.5, -0.25, -0.5]},  # One list for two turns.
        {"positions": [[0, 1], [0, 1, 2]]},
        {"bytes": [[98, 99], [100]]},  # Whole numbers whose name is none of ids.
        {"lp": [[-0.5, 0.5], [-0.25]]},
    ],
)
def test_what_no_turn_can_have_is_not_offered(more):
    assert not infer_fields.infer([{"messages": TALK, **more}] * 2, names=["logprobs", "token_ids"]).guesses


def test_ids_alone_are_offered_under_a_name_of_ids():
    [found] = infer_fields.infer([{"messages": TALK, "tok": [[5, 2], [6, 2]]}], names=["logprobs", "token_ids"]).guesses
    assert found.flags() == ["--map.token_ids", "tok"]
    own = {"messages": [TALK[0], {**said("b"), "token_ids": [5, 2]}], "tok": [5, 2]}
    assert not infer_fields.infer([own], names=["logprobs", "token_ids"]).guesses
    with_own = infer_fields.infer([{**own, "lp": [-0.5, -0.25]}], names=["logprobs", "token_ids"]).guesses
    assert with_own[0].flags()[:2] == ["--map.logprobs", "lp"]


def test_the_rollouts_own_logprobs_come_before_those_of_another_model():
    record = {"messages": TALK[:2], "ref_logprobs": [-0.5, -0.5], "z": {"logps": [-0.25, -0.25]}}
    first, second = infer_fields.infer([record], names=["logprobs"]).guesses
    assert (first.path, second.path) == ("z.logps", "ref_logprobs")


@pytest.mark.parametrize(
    ("record", "paths", "says"),
    [
        ({"messages": TALK, "lp": [-0.5]}, {"logprobs": "lp"}, "it is one list, and the record has 2 sampled turns"),
        ({"messages": TALK, "lp": [[-0.5]] * 3}, {"logprobs": "lp"}, "it has 3 lists, and the record has 2 sampled"),
        ({"messages": TALK, "lp": [["x"], [-0.5]]}, {"logprobs": "lp"}, "a list in it is not a list of numbers"),
        (
            {"messages": [{**user("a"), "lp": [-0.5]}, said("b")]},
            {"logprobs": "messages.*.lp"},
            "none of them belongs to a sampled turn",
        ),
        (
            {"messages": TALK[:2], "ids": [1, 5], "m": [1]},
            {"token_ids": "ids", "loss_mask": "m"},
            "not a list with one entry per id of map.token_ids",
        ),
        ({"traj": TALK, "task_id": 1, "trial": 0, "lp": [-0.5]}, {"logprobs": "lp"}, "no messages, calls or ids of a"),
        (
            {**ROW, "lp": [-0.5] * 4},
            {"token_ids": "ids", "loss_mask": "used", "logprobs": "lp"},
            "a list of logprobs of",
        ),
        (
            {"prompt_ids": [1], "out": [5, 2], "lp": [-0.5]},
            {"token_ids": "out", "logprobs": "lp"},
            "a list of logprobs of",
        ),
        ({"prompt_ids": [1, 3], "out": [1, 3, 5, 2]}, {"token_ids": "out"}, "it begins with the ids of the prompt"),
        (
            {"prompt": "a", "responses": ["b", "c"], "lp": [-0.5, -0.25, -0.125]},
            {"logprobs": "lp"},
            "lp: it is one list, and the record has 2 answers",
        ),
    ],
)
def test_a_list_that_may_belong_to_another_turn_is_refused(record, paths, says):
    with pytest.raises(FormatError, match=rf"TG-(DATA-043|FORMAT-067): <records>:1: .*{says}"):
        tg.read([record], map=paths)


def test_ids_of_a_whole_conversation_repeat_no_prompt_and_those_of_an_answer_follow_it():
    paths = {"token_ids": "ids", "loss_mask": "used", "logprobs": "lp", "prompt_token_ids": "before"}
    for before, ids in (([1, 3], [1, 3, 9, 5, 2]), ([1, 3], [9, 5, 2])):
        used = [0] * (len(ids) - 2) + [1, 1]
        [trace] = tg.read([{"before": before, "ids": ids, "used": used, "lp": [-0.5, -0.25]}], map=paths)
        [turn] = trace.generations
        assert (turn.prompt_token_ids.tolist(), turn.token_ids.tolist()) == ([1, 3, 9], [5, 2])
        assert turn.logprobs.tolist() == [-0.5, -0.25]


def test_a_mask_needs_the_ids_that_it_marks():
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-011.*map\.token_ids"):
        FieldMap(loss_mask="m")


def test_a_temperature_of_each_turn_and_lists_of_joined_calls_stay_with_their_turns():
    first = {"messages": [user("a"), {**said("b"), "m": {**A, "temp": 0.5}}]}
    second = {"messages": [user("a"), said("b"), user("c"), {**said("d"), "m": {**B, "temp": 0.75}}]}
    paths = {"logprobs": "messages.*.m.lp", "token_ids": "messages.*.m.toks", "temperature": "messages.*.m.temp"}
    [trace] = tg.read([first, second], map={**paths, "session": "prefix"})
    assert [(turn.token_ids.tolist(), turn.temperature) for turn in trace.generations] == [
        ([5, 2], 0.5),
        ([6, 7, 2], 0.75),
    ]
    found = infer_fields.infer([first], names=["sampling"]).guesses
    assert [each.flags() for each in found] == [["--map.temperature", "messages.*.m.temp"]]


OPTIONS = {"top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize(
    ("fields", "flags", "sampling"),
    [
        ({"params": OPTIONS}, {"sampling": "params"}, (None, 0.9)),
        ({"meta": {"gen": {"repetition_penalty": 1.1}}}, {"sampling": "meta.gen"}, (None, None)),
        ({"params": {**OPTIONS, "temp": 0.5}}, {"sampling": "params", "temperature": "params.temp"}, (0.5, 0.9)),
        ({"params": OPTIONS, "t": {"temp": 0.5}}, {"sampling": "params", "temperature": "t.temp"}, (0.5, 0.9)),
        ({"params": {**OPTIONS, "temperature": 0.5}}, {"sampling": "params"}, (0.5, 0.9)),
        # An object with the temperature comes before one without it.
        ({"a": {"min_p": 0.1}, "b": {"temperature": 0.5, "top_p": 0.8}}, {"sampling": "b"}, (0.5, 0.8)),
        ({"search": {"top_k": 5, "seed": 1, "n": 1}}, {}, (None, None)),
        ({"config": {"seed": 1}}, {}, (None, None)),
        ({"params": {"top_p": "high"}}, {}, (None, None)),
        ({"params": {"min_p": "high"}}, {}, (None, None)),
        ({"params": {"top_p": 9.5}}, {}, (None, None)),
        ({"settings": [{"name": "top_p", "value": 0.9}]}, {}, (None, None)),  # The reader refuses a list.
        ({**OPTIONS, "params": OPTIONS}, {}, (None, 0.9)),
    ],
)
def test_sampling_options_without_a_temperature_are_offered_if_they_can_be_read(fields, flags, sampling):
    record = {"messages": [user("a"), {**said("b"), "token_ids": [5, 2], "logprobs": [-0.5, -0.25]}], **fields}
    guesses = infer_fields.infer([record] * 2, names=["sampling"])
    paths = [each.path for each in guesses.of("sampling")]
    assert len(paths) == len({*paths})
    assert guesses.flags(["sampling"]) == [part for name, path in flags.items() for part in (f"--map.{name}", path)]
    [trace] = tg.read([record], map=flags)
    [turn] = trace.generations
    assert (turn.temperature, turn.top_p and round(turn.top_p, 6)) == sampling


def test_the_evidence_of_sampling_options_is_counted():
    records = [*[{"messages": TALK}] * infer_tokens.TRIED, {"messages": TALK, "params": OPTIONS}]
    assert infer_fields.infer(records, names=["sampling"]).lines(["sampling"]) == [
        'guess    1 of 17 records have top_p, top_k in "params", without a temperature: --map.sampling params'
    ]
    assert not infer_fields.infer(records, names=["group"]).of("sampling")


def test_lists_of_numbers_are_those_without_other_values_and_the_logprobs_of_entries():
    record = {
        "a": [None],
        "b": [[1, None], "[2]", "[x"],
        "c": [None, {"logprob": -1}],
        "d": [{"logprob": -1}, {"x": [3]}],
        "e": '{"f": [4]}',
        "g": [[], 5, {"h": [True]}],
    }
    paths = {"b": [[1, None], [2]], "c": [[-1]], "d.*.x": [[3]], "e.f": [[4]], "g.*.h": [[True]]}
    assert number_lists(record) == paths
    assert number_lists([[6], "[7]"]) == {"": [[6]]}
    assert number_lists([{"i": [8]}]) == {"*.i": [[8]]}


def test_lists_are_searched_to_a_bound():
    deep = {"a": 1}
    for _ in range(20):
        deep = {"a": deep, "lp": [-0.5]}
    assert len(number_lists(deep)) == 8
    assert sum(map(len, number_lists({"lp": [[-0.5]] * 10_000}).values())) < 10_000


def test_sets_of_lists_are_tried_to_a_bound(monkeypatch):
    tried = []
    monkeypatch.setattr(infer_tokens, "_turns", lambda records, paths: tried.append(paths))
    lists = {f"{name}{at}": value for at in range(100) for name, value in (("tok", [5, 2]), ("used", [0, 1]))}
    infer_fields.infer([{"prompt_ids": [1], **lists, "lp": [-0.5]}], names=["logprobs", "token_ids"])
    found = [paths for paths in tried if paths]
    assert [len([each for each in found if name in each]) for name in ("loss_mask", "token_ids")] == [64, 64 + 32]
    assert {"logprobs": "lp"} in found


def rows(**changes):
    """Twelve records of three prompts whose ids are those of the quickstart's tokenizer."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    for number in range(12):
        text = ["3 lamps", "a deep sea", "yes"][number % 3]
        ids = [*tokenizer.encode(text).tolist(), 2]
        meta = {"lp": [-0.5 - at / 8 for at in range(len(ids))], "toks": ids, "temp": 1.0}
        talk = [user(f"{number % 4}?"), {**said(text), "meta": {**meta, **changes}}]
        yield {"messages": talk, "score": number % 3 / 2, "task": f"q{number % 4}"}


def test_the_printed_commands_go_from_unknown_names_to_every_token(tmp_path, capsys):
    path, count = (
        written(tmp_path / "t.jsonl", list(rows())),
        sum(len(row["messages"][1]["meta"]["toks"]) for row in rows()),
    )
    assert main(["doctor", str(path), "--model", str(MODEL)]) == 1
    out = capsys.readouterr().out
    assert "no logprobs were read, but a list as long as the turn is at messages.*.meta.lp" in " ".join(out.split())
    assert "the record has no logprobs" not in out
    [command] = [line.removeprefix("next ").strip() for line in out.splitlines() if line.startswith("next ")]
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trained_tokens"], found["verdict"], found["found"]) == (count, "clean", [])
    assert "--text-only" not in found["next"]


def test_the_printed_command_reads_sampling_options_without_a_temperature_once(tmp_path, capsys):
    records = []
    for row in rows():
        question, answer = row["messages"]
        meta = answer.pop("meta")
        answer |= {"token_ids": meta["toks"], "logprobs": meta["lp"]}
        params = {"params": {"top_p": 1.0, "top_k": -1}, "logprob_kind": "raw"}
        records.append({**row, "messages": [question, answer], **params})
    path = written(tmp_path / "t.jsonl", records)
    words, printed = ["doctor", str(path), "--model", str(MODEL)], []
    for _ in range(2):
        main([*words, "--json"])
        printed.append(json.loads(capsys.readouterr().out))
        words = shlex.split(printed[-1]["next"])[1:]
    assert printed[0]["next"].endswith("--map.sampling params")
    assert [words[0], *printed[1]["found"]] == ["train"]
    assert words[words.index("--map.sampling") :][:2] == ["--map.sampling", "params"]


def test_no_logprobs_is_said_only_of_a_record_without_such_a_list(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", list(rows(lp=None)))
    main(["doctor", str(path), "--model", str(MODEL)])
    assert "the record has no logprobs" in capsys.readouterr().out
    short = written(tmp_path / "short.jsonl", list(rows(lp=[-0.5])))
    flags = ["--map.logprobs", "messages.*.meta.lp", "--map.token_ids", "messages.*.meta.toks"]
    main(["doctor", str(short), "--model", str(MODEL), *flags, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["count"] for each in found["findings"] if each["name"] == "count_mismatch"] == [12]
