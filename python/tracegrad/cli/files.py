"""`tracegrad prepare` and `tracegrad doctor`: what reads traces and trains nothing. No torch."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from tracegrad import config, doctor, prepare
from tracegrad.cli.args import command, folder_of, inputs_of, say, tell, verb
from tracegrad.data import Bar
from tracegrad.data.codes import LOGPROB_KINDS, SERVERS
from tracegrad.errors import ArgumentError
from tracegrad.prepare.summary import Account


def add_to(commands: Any) -> None:
    """Adds the verbs."""
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
    _doctor_command(commands)


def _doctor_command(commands: Any) -> None:
    parser = verb(commands, "doctor", "say why training on traces would be wrong, what it costs, and the cure", _doctor)
    inputs_of(parser)
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
        "--sampling-defaults",
        dest="defaults",
        choices=("neutral", "model"),
        help="options that requests leave out: off, or as the model's generation_config.json says",
    )
    parser.add_argument(
        "--server-profile", dest="profile", choices=SERVERS, help="which server rendered prompts that are not recorded"
    )
    parser.add_argument(
        "--rescore", type=int, nargs="?", const=64, default=0, metavar="N", help="compare N traces with the model (64)"
    )


def _prepare(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    told.model = folder_of(told.model)
    of_reading = ("data.", "map.")
    unread = ("data.reward", "data.holdout", "data.accept_truncated_sampling")
    if idle := [name for name, _ in overrides if not name.startswith(of_reading) or name in unread]:
        raise ArgumentError(f"{idle[0]} has no effect on prepare, which only reads and aligns. Leave it for train.")
    for flag in ("shard_traces", "workers", "part_bytes"):
        if getattr(told, flag) < 1:
            raise ArgumentError(f"--{flag.replace('_', '-')} is {getattr(told, flag)}. At least 1 is. Leave it out.")
    chosen = config.load(overrides=overrides)
    cut = {name: getattr(told, name) for name in ("shard_traces", "resume", "workers", "ray", "part_bytes")}
    cut |= {"map": chosen.map, "progress": Bar()}
    account = prepare.prepare(told.traces, told.model, chosen.data, told.out, **cut)
    steps = _next(told, chosen, account)
    if told.json:
        tell({**account.as_dict(), "next": steps})
        return 0
    say(*account.lines(), f"written  {told.out}/shard-*, {told.out}/drift.json, {told.out}/manifest.json")
    say(*(f"next     {step}" for step in steps))
    return 0


def _next(told: argparse.Namespace, chosen: config.Config, account: Account) -> list[str]:
    """The command that goes on from here; where no reward or group is known, the one that says what may be meant."""
    where, text_only = ["--model", str(told.model), "--out"], chosen.data.text_only
    mapped = [part for name, path in chosen.map.told().items() for part in (f"--map.{name}", path)]
    if not account.terms and not text_only and account.tiers.keys() <= {"T6"}:
        again = ["tracegrad", "prepare", *told.traces, *where, f"{told.out}-text", *mapped, "--text-only"]
        return [f"{shlex.join(again)}  (the traces are text: no logprob is in them)"]
    if account.found:
        return [shlex.join(["tracegrad", "doctor", *told.traces, *where[:2], *mapped])]
    flags = ["--objective", "TOPR_POSITIVE", "--text-only"] if text_only else []
    return [shlex.join(["tracegrad", "train", str(told.out), *where, "runs/first", *flags])]


def _doctor(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    told.model = folder_of(told.model)
    if idle := [name for name, _ in overrides if not name.startswith("map.")]:
        raise ArgumentError(f"{idle[0]} has no effect on doctor, which trains nothing. Leave it for train.")
    diagnosis = doctor.examine(
        told.traces,
        told.model,
        map=config.load(overrides=overrides).map,
        progress=Bar(),
        max_tokens=told.max_tokens,
        held_out=told.held_out,
        logprob_kind=told.kind,
        sampling_defaults=told.defaults,
        server_profile=told.profile,
        rescored=told.rescore,
    )
    if told.json:
        tell(diagnosis.as_dict())
    else:
        say(*doctor.lines(diagnosis))
    return diagnosis.exit_code
