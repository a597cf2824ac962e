"""The workflows of a release: each platform is built and tested, actions are pinned, only tested tags are published."""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TEXTS = {path.stem: path.read_text() for path in FILES}
FLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
RELEASE = FLOWS["release"]["jobs"]
TAGGED = "github.event_name == 'push' && github.ref_type == 'tag'"
WHEELS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_11_0_arm64", "macosx_10_12_x86_64")


def began_by(flow):
    return flow[True]  # YAML 1.1 reads `on` as a boolean.


def commands(job):
    return "\n".join(step.get("run", "") for step in job.get("steps", []))


def actions(job):
    return [step["uses"].split("@")[0] for step in job.get("steps", []) if "uses" in step]


def needed(name):
    """The jobs that a job waits for, and those that they wait for."""
    told = RELEASE[name].get("needs", [])
    direct = {told} if isinstance(told, str) else set(told)
    return direct.union(*map(needed, direct))


# --- what is built and tested ---


def test_each_platform_is_built_on_a_runner_of_its_own_kind():
    assert {(one["platform"], one["runner"]) for one in RELEASE["wheels"]["strategy"]["matrix"]["include"]} == {
        ("manylinux-x86_64", "ubuntu-24.04"),
        ("manylinux-aarch64", "ubuntu-24.04-arm"),
        ("macos-arm64", "macos-15"),
        ("macos-x86_64", "macos-15-intel"),
    }


def test_the_wheel_test_runs_on_each_platform_after_the_build_and_before_the_upload():
    steps = RELEASE["wheels"]["steps"]
    build, test, upload = (
        next(number for number, step in enumerate(steps) if word in step.get("run", step.get("uses")))
        for word in ("maturin build", "make test-wheel", "upload-artifact")
    )
    assert build < test < upload
    assert not any({"if", "continue-on-error"} & step.keys() for step in steps)
    assert "3.10" in str(next(step["with"] for step in steps if "setup-python" in step.get("uses", "")))


def test_linux_wheels_are_manylinux_as_those_of_make_wheel_and_one_job_makes_the_source():
    linux = "--zig --compatibility manylinux_2_28"
    assert linux in (ROOT / "Makefile").read_text()
    options = {one["platform"]: one["options"] for one in RELEASE["wheels"]["strategy"]["matrix"]["include"]}
    assert all((linux in option) == ("manylinux" in name) for name, option in options.items())
    assert sum("--sdist" in option for option in options.values()) == 1


def test_every_change_is_checked_and_tested_by_the_commands_of_contributors():
    flow = FLOWS["ci"]
    assert {"push", "pull_request", "workflow_call"} <= began_by(flow).keys()
    job = flow["jobs"]["checks"]
    assert job["strategy"]["matrix"]["target"] == ["check", "test"]
    assert 'make "$TARGET"' in commands(job)


# --- what may be published ---


@pytest.mark.parametrize("job", ["draft", "publish"])
def test_nothing_is_published_before_all_tests_have_passed_and_only_for_a_tag(job):
    assert {"version", "checks", "wheels", "notes"} <= needed(job)
    assert RELEASE[job]["if"] == TAGGED
    assert RELEASE["checks"]["uses"] == "./.github/workflows/ci.yml"
    assert began_by(FLOWS["release"]) == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    assert "SHA256SUMS" in commands(RELEASE[job])


def test_the_index_is_told_who_builds_and_no_password():
    job = RELEASE["publish"]
    assert job["environment"] == "release"
    assert job["permissions"] == {"id-token": "write"}
    (step,) = [step for step in job["steps"] if "pypi-publish" in step.get("uses", "")]
    assert step["with"] == {"packages-dir": "dist", "attestations": True}
    assert not any("secrets." in text for text in TEXTS.values())


def test_a_job_may_write_only_where_it_says_so_and_only_for_a_tag():
    assert all(flow["permissions"] == {"contents": "read"} for flow in FLOWS.values())
    writing = {name for name, job in RELEASE.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"draft", "publish", "announce"}
    assert all(RELEASE[name]["if"] == TAGGED for name in writing)
    assert not any("write" in job.get("permissions", {}).values() for job in FLOWS["ci"]["jobs"].values())
    assert all("checkout" not in " ".join(actions(RELEASE[name])) for name in writing)


# --- what the workflows themselves stand on ---


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_and_nothing_comes_from_a_cache(path):
    text = path.read_text()
    for line in re.findall(r"uses: (.+)", text):
        assert line.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert "pull_request_target" not in text
    assert not re.search(r"^\s*cache\b.*:|uses: .*cache", text, re.MULTILINE)
    checkouts = [
        s for j in FLOWS[path.stem]["jobs"].values() for s in j.get("steps", []) if "checkout" in str(s.get("uses"))
    ]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert FLOWS[path.stem]["concurrency"]["group"]


def test_both_workflows_use_one_toolchain_that_the_crates_allow():
    (used,) = {flow["env"]["RUSTUP_TOOLCHAIN"] for flow in FLOWS.values()}
    least = re.search(r'rust-version = "(.+)"', (ROOT / "Cargo.toml").read_text())[1]
    assert tuple(map(int, used.split("."))) >= tuple(map(int, least.split(".")))


def test_what_builds_the_wheels_is_named_by_version_and_hash():
    asked = re.findall(r"^\w+==\S+$", (ROOT / ".ci" / "release-tools.in").read_text(), re.MULTILINE)
    locked = (ROOT / ".ci" / "release-tools.txt").read_text()
    assert re.findall(r"^(\S+==\S+) \\$", locked, re.MULTILINE) == asked
    assert "--require-hashes" in commands(RELEASE["wheels"])


# --- the script that they call ---


def told(*arguments):
    command = [sys.executable, str(ROOT / ".ci" / "release.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


def built(folder, wheels=WHEELS, version="0.1.0", bill=True):
    folder.mkdir()
    (folder / f"tracegrad-{version}.tar.gz").write_bytes(b"source")
    for platform in wheels:
        with zipfile.ZipFile(folder / f"tracegrad-{version}-cp310-abi3-{platform}.whl", "w") as wheel:
            wheel.writestr("tracegrad/__init__.py", "")
            if bill:
                wheel.writestr(f"tracegrad-{version}.dist-info/sboms/tracegrad-py.cyclonedx.json", platform)
    return folder


def test_a_tag_must_be_the_version_of_the_crates():
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    assert told("tag", f"v{version}") == (0, "")
    code, said = told("tag", "v9.9.9")
    assert (code, said) == (
        1,
        f"the tag is v9.9.9 but Cargo.toml has {version}: tag v{version}, or change the version first",
    )


def test_the_notes_are_the_bill_of_each_wheel_and_the_sums_of_all_files(tmp_path):
    dist, notes = built(tmp_path / "dist"), tmp_path / "notes"
    assert told("files", dist, notes) == (0, "")
    bills = {f"tracegrad-0.1.0-cp310-abi3-{platform}.cdx.json": platform for platform in WHEELS}
    assert {path.name for path in notes.iterdir()} == {*bills, "SHA256SUMS"}
    assert {name: (notes / name).read_text() for name in bills} == bills
    lines = (notes / "SHA256SUMS").read_text().splitlines()
    files = sorted([*dist.iterdir(), *notes.glob("*.cdx.json")], key=lambda path: path.name)
    assert lines == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: next(folder.glob("*aarch64.whl")).unlink(), "has 0 files like .*aarch64.whl"),
        (lambda folder: next(folder.glob("*.tar.gz")).unlink(), "has 0 files like .*tar.gz"),
        (lambda folder: (folder / "tracegrad-0.2.0.tar.gz").write_bytes(b""), "has 2 files like .*tar.gz"),
        (lambda folder: (folder / "core").write_bytes(b""), r"has \['core'\], which no release has"),
        (
            lambda folder: next(folder.glob("*.tar.gz")).rename(folder / "tracegrad-0.2.0.tar.gz"),
            r"files of 2 versions: \['0.1.0', '0.2.0'\]",
        ),
    ],
)
def test_a_release_with_a_file_missing_or_too_many_is_refused(tmp_path, spoil, said):
    dist = built(tmp_path / "dist")
    spoil(dist)
    code, message = told("files", dist, tmp_path / "notes")
    assert code == 1
    assert re.search(said, message)
    assert not (tmp_path / "notes").exists()


def test_a_wheel_that_does_not_say_what_it_is_made_of_is_refused(tmp_path):
    code, message = told("files", built(tmp_path / "dist", bill=False), tmp_path / "notes")
    assert code == 1
    assert "has 0 bills of materials of its Rust crates; it must have one" in message
