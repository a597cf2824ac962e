"""Image checks, run on each batch: images missing from the record, unplaced in a prompt, or expanded twice."""

import numpy as np

from tracegrad.data.codes import SAMPLED
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import Array, TraceBatch


@check(
    "pictures that the record does not hold, sound or video before a turn",
    wrong=0.0,
    hurts="Ids do not say what a picture shows: a forward pass without it gives logprobs that are nats away, and two "
    "pictures of one size have the same ids. Nothing behind one is trained.",
    cure="Record pictures by their bytes: a data URL, without `uuid`, of PNG, JPEG, WebP or GIF. Nothing is fetched "
    "from an address; a server may answer a `uuid` with an older picture. Sound and video have no road: leave those "
    "traces out.",
    hides=("drift", "other_prompt"),
)
def media(look: TraceBatch) -> Hits:
    """Sees pictures at an address or a path, with a `uuid`, or of a kind that is not read; sound and video; and
    placeholder ids that no picture of the record explains (R32). Pictures that the record holds are no finding.

    Threshold: any turn, as nothing of such a turn can be trained.
    """
    return look.drift_hits(32)


@check(
    "prompts whose ids do not fit their pictures",
    costs=0.0,
    wrong=0.01,
    hurts="Which ids stand for which picture is not known: the policy would see a picture at another place, or another "
    "number of its features. These turns are held, not trained.",
    cure="By what was found: other lengths are another image processor's, so give --model the folder that the server "
    "loaded, with its preprocessor_config.json; fewer places mean that a message lost its picture, or that the record "
    "has one more than was sent; more ids mean that expanded ids were sent again, with the pictures: send them with "
    "one id for each. No ids: record return_token_ids.",
    hides=("drift", "other_prompt"),
)
def picture_unplaced(look: TraceBatch) -> Hits:
    """Sees turns whose recorded prompt has no place, or a place of another length, for a picture of their messages
    (R34): options of another image processor, a picture left out, ids expanded twice, or no ids at all.

    Threshold: any turn; wrong from 1 % of turns, as another folder's processor has other lengths for most sizes.
    """
    return look.drift_hits(34)


@check(
    "pictures that stand in a prompt twice",
    costs=0.0,
    hurts="Ids that were expanded already were sent again with their pictures, so the server expanded the first of "
    "them once more: the policy was sampled behind ids of pictures that it read as words. It is trained as it was "
    "sampled, in a context that it will not meet where it is served rightly.",
    cure="Send prompts with one id for each picture, or the messages; keep these traces apart.",
)
def doubled_pictures(look: TraceBatch) -> Hits:
    """Sees prompts that hold as many ids of pictures outside of their pictures as a second expansion leaves: of
    pictures of n features each, n - 1.

    Threshold: any turn with two such ids or more; a single one is a word that a user wrote.
    """
    pads, features, starts = _before(look)
    hit = (pads >= 2) & (starts > 0) & (pads >= features - starts)

    def describe(g: int) -> str:
        return f"{pads[g]} ids of pictures beside the {features[g]} of {starts[g]} pictures"

    return look.hits(hit, None, describe)


@check(
    "prompts that were recorded as they were sent, with one id for each picture",
    note=0.0,
    hurts="Nothing: the server gave each picture as many ids as it has features, and so does tracegrad, by the image "
    "processor of --model. A server with other options had another prompt, which nothing in the record shows.",
    cure="None is needed; with return_token_ids the prompt stands in the record as the policy read it.",
)
def pictures_as_sent(look: TraceBatch) -> Hits:
    """Sees turns whose recorded prompt has one id for each picture, and was expanded here (R35).

    Threshold: any turn; a note, because the ids of the model's processor are those of the server's.
    """
    return look.drift_hits(35)


def _before(look: TraceBatch) -> tuple[Array, Array, Array]:
    """Return three [G] int64 arrays that count, before each turn: pad ids outside images, image features, images.

    Counting starts at the beginning of the turn's branch. Pad ids that the policy sampled are not counted.
    """
    sequences, images = look.sequences, look.sequences.images
    out = np.zeros((3, look.generations), np.int64)
    if images is None or not len(look.own):
        return out[0], out[1], out[2]
    marks = np.zeros((3, sequences.tokens + 1), np.int64)
    tokens = images.tokens(sequences.cu_seqlens)
    marks[1, tokens + 1] = 1
    marks[2, tokens[images.cu_features[:-1]] + 1] = 1
    prompt_pads = (sequences.ids == images.rule.pad) & (sequences.source != SAMPLED)
    marks[0, 1:] = prompt_pads & (marks[1, 1:] == 0)
    running = marks.cumsum(axis=1)
    generations, first = np.unique(look.own_generation, return_index=True)
    position = look.own[first]
    out[:, generations] = running[:, position] - running[:, sequences.cu_seqlens[look.branch[position]]]
    return out[0], out[1], out[2]
