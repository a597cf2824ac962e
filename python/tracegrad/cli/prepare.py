"""Run `tracegrad prepare`: align traces into a folder of shards. No torch."""

import argparse
import shlex
from typing import Any

from tracegrad import config, prepare
from tracegrad.cli.args import command, folder_of, say, tell
from tracegrad.data import Bar
from tracegrad.errors import ArgumentError
from tracegrad.prepare.summary import Account


def add_to(commands: Any) -> None:
    """Adds the verb."""
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
