//! Importance ratios of recorded terms: levels, gates, weights and denominators, everything that carries no gradient.
//!
//! Flat slices in, vectors out. Blocks of terms that cut no segment run through the whole plan while they are in cache,
//! several threads at a time; what the plan says of the batch needs one block, and what it says of ranks an [`Exchange`].
#![allow(clippy::inline_always, reason = "a kernel is compiled for the vectors of the function it is inlined into")]
#![allow(clippy::needless_bitwise_bool, reason = "a branch on data is no vector code")]

mod all_reduce;
mod block;
mod estimators;
mod float;
mod gate;
mod loops;
mod plan;
mod scale;
mod segments;
mod simd;
mod terms;
#[cfg(test)]
mod tests;
mod weight;

pub use all_reduce::{Alone, Exchange, Op, Stats};
pub use float::Real;
pub use plan::{
    Agg, AnyGate, Blend, Budget, Gate, LOG_RATIO_LIMIT, Level, Missing, Over, Per, Plan, Policy, Ratio, Reduction,
    Shape, Stat, Weight, When,
};
pub use scale::Scale;
pub use terms::{Ids, Integers, Terms, Totals};

use crate::error::Result;
use crate::pool;
use block::{Context, Levels, Scratch, Sums};
use float::{Kernel, Vector};
use plan::SHARE;
use segments::{Index, Segments};
use std::ops::Range;
use terms::argument;

/// Fewest terms of a block: its arrays stay in the first caches.
const BLOCK: usize = 1024;

/// A mean weight up to this is not divided by (verl's bound).
const SMALLEST_MEAN: f64 = 1e-8;

/// What the loss takes of each term, and what the run reports.
#[derive(Debug, Clone)]
pub struct Corrected<F> {
    /// Product of the weights; 0 where masked as missing, 1 where neutral.
    pub weight: Vec<F>,
    /// Whether the term trains.
    pub keep: Vec<bool>,
    /// One for each reduction of the plan.
    pub scales: Vec<Scale<F>>,
    /// What was done, over all ranks.
    pub stats: Stats,
}

/// Weights, gates and scales of the terms, in new vectors; see [`correct_into`].
pub fn correct<F: Real>(terms: &Terms<'_, F>, plan: &Plan, exchange: &dyn Exchange) -> Result<Corrected<F>> {
    let (mut weight, mut keep) = (vec![F::ZERO; terms.len()], vec![false; terms.len()]);
    let (scales, stats) = correct_into(terms, plan, exchange, &mut weight, &mut keep)?;
    Ok(Corrected { weight, keep, scales, stats })
}

/// Writes the weight and the keep of each position; gives the scales and the statistics.
///
/// # Errors
/// [`crate::Kind::Argument`] for slices of unequal length, a plan that names what was not given, `old` or `reference`
/// that is not finite, `rollout` that is positive or infinite, NaN under [`Missing::Refuse`], and groups over ranks.
pub fn correct_into<F: Real>(
    terms: &Terms<'_, F>,
    plan: &Plan,
    exchange: &dyn Exchange,
    weight: &mut [F],
    keep: &mut [bool],
) -> Result<(Vec<Scale<F>>, Stats)> {
    check(terms, plan, exchange)?;
    let index = Index::new(terms);
    let used = |over: Over| if plan.spans(over) { index.of(over) } else { None };
    let [turn, trace, group, batch] = [Over::Turn, Over::Trace, Over::Group, Over::Batch].map(used);
    let levels = Levels { turn, trace, group, batch };
    let uncut: Vec<&Segments> = [batch, group, trace, turn].into_iter().flatten().collect();
    let ends = segments::blocks(terms.len(), &uncut, BLOCK);
    let context = Context { plan, levels, exchange };
    let mut sums = if let [_] = ends[..] {
        let blocks = std::iter::once(0..terms.len()).collect();
        F::dispatch(Share { terms, context, blocks, weight: &mut *weight, keep: &mut *keep })?
    } else {
        in_shares(terms, plan, levels, &ends, weight, keep)?
    };
    sums.stats.exchange(exchange)?;
    normalize(terms, plan, exchange, weight, &sums)?;
    let counting = scale::Counting { terms, index: &index, keep, stats: sums.stats, exchange };
    let scales = plan.reductions.iter().map(|reduction| counting.scale(reduction)).collect::<Result<_>>()?;
    Ok((scales, sums.stats))
}

/// Neighbouring blocks, and where their weights and keeps go.
struct Share<'a, F> {
    terms: &'a Terms<'a, F>,
    context: Context<'a>,
    blocks: Vec<Range<usize>>,
    weight: &'a mut [F],
    keep: &'a mut [bool],
}

impl<F: Real> Kernel<F> for Share<'_, F> {
    type Output = Result<Sums>;

    #[inline(always)]
    fn run<V: Vector<Element = F>>(self) -> Result<Sums> {
        let Self { terms, context, blocks, mut weight, mut keep } = self;
        let (mut sums, mut scratch) = (Sums::new(context.plan), Scratch::default());
        for range in blocks {
            let here = weight.split_off_mut(..range.len()).zip(keep.split_off_mut(..range.len()));
            block::run::<F, V>(terms, range, context, &mut scratch, here.unwrap_or_default(), &mut sums)?;
        }
        Ok(sums)
    }
}

/// Runs the blocks, several threads at a time; sums are added in the order of the blocks.
fn in_shares<F: Real>(
    terms: &Terms<'_, F>,
    plan: &Plan,
    levels: Levels<'_>,
    ends: &[usize],
    mut weight: &mut [F],
    mut keep: &mut [bool],
) -> Result<Sums> {
    let (mut shares, mut start, mut blocks) = (Vec::new(), 0, Vec::new());
    for &end in ends {
        blocks.push(blocks.last().map_or(start, |last: &Range<usize>| last.end)..end);
        if end - start >= SHARE || end == terms.len() {
            let here = weight.split_off_mut(..end - start).zip(keep.split_off_mut(..end - start));
            shares.push((std::mem::take(&mut blocks), here.unwrap_or_default()));
            start = end;
        }
    }
    let run = |(): &mut (), (blocks, (weight, keep))| {
        let context = Context { plan, levels, exchange: &Alone };
        F::dispatch(Share { terms, context, blocks, weight, keep })
    };
    let found: Vec<Result<Sums>> = pool::map(shares, || (), run);
    let mut total = Sums::new(plan);
    for sums in found {
        total.merge(&sums?);
    }
    Ok(total)
}

/// Divides by the mean of each weight that asks for it.
fn normalize<F: Real>(
    terms: &Terms<'_, F>,
    plan: &Plan,
    exchange: &dyn Exchange,
    weight: &mut [F],
    sums: &Sums,
) -> Result<()> {
    let asking = plan.weights.iter().zip(&sums.units).filter(|(weight, _)| weight.normalize);
    let mut units: Vec<f64> = asking.flat_map(|(_, &(sum, count))| [sum, count]).collect();
    if units.is_empty() {
        return Ok(());
    }
    exchange.all_reduce(&mut units, Op::Sum)?;
    let means = units.as_chunks::<2>().0.iter().map(|[sum, count]| sum / count.max(1.0));
    let mean: f64 = means.filter(|&mean| mean > SMALLEST_MEAN).product();
    let by = F::of(mean);
    for (position, weight) in weight.iter_mut().enumerate() {
        let known = terms.rollout.is_none_or(|rollout| rollout[position].is_known());
        *weight = if known { *weight / by } else { *weight };
    }
    Ok(())
}

fn check<F: Real>(terms: &Terms<'_, F>, plan: &Plan, exchange: &dyn Exchange) -> Result<()> {
    let total = terms.len();
    let lengths = [
        ("old", terms.old.map(<[F]>::len)),
        ("rollout", terms.rollout.map(<[F]>::len)),
        ("ref", terms.reference.map(<[F]>::len)),
        ("mask", terms.mask.map(<[bool]>::len)),
        ("turn", terms.turn.map(|ids| ids.terms())),
        ("group", terms.group.map(|ids| ids.terms())),
        ("advantages", terms.advantages.map(<[F]>::len)),
    ];
    for (name, length) in lengths {
        if let Some(length) = length.filter(|&length| length != total) {
            return Err(argument(format!("{name} has {length} entries but trace has {total}"))
                .cure("Pass one entry per term in every array"));
        }
    }
    let absent = |what: &str, given: &str| {
        argument(format!("{what} without {given}")).cure(format!("Pass {given}, one entry per term"))
    };
    for ratio in plan.ratios() {
        if let Some(policy) = [ratio.num, ratio.den].into_iter().find(|&policy| terms.logprobs(policy).is_none()) {
            let (num, den, name) = (ratio.num.name(), ratio.den.name(), policy.name());
            return Err(argument(format!("a weight or gate takes {num}/{den}, and {name} is None"))
                .why("Its ratio is not known")
                .cure(format!("Pass the logprobs of {name}, one entry per term")));
        }
    }
    for (over, given, name) in [(Over::Turn, terms.turn, "turn"), (Over::Group, terms.group, "group")] {
        if given.is_none() && plan.spans(over) {
            return Err(absent(&format!("a {name} level"), name));
        }
    }
    if plan.spans(Over::Group) && !exchange.is_alone() {
        return Err(argument("a group level over ranks".into())
            .why("A group may stand on several of them, and each sees its own part")
            .cure("Take the trace, or the batch"));
    }
    if terms.advantages.is_none() && plan.is_conditional() {
        return Err(absent("a weight or gate that depends on the sign of A", "advantages"));
    }
    Ok(())
}
