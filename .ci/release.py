"""Check a release, and add bills of materials to it, for `.github/workflows/release.yml`.

`python .ci/release.py tag v0.1.0` fails if the tag is not the version of Cargo.toml.
`python .ci/release.py files dist notes` checks that `dist` has only the source and one wheel of each platform. It
writes the bill of materials of each wheel and SHA256SUMS of all files to `notes`.
"""

import hashlib
import re
import sys
import zipfile
from pathlib import Path

PLATFORMS = ("manylinux*_x86_64", "manylinux*_aarch64", "macosx_*_arm64", "macosx_*_x86_64")


def check_tag(tag: str) -> None:
    manifest = (Path(__file__).parent.parent / "Cargo.toml").read_text()
    version = re.search(r'^\[workspace\.package\]\nversion = "(.+)"$', manifest, re.MULTILINE)[1]
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag} but Cargo.toml has {version}: tag v{version}, or change the version first")


def of_one_version(dist: Path) -> list[Path]:
    """Return the source and the wheels, after a check that none is missing and none is superfluous."""
    expected = ["tracegrad-*.tar.gz", *(f"tracegrad-*-cp310-abi3-{platform}.whl" for platform in PLATFORMS)]
    found = []
    for pattern in expected:
        files = list(dist.glob(pattern))
        if len(files) != 1:
            sys.exit(f"{dist} has {len(files)} files like {pattern}; a release has one")
        found += files
    if others := {path.name for path in dist.iterdir()} - {path.name for path in found}:
        sys.exit(f"{dist} has {sorted(others)}, which no release has")
    versions = {path.name.removesuffix(".tar.gz").split("-")[1] for path in found}
    if len(versions) != 1:
        sys.exit(f"{dist} has files of {len(versions)} versions: {sorted(versions)}")
    return found


def bill_of(wheel: Path, notes: Path) -> Path:
    """Copy the CycloneDX bill of materials, which maturin wrote into the wheel, next to it under its name."""
    with zipfile.ZipFile(wheel) as archive:
        bills = [name for name in archive.namelist() if re.search(r"\.dist-info/sboms/.*cyclonedx\.json$", name)]
        if len(bills) != 1:
            sys.exit(f"{wheel.name} has {len(bills)} bills of materials of its Rust crates; it must have one")
        path = notes / f"{wheel.stem}.cdx.json"
        path.write_bytes(archive.read(bills[0]))
    return path


def add_notes(dist: Path, notes: Path) -> None:
    released = of_one_version(dist)
    notes.mkdir(parents=True, exist_ok=True)
    released += [bill_of(path, notes) for path in released if path.suffix == ".whl"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in released]
    (notes / "SHA256SUMS").write_text("".join(sorted(lines, key=lambda line: line.split()[1])))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tag", tag]:
            check_tag(tag)
        case ["files", dist, notes]:
            add_notes(Path(dist), Path(notes))
        case _:
            sys.exit(__doc__)
