"""Random templates of all that the engine takes, over huge operands: each ends within a second and 256 MiB."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from peak import PEAK
from template_grammar import BEFORE, Grammar
from template_work import MEASURED

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>é</think> yes"}]


class Renderer:
    """A process that renders one template after another, each in a child of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PEAK + MEASURED]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, source: str) -> tuple[str, int, float, int]:
        """Outcome, exit status, CPU seconds and MiB."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([source, MESSAGES, None]), file=self.process.stdin, flush=True)
        says, status, seconds, mebibytes = ("killed " + self.process.stdout.readline()).rsplit(" ", 3)
        return says, int(status), float(seconds), int(mebibytes)


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    with made.process:
        yield made
        made.process.terminate()


def holds(renderer: Renderer, seed: int) -> str:
    body = Grammar(seed).statements(3)
    says, status, seconds, mebibytes = renderer(BEFORE + body)
    assert status == 0, (seed, "killed", body)
    assert "met a fault" not in says, (seed, says, body)
    assert seconds < 1, (seed, seconds, says, body)
    assert mebibytes < 256, (seed, mebibytes, says, body)
    return says


def test_any_template_ends_within_a_second_and_256_mib(renderer: Renderer) -> None:
    says = [holds(renderer, seed) for seed in range(40)]
    # Most mean something: else nothing but the first error of each would be tried.
    assert sum("rendered" in said or "does not end" in said or "made more text" in said for said in says) > 12


@pytest.mark.nightly
def test_any_template_of_half_an_hour_ends_within_a_second_and_256_mib(renderer: Renderer) -> None:
    seed, until = time.time_ns(), time.monotonic() + 1800
    while time.monotonic() < until:
        seed += 1
        holds(renderer, seed)
