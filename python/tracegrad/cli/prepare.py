"""Run `tracegrad prepare`: align traces into a folder of shards. It does not need torch."""

import argparse
import shlex
from typing import Any

from tracegrad import config, prepare
from tracegrad.cli.args import add_trace_arguments, folder_of, print_json, print_lines, verb
from tracegrad.data import ProgressBar
from tracegrad.errors import ArgumentError
from tracegrad.prepare.run import TRAIN_OPTIONS
from tracegrad.prepare.summary import IngestSummary


def option_names() -> list[str]:
    """Return the options that `prepare` accepts."""
    return [name for name in config.options() if name.startswith(("data.", "map.")) and name not in train_options()]


def train_options() -> list[str]:
    """Return the options of [data] that only training uses."""
    return [f"data.{name}" for name in TRAIN_OPTIONS]


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "prepare",
        "align traces once and write them as shards that train reads; needs neither torch nor a GPU",
        _prepare,
        more="The shards contain token ids, logprobs and masks. `tracegrad train DIR` reads them without aligning "
        "again. DIR/alignment_report.json is the alignment report.",
        examples=(
            "logs/ --model Qwen/Qwen3-0.6B --out prepared --map.reward score",
            "s3://bucket/logs --model MODEL --out s3://bucket/prepared --workers 8 --resume",
        ),
        dotted_names=option_names,
        reason_no_effect="which only reads and aligns. Use it with tracegrad train.",
    )
    add_trace_arguments(parser, out=str, out_help="folder or URL for shards and alignment report")
    parser.add_argument("--shard-traces", type=int, default=4096, metavar="N", help="traces per shard (default 4096)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument(
        "--resume", action="store_true", help="keep the complete parts in --out and prepare only the missing ones"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that prepare parts in parallel (default 1)"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="prepare the parts on a Ray cluster with at most --workers actors",
    )
    parser.add_argument(
        "--part-bytes",
        type=int,
        default=prepare.PART_BYTES,
        metavar="N",
        help="input bytes per part (default 256 MiB)",
    )


def _prepare(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    options.model = folder_of(options.model)
    for flag in ("shard_traces", "workers", "part_bytes"):
        if getattr(options, flag) < 1:
            raise ArgumentError(
                f"TG-CLI-020: --{flag.replace('_', '-')} is {getattr(options, flag)}. It must be at least 1."
            )
    run_config = config.load(overrides=overrides)
    with ProgressBar() as progress:
        summary = prepare.prepare(
            options.traces,
            options.model,
            run_config.data,
            options.out,
            shard_traces=options.shard_traces,
            resume=options.resume,
            map=run_config.map,
            progress=progress,
            workers=options.workers,
            ray_address=options.ray,
            part_bytes=options.part_bytes,
        )
    steps = _next(options, run_config, summary)
    if options.json:
        print_json({**summary.as_dict(), "next": steps})
        return 0
    print_lines(
        *summary.lines(),
        f"written  {options.out}/shard-*, {options.out}/alignment_report.json, {options.out}/manifest.json",
    )
    print_lines(*(f"next     {step}" for step in steps))
    return 0


def _next(options: argparse.Namespace, run_config: config.Config, summary: IngestSummary) -> list[str]:
    """Return the next command to run. If no reward or group is known, this is `doctor`, which lists likely fields."""
    flags, text_only = ["--model", str(options.model), "--out"], run_config.data.text_only
    map_flags = [part for name, path in run_config.map.paths().items() for part in (f"--map.{name}", path)]
    if not summary.terms and not text_only and summary.levels.keys() <= {"T6"}:
        retry = ["tracegrad", "prepare", *options.traces, *flags, f"{options.out}-text", *map_flags, "--text-only"]
        return [f"{shlex.join(retry)}  (because the traces have no logprobs)"]
    if summary.candidate_lines:
        return [shlex.join(["tracegrad", "doctor", *options.traces, *flags[:2], *map_flags])]
    objective_flags = ["--objective", "TOPR_POSITIVE", "--text-only"] if text_only else []
    return [shlex.join(["tracegrad", "train", str(options.out), *flags, "runs/first", *objective_flags])]
