//! Load balance: which rank takes which trace, by cost.

use super::lexical::RunningMin;
use crate::stop::{now_and_then, sort_by_key};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What a pass forward and backward costs, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Of one token in the linear layers.
    pub token: f64,
    /// Of one key that one query sees. A branch of n tokens has n (n + 1) / 2 of them.
    pub pair: f64,
    /// Of one term in the head.
    pub term: f64,
}

impl Cost {
    /// Of a branch's first `tokens` tokens, without the head.
    pub fn of(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        self.token * tokens + self.pair * tokens * (tokens + 1.0) / 2.0
    }
}

/// One trace as ranks see it.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// What it costs alone.
    pub cost: f64,
    /// What of that the trace before it has paid already where both lie in one row: their common prefix.
    pub prefix: f64,
    /// Tokens of that prefix.
    pub shared: u32,
}

/// How often parts are cut finer than a rank's fair share: into halves, quarters and so on.
const ROUNDS: i32 = 5;

/// A prefix worth less than this share of a trace does not hold it to the one before.
const LOOSE: f64 = 0.05;

/// The rank of each trace, and what each rank has to do.
///
/// Traces come in lexicographic order where prefixes are shared, and neighbours that share much are moved as one: first
/// uncut, then cut ever finer, and the cut whose busiest rank has least to do is taken. Parts go to ranks by their cost,
/// largest first, each to the rank with least so far (LPT: at most 4/3 of the optimum). Ties go to the part and the
/// rank that come first, so that every rank finds the same.
pub fn balance(works: &[Work], ranks: usize, cost: Cost) -> (Vec<u32>, Vec<f64>) {
    let total: f64 = works.iter().map(|work| work.cost - work.prefix).sum();
    if ranks == 1 {
        return (vec![0; works.len()], vec![total]);
    }
    let fair = total / ranks as f64;
    let tied = works.iter().any(|work| work.prefix > 0.0);
    let limits = (0..=ROUNDS).map(|round| if round == 0 { f64::INFINITY } else { fair / 2f64.powi(round - 1) });
    let mut best: Option<(f64, Vec<u32>, Vec<f64>)> = None;
    for limit in limits.take(if tied { usize::MAX } else { 1 }) {
        let rank = longest_first(&parts(works, limit), works.len(), ranks);
        let load = loads(works, &rank, ranks, cost);
        let most = load.iter().copied().fold(0.0, f64::max);
        if best.as_ref().is_none_or(|(least, ..)| most < 0.999 * least) {
            best = Some((most, rank, load));
        }
    }
    best.map_or_else(Default::default, |(_, rank, load)| (rank, load))
}

/// Runs of traces with their cost: cut where the prefix is loose, and where a run would pass `limit`.
fn parts(works: &[Work], limit: f64) -> Vec<(f64, std::ops::Range<usize>)> {
    let mut out: Vec<(f64, std::ops::Range<usize>)> = Vec::new();
    for (place, work) in works.iter().enumerate() {
        now_and_then(place);
        let more = work.cost - work.prefix;
        match out.last_mut() {
            Some((cost, run)) if work.prefix > LOOSE * work.cost && *cost + more <= limit => {
                *cost += more;
                run.end = place + 1;
            }
            _ => out.push((work.cost, place..place + 1)),
        }
    }
    out
}

fn longest_first(parts: &[(f64, std::ops::Range<usize>)], works: usize, ranks: usize) -> Vec<u32> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    // The bits of floats that are not negative are in the order of the floats.
    sort_by_key(&mut order, |&part| (Reverse(parts[part].0.to_bits()), part));
    let mut load: BinaryHeap<Reverse<(u64, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut out = vec![0; works];
    for (round, part) in order.into_iter().enumerate() {
        now_and_then(round);
        let (cost, run) = &parts[part];
        let Some(Reverse((before, rank))) = load.pop() else { continue };
        load.push(Reverse(((f64::from_bits(before) + cost).to_bits(), rank)));
        out[run.clone()].fill(rank as u32);
    }
    out
}

/// What each rank has to do, common prefixes of its traces counted once.
fn loads(works: &[Work], rank: &[u32], ranks: usize, cost: Cost) -> Vec<f64> {
    let mut load = vec![0.0; ranks];
    let mut last: Vec<Option<usize>> = vec![None; ranks];
    let mut running = RunningMin::default();
    for (place, work) in works.iter().enumerate() {
        now_and_then(place);
        running.push(place, work.shared);
        let rank = rank[place] as usize;
        let shared = last[rank].map_or(0, |last| running.after(last));
        load[rank] += work.cost - cost.of(shared as usize);
        last[rank] = Some(place);
    }
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: Cost = Cost { token: 1.0, pair: 0.0, term: 0.0 };

    fn works(traces: &[(usize, u32)]) -> Vec<Work> {
        let work = |&(tokens, shared): &(usize, u32)| Work { cost: tokens as f64, prefix: f64::from(shared), shared };
        traces.iter().map(work).collect()
    }

    #[test]
    fn traces_go_to_the_rank_with_least_to_do_by_what_they_cost_and_share() {
        let check = |works: &[Work], cost: Cost, rank: &[u32], load: [f64; 2]| {
            assert_eq!(balance(works, 2, cost), (rank.to_vec(), load.to_vec()), "{works:?}");
        };
        // 9 to rank 0, 8 to rank 1, 3 to rank 1 (8 < 9), 2 to rank 0: 11 each.
        check(&works(&[(9, 0), (2, 0), (8, 0), (3, 0)]), TOKENS, &[0, 0, 1, 1], [11.0; 2]);
        // pair = 1 alone: 10 tokens are 55 pairs, 4 are 10. The long one stands alone.
        let pairs = Cost { token: 0.0, pair: 1.0, term: 0.0 };
        let long = [10, 4, 4, 4].map(|tokens| Work { cost: pairs.of(tokens), prefix: 0.0, shared: 0 });
        check(&long, pairs, &[0, 1, 1, 1], [55.0, 30.0]);
        // Two groups of three, 10 tokens of which 8 are shared: 10 + 2 + 2 = 14 each.
        check(&works(&[(10, 0), (10, 8), (10, 8)].repeat(2)), TOKENS, &[0, 0, 0, 1, 1, 1], [14.0; 2]);
    }

    #[test]
    fn one_group_is_cut_over_ranks_and_its_prefix_paid_on_each() {
        // 8 + 4 * 6 = 32 uncut: one rank would do all. Cut at 16: 8 + 6 = 14 and 3 more parts of 14 or one more.
        let (rank, load) = balance(&works(&[(14, 0), (14, 8), (14, 8), (14, 8)]), 2, TOKENS);
        assert_eq!(load, [20.0, 20.0]); // two branches each: 8 + 6 + 6
        assert_eq!(rank.iter().sum::<u32>(), 2);
    }
}
