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
from tracegrad.doctor.trace_batch import Array, without_filled
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
        images: which tokens come after images; None if there is no image.
        broken: images that cannot be decoded. Their traces are left out here.
    """

    recorded: Array
    recomputed: Array
    cu_turns: Array
    first: list[Place]
    advice: Advice
    images: "ImageContext | None" = None
    broken: Hits = field(default_factory=Hits)

    def lags(self) -> LagTest:
        """Run the lag test of recorded against recomputed logprobs at lags -1, 0 and 1."""
        return lag_test(self.recorded, self.recomputed, self.cu_turns)


@dataclass(frozen=True)
class ImageContext:
    """Images before rescored tokens.

    Args:
        after_image: [M] bool: whether a token has an image before it in its branch.
        pictures, transparent: number of distinct images, and of those with transparent pixels.
        backend: library that resizes the images here.
    """

    after_image: Array
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
        rows = np.unique(images.image).tolist()
        media_types, table = images.pictures.media_type, images.pictures
        transparent = sum(is_transparent(table.bytes_of(row), media_types[row]) for row in rows)
        return cls(total[terms] > total[start], len(rows), transparent, images.rule.processor.backend)

    def describe(self, gap: Array) -> str:
        """Return how large the gaps [M] are after images and elsewhere, and what may cause a difference."""
        places = (("after images", self.after_image), ("elsewhere", ~self.after_image))
        gaps = [f"{gap[mask].mean():.2g} nats on {mask.sum():,} tokens {place}" for place, mask in places if mask.any()]
        parts = [", ".join(gaps)]
        parts.append(f"images are resized by {self.backend} here")
        if self.transparent:
            parts.append(
                f"{self.transparent:,} of {self.pictures:,} have transparent pixels, which are white here: a server "
                "with another colour showed another image"
            )
        return "; ".join(parts)


@check(
    "logprobs that differ from this model's",
    "tokens",
    note=0.01,
    costs=0.05,
    wrong=0.5,
    impact="If recorded and recomputed logprobs differ before the first step, the ratio starts far from 1. Tokens "
    "are clipped or masked for a difference that training did not cause.",
    fix="Pass the weights that sampled the traces as --model. If you did, check temperature, template and precision.",
)
def other_model(comparison: LogprobComparison) -> Hits:
    """Detect recorded logprobs that differ by more than 0.5 nats from the logprobs of --model; only with
    --check-logprobs.

    Threshold: a note from 1 % of tokens, because engines in bf16 differ on a few. Costs from 5 %: the policy has
    changed since. Wrong from half: it is another model.
    """
    differing = np.flatnonzero(np.abs(comparison.recorded - comparison.recomputed) > APART)
    if not len(differing):
        return Hits(0, len(comparison.recorded))
    index = int(differing[0])
    place = _place(comparison, index)
    description = f"recorded {comparison.recorded[index]:.3f}, the model computes {comparison.recomputed[index]:.3f}"
    return Hits(len(differing), len(comparison.recorded), place, description + _image_note(comparison))


@check(
    "recorded logprobs that the trainer computed",
    "tokens",
    costs=0.0,
    impact="The ratio is exactly 1 at every token, whatever the server sampled from. A difference between server and "
    "trainer, or an older policy, is not corrected, and no metric shows it.",
    fix="Record the logprobs that the server returned with the tokens. Recomputed logprobs are `old_logprobs`, never "
    "the logprobs of the policy that sampled.",
)
def own_logprobs(comparison: LogprobComparison) -> Hits:
    """Detect recorded logprobs that equal the recomputed ones to the last bit of float32; only with --check-logprobs.

    Threshold: 99 % of at least 64 tokens below probability 0.999. Other code for the same weights, or another batch,
    sums in another order, which changes most logprobs by some bits.
    """
    recorded, recomputed = (logprobs.astype(np.float32) for logprobs in (comparison.recorded, comparison.recomputed))
    uncertain = np.flatnonzero(recorded < -1e-3)
    same = recorded[uncertain] == recomputed[uncertain]
    if len(uncertain) < OWN_TOKENS or same.mean() < OWN_SHARE:
        return Hits(0, len(uncertain))
    return Hits(
        int(same.sum()), len(uncertain), _place(comparison, int(uncertain[same.argmax()])), "equal to the last bit"
    )


@check(
    "larger logprob differences after images than in text",
    "tokens",
    note=0.05,
    costs=0.2,
    impact="The weights and the text match the server's, but the pixels do not. The policy is trained on images that "
    "the sampling policy did not see, and the ratio starts far from 1 after them.",
    fix="Record the bytes that were sent, not a copy in another format or size. Use the server's "
    "preprocessor_config.json in the --model folder. Install torchvision: servers resize with it, and Pillow's pixels "
    "differ by one level. If the server fills transparent pixels with another colour (media_io_kwargs), record images "
    "without them.",
)
def other_pictures(comparison: LogprobComparison) -> Hits:
    """Detect tokens after images whose logprob differs from the model's by more than 0.02 nats plus four times the 95 %
    quantile of text tokens. Without text tokens the limit is 0.1 nats. Only with --check-logprobs.

    Threshold: a note from 5 % of the tokens after images; costs from 20 %. The factor of four is for a vision tower in
    bf16, which differs more than text. On a random Qwen3-VL, an image that was saved again as JPEG changed logprobs by
    up to 0.5 nats, transparent pixels on another colour by 0.8, and omitted pixels by 1.4 to 2.9. Pillow instead of
    torchvision changed them by 0.001, which is not detected.
    """
    if comparison.images is None or not comparison.images.after_image.any():
        return Hits()
    gap, behind = np.abs(comparison.recorded - comparison.recomputed), comparison.images.after_image
    threshold = ALONE if behind.all() else FURTHER + 4 * float(np.quantile(gap[~behind], 0.95))
    further = np.flatnonzero(behind & (gap > threshold))
    if not len(further):
        return Hits(0, int(behind.sum()))
    return Hits(
        len(further), int(behind.sum()), _place(comparison, int(further[0])), _image_note(comparison).removeprefix("; ")
    )


@check(
    "images that cannot be decoded",
    "images",
    wrong=0.0,
    impact="An image is decoded when its batch is sent to the device, so a run stops at that step.",
    fix="Remove their traces, or record the complete files. If a server answered after such a file, its decoder is "
    "more tolerant than Pillow, and the pixels that the policy saw are unknown.",
)
def broken_pictures(comparison: LogprobComparison) -> Hits:
    """Detect images of the rescored traces whose header can be read but whose pixels cannot: truncated, of another size
    than the header states, or with a broken stream. Only with --check-logprobs, which skips their traces.

    Threshold: any image.
    """
    return comparison.broken


def _image_note(rescored: LogprobComparison) -> str:
    return (
        ""
        if rescored.images is None
        else f"; {rescored.images.describe(np.abs(rescored.recorded - rescored.recomputed))}"
    )


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
    aligned = align(
        traces,
        tokenizer,
        logprob_kind=logprob_kind,
        sampling_defaults=sampling_defaults,
        server_profile=server_profile,
        on_error="skip",
    )
    index_of = {trace.id: index for index, trace in enumerate(traces)}
    sequences, broken = _without_broken_images(aligned, lambda row: Place.of(traces, index_of[aligned.trace_ids[row]]))
    if not len(sequences.terms) and not broken.count:
        return None
    terms = sequences.terms[~np.isnan(without_filled(sequences)[sequences.terms])]
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
    image_context = ImageContext.of(sequences, terms)
    return LogprobComparison(
        sequences.rollout_logprobs[terms].astype(np.float64), recomputed, cu, first, advice, image_context, broken
    )


def _without_broken_images(sequences: Sequences, place: Callable[[int], Place]) -> tuple[Sequences, Hits]:
    """Return the sequences without traces that show an undecodable image, and the hits of such images.

    `place` returns the place of a trace, given its row in the sequences.
    """
    if (images := sequences.images) is None:
        return sequences, Hits()
    table, errors = images.pictures, dict[int, str]()
    rows = np.unique(images.image).tolist()
    for row in rows:
        size, name = (
            (int(table.width[row]), int(table.height[row])),
            f"image {table.digest[row].tobytes().hex()[:16]}",
        )
        try:
            decode_image(table.bytes_of(row), name, table.media_type[row], size)
        except ReadError as error:
            errors[row] = str(error)
    if not errors:
        return sequences, Hits(0, len(rows))
    spans = np.flatnonzero(np.isin(images.image, list(errors)))
    owners = sequences.trace[np.searchsorted(images.cu_images, spans, side="right") - 1]
    intact = np.setdiff1d(np.arange(sequences.traces), owners)
    hits = Hits(len(errors), len(rows), place(int(owners[0])), errors[int(images.image[spans[0]])])
    return subset(sequences, intact)[0], hits


def _recomputed(sequences: Sequences, model: Path) -> Array:
    """Return [T] float64 nats; NaN at tokens that are not trained."""
    try:
        import torch

        from tracegrad.model import logprobs
        from tracegrad.trainer.lora import load_model
    except ImportError as error:
        raise ArgumentError(
            f"TG-DOCTOR-004: --check-logprobs needs {error.name}, which is not installed. "
            "The other checks work without it. Run pip install 'tracegrad[train]', or omit --check-logprobs."
        ) from error
    out = np.full(sequences.tokens, np.nan)
    longest = int(np.diff(sequences.cu_seqlens).max())
    policy = load_model(model)
    with torch.no_grad():
        for step in pack(sequences, np.zeros(sequences.traces), tokens_per_row=max(ROW, longest), per="trace"):
            for batch in step.batches:
                out[step.origin[batch.term]] = logprobs(policy, batch.to("cpu")).double().numpy()
    return out
