"""The command line: `tracegrad train`, `prepare`, `doctor`, `replay`, and `--version`.

Options and their refusals, the story that a run prints, and exit codes: 0, 1 for an error of ours in one line, 2 for
usage, 128 + signal; `doctor` gives 1 where training would be wrong. No torch until `train` needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tracegrad import _core, config, doctor, prepare
from tracegrad.batch import ModelShape
from tracegrad.errors import ArgumentError, TracegradError, shown
from tracegrad.metrics import Stopwatch
from tracegrad.report import write_report
from tracegrad.sequence import LOGPROB_KINDS
from tracegrad.tokenizer import Tokenizer

SHORT = {
    "seed": "train.seed",
    "epochs": "train.epochs",
    "stop_below_ess": "train.stop_below_ess",
    "tensorboard": "train.tensorboard",
    "objective": "objective",
    "on_error": "data.on_error",
    "logprob_kind": "data.logprob_kind",
    "text_only": "data.text_only",
    "lenient": "data.lenient",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["train", "traces.jsonl", "--model", "m", "--out", "o", "--optimizer.lrr", "1"])
    1
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    told, overrides = _parse(arguments)
    try:
        return told.run(told, overrides, arguments)
    except TracegradError as error:
        print(f"tracegrad: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ntracegrad: interrupted. --resume goes on from the last checkpoint or shard, if there is one.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        return 141


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tracegrad: error: {shown(message)}\nSee {self.prog} --help.\n")


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[tuple[str, Any]]]:
    parser = _Parser(prog="tracegrad", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tracegrad {_core.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    train = _command(commands, "train", "train a model on recorded traces", _train)
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
    shards = _command(commands, "prepare", "align traces into shards, without torch", _prepare)
    shards.add_argument("--shard-traces", type=int, default=4096, metavar="N", help="traces in a shard (default 4096)")
    shards.add_argument("--resume", action="store_true", help="go on from the last whole shard in --out")
    _doctor_command(commands)
    _replay_command(commands)
    told, rest = parser.parse_known_args(arguments)
    given = [(name, getattr(told, flag, None)) for flag, name in SHORT.items()]
    return told, [*((name, value) for name, value in given if value is not None), *_dotted(rest, told.parser)]


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("traces", help="JSONL of traces, plain, .gz or .zst; - for standard input")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of model and tokenizer")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    data = parser.add_argument_group("reading and aligning")
    choices = ("raise", "skip", "quarantine")
    data.add_argument("--on-error", choices=choices, help="a bad record: stop, leave it out, write it aside")
    data.add_argument("--logprob-kind", choices=("raw", "processed", "unknown"), help="what the logprobs are of")
    data.add_argument("--text-only", action="store_const", const=True, help="train text that has no logprobs")
    data.add_argument("--lenient", action="store_const", const=True, help="go on, untrained, after an unknown id")
    return parser


def _doctor_command(commands: Any) -> None:
    text = "say why training on traces would be wrong, what it costs, and the cure"
    parser = commands.add_parser("doctor", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(run=_doctor, parser=parser)
    parser.add_argument("traces", help="JSONL of traces, plain, .gz or .zst; - for standard input")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of model and tokenizer")
    parser.add_argument("--json", action="store_true", help="the same for machines, one object")
    parser.add_argument(
        "--held-out", action="append", default=[], metavar="FILE", help="traces whose prompts must not be trained on"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest trace (default: the model's positions)")
    parser.add_argument(
        "--logprob-kind", dest="kind", choices=LOGPROB_KINDS, help="what the logprobs are of, over what the records say"
    )
    parser.add_argument(
        "--rescore", type=int, nargs="?", const=64, default=0, metavar="N", help="compare N traces with the model (64)"
    )


def _replay_command(commands: Any) -> None:
    text = "take the steps of an online run again, from its folder alone"
    parser = commands.add_parser("replay", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(run=_replay, parser=parser)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder that the run began with")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where checkpoint and metrics go")
    parser.add_argument("--objective", metavar="NAME", help="that of the run (default DAPO)")


def _dotted(rest: list[str], parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """`--a.b value` and `--a.b=value` pairs."""
    found: list[tuple[str, str]] = []
    words = iter(rest)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            flags = [flag for action in parser._actions for flag in action.option_strings if "." not in flag]
            cure = config.nearest(f"--{name}", [*flags, *(f"--{option}" for option in config.options())])
            parser.error(f"{word} is no option here. {cure}")
        if not equals:
            value = next(words, None)
        if value is None:
            parser.error(f"{word} has no value. Write {word} VALUE.")
        found.append((name, value))
    return found


def _prepare(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    idle = [name for name, _ in overrides if not name.startswith("data.") or name in ("data.reward", "data.holdout")]
    if idle:
        raise ArgumentError(f"{idle[0]} has no effect on prepare, which only reads and aligns. Leave it for train.")
    if told.shard_traces < 1:
        raise ArgumentError(f"--shard-traces is {told.shard_traces}. A shard holds at least one trace. Leave it out.")
    data = config.load(overrides=overrides).data
    cut = {"shard_traces": told.shard_traces, "resume": told.resume}
    account = prepare.prepare(told.traces, told.model, data, told.out, **cut)
    _say(*account.lines(), f"written  {told.out}/shard-*, {told.out / 'drift.json'}, {told.out / 'manifest.json'}")
    return 0


def _doctor(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if overrides:
        raise ArgumentError(f"{overrides[0][0]} has no effect on doctor, which trains nothing. Leave it for train.")
    diagnosis = doctor.examine(
        told.traces,
        told.model,
        max_tokens=told.max_tokens,
        held_out=told.held_out,
        logprob_kind=told.kind,
        rescored=told.rescore,
    )
    _say(*(json.dumps(diagnosis.as_dict(), indent=1).split("\n") if told.json else doctor.lines(diagnosis)))
    return diagnosis.exit_code


def _replay(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import algebra, online, presets

    idle = [name for name, _ in overrides if not name.startswith("objective")]
    if idle:
        raise ArgumentError(f"{idle[0]} has no effect on replay, which takes what the run was told. Leave it out.")
    chosen = config.load(overrides=overrides).objective
    objective = algebra.override_all(presets.find(chosen.preset), dict(chosen.overrides))
    found = online.replay(told.folder, told.model, objective=objective, out=told.out, say=lambda line: _say(line))
    _say(f"replayed {found.steps} steps; {found.checkpoint}")
    return 0


def _train(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import algebra, presets

    chosen = _config(told, overrides)
    objective = algebra.override_all(presets.find(chosen.objective.preset), dict(chosen.objective.overrides))
    if told.print_config or told.dry_run:
        _say(*config.to_toml(chosen).split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    if told.print_config:
        return 0
    watch = Stopwatch()
    data = chosen.data if _first() or chosen.data.on_error != "quarantine" else replace(chosen.data, on_error="skip")
    sequences, account = prepare.load(told.traces, told.model, data, told.out, watch)
    _say(*account.lines())
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
    _say(
        *(f"note     {note}" for note in feed.notes),
        f"would    take {plan.total:,} steps, {plan.steps_per_epoch:,} an epoch, on {int((~feed.held).sum()):,} "
        f"traces, with {int(feed.held.sum()):,} held out for value",
        f"         {len(rows):,} rows an epoch, the longest {max(rows):,} tokens, {fill:.0%} of the budget filled, "
        f"{sum(map(len, steps)):,} terms" + ("" if ranks == 1 else f", on the first of {ranks} ranks"),
        f"sharing  {feed.sharing()}, in the first step"
        + ("" if chosen.pack.share_prefixes else "; it is off: pack.leave_out repeats"),
    )
    _say(*_forecast(model, chosen, feed, ranks))
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
    done = learner.train(sequences, model, objective=objective, config=chosen, say=_say, **places)
    if not _first():
        return done.exit_code
    watch.seconds.update(done.seconds)
    summary = _summary(chosen, account, done, watch.seconds)
    prepare.write_json(told.out / "summary.json", summary)
    with watch("report"):
        tokenizer = Tokenizer.from_pretrained(told.model)
        found = {"rows": done.rows, "terms": done.terms, "summary": summary}
        title = Path(told.traces).name
        write_report(told.out / "report.html", sequences=sequences, tokenizer=tokenizer, title=title, **found)
    _say(*_ending(told, arguments, done))
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


def _first() -> bool:
    """Whether this process is the one that speaks: torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def _say(*lines: str) -> None:
    for line in lines if _first() else ():
        print(shown(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
