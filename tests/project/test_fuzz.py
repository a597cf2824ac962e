"""A few seconds of the fuzzers that are Python, and what `make nightly` runs of all."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """fuzz/run.py by its path, for benches/ has scripts of that name too."""
    sys.path.insert(0, str(ROOT / "fuzz"))
    spec = importlib.util.spec_from_file_location("fuzz_run", ROOT / "fuzz" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "target", ["shards", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("checkpoints", "tables"))]
)
def test_a_changed_folder_loads_as_it_was_or_is_an_error_of_ours(target: str, tmp_path: Path) -> None:
    pytest.importorskip({"checkpoints": "torch", "tables": "pyarrow"}.get(target, "json"))
    command = [
        sys.executable,
        str(ROOT / "fuzz/run.py"),
        target,
        "--seconds",
        "2",
        "--seed",
        "1",
        "--out",
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    folders, refused, loaded = (int(run.stdout.split()[at]) for at in (1, -4, -2))
    assert folders > 20, run.stdout
    assert refused, run.stdout
    assert loaded, run.stdout


@pytest.mark.parametrize("target", ["prepared", "images", "bodies", "addresses", "scores"])
@pytest.mark.first_cases(1)
def test_two_seconds_of_a_fuzzer_find_nothing(target: str, tmp_path: Path) -> None:
    needed = {"images": "PIL", "bodies": "aiohttp", "addresses": "starlette"}
    pytest.importorskip(needed.get(target, "json"))
    command = [sys.executable, str(ROOT / "fuzz/run.py"), target, "--seconds", "2", "--seed", "1"]
    run = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    inputs, refused, taken = (int(run.stdout.split()[at]) for at in (1, -4, -2))
    assert inputs > 9, run.stdout
    assert refused, run.stdout
    assert taken, run.stdout


def test_an_hour_of_each_fuzzer_is_nightly(fuzz: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = next(line for line in makefile.splitlines() if line.startswith("FUZZERS"))
    assert set(named.split()[2:]) == {*fuzz.IN_RUST, *fuzz.IN_PYTHON, *fuzz.MUTATED}
    assert "$(addprefix fuzz-,$(FUZZERS))" in makefile
    assert "fuzz/run.py $* --seconds $(or $(SECONDS),3600)" in makefile


@pytest.mark.parametrize("target", ["records", "events", "templates", "tokenizers"])
@pytest.mark.first_cases(2)
def test_every_fuzzer_begins_with_files_that_are_right(target: str, fuzz: ModuleType, tmp_path: Path) -> None:
    fuzz.seeds(target, tmp_path / "seeds", [])
    assert len(list((tmp_path / "seeds").iterdir())) > 9
    assert len((tmp_path / "words").read_text().splitlines()) > 50
