"""Give the packed steps of a run that is driven step by step."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tiny import sampled, tiny_model
from tracegrad import advantage
from tracegrad.packing import pack
from tracegrad.trainer.schedule import Schedule


@pytest.fixture(scope="module")
def traces():
    """96 traces, of which every third token is of version 3, the rest of 4 or unknown."""
    found = sampled(tiny_model())
    version = np.where(found.trainable, np.arange(found.tokens) % 3 + 3, -1)
    return replace(found, version=np.where(version == 5, -1, version).astype(np.int32))


def steps_of(traces, objective, epoch, **more):
    """The steps of an epoch as anybody packs them."""
    given = {
        "tokens_per_row": 64,
        "groups_per_step": 6,
        "requirements": objective.requirements,
        "seed": Schedule(1).shuffle_seed(epoch),
    }
    return pack(traces, advantage.group_mean(traces.reward, traces.group), per="trace", **given | more)
