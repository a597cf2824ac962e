"""`tracegrad train`: what a run over a file is told, the story that it prints, and what it leaves.

torch is imported when the run begins, not for `--print-config` and `--dry-run`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tracegrad import config, prepare
from tracegrad.batch import ModelShape
from tracegrad.cli.words import command, first, say
from tracegrad.errors import ArgumentError
from tracegrad.metrics import Stopwatch
from tracegrad.report import write_report
from tracegrad.tokenizer import Tokenizer


def add_to(commands: Any) -> None:
    """Adds the verb."""
    train = command(commands, "train", "train a model on recorded traces", _train)
    run = train.add_argument_group("the run")
    run.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the options of docs/configuration.md")
    run.add_argument("--objective", metavar="NAME", help="one of tracegrad.presets, or module:NAME (default DAPO)")
    run.add_argument("--epochs", metavar="N", help="passes over the groups (default 1)")
    run.add_argument("--seed", metavar="N", help="of the order of groups and the held-out choice (default 0)")
    run.add_argument("--stop-below-ess", metavar="F", help="stop when value's effective sample falls below this share")
    run.add_argument("--tensorboard", action="store_const", const=True, help="write TensorBoard scalars as well")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    run.add_argument("--print-config", action="store_true", help="print the resolved config and do nothing")
    run.add_argument("--dry-run", action="store_true", help="read, align and pack, print what would be done, and stop")
    run.add_argument("--SECTION.OPTION", metavar="VALUE", help="any option, such as --optimizer.lr 2e-4")


def _train(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import algebra, presets

    chosen = _config(told, overrides)
    objective = algebra.override_all(presets.find(chosen.objective.preset), dict(chosen.objective.overrides))
    if told.print_config or told.dry_run:
        say(*config.to_toml(chosen).split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    if told.print_config:
        return 0
    watch = Stopwatch()
    data = chosen.data if first() or chosen.data.on_error != "quarantine" else replace(chosen.data, on_error="skip")
    sequences, account = prepare.load(told.traces, told.model, data, told.out, watch)
    say(*account.lines())
    if told.dry_run:
        return _dry_run(sequences, objective, chosen, told.model)
    return _learn(told, arguments, chosen, objective, sequences, account, watch)


def _config(told: argparse.Namespace, overrides: list[tuple[str, Any]]) -> config.Config:
    """Defaults, or what the resumed run was told; then the file, then the command line."""
    before = told.out / "config.toml"
    start = config.load(before) if told.resume and before.is_file() else None
    return config.load(told.config, overrides, start=start)


def _dry_run(sequences: Any, objective: Any, chosen: config.Config, model: Path) -> int:
    """What would be done: steps, rows and their fill, memory and time."""
    from tracegrad.learner.feed import Feed

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    feed = Feed.of(sequences, objective, chosen, ranks=ranks, shape=_shape(model))
    steps = feed.steps(0)
    plan = feed.plan(len(steps))
    rows = [len(batch.ids) for step in steps for batch in step.batches]
    fill = sum(rows) / (len(rows) * chosen.pack.token_budget)
    say(
        *(f"note     {note}" for note in feed.notes),
        f"would    take {plan.total:,} steps, {plan.steps_per_epoch:,} an epoch, on {int((~feed.held).sum()):,} "
        f"traces, with {int(feed.held.sum()):,} held out for value",
        f"         {len(rows):,} rows an epoch, the longest {max(rows):,} tokens, {fill:.0%} of the budget filled, "
        f"{sum(map(len, steps)):,} terms" + ("" if ranks == 1 else f", on the first of {ranks} ranks"),
        f"sharing  {feed.sharing()}, in the first step"
        + ("" if chosen.pack.share_prefixes else "; it is off: pack.leave_out repeats"),
    )
    say(*_forecast(model, chosen, feed, ranks))
    return 0


def _shape(model: Path) -> ModelShape | None:
    """Of the model, by its config.json alone; None where that does not tell it."""
    try:
        told = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return ModelShape.known(SimpleNamespace(**told.get("text_config", told)))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _forecast(model: Path, chosen: config.Config, feed: Any, ranks: int) -> list[str]:
    """Memory and time, as far as they are known before a weight is read; says so where torch is not there."""
    try:
        from tracegrad.learner.forecast import forecast
    except ImportError as error:
        return [f"memory   not known: {error.name} is not installed"]
    return forecast(model, chosen, feed, ranks).lines()


def _learn(
    told: argparse.Namespace,
    arguments: list[str],
    chosen: config.Config,
    objective: Any,
    sequences: Any,
    account: prepare.Account,
    watch: Stopwatch,
) -> int:
    try:
        with watch("import"):
            from tracegrad import learner
            from tracegrad.learner.model import load_model
    except ImportError as error:
        raise ArgumentError(
            f"train needs {error.name}, which is not installed. Reading and aligning work without it, training does "
            "not. pip install 'tracegrad[train]'"
        ) from error
    with watch("load"):
        model = load_model(told.model)
    places = {"out": told.out, "tokenizer": told.model, "resume": told.resume}
    done = learner.train(sequences, model, objective=objective, config=chosen, say=say, **places)
    if not first():
        return done.exit_code
    watch.seconds.update(done.seconds)
    summary = _summary(chosen, account, done, watch.seconds)
    prepare.write_json(told.out / "summary.json", summary)
    with watch("report"):
        tokenizer = Tokenizer.from_pretrained(told.model)
        found = {"rows": done.rows, "terms": done.terms, "summary": summary}
        title = Path(told.traces).name
        write_report(told.out / "report.html", sequences=sequences, tokenizer=tokenizer, title=title, **found)
    say(*_ending(told, arguments, done))
    return done.exit_code


def _summary(chosen: config.Config, account: prepare.Account, done: Any, seconds: dict[str, float]) -> dict[str, Any]:
    kept = ("traces", "groups", "tokens", "terms", "tiers", "drift", "recorded", "exact")
    value = next((row for row in reversed(done.rows) if "value" in row), {})
    return {
        **{name: value for name, value in account.as_dict().items() if name in kept},
        "seed": chosen.train.seed,
        "steps": done.step,
        "steps_planned": done.total,
        "stopped": done.stopped,
        "value": {name: value[name] for name in value if name.startswith("value")},
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "checkpoint": str(done.checkpoint),
        "device_idle": done.idle,
    }


def _ending(told: argparse.Namespace, arguments: list[str], done: Any) -> list[str]:
    reasons = {
        "done": f"trained  {done.step:,} steps",
        "ess": f"stopped  after step {done.step:,} of {done.total:,}: value's effective sample is too small",
        "signal": f"stopped  on request after step {done.step:,} of {done.total:,}; nothing is lost",
    }
    lines = [
        reasons[done.stopped],
        *_value_line(done.rows),
        "device   "
        + (
            "a CPU: host and device are one, no idle share"
            if done.idle is None
            else f"{done.idle:.1%} of its time idle"
        ),
        f"         {told.out / 'checkpoint'}  loads with AutoModelForCausalLM.from_pretrained",
        f"         {told.out / 'report.html'}  shows the run and its tokens",
        f"         {told.out / 'metrics.jsonl'}, {told.out / 'summary.json'}",
    ]
    if done.stopped == "signal":
        again = arguments if "--resume" in arguments else [*arguments, "--resume"]
        lines.append(f"go on    tracegrad {shlex.join(again)}")
    return lines


def _value_line(rows: list[dict[str, Any]]) -> list[str]:
    """What is known of the policy's reward at the end."""
    last = next((row for row in reversed(rows) if row.get("value") is not None), None)
    if last is None:
        return []
    sample = f"effective sample {last['value_ess']:.0f} of {last['value_traces']} held-out traces"
    if not last["value_known"]:
        return [f"value    no longer known: {sample}"]
    span = f"{last['value_low']:.3f} to {last['value_high']:.3f}"
    return [f"value    {last['value_recorded']:.3f} as recorded, {last['value']:.3f} now ({span}, {sample})"]
