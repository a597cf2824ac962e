"""Run `tracegrad train`: options of a training run on a file, its printed output, and the files it writes.

torch is imported when training starts, not for `--print-config` and `--dry-run`.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tracegrad import config
from tracegrad.cli import args
from tracegrad.cli.args import add_json_flag, command, folder_of, print_json, print_lines, printer_for, resume_line
from tracegrad.errors import ArgumentError, redact
from tracegrad.metrics import Stopwatch, off_policy_estimate
from tracegrad.packing import ModelShape
from tracegrad.prepare.summary import IngestSummary
from tracegrad.storage.files import read_json
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer import api


def add_to(commands: Any) -> None:
    """Add the verb."""
    train = command(commands, "train", "train a model on recorded traces", _train, RunDirectory)
    run = train.add_argument_group("the run")
    run.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the options of docs/configuration.md")
    args.add_to(run)
    run.add_argument(
        "--accept-truncated-sampling",
        action="store_const",
        const=True,
        help="take a ratio on traces sampled with top_p, top_k, penalties or the like, which is off by the kept mass",
    )
    run.add_argument("--epochs", metavar="N", help="passes over the groups (default 1)")
    run.add_argument("--seed", metavar="N", help="of the order of groups and the held-out choice (default 0)")
    run.add_argument(
        "--stop-below-ess", metavar="F", help="stop when the off-policy value rests on a smaller share of the traces"
    )
    run.add_argument("--log-to", metavar="NAMES", help="dashboards: tensorboard, wandb, trackio, with commas between")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    run.add_argument("--print-config", action="store_true", help="print the resolved config and do nothing")
    add_json_flag(run)
    run.add_argument("--dry-run", action="store_true", help="read, align and pack, print what would be done, and stop")
    run.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: what each of so many ranks would need")
    run.add_argument("--SECTION.OPTION", metavar="VALUE", help="any option, such as --optimizer.lr 2e-4")


def _train(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if options.ranks is not None and (options.ranks < 1 or not options.dry_run):
        raise ArgumentError(
            f"TG-CLI-035: --ranks {options.ranks} is for --dry-run, and at least 1. A run has as many ranks as "
            "torchrun starts. Leave it out, or add --dry-run."
        )
    options.model = folder_of(options.model)
    run_config, recipe_lines = _config(options, overrides)
    objective = api.objective_of(run_config)
    speak, as_json = printer_for(options), options.json
    speak(*(f"# {line}" if options.print_config or options.dry_run else line for line in recipe_lines))
    if (options.print_config or options.dry_run) and not as_json:
        print_lines(*config.to_toml(run_config).split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    if options.print_config:
        if as_json:
            print_json({"config": config.as_dict(run_config), "objective": str(objective)})
        return 0
    watch = Stopwatch()
    with nullcontext() if options.dry_run or not api.is_first_rank() else options.out.locked():
        data, summary = api.load_traces(options.traces, options.model, run_config, options.out.path, watch)
        speak(*summary.lines())
        if options.dry_run:
            ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
            return _dry_run(data, objective, run_config, options.model, summary if as_json else None, ranks)
        return _learn(options, arguments, run_config, objective, data, summary, watch)


def _config(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[config.Config, list[str]]:
    """Return the config of a run, and the lines that describe its recipe.

    The start is the config of the resumed run, or the defaults. Recipe, file and command line override it in this
    order.
    """
    start = api.resumed_config(options.out, options.resume)
    recipe = args.recipe_from_flags(options)
    if recipe is None:
        return config.load(options.config, overrides, start=start), []
    run_config, otherwise = recipe.settle(options.config, overrides, start=start)
    return run_config, args.lines(options, recipe, otherwise)


def _dry_run(
    data: Any, objective: Any, chosen: config.Config, model: Path, account: IngestSummary | None, ranks: int
) -> int:
    """Print what a run would do: steps, rows and their fill, memory and time. With `account`, print one JSON object."""
    from tracegrad.trainer.steps import TrainingData

    feed = TrainingData.of(data, objective, chosen, ranks=ranks, shape=_shape(model))
    terms = sum(step.terms for step in feed.sizes)
    rows = [tokens for step in feed.sizes for tokens, _ in step.rows]
    plan = feed.plan(len(feed.sizes))
    fill = sum(rows) / (len(rows) * chosen.pack.token_budget)
    if account is not None:
        plan_counts = {
            "steps": plan.total,
            "steps_per_epoch": plan.steps_per_epoch,
            "rows": len(rows),
            "longest_row": max(rows),
        }
        traces = {"trained": int(feed.trained.sum()), "held_out": int(feed.held.sum()), "terms": terms}
        lines, numbers = _forecast(model, chosen, feed, ranks)
        forecast = {"forecast": [line.strip() for line in lines], "per_rank": numbers}
        estimate = {**plan_counts, **traces, "fill": round(fill, 4), "notes": list(feed.notes), **forecast}
        inputs = {**account.as_dict(), "config": config.as_dict(chosen), "objective": str(objective)}
        print_json({"would": estimate, **inputs})
        return 0
    print_lines(
        *(f"note     {note}" for note in feed.notes),
        f"would    take {plan.total:,} steps, {plan.steps_per_epoch:,} an epoch, on {int(feed.trained.sum()):,} "
        f"traces, with {int(feed.held.sum()):,} held out for value",
        f"         {len(rows):,} rows an epoch, the longest {max(rows):,} tokens, {fill:.0%} of the budget filled, "
        f"{terms:,} terms" + ("" if ranks == 1 else f", on the first of {ranks} ranks"),
        f"sharing  {feed.sharing()}, in the first step"
        + ("" if chosen.pack.share_prefixes else "; it is off: pack.share_prefixes"),
    )
    print_lines(*_forecast(model, chosen, feed, ranks)[0])
    return 0


def _shape(model: Path) -> ModelShape | None:
    """Return the shape of a model from its config.json, or None if it is not specified there."""
    try:
        model_config = read_json(model / "config.json")
        return ModelShape.known(SimpleNamespace(**model_config.get("text_config", model_config)))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _forecast(model: Path, chosen: config.Config, feed: Any, ranks: int) -> tuple[list[str], dict[str, Any]]:
    """Return the memory, time and communication estimates as lines and numbers.

    Without torch, return one line saying so.
    """
    try:
        from tracegrad.trainer.resource_estimate import estimate_resources
    except ImportError as error:
        return [f"memory   not known: {error.name} is not installed"], {}
    estimate = estimate_resources(model, chosen, feed, ranks)
    return estimate.lines(), estimate.as_dict()


def _learn(
    options: argparse.Namespace,
    arguments: list[str],
    chosen: config.Config,
    objective: Any,
    data: Any,
    summary: IngestSummary,
    watch: Stopwatch,
) -> int:
    title = Path(redact(options.traces[0]).rstrip("/")).name
    settings = {
        "out": options.out,
        "resume": options.resume,
        "title": title,
        "say": printer_for(options),
        "watch": watch,
    }
    result = api.train_aligned(data, summary, options.model, objective, chosen, **settings)
    if options.json:
        places = _outputs(options.out, result)
        counts = {
            "steps": result.step,
            "planned": result.total,
            "stopped": result.stopped,
            "exit_code": result.exit_code,
        }
        print_json({**counts, "last": result.rows[-1] if result.rows else None, "files": places})
    else:
        print_lines(*_ending(options, arguments, result))
    return result.exit_code


def _ending(options: argparse.Namespace, arguments: list[str], result: Any) -> list[str]:
    from tracegrad.trainer.load_model import auto_class_name

    reasons = {
        "done": f"trained  {result.step:,} steps",
        "ess": f"stopped  after step {result.step:,} of {result.total:,}: the off-policy value rests on too few traces",
        "worse": f"stopped  after step {result.step:,} of {result.total:,}: value was best after {result.best}",
        "signal": f"stopped  on request after step {result.step:,} of {result.total:,}; nothing is lost",
    }
    places = _outputs(options.out, result)
    return [
        reasons[result.stopped],
        *_value_line(result.rows),
        "device   "
        + (
            "a CPU: host and device are one, no idle share"
            if result.idle is None
            else f"{result.idle:.1%} of its time idle"
        ),
        f"         {places['checkpoint']}  loads with {auto_class_name(result.checkpoint)}.from_pretrained",
        f"         {places['report.html']}  shows the run and its tokens",
        f"         {places['metrics.jsonl']}, {places['summary.json']}",
        *resume_line(result.stopped, arguments),
    ]


def _outputs(out: RunDirectory, result: Any) -> dict[str, str]:
    """Return the addresses or paths of a run's outputs. At an address, the checkpoint is the newest one."""
    names = ("checkpoint", "report.html", "metrics.jsonl", "summary.json")
    places = {name: out.named(out.path / name) or str(out.path / name) for name in names}
    return {**places, "checkpoint": result.address or places["checkpoint"]}


def _value_line(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line with the final off-policy estimate of the reward, if there is one."""
    last = next((row for row in reversed(rows) if row.get("off_policy_value") is not None), None)
    if last is None:
        return []
    sample = f"effective sample {last['off_policy_value_ess']:.0f} of {last['off_policy_value_traces']} held-out traces"
    if (estimate := off_policy_estimate(last)) is None:
        was_known = any(row.get("off_policy_value_known") for row in rows)
        clamped = last.get("off_policy_value_clamped") or 0
        reason = f"{sample}, {clamped:.0f} with a clamped weight" if clamped else sample
        return [f"value    {'no longer' if was_known else 'not'} known: {reason}"]
    mean, low, high = estimate
    recorded = last["off_policy_value_recorded"]
    return [f"value    {recorded:.3f} as recorded, {mean:.3f} now ({low:.3f} to {high:.3f}, {sample})"]
