"""Run `tracegrad fill`: measure the logprobs that recorded tokens lack, and write the traces with them."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from tracegrad import config, missing_logprobs
from tracegrad.cli.args import (
    MODEL_HELP,
    SERVER_PROFILE_HELP,
    folder_of,
    inputs_of,
    place,
    print_json,
    print_lines,
    verb,
)
from tracegrad.data.codes import SERVERS
from tracegrad.data.sources import expand
from tracegrad.errors import ArgumentError
from tracegrad.missing_logprobs.fill_file import TEXT_UNCERTAINTY
from tracegrad.progress import ProgressPrinter, progress_line
from tracegrad.storage import files


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "fill",
        "measure the logprobs that recorded tokens lack, with the checkpoint that sampled them",
        _fill,
        more="It first tests on a sample of the tokens whether this checkpoint wrote them, and refuses if not. The "
        "records are copied unchanged, with the measured logprobs under a key of their own.",
        examples=(
            "logs.jsonl --model MODEL --out filled.jsonl",
            "logs/ --model runs/a/checkpoints/step-00000040 --compare-with runs/a/checkpoints/step-00000036 "
            "--temperature 0.7 --out filled.jsonl.zst",
        ),
        dotted_names=lambda: [
            name
            for name in config.options()
            if name.startswith(("map.", "data.on_error", "train.device", "train.dtype", "pack.tokens_per_row"))
        ],
    )
    inputs_of(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help=f"the checkpoint: {MODEL_HELP}")
    parser.add_argument(
        "--out", type=place, required=True, metavar="FILE", help="file for the traces; .gz or .zst compresses it"
    )
    parser.add_argument(
        "--logprobs-from",
        metavar="URL",
        help="vLLM server of this checkpoint: use its prompt_logprobs in place of forward passes here",
    )
    for name, kind, what in (
        ("--temperature", float, "temperature"),
        ("--top-p", float, "top_p"),
        ("--top-k", int, "top_k"),
        ("--min-p", float, "min_p"),
    ):
        text = f"{what} of the sampler, if the records do not state it or state it wrongly"
        parser.add_argument(name, type=kind, metavar="N" if kind is int else "F", help=text)
    parser.add_argument(
        "--policy-version", type=int, metavar="N", help="measure only tokens of this recorded policy version"
    )
    parser.add_argument(
        "--compare-with",
        type=Path,
        action="append",
        metavar="MODEL",
        help="another checkpoint that may have written the tokens; repeatable (default: up to four other steps of the "
        "run, if MODEL is one of its checkpoints)",
    )
    parser.add_argument(
        "--max-text-uncertainty",
        type=float,
        default=TEXT_UNCERTAINTY,
        metavar="F",
        help="leave out a text without ids if its other segmentations exceed its canonical tokens by more than F nats "
        f"(default {TEXT_UNCERTAINTY})",
    )
    parser.add_argument(
        "--accept-undecided",
        action="store_true",
        help="fill also if the tokens are too few, or too certain, to show whether the checkpoint wrote them",
    )
    parser.add_argument("--server-profile", dest="profile", choices=SERVERS, help=SERVER_PROFILE_HELP)
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), help="for a record that cannot be read: stop (default) or skip it"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def _fill(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if "-" in options.traces:
        raise ArgumentError(
            "TG-CLI-057: fill reads its input twice, and standard input can be read once. Write it to a file first."
        )
    folder = folder_of(options.model)
    files.check_not_read([options.out], [source.path for source in expand(options.traces)], "--out")
    run_config = config.load(overrides=overrides)
    printer = ProgressPrinter()

    def report_progress(phase: str, done: int, total: int) -> None:
        printer.tick(
            lambda seconds: progress_line(
                phase, [f"{done:,} conversations"], seconds=seconds, done=done if total else 0, total=total
            )
        )

    dtypes = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}
    report = missing_logprobs.fill(
        options.traces,
        folder,
        out=options.out,
        logprobs_from=options.logprobs_from,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        policy_version=options.policy_version,
        compare_with=options.compare_with and [folder_of(other) for other in options.compare_with],
        max_text_uncertainty=options.max_text_uncertainty,
        accept_undecided=options.accept_undecided,
        server_profile=options.profile,
        map=run_config.map,
        on_error=run_config.data.on_error,
        device=run_config.train.device,
        dtype=dtypes[run_config.train.dtype],
        tokens_per_row=run_config.pack.tokens_per_row,
        progress=report_progress,
    )
    printer.clear()
    command = shlex.join(["tracegrad", "doctor", str(options.out), "--model", str(options.model)])
    if options.json:
        print_json({"file": str(options.out), **report.as_dict(), "next": command})
    else:
        print_lines(*report.lines(), f"file     {options.out}", f"next     {command}")
    return 0
