"""Run `tracegrad online` and `tracegrad replay`: train online, and repeat a run's steps from its folder.

`run_file` reads run.toml, and `user_functions` imports what it names. torch is imported when a verb is called.
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
from tracegrad.cli.args import (
    add_json_flag,
    place,
    print_json,
    print_lines,
    print_stderr,
    printer_for,
    resume_line,
    verb,
)
from tracegrad.errors import ArgumentError

if TYPE_CHECKING:
    from tracegrad.cli.run_file import RunFile

WARNING = "The files that it names are run as programs: name only what you have written or read."


def add_to(commands: Any) -> None:
    """Add the verbs."""
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
    add_json_flag(parser)
    parser.add_argument("--SECTION.OPTION", metavar="VALUE", help="any option, such as --online.steps 12")
    _replay_command(commands)


def _replay_command(commands: Any) -> None:
    parser = verb(commands, "replay", "take the steps of an online run again, from its folder alone", _replay)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder that the run began with")
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="where checkpoint and metrics go")
    parser.add_argument("--objective", metavar="NAME", help="that of the run (default: as its config.toml says)")
    add_json_flag(parser)


def _replay(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import online
    from tracegrad.objective import override_all, presets

    if idle := [name for name, _ in overrides if not name.startswith("objective")]:
        raise ArgumentError(
            f"TG-CLI-012: {idle[0]} has no effect on replay, which takes what the run was told. Leave it out."
        )
    objective_config = config.load(overrides=overrides).objective
    objective = (
        override_all(presets.find(objective_config.preset), dict(objective_config.overrides)) if overrides else None
    )
    result = online.replay(
        options.folder, options.model, objective=objective, out=options.out, say=printer_for(options)
    )
    if options.json:
        print_json(_result_fields(result))
        return result.exit_code
    print_lines(f"replayed {result.steps} steps; {result.checkpoint}")
    return result.exit_code


def _online(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if options.collect is not None:
        return _collect(options, overrides, arguments)
    needs("training_loop")
    from tracegrad import online
    from tracegrad.cli import run_file
    from tracegrad.objective import override_all, presets

    flags = {
        "model": options.model,
        "out": options.out,
        "tasks": options.tasks,
        "servers": options.server,
        "python": options.python,
    }
    flags = {key: value for key, value in flags.items() if value is not None}
    recipe = args.recipe_from_flags(options)
    run = run_file.read(options.run_file, flags, overrides, options.resume, recipe)
    recipe_lines = [] if recipe is None else args.lines(options, recipe, run.otherwise, run_file.OFFLINE_ONLY_OPTIONS)
    speak = printer_for(options)
    speak(*(f"# {line}" if options.dry_run else line for line in recipe_lines))
    objective = override_all(presets.find(run.config.objective.preset), dict(run.config.objective.overrides))
    model, out, contract = run.place("model"), run.place("out"), _local_arguments(run, options.trainer_only)
    if options.dry_run:
        return _dry_run(run, objective, contract, as_json=options.json)
    result = online.train(
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
        resume=options.resume,
        say=speak,
    )
    if options.json:
        print_json({**_result_fields(result), "played": str(out / "played"), "metrics": str(out / "metrics.jsonl")})
    else:
        print_lines(*_final_lines(result, out, arguments))
    return result.exit_code


def _result_fields(result: Any) -> dict[str, Any]:
    """Return the result of a run for --json."""
    counts = {"steps": result.steps, "stopped": result.stopped, "checkpoint": str(result.checkpoint)}
    return {**counts, "last": result.rows[-1] if result.rows else None, "exit_code": result.exit_code}


def _collect(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    """Run rollouts for a trainer in another process, which determines the settings."""
    needs("collector_process")
    from tracegrad import online
    from tracegrad.cli import run_file, user_functions

    trainers = ("model", "server", "python", "objective", "recipe", "like", "resume", "trainer_only", "dry_run")
    idle = [name.replace("_", "-") for name in trainers if getattr(options, name)] + [name for name, _ in overrides]
    if idle:
        raise ArgumentError(
            f"TG-CLI-013: --{idle[0]} has no effect on a collector: the trainer says how is played. Leave it out."
        )
    share = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", options.collect)
    if share is None or int(share[1]) >= int(share[2]):
        raise ArgumentError(
            f"TG-CLI-014: --collect is {options.collect!r:.40}. Which tasks it plays is not known. Collectors count "
            "from 0: write 0/2 and 1/2 for two."
        )
    flags = {key: value for key, value in (("out", options.out), ("tasks", options.tasks)) if value is not None}
    run = run_file.read(options.run_file, flags, [], False)
    out, _, contract = run.place("out"), run.place("tasks"), _rollout_arguments(run)
    contract |= {"share": (int(share[1]), int(share[2])), "key": run.key, "say": printer_for(options)}
    result = online.collect(out, user_functions.tasks(run.named["tasks"], run.base), **contract)
    if options.json:
        counts = {"trajectories": result.trajectories, "groups": result.groups, "failed": result.failed}
        print_json({**counts, "stopped": result.stopped, "exit_code": result.exit_code})
        return result.exit_code
    reasons = {"done": "the run is over", "signal": "stopped on request; nothing is lost", "tasks": "no task is left"}
    print_lines(
        f"played   {result.trajectories:,} trajectories in {result.groups:,} groups; {result.failed:,} failed; "
        f"{reasons[result.stopped]}",
        *resume_line(result.stopped, arguments, flag=""),
    )
    return result.exit_code


def needs(module: str) -> None:
    """Raise if a package for online training is not installed.

    Raises:
        ArgumentError: if so, with the name of the package.
    """
    try:
        importlib.import_module(f"tracegrad.online.{module}")
        importlib.import_module("tracegrad.rollout.proxy")
    except ImportError as error:
        raise ArgumentError(
            f"TG-CLI-015: it needs {error.name}, which is not installed. Nothing can be played. pip install "
            f"'tracegrad[online]'"
        ) from error


def _local_arguments(run: RunFile, has_remote_collectors: bool) -> dict[str, Any]:
    """Return the arguments of `online.train` for rollouts in the trainer's process.

    Without local rollouts (`elsewhere`), tasks are None and only an evaluation needs the rest.
    """
    from tracegrad.cli import user_functions

    if not has_remote_collectors:
        run.place("tasks")
    kwargs: dict[str, Any] = {} if has_remote_collectors and "evaluation" not in run.named else _rollout_arguments(run)
    kwargs["tasks"] = None if has_remote_collectors else user_functions.tasks(run.named["tasks"], run.base)
    if "evaluation" in run.named:
        kwargs["evaluation"] = user_functions.evaluation_tasks(run.named["evaluation"], run.base)
    return kwargs


def _rollout_arguments(run: RunFile) -> dict[str, Any]:
    """Return the arguments of `online.train` that define rollouts and rewards."""
    from tracegrad.cli import user_functions
    from tracegrad.online.rollout_workers import RolloutSpec

    found: dict[str, Any] = {}
    for key in ("agent", "environment"):
        if key in run.named:
            found[key] = user_functions.agent_or_environment(run.named[key], run.base, key)
    if "tools" in run.named:
        found["tools"] = user_functions.tools(run.named["tools"], run.base)
    if "rewards" in run.named:
        found["rewards"] = user_functions.functions(run.named["rewards"], run.base, "rewards")
    if "weights" in run.named:
        found["weights"] = run.named["weights"]
        if len(found["weights"]) != len(found.get("rewards", ())):
            raise ArgumentError(
                f"TG-CLI-016: {run.path}: weights has {len(found['weights'])} numbers for "
                f"{len(found.get('rewards', ()))} rewards. "
                "Each reward function has one. Write as many."
            )
    RolloutSpec.of(**{key: found.get(key) for key in ("agent", "environment", "tools", "rewards")})
    return found


def _dry_run(run: RunFile, objective: Any, contract: dict[str, Any], *, as_json: bool) -> int:
    """Print what a run would do, after checking that files, names, tasks and servers are usable."""
    from tracegrad.alignment.tokenizer import Tokenizer

    speak = print_stderr if as_json else print_lines
    speak(*run.to_toml().split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    Tokenizer.from_pretrained(run.place("model"))
    online, tasks = run.online, contract["tasks"]
    count = f"{len(tasks):,} tasks" if isinstance(tasks, (list, tuple)) else "tasks that are iterated once"
    count = "tasks that collectors play" if tasks is None else count
    groups = run.config.pack.step_groups
    servers = asyncio.run(served(run.named["servers"], run.key)) if "servers" in run.named else _check_interpreter(run)
    if as_json:
        size = {"steps": online.steps, "groups": groups, "samples": run.play.samples}
        task_count = len(tasks) if isinstance(tasks, (list, tuple)) else None
        inputs = {"tasks": task_count, "evaluation": len(contract.get("evaluation", ())), "servers": servers}
        settings = {"config": config.as_dict(run.config), "run": run.to_toml(), "objective": str(objective)}
        print_json({"would": {**size, **inputs}, **settings})
        return 0
    print_lines(
        f"would    take {online.steps:,} steps of {groups} groups of {run.play.samples} trajectories, from {count}",
        f"         evaluate on {len(contract.get('evaluation', ())):,} tasks"
        + (f" every {online.eval_every} steps" if online.eval_every else " before the first step and after the last"),
        f"servers  {servers}",
    )
    return 0


async def served(urls: list[str], key: str | None) -> str:
    """Return the server URLs and the model that they serve, as text."""
    from tracegrad.online.options import IN_PROCESS
    from tracegrad.online.server_pool import model_of
    from tracegrad.rollout.client import Servers

    if urls == [IN_PROCESS]:
        return "vLLM runs in this process"
    async with Servers(urls, model="", key=key) as servers:
        return f"{', '.join(urls)}, which serve {await model_of(servers)!r}"


def _check_interpreter(run: RunFile) -> str:
    """Return which interpreter would start a server, after checking that it has vLLM."""
    python = run.python or sys.executable
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        has_vllm = subprocess.run([python, "-c", probe], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArgumentError(
            f"TG-CLI-017: {python}: it cannot be run: {error}. No server would start. Correct python."
        ) from error
    if not has_vllm:
        raise ArgumentError(
            f"TG-CLI-018: {python} has no vLLM. No server would start. Name servers, or as python an "
            f"interpreter that has it."
        )
    return f"one is started by {python}"


def _final_lines(result: Any, out: Path, arguments: list[str]) -> list[str]:
    reasons = {"done": "", "signal": ", stopped on request; nothing is lost", "tasks": ", after which no task was left"}
    return [
        f"trained  {result.steps:,} steps{reasons[result.stopped]}",
        f"         {result.checkpoint}  loads with AutoModelForCausalLM.from_pretrained",
        f"         {out / 'played'}  holds what was played, {out / 'metrics.jsonl'} how it went",
        *resume_line(result.stopped, arguments),
    ]
