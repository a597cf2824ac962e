"""Write traces, hostile ones too, and wait for their index."""

import json
import time
from pathlib import Path

import pytest

from tracegrad.view import Viewer

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x00 `"


def record(n, **more):
    call = {"function": {"name": "price", "arguments": '{"item": "lamp"}'}}
    told = {"role": "assistant", "content": f"It costs {n} pounds."} | ({"tool_calls": [call]} if n % 2 else {})
    generation = {"token_ids": [19, 2], "logprobs": [-0.5, -0.1], "policy_version": n % 3, "prompt_token_ids": [5, 6]}
    messages = [{"role": "user", "content": f"How much is amber number {n}?"}, {**told, "generation": generation}]
    return {"id": f"t{n}", "group": f"g{n // 4}", "reward": float(n % 4 == 0), "messages": messages} | more


def written(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def whole(session):
    """Waits until everything that is there is in the index."""
    end = time.monotonic() + 60
    while not (session.indexer.done and session.indexer._gramed == session.rows):
        assert time.monotonic() < end
        time.sleep(0.01)
    return session


@pytest.fixture
def session(tmp_path):
    traces = written(tmp_path / "traces.jsonl", [record(n) for n in range(1100)])
    with Viewer([traces], tmp_path / "index") as opened:
        yield whole(opened)
