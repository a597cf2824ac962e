"""Run `tracegrad prepare`: align traces into a folder of shards. It does not need torch."""

import argparse
import shlex
from typing import Any

from tracegrad import config, prepare
from tracegrad.cli.args import command, folder_of, print_json, print_lines
from tracegrad.data import ProgressBar
from tracegrad.errors import ArgumentError
from tracegrad.prepare.summary import IngestSummary


def add_to(commands: Any) -> None:
    """Add the verb."""
    shards = command(commands, "prepare", "align traces into shards, without torch", _prepare, out=str)
    shards.add_argument("--shard-traces", type=int, default=4096, metavar="N", help="traces in a shard (default 4096)")
    shards.add_argument("--json", action="store_true", help="the account for machines, one object")
    shards.add_argument("--resume", action="store_true", help="keep what is whole in --out, do what is missing")
    shards.add_argument("--workers", type=int, default=1, metavar="N", help="processes that do parts of it (default 1)")
    shards.add_argument(
        "--ray", nargs="?", const="", metavar="ADDRESS", help="do the parts on a Ray cluster; --workers actors at most"
    )
    shards.add_argument(
        "--part-bytes", type=int, default=prepare.PART_BYTES, metavar="N", help="bytes of inputs in a part (256 MiB)"
    )


def _prepare(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    options.model = folder_of(options.model)
    reading_sections = ("data.", "map.")
    unused = ("data.reward", "data.holdout", "data.accept_truncated_sampling")
    if idle := [name for name, _ in overrides if not name.startswith(reading_sections) or name in unused]:
        raise ArgumentError(
            f"TG-CLI-019: {idle[0]} has no effect on prepare, which only reads and aligns. Leave it for train."
        )
    for flag in ("shard_traces", "workers", "part_bytes"):
        if getattr(options, flag) < 1:
            raise ArgumentError(
                f"TG-CLI-020: --{flag.replace('_', '-')} is {getattr(options, flag)}. At least 1 is. Leave it out."
            )
    run_config = config.load(overrides=overrides)
    settings = {name: getattr(options, name) for name in ("shard_traces", "resume", "workers", "ray", "part_bytes")}
    settings |= {"map": run_config.map, "progress": ProgressBar()}
    summary = prepare.prepare(options.traces, options.model, run_config.data, options.out, **settings)
    steps = _next(options, run_config, summary)
    if options.json:
        print_json({**summary.as_dict(), "next": steps})
        return 0
    print_lines(
        *summary.lines(), f"written  {options.out}/shard-*, {options.out}/drift.json, {options.out}/manifest.json"
    )
    print_lines(*(f"next     {step}" for step in steps))
    return 0


def _next(options: argparse.Namespace, run_config: config.Config, summary: IngestSummary) -> list[str]:
    """Return the next command to run. If no reward or group is known, this is `doctor`, which lists likely fields."""
    flags, text_only = ["--model", str(options.model), "--out"], run_config.data.text_only
    map_flags = [part for name, path in run_config.map.told().items() for part in (f"--map.{name}", path)]
    if not summary.terms and not text_only and summary.tiers.keys() <= {"T6"}:
        retry = ["tracegrad", "prepare", *options.traces, *flags, f"{options.out}-text", *map_flags, "--text-only"]
        return [f"{shlex.join(retry)}  (the traces are text: no logprob is in them)"]
    if summary.found:
        return [shlex.join(["tracegrad", "doctor", *options.traces, *flags[:2], *map_flags])]
    objective_flags = ["--objective", "TOPR_POSITIVE", "--text-only"] if text_only else []
    return [shlex.join(["tracegrad", "train", str(options.out), *flags, "runs/first", *objective_flags])]
