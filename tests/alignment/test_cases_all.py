"""Every case of the numbered list of nasty records is a test with its number in its name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"cases?_(\d\d)")


def numbers(paths):
    """Numbers that stand in the names of test functions, and in their ids."""
    found = set()
    for path in paths:
        for line in path.read_text().splitlines():
            if re.match(r"\s*(def test_|fn )|.*ids=\[", line):
                found |= {int(number) for number in NAME.findall(line)}
    return found


def test_no_case_is_missing():
    found = numbers([*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "rust" / "core" / "src").rglob("*.rs")])
    assert found <= set(range(1, 66))
    assert set(range(1, 66)) - found == set()
