"""Rows that share prefixes: the tree they hold, and the gradient, which no packing changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forked import apart, forked, gradient, padded_gradient
from tiny import VOCABULARY, tiny_model
from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Aggregation,
    EntropyBonus,
    Importance,
    Objective,
    Ratio,
    Reduce,
    Truncate,
    Weight,
    presets,
    with_entropy,
    with_kl,
)
from tracegrad.packing import pack

BOUND = {torch.float64: 1e-6, torch.float32: 1e-5}
OBJECTIVES = {
    "token": presets.GRPO,
    "token, kept": presets.DAPO,
    "token, direct": presets.GRPO_DIRECT,
    "turn": Objective(
        Importance(Aggregation("turn", "mean")),
        Ratio("theta", "old"),
        (Weight(Ratio("old", "rollout"), transform=Truncate(0, 2)),),
    ),
    "trace": presets.GSPO,
    "trace, geometric": presets.GMPO,
    "penalty": with_kl(presets.GRPO, 0.1),
    "penalty, trace": with_kl(presets.GSPO, 0.1),
    "bonus": with_entropy(presets.GRPO, 0.05),
    "bonus, own denominator": Objective(
        presets.GRPO.surrogate,
        presets.GRPO.ratio,
        penalties=with_kl(presets.GRPO, 0.1).penalties,
        entropy=EntropyBonus(0.05, masked=False, reduce=Reduce("trace", "mean")),
    ),
}


def model_of(dtype, **changes):
    return tiny_model(**changes).to(dtype)


def packs(case, objective, budget, **more):
    return pack(
        case.sequences, case.advantages, per="trace", tokens_per_row=budget, requirements=objective.requirements, **more
    )


# --- the gradient ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), more=st.integers(0, 4), tight=st.booleans())
@pytest.mark.first_cases(4)
def test_padded_packed_shared_and_any_cut_have_one_gradient(name, dtype, seed, more, tight):
    objective, model, case = OBJECTIVES[name], model_of(dtype), forked(seed, more)
    [whole] = packs(case, objective, 4096)
    theirs = padded_gradient(model, case, whole, objective)
    budget = 64 if tight else 120  # a trace has at most 49 tokens, a row of 64 holds one or two without sharing
    found = {"packed": [whole], "cut": packs(case, objective, budget)}
    found["shared"] = packs(case, objective, 4096, share_prefixes=True)
    found["shared and cut"] = packs(case, objective, budget, share_prefixes=True, pad_to_multiple_of=8)
    over_ranks = [packs(case, objective, budget, share_prefixes=True, ranks=3, rank=rank)[0] for rank in range(3)]
    if objective.reduce.denominator == "all":
        found["shared over ranks"] = over_ranks
    for way in ("shared", "shared and cut"):
        assert all(step.sharing.shared for step in found[way])
    for way, steps in found.items():
        assert apart(gradient(model, case, steps, objective), theirs) <= BOUND[dtype], way


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_law_is_not_held_on_a_gradient_of_zero(name):
    objective, model, case = OBJECTIVES[name], model_of(torch.float64), forked(0, 2)
    assert padded_gradient(model, case, packs(case, objective, 4096)[0], objective).norm() > 1e-3


@pytest.mark.parametrize("name", ["token", "trace", "bonus"])
def test_two_steps_in_a_row_have_the_gradients_of_two_plain_ones(name):
    objective, model, case = OBJECTIVES[name], model_of(torch.float64), forked(7)
    plain = packs(case, objective, 100, groups_per_step=1)
    shared = packs(case, objective, 100, groups_per_step=1, share_prefixes=True)
    assert len(plain) == len(shared) == 2
    for one, other in zip(plain, shared, strict=True):
        theirs = gradient(model, case, [one], objective)
        assert apart(gradient(model, case, [other], objective), theirs) <= 1e-6


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
MODELS = {
    "Llama": {},
    "Mistral": {"head_dim": 8, "sliding_window": 5},
    "Qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_positions_go_by_depth_in_the_tree(name):
    torch.manual_seed(3)
    config = getattr(transformers, name + "Config")(**SMALL, **MODELS[name])
    config.initializer_range = 0.3
    model = getattr(transformers, name + "ForCausalLM")(config).double().eval()
    case, objective = forked(11), presets.GRPO
    shared = packs(case, objective, 4096, share_prefixes=True)
    plain = packs(case, objective, 4096)
    theirs = gradient(model, case, plain, objective)
    assert policy.forward_plan(model, shared[0].batches[0].to("cpu")) == "mask"
    assert apart(gradient(model, case, shared, objective), theirs) <= 1e-6


# --- the tree ---


@st.composite
def overlapping(draw):
    """Branches over two ids that continue one another's paths, with terms anywhere after the first token."""
    ids, terms, trace = [], [], []
    for _ in range(draw(st.integers(1, 14))):
        path = draw(st.sampled_from(ids))[: draw(st.integers(1, 20))] if ids and draw(st.booleans()) else [1]
        path = path + draw(st.lists(st.integers(1, 2), min_size=1, max_size=6))
        ids.append(path)
        terms.append(draw(st.lists(st.integers(1, len(path) - 1), unique=True, max_size=4)))
        trace.append(trace[-1] + draw(st.integers(0, 1)) if trace else 0)
    terms[0] = terms[0] or [1]
    cu = np.r_[0, np.cumsum([len(path) for path in ids])]
    trainable = np.zeros(cu[-1], bool)
    for start, places in zip(cu, terms, strict=False):
        trainable[start + np.array(places, int)] = True
    heat = draw(st.lists(st.sampled_from([1.0, 0.5]), min_size=len(ids), max_size=len(ids)))
    group = draw(st.lists(st.integers(0, 2), min_size=trace[-1] + 1, max_size=trace[-1] + 1))
    return Sequences.from_arrays(
        np.concatenate(ids),
        cu,
        np.where(trainable, -1.0, np.nan),
        trainable,
        trace=trace,
        group=group,
        inv_temperature=np.repeat(heat, np.diff(cu)),
    )


@settings(max_examples=80, deadline=None)
@given(overlapping(), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.sampled_from([1, 8]))
def test_a_shared_row_holds_every_term_once_and_no_head_row_twice(s, ranks, groups, whole, multiple):
    needs = presets.GSPO.requirements if whole else presets.GRPO.requirements
    common = {"tokens_per_row": 400 if whole else 30, "groups_per_step": groups, "ranks": ranks, "requirements": needs}
    seen = []
    for rank in range(ranks):
        options = {**common, "rank": rank, "share_prefixes": True, "pad_to_multiple_of": multiple}
        for step in pack(s, np.arange(s.traces), per="trace", **options):
            seen += step.origin.tolist()
            assert sorted(np.concatenate([batch.term for batch in step.batches])) == list(range(len(step)))
            for batch in step.batches:
                check_row(s, step, batch)
                assert len(batch.ids) <= -(-common["tokens_per_row"] // multiple) * multiple
            if whole:
                homes = [set(step.trace[batch.term].tolist()) for batch in step.batches]
                assert sum(map(len, homes)) == len(set().union(*homes))
    assert sorted(seen) == s.terms.tolist()


def check_row(s, step, batch):
    origin, branch = step.origin[batch.term], step.branch[batch.term]
    heads = np.stack([batch.read, batch.target, batch.inv_temperature.view(np.int32)])
    assert len(np.unique(heads, axis=1).T) == len(batch.read) or not step.sharing.shared
    assert sorted(set(batch.logit_row.tolist())) == list(range(len(batch.read)))
    assert np.array_equal(batch.target[batch.logit_row], s.ids[origin])
    assert np.array_equal(batch.inv_temperature[batch.logit_row], s.inv_temperature[origin])
    index = np.arange(len(batch.ids))
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < batch.tree_end[None, :])
    for read, n, token in zip(batch.read[batch.logit_row], branch, origin, strict=True):
        context = s.ids[s.cu_seqlens[n] : token]  # all that stands before the term in its branch, and nothing else
        assert batch.ids[visible[read]].tolist() == context.tolist()
        assert batch.positions[visible[read]].tolist() == list(range(len(context)))


def test_a_token_that_two_traces_sampled_is_one_head_row_with_the_numbers_of_both():
    # Two traces 4 5 6 with terms 5 and 6.
    ids, trainable = [4, 5, 6, 4, 5, 6], [False, True, True, False, True, True]
    logprobs = [np.nan, -0.1, -0.2, np.nan, -0.3, np.nan]
    s = Sequences.from_arrays(ids, [0, 3, 6], logprobs, trainable, group=[0, 0])
    [step] = pack(s, [1.0, -1.0], tokens_per_row=8, share_prefixes=True)
    [row] = step.batches
    assert (row.ids.tolist(), row.tree_end.tolist()) == ([4, 5, 6], [3, 3, 3])
    assert (row.read.tolist(), row.target.tolist(), row.logit_row.tolist()) == ([0, 1], [5, 6], [0, 1, 0, 1])
    assert step.advantages[row.term].tolist() == [1.0, 1.0, -1.0, -1.0]
    np.testing.assert_allclose(step.rollout_logprobs[row.term], np.float32(logprobs)[[1, 2, 4, 5]])


def test_the_plan_is_the_same_on_every_rank_and_every_time():
    case = forked(3, 9)
    steps = [packs(case, presets.GRPO, 64, share_prefixes=True, ranks=2, rank=rank)[0] for rank in (0, 1, 0)]
    assert steps[0].load.tolist() == steps[1].load.tolist()
    assert steps[0].sharing == steps[1].sharing
    assert len(steps[0].batches) == len(steps[1].batches)
    assert [batch.ids.tolist() for batch in steps[0].batches] == [batch.ids.tolist() for batch in steps[2].batches]
    assert not set(steps[0].trace.tolist()) & set(steps[1].trace.tolist())


def test_a_trace_that_must_lie_in_one_row_is_measured_as_a_tree():
    # Branches of 6 and 6 that share 4: 8 tokens as a tree, 12 side by side.
    ids = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7, 8]
    s = Sequences.from_arrays(ids, [0, 6, 12], np.full(12, -1.0), np.arange(12) % 6 > 3, trace=[0, 0])
    needs = presets.GSPO.requirements
    [step] = pack(s, [1.0], tokens_per_row=8, requirements=needs, share_prefixes=True)
    assert len(step.batches[0].ids) == 8
    assert step.sharing.needed
    with pytest.raises(ArgumentError, match=r"TG-PACK-517.*12"):
        pack(s, [1.0], tokens_per_row=8, requirements=needs)
    with pytest.raises(ArgumentError, match=r"TG-PACK-517.*8"):
        pack(s, [1.0], tokens_per_row=7, requirements=needs, share_prefixes=True)
    with pytest.raises(ArgumentError, match="TG-PACK-515"):
        pack(s, [1.0], tokens_per_row=7, requirements=needs, share_prefixes=True, too_long="truncate")


def test_a_step_that_gains_little_stays_plain_and_says_what_it_would_have_gained():
    # Two branches of 100 tokens that share one: 199 of 200 tokens.
    ids = np.r_[0, np.arange(1, 100), 0, np.arange(101, 200)]
    s = Sequences.from_arrays(ids, [0, 100, 200], np.full(200, -1.0), np.arange(200) % 100 > 50)
    [step] = pack(s, [1.0, -1.0], tokens_per_row=200, share_prefixes=True)
    assert (step.sharing.shared, step.sharing.tokens, step.sharing.tree_tokens) == (False, 200, 199)
    assert 1.0 < step.sharing.flop_ratio < 1.01
    assert str(step.sharing).startswith("prefixes not shared, too little to gain: 199 of 200 tokens, predicted FLOP ")
    assert len(step.batches[0].ids) == 200
    assert pack(s, [1.0, -1.0], tokens_per_row=200)[0].sharing is None
