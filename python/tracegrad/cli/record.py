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
from tracegrad.cli.online import WARNING, served
from tracegrad.config.dotted_keys import set_values
from tracegrad.errors import TracegradError
from tracegrad.storage import files

CLOCK_S = 2.0
"""Tolerance of file times, in seconds."""


def add_to(commands: Any) -> None:
    """Add the verbs."""
    parser = verb(
        commands,
        "record",
        "run rollouts of your tasks and record them with logprobs and rewards, without training",
        _record,
        more=WARNING,
        examples=(
            "agent.py:agent --tasks tasks.jsonl --server http://localhost:8000 --out recorded",
            "--rewards mine.py:correct --tools mine.py:search --tasks tasks.jsonl --server URL --out recorded",
        ),
        dotted_names=option_names,
        reason_no_effect="which does not train. Use it with tracegrad online.",
    )
    parser.add_argument(
        "contract",
        nargs="?",
        metavar="file.py:name",
        help="async agent(task, policy), or an environment class; not needed with --rewards",
    )
    _common(parser)
    parser.add_argument(
        "--tasks", required=True, metavar="FILE", help="JSON Lines file, or file.py:name; each task becomes one group"
    )
    parser.add_argument(
        "--group-size", metavar="N", help="trajectories per task; together they are a group (default 8)"
    )
    parser.add_argument(
        "--tools", action="append", metavar="file.py:name", help="Python function that the model may call; repeatable"
    )
    parser.add_argument(
        "--rewards",
        action="append",
        metavar="file.py:name",
        help="TRL-style reward function, called once per group; repeatable",
    )
    parser.add_argument("--groups", type=int, metavar="N", help="maximum number of groups (default: all tasks)")
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="groups in progress at once (default 8)"
    )
    parser.add_argument("--resume", action="store_true", help="skip the groups that --out already contains")
    parser.add_argument(
        "--rollout.OPTION", metavar="VALUE", help="set a rollout option, such as --rollout.max_tokens 512"
    )
    parser = verb(
        commands,
        "proxy",
        "record any program: an OpenAI-compatible proxy in front of a server",
        _proxy,
        more="Point the program's OPENAI_BASE_URL at the printed URL. Each session name is one trajectory.",
        examples=(
            "--server http://localhost:8000 --out recorded",
            "--server http://localhost:8000 --out recorded --port 8080 --session-timeout 600",
        ),
        reason_no_effect="whose recorded program sets its own sampling options. Remove it.",
    )
    _common(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port on this machine's loopback (default: a free one)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model name for every request (default: the name that the program sends)"
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds without a request after which a session ends (default 3600)",
    )


def option_names() -> list[str]:
    """Return the options that `record` accepts."""
    from tracegrad.online import RolloutConfig

    return [f"rollout.{name}" for name in vars(RolloutConfig())]


def _common(parser: Parser) -> None:
    parser.add_argument(
        "--server", action="append", required=True, metavar="URL", help="OpenAI-compatible server; repeatable"
    )
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="folder for the recorded traces")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's access token")
    parser.add_argument(
        "--logprob-kind",
        dest="kind",
        choices=("raw", "processed"),
        default="raw",
        help="whether the server computes logprobs before (raw) or after (processed) temperature and truncation "
        "(default raw)",
    )
    add_json_flag(parser)


def _record(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import online
    from tracegrad.cli import user_functions

    base = Path.cwd()
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
    samples = [] if options.group_size is None else [("rollout.group_size", options.group_size)]
    result = online.record(
        user_functions.tasks(options.tasks, base),
        **rollout_arguments,
        rollout=set_values({"rollout": online.RolloutConfig()}, [*overrides, *samples])["rollout"],
        servers=options.server,
        key=read_key(options.key_file) if options.key_file else None,
        logprob_kind=options.kind,
        groups=options.groups,
        concurrency=options.concurrency,
        out=options.out,
        resume=options.resume,
        log=printer_for(options),
    )
    if options.json:
        counts = {"trajectories": result.trajectories, "groups": result.groups, "failed": result.failed}
        reward = None if math.isnan(result.reward) else result.reward
        counts |= {"without_reward": result.without_reward, "before": result.existing_groups, "reward": reward}
        failures = {name: vars(failure) for name, failure in result.failures.items()}
        print_json({**counts, "failures": failures, "file": result.file and str(result.file)})
        return 0
    failures = result.failures.items()
    mean = "no rewards" if math.isnan(result.reward) else f"mean reward {result.reward:.3f}"
    unrewarded = f"; {result.without_reward:,} trajectories without a reward" if result.without_reward else ""
    earlier = f" in addition to {result.existing_groups:,} from before" if result.existing_groups else ""
    print_lines(
        f"recorded {result.trajectories:,} trajectories in {result.groups:,} groups{earlier}; {result.failed:,} failed",
        *(f"failed   {name}, {failure.count:,} trajectories; the first: {failure.first}" for name, failure in failures),
        f"         {mean}{unrewarded}",
        *((f"         {result.file}", f"next     tracegrad doctor {result.file} --model DIR") if result.file else ()),
    )
    return 0


def _proxy(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    return asyncio.run(_serve_proxy(options))


async def _serve_proxy(options: argparse.Namespace) -> int:
    """Serve until a signal arrives. Finished trajectories are on disk."""
    from tracegrad.online.buffer import ROLLOUT_FOLDER, GroupWriter
    from tracegrad.rollout.client import Servers
    from tracegrad.rollout.proxy import Proxy
    from tracegrad.rollout.proxy_journal import Journal

    key = read_key(options.key_file) if options.key_file else None
    log = printer_for(options)
    log(f"server   {await served(options.server, key)}")
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: stopped.done() or stopped.set_result(0))
    count = 0
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(options.out / "open"))
        journal.forget(_recorded_sessions(options.out / ROLLOUT_FOLDER, journal))
        servers = await stack.enter_async_context(Servers(options.server, model="", key=key))
        writer = stack.enter_context(GroupWriter(options.out / ROLLOUT_FOLDER))

        async def finished(record: dict[str, Any]) -> None:
            nonlocal count
            await asyncio.to_thread(writer.write, [record])
            count += 1

        proxy_options = {
            "key": _proxy_key(options.out / "key"),
            "upstream_key": key,
            "model": options.model,
            "port": options.port,
        }
        proxy_options |= {"journal": journal, "idle_s": options.session_timeout, "logprob_kind": options.kind}
        try:
            proxy = await Proxy(servers, finished=finished, **proxy_options).__aenter__()
        except OSError as error:
            raise TracegradError(f"TG-CLI-023: port {options.port}: {error.strerror}. Give another --port.") from error
        try:
            if open_count := len(journal.files):
                log(f"open     {open_count:,} sessions of an earlier proxy continue")
            if options.json:
                print_json({"url": proxy.url, "key_file": str(options.out / "key"), "open": open_count}, line=True)
            log(
                f"export OPENAI_BASE_URL={proxy.url}/s/NAME/v1 OPENAI_API_KEY=$(cat {options.out / 'key'})",
                "         choose a NAME for each trajectory, or send the header x-tracegrad-session: NAME",
                f'         to end a trajectory:  POST {proxy.url}/s/NAME/reward  {{"reward": 1.0, "group": "task 7"}}',
            )
            await stopped
        finally:
            await proxy.__aexit__()
    file = writer.folder / writer.name
    if options.json:
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
    return {str(trace.metadata.get("session")) for _, traces in follower.iter_new() for trace in traces}


def _proxy_key(path: Path) -> str:
    """Return the key that programs must present. It is created on first use, in a file only its owner can read."""
    if not path.exists():
        with files.create(path, 0o600) as file:
            file.write(secrets.token_urlsafe(24).encode() + b"\n")
    return read_key(path)
