"""Parse the arguments that verbs share, and print to the terminal or as JSON."""

import argparse
import contextlib
import ctypes
import difflib
import json
import math
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tracegrad import config, recipes
from tracegrad.data.codes import SERVERS
from tracegrad.errors import CODE, ArgumentError, ExitCode, escape_terminal, redact
from tracegrad.online.options import OnlineConfig, RolloutConfig
from tracegrad.recipes.import_config import NO_EFFECT
from tracegrad.storage.remote import require_local_path
from tracegrad.trainer.api import is_first_rank


def read_key(path: Path) -> str:
    """Return the access token in a file with one line.

    Raises:
        ArgumentError: if the file cannot be read or does not have exactly one printable line.
    """
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ArgumentError(
            f"TG-CLI-001: {path}: {reason}. The servers would refuse every request. Write their access token "
            "to this file."
        ) from error
    if not key or "\n" in key or not key.isprintable():
        raise ArgumentError(
            f"TG-CLI-002: {path}: the file must have exactly one printable line, the access token. The servers would "
            "refuse its content."
        )
    return key


_reserved: list[TextIO] = []
_failed: dict[int, OSError] = {}
"""Errors of streams that could not be written, by the id of the stream. Such a stream writes to /dev/null."""


class OutputFailed(Exception):
    """Standard output cannot be written. `why` has the reason."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def put(*lines: str, to: TextIO | None) -> None:
    """Write lines to a standard stream or its replacement, and flush it.

    Raises:
        OutputFailed: if it cannot be written, such as a closed pipe or a full disk.
    """
    try:
        if id(to) in _failed:  # in another thread
            raise _failed.pop(id(to))
        print(*lines, sep="\n", file=to, flush=True)
    except OSError as error:
        redirect_to_devnull(to)
        if threading.current_thread() is not threading.main_thread():
            _failed[id(to)] = error
        raise OutputFailed(error) from error


def redirect_to_devnull(to: TextIO | None) -> None:
    """Redirect a file to /dev/null, so that flushing its buffer at exit cannot raise."""
    try:
        descriptor = -1 if to is None else to.fileno()
    except (AttributeError, OSError, ValueError):
        return
    if to is not None and descriptor >= 0:
        with contextlib.suppress(OSError), open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), descriptor)
            to.flush()


def stream() -> TextIO:
    """Return the stream for machine-readable output."""
    return _reserved[-1] if _reserved else sys.stdout


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Reserve standard output for `stream()` until the block ends. Other output to it goes to standard error.

    If `sys.stdout` is descriptor 1, this includes output of C code and of processes started inside the block.

    >>> with reserve_stdout():
    ...     print("output of a reward function")
    ...     print("the result of a verb", file=stream())
    the result of a verb
    """
    output = sys.stdout
    if output is None:  # The process was started with standard output closed.
        yield
        return
    with contextlib.ExitStack() as stack:
        if _is_descriptor_1(output):
            output = stack.enter_context(_redirected(output))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        _reserved.append(output)
        stack.callback(_reserved.pop)
        yield


def _is_descriptor_1(output: TextIO) -> bool:
    try:
        return output.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def _redirected(output: TextIO) -> Iterator[TextIO]:
    """Redirect descriptor 1 to standard error, and yield a file that still writes to the old target."""
    _flush(output)
    with open(os.dup(1), "w", encoding=output.encoding, errors=output.errors) as original:
        if sys.stderr is None:
            with open(os.devnull, "w") as devnull:
                os.dup2(devnull.fileno(), 1)
        else:
            os.dup2(2, 1)
        try:
            yield original
        finally:
            with contextlib.suppress(OSError):  # Standard error may be closed.
                _flush(output)
            os.dup2(original.fileno(), 1)


def _flush(output: TextIO) -> None:
    """Flush the buffers of Python and C for descriptor 1 before it is redirected."""
    output.flush()
    ctypes.CDLL(None).fflush(None)


SHORT = {
    "seed": "train.seed",
    "epochs": "train.epochs",
    "min_ope_ess": "stop.min_ope_ess",
    "report_to": "train.report_to",
    "objective": "objective",
    "on_error": "data.on_error",
    "logprob_kind": "data.logprob_kind",
    "sampling_defaults": "data.sampling_defaults",
    "accept_truncated_sampling": "data.accept_truncated_sampling",
    "server_profile": "data.server_profile",
    "text_only": "data.text_only",
    "allow_unknown_ids": "data.allow_unknown_ids",
}


MEANT = {
    "optimizer.lr": ("lr", "learning_rate", "peak_lr", "step_size"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.grad_clip": ("grad_clip", "max_grad_norm", "clip_grad_norm", "gradient_clipping"),
    "train.groups_per_step": ("batch_size", "bs", "train_batch_size", "per_device_train_batch_size", "groups_per_step"),
    "pack.tokens_per_row": ("max_length", "max_seq_length", "max_seq_len", "seq_len", "max_tokens", "context_length"),
    "schedule.warmup_steps": ("warmup", "warmup_steps"),
    "schedule.name": ("scheduler", "lr_scheduler_type", "lr_schedule"),
    "train.lora_rank": ("lora", "lora_r", "lora_rank", "rank"),
    "train.dtype": ("dtype", "bf16", "fp16", "precision"),
    "train.device": ("device", "gpu"),
    "checkpoint.every_steps": ("save_steps", "save_every", "checkpoint_every"),
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
"""Names that other libraries use for a flag, by our name."""


def flag_meant_by(name: str, flags: Iterable[str]) -> str | None:
    """Return the flag that corresponds to another library's name, or None.

    >>> flag_meant_by("--learning-rate", ["optimizer.lr"]), flag_meant_by("--colour", ["optimizer.lr"])
    ('--optimizer.lr', None)
    """
    key, known = name.lstrip("-").replace("-", "_").lower(), set(flags)
    return next((f"--{flag}" for flag, names in MEANT.items() if key in names and flag in known), None)


_MOST_MESSAGE = 2000  # In characters. An error quotes the wrong value, which may be the content of a file.


class UsageError(SystemExit):
    """A wrong command line, already printed on standard error. The exit code is 2, and `message` has the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(int(ExitCode.USAGE))
        self.message = message


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps descriptions and prints examples unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


EXAMPLES = "examples:\n"


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors suggest the nearest flag.

    Args:
        dotted_names: returns the options that a verb accepts as `--section.option VALUE`, such as `optimizer.lr`. A
            name that ends in `*` stands for all options that begin so.
        reason_no_effect: why other options have no effect on the verb, and what to do. None if the verb checks the
            names itself.
    """

    dotted_names: Callable[[], Iterable[str]] = tuple
    reason_no_effect: str | None = None

    def error(self, message: str) -> NoReturn:
        message = escape_terminal(message if CODE.search(message) else f"TG-CLI-022: {message}")[:_MOST_MESSAGE]
        self._print_message(f"tracegrad: error: {message}\nSee {self.prog} --help.\n", sys.stderr)
        raise UsageError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not one of the choices of a flag, or an unknown command, and suggest the nearest."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"TG-CLI-015: {value} is not a command. {config.nearest(value, names)}")
        flag, hint = "/".join(action.option_strings) or action.dest, config.did_you_mean(value, names)
        self.error(f"TG-CLI-019: {flag} is {value!r}. It must be one of {', '.join(names)}.{hint}")

    def check_options(self, names: Iterable[str]) -> None:
        """Refuse `--section.option` that the verb does not have.

        Raises:
            ArgumentError: for an option of other verbs, or of none.
        """
        if self.reason_no_effect is None:
            return
        own = list(self.dotted_names())
        verb_name = self.prog.rpartition(" ")[2]
        for name in names:
            if name in own or any(name.startswith(option[:-1]) for option in own if option.endswith("*")):
                continue
            if name in known_options():
                raise ArgumentError(f"TG-CLI-006: {name} has no effect on {verb_name}, {self.reason_no_effect}")
            hint = config.nearest(name, own) if own else f"{verb_name} has no such options. Remove it."
            raise ArgumentError(f"TG-CLI-010: {name} is not an option of {verb_name}. {hint}")

    def nearest_flag(self, word: str) -> str | None:
        """Return the flag of this verb that a mistyped flag, or another library's name for it, probably means."""
        names = [flag.lstrip("-") for flag in self._option_string_actions if flag.startswith("--")]
        names = [name for name in names if "OPTION" not in name] + list(self.dotted_names())
        letters = word.lstrip("-").replace("-", "_").lower()
        spellings = {name: name.replace("-", "_").lower() for name in names}
        same_end = [name for name, spelling in spellings.items() if spelling.rpartition(".")[2] == letters]
        if len(same_end) == 1:
            return f"--{same_end[0]}"
        if flag := flag_meant_by(word, names):
            return flag
        by_spelling = {spelling.rpartition(".")[2]: name for name, spelling in reversed(spellings.items())}
        by_spelling |= {spelling: name for name, spelling in spellings.items()}
        close = difflib.get_close_matches(letters[:80], by_spelling, 1, 0.6)
        return f"--{by_spelling[close[0]]}" if close else None

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version. Unlike in argparse, a failure to write is raised."""
        if message and file is not None and file is sys.stdout:
            put(message.removesuffix("\n"), to=file)
        else:
            super()._print_message(message, file)


def known_options() -> list[str]:
    """Return the options of all verbs, by dotted name."""
    sections: dict[str, Any] = {"online": OnlineConfig(), "rollout": RolloutConfig()}
    return [*config.options(), *(f"{section}.{name}" for section, values in sections.items() for name in vars(values))]


def verb(
    commands: Any,
    name: str,
    text: str,
    run: Any,
    *,
    examples: Sequence[str],
    more: str = "",
    dotted_names: Callable[[], Iterable[str]] = tuple,
    reason_no_effect: str | None = "which does not train. Use it with tracegrad train.",
) -> Parser:
    """Add the parser of a verb.

    Args:
        text: what the verb does, for the list of verbs.
        run: the function to call.
        examples: commands for the verb's own help.
        more: additional sentences in the verb's own help.
        dotted_names, reason_no_effect: as for `Parser`.
    """
    description = " ".join(filter(None, (f"{text[0].upper()}{text[1:]}.", more)))
    parser: Parser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=EXAMPLES + "\n".join(f"  tracegrad {name} {example}" for example in examples),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.dotted_names, parser.reason_no_effect = dotted_names, reason_no_effect
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--no-cache", action="store_true", help="do not read or write the tokenizer cache")
    return parser


MODEL_HELP = "Hugging Face model folder, or a Hub id such as Qwen/Qwen3-0.6B"
LOGPROB_KIND_HELP = (
    "whether the logprobs were computed before (raw, vLLM's default) or after (processed) temperature and truncation; "
    "overrides the records"
)
SAMPLING_DEFAULTS_HELP = (
    "values of sampling options that a request does not set: off (neutral), or those of the model's "
    "generation_config.json (model)"
)
SERVER_PROFILE_HELP = "server that rendered the prompts, for traces without recorded prompt ids"


def add_trace_arguments(parser: Parser, *, out: Callable[[str], Any] = Path, out_help: str) -> None:
    """Add the arguments of a verb that aligns traces into a folder. `out` converts the value of --out."""
    inputs_of(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--out", type=out, required=True, metavar="DIR", help=out_help)
    data = parser.add_argument_group("reading and alignment")
    data.add_argument(
        "--on-error",
        choices=("raise", "skip", "quarantine"),
        help="for a record that cannot be read or aligned: stop (default), skip it, or copy it to a separate file",
    )
    data.add_argument("--logprob-kind", choices=("raw", "processed", "unknown"), help=LOGPROB_KIND_HELP)
    data.add_argument("--sampling-defaults", choices=("neutral", "model"), help=SAMPLING_DEFAULTS_HELP)
    data.add_argument("--server-profile", choices=SERVERS, help=SERVER_PROFILE_HELP)
    data.add_argument(
        "--text-only", action="store_const", const=True, help="train turns that have no recorded logprobs"
    )
    data.add_argument(
        "--allow-unknown-ids",
        action="store_const",
        const=True,
        help="continue a trace after an unknown token id with the tokens of its text, which are not trained",
    )


def inputs_of(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument `traces`, one or several inputs."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACES",
        help="JSONL, JSON, Parquet or Arrow: files, folders, glob patterns or URLs (s3://...), optionally .gz or .zst; "
        "- reads standard input. If a field of your records contains the reward, add --map.reward FIELD; see also "
        "--map.group and --map.session",
    )


def place(name: str) -> Path:
    """Convert an `--out` that must be a local path, for argparse."""
    try:
        return require_local_path(name)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def join_dotted_values(arguments: list[str]) -> list[str]:
    """Return arguments with `--a.b value` joined to `--a.b=value`.

    Otherwise the parser would take the value for a positional argument.

    >>> join_dotted_values(["record", "--rollout.max_turns", "3", "a.py:b", "--out", "o"])
    ['record', '--rollout.max_turns=3', 'a.py:b', '--out', 'o']
    """
    result: list[str] = []
    words = iter(arguments)
    for word in words:
        has_separate_value = word.startswith("--") and "." in word and "=" not in word
        value = next(words, None) if has_separate_value else None
        result.append(word if value is None else f"{word}={value}")
    return result


def dotted(rest: list[str], parser: Parser) -> list[tuple[str, str]]:
    """Return names and values of arguments like `--a.b=value`."""
    pairs: list[tuple[str, str]] = []
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            parser.error(f"unexpected argument {word}. Write all positional arguments next to each other.")
        if not word.startswith("--") or "." not in name:
            flag = parser.nearest_flag(name)
            parser.error(
                f"TG-CLI-021: unknown flag {word.partition('=')[0]}." + (f" Did you mean {flag}?" if flag else "")
            )
        if not equals:
            parser.error(f"{word} has no value. Write {word} VALUE.")
        pairs.append((name, value))
    return pairs


def resume_line(stopped: str, arguments: list[str], flag: str = "--resume") -> list[str]:
    """Return a line with the command that resumes a run, if a signal stopped it. Otherwise an empty list.

    >>> resume_line("signal", ["online", "run.toml"]), resume_line("done", ["online", "run.toml"])
    (['resume   tracegrad online run.toml --resume'], [])
    """
    if stopped != "signal":
        return []
    command = arguments if flag in arguments or not flag else [*arguments, flag]
    return [f"resume   tracegrad {shlex.join(command)}"]


AS_FLAGS = {
    "resume=True": "--resume",
    "workers and ray_address": "--workers and --ray",
    "fewer workers or a smaller shard_traces": "fewer --workers or a smaller --shard-traces",
    "Pass model with": "Pass --model with",
    "Omit objective": "Omit --objective",
    "tasks is None": "--trainer-only is given",
    "Start train with tasks=None and this folder as out": "Start tracegrad online with --trainer-only and this --out",
    "another out": "another --out",
    "Pass servers=, or pass python=, the": "Give --server, or --python, the",
    "python has no effect": "--python has no effect",
    "servers='in-process' by python=, the": 'servers = ["in-process"] by python, the',
    "servers='in-process'": 'servers = ["in-process"]',
    "options in engine=": "options in [engine]",
    'on_error="skip"': "--on-error skip",
    ", or name another place with quarantine=": ", or leave bad records out with --on-error skip",
    "Pass quarantine=PREFIX": "Write it to a file and name that, or leave bad records out with --on-error skip",
    "limited by max_record_bytes, ": "limited to ",
    "Raise max_record_bytes to as much, or decompress it first": "Decompress it first",
    "Split it, or raise max_record_bytes": "Split it",
    "but tokens_per_row is": "but --pack.tokens_per_row is",
    "Raise tokens_per_row to": "Raise --pack.tokens_per_row to",
    "or pass too_long='drop'": "or give --pack.too_long drop",
    "too_long is 'truncate' with": "--pack.too_long is truncate with",
    "Pass too_long='drop' or 'error'": "Give --pack.too_long drop or error",
    "Pack with share_prefixes=False; in a run, leave out pack.share_prefixes": "Leave out --pack.share_prefixes",
    "load the model with attn_implementation='sdpa'; in a run, set attention.implementation sdpa": (
        "give --attention.implementation sdpa"
    ),
    "Record it, or pass missing_logprobs='mask' or missing_logprobs='ratio_one'": (
        "Record it, or give --train.missing_logprobs mask or ratio_one"
    ),
}
"""Python arguments as they appear in error messages, and the corresponding flags."""


_ADVICE = re.compile(
    r"\b(Set|set|Pass|pass|example|choose|or|with|share:|version:|traces:) ([a-z_]+\.[a-z_]+|objective(?= [A-Z]))\b"
)
"""An option that a message advises to set. Python takes it by the same name without dashes."""


def as_flags(message: str) -> str:
    """Return an error message with Python arguments replaced by command-line flags.

    Text from a traceback on is user code and stays unchanged.

    >>> as_flags("out already contains a run. Pass resume=True to continue it, or another out.")
    'out already contains a run. Pass --resume to continue it, or another --out.'
    >>> as_flags("data.holdout is 1. Set data.holdout 0, or train with objective SFT.")
    'data.holdout is 1. Set --data.holdout 0, or train with --objective SFT.'
    """
    text, mark, traceback = message.partition("Traceback (most recent call last)")
    for argument, flag in AS_FLAGS.items():
        text = text.replace(argument, flag)
    names = {"objective", *known_options()}
    text = _ADVICE.sub(lambda match: f"{match[1]} --{match[2]}" if match[2] in names else match[0], text)
    return text + mark + traceback


def without_missing_flags(message: str, parser: "Parser") -> str:
    """Return an error message of a verb, with a note if it names a flag that only other verbs have.

    >>> parser = Parser(prog="tracegrad replay")
    >>> without_missing_flags("Free space, and continue with --resume.", parser)
    'Free space, and continue with --resume. (replay has no --resume.)'
    """
    text = message.partition("Traceback (most recent call last)")[0]
    own = {*parser._option_string_actions, *(f"--{name}" for name in parser.dotted_names())}
    ours = {*OUR_FLAGS, *(f"--{name}" for name in known_options())}
    verb_name = parser.prog.rpartition(" ")[2]
    missing = []
    for match in re.finditer(r"(?<![\w-])--[a-z][\w.-]*\w", text):
        sentence = re.split(r"[.;:] ", text[: match.start()])[-1]
        is_of_another_command = re.search(r"\b(?:tracegrad|python|vllm|inspect) \w+|`prepare", sentence)
        if match[0] in ours and match[0] not in own and not is_of_another_command:
            missing.append(match[0])
    note = f" ({verb_name} has no {' and no '.join(dict.fromkeys(missing))}.)" if missing else ""
    return message + note


OUR_FLAGS = frozenset(
    [
        "--resume",
        "--out",
        "--model",
        "--workers",
        "--ray",
        "--shard-traces",
        "--on-error",
        "--logprob-kind",
        "--objective",
        "--text-only",
        "--config",
        "--check-logprobs",
        "--accept-truncated-sampling",
        "--server-profile",
        "--sampling-defaults",
        "--key-file",
    ]
)
"""Flags that errors of several verbs name."""


def print_lines(*lines: str) -> None:
    """Print lines, on the first rank only."""
    for line in lines if is_first_rank() else ():
        put(escape_terminal(redact(line)), to=sys.stdout)


def print_stderr(*lines: str) -> None:
    """Print lines on standard error, on the first rank only. Used when standard output is machine-readable."""
    for line in lines if is_first_rank() else ():
        print(escape_terminal(redact(line)), file=sys.stderr, flush=True)


def print_json(account: Mapping[str, Any], *, line: bool = False) -> None:
    """Print one JSON object, over several lines or on one. NaN and infinities become null."""
    text = json.dumps(_finite(account), indent=None if line else 1, allow_nan=False)
    if is_first_rank():
        put(*map(escape_terminal, redact(text).split("\n")), to=stream())


def _finite(value: Any) -> Any:
    """Return a value with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Add --json."""
    text = "print one JSON object at the end; all other lines go to standard error"
    parser.add_argument("--json", action="store_true", help=text)


def printer_for(options: argparse.Namespace) -> Callable[..., None]:
    """Return the function that prints lines for people: `print_stderr` with --json, otherwise `print_lines`."""
    return print_stderr if options.json else print_lines


def folder_of(model: Path) -> Path:
    """Return the folder of a model: the path itself, or a download from the Hub if the name is a Hub id.

    Raises:
        ArgumentError: if the Hub id cannot be downloaded.
    """
    name = str(model)
    if model.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return model
    prefix = f"--model {name}: this folder does not exist"
    if "/" not in name:
        return model
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ArgumentError(
            f"TG-CLI-003: {prefix}, and a Hub id needs huggingface_hub, which is not installed. Run pip install "
            "'tracegrad[cloud]', or give a folder."
        ) from None
    try:
        return Path(snapshot_download(name))
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        raise ArgumentError(
            f"TG-CLI-004: {prefix}, and it cannot be downloaded from the Hub ({cause}). Give a folder, or run "
            "huggingface-cli download on a machine with a network."
        ) from error


def add_to(parser: Any) -> None:
    """Add the flags --objective, --recipe and --from-config."""
    parser.add_argument(
        "--objective",
        metavar="NAME",
        help="a preset such as GRPO or DAPO, or your own as file.py:NAME or module:NAME (default DAPO)",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="start from an objective with all other options of its paper: a name of tracegrad.recipes, or your own as "
        "file.py:NAME or module:NAME",
    )
    parser.add_argument(
        "--from-config",
        metavar="PEER:FILE",
        help="start from a config of trl, verl, skyrl or art, such as trl:config.yaml",
    )


def recipe_from_flags(options: argparse.Namespace) -> recipes.Recipe | None:
    """Return the recipe that --recipe or --from-config names, or None.

    Raises:
        ArgumentError: for both flags, or if there is no such recipe.
    """
    if options.recipe and options.from_config:
        raise ArgumentError(
            "TG-CLI-005: --recipe and --from-config are both given. Each sets all options that a run starts from. Give "
            "one of them."
        )
    if options.recipe:
        return recipes.find(options.recipe)
    return recipes.like(str(options.from_config)) if options.from_config else None


def lines(
    options: argparse.Namespace,
    recipe: recipes.Recipe,
    overrides: Sequence[str],
    groups_per_step: int,
    unused_names: Sequence[str] = (),
) -> list[str]:
    """Return lines about a recipe: its options, translated, differing and ignored options, and overriding options.

    Args:
        overrides: options that override the recipe.
        groups_per_step: `train.groups_per_step` of the run.
        unused_names: options that have no effect here.
    """
    used = [(name, value) for name, value in recipe.options if name not in unused_names]
    # The code of an objective without a name is long; its formula is printed after these lines.
    used = [(name, value) for name, value in used if name != "objective" or str(value).isidentifier()]
    applied = ", ".join(f"{name} = {value}" for name, value in used)
    unused = ", ".join(f"{name} = {value}" for name, value in recipe.options if name in unused_names)
    idle = [name for name, translation in recipe.imported_options if translation == NO_EFFECT]
    translated = [f"         {name}: {text}" for name, text in recipe.imported_options if text != NO_EFFECT]
    peer = recipe.source.partition(":")[0]
    if recipe.batch:
        own = f"{groups_per_step:,} groups per step (train.groups_per_step)"
        translated.append(f"batch    {own}; the config has {recipe.batch}")
    if recipe.default_options:
        translated.append(f"default  as {peer}'s default: {', '.join(recipe.default_options)}")
    if idle:
        translated.append(f"idle     {NO_EFFECT}: {', '.join(idle)}")
    translated += [f"differs  on purpose, {name}: {difference}" for name, difference in recipe.differences]
    warned = [(name, warning) for name, warning in recipe.ignored_options if warning]
    other = [name for name, warning in recipe.ignored_options if not warning]
    warnings = [f"warning  {name} of the config has no effect here: {warning}" for name, warning in warned]
    if recipe.set_elsewhere:
        elsewhere = ", ".join(f"{name} ({here})" for name, here in recipe.set_elsewhere)
        warnings.append(f"instead  not read from the config, but set by (...): {elsewhere}")
    warnings += [f"ignored  options of the config without effect here: {', '.join(other)}"] if other else []
    unused_lines = [f"         ignored, because only training from a file uses it: {unused}"] if unused else []
    override_lines = [f"override these options replace the recipe's: {', '.join(overrides)}"] if overrides else []
    source = options.recipe or options.from_config
    return [f"recipe   {source}: {applied}", *translated, *warnings, *unused_lines, *override_lines]
