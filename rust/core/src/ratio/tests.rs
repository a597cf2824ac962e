use super::*;
use proptest::prelude::*;

const NAN: f64 = f64::NAN;

fn plan(rejections: Vec<Rejection>, weights: Vec<Weight>, missing: Missing) -> Plan {
    let rejections = rejections.into_iter().map(AnyRejection::Rejection).collect();
    Plan { rejections, weights, missing, reductions: vec![] }
}

fn weight(level: Aggregation, shape: Shape) -> Weight {
    Weight { ratio: Ratio::MISMATCH, level, shape, when: When::Always, normalize: false }
}

fn rejection(stat: Stat, level: Aggregation, low: f64, high: f64, scope: Over) -> Rejection {
    Rejection { ratio: Ratio::MISMATCH, stat, level, low, high, when: When::Always, scope }
}

fn level(over: Over, agg: Reduce) -> Aggregation {
    Aggregation { over, agg, kept: false, blend: None }
}

fn corrected(old: &[f64], rollout: &[f64], trace: &[i64], plan: &Plan) -> Result<Correction<f64>> {
    correct(&Terms::of(Some(old), Some(rollout), trace), plan, &SingleRank)
}

fn near(actual: &[f64], expected: &[f64]) {
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() < 1e-12, "{actual} is not {expected}");
    }
}

#[test]
fn traces_are_grouped_by_id_and_not_by_runs() {
    let product = plan(vec![], vec![weight(level(Over::Trace, Reduce::Sum), Shape::Identity)], Missing::Mask);
    // Trace 4: log-ratios 0.1 and 0.3, trace 2: -0.2.
    let correction = corrected(&[-1.0, -1.0, -1.0], &[-1.1, -0.8, -1.3], &[4, 2, 4], &product).unwrap();
    near(&correction.weight, &[0.4_f64.exp(), (-0.2_f64).exp(), 0.4_f64.exp()]);
}

#[test]
fn a_missing_logprob_is_masked_and_not_in_the_mean() {
    let mean = plan(vec![], vec![weight(level(Over::Trace, Reduce::Mean), Shape::Identity)], Missing::Mask);
    let correction = corrected(&[-1.0, -1.0, -1.0], &[-1.2, NAN, -1.4], &[0, 0, 0], &mean).unwrap();
    // mean of 0.2 and 0.4
    near(&correction.weight, &[0.3_f64.exp(), 0.0, 0.3_f64.exp()]);
    assert_eq!(correction.keep, [true, false, true]);
    assert_eq!((correction.stats.known, correction.stats.kept, correction.stats.gated), (2.0, 2.0, 0.0));
}

#[test]
fn invalid_logprobs_are_rejected_with_their_term() {
    for (bad, missing) in [(0.3, Missing::Mask), (f64::INFINITY, Missing::Mask), (-9999.0, Missing::RatioOne)] {
        let error = corrected(&[-1.0, -1.0], &[-1.0, bad], &[0, 0], &plan(vec![], vec![], missing)).unwrap_err();
        assert!(error.what.starts_with("trained token 1 (trace 0): the rollout logprob is"), "{error}");
    }
    let error = corrected(&[-1.0, NAN], &[-1.0, -1.0], &[0, 3], &plan(vec![], vec![], Missing::Mask)).unwrap_err();
    assert!(error.what.contains("trained token 1 (trace 3): the old logprob is NaN"), "{error}");
    let error = corrected(&[-1.0, -1.0], &[-1.0, NAN], &[3, 3], &plan(vec![], vec![], Missing::Error)).unwrap_err();
    assert!(error.to_string().contains(": trained token 1 (trace 3): the rollout logprob is missing"), "{error}");
}

#[test]
fn an_error_names_a_term_by_its_index_among_the_terms() {
    let mask = [false, true, false, true];
    let (old, rollout) = ([NAN, -1.0, NAN, -1.0], [9.0, -1.0, 9.0, 1.0]);
    let terms = Terms { mask: Some(&mask), ..Terms::of(Some(&old), Some(&rollout), &[0, 0, 5, 5]) };
    let error = correct(&terms, &plan(vec![], vec![], Missing::Mask), &SingleRank).unwrap_err();
    assert!(error.what.starts_with("trained token 1 (trace 5): the rollout logprob is 1"), "{error}");
}

#[test]
fn trace_sums_do_not_drift_in_f32() {
    // 0.1 added a hundred thousand times in f32 would be off by 1.4; the mean is exact to f32.
    let (old, rollout, trace) = (vec![-1.0_f32; 100_000], vec![-1.1_f32; 100_000], vec![0; 100_000]);
    let mean = plan(vec![], vec![weight(level(Over::Trace, Reduce::Mean), Shape::Identity)], Missing::Mask);
    let result = correct(&Terms::of(Some(&old), Some(&rollout), &trace), &mean, &SingleRank).unwrap();
    assert!((result.weight[0].wide() - f64::from(-1.0_f32 + 1.1_f32).exp()).abs() < 1e-7);
}

#[test]
fn the_exponential_of_f32_is_within_two_ulp() {
    let worst = (-870_000..=880_000)
        .map(|step| step as f32 * 1e-4)
        .map(|x| ((Real::exp(x).wide() - x.wide().exp()) / x.wide().exp()).abs())
        .fold(0.0, f64::max);
    assert!(worst < 2e-7, "{worst}");
    assert_eq!(Real::exp(0.0_f32), 1.0);
}

#[test]
fn k3_keeps_its_digits_around_zero() {
    for x in [1e-4_f32, -3e-3, 0.06, 0.34, 0.35, -0.35, -2.0, 20.0] {
        let exact = x.wide().exp_m1() - x.wide();
        assert!(((x.exp_k3().1.wide() - exact) / exact).abs() < 5e-6, "{x}");
    }
}

#[test]
fn blocks_end_where_no_segment_is_cut() {
    let ids = [1, 1, 1, 2, 2, 3, 3, 3, 3, 4];
    let traces = Segments::of(Ids::of(&ids));
    assert_eq!(segments::blocks(10, &[&traces], 4), [5, 9, 10]);
    let groups = Segments::of(Ids::of(&[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]));
    assert_eq!(segments::blocks(10, &[&groups, &traces], 4), [5, 10]);
    let scattered = Segments::of(Ids::of(&[1, 2, 1, 3, 3, 3, 3, 3, 3, 3]));
    assert_eq!(segments::blocks(10, &[&scattered, &traces], 4), [10]);
    assert_eq!(segments::blocks(10, &[], 4), [4, 8, 10]);
    assert_eq!(segments::blocks(0, &[], 4), [0]);
}

#[test]
fn counts_of_groups_on_other_ranks_come_from_the_caller() {
    struct Rank;
    impl Exchange for Rank {
        fn all_reduce(&self, _: &mut [f64], _: Op) -> Result<()> {
            Ok(())
        }
    }
    let (ids, four) = ([7, 7], [4, 4]);
    for (mean, group_terms, expected) in [(true, Some(&four), Some(0.25)), (true, None, None), (false, None, Some(0.2))]
    {
        let totals = Some(Totals { terms: 4, traces: 2, groups: 1 });
        let (group, group_terms) = (Some(Ids::of(&ids)), group_terms.map(|terms| Ids::of(terms)));
        let terms = Terms { group, totals, group_terms, ..Terms::of(Some(&[-1.0, -1.0]), None, &[0, 1]) };
        let reductions = vec![Reduction { per: Per::Prompt, mean, norm: 5.0, kept: false }];
        let result = correct(&terms, &Plan { reductions, ..plan(vec![], vec![], Missing::Mask) }, &Rank);
        assert_eq!(
            result.ok().map(|result| result.scales),
            expected.map(|each| vec![Scale::Each(vec![each; 2])]),
            "{mean}"
        );
    }
}

/// Columns of a random step, with some recorded logprobs missing.
fn steps(max_terms: usize) -> impl Strategy<Value = (Vec<f32>, Vec<f32>, Vec<i64>)> {
    prop::collection::vec((-8.0_f32..0.0, prop::option::weighted(0.9, -8.0_f32..0.0), 0_i64..9), 0..max_terms).prop_map(
        |rows| {
            let mut traces: Vec<i64> = rows.iter().map(|row| row.2).collect();
            traces.sort_unstable();
            let rollout = rows.iter().map(|row| row.1.unwrap_or(f32::NAN)).collect();
            (rows.iter().map(|row| row.0).collect(), rollout, traces)
        },
    )
}

fn rich_plan() -> Plan {
    let trace = |agg| level(Over::Trace, agg);
    plan(
        vec![
            rejection(Stat::K3, Aggregation::TOKEN, f64::NEG_INFINITY, 200.0, Over::Token),
            rejection(Stat::BinaryKl, trace(Reduce::Mean), -0.5, 0.5, Over::Trace),
        ],
        vec![
            weight(Aggregation::TOKEN, Shape::MaskOutside(0.2, 4.0)),
            weight(Aggregation { blend: Some(Blend::Geometric), ..trace(Reduce::Mean) }, Shape::Truncate(0.1, 3.0)),
            weight(trace(Reduce::PrefixSum), Shape::Gamma { power: 2.0, rate: 3.0 }),
        ],
        Missing::Mask,
    )
}

proptest! {
    #[test]
    fn blocks_and_whole_passes_agree((old, rollout, trace) in steps(5000)) {
        let terms = Terms::of(Some(&old), Some(&rollout), &trace);
        let tokens = plan(
            vec![rejection(Stat::K3, Aggregation::TOKEN, f64::NEG_INFINITY, 2.0, Over::Token)],
            vec![weight(Aggregation::TOKEN, Shape::MaskOutside(0.2, 4.0))],
            Missing::Mask,
        );
        // A rejection on the batch that keeps everything forces one block.
        let mut single_block = tokens.clone();
        single_block.rejections.push(AnyRejection::Rejection(rejection(Stat::K1, level(Over::Batch, Reduce::Max), -1e9, 1e9, Over::Batch)));
        let (a, b) = (correct(&terms, &tokens, &SingleRank).unwrap(), correct(&terms, &single_block, &SingleRank).unwrap());
        prop_assert_eq!(&a.weight, &b.weight);
        prop_assert_eq!(&a.keep, &b.keep);
        prop_assert_eq!(a.stats, b.stats);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))] // each of a hundred thousand terms

    #[test]
    fn results_do_not_depend_on_the_number_of_threads((old, rollout, trace) in steps(3000)) {
        let many = |values: &[f32]| values.repeat(60);
        let (old, rollout) = (many(&old), many(&rollout));
        let trace: Vec<i64> = (0..60).flat_map(|copy| trace.iter().map(move |id| id + 9 * copy)).collect();
        let terms = Terms::of(Some(&old), Some(&rollout), &trace);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| correct(&terms, &rich_plan(), &SingleRank).unwrap())
        };
        let (one, three) = (run(1), run(3));
        prop_assert_eq!(one.weight, three.weight);
        prop_assert_eq!(one.keep, three.keep);
        prop_assert_eq!(one.stats, three.stats);
    }
}
