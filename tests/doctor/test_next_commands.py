"""Each command that the doctor prints works: it is run for every golden file, up to the plan of a training run."""

import json
import shlex
from pathlib import Path

import pytest

import tracegrad as tg
from messages import user, written
from tracegrad.cli import main
from tracegrad.data import infer_fields
from tracegrad.doctor import diagnose
from tracegrad.doctor.next_command import comparison_flags

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "examples" / "quickstart" / "model"
FOLDERS = {"minisweagent", "openai_streams", "openhands"}
"""Folders whose files are one input."""
NOT_RECORDS = ("vllm_prompts.json", "conversation.json", "cut_off.eval", "README.md", "openai_v2_uncaptured.jsonl.gz")
"""Files of other tests: expected values, a log without a sample, and files whose records are all refused."""
OFTEN = (
    "golden/servers/vllm_",
    "golden/dumps/t",
    "fourth/",
    "third/s",
    "openai_calls",
    "mlflow",
    "strangers/openinference",
    "semconv_otlp.jsonl",
)


def files():
    found = [
        path for folder in ("golden", "data/strangers", "data/spans") for path in sorted((TESTS / folder).rglob("*"))
    ]
    found = [path for path in found if path.is_file() and FOLDERS.isdisjoint(path.parts)]
    found = [
        path
        for path in found
        if not path.name.endswith((".py", ".truth", ".truth.json")) and path.name not in NOT_RECORDS
    ]
    names = [path.relative_to(TESTS).as_posix() for path in found]
    names += [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("*")) if path.name in FOLDERS]
    return [
        each if any(sign in each for sign in OFTEN) else pytest.param(each, marks=pytest.mark.nightly) for each in names
    ]


@pytest.mark.parametrize("name", files())
def test_the_commands_that_are_printed_for_a_file_work(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import itertools\nCOUNT = itertools.count()\n"
        "def right(prompts, completions, **columns):\n    return [next(COUNT) % 2 for _ in completions]\n"
    )
    command, promised = f"tracegrad doctor {TESTS / name} --model {MODEL}", 0
    for _ in range(5):
        words = shlex.split(command)[1:]
        code = main([*words, *["--dry-run"] * (words[0] == "train"), "--json"])
        said = capsys.readouterr()
        result = json.loads(said.out)
        assert words[0] == "doctor" or code == 0, (command, result)
        if words[0] == "train":
            assert result["terms"] >= max(promised, 1)
            return
        promised = result.get("trained_tokens", promised)
        if result["next"] is None:
            break
        command = result["next"]
    # No command works: every token is of another tokenizer, or no trace is better than another.
    assert words[0] == "doctor", "the chain of commands does not end"
    found = {finding["name"]: finding for finding in result["findings"]}
    lines = " ".join(result["found"])
    assert "wrong_tokenizer" in found or "equal_rewards" in found or "every reward is" in lines, (name, command)


@pytest.mark.parametrize("name", files())
def test_each_flag_that_is_printed_for_a_file_reads_as_many_records_as_before(name):
    guesses = infer_fields.infer(TESTS / name, names=("reward", "group", "session", "sampling"))
    before = tg.read(TESTS / name, on_error="skip").read_report.bad if guesses.guesses else 0
    for guess in guesses.guesses:
        paths = {guess.field: guess.path, **dict(guess.also)}
        if "records without a call have" in guess.evidence:  # Of a conversation with the same session.
            session = guesses.of("session")[0]
            paths |= {"session": session.path, **dict(session.also)}
        assert tg.read(TESTS / name, on_error="skip", map=paths).read_report.bad <= before, guess.line()


BATCH, ZERO, ALL = (
    ["--advantage.baseline", "batch_mean"],
    ["--advantage.single_sample_group", "zero"],
    ["--data.holdout", "0"],
)
PAIRS = [number // 2 for number in range(40)]


@pytest.mark.parametrize(
    ("rewards", "groups", "has_group", "flags"),
    [
        ([1, 0] * 20, PAIRS, True, []),
        ([1, 0] * 20, PAIRS, False, BATCH),
        ([1, 0] * 20 + [1], [*PAIRS, 99], True, ZERO),
        # One of 20 groups is held out, and it may be the only one that differs.
        ([1, 0] + [1] * 38, PAIRS, True, ALL),
        ([1, 0, 1, 0] + [1] * 36, PAIRS, True, []),
        # Without a group that differs, all traces are compared.
        ([1, 1, 0, 0] * 10, PAIRS, True, BATCH),
        ([1] * 39 + [0], [*range(40)], True, [*BATCH, *ALL]),  # Two of 40 are held out: the 0 may be one of them.
        ([1] * 38 + [0] * 2, [*range(40)], True, [*BATCH, *ALL]),
        ([1] * 37 + [0] * 3, [*range(40)], True, BATCH),
        ([1, 0], [5, 5], True, []),  # The only group is never held out.
        ([1, float("nan"), 1], [1, 1, 2], True, None),
        ([float("nan")], [1], True, None),
        ([1], [1], True, None),
    ],
)
def test_traces_are_compared_whichever_groups_are_held_out(rewards, groups, has_group, flags):
    assert comparison_flags(rewards, groups, has_group=has_group) == flags
    without = None if flags is None else [flag for flag in flags if flag not in ALL]
    assert comparison_flags(rewards, groups, has_group=has_group, share=0) == without  # No group is held out.


def rows(rewards, **more):
    for number, reward in enumerate(rewards):
        yield {"messages": [user("2+2?"), {"role": "assistant", "content": str(number)}], "reward": reward, **more}


def test_equal_rewards_have_no_next_command_but_a_line_that_says_so(tmp_path):
    found = diagnose(written(tmp_path / "t.jsonl", rows([1, 1])), MODEL)
    assert found.next_command is None
    assert "every reward is 1, so no trace is better than another" in " ".join(found.suggestions)
    found = diagnose(written(tmp_path / "t.jsonl", rows([1, 0], group="g")), MODEL)
    assert found.next_command.endswith("--text-only")
    assert not found.suggestions


def test_flags_that_are_suggested_decide_how_traces_are_compared(tmp_path):
    many = [*rows([None] * 4, task="a", score=0), *rows([None] * 4, task="b", score=1)]
    for number, row in enumerate(many):
        row["score"] = number % 2
    found = diagnose(written(tmp_path / "t.jsonl", many), MODEL)
    assert found.next_command.endswith("--map.reward score --map.group task --objective TOPR_POSITIVE --text-only")
    for number, row in enumerate(many):
        row["score"] = number // 4
    found = diagnose(written(tmp_path / "t.jsonl", many), MODEL)
    assert found.next_command.endswith("--text-only --advantage.baseline batch_mean")


def test_a_recorded_group_is_kept_and_said_to_be(tmp_path):
    many = [{**row, "task": n % 2, "group": f"g{n}"} for n, row in enumerate(rows([1, 0, 1, 0]))]
    for rewarded in (True, False):
        records = many if rewarded else [{**row, "reward": None} for row in many]
        found = diagnose(written(tmp_path / "t.jsonl", records), MODEL)
        assert "--map.group" not in found.next_command
        assert ("group    4 of 4 traces have a recorded group, which is used" in found.suggestions) == rewarded
    found = diagnose(written(tmp_path / "t.jsonl", [{**row, "group": None} for row in many]), MODEL)
    assert "--map.group" in found.next_command
