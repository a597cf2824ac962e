"""`tracegrad fill`: what it prints, what it refuses, and the command that it names next."""

import json
import shlex

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from logs_without_logprobs import other_weights, records_of, without_logprobs, write_records
from tracegrad.cli import build_parser, main
from tracegrad.errors import ExitCode


@pytest.fixture(scope="module")
def log(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    return write_records(folder / "in.jsonl", map(without_logprobs, records_of(example, 24)))


def output_of(capsys, *words, code=0):
    """Run a command with this exit code, and return what it printed."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    return capsys.readouterr()


def test_help_names_what_is_filled_and_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fill", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--out", "--logprobs-from", "--temperature", "--top-p", "--top-k", "--min-p", "--json"):
        assert flag in text
    for flag in ("--policy-version", "--compare-with", "--max-text-uncertainty", "--accept-undecided"):
        assert flag in text
    assert "fill" in build_parser().format_help()


def test_the_report_is_one_json_object_and_its_next_command_works(example, log, tmp_path, capsys):
    out = tmp_path / "out.jsonl.zst"
    printed = output_of(capsys, "fill", log, "--model", example / "model", "--out", out, "--json")
    report = json.loads(printed.out)
    assert (report["file"], report["test"]["verdict"], report["conversations"]) == (str(out), "accepted", 24)
    assert (report["filled_conversations"], report["unfilled"]) == (23, {"no sampled token that training can use": 1})
    assert report["filled"] == report["tokens"] > 500
    program, *words = shlex.split(report["next"])
    assert program == "tracegrad"
    assert words[:2] == ["doctor", str(out)]
    doctor = json.loads(output_of(capsys, *words, "--json").out)
    assert doctor["traces"] == 24


def test_the_report_is_lines_for_a_terminal(example, log, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    text = output_of(capsys, "fill", log, "--model", example / "model", "--out", out, "--accept-undecided").out
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["test"].startswith("accepted: ")
    assert lines["filled"].startswith("760 of 760 tokens without a recorded logprob, in 23 of 24 conversations")
    assert lines["unfilled"] == "1 conversations: no sampled token that training can use"
    assert lines["file"] == str(out)
    assert lines["next"].startswith("tracegrad doctor ")


@pytest.mark.parametrize("words", [["-"], ["in.jsonl", "-"]], ids=str)
def test_standard_input_is_refused(example, tmp_path, capsys, words):
    command = ["fill", *words, "--model", example / "model", "--out", tmp_path / "out.jsonl"]
    assert "TG-CLI-057" in output_of(capsys, *command, code=ExitCode.ERROR).err


def test_the_input_is_not_overwritten(example, log, capsys):
    before = log.read_bytes()
    command = ["fill", log, "--model", example / "model", "--out", log, "--accept-undecided"]
    assert "--out" in output_of(capsys, *command, code=ExitCode.ERROR).err
    assert log.read_bytes() == before


def test_a_missing_model_is_an_error(log, tmp_path, capsys):
    command = ["fill", log, "--model", tmp_path / "none", "--out", tmp_path / "out.jsonl"]
    assert "TG-" in output_of(capsys, *command, code=ExitCode.ERROR).err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as ended:
        main(["fill", str(log), "--out", str(tmp_path / "out.jsonl")])
    assert ended.value.code == ExitCode.USAGE


def test_another_checkpoint_or_too_few_tokens_are_refused(example, log, tmp_path, capsys):
    other = other_weights(example / "model", tmp_path / "other", 2.0)
    out = tmp_path / "out.jsonl"
    command = ["fill", log, "--model", other, "--out", out, "--accept-undecided", "--json"]
    printed = output_of(capsys, *command, code=1)
    assert "TG-FILL-004" in printed.err + printed.out
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:1]))
    command = ["fill", few, "--model", example / "model", "--out", out]
    printed = output_of(capsys, *command, code=1)
    assert "TG-FILL-005" in printed.err
    assert "--accept-undecided" in printed.err
    assert not out.exists()
    assert output_of(capsys, *command, "--accept-undecided").out.count("undecided") == 1


def test_the_options_of_the_sampler_are_passed_on(example, log, tmp_path, capsys):
    command = ["fill", log, "--model", example / "model", "--accept-undecided", "--json"]
    out = tmp_path / "out.jsonl"
    # A wrong temperature is refused.
    assert "TG-FILL-004" in str(output_of(capsys, *command, "--out", out, "--temperature", "3", code=1))
    report = json.loads(output_of(capsys, *command, "--out", out, "--policy-version", "9").out)
    assert report["filled"] == 0
    assert list(report["unknown"]) == ["another policy version"]
    assert "TG-FILL-002" in output_of(capsys, *command, "--out", out, "--top-p", "2", code=ExitCode.ERROR).err
