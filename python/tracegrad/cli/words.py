"""What a user writes and reads: flags and dotted options, and lines on the terminal of the process that speaks.

Nothing is done here; the files of the verbs call it.
"""

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tracegrad import config
from tracegrad.addresses import place_here
from tracegrad.cli import output
from tracegrad.codes import SERVERS
from tracegrad.errors import ArgumentError, redacted, shown
from tracegrad.training import first

SHORT = {
    "seed": "train.seed",
    "epochs": "train.epochs",
    "stop_below_ess": "stop.below_ess",
    "log_to": "train.log_to",
    "objective": "objective",
    "on_error": "data.on_error",
    "logprob_kind": "data.logprob_kind",
    "sampling_defaults": "data.sampling_defaults",
    "accept_truncated_sampling": "data.accept_truncated_sampling",
    "server_profile": "data.server_profile",
    "text_only": "data.text_only",
    "lenient": "data.lenient",
}


MEANT = {
    "optimizer.lr": ("lr", "learning_rate", "peak_lr", "step_size"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.grad_clip": ("grad_clip", "max_grad_norm", "clip_grad_norm", "gradient_clipping"),
    "pack.step_groups": ("batch_size", "bs", "train_batch_size", "per_device_train_batch_size", "groups_per_step"),
    "pack.token_budget": ("max_length", "max_seq_length", "max_seq_len", "seq_len", "max_tokens", "context_length"),
    "schedule.warmup_steps": ("warmup", "warmup_steps"),
    "schedule.name": ("scheduler", "lr_scheduler_type", "lr_schedule"),
    "train.lora_rank": ("lora", "lora_r", "lora_rank", "rank"),
    "train.dtype": ("dtype", "bf16", "fp16", "precision"),
    "train.device": ("device", "gpu"),
    "checkpoint.every": ("save_steps", "save_every", "checkpoint_every"),
    "advantage.baseline": ("baseline", "advantage"),
    "map.reward": ("reward", "reward_key", "reward_field", "rewards"),
    "map.group": ("group", "group_key", "prompt_id", "group_by"),
    "map.session": ("session", "session_key", "thread", "conversation"),
    "epochs": ("num_epochs", "num_train_epochs", "n_epochs", "epoch"),
    "objective": ("loss", "loss_type", "algorithm", "algo", "method", "preset"),
    "model": ("model_path", "model_name", "model_name_or_path", "base_model", "checkpoint"),
    "out": ("output", "output_dir", "out_dir", "save_dir", "dir"),
    "resume": ("continue", "resume_from_checkpoint"),
}
"""What others call a flag, by what it is called here."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """The flag that is meant by a name that others use, if there is such a flag here.

    >>> meant("--learning-rate", ["optimizer.lr"]), meant("--colour", ["optimizer.lr"])
    ('--optimizer.lr', None)
    """
    word, known = name.lstrip("-").replace("-", "_").lower(), set(known)
    return next((f"--{flag}" for flag, names in MEANT.items() if word in names and flag in known), None)


_MOST_MESSAGE = 2000  # characters: a wrong value is quoted, and a value may be a whole file


class Parser(argparse.ArgumentParser):
    """argparse, whose errors name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong and "COMMAND" in message:
            names = re.findall(r"[a-z]+", wrong[2])
            message = f"{wrong[1]} is no command. {config.nearest(wrong[1], names)}"
        self.exit(2, f"tracegrad: error: {shown(message)[:_MOST_MESSAGE]}\nSee {self.prog} --help.\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version; argparse says nothing of an output that takes nothing."""
        if message and file is not None and file is sys.stdout:
            output.put(message.removesuffix("\n"), to=file)
        else:
            super()._print_message(message, file)


def verb(commands: Any, name: str, text: str, run: Any, more: str = "") -> Parser:
    """A verb and what it does, with a sentence more in its own help."""
    described = " ".join(filter(None, (f"{text[0].upper()}{text[1:]}.", more)))
    parser: Parser = commands.add_parser(name, help=text, description=described, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--no-cache", action="store_true", help="keep nothing of the tokenizer, take nothing kept")
    return parser


def command(commands: Any, name: str, text: str, run: Any, out: Callable[[str], Any] = Path) -> Parser:
    """A verb over traces with a model and a place for what comes of them, which `out` makes of what is typed."""
    parser = verb(commands, name, text, run)
    inputs_of(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of model and tokenizer")
    parser.add_argument("--out", type=out, required=True, metavar="DIR", help="where results go")
    data = parser.add_argument_group("reading and aligning")
    choices = ("raise", "skip", "quarantine")
    data.add_argument("--on-error", choices=choices, help="a bad record: stop, leave it out, write it aside")
    data.add_argument("--logprob-kind", choices=("raw", "processed", "unknown"), help="what the logprobs are of")
    defaults = "options that requests leave out: off, or as generation_config.json says"
    data.add_argument("--sampling-defaults", choices=("neutral", "model"), help=defaults)
    data.add_argument("--server-profile", choices=SERVERS, help="which server rendered prompts that are not recorded")
    data.add_argument("--text-only", action="store_const", const=True, help="train text that has no logprobs")
    data.add_argument("--lenient", action="store_const", const=True, help="go on, untrained, after an unknown id")
    return parser


def inputs_of(parser: argparse.ArgumentParser) -> None:
    """Adds what is read: `traces`, one or several."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACES",
        help="files, folders, patterns or addresses (s3://...) of JSONL, JSON, Parquet or Arrow, plain, .gz or .zst; "
        "- for standard input. Where the records hold reward, group or session: --map.reward PATH and so on",
    )


def place(name: str) -> Path:
    """An `--out` that must be a path, for argparse."""
    try:
        return place_here(name)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def joined(arguments: list[str]) -> list[str]:
    """`--a.b value` as `--a.b=value`, so that the value is not taken for an argument that has no flag.

    >>> joined(["record", "--play.turns", "3", "a.py:b", "--out", "o"])
    ['record', '--play.turns=3', 'a.py:b', '--out', 'o']
    """
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        alone = word.startswith("--") and "." in word and "=" not in word
        value = next(words, None) if alone else None
        found.append(word if value is None else f"{word}={value}")
    return found


def dotted(rest: list[str], parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Names and values of `--a.b=value`."""
    found: list[tuple[str, str]] = []
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            flags = [flag for action in parser._actions for flag in action.option_strings if "." not in flag]
            same = meant(name, [*(flag.lstrip("-") for flag in flags), *config.options()])
            cure = config.nearest(f"--{name}", [*flags, *(f"--{option}" for option in config.options())])
            cure = f"Did you mean {same}?" if same else cure
            parser.error(f"{word} is no option here. {cure}")
        if not equals:
            parser.error(f"{word} has no value. Write {word} VALUE.")
        found.append((name, value))
    return found


def go_on(stopped: str, arguments: list[str], flag: str = "--resume") -> list[str]:
    """How to go on with what a signal has stopped; nothing where it was something else.

    >>> go_on("signal", ["online", "run.toml"]), go_on("done", ["online", "run.toml"])
    (['go on    tracegrad online run.toml --resume'], [])
    """
    if stopped != "signal":
        return []
    again = arguments if flag in arguments or not flag else [*arguments, flag]
    return [f"go on    tracegrad {shlex.join(again)}"]


AS_FLAGS = {
    "resume=True": "--resume",
    "tasks is None": "--trainer-only is given",
    "Start train with tasks=None and this folder as out": "Start tracegrad online with --trainer-only and this --out",
    "give another out.": "give another --out.",
    "Give another out.": "Give another --out.",
    "Pass servers=, or python=, the": "Give --server, or --python, the",
    "pass python=, the": "give --python, the",
    "python has no effect": "--python has no effect",
    "servers='in-process'": 'servers = ["in-process"]',
    "Look at engine=": "Look at [engine]",
    'on_error="skip"': "--on-error skip",
    ", or name another place with quarantine=": ", or leave bad records out with --on-error skip",
    "Pass quarantine=PREFIX": "Write it to a file and name that, or leave bad records out with --on-error skip",
    "bounded by max_record_bytes, ": "bounded by ",
    "Raise max_record_bytes to as much, or decompress it first": "Decompress it first",
    "Split it, or raise max_record_bytes": "Split it",
    "but token_budget is": "but --pack.token_budget is",
    "Raise token_budget to": "Raise --pack.token_budget to",
    "or pass too_long='drop'": "or give --pack.too_long drop",
    "too_long is 'truncate' with": "--pack.too_long is truncate with",
    "Pass too_long='drop' or 'refuse'": "Give --pack.too_long drop or refuse",
    "Pack with share_prefixes=False; in a run, leave out pack.share_prefixes": "Leave out --pack.share_prefixes",
    "load the model with attn_implementation='sdpa'; in a run, set attention.implementation sdpa": (
        "give --attention.implementation sdpa"
    ),
    "Record it, or pass missing='mask' or missing='neutral'": (
        'Record it, or name an objective with missing "mask" or "neutral" (--objective)'
    ),
}
"""Arguments of Python as errors of the package name them, and what they are on the command line."""


def as_flags(message: str) -> str:
    """Return an error's message with the flags of the command line where it names arguments of Python.

    What a message quotes of users' own code, from a traceback on, stays as it is.

    >>> as_flags("out holds a run. Go on with resume=True, or give another out.")
    'out holds a run. Go on with --resume, or give another --out.'
    """
    own, mark, traceback = message.partition("Traceback (most recent call last)")
    for argument, flag in AS_FLAGS.items():
        own = own.replace(argument, flag)
    return own + mark + traceback


def say(*lines: str) -> None:
    """Prints lines, where this process is the one that speaks."""
    for line in lines if first() else ():
        output.put(shown(redacted(line)), to=sys.stdout)


def aside(*lines: str) -> None:
    """Prints lines on standard error, where standard output is for machines."""
    for line in lines if first() else ():
        print(shown(redacted(line)), file=sys.stderr, flush=True)


def tell(account: Mapping[str, Any], *, line: bool = False) -> None:
    """Prints one object for machines, over several lines or on one, with null for NaN and infinities."""
    text = json.dumps(_finite(account), indent=None if line else 1, allow_nan=False)
    if first():
        output.put(*map(shown, redacted(text).split("\n")), to=output.stream())


def _finite(value: Any) -> Any:
    """As JSON has it, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def for_machines(parser: argparse._ActionsContainer) -> None:
    """Adds --json."""
    text = "one object for machines at the end; what is told meanwhile goes to standard error"
    parser.add_argument("--json", action="store_true", help=text)


def speaker(told: argparse.Namespace) -> Callable[..., None]:
    """Where lines go."""
    return aside if told.json else say


def folder_of(model: Path) -> Path:
    """The folder of a model: the path itself, or what a Hub id names, brought here by huggingface_hub."""
    name = str(model)
    if model.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return model
    lacks = f"--model {name}: there is no such folder"
    if "/" not in name:
        return model
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ArgumentError(
            f"{lacks}, and huggingface_hub is not installed. A Hub id cannot be looked up. pip install "
            "'tracegrad[cloud]', or give a folder."
        ) from None
    try:
        return Path(snapshot_download(name))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        raise ArgumentError(
            f"{lacks}, and the Hub does not give it ({why}). Without a tokenizer nothing is read. Give a folder, or "
            "run huggingface-cli download where there is a network."
        ) from error
