"""Run `tracegrad merge`: merge the LoRA adapters of a checkpoint into full weights."""

import argparse
from pathlib import Path
from typing import Any

from tracegrad.cli.args import add_json_flag, place, print_json, print_lines, verb
from tracegrad.errors import ArgumentError


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(commands, "merge", "make whole weights of a checkpoint that holds LoRA adapters", _merge)
    parser.add_argument("checkpoint", type=Path, help="folder of adapters, such as out/checkpoint")
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="where the model goes; not there yet")
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the model that the adapters are of (default: the one they name)"
    )
    add_json_flag(parser)


def _merge(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if overrides:
        raise ArgumentError(
            f"TG-CLI-010: {overrides[0][0]} has no effect on merge, which trains nothing. Leave it for train."
        )
    try:
        from tracegrad.trainer import merge_adapters
    except ImportError as error:
        raise ArgumentError(
            f"TG-CLI-011: merge needs {error.name}, which is not installed. No weights can be read. pip install "
            f"'tracegrad[lora]'"
        ) from error
    out = merge_adapters(options.checkpoint, options.out, options.base)
    if options.json:
        print_json({"checkpoint": str(options.checkpoint), "model": str(out)})
        return 0
    print_lines(
        f"merged   {out}  loads with AutoModelForCausalLM.from_pretrained; tokenizer and template are beside it"
    )
    return 0
