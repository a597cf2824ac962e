"""Run `tracegrad record` and `tracegrad proxy`: record trajectories in a folder, without training.

`record` runs tasks with an agent or environment from a file. `proxy` records any program that sends requests to it.
"""

import argparse
import asyncio
import math
import secrets
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tracegrad.cli.args import Parser, add_json_flag, place, print_json, print_lines, printer_for, read_key, verb
from tracegrad.cli.online import WARNING, needs, served
from tracegrad.config.dotted_keys import set_values
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.storage import files

CLOCK_S = 2.0
"""Tolerance of file times, in seconds."""


def add_to(commands: Any) -> None:
    """Add the verbs."""
    parser = verb(commands, "record", "play tasks and record them by whole groups, without training", _record, WARNING)
    parser.add_argument(
        "contract", nargs="?", metavar="file.py:name", help="an agent of (task, policy), or a class of environments"
    )
    _common(parser)
    parser.add_argument("--tasks", required=True, metavar="FILE", help="JSON lines, or file.py:name; each played once")
    parser.add_argument("--samples", metavar="N", help="trajectories of each task: a group (default 8)")
    parser.add_argument("--tools", action="append", metavar="file.py:name", help="in place of an agent; repeatable")
    parser.add_argument("--rewards", action="append", metavar="file.py:name", help="score whole groups; repeatable")
    parser.add_argument("--groups", type=int, metavar="N", help="at most so many (default: all tasks)")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="groups played at once (default 8)")
    parser.add_argument("--resume", action="store_true", help="leave out the groups that are in --out already")
    parser.add_argument("--play.OPTION", metavar="VALUE", help="temperature, max_tokens, turns, seconds, ...")
    parser = verb(commands, "proxy", "record any program: an OpenAI-compatible address in front of a server", _proxy)
    _common(parser)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="on loopback (default: a free one)")
    parser.add_argument("--model", metavar="NAME", help="which every request gets (default: the program's own)")
    parser.add_argument(
        "--idle", type=float, default=3600.0, metavar="S", help="seconds after which an unused session ends (3600)"
    )


def _common(parser: Parser) -> None:
    parser.add_argument("--server", action="append", required=True, metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="folder of what is recorded")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's token")
    parser.add_argument(
        "--logprob-kind",
        dest="kind",
        choices=("raw", "processed"),
        default="raw",
        help="what the server's logprobs are of (raw)",
    )
    add_json_flag(parser)


def _record(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    needs("recording")
    from tracegrad import online
    from tracegrad.cli import user_functions

    base = Path.cwd()
    if idle := [name for name, _ in overrides if name.partition(".")[0] != "play"]:
        raise ArgumentError(
            f"TG-CLI-021: {idle[0]} has no effect on record, which trains nothing. Leave it for tracegrad online."
        )
    rollout_arguments: dict[str, Any] = {}
    if options.contract is not None:
        result = user_functions.agent_or_environment(options.contract, base, "")
        rollout_arguments["environment" if isinstance(result, type) else "agent"] = result
    if options.tools:
        rollout_arguments["tools"] = user_functions.tools(
            options.tools[0] if len(options.tools) == 1 else options.tools, base
        )
    if options.rewards:
        rollout_arguments["rewards"] = user_functions.functions(options.rewards, base, "rewards")
    samples = [] if options.samples is None else [("play.samples", options.samples)]
    result = online.record(
        user_functions.tasks(options.tasks, base),
        **rollout_arguments,
        play=set_values({"play": online.RolloutConfig()}, [*overrides, *samples])["play"],
        servers=options.server,
        key=read_key(options.key_file) if options.key_file else None,
        logprob_kind=options.kind,
        groups=options.groups,
        parallel=options.parallel,
        out=options.out,
        resume=options.resume,
        say=printer_for(options),
    )
    if options.json:
        counts = {"trajectories": result.trajectories, "groups": result.groups, "failed": result.failed}
        reward = None if math.isnan(result.reward) else result.reward
        counts |= {"without_reward": result.without_reward, "before": result.before, "reward": reward}
        failures = {name: vars(failure) for name, failure in result.failures.items()}
        print_json({**counts, "failures": failures, "file": result.file and str(result.file)})
        return 0
    failures = result.failures.items()
    mean = "no reward is known" if math.isnan(result.reward) else f"mean reward {result.reward:.3f}"
    unrewarded = f"; {result.without_reward:,} trajectories without a reward" if result.without_reward else ""
    earlier = f", beside {result.before:,} that were there" if result.before else ""
    print_lines(
        f"recorded {result.trajectories:,} trajectories in {result.groups:,} groups{earlier}; {result.failed:,} failed",
        *(f"failed   {name}, {failure.count:,} trajectories; the first: {failure.first}" for name, failure in failures),
        f"         {mean}{unrewarded}",
        *((f"         {result.file}", f"next     tracegrad doctor {result.file} --model DIR") if result.file else ()),
    )
    return 0


def _proxy(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    needs("recording")
    if overrides:
        raise ArgumentError(
            f"TG-CLI-022: {overrides[0][0]} has no effect on proxy: a program says itself how it samples."
        )
    return asyncio.run(_serve_proxy(options))


async def _serve_proxy(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Finished trajectories are on disk."""
    from tracegrad.online.buffer import ROLLOUT_FOLDER, GroupWriter
    from tracegrad.rollout.client import Servers
    from tracegrad.rollout.proxy import Proxy
    from tracegrad.rollout.proxy_journal import Journal

    key = read_key(args.key_file) if args.key_file else None
    speak = printer_for(args)
    speak(f"server   {await served(args.server, key)}")
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: stopped.done() or stopped.set_result(0))
    count = 0
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(args.out / "open"))
        journal.forget(_recorded_sessions(args.out / ROLLOUT_FOLDER, journal))
        servers = await stack.enter_async_context(Servers(args.server, model="", key=key))
        writer = stack.enter_context(GroupWriter(args.out / ROLLOUT_FOLDER))

        async def finished(record: dict[str, Any]) -> None:
            nonlocal count
            await asyncio.to_thread(writer.write, [record])
            count += 1

        proxy_options = {
            "key": _proxy_key(args.out / "key"),
            "upstream_key": key,
            "model": args.model,
            "port": args.port,
        }
        proxy_options |= {"journal": journal, "idle_s": args.idle, "logprob_kind": args.kind}
        try:
            proxy = await Proxy(servers, finished=finished, **proxy_options).__aenter__()
        except OSError as error:
            raise TracegradError(
                f"TG-CLI-023: port {args.port}: {error.strerror}. Nothing can be recorded. Give another --port."
            ) from error
        try:
            if open_count := len(journal.files):
                speak(f"open     {open_count:,} sessions that the proxy before this one left open")
            if args.json:
                print_json({"url": proxy.url, "key_file": str(args.out / "key"), "open": open_count}, line=True)
            speak(
                f"export OPENAI_BASE_URL={proxy.url}/s/NAME/v1 OPENAI_API_KEY=$(cat {args.out / 'key'})",
                "         NAME is yours to choose, one for each trajectory; or send x-tracegrad-session: NAME",
                f"         a trajectory ends with  POST {proxy.url}/s/NAME/reward  "
                '{"reward": 1.0, "group": "task 7"}',
            )
            await stopped
        finally:
            await proxy.__aexit__()
    file = writer.folder / writer.name
    if args.json:
        print_json({"trajectories": count, "file": str(file)}, line=True)
    else:
        print_lines(f"recorded {count:,} trajectories; {file}")
    return 0


def _recorded_sessions(folder: Path, journal: Any) -> set[str]:
    """Return sessions of the journal that are already completely recorded.

    A proxy may have been killed after it wrote a record and before it removed the session from the journal.
    """
    from tracegrad.online.buffer import GroupLocation, GroupReader

    journal_times = [path.stat().st_mtime for path in journal.files]
    follower = GroupReader(folder)
    earlier_files = [
        path
        for path in folder.glob("*.jsonl.zst")
        if path.stat().st_mtime < min(journal_times, default=math.inf) - CLOCK_S
    ]
    follower.skip(GroupLocation(path.name, path.stat().st_size, 0) for path in earlier_files)
    return {str(trace.metadata.get("session")) for _, traces in follower.each() for trace in traces}


def _proxy_key(path: Path) -> str:
    """Return the key that programs must present. It is created on first use, in a file only its owner can read."""
    if not path.exists():
        with files.create(path, 0o600) as file:
            file.write(secrets.token_urlsafe(24).encode() + b"\n")
    return read_key(path)
