"""Examples in the help that run, and suggestions for what is misspelt: verbs, flags, options and values."""

import argparse
import re
import shlex

import pytest

from tracegrad.cli import build_parser, main, parse
from tracegrad.config import FieldMap, options

(COMMANDS,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
VERBS = dict(COMMANDS.choices)
EXAMPLES = [line.strip() for parser in VERBS.values() for line in parser.epilog.splitlines()[1:]]


def error(capsys, *words):
    """The exit code of a command, and the line that it prints."""
    try:
        code = main([*map(str, words)])
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


def test_the_help_lists_every_verb_and_each_has_two_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(VERBS)
    for verb, parser in VERBS.items():
        assert len(parser.epilog.splitlines()) == 3, verb
        assert all(line.startswith(f"  tracegrad {verb} ") for line in parser.epilog.splitlines()[1:])


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_help_is_parsed_by_its_verb(example):
    words = shlex.split(example)[1:]
    parsed, overrides = parse(words)
    assert parsed.parser.prog == f"tracegrad {words[0]}"
    assert {name for name, _ in overrides} <= {"objective", *parsed.parser.dotted_names()}


@pytest.mark.parametrize("verb", VERBS)
def test_a_flag_with_a_letter_missing_is_found_again(verb, capsys):
    flags = [flag for flag in VERBS[verb]._option_string_actions if flag.startswith("--") and flag.islower()]
    long = [flag for flag in flags if len(flag) > 6]
    assert long
    for flag in long:
        if (wrong := flag[:4] + flag[5:]) not in flags:
            assert VERBS[verb].nearest_flag(wrong) == flag
    with pytest.raises(SystemExit) as ended:
        VERBS[verb].error("x")
    assert (ended.value.code, f"tracegrad {verb} --help" in capsys.readouterr().err) == (2, True)


DOTTED = {verb: parser.dotted_names() for verb, parser in VERBS.items() if parser.reason_no_effect is not None}


@pytest.mark.parametrize("verb", DOTTED)
def test_an_option_that_a_verb_does_not_have_is_refused_before_anything_is_read(verb, capsys):
    arguments = {
        "init": ["none.jsonl"],
        "score": ["none.jsonl", "--out", "o", "--reward", "a.py:b"],
        "fill": ["none.jsonl", "--model", "m", "--out", "o"],
        "merge": ["none", "--out", "o"],
        "prepare": ["none.jsonl", "--model", "m", "--out", "o"],
        "doctor": ["none.jsonl", "--model", "m"],
        "view": ["none.jsonl"],
        "replay": ["none", "--model", "m", "--out", "o"],
        "record": ["a.py:b", "--tasks", "t", "--server", "u", "--out", "o"],
        "proxy": ["--server", "u", "--out", "o"],
        "receive": ["--out", "o"],
        "pull": ["phoenix", "http://h", "--project", "p", "--out", "o"],
    }[verb]
    for other in ("optimizer.lr", "online.steps"):
        code, said = error(capsys, verb, *arguments, f"--{other}", "1")
        assert code == 1
        assert f"TG-CLI-006: {other} has no effect on {verb}" in said
    code, said = error(capsys, verb, *arguments, "--maap.rewrd", "1")
    assert code == 1
    assert f"TG-CLI-010: maap.rewrd is not an option of {verb}" in said
    if "map.reward" in DOTTED[verb]:
        assert "Did you mean map.reward?" in said


def test_the_options_that_are_refused_are_those_that_a_verb_does_not_read():
    """By hand: init, doctor and view read [map]; score also data.on_error; prepare also what aligns; merge nothing."""
    fields = {f"map.{name}" for name in vars(FieldMap())}
    for verb in ("init", "doctor", "view"):
        assert set(DOTTED[verb]) == fields
    assert set(DOTTED["score"]) == {*fields, "data.on_error"}
    assert set(DOTTED["merge"]) == set(DOTTED["proxy"]) == set(DOTTED["receive"]) == set(DOTTED["pull"]) == set()
    assert {"data.text_only", "data.logprob_kind"} < set(DOTTED["prepare"]) - fields < set(options())
    assert "data.holdout" not in DOTTED["prepare"]


TRAIN = ["train", "none.jsonl", "--model", "m", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["doctr"], 2, "doctor"),
        ([*TRAIN, "--on-error", "skp"], 2, "skip"),
        ([*TRAIN, "--server-profile", "vlm"], 2, "vllm"),
        (["doctor", "t", "--model", "m", "--logprob-kind", "rw"], 2, "raw"),
        (["score", "t", "--out", "o", "--reward-input", "txt"], 2, "text"),
        (["proxy", "--server", "u", "--out", "o", "--logprob-kind", "procesed"], 2, "processed"),
        ([*TRAIN, "--data.on_error", "quarantin"], 1, "quarantine"),
        ([*TRAIN, "--schedule.name", "cosin"], 1, "cosine"),
        ([*TRAIN, "--report-to", "wandbb"], 1, "wandb"),
        ([*TRAIN, "--objective", "GSPOO"], 1, "GSPO"),
        ([*TRAIN, "--recipe", "DAPPO"], 1, "DAPO"),
        ([*TRAIN, "--from-config", "tlr:x.yaml"], 1, "trl"),
        ([*TRAIN, "--optimzer.lr", "1"], 1, "optimizer.lr"),
    ],
)
def test_a_misspelt_value_is_found_again(words, code, hint, capsys):
    found, said = error(capsys, *words)
    assert (found, re.findall(r"Did you mean (\S+)\?", said)) == (code, [hint]), said


def test_a_misspelt_key_or_section_of_run_toml_is_found_again(tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "run.toml"
    for text, hint in (
        ("modle = 'm'", "model"),
        ("[onlin]\nsteps = 3", "online"),
        ("[online]\nstep = 3", "online.steps"),
    ):
        path.write_text(text + "\n")
        code, said = error(capsys, "online", path)
        assert (code, re.findall(r"Did you mean (\S+)\?", said)) == (1, [hint]), said
    path.write_text("")
    code, said = error(capsys, "online", path, "--rolout.max_tokens", "8")
    assert (code, re.findall(r"Did you mean (\S+)\?", said)) == (1, ["rollout"]), said


def test_init_refuses_options_that_it_does_not_write(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}], "reward": 1}\n')
    out = tmp_path / "run.toml"
    assert error(capsys, "init", tmp_path / "t.jsonl", "--out", out, "--optimizer.lr", "1")[0] == 1
    assert not out.exists()
    assert error(capsys, "init", tmp_path / "t.jsonl", "--out", out, "--map.reward", "reward")[0] == 0
    assert 'reward = "reward"' in out.read_text()


def test_a_misspelt_column_is_found_again(tmp_path, capsys):
    pytest.importorskip("starlette")
    (tmp_path / "t.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}], "reward": 1}\n')
    words = ["view", tmp_path / "t.jsonl", "--index", tmp_path / "i", "--export", tmp_path / "o.html"]
    for flag, value in (("--sort", "rewrd"), ("--where", "rewrd<1")):
        code, said = error(capsys, *words, flag, value)
        assert (code, re.findall(r"Did you mean (\S+)\?", said)) == (1, ["reward"]), said
