"""`tracegrad record` and `tracegrad proxy`: trajectories into a folder, and nothing trained.

`record` plays tasks with what a file names; `proxy` records whatever program talks to it.
"""

import argparse
import asyncio
import math
import secrets
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tracegrad.cli.args import Parser, for_machines, place, read_key, say, speaker, tell, verb
from tracegrad.cli.online import WARNING, needs, served
from tracegrad.config.dotted_keys import changed
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.storage import files

CLOCK_S = 2.0
"""By which times of files may be off."""


def add_to(commands: Any) -> None:
    """Adds the verbs."""
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
    for_machines(parser)


def _record(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    needs("recording")
    from tracegrad import online
    from tracegrad.cli import user_functions

    here = Path.cwd()
    if idle := [name for name, _ in overrides if name.partition(".")[0] != "play"]:
        raise ArgumentError(f"{idle[0]} has no effect on record, which trains nothing. Leave it for tracegrad online.")
    how: dict[str, Any] = {}
    if told.contract is not None:
        found = user_functions.contract(told.contract, here, "")
        how["environment" if isinstance(found, type) else "agent"] = found
    if told.tools:
        how["tools"] = user_functions.tools(told.tools[0] if len(told.tools) == 1 else told.tools, here)
    if told.rewards:
        how["rewards"] = user_functions.functions(told.rewards, here, "rewards")
    samples = [] if told.samples is None else [("play.samples", told.samples)]
    found = online.record(
        user_functions.tasks(told.tasks, here),
        **how,
        play=changed({"play": online.Play()}, [*overrides, *samples])["play"],
        servers=told.server,
        key=read_key(told.key_file) if told.key_file else None,
        logprob_kind=told.kind,
        groups=told.groups,
        parallel=told.parallel,
        out=told.out,
        resume=told.resume,
        say=speaker(told),
    )
    if told.json:
        counts = {"trajectories": found.trajectories, "groups": found.groups, "failed": found.failed}
        reward = None if math.isnan(found.reward) else found.reward
        counts |= {"without_reward": found.without_reward, "before": found.before, "reward": reward}
        failures = {name: vars(each) for name, each in found.failures.items()}
        tell({**counts, "failures": failures, "file": found.file and str(found.file)})
        return 0
    failures = found.failures.items()
    mean = "no reward is known" if math.isnan(found.reward) else f"mean reward {found.reward:.3f}"
    without = f"; {found.without_reward:,} trajectories without a reward" if found.without_reward else ""
    before = f", beside {found.before:,} that were there" if found.before else ""
    say(
        f"recorded {found.trajectories:,} trajectories in {found.groups:,} groups{before}; {found.failed:,} failed",
        *(f"failed   {name}, {each.count:,} trajectories; the first: {each.first}" for name, each in failures),
        f"         {mean}{without}",
        *((f"         {found.file}", f"next     tracegrad doctor {found.file} --model DIR") if found.file else ()),
    )
    return 0


def _proxy(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    needs("recording")
    if overrides:
        raise ArgumentError(f"{overrides[0][0]} has no effect on proxy: a program says itself how it samples.")
    return asyncio.run(_recording(told))


async def _recording(told: argparse.Namespace) -> int:
    """Serves until a signal comes; what is finished is on the disk."""
    from tracegrad.online.buffer import FOLDER, Writer
    from tracegrad.rollout.client import Servers
    from tracegrad.rollout.proxy import Proxy
    from tracegrad.rollout.proxy_journal import Journal

    key = read_key(told.key_file) if told.key_file else None
    speak = speaker(told)
    speak(f"server   {await served(told.server, key)}")
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: ended.done() or ended.set_result(0))
    count = 0
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(told.out / "open"))
        journal.forget(_recorded(told.out / FOLDER, journal))
        servers = await stack.enter_async_context(Servers(told.server, model="", key=key))
        writer = stack.enter_context(Writer(told.out / FOLDER))

        async def finished(record: dict[str, Any]) -> None:
            nonlocal count
            await asyncio.to_thread(writer.write, [record])
            count += 1

        options = {"key": _own_key(told.out / "key"), "upstream_key": key, "model": told.model, "port": told.port}
        options |= {"journal": journal, "idle_s": told.idle, "logprob_kind": told.kind}
        try:
            proxy = await Proxy(servers, finished=finished, **options).__aenter__()
        except OSError as error:
            raise TracegradError(
                f"port {told.port}: {error.strerror}. Nothing can be recorded. Give another --port."
            ) from error
        try:
            if left := len(journal.files):
                speak(f"open     {left:,} sessions that the proxy before this one left open")
            if told.json:
                tell({"url": proxy.url, "key_file": str(told.out / "key"), "open": left}, line=True)
            speak(
                f"export OPENAI_BASE_URL={proxy.url}/s/NAME/v1 OPENAI_API_KEY=$(cat {told.out / 'key'})",
                "         NAME is yours to choose, one for each trajectory; or send x-tracegrad-session: NAME",
                f"         a trajectory ends with  POST {proxy.url}/s/NAME/reward  "
                '{"reward": 1.0, "group": "task 7"}',
            )
            await ended
        finally:
            await proxy.__aexit__()
    file = writer.folder / writer.name
    if told.json:
        tell({"trajectories": count, "file": str(file)}, line=True)
    else:
        say(f"recorded {count:,} trajectories; {file}")
    return 0


def _recorded(folder: Path, journal: Any) -> set[str]:
    """Sessions of the journal whose records are whole in the folder: a proxy was killed just after it wrote them."""
    from tracegrad.online.buffer import Follower, Place

    left = [path.stat().st_mtime for path in journal.files]
    found = Follower(folder)
    old = [path for path in folder.glob("*.jsonl.zst") if path.stat().st_mtime < min(left, default=math.inf) - CLOCK_S]
    found.skip(Place(path.name, path.stat().st_size, 0) for path in old)
    return {str(trace.metadata.get("session")) for _, traces in found.each() for trace in traces}


def _own_key(path: Path) -> str:
    """What programs show, kept in a file that only its owner reads."""
    if not path.exists():
        with files.create(path, 0o600) as file:
            file.write(secrets.token_urlsafe(24).encode() + b"\n")
    return read_key(path)
