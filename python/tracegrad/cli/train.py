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
from tracegrad._html import plural
from tracegrad.cli import args, extras
from tracegrad.cli.args import (
    add_json_flag,
    add_trace_arguments,
    folder_of,
    print_json,
    print_lines,
    printer_for,
    resume_line,
    verb,
)
from tracegrad.errors import ArgumentError, redact
from tracegrad.metrics import Stopwatch, off_policy_estimate
from tracegrad.packing import ModelShape
from tracegrad.prepare.summary import IngestSummary
from tracegrad.storage.files import read_json
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer import api


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "train",
        "train a model on recorded traces",
        _train,
        more="TRACES may also be a folder that `tracegrad prepare` wrote. --out gets a checkpoint, metrics.jsonl, "
        "report.html and summary.json.",
        examples=(
            "logs/ --model Qwen/Qwen3-0.6B --out runs/first --map.reward score",
            "prepared --model MODEL --out runs/second --objective GSPO --optimizer.lr 2e-6 --dry-run",
        ),
        dotted_names=config.options,
        reason_no_effect=None,
    )
    add_trace_arguments(parser, out=RunDirectory, out_help="folder or URL of the run")
    run = parser.add_argument_group("training")
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with options (docs/reference/configuration.md)"
    )
    args.add_to(run)
    run.add_argument(
        "--accept-truncated-sampling",
        action="store_const",
        const=True,
        help="train with a ratio on traces sampled with top_p, top_k or penalties; the ratio is wrong by the "
        "probability mass that sampling kept",
    )
    run.add_argument("--epochs", metavar="N", help="passes over the groups (default 1)")
    run.add_argument(
        "--seed", metavar="N", help="seed for the order of groups and the choice of held-out groups (default 0)"
    )
    run.add_argument(
        "--min-ope-ess",
        metavar="F",
        help="stop when the effective sample size of the held-out estimate falls below F of the held-out traces",
    )
    run.add_argument(
        "--report-to",
        metavar="NAMES",
        help="also send metrics to tensorboard, wandb or trackio; separate several with commas",
    )
    run.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out, if one exists"
    )
    run.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    add_json_flag(run)
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="read, align and pack, print steps and memory estimate, and exit without training",
    )
    run.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: print the estimate for N ranks")
    run.add_argument(
        "--SECTION.OPTION",
        metavar="VALUE",
        help="set any option of docs/reference/configuration.md, such as --optimizer.lr 2e-4",
    )


def _train(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if options.ranks is not None and (options.ranks < 1 or not options.dry_run):
        raise ArgumentError(
            f"TG-CLI-035: --ranks {options.ranks} needs --dry-run and must be at least 1. A training run has the ranks "
            "that torchrun starts. Remove --ranks, or add --dry-run."
        )
    run_config, recipe_lines, recipe = _config(options, overrides)
    extras.check(options, config.as_dict(run_config))
    objective = api.objective_of(run_config)
    options.model = folder_of(options.model)
    if not options.print_config and not options.dry_run:
        extras.check_images(options.traces, options.model)
    speak, as_json = printer_for(options), options.json
    if options.print_config:
        speak(*(f"# {line}" for line in recipe_lines))
        if as_json:
            print_json({"config": config.as_dict(run_config), "objective": str(objective)})
        else:
            print_lines(*config.to_toml(run_config).split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
        return 0
    speak(*recipe_lines)
    if options.dry_run and not as_json:
        changes = [f"{name} = {value}" for name, value in api.changed_options(run_config)]
        loss, *rest = str(objective).removeprefix("loss = ").splitlines()
        print_lines(
            *(f"option   {line}" for line in changes), f"loss     {loss}", *(f"         {line}" for line in rest)
        )
    elif recipe is not None and not options.dry_run:
        speak(*(f"         {line}" for line in str(objective).splitlines()))
    watch = Stopwatch()
    with nullcontext() if options.dry_run or not api.is_first_rank() else options.out.lock():
        data, summary = api.load_traces(options.traces, options.model, run_config, options.out.path, watch)
        speak(*summary.lines())
        if options.dry_run:
            ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
            return _dry_run(data, objective, run_config, options.model, summary if as_json else None, ranks, recipe)
        return _learn(options, arguments, run_config, objective, data, summary, watch, recipe)


def _config(options: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[config.Config, list[str], Any]:
    """Return the config of a run, the lines that describe its recipe, and the recipe or None.

    The start is the config of the resumed run, or the defaults. Recipe, file and command line override it in this
    order.
    """
    start = api.resumed_config(options.out, options.resume)
    recipe = args.recipe_from_flags(options)
    if recipe is None:
        return config.load(options.config, overrides, start=start), [], None
    run_config, overridden = recipe.resolve(options.config, overrides, start=start)
    return run_config, args.lines(options, recipe, overridden, run_config.train.groups_per_step), recipe


def _dry_run(
    data: Any,
    objective: Any,
    chosen: config.Config,
    model: Path,
    account: IngestSummary | None,
    ranks: int,
    recipe: Any,
) -> int:
    """Print what a run would do: steps, rows and their fill, memory and time. With `account`, print one JSON object."""
    from tracegrad.trainer.steps import TrainingData

    feed = TrainingData.of(data, objective, chosen, ranks=ranks, shape=_shape(model))
    rows = [tokens for step in feed.sizes for tokens, _ in step.rows]
    plan, counts = feed.plan(len(feed.sizes)), feed.counts()
    fill = sum(rows) / (len(rows) * chosen.pack.tokens_per_row)
    lines, numbers = _forecast(model, chosen, feed, ranks)
    if account is not None:
        plan_counts = {
            "steps": plan.total,
            "steps_per_epoch": plan.steps_per_epoch,
            "rows": len(rows),
            "longest_row": max(rows),
        }
        forecast = {"forecast": [line.strip() for line in lines], "per_rank": numbers}
        estimate = {**plan_counts, **counts, "fill": round(fill, 4), "notes": list(feed.notes), **forecast}
        estimate["warnings"] = feed.warnings(recipe)
        inputs = {**account.as_dict(), "config": config.as_dict(chosen), "objective": str(objective)}
        print_json({"would": estimate, **inputs})
        return 0
    trained, held_out = counts["trained"], counts["held_out"]["traces"]
    print_lines(
        *(f"warning  {warning}" for warning in feed.warnings(recipe)),
        *(f"note     {note}" for note in feed.notes),
        *feed.lines(),
        f"dry run  {plural(plan.total, 'optimizer step')}, {plan.steps_per_epoch:,} per epoch, on "
        f"{plural(trained['traces'], 'trace')} with {plural(trained['tokens'], 'trained token')}; "
        f"{held_out:,} held out for the off-policy estimate",
        f"         {plural(len(rows), 'row')} per epoch"
        + ("" if ranks == 1 else f" on the first of {ranks} ranks")
        + f", the longest has {plural(max(rows), 'token')}, rows are {fill:.0%} full",
        f"sharing  {feed.sharing()}, in the first step"
        + ("" if chosen.pack.share_prefixes else "; pack.share_prefixes turns it on"),
        *lines,
    )
    return 0


def _shape(model: Path) -> ModelShape | None:
    """Return the shape of a model from its config.json, or None if it is not specified there."""
    try:
        model_config = read_json(model / "config.json")
        return ModelShape.try_of(SimpleNamespace(**model_config.get("text_config", model_config)))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _forecast(model: Path, chosen: config.Config, feed: Any, ranks: int) -> tuple[list[str], dict[str, Any]]:
    """Return the memory, time and communication estimates as lines and numbers.

    Without torch, return one line saying so.
    """
    try:
        from tracegrad.trainer.resource_estimate import estimate_resources
    except ImportError as error:
        return [f"memory   no estimate: {error.name} is not installed"], {}
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
    recipe: Any,
) -> int:
    title = Path(redact(options.traces[0]).rstrip("/")).name
    result = api.train_aligned(
        data,
        summary,
        options.model,
        objective,
        chosen,
        out=options.out,
        resume=options.resume,
        title=title,
        log=printer_for(options),
        watch=watch,
        recipe=recipe,
    )
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

    position = f"after step {result.step:,} of {result.total:,}"
    reasons = {
        "done": f"trained  {plural(result.step, 'step')}",
        "ope_ess": f"stopped  {position}: the effective sample size of the off-policy estimate is too small",
        "ope_falls": f"stopped  {position}: the off-policy estimate peaked after step {result.best_step}",
        "signal": f"stopped  on request {position}; a checkpoint is written",
    }
    places = _outputs(options.out, result)
    return [
        reasons[result.stopped],
        *_gradient_line(result.trained),
        *_estimate_line(result.rows),
        "device   "
        + (
            "CPU, so no idle share is measured"
            if result.device_idle_share is None
            else f"idle for {result.device_idle_share:.1%} of the time"
        ),
        f"         {places['checkpoint']}  loads with {auto_class_name(result.checkpoint)}.from_pretrained",
        f"         {places['report.html']}  has curves, alignment and tokens",
        f"         {places['metrics.jsonl']}, {places['summary.json']}",
        *resume_line(result.stopped, arguments),
    ]


def _gradient_line(trained: dict[str, int]) -> list[str]:
    """Return a line with the traces and tokens that had a gradient in the first epoch."""
    traces, tokens = plural(trained["traces"], "trace"), plural(trained["tokens"], "trained token")
    part = f"{trained['traces_with_gradient']:,} of {traces}, {trained['tokens_with_gradient']:,} of {tokens}"
    return [f"gradient from {part}, in the first epoch"] if trained["tokens"] else []


def _outputs(out: RunDirectory, result: Any) -> dict[str, str]:
    """Return the addresses or paths of a run's outputs. At an address, the checkpoint is the newest one."""
    names = ("checkpoint", "report.html", "metrics.jsonl", "summary.json")
    places = {name: out.address_of(out.path / name) or str(out.path / name) for name in names}
    return {**places, "checkpoint": result.address or places["checkpoint"]}


def _estimate_line(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line with the final off-policy estimate of the reward, if there is one."""
    last = next((row for row in reversed(rows) if row.get("ope") is not None), None)
    if last is None:
        return []
    sample = f"effective sample size {last['ope_ess']:.0f} of {last['ope_traces']} held-out traces"
    if (estimate := off_policy_estimate(last)) is None:
        was_reliable = any(row.get("ope_reliable") for row in rows)
        clamped = last.get("ope_clamped") or 0
        reason = f"{sample}, {clamped:.0f} with a clamped weight" if clamped else sample
        return [f"eval     estimate {'no longer reliable' if was_reliable else 'unreliable'}: {reason}"]
    mean, low, high = estimate
    recorded = last["ope_recorded_reward"]
    estimate = f"{mean:.3f} estimated now ({low:.3f} to {high:.3f}, {sample})"
    return [f"eval     held-out reward {recorded:.3f} as recorded, {estimate}"]
