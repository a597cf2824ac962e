"""`tracegrad init`: a commented run.toml for a file, with what was found in it filled in."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from tracegrad import config, data
from tracegrad.cli.args import inputs_of, say, tell, verb
from tracegrad.data import infer_fields
from tracegrad.errors import ArgumentError
from tracegrad.storage import files

SAMPLE = 200


def add_to(commands: Any) -> None:
    """Adds the verb."""
    parser = verb(commands, "init", "write a commented run.toml for traces, with what was found in them", _init)
    inputs_of(parser)
    parser.add_argument(
        "--model", metavar="DIR", default="MODEL", help="folder of model and tokenizer, for the command"
    )
    parser.add_argument("--out", type=Path, default=Path("run.toml"), metavar="FILE", help="default run.toml")
    parser.add_argument("--json", action="store_true", help="what was found for machines, one object")


def _init(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    chosen = config.load(overrides=overrides)
    if told.traces == ["-"]:
        raise ArgumentError("standard input cannot be read twice. Nothing of it could be filled in. Name a file.")
    if told.out.exists():
        raise ArgumentError(f"{told.out} is there already. It would be lost. Give another --out, or remove it.")
    found = infer_fields.find(told.traces, chosen.map)
    best = {each.field: each for each in reversed(found.found)}
    map_told = chosen.map.told()
    for name, each in best.items():
        map_told.setdefault(name, each.path)
        if each.order and map_told[name] == each.path:
            map_told.setdefault("order", each.order)
    account = data.stream(told.traces, map=config.Map(**map_told), on_error="skip", limit=SAMPLE)
    traces = data.together(account)
    logprobs = any(turn.logprobs is not None for trace in traces for turn in trace.generations)
    kind = "recorded" if all(map(_tells_kind, traces)) else "raw"
    text = _text(map_told, found, logprobs, len(traces), kind)
    try:
        files.write(told.out, text)
    except OSError as error:
        raise ArgumentError(f"{told.out}: {error.strerror}. It is not written. Give another --out.") from error
    command = [
        "tracegrad",
        "train",
        *told.traces,
        "--model",
        told.model,
        "--config",
        str(told.out),
        "--out",
        "runs/first",
    ]
    if told.json:
        rows = [{"field": each.field, "path": each.path, "why": each.why} for each in found.found]
        tell({"file": str(told.out), "found": rows, "command": shlex.join(command)})
        return 0
    say(*found.lines(), f"written  {told.out}: read it, then", f"         {shlex.join(command)}")
    return 0


def _tells_kind(trace: Any) -> bool:
    """Whether a trace says what its logprobs are of, where that makes a difference."""
    turns = [turn for turn in trace.generations if turn.logprobs is not None]
    return all(turn.logprob_kind != "unknown" or turn.temperature == 1 for turn in turns)


def _text(told: dict[str, str], found: infer_fields.Candidates, logprobs: bool, traces: int, kind: str) -> str:
    """The file: what was found, each with why, and what else could be meant as comments."""
    lines = [
        "# What `tracegrad init` found. Every line may be changed; docs/configuration.md tells the other options.",
        "",
    ]
    lines += ["[data]"]
    if not logprobs:
        lines += [
            "# None of the first traces has logprobs: they are text. No ratio can be formed, and none is invented.",
            "text_only = true",
        ]
    else:
        told_kind = 'logprob_kind = "raw"  # where the records do not say it: raw (vLLM\'s default) or processed'
        lines += [told_kind if kind == "raw" else f"# {told_kind}"]
    lines += ["", "[data.map]", f"# Where the records hold what a trace needs; {traces:,} were read with it."]
    for name, docs in config.field_docs(config.Map).items():
        others = [each for each in found.of(name) if each.path != told.get(name)]
        why = next((f"  # {each.why}" for each in found.of(name) if each not in others), "")
        lines.append(f"# {docs}")
        lines.append(
            f"{name} = {json.dumps(told[name], ensure_ascii=False)}{why}" if name in told else f'# {name} = ""'
        )
        lines += [f"# {name} = {json.dumps(each.path, ensure_ascii=False)}  # {each.why}" for each in others[:3]]
    if not logprobs:
        lines += [
            "",
            "[objective]",
            "# Of the objectives that need no logprob; WEIGHTED_SFT pushes bad tokens down without bound.",
        ]
        lines += ['preset = "TOPR_POSITIVE"']
    lines += ["", "[optimizer]", "lr = 1e-6  # for models of a billion parameters and more", ""]
    return "\n".join(lines)
