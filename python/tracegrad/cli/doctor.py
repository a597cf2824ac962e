"""Run `tracegrad doctor`: check traces before training on them. torch is needed only for `--check-logprobs`."""

import argparse
from pathlib import Path
from typing import Any

from tracegrad import config, doctor
from tracegrad.cli.args import (
    LOGPROB_KIND_HELP,
    MODEL_HELP,
    SAMPLING_DEFAULTS_HELP,
    SERVER_PROFILE_HELP,
    folder_of,
    inputs_of,
    print_json,
    print_lines,
    verb,
)
from tracegrad.data import ProgressBar
from tracegrad.data.codes import LOGPROB_KINDS, SERVERS


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "doctor",
        "check recorded traces for problems that would silently corrupt training",
        _doctor,
        more="For each problem it prints the first trace that has it, its impact and the fix. It also prints the flags "
        "that your records probably need. The exit code is 1 if training would be wrong.",
        examples=(
            "logs/ --model Qwen/Qwen3-0.6B",
            "traces.jsonl --model MODEL --map.reward score --check-logprobs",
        ),
        dotted_names=lambda: [name for name in config.options() if name.startswith("map.")],
    )
    inputs_of(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "--held-out",
        action="append",
        default=[],
        metavar="FILE",
        help="evaluation traces: report training prompts that are also in FILE; repeatable",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="report traces longer than N tokens (default: the model's maximum number of positions)",
    )
    parser.add_argument("--logprob-kind", dest="kind", choices=LOGPROB_KINDS, help=LOGPROB_KIND_HELP)
    parser.add_argument(
        "--sampling-defaults", dest="defaults", choices=("neutral", "model"), help=SAMPLING_DEFAULTS_HELP
    )
    parser.add_argument("--server-profile", dest="profile", choices=SERVERS, help=SERVER_PROFILE_HELP)
    parser.add_argument(
        "--check-logprobs",
        type=int,
        nargs="?",
        const=64,
        default=0,
        metavar="N",
        help="compare the recorded logprobs of N traces with the model's (default 64; needs torch)",
    )


def _doctor(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    options.model = folder_of(options.model)
    with ProgressBar() as progress:
        diagnosis = doctor.diagnose(
            options.traces,
            options.model,
            map=config.load(overrides=overrides).map,
            progress=progress,
            max_tokens=options.max_tokens,
            held_out=options.held_out,
            logprob_kind=options.kind,
            sampling_defaults=options.defaults,
            server_profile=options.profile,
            check_logprobs=options.check_logprobs,
        )
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        print_lines(*doctor.render_lines(diagnosis))
    return diagnosis.exit_code
