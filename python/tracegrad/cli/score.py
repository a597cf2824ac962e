"""`tracegrad score`: recorded traces with rewards from functions or from a judge, written to another file."""

import argparse
import asyncio
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tracegrad import config, data, doctor
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.cli import user_functions
from tracegrad.cli.args import folder_of, inputs_of, place, read_key, say, tell, verb
from tracegrad.data.sources import expand
from tracegrad.data.trace import write
from tracegrad.errors import ArgumentError
from tracegrad.storage import files


def add_to(commands: Any) -> None:
    """Adds the verb."""
    parser = verb(commands, "score", "score recorded traces by functions or by a judge", _score)
    inputs_of(parser)
    parser.add_argument(
        "--out", type=place, required=True, metavar="FILE", help="traces with rewards; .gz, .zst compress"
    )
    parser.add_argument(
        "--reward", action="append", metavar="file.py:name", help="function of whole groups; repeatable"
    )
    parser.add_argument("--weight", action="append", type=float, metavar="F", help="of each function (default 1)")
    parser.add_argument("--text", action="store_true", help="functions are given texts, not messages")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time limit of a call (default 60)")
    parser.add_argument("--judge", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument("--judge-model", metavar="NAME", help="the name that the server knows the judge by")
    parser.add_argument(
        "--rubric", type=Path, metavar="FILE", help="what counts, in words (default: reaching the goal)"
    )
    parser.add_argument(
        "--votes", type=int, default=2, metavar="N", help="orders that each group is shown in (default 2)"
    )
    parser.add_argument("--price", metavar="IN,OUT", help="of a million tokens read and written, for the cost")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's token")
    parser.add_argument("--parallel", type=int, metavar="N", help="groups at once (default 4, of a judge 8)")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="what was scored before (default OUT.scores)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of the model to train, for the command after")
    parser.add_argument("--on-error", choices=("raise", "skip"), help="a bad record: stop, leave it out")
    parser.add_argument("--json", action="store_true", help="the account for machines, one object")


def _score(told: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import rewards

    if idle := [name for name, _ in overrides if not name.startswith(("map.", "data.on_error"))]:
        raise ArgumentError(f"{idle[0]} has no effect on score, which trains nothing. Leave it for train.")
    if bool(told.reward) == bool(told.judge):
        raise ArgumentError("what scores is not told. Give --reward file.py:name, or --judge URL, one of the two.")
    source = told.traces
    if told.model is not None:
        told.model = folder_of(told.model)
        Tokenizer.from_pretrained(told.model)  # what is no model is said before anything is scored
    price = _price(told.price)
    cache = told.cache or told.out.with_name(f"{told.out.name}.scores")
    read = [place.path for place in expand(source)]
    files.check_not_read([told.out], [*read, cache], "--out")
    files.check_not_read([cache], read, "--cache")
    chosen = config.load(overrides=overrides)
    reading = {"map": chosen.map, "on_error": chosen.data.on_error, "progress": data.Bar()}
    functions = user_functions.functions(told.reward, Path.cwd(), "--reward") if told.reward else []
    common = {"cache": cache, "told": _Counter()}
    stream = data.stream(source, batch=rewards.PART, **reading)
    with rewards.Spool(stream) as traces:
        if told.reward:
            more = {"weights": told.weight, "texts": told.text, "seconds": told.seconds, "parallel": told.parallel or 4}
            done = rewards.recorded(traces, functions, **more, **common)
        else:
            done = asyncio.run(_judge(told, traces, common))
        common["told"].end()
        write(done.parts(), told.out)
    none = bool(done.counts) and done.unscored == len(done.source)
    following = "" if none else _following(told.out, told.model)
    if told.json:
        tell({**_account(told, done, price), "next": following})
    else:
        then = (
            f"next     {following}"
            if following
            else "         no trace has a score: mend what failed, and type it again"
        )
        say(*stream.lines(), *_lines(told, done, price, cache), then)
    return 0


def _following(out: Path, model: Path | None) -> str:
    """The command that goes on; with a model the doctor's, which looks at what was written, or the doctor itself."""
    if model is None:
        return shlex.join(["tracegrad", "train", str(out), "--model", "MODEL", "--out", "runs/first"])
    found = doctor.examine(out, model).following
    # What logprobs are of is for the user to say: the doctor tells both ways.
    look = shlex.join(["tracegrad", "doctor", str(out), "--model", str(model)])
    return found if found and "--logprob-kind" not in found else look


async def _judge(told: argparse.Namespace, traces: Any, common: dict[str, Any]) -> Any:
    try:
        from tracegrad.rollout.client import Servers
    except ImportError as error:
        raise ArgumentError(
            f"--judge needs {error.name}. No server can be asked. pip install 'tracegrad[online]'"
        ) from error
    from tracegrad import rewards

    rubric = None
    if told.rubric is not None:
        try:
            rubric = told.rubric.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{told.rubric}: {error}. The judge has no rubric. Correct the path.") from error
    if not told.judge_model:
        raise ArgumentError("--judge-model is missing. The server answers by a model's name. Give the one it serves.")
    key = read_key(told.key_file) if told.key_file else None
    async with Servers([told.judge], model=told.judge_model, key=key, timeout_s=300) as servers:
        more = {"rubric": rubric, "votes": told.votes, "parallel": told.parallel or 8}
        return await rewards.judged(traces, servers.chat, model=told.judge_model, **more, **common)


def _price(told: str | None) -> tuple[float, float] | None:
    if told is None:
        return None
    try:
        read, written = map(float, told.split(","))
    except ValueError:
        raise ArgumentError(
            f"--price is {told!r:.40}. The cost would not be known. Write two numbers: 0.5,1.5"
        ) from None
    return read, written


def _account(told: argparse.Namespace, done: Any, price: tuple[float, float] | None) -> dict[str, Any]:
    account = {
        "file": str(told.out),
        "traces": len(done.source),
        "groups": done.groups,
        "from_cache": done.cached,
        "unscored": done.unscored,
        "failures": dict(done.counts),
        "first_failures": {name: failure.as_dict() for name, failure in done.failures.items()},
    }
    if told.judge:
        agreement = None if done.agreement != done.agreement else round(done.agreement, 4)
        tokens = {"prompt_tokens": done.prompt_tokens, "completion_tokens": done.completion_tokens}
        account |= {**tokens, "cost": None if price is None else done.cost(price), "agreement": agreement}
    return account


def _lines(told: argparse.Namespace, done: Any, price: tuple[float, float] | None, cache: Path) -> list[str]:
    left = f", {done.unscored:,} without a score" if done.unscored else ""
    out = [
        f"scored   {len(done.source):,} traces in {done.groups:,} groups by {', '.join(done.names)}{left}",
        f"         {done.cached:,} groups were known from {cache}",
    ]
    for name, count in done.counts.items():
        first = done.failures.get(name)
        out.append(f"failed   {name}, {count:,} times" + (f"; the first: {first}" if first is not None else ""))
        out += [f"         {line}" for line in first.traceback.splitlines()] if first is not None else []
    if told.judge:
        cost = f", {done.cost(price):.4f} at {told.price} a million" if price else ""
        out.append(f"judge    read {done.prompt_tokens:,} tokens, wrote {done.completion_tokens:,}{cost}")
        if done.agreement == done.agreement:
            out.append(f"         two orders put {done.agreement:.0%} of the pairs alike")
    return [*out, f"written  {told.out}"]


class _Counter:
    """Groups done, as a line that is written anew on a terminal."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1
        self._said = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next and sys.stderr.isatty():
            self._next, self._said = now + 0.2, True
            sys.stderr.write(f"\rscored   {done:,} of {total:,} groups")
            sys.stderr.flush()

    def end(self) -> None:
        """The last word."""
        if self._said:
            sys.stderr.write("\r" + " " * 40 + "\r")
