"""Install the built wheel without Rust, on Python 3.10 and the newest one here, and run `prepare` with it.

Called by `make test-wheel` with the folder of the wheel. The environment has only the wheel and numpy, without torch.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from interpreters import interpreters

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def try_wheel(python: str, wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        bin_ = Path(folder, "bin")
        bare = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": os.environ["HOME"]}
        if shutil.which("cargo", path=bare["PATH"]):
            sys.exit("cargo is on the path of the environment that is meant to be without Rust")
        installer = dict(os.environ, PATH=bare["PATH"])
        run([str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--only-binary=:all:", str(wheel)], env=installer)
        packages = json.loads(run([str(bin_ / "python"), "-m", "pip", "list", "--format=json"], env=installer))
        names = {package["name"].lower() for package in packages} - {"pip", "setuptools", "wheel"}
        if names != {"numpy", "tracegrad"}:
            sys.exit(f"the base install has {sorted(names)}; it must be only numpy")
        out = Path(folder, "prepared")
        traces, model = EXAMPLE / "traces.jsonl.zst", EXAMPLE / "model"
        command = [str(bin_ / "tracegrad"), "prepare", str(traces), "--model", str(model), "--out", str(out)]
        print(run([str(bin_ / "python"), "--version"]).strip(), "-", wheel.name)
        print(run(command, env=bare, cwd=folder).strip())


def main() -> None:
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    system = "macosx" if sys.platform == "darwin" else "manylinux"
    if not wheel.match(f"*-abi3-{system}_*_{platform.machine()}.whl"):
        sys.exit(f"{wheel.name} is not an abi3 wheel of {system} for {platform.machine()}")
    found = interpreters()
    if 10 not in found:
        sys.exit("no Python 3.10 here; the wheel promises it")
    for minor in (10, max(found)):
        try_wheel(found[minor], wheel)
    print("2 passed, 0 failed")


main()
