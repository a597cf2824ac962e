"""`tracegrad doctor`: exit codes, what is printed, JSON, and files that are no traces at all."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad
from generate_docs import with_findings
from spoil import MODEL, recorded, save, spoiled, zero
from tracegrad.cli import main
from tracegrad.doctor import CHECKS, diagnose
from tracegrad.doctor.render import printable

ROOT = Path(__file__).parents[2]


def doctor(path, *more):
    return main(["doctor", str(path), "--model", str(MODEL), *more])


def test_a_clean_file_gets_one_line_the_next_command_and_exit_code_0(tmp_path, capsys):
    path = save(recorded(), tmp_path / "clean.jsonl")
    assert doctor(path) == 0
    out = capsys.readouterr().out
    line, *_, reward, _, following = out.splitlines()
    assert reward.startswith('reward   trained on is "reward", the total of each record, ')
    assert line.startswith("clean    120 traces")
    assert line.endswith(f"in {path}: nothing found")
    assert following == f"next     tracegrad train {path} --model {MODEL} --out runs/first"


def test_a_wrong_file_gets_its_findings_and_exit_code_1(tmp_path, capsys):
    path = save(spoiled(zero), tmp_path / "zeros.jsonl")
    assert doctor(path) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("reward   ")]
    assert lines[0].startswith("wrong    120 traces")
    around = "training on it as it is would be wrong; the command after `next` avoids the problem"
    assert lines[2] == f"         1 finding; {around}"
    assert lines[4].startswith("WRONG    logprobs filled with one value: ")
    assert lines[5] == f"  first  {path}:1 trace '{recorded()[0]['id']}' turn 0"
    assert [line[2:9].strip() for line in lines[6:-2] if line and line[2] != " "] == ["found", "impact", "fix"]
    assert max(map(len, lines[1:-2])) <= 120
    assert lines[-1].startswith("next     tracegrad train ")


def test_advice_alone_is_exit_code_0(tmp_path, capsys):
    assert doctor(save(recorded(), tmp_path / "t.jsonl"), "--max-tokens", "250") == 0
    assert capsys.readouterr().out.startswith("costs    ")


def test_json_has_the_same_in_one_object(tmp_path, capsys):
    path = save(spoiled(zero), tmp_path / "zeros.jsonl")
    assert doctor(path, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert list(told) == [
        "format",
        "source",
        "traces",
        "turns",
        "trained_tokens",
        "rewards",
        "verdict",
        "exit_code",
        "findings",
        "more",
        "mapped",
        "summary",
        "found",
        "next",
        "reward_columns",
    ]
    assert told["next"].endswith("--objective TOPR_POSITIVE --text-only"), "the text is right, its logprobs are not"
    assert (told["format"], told["verdict"], told["exit_code"], told["more"]) == ("tracegrad-doctor/1", "wrong", 1, [])
    (finding,) = told["findings"]
    keys = ["name", "severity", "title", "count", "of", "unit", "first", "found", "impact", "fix"]
    assert list(finding) == keys
    assert (finding["name"], finding["severity"], finding["unit"]) == ("filled_logprobs", "wrong", "turns")
    assert finding["first"] == {
        "file": str(path),
        "line": 1,
        "trace": recorded()[0]["id"],
        "turn": 0,
        "token": None,
        "record": None,
    }


def test_more_than_ten_findings_are_cut_to_ten_and_the_others_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tracegrad.doctor.examination.SHOWN", 1)
    monkeypatch.setattr("tracegrad.doctor.render.SHOWN", 1)
    path = save(spoiled(lambda record: (zero(record), record.pop("group"))), tmp_path / "t.jsonl")
    assert doctor(path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("WRONG") for line in lines) == 1
    assert "more     filled_logprobs" in lines
    assert lines[-4].endswith("--map.group prompt")
    assert doctor(path, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert ([finding["name"] for finding in told["findings"]], told["more"]) == (["lone_traces"], ["filled_logprobs"])


def test_an_empty_file_and_a_missing_one_are_errors_in_one_line(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for name, said in (("empty.jsonl", "empty"), ("none.jsonl", "none.jsonl")):
        assert doctor(tmp_path / name) == 1
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert error.startswith("tracegrad: error: ")
        assert said in error


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path, capsys):
    whole = gzip.compress(save(recorded(), tmp_path / "t.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    assert doctor(tmp_path / "cut.jsonl.gz") == 0
    out = capsys.readouterr().out
    assert "records that cannot be read: 1 of " in out
    assert "1 stream" in out


def test_a_binary_file_is_wrong_and_its_bytes_stay_out_of_the_terminal(tmp_path, capsys):
    path = tmp_path / "noise.jsonl"
    path.write_bytes(bytes(range(256)) * 40)
    assert doctor(path) == 1
    told = capsys.readouterr()
    assert "records that cannot be read" in told.out
    assert all(character.isprintable() or character == "\n" for character in told.out + told.err)


def test_control_characters_in_ids_and_texts_are_escaped(tmp_path, capsys):
    records = spoiled(zero)[:8]
    for at, record in enumerate(records):
        record["id"] = f"\x1b[31m\u202e{at}\x07\r\nCLEAN"
        record["group"] = "\x1b]0;owned\x07"
    path = save(records, tmp_path / "t.jsonl")
    assert doctor(path) == 1
    out = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert r"trace '\x1b[31m\u202e0\x07\r\nCLEAN' turn 0" in out
    assert doctor(path, "--json") == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["first"]["trace"] == records[0]["id"]


def test_printable_keeps_words_of_any_script_and_cuts_what_is_long():
    assert printable("さき 🛒 é") == "さき 🛒 é"
    assert printable("a\tb\u200f\ud83d") == r"a\tb\u200f\ud83d"
    assert printable("x" * 1000) == "x" * 300 + "..."


def test_a_huge_line_and_a_deep_one_are_bad_records_not_crashes(tmp_path):
    records = save(recorded()[:16], tmp_path / "t.jsonl").read_text()
    (tmp_path / "t.jsonl").write_text(records + "[" * 100_000 + "\n" + '{"messages": "' + "x" * 3_000_000 + '"}\n')
    found = diagnose(str(tmp_path / "t.jsonl"), MODEL)
    (finding,) = [each for each in found.findings if each.name == "bad_records"]
    assert finding.hits.count == 2


def test_standard_input_is_read(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tracegrad.cli", "doctor", "-", "--model", str(MODEL)],
        input=save(recorded(), tmp_path / "t.jsonl").read_bytes(),
        env={**os.environ, "PYTHONPATH": str(Path(tracegrad.__file__).parents[1])},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:5]) == (0, b"clean"), done.stderr


def test_it_takes_neither_torch_nor_transformers_and_says_so_where_rescore_needs_them(tmp_path):
    path = save(recorded(), tmp_path / "t.jsonl")
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'])); from tracegrad.cli import main; "
    )
    for more, code, said in (([], 0, ""), (["--check-logprobs"], 1, "--check-logprobs needs torch")):
        arguments = ["doctor", str(path), "--model", str(MODEL), *more]
        done = subprocess.run(
            [sys.executable, "-c", f"{blocked}from tracegrad.cli import main; sys.exit(main({arguments!r}))"],
            env={**os.environ, "PYTHONPATH": str(Path(tracegrad.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert said in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--check-logprobs", "-1"], "check_logprobs is -1"),
        (["--optimizer.lr", "1"], "no effect on doctor"),
        (["--held-out", "none.jsonl"], "none.jsonl"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, capsys, more, said):
    assert doctor(save(recorded()[:8], tmp_path / "t.jsonl"), *more) == 1
    assert said in capsys.readouterr().err


def test_the_page_is_current_and_every_check_says_what_it_sees_its_threshold_and_the_cure():
    page = (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
    assert with_findings(page) == page, "run: python tools/generate_docs.py"
    for check in CHECKS:
        sees, threshold = (check.run.__doc__ or "").split("\n\n")
        assert sees.startswith("Detect "), check.name
        assert threshold.strip().startswith("Threshold: "), check.name
        assert check.impact.endswith("."), check.name
        assert check.fix.endswith("."), check.name
        assert check.levels, check.name
    names = {check.name for check in CHECKS}
    assert all(set(check.hides) <= names for check in CHECKS)
