"""`make bench-counts`: which growth of a stage fails, and a row for each stage of the workload."""

import doctest
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches"))

import counts

ROW = {"unit": "token", "units": 10, "instructions": 20_000_000, "allocations": 1_000, "peak": 2_000_000}


def test_its_examples():
    assert doctest.testmod(counts) == doctest.TestResults(failed=0, attempted=4)


@pytest.mark.parametrize(
    ("now", "code", "said"),
    [
        ({}, 0, ""),
        ({"instructions": 21_000_000, "allocations": 1_064, "peak": 2_100_000}, 0, ""),
        ({"instructions": 21_020_000}, 1, "align: instructions 20,000,000 -> 21,020,000 (+5.1 %)"),
        ({"allocations": 1_070}, 1, "align: allocations 1,000 -> 1,070 (+7.0 %)"),
        ({"peak": 2_110_000}, 1, "align: peak 2,000,000 -> 2,110,000 (+5.5 %)"),
    ],
)
def test_a_stage_that_has_grown_fails(tmp_path, monkeypatch, capsys, now, code, said):
    kept = tmp_path / "counts.json"
    kept.write_text(json.dumps({"machine": "this", "stages": {"align": ROW, "pack": ROW}}))
    monkeypatch.setattr(counts, "machine", lambda: "this")
    monkeypatch.setattr(counts, "KEPT", kept)
    monkeypatch.setattr(counts, "measured", lambda only: {"align": {**ROW, **now}})
    monkeypatch.setattr(counts.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["counts.py"])
    assert counts.main() == code
    assert capsys.readouterr().out.partition("\n")[0] == said
    monkeypatch.setattr(counts, "machine", lambda: "another")
    assert counts.main() == 0
    assert ("this is another" in capsys.readouterr().out) == bool(code)
    monkeypatch.setattr(sys, "argv", ["counts.py", "--write", "--only", "align"])
    assert counts.main() == 0
    stages = {"align": {**ROW, **now}, "pack": ROW}
    assert json.loads(kept.read_text()) == {"machine": "another", "stages": stages}


def test_every_stage_has_its_row():
    source = (ROOT / "benches" / "counts.rs").read_text()
    kept = json.loads(counts.KEPT.read_text())["stages"]
    assert len(kept) == 21
    assert {name.split()[0] for name in kept} == {"read", "align", "render", "correct", "pack"}
    assert all(f'"{name.split()[0]}' in source for name in kept)
