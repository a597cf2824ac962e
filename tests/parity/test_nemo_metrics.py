"""NeMo-RL's metrics beside ours: ClippedPGLossFn, where its package can be imported."""

from __future__ import annotations

import pytest
import torch

from metric_cases import KINDS, compare, drawn, merged
from tracegrad.metrics import peers


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("truncation", "bounds"),
    [(None, (None, 2.0)), ("tis", (None, 1.2)), ("icepop", (0.8, 1.25)), ("seq-mask-tis", (0.98, 1.02))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_policy_gradient(close, fired, kind, truncation, bounds, kl_type, sequence):
    module = pytest.importorskip("nemo_rl.algorithms.loss.loss_functions")
    if sequence and truncation == "seq-mask-tis":
        pytest.skip("NeMo-RL refuses the two together")
    data = drawn(kind)
    config = module.ClippedPGLossConfig(
        reference_policy_kl_penalty=0.0,
        reference_policy_kl_type=kl_type,
        use_importance_sampling_correction=truncation is not None,
        truncated_importance_sampling_type=truncation,
        truncated_importance_sampling_ratio=bounds[1] if truncation else None,
        truncated_importance_sampling_ratio_min=bounds[0],
        sequence_level_importance_ratios=sequence,
        token_level_loss=not sequence,
    )

    def padded(values):
        return torch.nn.functional.pad(values, (1, 0))

    batch = {
        "token_mask": padded(data.mask.double()),
        "sample_mask": torch.ones(len(data.mask), dtype=torch.float64),
        "advantages": padded(data.advantages),
        "prev_logprobs": padded(data.old),
        "generation_logprobs": padded(data.rollout),
    }
    counts = torch.tensor(float(len(data.mask))), data.mask.sum()
    _, theirs = module.ClippedPGLossFn(config)(data.theta, batch, *counts)
    theirs = {name: value for name, value in theirs.items() if name in {row.name for row in peers.NEMO}}
    options = {"kl_type": kl_type, "truncation": truncation, "bounds": bounds, "sequence_level": sequence}
    ours = merged(
        data,
        lambda rows, part: peers.as_nemo(part(data.theta), part(data.old), part(data.rollout), rows, **options),
    )
    if sequence:  # [B, 1] * [B] in its masked mean: the sum over rows, where the mean is meant
        theirs["sampling_importance_ratio"] /= len(data.mask)
    compare(close, fired, "NeMo-RL", ours, theirs, 1e-6)
