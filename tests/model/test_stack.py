"""Packs as padded batches of branches: how a body is given the keys and values of what its branches begin with."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from families import model_of
from tracegrad.model.attention import run_stacked


class Said(dict):
    last_hidden_state = property(lambda self: self["last_hidden_state"])


class Old(torch.nn.Module):
    """A body that knows its keys and values by the name that transformers had, and by no other."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.name = "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"

    def forward(self, input_ids, use_cache, past_key_values=None):
        return self.said(input_ids, use_cache, past_key_values, "past_key_values")

    def said(self, input_ids, use_cache, held, name):
        out = self.inner(input_ids=input_ids, use_cache=use_cache, **{self.name: held})
        return Said({"last_hidden_state": out.last_hidden_state, name: out[self.name] if use_cache else None})


class New(Old):
    """The same by the name that it has now."""

    def forward(self, input_ids, use_cache, cache=None):
        return self.said(input_ids, use_cache, cache, "cache")


@pytest.mark.parametrize("names", [Old, New])
def test_keys_and_values_of_a_prefix_are_given_by_the_name_that_the_body_has(names):
    body = model_of("qwen3").double().model
    ids = torch.cat([torch.tensor([*range(20), *own]) for own in ([3, 4], [5, 6, 7])])
    positions = torch.cat([torch.arange(22), torch.arange(23)])
    got = run_stacked(names(body), ids, positions, torch.arange(45), share_prefix=True)
    want = torch.cat([body(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in ids.split([22, 23])])
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)
