"""Print the figures of the layout: top-level entries of the package, names that files share, imports that go up.

    python tools/figures.py

The order of packages is the table in DESIGN.md: a package may only import packages of smaller numbers.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, CORE = ROOT / "python" / "tracegrad", ROOT / "rust" / "core" / "src"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from file_imports import circles, package_order, python_imports, rust_imports, upward  # noqa: E402

PARALLEL = {"integrations", "recipes"}
"""Packages whose files may share names: one for each peer."""


def entries() -> list[str]:
    """Return the top-level entries of the package."""
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


def main() -> None:
    """Print all figures, and the counted things if they are few."""
    imports = python_imports(PACKAGE)
    top, stems = entries(), shared_stems()
    order = {name for row in package_order() for name in row}
    against = list(upward(imports))
    print(f"entries at the top of the package: {len(top)}")
    print(
        f"of which the order of packages names: {len({name.partition('.')[0] for name in top} & order)} of {len(order)}"
    )
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
