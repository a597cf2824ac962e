"""Ten files and more of strangers, each walked from the file to a report by the commands that the tool prints.

`doctor` is asked first; what it prints behind `next` is typed as it stands, and so on until there is a report.html. The
files are those of tests/data/strangers (its README says who wrote them), and layouts of public data sets and trainers'
dumps, written here from the texts beside them.
"""

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad.cli import main
from tracegrad.data import infer_fields

FILES = Path(__file__).parents[1] / "data" / "strangers"
MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
SIGNS = {
    "openai_calls.jsonl.gz": ("conversations, whose calls share sessionId",),
    "openai_streams": ("records are 8 conversations, whose calls continue one another",),
    "openai_array.json.gz": ("12 as calls: it has `calls`",),
    "openai_choices.jsonl.gz": ("convert  3 records of choices",),
    "langsmith.jsonl.gz": ("8 conversations, whose calls share extra.metadata.thread_id",),
    "langchain_app.jsonl.gz": ("convert  12 records of langchain",),
    "litellm.jsonl.gz": ("map      reward is user_feedback.thumbs_up: true or false in 11 of 11 records, 0 to 1",),
    "inspect.eval": ("convert  8 records of inspect_ai",),
    "http_wire.jsonl.gz": ("convert  43 records of nested_call", "24 conversations, whose calls continue one another"),
    "sse_wire.jsonl.gz": ("convert  24 records of nested_call", "true or false in 24 of 24 records"),
    "litellm_callback.json.gz": ("convert  1 records of export", "reward is tags.stars"),
    "langgraph_states.jsonl.gz": ("convert  24 records of renamed_messages", "reward is grader.points"),
    "openai_agents.jsonl.gz": ("24 conversations, whose calls share trace_id", "reward is span_data.data.score"),
    "openinference.jsonl.gz": ("conversations, whose calls share context.trace_id", "24 records without a call add"),
    "pydantic_ai.jsonl.gz": ("convert  24 records of pydantic_ai", "reward is assertions.is_short"),
    "smolagents.jsonl.gz": ("24 as calls: it has `calls`", "reward is is_correct"),
    "dspy_history.jsonl.gz": ("convert  24 records of prompt_samples", "reward is metric"),
    "lm_eval_samples.jsonl.gz": ("convert  24 records of lm_eval", "reward is has_depth"),
    "camel_sharegpt.jsonl.gz": ("convert  24 records of sharegpt", "'up' is 1, 'down' is 0"),
    "distilabel_dpo.json.gz": ("records of preference_pair", "22 traces in 6 groups"),
    "harbor_atif.jsonl.gz": ("24 as atif", "reward is extra.verifier_result.rewards.reward"),
    "inspect_two_marks.eval": ("convert  12 records of inspect_ai", 'trained on is "marks.exact"'),
    "mlflow.jsonl.gz": ("convert  24 records of nested_call", "info.assessments.verdict: a text in 18 of 24 records"),
    "evalscope": ("16 records are 8 conversations, whose calls share index", "8 traces in 2 groups"),
    "minisweagent": ("records of kept_responses", "reward is info.resolved"),
    "third/openai_calls.jsonl.gz": ("16 traces in 4 groups", "convert  4 records of choices", "reward is judge"),
    "third/litellm.jsonl.gz": (
        "16 traces in 4 groups",
        "reward is metadata.grade: a number in 16 of 16 records, 0 to 10",
    ),
    "third/langsmith_runs.jsonl.gz": ("12 traces in 4 groups", "share trace_id", "36 records without a call add"),
    "third/camel_sharegpt.json.gz": ("16 traces in 4 groups", "reward is stars"),
    "third/facts.eval": ("8 traces in 2 groups", "convert  8 records of inspect_ai"),
    "third/streams.jsonl.gz": ("12 traces in 4 groups", "true or false in 12 of 12 records"),
    "third/langgraph_threads.jsonl.gz": ("10 traces in 2 groups", "reward is user_rating"),
    "third/weather.eval": ("6 traces in 2 groups", 'trained on is "graded.right"'),
    "third/dspy_history.json.gz": ("12 traces in 4 groups", "reward is metric"),
    "third/smolagents_runs.jsonl.gz": ("8 traces in 2 groups", "reward is success"),
    "third/distilabel_dpo.jsonl.gz": ("convert  8 records of preference_pair",),
    "fourth/triage_calls.jsonl.gz": (
        "40 traces in 5 groups",
        "convert  10 records of choices",
        "per_choice_correct: true or false",
    ),
    "fourth/chat_sessions.json.gz": (
        "12 traces in 1 group from",
        "28 records are 12 conversations",
        "'down' is 0, 'up' is 1",
    ),
    "fourth/lc_threads.jsonl.gz": ("20 traces in 2 groups", "'resolved' is 1, 'escalated' is 0"),
    "fourth/rated_pairs.jsonl.gz": ("48 traces in 12 groups", "convert  24 records of preference_pair"),
}
"""What the run of each file prints."""


def typed(command, capsys):
    """Runs a command as it was printed; what it said."""
    words = shlex.split(command)
    assert words[0] == "tracegrad"
    code = main(words[1:])
    said = capsys.readouterr()
    return code, said.out, said.err


def followed(out):
    """The command that the tool says comes next."""
    [found] = [line.removeprefix("next ").strip() for line in out.splitlines() if line.startswith("next ")]
    return found


def walk(path, capsys):
    """From a file to its report; the lines of the run. Each command is printed by the tool but the first.

    They are two, or three where the doctor has to look again with the temperatures or the keys that it found.
    """
    _, out, _ = typed(f"tracegrad doctor {path} --model {MODEL}", capsys)
    if followed(out).startswith("tracegrad doctor ") and re.search("--map.(sampling|session index)", followed(out)):
        _, out, _ = typed(followed(out), capsys)
    code, out, error = typed(followed(out), capsys)
    assert code == 0, error
    assert Path("runs/first/report.html").stat().st_size > 10_000
    return out


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


OFTEN = {
    *("openai_calls.jsonl.gz", "openai_streams", "langsmith.jsonl.gz", "inspect.eval"),
    *("openai_agents.jsonl.gz", "pydantic_ai.jsonl.gz", "minisweagent", "third/camel_sharegpt.json.gz"),
    *("distilabel_dpo.json.gz", "mlflow.jsonl.gz", "fourth/chat_sessions.json.gz"),
}
"""The walks of every run of the tests, one for each kind of record; the others are nightly."""


def walks(names):
    return [each if each in OFTEN else pytest.param(each, marks=pytest.mark.nightly) for each in names]


@pytest.mark.parametrize("name", walks(SIGNS))
def test_what_producers_wrote_goes_to_a_report_by_the_printed_commands(name, here, capsys):
    source = FILES / name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, here / source.name)
    out = walk(source.name, capsys)
    for sign in SIGNS[name]:
        assert sign in out
    rows = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert [row for row in rows if row.get("loss") is not None]


def test_the_thumb_of_a_session_is_given_to_the_answer_that_its_chunks_hold():
    held = json.loads(gzip.decompress((FILES / "fourth" / "chat_sessions.json.gz").read_bytes()))
    told = {"reward": "thumbs", "session": "session_id"}
    traces = tg.read(FILES / "fourth" / "chat_sessions.json.gz", map=told)
    last = {each["session_id"]: each for each in held}
    assert len(traces) == len(last) == 12
    for trace, (name, call) in zip(traces, last.items(), strict=True):
        parts = [each["choices"][0]["delta"].get("content") or "" for each in call["chunks"] if each["choices"]]
        assert trace.messages[trace.generations[-1].message]["content"] == "".join(parts)
        assert len(trace.generations) == sum(each["session_id"] == name for each in held)
        assert trace.reward == {"up": 1.0, "down": 0.0, None: None}[call["thumbs"]]


def test_equal_sides_of_a_pair_are_worth_the_same_and_ratings_are_rewards_beside(here, capsys):
    shutil.copy(FILES / "fourth" / "rated_pairs.jsonl.gz", here)
    _, out, _ = typed(f"tracegrad doctor rated_pairs.jsonl.gz --model {MODEL}", capsys)
    assert "unlike rewards" not in out
    assert 'trained on is "reward", the total of each record, not "rating": --data.reward rating' in out
    rows = [json.loads(line) for line in gzip.decompress(Path("rated_pairs.jsonl.gz").read_bytes()).splitlines()]
    assert sum(each["chosen"] == each["rejected"] for each in rows) == 4
    rated = [each[f"{side}_rating"] for each in rows for side in ("chosen", "rejected")]
    traces = tg.read("rated_pairs.jsonl.gz")
    assert [trace.rewards["rating"] for trace in traces] == pytest.approx(rated)
    worth = [(0.5, 0.5) if each["chosen"] == each["rejected"] else (1.0, 0.0) for each in rows]
    assert traces.reward.tolist() == [one for both in worth for one in both]


def test_a_log_without_a_sample_is_left_out_beside_others_and_alone_says_why(here, capsys):
    shutil.copy(FILES / "fourth" / "cut_off.eval", here)
    code, _, error = typed(f"tracegrad doctor cut_off.eval --model {MODEL}", capsys)
    assert code == 1
    assert "a log of inspect-ai whose run ended before its first sample" in error
    shutil.copy(FILES / "inspect.eval", here)
    stream = tg.stream(["cut_off.eval", "inspect.eval"])
    assert sum(map(len, stream)) == 8
    assert "1 files without a record of a call are left out, cut_off.eval first" in stream.lines()[0]
    shutil.copy(FILES / "third" / "weather.eval", here)
    found = infer_fields.infer(["cut_off.eval", "weather.eval"]).of("reward")
    assert found[0].path == "scores.graded.value.right", "what cannot be read does not hide the others"


def test_words_that_are_no_verdict_are_named_for_a_function(here, capsys):
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    lines(here / "labels.jsonl", [{"messages": talk, "label": "so-so" if at % 3 else "fine"} for at in range(6)])
    _, out, _ = typed(f"tracegrad doctor labels.jsonl --model {MODEL}", capsys)
    assert "the command after `next` adds the missing rewards" in out
    assert (
        "guess    6 of 6 records have words \"label\" ('so-so' in 4, 'fine' in 2), which are no numbers: a function of "
        'score has them as columns["label"], one for each completion'
    ) in out
    Path("mine.py").write_text(
        "def right(prompts, completions, label, **columns):\n    return [float(each == 'fine') for each in label]\n"
    )
    code, out, error = typed(followed(out), capsys)
    assert code == 0, error
    assert [each.reward for each in tg.read("scored.jsonl")] == [1, 0, 0, 1, 0, 0]


def test_a_function_that_fails_everywhere_is_not_asked_for_again_by_what_is_printed(here, capsys):
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    lines(here / "t.jsonl", [{"messages": talk, "group": "g"}] * 2)
    Path("mine.py").write_text("def right(prompts, completions, **columns):\n    raise KeyError('gold')\n")
    command = f"tracegrad score t.jsonl --reward mine.py:right --out scored.jsonl --model {MODEL}"
    _, out, _ = typed(command, capsys)
    assert "no trace has a score: fix the failures" in out
    assert "\nnext " not in out
    _, out, _ = typed(f"{command} --json", capsys)
    assert json.loads(out)["next"] is None


def test_a_verdict_agrees_with_the_command_below_it(here, capsys):
    shutil.copy(FILES / "third" / "litellm.jsonl.gz", here)
    _, out, _ = typed(f"tracegrad doctor litellm.jsonl.gz --model {MODEL}", capsys)
    assert "training on it as it is would be wrong; the command after `next` avoids the problem" in out
    assert followed(out).endswith("--objective TOPR_POSITIVE --text-only")


def test_the_only_group_that_differs_is_not_held_out(here, capsys):
    shutil.copy(FILES / "third" / "facts.eval", here)
    _, out, _ = typed(f"tracegrad doctor facts.eval --model {MODEL}", capsys)
    command = followed(out)
    assert command.endswith("--text-only"), "of text nothing is held out"
    code, _, error = typed(f"{command} --data.holdout 0.5", capsys)
    assert code == 1
    assert "TG-TRAIN-078" in error, "one of two groups differs, and one is held out"


def test_what_another_model_said_is_text(here, capsys):
    shutil.copy(FILES / "third" / "openai_calls.jsonl.gz", here)
    _, out, _ = typed(f"tracegrad doctor openai_calls.jsonl.gz --model {MODEL}", capsys)
    command = followed(out)
    assert command.endswith("--map.reward judge --objective TOPR_POSITIVE --text-only")


def test_a_log_of_prompts_and_responses_is_scored_and_trained_by_what_is_printed(here, capsys):
    shutil.copy(FILES / "third" / "llm_logs.json.gz", here)
    Path("mine.py").write_text(
        "def right(prompts, completions, **columns):\n"
        "    return [float(any(word in each for word in ('Paris', 'Canberra', '102', '7'))) for each in completions]\n"
    )
    _, out, _ = typed(f"tracegrad doctor llm_logs.json.gz --model {MODEL}", capsys)
    assert "--map.session" not in out, "conversation_name is the prompt, and each of its answers a draw"
    code, out, error = typed(followed(out), capsys)
    assert code == 0, error
    code, out, error = typed(followed(out), capsys)
    assert code == 0, error
    assert "12 traces in 4 groups" in out


def texts():
    return json.loads(gzip.decompress((FILES / "texts.json.gz").read_bytes()))


def groups():
    found = {}
    for each in texts():
        found.setdefault(each["i"], []).append(each)
    return list(found.values())


def question(each):
    return each["talk"][1]["content"]


def answer(each):
    return each["talk"][-1].get("content") or ""


def lines(path, rows, end="\n"):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + end for row in rows), encoding="utf-8")


def sharegpt(path):
    """LLaMA-Factory's layout with tools: calls and schemas as text."""

    def said(message):
        if message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            told = {"name": function["name"], "arguments": json.loads(function["arguments"])}
            return {"from": "function_call", "value": json.dumps(told)}
        names = {"user": "human", "assistant": "gpt", "tool": "observation"}
        return {"from": names[message["role"]], "value": message["content"] or ""}

    schema = {"name": "price", "description": "Price of one item.", "parameters": {"type": "object", "properties": {}}}
    rows = []
    for each in texts():
        system, *talk = each["talk"]
        told = {"system": system["content"], "tools": json.dumps([schema]), "rating": 5 if each["r"] else 2}
        rows.append({"conversations": [said(message) for message in talk], **told})
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")


def ultrafeedback(path):
    """HuggingFaceH4/ultrafeedback_binarized's columns, in Parquet."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = []
    for members in groups():
        good, bad = ([each for each in members if each["r"] == reward] for reward in (1, 0))
        for chosen, rejected in zip(good, bad, strict=False):
            asked = question(chosen)
            sides = [
                [{"content": asked, "role": "user"}, {"content": answer(each), "role": "assistant"}]
                for each in (chosen, rejected)
            ]
            told = {"prompt": asked, "prompt_id": f"p{chosen['i']}", "messages": sides[0]}
            scores = {"score_chosen": 8.5, "score_rejected": 4.0 + chosen["s"]}
            rows.append({**told, "chosen": sides[0], "rejected": sides[1], **scores})
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def completions(path):
    """TRL's table of completions: a column for each reward function and no total."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = []
    for each in texts():
        prompt = f"<|im_start|>user\n{question(each)}<|im_end|>\n<|im_start|>assistant\n"
        told = {"step": 1, "prompt": prompt, "completion": answer(each), "advantage": 0.0}
        rows.append({**told, "format_reward": 1.0, "correct_reward": each["r"]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def nemo_gym(path):
    """NeMo Gym's rollouts.jsonl."""
    rows = []
    for each in texts():
        out = []
        for message in each["talk"][2:]:
            if message["role"] == "tool":
                told = {"call_id": message["tool_call_id"], "output": message["content"]}
                out.append({"type": "function_call_output", **told})
            made = message.get("tool_calls") or []
            out += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in made]
            if message["role"] == "assistant" and message["content"]:
                part = {"type": "output_text", "text": message["content"], "annotations": []}
                out.append({"type": "message", "role": "assistant", "content": [part]})
        given = [{"type": "message", **message} for message in each["talk"][:2]]
        asked = {"input": given, "tools": [{"type": "function", "name": "price", "parameters": {}, "strict": True}]}
        response = {"id": f"resp_{each['i']}", "object": "response", "output": out}
        indices = {"_ng_task_index": each["i"], "_ng_rollout_index": each["s"]}
        rows.append({"responses_create_params": asked, "response": response, "reward": each["r"], **indices})
    lines(path, rows)


def samples(path):
    """A prompt, its answers and their rewards as text, in lines that were an array's."""
    rows = [
        {
            "prompt": question(members[0]),
            "completions": [answer(each) for each in members],
            "rewards": [f"{each['r']:.1f}" for each in members],
        }
        for members in groups()
    ]
    lines(path, rows, end=",\n")


def renamed(path):
    """An application's own names, JSON as text one level below."""
    rows = [{"taskId": each["i"], "finalScore": each["r"], "data": {"turns": each["talk"]}} for each in texts()]
    lines(path, rows)


WRITTEN = {
    "sharegpt.json": (sharegpt, "convert  24 records of sharegpt"),
    "ultrafeedback.parquet": (ultrafeedback, "records of preference_pair"),
    "completions_00004.parquet": (completions, "24 as trl"),
    "rollouts.jsonl": (nemo_gym, "convert  24 records of nemo_gym"),
    "groups.jsonl": (samples, "convert  6 records of prompt_samples"),
    "app.jsonl": (renamed, "convert  24 records of renamed_messages"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_text_of_public_layouts_goes_to_a_report_by_the_printed_commands(name, here, capsys):
    write, sign = WRITTEN[name]
    write(here / name)
    out = walk(name, capsys)
    assert sign in out
    assert out.count("text only: no ratio") == 1, "what text lacks is said once"
    assert "are without an exact id" not in out


def test_what_has_no_reward_is_scored_first_by_the_printed_command(here, capsys):
    rows = [json.loads(line) for line in gzip.decompress((FILES / "litellm.jsonl.gz").read_bytes()).splitlines()]
    lines(here / "bare.jsonl", [{key: row[key] for key in row if key != "user_feedback"} for row in rows])
    _, out, _ = typed(f"tracegrad doctor bare.jsonl --model {MODEL}", capsys)
    command = followed(out)
    assert command.startswith("tracegrad score bare.jsonl --map.group prompt --map.session trace_id")
    Path("mine.py").write_text(
        "def right(prompts, completions, **columns):\n    return [len(str(each)) % 2 for each in completions]\n"
    )
    code, out, _ = typed(command, capsys)
    assert code == 0
    assert followed(out).startswith(f"tracegrad train scored.jsonl --model {MODEL}")
    assert typed(followed(out), capsys)[0] == 0
    assert Path("runs/first/report.html").exists()


def test_events_that_a_call_started_are_no_traces_of_their_own(here, capsys):
    shutil.copy(FILES / "llamaindex_events.jsonl.gz", here)
    code, out, _ = typed(f"tracegrad doctor llamaindex_events.jsonl.gz --model {MODEL}", capsys)
    assert code == 1
    assert "24 records of span, 24 of them hold no call and are left out" in out
    assert "24 traces, 24 turns" in out
    assert followed(out).startswith("tracegrad score llamaindex_events.jsonl.gz --map.group prompt")


def test_a_dump_without_its_prompts_has_no_next_command_but_its_cause(here, capsys):
    rows = [
        {"input": "system\nuser\n?", "output": answer(each), "gts": "", "score": each["r"], "step": 1}
        for each in texts()
    ]
    lines(here / "verl.jsonl", rows)
    code, out, _ = typed(f"tracegrad doctor verl.jsonl --model {MODEL}", capsys)
    assert code == 1
    assert "the prompts were not recorded" in out
    assert "turns without logprobs" not in out
    assert "next " not in out


def test_ids_of_tool_calls_are_no_ids_of_responses(here, capsys):
    shutil.copy(FILES / "langsmith.jsonl.gz", here)
    _, out, _ = typed(f"tracegrad doctor langsmith.jsonl.gz --model {MODEL}", capsys)
    assert "duplicated generations" not in out


def test_what_logprobs_are_of_is_asked_where_the_records_do_not_say_it(here, capsys):
    shutil.copy(FILES / "langchain_app.jsonl.gz", here)
    _, out, _ = typed(f"tracegrad doctor langchain_app.jsonl.gz --model {MODEL}", capsys)
    assert "do not record their logprob kind: --logprob-kind raw, vLLM's default, or processed" in out
    assert followed(out).endswith("--logprob-kind raw")
    _, out, _ = typed(f"tracegrad doctor langchain_app.jsonl.gz --model {MODEL} --logprob-kind processed", capsys)
    assert followed(out).endswith("--logprob-kind processed")


def test_the_file_of_options_trains_too(here, capsys):
    for name in ("openai_calls.jsonl.gz", "langchain_app.jsonl.gz"):
        shutil.copy(FILES / name, here)
        code, out, _ = typed(f"tracegrad init {name} --model {MODEL} --out {name}.toml", capsys)
        assert code == 0
        [command] = [line.strip() for line in out.splitlines() if line.strip().startswith("tracegrad train")]
        code, _, error = typed(f"{command} --dry-run", capsys)
        assert code == 0, error
