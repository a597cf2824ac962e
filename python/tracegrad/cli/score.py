"""Run `tracegrad score`: score recorded traces with functions or a judge, and write them to another file."""

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
from tracegrad.cli.args import folder_of, inputs_of, place, print_json, print_lines, read_key, verb
from tracegrad.data.sources import expand
from tracegrad.data.trace import write
from tracegrad.errors import ArgumentError
from tracegrad.storage import files


def add_to(commands: Any) -> None:
    """Add the verb."""
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


def _score(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import rewards

    if idle := [name for name, _ in overrides if not name.startswith(("map.", "data.on_error"))]:
        raise ArgumentError(f"TG-CLI-029: {idle[0]} has no effect on score, which trains nothing. Leave it for train.")
    if bool(options.reward) == bool(options.judge):
        raise ArgumentError(
            "TG-CLI-030: what scores is not told. Give --reward file.py:name, or --judge URL, one of the two."
        )
    source = options.traces
    if options.model is not None:
        options.model = folder_of(options.model)
        Tokenizer.from_pretrained(options.model)  # Fail before scoring if it is not a model.
    price = _price(options.price)
    cache = options.cache or options.out.with_name(f"{options.out.name}.scores")
    input_paths = [place.path for place in expand(source)]
    files.check_not_read([options.out], [*input_paths, cache], "--out")
    files.check_not_read([cache], input_paths, "--cache")
    run_config = config.load(overrides=overrides)
    reading = {"map": run_config.map, "on_error": run_config.data.on_error, "progress": data.ProgressBar()}
    functions = user_functions.functions(options.reward, Path.cwd(), "--reward") if options.reward else []
    shared = {"cache": cache, "told": _Counter()}
    stream = data.stream(source, batch=rewards.TRACES_PER_BATCH, **reading)
    with rewards.SpillFile(stream) as traces:
        if options.reward:
            settings = {
                "weights": options.weight,
                "texts": options.text,
                "seconds": options.seconds,
                "parallel": options.parallel or 4,
            }
            result = rewards.score_traces(traces, functions, **settings, **shared)
        else:
            result = asyncio.run(_judge(options, traces, shared))
        shared["told"].end()
        write(result.parts(), options.out)
    all_failed = bool(result.counts) and result.unscored == len(result.source)
    next_command = "" if all_failed else _next_command(options.out, options.model)
    if options.json:
        print_json({**_account(options, result, price), "next": next_command})
    else:
        last_line = (
            f"next     {next_command}"
            if next_command
            else "         no trace has a score: mend what failed, and type it again"
        )
        print_lines(*stream.lines(), *_lines(options, result, price, cache), last_line)
    return 0


def _next_command(out: Path, model: Path | None) -> str:
    """Return the next command. With a model, the doctor examines the output and proposes it."""
    if model is None:
        return shlex.join(["tracegrad", "train", str(out), "--model", "MODEL", "--out", "runs/first"])
    proposed = doctor.diagnose(out, model).following
    # The user must decide --logprob-kind. The doctor explains both choices.
    doctor_command = shlex.join(["tracegrad", "doctor", str(out), "--model", str(model)])
    return proposed if proposed and "--logprob-kind" not in proposed else doctor_command


async def _judge(options: argparse.Namespace, traces: Any, shared: dict[str, Any]) -> Any:
    try:
        from tracegrad.rollout.client import Servers
    except ImportError as error:
        raise ArgumentError(
            f"TG-CLI-031: --judge needs {error.name}. No server can be asked. pip install 'tracegrad[online]'"
        ) from error
    from tracegrad import rewards

    rubric = None
    if options.rubric is not None:
        try:
            rubric = options.rubric.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"TG-CLI-032: {options.rubric}: {error}. The judge has no rubric. Correct the path."
            ) from error
    if not options.judge_model:
        raise ArgumentError(
            "TG-CLI-033: --judge-model is missing. The server answers by a model's name. Give the one it serves."
        )
    key = read_key(options.key_file) if options.key_file else None
    async with Servers([options.judge], model=options.judge_model, key=key, timeout_s=300) as servers:
        settings = {"rubric": rubric, "votes": options.votes, "parallel": options.parallel or 8}
        return await rewards.judge_traces(traces, servers.chat, model=options.judge_model, **settings, **shared)


def _price(value: str | None) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        read, written = map(float, value.split(","))
    except ValueError:
        raise ArgumentError(
            f"TG-CLI-034: --price is {value!r:.40}. The cost would not be known. Write two numbers: 0.5,1.5"
        ) from None
    return read, written


def _account(options: argparse.Namespace, result: Any, price: tuple[float, float] | None) -> dict[str, Any]:
    account = {
        "file": str(options.out),
        "traces": len(result.source),
        "groups": result.groups,
        "from_cache": result.cached,
        "unscored": result.unscored,
        "failures": dict(result.counts),
        "first_failures": {name: failure.as_dict() for name, failure in result.failures.items()},
    }
    if options.judge:
        agreement = None if result.agreement != result.agreement else round(result.agreement, 4)
        tokens = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens}
        account |= {**tokens, "cost": None if price is None else result.cost(price), "agreement": agreement}
    return account


def _lines(options: argparse.Namespace, result: Any, price: tuple[float, float] | None, cache: Path) -> list[str]:
    unscored = f", {result.unscored:,} without a score" if result.unscored else ""
    out = [
        f"scored   {len(result.source):,} traces in {result.groups:,} groups by {', '.join(result.names)}{unscored}",
        f"         {result.cached:,} groups were known from {cache}",
    ]
    for name, count in result.counts.items():
        failure = result.failures.get(name)
        out.append(f"failed   {name}, {count:,} times" + (f"; the first: {failure}" if failure is not None else ""))
        out += [f"         {line}" for line in failure.traceback.splitlines()] if failure is not None else []
    if options.judge:
        cost = f", {result.cost(price):.4f} at {options.price} a million" if price else ""
        out.append(f"judge    read {result.prompt_tokens:,} tokens, wrote {result.completion_tokens:,}{cost}")
        if result.agreement == result.agreement:
            out.append(f"         two orders put {result.agreement:.0%} of the pairs alike")
    return [*out, f"written  {options.out}"]


class _Counter:
    """The number of scored groups, shown on one line of a terminal that is overwritten."""

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
        """Erase the line."""
        if self._said:
            sys.stderr.write("\r" + " " * 40 + "\r")
