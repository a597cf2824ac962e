"""Compare recorded logprobs with the model's own, on a sample of traces. Only this module of `doctor` needs torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.trace import Traces
from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.shift_test import LagTest, lag_test
from tracegrad.doctor.trace_batch import Array
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.images.processor import decode_image, is_transparent
from tracegrad.packing import pack
from tracegrad.recipes import Advice, for_data
from tracegrad.trainer.token_log import subset

APART = 0.5  # nats between a recorded and a recomputed logprob
FURTHER, ALONE = 0.02, 0.1  # nats after images: above what text tokens show, and without text tokens
OWN_TOKENS, OWN_SHARE = 64, 0.99  # least number of tokens, and least share of them equal to the last bit
ROW = 8192  # tokens of a packed row, or those of the longest branch if it has more


@dataclass(frozen=True)
class LogprobComparison:
    """Recorded and recomputed logprobs of the same trained tokens.

    Args:
        recorded, recomputed: [M] float64 nats.
        cu_turns: [N+1] offsets of the turns.
        first: place of each turn, N places.
        advice: the recipe recommended by what was measured on these traces.
        seen: which tokens come after images; None if there is no image.
        broken: images that cannot be decoded. Their traces are left out here.
    """

    recorded: Array
    recomputed: Array
    cu_turns: Array
    first: list[Place]
    advice: Advice
    seen: "ImageContext | None" = None
    broken: Hits = field(default_factory=Hits)

    def lags(self) -> LagTest:
        """Run the lag test of recorded against recomputed logprobs at lags -1, 0 and 1."""
        return lag_test(self.recorded, self.recomputed, self.cu_turns)


@dataclass(frozen=True)
class ImageContext:
    """Images before rescored tokens.

    Args:
        behind: [M] bool: whether a token has an image before it in its branch.
        pictures, transparent: number of distinct images, and of those with transparent pixels.
        backend: library that resizes the images here.
    """

    behind: Array
    pictures: int
    transparent: int
    backend: str

    @classmethod
    def of(cls, sequences: Sequences, terms: Array) -> "ImageContext | None":
        """Return the images before these tokens [M]; None if there are no images."""
        if (images := sequences.images) is None or not len(images):
            return None
        marks = np.zeros(sequences.tokens + 1, np.int64)
        marks[images.tokens(sequences.cu_seqlens) + 1] = 1
        total = marks.cumsum()
        start = np.repeat(sequences.cu_seqlens[:-1], np.diff(sequences.cu_seqlens))[terms]
        rows = np.unique(images.picture).tolist()
        media_types, table = images.pictures.media_type, images.pictures
        transparent = sum(is_transparent(table.bytes_of(row), media_types[row]) for row in rows)
        return cls(total[terms] > total[start], len(rows), transparent, images.rule.processor.backend)

    def words(self, gap: Array) -> str:
        """Return how large the gaps [M] are after images and elsewhere, and what may cause a difference."""
        places = (("behind pictures", self.behind), ("elsewhere", ~self.behind))
        gaps = [f"{gap[mask].mean():.2g} nats on {mask.sum():,} tokens {place}" for place, mask in places if mask.any()]
        parts = [", ".join(gaps)]
        parts.append(f"pictures are resized by {self.backend} here")
        if self.transparent:
            parts.append(
                f"{self.transparent:,} of {self.pictures:,} have transparent pixels, which show white here: a server "
                "with another colour saw another picture"
            )
        return "; ".join(parts)


@check(
    "logprobs that this model does not give",
    "tokens",
    note=0.01,
    costs=0.05,
    wrong=0.5,
    hurts="Where recorded and recomputed logprobs differ before the first step, the ratio starts far from 1: terms are "
    "clipped or masked for a difference that no training made.",
    cure="Give --model the weights that sampled. If it has them, look at temperature, template and precision.",
)
def other_model(found: LogprobComparison) -> Hits:
    """Sees recorded logprobs more than 0.5 nats from those of the model in --model; only with --rescore.

    Threshold: a note from 1 % of tokens, as engines in bf16 differ on a few; it costs from 5 %, where the policy has
    moved on; wrong from half, where it is another model.
    """
    differing = np.flatnonzero(np.abs(found.recorded - found.recomputed) > APART)
    if not len(differing):
        return Hits(0, len(found.recorded))
    index = int(differing[0])
    place = _place(found, index)
    description = f"recorded {found.recorded[index]:.3f}, the model gives {found.recomputed[index]:.3f}"
    return Hits(len(differing), len(found.recorded), place, description + _image_note(found))


@check(
    "recorded logprobs that are the trainer's own",
    "tokens",
    costs=0.0,
    hurts="The ratio is exactly 1 at every token, whatever the server sampled from: a difference between server and "
    "trainer, or an older policy, is not corrected, and no metric shows it.",
    cure="Record the logprobs that the server returned with the tokens. Recomputed ones are `old_logprobs`, never "
    "those of the policy that sampled.",
)
def own_logprobs(found: LogprobComparison) -> Hits:
    """Sees recorded logprobs that are equal to the recomputed ones to the last bit of float32; only with --rescore.

    Threshold: 99 % of at least 64 tokens below probability 0.999: other code for the same weights, or another batch,
    sums in another order, which moves most logprobs by some bits.
    """
    recorded, recomputed = (logprobs.astype(np.float32) for logprobs in (found.recorded, found.recomputed))
    uncertain = np.flatnonzero(recorded < -1e-3)
    same = recorded[uncertain] == recomputed[uncertain]
    if len(uncertain) < OWN_TOKENS or same.mean() < OWN_SHARE:
        return Hits(0, len(uncertain))
    return Hits(int(same.sum()), len(uncertain), _place(found, int(uncertain[same.argmax()])), "equal to the last bit")


@check(
    "logprobs behind pictures that are further off than those of text",
    "tokens",
    note=0.05,
    costs=0.2,
    hurts="The weights and the text are the server's, and the pixels are not: the policy is trained on pictures that "
    "the one that was sampled did not see, and the ratio begins far from 1 where it matters.",
    cure="Record the bytes that were sent, not a copy in another format or size. Give --model the server's "
    "preprocessor_config.json. Install torchvision: servers resize by it, and Pillow's pixels differ by a level. A "
    "server that lays transparent pixels on another colour (media_io_kwargs) needs pictures without them.",
)
def other_pictures(found: LogprobComparison) -> Hits:
    """Sees tokens behind pictures whose logprob is more than 0.02 nats, and four times what 95 % of those of text are,
    from the model's; 0.1 nats where there is no text. Only with --rescore.

    Threshold: a note from 5 % of the tokens behind pictures; it costs from 20 %. A vision tower in bf16 is further off
    than text, hence four times. On a random Qwen3-VL a picture that was written again as JPEG moved logprobs by up to
    0.5 nats, alpha on another colour by 0.8, forgotten pixels by 1.4 to 2.9; Pillow in place of torchvision by 0.001,
    which is not found.
    """
    if found.seen is None or not found.seen.behind.any():
        return Hits()
    gap, behind = np.abs(found.recorded - found.recomputed), found.seen.behind
    threshold = ALONE if behind.all() else FURTHER + 4 * float(np.quantile(gap[~behind], 0.95))
    further = np.flatnonzero(behind & (gap > threshold))
    if not len(further):
        return Hits(0, int(behind.sum()))
    return Hits(len(further), int(behind.sum()), _place(found, int(further[0])), _image_note(found).removeprefix("; "))


@check(
    "pictures that cannot be decoded",
    "pictures",
    wrong=0.0,
    hurts="A picture is decoded when its batch is sent: a run stops there, at whatever step that is.",
    cure="Leave their traces out, or record the files whole. Where a server answered after such a file, it was read "
    "by more forgiving code than Pillow's, and what the policy saw is not known.",
)
def broken_pictures(found: LogprobComparison) -> Hits:
    """Sees pictures of the rescored traces whose header is read and whose pixels are not: cut off, of another size than
    the header says, with a broken stream; only with --rescore, which leaves their traces out.

    Threshold: any picture.
    """
    return found.broken


def _image_note(rescored: LogprobComparison) -> str:
    return "" if rescored.seen is None else f"; {rescored.seen.words(np.abs(rescored.recorded - rescored.recomputed))}"


def _place(rescored: LogprobComparison, at: int) -> Place:
    turn = int(np.searchsorted(rescored.cu_turns, at, side="right")) - 1
    return replace(rescored.first[turn], token=at - int(rescored.cu_turns[turn]))


def rescore(
    traces: Traces,
    model: Path,
    tokenizer: Tokenizer,
    logprob_kind: str | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    server_profile: str | None = None,
) -> LogprobComparison | None:
    """Return the model's logprobs of the sampled tokens of these traces.

    Return None if no token is trained and no image is broken. If no token has a recorded logprob, there is nothing to
    compare: the result has only the advice.
    """
    settings: dict[str, Any] = {
        "logprob_kind": logprob_kind,
        "sampling_defaults": sampling_defaults,
        "server_profile": server_profile,
    }
    aligned = align(traces, tokenizer, **settings, on_error="skip")
    index_of = {trace.id: index for index, trace in enumerate(traces)}
    sequences, broken = _without_broken_images(aligned, lambda row: Place.of(traces, index_of[aligned.trace_ids[row]]))
    if not len(sequences.terms) and not broken.count:
        return None
    terms = sequences.terms[~np.isnan(sequences.rollout_logprobs[sequences.terms])]
    if not len(terms):
        return LogprobComparison(np.zeros(0), np.zeros(0), np.zeros(1, np.int64), [], for_data(aligned), broken=broken)
    recomputed = _recomputed(sequences, model)
    advice, recomputed = for_data(sequences, recomputed), recomputed[terms]
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[terms]
    turn = sequences.cu_turns[owner] + sequences.turn[terms]
    start = np.flatnonzero(np.concatenate([[True], turn[1:] != turn[:-1]]))
    first = [
        Place.of(traces, index_of[trace_id], int(sequences.turn[terms[index]]))
        for index in start
        for trace_id in [sequences.trace_ids[owner[index]]]
    ]
    cu = np.concatenate([start, [len(terms)]])
    seen = ImageContext.of(sequences, terms)
    return LogprobComparison(
        sequences.rollout_logprobs[terms].astype(np.float64), recomputed, cu, first, advice, seen, broken
    )


def _without_broken_images(sequences: Sequences, place: Callable[[int], Place]) -> tuple[Sequences, Hits]:
    """Return the sequences without traces that show an undecodable image, and the hits of such images.

    `place` returns the place of a trace, given its row in the sequences.
    """
    if (images := sequences.images) is None:
        return sequences, Hits()
    table, errors = images.pictures, dict[int, str]()
    rows = np.unique(images.picture).tolist()
    for row in rows:
        size, name = (
            (int(table.width[row]), int(table.height[row])),
            f"picture {table.digest[row].tobytes().hex()[:16]}",
        )
        try:
            decode_image(table.bytes_of(row), name, table.media_type[row], size)
        except ReadError as error:
            errors[row] = str(error)
    if not errors:
        return sequences, Hits(0, len(rows))
    spans = np.flatnonzero(np.isin(images.picture, list(errors)))
    owners = sequences.trace[np.searchsorted(images.cu_images, spans, side="right") - 1]
    kept = np.setdiff1d(np.arange(sequences.traces), owners)
    hits = Hits(len(errors), len(rows), place(int(owners[0])), errors[int(images.picture[spans[0]])])
    return subset(sequences, kept)[0], hits


def _recomputed(sequences: Sequences, model: Path) -> Array:
    """Return [T] float64 nats; NaN at tokens that are not trained."""
    try:
        import torch

        from tracegrad.model import logprobs
        from tracegrad.trainer.lora import load_model
    except ImportError as error:
        raise ArgumentError(
            f"TG-DOCTOR-004: --rescore needs {error.name}, which is not installed. The other checks work without it. "
            "pip install 'tracegrad[train]', or leave --rescore out."
        ) from error
    out = np.full(sequences.tokens, np.nan)
    longest = int(np.diff(sequences.cu_seqlens).max())
    policy = load_model(model)
    with torch.no_grad():
        for step in pack(sequences, np.zeros(sequences.traces), token_budget=max(ROW, longest), per="trace"):
            for batch in step.batches:
                out[step.origin[batch.term]] = logprobs(policy, batch.to("cpu")).double().numpy()
    return out
