"""`train.memory_mode`: what recomputed layers cost and give, and the chunk of logits that a forecast counts."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tiny import tiny_model
from tracegrad.trainer.memory import Memory, draws_random_numbers, layers_of, recompute_layers
from tracegrad.trainer.resource_estimate import _logits_bytes


class Noisy(nn.Module):
    """A layer that draws a random number in either mode."""

    def forward(self, x):
        return x * (1 + torch.rand(()))


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), layer)])

    def forward(self, x):
        return self.layers[0](x)


def random_state_is_kept(model):
    """Whether the generator is put back after the layers are computed again in the backward pass."""
    recompute_layers(model)
    loss = model(torch.ones(2, 4)).sum()
    before = torch.get_rng_state()
    loss.backward()
    return torch.equal(before, torch.get_rng_state())


def test_the_random_state_is_kept_only_for_layers_that_draw_in_training_mode():
    assert not random_state_is_kept(Model(Noisy()).eval())
    assert not random_state_is_kept(Model(nn.Sequential(Noisy(), nn.Dropout(0.0))).train())
    assert random_state_is_kept(Model(nn.Sequential(Noisy(), nn.Dropout(0.5))).train())


def gradient_of(model, ids):
    torch.manual_seed(0)
    model(ids).logits.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_recomputed_layers_drop_the_same_numbers_again():
    """transformers keeps the rate of attention's dropout as a number; nothing there is a module."""
    plain = tiny_model(attention_dropout=0.5)
    for layer in layers_of(plain):
        layer.self_attn.train()
    ids = torch.arange(12)[None] % 7
    assert draws_random_numbers(layers_of(plain)[0])
    recomputed = copy.deepcopy(plain)
    recompute_layers(recomputed)
    expected = gradient_of(plain, ids)
    assert torch.equal(gradient_of(recomputed, ids), expected)
    without = gradient_of(copy.deepcopy(plain).eval(), ids)
    assert not torch.allclose(without, expected)  # dropout did something


def test_layers_without_a_rate_or_outside_training_mode_draw_nothing():
    assert not draws_random_numbers(layers_of(tiny_model(attention_dropout=0.5))[0])
    assert not draws_random_numbers(layers_of(tiny_model().train())[0])


@pytest.mark.parametrize(
    ("memory", "rows"),
    [
        ("speed", 14_080),  # 4 GiB hold 14,134 rows of 2 * 151,936 bytes: 55 * 256
        ("balanced", 768),  # 256 MiB hold 883
        ("low", 110),  # 32 MiB
    ],
)
def test_a_forecast_counts_the_largest_chunk_of_the_head(memory, rows):
    found = _logits_bytes(151_936, 100_000, Memory.of(memory), cuda=True, low=True)
    assert found == rows * 2 * 151_936
    assert _logits_bytes(151_936, 50, Memory.of(memory), cuda=True, low=True) == 50 * 2 * 151_936
