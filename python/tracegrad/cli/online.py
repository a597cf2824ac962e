"""`tracegrad online` and `tracegrad replay`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad.cli.words import say
from tracegrad.errors import ArgumentError


def add_to(commands: Any) -> None:
    """Adds the verbs."""
    _replay_command(commands)


def _replay_command(commands: Any) -> None:
    text = "take the steps of an online run again, from its folder alone"
    parser = commands.add_parser("replay", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(run=_replay, parser=parser)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder that the run began with")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where checkpoint and metrics go")
    parser.add_argument("--objective", metavar="NAME", help="that of the run (default DAPO)")


def _replay(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import algebra, online, presets

    idle = [name for name, _ in overrides if not name.startswith("objective")]
    if idle:
        raise ArgumentError(f"{idle[0]} has no effect on replay, which takes what the run was told. Leave it out.")
    chosen = config.load(overrides=overrides).objective
    objective = algebra.override_all(presets.find(chosen.preset), dict(chosen.overrides))
    found = online.replay(told.folder, told.model, objective=objective, out=told.out, say=lambda line: say(line))
    say(f"replayed {found.steps} steps; {found.checkpoint}")
    return 0
