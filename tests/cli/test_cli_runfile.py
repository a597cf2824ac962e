"""A run.toml: every option arrives, and what cannot be played or would have no effect is said before anything is."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from policy_server import MODEL
from shop_files import dry, folder, written  # noqa: F401
from tracegrad import online
from tracegrad.cli import main, run_file
from tracegrad.errors import ArgumentError
from tracegrad.trainer import merge_adapters


def other(value):
    """A value that is not the default."""
    words = {"chat": "tokens", "file": "lora"}
    return words[value] if isinstance(value, str) else value + (0.5 if isinstance(value, float) else 1)


def test_every_option_of_playing_comes_from_the_file_and_from_the_command_line(folder):
    names = {name: {f.name: other(f.default) for f in fields(part)} for name, part in run_file.PLAYING.items()}
    path = folder / "run.toml"
    path.write_text("".join(run_file._table(name, values) + "\n" for name, values in names.items()))
    found = run_file.read(path, {}, [], False)
    assert {"online": asdict(found.online), "play": asdict(found.play)} == names
    path.write_text("")
    told = [(f"{name}.{key}", str(value)) for name, values in names.items() for key, value in values.items()]
    found = run_file.read(path, {}, told, False)
    assert {"online": asdict(found.online), "play": asdict(found.play)} == names


WRONG = {
    "no file": ({"agent": "shop.py:agent"}, r"shop\.py:agent: there is no file .*mine/shop\.py"),
    "no name": ({"agent": "shop_clerk.py:agnet"}, r"there is no agnet in it\. Did you mean agent\?"),
    "no colon": ({"agent": "shop_clerk.py"}, r"names nothing\. Write file\.py:name"),
    "no module": ({"agent": "not_installed_here:agent"}, r"cannot be imported: ModuleNotFoundError"),
    "one argument": (
        {"agent": "shop_clerk.py:alone"},
        r"a function of \(task_\)\. It would be called with \(task, policy\)",
    ),
    "no function": ({"agent": "shop_clerk.py:number"}, r"is a int\. It would be called"),
    "no class": ({"agent": None, "environment": "shop_clerk.py:alone"}, r"An environment is a class with reset"),
    "no reward function": ({"agent": None, "rewards": "shop_clerk.py:number"}, r"rewards are functions"),
    "a class as reward": ({"agent": None, "rewards": "shop_clerk.py:Talk"}, r"the class Talk\. rewards are functions"),
    "a tool without hints": (
        {"agent": None, "rewards": "shop_clerk.py:one", "tools": ["shop_clerk.py:short"]},
        r"tool short takes \*\*columns",
    ),
    "two ways": ({"environment": "shop_clerk.py:Talk"}, r"agent and environment are both given"),
    "no way": ({"agent": None}, r"neither an agent, an environment nor rewards"),
    "weights": ({"weights": [1.0, 2.0], "rewards": "shop_clerk.py:one"}, r"weights has 2 numbers for 1 rewards"),
    "no tasks": ({"tasks": None}, r"tasks is missing"),
    "no model": ({"model": None}, r"model is missing"),
    "no out": ({"out": None}, r"out is missing"),
    "no task file": ({"tasks": "gone.jsonl"}, r"gone\.jsonl: No such file"),
    "empty tasks": ({"tasks": "shop_clerk.py:nothing"}, r"nothing is empty\. There is nothing to play"),
    "tasks of no kind": ({"tasks": "shop_clerk.py:number"}, r"number is a int"),
    "broken tasks": (
        {"tasks": "shop_clerk.py:broken"},
        r"RuntimeError: no tasks today \(.*shop_clerk\.py:\d+ in broken\)",
    ),
    "endless evaluation": ({"evaluation": "shop_clerk.py:endless"}, r"more than 100,000 tasks"),
    "unknown key": ({"modell": "x"}, r"modell is no key here.*Did you mean model\?"),
    "a number as text": ({"model": 7}, r"model is 7\. It must be a text"),
    "servers as text": ({"servers": "http://127.0.0.1:9"}, r"must be a list of URLs"),
    "server down": ({"servers": ["http://127.0.0.1:9"]}, r"127\.0\.0\.1:9.*lists no model"),
    "no interpreter": ({"python": "/nowhere/python"}, r"nowhere/python: it cannot be run"),
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
    "[online]\nstepz = 3": r"run\.toml: online\.stepz is no option.*Did you mean online\.steps\?",
    "[online]\nsteps = 0": r"online\.steps is 0",
    "[online]\nsteps = 'x'": r"online\.steps is 'x'\. It must be a whole number",
    "[online]\nsamples = 3": r"online\.samples is no option.*Did you mean play\.samples\?",
    "[play]\nids = 'text'": r"play\.ids is 'text'\. It must be one of chat, tokens",
    "[play.turns]\na = 3": r"play\.turns\.a is no option",
    "[train]\nepochs = 3": r"train\.epochs has no effect on an online run",
    "[optimizer]\nlrr = 3": r"optimizer\.lrr is no option",
    "[nothing]\na = 3": r"nothing\.a is no option",
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
        ("", "has no line"),
        ('"a"\n7\n', r"t\.jsonl:2: no task: it is 7"),
        ('"a"\n{\n', r"t\.jsonl:2: no task"),
        ("[" * 100_000, r"t\.jsonl:1: no task"),
    ],
)
def test_a_file_of_tasks_is_read_line_by_line(folder, capsys, text, why):
    (folder / "t.jsonl").write_text(text)
    code, _, err = dry(capsys, written(folder, out="o", tasks="t.jsonl"))
    assert code == 1
    assert re.search(why, err), err
