//! The passes over one block of terms: ratios, gates, weights, statistics. Plain loops without calls or branches on data.

use std::ops::Range;

use super::{
    Corrected, Gate, LOG_RATIO_LIMIT, Level, Missing, Over, POSITIVE_TOLERANCE, Plan, Real, SENTINEL, Segments, Shape,
    Stat, Stats, Terms, Weight, When, argument,
};
use crate::error::Result;

/// Independent partial sums, so that a sum in f64 is vector code with one fixed order.
const LANES: usize = 8;

/// The segments of the levels that a plan names.
#[derive(Debug, Clone, Copy)]
pub(super) struct Levels<'a> {
    pub turn: Option<&'a Segments>,
    pub trace: Option<&'a Segments>,
}

impl Levels<'_> {
    fn of(&self, over: Over) -> Option<&Segments> {
        match over {
            Over::Token => None,
            Over::Turn => self.turn,
            Over::Trace => self.trace,
        }
    }
}

/// Buffers of one block.
#[derive(Debug)]
pub(super) struct Scratch<F> {
    known: Vec<bool>,
    log_ratio: Vec<F>,
    ratio: Vec<F>,
    truncated: Vec<bool>,
    counted: Vec<bool>,
}

impl<F: Real> Scratch<F> {
    pub fn new(size: usize) -> Self {
        Self {
            known: vec![false; size],
            log_ratio: vec![F::ZERO; size],
            ratio: vec![F::ONE; size],
            truncated: vec![false; size],
            counted: vec![false; size],
        }
    }
}

/// One block as the passes see it.
struct Block<'a, F> {
    known: &'a [bool],
    log_ratio: &'a [F],
    ratio: &'a [F],
    advantages: Option<&'a [F]>,
    levels: Levels<'a>,
}

/// Runs the plan on the terms of `range`. Levels above the token need `range` to be everything.
pub(super) fn run<F: Real>(
    terms: Terms<'_, F>,
    plan: &Plan,
    levels: Levels<'_>,
    range: Range<usize>,
    scratch: &mut Scratch<F>,
    out: &mut Corrected<F>,
) -> Result<()> {
    let size = range.len();
    let rollout = &terms.rollout[range.clone()];
    let known = &mut scratch.known[..size];
    for (known, &logprob) in known.iter_mut().zip(rollout) {
        *known = logprob.is_known();
    }
    check_values(terms, plan.missing, known, range.start)?;
    let (weight, keep) = (&mut out.weight[range.clone()], &mut out.keep[range.clone()]);
    if plan.missing == Missing::Mask {
        keep.copy_from_slice(known);
    }
    let before = ones(keep);
    out.stats.terms += size as f64;
    out.stats.known += ones(known);
    if let Some(old) = terms.old {
        let (log_ratio, ratio) = (&mut scratch.log_ratio[..size], &mut scratch.ratio[..size]);
        ratios(&old[range.clone()], rollout, known, log_ratio, ratio);
        let advantages = terms.advantages.map(|advantages| &advantages[range]);
        let block = Block { known, log_ratio, ratio, advantages, levels };
        for gate in &plan.gates {
            block.gate(gate, keep, &mut out.stats);
        }
        let truncated = &mut scratch.truncated[..size];
        truncated.fill(false);
        for (plan, sums) in plan.weights.iter().zip(&mut out.unit_sums) {
            block.weigh(plan, keep, weight, truncated, sums, &mut out.stats);
        }
        out.stats.truncated += ones(truncated);
        block.describe(weight, keep, &mut scratch.counted[..size], &mut out.stats);
    }
    if plan.missing == Missing::Mask {
        for (weight, &known) in weight.iter_mut().zip(known.iter()) {
            *weight = if known { *weight } else { F::ZERO };
        }
    }
    let after = ones(keep);
    out.stats.kept += after;
    out.stats.gated += before - after;
    Ok(())
}

/// The first value that is no logprob, told by its term.
fn check_values<F: Real>(terms: Terms<'_, F>, missing: Missing, known: &[bool], start: usize) -> Result<()> {
    let wrong = |logprob: F| logprob.wide() > POSITIVE_TOLERANCE || logprob.wide() <= SENTINEL;
    let block = start..start + known.len();
    let mut bad = false;
    for &logprob in &terms.rollout[block.clone()] {
        bad |= wrong(logprob);
    }
    if let Some(old) = terms.old {
        for &logprob in &old[block.clone()] {
            bad |= !logprob.wide().is_finite();
        }
    }
    bad |= missing == Missing::Refuse && known.iter().any(|&known| !known);
    if !bad {
        return Ok(());
    }
    let place = |term: usize| format!("term {term} (trace {})", terms.trace[term]);
    for term in block {
        let logprob = terms.rollout[term].wide();
        if wrong(terms.rollout[term]) {
            return Err(argument(format!("{}: the rollout logprob is {logprob}", place(term)))
                .why("No sampled token has it, so the ratio would be an invention")
                .cure("Pass NaN where a logprob is not known"));
        }
        if let Some(old) = terms.old.filter(|old| !old[term].wide().is_finite()) {
            return Err(argument(format!("{}: the old logprob is {}", place(term), old[term].wide()))
                .why("It comes from a forward of the trained model, so it is an overflow and not a gap in the records")
                .cure("Look at that forward, or leave the term out"));
        }
        if missing == Missing::Refuse && logprob.is_nan() {
            return Err(argument(format!("{}: the rollout logprob is missing", place(term)))
                .why("Its ratio is not known")
                .cure("Record it, or pass missing='mask' or missing='neutral'"));
        }
    }
    Ok(())
}

/// l = old - rollout and exp of it, clamped; 0 and 1 where rollout is not known.
fn ratios<F: Real>(old: &[F], rollout: &[F], known: &[bool], log_ratio: &mut [F], ratio: &mut [F]) {
    for (((l, &old), &rollout), &known) in log_ratio.iter_mut().zip(old).zip(rollout).zip(known) {
        *l = if known { old - rollout } else { F::ZERO };
    }
    for (r, &l) in ratio.iter_mut().zip(log_ratio.iter()) {
        *r = clamped(l).exp();
    }
}

impl<F: Real> Block<'_, F> {
    fn applies(&self, when: When, term: usize) -> bool {
        match self.advantages {
            Some(advantages) => when.holds(advantages[term].wide()),
            None => true,
        }
    }

    /// Aggregates a term's values over the level's segments, over known terms or over those of them still kept.
    fn aggregate(&self, segments: &Segments, values: &[F], level: Level, keep: &[bool]) -> Vec<f64> {
        segments.aggregate(values, |term| self.known[term] && (!level.kept || keep[term]), level.agg)
    }

    fn gate(&self, gate: &Gate, keep: &mut [bool], stats: &mut Stats) {
        let mut failed = self.failures(gate, keep, stats);
        if gate.when != When::Always {
            for (term, failed) in failed.iter_mut().enumerate() {
                *failed &= self.applies(gate.when, term);
            }
        }
        if let Some(segments) = self.levels.of(gate.scope).filter(|_| gate.scope != gate.level.over) {
            let mut fallen = vec![false; segments.len];
            for (&segment, &failed) in segments.of.iter().zip(&failed) {
                fallen[segment as usize] |= failed;
            }
            for (failed, &segment) in failed.iter_mut().zip(&segments.of) {
                *failed = fallen[segment as usize];
            }
        }
        for (keep, failed) in keep.iter_mut().zip(failed) {
            *keep &= !failed;
        }
    }

    /// Whether each term lies outside the bounds; an unknown term does so only with its turn or trace.
    fn failures(&self, gate: &Gate, keep: &[bool], stats: &mut Stats) -> Vec<bool> {
        let (low, high) = (F::of(gate.low), F::of(gate.high));
        let values: Vec<F> = match gate.stat {
            Stat::Ratio if gate.level.over == Over::Token => self.ratio.to_vec(),
            Stat::Ratio | Stat::K1 => self.log_ratio.to_vec(),
            Stat::K2 => self.log_ratio.iter().map(|&l| l * l * F::of(0.5)).collect(),
            Stat::K3 => self.log_ratio.iter().map(|&l| clamped(l).k3()).collect(),
        };
        let Some(segments) = self.levels.of(gate.level.over) else {
            let outside = values.iter().map(|&value| !(value >= low && value <= high));
            return outside.zip(self.known).map(|(outside, &known)| outside && known).collect();
        };
        let mut levels = self.aggregate(segments, &values, gate.level, keep);
        if gate.stat == Stat::Ratio {
            exponentiate(&mut levels, stats);
        }
        let outside: Vec<bool> = levels.iter().map(|&value| value < gate.low || value > gate.high).collect();
        segments.of.iter().map(|&segment| outside[segment as usize]).collect()
    }

    fn weigh(
        &self,
        plan: &Weight,
        keep: &[bool],
        weight: &mut [F],
        truncated: &mut [bool],
        sums: &mut (f64, f64),
        stats: &mut Stats,
    ) {
        let Some(segments) = self.levels.of(plan.level.over) else {
            let always = plan.when == When::Always;
            let terms = weight.iter_mut().zip(truncated).zip(self.ratio).zip(self.known).enumerate();
            for (term, (((weight, truncated), &raw), &known)) in terms {
                let shaped = plan.shape.of(raw);
                let here = known && (always || self.applies(plan.when, term));
                *weight = if here { *weight * shaped } else { *weight };
                *truncated |= here && shaped != raw;
            }
            let shaped = |ratio: F| plan.shape.of(ratio).wide();
            sums.0 += sum(self.ratio, self.known, shaped);
            sums.1 += ones(self.known);
            return;
        };
        let mut levels = self.aggregate(segments, self.log_ratio, plan.level, keep);
        exponentiate(&mut levels, stats);
        let shaped: Vec<f64> = levels.iter().map(|&raw| if raw.is_nan() { raw } else { plan.shape.of(raw) }).collect();
        for (term, &segment) in segments.of.iter().enumerate() {
            let (raw, shaped) = (levels[segment as usize], shaped[segment as usize]);
            if !raw.is_nan() && self.known[term] && self.applies(plan.when, term) {
                weight[term] = weight[term] * F::of(shaped);
                truncated[term] |= shaped != raw;
            }
        }
        for value in shaped.iter().filter(|value| !value.is_nan()) {
            sums.0 += value;
            sums.1 += 1.0;
        }
    }

    /// Adds this block to the statistics; `counted` is a buffer.
    fn describe(&self, weight: &[F], keep: &[bool], counted: &mut [bool], stats: &mut Stats) {
        let Self { known, log_ratio, ratio, .. } = *self;
        let limit = LOG_RATIO_LIMIT;
        stats.clamped += sum(log_ratio, known, |l| f64::from(u8::from(l.wide().abs() > limit)));
        stats.log_ratio += sum(log_ratio, known, Real::wide);
        stats.log_ratio_abs += sum(log_ratio, known, |l| l.wide().abs());
        stats.k3 += sum(log_ratio, known, |l| clamped(l).k3().wide());
        stats.ratio += sum(ratio, known, Real::wide);
        stats.ratio_squared += sum(ratio, known, |r| r.wide() * r.wide());
        stats.ratio_max = stats.ratio_max.max(largest(ratio, known, Real::wide));
        stats.minus_ratio_min = stats.minus_ratio_min.max(largest(ratio, known, |r| -r.wide()));
        stats.log_ratio_abs_max = stats.log_ratio_abs_max.max(largest(log_ratio, known, |l| l.wide().abs()));
        for ((counted, &known), &keep) in counted.iter_mut().zip(known).zip(keep) {
            *counted = known && keep;
        }
        stats.weighted += ones(counted);
        stats.weight += sum(weight, counted, Real::wide);
        stats.weight_squared += sum(weight, counted, |w| w.wide() * w.wide());
    }
}

impl Shape {
    fn of<F: Real>(self, ratio: F) -> F {
        match self {
            Self::Clamp(low, high) => ratio.at_least(F::of(low)).at_most(F::of(high)),
            Self::Window(low, high) if ratio < F::of(low) || ratio > F::of(high) => F::ZERO,
            Self::Identity | Self::Window(..) => ratio,
        }
    }
}

fn clamped<F: Real>(log_ratio: F) -> F {
    log_ratio.at_least(F::of(-LOG_RATIO_LIMIT)).at_most(F::of(LOG_RATIO_LIMIT))
}

/// Aggregated log-ratios become ratios; NaN, for a segment without a counted term, stays.
fn exponentiate(levels: &mut [f64], stats: &mut Stats) {
    for level in levels.iter_mut() {
        stats.clamped_levels += f64::from(u8::from(level.abs() > LOG_RATIO_LIMIT));
        *level = level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
    }
}

fn ones(flags: &[bool]) -> f64 {
    flags.iter().map(|&flag| usize::from(flag)).sum::<usize>() as f64
}

/// Sum over the counted terms in f64, in lanes and then in order.
fn sum<F: Real>(values: &[F], counted: &[bool], of: impl Fn(F) -> f64) -> f64 {
    fold(values, counted, 0.0, of, |total, value| total + value)
}

/// The largest over the counted terms, minus infinity without one.
fn largest<F: Real>(values: &[F], counted: &[bool], of: impl Fn(F) -> f64) -> f64 {
    fold(values, counted, f64::NEG_INFINITY, of, |most, value| if value > most { value } else { most })
}

fn fold<F: Real>(
    values: &[F],
    counted: &[bool],
    empty: f64,
    of: impl Fn(F) -> f64,
    join: impl Fn(f64, f64) -> f64,
) -> f64 {
    let mut lanes = [empty; LANES];
    let (values, tail) = values.as_chunks::<LANES>();
    let (flags, tail_flags) = counted.as_chunks::<LANES>();
    for (values, flags) in values.iter().zip(flags) {
        for lane in 0..LANES {
            lanes[lane] = join(lanes[lane], if flags[lane] { of(values[lane]) } else { empty });
        }
    }
    let tail = tail.iter().zip(tail_flags).map(|(&value, &flag)| if flag { of(value) } else { empty });
    tail.chain(lanes).fold(empty, join)
}
