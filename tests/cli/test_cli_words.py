"""Help for new users: suggested flags and next commands, and the provenance of a run."""

import ast
import hashlib
import json
import re
import subprocess
from pathlib import Path

import pytest

import sources
from tracegrad.cli import main
from tracegrad.cli.args import AS_FLAGS, MEANT, as_flags, flag_meant_by
from tracegrad.config import options
from tracegrad.data import provenance

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TRAIN = ["train", "t.jsonl", "--model", "m", "--out", "o"]


def usage(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--lr", "--optimizer.lr"),
        ("--learning-rate", "--optimizer.lr"),
        ("--learning_rate", "--optimizer.lr"),
        ("--batch-size", "--train.groups_per_step"),
        ("--max-seq-length", "--pack.tokens_per_row"),
        ("--reward", "--map.reward"),
        ("--output-dir", "--out"),
        ("--loss", "--objective"),
    ],
)
def test_flags_of_other_trainers_are_suggested(given, wanted, capsys):
    assert f"Did you mean {wanted}?" in usage([*TRAIN, given, "1"], capsys)


def test_suggested_flags_exist():
    flags = {"epochs", "objective", "model", "out", "resume"}
    assert set(MEANT) <= {*options(), *flags}
    assert flag_meant_by("--nothing", ["optimizer.lr"]) is None


@pytest.mark.parametrize(("given", "wanted"), [("dapo", "DAPO"), ("Grpo", "GRPO"), ("topr-positive", "TOPR_POSITIVE")])
def test_an_objective_in_another_case_is_suggested(given, wanted, capsys):
    assert main([*TRAIN, "--objective", given, "--print-config"]) == 1
    assert f"Did you mean {wanted}?" in capsys.readouterr().err


def text(path, **more):
    rows = [{"prompt": "2 × lamp", "response": f"It costs {n}.", "score": n % 2, **more} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prepare_prints_the_next_command(tmp_path, capsys):
    path = text(tmp_path / "t.jsonl")
    out = tmp_path / "o"
    assert main(["prepare", path, "--model", str(MODEL), "--out", str(out), "--map.reward", "score"]) == 0
    said = capsys.readouterr().out
    assert f"next     tracegrad prepare {path} --model {MODEL} --out {out}-text --map.reward score --text-only" in said
    command = ["prepare", path, "--model", str(MODEL), "--out", str(tmp_path / "p"), "--text-only", "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["next"] == [f"tracegrad doctor {path} --model {MODEL}"], "no reward is known"
    command[5] = str(tmp_path / "q")
    assert main([*command, "--map.reward", "score", "--map.group", "prompt"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["terms"] > 0
    assert told["next"][0].endswith("--objective TOPR_POSITIVE --text-only")


def test_errors_of_single_sample_groups_name_flags(tmp_path, capsys):
    path = text(tmp_path / "t.jsonl")
    command = ["train", path, "--model", str(MODEL), "--out", str(tmp_path / "o"), "--text-only", "--dry-run"]
    told = ["--objective", "TOPR_POSITIVE", "--map.reward", "score", "--data.holdout", "0"]
    assert main([*command, *told]) == 1
    error = capsys.readouterr().err
    assert f"TG-TRAIN-006: trace '{path}:1' " in error
    assert "--map.group prompt" in error
    assert "single_sample_group=" not in error
    assert main([*command, *told, "--map.group", "prompt"]) == 0
    capsys.readouterr()
    assert main([*command, *told[:2], "--map.group", "prompt"]) == 1
    assert "no trace has a reward" in capsys.readouterr().err


def test_text_without_logprobs_gets_a_suitable_objective(tmp_path, capsys):
    path = text(tmp_path / "t.jsonl")
    told = ["--map.reward", "score", "--map.group", "prompt", "--data.holdout", "0", "--dry-run"]
    assert main(["train", path, "--model", str(MODEL), "--out", str(tmp_path / "o"), *told]) == 1
    error = capsys.readouterr().err
    assert "--objective TOPR_POSITIVE" in error
    assert error.count("T6") == error.count("TOPR_POSITIVE") == error.count("WEIGHTED_SFT") == 1


def test_an_unavailable_hub_id_is_one_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = text(tmp_path / "t.jsonl")
    assert main(["doctor", path, "--model", "nobody/nothing-such"]) == 1
    error = capsys.readouterr().err
    assert "--model nobody/nothing-such: this folder does not exist, and it cannot be downloaded from the Hub" in error
    assert len(error.strip().splitlines()) == 1


def test_provenance_has_files_hashes_and_the_commit(tmp_path, monkeypatch):
    path = Path(text(tmp_path / "t.jsonl"))
    monkeypatch.chdir(tmp_path)
    found = provenance.provenance([str(path), "-"], MODEL)
    wanted = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["traces"][0] == {"path": str(path), "bytes": path.stat().st_size, "sha256": wanted}
    assert found["traces"][1] == {"path": "-", "bytes": None, "sha256": None}
    assert len(found["model"]["sha256"]) == 64
    assert provenance.provenance([str(path)], tmp_path)["model"] != found["model"]
    told = {"cwd": tmp_path, "check": True, "capture_output": True}
    subprocess.run(["git", "init", "-q", "."], **told)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], **told)
    head = subprocess.run(["git", "rev-parse", "HEAD"], text=True, **told).stdout.strip()
    assert provenance.commit(tmp_path) == head


@pytest.mark.parametrize("comment", ["", "# my run\n\n"])
def test_a_config_gets_one_header(tmp_path, comment):
    made_of = {"traces": [], "model": {"path": "m", "sha256": "0"}, "version": "1", "commit": None}
    path = tmp_path / "config.toml"
    path.write_text("train.epochs = 1\n")
    provenance.write_header(path, made_of)
    header, _, options = path.read_text().partition("\n\n")
    assert header.splitlines() == ["# made of", "# model m sha256 0", "# tracegrad 1"]
    assert options == "train.epochs = 1\n"
    path.write_text(comment + path.read_text())
    before = path.read_text()
    provenance.write_header(path, made_of)
    assert path.read_text() == before


def test_a_run_saves_its_provenance(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = text(tmp_path / "t.jsonl")
    out = tmp_path / "o"
    told = ["--objective", "TOPR_POSITIVE", "--text-only", "--map.reward", "score", "--map.group", "prompt"]
    command = ["train", path, "--model", str(MODEL), "--out", str(out), *told, "--data.holdout", "0"]
    assert main(command) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["provenance"] == provenance.provenance([path], MODEL)
    config = (out / "config.toml").read_text()
    assert f"# traces {path} sha256 {summary['provenance']['traces'][0]['sha256']}" in config
    assert main([*command, "--resume", "--train.epochs", "2"]) == 0
    assert (out / "config.toml").read_text().count("# made of") == 1


def test_the_estimate_line_distinguishes_unreliable_and_no_longer_reliable():
    from tracegrad.cli.train import _estimate_line

    known = {
        "ope": 0.5,
        "ope_low": 0.3,
        "ope_high": 0.75,
        "ope_reliable": 1,
        "ope_ess": 9.0,
        "ope_traces": 9,
        "ope_recorded_reward": 0.4,
    }
    lost = {**known, "ope_reliable": 0}
    assert _estimate_line([known, lost])[0].startswith("eval     estimate no longer reliable")
    assert _estimate_line([lost, lost])[0].startswith("eval     estimate unreliable")
    assert _estimate_line([known])[0] == (
        "eval     held-out reward 0.400 as recorded, 0.500 estimated now "
        "(0.300 to 0.750, effective sample size 9 of 9 held-out traces)"
    )
    clamped = {**lost, "ope_clamped": 2}
    assert _estimate_line([clamped])[0].endswith(
        "effective sample size 9 of 9 held-out traces, 2 with a clamped weight"
    )


def test_a_dry_run_is_one_object(tmp_path, capsys):
    pytest.importorskip("torch")
    path = text(tmp_path / "t.jsonl")
    told = ["--objective", "TOPR_POSITIVE", "--text-only", "--map.reward", "score", "--map.group", "prompt"]
    command = ["train", path, "--model", str(MODEL), "--out", str(tmp_path / "o"), *told, "--data.holdout", "0"]
    assert main([*command, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["would"]["steps"], found["would"]["trained"], found["traces"]) == (
        1,
        {"traces": 4, "tokens": 32},
        4,
    )
    assert found["config"]["map.reward"] == "score"


ROOT = Path(__file__).parents[2]
ARGUMENT = re.compile(r"""(?<![-\w])[a-z_]{2,}=(?:True|False|None|["'A-Z\d]|[.,](?:\s|$)|$)""")
# The first is not an argument of this package, and commands read each file with the second.
OTHERS = ('mode="json"', 'format="auto"')
# Errors of arguments that only Python can pass. Their messages name the arguments.
FROM_PYTHON = ("advantage", "integrations", "metrics", "objective", "recipes")
FROM_PYTHON += (
    "packing/packing.py",
    "data/read_options.py",
    "trainer/optim.py",
    "trainer/trainer.py",
    "prepare/part.py",
    "rollout/policy.py",
)


def said(text):
    """Return a text with the code of its replacement fields in braces."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    told = (part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}" for part in parts)
    return "".join(map(str, told)).replace("{IN_PROCESS}", "'in-process'")


def messages():
    """Yield error texts of the modules that commands use, and of the core."""
    for path in sources.package_files():
        if not str(path.relative_to(sources.PACKAGE)).startswith(FROM_PYTHON):
            for call in (node for node in sources.nodes(path) if isinstance(node, ast.Call)):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if re.search("Error$|Fault$|^_?unwritten$", name):
                    yield from (
                        (path, said(part)) for part in call.args if isinstance(part, ast.JoinedStr | ast.Constant)
                    )
    for path in (ROOT / "rust").rglob("*.rs"):
        if "tests" not in path.parts and path.parent.name not in ("ratio", "correction"):
            for told in re.findall(
                r'\.(?:cure|why|new)\((?:Kind::\w+,\s*)?(?:format!\()?"((?:[^"\\]|\\.)*)"', path.read_text()
            ):
                yield path, told.replace('\\"', '"')


def test_errors_of_commands_name_flags_and_not_python_arguments():
    texts = list(messages())
    found = {as_flags(text): path.name for path, text in texts}
    wrong = [(name, text) for text, name in found.items() if ARGUMENT.search(re.sub("|".join(OTHERS), "", text))]
    assert wrong == [], wrong
    # A text that no error contains must be removed from the table.
    core = [path.read_text().replace('\\"', '"') for path in (ROOT / "rust" / "core" / "src").rglob("*.rs")]
    every = "\n".join([*(text for _, text in texts), *core])
    gone = [argument for argument in AS_FLAGS if argument not in every]
    assert gone == [], gone


def test_errors_of_user_code_are_not_changed():
    told = "resume=True\nTraceback (most recent call last):\n  train(resume=True)"
    assert as_flags(told) == "--resume\nTraceback (most recent call last):\n  train(resume=True)"
