"""Advantages beside the peers' own functions: all 14 estimators of verl, SkyRL's six, TRL's, ART's.

Padded rows hold ragged groups, groups of one, equal groups, empty rows, rows with one term, holes and long rows. What
is not a term is cut away for ours: trace ids and flat arrays stand for the mask.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peer_code import trl_advantages, trl_optimal_value, trl_rloo
from tracegrad import advantage as adv

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
skyrl = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
tokenize = pytest.importorskip("art.preprocessing.tokenize")

VERL = {"ddof": 1, "eps": 1e-6}
WHITEN = {"ddof": 1, "eps": 1e-8, "eps_in": "variance"}
GAMMAS = [1.0, 0.95, 0.0]


class Case:
    """Rows of one batch; `rewards` per row stand on one column, `dense` ones on all terms."""

    def __init__(self, seed, sizes=(7, 6, 5, 2, 1, 1, 8), width=40, holes=True):
        draw = np.random.default_rng(seed)
        self.groups = draw.permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
        rows = len(self.groups)
        lengths = draw.integers(2, width - 4, rows)
        lengths[:3] = 0, 1, width
        self.lengths = draw.permutation(lengths)
        mask = np.arange(width) < self.lengths[:, None]
        if holes:
            mask &= draw.random((rows, width)) > 0.25
        self.mask = torch.tensor(mask, dtype=torch.float64)
        self.rewards = draw.integers(0, 3, rows) / 4 + draw.normal(size=rows) * draw.integers(0, 2, rows)
        self.rewards[self.groups == 3] = 0.25
        self.dense = torch.tensor(draw.normal(size=mask.shape)) * self.mask
        self.values = torch.tensor(draw.normal(size=mask.shape)) * self.mask
        self.logprobs = torch.tensor(-draw.exponential(size=mask.shape))
        chosen = self.logprobs.exp()  # the others' squares sum to (1 - p)^2 at most
        self.squares = chosen**2 + (1 - chosen) ** 2 * torch.tensor(draw.random(mask.shape))
        self.weights = torch.tensor(draw.lognormal(size=mask.shape))
        self.trace, self.column = np.nonzero(mask)
        self.holed = holes

    @property
    def outcome(self):
        """[B, T] with each row's reward at its last term, or at column 0 where it has none."""
        last = (self.mask * torch.arange(1, self.mask.shape[1] + 1)).argmax(1)
        table = torch.zeros_like(self.mask)
        table[torch.arange(len(last)), last] = torch.tensor(self.rewards)
        return table

    def terms(self, table):
        return np.asarray(table)[self.trace, self.column]

    def spread(self, per_trace):
        """[M]: a value per trace at each of its terms."""
        return np.asarray(per_trace)[self.trace]


PAIRS = (7, 6, 5, 2, 8)
CASES = {f"seed {seed}": Case(seed) for seed in range(4)} | {
    "long rows": Case(4, sizes=(3, 3, 1, 2), width=1500),
    "one column": Case(5, width=41, holes=False),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def double():
    """Peers divide counts and make tensors of Python floats: in float64 they show their formula, not its rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def config(**options):
    return SimpleNamespace(get=lambda name, default=None: options.get(name, default), **options)


def test_the_cases_hold_every_branch():
    fired = dict.fromkeys(["groups of one", "equal groups", "empty rows", "rows of one term", "holes", "lone steps"], 0)
    for case in CASES.values():
        counts = adv.group_counts(case.rewards, case.groups)
        mask = case.mask.numpy() > 0
        alive = np.stack([mask[case.groups == group].sum(0) for group in np.unique(case.groups)])
        fired["groups of one"] += counts.singletons
        fired["equal groups"] += counts.equal
        fired["empty rows"] += int((~mask.any(1)).sum())
        fired["rows of one term"] += int((mask.sum(1) == 1).sum())
        fired["holes"] += int(((np.arange(mask.shape[1]) < case.lengths[:, None]) & ~mask).sum())
        fired["lone steps"] += int((alive == 1).sum())
    print(fired)
    assert all(fired.values()), fired


@ALL
@pytest.mark.parametrize("by_std", [True, False])
def test_verl_grpo(close, case, by_std):
    ours = adv.group_mean(
        case.rewards, case.groups, single_sample_group="keep", **({"scale": "std"} | VERL if by_std else {})
    )
    call = (case.outcome, case.mask, case.groups, 1e-6, by_std)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(*call)
    close("verl grpo", case.spread(ours), case.terms(theirs))
    theirs, _ = core_algos.compute_grpo_vectorized_outcome_advantage(*call)
    varied = case.spread(case.groups != 3)  # of equal groups float32 leaves it 1e-8 over 1e-6
    assert varied.any()
    assert not varied.all()
    close("verl grpo_vectorized (float32)", case.spread(ours)[varied], case.terms(theirs)[varied], 1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by_std", [True, False])
def test_verl_pass_at_k(close, seed, by_std):
    case = Case(seed, sizes=PAIRS)  # verl refuses a group of one, as ours does by default
    options = config(norm_adv_by_std_in_grpo=by_std)
    theirs, _ = core_algos.compute_grpo_passk_outcome_advantage(case.outcome, case.mask, case.groups, config=options)
    ours = adv.pass_at_k(case.rewards, case.groups, **({"scale": "std"} | VERL if by_std else {}))
    assert (ours > 0).sum() > 1
    close("verl grpo_passk", case.spread(ours), case.terms(theirs))


@ALL
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, -2.0]])
def test_verl_gdpo(close, case, weights):
    table = np.random.default_rng(9).normal(size=(len(case.rewards), 3))
    table[:, 1] *= 50
    names = {f"r{k}": table[:, k] for k in range(3)}
    width = case.mask.shape[1]
    batch = {"prompts": torch.zeros(len(table), 1), "attention_mask": torch.ones(len(table), width + 1).long()}
    options = config(gdpo_reward_keys=list(names), gdpo_reward_weights=weights)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        case.outcome, case.mask, case.groups, config=options, non_tensor_batch=names, batch=batch
    )
    each = adv.normalize_then_sum(table, case.groups, weights=weights, single_sample_group="keep", **VERL)
    # three float32 numbers that nearly cancel
    close("verl gdpo (float32)", adv.whiten(case.spread(each), **WHITEN), case.terms(theirs), 5e-5)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(case.outcome, case.mask, case.groups)
    each = adv.normalize_then_sum(case.rewards[:, None], case.groups, single_sample_group="keep", **VERL)
    close("verl gdpo of one reward", adv.whiten(case.spread(each), **WHITEN), case.terms(theirs))


@ALL
def test_verl_outcome_estimators(close, case):
    call = (case.outcome, case.mask, case.groups)
    terms = case.mask.sum(1).numpy()
    close(
        "verl rloo",
        case.spread(adv.rloo(case.rewards, case.groups, single_sample_group="keep")),
        case.terms(core_algos.compute_rloo_outcome_advantage(*call)[0]),
    )
    close(
        "verl rloo_vectorized",
        case.spread(adv.rloo(case.rewards, case.groups, single_sample_group="zero")),
        case.terms(core_algos.compute_rloo_vectorized_outcome_advantage(*call)[0]),
    )
    close(
        "verl opo",
        case.spread(adv.opo(case.rewards, terms, case.groups, single_sample_group="keep")),
        case.terms(core_algos.compute_opo_outcome_advantage(*call)[0]),
    )
    close(
        "verl gpg",
        case.spread(adv.gpg(case.rewards, case.groups, nonzero="rewards", single_sample_group="keep")),
        case.terms(core_algos.compute_gpg_outcome_advantage(*call)[0]),
    )
    close(
        "verl reinforce_plus_plus_baseline",
        adv.reinforce_plus_plus_baseline(case.rewards, case.groups, case.trace, single_sample_group="keep"),
        case.terms(core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(*call)[0]),
    )


@ALL
@pytest.mark.parametrize("kind", ["outcome", "dense"])
def test_verl_estimators_by_token(close, case, kind):
    given = getattr(case, kind) * case.mask
    rewards = case.terms(given)
    for gamma in GAMMAS:
        theirs, sums = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            given, case.mask, config=config(gamma=gamma)
        )
        ours = adv.reinforce_plus_plus(rewards, case.trace, gamma=gamma)
        close("verl reinforce_plus_plus", ours, case.terms(theirs), 2e-7)  # verl's mean divides by count + 1e-8
        close("verl returns", adv.returns(rewards, case.trace, gamma=gamma), case.terms(sums))
    greedy = np.random.default_rng(1).normal(size=len(case.rewards))
    theirs, _ = core_algos.compute_remax_outcome_advantage(given, torch.tensor(greedy), case.mask)
    close("verl remax", adv.remax(rewards, greedy, case.trace), case.terms(theirs))


@ALL
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (1.0, 0.0)])
def test_verl_gae(close, case, gamma, lam):
    theirs, sums = core_algos.compute_gae_advantage_return(case.dense, case.values, case.mask, gamma, lam)
    ours = adv.gae(case.terms(case.dense), case.terms(case.values), case.trace, gamma=gamma, lam=lam)
    close("verl gae", adv.whiten(ours.advantages, **WHITEN), case.terms(theirs))
    close("verl gae, returns", ours.returns, case.terms(sums))


@ALL
@pytest.mark.parametrize("tail", ["keep", "zero"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["outcome", "dense"])
def test_verl_optimal_token_baselines(close, case, kind, weighted, tail):
    given = getattr(case, kind) * case.mask
    per_term = {"logprobs": case.terms(case.logprobs), "sum_pi_squared": case.terms(case.squares)}
    if weighted:
        per_term["weights"] = case.terms(case.weights)
    call = (given, case.mask, case.groups, case.logprobs, case.squares, case.weights if weighted else None)

    def compare(subject, function, position):
        ours = adv.optimal_token_baseline(
            case.terms(given),
            case.groups,
            case.trace,
            tail=tail,
            position=position,
            single_sample_group="keep",
            **per_term,
        )
        theirs = case.terms(function(*call, handle_zero_tail=tail == "keep")[0])
        # Where one reward stands for all, and at lone steps, verl leaves 1e-8 / W of the return; ours are exactly 0.
        nothing = (ours == 0) & (np.abs(theirs) < 1e-5)
        close(subject, ours[~nothing], theirs[~nothing])

    compare("verl tir_otb", core_algos.compute_multi_turn_optimal_token_baseline_advantage, None)
    if not case.holed:
        compare("verl otb", core_algos.compute_optimal_token_baseline_advantage, case.column)


@ALL
def test_skyrl_outcome_estimators(close, case):
    call = (case.outcome, case.mask, case.groups)
    for by_std in (True, False):
        theirs, _ = skyrl.compute_grpo_outcome_advantage(*call, grpo_norm_by_std=by_std)
        options = {"scale": "std"} | VERL if by_std else {}
        close(
            "SkyRL grpo",
            case.spread(adv.group_mean(case.rewards, case.groups, single_sample_group="keep", **options)),
            case.terms(theirs),
        )
    close(
        "SkyRL rloo",
        case.spread(adv.rloo(case.rewards, case.groups, single_sample_group="zero")),
        case.terms(skyrl.compute_rloo_outcome_advantage(*call)[0]),
    )


@ALL
def test_skyrl_max_rl_where_the_mean_is_above_zero(close, case):
    theirs = case.terms(skyrl.compute_maxrl_advantage(case.outcome, case.mask, case.groups)[0])
    ours = case.spread(adv.max_rl(case.rewards, case.groups, eps=1e-6, single_sample_group="keep"))
    means = np.array([case.rewards[case.groups == group].mean() for group in case.groups])
    alone = np.array([(case.groups == group).sum() == 1 for group in case.groups])
    positive = case.spread((means > 0) | alone)
    assert positive.any()
    close("SkyRL maxrl", ours[positive], theirs[positive])


def test_verl_spreads_a_nan_over_its_group_and_ours_leaves_it_out():
    rewards, groups = np.array([1.0, np.nan, 0.0]), np.zeros(3, int)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(torch.tensor(rewards)[:, None], torch.ones(3, 1), groups)
    assert theirs.isnan().all()
    assert adv.group_mean(rewards, groups).tolist() == [0.5, 0.0, -0.5]


def test_verl_opo_leaves_nan_in_a_group_without_terms():
    theirs, _ = core_algos.compute_opo_outcome_advantage(torch.ones(2, 3), torch.zeros(2, 3), np.zeros(2, int))
    assert theirs.isnan().all()
    assert adv.opo([3.0, 2.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]


def test_verl_otb_keeps_the_return_of_a_lone_step_at_the_tail_and_not_in_a_hole():
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    rewards, zeros = torch.zeros(2, 4), torch.zeros(2, 4)
    rewards[0, 3], rewards[1, 1] = 1.0, 5.0
    theirs, _ = core_algos.compute_optimal_token_baseline_advantage(
        rewards, mask, np.zeros(2, int), zeros - 1, zeros + 0.5
    )
    trace, column = np.nonzero(mask.numpy())
    ours = adv.optimal_token_baseline(
        rewards.numpy()[trace, column],
        [0, 0],
        trace,
        logprobs=np.full(5, -1.0),
        sum_pi_squared=np.full(5, 0.5),
        tail="keep",
        position=column,
    )
    assert theirs[1, 1].abs() < 1e-6
    assert ours.tolist() == pytest.approx([-2.0, 1.0, 1.0, 2.0, 5.0])


def test_skyrl_max_rl_turns_the_sign_where_the_mean_is_below_zero():
    rewards, groups = [-1.0, -3.0], [0, 0]
    theirs, _ = skyrl.compute_maxrl_advantage(torch.tensor(rewards)[:, None], torch.ones(2, 1), np.array(groups))
    assert theirs[0, 0] < 0  # the better of the two is pushed down
    assert adv.max_rl(rewards, groups, eps=1e-6).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(3))
def test_skyrl_estimators_by_token(close, seed):
    case = Case(seed, holes=False)
    rewards, values = case.terms(case.dense), case.terms(case.values)
    for gamma in GAMMAS:
        theirs, _ = skyrl.compute_reinforce_plus_plus_outcome_advantage(case.dense, case.mask, gamma)
        close("SkyRL reinforce++", adv.reinforce_plus_plus(rewards, case.trace, gamma=gamma), case.terms(theirs))
    theirs, sums = skyrl.compute_gae_advantage_return(case.dense, case.values, case.mask, 0.99, 0.9)
    ours = adv.gae(rewards, values, case.trace, gamma=0.99, lam=0.9)
    close("SkyRL gae", adv.whiten(ours.advantages, **WHITEN), case.terms(theirs))
    close("SkyRL gae, returns", ours.returns, case.terms(sums))


def test_skyrl_lets_no_reward_reach_over_a_hole():
    reward, mask = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    _, theirs = skyrl.compute_reinforce_plus_plus_outcome_advantage(reward, mask, 1.0)
    assert theirs[0].tolist() == [0.0, 1.0, 1.0]
    assert adv.returns([0.0, 1.0], [0, 0], gamma=1.0).tolist() == [1.0, 1.0]


def trl_table(seed):
    """[48, 3] in groups of 8: NaN in places, a row of NaN, a group with one scorable row, an equal group."""
    draw = np.random.default_rng(seed)
    table = draw.normal(size=(48, 3)) * [1.0, 20.0, 0.1]
    table[draw.random(table.shape) < 0.15] = np.nan
    table[5] = np.nan
    table[8:15] = np.nan
    table[15] = 1.0
    table[16:24] = [0.5, 2.0, 0.25]
    table[24:31, 1] = np.nan  # one trace of the group has this reward
    return table


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [2.0, 0.5, -1.0]])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trl_sum_then_normalize(close, seed, weights, scale):
    table, groups = trl_table(seed), np.arange(48) // 8
    theirs = trl_advantages(torch.tensor(table), 8, scale, weights=torch.tensor(weights, dtype=torch.float64))
    rewards = adv.weighted_sum(table, weights)
    counts = adv.group_counts(rewards, groups)
    assert (counts.singletons, counts.equal) == (1, 1)
    assert counts.unscorable >= 8
    options = {} if scale == "none" else {"scale": {"group": "std", "batch": "batch_std"}[scale], "ddof": 1}
    ours = adv.group_mean(rewards, groups, single_sample_group="zero", **options)
    close(f"TRL sum_then_normalize, {scale}", ours, theirs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [2.0, 0.5, -1.0]])
def test_trl_normalize_then_sum(close, seed, weights):
    table, groups = trl_table(seed), np.arange(48) // 8
    theirs = trl_advantages(
        torch.tensor(table), 8, "group", "normalize_then_sum", torch.tensor(weights, dtype=torch.float64)
    )
    each = adv.normalize_then_sum(table, groups, weights=weights, ddof=1, single_sample_group="zero")
    close("TRL normalize_then_sum", adv.whiten(each, ddof=1, eps=1e-4, eps_in="deviation"), theirs)


@pytest.mark.parametrize("seed", range(4))
def test_trl_rloo_and_a2po(close, seed):
    rewards, groups = trl_table(seed)[:, 0], np.arange(48) // 8
    ours = adv.rloo(rewards, groups, single_sample_group="zero")
    assert np.isnan(rewards).any()
    close("TRL rloo", ours, trl_rloo(torch.tensor(rewards), 8, normalize=False))
    # TRL leaves a group of one outside its normalisation too
    counted = np.where(np.isin(groups, adv.group_counts(rewards, groups).singleton_ids), np.nan, rewards)
    ours = adv.whiten(np.where(np.isnan(counted), np.nan, ours), ddof=1, eps=1e-4, eps_in="deviation")
    theirs = trl_rloo(torch.tensor(rewards), 8, normalize=True).numpy()
    equal = groups == 2  # 0 minus a mean of about 0, which the float32 of rloo moves by 1e-9
    close("TRL rloo, normalised (of float32)", ours[~equal], theirs[~equal], 2e-6)
    assert np.abs(ours[equal] - theirs[equal]).max() < 1e-8
    whole = np.random.default_rng(seed).normal(size=(6, 8))
    for beta in (0.1, 0.5, 5.0):
        value = trl_optimal_value(torch.tensor(whole), beta).numpy()
        ours = adv.a_star(whole.reshape(-1), groups, beta=beta)
        close("TRL a2po: reward - V*", ours, (whole - value[:, None]).reshape(-1))


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_art_groups(close, scale, seed, monkeypatch):
    seen = []
    monkeypatch.setattr(tokenize, "tokenize_trajectory", lambda *args, **_: seen.append(args[3]))
    monkeypatch.setattr(tokenize, "History", SimpleNamespace)
    draw = np.random.default_rng(seed)
    sizes = [7, 1, 4, 2, 5]
    groups, rewards = np.repeat(np.arange(5), sizes), draw.normal(size=19)
    rewards[groups == 2] = 0.5
    rows = [
        [SimpleNamespace(reward=r, messages_and_choices=[], tools=None, additional_histories=[]) for r in group]
        for group in np.split(rewards, np.cumsum(sizes)[:-1])
    ]
    options = {"shuffle_group_trajectories": False, "drop_zero_advantage_trajectories": False}
    list(tokenize.tokenize_trajectory_groups(None, rows, True, scale, **options))
    options = {"scale": "std", "ddof": 0, "eps": 1e-6} if scale else {}
    ours = adv.group_mean(rewards, groups, single_sample_group="zero", **options)
    close(f"ART, scaled {scale}", ours, seen)
