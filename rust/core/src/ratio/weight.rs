//! Importance weights: log-ratios aggregated at a level, then shaped (truncated, masked outside a window, ...).

use super::block::Block;
use super::estimators::clamped;
use super::float::{Real, Vector};
use super::loops::{exponentiate, map2, ones, wide_sum};
use super::plan::{Blend, Over, Shape, Weight, When};
use super::rejection::{Found, beyond};
use super::segments::Local;
use crate::error::Result;

impl<F: Real> Block<'_, F> {
    /// Writes the weights of a plan with a single token-level weight, and `unknown` for unknown terms.
    #[inline(always)]
    pub fn weigh_tokens<V: Vector<Element = F>>(&mut self, weight: &Weight, unknown: F) {
        self.take::<V>(weight.ratio);
        let work = &mut *self.work;
        let last = |l: F, weight: F| if l.is_known() { weight } else { unknown };
        weight.shape.apply([&work.log_ratio, &work.ratio], last, self.weight, &mut work.bounded);
    }

    /// Multiplies the weights by the factor of `weight`, which has this index in the plan.
    #[inline(always)]
    pub fn weigh<V: Vector<Element = F>>(&mut self, weight: &Weight, index: usize) -> Result<()> {
        self.take::<V>(weight.ratio);
        self.work.flags.fill(false);
        let unit = match self.local(weight.level.over) {
            None => {
                let work = &mut *self.work;
                weight.shape.apply([&work.log_ratio, &work.ratio], |_, w| w, &mut work.factor, &mut work.flags);
                self.unit_of_tokens(weight)
            }
            Some(local) => self.weigh_level::<V>(weight, local)?,
        };
        self.sums.units[index].0 += unit.0;
        self.sums.units[index].1 += unit.1;
        self.multiply(weight.when, index == 0);
        Ok(())
    }

    fn weigh_level<V: Vector<Element = F>>(&mut self, weight: &Weight, local: Local<'_>) -> Result<(f64, f64)> {
        let levels = self.aggregate(local, weight.level, true)?;
        if weight.level.over != Over::Batch {
            self.sums.stats.clamped_levels += beyond(&levels);
        }
        self.work.flags.fill(false);
        match levels {
            Found::Segments(levels) if weight.level.blend.is_none() => {
                Ok(self.weigh_segments(weight.shape, local, &levels))
            }
            Found::Segments(levels) => {
                for (run, segment) in local.runs() {
                    self.work.values[run].fill(F::of(levels[segment]));
                }
                Ok(self.weigh_terms::<V>(weight))
            }
            Found::Terms(levels) => {
                for (value, level) in self.work.values.iter_mut().zip(levels) {
                    *value = F::of(level);
                }
                Ok(self.weigh_terms::<V>(weight))
            }
        }
    }

    /// Computes one factor for each segment; 1 if nothing in it is counted.
    fn weigh_segments(&mut self, shape: Shape, local: Local<'_>, levels: &[f64]) -> (f64, f64) {
        let ratio: Vec<f64> = levels.iter().map(|&level| clamped(level.or(0.0)).exp()).collect();
        let (mut factor, mut bounded) = (ratio.clone(), vec![false; levels.len()]);
        shape.apply([levels, &ratio], |_, w| w, &mut factor, &mut bounded);
        for (run, segment) in local.runs() {
            self.work.factor[run.clone()].fill(F::of(factor[segment]));
            self.work.flags[run].fill(bounded[segment]);
        }
        let counted = levels.iter().zip(&factor).filter(|(level, _)| !level.is_nan());
        counted.fold((0.0, 0.0), |(sum, count), (_, factor)| (sum + factor, count + 1.0))
    }

    /// Computes a factor for each term from its own level in `work.values`.
    fn weigh_terms<V: Vector<Element = F>>(&mut self, weight: &Weight) -> (f64, f64) {
        let (work, blend) = (&mut *self.work, weight.level.blend);
        for (level, &l) in work.values.iter_mut().zip(&work.log_ratio) {
            let mean = if blend == Some(Blend::Geometric) { (l + *level) * F::of(0.5) } else { *level };
            *level = if l.is_known() { mean } else { F::NAN };
        }
        let mut ratio = vec![F::ZERO; work.values.len()];
        exponentiate::<V>(&work.values, &mut ratio);
        if blend == Some(Blend::Arithmetic) {
            for ((level, ratio), &own) in work.values.iter_mut().zip(&mut ratio).zip(&work.ratio) {
                *ratio = (*ratio + own) * F::of(0.5);
                *level = if level.is_known() { ratio.ln() } else { F::NAN };
            }
        }
        weight.shape.apply([&work.values, &ratio], |_, w| w, &mut work.factor, &mut work.flags);
        let counted = work.values.iter().zip(&work.factor).filter(|(level, _)| level.is_known());
        counted.fold((0.0, 0.0), |(sum, count), (_, factor)| (sum + factor.wide(), count + 1.0))
    }

    /// Returns the sum and the number of token factors, which only normalization needs.
    #[inline(always)]
    fn unit_of_tokens(&mut self, weight: &Weight) -> (f64, f64) {
        if !weight.normalize {
            return (0.0, 0.0);
        }
        let work = &mut *self.work;
        map2(&mut work.values, &work.factor, &work.log_ratio, |factor, l| if l.is_known() { factor } else { F::ZERO });
        (wide_sum(&work.values), ones(&work.known))
    }

    /// Multiplies by `work.factor` if the condition on the advantage holds. The first factor becomes the product.
    #[inline(always)]
    fn multiply(&mut self, when: When, first: bool) {
        if when != When::Always {
            let holds = self.holds(when);
            for ((factor, flag), holds) in self.work.factor.iter_mut().zip(&mut self.work.flags).zip(holds) {
                *factor = if holds { *factor } else { F::ONE };
                *flag &= holds;
            }
        }
        let work = &mut *self.work;
        if first {
            std::mem::swap(&mut work.weight, &mut work.factor);
            std::mem::swap(&mut work.bounded, &mut work.flags);
            return;
        }
        for (weight, &factor) in work.weight.iter_mut().zip(&work.factor) {
            *weight = *weight * factor;
        }
        for (bounded, &flag) in work.bounded.iter_mut().zip(&work.flags) {
            *bounded |= flag;
        }
    }
}
