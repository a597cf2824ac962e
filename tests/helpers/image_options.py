"""Check `images.vision_encoder`, a row of test_every_option.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

import tracegrad as tg
import vlm
from picture_pages import GOLDEN


def images_tower(folder: Path) -> None:
    """A run on a recording with pictures moves the weights of what sees them."""
    model, records = vlm.folder(folder / "vlm"), tg.read(GOLDEN)
    sequences = tg.align(records, tg.Tokenizer.from_pretrained(model))
    rewards = np.arange(sequences.traces, dtype=np.float32)[:, None] % 3
    sequences = replace(sequences, rewards=rewards, group=np.zeros(sequences.traces, np.int32), group_names=("g",))
    options = {"images.vision_encoder": "trained", "data.holdout": 0.0, "optimizer.lr": 1e-3}
    options["data.accept_truncated_sampling"] = True
    done = tg.train(model, sequences, out=folder / "out", options=options)
    before, after = (load_file(each / "model.safetensors") for each in (model, done.checkpoint))
    assert any("visual" in name and not before[name].equal(after[name]) for name in before)
