"""Shared code of the benches of the online loop: the example's task, CPU seconds of processes, and where results go."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
MODEL = QUICKSTART / "model"
sys.path[:0] = [str(QUICKSTART), str(ROOT / "tests" / "helpers")]

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def seconds_of(pid: int) -> float:
    """CPU seconds, user and system, of a process, all that it started and all that these have waited for."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended already
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
        spent[int(entry.name)] = TICK_S * sum(map(int, fields[11:15]))
    found, left = 0.0, [pid]
    while left:
        one = left.pop()
        found += spent.get(one, 0.0)
        left += parents.get(one, [])
    return found


def row(name: str, command: str, **told: Any) -> dict[str, Any]:
    """A row of the results: the measurement and its machine."""
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return {"name": name, **told, **machine, "python": platform.python_version(), "command": command}


def keep(path: Path | None, rows: list[Mapping[str, Any]]) -> None:
    """Writes rows, and replace rows of the same names, into a file of results."""
    if path is None:
        return
    before = json.loads(path.read_text()) if path.exists() else []
    names = {each["name"] for each in rows}
    path.write_text(json.dumps([*(each for each in before if each["name"] not in names), *rows], indent=1) + "\n")
