//! One block of terms: what is known of it, its log-ratios, and what it adds to the statistics.
//!
//! Plain loops without calls or branches on data; gates and weights stand in their own files.

use std::ops::Range;

use super::lanes::{LANES, each, largest, ones, sum};
use super::segments::{Local, Segments};
use super::stat::{clamped, exponentiate};
use super::{
    AnyGate, BLOCK, Exchange, LOG_RATIO_LIMIT, Missing, Over, POSITIVE_TOLERANCE, Plan, Policy, Ratio, Real, SENTINEL,
    Stats, Terms, When, budget,
};
use crate::error::Result;

/// The segments of the levels that a plan names.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Levels<'a> {
    pub turn: Option<&'a Segments>,
    pub trace: Option<&'a Segments>,
    pub group: Option<&'a Segments>,
    pub batch: Option<&'a Segments>,
}

/// What the plan and the ranks are, the same for all blocks.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub plan: &'a Plan,
    pub levels: Levels<'a>,
    pub exchange: &'a dyn Exchange,
}

/// What blocks add up.
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub stats: Stats,
    /// For each weight the sum of its values and their number, each token, turn, trace or group once.
    pub units: Vec<(f64, f64)>,
}

impl Sums {
    pub fn new(plan: &Plan) -> Self {
        Self { stats: Stats::default(), units: vec![(0.0, 0.0); plan.weights.len()] }
    }

    pub fn merge(&mut self, other: &Self) {
        self.stats.merge(&other.stats);
        for (mine, other) in self.units.iter_mut().zip(&other.units) {
            *mine = (mine.0 + other.0, mine.1 + other.1);
        }
    }
}

/// The columns of one block. Off the mask rollout is NaN and the others are 0.
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
            old: seen(terms.old, &range, mask, old, F::ZERO),
            rollout: seen(terms.rollout, &range, mask, rollout, F::NAN),
            reference: seen(terms.reference, &range, mask, reference, F::ZERO),
            mask,
            advantages,
        }
    }

    fn logprobs(&self, policy: Policy) -> &'a [F] {
        let found = match policy {
            Policy::Old => self.old,
            Policy::Rollout => self.rollout,
            Policy::Reference => self.reference,
        };
        found.unwrap_or(&[])
    }
}

/// A block of a column, through a copy where a mask hides some of it.
fn seen<'a, F: Real>(
    column: Option<&'a [F]>,
    range: &Range<usize>,
    mask: Option<&[bool]>,
    copy: &'a mut Vec<F>,
    hidden: F,
) -> Option<&'a [F]> {
    let column = &column?[range.clone()];
    let Some(mask) = mask else { return Some(column) };
    copy.clear();
    copy.extend(column.iter().zip(mask).map(|(&value, &here)| if here { value } else { hidden }));
    Some(copy)
}

/// Buffers, kept from block to block.
#[derive(Debug, Default)]
pub(super) struct Scratch<F> {
    visible: [Vec<F>; 3],
    work: Work<F>,
}

/// Arrays of the size of the block.
#[derive(Debug, Default)]
pub(super) struct Work<F> {
    /// Of the ratio at hand; NaN where not known.
    pub log_ratio: Vec<F>,
    /// exp of it, clamped; 1 where not known.
    pub ratio: Vec<F>,
    pub values: Vec<F>,
    pub factor: Vec<F>,
    pub known: Vec<bool>,
    pub flags: Vec<bool>,
    /// A bound has changed the ratio on its way to the weight.
    pub bounded: Vec<bool>,
}

impl<F: Real> Work<F> {
    fn resize(&mut self, size: usize) {
        for floats in [&mut self.log_ratio, &mut self.ratio, &mut self.values, &mut self.factor] {
            floats.resize(size, F::ZERO);
        }
        for flags in [&mut self.known, &mut self.flags, &mut self.bounded] {
            flags.resize(size, false);
        }
    }
}

/// One block on its way through the plan.
pub(super) struct Block<'a, F> {
    columns: Columns<'a, F>,
    pub context: Context<'a>,
    range: Range<usize>,
    pub work: &'a mut Work<F>,
    pub weight: &'a mut [F],
    pub keep: &'a mut [bool],
    pub sums: &'a mut Sums,
    /// The ratio whose logarithm stands in `work`.
    at_hand: Option<Ratio>,
}

/// Runs the plan on the terms of `range`, which cuts no segment of its levels.
#[inline(always)]
pub(super) fn run<F: Real>(
    terms: &Terms<'_, F>,
    range: Range<usize>,
    context: Context<'_>,
    scratch: &mut Scratch<F>,
    (weight, keep): (&mut [F], &mut [bool]),
    sums: &mut Sums,
) -> Result<()> {
    let Scratch { visible, work } = scratch;
    work.resize(range.len());
    let columns = Columns::of(terms, range.clone(), visible);
    let mut block = Block { columns, context, range: range.clone(), work, weight, keep, sums, at_hand: None };
    if !block.open() {
        terms.check(range, context.plan.missing == Missing::Refuse)?;
    }
    let before = ones(block.keep);
    for gate in &context.plan.gates {
        match gate {
            AnyGate::Gate(gate) => block.gate(gate)?,
            AnyGate::Budget(plan) => budget::apply(&mut block, plan)?,
        }
    }
    let after = ones(block.keep);
    block.sums.stats.kept += after;
    block.sums.stats.gated += before - after;
    block.weight.fill(F::ONE);
    block.work.bounded.fill(false);
    for (index, weight) in context.plan.weights.iter().enumerate() {
        block.weigh(weight, index)?;
    }
    block.close();
    Ok(())
}

impl<'a, F: Real> Block<'a, F> {
    /// Finds what is known and starts `keep`; false where a value is no logprob.
    #[inline(always)]
    fn open(&mut self) -> bool {
        let Columns { old, rollout, reference, mask, .. } = self.columns;
        let size = self.keep.len();
        let mut sound = true;
        match (rollout, mask) {
            (Some(rollout), _) => {
                for (known, logprob) in self.work.known.iter_mut().zip(rollout) {
                    *known = logprob.is_known();
                }
                sound &= is_sound(rollout);
            }
            (None, Some(mask)) => self.work.known.copy_from_slice(mask),
            (None, None) => self.work.known.fill(true),
        }
        for logprobs in [old, reference].into_iter().flatten() {
            sound &= is_finite(logprobs);
        }
        let missing = self.context.plan.missing;
        match mask {
            _ if missing == Missing::Mask => self.keep.copy_from_slice(&self.work.known),
            Some(mask) => self.keep.copy_from_slice(mask),
            None => self.keep.fill(true),
        }
        let (terms, known) = (mask.map_or(size as f64, ones), ones(&self.work.known));
        self.sums.stats.terms += terms;
        self.sums.stats.known += known;
        sound &= missing != Missing::Refuse || terms == known;
        if old.is_some() && rollout.is_some() {
            self.take(Ratio::MISMATCH);
            self.describe_ratios(size as f64 - known);
        }
        sound
    }

    /// Brings the log-ratio of two policies to hand, and its exponential.
    #[inline(always)]
    pub fn take(&mut self, ratio: Ratio) {
        if self.at_hand == Some(ratio) {
            return;
        }
        self.at_hand = Some(ratio);
        let (num, den) = (self.columns.logprobs(ratio.num), self.columns.logprobs(ratio.den));
        let work = &mut *self.work;
        each([num, den], [&mut work.log_ratio], |_, [num, den]| [num - den]);
        if ratio.num != Policy::Rollout && ratio.den != Policy::Rollout {
            for (l, &known) in work.log_ratio.iter_mut().zip(&work.known) {
                *l = if known { *l } else { F::NAN };
            }
        }
        exponentiate(&work.log_ratio, &mut work.ratio);
    }

    /// The logprobs of the ratio at hand, above and below.
    pub fn logprobs(&self, ratio: Ratio) -> [&'a [F]; 2] {
        [self.columns.logprobs(ratio.num), self.columns.logprobs(ratio.den)]
    }

    /// The segments of a level in this block; none for the token.
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

    /// Where a condition on the advantage holds.
    pub fn holds(&self, when: When) -> impl Iterator<Item = bool> + use<'a, F> {
        self.columns.advantages.unwrap_or(&[]).iter().map(move |advantage| when.holds(advantage.wide()))
    }

    /// Adds old/rollout, which is at hand, to the statistics.
    #[inline(always)]
    fn describe_ratios(&mut self, unknown: f64) {
        let stats = &mut self.sums.stats;
        let mut extremes = [[F::of(f64::NEG_INFINITY); LANES]; 2];
        for (logs, ratios) in self.work.log_ratio.chunks(BLOCK).zip(self.work.ratio.chunks_mut(BLOCK)) {
            let mut sums = [[F::ZERO; LANES]; 5];
            each([logs], [], |lane, [l]| {
                extremes[0][lane] = l.at_least(extremes[0][lane]);
                extremes[1][lane] = (F::ZERO - l).at_least(extremes[1][lane]);
                let l = l.or(F::ZERO);
                sums[0][lane] = sums[0][lane] + l;
                sums[1][lane] = sums[1][lane] + l.abs();
                []
            });
            each([logs], [ratios], |lane, [l]| {
                let (ratio, k3) = clamped(l.or(F::ZERO)).exp_k3();
                sums[2][lane] = sums[2][lane] + ratio;
                sums[3][lane] = sums[3][lane] + ratio * ratio;
                sums[4][lane] = sums[4][lane] + k3;
                [ratio]
            });
            stats.log_ratio += sum(&sums[0]);
            stats.log_ratio_abs += sum(&sums[1]);
            stats.ratio += sum(&sums[2]);
            stats.ratio_squared += sum(&sums[3]);
            stats.k3 += sum(&sums[4]);
        }
        stats.ratio -= unknown;
        stats.ratio_squared -= unknown;
        let (most, least) = (largest(&extremes[0]), largest(&extremes[1]));
        stats.log_ratio_max = stats.log_ratio_max.max(most);
        stats.minus_log_ratio_min = stats.minus_log_ratio_min.max(least);
        if most.max(least) > LOG_RATIO_LIMIT {
            let limit = F::of(LOG_RATIO_LIMIT);
            stats.clamped += self.work.log_ratio.iter().filter(|l| l.abs() > limit).count() as f64;
        }
    }

    /// Sets the weights of what is not known, and adds the weights to the statistics.
    #[inline(always)]
    fn close(&mut self) {
        let (work, stats) = (&mut *self.work, &mut self.sums.stats);
        let unknown = if self.context.plan.missing == Missing::Mask { F::ZERO } else { F::ONE };
        for (weight, &known) in self.weight.iter_mut().zip(&work.known) {
            *weight = if known { *weight } else { unknown };
        }
        if let Some(mask) = self.columns.mask {
            for (weight, &here) in self.weight.iter_mut().zip(mask) {
                *weight = if here { *weight } else { F::ZERO };
            }
        }
        for (flag, (&known, &keep)) in work.flags.iter_mut().zip(work.known.iter().zip(&*self.keep)) {
            *flag = known & keep;
        }
        for ((value, &weight), &counted) in work.values.iter_mut().zip(&*self.weight).zip(&work.flags) {
            *value = if counted { weight } else { F::ZERO };
        }
        for weights in work.values.chunks(BLOCK) {
            let mut sums = [[F::ZERO; LANES]; 2];
            each([weights], [], |lane, [weight]| {
                sums[0][lane] = sums[0][lane] + weight;
                sums[1][lane] = sums[1][lane] + weight * weight;
                []
            });
            stats.weight += sum(&sums[0]);
            stats.weight_squared += sum(&sums[1]);
        }
        stats.weighted += ones(&work.flags);
        for (bounded, &known) in work.bounded.iter_mut().zip(&work.known) {
            *bounded &= known;
        }
        stats.truncated += ones(&work.bounded);
    }
}

/// Whether no rollout logprob is impossible.
#[inline(always)]
fn is_sound<F: Real>(rollout: &[F]) -> bool {
    let (top, sentinel) = (F::of(POSITIVE_TOLERANCE), F::of(SENTINEL));
    let mut wrong = false;
    for &logprob in rollout {
        wrong |= (logprob > top) | (logprob <= sentinel);
    }
    !wrong
}

/// Whether all are finite: 0 times any other is NaN.
#[inline(always)]
fn is_finite<F: Real>(logprobs: &[F]) -> bool {
    let mut zeros = [F::ZERO; LANES];
    each([logprobs], [], |lane, [logprob]| {
        zeros[lane] = zeros[lane] + logprob * F::ZERO;
        []
    });
    zeros.iter().all(|zero| zero.is_known())
}
