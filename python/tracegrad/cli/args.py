"""Parse the arguments that verbs share, and print to the terminal or as JSON."""

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tracegrad import config, recipes
from tracegrad.data.codes import SERVERS
from tracegrad.errors import ArgumentError, redacted, shown
from tracegrad.storage.remote import place_here
from tracegrad.trainer.api import first


def read_key(path: Path) -> str:
    """The token in a file: its first line."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(
            f"{path}: {why}. The servers would refuse every request. Write their token there."
        ) from error
    if not key or "\n" in key or not key.isprintable():
        raise ArgumentError(f"{path}: one line with a token is wanted. The servers would refuse what it holds.")
    return key


_kept: list[TextIO] = []


class OutputFailed(Exception):
    """Standard output takes nothing: `why`."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def put(*lines: str, to: TextIO | None) -> None:
    """Write lines to a standard output, or to what stands for it.

    Raises:
        OutputFailed: it takes nothing, such as a pipe that nobody reads or a full disk.
    """
    try:
        print(*lines, sep="\n", file=to, flush=True)
    except OSError as error:
        nowhere(to)
        raise OutputFailed(error) from error


def nowhere(to: TextIO | None) -> None:
    """Lead a file to nowhere, so that what it still holds raises nothing when it is closed."""
    try:
        place = -1 if to is None else to.fileno()
    except (AttributeError, OSError, ValueError):
        return
    if to is not None and place >= 0:
        with contextlib.suppress(OSError), open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), place)
            to.flush()


def stream() -> TextIO:
    """Where what is told to machines goes."""
    return _kept[-1] if _kept else sys.stdout


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps standard output for `stream()` until its end: what else is printed there goes to standard error.

    Where `sys.stdout` is descriptor 1, so does what C and the processes that are started meanwhile write there.

    >>> with kept():
    ...     print("what a reward function prints")
    ...     print("what a verb tells", file=stream())
    what a verb tells
    """
    own = sys.stdout
    if own is None:  # the process was started with it closed
        yield
        return
    with contextlib.ExitStack() as stack:
        if _is_descriptor_1(own):
            own = stack.enter_context(_turned(own))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        _kept.append(own)
        stack.callback(_kept.pop)
        yield


def _is_descriptor_1(own: TextIO) -> bool:
    try:
        return own.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def _turned(own: TextIO) -> Iterator[TextIO]:
    """Descriptor 1 turned to standard error; gives what still writes where it was."""
    _flush(own)
    with open(os.dup(1), "w", encoding=own.encoding, errors=own.errors) as told:
        if sys.stderr is None:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
        else:
            os.dup2(2, 1)
        try:
            yield told
        finally:
            with contextlib.suppress(OSError):  # standard error may be gone
                _flush(own)
            os.dup2(told.fileno(), 1)


def _flush(own: TextIO) -> None:
    """Writes out what Python and C hold back for descriptor 1, before it becomes another."""
    own.flush()
    ctypes.CDLL(None).fflush(None)


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
            put(message.removesuffix("\n"), to=file)
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
        put(shown(redacted(line)), to=sys.stdout)


def aside(*lines: str) -> None:
    """Prints lines on standard error, where standard output is for machines."""
    for line in lines if first() else ():
        print(shown(redacted(line)), file=sys.stderr, flush=True)


def tell(account: Mapping[str, Any], *, line: bool = False) -> None:
    """Prints one object for machines, over several lines or on one, with null for NaN and infinities."""
    text = json.dumps(_finite(account), indent=None if line else 1, allow_nan=False)
    if first():
        put(*map(shown, redacted(text).split("\n")), to=stream())


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


def add_to(parser: Any) -> None:
    """Adds the flags, and that of an objective alone."""
    parser.add_argument(
        "--objective",
        metavar="NAME",
        help="of tracegrad.objective.presets, or file.py:NAME, module:NAME (default DAPO)",
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help="what a paper fixes: of tracegrad.recipes, or file.py:NAME, module:NAME"
    )
    parser.add_argument(
        "--like", metavar="PEER:FILE", help="a config of trl, verl, skyrl or art, such as trl:config.yaml"
    )


def told_recipe(told: argparse.Namespace) -> recipes.Recipe | None:
    """The recipe that the flags name; None without them.

    Raises:
        ArgumentError: for both flags, and for what is no recipe.
    """
    if told.recipe and told.like:
        raise ArgumentError("--recipe and --like are both told. Each is the whole start of a run. Give one of them.")
    if told.recipe:
        return recipes.find(told.recipe)
    return recipes.like(str(told.like)) if told.like else None


def lines(
    told: argparse.Namespace, recipe: recipes.Recipe, otherwise: Sequence[str], idle: Sequence[str] = ()
) -> list[str]:
    """What the recipe sets, what each option of a config from elsewhere is here, where it differs, and what
    was told otherwise.

    Args:
        idle: options that have no effect here.
    """
    sets = ", ".join(f"{name} = {value}" for name, value in recipe.options if name not in idle)
    left = ", ".join(f"{name} = {value}" for name, value in recipe.options if name in idle)
    spelled = [f"         {name}: {here}" for name, here in recipe.told]
    spelled += [f"differs  on purpose, {name}: {words}" for name, words in recipe.differs]
    without = [f"         left out, as it is of training from a file: {left}"] if left else []
    wins = [f"told     otherwise, which wins: {', '.join(otherwise)}"] if otherwise else []
    return [f"recipe   {told.recipe or told.like}: {sets}", *spelled, *without, *wins]
