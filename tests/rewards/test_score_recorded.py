"""Recorded traces scored by functions and by a judge: the records stay, what was scored before is not scored again."""

import asyncio
import json
import math
import shlex
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tracegrad as tg
from peak import PEAK
from tracegrad.cli import main
from tracegrad.rewards.recorded import ScoreCache, _inputs, _split


def trace(number, **more):
    said = [{"role": "user", "content": f"{number // 2}?"}, {"role": "assistant", "content": str(number)}]
    return {"id": f"t{number}", "group": f"g{number // 2}", "metadata": {"want": number}, "messages": said, **more}


def written(path, numbers, **more):
    path.write_text("".join(json.dumps(trace(number, **more)) + "\n" for number in numbers))
    return path


MODULE = """
import pathlib
def right(completions, want, **columns):
    with open({log!r}, "a") as log:
        log.write("call\\n")
    return [float(said[-1]["content"] == str(each)) if each != 3 else None for said, each in zip(completions, want)]
def long(completions, **columns):
    return [len(text) / 10 for text in completions]
def raises(completions, **columns):
    raise RuntimeError("no score")
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "calls.log"
    log.write_text("")
    (tmp_path / "mine.py").write_text(MODULE.format(log=str(log)))
    return lambda: log.read_text().count("call")


def test_a_second_run_scores_only_what_is_new(tmp_path, functions, capsys):
    path = written(tmp_path / "t.jsonl", range(6), reward=0.5)
    command = ["score", str(path), "--reward", "mine.py:right", "--out", str(tmp_path / "s.jsonl")]
    assert main(command) == 0
    assert functions() == 3
    traces = tg.read(tmp_path / "s.jsonl")
    assert [one.id for one in traces] == [f"t{number}" for number in range(6)]
    assert traces[0].rewards == {"recorded": 0.5, "right": 1.0}
    assert traces[3].reward is None
    assert math.isnan(traces[3].rewards["right"])
    assert traces[0].record.startswith(json.dumps(trace(0, reward=0.5))[:-1].encode())
    assert "1 without a score" in capsys.readouterr().out
    written(path, range(8), reward=0.5)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["groups"], told["from_cache"], told["unscored"]) == (4, 3, 1)
    assert functions() == 4
    # A function that was changed is asked again.
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "\nx = 1\n")
    done = tg.rewards.score_traces(tg.read(path), _right(tmp_path), cache=tmp_path / "s.jsonl.scores")
    assert done.cached_groups == 0


def _right(folder):
    space = {}
    exec(compile((folder / "mine.py").read_text(), str(folder / "mine.py"), "exec"), space)
    return space["right"]


def test_a_function_that_fails_gives_no_reward_and_is_not_kept(tmp_path, functions, capsys):
    path = written(tmp_path / "t.jsonl", range(2))
    command = ["score", str(path), "--reward", "mine.py:raises", "--reward", "mine.py:right", "--out", "s.jsonl"]
    assert main(command) == 0
    out = capsys.readouterr().out
    file = tmp_path / "mine.py"
    assert f"failed   raises: raised, 1 time; the first: {path}:1, group 'g0': RuntimeError: no score ({file}:10" in out
    assert '    raise RuntimeError("no score")\n' in out
    assert [one.reward for one in tg.read("s.jsonl")] == [None, None]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["from_cache"], told["failures"]) == (0, {"raises: raised": 1})
    assert told["first_failures"]["raises: raised"]["location"].endswith("in raises")


def solved(completions, solution, **columns):
    return [None if want is None else float(one[-1]["content"] == want) for one, want in zip(completions, solution)]  # noqa: B905


def passing(completions, tests, **columns):
    return [None if each is None else 0.5 for each in tests]


@pytest.mark.parametrize("form", ["record", "metadata", "task"])
def test_a_column_that_is_null_for_tasks_of_another_kind_is_given_as_none(form):
    """As in TRL, and as the online loop gives columns; of what was played the columns are those of its task."""
    kinds = {"math": {"solution": "4", "tests": None}, "code": {"solution": None, "tests": "assert f()"}}
    rows = []
    for group, columns in kinds.items():
        for text in "45":
            said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
            columns_ = {"record": columns, "metadata": {"metadata": columns}}
            columns_["task"] = {"metadata": {"task": {"prompt": "q", "messages": [], **columns}}}
            rows.append({"group": group, "messages": said, **columns_[form]})
    done = tg.rewards(tg.Traces.from_records(rows), [solved, passing])
    assert [done.rows[at][0] for at in range(4)] == [1.0, 0.0, 0.5, 0.5]
    assert not done.counts
    # A trace of a group may have a key that another has not.
    table = _inputs(list(tg.Traces.from_records([{**rows[0], "step": 3}, rows[1]])), False)["columns"]
    assert table["step"] == [3, None]
    assert not {"messages", "prompt"} & set(table)


@pytest.mark.parametrize("line", ["7", "[1]", "[[{}, 1]]", '{"scores": [7]}', '[[{"right": "a"}, "b"]]', "null"])
def test_a_line_of_the_cache_that_is_no_answer_is_scored_anew(tmp_path, functions, line):
    traces = tg.Traces.from_records([trace(0), trace(1)])

    async def even(body, **_):
        rows = [{"id": "1", "score": 0.5}, {"id": "2", "score": 0.5}]
        return {"choices": [{"message": {"content": json.dumps({"scores": rows})}}], "usage": {"prompt_tokens": "many"}}

    for score in (
        lambda: tg.rewards(traces, _right(tmp_path), cache=tmp_path / "c"),
        lambda: asyncio.run(tg.rewards.judge_traces(traces, even, cache=tmp_path / "c")),
    ):
        first = score()
        [key] = [json.loads(each)["key"] for each in (tmp_path / "c").read_text().splitlines()]
        (tmp_path / "c").write_text(json.dumps({"key": key, "value": json.loads(line)}) + "\n")
        again = score()
        assert (again.cached_groups, again.unscored_traces, again.rows) == (0, 0, first.rows)
        (tmp_path / "c").unlink()


ODD = ["true", '"5"', '"5/5"', '"5,5"', "NaN", "Infinity", "1e999", "[0.5]", '{"a": 1}', "10" + "0" * 400, "9" * 5000]
ODD += ['"\\ud800"', "-0.5", "1.5", '"\u0665"', "[" * 3000 + "]" * 3000]


@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:12])
def test_an_odd_score_in_a_cache_is_none_and_the_others_stay(tmp_path, functions, value):
    traces = tg.Traces.from_records([trace(number) for number in range(6)])
    asked = []

    async def even(body, **_):
        asked.append(body)
        rows = [{"id": "1", "score": 0.5}, {"id": "2", "score": 0.5}]
        return {"choices": [{"message": {"content": json.dumps({"scores": rows})}}]}

    def judge():
        return asyncio.run(tg.rewards.judge_traces(traces, even, votes=1, cache=tmp_path / "c"))

    first = judge()
    lines = (tmp_path / "c").read_text().splitlines()
    key = json.loads(lines[0])["key"]
    scores = f"[{value}, 0.5]"
    lines[0] = f'{{"key": "{key}", "value": {{"scores": {scores}, "votes": [[0.5, 0.5]]}}}}'
    lines[1:1] = [f'{{"key": {value}, "value": 1}}', f'{{"key": "{key[:9]}", "value": {value}}}', value, lines[1][:20]]
    (tmp_path / "c").write_text("\n".join(lines) + "\n" + lines[-1][:30])
    before = len(asked)
    again = judge()
    assert (again.cached_groups, len(asked) - before, again.unscored_traces) == (len(lines) - 5, 1, 0)
    assert again.rows == first.rows


@pytest.mark.parametrize("value", ["true", '"5"', "NaN", "1e999", "[0.5]", "10" + "0" * 400, "9" * 5000, '"\\ud800"'])
@pytest.mark.first_cases(2)
def test_an_odd_reward_of_functions_in_a_cache_is_none(tmp_path, functions, value):
    traces = tg.Traces.from_records([trace(number) for number in range(6)])
    first = tg.rewards(traces, _right(tmp_path), cache=tmp_path / "c")
    lines = (tmp_path / "c").read_text().splitlines()
    answer = json.loads(lines[0])
    for at in range(2):
        told = json.dumps({**answer, "value": [["@", "@"] if at else [{"right": "@"}, 1.0]] * len(answer["value"])})
        (tmp_path / "c").write_text("\n".join([told.replace('"@"', value), *lines[1:]]) + "\n")
        again = tg.rewards(traces, _right(tmp_path), cache=tmp_path / "c")
        assert (again.cached_groups, again.rows) == (len(lines) - 1, first.rows)


def test_weights_texts_and_the_room_itself(tmp_path):
    def length(prompts, completions):
        return [len(prompt) + len(text) for prompt, text in zip(prompts, completions, strict=True)]

    traces = tg.Traces.from_records([trace(number) for number in (0, 10)])
    done = tg.rewards(traces, length, weights=[0.5], reward_input=True)
    assert [one.reward for one in done.traces] == [1.5, 2.0]
    assert done.traces[1].rewards == {"length": 4.0}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "TG-CLI-030"),
        (["--reward", "mine.py:right", "--judge", "http://x"], "TG-CLI-030"),
        (["--reward", "mine.py:wrong"], "Did you mean|there is no wrong"),
        (["--judge", "http://127.0.0.1:9"], "--judge-model is missing"),
        (["--reward", "mine.py:right", "--price", "x"], "--price is 'x'"),
        (["--reward", "mine.py:right", "--optimizer.lr", "1"], r"optimizer\.lr has no effect"),
    ],
)
def test_what_cannot_be_scored_is_said(tmp_path, functions, capsys, flags, says):
    import re

    path = written(tmp_path / "t.jsonl", range(2))
    assert main(["score", str(path), "--out", "s.jsonl", *flags]) == 1
    assert re.search(says, capsys.readouterr().err)
    assert main(["score", str(path), "--out", str(path), "--reward", "mine.py:right"]) == 1


def test_a_cache_with_a_line_that_was_cut_is_read_and_added_to(tmp_path):
    path = tmp_path / "c"
    ScoreCache(path).put("a", [1])
    with path.open("a") as file:
        file.write('{"key": "b", "val')
    cache = ScoreCache(path)
    assert (cache.get("a"), cache.get("b")) == ([1], None)
    cache.put("b", 2)
    assert (ScoreCache(path).get("a"), ScoreCache(path).get("b")) == ([1], 2)


# --- a judge ---


def scores(prompt):
    """Every trajectory by the number that it says, out of 10."""
    count = prompt.count("<trajectory id=")
    found = []
    for number in range(1, count + 1):
        part = prompt.split(f'<trajectory id="{number}">')[1].split("</trajectory>")[0]
        found.append({"id": str(number), "score": int(json.loads(part.strip().split("\n")[-1])["content"]) / 10})
    return json.dumps({"scores": found})


class Judge(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self):
        Judge.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": scores(body["messages"][1]["content"])}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        answer = json.dumps(
            {"model": body["model"], "choices": [{"index": 0, "message": message}], "usage": usage}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_judge_counts_its_tokens_and_is_not_asked_twice(tmp_path, monkeypatch, capsys):
    pytest.importorskip("aiohttp")
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = written(tmp_path / "t.jsonl", range(6))
    (tmp_path / "rubric.md").write_text("- More is better.")
    url = f"http://127.0.0.1:{server.server_port}"
    flags = ["--judge", url, "--judge-model", "j", "--rubric", "rubric.md", "--price", "1,10"]
    command = ["score", str(path), *flags, "--out", "s.jsonl", "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (Judge.asked, told["prompt_tokens"], told["completion_tokens"]) == (6, 600, 60)
    assert told["cost"] == pytest.approx(600e-6 + 600e-6)
    assert told["agreement"] == 1.0
    assert [one.reward for one in tg.read("s.jsonl")] == pytest.approx([number / 10 for number in range(6)])
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (Judge.asked, told["from_cache"], told["prompt_tokens"], told["agreement"]) == (6, 3, 0, 1.0)
    server.shutdown()


def test_two_orders_that_disagree_are_told():
    async def first_wins(body, **_):
        count = body["messages"][1]["content"].count("<trajectory id=")
        rows = [{"id": str(number), "score": 1 - number / 10} for number in range(1, count + 1)]
        return {"choices": [{"message": {"content": json.dumps({"scores": rows})}}]}

    records = [{**trace(number), "group": "g"} for number in range(8)]
    done = asyncio.run(tg.rewards.judge_traces(tg.Traces.from_records(records), first_wins, votes=2))
    assert 0.1 < done.agreement < 0.9
    assert done.unscored_traces == 0


@pytest.mark.parametrize("count", [True, -1, 1.5, "9", 10**400, [9], {}, None])
def test_a_count_of_tokens_that_is_none_is_not_counted(count):
    async def odd(body, **_):
        rows = [{"id": "1", "score": 0.5}, {"id": "2", "score": 0.5}]
        usage = {"prompt_tokens": count, "completion_tokens": 3}
        return {"choices": [{"message": {"content": json.dumps({"scores": rows})}}], "usage": usage}

    done = asyncio.run(tg.rewards.judge_traces(tg.Traces.from_records([trace(0), trace(1)]), odd, votes=1))
    assert (done.prompt_tokens, done.completion_tokens, done.unscored_traces) == (0, 3, 0)
    assert done.cost((1.0, 10.0)) == 30e-6


def test_what_a_judge_cannot_say_is_no_reward_and_is_asked_again(tmp_path):
    async def mute(body, **_):
        return {"choices": [{"message": {"content": "I would rather not."}}]}

    traces = tg.Traces.from_records([trace(0), trace(1)])
    for _ in range(2):
        done = asyncio.run(tg.rewards.judge_traces(traces, mute, votes=1, cache=tmp_path / "c"))
        assert (done.unscored_traces, done.cached_groups, done.counts["judge: unusable"]) == (2, 0, 1)
        assert done.failures["judge: unusable"].message.startswith("<records>:1, group 'g0': there is no JSON")


@pytest.mark.nightly
def test_traces_of_a_group_may_stand_anywhere_and_the_file_is_not_held(tmp_path, functions):
    # Two files of 40 MB; the two traces of a group stand in one each.
    for name, half in (("a", 0), ("b", 1)):
        rows = (trace(2 * number + half, filler="x" * 10_000) for number in range(4000))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = "def pairs(completions, **columns):\n    return [len(completions)] * len(completions)\n"
    (tmp_path / "mine.py").write_text(body)
    code = "import sys; from tracegrad.cli import main; code = main(sys.argv[1:]); print(int(peak())); sys.exit(code)"
    told = ["score", "a.jsonl", "b.jsonl", "--reward", "mine.py:pairs", "--out", "s.jsonl"]
    command = [sys.executable, "-c", PEAK + code, *told]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "scored   8,000 traces in 4,000 groups by pairs\n" in done.stdout
    assert int(done.stdout.split()[-1]) < 225, "MiB; with all of the 80 MB held it takes 303"
    traces = tg.read(tmp_path / "s.jsonl")
    assert [one.id for one in traces][3998:4002] == ["t7996", "t7998", "t1", "t3"]
    assert set(traces.reward.tolist()) == {2.0}


def test_where_there_is_no_room_for_what_is_scored_that_is_said(functions, tmp_path, capsys, monkeypatch):
    path = written(tmp_path / "t.jsonl", range(2))
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115  a disk without room
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    assert main(["score", str(path), "--reward", "mine.py:right", "--out", "s.jsonl"]) == 1
    assert "TG-REWARD-008: " in capsys.readouterr().err


def test_where_no_file_can_be_made_that_is_said(tmp_path, functions, capsys, monkeypatch):
    path = written(tmp_path / "t.jsonl", range(2))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert main(["score", str(path), "--reward", "mine.py:right", "--out", "s.jsonl"]) == 1
    assert f"{tmp_path / 'gone'}: No such file or directory. " in capsys.readouterr().err


def test_an_error_of_the_input_is_not_one_of_the_temporary_file_which_is_closed(monkeypatch):
    opened, make = [], tempfile.TemporaryFile
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **told: opened.append(make(**told)) or opened[0])

    def parts():
        yield tg.Traces.from_records([trace(0)])
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Errno 5") as raised:
        tg.rewards.SpillFile(parts())
    assert not isinstance(raised.value, tg.TracegradError)
    assert opened[0].closed


def test_a_function_gets_the_prompt_and_the_columns_of_a_record_of_texts():
    seen = []

    def right(prompts, completions, gold, **columns):
        seen.append((prompts, sorted(columns)))
        return [float(said == want) for said, want in zip(completions, gold, strict=True)]

    rows = [{"prompt": "2+2=", "completion": text, "gold": "4", "step": 1, "reward": 7, "group": "g"} for text in "45"]
    found = tg.rewards(tg.read(rows), [asynchronous(right)], reward_input=True)
    assert [found.rows[at][0] for at in (0, 1)] == [1.0, 0.0]
    [(prompts, columns)] = seen
    assert prompts == ["2+2=", "2+2="]
    assert "step" in columns
    assert "reward" not in columns, "scoring writes it: it would be asked anew each time"


def asynchronous(function):
    async def right(prompts, completions, gold, **columns):
        return function(prompts, completions, gold, **columns)

    return right


def test_metadata_counts_over_the_record_and_a_judge_is_shown_the_prompt():
    [one] = tg.read([{**trace(0), "want": "of the record", "step": 3}])
    assert _inputs([one], False)["columns"]["want"] == [0]
    assert _inputs([one], False)["columns"]["step"] == [3]
    [text] = tg.read([{"prompt": "2+2=", "completion": "4"}])
    assert [each["content"] for part in _split(text) for each in part] == ["2+2=", "4"]


MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def sampled(number, **more):
    """A record of two tokens, with logprobs except for number 0 unless they are given."""
    said = {"role": "assistant", "content": "4", "token_ids": [22, 2], **({"logprobs": [-1.0, -0.5]} if number else {})}
    return {"messages": [{"role": "user", "content": f"{number // 2}?"}, said], "group": f"g{number // 2}", **more}


EQUAL = "every reward is 1, so no trace is better than another. To imitate those above 0: --objective WEIGHTED_SFT"


@pytest.mark.parametrize(
    ("records", "returns", "flags", "reason"),
    [
        ([trace(number) for number in range(4)], "[0, 1]", ["--objective", "TOPR_POSITIVE", "--text-only"], None),
        ([sampled(number, temperature=1) for number in range(2, 6)], "[0, 1]", [], None),
        ([sampled(number, temperature=1) for number in range(6)], "[0, 1]", ["--on-error", "skip"], None),
        ([sampled(number) for number in range(2, 6)], "[0, 1]", None, "the logprob kind of 4 turns"),
        ([trace(number) for number in range(4)], "[1, 1]", None, EQUAL),
        ([trace(number) for number in range(4)], "[None, None]", None, "no trace has a reward"),
    ],
)
@pytest.mark.first_cases(4)
def test_the_command_that_is_printed_works_or_has_a_reason(
    tmp_path, monkeypatch, capsys, records, returns, flags, reason
):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("mine.py").write_text(f"def right(completions, **columns):\n    return {returns}\n")
    for model in ([], ["--model", str(MODEL)]):
        assert main(["score", "t.jsonl", "--reward", "mine.py:right", "--out", "s.jsonl", "--json", *model]) == 0
        told = json.loads(capsys.readouterr().out)
        program, verb, *words = shlex.split(told["next"])
        assert words[:3] == ["s.jsonl", "--model", (model or ["", "MODEL"])[1]]
        assert (program, verb) == ("tracegrad", "doctor" if reason else "train")
        if reason:
            assert told["reason"].startswith(reason)
        else:
            assert (told["reason"], words[5:]) == (None, flags) if not model else words
            words[2] = str(MODEL)
            assert main(["train", *words, "--dry-run"]) == 0
            assert main(["doctor", "s.jsonl", "--model", str(MODEL)]) in (0, 1)
            assert "trained on is" not in capsys.readouterr().out, "the only function is the total"


def test_a_text_has_the_answers_and_nothing_else_and_the_columns_are_named(tmp_path, monkeypatch, capsys):
    """Text lacks tool calls, so `doctor` proposes messages for traces that have some."""
    call = {"id": "1", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 7."}]},
    ]
    seen = []

    async def right(prompts, completions, **columns):
        seen.extend([prompts[0], completions[0]])
        return [1.0]

    records = [{"messages": said, "info": {"exit": 0}, "metadata": {"kind": "shop"}}]
    done = tg.rewards(tg.Traces.from_records(records), right, reward_input=True)
    assert (seen, list(done.columns)) == (["What?", "I look.\n\nIt is 7."], ["info", "kind"])
    monkeypatch.chdir(tmp_path)
    for messages, form in ((said, "messages"), ([said[0], said[4]], "text")):
        Path("t.jsonl").write_text(2 * (json.dumps({**records[0], "messages": messages}) + "\n"))
        main(["doctor", "t.jsonl", "--model", str(MODEL)])
        *_, command, _, columns = capsys.readouterr().out.splitlines()
        assert f" --reward mine.py:right --reward-input {form} " in command
        assert columns.endswith(" columns: info, kind")
    Path("mine.py").write_text("def right(completions, **columns):\n    return [0]\n")
    assert main(["score", "t.jsonl", "--reward", "mine.py:right", "--out", "s.jsonl"]) == 0
    assert "\ncolumns  info, kind\n" in capsys.readouterr().out


def test_a_trace_without_an_id_keeps_the_place_where_it_was_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**trace(0), "id": None if name == "a" else "own"}) + "\n")
    tg.write(tg.rewards(tg.read(tmp_path), asynchronous_zero).traces, tmp_path / "s.jsonl")
    assert [one.id for one in tg.read(tmp_path / "s.jsonl")] == [f"{tmp_path / 'a.jsonl'}:1", "own"]


async def asynchronous_zero(completions, **columns):
    return [0.0 for _ in completions]
