use super::*;
use proptest::prelude::*;

const NAN: f64 = f64::NAN;

fn plan(gates: Vec<Gate>, weights: Vec<Weight>, missing: Missing) -> Plan {
    Plan { gates, weights, missing }
}

fn weight(level: Level, shape: Shape) -> Weight {
    Weight { level, shape, when: When::Always }
}

fn gate(stat: Stat, level: Level, low: f64, high: f64, scope: Over) -> Gate {
    Gate { stat, level, low, high, when: When::Always, scope }
}

fn level(over: Over, agg: Agg) -> Level {
    Level { over, agg, kept: false }
}

fn terms<'a>(old: &'a [f64], rollout: &'a [f64], trace: &'a [i64]) -> Terms<'a, f64> {
    Terms { old: Some(old), rollout, trace, turn: None, advantages: None }
}

fn near(found: &[f64], expected: &[f64]) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    }
}

#[test]
fn a_clamped_token_weight_is_the_ratio_up_to_two() {
    // exp(-1 + 0.5) = 0.6065, exp(-0.5 + 2) = 4.48 -> 2
    let tis = plan(vec![], vec![weight(Level::TOKEN, Shape::Clamp(0.0, 2.0))], Missing::Mask);
    let found = correct(terms(&[-1.0, -0.5], &[-0.5, -2.0], &[0, 0]), &tis).unwrap();
    near(&found.weight, &[(-0.5_f64).exp(), 2.0]);
    assert_eq!(found.stats.truncated, 1.0);
    near(&[found.unit_sums[0].0, found.unit_sums[0].1], &[(-0.5_f64).exp() + 2.0, 2.0]);
}

#[test]
fn traces_are_grouped_by_id_and_not_by_runs() {
    let product = plan(vec![], vec![weight(level(Over::Trace, Agg::Sum), Shape::Identity)], Missing::Mask);
    // Trace 4: log-ratios 0.1 and 0.3, trace 2: -0.2.
    let found = correct(terms(&[-1.0, -1.0, -1.0], &[-1.1, -0.8, -1.3], &[4, 2, 4]), &product).unwrap();
    near(&found.weight, &[0.4_f64.exp(), (-0.2_f64).exp(), 0.4_f64.exp()]);
    near(&[found.unit_sums[0].1], &[2.0]);
}

#[test]
fn a_missing_logprob_is_masked_and_stands_outside_the_mean() {
    let mean = plan(vec![], vec![weight(level(Over::Trace, Agg::Mean), Shape::Identity)], Missing::Mask);
    let found = correct(terms(&[-1.0, -1.0, -1.0], &[-1.2, NAN, -1.4], &[0, 0, 0]), &mean).unwrap();
    // mean of 0.2 and 0.4
    near(&found.weight, &[0.3_f64.exp(), 0.0, 0.3_f64.exp()]);
    assert_eq!(found.keep, [true, false, true]);
    assert_eq!((found.stats.known, found.stats.kept, found.stats.gated), (2.0, 2.0, 0.0));
}

#[test]
fn a_neutral_missing_logprob_has_weight_one_and_is_kept() {
    let mean = plan(vec![], vec![weight(level(Over::Trace, Agg::Mean), Shape::Identity)], Missing::Neutral);
    let found = correct(terms(&[-1.0, -1.0, -1.0], &[-1.2, NAN, -1.4], &[0, 0, 0]), &mean).unwrap();
    near(&found.weight, &[0.3_f64.exp(), 1.0, 0.3_f64.exp()]);
    assert_eq!(found.keep, [true; 3]);
    assert_eq!(found.stats.weighted, 2.0);
}

#[test]
fn a_trace_without_a_known_logprob_counts_for_nothing() {
    let product = plan(vec![], vec![weight(level(Over::Trace, Agg::Sum), Shape::Clamp(0.0, 2.0))], Missing::Neutral);
    let found = correct(terms(&[-1.0, -1.0], &[-1.5, NAN], &[0, 1]), &product).unwrap();
    near(&found.weight, &[0.5_f64.exp(), 1.0]);
    near(&[found.unit_sums[0].0, found.unit_sums[0].1], &[0.5_f64.exp(), 1.0]);
}

#[test]
fn a_missing_logprob_can_be_refused_by_term() {
    let error =
        correct(terms(&[-1.0, -1.0], &[-1.0, NAN], &[3, 3]), &plan(vec![], vec![], Missing::Refuse)).unwrap_err();
    assert!(error.to_string().starts_with("term 1 (trace 3): the rollout logprob is missing"), "{error}");
}

#[test]
fn what_is_no_logprob_is_refused_by_term() {
    for bad in [0.3, f64::NEG_INFINITY, f64::INFINITY, -9999.0] {
        let error =
            correct(terms(&[-1.0, -1.0], &[-1.0, bad], &[0, 0]), &plan(vec![], vec![], Missing::Mask)).unwrap_err();
        assert!(error.what.starts_with("term 1 (trace 0): the rollout logprob is"), "{error}");
    }
    let error = correct(terms(&[NAN], &[-1.0], &[0]), &plan(vec![], vec![], Missing::Mask)).unwrap_err();
    assert!(error.what.contains("the old logprob is NaN"), "{error}");
}

#[test]
fn a_veto_drops_the_whole_trace() {
    let veto = gate(Stat::Ratio, Level::TOKEN, 1e-4, f64::INFINITY, Over::Trace);
    let found =
        correct(terms(&[-11.0, -1.0, -1.0], &[-1.0, -1.0, -1.0], &[0, 1, 0]), &plan(vec![veto], vec![], Missing::Mask));
    assert_eq!(found.unwrap().keep, [false, true, false]);
}

#[test]
fn gates_apply_in_order_and_over_kept_sees_only_the_survivors() {
    // The outlier (l = 2) fails the token gate; the mean of the rest (0.1) passes, the mean of all (0.733) does not.
    let token = gate(Stat::Ratio, Level::TOKEN, 0.5, 2.0, Over::Token);
    let mut mean = gate(Stat::K1, level(Over::Trace, Agg::Mean), -0.2, 0.2, Over::Trace);
    let (old, rollout, trace) = ([-1.0, -1.0, -1.0], [-1.1, -1.1, -3.0], [0, 0, 0]);
    let all = correct(terms(&old, &rollout, &trace), &plan(vec![token, mean], vec![], Missing::Mask)).unwrap();
    assert_eq!(all.keep, [false; 3]);
    mean.level.kept = true;
    let kept = correct(terms(&old, &rollout, &trace), &plan(vec![token, mean], vec![], Missing::Mask)).unwrap();
    assert_eq!(kept.keep, [true, true, false]);
    let reverse = correct(terms(&old, &rollout, &trace), &plan(vec![mean, token], vec![], Missing::Mask)).unwrap();
    assert_eq!(reverse.keep, [false; 3]);
}

#[test]
fn a_condition_on_the_advantage_is_read_per_term() {
    let mut when = weight(Level::TOKEN, Shape::Clamp(0.0, 1.0));
    when.when = When::NonPositive;
    let input = Terms { advantages: Some(&[1.0, -1.0, 0.0]), ..terms(&[-1.0; 3], &[-2.0; 3], &[0, 0, 0]) };
    let found = correct(input, &plan(vec![], vec![when], Missing::Mask)).unwrap();
    near(&found.weight, &[1.0, 1.0, 1.0]);
    assert_eq!(found.stats.truncated, 2.0);
    let error = correct(terms(&[-1.0], &[-2.0], &[0]), &plan(vec![], vec![when], Missing::Mask)).unwrap_err();
    assert!(error.what.contains("without advantages"), "{error}");
}

#[test]
fn a_wild_log_ratio_is_clamped_and_counted() {
    let identity = plan(vec![], vec![weight(Level::TOKEN, Shape::Identity)], Missing::Mask);
    let found = correct(terms(&[-0.1, -300.0], &[-90.0, -1.0], &[0, 0]), &identity).unwrap();
    near(&found.weight, &[20.0_f64.exp(), (-20.0_f64).exp()]);
    assert_eq!(found.stats.clamped, 2.0);
    assert_eq!(found.stats.log_ratio_abs_max, 299.0);
}

#[test]
fn trace_sums_do_not_drift_in_f32() {
    // 0.1 a hundred thousand times in f32 would be off by 1.4; the mean is exact to f32.
    let old = vec![-1.0_f32; 100_000];
    let rollout = vec![-1.1_f32; 100_000];
    let trace = vec![0; 100_000];
    let mean = plan(vec![], vec![weight(level(Over::Trace, Agg::Mean), Shape::Identity)], Missing::Mask);
    let input = Terms { old: Some(&old), rollout: &rollout, trace: &trace, turn: None, advantages: None };
    let found = correct(input, &mean).unwrap();
    assert!((found.weight[0].wide() - f64::from(-1.0_f32 + 1.1_f32).exp()).abs() < 1e-7);
}

#[test]
fn the_exponential_of_f32_is_within_two_ulp() {
    let worst = (-200_000..=200_000)
        .map(|step| step as f32 * 1e-4)
        .map(|x| ((Real::exp(x).wide() - x.wide().exp()) / x.wide().exp()).abs())
        .fold(0.0, f64::max);
    assert!(worst < 2e-7, "{worst}");
    assert_eq!(Real::exp(0.0_f32), 1.0);
}

#[test]
fn k3_keeps_its_digits_around_zero() {
    for x in [1e-4_f32, -3e-3, 0.0599, 0.0601, -2.0, 20.0] {
        let exact = x.wide().exp_m1() - x.wide();
        assert!(((x.k3(Real::exp(x)).wide() - exact) / exact).abs() < 1e-4, "{x}");
    }
}

proptest! {
    #[test]
    fn blocks_and_whole_passes_agree(
        rows in prop::collection::vec((-8.0_f32..0.0, prop::option::weighted(0.9, -8.0_f32..0.0), 0_i64..9), 0..3000)
    ) {
        let old: Vec<f32> = rows.iter().map(|row| row.0).collect();
        let rollout: Vec<f32> = rows.iter().map(|row| row.1.unwrap_or(f32::NAN)).collect();
        let trace: Vec<i64> = rows.iter().map(|row| row.2).collect();
        let input = Terms { old: Some(&old), rollout: &rollout, trace: &trace, turn: None, advantages: None };
        let tokens = plan(
            vec![gate(Stat::K3, Level::TOKEN, f64::NEG_INFINITY, 2.0, Over::Token)],
            vec![weight(Level::TOKEN, Shape::Window(0.2, 4.0))],
            Missing::Mask,
        );
        // A trace gate that keeps everything forces the whole-array road.
        let open = gate(Stat::K1, level(Over::Trace, Agg::Max), f64::NEG_INFINITY, f64::INFINITY, Over::Trace);
        let whole = Plan { gates: vec![tokens.gates[0], open], ..tokens.clone() };
        let (a, b) = (correct(input, &tokens).unwrap(), correct(input, &whole).unwrap());
        prop_assert_eq!(&a.weight, &b.weight);
        prop_assert_eq!(&a.keep, &b.keep);
        for ((name, x), (_, y)) in a.stats.sums().into_iter().zip(b.stats.sums()) {
            prop_assert!((x - y).abs() <= 1e-9 * x.abs().max(1.0), "{} {} {}", name, x, y);
        }
        prop_assert_eq!(a.stats.maxima(), b.stats.maxima());
        let counts = count(&trace, Some(&a.keep));
        let total: i64 = (0..9).filter(|&id| (0..trace.len()).any(|t| trace[t] == id && a.keep[t])).count() as i64;
        prop_assert_eq!(counts.units, total);
    }
}
