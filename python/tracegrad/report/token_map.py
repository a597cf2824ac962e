"""Draw the tokens of a trace as HTML, coloured by gradient, ratio, weight or advantage, with image thumbnails."""

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad._html import escape, number, percent, visible
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import FILLED, LEVELS, PROMPT, SAMPLED
from tracegrad.errors import TracegradError
from tracegrad.images import Images
from tracegrad.images.processor import decode_image

MOST = 64
"""Maximum number of distinct images drawn on a page. The others are boxes."""
SIDE = 96
"""Size of a thumbnail's longer side, in pixels."""
MOST_PIXELS = 40_000_000
"""Maximum number of pixels of an image to decode. It allows camera photos and stops decompression bombs."""
PAGE_PIXELS = 4 * MOST_PIXELS
"""Maximum number of pixels of all images decoded for one page."""
MOST_HTML = 2_000_000
"""Maximum number of HTML characters of all thumbnails on a page. One image can be at many positions."""


class Thumbnails:
    """The thumbnails of one page.

    Args:
        most: maximum number of distinct images that are drawn.
        drawn: thumbnails that other pages have drawn, by digest. Each is a data URL, or the reason why there is none.
            New ones are added.
    """

    def __init__(self, most: int = MOST, drawn: dict[bytes, tuple[str, str]] | None = None) -> None:
        self.most, self.room, self.pixels = most, MOST_HTML, PAGE_PIXELS
        self.drawn = {} if drawn is None else drawn
        self._here: set[bytes] = set()

    @property
    def any(self) -> bool:
        """Return whether the page has a drawn image."""
        return self.room < MOST_HTML

    def html(self, pictures: Images, row: int, more: str = "") -> str:
        """Return the HTML of one image.

        Args:
            row: index in `pictures`.
            more: additional text for the tooltip.
        """
        digest = pictures.digest[row].tobytes()
        size = f"picture {pictures.width[row]} x {pictures.height[row]}"
        tip = "  ·  ".join([size, pictures.media_type[row], f"blake3 {digest.hex()[:16]}", *([more] if more else [])])
        source, why = self._draw(pictures, row, digest)
        if not source:
            return (
                f'<span class="picture box" data-n="{escape(tip)}">{escape(f"{size}: {why}" if why else size)}</span>'
            )
        alt = escape(f"{size}, blake3 {digest.hex()}")
        # The URL is generated here, so it needs no escaping, although it can end with `=`.
        element = f'<span class="picture" data-n="{escape(tip)}"><img alt="{alt}" src="{source}"></span>'
        self.room -= len(element)
        return element

    def absent(self, name: str) -> str:
        """Return a box for an image of which the record only has the digest."""
        return f'<span class="picture box">{escape(f"picture {name[:23]}: it is not in the record")}</span>'

    def _draw(self, pictures: Images, row: int, digest: bytes) -> tuple[str, str]:
        """Return a data URL, or the reason why there is none. Both are empty if a limit of the page is reached."""
        if self.room <= 0 or (digest not in self._here and len(self._here) >= self.most):
            return "", ""
        if digest not in self.drawn:
            count = int(pictures.width[row]) * int(pictures.height[row])
            if self.pixels < count <= MOST_PIXELS:
                return "", f"the pictures of this page have more than {PAGE_PIXELS:,} pixels"
            self.pixels -= count if count <= MOST_PIXELS else 0
            try:
                self.drawn[digest] = "data:image/png;base64," + base64.b64encode(small(pictures, row)).decode(), ""
            except TracegradError as error:
                self.drawn[digest] = "", str(error)[:400]
        self._here.add(digest)
        return self.drawn[digest]


def small(pictures: Images, row: int, side: int = SIDE) -> bytes:
    """Return a PNG thumbnail with at most `side` pixels on its longer side and 256 colours.

    It is drawn from the decoded pixels of an image.

    Raises:
        ReadError: if the image is no longer available, cannot be decoded, or is too large.
        ArgumentError: if Pillow is not installed.
    """
    size = int(pictures.width[row]), int(pictures.height[row])
    name = f"picture {pictures.digest[row].tobytes().hex()[:16]}"
    return _png(decode_image(pictures.bytes_of(row), name, pictures.media_type[row], size, MOST_PIXELS), side)


def _png(pixel_values: NDArray[np.uint8], side: int) -> bytes:
    from PIL import Image

    image: Any = Image.fromarray(pixel_values)
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.quantize(256).save(out, "PNG", optimize=True)
    return out.getvalue()


_NEUTRAL = 8  # Colour classes are 0 (far below) to 16 (far above), with 8 as neutral.
_MOST_TERMS = 1500  # Limit of trained tokens per trace.
_MOST_HTML = 300_000  # Limit of HTML characters per trace.
_MOST_TOKEN = 256  # Limit of bytes per token. An added token can be arbitrarily long.
_RUN_HEAD, _RUN_TAIL = 160, 60  # Tokens shown at the start and end of a long untrained run.
_FLOATS = ("ratio", "weight", "advantages", "logprobs", "gradient")
_SURPRISE = 5.0  # Surprise with full colour, in nats.


class TermArrays(Protocol):
    """Arrays [m] with one entry per trained token of an optimizer step, as the trainer records them.

    Attributes:
        origin: index of the token in the `Sequences`.
        ratio, weight, keep, clipped, advantages, logprobs: values of the step.
        gradient: d loss / d logprob.

    >>> from tracegrad.trainer import TokenRecord
    >>> names = ("ratio", "weight", "keep", "clipped", "advantages", "logprobs", "gradient")
    >>> arrays = {name: np.ones(2) for name in names}
    >>> record: TermArrays = TokenRecord(step=1, origin=np.array([1, 2]), trace=np.array([0, 0]), **arrays)
    >>> # Pass it as `terms=[record]` to `write_report`.
    >>> record.origin.tolist(), record.ratio.tolist()
    ([1, 2], [1.0, 1.0])
    """

    @property
    def origin(self) -> NDArray[Any]: ...
    @property
    def ratio(self) -> NDArray[Any]: ...
    @property
    def weight(self) -> NDArray[Any]: ...
    @property
    def keep(self) -> NDArray[Any]: ...
    @property
    def clipped(self) -> NDArray[Any]: ...
    @property
    def advantages(self) -> NDArray[Any]: ...
    @property
    def logprobs(self) -> NDArray[Any]: ...
    @property
    def gradient(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class PerToken:
    """Values of trained tokens by position [T]. Other tokens have NaN or False. The last of several steps counts.

    `old` is the ratio of old to rollout policy. `entropy` is in nats. Both are NaN if unknown. `why` is the outcome of
    a trained token as an index into `words`. Without words, the outcome is "kept", "clipped" or "masked".
    """

    ratio: NDArray[np.float32]
    weight: NDArray[np.float32]
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    gradient: NDArray[np.float32]
    keep: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    old: NDArray[np.float32]
    entropy: NDArray[np.float32]
    why: NDArray[np.uint8]
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokens: int, terms: Iterable[TermArrays]) -> "PerToken":
        """Write the values of several steps to their token positions."""
        columns: dict[str, Any] = {name: np.full(tokens, np.nan, np.float32) for name in (*_FLOATS, "old", "entropy")}
        columns |= {name: np.zeros(tokens, bool) for name in ("keep", "clipped")}
        for step in terms:
            for name in (*_FLOATS, "keep", "clipped"):
                columns[name][step.origin] = getattr(step, name)
        return cls(**columns, why=np.zeros(tokens, np.uint8))

    @property
    def term(self) -> NDArray[np.bool_]:
        """Return the mask [T] of trained tokens."""
        return np.isfinite(self.gradient)


def traces_by_gradient(
    sequences: Sequences, values: PerToken, most: int, total: float | None = None
) -> list[tuple[int, float]]:
    """Return the traces with the largest shares of the gradient, as (trace, share), largest first.

    The gradient of a trace is its sum of |d loss / d logprob|.

    Args:
        total: denominator of the shares. Default: the sum over the values.
    """
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    magnitude = np.abs(np.nan_to_num(values.gradient)).astype(np.float64)
    gradient = np.bincount(owner, magnitude, minlength=sequences.traces)
    order = np.argsort(-gradient, kind="stable")[:most]
    divisor = total or gradient.sum()
    return [(int(trace), float(gradient[trace] / divisor)) for trace in order if gradient[trace] > 0]


def select_examples(
    sequences: Sequences, values: PerToken, most: int, whole: float | None = None
) -> list[tuple[int, float]]:
    """Return traces to show: those with the largest gradient, alternating between good and bad, from many groups.

    Good means a mean advantage of at least 0. They are sorted by share, the largest first, like those of
    `traces_by_gradient`.
    """
    ranked = traces_by_gradient(sequences, values, sequences.traces, whole)
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    total = np.bincount(owner, np.nan_to_num(values.advantages).astype(np.float64), minlength=sequences.traces)
    sides: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
    for good, side in zip((True, False), sides, strict=True):
        ranked_side = [example for example in ranked if (total[example[0]] >= 0) == good]
        best_of_group = {int(sequences.group[trace]): (trace, share) for trace, share in reversed(ranked_side)}
        heads = set(best_of_group.values())
        side += [example for example in ranked_side if example in heads] + [
            example for example in ranked_side if example not in heads
        ]
    turns = [example for pair in zip_longest(*sides) for example in pair if example is not None]
    return sorted(turns[:most], key=lambda example: -example[1])


def trace_html(
    sequences: Sequences,
    values: PerToken,
    token_bytes: Callable[[int], bytes],
    trace: int,
    share: float,
    rank: int,
    largest: float,
    drawn: Thumbnails | None = None,
) -> str:
    """Return the HTML of one trace. Only the first is unfolded. Its bar shows its share relative to `largest`."""
    branches = np.flatnonzero(np.asarray(sequences.trace) == trace)
    spans = [range(int(sequences.cu_seqlens[n]), int(sequences.cu_seqlens[n + 1])) for n in branches]
    places = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    trained = places[np.isfinite(values.gradient[places])]
    writer = Writer(sequences, values, token_bytes, trained, thumbnails=drawn)
    parts = []
    for count, span in enumerate(spans, 1):
        if writer.characters_left <= 0:
            parts.append(_note(f"{len(spans) - count + 1:,} more branches are not shown, so that the page stays small"))
            break
        parts.append(f'<p class="branch">branch {count} of {len(spans)}</p>' if len(spans) > 1 else "")
        parts.append(f'<pre class="tokens">{writer.branch(span)}</pre>')
    head = _head(sequences, values, trace, trained, share, rank, share / largest)
    begin = f'<details id="example-{rank}"{" open" * (rank == 1)}>'
    return f"{begin}<summary>{head}</summary>{''.join(parts)}</details>"


def _head(
    sequences: Sequences, values: PerToken, trace: int, trained: NDArray[np.int64], share: float, rank: int, bar: float
) -> str:
    name = sequences.trace_name(trace)
    group = int(sequences.group[trace])
    group_name = sequences.group_names[group] if group < len(sequences.group_names) else str(group)
    rewards = ", ".join(
        f"{escape(key[:40])} {number(float(value))}"
        for key, value in zip(sequences.reward_names[:6], sequences.rewards[trace], strict=False)
    )
    advantage = float(values.advantages[trained].mean())
    facts = [
        f"group {escape(group_name[:60])}",
        rewards,
        f"advantage {advantage:+.3g}",
        f"{len(trained):,} trained tokens",
        f"mean ratio {number(float(values.ratio[trained].mean()))}",
        f"{percent(float(values.keep[trained].mean()))} kept",
    ]
    return (
        f'<span class="rank">{rank}</span><span class="share"><span style="width:{100 * bar:.1f}%"></span></span>'
        f'<b>{percent(share)}</b> <span class="name">{escape(name[:120])}</span><small>{" · ".join(facts)}</small>'
    )


class Writer:
    """Writes branches of one trace until the limits of a trace are reached.

    Args:
        sequences, values: the sequences, and values per token.
        token_bytes: returns the bytes of an id.
        trained: [m] positions of the trace's trained tokens.
        numbered: add the position of each sampled token as `data-t`, so that it can be selected, even if it is not
            trained.
        thumbnails: thumbnails of the page.
    """

    def __init__(
        self,
        sequences: Sequences,
        values: PerToken,
        token_bytes: Callable[[int], bytes],
        trained: NDArray[np.int64],
        *,
        numbered: bool = False,
        thumbnails: Thumbnails | None = None,
    ) -> None:
        self.sequences, self.values, self.token_bytes = sequences, values, token_bytes
        self.numbered, self.drawn = numbered, thumbnails or Thumbnails()
        self.left, self.characters_left = _MOST_TERMS * (1 + 3 * numbered), _MOST_HTML * (1 + 9 * numbered)
        self.gradient = float(np.abs(values.gradient[trained]).sum()) or 1.0
        self.largest = float(np.abs(values.gradient[trained]).max(initial=0.0)) or 1.0
        self.largest_advantage = float(np.abs(values.advantages[trained]).max(initial=0.0)) or 1.0

    def branch(self, span: range) -> str:
        """Return the HTML of the tokens of a branch."""
        out: list[str] = []
        spans = self._spans(span)
        for run in self._runs(span, spans):
            spot = int(spans[run.start - span.start])
            if spot >= 0 or not self._single(run.start):
                if self.characters_left <= 0:
                    remaining = span.stop - run.start
                    out.append(_note(f"{remaining:,} more tokens are not shown, so that the page stays small"))
                    break
                room_before = self.drawn.room
                out.append(self._untrained(run) if spot < 0 else self._picture(span, run, spot))
                # Thumbnails have their own limits and do not count against the text of a trace.
                self.characters_left -= len(out[-1]) * (self.drawn.room == room_before)
                continue
            written = run[:0]
            for place in run[: self.left]:
                if self.characters_left <= 0:
                    break
                out.append(self._term(place))
                self.characters_left -= len(out[-1])
                written = run[: len(written) + 1]
            self.left -= len(written)
            if len(written) < len(run):
                remaining = np.abs(self.values.gradient[run.start + len(written) : span.stop])
                share = percent(float(np.nansum(remaining)) / self.gradient)
                count = int(np.isfinite(remaining).sum())
                out.append(
                    _note(
                        f"{count:,} more trained tokens of this branch, {share} of the trace's gradient, are not shown"
                    )
                )
                break
        return "".join(out)

    def _single(self, place: int) -> bool:
        """Return whether a token gets its own element."""
        sampled = self.numbered and self.sequences.source[place] == SAMPLED
        return bool(sampled or np.isfinite(self.values.gradient[place]))

    def _spans(self, span: range) -> NDArray[np.int64]:
        """Return [tokens of the branch] the image index of each token, as `Images` counts positions; -1 for text."""
        out = np.full(len(span), -1)
        if (images := self.sequences.images) is not None and len(span):
            branch = int(np.searchsorted(self.sequences.cu_seqlens, span.start, side="right")) - 1
            places = np.arange(*images.cu_images[branch : branch + 2].tolist())
            counts = np.diff(images.cu_features)[places]
            start = int(images.cu_features[images.cu_images[branch]])
            out[images.position[start : start + int(counts.sum())]] = np.repeat(places, counts)
        return out

    def _picture(self, span: range, run: range, spot: int) -> str:
        """Return the image at its first token. Other parts of it, after row separators, are empty."""
        images = self.sequences.images
        assert images is not None, "a picture without a place"
        first, last = images.cu_features[spot : spot + 2].tolist()
        if span.start + int(images.position[first]) != run.start:
            return ""
        return self.drawn.html(images.pictures, int(images.image[spot]), f"{last - first:,} tokens, not trained")

    def _runs(self, span: range, spans: NDArray[np.int64]) -> list[range]:
        """Split a branch into runs of one kind: trained, untrained with one source, or one image."""
        source = np.asarray(self.sequences.source[span.start : span.stop]).astype(np.int16)
        single = np.isfinite(self.values.gradient[span.start : span.stop]) | (self.numbered & (source == SAMPLED))
        kind = np.where(spans >= 0, -2 - spans, np.where(single, -1, source))
        bounds = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(span)] if len(span) else [0]
        return [span[start:stop] for start, stop in pairwise(bounds)]

    def _untrained(self, run: range) -> str:
        kind = int(self.sequences.source[run.start])
        name = "s" if kind == SAMPLED else "g" if kind == PROMPT else "p"
        if len(run) <= _RUN_HEAD + _RUN_TAIL + 40:
            return f'<span class="{name}">{self._text(run)}</span>'
        hidden = len(run) - _RUN_HEAD - _RUN_TAIL
        head, tail = self._text(run[:_RUN_HEAD]), self._text(run[-_RUN_TAIL:])
        note = _note(f"{hidden:,} tokens not shown")
        return f'<span class="{name}">{head}</span>{note}<span class="{name}">{tail}</span>'

    def _text(self, run: range) -> str:
        ids = self.sequences.ids[run.start : run.stop]
        return visible(b"".join(_short(self.token_bytes(int(token))) for token in ids))

    def _term(self, place: int) -> str:
        v, s = self.values, self.sequences
        trained = bool(np.isfinite(v.gradient[place]))
        ratio, weight, advantage = float(v.ratio[place]), float(v.weight[place]), float(v.advantages[place])
        gradient, kept = float(np.nan_to_num(v.gradient[place])), bool(v.keep[place])
        clipped = kept and bool(v.clipped[place])
        colours = {
            "p": _level(-np.sign(gradient) * (abs(gradient) / self.largest) ** 0.5),
            "a": _level(advantage / self.largest_advantage),
            "r": _level(_log(ratio)),
            "w": _level(_log(weight)),
        }
        if self.numbered:
            colours["o"] = _level(_log(float(v.old[place])))
            colours["l"] = _level(-float(s.rollout_logprobs[place]) / _SURPRISE)
            colours["e"] = _level(float(v.entropy[place]) / _SURPRISE)
        classes = ["t"] if trained else ["s"]
        classes += [f"{key}{level}" for key, level in colours.items() if level != _NEUTRAL]
        classes += ["m"] * (trained and not kept) + ["c"] * clipped
        at = f' data-t="{place}"' if self.numbered else ""
        facts = self._facts(place) if trained else self._recorded(place)
        text = visible(_short(self.token_bytes(int(s.ids[place]))))
        return f'<span class="{" ".join(classes)}"{at} data-n="{escape("  ·  ".join(facts))}">{text}</span>'

    def _origin(self, place: int) -> str:
        level = int(self.sequences.alignment_level[place])
        name = f", level {LEVELS[level]}" if level < len(LEVELS) else ""
        return f"sampled{name}, turn {int(self.sequences.turn[place])}"

    def _source(self, place: int) -> str:
        """Return whether the rollout logprob of a token was recorded, or measured by `tracegrad fill`."""
        return "filled" if self.sequences.alignment_level[place] == FILLED else "recorded"

    def _recorded(self, place: int) -> list[str]:
        """Return facts about a sampled token from its record."""
        s = self.sequences
        facts = [self._origin(place), "trained token" if s.trainable[place] else "not trained"]
        logprob, version = float(s.rollout_logprobs[place]), int(s.version[place])
        origin = self._source(place)
        facts.append(f"{origin} logprob {number(logprob)}" if np.isfinite(logprob) else "no recorded logprob")
        return facts + ([f"version {version}"] if version >= 0 else [])

    def _facts(self, place: int) -> list[str]:
        v, s = self.values, self.sequences
        gradient = float(v.gradient[place])
        kept, clipped = bool(v.keep[place]), bool(v.clipped[place])
        fate = "clipped" if kept and clipped else "kept" if kept else "masked"
        more = [("old/rollout", v.old), ("entropy", v.entropy)]
        return [
            self._origin(place),
            f"ratio {number(float(v.ratio[place]))}",
            f"weight {number(float(v.weight[place]))}",
            v.words[int(v.why[place])] if v.words else fate,
            f"advantage {float(v.advantages[place]):+.3g}",
            f"logprob {number(float(v.logprobs[place]))}, "
            f"{self._source(place)} {number(float(s.rollout_logprobs[place]))}",
            *(f"{name} {number(float(column[place]))}" for name, column in more if np.isfinite(column[place])),
            f"{percent(abs(gradient) / self.gradient)} of the trace's gradient",
            *(["raises the logprob" if gradient < 0 else "lowers the logprob"] * (self.numbered and gradient != 0)),
        ]


def _level(signed: float) -> int:
    """Map -1 .. 1 to the levels 0 to 16. 8 is neutral."""
    if not np.isfinite(signed):
        return _NEUTRAL
    return int(np.clip(np.rint(_NEUTRAL + _NEUTRAL * signed), 0, 2 * _NEUTRAL))


def _log(factor: float) -> float:
    """Return the log of a ratio or weight to base 1.5, so that a factor of 1.5 has full colour.

    Factors below 1e-6 count as 1e-6.
    """
    if not np.isfinite(factor):
        return float("nan")
    return float(np.log(max(factor, 1e-6)) / np.log(1.5))


def _short(token: bytes) -> bytes:
    """Return the bytes of a token. A long token is cut, with the number of bytes that are left out."""
    more = len(token) - _MOST_TOKEN
    return token if more <= 0 else token[:_MOST_TOKEN] + f" [{more:,} bytes more] ".encode()


def _note(text: str) -> str:
    return f'<em class="cut">⋯ {escape(text)} ⋯</em>'
