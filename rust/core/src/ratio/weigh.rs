//! Weights: levels of log-ratios through a shape.

use super::block::Block;
use super::gate::{Found, beyond};
use super::lanes::{LANES, each, ones, sum};
use super::segments::Local;
use super::stat::exponentiate;
use super::{BLOCK, Blend, Over, Real, Shape, Weight, When};
use crate::error::Result;

impl<F: Real> Block<'_, F> {
    /// Multiplies the weights by the factor of `weight`, the plan's one of this index.
    #[inline(always)]
    pub fn weigh(&mut self, weight: &Weight, index: usize) -> Result<()> {
        self.take(weight.ratio);
        self.work.flags.fill(false);
        let unit = match self.local(weight.level.over) {
            None => {
                let work = &mut *self.work;
                weight.shape.apply(&work.log_ratio, &work.ratio, &mut work.factor, &mut work.flags);
                self.unit_of_tokens(weight)
            }
            Some(local) => self.weigh_level(weight, local)?,
        };
        self.sums.units[index].0 += unit.0;
        self.sums.units[index].1 += unit.1;
        self.multiply(weight.when);
        Ok(())
    }

    fn weigh_level(&mut self, weight: &Weight, local: Local<'_>) -> Result<(f64, f64)> {
        let work = &mut *self.work;
        work.values.copy_from_slice(&work.log_ratio);
        let found = self.aggregate(local, weight.level)?;
        if weight.level.over != Over::Batch {
            self.sums.stats.clamped_levels += beyond(&found);
        }
        self.work.flags.fill(false);
        match found {
            Found::Segments(levels) if weight.level.blend.is_none() => {
                Ok(self.weigh_segments(weight.shape, local, &levels))
            }
            Found::Segments(levels) => {
                for (run, segment) in local.runs() {
                    self.work.values[run].fill(F::of(levels[segment]));
                }
                Ok(self.weigh_terms(weight))
            }
            Found::Terms(levels) => {
                for (value, level) in self.work.values.iter_mut().zip(levels) {
                    *value = F::of(level);
                }
                Ok(self.weigh_terms(weight))
            }
        }
    }

    /// One factor for each segment, 1 where nothing of it is counted.
    fn weigh_segments(&mut self, shape: Shape, local: Local<'_>, levels: &[f64]) -> (f64, f64) {
        let mut ratio = vec![0.0; levels.len()];
        let (mut factor, mut bounded) = (ratio.clone(), vec![false; levels.len()]);
        exponentiate(levels, &mut ratio);
        shape.apply(levels, &ratio, &mut factor, &mut bounded);
        for (run, segment) in local.runs() {
            self.work.factor[run.clone()].fill(F::of(factor[segment]));
            self.work.flags[run].fill(bounded[segment]);
        }
        let counted = levels.iter().zip(&factor).filter(|(level, _)| !level.is_nan());
        counted.fold((0.0, 0.0), |(sum, count), (_, factor)| (sum + factor, count + 1.0))
    }

    /// A factor for each term from a level of its own, which stands in `work.values`.
    fn weigh_terms(&mut self, weight: &Weight) -> (f64, f64) {
        let (work, blend) = (&mut *self.work, weight.level.blend);
        for (level, &l) in work.values.iter_mut().zip(&work.log_ratio) {
            let mean = if blend == Some(Blend::Geometric) { (l + *level) * F::of(0.5) } else { *level };
            *level = if l.is_known() { mean } else { F::NAN };
        }
        let mut ratio = vec![F::ZERO; work.values.len()];
        exponentiate(&work.values, &mut ratio);
        if blend == Some(Blend::Arithmetic) {
            for ((level, ratio), &own) in work.values.iter_mut().zip(&mut ratio).zip(&work.ratio) {
                *ratio = (*ratio + own) * F::of(0.5);
                *level = if level.is_known() { ratio.ln() } else { F::NAN };
            }
        }
        weight.shape.apply(&work.values, &ratio, &mut work.factor, &mut work.flags);
        let counted = work.values.iter().zip(&work.factor).filter(|(level, _)| level.is_known());
        counted.fold((0.0, 0.0), |(sum, count), (_, factor)| (sum + factor.wide(), count + 1.0))
    }

    /// The sum and the number of token factors; only what normalises needs them.
    #[inline(always)]
    fn unit_of_tokens(&self, weight: &Weight) -> (f64, f64) {
        if !weight.normalize {
            return (0.0, 0.0);
        }
        let mut total = 0.0;
        for (logs, factors) in self.work.log_ratio.chunks(BLOCK).zip(self.work.factor.chunks(BLOCK)) {
            let mut lanes = [F::ZERO; LANES];
            each([logs, factors], [], |lane, [l, factor]| {
                lanes[lane] = lanes[lane] + if l.is_known() { factor } else { F::ZERO };
                []
            });
            total += sum(&lanes);
        }
        (total, ones(&self.work.known))
    }

    /// Multiplies by `work.factor` where the condition on the advantage holds.
    #[inline(always)]
    fn multiply(&mut self, when: When) {
        if when != When::Always {
            let holds = self.holds(when);
            for ((factor, flag), holds) in self.work.factor.iter_mut().zip(&mut self.work.flags).zip(holds) {
                *factor = if holds { *factor } else { F::ONE };
                *flag &= holds;
            }
        }
        let work = &mut *self.work;
        for (weight, &factor) in self.weight.iter_mut().zip(&work.factor) {
            *weight = *weight * factor;
        }
        for (bounded, &flag) in work.bounded.iter_mut().zip(&work.flags) {
            *bounded |= flag;
        }
    }
}
