"""Print the figures of the layout: what stands at the top of the package, names that files share, imports that go up.

    python tools/figures.py

The order of packages is that of `ORDER`: a package may import those of smaller numbers alone.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, CORE = ROOT / "python" / "tracegrad", ROOT / "rust" / "core" / "src"
sys.path.insert(0, str(ROOT / "tests"))

from file_imports import circles, python_imports, rust_imports  # noqa: E402

ORDER = [
    ["errors", "_validation", "_signals", "_html", "_core"],
    ["config", "storage", "user_code"],
    ["images"],
    ["data"],
    ["alignment"],
    ["advantage", "objective"],
    ["packing"],
    ["metrics"],
    ["model"],
    ["recipes", "prepare", "report"],
    ["trainer"],
    ["doctor", "view"],
    ["rollout", "rewards", "weight_sync"],
    ["online"],
    ["integrations", "cli", "__main__"],
]
"""Packages and modules bottom up."""
PLACES = {name: number for number, names in enumerate(ORDER, 1) for name in names}
PARALLEL = {"integrations", "recipes"}
"""Packages whose files may share names: one for each peer."""


def entries() -> list[str]:
    """Return what stands at the top of the package."""
    kept = [each for each in PACKAGE.iterdir() if each.name != "__pycache__" and each.suffix != ".so"]
    return sorted(each.name for each in kept)


def shared_stems() -> dict[str, list[str]]:
    """Return the names that several files of the package have, each with those files."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            found[path.stem].append(str(path.relative_to(PACKAGE)))
    return {
        stem: paths
        for stem, paths in found.items()
        if len(paths) > 1 and not {Path(path).parts[0] for path in paths} <= PARALLEL
    }


def upward(imports: dict[str, set[str]]) -> Iterator[str]:
    """Yield the imports that go against the order, of files whose package has a place in it."""

    def package(path: str) -> str:
        return Path(path).parts[0].removesuffix(".py")

    for path, others in sorted(imports.items()):
        for other in sorted(others):
            here, there = package(path), package(other)
            if here != there and here in PLACES and there in PLACES and PLACES[there] >= PLACES[here]:
                yield f"{path} imports {other}"


def main() -> None:
    """Print all figures, and what they count where that is short."""
    imports = python_imports(PACKAGE)
    top, stems = entries(), shared_stems()
    placed = {name.removesuffix(".py") for name in top} & set(PLACES)
    against = list(upward(imports))
    print(f"entries at the top of the package: {len(top)}")
    print(f"of which the order of packages names: {len(placed)} of {len(PLACES)}")
    print(f"names that unlike files share: {len(stems)}")
    print(f"circles of imports: {len(circles(imports))} in Python, {len(circles(rust_imports(CORE)))} in Rust")
    print(f"imports against the order of packages: {len(against)}")
    for name, count in Counter(line.split(" imports ")[0].split("/")[0] for line in against).most_common():
        print(f"  from {name}: {count}")
    for suffix, folders in ((".py", ["python"]), (".rs", ["rust"])):
        files = [path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}")]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        print(f"files *{suffix}: {len(files)}, lines {lines:,}")


if __name__ == "__main__":
    main()
