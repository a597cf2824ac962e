"""Predicted FLOP: what sharing gains, and how ranks are balanced by it."""

from types import SimpleNamespace

import numpy as np
import pytest

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.packing import ModelShape, pack

QWEN3_4B = ModelShape()
QWEN3_06B = ModelShape(hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936)


def groups(prompt, response, size):
    """`size` traces that share a prompt; every response token is a term."""
    length = prompt + response
    ids = np.tile(np.arange(length), size)
    ids[np.arange(len(ids)) % length >= prompt] += np.repeat(np.arange(size) * response, response)
    trainable = np.arange(len(ids)) % length >= prompt
    cu = np.arange(size + 1) * length
    return Sequences.from_arrays(ids, cu, np.full(len(ids), -1.0), trainable, group=np.zeros(size, int))


def test_flop_of_a_shape_by_hand():
    # H 2, one layer, MLP 3, one head of width 4, V 5. q, k, v, o: 4 * 2 * 4 = 32 weights, MLP 3 * 2 * 3 = 18.
    shape = ModelShape(hidden=2, layers=1, intermediate=3, heads=1, kv_heads=1, head_dim=4, vocab=5)
    assert shape.token_flop == 6 * (32 + 18)
    assert shape.pair_flop == 3.5 * 4 * 4
    assert shape.term_flop == 6 * 2 * 5


# By hand for P 4096, R 1024, G 8 of Qwen3-4B, in TFLOP: linear 111.6, attention 27.1 and head 2.4 a branch, 1128 for
# eight; shared 12,288 tokens 267.9, 46.1 M pairs 95.2, head 19.1: 382.2. The ratio is 2.95.
@pytest.mark.parametrize(
    ("prompt", "response", "size", "large", "small"),
    [
        (512, 2048, 8, 1.17, 1.13),
        (1024, 1024, 4, 1.52, 1.41),
        (2048, 512, 16, 3.57, 3.06),
        (4096, 1024, 8, 2.95, 2.59),
        (8192, 1024, 4, 2.77, 2.59),
    ],
)
def test_the_predicted_gain_of_a_group(prompt, response, size, large, small):
    s = groups(prompt, response, size)
    for shape, expected in ((QWEN3_4B, large), (QWEN3_06B, small)):
        [step] = pack(s, np.ones(size), tokens_per_row=1 << 20, share_prefixes=True, shape=shape)
        assert step.sharing.flop_ratio == pytest.approx(expected, abs=0.006)
        assert step.sharing.tree_tokens == prompt + size * response
        assert len(step.batches[0].ids) == step.sharing.tree_tokens


def test_a_shape_is_read_from_a_config():
    told = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10}
    dense = SimpleNamespace(**told, intermediate_size=16, num_key_value_heads=2, head_dim=None)
    assert ModelShape.of(dense) == ModelShape(8, 2, 16, 4, 2, 2, 10)
    experts = SimpleNamespace(**told, intermediate_size=99, moe_intermediate_size=5, num_experts_per_tok=3)
    assert ModelShape.of(experts) == ModelShape(8, 2, 15, 4, 4, 2, 10)
    with pytest.raises(ArgumentError, match=r"TG-PACK-006.*num_hidden_layers"):
        ModelShape.of(SimpleNamespace(num_attention_heads=1, hidden_size=2))
    with pytest.raises(ArgumentError, match=r"TG-PACK-005.*ModelShape\.layers.*0"):
        ModelShape(layers=0)


def test_ranks_are_balanced_by_cost_and_say_how_evenly():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(6, 1, 200)).astype(int) + 2
    cu = np.r_[0, lengths.cumsum()]
    trainable = np.ones(cu[-1], bool)
    trainable[cu[:-1]] = False
    ids = rng.integers(0, 1000, cu[-1])
    s = Sequences.from_arrays(ids, cu, np.full(cu[-1], -1.0), trainable)
    steps = [pack(s, np.ones(200), tokens_per_row=1 << 14, ranks=4, rank=rank)[0] for rank in range(4)]
    flop = QWEN3_4B.token_flop * lengths + QWEN3_4B.pair_flop * lengths * (lengths + 1) / 2
    flop += QWEN3_4B.term_flop * (lengths - 1)
    for rank, step in enumerate(steps):
        assert step.load[rank] == pytest.approx(flop[np.unique(step.trace)].sum())
        assert step.imbalance == pytest.approx(step.load.max() / step.load.mean())
    assert 1.0 <= steps[0].imbalance < 1.01
    assert pack(s, np.ones(200), tokens_per_row=1 << 14)[0].imbalance == 1.0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_eight_ranks_are_within_five_percent_on_lognormal_lengths(sigma):
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6, sigma, 512)), 8, 8000).astype(int) + 2
    cu = np.r_[0, lengths.cumsum()]
    trainable = np.ones(cu[-1], bool)
    trainable[cu[:-1]] = False
    group = np.repeat(np.arange(64), 8)
    s = Sequences.from_arrays(np.zeros(cu[-1], int), cu, np.full(cu[-1], -1.0), trainable, group=group)
    ranks = [pack(s, np.ones(512), tokens_per_row=8192, groups_per_step=16, ranks=8, rank=rank) for rank in range(8)]
    flop = QWEN3_4B.token_flop * lengths + QWEN3_4B.pair_flop * lengths * (lengths + 1) / 2
    flop += QWEN3_4B.term_flop * (lengths - 1)
    for steps in zip(*ranks, strict=True):
        loads = np.array([flop[np.unique(step.trace)].sum() for step in steps])
        assert loads.max() / loads.mean() == pytest.approx(steps[0].imbalance)
        assert steps[0].imbalance <= 1.05
        # Costliest first to the rank with least: the busiest is above the mean by less than its last trace.
        least = min(flop[np.unique(step.trace)].min() for step in steps)
        assert loads.max() <= loads.mean() + max(least, flop[np.unique(steps[loads.argmax()].trace)].min())


def test_a_group_stays_on_one_rank_where_it_is_shared():
    parts = [groups(200, 20, 8) for _ in range(4)]
    ids = np.concatenate([part.ids + 1000 * n for n, part in enumerate(parts)])
    trainable = np.concatenate([part.trainable for part in parts])
    cu = np.arange(33) * 220
    s = Sequences.from_arrays(ids, cu, np.full(len(ids), -1.0), trainable, group=np.repeat(np.arange(4), 8))
    steps = [pack(s, np.ones(32), tokens_per_row=1000, ranks=2, rank=rank, share_prefixes=True)[0] for rank in range(2)]
    assert [sorted(set(step.group.tolist())) for step in steps] in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    assert steps[0].sharing.tree_tokens == 4 * (200 + 8 * 20)
