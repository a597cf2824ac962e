"""With numpy alone the commands that need no torch work: whatever else is installed cannot be imported here."""

import subprocess
import sys

import pytest

BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        head = name.partition(".")[0]
        known = head in {"numpy", "tracegrad"} or head.startswith("_sysconfigdata")
        if not known and head not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
from tracegrad.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bare(*words):
    done = subprocess.run([sys.executable, "-c", BARE, *map(str, words)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_reading_aligning_and_examining(example, tmp_path):
    some = tmp_path / "some.jsonl"
    status, said = bare(
        "prepare", example / "traces.jsonl.zst", "--model", example / "model", "--out", tmp_path / "out"
    )
    assert status == 0, said
    assert "next     tracegrad train" in said
    some.write_text('{"messages": [{"role": "user", "content": "?"}], "reward": 1}\n')
    assert bare("doctor", some, "--model", example / "model", "--json")[0] == 1
    assert bare("init", some, "--model", example / "model", "--out", tmp_path / "run.toml")[0] == 0


@pytest.mark.parametrize(
    "words", [["view", "x"], ["online", "run.toml"], ["proxy", "--server", "http://h", "--out", "o"]]
)
def test_what_needs_more_says_so(words, tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\n')
    words = [tmp_path / "run.toml" if word == "run.toml" else word for word in words]
    status, said = bare(*words)
    assert status != 0
    assert "Traceback" not in said
    assert "tracegrad[" in said
