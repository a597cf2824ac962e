//! Importance ratios of recorded trained tokens (terms): levels, rejections, weights and denominators, all without
//! gradients.
//!
//! Takes flat slices and returns vectors. Blocks of terms that split no segment run through the whole plan while they
//! are in cache, on several threads. A plan with parts over the batch needs one block; parts over ranks use an
//! [`Exchange`].
#![allow(clippy::inline_always, reason = "a kernel is compiled for the vectors of the function it is inlined into")]
#![allow(clippy::needless_bitwise_bool, reason = "a branch on data is no vector code")]

mod all_reduce;
mod block;
mod estimators;
mod float;
mod loops;
mod plan;
mod rejection;
mod scale;
mod segments;
mod simd;
mod terms;
#[cfg(test)]
mod tests;
mod weight;

pub use all_reduce::{Exchange, Op, SingleRank, Stats};
pub use float::Real;
pub use plan::{
    Aggregation, AnyRejection, Blend, LOG_RATIO_LIMIT, Missing, Over, Per, Plan, Policy, Ratio, Reduce, Reduction,
    Rejection, RejectionBudget, Shape, Stat, Weight, When,
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

/// Minimum number of terms of a block. Its arrays stay in the first-level caches.
const BLOCK: usize = 1024;

/// Weights are not divided by a mean up to this value (verl's bound).
const SMALLEST_MEAN: f64 = 1e-8;

/// The inputs of the loss for each term, and the statistics that a run reports.
#[derive(Debug, Clone)]
pub struct Correction<F> {
    /// Product of the weights; 0 if masked as missing, 1 if neutral.
    pub weight: Vec<F>,
    /// True if the term is trained.
    pub keep: Vec<bool>,
    /// One scale for each reduction of the plan.
    pub scales: Vec<Scale<F>>,
    /// Statistics over all ranks.
    pub stats: Stats,
}

/// Computes weights, rejections and scales of the terms in new vectors; see [`correct_into`].
pub fn correct<F: Real>(terms: &Terms<'_, F>, plan: &Plan, exchange: &dyn Exchange) -> Result<Correction<F>> {
    let (mut weight, mut keep) = (vec![F::ZERO; terms.len()], vec![false; terms.len()]);
    let (scales, stats) = correct_into(terms, plan, exchange, &mut weight, &mut keep)?;
    Ok(Correction { weight, keep, scales, stats })
}

/// Writes the weight and the keep flag of each position. Returns the scales and the statistics.
///
/// # Errors
/// [`crate::Kind::Argument`] if slices differ in length, or if the plan needs a missing input. Also if `old` or
/// `reference` is not finite, or if `rollout` is positive or infinite. Also for NaN under [`Missing::Error`], and for
/// groups over ranks.
pub fn correct_into<F: Real>(
    terms: &Terms<'_, F>,
    plan: &Plan,
    exchange: &dyn Exchange,
    weight: &mut [F],
    keep: &mut [bool],
) -> Result<(Vec<Scale<F>>, Stats)> {
    check(terms, plan, exchange)?;
    let index = Index::new(terms);
    let segments_of = |over: Over| if plan.spans(over) { index.of(over) } else { None };
    let [turn, trace, group, batch] = [Over::Turn, Over::Trace, Over::Group, Over::Batch].map(segments_of);
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

/// Neighboring blocks, and the slices for their weights and keep flags.
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
            let outputs = weight.split_off_mut(..range.len()).zip(keep.split_off_mut(..range.len()));
            block::run::<F, V>(terms, range, context, &mut scratch, outputs.unwrap_or_default(), &mut sums)?;
        }
        Ok(sums)
    }
}

/// Runs the blocks on several threads. Sums are added in the order of the blocks.
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
            let outputs = weight.split_off_mut(..end - start).zip(keep.split_off_mut(..end - start));
            shares.push((std::mem::take(&mut blocks), outputs.unwrap_or_default()));
            start = end;
        }
    }
    let run = |(): &mut (), (blocks, (weight, keep))| {
        let context = Context { plan, levels, exchange: &SingleRank };
        F::dispatch(Share { terms, context, blocks, weight, keep })
    };
    let results: Vec<Result<Sums>> = pool::map(shares, || (), run);
    let mut total = Sums::new(plan);
    for sums in results {
        total.merge(&sums?);
    }
    Ok(total)
}

/// Divides by the mean of each weight with `normalize`.
fn normalize<F: Real>(
    terms: &Terms<'_, F>,
    plan: &Plan,
    exchange: &dyn Exchange,
    weight: &mut [F],
    sums: &Sums,
) -> Result<()> {
    let normalized = plan.weights.iter().zip(&sums.units).filter(|(weight, _)| weight.normalize);
    let mut units: Vec<f64> = normalized.flat_map(|(_, &(sum, count))| [sum, count]).collect();
    if units.is_empty() {
        return Ok(());
    }
    exchange.all_reduce(&mut units, Op::Sum)?;
    let means = units.as_chunks::<2>().0.iter().map(|[sum, count]| sum / count.max(1.0));
    let mean: f64 = means.filter(|&mean| mean > SMALLEST_MEAN).product();
    let divisor = F::of(mean);
    for (position, weight) in weight.iter_mut().enumerate() {
        let is_known = terms.rollout.is_none_or(|rollout| rollout[position].is_known());
        *weight = if is_known { *weight / divisor } else { *weight };
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
                .fix("Pass one entry per trained token in every array"));
        }
    }
    let missing_input = |what: &str, input: &str| {
        argument(format!("{what} without {input}")).fix(format!("Pass {input}, one entry per trained token"))
    };
    for ratio in plan.ratios() {
        if let Some(policy) = [ratio.num, ratio.den].into_iter().find(|&policy| terms.logprobs(policy).is_none()) {
            let (num, den, name) = (ratio.num.name(), ratio.den.name(), policy.name());
            return Err(argument(format!("a weight or rejection takes {num}/{den}, and {name} is None"))
                .why("Its ratio is not known")
                .fix(format!("Pass the logprobs of {name}, one entry per trained token")));
        }
    }
    for (over, ids, name) in [(Over::Turn, terms.turn, "turn"), (Over::Group, terms.group, "group")] {
        if ids.is_none() && plan.spans(over) {
            return Err(missing_input(&format!("a {name} level"), name));
        }
    }
    if plan.spans(Over::Group) && !exchange.is_single_rank() {
        return Err(argument("a group level over ranks".into())
            .why("A group may stand on several of them, and each sees its own part")
            .fix("Take the trace, or the batch"));
    }
    if terms.advantages.is_none() && plan.is_conditional() {
        return Err(missing_input("a weight or rejection that depends on the sign of A", "advantages"));
    }
    Ok(())
}
