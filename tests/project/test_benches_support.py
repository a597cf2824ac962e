"""The benchmarks of the sampler's support: their data, and the records that they train on."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "examples" / "quickstart")]
import kept_sets
import support_clerk
import support_size

import rollout
from truncated import truncated


def test_sizes_are_those_of_the_measured_sampler():
    sizes = kept_sets.sizes(200_000, np.random.default_rng(0))
    assert sizes.mean() == pytest.approx(8, abs=0.2)
    assert np.median(sizes) == 2
    assert np.percentile(sizes, 99) == pytest.approx(82, abs=3)
    assert (sizes == 1).mean() == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(("source", "most"), [("zipf", 16), ("uniform", 24)])
def test_the_support_takes_few_bytes_in_memory_and_on_disk(source, most):
    found = support_size.measure(source, 20)
    assert max(found["memory"], found["saved"]) < most
    # A set of one id takes 1 byte without it; a token without a set takes 1 byte and 8 / 64 of its start.
    assert found["memory"] == pytest.approx(found["of_sets"] + 1 + 2 * 8 / 64, abs=0.01)


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_the_example_keeps_the_ids_that_vllm_keeps(top_p):
    scores = 3 * torch.randn(40, 640, generator=torch.Generator().manual_seed(0))
    kept = rollout.truncate(scores, top_p).isfinite().numpy()
    expected = np.stack([np.isfinite(truncated(row, top_p=top_p)) for row in scores.numpy()])
    np.testing.assert_array_equal(kept, expected)


def test_the_records_list_the_kept_ids_and_the_logprobs_over_them(tmp_path):
    sequences = {
        name: support_clerk.record(arm, 0.8, 1, 0, tmp_path / name) for name, arm in support_clerk.ARMS.items()
    }
    replayed, vocabulary, untruncated = (sequences[name] for name in ("replayed", "vocabulary", "untruncated"))
    assert (np.diff(replayed.support.rows(replayed.terms).offsets) > 0).all()
    assert (replayed.reshaped.any(), vocabulary.reshaped.all(), untruncated.reshaped.any()) == (False, True, False)
    assert (vocabulary.support, untruncated.support) == (None, None)
    np.testing.assert_array_equal(replayed.ids, vocabulary.ids)
    assert support_clerk.mismatch(replayed)["distance"] < 1e-5
    assert support_clerk.mismatch(untruncated)["distance"] < 1e-5
    # Over the vocabulary, a ratio is the mass that top_p keeps: at least 0.8.
    assert 0.8 <= support_clerk.mismatch(vocabulary)["ratio_mean"] < 0.999
