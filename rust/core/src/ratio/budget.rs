//! The largest value up to which a set of terms may be kept, by a radix descent over the bits of the values.
//!
//! Source: M2PO, arXiv 2510.01161; AReaL sorts instead, and looks at all terms.

use super::block::Block;
use super::exchange::{Exchange, Op};
use super::plan::Budget;
use super::real::{Real, Vector};
use crate::error::Result;

/// Bits decided in one round.
const DIGIT: u32 = 11;

impl<F: Real> Block<'_, F> {
    /// Drops the terms with the largest statistic, so many that the mean of the others is within the budget.
    pub fn budget<V: Vector<Element = F>>(&mut self, plan: &Budget) -> Result<()> {
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
        let most = threshold(&work.values, plan.mean, self.context.exchange)?;
        for (keep, &value) in self.keep.iter_mut().zip(&work.values) {
            *keep &= !value.is_known() || value <= most;
        }
        Ok(())
    }
}

/// The largest value such that the mean of those up to it is at most `mean`; the smallest of all where there is none.
///
/// Values are not negative; NaN is passed over. The mean rises with the threshold, so each round finds the digit of the
/// threshold from the counts and sums of the values that agree with the digits before.
fn threshold<F: Real>(values: &[F], mean: f64, exchange: &dyn Exchange) -> Result<F> {
    let (mut path, mut left) = (0, F::BITS);
    let (mut sum, mut count) = (0.0, 0.0);
    loop {
        let digit = DIGIT.min(left);
        let shift = left - digit;
        let mut buckets = histogram(values, path, left, shift);
        exchange.all_reduce(&mut buckets, Op::Sum)?;
        let mut filled = buckets.as_chunks::<2>().0.iter().enumerate().filter(|(_, [_, here])| *here > 0.0);
        let over = filled.find(|(_, [more, here])| {
            let fits = sum + more <= mean * (count + here);
            if fits {
                sum += more;
                count += here;
            }
            !fits
        });
        let Some((bucket, _)) = over else {
            return Ok(F::from_order(path | ((1 << left) - 1)).or(F::of(f64::INFINITY)));
        };
        let bucket = path | ((bucket as u64) << shift);
        if shift == 0 {
            // The bucket is one value, the first that does not fit.
            let none = count == 0.0;
            return Ok(if none { F::from_order(bucket) } else { F::from_order(bucket - 1) });
        }
        (path, left) = (bucket, shift);
    }
}

/// Sum and count of the values whose bits above `left` are those of `path`, by their bits from `shift` on.
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
    use super::super::Alone;
    use super::*;

    fn kept(values: &[f64], mean: f64) -> Vec<f64> {
        let most = threshold(values, mean, &Alone).unwrap();
        values.iter().copied().filter(|&value| value <= most).collect()
    }

    #[test]
    fn the_largest_fall_until_the_mean_fits_but_one() {
        // means of the smallest one, two, three, four: 0.1, 0.15, 0.2, 0.65
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 0.2), [0.1, 0.3, 0.2]);
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 0.17), [0.1, 0.2]);
        assert_eq!(kept(&[2.0, 0.1, 0.3, 0.2], 5.0), [2.0, 0.1, 0.3, 0.2]);
        // One stays, and ties stay or fall together.
        assert_eq!(kept(&[2.0, 1.0], 0.1), [1.0]);
        assert_eq!(kept(&[0.0, 1.0, 1.0], 0.5), [0.0]);
        assert_eq!(kept(&[1.0, 1.0, 3.0], 0.1), [1.0, 1.0]);
        assert_eq!(kept(&[f64::NAN], 0.1).len(), 0);
        assert_eq!(kept(&[], 0.1).len(), 0);
    }
}
