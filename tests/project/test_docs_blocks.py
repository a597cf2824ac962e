"""Each code block in README and docs/ runs, or has a comment with the reason why it does not."""

import ast
import asyncio
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from doc_blocks import PAGES, ROOT, blocks, commands, indented
from page_table import put_table
from tracegrad import config, objective
from tracegrad.cli import main, parse
from tracegrad.online import OnlineConfig, RolloutConfig

EXAMPLE = ROOT / "examples" / "quickstart"
NOT_RUN = {
    "README.md": 1,
    "how-to/art.md": 1,
    "how-to/online-processes.md": 1,
    "how-to/online.md": 1,
    "how-to/prepare-with-your-engine.md": 1,
    "how-to/skyrl.md": 1,
    "how-to/train-on-several-machines.md": 1,
    "how-to/trl-rollouts.md": 1,
    "how-to/verl.md": 1,
}
"""Number of blocks of a page that do not run. The comment above each has the reason."""
PARSED = {"merge", "online", "proxy", "pull", "receive", "record", "replay", "view"}
"""Verbs that are only parsed: they need a server or a checkpoint of adapters, or do not end."""
RUN = {"doctor", "fill", "init", "prepare", "score", "train"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create traces.jsonl, model, logs/ and the other paths of the pages, from 12 groups of the example."""
    there = tmp_path_factory.mktemp("pages")
    recorded = tg.read(EXAMPLE / "traces.jsonl.zst")
    tg.write((trace for trace in recorded if "g0240" <= (trace.group or "") < "g0252"), there / "traces.jsonl")
    (there / "logs").mkdir()
    rows = [json.loads(line) for line in (there / "traces.jsonl").read_text().splitlines()]
    scored = [{**row, "metadata": {**(row.get("metadata") or {}), "score": row["reward"]}} for row in rows]
    (there / "logs" / "monday.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    (there / "model").symlink_to(EXAMPLE / "model")
    (there / "examples").symlink_to(ROOT / "examples")
    (there / "mine.py").write_text("def right(completions, **columns):\n    return [1.0 for _ in completions]\n")
    for name in ("rollouts", "received"):
        shutil.copytree(there / "logs", there / name)
    (there / "grpo.yaml").write_text("epsilon_high: 0.28\n")
    (there / "resolved.yaml").write_text("actor_rollout_ref:\n  actor:\n    clip_ratio_high: 0.28\n")
    (there / "train.json").write_text('{"epsilon": 0.2}')
    (there / "run.toml").write_text("[train]\nepochs = 1\n")
    [own] = [each for each in blocks("python") if "class DropUnlikely" in each.text]
    (there / "rejection.py").write_text(own.text)
    return there


@pytest.fixture(scope="module")
def known(folder):
    """Return the values of the variables that the text of the pages introduces."""
    tokenizer = tg.Tokenizer.from_pretrained(folder / "model")
    data = tg.align(tg.read(folder / "traces.jsonl", limit=24), tokenizer)
    rollout = data.rollout_logprobs[data.terms]
    trace = np.repeat(data.trace, np.diff(data.cu_seqlens))[data.terms]
    return {
        "tg": tg,
        "data": data,
        "sequences": data,
        "logprobs": rollout,
        "old": rollout + np.float32(0.01),
        "rollout": rollout,
        "trace": trace,
        "turn": np.zeros_like(trace),
        "staleness": np.zeros_like(trace),
        "weight": np.ones_like(rollout),
        "mask": np.ones((2, len(rollout) // 2), bool),
        "all_reduce": lambda values, how: values,
        "advantages": tg.advantage.group_mean(data.reward, data.group),
    }


@pytest.fixture
def at_home(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def given(text, known):
    """Return more variables for one block: arguments of a trainer, another micro-batch, arrays of its shape."""
    names = {}
    if "OffPolicySums.of" in text:
        from tracegrad.metrics import OffPolicySums

        arrays = {name: known[name] for name in ("trace", "weight", "turn", "staleness")}
        names |= {"OffPolicySums": OffPolicySums, "there": OffPolicySums.of(known["old"], known["rollout"], **arrays)}
    if "Trainer(" in text:
        names |= _trainers(text)
    return names


def _trainers(text):
    import transformers
    from trl import GRPOConfig

    plain = {
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": 1,
    }
    plain |= {"per_device_train_batch_size": 4}
    return {
        "model": transformers.AutoModelForCausalLM.from_pretrained("model"),
        "tokenizer": transformers.AutoTokenizer.from_pretrained("model"),
        "arguments": transformers.TrainingArguments("trained", **plain)
        if "TraceLoss" in text
        else GRPOConfig("trained", **plain, num_generations=4, gradient_checkpointing=False),
    }


def test_code_is_fenced_and_its_language_is_tested_or_a_reason_is_given():
    assert not {page.name: lines for page in PAGES if (lines := indented(page))}
    assert {block.language for block in blocks()} == {"bash", "console", "json", "python", "text", "toml"}
    marked = [block for block in blocks() if block.reason]
    assert Counter(block.page for block in marked) == NOT_RUN
    for block in marked:
        assert block.language == "python"
        compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for named in re.findall(r"tests/[\w/]+\.py", block.reason):
            assert (ROOT / named).is_file(), f"{block}: {named}"


TRL_PAGE = "how-to/trl.md"
PYTHON = [block for block in blocks("python") if not block.reason]


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON} - {TRL_PAGE}))
def test_the_python_of_a_page_runs(page, at_home, known, monkeypatch):
    if page == "how-to/view.md":  # the run that its last lines open
        shutil.rmtree("out", ignore_errors=True)  # of other pages
        told = {"data.holdout": 0.0, "train.groups_per_step": 12, "token_log.mode": "all"}
        tg.train("model", "traces.jsonl", out="out", options=told, log=lambda _: None)
    module = type(json)("page")
    monkeypatch.setitem(__import__("sys").modules, "page", module)
    vars(module).update(known, **(vars(objective) if page == "reference/losses.md" else {}))
    for block in (block for block in PYTHON if block.page == page):
        vars(module).update(given(block.text, known))
        code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        left = eval(code, vars(module))
        if left is not None:
            asyncio.run(left)


def test_the_script_for_trl_is_complete_and_has_trls_correction_in_its_loss(at_home, recwarn):
    [block] = [block for block in PYTHON if block.page == TRL_PAGE]
    names = {}
    exec(block.text, names)
    trainer = names["trainer"]
    assert not [each for each in recwarn if str(each.message).startswith(("The recorded", "Options of GRPOConfig"))]
    loss = count = unweighted = 0.0
    for terms in (inputs["terms"] for inputs in trainer._buffered_inputs):  # of the second step
        trace, difference = terms.trace.numpy(), (terms.old - terms.rollout).numpy()
        ratio = np.exp([difference[trace == each].sum() for each in trace])  # TRL's sequence_mask, at most 3
        loss -= (np.where(ratio <= 3, ratio, 0) * terms.advantages.numpy()).sum()
        unweighted -= terms.advantages.numpy().sum()
        count += len(trace)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 2
    assert logged[1] == pytest.approx(loss / count, abs=1e-5)
    assert logged[1] != pytest.approx(unweighted / count, abs=1e-4)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_a_config_is_read_and_no_option_has_its_default(block, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(block.text)
    found, default = config.as_dict(config.load(path)), config.as_dict(config.Config())
    for name, value in config.flatten(config.read_toml(path)):
        assert found.get(name, value) == value, f"{block}: {name}"
        assert default.get(name) != value or name == "objective.preset", f"{block}: {name} is the default"


@pytest.mark.parametrize(
    "block", [block for block in blocks("json") if block.page == "reference/trace-format.md"], ids=str
)
def test_each_example_record_is_read(block, tmp_path):
    decoder, at, records = json.JSONDecoder(), 0, []
    while at < len(block.text):
        record, at = decoder.raw_decode(block.text, at)
        at = len(block.text) - len(block.text[at:].lstrip())
        records.append(record)
    for record in records:
        path = tmp_path / "record.jsonl"
        path.write_text(json.dumps(record) + "\n")
        assert len(tg.read(path)) >= 1


def test_the_json_of_doctor_has_the_keys_of_the_page(at_home, capsys):
    (shown,) = (json.loads(block.text) for block in blocks("json") if block.page == "reference/findings.md")
    held_out = ["--held-out", "traces.jsonl"]  # so that there is a finding
    assert main(["doctor", "traces.jsonl", "--model", "model", "--json", *held_out]) == shown["exit_code"]
    said = json.loads(capsys.readouterr().out)
    assert shown.keys() == said.keys()
    assert shown["findings"][0].keys() == said["findings"][0].keys()


COMMANDS = [(block, words) for block in blocks("bash") for words in commands(block.text)]
OURS = [(block, words[1:]) for block, words in COMMANDS if words[0] == "tracegrad"]
OURS += [(block, words[words.index("-m") + 2 :]) for block, words in COMMANDS if words[0] == "torchrun"]


def test_the_parser_accepts_each_tracegrad_command():
    known = (
        set(config.options())
        | {f"online.{name}" for name in vars(OnlineConfig())}
        | {f"rollout.{name}" for name in vars(RolloutConfig())}
    )
    for block, words in OURS:
        try:
            _, overrides = parse(words)
        except SystemExit:
            pytest.fail(f"{block}: tracegrad {' '.join(words)} is refused")
        for name, _ in overrides:
            assert name in known or name.startswith("objective"), f"{block}: --{name}"
    assert {words[0] for _, words in OURS} == PARSED | RUN


@pytest.mark.parametrize("verb", sorted(RUN))
def test_commands_without_a_server_run(verb, at_home, tmp_path, capsys):
    seen = 0
    if verb == "train":  # a page trains from the output of the previous command
        assert main(["prepare", "traces.jsonl", "--model", "model", "--out", "prepared"]) == 0
    for block, words in OURS:
        if words[0] != verb or {"--judge", "--logprobs-from"} & set(words) or "--parallel.mode" in words:
            continue
        words = ["traces.jsonl" if word in ("runs.jsonl", "filled.jsonl") else word for word in words]
        for flag in ("--model", "--out"):
            if flag in words:
                place = "model" if flag == "--model" else str(tmp_path / f"out{seen}")
                words[words.index(flag) + 1] = place
        if verb == "init" and "--out" not in words:
            words += ["--out", str(tmp_path / f"run{seen}.toml")]
        words += ["--dry-run"] if verb == "train" else []
        assert main(words) == 0, f"{block}: tracegrad {' '.join(words)}: {capsys.readouterr()}"
        seen += 1
    assert seen


def test_other_programs_targets_and_extras_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = config.read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    for block, (program, *rest) in COMMANDS:
        if program == "make":
            assert rest[0] in targets, f"{block}: make {rest[0]}"
        elif program == "pip":
            assert rest[0] == "install"
            assert all(extra in extras for extra in re.findall(r"\[(\w+)\]", rest[1])), f"{block}: {rest[1]}"
        elif program == "python":
            script = (ROOT / rest[0]).read_text()
            assert all(f'"{flag}"' in script for flag in rest if flag.startswith("--")), f"{block}: {rest}"
        else:
            installs = ("git", "python3", "source") if block.page == "README.md" else ()
            assert program in ("tracegrad", "torchrun", "accelerate", *installs), f"{block}: {program}"


TABLES = ("study", "choosing", "recommended", "recovery", "faults", "checkpoint-test", "fill-clerk", "fill-speed")


@pytest.mark.parametrize("name", TABLES)
def test_a_script_replaces_its_table_and_nothing_else(name, tmp_path):
    page = tmp_path / "page.md"
    before = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text(encoding="utf-8")
    page.write_text(before, encoding="utf-8")
    put_table(page, name, ["| a |", "|---|"])
    head, after = before.split(f"<!-- table: {name} -->\n\n")
    rest = after[after.index("\n\n<!-- end -->") :]
    assert page.read_text(encoding="utf-8") == f"{head}<!-- table: {name} -->\n\n| a |\n|---|{rest}"
    with pytest.raises(ValueError, match="0 places"):
        put_table(page, "nothing", [])


def test_unmarked_and_unfenced_blocks_are_found(tmp_path):
    page = Path(tmp_path, "page.md")
    page.write_text("<!-- not run: no server -->\n```python\na\n```\n\n    code\n\n```bash\nb\n```\n")
    from doc_blocks import of_page

    assert [(block.line, block.language, block.reason) for block in of_page(page)] == [
        (2, "python", "no server"),
        (8, "bash", ""),
    ]
    assert indented(page) == [6]
