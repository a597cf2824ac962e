"""Print the path of a Python 3 interpreter of a minor version: `python .ci/interpreters.py 12`."""

import shutil
import subprocess
import sys
from pathlib import Path


def interpreters() -> dict[int, str]:
    """Return an interpreter for each minor version, from PATH and from pyenv."""
    found = {}
    for minor in range(10, 20):
        name = shutil.which(f"python3.{minor}")
        if name and subprocess.run([name, "--version"], capture_output=True, check=False).returncode == 0:
            found[minor] = name
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=True).stdout
        for version in listed.split():
            prefix = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True, check=True).stdout
            minor = int(version.split(".")[1]) if version.startswith("3.") else 0
            python = Path(prefix.strip()) / "bin" / "python"
            if minor >= 10 and python.exists():
                found.setdefault(minor, str(python))
    return found


if __name__ == "__main__":
    minor = int(sys.argv[1])
    print(interpreters().get(minor) or sys.exit(f"no Python 3.{minor} is installed here; install one and try again"))
