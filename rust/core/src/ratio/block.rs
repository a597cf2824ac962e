//! One block of terms: which terms are known, their log-ratios, and their contribution to the statistics.
//!
//! The loops have no calls and no branches on data. `rejection` and `weight` implement the rejections and weights.

use super::all_reduce::{Exchange, Stats};
use super::float::{Real, Vector};
use super::loops::{Aligned, count, exponentiate, map2, mismatch, ones};
use super::plan::{
    AnyRejection, LOG_RATIO_LIMIT, Missing, Over, POSITIVE_TOLERANCE, Plan, Policy, Ratio, SENTINEL, SHARE, When,
};
use super::segments::{Local, Segments};
use super::terms::Terms;
use crate::cancel;
use crate::error::Result;
use std::ops::Range;

/// The segments of the levels that a plan names.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Levels<'a> {
    pub turn: Option<&'a Segments>,
    pub trace: Option<&'a Segments>,
    pub group: Option<&'a Segments>,
    pub batch: Option<&'a Segments>,
}

/// The plan, levels and ranks, which are the same for all blocks.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub plan: &'a Plan,
    pub levels: Levels<'a>,
    pub exchange: &'a dyn Exchange,
}

/// The sums over blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub stats: Stats,
    /// For each weight, the sum and the number of its values. Each token, turn, trace or group counts once.
    pub units: Vec<(f64, f64)>,
}

impl Sums {
    pub fn new(plan: &Plan) -> Self {
        Self { stats: Stats::default(), units: vec![(0.0, 0.0); plan.weights.len()] }
    }

    pub fn merge(&mut self, other: &Self) {
        self.stats.merge(&other.stats);
        for (own, other) in self.units.iter_mut().zip(&other.units) {
            *own = (own.0 + other.0, own.1 + other.1);
        }
    }
}

/// The columns of one block. At positions outside the mask, rollout is NaN and the others are 0.
#[derive(Clone, Copy)]
struct Columns<'a, F> {
    old: Option<&'a [F]>,
    rollout: Option<&'a [F]>,
    reference: Option<&'a [F]>,
    mask: Option<&'a [bool]>,
    advantages: Option<&'a [F]>,
}

impl<'a, F: Real> Columns<'a, F> {
    fn of(terms: &Terms<'a, F>, range: Range<usize>, visible: &'a mut [Vec<F>; 3]) -> Self {
        let mask = terms.mask.map(|mask| &mask[range.clone()]);
        let advantages = terms.advantages.map(|advantages| &advantages[range.clone()]);
        let [old, rollout, reference] = visible;
        Self {
            old: visible_block(terms.old, &range, mask, old, F::ZERO),
            rollout: visible_block(terms.rollout, &range, mask, rollout, F::NAN),
            reference: visible_block(terms.reference, &range, mask, reference, F::ZERO),
            mask,
            advantages,
        }
    }

    fn logprobs(&self, policy: Policy) -> &'a [F] {
        let logprobs = match policy {
            Policy::Old => self.old,
            Policy::Rollout => self.rollout,
            Policy::Reference => self.reference,
        };
        logprobs.unwrap_or(&[])
    }
}

/// Returns a block of a column. If there is a mask, hidden values are replaced in a copy.
fn visible_block<'a, F: Real>(
    column: Option<&'a [F]>,
    range: &Range<usize>,
    mask: Option<&[bool]>,
    copy: &'a mut Vec<F>,
    hidden: F,
) -> Option<&'a [F]> {
    let column = &column?[range.clone()];
    let Some(mask) = mask else { return Some(column) };
    copy.clear();
    copy.extend(column.iter().zip(mask).map(|(&value, &is_term)| if is_term { value } else { hidden }));
    Some(copy)
}

/// Buffers that blocks reuse.
#[derive(Debug, Default)]
pub(super) struct Scratch<F> {
    visible: [Vec<F>; 3],
    work: Work<F>,
}

/// Arrays of the size of the block.
#[derive(Debug, Default)]
pub(super) struct Work<F> {
    /// Log-ratio of the current ratio; NaN if unknown.
    pub log_ratio: Aligned<F>,
    /// Its exponential, clamped; 1 if unknown.
    pub ratio: Aligned<F>,
    pub values: Aligned<F>,
    pub factor: Aligned<F>,
    /// The product of the factors so far.
    pub weight: Aligned<F>,
    pub known: Vec<bool>,
    pub flags: Vec<bool>,
    /// True if a bound changed the ratio that the weight uses.
    pub bounded: Vec<bool>,
}

impl<F: Real> Work<F> {
    fn resize(&mut self, size: usize) {
        for floats in [&mut self.log_ratio, &mut self.ratio, &mut self.values, &mut self.factor, &mut self.weight] {
            floats.resize(size);
        }
        for flags in [&mut self.known, &mut self.flags, &mut self.bounded] {
            flags.resize(size, false);
        }
    }
}

/// One block during the execution of the plan.
pub(super) struct Block<'a, F> {
    columns: Columns<'a, F>,
    pub context: Context<'a>,
    range: Range<usize>,
    /// The columns of the next block, with as many terms as this one.
    ahead: [&'a [F]; 2],
    pub work: &'a mut Work<F>,
    pub weight: &'a mut [F],
    pub keep: &'a mut [bool],
    pub sums: &'a mut Sums,
    /// The ratio whose logarithm is in `work`.
    at_hand: Option<Ratio>,
    /// Number of terms with keep 1 before any rejection.
    open: f64,
}

/// Runs the plan on the terms of `range`, which does not split a segment of its levels.
#[inline(always)]
pub(super) fn run<F: Real, V: Vector<Element = F>>(
    terms: &Terms<'_, F>,
    range: Range<usize>,
    context: Context<'_>,
    scratch: &mut Scratch<F>,
    (weight, keep): (&mut [F], &mut [bool]),
    sums: &mut Sums,
) -> Result<()> {
    let is_long = range.len() > SHARE;
    let Scratch { visible, work } = scratch;
    work.resize(range.len());
    let columns = Columns::of(terms, range.clone(), visible);
    let next = range.end..terms.len().min(range.end + range.len());
    let ahead = [terms.old, terms.rollout].map(|column| column.map_or(&[][..], |column| &column[next.clone()]));
    let (at_hand, open, place) = (None, 0.0, range.clone());
    let mut block = Block { columns, context, range: place, ahead, work, weight, keep, sums, at_hand, open };
    if !block.open::<V>() {
        terms.check(range, context.plan.missing == Missing::Error)?;
    }
    for rejection in &context.plan.rejections {
        check_if(is_long);
        match rejection {
            AnyRejection::Rejection(rejection) => block.rejection::<V>(rejection)?,
            AnyRejection::RejectionBudget(plan) => block.budget::<V>(plan)?,
        }
    }
    let unknown = if context.plan.missing == Missing::Mask { F::ZERO } else { F::ONE };
    match &context.plan.weights[..] {
        [weight] if weight.is_of_tokens() => block.weigh_tokens::<V>(weight, unknown),
        weights => {
            if weights.is_empty() {
                block.work.weight.fill(F::ONE);
            }
            for (index, weight) in weights.iter().enumerate() {
                check_if(is_long);
                block.weigh::<V>(weight, index)?;
            }
            block.give(unknown);
        }
    }
    block.close(unknown);
    Ok(())
}

/// Checks for cancellation in long blocks. A block is long if segments are scattered, and then every part of the plan
/// takes a while.
fn check_if(is_long: bool) {
    if is_long {
        cancel::check();
    }
}

impl<'a, F: Real> Block<'a, F> {
    /// Determines which terms are known and initializes `keep`. Returns false if a value is not a logprob.
    #[inline(always)]
    fn open<V: Vector<Element = F>>(&mut self) -> bool {
        let Columns { old, rollout, reference, mask, .. } = self.columns;
        let (missing, size) = (self.context.plan.missing, self.keep.len());
        // The longest loop reads the columns first, so that it does not have to wait for them.
        let mut sound = match (old, rollout) {
            (Some(old), Some(rollout)) => self.open_mismatch::<V>(old, rollout),
            _ => rollout.is_none_or(is_possible) & old.is_none_or(is_finite),
        };
        sound &= reference.is_none_or(is_finite);
        let work = &mut *self.work;
        match (rollout, mask) {
            (Some(rollout), _) => {
                let source = if old.is_some() { &*work.log_ratio } else { rollout };
                for (known, value) in work.known.iter_mut().zip(source) {
                    *known = value.is_known();
                }
            }
            (None, Some(mask)) => work.known.copy_from_slice(mask),
            (None, None) => work.known.fill(true),
        }
        match mask {
            _ if missing == Missing::Mask => self.keep.copy_from_slice(&self.work.known),
            Some(mask) => self.keep.copy_from_slice(mask),
            None => self.keep.fill(true),
        }
        let (terms, known) = (mask.map_or(size as f64, ones), ones(&self.work.known));
        let stats = &mut self.sums.stats;
        stats.terms += terms;
        stats.known += known;
        self.open = if missing == Missing::Mask { known } else { terms };
        sound & (missing != Missing::Error || terms == known)
    }

    /// Computes the ratio old/rollout and counts clamped values. Returns false if a value is not a logprob.
    #[inline(always)]
    fn open_mismatch<V: Vector<Element = F>>(&mut self, old: &[F], rollout: &[F]) -> bool {
        self.at_hand = Some(Ratio::MISMATCH);
        let (work, stats) = (&mut *self.work, &mut self.sums.stats);
        let summary = mismatch::<V>(
            (old, rollout),
            (&mut work.log_ratio, &mut work.ratio),
            [self.ahead[0], self.ahead[1], &*self.weight],
        );
        if summary.farthest > LOG_RATIO_LIMIT {
            let limit = F::of(LOG_RATIO_LIMIT);
            stats.clamped += count(&work.log_ratio, |l| l.abs() > limit) as f64;
        }
        summary.is_sound
    }

    /// Computes the log-ratio of two policies and its exponential, unless they are current.
    #[inline(always)]
    pub fn take<V: Vector<Element = F>>(&mut self, ratio: Ratio) {
        if self.at_hand == Some(ratio) {
            return;
        }
        self.at_hand = Some(ratio);
        let (num, den) = (self.columns.logprobs(ratio.num), self.columns.logprobs(ratio.den));
        let work = &mut *self.work;
        map2(&mut work.log_ratio, num, den, |num, den| num - den);
        if ratio.num != Policy::Rollout && ratio.den != Policy::Rollout {
            for (l, &known) in work.log_ratio.iter_mut().zip(&work.known) {
                *l = if known { *l } else { F::NAN };
            }
        }
        exponentiate::<V>(&work.log_ratio, &mut work.ratio);
    }

    /// Returns the logprobs of numerator and denominator of a ratio.
    pub fn logprobs(&self, ratio: Ratio) -> [&'a [F]; 2] {
        [self.columns.logprobs(ratio.num), self.columns.logprobs(ratio.den)]
    }

    /// Returns the advantages of the block, or an empty slice if the plan does not use them.
    pub fn advantages(&self) -> &'a [F] {
        self.columns.advantages.unwrap_or(&[])
    }

    /// Returns the segments of a level in this block, or `None` for the token level.
    pub fn local(&self, over: Over) -> Option<Local<'a>> {
        let levels = self.context.levels;
        let segments = match over {
            Over::Token => None,
            Over::Turn => levels.turn,
            Over::Trace => levels.trace,
            Over::Group => levels.group,
            Over::Batch => levels.batch,
        };
        segments.map(|segments| segments.within(&self.range))
    }

    /// Returns, for each term, whether a condition on the advantage holds.
    pub fn holds(&self, when: When) -> impl Iterator<Item = bool> + use<'a, F> {
        self.advantages().iter().map(move |advantage| when.holds(advantage.wide()))
    }

    /// Writes the product of the weights, and `unknown` for unknown terms.
    #[inline(always)]
    fn give(&mut self, unknown: F) {
        for ((out, &weight), &known) in self.weight.iter_mut().zip(&self.work.weight).zip(&self.work.known) {
            *out = if known { weight } else { unknown };
        }
    }

    /// Sets the weights outside the mask, and adds the block to the statistics.
    #[inline(always)]
    fn close(&mut self, unknown: F) {
        let (plan, work, stats) = (self.context.plan, &mut *self.work, &mut self.sums.stats);
        let kept = if plan.rejections.is_empty() { self.open } else { ones(self.keep) };
        stats.kept += kept;
        stats.gated += self.open - kept;
        if let Some(mask) = self.columns.mask.filter(|_| unknown != F::ZERO) {
            for (weight, &is_term) in self.weight.iter_mut().zip(mask) {
                *weight = if is_term { *weight } else { F::ZERO };
            }
        }
        if plan.weights.iter().any(|weight| weight.shape.is_bounded()) {
            for (bounded, &known) in work.bounded.iter_mut().zip(&work.known) {
                *bounded &= known;
            }
            stats.truncated += ones(&work.bounded);
        }
    }
}

/// Returns true if every rollout logprob is possible.
#[inline(always)]
fn is_possible<F: Real>(rollout: &[F]) -> bool {
    let (top, sentinel) = (F::of(POSITIVE_TOLERANCE), F::of(SENTINEL));
    count(rollout, |logprob| (logprob > top) | (logprob <= sentinel)) == 0
}

/// Returns true if all logprobs are finite: 0 times any other value is NaN.
#[inline(always)]
fn is_finite<F: Real>(logprobs: &[F]) -> bool {
    count(logprobs, |logprob| !(logprob * F::ZERO).is_known()) == 0
}
