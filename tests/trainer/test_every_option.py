"""Every option of a run does something: a value that is not its default, and what must follow from it, derived here.

A row is a way to come by something (a run, steps, a file that was read) and what must hold of it. The walk fails where
an option has no row. `make nightly` has each option ignored, one by one, and sees its row fail.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tracegrad as tg
from ignored_fields import ignored
from image_options import images_tower
from loop_options import BY_TRACE, OF_FILTER, attention, by_trace, timeout
from reward_kl_option import reward_kl
from sharded_runs import weights
from tiny import PROMPT, sampled, spoilt, tiny_model
from token_log_options import terms_kept, terms_megabytes
from tracegrad import config, prepare
from tracegrad.cli import main
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sampling import options_on
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.metrics import Stopwatch
from tracegrad.objective import presets, with_kl
from tracegrad.trainer.checkpoint import list_checkpoints
from tracegrad.trainer.off_policy_eval import choose_held_out
from tracegrad.trainer.schedule import Schedule
from tracegrad.trainer.setup import device_of
from tracegrad.trainer.step import compute_logprobs
from tracegrad.trainer.steps import TrainingData
from watched import GROUPS, SIZE, told, traces, watched

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
KL = with_kl(presets.DAPO, 0.05)

# --- what is read ---


def turn(text: str, **recorded: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "finish_reason": "stop", **recorded}


def aligned(folder: Path, *messages: Any, broken: bool = False, **data: Any) -> tg.Sequences:
    """One trace of the assistant turns given, and a line that is no record where asked for."""
    talk = [each for message in messages for each in ({"role": "user", "content": "2 × lamp"}, message)]
    lines = [json.dumps({"reward": 1.0, "messages": talk})] + ["{"] * broken
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    chosen = config.load(overrides=[(f"data.{name}", value) for name, value in data.items()]).data
    return prepare.load(str(folder / "t.jsonl"), MODEL, chosen, folder, Stopwatch())[0]


@cache
def ids() -> list[int]:
    return [*map(int, tg.Tokenizer.from_pretrained(MODEL).encode("It costs 3.")), 2]


def known() -> dict[str, Any]:
    """Ids and logprobs of a turn."""
    return {"token_ids": ids(), "logprobs": {"content": [{"token": "", "logprob": -0.5}] * len(ids())}}


def on_error(folder: Path) -> None:
    assert aligned(folder, turn("It costs 3.", **known()), broken=True, on_error="skip").traces == 1


def logprob_kind(folder: Path) -> None:
    found = aligned(folder, turn("It costs 3.", **known()), logprob_kind="processed")
    assert found.logprob_kind.tolist() == [LOGPROB_KINDS.index("processed")]


def server_profile(folder: Path) -> None:
    found = aligned(folder, turn("It costs 3.", **known()), server_profile="sglang")
    assert found.alignment_report.server_profiles == {"sglang": 1}


def sampling_defaults(folder: Path) -> None:
    """A request says no option, and the model's generation_config.json cuts to 20 tokens."""
    model = Path(shutil.copytree(MODEL, folder / "model"))
    (model / "generation_config.json").write_text('{"top_k": 20}')
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "It costs 3."}}
    choice |= {"token_ids": ids(), "logprobs": known()["logprobs"]}
    request = {"messages": [{"role": "user", "content": "2 × lamp"}]}
    line = {"id": "t", "reward": 1.0, "request": request, "response": {"choices": [choice]}}
    (folder / "t.jsonl").write_text(json.dumps(line) + "\n")
    chosen = config.load(overrides=[("data.sampling_defaults", "model")]).data
    cut = prepare.load(str(folder / "t.jsonl"), model, chosen, folder, Stopwatch())[0]
    assert [options_on(int(bits)) for bits in cut.reshaped] == [("top_k",)]


def accept_truncated_sampling(folder: Path) -> None:
    found = traces()
    cut = replace(found, reshaped=np.ones_like(found.reshaped))
    assert watched(cut, folder, data__accept_truncated_sampling=True).steps


def text_only(folder: Path) -> None:
    assert aligned(folder, turn("It costs 3."), text_only=True).trainable.sum() == len(ids())


def allow_unknown_ids(folder: Path) -> None:
    """Two tokens show a sign of four bytes that the vocabulary has in three: its ids stand there untrained."""
    entries = [{"token": text, "logprob": -0.5} for text in ("I", "t", "", "😀", "3")]
    found = aligned(folder, turn("It😀3", logprobs={"content": entries}), allow_unknown_ids=True)
    assert found.trainable[-6:].tolist() == [True, True, False, False, False, True]


def mapped(**told: str) -> tg.Traces:
    """Two calls of one conversation, the later one first, as a mapping from a config reads them."""
    first = [{"role": "user", "content": "2 × lamp"}, turn("It costs 3.", token_ids=ids())]
    later = [first[0], turn("It costs 3."), {"role": "user", "content": "And?"}, turn("No.", token_ids=ids())]
    run = {"score": "0.5", "name": "a", "kind": "processed", "t": "0.25", "v": "v7", "sampling": {"temperature": 0.5}}
    records = [{"messages": each, **run, "at": at} for at, each in ((2, later), (1, first))]
    return tg.read(records, map=config.load(overrides=[(f"map.{name}", path) for name, path in told.items()]).map)


MAPPED = ("reward", "group", "id", "logprob_kind", "temperature", "sampling", "version")


MAPPED_TOKENS = {"token_ids": "out", "logprobs": "lp", "prompt_token_ids": "asked", "loss_mask": "mine"}


def map_tokens(_: Path) -> None:
    """Row of ids whose first one is of the prompt; without one of the paths it is read otherwise."""
    row = {"asked": [5], "out": [9, 1, 2], "mine": [0, 1, 1], "lp": [-1.0, -0.5, -0.25], "prompt_ids": [7]}

    def read(*left_out: str) -> tuple[Any, ...]:
        told = {name: path for name, path in MAPPED_TOKENS.items() if name not in left_out}
        read_map = config.load(overrides=[(f"map.{name}", path) for name, path in told.items()]).map
        [turn_read] = tg.read([row], map=read_map)[0].generations
        logprobs = None if turn_read.logprobs is None else turn_read.logprobs.tolist()
        return turn_read.prompt_token_ids.tolist(), turn_read.token_ids.tolist(), logprobs

    assert read() == ([5, 9], [1, 2], [-0.5, -0.25])
    assert read("logprobs") == ([5, 9], [1, 2], None)
    assert read("prompt_token_ids") == ([7, 9], [1, 2], [-0.5, -0.25])
    assert read("loss_mask") == ([5], [9, 1, 2], [-1.0, -0.5, -0.25])


def map_fields(_: Path) -> None:
    """A row for each: what the first trace then says."""
    assert mapped(reward="score")[0].reward == 0.5
    assert mapped(group="name")[0].group == "a"
    assert mapped(id="name")[0].id == "a"
    turns = mapped(logprob_kind="kind", temperature="t", version="v")[0].generations
    assert {(each.logprob_kind, each.temperature, each.policy_version) for each in turns} == {("processed", 0.25, 7)}
    assert {each.temperature for each in mapped(sampling="sampling")[0].generations} == {0.5}


def map_session(_: Path) -> None:
    assert [len(trace.generations) for trace in mapped(session="name", order="at")] == [2]
    assert mapped(session="name", order="at")[0].messages[-1]["content"] == "No."


# --- what becomes of it: steps and advantages ---


@cache
def data() -> tg.Sequences:
    return sampled(tiny_model(), groups=GROUPS, size=SIZE)


def fed(sequences: tg.Sequences | None = None, **changes: Any) -> TrainingData:
    return TrainingData.of(sequences or data(), presets.DR_GRPO, told(**{"data__holdout": 0, **changes}))


def rewards(values: Any, group: Any) -> tg.Sequences:
    """The first traces with these rewards and groups; all others have rewards that teach nothing."""
    found, n = data(), len(values)
    reward, ids = np.full(found.traces, 1.0, np.float32), found.group + 1000
    reward[:n], ids[:n] = values, group
    return replace(found, rewards=reward[:, None] if found.rewards.ndim == 2 else reward, group=ids)


def reward(_: Path) -> None:
    both = np.stack([data().rewards.reshape(-1), np.arange(data().traces)], 1).astype(np.float32)
    found = fed(replace(data(), rewards=both, reward_names=("share", "place")), data__reward="place")
    assert found.rewards.tolist() == list(range(data().traces))


def with_two_rewards(**changes: Any) -> Any:
    """Six traces in two groups of three; the second reward is ten times as large, and one trace has the first alone."""
    s = rewards([0.0] * 6, [0] * 3 + [1] * 3)
    table = np.full((s.traces, 3), np.nan, np.float32)
    table[:6, 1:] = [[1, 10], [0, 20], [0, 0], [1, 30], [0, np.nan], [1, 0]]
    names = ("reward", "right", "short")
    return fed(replace(s, rewards=table, reward_names=names), data__reward_weights="2,0.1", **changes)


def reward_weights(_: Path) -> None:
    found = with_two_rewards()
    assert found.rewards[:6] == pytest.approx([3.0, 2.0, 0.0, 5.0, 0.0, 2.0])
    swapped = with_two_rewards(data__reward="short,right").rewards[:6]
    assert swapped == pytest.approx([20.1, 40.0, 0.0, 60.1, 0.0, 0.1])
    for told_, why in (
        ({"data__reward": "right"}, r"TG-TRAIN-005.*right"),
        ({"data__reward": "r"}, r"TG-TRAIN-004.*r"),
    ):
        with pytest.raises(ArgumentError, match=why):
            with_two_rewards(**told_)


def several(_: Path) -> None:
    """Each reward by its group's mean and deviation (n - 1), weighed and summed, and the sums of all likewise."""
    found = with_two_rewards(
        advantage__multi_objective_aggregation="normalize_then_sum", advantage__scale="std"
    ).advantages[:6]
    third, root = math.sqrt(1 / 3), math.sqrt(2) / 2  # deviations of 1 0 0 and of 30 0: 0.577 and 21.2
    right = [2 / 3 / third, -1 / 3 / third, -1 / 3 / third, 1 / 3 / third, -2 / 3 / third, 1 / 3 / third]
    short = [0.0, 1.0, -1.0, root, 0.0, -root]
    each = [2 * one + 0.1 * other for one, other in zip(right, short, strict=True)]
    expected = (np.array(each) - np.mean(each)) / np.std(each, ddof=1)
    assert found == pytest.approx(expected, rel=1e-3)
    for told_ in ({"advantage__scale": "none"}, {"advantage__scale": "std", "filter__zero_truncated": True}):
        with pytest.raises(ArgumentError, match=r"TG-TRAIN-08[67]"):
            with_two_rewards(advantage__multi_objective_aggregation="normalize_then_sum", **told_)


def holdout(_: Path) -> None:
    assert fed(data__holdout=0.5).held_out.sum() == GROUPS * SIZE / 2


def tokens_per_row(_: Path) -> None:
    rows = [len(batch.ids) for batch in fed(pack__tokens_per_row=16).steps(0)[0].batches]
    assert max(rows) <= 16  # twelve branches of 7 to 12 tokens: at most two of them a row
    assert 6 <= len(rows) <= 12


def groups_per_step(_: Path) -> None:
    assert len(fed(train__groups_per_step=4).steps(0)) == 3


def too_long(_: Path) -> None:
    lengths = np.diff(data().cu_seqlens)
    cut = fed(pack__tokens_per_row=9, pack__too_long="truncate").steps(0)
    assert sum(map(len, cut)) == (np.minimum(lengths, 9) - PROMPT).sum() < (lengths - PROMPT).sum()


SHARED = {"pack__share_prefixes": True}


def share_prefixes(_: Path) -> None:
    """A group's traces begin with one prompt: of four only the first lays it out."""
    plain, found = ([len(batch.ids) for batch in fed(**how).steps(0)[0].batches] for how in ({}, SHARED))
    assert sum(plain) - sum(found) >= GROUPS // 4 * (SIZE - 1) * PROMPT


def skip_zero_weight(_: Path) -> None:
    steps = fed(rewards([1.0, 0.0], [0, 0]), pack__skip_zero_weight=True, train__groups_per_step=GROUPS + 1).steps(0)
    assert [len(np.unique(step.trace)) for step in steps] == [2]  # of the others each has its group's mean


def advantages(values: Any, group: Any, **changes: Any) -> list[float]:
    told_ = {f"advantage__{name}": value for name, value in changes.items()}
    return fed(rewards(values, group), **told_).advantages[: len(values)].tolist()


def baseline(_: Path) -> None:
    # The sum of the others over three: rloo of 3, 0, 0, 0 is 3 - 0 and 0 - 1.
    assert advantages([3.0, 0.0, 0.0, 0.0], [0] * 4, baseline="rloo") == pytest.approx([3, -1, -1, -1])


def scale(_: Path) -> None:
    # Mean 1, squares 4 + 1 + 1 + 1 = 7 and n - 1 = 3: deviation 1.5275.
    found = advantages([3.0, 0.0, 0.0, 2.0 - 1.0], [0] * 4, scale="std")
    assert found == pytest.approx([2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0], rel=1e-3, abs=1e-3)


def ddof(_: Path) -> None:
    found = advantages([3.0, 0.0, 0.0, 1.0], [0] * 4, scale="std", ddof=0)
    assert found == pytest.approx([2 / math.sqrt(1.5), *[-1 / math.sqrt(1.5)] * 2, 0], rel=1e-3, abs=1e-3)


def single_sample_group(_: Path) -> None:
    assert advantages([3.0, 1.0, 0.0], [0, 1, 1], single_sample_group="keep")[:1] == [3.0]


# --- runs ---

OPTIMIZER = {"lr": 2e-2, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.2, "grad_clip": 0.02}
SCHEDULE = {"name": "wsd", "warmup_steps": 2, "decay_ratio": 0.5, "min_lr_ratio": 0.25}
RESTARTED = {"name": "cosine_with_restarts", "warmup_ratio": 0.2, "kwargs": '{"num_cycles": 2}'}
CADENCE = {
    "train__epochs": 2,
    "train__seed": 7,
    "train__updates_per_old_logprobs": 2,
    "train__missing_logprobs": "ratio_one",
    "train__dtype": "bf16",
    "eval__ope_per_epoch": 1,
    "train__report_to": "tensorboard",
    "train__memory_mode": "balanced",
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 3,
}
SPOILING = {"train__epochs": 9, "eval__ope_per_epoch": 99, "data__holdout": 0.3, "stop__ope_falls": True}
SPOILING |= {"optimizer__lr": 3e-3, "train__groups_per_step": 6}
RUNS: dict[str, Callable[[Path], Any]] = {
    "cadence": lambda out: watched(traces(), out, **CADENCE),
    "adamw": lambda out: watched(traces(), out, **{f"optimizer__{name}": value for name, value in OPTIMIZER.items()}),
    "scheduled": lambda out: watched(
        traces(), out, train__epochs=2, **{f"schedule__{name}": value for name, value in SCHEDULE.items()}
    ),
    "restarted": lambda out: watched(
        traces(), out, train__max_steps=8, **{f"schedule__{name}": value for name, value in RESTARTED.items()}
    ),
    "repeated": lambda out: watched(traces(), out, train__updates_per_old_logprobs=2, train__iterations=3),
    "renewed": lambda out: watched(traces(), out, objective=KL, train__ref_sync_steps=2),
    "mixed": lambda out: watched(traces(), out, objective=KL, train__ref_sync_steps=2, train__ref_mixup_alpha=0.25),
    "adapters": lambda out: watched(traces(), out, objective=KL, train__lora_rank=2),
    "spoiling": lambda out: watched(spoilt(), out, objective=presets.DAPO_DIRECT, **SPOILING),
    "drifting": lambda out: watched(data(), out, optimizer__lr=3e-2, stop__min_ope_ess=0.9999),
}


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    """Runs by name, each made once."""
    found: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in found:
            found[name] = RUNS[name](tmp_path_factory.mktemp(name))
        return found[name]

    return of


def adamw(run: Any) -> None:
    """Every parameter of every step by the formula; norms, which are vectors, do not decay."""
    o = OPTIMIZER
    for name, start in run.steps[0].before.items():
        value, first, second = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
        for n, step in enumerate(run.steps, 1):
            g = step.gradient[name].double()
            first, second = o["beta1"] * first + (1 - o["beta1"]) * g, o["beta2"] * second + (1 - o["beta2"]) * g * g
            rate = o["lr"]
            value = value * (1 - rate * o["weight_decay"] * (start.ndim > 1))
            value = value - rate * (first / (1 - o["beta1"] ** n)) / (
                (second / (1 - o["beta2"] ** n)).sqrt() + o["eps"]
            )
            torch.testing.assert_close(step.after[name].double(), value, rtol=0, atol=2e-6, msg=f"{name}, step {n}")


def schedule(run: Any) -> None:
    """Six steps: two that rise from the floor, one at lr, and three that fall to it by a half cosine."""
    falls = [0.25 + 0.75 * (1 + math.cos(math.pi * place / 3)) / 2 for place in range(3)]
    assert [step.lr / 3e-3 for step in run.steps] == pytest.approx([0.25, 0.625, 1.0, *falls])


def restarts(run: Any) -> None:
    """Eight steps, two of which (0.2 of eight, rounded up) rise from 0; the others fall twice by a half cosine."""
    falls = [(1 + math.cos(math.pi * ((2 * place / 6) % 1))) / 2 for place in range(6)]
    assert [step.lr / 3e-3 for step in run.steps] == pytest.approx([0.0, 0.5, *falls])


def max_steps(run: Any) -> None:
    """The third epoch, of three steps each, ends after two of them, and the value is measured there."""
    assert (run.done.total, len(run.steps)) == (8, 8)
    assert [row["epoch"] for row in run.done.rows if "epoch" in row] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert "ope" in run.done.rows[-1]


def iterations(run: Any) -> None:
    """Three steps: the batch of the first two three times, then the last one three times; `old` is of a batch."""
    first = {tuple(step.step.origin.tolist()): None for step in run.steps}
    order = [list(first).index(tuple(step.step.origin.tolist())) for step in run.steps]
    assert order == [0, 1, 0, 1, 0, 1, 2, 2, 2]
    away = [float(np.abs(step.outcome.ratio - 1).max()) for step in run.steps]
    assert max(away[0], away[6]) < 1e-4 < min(away[1:6] + away[7:])
    for again, before in ((2, 0), (4, 0), (3, 1), (5, 1), (7, 6), (8, 6)):
        assert np.array_equal(run.steps[again].step.old_logprobs, run.steps[before].step.old_logprobs)


def grad_clip(run: Any) -> None:
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in step.gradient.values())) for step in run.steps]
    assert norms == pytest.approx([min(step.outcome.grad_norm, 0.02) for step in run.steps], rel=1e-3)
    assert max(step.outcome.grad_norm for step in run.steps) > 0.02


def epochs(run: Any) -> None:
    assert run.done.total == 2 * 3
    assert len(run.steps) == 6


def seed(run: Any) -> None:
    """Of what is held out, and of the order of the groups, which is another in each epoch."""
    held = choose_held_out(run.data.group, 0.25, 7)
    feed = TrainingData.of(run.data, presets.DAPO, told())
    plan, order = Schedule(3, epochs=2, seed=7), []
    for epoch in range(2):
        expected = replace(feed, held_out=held, eligible=~held).steps(plan.shuffle_seed(epoch))
        for step, own in zip(expected, run.steps[3 * epoch : 3 * epoch + 3], strict=True):
            assert np.array_equal(step.origin, own.step.origin)
        order.append([set(step.trace.tolist()) for step in expected])
    assert order[0] != order[1]


def updates_per_old_logprobs(run: Any) -> None:
    """Before steps 1, 3 and 5 `old` is measured: theta is old there, and has moved one step later."""
    away = [float(np.abs(step.outcome.ratio - 1).max()) for step in run.steps]
    assert max(away[::2]) < 1e-4 < min(away[1::2])


def missing(run: Any) -> None:
    for each in run.steps:
        unknown = np.isnan(each.step.rollout_logprobs)
        assert unknown.any()
        assert each.corrected.keep[unknown].all()
        assert (each.corrected.weight[unknown] == 1).all()


def dtype(run: Any) -> None:
    assert {step.precision for step in run.steps} == {torch.bfloat16}


def ope_per_epoch(run: Any) -> None:
    assert [row["step"] for row in run.done.rows if "ope" in row] == [0, 3, 6]


def report_to(run: Any) -> None:
    pytest.importorskip("tensorboard")
    assert list((run.out / "tensorboard").glob("events*"))


def memory(run: Any) -> None:
    assert all(layer.gradient_checkpointing for layer in run.model.model.layers)


def checkpoint_every(run: Any) -> None:
    assert [path.name[-1] for path in list_checkpoints(run.out)][-2:] == ["4", "6"]


def checkpoint_keep(run: Any) -> None:
    assert len(list_checkpoints(run.out)) == 3


def min_ope_ess(run: Any) -> None:
    assert run.done.stopped == "ope_ess"
    assert run.done.step < run.done.total
    sizes = [row["ope_ess_fraction"] for row in run.done.rows if "ope_ess_fraction" in row]
    assert sizes[-1] < 0.9999 <= sizes[-2]
    assert run.done.checkpoint.name == f"step-{run.done.step:08d}"


def stop_worse(run: Any) -> None:
    assert run.done.stopped == "ope_falls"
    assert run.done.best_step < run.done.step < run.done.total


def lora_rank(run: Any) -> None:
    down = {name: p.shape for name, p in run.steps[0].before.items() if "lora_A" in name}
    assert {shape[0] for shape in down.values()} == {2}


def ref_sync_steps(run: Any) -> None:
    """The reference of steps 1 and 2 is the model they began with, that of step 3 the policy after two of them."""
    assert len(run.steps) == 3
    for step, reference in zip(run.steps, (0, 0, 2), strict=True):
        model = tiny_model()
        model.load_state_dict(run.steps[reference].before, strict=False)
        expected = step.step.with_logprobs(old=compute_logprobs(model, step.step.batches)).old_logprobs
        np.testing.assert_allclose(step.step.ref_logprobs, expected, rtol=0, atol=1e-5)
    moved = [float(np.abs(each.step.ref_logprobs - each.outcome.logprobs).max()) for each in run.steps]
    assert moved[0] < 1e-5 < 1e-4 < moved[1]
    assert moved[2] < 1e-5


def ref_mixup_alpha(run: Any) -> None:
    """The reference of step 3 is a quarter of the policy after two steps, and three quarters of the one it began as."""
    start, after, third = run.steps[0].before, run.steps[2].before, run.steps[2]
    model = tiny_model()
    model.load_state_dict({name: 0.25 * after[name] + 0.75 * start[name] for name in start}, strict=False)
    expected = third.step.with_logprobs(old=compute_logprobs(model, third.step.batches)).old_logprobs
    np.testing.assert_allclose(third.step.ref_logprobs, expected, rtol=0, atol=1e-5)
    assert float(np.abs(third.step.ref_logprobs - third.outcome.logprobs).max()) > 1e-4


def ref_model(folder: Path) -> None:
    other = tiny_model(7)
    other.save_pretrained(folder / "other")
    [first, *_] = watched(traces(), folder / "o", objective=KL, train__ref_model=str(folder / "other")).steps
    expected = first.step.with_logprobs(old=compute_logprobs(other, first.step.batches)).old_logprobs
    np.testing.assert_allclose(first.step.ref_logprobs, expected, rtol=0, atol=1e-5)


def compiles(folder: Path) -> None:
    with mock.patch.object(torch, "compile", side_effect=lambda forward: forward) as compiled:
        watched(traces(), folder, train__compile=True)
    assert compiled.call_count == 2  # one for each layer


def device(_: Path) -> None:
    assert device_of(told(train__device="meta")).type == "meta"


def mode(folder: Path) -> None:
    with pytest.raises(TracegradError, match="TG-TRAIN-026"):  # one process has nobody to share with
        watched(traces(), folder, parallel__mode="ddp")


def printed(folder: Path, *changes: str) -> str:
    """The formula that a run would take."""
    (folder / "t.jsonl").write_text("{}\n")
    with mock.patch("tracegrad.cli.train.print_lines") as said:
        code = main(
            [
                "train",
                str(folder / "t.jsonl"),
                "--model",
                str(MODEL),
                "--out",
                str(folder / "o"),
                *changes,
                "--print-config",
            ]
        )
    assert code == 0
    return "\n".join(map(str, said.call_args.args))


def preset(folder: Path) -> None:
    assert "-A (4 / tau) sigmoid" in printed(folder, "--objective", "SAPO")


def overrides(folder: Path) -> None:
    assert "clip(r, 0.8, 1.5)" in printed(folder, "--objective.surrogate.high", "0.5")


ROWS: dict[str, tuple[str | None, Callable[[Any], None]]] = {
    "data.on_error": (None, on_error),
    "data.logprob_kind": (None, logprob_kind),
    "data.server_profile": (None, server_profile),
    "data.sampling_defaults": (None, sampling_defaults),
    "data.accept_truncated_sampling": (None, accept_truncated_sampling),
    "data.text_only": (None, text_only),
    "data.allow_unknown_ids": (None, allow_unknown_ids),
    "data.reward": (None, reward),
    "data.reward_weights": (None, reward_weights),
    "data.holdout": (None, holdout),
    "mixture.weights": (None, weights),
    **{f"map.{name}": (None, map_fields) for name in MAPPED},
    **{f"map.{name}": (None, map_tokens) for name in MAPPED_TOKENS},
    **{f"map.{name}": (None, map_session) for name in ("session", "order")},
    **{f"filter.{of.__name__}": (None, of) for of in OF_FILTER},
    **{f"filter.{name}": (None, by_trace(name)) for how, *_ in BY_TRACE for name in how},
    **{f"reward_kl.{name}": (None, reward_kl) for name in ("coef", "kind", "cap", "target_kl", "horizon")},
    "pack.tokens_per_row": (None, tokens_per_row),
    "train.groups_per_step": (None, groups_per_step),
    "pack.too_long": (None, too_long),
    "pack.share_prefixes": (None, share_prefixes),
    "pack.skip_zero_weight": (None, skip_zero_weight),
    "advantage.baseline": (None, baseline),
    "advantage.scale": (None, scale),
    "advantage.ddof": (None, ddof),
    "advantage.multi_objective_aggregation": (None, several),
    "advantage.single_sample_group": (None, single_sample_group),
    **{f"optimizer.{name}": ("adamw", adamw) for name in OPTIMIZER},
    "optimizer.grad_clip": ("adamw", grad_clip),
    **{f"schedule.{name}": ("scheduled", schedule) for name in SCHEDULE},
    **{f"schedule.{name}": ("restarted", restarts) for name in ("warmup_ratio", "kwargs")},
    "train.max_steps": ("restarted", max_steps),
    "train.iterations": ("repeated", iterations),
    "train.epochs": ("cadence", epochs),
    "train.seed": ("cadence", seed),
    "train.updates_per_old_logprobs": ("cadence", updates_per_old_logprobs),
    "train.missing_logprobs": ("cadence", missing),
    "train.device": (None, device),
    "train.dtype": ("cadence", dtype),
    "attention.implementation": (None, attention),
    "eval.ope_per_epoch": ("cadence", ope_per_epoch),
    "stop.min_ope_ess": ("drifting", min_ope_ess),
    "stop.ope_falls": ("spoiling", stop_worse),
    "train.report_to": ("cadence", report_to),
    "train.memory_mode": ("cadence", memory),
    "train.compile": (None, compiles),
    "train.lora_rank": ("adapters", lora_rank),
    "train.ref_sync_steps": ("renewed", ref_sync_steps),
    "train.ref_mixup_alpha": ("mixed", ref_mixup_alpha),
    "train.ref_model": (None, ref_model),
    "train.timeout_s": (None, timeout),
    "parallel.mode": (None, mode),
    "checkpoint.every_steps": ("cadence", checkpoint_every),
    "checkpoint.keep": ("cadence", checkpoint_keep),
    "images.vision_encoder": (None, images_tower),
    "token_log.mode": (None, terms_kept),
    "token_log.max_mb": (None, terms_megabytes),
    "objective.preset": (None, preset),
    "objective.overrides": (None, overrides),
}


def test_every_option_has_a_row():
    sections = {name: type(getattr(config.Config(), name)) for name in config.SECTIONS}
    assert {f"{name}.{each.name}" for name, cls in sections.items() for each in fields(cls)} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_an_option_does_what_it_says(name, done, tmp_path):
    run, holds = ROWS[name]
    holds(tmp_path if run is None else done(run))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_an_option_that_is_ignored_fails_its_row(name, tmp_path):
    run, holds = ROWS[name]
    section, option = name.split(".")
    cls = type(getattr(config.Config(), section))
    with ignored(cls, option, next(each.default for each in fields(cls) if each.name == option)):
        try:
            holds(tmp_path if run is None else RUNS[run](tmp_path))
        except (AssertionError, TracegradError, ArgumentError, pytest.fail.Exception):
            return
    pytest.fail(f"{name} was ignored, and its row did not notice")
