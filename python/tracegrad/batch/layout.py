"""The rows of a plan as the core lays them out, and as the batches that are made of them.

Here are `Layout`, `compared_ids`, by which rows are laid out (two pictures of one size are never the same text), and
`towers_as_terms`, what pictures cost beside tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch.cost import ModelShape
from tracegrad.batch.step import Batch, Counts, Floats, Ints
from tracegrad.pictures import Images, RowImages
from tracegrad.pictures.spans import Keys
from tracegrad.sequence import Sequences


def compared_ids(sequences: Sequences) -> tuple[Ints, Keys | None]:
    """[T] int32: the ids by which branches are compared: those of pictures are numbers that no other picture has."""
    ids = np.require(sequences.ids, np.int32, ["C", "A"])
    return (ids, None) if sequences.images is None else sequences.images.keyed(ids, sequences.cu_seqlens)


def towers_as_terms(sequences: Sequences, length: Ints, shape: ModelShape) -> Ints:
    """[N] int32: what the pictures of each branch cost in the tower, as so many terms of the head.

    Args:
        length: [N] tokens of each branch that are laid out.
        shape: of the model.
    """
    out = np.zeros(len(length), np.int32)
    if (images := sequences.images) is not None and shape.feature_flop:
        branch = np.repeat(np.arange(len(length)), np.diff(images.cu_images))
        owner = np.repeat(branch, np.diff(images.cu_features))
        shown = np.bincount(owner[images.at < length[owner]], minlength=len(length))
        out += np.rint(shown * (shape.feature_flop / shape.term_flop)).astype(np.int32)
    return out


class Layout(NamedTuple):
    """The arrays of `_core.pack_lay`, and what `compared_ids` put in place of the ids of pictures."""

    ids: Ints
    positions: Ints
    tree_end: Ints
    cu_tokens: Counts
    read: Ints
    target: Ints
    inv_temperature: Floats
    row: Ints
    term: Ints
    cu_heads: Counts
    cu_row_terms: Counts
    cu_rows: Counts
    origin: NDArray[np.int64]
    branch: Ints
    cu_terms: Counts
    images: Images | None = None
    keys: Keys | None = None

    def batch(self, row: int) -> Batch:
        """A row."""
        tokens = slice(self.cu_tokens[row], self.cu_tokens[row + 1])
        heads = slice(self.cu_heads[row], self.cu_heads[row + 1])
        terms = slice(self.cu_row_terms[row], self.cu_row_terms[row + 1])
        ids, images = self.ids[tokens], None
        if self.images is not None and self.keys is not None:
            at, cu, picture = self.keys.read(ids)
            if len(at):
                ids = ids.copy()
                ids[at] = self.images.rule.pad
                images = RowImages(at, cu, picture, self.images.rule, self.images.pictures)
        return Batch(
            ids=ids,
            positions=self.positions[tokens],
            tree_end=self.tree_end[tokens],
            read=self.read[heads],
            target=self.target[heads],
            inv_temperature=self.inv_temperature[heads],
            row=self.row[terms],
            term=self.term[terms],
            images=images,
        )
