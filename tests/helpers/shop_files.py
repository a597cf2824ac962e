"""A run.toml and the files that it names, for the tests of the command line; and what comes of a run of it."""

import json

import pytest

import tracegrad as tg
from policy_server import MODEL, PolicyServer
from tracegrad.cli import main

CLERK = '''
import itertools

import task
import tracegrad as tg

questions = [{"prompt": each.messages()} for each in itertools.islice(task.prompts("traces", 0), 8)]
fresh = [{"prompt": each.messages()} for each in itertools.islice(task.prompts("evaluation", 0), 3)]
nothing = []
number = 7


def drawn():
    return iter(questions)


def broken():
    raise RuntimeError("no tasks today")


def breaking():
    yield questions[0]
    raise RuntimeError("no more today")


def endless():
    while True:
        yield from questions


async def agent(task_, policy):
    message = await policy.chat(task_["prompt"])
    return -float(len(message["content"] or "")) / 10


def alone(task_):
    return 1.0


class Talk(tg.rollout.Environment):
    def reset(self, task_):
        return task_["prompt"]

    def step(self, message):
        self.said = message["content"] or ""
        return None

    def reward(self):
        return -float(len(self.said))


class Theirs:
    """As TRL's environment_factory takes them."""

    def reset(self, **row):
        return None

    def price(self, item: str) -> str:
        """Price of one item.

        Args:
            item: the item.
        """
        return "7"

    def get_reward(self):
        return 0.5


def short(prompts, completions, **columns):
    return [-float(len(each[-1]["content"] or "")) for each in completions]


def one(prompts, completions, **columns):
    return [1.0 for _ in completions]


both = [short, one]


def price(item: str) -> int:
    """Price of one item.

    Args:
        item: the item.
    """
    return 7


def shop(task):
    return [price]
'''
PLAY = """
[online]
steps = 2
steps_ahead = 0
max_resample_factor = 1

[rollout]
group_size = 4
max_tokens = 12
max_turns = 1

[train]
groups_per_step = 2

[optimizer]
lr = 2e-3

[advantage]
baseline = "none"

[objective]
preset = "DAPO_DIRECT"
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that a run names, and another that the tests work in."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shop_clerk.py").write_text(CLERK)
    (tmp_path / "mine" / "tasks.jsonl").write_text('"What do 2 × red lamp cost?"\n\n{"prompt": "And 3?"}\n')
    return tmp_path / "mine"


@pytest.fixture(scope="module")
def server():
    with PolicyServer() as served:
        yield served


def written(folder, sections=PLAY, **told):
    told = {"model": str(MODEL), "tasks": "shop_clerk.py:questions", "agent": "shop_clerk.py:agent"} | told
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if value is not None]
    (folder / "run.toml").write_text("\n".join(lines) + "\n" + sections)
    return str(folder / "run.toml")


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def played(out):
    return tg.Traces.concatenate(tg.read(path) for path in sorted((out / "played").glob("*")))


def dry(capsys, *arguments):
    """What a dry run prints: its TOML and the rest."""
    code = main(["online", *arguments, "--dry-run"])
    said = capsys.readouterr()
    return code, said.out, said.err
