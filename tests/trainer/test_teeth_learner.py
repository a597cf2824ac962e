"""What a wrong line in the loop or its parts would change, worked out from a watched run."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_model
from tracegrad import model as policy
from tracegrad.model.forward import read_states
from tracegrad.objective import AdaptiveEntropy, EntropyBonus, Ratio, Rejection, presets
from tracegrad.packing import pack
from tracegrad.trainer import trainer as driven
from tracegrad.trainer.lora import with_adapters
from tracegrad.trainer.optim import EntropyController
from watched import traces, watched


def test_the_proximal_lies_where_old_would_have_been_measured(tmp_path):
    """Versions 0 to 4 are recorded, so the run's step n is version 4 + n; `old` would be measured at steps 0, 2, 4."""
    run = watched(traces(), tmp_path, objective=presets.A3PO, train__epochs=2, train__updates_per_old_logprobs=2)
    assert len(run.steps) == 6
    for n, each in enumerate(run.steps):
        version, current, proximal = each.step.version.astype(float), 4 + n, 4 + n // 2 * 2
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(version < current, (proximal - version) / (current - version), 1.0)
        np.testing.assert_allclose(each.step.alpha, expected, rtol=1e-6)
    # Step 3, a term of version 2: (6 - 2) / (7 - 2).
    third = run.steps[3].step
    assert third.alpha[third.version == 2] == pytest.approx(0.8)


def test_the_report_is_of_the_last_epoch(tmp_path):
    run = watched(traces(), tmp_path, train__epochs=3)
    assert [part.step for part in run.done.terms] == [7, 8, 9]
    for part, own in zip(run.done.terms, run.steps[6:], strict=True):
        np.testing.assert_array_equal(part.logprobs, own.outcome.logprobs)
        np.testing.assert_array_equal(part.ratio, own.outcome.ratio)


def test_old_is_measured_anew_in_each_epoch(tmp_path):
    """With the policy as it is then: not the one before, and not the one that recorded."""
    run = watched(traces(), tmp_path, train__epochs=2)
    for first in (0, 3):
        for each in run.steps[first : first + 3]:
            model = tiny_model()
            model.load_state_dict(run.steps[first].before, strict=False)
            with torch.no_grad():
                found = [policy.logprobs(model, batch.to("cpu")).numpy() for batch in each.step.batches]
            expected = each.step.with_logprobs(old=found).old_logprobs
            np.testing.assert_allclose(each.step.old_logprobs, expected, rtol=0, atol=1e-5)
    fourth = run.steps[3].step
    assert np.nanmax(np.abs(fourth.old_logprobs - fourth.rollout_logprobs)) > 1e-3


def test_a_gated_bonus_adapts_to_the_entropy_of_what_the_gates_left(tmp_path, monkeypatch):
    seen = []

    class Watched(EntropyController):
        def update(self, *arguments):
            super().update(*arguments)
            seen.append((self.last, self.coef))

    monkeypatch.setattr(driven, "EntropyController", Watched)
    gate = Rejection(Ratio("theta", "rollout"), "k1", low=-0.01, high=0.01)
    entropy = EntropyBonus(0.1, masked=True, adapt=AdaptiveEntropy(target=3.0, delta=0.01))
    run = watched(traces(), tmp_path, objective=replace(presets.DAPO, rejections=(gate,), entropy=entropy))
    assert len(seen) == len(run.steps) == 3
    for (last, _), each in zip(seen, run.steps, strict=True):
        keep, spread = each.outcome.keep, each.outcome.entropy.astype(np.float64)
        assert 0 < keep.sum() < len(keep)
        assert last == pytest.approx(spread[keep].mean(), rel=1e-9)
    assert abs(seen[-1][0] - run.steps[-1].outcome.entropy.mean()) > 1e-6


def test_adapters_count_twice():
    """alpha = 2 r: a layer gives W x + 2 B A x."""
    pytest.importorskip("peft")
    base = tiny_model()
    plain = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    adapted = with_adapters(base, 4)
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        up.copy_(torch.linspace(-0.1, 0.1, up.numel()).view_as(up))
        x = torch.linspace(-1, 1, plain.shape[1])
        torch.testing.assert_close(layer(x), plain @ x + 2 * (up @ (down @ x)), rtol=1e-5, atol=1e-6)


def test_the_head_is_computed_in_autocasts_dtype_as_transformers_does():
    data = traces()
    model = tiny_model(5)
    [batch] = pack(data, np.ones(data.traces, np.float32), tokens_per_row=12, groups_per_step=None)[0].batches[:1]
    batch = batch.to("cpu")
    row = batch.ids[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = read_states(model, batch)
        found = policy.logprobs(model, batch)
        theirs = model(row).logits[0]
    assert theirs.dtype == states.dtype == torch.bfloat16
    expected = (
        theirs.float()
        .log_softmax(-1)[batch.read[batch.logit_row]]
        .gather(1, batch.target[batch.logit_row][:, None])[:, 0]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
