"""With numpy alone the commands that need no torch work: whatever else is installed cannot be imported here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tracegrad.cli import extras, main
from tracegrad.errors import ArgumentError

BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        head = name.partition(".")[0]
        known = head in {"numpy", "tracegrad"} or head.startswith("_sysconfigdata")
        if not known and head not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
from tracegrad.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bare(*words):
    done = subprocess.run([sys.executable, "-c", BARE, *map(str, words)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_reading_aligning_and_examining(example, tmp_path):
    some = tmp_path / "some.jsonl"
    status, said = bare(
        "prepare", example / "traces.jsonl.zst", "--model", example / "model", "--out", tmp_path / "out"
    )
    assert status == 0, said
    assert "next     tracegrad train" in said
    some.write_text('{"messages": [{"role": "user", "content": "?"}], "reward": 1}\n')
    assert bare("doctor", some, "--model", example / "model", "--json")[0] == 1
    assert bare("init", some, "--model", example / "model", "--out", tmp_path / "run.toml")[0] == 0


RUN = 'model = "m"\ntasks = "none.jsonl"\nout = "o"\n'
TRAIN = ["train", "none.jsonl", "--model", "m", "--out", "o"]
DOCTOR = ["doctor", "none.jsonl", "--model", "m"]
TORCH = "torch, transformers, safetensors"
MISSING = [
    (TRAIN, f"{TORCH} and tqdm", "tracegrad[train]"),
    ([*TRAIN, "--dry-run", "--from-config", "trl:peer.yaml"], "yaml", "pyyaml"),
    ([*DOCTOR, "--check-logprobs"], f"{TORCH} and tqdm", "tracegrad[train]"),
    (["merge", "none", "--out", "o"], f"{TORCH}, tqdm and peft", "tracegrad[lora]"),
    (["view", "none.jsonl"], "starlette and uvicorn", "tracegrad[view]"),
    (["online", "run.toml"], f"{TORCH}, tqdm, aiohttp", "tracegrad[online]"),
    (["online", "run.toml", "--collect", "0/1"], "aiohttp, starlette", "tracegrad[online]"),
    (["replay", "none", "--model", "m", "--out", "o"], f"{TORCH}, tqdm, aiohttp", "tracegrad[online]"),
    (["record", "a.py:b", "--tasks", "none", "--server", "u", "--out", "o"], "aiohttp", "tracegrad[online]"),
    (["proxy", "--server", "u", "--out", "o"], "aiohttp", "tracegrad[online]"),
    (["pull", "phoenix", "http://h", "--project", "p", "--out", "o"], "phoenix.client", "tracegrad[phoenix]"),
    (["pull", "mlflow", "http://h", "--project", "p", "--out", "o"], "mlflow", "tracegrad[mlflow]"),
    (["receive", "--out", "o"], "opentelemetry.proto, google.rpc, uvicorn and h11", "tracegrad[receive]"),
    (["score", "none.jsonl", "--judge", "http://h", "--out", "o"], "aiohttp and orjson", "tracegrad[online]"),
    (["prepare", "none.jsonl", "--model", "m", "--out", "o", "--ray"], "ray and pyarrow", "tracegrad[ray]"),
    (["prepare", "s3://b/none.jsonl", "--model", "m", "--out", "o"], "fsspec and s3fs", "tracegrad[cloud]"),
    (["prepare", "none.jsonl", "--model", "m", "--out", "gs://b/o"], "fsspec and gcsfs", "tracegrad[cloud]"),
    (["prepare", "t.jsonl", "tables", "--model", "m", "--out", "o"], "pyarrow", "tracegrad[arrow]"),
    (["doctor", "none.parquet", "--model", "m"], "pyarrow", "tracegrad[arrow]"),
    ([*DOCTOR, "--held-out", "none.arrow"], "pyarrow", "tracegrad[arrow]"),
    (["init", "tables"], "pyarrow", "tracegrad[arrow]"),
]
"""Commands, with the packages that they lack and what installs these. Files called `none` do not exist."""


MANY = BARE.replace(
    "sys.exit(main(sys.argv[1:]))",
    "import json; [print('exit', main([*words, '--json']), flush=True) for words in json.loads(sys.argv[1])]",
)
"""Runs several commands in one process, and prints the exit code of each after its output."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The folder in which the commands of MISSING ran, and what each printed on standard output."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "run.toml").write_text(RUN)
    (folder / "peer.yaml").write_text("beta: 0\n")
    (folder / "t.jsonl").write_text("not read\n")
    (folder / "tables").mkdir()
    (folder / "tables" / "a.parquet").write_bytes(b"PAR1 is not read PAR1")
    command = [sys.executable, "-c", MANY, json.dumps([words for words, _, _ in MISSING])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split("exit 1\n")


@pytest.mark.parametrize("number", range(len(MISSING)))
def test_a_missing_package_is_reported_before_any_input_is_read(refusals, number):
    folder, outputs = refusals
    _, packages, extra = MISSING[number]
    assert (len(outputs), outputs[-1]) == (len(MISSING) + 1, "")
    error = json.loads(outputs[number])["error"]
    assert error["code"] == "TG-CLI-011"
    assert f" needs {packages}" in error["message"]
    assert error["message"].rpartition("pip install ")[2] == (f"'{extra}'." if "[" in extra else f"{extra}.")
    assert not (folder / "o").exists()


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("wandb", ["--report-to", "tensorboard,wandb"], "wandb"),
        ("tensorboard", ["--report-to", "tensorboard"], "tensorboard"),
        ("trackio", ["--config", "run.toml"], "trackio"),
        ("peft", ["--train.lora_rank", "8"], "lora"),
        ("tqdm", [], "train"),
        ("vllm", None, ""),
    ],
)
def test_options_of_a_run_name_the_package_that_they_lack(package, options, extra, tmp_path, monkeypatch, capsys):
    """Also those of a file. `options` None: online, without a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "is_installed", lambda name: name != package)
    (tmp_path / "run.toml").write_text('[train]\nreport_to = ["trackio"]\n' if options else RUN)
    command = ["online", "run.toml"] if options is None else [*TRAIN, *options]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"TG-CLI-011: {'a run without --server' if options is None else ''}" in error
    assert f" needs {package}, which is not installed" in error
    assert (f"'tracegrad[{extra}]'" if extra else "pip install vllm") in error


def test_options_that_need_more_need_nothing_where_no_run_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    command = ["train", "none.jsonl", "--model", "m", "--out", str(tmp_path / "o"), "--report-to", "wandb"]
    assert main([*command, "--print-config"]) == 0
    assert main([*command, "--dry-run"]) == 1
    assert "TG-CLI-011" not in capsys.readouterr().err


@pytest.mark.parametrize(("has_encoder", "has_image", "refused"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_images_need_pillow_if_there_are_any(has_encoder, has_image, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "PIL")
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}} if has_encoder else {}))
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    content = [{"type": "text", "text": "?"}, *([image] if has_image else [])]
    trace = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}], "reward": 1}
    (tmp_path / "t.jsonl").write_text(json.dumps(trace) + "\n")
    if refused:
        with pytest.raises(ArgumentError) as raised:
            extras.check_images([str(tmp_path / "t.jsonl")], tmp_path)
        assert raised.value.code == "TG-CLI-011"
    else:
        extras.check_images([str(tmp_path / "t.jsonl")], tmp_path)


@pytest.mark.parametrize("has_images", [True, False])
def test_a_prepared_folder_needs_pillow_only_if_it_has_images(has_images, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "PIL")
    monkeypatch.setattr(extras.prepare, "is_prepared", lambda name: True)
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    (tmp_path / "shard-00000").mkdir()
    if not has_images:
        extras.check_images([str(tmp_path)], tmp_path)
        return
    (tmp_path / "shard-00000" / "media.bin").write_bytes(b"")
    with pytest.raises(ArgumentError, match="TG-CLI-011"):
        extras.check_images([str(tmp_path)], tmp_path)


def test_an_export_needs_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: name not in ("starlette", "uvicorn"))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": messages, "reward": 1}) + "\n")
    view = ["view", str(tmp_path / "t.jsonl"), "--index", str(tmp_path / "index")]
    assert main([*view, "--export", str(tmp_path / "a.html")]) == 0
    assert "2+2?" in (tmp_path / "a.html").read_text()
    assert main(view) == 1


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""One red pixel as a PNG."""


def test_the_extras_are_those_of_the_project():
    """Import names of pyproject's packages differ for a few, and two packages are needed otherwise."""
    projects = {"PIL": "pillow", "opentelemetry.proto": "opentelemetry-proto", "google.rpc": "googleapis-common-protos"}
    projects |= {"phoenix.client": "arize-phoenix-client", "mlflow": "mlflow-skinny"}
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for extra, packages in extras.EXTRAS.items():
        line = re.search(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)[1]
        names = {name.partition("[")[0] for name in re.findall(r'"([a-z0-9_-]+(?:\[data\])?)[>;=\"]', line)}
        expected = {projects.get(name, name) for name in packages} - {"pyarrow"} | (names & {"pyarrow"})
        unchecked = {"tomli"} | set(extras._FILE_SYSTEMS.values())
        assert names - unchecked == expected, extra
