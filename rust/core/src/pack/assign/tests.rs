use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const TOKENS: Cost = Cost { token: 1.0, pair: 0.0, term: 0.0 };

/// Places branches of the given ids, with changes to a demand of one rank and one step.
fn placed(texts: &[Vec<i32>], trace: &[i32], change: impl FnOnce(&mut PackRequest<'_>)) -> Result<Placement> {
    placed_in(&vec![0; trace.last().map_or(0, |&last| last as usize + 1)], texts, trace, change)
}

fn placed_in(
    step: &[i32],
    texts: &[Vec<i32>],
    trace: &[i32],
    change: impl FnOnce(&mut PackRequest<'_>),
) -> Result<Placement> {
    let ids: Vec<i32> = texts.concat();
    let mut cu = vec![0];
    cu.extend(texts.iter().scan(0, |end, text| {
        *end += text.len() as i64;
        Some(*end)
    }));
    let length: Vec<i32> = texts.iter().map(|text| text.len() as i32).collect();
    let mut request = PackRequest {
        ids: &ids,
        cu_seqlens: &cu,
        length: &length,
        terms: &length,
        trace,
        step,
        ranks: 1,
        tokens_per_row: 10,
        whole_traces: false,
        cost: TOKENS,
        min_sharing_gain: None,
    };
    change(&mut request);
    place(request)
}

fn of_lengths(lengths: &[usize]) -> Vec<Vec<i32>> {
    lengths.iter().map(|&length| vec![0; length]).collect()
}

#[test]
fn rows_are_filled_longest_first_by_best_fit() {
    // 6 opens row 0, 5 row 1, 4 fits row 0 exactly (free space 4 < 5), 3 then 2 fill row 1.
    let placed = placed(&of_lengths(&[3, 6, 4, 5, 2]), &[0, 1, 2, 3, 4], |_| ()).unwrap();
    assert_eq!(placed.row, [1, 0, 0, 1, 1]);
    assert_eq!(placed.rows, [2]);
}

#[test]
fn branches_of_a_whole_trace_are_in_one_row() {
    let whole = |request: &mut PackRequest<'_>| (request.tokens_per_row, request.whole_traces) = (9, true);
    let placed = placed(&of_lengths(&[3, 6, 4, 5]), &[0, 0, 1, 1], whole).unwrap();
    assert_eq!(placed.row, [0, 0, 1, 1]);
}

#[test]
fn ranks_get_the_costliest_traces_in_turn() {
    // Trace totals 9, 2, 8, 3: rank 0 gets 9 then 2 (loads 9, 8 -> 3 goes to rank 1 -> 11; 2 to rank 0 -> 11).
    let texts = of_lengths(&[9, 2, 4, 4, 3]);
    let placed = placed(&texts, &[0, 1, 2, 2, 3], |request| request.ranks = 2).unwrap();
    assert_eq!(placed.rank, [0, 0, 1, 1, 1]);
    assert_eq!(placed.rows, [2, 2]);
    assert_eq!(placed.load, [11.0, 11.0]);
}

#[test]
fn traces_without_a_step_or_a_length_are_not_placed() {
    let change = |request: &mut PackRequest<'_>| (request.length, request.step) = (&[3, 0, 4], &[1, 0, -1]);
    let placed = placed(&of_lengths(&[3, 2, 4]), &[0, 1, 2], change).unwrap();
    assert_eq!(placed.rank, [0, -1, -1]);
    assert_eq!(placed.rows, [0, 1]);
}

// Two groups of two branches, with 6 of 8 tokens in common.
fn two_groups() -> Vec<Vec<i32>> {
    let branch = |stem: i32, tail: i32| [vec![stem; 6], vec![tail; 2]].concat();
    vec![branch(5, 1), branch(3, 1), branch(5, 2), branch(3, 2)]
}

#[test]
fn branches_with_a_shared_prefix_are_in_one_row_that_counts_it_once() {
    let sharing = |request: &mut PackRequest<'_>| request.min_sharing_gain = Some(1.05);
    let out = placed(&two_groups(), &[0, 1, 2, 3], sharing).unwrap();
    assert_eq!((out.row, out.rows), (vec![1, 0, 1, 0], vec![2])); // rows of 10, filled by groups of 6 + 2 + 2
    assert_eq!(out.order, [2, 0, 3, 1]);
    let gain = Gain { shared: true, needed: false, tokens: 32, tree_tokens: 20, ratio: 32.0 / 20.0 };
    assert_eq!(out.gain, [gain]);
    assert_eq!(placed(&two_groups(), &[0, 1, 2, 3], |_| ()).unwrap().rows, [4]);
}

#[test]
fn leaves_too_long_for_one_row_are_joined_by_what_shares_less() {
    // After 4 common tokens: 6 and 6, with 4 more common tokens, need a row of 11 each, and each of the others 1 more.
    let units = [(10, 0), (10, 8), (5, 4), (5, 4)].map(|(tokens, shared)| Unit { tokens, shared });
    assert_eq!(rows_of(&units, 11, &mut BestFit::new(11)).1, 2);
}

#[test]
fn a_step_that_gains_too_little_shares_nothing_and_says_what_it_would_have_gained() {
    let plain = placed(&two_groups(), &[0, 1, 2, 3], |_| ()).unwrap();
    let out = placed(&two_groups(), &[0, 1, 2, 3], |request| request.min_sharing_gain = Some(1.6)).unwrap();
    assert_eq!(out.row, plain.row);
    assert_eq!((out.gain[0].shared, out.gain[0].ratio), (false, 1.6));
}

#[test]
fn a_trace_that_fits_a_row_only_as_a_tree_is_shared_whatever_the_gain() {
    let change = |request: &mut PackRequest<'_>| (request.whole_traces, request.min_sharing_gain) = (true, Some(100.0));
    let texts = vec![vec![1, 2, 3, 4, 5, 6], vec![1, 2, 3, 4, 7, 8]];
    let out = placed(&texts, &[0, 0], change).unwrap();
    assert!(out.gain[0].needed && out.gain[0].shared);
    assert_eq!(out.rows, [1]);
    let plain = placed(&texts, &[0, 0], |request| request.whole_traces = true);
    assert!(plain.unwrap_err().to_string().contains("has 12 tokens"));
}

proptest! {
    #[test]
    fn every_branch_is_in_one_row_within_the_budget(
        texts in prop::collection::vec((0usize..3, prop::collection::vec(0i32..2, 1..20), any::<bool>()), 1..60),
        ranks in 1usize..4, whole in any::<bool>(), share in any::<bool>(),
    ) {
        let mut trace: Vec<i32> = Vec::new();
        for (_, _, fresh) in &texts {
            trace.push(trace.last().map_or(0, |&last| last + i32::from(*fresh)));
        }
        let texts: Vec<Vec<i32>> =
            texts.iter().map(|(stem, tail, _)| [vec![*stem as i32; 20 * stem], tail.clone()].concat()).collect();
        let traces = *trace.last().unwrap() as usize + 1;
        let step: Vec<i32> = (0..traces as i32).map(|trace| trace / 5).collect();
        let budget = if whole { 60 * 60 } else { 64 };
        let out = placed_in(&step, &texts, &trace, |request| {
            (request.ranks, request.whole_traces, request.tokens_per_row) = (ranks, whole, budget);
            request.min_sharing_gain = share.then_some(0.0);
        }).unwrap();
        let mut rows: HashMap<_, Vec<usize>> = HashMap::new();
        let mut home = HashMap::new();
        for branch in 0..texts.len() {
            let (step, rank, row) = (step[trace[branch] as usize], out.rank[branch], out.row[branch]);
            prop_assert!(row < out.rows[step as usize * ranks + rank as usize]);
            rows.entry((step, rank, row)).or_default().push(branch);
            let place = (rank, if whole { row } else { 0 });
            prop_assert_eq!(*home.entry(trace[branch]).or_insert(place), place);
        }
        let mut tokens = 0;
        for branches in rows.values_mut() {
            branches.sort_by_key(|&branch| out.order[branch]);
            let mut size = texts[branches[0]].len();
            for pair in branches.windows(2) {
                let (a, b) = (&texts[pair[0]], &texts[pair[1]]);
                prop_assert!(!share || a <= b);
                size += b.len() - if share { common(a, b) } else { 0 };
            }
            prop_assert!(size <= budget);
            tokens += size;
        }
        if share {
            prop_assert_eq!(out.gain.iter().map(|gain| gain.tree_tokens).sum::<u64>(), tokens as u64);
        }
    }
}
