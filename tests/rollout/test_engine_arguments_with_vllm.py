"""Engine arguments reach a server as they were told: every field of vLLM's EngineArgs, through flags and its parser."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import tracegrad as tg

pytestmark = pytest.mark.vllm

# Each field is given a value that is not its default; it must come out of vLLM's parser as it went in.
CODE = """
import dataclasses, json
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from tracegrad.rollout.launch import flags
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
actions = {action.dest: action for action in parser._actions}
PLAIN = [7, 0.5, "auto", "x", "/tmp", [1, 2], ["a", "b"], {"a": 1}, {"image": 1}, True, False]
PLAIN += [{"method": "ngram", "num_speculative_tokens": 2}]


def taken(name, value):
    try:
        return getattr(parser.parse_args(flags({name: value})), name)
    except (SystemExit, Exception):
        return None


def passes(name, action):
    choices = list(action.choices or [])
    for value in [*choices, *([choice] for choice in choices), ["model"], *PLAIN]:
        got = taken(name, value)
        if got == value and type(got) is type(value) and got != action.default:
            return True
    config = taken(name, {})
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else []:
        for value in PLAIN:
            got = getattr(taken(name, {field.name: value}), field.name, None)
            if got == value and type(got) is type(value) and got != getattr(config, field.name):
                return True
    return False


fields = [field.name for field in dataclasses.fields(EngineArgs)]
found = {name: name in actions and passes(name, actions[name]) for name in fields}
print(json.dumps({"fields": len(fields), "no flag": [n for n in fields if n not in actions],
                  "lost": [n for n in fields if n in actions and not found[n]]}))
"""


def test_every_field_of_engine_args_comes_through(request, tmp_path):
    python = request.config.getoption("--vllm-python")
    (tmp_path / "tracegrad").symlink_to(Path(tg.__file__).parent, target_is_directory=True)
    told = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-c", CODE], capture_output=True, text=True, check=False, env=told, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{found}")
    assert found["lost"] == []
    assert found["fields"] > 200
    assert len(found["no flag"]) < 10
