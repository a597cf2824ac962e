"""One trace as a piece of HTML: its facts, its messages folded by turn, its tokens with what a step made of them.

Everything that comes from outside goes through `report.text.escape`; the page puts these pieces in as they are. A
piece holds no script, no address and no style of its own.
"""

import json
import math
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegrad._html import escape, number, percent
from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.sampling import options
from tracegrad.data.trace import Trace
from tracegrad.errors import TracegradError, redacted
from tracegrad.images import Pictures
from tracegrad.report.token_map import PerToken, Thumbnails, Writer
from tracegrad.trainer.token_log import CLIPPED, StepTerms
from tracegrad.view.features import message_parts, tool_calls
from tracegrad.view.tokens import Shown

FOLD = 4_000
"""Characters of a message that are sent at once; the rest is asked for in parts."""
PART = 200_000
MODES = (
    ("pull", "how hard, and which way, the token moves the policy"),
    ("ratio", "the ratio inside the surrogate: theta over old, or what it takes"),
    ("old", "old over rollout: what the trainer saw over what was recorded"),
    ("weight", "the detached correction"),
    ("advantage", "what the trace earned above its group"),
    ("entropy", "of the policy at that token, in nats"),
    ("logprob", "how unlikely the token was when it was recorded"),
    ("source", "sampled, given or template"),
)


def facts(pairs: list[tuple[str, object]]) -> str:
    """Names and values beside one another."""
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="tiles">{tiles}</dl>'


def of_trace(trace: Trace) -> list[tuple[str, object]]:
    """What its record says of a trace as a whole."""
    rewards = ", ".join(f"{name} {number(value)}" for name, value in list(trace.rewards.items())[:8])
    kinds = {generation.logprob_kind for generation in trace.generations}
    heats = {generation.temperature for generation in trace.generations}
    return [
        ("group", (trace.group or "alone")[:120]),
        ("reward", "none" if trace.reward is None else number(trace.reward)),
        *([("rewards", rewards)] if rewards else []),
        ("turns", len(trace.generations)),
        ("sampled tokens", f"{sum(generation.tokens for generation in trace.generations):,}"),
        ("logprobs", ", ".join(sorted(kinds)) or "none"),
        ("temperature", ", ".join("?" if heat is None else number(heat) for heat in heats) or "?"),
        *([("sampling", told)] if (told := _sampling(trace)) else []),
        ("model", (trace.model or "?")[:120]),
    ]


def _sampling(trace: Trace) -> str:
    """The sampling options of its turns beside temperature, each distinct set once."""
    said = [
        options({**({} if turn.top_p is None else {"top_p": round(turn.top_p, 6)}), **turn.sampling})
        for turn in trace.generations
    ]
    return "; ".join(dict.fromkeys(filter(None, said)))[:400]


def messages(trace: Trace, whole: int = FOLD, drawn: Thumbnails | None = None) -> str:
    """The conversation, a fold for each turn: what was given since the last answer, and the answer."""
    show = pictures(trace, drawn or Thumbnails())
    rewards, sampled = trace.message_rewards, {generation.message for generation in trace.generations}
    order = trace.core.conversation(trace.index)
    out, turn, count = [], [], 0
    for place, message in enumerate(order):
        turn.append(_message(trace.pool[message], message, rewards[place], message in sampled, whole, show))
        if message in sampled or place == len(order) - 1:
            count += 1
            name = f"turn {count}" if message in sampled else "after the last turn"
            out.append(f'<details class="turn" open><summary>{name}</summary>{"".join(turn)}</details>')
            turn = []
    if gone := [message for message in range(len(trace.pool)) if message not in set(order)]:
        inner = "".join(
            _message(trace.pool[message], message, None, message in sampled, whole, show) for message in gone
        )
        text = f"{len(gone)} messages that the policy saw or said and that are no longer in the conversation"
        out.append(f'<details class="turn"><summary>{text}</summary>{inner}</details>')
    return "".join(out)


def pictures(trace: Trace, drawn: Thumbnails) -> Callable[[str], str]:
    """What stands for the picture of a digest in the messages of a trace."""
    table = Pictures.of_records(trace.core)
    rows = {digest.tobytes().hex(): row for row, digest in enumerate(table.digest)}
    return lambda digest: drawn.html(table, rows[digest]) if digest in rows else drawn.absent(digest)


def _message(
    message: dict[str, Any],
    index: int,
    reward: float | None,
    sampled: bool,
    whole: int,
    show: Callable[[str], str],
) -> str:
    role = str(message.get("role", "?"))[:40]
    kind = role if role in ("system", "user", "assistant", "tool") else "other"
    marks = [role, *([f"reward {number(reward)}"] if reward is not None else []), *(["sampled"] if sampled else [])]
    name = message.get("name") or message.get("tool_call_id")
    marks += [str(name)[:80]] if name else []
    said = message_parts(message)
    calls = "".join(_call(name, arguments, whole) for name, arguments in tool_calls(message))
    body = f'<div class="said">{folded(said, index, 0, whole, show)}</div>' if said else ""
    return f'<article class="{kind}"><h4>{escape(" · ".join(marks))}</h4>{body}{calls}</article>'


def folded(said: list[tuple[str, str]], index: int, start: int, whole: int, show: Callable[[str], str]) -> str:
    """What is said from character `start` on, at most `whole` of them, and a button that asks for more.

    Args:
        said: texts and pictures, as `message_parts` gives them.
        show: what stands for the picture of a digest.
    """
    total = sum(len(text) + 1 for text, _ in said) - 1
    out, at, end = [], 0, min(start + whole, total)
    for text, digest in said:
        if not digest:
            out.append(escape(f"{text}\n"[max(start - at, 0) : max(end - at, 0)]))
        elif start <= at < end:
            out.append(show(digest) + "\n" * (at + len(text) < total))
        at += len(text) + 1
    shown, left = "".join(out), total - end
    if left <= 0:
        return shown
    return (
        f'{shown}<button class="more" data-message="{index}" data-start="{start + whole}">'
        f"{left:,} more characters</button>"
    )


def _call(name: str, arguments: str, whole: int) -> str:
    """A call as a call: `price(item='lamp')`."""
    try:
        told = json.loads(arguments) if len(arguments) < whole else None
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict):
        inner = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in told.items())
    else:
        inner = arguments
    more = f" … {len(inner) - whole:,} more characters" if len(inner) > whole else ""
    return f'<pre class="call"><b>{escape(name[:200])}</b>({escape(inner[:whole])}{more})</pre>'


def aligned(trace: Trace, tokenizer: Tokenizer) -> tuple[Shown | None, str]:
    """The tokens of a record as training would take them; and why not, where it cannot."""
    try:
        return Shown(None, align(trace, tokenizer, lenient=True)), ""
    except TracegradError as error:
        return None, str(error)


def tokens(shown: Shown, token_bytes: Callable[[int], bytes], at: int, drawn: Thumbnails | None = None) -> str:
    """The tokens of a trace, laid over by its step number `at` (an index into `shown.steps`)."""
    sequences = shown.sequences
    values = _values(sequences, shown.steps[at] if shown.steps else None)
    writer = Writer(sequences, values, token_bytes, np.flatnonzero(values.term), numbered=True, drawn=drawn)
    parts = []
    for branch in range(sequences.branches):
        span = range(int(sequences.cu_seqlens[branch]), int(sequences.cu_seqlens[branch + 1]))
        parts.append(f'<p class="branch">branch {branch + 1} of {sequences.branches}</p>' * (sequences.branches > 1))
        parts.append(f'<pre class="tokens">{writer.branch(span)}</pre>')
    return "".join(parts)


def _values(sequences: Sequences, step: StepTerms | None) -> PerToken:
    empty = PerToken.of(sequences.tokens, [])
    if step is None:
        return empty
    v = step.values
    for name in ("ratio", "weight", "advantages", "logprobs", "gradient", "entropy"):
        getattr(empty, name)[step.place] = v[name]
    empty.keep[step.place] = step.keep
    empty.clipped[step.place] = step.why == CLIPPED
    empty.why[step.place] = step.why
    with np.errstate(over="ignore"):
        empty.old[step.place] = np.exp(v["old_logprobs"] - sequences.rollout_logprobs[step.place])
    return PerToken(**{**vars(empty), "words": step.words})


def history(shown: Shown) -> str:
    """What became of a trace step by step, a row each."""
    heads = ("step", "advantage", "mean ratio", "mean weight", "kept", "clipped", "entropy", "pull")
    rows = []
    for index, step in enumerate(shown.steps):
        v = step.values
        known = np.isfinite(v["ratio"])
        pull = float(np.abs(np.nan_to_num(v["gradient"])).sum())
        cells = [
            number(_mean(v["advantages"])),
            number(_mean(v["ratio"][known])),
            number(_mean(v["weight"])),
            percent(float(step.keep.mean())),
            percent(float((step.why == CLIPPED).mean())),
            number(_mean(v["entropy"])),
            number(pull),
        ]
        button = f'<button class="step" data-step="{index}">{step.step}</button>'
        rows.append(f"<tr><td>{button}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table class="steps">{body}</table></div>'


def _mean(values: Any) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def findings(sequences: Sequences) -> str:
    """The drift of one trace in words."""
    drift = sequences.drift
    lines = []
    for row in range(min(len(drift), 50)):
        reason = drift.reasons[int(drift.reason[row])].replace("_", " ")
        turn, count = int(drift.turn[row]), int(drift.count[row])
        where = f"turn {turn}" if turn >= 0 else "the trace"
        lines.append(f"<li><b>{escape(reason)}</b> {where}, {count:,} tokens: {escape(drift.detail[row][:300])}</li>")
    return f'<ul class="drift">{"".join(lines)}</ul>' if lines else ""


def python(path: str, place: int, trace_id: str, *, model: str | None, run: str | None, token: int | None) -> str:
    """The lines that give the same in Python."""
    lines = ["import tracegrad as tg"]
    if path:
        lines += [f"trace = tg.read({path!r}, limit={place + 1}, on_error='skip')[{place}]"]
    if path and model:
        lines += [f"sequences = tg.align(trace, tg.Tokenizer.from_pretrained({model!r}))"]
    if run:
        lines += ["from tracegrad.trainer.token_log import Terms", f"steps = Terms({run!r}).of({trace_id!r})"]
    if token is not None and path and model:
        lines += [f"print(sequences.ids[{token}], sequences.rollout_logprobs[{token}])"]
    elif token is not None and run:
        lines += [
            "kept = Terms(" + repr(run) + ")",
            f"name, row = kept.find({trace_id!r})[-1]",
            "sequences, _ = tg.trainer.token_log.subset(kept.sequences(name), [row])",
            f"print(sequences.ids[{token}], sequences.rollout_logprobs[{token}])",
        ]
    return "\n".join(lines)


def shell(paths: list[str], model: str | None) -> str:
    """The command that opens the page again."""
    return shlex.join(["tracegrad", "view", *map(redacted, paths), *(["--model", model] if model else [])])
