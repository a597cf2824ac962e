//! Gates, which reject terms by bounds on a statistic or by a budget, and the levels that rejections and weights share.
//!
//! The budget (M2PO, arXiv 2510.01161) keeps terms up to the largest allowed value, which a radix descent over the
//! bits of the values finds. AReaL sorts instead, and considers all terms.

use super::all_reduce::{Exchange, Op};
use super::block::{Block, Work};
use super::estimators::clamped;
use super::float::{Real, Vector};
use super::plan::{Aggregation, LOG_RATIO_LIMIT, Over, Reduce, Rejection, RejectionBudget, Stat, When};
use super::segments::{Local, Totals, prefix};
use crate::error::Result;

/// The level of each segment, or of each term; NaN if nothing is counted.
pub(super) enum Found {
    Segments(Vec<f64>),
    Terms(Vec<f64>),
}

/// Counts the log-ratios that are clamped before they are exponentiated.
pub(super) fn beyond(found: &Found) -> f64 {
    let (Found::Segments(levels) | Found::Terms(levels)) = found;
    levels.iter().filter(|level| level.abs() > LOG_RATIO_LIMIT).count() as f64
}

impl<F: Real> Block<'_, F> {
    /// Aggregates `work.values`, or the log-ratio if `of_log_ratio`. Overwrites `work.factor` and the flags.
    #[inline(always)]
    pub fn aggregate(&mut self, local: Local<'_>, level: Aggregation, of_log_ratio: bool) -> Result<Found> {
        let Work { log_ratio, values, factor, known, flags, .. } = &mut *self.work;
        let (mut values, mut counted) = (if of_log_ratio { log_ratio } else { values }, known);
        if level.kept {
            for ((factor, &value), &keep) in factor.iter_mut().zip(&*values).zip(&*self.keep) {
                *factor = if keep { value } else { F::NAN };
            }
            for ((flag, &known), &keep) in flags.iter_mut().zip(&*counted).zip(&*self.keep) {
                *flag = known & keep;
            }
            (values, counted) = (factor, flags);
        }
        if level.agg.is_prefix() {
            return Ok(Found::Terms(prefix(local, values, level.agg)));
        }
        let mut totals = Totals::of(local, values, counted, level.agg);
        if level.over == Over::Batch {
            let op = if level.agg == Reduce::Max { Op::Max } else { Op::Sum };
            self.context.exchange.all_reduce(&mut totals.value, op)?;
            self.context.exchange.all_reduce(&mut totals.count, Op::Sum)?;
        }
        Ok(Found::Segments(totals.finish(level.agg)))
    }

    /// Rejects the terms that fail the rejection.
    #[inline(always)]
    pub fn rejection<V: Vector<Element = F>>(&mut self, rejection: &Rejection) -> Result<()> {
        self.take::<V>(rejection.ratio);
        let [num, den] = self.logprobs(rejection.ratio);
        let work = &mut *self.work;
        let of_log_ratio = matches!(rejection.stat, Stat::Ratio | Stat::K1);
        if !of_log_ratio || rejection.level.over == Over::Token {
            rejection.stat.of(&work.log_ratio, num, den, &mut work.values);
        }
        match self.local(rejection.level.over) {
            None => self.fail_tokens(rejection),
            Some(local) => {
                let levels = self.aggregate(local, rejection.level, of_log_ratio)?;
                self.fail_levels(rejection, local, levels);
            }
        }
        if rejection.when != When::Always {
            let holds = self.holds(rejection.when);
            for (failed, holds) in self.work.flags.iter_mut().zip(holds) {
                *failed &= holds;
            }
        }
        if let Some(local) = self.local(rejection.scope).filter(|_| rejection.scope != rejection.level.over) {
            self.widen(local);
        }
        for (keep, &failed) in self.keep.iter_mut().zip(&self.work.flags) {
            *keep &= !failed;
        }
        Ok(())
    }

    /// Flags the terms outside the bounds. NaN (unknown) is never flagged.
    #[inline(always)]
    fn fail_tokens(&mut self, rejection: &Rejection) {
        let (low, high) = (F::of(rejection.low), F::of(rejection.high));
        let work = &mut *self.work;
        if rejection.stat == Stat::Ratio {
            for (value, &ratio) in work.values.iter_mut().zip(&work.ratio) {
                *value = if value.is_known() { ratio } else { F::NAN };
            }
        }
        for (failed, &value) in work.flags.iter_mut().zip(&work.values) {
            *failed = (value < low) | (value > high);
        }
    }

    /// Flags the terms whose turn, trace, group, batch or prefix is outside the bounds. Unknown terms are flagged with
    /// it.
    fn fail_levels(&mut self, rejection: &Rejection, local: Local<'_>, found: Found) {
        let is_log = rejection.stat == Stat::Ratio;
        if is_log && rejection.level.over != Over::Batch {
            self.sums.stats.clamped_levels += beyond(&found);
        }
        let fails = |level: f64| {
            let bounded = if is_log { clamped(level).exp() } else { level };
            !level.is_nan() && (bounded < rejection.low || bounded > rejection.high)
        };
        match found {
            Found::Segments(levels) => {
                let failed: Vec<bool> = levels.into_iter().map(fails).collect();
                for (run, segment) in local.runs() {
                    self.work.flags[run].fill(failed[segment]);
                }
            }
            Found::Terms(levels) => {
                for (flag, level) in self.work.flags.iter_mut().zip(levels) {
                    *flag = fails(level);
                }
            }
        }
    }

    /// Extends a flag on one term to all terms of its segment.
    fn widen(&mut self, local: Local<'_>) {
        let flags = &mut self.work.flags;
        let mut segment_failed = vec![false; local.len];
        for (run, segment) in local.runs() {
            segment_failed[segment] |= flags[run].contains(&true);
        }
        for (run, segment) in local.runs() {
            flags[run].fill(segment_failed[segment]);
        }
    }
}

/// Number of bits decided in one round.
const DIGIT: u32 = 11;

impl<F: Real> Block<'_, F> {
    /// Rejects the terms with the largest statistic until the mean of the remaining ones is within the budget.
    pub fn budget<V: Vector<Element = F>>(&mut self, plan: &RejectionBudget) -> Result<()> {
        self.take::<V>(plan.ratio);
        let [num, den] = self.logprobs(plan.ratio);
        let advantages = self.advantages();
        let work = &mut *self.work;
        plan.stat.of(&work.log_ratio, num, den, &mut work.values);
        if plan.kept {
            for (value, &keep) in work.values.iter_mut().zip(&*self.keep) {
                *value = if keep { *value } else { F::NAN };
            }
        }
        if plan.active {
            for ((value, &l), &a) in work.values.iter_mut().zip(&work.log_ratio).zip(advantages) {
                let is_active = (a > F::ZERO && l > F::ZERO) || (a < F::ZERO && l < F::ZERO);
                *value = if is_active { *value } else { F::NAN };
            }
        }
        let limit = threshold(&work.values, plan.mean, self.context.exchange)?;
        for (keep, &value) in self.keep.iter_mut().zip(&work.values) {
            *keep &= !value.is_known() || value <= limit;
        }
        Ok(())
    }
}

/// Returns the largest threshold such that the mean of the values up to it is at most `mean`, or the smallest value if
/// there is none.
///
/// Values are not negative; NaN is skipped. The mean rises with the threshold. Each round therefore finds one digit of
/// the threshold from the counts and sums of the values that agree with the previous digits.
fn threshold<F: Real>(values: &[F], mean: f64, exchange: &dyn Exchange) -> Result<F> {
    let (mut path, mut left) = (0, F::BITS);
    let (mut sum, mut count) = (0.0, 0.0);
    loop {
        let digit = DIGIT.min(left);
        let shift = left - digit;
        let mut buckets = histogram(values, path, left, shift);
        exchange.all_reduce(&mut buckets, Op::Sum)?;
        let mut filled =
            buckets.as_chunks::<2>().0.iter().enumerate().filter(|(_, [_, bucket_count])| *bucket_count > 0.0);
        let over = filled.find(|(_, [bucket_sum, bucket_count])| {
            let fits = sum + bucket_sum <= mean * (count + bucket_count);
            if fits {
                sum += bucket_sum;
                count += bucket_count;
            }
            !fits
        });
        let Some((bucket, _)) = over else {
            return Ok(F::from_order(path | ((1 << left) - 1)).or(F::of(f64::INFINITY)));
        };
        let bucket = path | ((bucket as u64) << shift);
        if shift == 0 {
            // The bucket is a single value, the first that does not fit.
            let is_first = count == 0.0;
            return Ok(if is_first { F::from_order(bucket) } else { F::from_order(bucket - 1) });
        }
        (path, left) = (bucket, shift);
    }
}

/// Returns sum and count of the values whose bits above `left` equal those of `path`, by their bits from `shift` on.
fn histogram<F: Real>(values: &[F], path: u64, left: u32, shift: u32) -> Vec<f64> {
    let mut buckets = vec![0.0; 2 << (left - shift)];
    for value in values.iter().filter(|value| value.is_known()) {
        let value = value.at_least(F::ZERO);
        let bits = value.order();
        if bits >> left == path >> left {
            let bucket = ((bits >> shift) as usize & ((1 << (left - shift)) - 1)) * 2;
            buckets[bucket] += value.wide();
            buckets[bucket + 1] += 1.0;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::super::SingleRank;
    use super::*;

    fn kept(values: &[f64], mean: f64) -> Vec<f64> {
        let limit = threshold(values, mean, &SingleRank).unwrap();
        values.iter().copied().filter(|&value| value <= limit).collect()
    }

    #[test]
    fn the_largest_are_rejected_until_the_mean_fits_but_one_stays() {
        // means of the smallest one, two, three and four values: 0.1, 0.15, 0.2, 0.65
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 0.2), [0.1, 0.3, 0.2]);
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 0.17), [0.1, 0.2]);
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 5.0), [2.0, 0.1, 0.3, 0.2]);
        // One stays, and equal values stay or are rejected together.
        assert_eq!(kept(&[2.0, 1.0], 0.1), [1.0]);
        assert_eq!(kept(&[0.0, 1.0, 1.0], 0.5), [0.0]);
        assert_eq!(kept(&[1.0, 1.0, 3.0], 0.1), [1.0, 1.0]);
        assert_eq!(kept(&[f64::NAN], 0.1).len(), 0);
        assert_eq!(kept(&[], 0.1).len(), 0);
    }
}
