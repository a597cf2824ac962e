"""Learning rates by step: beside transformers' own schedules, resumed, and what is refused."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from collect_run import questions
from few_probes import few  # noqa: F401
from manual_steps import steps_of
from online_runs import CONFIG, weights
from online_runs import run as play
from policy_server import MODEL, PolicyServer
from tiny import tiny_model
from tracegrad.config import Schedule, update
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.online import replay
from tracegrad.trainer import Trainer, checkpoint
from tracegrad.trainer.optim import check_rates, lr_factor
from training_runs import SignalAfter, assert_same, run, told, traces  # noqa: F401

STEPS = 40


def theirs(name, warmup, lr=1.0, **more):
    """The rates that an optimizer has under transformers' scheduler, step by step."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=more)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "more", "ours"),
    [
        ("constant_with_warmup", {}, {"name": "constant"}),
        ("linear", {}, {"name": "linear"}),
        ("cosine", {}, {"name": "cosine"}),
        ("warmup_stable_decay", {"num_decay_steps": 4}, {"name": "wsd"}),
        ("warmup_stable_decay", {"num_decay_steps": 33}, {"name": "wsd", "decay_ratio": 33 / 40}),
        ("polynomial", {"lr_end": 0.25, "power": 1.0}, {"name": "linear", "min_lr_ratio": 0.25}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.25}, {"name": "cosine", "min_lr_ratio": 0.25}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 8, "min_lr_ratio": 0.25},
            {"name": "wsd", "decay_ratio": 0.2, "min_lr_ratio": 0.25},
        ),
    ],
)
def test_rates_are_those_of_transformers_step_by_step(name, more, ours, warmup):
    schedule = Schedule(**ours, warmup_steps=warmup)
    found = [lr_factor(schedule, step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(theirs(name, warmup, **more), rel=1e-14, abs=1e-16)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "more", "ours"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, {}),
        ("polynomial", {}, {}),
        ("polynomial", {"lr_end": 2e-7, "power": 2.0}, {}),
        ("inverse_sqrt", {}, {}),
        ("cosine_with_min_lr", {"min_lr": 1e-7}, {}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, {}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "1-sqrt"}, {}),
        ("cosine", {"num_cycles": 1.5}, {}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "cosine"}, {"name": "wsd"}),
    ],
)
def test_schedules_of_transformers_are_its_own(name, more, ours, warmup):
    schedule = Schedule(**{"name": name, **ours}, warmup_steps=warmup, kwargs=json.dumps(more) if more else "")
    found = [1e-6 * lr_factor(schedule, step, STEPS, 1e-6) for step in range(STEPS)]
    assert found == pytest.approx(theirs(name, warmup, lr=1e-6, **more), rel=1e-12, abs=1e-20)
    assert len(set(found)) > 8


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.33])
@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine"])
def test_a_share_of_all_steps_rises_as_transformers_counts_it(name, ratio):
    from transformers import TrainingArguments

    warm = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=ratio), STEPS)
    schedule = Schedule(name.removesuffix("_with_warmup"), warmup_ratio=ratio)
    found = [lr_factor(schedule, step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(theirs(name, warm), rel=1e-14, abs=1e-16)


@pytest.mark.parametrize("kwargs", ["{", '"text"', '{"cycles": 2}', '{"lr_end": 1.0}'])
def test_arguments_that_transformers_refuses_are_refused_by_name(kwargs):
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-052.*polynomial"):
        lr_factor(Schedule("polynomial", kwargs=kwargs), 0, STEPS)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.first_cases(1)
def test_a_run_that_was_cut_goes_on_with_the_rates_of_one_that_was_not(traces, tmp_path, name):
    told_so = {"schedule__name": name, "schedule__warmup_steps": 2, "schedule__min_lr_ratio": 0.1}
    if name == "wsd":
        told_so["schedule__decay_ratio"] = 0.5
    whole, parameters = run(traces, tmp_path / "whole", **told_so)
    run(traces, tmp_path / "cut", sinks=[SignalAfter(5)], **told_so)
    again, resumed = run(traces, tmp_path / "cut", tiny_model(9), resume=True, **told_so)
    assert_same(parameters, resumed)
    rates = [row["lr"] for row in whole.rows if "lr" in row]
    assert rates == [row["lr"] for row in again.rows if "lr" in row]
    expected = [3e-3 * lr_factor(told(**told_so).schedule, step, whole.total) for step in range(whole.total)]
    assert rates == expected
    assert len(set(rates)) > whole.total // 2


def test_more_epochs_are_refused_where_a_step_that_was_taken_would_have_had_another_rate(traces, tmp_path):
    run(traces, tmp_path, train__epochs=1, schedule__name="linear")
    taken = checkpoint.read_progress(checkpoint.list_checkpoints(tmp_path)[-1]).step
    with pytest.raises(ArgumentError, match=rf"TG-TRAIN-055.*{taken}.*{2 * taken}.*{taken}"):
        run(traces, tmp_path, resume=True, train__epochs=2, schedule__name="linear")


def test_a_stable_phase_may_be_made_longer(tmp_path):
    schedule = Schedule("wsd", warmup_steps=2)
    check_rates(tmp_path, schedule, 80, 40, 36)  # the last 4 of 40 fall, and the first of them is still at lr
    check_rates(tmp_path, schedule, 80, 40, 37)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-055.*38"):
        check_rates(tmp_path, schedule, 80, 40, 38)
    for before in (None, "40", 20):  # a checkpoint that says nothing, or something else, is not believed
        with pytest.raises(ArgumentError, match="TG-TRAIN-055"):
            check_rates(tmp_path, schedule, 80, before, 38)


def test_a_schedule_has_no_rate_behind_its_last_step():
    for step in (6, 9):
        with pytest.raises(ArgumentError, match=rf"TG-TRAIN-050.*{step + 1}"):
            lr_factor(Schedule("linear"), step, 6)


def test_a_run_of_ones_own_steps_must_be_told_how_many(traces, tmp_path):
    linear = told(schedule__name="linear")
    [step, *_] = steps_of(traces, presets.DAPO_DIRECT, 0)
    with pytest.raises(ArgumentError, match="TG-TRAIN-053"):
        Trainer(tiny_model(), presets.DAPO_DIRECT, linear, out=tmp_path / "a").step(step)
    assert not (tmp_path / "a").exists()
    own = Trainer(tiny_model(), presets.DAPO_DIRECT, linear, out=tmp_path / "b", total_steps=2)
    rates = []
    for _ in range(2):
        own.step(step)
        rates.append(own.metrics()["lr"])
    assert rates == [3e-3, 1.5e-3]
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-050.*3.*2"):
        own.step(step)
    own.save()
    again = Trainer(tiny_model(), presets.DAPO_DIRECT, linear, out=tmp_path / "b")
    with pytest.raises(ArgumentError, match="TG-TRAIN-053"):
        again.restore()
    again.steps = 4
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-055.*2.*4"):
        again.restore()
    again.steps = 2
    assert again.restore().step == 2


def test_each_group_of_an_optimizer_of_ones_own_keeps_its_part_of_the_rate(traces, tmp_path):
    from tracegrad.trainer import train

    seen = []

    class Rates:
        def log(self, row):
            seen.append([group["lr"] for group in optimizer.param_groups])

        def close(self):
            pass

    model = tiny_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest, "lr": 0.1}])
    config = told(schedule__name="linear", optimizer__lr=1e-6, train__epochs=1)
    given = {"optimizer": optimizer, "sinks": [Rates()], "log": lambda _: None}
    done = train(traces, model, objective=presets.DAPO, out=tmp_path, config=config, **given)
    parts = [1 - step / done.total for step in range(done.total)]
    assert seen[1:] == [pytest.approx([0.2 * part, 0.1 * part]) for part in parts]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule__decay_ratio": 0.3}, r"TG-TRAIN-085.*schedule\.decay.*schedule\.name.*constant"),
        ({"schedule__name": "linear", "schedule__decay_ratio": 0.3}, r"TG-TRAIN-085.*schedule\.decay.*schedule\.name"),
        ({"schedule__min_lr_ratio": 0.3}, r"TG-TRAIN-085.*schedule\.min_lr_ratio"),
        ({"schedule__name": "cosine", "schedule__warmup_steps": 99}, r"TG-TRAIN-054.*warmup_steps.*99"),
        ({"schedule__name": "wsd", "schedule__decay_ratio": 1.0, "schedule__warmup_steps": 1}, r"TG-TRAIN-054.*1"),
        ({"schedule__min_lr_ratio": 1.0}, r"TG-CONFIG-010.*0.*1"),
        ({"schedule__decay_ratio": 0.0}, r"TG-CONFIG-010.*0.*1"),
        ({"optimizer__warmup_steps": 4}, r"TG-CONFIG-001.*optimizer\.warmup_steps.*schedule\.warmup_steps"),
    ],
)
def test_what_a_schedule_cannot_be_is_refused(traces, tmp_path, changes, said):
    with pytest.raises(ArgumentError, match=said):
        run(traces, tmp_path, **changes)


def test_an_online_run_goes_by_its_steps_and_a_replay_by_those_of_the_run(tmp_path):
    """Four steps were to come, and the tasks end after two."""
    config = update(CONFIG, [("schedule.name", "linear")])
    with PolicyServer() as server:
        found = play(server, tmp_path / "run", config=config, tasks=iter(questions(count=4)), steps=4)
    assert (found.stopped, [row["lr"] for row in found.rows]) == ("tasks", [2e-3, 2e-3 * 0.75])
    again = replay(tmp_path / "run", MODEL, objective=presets.DAPO_DIRECT, out=tmp_path / "again")
    assert_same(weights(found.checkpoint), weights(again.checkpoint))
