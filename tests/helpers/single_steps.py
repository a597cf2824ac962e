"""Compare a step that is packed alone with the same step of all."""

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from tracegrad.alignment.sequences import Sequences
from tracegrad.packing import Batch, Step


@st.composite
def traces(draw):
    """Traces that begin alike, of several branches, some without a term, in groups that stand apart."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    count = draw(st.integers(2, 24))
    branches = rng.integers(1, 4, count)
    lengths = rng.integers(2, 14, int(branches.sum()))
    cu = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 2, cu[-1])
    trainable = rng.random(cu[-1]) < draw(st.sampled_from([0.05, 0.4]))
    trainable[cu[:-1]] = False
    trainable[1] = True
    return Sequences.from_arrays(
        ids,
        cu,
        -rng.random(cu[-1]),
        trainable,
        trace=np.repeat(np.arange(count), branches),
        group=rng.integers(0, draw(st.integers(1, 8)), count) if draw(st.booleans()) else np.arange(count) // 3,
        inv_temperature=rng.choice([1.0, 2.0], cu[-1]),
        version=rng.integers(-1, 3, cu[-1]),
    )


def assert_same(one: Step | Batch, other: Step | Batch):
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "batches":
            assert len(a) == len(b)
            for left, right in zip(a, b, strict=True):
                assert_same(left, right)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name
