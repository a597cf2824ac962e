//! Which rank and which row each branch goes to.

use super::{BestFit, check_budget, check_length};
use crate::{Error, Kind, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Where each branch lies.
#[derive(Debug, Default)]
pub struct Placed {
    /// [N] rank, -1 where the branch is not laid out.
    pub rank: Vec<i32>,
    /// [N] row among those of its step and rank, -1 where the branch is not laid out.
    pub row: Vec<i32>,
    /// [steps, ranks] rows of each rank, step by step.
    pub rows: Vec<i32>,
}

/// Branches that must lie in one row, and their tokens.
struct Unit {
    tokens: usize,
    branches: std::ops::Range<usize>,
}

/// Places every branch that has a length and whose trace has a step.
///
/// Traces go to ranks longest first, each to the rank with the fewest tokens so far; all branches of a trace to one
/// rank. Within a rank, branches (with `whole_traces`: traces) go to rows by best fit, longest first. Ties go to the
/// lower rank and the earlier branch, so the result depends on nothing but the arguments. O(n log n).
///
/// Args: `length` and `trace` [N], `step` [R] with -1 for traces of no step.
///
/// # Errors
/// A length above the budget, or slices that contradict one another.
pub fn place(
    length: &[i32],
    trace: &[i32],
    step: &[i32],
    ranks: usize,
    token_budget: usize,
    whole_traces: bool,
) -> Result<Placed> {
    check(length, trace, step, ranks, token_budget)?;
    let steps = step.iter().copied().max().map_or(0, |last| (last + 1).max(0) as usize);
    let mut out =
        Placed { rank: vec![-1; length.len()], row: vec![-1; length.len()], rows: Vec::with_capacity(steps * ranks) };
    let total = length.iter().map(|&tokens| tokens.max(0) as usize).sum::<usize>();
    let mut rows = BestFit::new(token_budget.min(total.max(1)));
    for traces in traces_by_step(length, trace, step, steps) {
        for (rank, share) in share(traces, ranks).into_iter().enumerate() {
            rows.reset();
            for unit in units(length, share, whole_traces) {
                if unit.tokens > token_budget {
                    return Err(Error::new(
                        Kind::Argument,
                        format!(
                            "branch {} has {} tokens to lay out, but token_budget is {token_budget}",
                            unit.branches.start, unit.tokens
                        ),
                    ));
                }
                let row = rows.place(unit.tokens) as i32;
                for branch in unit.branches.filter(|&branch| length[branch] > 0) {
                    out.rank[branch] = rank as i32;
                    out.row[branch] = row;
                }
            }
            out.rows.push(rows.rows() as i32);
        }
    }
    Ok(out)
}

fn check(length: &[i32], trace: &[i32], step: &[i32], ranks: usize, token_budget: usize) -> Result<()> {
    check_budget(token_budget)?;
    check_length("length", length.len(), trace.len())?;
    check_length("step", step.len(), trace.last().map_or(0, |&last| last as usize + 1))?;
    if ranks == 0 {
        return Err(Error::new(Kind::Argument, "ranks is 0").cure("Pass the number of processes that train"));
    }
    Ok(())
}

/// Per step, its traces with something to lay out, in order.
fn traces_by_step(length: &[i32], trace: &[i32], step: &[i32], steps: usize) -> Vec<Vec<Unit>> {
    let mut by_step: Vec<Vec<Unit>> = Vec::new();
    by_step.resize_with(steps, Vec::new);
    let mut first = 0;
    for run in trace.chunk_by(|a, b| a == b) {
        let branches = first..first + run.len();
        first = branches.end;
        let tokens = length[branches.clone()].iter().map(|&tokens| tokens.max(0) as usize).sum();
        let step = step[run[0] as usize];
        if step >= 0 && tokens > 0 {
            by_step[step as usize].push(Unit { tokens, branches });
        }
    }
    by_step
}

/// Longest first to the rank with the fewest tokens; each rank's share in the order of the traces.
fn share(traces: Vec<Unit>, ranks: usize) -> Vec<Vec<Unit>> {
    if ranks == 1 {
        return vec![traces];
    }
    let mut load: BinaryHeap<Reverse<(usize, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut shares: Vec<Vec<Unit>> = Vec::new();
    shares.resize_with(ranks, Vec::new);
    for unit in longest_first(traces) {
        let Some(Reverse((tokens, rank))) = load.pop() else { continue };
        load.push(Reverse((tokens + unit.tokens, rank)));
        shares[rank].push(unit);
    }
    shares
}

fn units(length: &[i32], traces: Vec<Unit>, whole_traces: bool) -> Vec<Unit> {
    if whole_traces {
        return longest_first(traces);
    }
    let branches = traces.into_iter().flat_map(|unit| unit.branches);
    let single = |branch| Unit { tokens: length[branch] as usize, branches: branch..branch + 1 };
    longest_first(branches.filter(|&branch| length[branch] > 0).map(single).collect())
}

fn longest_first(mut units: Vec<Unit>) -> Vec<Unit> {
    units.sort_unstable_by_key(|unit| (Reverse(unit.tokens), unit.branches.start));
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_are_filled_longest_first_by_best_fit() {
        // 6 opens row 0, 5 row 1, 4 fits row 0 exactly (room 4 < 5), 3 then 2 fill row 1.
        let placed = place(&[3, 6, 4, 5, 2], &[0, 1, 2, 3, 4], &[0; 5], 1, 10, false).unwrap();
        assert_eq!(placed.row, [1, 0, 0, 1, 1]);
        assert_eq!(placed.rows, [2]);
    }

    #[test]
    fn branches_of_a_trace_lie_in_one_row_when_it_is_taken_whole() {
        let placed = place(&[3, 6, 4, 5], &[0, 0, 1, 1], &[0, 0], 1, 9, true).unwrap();
        assert_eq!(placed.row, [0, 0, 1, 1]);
    }

    #[test]
    fn ranks_get_the_longest_traces_in_turn() {
        // Trace totals 9, 2, 8, 3: rank 0 gets 9 then 2 (loads 9, 8 -> 3 goes to rank 1 -> 11; 2 to rank 0 -> 11).
        let placed = place(&[9, 2, 4, 4, 3], &[0, 1, 2, 2, 3], &[0; 4], 2, 10, false).unwrap();
        assert_eq!(placed.rank, [0, 0, 1, 1, 1]);
        assert_eq!(placed.rows, [2, 2]);
    }

    #[test]
    fn traces_without_a_step_or_a_length_lie_nowhere() {
        let placed = place(&[3, 0, 4], &[0, 1, 2], &[1, 0, -1], 1, 10, false).unwrap();
        assert_eq!(placed.rank, [0, -1, -1]);
        assert_eq!(placed.rows, [0, 1]);
    }

    proptest! {
        #[test]
        fn every_branch_lies_in_one_row_within_the_budget(
            lengths in prop::collection::vec((0i32..60, any::<bool>()), 1..80),
            ranks in 1usize..4, whole in any::<bool>(),
        ) {
            let mut trace: Vec<i32> = Vec::new();
            for (_, fresh) in &lengths {
                trace.push(trace.last().map_or(0, |&last| last + i32::from(*fresh)));
            }
            let length: Vec<i32> = lengths.iter().map(|(length, _)| *length).collect();
            let traces = *trace.last().unwrap() as usize + 1;
            let step: Vec<i32> = (0..traces as i32).map(|trace| trace / 5).collect();
            let budget = if whole { 60 * 80 } else { 64 };
            let placed = place(&length, &trace, &step, ranks, budget, whole).unwrap();
            let mut fill = std::collections::HashMap::new();
            let mut home = std::collections::HashMap::new();
            for branch in 0..length.len() {
                let (rank, row) = (placed.rank[branch], placed.row[branch]);
                prop_assert_eq!(rank >= 0, length[branch] > 0);
                if rank < 0 { continue; }
                let key = (step[trace[branch] as usize], rank, row);
                prop_assert!(row < placed.rows[key.0 as usize * ranks + rank as usize]);
                *fill.entry(key).or_insert(0) += length[branch];
                prop_assert_eq!(*home.entry(trace[branch]).or_insert(rank), rank);
            }
            prop_assert!(fill.values().all(|&tokens| tokens <= budget as i32));
        }
    }
}
