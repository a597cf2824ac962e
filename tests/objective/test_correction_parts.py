"""correction: every statistic, level, shape, gate and budget of the algebra, each against numbers worked by hand."""

import math

import numpy as np
import pytest

from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    LOG_RATIO_LIMIT,
    Aggregation,
    Gamma,
    Gaussian,
    Identity,
    MaskOutside,
    Ratio,
    Reduce,
    Rejection,
    RejectionBudget,
    TopEntropy,
    Truncate,
    Weight,
)
from tracegrad.objective.correction import correct

NAN = float("nan")
MISMATCH = Ratio("old", "rollout")
PASS = 1e-6  # a bound this far beyond a statistic lets it pass, this far short of it does not

# Log-ratios 0.1, 0.3, -0.5 | 1.0 | -0.2: two traces of one group, the first with two turns; a third alone in its group.
STEP = {
    "old": np.array([-1.0, -1.0, -1.0, -1.0, -1.0]),
    "rollout": np.array([-1.1, -1.3, -0.5, -2.0, -0.8]),
    "trace": np.array([0, 0, 0, 1, 2]),
    "turn": np.array([0, 0, 1, 0, 0]),
    "group": np.array([7, 7, 7, 7, 9]),
}
STEP_OLD, STEP_ROLLOUT = STEP["old"], STEP["rollout"]


def keeps(*gates, **options):
    return correct(**STEP, rejections=gates, **options).keep.tolist()


def log_weights(weight, **options):
    return np.log(correct(**{**STEP, **options}, weights=[weight]).weight)


class TestStatistics:
    # p = 1/2 over q = 1/4, then the other way round; log 2 = 0.6931
    log2 = math.log(2)
    old, rollout = np.log([0.5, 0.25]), np.log([0.25, 0.5])
    values = pytest.mark.parametrize(
        ("stat", "first", "second"),
        [
            ("ratio", 2.0, 0.5),
            ("k1", log2, -log2),
            ("k2", log2**2 / 2, log2**2 / 2),
            ("k3", 2 - 1 - log2, 0.5 - 1 + log2),
            ("abs", log2, log2),
            ("square", log2**2, log2**2),
            ("dprob", 0.25, -0.25),
            # q log(q/p) + (1 - q) log((1 - q)/(1 - p)): 1/4 log(1/2) + 3/4 log(3/2), and 1/2 log 2 + 1/2 log(2/3)
            ("binary_kl", 0.75 * math.log(1.5) - 0.25 * log2, -(0.5 * log2 + 0.5 * math.log(2 / 3))),
        ],
    )

    @values
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_a_token_passes_up_to_its_own_value(self, stat, first, second, dtype):
        columns = {"old": self.old.astype(dtype), "rollout": self.rollout.astype(dtype), "trace": [0, 1]}
        for high, expected in [(first + PASS, True), (first - PASS, False)]:
            assert correct(**columns, rejections=[Rejection(MISMATCH, stat, high=high)]).keep[0] == expected
        if second >= 0 and stat != "ratio":
            return
        for low, expected in [(second - PASS, True), (second + PASS, False)]:
            assert correct(**columns, rejections=[Rejection(MISMATCH, stat, low=low)]).keep[1] == expected

    @pytest.mark.parametrize(
        ("stat", "mean"),
        [
            # p = 1/2 at both, q = 1/4 and 2/5: log-ratios log 2 and log 1.25, whose mean is log(2.5) / 2
            ("ratio", 2.5**0.5),
            ("k1", math.log(2.5) / 2),
            ("k2", (math.log(2) ** 2 + math.log(1.25) ** 2) / 4),
            ("k3", (2 - 1 + 1.25 - 1 - math.log(2.5)) / 2),
            ("abs", math.log(2.5) / 2),
            ("square", (math.log(2) ** 2 + math.log(1.25) ** 2) / 2),
            ("dprob", (0.25 + 0.1) / 2),
            (
                "binary_kl",
                (0.25 * math.log(0.5) + 0.75 * math.log(1.5) + 0.4 * math.log(0.8) + 0.6 * math.log(1.2)) / 2,
            ),
        ],
    )
    def test_a_level_aggregates_log_ratios_before_exp_and_other_statistics_as_they_are(self, stat, mean):
        columns = {"old": np.log([0.5, 0.5]), "rollout": np.log([0.25, 0.4]), "trace": [0, 0]}
        for high, expected in [(mean + PASS, True), (mean - PASS, False)]:
            gate = Rejection(MISMATCH, stat, Aggregation("trace", "mean"), high=high)
            assert correct(**columns, rejections=[gate]).keep.tolist() == [expected] * 2

    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_binary_kl_is_finite_where_a_probability_is_one(self, dtype):
        # p = 1, q = 1/e: -1/e + (1 - 1/e) log((1 - 1/e + 1e-8) / 1e-8) = 10.99; and 0 where both are 1
        kl = -1 / math.e + (1 - 1 / math.e) * math.log((1 - 1 / math.e + 1e-8) / 1e-8)
        columns = {"old": np.array([0.0, 0.0], dtype), "rollout": np.array([-1.0, 0.0], dtype), "trace": [0, 1]}
        for high, expected in [(kl + 1e-4, True), (kl - 1e-4, False)]:
            keep = correct(**columns, rejections=[Rejection(MISMATCH, "binary_kl", high=high)]).keep
            assert keep.tolist() == [expected, True]
        assert correct(**columns, rejections=[Rejection(MISMATCH, "binary_kl", low=0.0)]).keep.all()

    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_a_difference_of_probabilities_survives_logprobs_far_below_exp(self, dtype):
        columns = {"old": np.array([-300.0, -0.1], dtype), "rollout": np.array([-0.1, -5000.0], dtype), "trace": [0, 1]}
        assert correct(**columns, rejections=[Rejection(MISMATCH, "dprob", low=-0.9)]).keep.tolist() == [False, True]
        assert correct(**columns, rejections=[Rejection(MISMATCH, "dprob", high=0.9)]).keep.tolist() == [True, False]

    def test_only_what_is_exponentiated_is_clamped(self):
        # l = 40: k1 is 40, the ratio and k3 are those of 20
        columns = {"old": np.array([-1.0]), "rollout": np.array([-41.0]), "trace": [0]}
        top = math.exp(LOG_RATIO_LIMIT)
        for stat, value in [("k1", 40), ("abs", 40), ("k2", 800), ("square", 1600), ("ratio", top), ("k3", top - 21)]:
            for factor, expected in [(1 + 1e-9, True), (1 - 1e-9, False)]:
                assert (
                    correct(**columns, rejections=[Rejection(MISMATCH, stat, high=value * factor)]).keep[0] == expected
                )


class TestGates:
    @pytest.mark.parametrize(
        ("gate", "keep"),
        [
            # over all five terms: mean 0.14, sum 0.7, largest 1
            (Rejection(MISMATCH, "k1", Aggregation("batch", "mean"), high=0.141), [1, 1, 1, 1, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("batch", "mean"), high=0.139), [0, 0, 0, 0, 0]),
            (Rejection(MISMATCH, "ratio", Aggregation("batch", "sum"), high=math.exp(0.701)), [1, 1, 1, 1, 1]),
            (Rejection(MISMATCH, "ratio", Aggregation("batch", "sum"), high=math.exp(0.699)), [0, 0, 0, 0, 0]),
            (Rejection(MISMATCH, "k1", Aggregation("batch", "max"), high=0.99), [0, 0, 0, 0, 0]),
            # group 7: mean 0.9 / 4, group 9: -0.2
            (Rejection(MISMATCH, "k1", Aggregation("group", "mean"), high=0.224), [0, 0, 0, 0, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("group", "mean"), high=0.226), [1, 1, 1, 1, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("group", "mean"), low=-0.1), [1, 1, 1, 1, 0]),
            # one token, or one turn, takes its trace or its group with it
            (Rejection(MISMATCH, low=0.7, drops="group"), [0, 0, 0, 0, 1]),
            (Rejection(MISMATCH, "k1", high=0.5, drops="group"), [0, 0, 0, 0, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("turn", "sum"), low=-0.3, drops="trace"), [0, 0, 0, 1, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("trace", "sum"), high=0.5, drops="group"), [0, 0, 0, 0, 1]),
            # a term falls by its own past: sums 0.1, 0.4, -0.1 | 1 | -0.2, and of turns 0.1, 0.4 | -0.5 | 1 | -0.2
            (Rejection(MISMATCH, "k1", Aggregation("trace", "prefix_sum"), high=0.3), [1, 0, 1, 0, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("turn", "prefix_sum"), low=-0.3), [1, 1, 0, 1, 1]),
            (Rejection(MISMATCH, "ratio", Aggregation("trace", "prefix_min"), low=0.9), [1, 1, 0, 1, 0]),
            (Rejection(MISMATCH, "k1", Aggregation("turn", "prefix_sum"), high=0.3, drops="trace"), [0, 0, 0, 0, 1]),
            # ratios 1.11, 1.35, 0.61 | 2.72 | 0.82; the mean of trace 0 is e^(-0.1 / 3) = 0.97
            (Rejection(MISMATCH, low=0.7, high=2.0), [1, 1, 0, 0, 1]),
            (Rejection(MISMATCH, low=0.7, drops="turn"), [1, 1, 0, 1, 1]),
            (Rejection(MISMATCH, low=0.7, drops="trace"), [0, 0, 0, 1, 1]),
            (Rejection(MISMATCH, "k1", Aggregation("trace", "sum"), high=0.5), [1, 1, 1, 0, 1]),
            (Rejection(MISMATCH, "ratio", Aggregation("trace", "mean"), low=0.99), [0, 0, 0, 1, 0]),
            # k2: 0.005, 0.045, 0.125 | 0.5 | 0.02; k3: 0.005, 0.05, 0.107 | 0.718 | 0.019
            (Rejection(MISMATCH, "k2", Aggregation("turn", "max"), high=0.1), [1, 1, 0, 0, 1]),
            (Rejection(MISMATCH, "k3", high=0.12), [1, 1, 1, 0, 1]),
            (Rejection(MISMATCH, "k3", Aggregation("turn", "mean"), high=0.05, drops="trace"), [0, 0, 0, 0, 1]),
        ],
    )
    def test_levels_by_hand(self, gate, keep):
        assert keeps(gate) == [bool(flag) for flag in keep]

    def test_over_kept_counts_the_survivors_of_the_gates_before(self):
        outlier = Rejection(MISMATCH, high=2.0)  # the fourth term falls; the others have mean -0.075
        mean = {"ratio": MISMATCH, "stat": "k1", "level": Aggregation("batch", "mean"), "high": 0.1}
        assert keeps(outlier, Rejection(**mean)) == [False] * 5
        assert keeps(outlier, Rejection(**mean, terms="kept")) == [True, True, True, False, True]
        assert keeps(Rejection(**mean, terms="kept"), outlier) == [False] * 5

    def test_a_running_sum_over_kept_terms_passes_over_what_fell(self):
        # trace 0 without its second term: 0.1, (0.1), -0.4
        gates = [
            Rejection(MISMATCH, high=1.3),
            Rejection(MISMATCH, "k1", Aggregation("trace", "prefix_sum"), low=-0.3, terms="kept"),
        ]
        assert keeps(*gates) == [True, False, False, False, True]

    def test_a_condition_spares_the_other_sign_and_the_scope_does_not(self):
        gate = Rejection(MISMATCH, "k1", high=0.2, when="A<0", drops="trace")
        assert keeps(gate, advantages=np.array([1.0, -1.0, 1.0, 1.0, -1.0])) == [False, False, False, True, True]
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*without.*advantages"):
            keeps(gate)

    def test_ratios_of_the_trained_policy_are_left_to_the_objective(self):
        theta = Rejection(Ratio("theta", "old"), high=1.0)
        proximal = Weight(Ratio("rollout", "proximal"))
        entropy = TopEntropy(0.2, scope="microbatch")
        found = correct(**STEP, rejections=[theta, entropy], weights=[proximal])
        assert found.keep.all()
        assert (found.weight == 1).all()


class TestBudget:
    # squares 0.01, 0.09, 0.25, 1, 0.04; the means of the smallest 1, 2, ... 5: 0.01, 0.025, 0.0467, 0.0975, 0.278
    @pytest.mark.parametrize(
        ("mean", "keep"),
        [
            (0.3, [1, 1, 1, 1, 1]),
            (0.1, [1, 1, 1, 0, 1]),
            (0.047, [1, 1, 0, 0, 1]),
            (0.04, [1, 0, 0, 0, 1]),
            (0.001, [1, 0, 0, 0, 0]),
        ],
    )
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_the_largest_squares_fall_until_the_mean_fits(self, mean, keep, dtype):
        columns = {**STEP, "old": STEP_OLD.astype(dtype), "rollout": STEP_ROLLOUT.astype(dtype)}
        assert correct(**columns, rejections=[RejectionBudget(MISMATCH, mean=mean)]).keep.tolist() == [
            bool(flag) for flag in keep
        ]

    def test_other_statistics(self):
        # |l| sorted: 0.1, 0.2, 0.3, 0.5, 1 with means 0.1, 0.15, 0.2, 0.275, 0.42
        assert keeps(RejectionBudget(MISMATCH, "abs", 0.28)) == [True, True, True, False, True]
        assert keeps(RejectionBudget(MISMATCH, "k2", 0.05)) == [True, True, True, False, True]
        # k3: 0.0052, 0.0499, 0.1065, 0.7183, 0.0187: the four small ones have mean 0.0451
        assert keeps(RejectionBudget(MISMATCH, "k3", 0.046)) == [True, True, True, False, True]

    def test_over_kept_spends_nothing_on_what_has_fallen(self):
        # without the first and last term the smallest is 0.09
        gate = Rejection(MISMATCH, "k1", Aggregation("trace", "sum"), low=-0.15)
        assert keeps(gate, RejectionBudget(MISMATCH, mean=0.04)) == [True, False, False, False, False]
        first = Rejection(MISMATCH, "abs", high=0.25)
        assert keeps(first, RejectionBudget(MISMATCH, mean=0.02, terms="kept")) == [True, False, False, False, False]
        assert keeps(first, RejectionBudget(MISMATCH, mean=0.03, terms="kept")) == [True, False, False, False, True]

    # log-ratios 0.1, 0.3, -0.5, 1, -0.2. Only those that an update moves further away are counted or fall.
    @pytest.mark.parametrize(
        ("advantages", "mean", "keep"),
        [
            # 0.1 and 0.3 with A > 0, -0.2 with A < 0: means of the smallest 0.01, 0.025, 0.0467.
            ([1, 1, 1, -1, -1], 0.047, [1, 1, 1, 1, 1]),
            ([1, 1, 1, -1, -1], 0.04, [1, 0, 1, 1, 1]),
            ([1, 1, 1, -1, -1], 0.02, [1, 0, 1, 1, 0]),
            # -0.5 with A < 0, 1 with A > 0: means 0.25, 0.625. The smallest stays, whatever the mean.
            ([-1, -1, -1, 1, 0], 0.3, [1, 1, 1, 0, 1]),
            ([-1, -1, -1, 1, 0], 0.04, [1, 1, 1, 0, 1]),
            ([0, 0, 0, 0, 0], 0.001, [1, 1, 1, 1, 1]),
        ],
    )
    def test_the_active_quadrants(self, advantages, mean, keep):
        columns = {**STEP, "advantages": np.array(advantages, np.float64)}
        gate = RejectionBudget(MISMATCH, mean=mean, quadrants="active")
        assert correct(**columns, rejections=[gate]).keep.tolist() == [bool(flag) for flag in keep]

    def test_the_active_quadrants_of_what_is_kept_and_known(self):
        columns = {**STEP, "advantages": np.array([1.0, 1.0, 1.0, -1.0, -1.0])}
        # 0.1 has fallen before, so that 0.04 and 0.09 are left: mean 0.065 above 0.05.
        first = Rejection(MISMATCH, "k1", high=0.05, when="A>0")
        fell = correct(
            **columns, rejections=[first, RejectionBudget(MISMATCH, mean=0.05, terms="kept", quadrants="active")]
        )
        assert fell.keep.tolist() == [False, False, True, True, True]
        rollout = STEP_ROLLOUT.copy()
        rollout[0] = NAN
        budget = RejectionBudget(MISMATCH, mean=0.05, quadrants="active")
        found = correct(**{**columns, "rollout": rollout}, rejections=[budget], missing_logprobs="ratio_one")
        assert found.keep.tolist() == [True, False, True, True, True]

    def test_the_active_quadrants_need_advantages(self):
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*depends.*on.*sign.*A"):
            keeps(RejectionBudget(MISMATCH, quadrants="active"))

    def test_ties_stand_or_fall_together_and_the_smallest_always_stands(self):
        columns = {"old": np.array([-1.0, -1.0, -2.0, -1.0]), "rollout": np.array([-1.5, -0.5, -1.0, -2.0])}
        columns["trace"] = [0, 0, 0, 0]
        # squares 0.25, 0.25, 1, 1
        assert correct(**columns, rejections=[RejectionBudget(MISMATCH, mean=0.5)]).keep.tolist() == [
            True,
            True,
            False,
            False,
        ]
        assert correct(**columns, rejections=[RejectionBudget(MISMATCH, mean=0.01)]).keep.tolist() == [
            True,
            True,
            False,
            False,
        ]
        assert correct(**columns, rejections=[RejectionBudget(MISMATCH, mean=0.7)]).keep.all()

    def test_a_missing_term_neither_spends_nor_falls(self):
        rollout = STEP_ROLLOUT.copy()
        rollout[3] = NAN
        found = correct(
            **{**STEP, "rollout": rollout},
            rejections=[RejectionBudget(MISMATCH, mean=0.05)],
            missing_logprobs="ratio_one",
        )
        assert found.keep.tolist() == [True, True, False, True, True]


class TestLevels:
    @pytest.mark.parametrize(
        ("level", "expected"),
        [
            (Aggregation("turn", "sum"), [0.4, 0.4, -0.5, 1.0, -0.2]),
            (Aggregation("turn", "mean"), [0.2, 0.2, -0.5, 1.0, -0.2]),
            (Aggregation("trace", "sum"), [-0.1, -0.1, -0.1, 1.0, -0.2]),
            (Aggregation("trace", "max"), [0.3, 0.3, 0.3, 1.0, -0.2]),
            (Aggregation("group", "sum"), [0.9, 0.9, 0.9, 0.9, -0.2]),
            (Aggregation("group", "max"), [1.0, 1.0, 1.0, 1.0, -0.2]),
            (Aggregation("batch", "mean"), [0.14] * 5),
            (Aggregation("trace", "prefix_sum"), [0.1, 0.4, -0.1, 1.0, -0.2]),
            (Aggregation("turn", "prefix_sum"), [0.1, 0.4, -0.5, 1.0, -0.2]),
            (Aggregation("trace", "prefix_min"), [0.1, 0.1, -0.5, 1.0, -0.2]),
            # (l + L) / 2 with L = -0.1, 1, -0.2
            (Aggregation("trace", "sum", blend="geometric"), [0.0, 0.1, -0.3, 1.0, -0.2]),
            (Aggregation("trace", "prefix_sum", blend="geometric"), [0.1, 0.35, -0.3, 1.0, -0.2]),
        ],
    )
    def test_log_ratios_by_hand(self, level, expected):
        np.testing.assert_allclose(log_weights(Weight(MISMATCH, level)), expected, atol=1e-14)

    def test_the_arithmetic_blend_is_the_mean_of_two_ratios(self):
        found = correct(**STEP, weights=[Weight(MISMATCH, Aggregation("trace", "mean", blend="arithmetic"))]).weight
        trace = math.exp(-0.1 / 3)
        own = [math.exp(each) for each in (0.1, 0.3, -0.5)]
        np.testing.assert_allclose(found[:3], [(trace + ratio) / 2 for ratio in own], rtol=1e-15)
        np.testing.assert_allclose(found[3:], np.exp([1.0, -0.2]))

    def test_the_clamp_holds_every_log_ratio_that_is_exponentiated(self):
        # l = 15 at both terms of a trace: the sum of 30 is held at 20, and the geometric mean of 15 and 30 is 20 too
        columns = {"old": np.array([-1.0, -1.0]), "rollout": np.array([-16.0, -16.0]), "trace": [0, 0]}
        top = math.exp(LOG_RATIO_LIMIT)
        for blend, expected in [(None, top), ("geometric", top), ("arithmetic", (top + math.exp(15)) / 2)]:
            found = correct(**columns, weights=[Weight(MISMATCH, Aggregation("trace", "sum", blend=blend))])
            np.testing.assert_allclose(found.weight, expected, rtol=1e-14)
            assert found.metrics["clamped_levels"] == 1

    def test_terms_of_a_running_level_count_in_the_order_of_the_arrays(self):
        order = np.array([2, 3, 0, 4, 1])
        shuffled = {name: column[order] for name, column in STEP.items()}
        found = correct(**shuffled, weights=[Weight(MISMATCH, Aggregation("trace", "prefix_sum"))])
        # trace 0 now runs -0.5, 0.1, 0.3
        np.testing.assert_allclose(np.log(found.weight), [-0.5, 1.0, -0.4, -0.2, -0.1], atol=1e-14)

    def test_missing_and_dropped_terms_stand_outside_running_levels(self):
        rollout = STEP_ROLLOUT.copy()
        rollout[0] = NAN
        weight = Weight(MISMATCH, Aggregation("trace", "prefix_sum"))
        found = correct(**{**STEP, "rollout": rollout}, weights=[weight], missing_logprobs="ratio_one")
        np.testing.assert_allclose(np.log(found.weight), [0.0, 0.3, -0.2, 1.0, -0.2], atol=1e-14)
        # the first term falls, and what is not yet counted has no level: its weight is 1
        kept = Weight(MISMATCH, Aggregation("trace", "prefix_sum", terms="kept"))
        found = correct(**STEP, rejections=[Rejection(MISMATCH, "k1", high=0.05)], weights=[kept])
        np.testing.assert_allclose(np.log(found.weight), [0.0, 0.0, -0.5, 0.0, -0.2], atol=1e-14)

    def test_a_level_needs_its_ids(self):
        columns = {name: STEP[name] for name in ("old", "rollout", "trace")}
        for over in ("turn", "group"):
            with pytest.raises(ArgumentError, match=rf"TG-RATIO-001.*{over}.*{over}"):
                correct(**columns, weights=[Weight(MISMATCH, Aggregation(over, "sum"))])


class TestShapes:
    ratios = (0.5, 1.0, 1.5, 4.0)

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            (Identity(), [0.5, 1.0, 1.5, 4.0]),
            (Truncate(0.8, 3.0), [0.8, 1.0, 1.5, 3.0]),
            (MaskOutside(1.0, 2.0), [0.0, 1.0, 1.5, 0.0]),
            (MaskOutside(1.0, 2.0, strict=True), [0.0, 0.0, 1.5, 0.0]),
            # e^3 w^2 e^(-3 w)
            (Gamma(2.0, 3.0), [math.exp(1.5) / 4, 1.0, 2.25 * math.exp(-1.5), 16 * math.exp(-9)]),
            # e^(-(log w)^2 / (2 * 0.25))
            (Gaussian(0.5), [math.exp(-2 * math.log(w) ** 2) for w in ratios]),
        ],
    )
    @pytest.mark.parametrize("level", [Aggregation(), Aggregation("trace", "sum"), Aggregation("trace", "prefix_sum")])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)])
    def test_each_shape_at_a_token_and_at_a_level(self, shape, expected, level, dtype, tolerance):
        old, rollout = np.log(self.ratios).astype(dtype), np.zeros(4, dtype)
        found = correct(old - 2, rollout - 2, trace=np.arange(4), weights=[Weight(MISMATCH, level, shape)])
        np.testing.assert_allclose(found.weight, expected, rtol=tolerance)

    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_smooth_shapes_end_at_zero_and_never_at_nan(self, dtype):
        columns = {"old": np.array([-1.0, -90.0], dtype), "rollout": np.array([-90.0, -1.0], dtype), "trace": [0, 1]}
        for shape in (Gamma(2.0, 3.0), Gamma(50.0, 0.1), Gaussian(0.1)):
            assert np.isfinite(correct(**columns, weights=[Weight(MISMATCH, transform=shape)]).weight).all(), shape
        assert correct(**columns, weights=[Weight(MISMATCH, transform=Gamma(2.0, 3.0))]).weight[0] == 0

    def test_a_window_sets_weights_to_zero_and_leaves_keep(self):
        found = correct(**STEP, weights=[Weight(MISMATCH, transform=MaskOutside(0.7, 2.0))])
        np.testing.assert_allclose(found.weight, [np.exp(0.1), np.exp(0.3), 0.0, 0.0, np.exp(-0.2)])
        assert found.keep.all()
        assert found.metrics["truncated_fraction"] == 2 / 5

    def test_a_log_ratio_beyond_the_limit_is_clamped_and_counted(self):
        found = correct(np.array([-1.0, -60.0]), np.array([-60.0, -1.0]), trace=[0, 1], weights=[Weight(MISMATCH)])
        np.testing.assert_allclose(np.log(found.weight), [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT])
        assert found.metrics["clamped"] == 2

    def test_everything_rejected_is_zero_and_not_nan(self):
        gate, reduce = Rejection(MISMATCH, low=1.0, high=1.0), Reduce("trace", "mean", denominator="kept")
        found = correct(**STEP, rejections=[gate], weights=[Weight(MISMATCH)], reduce=reduce)
        assert not found.keep.any()
        assert found.scale.tolist() == [0.0] * 5

    def test_weights_multiply(self):
        weights = [
            Weight(MISMATCH),
            Weight(MISMATCH, Aggregation("trace", "sum")),
            Weight(MISMATCH, transform=Truncate(1.0, 1.2)),
        ]
        found = correct(**STEP, weights=weights)
        expected = np.exp([0.1 - 0.1 + 0.1, 0.3 - 0.1, -0.5 - 0.1, 1 + 1, -0.2 - 0.2]) * [1, 1.2, 1, 1.2, 1]
        np.testing.assert_allclose(found.weight, expected)
        assert found.metrics["truncated_fraction"] == 4 / 5

    @pytest.mark.parametrize(
        ("level", "mean"),
        [
            (Aggregation(), np.exp([0.1, 0.3, -0.5, 1.0, -0.2]).mean()),
            (Aggregation("turn", "sum"), np.exp([0.4, -0.5, 1.0, -0.2]).mean()),
            (Aggregation("trace", "sum"), np.exp([-0.1, 1.0, -0.2]).mean()),
            (Aggregation("group", "sum"), np.exp([0.9, -0.2]).mean()),
            (Aggregation("trace", "prefix_sum"), np.exp([0.1, 0.4, -0.1, 1.0, -0.2]).mean()),
        ],
    )
    def test_normalize_counts_each_unit_once(self, level, mean):
        plain = correct(**STEP, weights=[Weight(MISMATCH, level)])
        normal = correct(**STEP, weights=[Weight(MISMATCH, level, normalize=True)])
        np.testing.assert_allclose(normal.weight, plain.weight / mean, rtol=1e-14)


class TestPairsOfPolicies:
    ref = np.array([-1.2, -1.0, -1.0, -1.5, -0.8])

    @pytest.mark.parametrize("num", ["old", "rollout", "ref"])
    @pytest.mark.parametrize("den", ["old", "rollout", "ref"])
    def test_every_detached_ratio(self, num, den):
        if num == den:
            return
        logprobs = {"old": STEP_OLD, "rollout": STEP_ROLLOUT, "ref": self.ref}
        found = correct(**STEP, ref=self.ref, weights=[Weight(Ratio(num, den))])
        np.testing.assert_allclose(np.log(found.weight), logprobs[num] - logprobs[den], atol=1e-14)

    def test_parts_on_different_ratios_stand_side_by_side(self):
        # ref/rollout: -0.1, 0.3, -0.5, 0.5, 0; the gate on it drops the second and the fourth
        found = correct(
            **STEP,
            ref=self.ref,
            rejections=[Rejection(Ratio("ref", "rollout"), "k1", high=0.2)],
            weights=[Weight(MISMATCH), Weight(Ratio("old", "ref"), Aggregation("trace", "sum"))],
        )
        assert found.keep.tolist() == [True, False, True, False, True]
        # old/ref: 0.2, 0, 0 | 0.5 | -0.2
        np.testing.assert_allclose(np.log(found.weight), [0.3, 0.5, -0.3, 1.5, -0.4], atol=1e-14)

    def test_a_term_whose_recorded_logprob_is_missing_is_known_to_no_ratio(self):
        rollout = STEP_ROLLOUT.copy()
        rollout[0] = NAN
        columns = {**STEP, "rollout": rollout, "ref": self.ref}
        found = correct(**columns, weights=[Weight(Ratio("old", "ref"), Aggregation("trace", "sum"))])
        np.testing.assert_allclose(found.weight[:3], [0.0, 1.0, 1.0])
        found = correct(**columns, weights=[Weight(Ratio("old", "ref"))], missing_logprobs="ratio_one")
        np.testing.assert_allclose(found.weight[:2], [1.0, 1.0])

    def test_without_rollout_the_others_have_ratios_all_the_same(self):
        found = correct(
            STEP_OLD,
            None,
            ref=self.ref,
            trace=STEP["trace"],
            weights=[Weight(Ratio("old", "ref"), Aggregation("trace", "sum"))],
        )
        np.testing.assert_allclose(np.log(found.weight), [0.2, 0.2, 0.2, 0.5, -0.2], atol=1e-14)
        assert "ratio_mean" not in found.metrics

    def test_ref_is_refused_where_it_is_not_finite_or_not_there(self):
        weight = Weight(Ratio("old", "ref"))
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*1.*0"):
            correct(**STEP, ref=np.where(np.arange(5) == 1, NAN, self.ref), weights=[weight])
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*takes.*old/ref.*None"):
            correct(**STEP, weights=[weight])
