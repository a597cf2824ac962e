"""What `make mutants` draws: evenly over the kinds of change, the same for a seed, and nothing that does not run."""

import sqlite3
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "fuzz"))

import mutants

SOURCE = '''"""One."""


def half(value: int | None = 1 + 1) -> int | None:
    """The half."""
    return value and value // 2
'''


def test_every_room_and_every_test_that_judges_it_is_there():
    assert all((ROOT / "python" / "tracegrad" / room / "__init__.py").is_file() for room in mutants.PYTHON)
    assert all((ROOT / "rust" / "core" / "src" / room / "mod.rs").is_file() for room in mutants.RUST)
    for room, tests in {**mutants.PYTHON, **mutants.RUST}.items():
        assert all((ROOT / mutants.test_file(name)).is_file() for name in tests), room


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_takes_by_turns_from_each_kind(seed):
    rows = [f"{kind}{number}" for kind, count in (("a", 9), ("b", 2), ("c", 1)) for number in range(count)]
    drawn = mutants.spread(rows, lambda row: row[0], 6, seed)
    assert sorted(row[0] for row in drawn) == ["a", "a", "a", "b", "b", "c"]
    assert drawn == mutants.spread(rows, lambda row: row[0], 6, seed)


def test_another_seed_is_another_sample():
    assert len({tuple(mutants.spread(range(50), lambda _: 0, 5, seed)) for seed in range(5)}) == 5


def test_annotations_and_docstrings_are_no_mutants_and_defaults_are(tmp_path):
    (tmp_path / "half.py").write_text(SOURCE)
    columns = [SOURCE.split("\n")[3].index(sign) for sign in ("|", "+")]
    places = [(1, 0), (4, columns[0]), (4, columns[1]), (4, SOURCE.split("\n")[3].rindex("|")), (5, 6), (6, 21)]
    with sqlite3.connect(tmp_path / "session.sqlite") as store:
        store.execute("create table work_items (job_id)")
        store.execute("create table mutation_specs (job_id, module_path, operator_name, start_pos_row, start_pos_col)")
        for job, (row, column) in enumerate(places):
            store.execute("insert into work_items values (?)", (str(job),))
            store.execute("insert into mutation_specs values (?, 'half.py', 'any', ?, ?)", (str(job), row, column))
    mutants._keep_sample(tmp_path / "session.sqlite", tmp_path, 9, 0)
    with sqlite3.connect(tmp_path / "session.sqlite") as store:
        for table in ("work_items", "mutation_specs"):
            assert [job for (job,) in store.execute(f"select job_id from {table} order by job_id")] == ["2", "5"]
