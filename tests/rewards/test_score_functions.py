"""Reward functions: what TRL computes of the same functions; and what fails is NaN, counted and located."""

import asyncio
import functools
import logging
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stand_in import until
from tracegrad.errors import ArgumentError
from tracegrad.rewards import Rewards, columns_of, compute_rewards

CHAT = [[{"role": "user", "content": f"{n}+{n}?"}] for n in range(4)]
ANSWERS = [
    [{"role": "assistant", "content": "0"}],
    [{"role": "assistant", "content": "2"}],
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "add"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "4"},
    ],
    [{"role": "assistant", "content": "seven"}],
]
COLUMNS = {"right": ["0", "2", "4", "6"], "kind": ["a", "b", "a", "b"], "prompt": CHAT}


def correct(prompts, completions, right, **columns):
    assert [prompt[0]["role"] for prompt in prompts] == ["user"] * 4
    return [float(one[-1]["content"] == told) for one, told in zip(completions, right, strict=True)]


def only_a(completions, kind, **columns):
    return [len(one) if told == "a" else None for one, told in zip(completions, kind, strict=True)]


async def thoughtful(prompts, completions, log_metric, log_extra, **columns):
    await asyncio.sleep(0.01)
    log_metric("thoughts", 2.0)
    log_extra("said", [one[-1]["content"] for one in completions])
    return [0.25, None, float("nan"), 1]


def never(completions, **columns):
    return [None] * len(completions)


class Object:
    def __call__(self, completions, **columns):
        return torch.tensor([1.0, 2.0, 3.0, 4.0])


def names_what_it_gets(**columns):
    assert sorted(columns) == EVERYTHING
    return [0.0] * 4


EVERYTHING = sorted(
    ["prompts", "completions", "completion_ids", "right", "kind", "trainer_state", "log_extra", "log_metric"]
)


def of_trl(functions, prompts, completions, columns):
    """The matrix that TRL's own trainer makes of the same functions."""
    from trl import GRPOTrainer

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[getattr(one, "__name__", "object") for one in functions],
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
    )
    inputs = [{name: each[row] for name, each in columns.items()} for row in range(len(prompts))]
    logging.getLogger("trl").setLevel(logging.ERROR)
    found = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, [[1]] * len(prompts))
    loop.call_soon_threadsafe(loop.stop)
    return found.double().numpy()


FUNCTIONS = [correct, only_a, thoughtful, never, Object(), functools.partial(correct), names_what_it_gets]


def test_the_values_are_those_of_trl():
    async def main():
        held = Rewards(FUNCTIONS)
        try:
            return await held.score(CHAT, ANSWERS, COLUMNS, completion_ids=[[1]] * 4), held
        finally:
            held.close()

    scored, held = asyncio.run(main())
    theirs = of_trl(FUNCTIONS, CHAT, ANSWERS, COLUMNS)
    np.testing.assert_array_equal(scored.values, theirs)
    assert not held.counts
    expected = ["correct", "only_a", "thoughtful", "never", "Object", "correct-2", "names_what_it_gets"]
    assert list(scored.names) == expected
    assert scored.metrics == {"thoughts": [2.0]}
    assert scored.extra == {"said": ["0", "2", "4", "seven"]}
    assert scored.row(3)["only_a"] is None


async def test_weights_sum_what_applies_and_nothing_is_not_zero():
    held = Rewards([correct, only_a, never], [2.0, 0.5, 9.0])
    scored = await held.score(CHAT, ANSWERS, COLUMNS)
    alone = Rewards([never])
    nothing = await alone.score(CHAT, ANSWERS, COLUMNS)
    for each in (held, alone):
        each.close()
    # correct: 1 1 1 0; only_a: 1 - 3 -
    assert scored.total.tolist() == [2.5, 2.0, 3.5, 0.0]
    assert np.isnan(nothing.total).all()


def fails(completions, **columns):
    return {}["lamp"]


def hangs(completions, **columns):
    time.sleep(3600)


def spins(completions, **columns):
    time.sleep(1.8)
    while True:  # when the 2 s are over
        pass


async def hangs_softly(completions, **columns):
    await asyncio.sleep(3600)


def dies(completions, **columns):
    os._exit(7)


def leaves(completions, **columns):
    raise SystemExit(3)


def too_few(completions, **columns):
    return [1.0]


def text(completions, **columns):
    return "four"


def words(completions, **columns):
    return ["1"] * len(completions)


def one_number(completions, **columns):
    return 1.0


def nothing_at_all(completions, **columns):
    return None


def unknown_argument(completions, missing):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        (fails, "raised", "KeyError: 'lamp'"),
        (hangs, "late", "longer than 2 s"),
        (spins, "late", "longer than 2 s"),
        (hangs_softly, "late", "longer than 2 s"),
        (dies, "died", "exit status 7"),
        (leaves, "raised", "SystemExit: 3"),
        (too_few, "wrong", "1 rewards for 4"),
        (text, "raised", "it returned 'four'"),
        (words, "raised", "'1' is not a number"),
        (one_number, "raised", "it returned 1.0"),
        (nothing_at_all, "raised", "it returned None"),
        (unknown_argument, "raised", "missing"),
    ],
)
def test_what_fails_is_nan_counted_and_located_and_the_others_are_kept(function, kind, told):
    async def main():
        held = Rewards([correct, function], timeout_s=2)
        try:
            scored = await held.score(CHAT, ANSWERS, COLUMNS)
            again = await held.score(CHAT, ANSWERS, COLUMNS)
            return scored, again, held
        finally:
            held.close()

    scored, again, held = asyncio.run(asyncio.wait_for(main(), 120))
    assert scored.values[:, 0].tolist() == again.values[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert np.isnan(scored.values[:, 1]).all()
    assert np.isnan(scored.total).all()
    assert scored.failed[:, 1].all()
    name = function.__name__
    assert held.counts == {f"{name}: {kind}": 2}
    assert told in str(held.failures[name])
    if function in (fails, hangs, spins, hangs_softly, leaves):
        assert held.failures[name].location.endswith(f"in {name}")
        assert "test_score_functions.py:" in held.failures[name].location


async def test_an_infinite_reward_is_a_failure_of_its_trajectory_alone():
    def infinite(completions, **columns):
        return [1.0, float("inf"), 2.0, float("-inf")]

    held = Rewards([correct, infinite])
    scored = await held.score(CHAT, ANSWERS, COLUMNS)
    held.close()
    assert str(scored.failures["infinite"]) == "infinite returned inf for trajectory 1 of 4, from 0"
    assert scored.failed[:, 1].tolist() == [False, True, False, True]
    assert np.isnan(scored.total).tolist() == [False, True, False, True]


def test_what_a_function_started_ends_with_it(tmp_path):
    marker = f"sleep 31{os.getpid()}"

    def starts(completions, **columns):
        import subprocess

        with subprocess.Popen(marker.split()):
            (tmp_path / "started").touch()

    found = asyncio.run(compute_rewards([starts], None, CHAT, ANSWERS, timeout_s=2))
    assert np.isnan(found).all()
    assert (tmp_path / "started").exists()

    def running():
        words = marker.replace(" ", "\0").encode()
        return [path for path in os.listdir("/proc") if path.isdigit() and words in read(f"/proc/{path}/cmdline")]

    asyncio.run(until(lambda: not running()))  # what is killed takes a moment to be gone


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def on_the_gpu(completions, **columns):
    return torch.zeros(len(completions), device="cuda").tolist()


def on_the_gpu_with_words_of_its_own(completions, **columns):
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise ValueError("the reward model cannot be loaded") from error


@pytest.mark.parametrize("function", [on_the_gpu, on_the_gpu_with_words_of_its_own])
def test_a_function_that_uses_cuda_in_a_forked_process_is_told_what_to_do(function):
    """Asking whether there is a device is enough for torch to refuse CUDA in processes that are forked afterwards."""
    if not hasattr(torch._C, "_cuda_isInBadFork"):
        pytest.skip("this build of torch has no CUDA")
    torch.cuda.is_available()

    async def main():
        held = Rewards([function])
        try:
            return await held.score(CHAT, ANSWERS, COLUMNS), held
        finally:
            held.close()

    scored, held = asyncio.run(main())
    name = function.__name__
    assert np.isnan(scored.total).all()
    assert held.counts == {f"{name}: raised": 1}
    assert held.failures[name].location.endswith(f"in {name}")
    words = held.failures[name].message
    assert words.startswith(f"{name} uses CUDA, but it runs in a process forked from one that has initialized CUDA")
    assert f"write {name} as `async def`" in words
    first = "RuntimeError: Cannot re-initialize CUDA" if function is on_the_gpu else "ValueError: the reward model"
    assert f"It raised {first}" in words


def test_what_cannot_be_sent_to_a_process_is_said():
    async def main():
        held = Rewards([only_a])
        try:
            await held.score(CHAT, ANSWERS, {"kind": ["a"] * 4, "lock": [threading.Lock()] * 4})
            return held
        finally:
            held.close()

    held = asyncio.run(main())
    assert "arguments that cannot be sent" in str(held.failures["only_a"])


def test_functions_without_keywords_get_what_they_name():
    def short(completions):
        return [len(one) for one in completions]

    assert asyncio.run(compute_rewards([short], None, ["a"] * 2, ["b", "cc"], {"other": [1, 2]})).tolist() == [
        [1.0],
        [2.0],
    ]


@pytest.mark.parametrize(
    ("functions", "weights"), [([correct], [1.0, 2.0]), ([correct], [float("nan")]), ([torch.nn.Linear(1, 1)], None)]
)
def test_wrong_weights_and_models_are_refused(functions, weights):
    with pytest.raises(ArgumentError):
        Rewards(functions, weights)


def test_a_column_does_not_take_the_place_of_what_functions_are_given():
    def right(completions, log_metric, **columns):
        log_metric("n", len(completions))
        return [float(one == "a") for one in completions]

    names = ("prompts", "completions", "log_metric", "log_extra", "trainer_state", "completion_ids")
    taken = {name: [9] for name in names}
    assert columns_of([taken, {"want": 1}]) == {"want": [None, 1]}
    assert asyncio.run(compute_rewards([right], None, ["q"], ["a"], {**taken})).tolist() == [[1.0]]


def test_columns_of_another_length_are_refused():
    with pytest.raises(ArgumentError, match=r"TG-REWARD-003.*right.*3.*4"):
        asyncio.run(compute_rewards([correct], None, CHAT, ANSWERS, {"right": ["0"] * 3}))
