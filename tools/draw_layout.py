"""Draw the packages and their imports as one SVG: `python tools/draw_layout.py docs/layout.svg`.

`make layout` runs it; tests/project/test_layers.py checks that the picture is up to date. A line means that the upper
package imports the lower one. If it also reaches it through a third one, only that longer way is drawn.
"""

import re
import sys
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from file_imports import Imports, python_imports, rust_imports

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "python" / "tracegrad"
RUST = ROOT / "rust" / "core" / "src"
STEPS = {
    "data": "1",
    "alignment": "2",
    "advantage": "3",
    "packing": "4",
    "model": "5",
    "objective": "6",
    "trainer": "7",
}
"""The steps of the data flow in DESIGN.md, at the packages that take them."""
ABOVE = "python/tracegrad: packages import downwards. Blue: the steps of the data flow. Dot: calls the Rust core."
UNDER = "rust/core: reads, aligns, computes detached weights, packs. rust/py hands arrays over."
STYLE = """<style>
text{font:13px sans-serif}
path{fill:none;stroke:#8a96a3} rect{fill:#f2f4f7;stroke:#5b6773} rect.walk{fill:#dcebff;stroke:#2463b0}
text{text-anchor:middle;fill:#1b2229} .step{fill:#2463b0;font-weight:bold} .note{text-anchor:start;fill:#5b6773}
circle{fill:#b3541e} .ground{fill:#fff;stroke:none}
</style>"""
WIDTH, HEIGHT, APART, BELOW = 128, 26, 140, 74

Uses = dict[str, set[str]]


def room(path: str) -> str:
    return path.split("/")[0].split(".")[0]


def uses(imports: Imports, packages: set[str]) -> Uses:
    """Return which of `packages` each of them imports, directly or through other files."""
    direct: Uses = {}
    for path, others in imports.items():
        direct.setdefault(room(path), set()).update({room(other) for other in others} - {room(path)})
    reached: Uses = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set()
            reached[name] = direct.get(name, set()).union(*(reach(other) for other in direct.get(name, ())))
        return reached[name]

    return {name: reach(name) & packages - {name} for name in sorted(packages)}


def lines(graph: Uses) -> Uses:
    """The lines that say all of a graph: without those that two others say."""
    return {name: {o for o in below if not any(o in graph[via] for via in below)} for name, below in graph.items()}


def floors(graph: Uses) -> list[list[str]]:
    """Rooms by floor, from the top: each right below the lowest that uses it, ordered so that lines are short."""
    depth: dict[str, int] = {}
    for name in sorted(graph, key=lambda name: (sum(name in below for below in graph.values()), name)):
        depth[name] = 1 + max((depth[user] for user, below in graph.items() if name in below), default=-1)
    rows = [[name for name in graph if depth[name] == level] for level in range(max(depth.values()) + 1)]
    pairs = [(name, other) for name, below in lines(graph).items() for other in sorted(below)]

    def length() -> float:
        place = places(rows)
        return round(sum(abs(place[name][0] - place[other][0]) for name, other in pairs), 6)

    shortest, before = length(), None
    while shortest != before:
        before = shortest
        for row in rows:
            for first, second in combinations(range(len(row)), 2):
                row[first], row[second] = row[second], row[first]
                if length() < shortest:
                    shortest = length()
                else:
                    row[first], row[second] = row[second], row[first]
    return rows


def places(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """The middle of each box."""
    widest = max(map(len, rows)) * APART
    return {
        name: ((at + 0.5) * widest / len(row), level * BELOW + HEIGHT / 2)
        for level, row in enumerate(rows)
        for at, name in enumerate(row)
    }


def band(graph: Uses, left: float, top: float, marked: set[str]) -> tuple[list[str], float, float]:
    """Return one graph as SVG, and its right and lower edges. `marked` packages have a dot."""
    rows = floors(graph)
    place = {name: (left + x, top + y) for name, (x, y) in places(rows).items()}
    svg = []
    for name, below in lines(graph).items():
        for other in sorted(below):
            (x, y), (to_x, to_y) = place[name], place[other]
            y, to_y = y + HEIGHT / 2, to_y - HEIGHT / 2
            bend = (to_y - y) / 2
            svg.append(f'<path d="M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"/>')
    for name, (x, y) in place.items():
        kind = ' class="walk"' if name in STEPS and marked else ""
        svg.append(
            f'<rect{kind} x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
        )
        step = f'<tspan class="step" dx="6">{STEPS[name]}</tspan>' if kind else ""
        svg.append(f'<text x="{x:g}" y="{y + 4.5:g}">{name}{step}</text>')
        if name in marked:
            svg.append(f'<circle cx="{x - WIDTH / 2 + 8:g}" cy="{y:g}" r="2.5"/>')
    return svg, left + max(map(len, rows)) * APART, top + (len(rows) - 1) * BELOW + HEIGHT


def drawn() -> str:
    """Return the picture: the Python packages, and below them the modules of the Rust core."""
    imports = python_imports(PYTHON)
    packages = {path.name for path in PYTHON.iterdir() if (path / "__init__.py").exists()}
    core = {room(path) for path in imports if re.search(r"import.*\b_core\b|_core import", (PYTHON / path).read_text())}
    python, right, bottom = band(uses(imports, packages), 10, 40, core & packages)
    rust_modules = {path.name for path in RUST.iterdir() if (path / "mod.rs").exists()} | {"trace"}
    rust, _, end = band(uses(rust_imports(RUST), rust_modules), 10, bottom + 60, set())
    width, height = f"{right + 10:g}", f"{end + 14:g}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            STYLE,
            f'<rect class="ground" width="{width}" height="{height}"/>',
            f'<text class="note" x="10" y="20">{ABOVE}</text>',
            *python,
            f'<text class="note" x="10" y="{bottom + 44:g}">{UNDER}</text>',
            *rust,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn())
