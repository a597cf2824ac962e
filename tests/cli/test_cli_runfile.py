"""A run.toml: every option arrives, and what cannot be played or would have no effect is said before anything is."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from policy_server import MODEL
from shop_files import dry, folder, written  # noqa: F401
from tracegrad import online, recipes
from tracegrad.cli import main, run_file
from tracegrad.errors import ArgumentError
from tracegrad.trainer import merge_adapters


def other(value):
    """A value that is not the default."""
    words = {"messages": "token_ids", "file": "lora"}
    if isinstance(value, float):
        return 0.5 if value == 1.0 else value + 0.5
    return words[value] if isinstance(value, str) else value + 2


def test_every_option_of_playing_comes_from_the_file_and_from_the_command_line(folder):
    names = {name: {f.name: other(f.default) for f in fields(part)} for name, part in run_file.PLAYING.items()}
    path = folder / "run.toml"
    path.write_text("".join(run_file._table(name, values) + "\n" for name, values in names.items()))
    found = run_file.read(path, {}, [], False)
    assert {"online": asdict(found.online), "rollout": asdict(found.rollout)} == names
    path.write_text("")
    told = [(f"{name}.{key}", str(value)) for name, values in names.items() for key, value in values.items()]
    found = run_file.read(path, {}, told, False)
    assert {"online": asdict(found.online), "rollout": asdict(found.rollout)} == names


WRONG = {
    "no file": ({"agent": "shop.py:agent"}, r"TG-CLI-038.*shop\.py:agent.*mine/shop\.py"),
    "no name": ({"agent": "shop_clerk.py:agnet"}, r"TG-CLI-037.*agnet.*Did you mean agent\?"),
    "no colon": ({"agent": "shop_clerk.py"}, r"TG-CLI-036.*Write file\.py:name"),
    "no module": ({"agent": "not_installed_here:agent"}, r"TG-CLI-039.*ModuleNotFoundError"),
    "one argument": ({"agent": "shop_clerk.py:alone"}, r"TG-CLI-050.*a function of \(task_\)"),
    "no function": ({"agent": "shop_clerk.py:number"}, r"TG-CLI-050.*is a int\."),
    "no class": ({"agent": None, "environment": "shop_clerk.py:alone"}, "TG-CLI-049"),
    "no reward function": ({"agent": None, "rewards": "shop_clerk.py:number"}, "TG-CLI-052.*rewards must be functions"),
    "a class as reward": ({"agent": None, "rewards": "shop_clerk.py:Talk"}, r"TG-CLI-052.*the class Talk\."),
    "a tool without hints": (
        {"agent": None, "rewards": "shop_clerk.py:one", "tools": ["shop_clerk.py:short"]},
        r"TG-ROLLOUT-043: tool short ",
    ),
    "two ways": ({"environment": "shop_clerk.py:Talk"}, r"agent and environment are both set"),
    "no way": ({"agent": None}, r"agent, environment and rewards are all missing"),
    "weights": (
        {"reward_weights": [1.0, 2.0], "rewards": "shop_clerk.py:one"},
        r"reward_weights has 2 numbers for 1 rewards",
    ),
    "no tasks": ({"tasks": None}, r"tasks is missing"),
    "no model": ({"model": None}, r"model is missing"),
    "no out": ({"out": None}, r"out is missing"),
    "no task file": ({"tasks": "gone.jsonl"}, r"gone\.jsonl: No such file"),
    "empty tasks": ({"tasks": "shop_clerk.py:nothing"}, "TG-CLI-043.*nothing is empty"),
    "tasks of no kind": ({"tasks": "shop_clerk.py:number"}, "TG-CLI-042.*number is a int"),
    "broken tasks": (
        {"tasks": "shop_clerk.py:broken"},
        r"RuntimeError: no tasks today \(.*shop_clerk\.py:\d+ in broken\)",
    ),
    "endless evaluation": ({"eval_tasks": "shop_clerk.py:endless"}, "TG-CLI-045.*more than 100,000 tasks"),
    "unknown key": ({"modell": "x"}, r"TG-CLI-027.*modell.*Did you mean model\?"),
    "a number as text": ({"model": 7}, r"TG-CLI-028.*model is 7\."),
    "servers as text": ({"servers": "http://127.0.0.1:9"}, "TG-CLI-028.*list of URLs"),
    "server down": ({"servers": ["http://127.0.0.1:9"]}, r"127\.0\.0\.1:9.*lists no model"),
    "no interpreter": ({"python": "/nowhere/python"}, "TG-CLI-017.*nowhere/python"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_played_is_said_before_anything_is(folder, capsys, name):
    told, why = WRONG[name]
    code, _, err = dry(capsys, written(folder, **{"out": "o", **told}))
    assert code == 1
    assert err.startswith("tracegrad: error: ")
    assert err.count("\n") == 1
    assert re.search(why, err), err


SECTIONS = {
    "[online]\nstepz = 3": r"run\.toml: .*online\.stepz.*Did you mean online\.steps\?",
    "[online]\nsteps = 0": r"online\.steps is 0",
    "[online]\nsteps = 'x'": r"online\.steps is 'x'\. It must be a whole number",
    "[online]\ngroup_size = 3": r"online\.group_size.*Did you mean rollout\.group_size\?",
    "[rollout]\ninput = 'text'": r"rollout\.input is 'text'.*messages, token_ids",
    "[rollout.max_turns]\na = 3": r"rollout\.max_turns\.a",
    "[train]\nepochs = 3": r"train\.epochs has no effect on an online run",
    "[optimizer]\nlrr = 3": r"optimizer\.lrr",
    "[nothing]\na = 3": r"nothing\.a",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_options_that_would_have_no_effect_are_refused(folder, capsys, section):
    code, _, err = dry(capsys, written(folder, section, out="o", servers=["http://127.0.0.1:9"]))
    assert code == 1
    assert re.search(SECTIONS[section], err), err


@pytest.mark.parametrize(
    "words",
    [
        ["online", "FILE", "--out", "s3://bucket/run"],
        ["online", "FILE", "--collect", "0/1", "--out", "s3://bucket/run"],
        ["replay", "run", "--model", "m", "--out", "s3://bucket/run"],
        ["record", "a.py:b", "--tasks", "t.jsonl", "--server", "http://127.0.0.1:9", "--out", "s3://bucket/run"],
        ["proxy", "--server", "http://127.0.0.1:9", "--out", "s3://bucket/run"],
        ["receive", "--out", "s3://bucket/run"],
        ["pull", "mlflow", "http://h", "--project", "p", "--out", "s3://bucket/run"],
        ["merge", "adapters", "--out", "s3://bucket/run"],
        ["score", "t.jsonl", "--reward", "a.py:b", "--out", "s3://bucket/run"],
    ],
)
def test_an_address_is_refused_where_out_is_read_again_while_it_is_written(folder, capsys, monkeypatch, words):
    monkeypatch.chdir(folder)
    path = written(folder, out="o", servers=["http://127.0.0.1:9"])
    try:
        code = main([path if word == "FILE" else word for word in words])
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2)
    assert re.search(r"s3://bucket/run, an address\. .*Give a path", capsys.readouterr().err)
    assert not {path.name for path in folder.iterdir()} & {"o", "s3:"}


def test_an_address_in_the_file_or_from_python_is_refused_too(folder, capsys):
    code, _, err = dry(capsys, written(folder, out="s3://bucket/run"))
    assert (code, "out is s3://bucket/run, an address" in err) == (1, True)
    assert run_file.read(folder / "run.toml", {"out": "file:///data/run"}, [], False).place("out") == Path("/data/run")
    for begin in (
        lambda out: online.train(MODEL, ["hi"], out=out),
        lambda out: online.replay(folder, MODEL, out=out),
        lambda out: online.collect(out, ["hi"], wait_s=0.1),
        lambda out: online.record(["hi"], servers=["http://127.0.0.1:9"], out=out),
        lambda out: merge_adapters(folder, out),
    ):
        with pytest.raises(ArgumentError, match=r"TG-STORE-017.*s3://bucket/run"):
            begin("s3://bucket/run")


@pytest.mark.parametrize("name", run_file.OFFLINE_ONLY_OPTIONS)
def test_what_is_of_training_from_files_is_refused_on_the_command_line_too(folder, capsys, name):
    code, _, err = dry(capsys, written(folder, out="o"), f"--{name}", "1")
    assert (code, f"{name} has no effect" in err) == (1, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "TG-CLI-047"),
        ('"a"\n7\n', r"TG-CLI-048.*t\.jsonl:2: .* 7\."),
        ('"a"\n{\n', r"TG-CLI-048.*t\.jsonl:2"),
        ("[" * 100_000, r"TG-CLI-048.*t\.jsonl:1"),
    ],
)
def test_a_file_of_tasks_is_read_line_by_line(folder, capsys, text, why):
    (folder / "t.jsonl").write_text(text)
    code, _, err = dry(capsys, written(folder, out="o", tasks="t.jsonl"))
    assert code == 1
    assert re.search(why, err), err


def test_the_truncation_of_an_imported_config_is_that_of_the_rollouts_unless_it_is_given(tmp_path):
    path, recipe = tmp_path / "run.toml", recipes.from_trl({"top_p": 0.9, "top_k": 20})
    path.write_text("[rollout]\ntop_p = 0.8\ngroup_size = 3\n[optimizer]\nlr = 0.5\n")
    found = run_file.read(path, {}, [("rollout.top_logprobs", "32")], False, recipe)
    rollout = found.rollout
    assert (rollout.top_p, rollout.top_k, rollout.top_logprobs, rollout.group_size) == (0.8, 20, 32, 3)
    assert [line for line in found.overrides if line.startswith("rollout.")] == [
        "rollout.top_p = 0.8 (not 0.9)",
        "rollout.top_logprobs = 32 (not 21)",
    ]
    assert run_file.read(path, {}, [], False, recipes.from_trl({})).rollout.top_k == -1
