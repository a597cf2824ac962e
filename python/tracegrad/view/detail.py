"""Render one trace as HTML: facts, messages folded by turn, and tokens with the values of a training step.

All external text is escaped with `_html.escape`, and the page inserts these pieces unchanged. They contain no scripts,
addresses or styles.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tracegrad._html import escape, number, percent, plural
from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import MISMATCH_TEXT
from tracegrad.data.sampling import format_options
from tracegrad.data.trace import Trace
from tracegrad.errors import TracegradError, redact
from tracegrad.images import Images
from tracegrad.report.token_map import PerToken, Thumbnails, Writer
from tracegrad.trainer.token_log import CLIPPED, StepTokens
from tracegrad.view.features import message_parts, tool_calls
from tracegrad.view.meanings import mismatch_text
from tracegrad.view.tokens import TraceTokens

FOLD = 4_000
"""Number of characters of a message that are sent at first. The page requests more in parts."""
PART = 200_000
MODES = (
    ("gradient", "gradient", "Gradient of the loss with respect to the logprob: its size and direction."),
    ("ratio", "ratio", "Ratio inside the surrogate, such as theta over old."),
    ("old", "old / rollout", "Ratio of the old policy to the rollout policy."),
    ("weight", "weight", "Off-policy weight of the token, without a gradient of its own."),
    ("advantage", "advantage", "Advantage of the token."),
    ("entropy", "entropy", "Entropy of the policy at the token, in nats."),
    ("logprob", "logprob", "Recorded logprob of the token."),
    ("source", "source", "Source of the token: sampled, prompt or template."),
)
"""Overlays of tokens: the class name in the report's style, the name on the page, and its meaning."""
_MOST_MISMATCHES = 200


def facts(pairs: list[tuple[str, object]], tooltips: Mapping[str, str]) -> str:
    """Return names and values as HTML tiles.

    Args:
        tooltips: sentences by name.
    """
    tiles = (
        f"<div{_title(tooltips.get(name, ''))}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in pairs
    )
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def table(heads: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """Return an HTML table.

    Args:
        heads: column titles, as text.
        rows: the cells of each row, as HTML.
        kind: class of the table.
    """
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    attribute = f' class="{kind}"' if kind else ""
    content = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide" tabindex="0"><table{attribute}>{content}</table></div>'


def reason_cell(reason: str) -> str:
    """Return the table cell of a mismatch reason with its meaning."""
    meaning = MISMATCH_TEXT.get(reason, "")
    text = f"<small>{escape(meaning)}</small>" if meaning else ""
    return f"<td{_title(mismatch_text(reason))}><b>{escape(reason[:80].replace('_', ' '))}</b> {text}</td>"


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def of_trace(trace: Trace) -> list[tuple[str, object]]:
    """Return facts of a trace from its record."""
    rewards = ", ".join(f"{name} {number(value)}" for name, value in list(trace.rewards.items())[:8])
    recorded = sum(turn.tokens for turn in trace.generations)
    with_logprobs = [
        turn for turn in trace.generations if turn.logprobs is not None or turn.filled_logprobs is not None
    ]
    kinds = {turn.logprob_kind for turn in with_logprobs}
    temperatures = {generation.temperature for generation in trace.generations}
    return [
        ("group", (trace.group or "none")[:120]),
        ("reward", "none" if trace.reward is None else number(trace.reward)),
        *([("rewards", rewards)] if rewards else []),
        ("turns", len(trace.generations)),
        ("recorded tokens", f"{recorded:,}" if recorded else "none"),
        ("logprobs", ", ".join(sorted(kinds)) or "none"),
        *([("filled logprobs", f"{filled:,}, measured afterwards")] if (filled := _filled(trace)) else []),
        (
            "temperature",
            ", ".join("?" if temperature is None else number(temperature) for temperature in temperatures) or "?",
        ),
        *([("sampling", sampling)] if (sampling := _sampling(trace)) else []),
        ("model", (trace.model or "?")[:120]),
    ]


def _filled(trace: Trace) -> int:
    """Return the number of logprobs that `tracegrad fill` measured."""
    filled = (generation.filled_logprobs for generation in trace.generations)
    return sum(int(np.count_nonzero(~np.isnan(logprobs))) for logprobs in filled if logprobs is not None)


def _sampling(trace: Trace) -> str:
    """Return the sampling options of its turns other than temperature, each distinct set once."""
    option_texts = [
        format_options({**({} if turn.top_p is None else {"top_p": round(turn.top_p, 6)}), **turn.sampling})
        for turn in trace.generations
    ]
    return "; ".join(dict.fromkeys(filter(None, option_texts)))[:400]


def messages(trace: Trace, whole: int = FOLD, drawn: Thumbnails | None = None) -> str:
    """Return the conversation as HTML, with one fold per turn: the prompt since the last answer, and the answer."""
    picture_html = pictures(trace, drawn or Thumbnails())
    rewards, sampled = trace.message_rewards, {generation.message for generation in trace.generations}
    order = trace.core.conversation(trace.index)
    out, turn, count = [], [], 0
    for position, message in enumerate(order):
        turn.append(_message(trace.pool[message], message, rewards[position], message in sampled, whole, picture_html))
        if message in sampled or position == len(order) - 1:
            name = f"turn {count}" if message in sampled else "after the last turn"
            count += 1
            out.append(f'<details class="turn" open><summary>{name}</summary>{"".join(turn)}</details>')
            turn = []
    if removed := [message for message in range(len(trace.pool)) if message not in set(order)]:
        inner = "".join(
            _message(trace.pool[message], message, None, message in sampled, whole, picture_html) for message in removed
        )
        text = f"{plural(len(removed), 'message')} of earlier turns, no longer in the conversation"
        out.append(f'<details class="turn"><summary>{text}</summary>{inner}</details>')
    return "".join(out)


def pictures(trace: Trace, drawn: Thumbnails) -> Callable[[str], str]:
    """Return a function that renders the image of a digest in the messages of a trace."""
    table = Images.of_records(trace.core)
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
    labels = [role, *([f"reward {number(reward)}"] if reward is not None else []), *(["sampled"] if sampled else [])]
    name = message.get("name") or message.get("tool_call_id")
    labels += [str(name)[:80]] if name else []
    contents = message_parts(message)
    calls = "".join(_call(name, arguments, whole) for name, arguments in tool_calls(message))
    body = f'<div class="content">{message_html(contents, index, 0, whole, show)}</div>' if contents else ""
    return f'<article class="{kind}"><h3>{escape(" · ".join(labels))}</h3>{body}{calls}</article>'


def message_html(parts: list[tuple[str, str]], index: int, start: int, whole: int, show: Callable[[str], str]) -> str:
    """Return at most `whole` characters of a message from `start` on, with a button for more.

    Args:
        parts: texts and images, as `message_parts` returns them.
        show: renders the image of a digest.
    """
    total = sum(len(text) + 1 for text, _ in parts) - 1
    out, offset, end = [], 0, min(start + whole, total)
    for text, digest in parts:
        if not digest:
            out.append(escape(f"{text}\n"[max(start - offset, 0) : max(end - offset, 0)]))
        elif start <= offset < end:
            out.append(show(digest) + "\n" * (offset + len(text) < total))
        offset += len(text) + 1
    visible_html, remaining = "".join(out), total - end
    if remaining <= 0:
        return visible_html
    return (
        f'{visible_html}<button class="more" data-message="{index}" data-start="{start + whole}">'
        f"{plural(remaining, 'more character')}</button>"
    )


def _call(name: str, arguments: str, whole: int) -> str:
    """Return a tool call written like a function call: `price(item='lamp')`."""
    try:
        parsed = json.loads(arguments) if len(arguments) < whole else None
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        inner = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in parsed.items())
    else:
        inner = arguments
    more = f" … {plural(len(inner) - whole, 'more character')}" if len(inner) > whole else ""
    return f'<pre class="call"><b>{escape(name[:200])}</b>({escape(inner[:whole])}{more})</pre>'


def align_trace(trace: Trace, tokenizer: Tokenizer) -> tuple[TraceTokens | None, str]:
    """Return the tokens of a record as training would use them. If that fails, return None and the reason."""
    try:
        return TraceTokens(None, align(trace, tokenizer, allow_unknown_ids=True)), ""
    except TracegradError as error:
        return None, str(error)


def tokens(shown: TraceTokens, token_bytes: Callable[[int], bytes], at: int, drawn: Thumbnails | None = None) -> str:
    """Return the tokens of a trace as HTML, with the values of step `at` (an index into `shown.steps`)."""
    sequences = shown.sequences
    values = _values(sequences, shown.steps[at] if shown.steps else None)
    writer = Writer(sequences, values, token_bytes, np.flatnonzero(values.term), numbered=True, thumbnails=drawn)
    parts = []
    for branch in range(sequences.branches):
        span = range(int(sequences.cu_seqlens[branch]), int(sequences.cu_seqlens[branch + 1]))
        parts.append(f'<p class="branch">branch {branch + 1} of {sequences.branches}</p>' * (sequences.branches > 1))
        parts.append(f'<pre class="tokens">{writer.branch(span)}</pre>')
    return "".join(parts)


def _values(sequences: Sequences, step: StepTokens | None) -> PerToken:
    empty = PerToken.of(sequences.tokens, [])
    if step is None:
        return empty
    v = step.values
    for name in ("ratio", "weight", "advantages", "logprobs", "gradient", "entropy"):
        getattr(empty, name)[step.token] = v[name]
    empty.keep[step.token] = step.keep
    empty.clipped[step.token] = step.outcome == CLIPPED
    empty.why[step.token] = step.outcome
    with np.errstate(over="ignore"):
        empty.old[step.token] = np.exp(v["old_logprobs"] - sequences.rollout_logprobs[step.token])
    return PerToken(**{**vars(empty), "words": step.labels})


def history(shown: TraceTokens) -> str:
    """Return a table of the trace's values, with one row per step."""
    heads = ("step", "advantage", "mean ratio", "mean weight", "kept", "clipped", "entropy", "gradient")
    rows = []
    for index, step in enumerate(shown.steps):
        v = step.values
        has_ratio = np.isfinite(v["ratio"])
        gradient = float(np.abs(np.nan_to_num(v["gradient"])).sum())
        cells = [
            number(_mean(v["advantages"])),
            number(_mean(v["ratio"][has_ratio])),
            number(_mean(v["weight"])),
            percent(float(step.keep.mean())),
            percent(float((step.outcome == CLIPPED).mean())),
            number(_mean(v["entropy"])),
            number(gradient),
        ]
        button = f'<button class="step" data-step="{index}">{step.step}</button>'
        rows.append(f"<td>{button}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}")
    return table(heads, rows, "steps")


def _mean(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def mismatches(sequences: Sequences) -> str:
    """Return the alignment mismatches of one trace as a table."""
    report = sequences.alignment_report
    rows = []
    for row in range(min(len(report), _MOST_MISMATCHES)):
        turn, count = int(report.turn[row]), int(report.count[row])
        location = f"turn {turn}" if turn >= 0 else "trace"
        reason = reason_cell(report.reasons[int(report.reason[row])])
        rows.append(f"{reason}<td>{location}</td><td>{count:,}</td><td>{escape(report.detail[row][:300])}</td>")
    if not rows:
        return ""
    more = len(report) - len(rows)
    note = f"<p>{plural(more, 'more mismatch')} not shown.</p>" if more else ""
    return table(("mismatch", "where", "tokens", "detail"), rows, "mismatches") + note


def python(path: str, place: int, trace_id: str, *, model: str | None, run: str | None, token: int | None) -> str:
    """Return Python code that loads the same trace and tokens."""
    lines = ["import tracegrad as tg"]
    if path:
        lines += [f"trace = tg.read({path!r}, limit={place + 1}, on_error='skip')[{place}]"]
    if path and model:
        lines += [f"sequences = tg.align(trace, tg.Tokenizer.from_pretrained({model!r}))"]
    if run:
        lines += ["from tracegrad.trainer.token_log import TokenLog", f"steps = TokenLog({run!r}).of({trace_id!r})"]
    if token is not None and path and model:
        lines += [f"print(sequences.ids[{token}], sequences.rollout_logprobs[{token}])"]
    elif token is not None and run:
        lines += [
            "from tracegrad.trainer.token_log import TokenLog, subset",
            f"log = TokenLog({run!r})",
            f"name, row = log.find({trace_id!r})[-1]",
            "sequences, _ = subset(log.sequences(name), [row])",
            f"print(sequences.ids[{token}], sequences.rollout_logprobs[{token}])",
        ]
    return "\n".join(lines)


def shell(paths: list[str], model: str | None) -> str:
    """Return the command that opens the page again."""
    return shlex.join(["tracegrad", "view", *map(redact, paths), *(["--model", model] if model else [])])
