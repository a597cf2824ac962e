"""Run `tracegrad init`: write a commented run.toml for traces, with inferred fields filled in."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from tracegrad import config, data
from tracegrad.cli.args import inputs_of, print_json, print_lines, verb
from tracegrad.data import infer_fields
from tracegrad.errors import ArgumentError
from tracegrad.storage import files

SAMPLE = 200


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "init",
        "write a commented run.toml for your traces, with the reward and group fields filled in",
        _init,
        more="It reads the first records, fills in the fields that it infers, and prints the command that trains with "
        "the file.",
        examples=("logs/ --model Qwen/Qwen3-0.6B", "traces.jsonl --out configs/run.toml --map.reward score"),
        dotted_names=lambda: [name for name in config.options() if name.startswith("map.")],
        reason_no_effect="which writes only paths of fields. Add it to the file, or use it with tracegrad train.",
    )
    inputs_of(parser)
    parser.add_argument(
        "--model", metavar="MODEL", default="MODEL", help="model folder or Hub id to write into the printed command"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("run.toml"), metavar="FILE", help="file to write (default run.toml)"
    )
    parser.add_argument("--json", action="store_true", help="print the inferred fields as one JSON object")


def _init(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    run_config = config.load(overrides=overrides)
    if options.traces == ["-"]:
        raise ArgumentError(
            "TG-CLI-007: init must read its input twice, and standard input can be read only once. Give a file."
        )
    if options.out.exists():
        raise ArgumentError(
            f"TG-CLI-008: {options.out} exists and would be overwritten. Give another --out, or remove the file."
        )
    candidates = infer_fields.infer(options.traces, run_config.map, (*infer_fields.FIELDS, "logprobs", "token_ids"))
    best = {candidate.field: candidate for candidate in reversed(candidates.guesses)}
    field_map = run_config.map.paths()
    for name, candidate in best.items():
        field_map.setdefault(name, candidate.path)
        if field_map[name] == candidate.path:
            field_map = {**dict(candidate.also), **field_map}
    stream = data.stream(options.traces, map=config.FieldMap(**field_map), on_error="skip", limit=SAMPLE)
    traces = data.concatenate(stream)
    logprobs = any(turn.logprobs is not None for trace in traces for turn in trace.generations)
    kind = "recorded" if all(map(_has_logprob_kind, traces)) else "raw"
    text = _text(field_map, candidates, logprobs, len(traces), kind)
    try:
        files.write(options.out, text)
    except OSError as error:
        raise ArgumentError(
            f"TG-CLI-009: {options.out} cannot be written: {error.strerror}. Give another --out."
        ) from error
    command = [
        "tracegrad",
        "train",
        *options.traces,
        "--model",
        options.model,
        "--config",
        str(options.out),
        "--out",
        "runs/first",
    ]
    if options.json:
        rows = [
            {"field": candidate.field, "path": candidate.path, "why": candidate.evidence}
            for candidate in candidates.guesses
        ]
        print_json({"file": str(options.out), "found": rows, "command": shlex.join(command)})
        return 0
    print_lines(*candidates.lines(), f"written  {options.out}. Review it, then run", f"         {shlex.join(command)}")
    return 0


def _has_logprob_kind(trace: Any) -> bool:
    """Return whether a trace records what kind its logprobs are, if the kind makes a difference."""
    turns = [turn for turn in trace.generations if turn.logprobs is not None]
    return all(turn.logprob_kind != "unknown" or turn.temperature == 1 for turn in turns)


def _text(
    field_map: dict[str, str], candidates: infer_fields.Candidates, logprobs: bool, traces: int, kind: str
) -> str:
    """Return the text of the file: inferred fields with the reason for each, and alternatives as comments."""
    lines = [
        "# Written by `tracegrad init` from your first records. Change any line. All options: "
        "docs/reference/configuration.md",
        "",
    ]
    lines += ["[data]"]
    if not logprobs:
        lines += [
            "# No logprobs were read in the first traces, so no importance ratio can be computed.",
            "text_only = true",
        ]
    else:
        kind_line = 'logprob_kind = "raw"  # kind of all logprobs: raw (vLLM\'s default) or processed'
        lines += [kind_line if kind == "raw" else f"# {kind_line}"]
    lines += ["", "[map]", f"# Paths of the fields in your records. {traces:,} traces were read with these paths."]
    for name, docs in config.field_docs(config.FieldMap).items():
        alternatives = [candidate for candidate in candidates.of(name) if candidate.path != field_map.get(name)]
        reason = next(
            (f"  # {candidate.evidence}" for candidate in candidates.of(name) if candidate not in alternatives), ""
        )
        lines.append(f"# {docs}")
        lines.append(
            f"{name} = {json.dumps(field_map[name], ensure_ascii=False)}{reason}"
            if name in field_map
            else f'# {name} = ""'
        )
        lines += [
            f"# {name} = {json.dumps(candidate.path, ensure_ascii=False)}  # {candidate.evidence}"
            for candidate in alternatives[:3]
        ]
    if not logprobs:
        lines += [
            "",
            "[objective]",
            "# An objective that needs no logprobs.",
            "# WEIGHTED_SFT also needs none, but it pushes the probability of bad tokens down without bound.",
        ]
        lines += ['preset = "TOPR_POSITIVE"']
    lines += ["", "[optimizer]", "lr = 1e-6  # for models with a billion parameters or more", ""]
    return "\n".join(lines)
