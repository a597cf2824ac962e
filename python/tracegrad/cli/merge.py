"""Run `tracegrad merge`: merge the LoRA adapters of a checkpoint into full weights."""

import argparse
from pathlib import Path
from typing import Any

from tracegrad.cli.args import add_json_flag, place, print_json, print_lines, verb


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "merge",
        "merge the LoRA adapters of a checkpoint into full weights",
        _merge,
        more="It also copies tokenizer and chat template. transformers and vLLM load the result as a model.",
        examples=(
            "runs/first/checkpoint --out merged",
            "runs/first/checkpoint --out merged --base models/Qwen3-0.6B",
        ),
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder with LoRA adapters, such as runs/first/checkpoint"
    )
    parser.add_argument(
        "--out", type=place, required=True, metavar="DIR", help="folder for the model; it must not exist"
    )
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="base model (default: the one that the adapters' config names)"
    )
    add_json_flag(parser)


def _merge(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad.trainer import merge_adapters

    out = merge_adapters(options.checkpoint, options.out, options.base)
    if options.json:
        print_json({"checkpoint": str(options.checkpoint), "model": str(out)})
        return 0
    print_lines(
        f"merged   {out}  loads with AutoModelForCausalLM.from_pretrained; it includes tokenizer and chat template"
    )
    return 0
