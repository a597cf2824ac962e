"""Run `tracegrad doctor`: check traces before training on them. torch is needed only for `--rescore`."""

import argparse
from pathlib import Path
from typing import Any

from tracegrad import config, doctor
from tracegrad.cli.args import folder_of, inputs_of, print_json, print_lines, verb
from tracegrad.data import ProgressBar
from tracegrad.data.codes import LOGPROB_KINDS, SERVERS
from tracegrad.errors import ArgumentError


def add_to(commands: Any) -> None:
    """Add the verb."""
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


def _doctor(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    options.model = folder_of(options.model)
    if idle := [name for name, _ in overrides if not name.startswith("map.")]:
        raise ArgumentError(f"TG-CLI-006: {idle[0]} has no effect on doctor, which trains nothing. Leave it for train.")
    diagnosis = doctor.diagnose(
        options.traces,
        options.model,
        map=config.load(overrides=overrides).map,
        progress=ProgressBar(),
        max_tokens=options.max_tokens,
        held_out=options.held_out,
        logprob_kind=options.kind,
        sampling_defaults=options.defaults,
        server_profile=options.profile,
        rescored=options.rescore,
    )
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        print_lines(*doctor.render_lines(diagnosis))
    return diagnosis.exit_code
