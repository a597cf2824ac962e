"""TRL's `sync_ref_model`: its callback on the weights of a run, beside the reference that the run measured."""

import sys
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from trl.trainer.callbacks import SyncRefModelCallback

from tiny import tiny_model
from tracegrad import recipes
from tracegrad.objective import presets, with_kl
from tracegrad.trainer.step import compute_logprobs
from watched import traces, watched


@pytest.fixture
def masks(monkeypatch):
    """Masks made by transformers alone: ART replaces a function of theirs on import, by one of an older signature."""
    from transformers import masking_utils

    patches = sys.modules.get("art.transformers.patches")
    if patches is not None:
        monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", patches._preprocess_mask_arguments)


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize(("every", "alpha"), [(1, 0.6), (2, 0.25)])
def test_the_reference_is_mixed_as_by_the_callback(tmp_path, close, every, alpha):
    asked = {"sync_ref_model": True, "ref_model_sync_steps": every, "ref_model_mixup_alpha": alpha, "beta": 0.05}
    options = dict(recipes.from_trl(asked).options)
    changes = {name.replace(".", "__"): options[name] for name in ("train.ref_sync_steps", "train.ref_mixup_alpha")}
    done = watched(traces(), tmp_path, objective=with_kl(presets.DAPO, 0.05), train__epochs=2, **changes)
    Accelerator(cpu=True)  # whose state the callback looks at
    reference, policy = tiny_model(), tiny_model()
    callback = SyncRefModelCallback(ref_model=reference, accelerator=None)
    moved = 0.0
    for taken, step in enumerate(done.steps):
        if taken:
            policy.load_state_dict(step.before, strict=False)
            state = SimpleNamespace(global_step=taken)
            arguments = SimpleNamespace(ref_model_sync_steps=every, ref_model_mixup_alpha=alpha)
            callback.on_step_end(arguments, state, None, model=policy)
        theirs = step.step.with_logprobs(old=compute_logprobs(reference, step.step.batches)).old_logprobs
        close("TRL's sync_ref_model, reference logprobs", step.step.ref_logprobs, theirs, rtol=2e-5)
        moved = max(moved, float(abs(step.step.ref_logprobs - step.outcome.logprobs).max()))
    assert len(done.steps) > 2 * every
    assert moved > 1e-4
