//! Assigns branches to ranks, balanced by cost, and to rows. Decides whether the rows share prefixes.

#[cfg(test)]
mod tests;

use super::bins::{BestFit, Unit, rows_of};
use super::check::{check_budget, check_inside, check_length};
use super::prefix::{Entry, RunningMin, common, sorted};
use crate::cancel::{check_every_16384, sort_by_key};
use crate::{Error, Kind, Result, pool};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// The branches to place, and the limits of ranks and rows.
#[derive(Debug, Clone, Copy)]
pub struct PackRequest<'a> {
    /// [T] token ids.
    pub ids: &'a [i32],
    /// [N+1] branch n is tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: &'a [i64],
    /// [N] tokens to lay out; 0 for a branch that is not laid out.
    pub length: &'a [i32],
    /// [N] trained tokens (terms) among them.
    pub terms: &'a [i32],
    /// [N] the trace of each branch, numbered from 0 without gaps.
    pub trace: &'a [i32],
    /// [R] the optimizer step of each trace; -1 for traces without a step.
    pub step: &'a [i32],
    /// Number of training processes.
    pub ranks: usize,
    /// Maximum number of tokens in a row.
    pub tokens_per_row: usize,
    /// True if all branches of a trace must be in one row.
    pub whole_traces: bool,
    /// The cost model for a rank's work.
    pub cost: Cost,
    /// Share prefixes in a step if that divides its cost by more than this. `None` never shares.
    pub min_sharing_gain: Option<f64>,
}

/// The effect of sharing prefixes on a step, over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gain {
    /// True if the step's rows share prefixes.
    pub shared: bool,
    /// True if some trace fits a row only with shared prefixes.
    pub needed: bool,
    /// Number of tokens of all its branches.
    pub tokens: u64,
    /// Number of tokens of its rows if prefixes are shared.
    pub tree_tokens: u64,
    /// Cost without shared prefixes divided by the cost with them.
    pub ratio: f64,
}

/// The placement of each branch.
#[derive(Debug, Default)]
pub struct Placement {
    /// [N] rank; -1 if the branch is not laid out.
    pub rank: Vec<i32>,
    /// [N] row among those of its step and rank; -1 if the branch is not laid out.
    pub row: Vec<i32>,
    /// [N] position of the branch in the order of its row. Rows list their branches in this order.
    pub order: Vec<i32>,
    /// [steps, ranks] number of rows of each rank, step by step.
    pub rows: Vec<i32>,
    /// [steps, ranks] total cost of each rank.
    pub load: Vec<f64>,
    /// [steps] effect of sharing.
    pub gain: Vec<Gain>,
}

/// Places every branch that has a length and whose trace has a step.
///
/// Traces are assigned to ranks by [`Cost`], with all branches of a trace on one rank. Within a rank, branches (with
/// `whole_traces`: traces) are assigned to rows by best fit, longest first. If prefixes are shared, branches with the
/// longest common prefix are combined first, and a row's budget counts a shared token once. Ties go to the lower rank
/// and the earlier branch, so the result depends on the arguments only. Takes O(tokens + n log n) time.
///
/// # Errors
/// Fails if a length exceeds the budget, or if slices are inconsistent.
pub fn place(request: PackRequest<'_>) -> Result<Placement> {
    check(request)?;
    let (count, steps) = (request.length.len(), request.step.iter().copied().max().map_or(0, |last| (last + 1).max(0)));
    let by_step = traces_by_step(request, steps as usize);
    let plans = pool::map(by_step, || (), |(), traces| plan(request, &traces));
    let plans: Vec<Plan> = plans.into_iter().collect::<Result<_>>()?;
    let mut out =
        Placement { rank: vec![-1; count], row: vec![-1; count], order: vec![-1; count], ..Placement::default() };
    for plan in plans {
        for (order, spot) in (0..).zip(&plan.spots) {
            out.rank[spot.branch as usize] = spot.rank as i32;
            out.row[spot.branch as usize] = spot.row as i32;
            out.order[spot.branch as usize] = order;
        }
        out.rows.extend(plan.rows.iter().map(|&rows| rows as i32));
        out.load.extend(plan.load);
        out.gain.push(plan.gain);
    }
    Ok(out)
}

fn check(request: PackRequest<'_>) -> Result<()> {
    check_budget(request.tokens_per_row)?;
    let count = request.length.len();
    check_length("trace", request.trace.len(), count)?;
    check_length("terms", request.terms.len(), count)?;
    check_length("cu_seqlens", request.cu_seqlens.len(), count + 1)?;
    check_length("step", request.step.len(), request.trace.last().map_or(0, |&last| last as usize + 1))?;
    if request.ranks == 0 {
        return Err(
            Error::new(Kind::Argument, "TG-PACK-501", "ranks is 0").fix("Pass the number of processes that train")
        );
    }
    let costs = [request.cost.token, request.cost.pair, request.cost.term];
    if costs.iter().any(|cost| !cost.is_finite() || *cost < 0.0) {
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-502",
            format!("the cost {costs:?} is not finite or is negative"),
        )
        .why("It is the cost of a token, a pair of tokens and a trained token")
        .fix("Take it from the shape of the model"));
    }
    check_inside(request.cu_seqlens, request.length, request.ids.len())?;
    let trace = request.trace;
    if trace.first().is_some_and(|&first| first != 0) || trace.windows(2).any(|w| !(0..=1).contains(&(w[1] - w[0]))) {
        return Err(Error::new(Kind::Argument, "TG-PACK-503", "trace does not count up from 0 without gaps"));
    }
    Ok(())
}

/// Returns, for each step, its traces with something to lay out, as ranges of branches, in order.
fn traces_by_step(request: PackRequest<'_>, steps: usize) -> Vec<Vec<Range<usize>>> {
    let mut by_step = vec![Vec::new(); steps];
    let mut first = 0;
    for run in request.trace.chunk_by(|a, b| a == b) {
        check_every_16384(run[0] as usize);
        let branches = first..first + run.len();
        first = branches.end;
        let step = request.step[run[0] as usize];
        if step >= 0 && request.length[branches.clone()].iter().any(|&tokens| tokens > 0) {
            by_step[step as usize].push(branches);
        }
    }
    by_step
}

/// The placement of one branch.
#[derive(Debug, Clone, Copy)]
struct Spot {
    /// Position in the step's order.
    place: u32,
    branch: u32,
    rank: u32,
    row: u32,
}

/// The plan of one step: its branches in order, rows, loads and gain.
#[derive(Debug, Default)]
struct Plan {
    spots: Vec<Spot>,
    rows: Vec<usize>,
    load: Vec<f64>,
    gain: Gain,
}

/// Branches that are moved together, with their positions in the step's order (ascending), and their total tokens and
/// cost.
#[derive(Debug, Clone)]
struct UnitOfBranches {
    places: Vec<u32>,
    tokens: usize,
    cost: f64,
}

fn plan(request: PackRequest<'_>, traces: &[Range<usize>]) -> Result<Plan> {
    let has_tokens = |branch: &u32| request.length[*branch as usize] > 0;
    let branches: Vec<u32> = traces.iter().cloned().flatten().map(|branch| branch as u32).filter(has_tokens).collect();
    let plain: Vec<Entry> = branches.iter().map(|&branch| Entry { branch, shared: 0 }).collect();
    let Some(floor) = request.min_sharing_gain else {
        return place_step(Order { request, entries: &plain, shares: false });
    };
    let entries = sorted(&branches, |branch| request.text(branch));
    let mut shared = place_step(Order { request, entries: &entries, shares: true })?;
    let fits_row = |trace: &Range<usize>| {
        let tokens: usize = request.length[trace.clone()].iter().map(|&tokens| tokens.max(0) as usize).sum();
        tokens <= request.tokens_per_row
    };
    let needed = request.whole_traces && !traces.iter().all(fits_row);
    let gain_of_sharing = gain(request, &shared.spots);
    shared.gain = Gain { needed, shared: needed || gain_of_sharing.ratio > floor, ..gain_of_sharing };
    if shared.gain.shared {
        return Ok(shared);
    }
    Ok(Plan { gain: shared.gain, ..place_step(Order { request, entries: &plain, shares: false })? })
}

/// Places the branches of a step.
fn place_step(order: Order<'_>) -> Result<Plan> {
    let request = order.request;
    let traces = order.traces();
    let shared = order.shared(traces.iter().map(|trace| trace.places[0]));
    let works: Vec<Work> = traces.iter().zip(shared).map(|(trace, shared)| order.work(trace, shared)).collect();
    let (rank_of, load) = balance(&works, request.ranks, request.cost);
    let total_tokens: usize = order.entries.iter().map(|entry| request.text(entry.branch).len()).sum();
    let mut fit = BestFit::new(request.tokens_per_row.min(total_tokens.max(1)));
    let mut shares: Vec<Vec<UnitOfBranches>> = vec![Vec::new(); request.ranks];
    for (trace, rank) in traces.into_iter().zip(rank_of) {
        shares[rank as usize].push(trace);
    }
    let mut out = Plan { load, spots: Vec::with_capacity(order.entries.len()), ..Plan::default() };
    for (rank, mut units) in (0..).zip(shares) {
        if !request.whole_traces {
            let mut places: Vec<u32> = units.into_iter().flat_map(|unit| unit.places).collect();
            places.sort_unstable();
            units = places.into_iter().map(|place| order.together(vec![place])).collect();
        }
        out.rows.push(place_rank(order, &units, rank, &mut fit, &mut out.spots)?);
    }
    sort_by_key(&mut out.spots, |spot| spot.place);
    Ok(out)
}

/// Assigns the units of a rank to rows. Returns the number of rows.
fn place_rank(
    order: Order<'_>,
    units: &[UnitOfBranches],
    rank: u32,
    fit: &mut BestFit,
    spots: &mut Vec<Spot>,
) -> Result<usize> {
    let budget = order.request.tokens_per_row;
    if let Some(too_long) = units.iter().find(|unit| unit.tokens > budget) {
        let branch = order.entries[too_long.places[0] as usize].branch;
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-504",
            format!("branch {branch} has {} tokens to lay out, but tokens_per_row is {budget}", too_long.tokens),
        ));
    }
    let shared = order.shared(units.iter().map(|unit| unit.places[0]));
    let sized: Vec<Unit> =
        units.iter().zip(shared).map(|(unit, shared)| Unit { tokens: unit.tokens, shared: shared as usize }).collect();
    let (rows, count) = rows_of(&sized, budget, fit);
    for (unit, row) in units.iter().zip(rows) {
        let spot = |&place: &u32| Spot { place, branch: order.entries[place as usize].branch, rank, row };
        spots.extend(unit.places.iter().map(spot));
    }
    Ok(count)
}

/// Computes cost and tokens of the existing rows if each lays out a common prefix once.
fn gain(request: PackRequest<'_>, spots: &[Spot]) -> Gain {
    let mut by_row: Vec<&Spot> = spots.iter().collect();
    sort_by_key(&mut by_row, |spot| (spot.rank, spot.row, spot.place));
    let (mut out, mut plain, mut tree) = (Gain::default(), 0.0, 0.0);
    let mut previous: Option<&Spot> = None;
    for (round, spot) in by_row.into_iter().enumerate() {
        check_every_16384(round);
        let text = request.text(spot.branch);
        let above = previous.filter(|previous| (previous.rank, previous.row) == (spot.rank, spot.row));
        let shared = above.map_or(0, |above| common(request.text(above.branch), text));
        let head = request.cost.term * f64::from(request.terms[spot.branch as usize]);
        out.tokens += text.len() as u64;
        out.tree_tokens += (text.len() - shared) as u64;
        plain += request.cost.of(text.len()) + head;
        tree += request.cost.of(text.len()) - request.cost.of(shared) + head;
        previous = Some(spot);
    }
    Gain { ratio: if tree > 0.0 { plain / tree } else { 1.0 }, ..out }
}

impl<'a> PackRequest<'a> {
    /// Returns the tokens of a branch that are laid out.
    fn text(&self, branch: u32) -> &'a [i32] {
        let start = self.cu_seqlens[branch as usize] as usize;
        &self.ids[start..start + self.length[branch as usize].max(0) as usize]
    }
}

/// The branches of a step in an order, which is lexicographic if prefixes are shared.
#[derive(Debug, Clone, Copy)]
struct Order<'a> {
    request: PackRequest<'a>,
    entries: &'a [Entry],
    shares: bool,
}

impl Order<'_> {
    fn text(&self, place: u32) -> &[i32] {
        self.request.text(self.entries[place as usize].branch)
    }

    /// Returns the traces, ordered by their first positions.
    fn traces(&self) -> Vec<UnitOfBranches> {
        let trace = |place: u32| self.request.trace[self.entries[place as usize].branch as usize];
        let mut places: Vec<u32> = (0..self.entries.len() as u32).collect();
        sort_by_key(&mut places, |&place| (trace(place), place));
        let runs = places.chunk_by(|&a, &b| trace(a) == trace(b));
        let mut out: Vec<UnitOfBranches> = runs.map(|run| self.together(run.to_vec())).collect();
        sort_by_key(&mut out, |trace| trace.places[0]);
        out
    }

    /// Combines branches and computes their total tokens and cost. Common prefixes count once if they are shared.
    fn together(&self, places: Vec<u32>) -> UnitOfBranches {
        let (cost, mut tokens, mut total) = (self.request.cost, 0, 0.0);
        for (n, &place) in places.iter().enumerate() {
            check_every_16384(place as usize);
            let text = self.text(place);
            let shared = if self.shares && n > 0 { common(self.text(places[n - 1]), text) } else { 0 };
            let terms = self.request.terms[self.entries[place as usize].branch as usize];
            tokens += text.len() - shared;
            total += cost.of(text.len()) - cost.of(shared) + cost.term * f64::from(terms);
        }
        UnitOfBranches { places, tokens, cost: total }
    }

    fn work(&self, trace: &UnitOfBranches, shared: u32) -> Work {
        Work { cost: trace.cost, prefix: self.request.cost.of(shared as usize), shared }
    }

    /// For each of the ascending positions, returns the length of its common prefix with the previous one.
    fn shared(&self, places: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut running = RunningMin::default();
        let (mut previous, mut pushed) = (None, 0);
        let mut out = Vec::new();
        for place in places.map(|place| place as usize) {
            check_every_16384(out.len());
            for (at, entry) in self.entries.iter().enumerate().take(place + 1).skip(pushed) {
                running.push(at, entry.shared);
            }
            pushed = place + 1;
            out.push(previous.map_or(0, |previous| running.after(previous)));
            previous = Some(place);
        }
        out
    }
}

/// The cost model of a forward and a backward pass, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Cost of one token in the linear layers.
    pub token: f64,
    /// Cost of one (query, key) pair. A branch of n tokens has n (n + 1) / 2 of them.
    pub pair: f64,
    /// Cost of one trained token (term) in the head.
    pub term: f64,
}

impl Cost {
    /// Returns the cost of a branch's first `tokens` tokens, without the head.
    pub fn of(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        self.token * tokens + self.pair * tokens * (tokens + 1.0) / 2.0
    }
}

/// One trace as a unit of work for a rank.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Its cost by itself.
    pub cost: f64,
    /// The part of the cost that the previous trace has already paid if both are in one row: their common prefix.
    pub prefix: f64,
    /// Tokens of that prefix.
    pub shared: u32,
}

/// Number of times that parts are split finer than a rank's fair share: into halves, quarters and so on.
const ROUNDS: i32 = 5;

/// A prefix worth less than this share of a trace's cost does not tie it to the previous trace.
const LOOSE: f64 = 0.05;

/// Returns the rank of each trace, and the total cost of each rank.
///
/// Traces come in lexicographic order if prefixes are shared, and neighbors with a long common prefix are moved
/// together. First the parts are not split, then they are split ever finer. The split with the lowest load of the
/// busiest rank is used. Parts go to ranks by cost, largest first, each to the rank with the lowest load so far (LPT:
/// at most 4/3 of the optimum). Ties go to the first part and the first rank, so that every rank computes the same
/// result.
pub fn balance(works: &[Work], ranks: usize, cost: Cost) -> (Vec<u32>, Vec<f64>) {
    let total: f64 = works.iter().map(|work| work.cost - work.prefix).sum();
    if ranks == 1 {
        return (vec![0; works.len()], vec![total]);
    }
    let fair = total / ranks as f64;
    let shares_prefixes = works.iter().any(|work| work.prefix > 0.0);
    let limits = (0..=ROUNDS).map(|round| if round == 0 { f64::INFINITY } else { fair / 2f64.powi(round - 1) });
    let mut best: Option<(f64, Vec<u32>, Vec<f64>)> = None;
    for limit in limits.take(if shares_prefixes { usize::MAX } else { 1 }) {
        let rank = longest_first(&parts(works, limit), works.len(), ranks);
        let load = loads(works, &rank, ranks, cost);
        let max_load = load.iter().copied().fold(0.0, f64::max);
        if best.as_ref().is_none_or(|(best_load, ..)| max_load < 0.999 * best_load) {
            best = Some((max_load, rank, load));
        }
    }
    best.map_or_else(Default::default, |(_, rank, load)| (rank, load))
}

/// Returns runs of traces with their cost. Runs are split if the prefix is loose, and if a run would exceed `limit`.
fn parts(works: &[Work], limit: f64) -> Vec<(f64, Range<usize>)> {
    let mut out: Vec<(f64, Range<usize>)> = Vec::new();
    for (place, work) in works.iter().enumerate() {
        check_every_16384(place);
        let added_cost = work.cost - work.prefix;
        match out.last_mut() {
            Some((cost, run)) if work.prefix > LOOSE * work.cost && *cost + added_cost <= limit => {
                *cost += added_cost;
                run.end = place + 1;
            }
            _ => out.push((work.cost, place..place + 1)),
        }
    }
    out
}

fn longest_first(parts: &[(f64, Range<usize>)], works: usize, ranks: usize) -> Vec<u32> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    // The bits of non-negative floats are in the order of the floats.
    sort_by_key(&mut order, |&part| (Reverse(parts[part].0.to_bits()), part));
    let mut load: BinaryHeap<Reverse<(u64, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut out = vec![0; works];
    for (round, part) in order.into_iter().enumerate() {
        check_every_16384(round);
        let (cost, run) = &parts[part];
        let Some(Reverse((load_before, rank))) = load.pop() else { continue };
        load.push(Reverse(((f64::from_bits(load_before) + cost).to_bits(), rank)));
        out[run.clone()].fill(rank as u32);
    }
    out
}

/// Returns the total cost of each rank. Common prefixes of its traces count once.
fn loads(works: &[Work], rank: &[u32], ranks: usize, cost: Cost) -> Vec<f64> {
    let mut load = vec![0.0; ranks];
    let mut last: Vec<Option<usize>> = vec![None; ranks];
    let mut running = RunningMin::default();
    for (place, work) in works.iter().enumerate() {
        check_every_16384(place);
        running.push(place, work.shared);
        let rank = rank[place] as usize;
        let shared = last[rank].map_or(0, |last| running.after(last));
        load[rank] += work.cost - cost.of(shared as usize);
        last[rank] = Some(place);
    }
    load
}

#[cfg(test)]
mod ranks_tests {
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
        // Only pairs, each of cost 1: 10 tokens are 55 pairs, 4 are 10. The long trace gets a rank for itself.
        let pairs = Cost { token: 0.0, pair: 1.0, term: 0.0 };
        let long = [10, 4, 4, 4].map(|tokens| Work { cost: pairs.of(tokens), prefix: 0.0, shared: 0 });
        check(&long, pairs, &[0, 1, 1, 1], [55.0, 30.0]);
        // Two groups of three traces of 10 tokens, 8 of them shared: 10 + 2 + 2 = 14 each.
        check(&works(&[(10, 0), (10, 8), (10, 8)].repeat(2)), TOKENS, &[0, 0, 0, 1, 1, 1], [14.0; 2]);
    }

    #[test]
    fn one_group_is_cut_over_ranks_and_its_prefix_paid_on_each() {
        // 8 + 4 * 6 = 32 unsplit: one rank would do everything. Split at 16: 8 + 6 = 14 and 3 more parts of at most
        // 14.
        let (rank, load) = balance(&works(&[(14, 0), (14, 8), (14, 8), (14, 8)]), 2, TOKENS);
        assert_eq!(load, [20.0, 20.0]); // two branches each: 8 + 6 + 6
        assert_eq!(rank.iter().sum::<u32>(), 2);
    }
}
