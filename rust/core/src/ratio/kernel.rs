//! The passes over one block of terms: ratios, gates, weights, statistics. Plain loops without calls or branches on data.

use std::ops::Range;

use super::{
    Corrected, Gate, LOG_RATIO_LIMIT, Level, Missing, Over, POSITIVE_TOLERANCE, Plan, Real, SENTINEL, Segments, Shape,
    Stat, Stats, Terms, Weight, When, argument,
};
use crate::error::Result;

/// Independent partial sums, so that a sum is vector code with one fixed order.
const LANES: usize = 16;

/// Terms summed in the type itself before the sum goes on in f64.
const SHORT: usize = 256;

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
    shaped: Vec<F>,
    truncated: Vec<bool>,
}

impl<F: Real> Scratch<F> {
    pub fn new(size: usize) -> Self {
        Self {
            known: vec![false; size],
            log_ratio: vec![F::ZERO; size],
            ratio: vec![F::ONE; size],
            shaped: vec![F::ZERO; size],
            truncated: vec![false; size],
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
        let (truncated, shaped) = (&mut scratch.truncated[..size], &mut scratch.shaped[..size]);
        truncated.fill(false);
        for (plan, sums) in plan.weights.iter().zip(&mut out.unit_sums) {
            if let Some(segments) = levels.of(plan.level.over) {
                block.weigh_segments(plan, segments, keep, weight, truncated, sums, &mut out.stats);
            } else {
                block.weigh_tokens(plan, weight, truncated, shaped, sums);
            }
        }
        out.stats.truncated += ones(truncated);
        block.describe(weight, keep, shaped, &mut out.stats);
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
    let (top, sentinel) = (F::of(POSITIVE_TOLERANCE), F::of(SENTINEL));
    let wrong = |logprob: F| logprob > top || logprob <= sentinel;
    let block = start..start + known.len();
    let mut bad = false;
    for &logprob in &terms.rollout[block.clone()] {
        bad |= wrong(logprob);
    }
    if let Some(old) = terms.old {
        for &logprob in &old[block.clone()] {
            bad |= !logprob.is_finite();
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
        if let Some(old) = terms.old.filter(|old| !old[term].is_finite()) {
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
        let terms = self.log_ratio.iter().zip(self.ratio);
        let values: Vec<F> = match gate.stat {
            Stat::Ratio if gate.level.over == Over::Token => self.ratio.to_vec(),
            Stat::Ratio | Stat::K1 => self.log_ratio.to_vec(),
            Stat::K2 => self.log_ratio.iter().map(|&l| l * l * F::of(0.5)).collect(),
            Stat::K3 => terms.map(|(&l, &r)| clamped(l).k3(r)).collect(),
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

    fn weigh_tokens(
        &self,
        plan: &Weight,
        weight: &mut [F],
        truncated: &mut [bool],
        shaped: &mut [F],
        sums: &mut (f64, f64),
    ) {
        plan.shape.apply(self.ratio, shaped);
        for (shaped, &known) in shaped.iter_mut().zip(self.known) {
            *shaped = if known { *shaped } else { F::ONE };
        }
        sums.0 += sum(shaped) - (shaped.len() as f64 - ones(self.known));
        sums.1 += ones(self.known);
        let terms = weight.iter_mut().zip(truncated).zip(self.ratio).zip(shaped.iter());
        if plan.when == When::Always {
            for (((weight, truncated), &raw), &shaped) in terms {
                *weight = *weight * shaped;
                *truncated |= shaped != raw;
            }
        } else {
            for (term, (((weight, truncated), &raw), &shaped)) in terms.enumerate() {
                let here = self.applies(plan.when, term);
                *weight = if here { *weight * shaped } else { *weight };
                *truncated |= here && shaped != raw;
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn weigh_segments(
        &self,
        plan: &Weight,
        segments: &Segments,
        keep: &[bool],
        weight: &mut [F],
        truncated: &mut [bool],
        sums: &mut (f64, f64),
        stats: &mut Stats,
    ) {
        let mut levels = self.aggregate(segments, self.log_ratio, plan.level, keep);
        exponentiate(&mut levels, stats);
        let mut shaped = vec![0.0; levels.len()];
        plan.shape.apply(&levels, &mut shaped);
        for (term, &segment) in segments.of.iter().enumerate() {
            let (raw, shaped) = (levels[segment as usize], shaped[segment as usize]);
            if !raw.is_nan() && self.known[term] && self.applies(plan.when, term) {
                weight[term] = weight[term] * F::of(shaped);
                truncated[term] |= shaped != raw;
            }
        }
        for (_, &value) in levels.iter().zip(&shaped).filter(|(raw, _)| !raw.is_nan()) {
            sums.0 += value;
            sums.1 += 1.0;
        }
    }

    /// Adds this block to the statistics. Unknown terms have log-ratio 0 and ratio 1; `buffer` is overwritten.
    fn describe(&self, weight: &[F], keep: &[bool], buffer: &mut [F], stats: &mut Stats) {
        let Self { known, log_ratio, ratio, .. } = *self;
        let unknown = known.len() as f64 - ones(known);
        stats.log_ratio += sum(log_ratio);
        stats.ratio += sum(ratio) - unknown;
        stats.ratio_squared += sum_of(ratio, buffer, |r| r * r) - unknown;
        let widest = sum_of(log_ratio, buffer, F::abs);
        stats.log_ratio_abs += widest;
        let (most, limit) = (largest(buffer), F::of(LOG_RATIO_LIMIT));
        if stats.known > 0.0 {
            stats.log_ratio_abs_max = stats.log_ratio_abs_max.max(most);
        }
        if most > LOG_RATIO_LIMIT {
            stats.clamped += buffer.iter().filter(|&&l| l > limit).count() as f64;
        }
        for ((out, &l), &r) in buffer.iter_mut().zip(log_ratio).zip(ratio) {
            *out = clamped(l).k3(r);
        }
        stats.k3 += sum(buffer);
        let lowest = F::of(f64::NEG_INFINITY);
        for ((out, &r), &known) in buffer.iter_mut().zip(ratio).zip(known) {
            *out = if known { r } else { lowest };
        }
        stats.ratio_max = stats.ratio_max.max(largest(buffer));
        for ((out, &r), &known) in buffer.iter_mut().zip(ratio).zip(known) {
            *out = if known { F::ZERO - r } else { lowest };
        }
        stats.minus_ratio_min = stats.minus_ratio_min.max(largest(buffer));
        for (((out, &w), &known), &keep) in buffer.iter_mut().zip(weight).zip(known).zip(keep) {
            *out = if known & keep { w } else { F::ZERO };
        }
        stats.weighted += both(known, keep);
        stats.weight += sum(buffer);
        for w in buffer.iter_mut() {
            *w = *w * *w;
        }
        stats.weight_squared += sum(buffer);
    }
}

impl Shape {
    /// Every ratio's weight; the choice stands outside the loops.
    fn apply<F: Real>(self, ratios: &[F], out: &mut [F]) {
        match self {
            Self::Identity => out.copy_from_slice(ratios),
            Self::Clamp(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                for (out, &ratio) in out.iter_mut().zip(ratios) {
                    *out = ratio.at_least(low).at_most(high);
                }
            }
            Self::Window(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                for (out, &ratio) in out.iter_mut().zip(ratios) {
                    *out = if ratio >= low && ratio <= high { ratio } else { F::ZERO };
                }
            }
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

/// How many are true; counted in bytes, which a vector holds most of.
fn ones(flags: &[bool]) -> f64 {
    let count = |flags: &[bool]| usize::from(flags.iter().map(|&flag| u8::from(flag)).sum::<u8>());
    flags.chunks(128).map(count).sum::<usize>() as f64
}

/// How many are true in both.
fn both(first: &[bool], second: &[bool]) -> f64 {
    let pairs = first.chunks(128).zip(second.chunks(128));
    let count = |(a, b): (&[bool], &[bool])| usize::from(a.iter().zip(b).map(|(a, b)| u8::from(a & b)).sum::<u8>());
    pairs.map(count).sum::<usize>() as f64
}

/// Sum in f64 of block sums in lanes of the type itself; the order is fixed.
fn sum<F: Real>(values: &[F]) -> f64 {
    let (chunks, tail) = values.as_chunks::<SHORT>();
    let blocks: f64 = chunks
        .iter()
        .map(|chunk| {
            let mut lanes = [F::ZERO; LANES];
            for part in chunk.as_chunks::<LANES>().0 {
                for (lane, &value) in lanes.iter_mut().zip(part) {
                    *lane = *lane + value;
                }
            }
            lanes.iter().map(|lane| lane.wide()).sum::<f64>()
        })
        .sum();
    tail.iter().fold(blocks, |total, &value| total + value.wide())
}

/// [`sum`] of a function of the values, which are left in `buffer`.
fn sum_of<F: Real>(values: &[F], buffer: &mut [F], of: impl Fn(F) -> F) -> f64 {
    for (out, &value) in buffer.iter_mut().zip(values) {
        *out = of(value);
    }
    sum(buffer)
}

/// The largest value, minus infinity without one.
fn largest<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [F::of(f64::NEG_INFINITY); LANES];
    let (chunks, tail) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = value.at_least(*lane);
        }
    }
    tail.iter().chain(&lanes).fold(f64::NEG_INFINITY, |most, value| most.max(value.wide()))
}
