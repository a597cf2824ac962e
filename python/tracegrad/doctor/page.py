"""The findings of docs/doctor.md, from the checks' own words, so that page and code cannot differ."""

import inspect

from tracegrad.doctor.examination import CHECKS
from tracegrad.doctor.finding import Check

BEGIN, END = "<!-- findings: python -m tracegrad.doctor docs/doctor.md -->", "<!-- end of findings -->"


def with_findings(page: str) -> str:
    """The page with everything between its two marks written anew."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{_index()}\n{''.join(_section(check) for check in CHECKS)}{END}{after}"


def _index() -> str:
    rows = ["| finding | what | a note from | costs from | wrong from |", "|---|---|---|---|---|"]
    for check in CHECKS:
        given = {level.name: share for level, share in check.levels.items()}
        cells = [_share(given.get(name), check.unit) for name in ("NOTE", "COSTS", "WRONG")]
        rows.append(f"| [{check.name}](#{check.name}) | {check.title} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _share(share: float | None, unit: str) -> str:
    if share is None:
        return ""
    if share == 0:
        return "any"
    return f"all {unit}" if share == 1 else f"{share:.0%} of {unit}"


def _section(check: Check) -> str:
    sees, threshold = (" ".join(part.split()) for part in inspect.cleandoc(check.run.__doc__ or "").split("\n\n"))
    return f"\n### {check.name}\n\n{sees}\n\n- {threshold}\n- Why it hurts: {check.hurts}\n- The cure: {check.cure}\n"
