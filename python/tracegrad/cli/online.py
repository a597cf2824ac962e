"""Run `tracegrad online` and `tracegrad replay`: train online, and repeat a run's steps from its folder.

`run_file` reads run.toml, and `user_functions` imports what it names. torch is imported when a verb is called.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracegrad import config
from tracegrad.cli import args, extras
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
from tracegrad.recipes.config_file import describe_unused_logprobs

if TYPE_CHECKING:
    from tracegrad.cli.run_file import RunFile

WARNING = "Python files that you name are executed: name only files that you wrote or reviewed."


def add_to(commands: Any) -> None:
    """Add the verbs."""
    parser = verb(
        commands,
        "online",
        "train online: roll out on vLLM, score, update, sync weights",
        _online,
        more=f"Flags override run.toml. {WARNING}",
        examples=("run.toml --dry-run", "run.toml --server http://localhost:8000 --online.steps 12"),
        dotted_names=option_names,
        reason_no_effect=None,
    )
    parser.add_argument(
        "run_file",
        type=Path,
        metavar="run.toml",
        help="model, tasks, rewards, options: docs/reference/configuration.md",
    )
    parser.add_argument("--model", metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--out", metavar="DIR", help="folder of the run")
    parser.add_argument("--tasks", metavar="FILE", help="JSON Lines file, or file.py:name")
    parser.add_argument("--server", action="append", metavar="URL", help="use this running vLLM server; repeatable")
    parser.add_argument("--python", metavar="PATH", help="Python interpreter with vLLM, to start a server")
    args.add_to(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--trainer-only", action="store_true", help="run no rollouts here; other processes run them with --collect"
    )
    parser.add_argument(
        "--collect",
        metavar="I/N",
        help="only run rollouts, as collector I of N (counted from 0), for a trainer with --trainer-only",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check files, tasks and servers, print the settings, and exit"
    )
    add_json_flag(parser)
    parser.add_argument("--SECTION.OPTION", metavar="VALUE", help="set any option, such as --online.steps 12")
    _replay_command(commands)


def option_names() -> list[str]:
    """Return the options that `online` accepts."""
    from tracegrad.cli.run_file import OFFLINE_ONLY_OPTIONS

    return [name for name in args.known_options() if name not in OFFLINE_ONLY_OPTIONS]


def _replay_command(commands: Any) -> None:
    parser = verb(
        commands,
        "replay",
        "repeat the optimizer steps of an online run from its folder, without a server",
        _replay,
        examples=(
            "runs/online --model models/Qwen3-0.6B --out runs/again",
            "runs/online --model models/Qwen3-0.6B --out runs/again --objective mine.py:LOSS --json",
        ),
        dotted_names=lambda: ["objective", "objective.*"],
        reason_no_effect="which uses the options of the recorded run. Remove it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the online run")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model folder that the run started from"
    )
    parser.add_argument(
        "--out", type=place, required=True, metavar="DIR", help="folder for the checkpoint and the metrics"
    )
    parser.add_argument(
        "--objective", metavar="NAME", help="the objective of the run (default: read from its config.toml)"
    )
    add_json_flag(parser)


def _replay(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import online
    from tracegrad.objective import override_all, presets

    objective_config = config.load(overrides=overrides).objective
    objective = (
        override_all(presets.find(objective_config.preset), dict(objective_config.overrides)) if overrides else None
    )
    result = online.replay(
        options.folder, options.model, objective=objective, out=options.out, log=printer_for(options)
    )
    if options.json:
        print_json(_result_fields(result))
        return result.exit_code
    print_lines(f"replayed {result.steps} steps; {result.checkpoint}")
    return result.exit_code


def _online(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if options.collect is not None:
        return _collect(options, overrides, arguments)
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
    groups = run.config.train.groups_per_step
    unused = run_file.OFFLINE_ONLY_OPTIONS
    recipe_lines = [] if recipe is None else args.lines(options, recipe, run.overrides, groups, unused)
    extras.check(options, {**config.as_dict(run.config), "servers": (), **run.inputs})
    log = printer_for(options)
    log(*(f"# {line}" if options.dry_run else line for line in recipe_lines))
    objective = override_all(presets.find(run.config.objective.preset), dict(run.config.objective.overrides))
    if not objective.requirements.rollout:
        warning = f"warning  {describe_unused_logprobs('' if recipe is None else recipe.source)}"
        log(f"# {warning}" if options.dry_run else warning)
    model, out, contract = run.place("model"), run.place("out"), _local_arguments(run, options.trainer_only)
    if options.dry_run:
        return _dry_run(run, objective, contract, as_json=options.json)
    result = online.train(
        model,
        **contract,
        objective=objective,
        config=run.config,
        online=run.online,
        rollout=run.rollout,
        servers=run.inputs.get("servers", ()),
        key=run.key,
        python=run.python,
        engine=run.engine,
        out=out,
        resume=options.resume,
        log=log,
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
    from tracegrad import online
    from tracegrad.cli import run_file, user_functions

    trainer_flags = (
        "model",
        "server",
        "python",
        "objective",
        "recipe",
        "from_config",
        "resume",
        "trainer_only",
        "dry_run",
    )
    unused = [name.replace("_", "-") for name in trainer_flags if getattr(options, name)] + [
        name for name, _ in overrides
    ]
    if unused:
        raise ArgumentError(
            f"TG-CLI-013: --{unused[0]} has no effect on a collector, which gets its settings from the trainer. "
            "Remove it."
        )
    share = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", options.collect)
    if share is None or int(share[1]) >= int(share[2]):
        raise ArgumentError(
            f"TG-CLI-014: --collect is {options.collect!r:.40}. It must be I/N. Collectors count from 0: for two "
            "collectors write 0/2 and 1/2."
        )
    flags = {key: value for key, value in (("out", options.out), ("tasks", options.tasks)) if value is not None}
    run = run_file.read(options.run_file, flags, [], False)
    out, _, contract = run.place("out"), run.place("tasks"), _rollout_arguments(run)
    contract |= {"share": (int(share[1]), int(share[2])), "key": run.key, "log": printer_for(options)}
    result = online.collect(out, user_functions.tasks(run.inputs["tasks"], run.base), **contract)
    if options.json:
        counts = {"trajectories": result.trajectories, "groups": result.groups, "failed": result.failed}
        print_json({**counts, "stopped": result.stopped, "exit_code": result.exit_code})
        return result.exit_code
    reasons = {"done": "the run has ended", "signal": "stopped on request", "tasks": "no tasks are left"}
    print_lines(
        f"rollout  {result.trajectories:,} trajectories in {result.groups:,} groups; {result.failed:,} failed; "
        f"{reasons[result.stopped]}",
        *resume_line(result.stopped, arguments, flag=""),
    )
    return result.exit_code


def _local_arguments(run: RunFile, has_remote_collectors: bool) -> dict[str, Any]:
    """Return the arguments of `online.train` for rollouts in the trainer's process.

    With remote collectors, tasks are None and only an evaluation needs the rest.
    """
    from tracegrad.cli import user_functions

    if not has_remote_collectors:
        run.place("tasks")
    kwargs: dict[str, Any] = {} if has_remote_collectors and "eval_tasks" not in run.inputs else _rollout_arguments(run)
    kwargs["tasks"] = None if has_remote_collectors else user_functions.tasks(run.inputs["tasks"], run.base)
    if "eval_tasks" in run.inputs:
        kwargs["eval_tasks"] = user_functions.evaluation_tasks(run.inputs["eval_tasks"], run.base)
    return kwargs


def _rollout_arguments(run: RunFile) -> dict[str, Any]:
    """Return the arguments of `online.train` that define rollouts and rewards."""
    from tracegrad.cli import user_functions
    from tracegrad.online.rollout_workers import RolloutSpec

    spec: dict[str, Any] = {}
    for key in ("agent", "environment"):
        if key in run.inputs:
            spec[key] = user_functions.agent_or_environment(run.inputs[key], run.base, key)
    if "tools" in run.inputs:
        spec["tools"] = user_functions.tools(run.inputs["tools"], run.base)
    if "rewards" in run.inputs:
        spec["rewards"] = user_functions.functions(run.inputs["rewards"], run.base, "rewards")
    if "reward_weights" in run.inputs:
        spec["reward_weights"] = run.inputs["reward_weights"]
        if len(spec["reward_weights"]) != len(spec.get("rewards", ())):
            raise ArgumentError(
                f"TG-CLI-016: {run.path}: reward_weights has {len(spec['reward_weights'])} numbers for "
                f"{len(spec.get('rewards', ()))} rewards. Write one weight per reward function."
            )
    RolloutSpec.of(**{key: spec.get(key) for key in ("agent", "environment", "tools", "rewards")})
    return spec


def _dry_run(run: RunFile, objective: Any, contract: dict[str, Any], *, as_json: bool) -> int:
    """Print the settings and size of a run, after checking that files, names, tasks and servers are usable."""
    from tracegrad.alignment.tokenizer import Tokenizer

    log = print_stderr if as_json else print_lines
    log(*run.to_toml().split("\n"), *(f"# {line}" for line in str(objective).splitlines()))
    Tokenizer.from_pretrained(run.place("model"))
    online, tasks = run.online, contract["tasks"]
    count = f"{len(tasks):,} tasks" if isinstance(tasks, (list, tuple)) else "an iterable of tasks"
    count = "tasks of remote collectors" if tasks is None else count
    groups = run.config.train.groups_per_step
    servers = (
        asyncio.run(served(run.inputs["servers"], run.key)) if "servers" in run.inputs else _check_interpreter(run)
    )
    if as_json:
        size = {"steps": online.steps, "groups": groups, "samples": run.rollout.group_size}
        task_count = len(tasks) if isinstance(tasks, (list, tuple)) else None
        inputs = {"tasks": task_count, "eval_tasks": len(contract.get("eval_tasks", ())), "servers": servers}
        settings = {"config": config.as_dict(run.config), "run": run.to_toml(), "objective": str(objective)}
        print_json({"would": {**size, **inputs}, **settings})
        return 0
    print_lines(
        f"dry run  {online.steps:,} optimizer steps of {groups} groups of {run.rollout.group_size} trajectories, from "
        f"{count}",
        f"         evaluation on {len(contract.get('eval_tasks', ())):,} tasks"
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
        return f"{', '.join(urls)} with model {await model_of(servers)!r}"


def _check_interpreter(run: RunFile) -> str:
    """Return which interpreter would start a server, after checking that it has vLLM."""
    python = run.python or sys.executable
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        has_vllm = subprocess.run([python, "-c", probe], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArgumentError(
            f"TG-CLI-017: {python} cannot be run: {error}. No server would start. Correct --python, or python in "
            "run.toml."
        ) from error
    if not has_vllm:
        raise ArgumentError(
            f"TG-CLI-018: {python} cannot import vLLM, so no server would start. Give --python an interpreter with "
            "vLLM, or name running servers with --server."
        )
    return f"vLLM is started by {python}"


def _final_lines(result: Any, out: Path, arguments: list[str]) -> list[str]:
    reasons = {"done": "", "signal": ", stopped on request", "tasks": ", then no tasks were left"}
    return [
        f"trained  {result.steps:,} steps{reasons[result.stopped]}",
        f"         {result.checkpoint}  loads with AutoModelForCausalLM.from_pretrained",
        f"         {out / 'played'}  has the rollouts, {out / 'metrics.jsonl'} the metrics",
        *resume_line(result.stopped, arguments),
    ]
