"""Change the code of a module in one place at a time, and count the changes that its tests find.

`python fuzz/mutants.py correction --sample 20 --seed 0`; `make mutants ROOM= SAMPLE= SEED=` calls it.

cosmic-ray changes Python modules in a copy of the tree. The doctests of the module and the test files listed below
judge them. cargo-mutants changes Rust modules. Their own Rust tests judge them, and Python tests judge the changes that
those do not find. The sample is drawn evenly over the kinds of change. Annotations and docstrings are not changed.
Results are stored in out/mutants, and the same command resumes there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Test files without test_ and .py, by the Python package that they test.
PYTHON = {
    "advantage": ["advantage", "advantage_terms", "ragged"],
    "packing": ["batch", "cost", "moving", "sharing", "ragged"],
    "trainer": [
        "adapted",
        "checkpoint",
        "learner",
        "loop",
        "loop_options",
        "rates",
        "run",
        "setup",
        "teeth_learner",
        "terms",
    ],
    "objective": [
        *("algebra", "idle", "every_field", "objective", "teeth_objective", "own_loss"),
        *("correction", "correction_parts", "correction_step", "conventions", "twins"),
        *("every_objective", "objective_presets", "policy_loss"),
    ],
}
RUST = {
    "align": ["align", "align_laws", "cases_tokens", "cases_history"],
    "format": ["formats_servers", "formats_dumps", "cases_formats", "bad_input", "trace"],
    "pack": ["batch", "cost", "moving", "sharing"],
    "ratio": ["correction", "correction_parts", "correction_step", "conventions", "twins"],
    "read": ["trace", "bad_input", "left_on_disk", "inputs_places"],
    "template": ["template", "template_limits", "cases_history"],
    "tokenizer": ["tokenizer", "tokenizer_kinds", "align"],
}
KEPT = ("docs", "examples", "fuzz", "tests", "python", "pyproject.toml", "README.md", "PARITY.md")
SECONDS = 600.0
"""Time limit of the tests of a mutant in seconds; a mutant that reaches it counts as found."""

Place = tuple[int, int]
Row = tuple[str, str, str, int, int]  # job, file, kind of change, row, column


def test_file(name: str) -> str:
    """Return the path of a test file below the root; `name` is without test_ and .py."""
    (found,) = (ROOT / "tests").glob(f"*/test_{name}.py")
    return found.relative_to(ROOT).as_posix()


def spread(rows: Iterable[Any], kind: Any, sample: int, seed: int) -> list[Any]:
    """Return a sample of rows, drawn in turn from each kind.

    >>> spread(["a1", "a2", "a3", "b1"], lambda row: row[0], 2, seed=0)
    ['b1', 'a1']
    """
    kinds = defaultdict(list)
    for row in rows:
        kinds[kind(row)].append(row)
    drawn = random.Random(seed)
    for each in kinds.values():
        drawn.shuffle(each)
    names = sorted(kinds)
    drawn.shuffle(names)
    turns = max(map(len, kinds.values()), default=0)
    return [kinds[name][at] for at in range(turns) for name in names if at < len(kinds[name])][:sample]


def unread(source: str) -> Iterator[tuple[Place, Place]]:
    """Return the start and end of annotations and docstrings as (row, column): no change there affects the code.

    >>> list(unread("low: int = 1"))
    [((1, 5), (1, 8))]
    """
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None), node if is_text else None):
            if isinstance(each, ast.expr | ast.stmt):
                yield (each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)


def copied(into: Path) -> Path:
    """Return a copy of the tree that may be changed, with the compiled extension of the imported package."""
    from tracegrad import _core

    tree = into / "tree"
    for name in KEPT:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    shutil.copy(_core.__file__, tree / "python" / "tracegrad")
    return tree


def python(room: str, sample: int, seed: int, out: Path) -> tuple[int, list[str]]:
    """Return the number of judged mutants of a Python package, and the changes that no test found."""
    ray = str(Path(sys.executable).with_name("cosmic-ray"))
    config, session = out / "cosmic-ray.toml", out / "session.sqlite"
    if not session.exists():
        tree = copied(out)
        tests = shlex.join([f"python/tracegrad/{room}", *map(test_file, PYTHON[room])])
        judge = "pytest -x -q -p no:cacheprovider --doctest-modules"
        command = f"env PYTHONPATH=python {sys.executable} -m {judge} {tests}"
        told = {"module-path": f"python/tracegrad/{room}", "timeout": SECONDS, "test-command": command}
        lines = ["[cosmic-ray]", *(f"{key} = {json.dumps(value)}" for key, value in told.items())]
        config.write_text(
            "\n".join([*lines, "excluded-modules = []", "[cosmic-ray.distributor]", 'name = "local"', ""])
        )
        subprocess.run(shlex.split(command), cwd=tree, check=True)  # no mutant is found by tests that fail anyway
        begun = session.with_suffix(".begun")
        subprocess.run([ray, "init", config, begun], cwd=tree, check=True)
        _keep_sample(begun, tree, sample, seed)
        begun.rename(session)
    subprocess.run([ray, "exec", config, session], cwd=out / "tree", check=True)
    with sqlite3.connect(session) as store:
        judged = store.execute("select test_outcome, diff from work_results").fetchall()
    return len(judged), [diff for outcome, diff in judged if outcome == "SURVIVED"]


def _keep_sample(session: Path, tree: Path, sample: int, seed: int) -> None:
    """Keep only the mutants of the sample in a session."""
    columns = "job_id, module_path, operator_name, start_pos_row, start_pos_col"
    with sqlite3.connect(session) as store:
        rows: list[Row] = store.execute(f"select {columns} from mutation_specs").fetchall()
        ranges = {path: list(unread((tree / path).read_text())) for path in {row[1] for row in rows}}
        read = [row for row in rows if not any(first <= row[3:] < last for first, last in ranges[row[1]])]
        read.sort(key=lambda row: row[1:])
        kept = {row[0] for row in spread(read, lambda row: row[2], sample, seed)}
        left = [(row[0],) for row in rows if row[0] not in kept]
        for table in ("mutation_specs", "work_items"):
            store.executemany(f"delete from {table} where job_id = ?", left)


def rust(room: str, sample: int, seed: int, out: Path) -> tuple[int, list[str]]:
    """Return the number of judged mutants of a Rust module, and those that no test in Rust or Python found."""
    if subprocess.run(["cargo", "mutants", "--version"], capture_output=True, check=False).returncode:
        raise SystemExit("cargo-mutants is not installed. Rust modules need it: cargo install cargo-mutants")
    which = ["--package", "tracegrad-core", "--file", f"rust/core/src/{room}/**"]
    listed = subprocess.run(
        ["cargo", "mutants", "--list", "--json", *which], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = sorted(json.loads(listed.stdout), key=lambda each: each["name"])
    chosen = spread(found, lambda each: each["genre"], sample, seed)
    wanted = [part for each in chosen for part in ("--re", f"^{re.escape(each['name'])}$")]
    told = ["--iterate", "--output", str(out), "--timeout", str(SECONDS), *which, *wanted, "--", "--lib", room]
    subprocess.run(["cargo", "mutants", *told], cwd=ROOT, check=False)  # its exit status is 2 if mutants are missed
    outcomes = json.loads((out / "mutants.out" / "outcomes.json").read_text())["outcomes"]
    judged = [each for each in outcomes if each["summary"] in ("CaughtMutant", "MissedMutant", "Timeout")]
    missed = [out / "mutants.out" / each["diff_path"] for each in judged if each["summary"] == "MissedMutant"]
    return len(judged), [diff.read_text() for diff in missed if not found_in_python(room, diff, out)]


def found_in_python(room: str, diff: Path, out: Path) -> bool:
    """Return whether the Python tests find a change of Rust. The result is stored next to the diff."""
    verdict = diff.with_suffix(".python")
    if not verdict.exists():
        tree = out / "tree" if (out / "tree").exists() else copied(out)
        for name in ("rust", "benches"):
            shutil.rmtree(tree / name, ignore_errors=True)
            shutil.copytree(ROOT / name, tree / name)
        for name in ("Cargo.toml", "Cargo.lock"):
            shutil.copy(ROOT / name, tree)
        subprocess.run(["patch", "--quiet", "-p0", "-i", diff], cwd=tree, check=True)
        target = ROOT / "target" / "mutants"
        told = {**os.environ, "CARGO_TARGET_DIR": str(target), "PYO3_BUILD_EXTENSION_MODULE": "1"}
        told["PYO3_PYTHON"] = sys.executable
        subprocess.run(["cargo", "build", "--quiet", "-p", "tracegrad-py"], cwd=tree, env=told, check=True)
        shutil.copy(target / "debug" / "lib_core.so", tree / "python" / "tracegrad" / "_core.abi3.so")
        tests = list(map(test_file, RUST[room]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *tests]
        done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": "python"}, check=False)
        verdict.write_text(str(done.returncode))
    return verdict.read_text() != "0"


def main(arguments: list[str] | None = None) -> int:
    """Judge a sample and print the changes that no test found. Return 1 if they are more than one in twenty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", choices=[*PYTHON, *RUST])
    parser.add_argument("--sample", type=int, default=20, help="mutants to judge")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another sample")
    told = parser.parse_args(arguments)
    out = ROOT / "out" / "mutants" / f"{told.room}-{told.seed}-{told.sample}"
    out.mkdir(parents=True, exist_ok=True)
    judge = python if told.room in PYTHON else rust
    judged, missed = judge(told.room, told.sample, told.seed, out)
    for each in missed:
        print(each, end="\n\n")
    print(f"{told.room}: of {judged} changes {judged - len(missed)} were found by a test, {len(missed)} by none")
    return int(20 * len(missed) > judged)


if __name__ == "__main__":
    sys.exit(main())
