"""The fused loss: every plan gives the loss and the gradient of full logits, and never holds them."""

from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from largest import Largest
from tracegrad.errors import ArgumentError
from tracegrad.model import loss as room
from tracegrad.model import policy_loss, token_logprobs
from tracegrad.model.lm_head import Gradients, Size, choose_plan
from tracegrad.objective import (
    Aggregation,
    Function,
    Objective,
    PolicyGradient,
    Ratio,
    Rejection,
    TopEntropy,
    Truncate,
    Weight,
    presets,
    with_entropy,
    with_kl,
)
from tracegrad.objective.correction import correct
from tracegrad.objective.torch_loss import PerTerm, Terms
from tracegrad.packing import Batch

U, H, V = 40, 6, 23
NAMES = [name for name in presets.__all__ if isinstance(getattr(presets, name), Objective)]


class Case:
    """A shared pack of 11 traces: 40 head rows and 53 terms, 13 of them a second use of a row by another trace."""

    def __init__(self, objective, seed=0, dtype=torch.float64, shared=True):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
        self.objective, self.dtype = objective, dtype
        self.hidden, self.weight, self.bias = draw(U, H).to(dtype), draw(V, H).to(dtype), draw(V).to(dtype)
        trace = np.arange(U) * 9 // U
        row = np.arange(U)
        if shared:  # two more traces, which begin with rows of the first and the third
            row = np.r_[row, np.flatnonzero(trace == 0), np.flatnonzero(trace == 2), 3, 3, 11]
            trace = np.r_[trace, np.full(int((trace == 0).sum()), 9), np.full(int((trace == 2).sum()), 10), 9, 9, 10]
        m = len(row)
        nothing = np.zeros(1, np.int32)
        self.batch = Batch(
            ids=nothing,
            positions=nothing,
            tree_end=nothing + 1,
            read=nothing,
            target=torch.randint(0, V, (U,), generator=g),
            inv_temperature=torch.rand(U, generator=g) + 0.5,
            logit_row=torch.from_numpy(row),
            term=np.arange(m, dtype=np.int32),
        )
        theta = self.plain()[0].detach()
        old = theta + 0.3 * draw(m)
        rollout = old + 0.3 * draw(m)
        rollout[::7] = torch.nan
        ref = old + 0.2 * draw(m)
        advantages = draw(trace.max() + 1)[trace]
        advantages[trace == 4] = 0.0
        needs = objective.requirements
        turn = np.arange(m) % 2
        corrected = correct(
            (old if needs.old or not needs.rollout else None),
            rollout if needs.rollout else None,
            ref=ref if needs.ref else None,
            trace=trace.astype(np.int32),
            turn=turn.astype(np.int32),
            group=(trace // 3).astype(np.int32),
            advantages=advantages,
            weights=objective.weights,
            rejections=objective.rejections,
            reduce=objective.reduce,
            reductions=objective.reductions,
        )
        self.terms = Terms(
            old=old if needs.old else None,
            rollout=rollout if needs.rollout else None,
            ref=ref if needs.ref else None,
            advantages=advantages,
            weight=corrected.weight,
            keep=corrected.keep,
            scale=corrected.scale,
            trace=torch.from_numpy(trace),
            turn=torch.from_numpy(turn),
            group=torch.from_numpy(trace // 3),
            alpha=torch.rand(m, generator=g) if needs.proximal else None,
            scales=corrected.scales,
        )

    def plain(self, hidden=None, weight=None, bias=None, softcap=None, logit_scale=1.0):
        """Logprob and entropy of each term, all logits at once."""
        hidden, weight = (self.hidden if hidden is None else hidden), (self.weight if weight is None else weight)
        logits = (hidden @ weight.T + (0 if bias is None else bias)).double() * logit_scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logp = (logits * self.batch.inv_temperature[:, None]).log_softmax(-1)
        chosen = logp.gather(1, self.batch.target[:, None]).squeeze(1)
        return chosen[self.batch.logit_row], -(logp.exp() * logp).sum(-1)[self.batch.logit_row]

    def ours(self, **how):
        return policy_loss(self.hidden, self.weight, self.batch, self.terms, self.objective, **how)


def chunks_of(rows):
    """chunk_bytes for this many rows of float64 in plain torch: two tables."""
    return rows * V * 16


def compare(case, bound=1e-11, head=(), **how):
    """Loss, per-term values and gradients against full logits; the plan that was taken."""
    head = dict(head)
    variables = [case.hidden.requires_grad_(), case.weight.requires_grad_()]
    if "bias" in head:
        variables.append(head["bias"].requires_grad_())
    torch.manual_seed(0)  # DropCovariance draws
    logp, entropy = case.plain(*variables, **{k: v for k, v in head.items() if k != "bias"})
    theirs = case.objective(logp, entropy, case.terms)
    (by_logp,) = torch.autograd.grad(theirs.loss, logp, retain_graph=True)
    expected = torch.autograd.grad(theirs.loss, variables)
    torch.manual_seed(0)
    ours = case.ours(**head, **how)
    found = torch.autograd.grad(ours.loss, variables)
    for name in (each.name for each in fields(PerTerm)):
        a, b = getattr(ours.per_term, name), getattr(theirs.per_term, name)
        assert torch.allclose(a.double(), b.double(), atol=1e-9), name
    assert torch.allclose(ours.gradient, by_logp, atol=bound)
    assert torch.allclose(ours.logprobs, logp, atol=bound)
    assert torch.allclose(ours.entropy, entropy, atol=bound)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), abs=bound)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= bound * max(b.norm().item(), 1.0)
    return ours.plan


# --- laws ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [3, 7, 100])
def test_the_fused_loss_of_a_preset_is_that_of_full_logits(name, rows):
    objective = getattr(presets, name)
    plan = compare(Case(objective), chunk_bytes=chunks_of(rows))
    # traces have 4 or 5 rows, a turn's terms alternate: chunks of 3 hold neither, chunks of 7 both
    apart = {3: ("term",), 7: ("term", "turn", "trace"), 100: ("term", "turn", "trace", "batch")}[rows]
    assert plan.name == ("one-pass" if objective.locality in apart else "recompute")


@pytest.mark.parametrize("agg", ["prefix_sum", "prefix_min"])
def test_a_running_sum_along_a_trace_is_in_the_terms_own_order_where_rows_are_shared(agg):
    weight = Weight(Ratio("theta", "rollout"), Aggregation("trace", agg), Truncate(0.0, 2.0))
    compare(Case(Objective(PolicyGradient(), weights=(weight,))), chunk_bytes=chunks_of(7))


MEAN = Aggregation("trace", "mean")
OWN = {
    "term": Function(lambda view: (view.log_ratio - view.advantages).square(), "term"),
    "trace": Function(lambda view: (view.ratio - MEAN.apply(view.ratio, view, view.keep)).abs(), "trace"),
    "batch": Function(lambda view: view.ratio * view.ratio.sum()),
    "entropy": Function(lambda view: -view.advantages * view.entropy * view.logprobs, "term", reads=("entropy",)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("rows", [3, 7, 100])
def test_a_loss_of_ones_own_is_fused_as_far_as_it_promises_to_look(name, rows):
    """A chunk of 3 rows holds no trace, one of 7 holds one, and only 100 hold all."""
    case = Case(Objective(OWN[name], Ratio("theta", "old")))
    plan = compare(case, chunk_bytes=chunks_of(rows))
    assert plan.name == ("one-pass" if rows >= {"trace": 7, "batch": 100}.get(name, 0) else "recompute")


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "CISPO", "SAPO"])
def test_penalties_and_an_entropy_bonus_go_through_the_fused_loss(name):
    objective = with_entropy(with_kl(getattr(presets, name), 0.1), 0.05)
    compare(Case(objective), chunk_bytes=chunks_of(7))
    compare(Case(objective, shared=False), chunk_bytes=chunks_of(7))


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "DAPO"])
@pytest.mark.parametrize("plan", ["recompute", "one-pass"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_plan_that_is_asked_for_gives_the_same(name, plan, softcap):
    objective = with_entropy(getattr(presets, name), 0.05)
    case = Case(objective)
    head = {"bias": case.bias, "softcap": softcap, "logit_scale": 0.7}
    assert compare(case, head=head, chunk_bytes=chunks_of(7), plan=plan).name == plan


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "CISPO"])
def test_terms_that_are_masked_on_the_device_give_the_same_as_terms_picked_out(name, monkeypatch):
    monkeypatch.setattr(room._Evaluation, "_select", room._Evaluation._mask)
    compare(Case(with_kl(getattr(presets, name), 0.1)), chunk_bytes=chunks_of(7))


def test_the_gradient_by_each_term_is_minus_its_coefficient():
    case = Case(with_kl(presets.GSPO, 0.1))
    case.hidden.requires_grad_()
    found = case.ours(chunk_bytes=chunks_of(7))
    coefficients = case.objective.coefficients(case.plain()[0].detach(), case.terms)
    np.testing.assert_allclose(-found.gradient.numpy(), coefficients, atol=1e-12)


# --- each plan in float64 ---


@pytest.mark.parametrize("plan", ["one-pass", "recompute"])
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_gradcheck_of_the_fused_loss(plan, bonus, fast):
    """`fast` compares the gradient along drawn directions, and otherwise each of its numbers is compared."""
    case = Case(BONUS if bonus else PLAIN)
    how = {"plan": plan, "chunk_bytes": chunks_of(16), "softcap": 2.5, "logit_scale": 0.7}

    def loss(hidden, weight, bias):
        found = policy_loss(hidden, weight, case.batch, case.terms, case.objective, bias=bias, **how)
        return 3 * found.loss  # a factor from above

    inputs = [v.requires_grad_() for v in (case.hidden, case.weight, case.bias)]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=fast)


# Without a clip or a detached ratio, so that a finite difference sees the gradient that autograd means.
PLAIN = with_kl(Objective(PolicyGradient()), 0.1)
BONUS = with_entropy(Objective(PolicyGradient()), 0.3)


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "GMPO"])
def test_a_frozen_head_keeps_slopes_for_any_loss(name):
    case = Case(getattr(presets, name))
    hidden = case.hidden.requires_grad_()
    theirs = torch.autograd.grad(case.objective(*case.plain(), case.terms).loss, hidden)[0]
    ours = case.ours(chunk_bytes=chunks_of(3))
    assert ours.plan.name == "frozen"
    assert ours.plan.flops == 4 * U * H * V
    assert torch.allclose(torch.autograd.grad(ours.loss, hidden)[0], theirs, atol=1e-12)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_gradcheck_of_the_frozen_head(fast):
    case = Case(PLAIN)
    how = {"chunk_bytes": chunks_of(16), "softcap": 2.5}

    def loss(hidden):
        return policy_loss(hidden, case.weight, case.batch, case.terms, PLAIN, **how).loss

    def logp(hidden):
        return token_logprobs(hidden, case.weight, case.batch.target, **how)[0]

    assert torch.autograd.gradcheck(loss, [case.hidden.requires_grad_()], fast_mode=fast)
    assert torch.autograd.gradcheck(logp, [case.hidden], fast_mode=fast)


def test_a_frozen_head_under_an_entropy_bonus_is_exact_too():
    case = Case(BONUS)
    hidden = case.hidden.requires_grad_()
    logp, entropy = case.plain()
    theirs = torch.autograd.grad(case.objective(logp, entropy, case.terms).loss, hidden)[0]
    ours = case.ours(chunk_bytes=chunks_of(7))
    assert (ours.plan.name, ours.plan.flops) == ("one-pass", 4 * U * H * V)
    assert torch.allclose(torch.autograd.grad(ours.loss, hidden)[0], theirs, atol=1e-12)
    inverse = case.batch.inv_temperature
    logp, entropy = token_logprobs(hidden, case.weight, case.batch.target, inv_temperature=inverse)
    row = case.batch.logit_row
    found = torch.autograd.grad(case.objective(logp[row], entropy[row], case.terms).loss, hidden)[0]
    assert torch.allclose(found, theirs, atol=1e-12)


def test_without_a_gradient_the_logits_are_computed_once():
    case = Case(presets.GRPO)
    case.hidden.requires_grad_()
    with torch.no_grad():
        found = case.ours(chunk_bytes=chunks_of(7))
    assert (found.plan.name, found.plan.flops) == ("no-grad", 2 * U * H * V)
    assert not found.loss.requires_grad
    assert found.loss.item() == pytest.approx(case.objective(*case.plain(), case.terms).loss.item(), abs=1e-12)


def test_a_pack_of_no_rows_has_a_loss_of_zero_that_reaches_hidden_states_and_head():
    case = Case(presets.GRPO)
    nothing = np.zeros(0, np.int32)
    batch = Batch(nothing, nothing, nothing, nothing, nothing, nothing.astype(np.float32), nothing, nothing)
    hidden, weight = case.hidden[:0].requires_grad_(), case.weight.requires_grad_()
    found = policy_loss(hidden, weight, batch, case.terms.select(slice(0, 0)), case.objective)
    assert found.loss.item() == 0.0
    by_hidden, by_weight = torch.autograd.grad(found.loss, [hidden, weight])
    assert by_hidden.shape == (0, H)
    assert not by_weight.any()


# --- the choice ---


def test_the_choice_and_its_cost_are_reported():
    case = Case(presets.GRPO)
    case.hidden.requires_grad_()
    case.weight.requires_grad_()
    plan = case.ours(chunk_bytes=chunks_of(10)).plan
    # a chunk is two tables of 10 rows in float64; the gradients are [40, 6] and [23, 6]
    assert plan.peak_bytes == 10 * V * 16 + 8 * (U * H + V * H)
    assert (plan.chunk_rows, plan.flops) == (10, 6 * U * H * V)
    assert str(plan).startswith("one-pass: the loss of a chunk is known when its logits are (chunks of 10 rows")


def test_plans_cost_what_their_products_with_the_weight_cost():
    size, product = Size(1000, 64, 500), 2 * 1000 * 64 * 500
    flops = {
        (True, True, True, True): 3,
        (True, True, True, False): 4,
        (True, False, True, True): 2,
        (True, False, True, False): 3,
        (True, False, False, False): 2,
        (False, True, True, True): 2,
        (False, False, False, True): 1,
    }
    for (hidden, weight, entropy, fits), products in flops.items():
        plan = choose_plan(size, Gradients(hidden=hidden, weight=weight, entropy=entropy), 100, fits=fits)
        assert plan.flops == products * product, plan


def test_a_plan_that_cannot_be_is_refused_with_the_reason():
    case = Case(presets.GSPO)
    case.hidden.requires_grad_()
    case.weight.requires_grad_()
    with pytest.raises(ArgumentError, match=r"TG-MODEL-025.*one-pass.*trace.*objective.*spans"):
        case.ours(chunk_bytes=chunks_of(3), plan="one-pass")
    with pytest.raises(ArgumentError, match="TG-MODEL-025"):
        case.ours(plan="frozen")
    with torch.no_grad(), pytest.raises(ArgumentError, match="TG-MODEL-025"):
        case.ours(plan="recompute")


def test_terms_of_another_batch_are_refused():
    case = Case(presets.GRPO)
    with pytest.raises(ArgumentError, match=r"TG-MODEL-013.*53.*50"):
        policy_loss(case.hidden, case.weight, case.batch, case.terms.select(slice(0, 50)), case.objective)


def test_an_objective_says_how_far_it_looks():
    on_theta, off = Ratio("theta", "rollout"), Ratio("old", "rollout")
    clipped = presets.GRPO
    assert clipped.locality == "term"
    assert presets.GSPO.locality == "trace"
    plain = Objective(PolicyGradient())
    over = {"turn": Aggregation("turn", "mean"), "trace": Aggregation("trace", "sum")}
    for locality, level in over.items():
        assert (
            Objective(PolicyGradient(), rejections=(Rejection(on_theta, level=level, high=2.0),)).locality == locality
        )
        assert Objective(PolicyGradient(), rejections=(Rejection(off, level=level, high=2.0),)).locality == "term"
    assert Objective(PolicyGradient(), rejections=(Rejection(on_theta, high=2.0, drops="trace"),)).locality == "trace"
    assert Objective(PolicyGradient(), rejections=(TopEntropy(0.2, "microbatch"),)).locality == "batch"
    assert with_entropy(plain, 0.1).locality == "term"


# --- memory ---


@pytest.mark.parametrize("name", ["GRPO", "GSPO"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_fused_loss_never_makes_a_tensor_of_the_size_of_all_logits(name, frozen):
    case = Case(getattr(presets, name), dtype=torch.float32)
    case.hidden.requires_grad_()
    case.weight.requires_grad_(not frozen)
    with Largest() as largest:
        case.ours(chunk_bytes=10 * V * 8).loss.backward()
    assert largest.numbers == U * H  # d_hidden; a chunk of 10 rows has 230 numbers, all logits would be 920
    assert largest.numbers < U * V


# --- against a float64 oracle ---


def oracle_inputs(peaked, dtype, rows=96, hidden=64, vocabulary=1000):
    """Hidden states whose logits have a standard deviation of 3, or that point at their target (entropy 0.5 nat)."""
    g = torch.Generator().manual_seed(7)
    weight = torch.randn(vocabulary, hidden, generator=g, dtype=torch.float64)
    target = torch.randint(0, vocabulary, (rows,), generator=g)
    states = torch.randn(rows, hidden, generator=g, dtype=torch.float64) * 3 / hidden**0.5
    if peaked:
        states = 10 * weight[target] / weight[target].square().sum(-1, keepdim=True) + states / 6
    return states.to(dtype), weight.to(dtype), target


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rounded", "bound", "gradients"),
    [
        (torch.float32, None, 5e-6, 5e-6),
        (torch.bfloat16, torch.float32, 5e-6, 5e-3),
        (torch.bfloat16, torch.bfloat16, 0.1, 2e-2),
    ],
)
def test_errors_against_a_float64_oracle(peaked, dtype, rounded, bound, gradients):
    hidden, weight, target = oracle_inputs(peaked, dtype)
    assert_near_oracle(hidden, weight, target, bound, gradients, logits_dtype=rounded, chunk_bytes=1 << 18)


def assert_near_oracle(hidden, weight, target, bound, gradients, **how):
    """logp and entropy within `bound`, gradients within `gradients` of their norm, of the same inputs in float64."""
    exact = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    log_p = (exact[0] @ exact[1].T).log_softmax(-1)
    expected = log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    slope = torch.linspace(-1, 1, len(target), dtype=torch.float64)
    variables = [value.detach().requires_grad_() for value in (hidden, weight)]
    found = token_logprobs(*variables, target, **how)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < bound
    ours = torch.autograd.grad((found[0] * slope).sum() + 0.1 * found[1].sum(), variables)
    theirs = torch.autograd.grad((expected[0] * slope).sum() + 0.1 * expected[1].sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < gradients * b.norm()
