"""`tracegrad train`: what a run over a file is told, the story that it prints, and what it leaves.

torch is imported when the run begins, not for `--print-config` and `--dry-run`.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tracegrad import config
from tracegrad.cli import args
from tracegrad.cli.args import command, folder_of, for_machines, go_on, say, speaker, tell
from tracegrad.errors import ArgumentError, redacted
from tracegrad.metrics import Stopwatch, off_policy_value_of
from tracegrad.packing import ModelShape
from tracegrad.prepare.summary import Account
from tracegrad.storage.files import read_json
from tracegrad.storage.run_dir import Mirror
from tracegrad.trainer import api


def add_to(commands: Any) -> None:
    """Adds the verb."""
    train = command(commands, "train", "train a model on recorded traces", _train, Mirror)
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
    for_machines(run)
    run.add_argument("--dry-run", action="store_true", help="read, align and pack, print what would be done, and stop")
    run.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: what each of so many ranks would need")
    run.add_argument("--SECTION.OPTION", metavar="VALUE", help="any option, such as --optimizer.lr 2e-4")


def _train(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if told.ranks is not None and (told.ranks < 1 or not told.dry_run):
        raise ArgumentError(
            f"--ranks {told.ranks} is for --dry-run, and at least 1. A run has as many ranks as torchrun starts. "
            "Leave it out, or add --dry-run."
        )
    told.model = folder_of(told.model)
    chosen, of_recipe = _config(told, overrides)
    objective = api.objective_of(chosen)
    speak, quiet = speaker(told), told.json
    speak(*(f"# {line}" if told.print_config or told.dry_run else line for line in of_recipe))
    if (told.print_config or told.dry_run) and not quiet:
        say(*config.to_toml(chosen).split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    if told.print_config:
        if quiet:
            tell({"config": config.as_dict(chosen), "objective": str(objective)})
        return 0
    watch = Stopwatch()
    with nullcontext() if told.dry_run or not api.first() else told.out.locked():
        data, account = api.aligned(told.traces, told.model, chosen, told.out.path, watch)
        speak(*account.lines())
        if told.dry_run:
            ranks = told.ranks or int(os.environ.get("WORLD_SIZE", "1"))
            return _dry_run(data, objective, chosen, told.model, account if quiet else None, ranks)
        return _learn(told, arguments, chosen, objective, data, account, watch)


def _config(told: argparse.Namespace, overrides: list[tuple[str, Any]]) -> tuple[config.Config, list[str]]:
    """Defaults, or what the resumed run was told; then the recipe, the file, and the command line; and what to say."""
    start = api.before(told.out, told.resume)
    begins = args.told_recipe(told)
    if begins is None:
        return config.load(told.config, overrides, start=start), []
    chosen, otherwise = begins.settle(told.config, overrides, start=start)
    return chosen, args.lines(told, begins, otherwise)


def _dry_run(data: Any, objective: Any, chosen: config.Config, model: Path, account: Account | None, ranks: int) -> int:
    """What would be done: steps, rows and their fill, memory and time; one object where the account is given."""
    from tracegrad.trainer.steps import Feed

    feed = Feed.of(data, objective, chosen, ranks=ranks, shape=_shape(model))
    terms = sum(step.terms for step in feed.sizes)
    rows = [tokens for step in feed.sizes for tokens, _ in step.rows]
    plan = feed.plan(len(feed.sizes))
    fill = sum(rows) / (len(rows) * chosen.pack.token_budget)
    if account is not None:
        told = {
            "steps": plan.total,
            "steps_per_epoch": plan.steps_per_epoch,
            "rows": len(rows),
            "longest_row": max(rows),
        }
        traces = {"trained": int(feed.trained.sum()), "held_out": int(feed.held.sum()), "terms": terms}
        lines, numbers = _forecast(model, chosen, feed, ranks)
        forecast = {"forecast": [line.strip() for line in lines], "per_rank": numbers}
        found = {**told, **traces, "fill": round(fill, 4), "notes": list(feed.notes), **forecast}
        read = {**account.as_dict(), "config": config.as_dict(chosen), "objective": str(objective)}
        tell({"would": found, **read})
        return 0
    say(
        *(f"note     {note}" for note in feed.notes),
        f"would    take {plan.total:,} steps, {plan.steps_per_epoch:,} an epoch, on {int(feed.trained.sum()):,} "
        f"traces, with {int(feed.held.sum()):,} held out for value",
        f"         {len(rows):,} rows an epoch, the longest {max(rows):,} tokens, {fill:.0%} of the budget filled, "
        f"{terms:,} terms" + ("" if ranks == 1 else f", on the first of {ranks} ranks"),
        f"sharing  {feed.sharing()}, in the first step"
        + ("" if chosen.pack.share_prefixes else "; it is off: pack.share_prefixes"),
    )
    say(*_forecast(model, chosen, feed, ranks)[0])
    return 0


def _shape(model: Path) -> ModelShape | None:
    """Of the model, by its config.json alone; None where that does not tell it."""
    try:
        told = read_json(model / "config.json")
        return ModelShape.known(SimpleNamespace(**told.get("text_config", told)))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _forecast(model: Path, chosen: config.Config, feed: Any, ranks: int) -> tuple[list[str], dict[str, Any]]:
    """Memory, time and traffic, as far as they are known before a weight is read; says so where torch is not there."""
    try:
        from tracegrad.trainer.resource_estimate import forecast
    except ImportError as error:
        return [f"memory   not known: {error.name} is not installed"], {}
    found = forecast(model, chosen, feed, ranks)
    return found.lines(), found.as_dict()


def _learn(
    told: argparse.Namespace,
    arguments: list[str],
    chosen: config.Config,
    objective: Any,
    data: Any,
    account: Account,
    watch: Stopwatch,
) -> int:
    title = Path(redacted(told.traces[0]).rstrip("/")).name
    run = {"out": told.out, "resume": told.resume, "title": title, "say": speaker(told), "watch": watch}
    done = api.learn(data, account, told.model, objective, chosen, **run)
    if told.json:
        places = _places(told.out, done)
        counts = {"steps": done.step, "planned": done.total, "stopped": done.stopped, "exit_code": done.exit_code}
        tell({**counts, "last": done.rows[-1] if done.rows else None, "files": places})
    else:
        say(*_ending(told, arguments, done))
    return done.exit_code


def _ending(told: argparse.Namespace, arguments: list[str], done: Any) -> list[str]:
    from tracegrad.trainer.load_model import loaded_by

    reasons = {
        "done": f"trained  {done.step:,} steps",
        "ess": f"stopped  after step {done.step:,} of {done.total:,}: the off-policy value rests on too few traces",
        "worse": f"stopped  after step {done.step:,} of {done.total:,}: value was best after {done.best}",
        "signal": f"stopped  on request after step {done.step:,} of {done.total:,}; nothing is lost",
    }
    places = _places(told.out, done)
    return [
        reasons[done.stopped],
        *_value_line(done.rows),
        "device   "
        + (
            "a CPU: host and device are one, no idle share"
            if done.idle is None
            else f"{done.idle:.1%} of its time idle"
        ),
        f"         {places['checkpoint']}  loads with {loaded_by(done.checkpoint)}.from_pretrained",
        f"         {places['report.html']}  shows the run and its tokens",
        f"         {places['metrics.jsonl']}, {places['summary.json']}",
        *go_on(done.stopped, arguments),
    ]


def _places(out: Mirror, done: Any) -> dict[str, str]:
    """Where a run has left what is looked at; at an address the newest checkpoint has no second name."""
    names = ("checkpoint", "report.html", "metrics.jsonl", "summary.json")
    places = {name: out.named(out.path / name) or str(out.path / name) for name in names}
    return {**places, "checkpoint": done.address or places["checkpoint"]}


def _value_line(rows: list[dict[str, Any]]) -> list[str]:
    """What is known of the policy's reward at the end."""
    last = next((row for row in reversed(rows) if row.get("off_policy_value") is not None), None)
    if last is None:
        return []
    sample = f"effective sample {last['off_policy_value_ess']:.0f} of {last['off_policy_value_traces']} held-out traces"
    if (found := off_policy_value_of(last)) is None:
        was = any(row.get("off_policy_value_known") for row in rows)
        clamped = last.get("off_policy_value_clamped") or 0
        why = f"{sample}, {clamped:.0f} with a clamped weight" if clamped else sample
        return [f"value    {'no longer' if was else 'not'} known: {why}"]
    now, low, high = found
    recorded = last["off_policy_value_recorded"]
    return [f"value    {recorded:.3f} as recorded, {now:.3f} now ({low:.3f} to {high:.3f}, {sample})"]
