"""Run `tracegrad score`: score recorded traces with functions or a judge, and write them to another file."""

import argparse
import asyncio
import shlex
import textwrap
from pathlib import Path
from typing import Any

from tracegrad import config, data, doctor
from tracegrad._html import plural
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.cli import user_functions
from tracegrad.cli.args import folder_of, inputs_of, place, print_json, print_lines, read_key, verb
from tracegrad.data.sources import expand
from tracegrad.data.trace import write
from tracegrad.doctor.next_command import RecordTotals
from tracegrad.errors import ArgumentError, escape_terminal
from tracegrad.progress import ProgressPrinter, progress_line
from tracegrad.storage import files


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "score",
        "score recorded traces with your reward functions or an LLM judge",
        _score,
        more="It writes the traces with their rewards to another file. A second run scores only groups that are not in "
        "the cache.",
        examples=(
            "logs/ --reward mine.py:correct --out scored.jsonl --model MODEL",
            "logs/ --judge http://localhost:8000 --judge-model NAME --out scored.jsonl",
        ),
        dotted_names=lambda: [name for name in config.options() if name.startswith(("map.", "data.on_error"))],
    )
    inputs_of(parser)
    parser.add_argument(
        "--out", type=place, required=True, metavar="FILE", help="file for the scored traces; .gz or .zst compresses it"
    )
    parser.add_argument(
        "--reward",
        action="append",
        metavar="file.py:name",
        help="TRL-style reward function, called once per group; repeatable",
    )
    parser.add_argument(
        "--weight",
        action="append",
        type=float,
        metavar="F",
        help="weight of a reward function in the total, one per --reward (default 1)",
    )
    parser.add_argument(
        "--reward-input",
        choices=("messages", "text"),
        default="messages",
        help="pass lists of messages, or text: the contents of all answers joined by blank lines, without tool calls "
        "and reasoning (default messages)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit of one call of a reward function, in seconds (default 60)",
    )
    parser.add_argument("--judge", metavar="URL", help="score with an LLM judge on this OpenAI-compatible server")
    parser.add_argument("--judge-model", metavar="NAME", help="model name to request from the judge's server")
    parser.add_argument(
        "--rubric", type=Path, metavar="FILE", help="text file with the judge's criteria (default: reaching the goal)"
    )
    parser.add_argument(
        "--votes",
        type=int,
        default=2,
        metavar="N",
        help="times that the judge sees each group, each time in another order (default 2)",
    )
    parser.add_argument(
        "--price", metavar="IN,OUT", help="USD per million input,output tokens, to print the judge's cost"
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="file with the access token of the judge's server"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="groups in progress at once (default 4; 8 with a judge)"
    )
    parser.add_argument("--cache", type=Path, metavar="FILE", help="cache of earlier scores (default OUT.scores)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="model that you will train: doctor checks the scored traces with it to print the next command",
    )
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), help="for a record that cannot be read: stop (default) or skip it"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def _score(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad import rewards

    if bool(options.reward) == bool(options.judge):
        raise ArgumentError("TG-CLI-030: give either --reward file.py:name or --judge URL, and not both.")
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
    functions = user_functions.functions(options.reward, Path.cwd(), "--reward") if options.reward else []
    bar, printer = data.ProgressBar(), ProgressPrinter()

    def report(done: int, total: int) -> None:
        printer.tick(
            lambda seconds: progress_line(
                "scoring", [f"{done:,} of {plural(total, 'group')}"], seconds=seconds, done=done, total=total
            )
        )

    shared = {"cache": cache, "on_progress": report}
    stream = data.stream(
        source,
        batch=rewards.TRACES_PER_BATCH,
        map=run_config.map,
        on_error=run_config.data.on_error,
        progress=bar,
    )
    with rewards.SpillFile(stream) as traces:
        if options.reward:
            result = rewards.score_traces(
                traces,
                functions,
                weights=options.weight,
                reward_input=options.reward_input == "text",
                timeout_s=options.timeout,
                concurrency=options.concurrency or 4,
                **shared,
            )
        else:
            result = asyncio.run(_judge(options, traces, shared))
        printer.clear()
        totals = RecordTotals()
        write(totals.counting(result.parts()), options.out)
    all_failed = bool(result.counts) and result.unscored_traces == len(result.source)
    next_command, reason = (None, None) if all_failed else _next_command(options.out, options.model, totals)
    if options.json:
        print_json({**_account(options, result, price), "next": next_command, "reason": reason})
    else:
        last_lines = [f"next     {next_command}", *([f"         because {reason}"] if reason else [])]
        if next_command is None:
            last_lines = ["         no trace has a score: fix the failures above, then run the command again"]
        print_lines(*stream.lines(), *_lines(options, result, price, cache), *last_lines)
    return 0


def _next_command(out: Path, model: Path | None, totals: RecordTotals) -> tuple[str, str | None]:
    """Return the next command, and the reason if it is `doctor`.

    With a model, the doctor examines the output and proposes the command.
    """
    reason = totals.reason()
    if model is None:
        proposed = totals.train_command(str(out), "MODEL")
    else:
        diagnosis = doctor.diagnose(out, model)
        proposed = diagnosis.next_command
        wrong = [finding.check.title for finding in diagnosis.findings if finding.severity == doctor.Severity.WRONG]
        guesses = [line.removeprefix("guess    ") for line in diagnosis.suggestions]
        reason = reason or "; ".join(wrong or guesses) or "no token of it can be trained"
    # The user must decide --logprob-kind. The doctor explains both choices.
    if proposed and "--logprob-kind" not in proposed:
        return proposed, reason if proposed.startswith("tracegrad doctor ") else None
    return shlex.join(["tracegrad", "doctor", str(out), "--model", str(model or "MODEL")]), reason


async def _judge(options: argparse.Namespace, traces: Any, shared: dict[str, Any]) -> Any:
    from tracegrad import rewards
    from tracegrad.rollout.client import Servers

    rubric = None
    if options.rubric is not None:
        try:
            rubric = options.rubric.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"TG-CLI-032: --rubric {options.rubric} cannot be read: {error}. Correct the path."
            ) from error
    if not options.judge_model:
        raise ArgumentError(
            "TG-CLI-033: --judge-model is missing. Give the name of a model that the judge's server serves."
        )
    key = read_key(options.key_file) if options.key_file else None
    async with Servers([options.judge], model=options.judge_model, key=key, timeout_s=300) as servers:
        return await rewards.judge_traces(
            traces,
            servers.chat,
            model=options.judge_model,
            rubric=rubric,
            votes=options.votes,
            concurrency=options.concurrency or 8,
            **shared,
        )


def _price(value: str | None) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        read, written = map(float, value.split(","))
    except ValueError:
        raise ArgumentError(
            f"TG-CLI-034: --price is {value!r:.40}. It must be two numbers with a comma between them, such as 0.5,1.5."
        ) from None
    return read, written


def _account(options: argparse.Namespace, result: Any, price: tuple[float, float] | None) -> dict[str, Any]:
    account = {
        "file": str(options.out),
        "traces": len(result.source),
        "groups": result.groups,
        "from_cache": result.cached_groups,
        "unscored": result.unscored_traces,
        "columns": list(result.columns),
        "failures": dict(result.counts),
        "first_failures": {name: failure.as_dict() for name, failure in result.failures.items()},
    }
    if options.judge:
        agreement = None if result.agreement != result.agreement else round(result.agreement, 4)
        tokens = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens}
        account |= {**tokens, "cost": None if price is None else result.cost(price), "agreement": agreement}
    return account


def _lines(options: argparse.Namespace, result: Any, price: tuple[float, float] | None, cache: Path) -> list[str]:
    unscored = f", {result.unscored_traces:,} without a score" if result.unscored_traces else ""
    counts = f"{plural(len(result.source), 'trace')} in {plural(result.groups, 'group')}"
    out = [
        f"scored   {counts} by {', '.join(result.names)}{unscored}",
        f"         {plural(result.cached_groups, 'group')} read from the cache {cache}",
    ]
    if result.columns:
        out.append(f"columns  {escape_terminal(textwrap.shorten(', '.join(result.columns), 110, placeholder=' ...'))}")
    for name, count in result.counts.items():
        failure = result.failures.get(name)
        out.append(
            f"failed   {name}, {plural(count, 'time')}" + (f"; the first: {failure}" if failure is not None else "")
        )
        out += [f"         {line}" for line in (failure.traceback or "").splitlines()] if failure is not None else []
    if options.judge:
        cost = f", {result.cost(price):.4f} USD at {options.price} per million" if price else ""
        out.append(f"judge    {result.prompt_tokens:,} input tokens, {result.completion_tokens:,} output tokens{cost}")
        if result.agreement == result.agreement:
            out.append(f"         two orders agree on {result.agreement:.0%} of the pairs")
    return [*out, f"written  {options.out}"]
