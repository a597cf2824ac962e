"""Image checks, run on each batch: images missing from the record, unplaced in a prompt, or expanded twice."""

import numpy as np

from tracegrad.data.codes import SAMPLED
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import Array, TraceBatch


@check(
    "images missing from the record, or audio, video or unknown parts before a turn",
    wrong=0.0,
    impact="Token ids do not show the content of an image. A forward pass without the image returns logprobs that "
    "are off by nats, and two images of one size have the same ids. Tokens after such an image, audio, video or a part "
    "of an unknown kind are not trained.",
    fix="Record images by their bytes: a data URL, without `uuid`, of PNG, JPEG, WebP or GIF. tracegrad does not "
    "download addresses, and a server may use an older image for a `uuid`. Audio and video are not supported: remove "
    "those traces. A part of another kind is named in the line `found`: write it as `text` if the model saw text.",
    hides=("mismatches", "other_prompt"),
)
def media(look: TraceBatch) -> Hits:
    """Detect images recorded as an address or a path, with a `uuid`, or in a format that is not read; audio and video;
    and placeholder ids that no image of the record explains (R32). Recorded images are not a finding.

    Threshold: any turn, because no token of such a turn can be trained.
    """
    return look.mismatch_hits(32)


@check(
    "prompts whose ids do not fit their images",
    costs=0.0,
    wrong=0.01,
    impact="It is unclear which ids belong to which image. The policy would see an image at another place, or with "
    "another number of features. These turns are not trained.",
    fix="The cause depends on the line `found`. Other lengths: another image processor was used, so pass the folder "
    "that the server loaded as --model, with its preprocessor_config.json. Fewer places: a message lost its image, or "
    "the record has an image that was not sent. More ids: expanded ids were sent again with the images; send one id "
    "per image. No ids: record return_token_ids.",
    hides=("mismatches", "other_prompt"),
)
def picture_unplaced(look: TraceBatch) -> Hits:
    """Detect turns whose recorded prompt lacks a place of the right length for an image of their messages (R34). Causes
    are other image processor options, an image left out, ids expanded twice, or no ids at all.

    Threshold: any turn; wrong from 1 % of turns, because the processor of another folder has other lengths for most
    sizes.
    """
    return look.mismatch_hits(34)


@check(
    "images that occur twice in a prompt",
    costs=0.0,
    impact="Expanded ids were sent again with their images, so the server expanded the first id of each image again. "
    "The policy was sampled after image ids that it read as words. The turn is trained as it was sampled, in a "
    "context that does not occur if the model is served correctly.",
    fix="Send prompts with one id per image, or send messages. Keep these traces separate from others.",
)
def doubled_pictures(look: TraceBatch) -> Hits:
    """Detect prompts with as many image ids outside images as a second expansion leaves: n - 1 for each image of n
    features.

    Threshold: any turn with two or more such ids. A single one can be a word that a user wrote.
    """
    pads, features, starts = _before(look)
    hit = (pads >= 2) & (starts > 0) & (pads >= features - starts)

    def describe(g: int) -> str:
        return f"{pads[g]} image ids in addition to the {features[g]} of {starts[g]} images"

    return look.hits(hit, None, describe)


@check(
    "prompts recorded as sent, with one id per image",
    note=0.0,
    impact="None. The server expanded each image to one id per feature, and tracegrad does the same with the image "
    "processor of --model. If the server had other options, its prompt was different, and the record does not show "
    "that.",
    fix="No fix is needed. With return_token_ids, the record has the prompt as the policy read it.",
)
def pictures_as_sent(look: TraceBatch) -> Hits:
    """Detect turns whose recorded prompt has one id per image and was expanded by tracegrad (R35).

    Threshold: any turn. It is a note because the ids of the model's processor equal the server's ids.
    """
    return look.mismatch_hits(35)


def _before(look: TraceBatch) -> tuple[Array, Array, Array]:
    """Return three [G] int64 arrays that count, before each turn: pad ids outside images, image features, images.

    Counting starts at the beginning of the turn's branch. Pad ids that the policy sampled are not counted.
    """
    sequences, images = look.sequences, look.sequences.images
    out = np.zeros((3, look.generations), np.int64)
    if images is None or not len(look.sampled):
        return out[0], out[1], out[2]
    marks = np.zeros((3, sequences.tokens + 1), np.int64)
    tokens = images.tokens(sequences.cu_seqlens)
    marks[1, tokens + 1] = 1
    marks[2, tokens[images.cu_features[:-1]] + 1] = 1
    prompt_pads = (sequences.ids == images.rule.pad) & (sequences.source != SAMPLED)
    marks[0, 1:] = prompt_pads & (marks[1, 1:] == 0)
    running = marks.cumsum(axis=1)
    generations, first = np.unique(look.sampled_generation, return_index=True)
    position = look.sampled[first]
    out[:, generations] = running[:, position] - running[:, sequences.cu_seqlens[look.branch[position]]]
    return out[0], out[1], out[2]
