"""`tracegrad online` and `tracegrad replay`: a run that plays and trains, and its steps again from its folder.

What a run.toml holds is `run_file`'s, what it names `user_functions`'s. torch is imported when a verb is called.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracegrad import config
from tracegrad.cli import args
from tracegrad.cli.args import aside, for_machines, go_on, place, say, speaker, tell, verb
from tracegrad.errors import ArgumentError

if TYPE_CHECKING:
    from tracegrad.cli.run_file import RunFile

WARNING = "The files that it names are run as programs: name only what you have written or read."


def add_to(commands: Any) -> None:
    """Adds the verbs."""
    parser = verb(commands, "online", "play, score, train and push, as a run.toml says", _online, WARNING)
    parser.add_argument("run_file", type=Path, metavar="run.toml", help="what to play and how: docs/online.md")
    parser.add_argument("--model", metavar="DIR", help="folder of model and tokenizer, over the file's")
    parser.add_argument("--out", metavar="DIR", help="folder of the run, over the file's")
    parser.add_argument("--tasks", metavar="FILE", help="JSON lines, or file.py:name, over the file's")
    parser.add_argument(
        "--server", action="append", metavar="URL", help="a running server, over the file's; repeatable"
    )
    parser.add_argument("--python", metavar="PATH", help="interpreter that has vLLM, to start a server")
    args.add_to(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--trainer-only", action="store_true", help="play nothing: processes with --collect play")
    parser.add_argument(
        "--collect", metavar="I/N", help="only play, as collector I of N, from 0, for a trainer with --trainer-only"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, look whether it can be, stop")
    for_machines(parser)
    parser.add_argument("--SECTION.OPTION", metavar="VALUE", help="any option, such as --online.steps 12")
    _replay_command(commands)


def _replay_command(commands: Any) -> None:
    parser = verb(commands, "replay", "take the steps of an online run again, from its folder alone", _replay)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder that the run began with")
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="where checkpoint and metrics go")
    parser.add_argument("--objective", metavar="NAME", help="that of the run (default: as its config.toml says)")
    for_machines(parser)


def _replay(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import online
    from tracegrad.objective import override_all, presets

    if idle := [name for name, _ in overrides if not name.startswith("objective")]:
        raise ArgumentError(f"{idle[0]} has no effect on replay, which takes what the run was told. Leave it out.")
    chosen = config.load(overrides=overrides).objective
    objective = override_all(presets.find(chosen.preset), dict(chosen.overrides)) if overrides else None
    found = online.replay(told.folder, told.model, objective=objective, out=told.out, say=speaker(told))
    if told.json:
        tell(_account(found))
        return found.exit_code
    say(f"replayed {found.steps} steps; {found.checkpoint}")
    return found.exit_code


def _online(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if told.collect is not None:
        return _collect(told, overrides, arguments)
    needs("training_loop")
    from tracegrad import online
    from tracegrad.cli import run_file
    from tracegrad.objective import override_all, presets

    given = {"model": told.model, "out": told.out, "tasks": told.tasks, "servers": told.server, "python": told.python}
    given = {key: value for key, value in given.items() if value is not None}
    begins = args.told_recipe(told)
    run = run_file.read(told.run_file, given, overrides, told.resume, begins)
    of_recipe = [] if begins is None else args.lines(told, begins, run.otherwise, run_file.OF_FILES)
    speak = speaker(told)
    speak(*(f"# {line}" if told.dry_run else line for line in of_recipe))
    objective = override_all(presets.find(run.config.objective.preset), dict(run.config.objective.overrides))
    model, out, contract = run.place("model"), run.place("out"), _all(run, told.trainer_only)
    if told.dry_run:
        return _dry_run(run, objective, contract, as_json=told.json)
    found = online.train(
        model,
        **contract,
        objective=objective,
        config=run.config,
        online=run.online,
        play=run.play,
        servers=run.named.get("servers", ()),
        key=run.key,
        python=run.python,
        engine=run.engine,
        out=out,
        resume=told.resume,
        say=speak,
    )
    if told.json:
        tell({**_account(found), "played": str(out / "played"), "metrics": str(out / "metrics.jsonl")})
    else:
        say(*_ending(found, out, arguments))
    return found.exit_code


def _account(found: Any) -> dict[str, Any]:
    """What a run has come to."""
    told = {"steps": found.steps, "stopped": found.stopped, "checkpoint": str(found.checkpoint)}
    return {**told, "last": found.rows[-1] if found.rows else None, "exit_code": found.exit_code}


def _collect(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    """Plays for a trainer that is another process, and that says how."""
    needs("collector_process")
    from tracegrad import online
    from tracegrad.cli import run_file, user_functions

    trainers = ("model", "server", "python", "objective", "recipe", "like", "resume", "trainer_only", "dry_run")
    idle = [name.replace("_", "-") for name in trainers if getattr(told, name)] + [name for name, _ in overrides]
    if idle:
        raise ArgumentError(f"--{idle[0]} has no effect on a collector: the trainer says how is played. Leave it out.")
    share = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", told.collect)
    if share is None or int(share[1]) >= int(share[2]):
        raise ArgumentError(
            f"--collect is {told.collect!r:.40}. Which tasks it plays is not known. Collectors count from 0: write "
            "0/2 and 1/2 for two."
        )
    given = {key: value for key, value in (("out", told.out), ("tasks", told.tasks)) if value is not None}
    run = run_file.read(told.run_file, given, [], False)
    out, _, contract = run.place("out"), run.place("tasks"), _contract(run)
    contract |= {"share": (int(share[1]), int(share[2])), "key": run.key, "say": speaker(told)}
    found = online.collect(out, user_functions.tasks(run.named["tasks"], run.base), **contract)
    if told.json:
        counts = {"trajectories": found.trajectories, "groups": found.groups, "failed": found.failed}
        tell({**counts, "stopped": found.stopped, "exit_code": found.exit_code})
        return found.exit_code
    reasons = {"done": "the run is over", "signal": "stopped on request; nothing is lost", "tasks": "no task is left"}
    say(
        f"played   {found.trajectories:,} trajectories in {found.groups:,} groups; {found.failed:,} failed; "
        f"{reasons[found.stopped]}",
        *go_on(found.stopped, arguments, flag=""),
    )
    return found.exit_code


def needs(module: str) -> None:
    """Says in one line what is not installed."""
    try:
        importlib.import_module(f"tracegrad.online.{module}")
        importlib.import_module("tracegrad.rollout.proxy")
    except ImportError as error:
        raise ArgumentError(
            f"it needs {error.name}, which is not installed. Nothing can be played. pip install 'tracegrad[online]'"
        ) from error


def _all(run: RunFile, elsewhere: bool) -> dict[str, Any]:
    """What is played in the trainer's process, by the names of `online.train`: not the tasks that others play."""
    from tracegrad.cli import user_functions

    if not elsewhere:
        run.place("tasks")
    told: dict[str, Any] = {} if elsewhere and "evaluation" not in run.named else _contract(run)
    told["tasks"] = None if elsewhere else user_functions.tasks(run.named["tasks"], run.base)
    if "evaluation" in run.named:
        told["evaluation"] = user_functions.evaluated(run.named["evaluation"], run.base)
    return told


def _contract(run: RunFile) -> dict[str, Any]:
    """What is played and what is good, by the names of `online.train`."""
    from tracegrad.cli import user_functions
    from tracegrad.online.rollout_workers import Contract

    told: dict[str, Any] = {}
    for key in ("agent", "environment"):
        if key in run.named:
            told[key] = user_functions.contract(run.named[key], run.base, key)
    if "tools" in run.named:
        told["tools"] = user_functions.tools(run.named["tools"], run.base)
    if "rewards" in run.named:
        told["rewards"] = user_functions.functions(run.named["rewards"], run.base, "rewards")
    if "weights" in run.named:
        told["weights"] = run.named["weights"]
        if len(told["weights"]) != len(told.get("rewards", ())):
            raise ArgumentError(
                f"{run.path}: weights has {len(told['weights'])} numbers for {len(told.get('rewards', ()))} rewards. "
                "Each reward function has one. Write as many."
            )
    Contract.of(**{key: told.get(key) for key in ("agent", "environment", "tools", "rewards")})
    return told


def _dry_run(run: RunFile, objective: Any, contract: dict[str, Any], *, as_json: bool) -> int:
    """What would be done, and whether it can be: files, names, tasks, servers."""
    from tracegrad.alignment.tokenizer import Tokenizer

    speak = aside if as_json else say
    speak(*run.to_toml().split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    Tokenizer.from_pretrained(run.place("model"))
    told, tasks = run.online, contract["tasks"]
    count = f"{len(tasks):,} tasks" if isinstance(tasks, (list, tuple)) else "tasks that are iterated once"
    count = "tasks that collectors play" if tasks is None else count
    groups = run.config.pack.step_groups
    servers = asyncio.run(served(run.named["servers"], run.key)) if "servers" in run.named else _starts(run)
    if as_json:
        size = {"steps": told.steps, "groups": groups, "samples": run.play.samples}
        listed = len(tasks) if isinstance(tasks, (list, tuple)) else None
        asked = {"tasks": listed, "evaluation": len(contract.get("evaluation", ())), "servers": servers}
        chosen = {"config": config.as_dict(run.config), "run": run.to_toml(), "objective": str(objective)}
        tell({"would": {**size, **asked}, **chosen})
        return 0
    say(
        f"would    take {told.steps:,} steps of {groups} groups of {run.play.samples} trajectories, from {count}",
        f"         evaluate on {len(contract.get('evaluation', ())):,} tasks"
        + (f" every {told.eval_every} steps" if told.eval_every else " before the first step and after the last"),
        f"servers  {servers}",
    )
    return 0


async def served(urls: list[str], key: str | None) -> str:
    """What servers say of themselves."""
    from tracegrad.online.options import IN_PROCESS
    from tracegrad.online.server_pool import model_of
    from tracegrad.rollout.client import Servers

    if urls == [IN_PROCESS]:
        return "vLLM runs in this process"
    async with Servers(urls, model="", key=key) as servers:
        return f"{', '.join(urls)}, which serve {await model_of(servers)!r}"


def _starts(run: RunFile) -> str:
    """Which interpreter would start a server, where it can."""
    python = run.python or sys.executable
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArgumentError(f"{python}: it cannot be run: {error}. No server would start. Correct python.") from error
    if not found:
        raise ArgumentError(
            f"{python} has no vLLM. No server would start. Name servers, or as python an interpreter that has it."
        )
    return f"one is started by {python}"


def _ending(found: Any, out: Path, arguments: list[str]) -> list[str]:
    reasons = {"done": "", "signal": ", stopped on request; nothing is lost", "tasks": ", after which no task was left"}
    return [
        f"trained  {found.steps:,} steps{reasons[found.stopped]}",
        f"         {found.checkpoint}  loads with AutoModelForCausalLM.from_pretrained",
        f"         {out / 'played'}  holds what was played, {out / 'metrics.jsonl'} how it went",
        *go_on(found.stopped, arguments),
    ]
