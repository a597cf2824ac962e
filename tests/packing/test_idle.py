"""What is left out because it cannot matter: traces without an advantage, head rows without a weight."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forked import apart, forked, gradient
from tiny import VOCABULARY
from tracegrad import model as policy
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective, PolicyGradient, presets, with_entropy, with_kl
from tracegrad.objective.correction import Correction
from tracegrad.packing import SkippedTraces, pack
from tracegrad.trainer.step import correct_step

NAMES = [name for name in presets.__all__ if isinstance(getattr(presets, name), Objective)]
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model():
    """A model whose norms sum in the dtype of its weights, so that float64 is float64 throughout."""
    torch.manual_seed(0)
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**SHAPE, **HEADS)).double().eval()


@pytest.fixture(scope="module")
def case(model):
    """All policies near the model, some traces nearer, so that the strictest gates keep some terms and drop some."""
    case = some_without_advantage()
    [step] = packed(case, presets.GSPO)
    with torch.no_grad():
        found = step.with_logprobs(old=[policy.logprobs(model, batch) for batch in step.batches]).old_logprobs
    spread = np.array([0.0, 1e-5, 0.3])[step.trace % 3]
    noise = spread * np.random.default_rng(0).normal(size=(3, len(step)))
    rollout, old, ref = np.full((3, case.sequences.tokens), np.nan)
    rollout[step.origin], old[step.origin], ref[step.origin] = np.minimum(found + noise, -1e-4)
    rollout[np.isnan(case.sequences.rollout_logprobs)] = np.nan
    sequences = replace(case.sequences, rollout_logprobs=rollout.astype(np.float32))
    return replace(case, sequences=sequences, old=old, ref=ref)


def some_without_advantage():
    """Two of the traces have none, one of them alone in its group."""
    case = forked(5, more=4)
    advantages = case.advantages.copy()
    advantages[[2, 6]] = 0.0
    group = case.sequences.group.copy()
    group[6] = 9
    return replace(case, advantages=advantages, sequences=replace(case.sequences, group=group))


def packed(case, objective, **more):
    return pack(
        case.sequences, case.advantages, per="trace", tokens_per_row=128, requirements=objective.requirements, **more
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.first_cases(12)
def test_a_preset_has_the_same_gradient_without_what_cannot_matter(model, case, name):
    objective = getattr(presets, name)
    if objective.microbatch_components:
        needs = objective.requirements
        assert all((needs.zero_advantage_reason, needs.dropped_reason, needs.zero_weight_reason))
        return
    whole = packed(case, objective)
    theirs = gradient(model, case, whole, objective)
    assert theirs.norm() > 0
    assert apart(gradient(model, case, whole, objective, skip=True), theirs) <= 1e-12
    if objective.requirements.zero_advantage_reason:
        with pytest.raises(ArgumentError, match=r"TG-PACK-013.*skip_zero_advantage=False"):
            packed(case, objective, skip_zero_advantage=True)
        return
    fewer = packed(case, objective, skip_zero_advantage=True)
    assert fewer[0].skipped == SkippedTraces(traces=2, tokens=int(np.isin(whole[0].trace, (2, 6)).sum()))
    assert len(fewer[0]) == len(whole[0]) - fewer[0].skipped.tokens
    assert apart(gradient(model, case, fewer, objective), theirs) <= 1e-12


def test_most_of_grpo_can_be_left_out_and_what_needs_a_trace_says_so():
    assert not presets.GRPO.requirements.zero_advantage_reason
    assert not presets.GRPO.requirements.dropped_reason
    assert not presets.GRPO.requirements.zero_weight_reason
    assert not presets.GSPO.requirements.zero_advantage_reason
    assert "of the trace" in presets.GSPO.requirements.dropped_reason
    assert "penalty" in with_kl(presets.GRPO, 0.1).requirements.zero_advantage_reason
    assert "penalty" in with_kl(presets.GRPO, 0.1).requirements.dropped_reason
    assert "entropy bonus" in with_entropy(presets.GRPO, 0.1).requirements.zero_advantage_reason
    assert "entropy bonus" in with_entropy(presets.GRPO, 0.1).requirements.dropped_reason


def test_skipped_traces_stay_in_totals_and_counts():
    case = some_without_advantage()
    whole, fewer = packed(case, presets.GRPO)[0], packed(case, presets.GRPO, skip_zero_advantage=True)[0]
    assert fewer.totals == whole.totals
    left = ~np.isin(whole.trace, (2, 6))
    for name in ("origin", "trace_terms", "group_terms", "group_traces", "advantages"):
        assert np.array_equal(getattr(fewer, name), getattr(whole, name)[left])


def test_a_step_that_nothing_is_left_of_still_reaches_every_parameter(model):
    case = replace(forked(), advantages=np.zeros(forked().sequences.traces))
    [step] = packed(case, presets.GRPO, skip_zero_advantage=True, pad_to_multiple_of=4)
    assert len(step) == 0
    assert step.totals.terms > 0
    assert [len(batch.ids) for batch in step.batches] == [4]
    found = gradient(model, case, [step], presets.GRPO)
    assert len(found) == sum(p.numel() for p in model.parameters())
    assert not found.any()


def test_head_rows_that_no_term_is_left_of_go_and_others_keep_their_terms():
    case = forked(1, more=0)
    [step] = packed(case, presets.GRPO, share_prefixes=True)
    [batch] = step.batches
    alone = np.isin(step.trace[batch.term], [1])
    fewer = batch.drop_tokens(~alone)
    assert np.array_equal(fewer.ids, batch.ids)
    assert step.trace[fewer.term].tolist() == [1] * len(fewer.term)
    assert np.array_equal(fewer.target[fewer.logit_row], case.sequences.ids[step.origin[fewer.term]])
    assert len(fewer.read) == len(fewer.term) < len(batch.read)
    assert len(batch.drop_tokens(np.ones(len(batch.term), bool)).read) == 0
    with pytest.raises(ArgumentError, match="TG-PACK-002"):
        batch.drop_tokens(np.zeros(1, bool))
    with pytest.raises(ArgumentError, match="TG-PACK-001"):
        batch.to("cpu").drop_tokens(alone)


def test_idle_terms_are_those_dropped_and_those_without_weight_or_advantage():
    case = forked(1, more=0)
    [step] = packed(case, presets.GRPO)
    some = np.arange(len(step))
    corrected = Correction((some != 3).astype(np.float32), some != 5, np.ones(len(step), np.float32), {}, {})
    expected = (some == 3) | (some == 5) | (step.advantages == 0)
    assert np.array_equal(step.tokens_without_gradient(presets.GRPO.requirements, corrected), expected)
    assert not step.tokens_without_gradient(presets.GSPO.requirements, corrected).any()
    gated = Objective(PolicyGradient(), penalties=(replace(with_kl(presets.GRPO, 0.1).penalties[0], masked=True),))
    assert np.array_equal(step.tokens_without_gradient(gated.requirements, corrected), some == 5)


def test_logprobs_of_terms_in_no_batch_stay_unknown():
    case = forked(1, more=0)
    [step] = packed(case, presets.GRPO)
    idle = step.tokens_without_gradient(presets.GRPO.requirements, correct_step(case.ready(step), presets.GRPO, "mask"))
    fewer = replace(step, batches=tuple(batch.drop_tokens(idle[batch.term]) for batch in step.batches))
    old = fewer.with_logprobs(old=[np.zeros(len(batch.term), np.float32) for batch in fewer.batches]).old_logprobs
    assert np.array_equal(np.isnan(old), idle)
    assert idle.any()


def test_skipping_asks_what_the_objective_looks_at():
    case = forked()
    with pytest.raises(ArgumentError, match=r"TG-PACK-013.*requirements=objective\.requirements"):
        pack(case.sequences, case.advantages, per="trace", tokens_per_row=128, skip_zero_advantage=True)
