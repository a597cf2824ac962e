"""An engine in this process: one thread uses it, what nobody waits for is let go, and an engine that ends says so.

The engine here is a stand-in, for its faults; tests/rollout/test_inside_with_vllm.py has the real one.
"""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

import tracegrad as tg
from policy_server import MODEL
from stand_in import until
from tracegrad.errors import ArgumentError, ServerError
from tracegrad.online import OnlineConfig
from tracegrad.rollout.in_process import Engine


class StandIn:
    """Answers each request after so many steps; `llm` and its engine at once."""

    def __init__(self, model, **told):
        self.told, self.llm_engine = told, self
        self.left, self.aborted, self.threads, self.calls = {}, [], set(), []
        self.broken = self.asleep = False
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))

    def add_request(self, name, prompt, params, lora_request=None):
        self.threads.add(threading.get_ident())
        self.left[name] = prompt
        return f"{name}-inside"

    def step(self):
        self.threads.add(threading.get_ident())
        assert not self.asleep
        if self.broken:
            raise RuntimeError("a worker is gone")
        self.left = {name: steps - 1 for name, steps in self.left.items()}
        done = [name for name, steps in self.left.items() if steps <= 0]
        self.left = {name: steps for name, steps in self.left.items() if steps > 0}
        return [SimpleNamespace(request_id=name, finished=True, outputs=name) for name in done]

    def abort_request(self, names, internal):
        self.aborted += names
        self.left = {name: steps for name, steps in self.left.items() if f"{name}-inside" not in names}

    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")
        self.asleep = True

    def wake_up(self, tags):
        self.asleep = False

    def reset_prefix_cache(self, reset_running_requests):
        self.calls.append("reset")
        return reset_running_requests

    def reset_mm_cache(self):
        self.calls.append("pictures")

    def reset_encoder_cache(self):
        self.calls.append("encodings")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=StandIn))
    made = Engine("m", {"dtype": "float32", "tool_call_parser": "hermes", "enable_auto_tool_choice": True})
    yield made
    made.close()


async def answer(engine, name, steps):
    async for output in engine.generate(steps, None, name):
        return output.outputs


async def test_many_ask_at_once_and_one_thread_alone_uses_the_engine(engine):
    names = [f"r{number}" for number in range(50)]
    assert await asyncio.gather(*(answer(engine, name, 1 + n % 7) for n, name in enumerate(names))) == names
    assert engine.llm.threads == {engine._thread.ident}
    assert engine.llm.told == {"dtype": "float32"}


async def test_a_paused_engine_keeps_what_it_was_asked_and_goes_on(engine):
    await asyncio.wrap_future(engine.pause(clear=True))
    waiting = asyncio.ensure_future(answer(engine, "r", 3))
    await until(lambda: engine.llm.left)
    await asyncio.sleep(0.1)  # for what must not come
    assert not waiting.done()
    assert engine.llm.left == {"r": 3}
    await asyncio.wrap_future(engine.resume())
    assert (await waiting) == "r"
    assert engine.llm.calls == ["reset", "pictures", "encodings"]
    engine.pause(clear=False).result(60)
    assert engine.llm.calls == ["reset", "pictures", "encodings"]


async def test_what_nobody_waits_for_is_let_go(engine):
    waiting = asyncio.ensure_future(answer(engine, "r", 10**9))
    await until(lambda: engine.llm.left)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wrap_future(engine.do(lambda llm: None))
    assert engine.llm.aborted == ["r-inside"]
    assert engine._answers == {}


def test_an_engine_that_ends_tells_all_who_wait_and_who_come_later(engine):
    async def run():
        engine.llm.broken = True
        found = await asyncio.gather(*(answer(engine, f"r{n}", 2) for n in range(3)), return_exceptions=True)
        return [*found, *await asyncio.gather(answer(engine, "late", 1), return_exceptions=True)]

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert [type(each) for each in found] == [ServerError] * 4
    assert "has ended: RuntimeError: a worker is gone" in str(found[0])


def test_what_does_not_fit_an_engine_in_this_process_is_refused(tmp_path, monkeypatch):
    told = {"rewards": [lambda prompts, completions: [0.0] * len(prompts)], "servers": "in-process"}
    monkeypatch.setitem(sys.modules, "vllm", None)  # not installed
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-016"):
        tg.online.train(MODEL, ["a"], **told, online=OnlineConfig(), out=tmp_path / "a")
    with pytest.raises(ArgumentError, match="TG-ONLINE-038"):
        tg.online.train(MODEL, ["a"], **told, python="python3", online=OnlineConfig(), out=tmp_path / "b")
