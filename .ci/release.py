"""What a release is checked for and what is added to it, for `.github/workflows/release.yml`.

`python .ci/release.py tag v0.1.0` ends with an error where the tag is not the version of Cargo.toml.
`python .ci/release.py files dist notes` looks whether `dist` holds the source and a wheel of each platform, nothing
else, and writes into `notes` the bill of materials out of each wheel and SHA256SUMS of all of them.
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
        sys.exit(f"the tag is {tag} and Cargo.toml says {version}: tag v{version}, or change the version first")


def of_one_version(dist: Path) -> list[Path]:
    """The source and the wheels, after it is sure that none is missing and none too many."""
    expected = ["tracegrad-*.tar.gz", *(f"tracegrad-*-cp310-abi3-{platform}.whl" for platform in PLATFORMS)]
    found = []
    for pattern in expected:
        files = list(dist.glob(pattern))
        if len(files) != 1:
            sys.exit(f"{dist} holds {len(files)} files like {pattern}; a release has one")
        found += files
    if others := {path.name for path in dist.iterdir()} - {path.name for path in found}:
        sys.exit(f"{dist} holds {sorted(others)}, which no release has")
    versions = {path.name.removesuffix(".tar.gz").split("-")[1] for path in found}
    if len(versions) != 1:
        sys.exit(f"{dist} holds files of {len(versions)} versions: {sorted(versions)}")
    return found


def bill_of(wheel: Path, notes: Path) -> Path:
    """The CycloneDX bill of materials that maturin has put into the wheel, beside it under the wheel's name."""
    with zipfile.ZipFile(wheel) as archive:
        bills = [name for name in archive.namelist() if re.search(r"\.dist-info/sboms/.*cyclonedx\.json$", name)]
        if len(bills) != 1:
            sys.exit(f"{wheel.name} holds {len(bills)} bills of materials of its Rust crates; it must hold one")
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
