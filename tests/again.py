"""`python tests/again.py OPTIONS`: pytest, and what failed beside others once more by itself.

A test that races fails once in hundreds of runs. Such a failure must not hide what thousands of others say, nor itself:
at most three tests that fail are run again, alone; where they pass, their names are the last lines, each of them a
fault to be found. A test that fails twice fails.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3


def main(options):
    with tempfile.TemporaryDirectory() as cache:
        pytest = [sys.executable, "-m", "pytest", *options, "-o", f"cache_dir={cache}"]
        code = subprocess.run(pytest, check=False).returncode
        table = Path(cache) / "v" / "cache" / "lastfailed"
        if code != 1 or not table.exists():
            return code
        failed = sorted(json.loads(table.read_bytes()))
        if len(failed) > MOST:
            return code
        print(f"again    {len(failed)} failed; each runs once more, alone", flush=True)
        code = subprocess.run([*pytest, "--last-failed", "-n", "0"], check=False).returncode
        for name in failed if code == 0 else []:
            print(f"RACE     {name} failed beside others and passed alone: find out why", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
