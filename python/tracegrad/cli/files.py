"""`tracegrad prepare` and `tracegrad doctor`: what reads traces and trains nothing. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tracegrad import config, doctor, prepare
from tracegrad.cli.words import command, say
from tracegrad.errors import ArgumentError
from tracegrad.sequence import LOGPROB_KINDS


def add_to(commands: Any) -> None:
    """Adds the verbs."""
    shards = command(commands, "prepare", "align traces into shards, without torch", _prepare)
    shards.add_argument("--shard-traces", type=int, default=4096, metavar="N", help="traces in a shard (default 4096)")
    shards.add_argument("--resume", action="store_true", help="go on from the last whole shard in --out")
    _doctor_command(commands)


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


def _prepare(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    idle = [name for name, _ in overrides if not name.startswith("data.") or name in ("data.reward", "data.holdout")]
    if idle:
        raise ArgumentError(f"{idle[0]} has no effect on prepare, which only reads and aligns. Leave it for train.")
    if told.shard_traces < 1:
        raise ArgumentError(f"--shard-traces is {told.shard_traces}. A shard holds at least one trace. Leave it out.")
    data = config.load(overrides=overrides).data
    cut = {"shard_traces": told.shard_traces, "resume": told.resume}
    account = prepare.prepare(told.traces, told.model, data, told.out, **cut)
    say(*account.lines(), f"written  {told.out}/shard-*, {told.out / 'drift.json'}, {told.out / 'manifest.json'}")
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
    say(*(json.dumps(diagnosis.as_dict(), indent=1).split("\n") if told.json else doctor.lines(diagnosis)))
    return diagnosis.exit_code
