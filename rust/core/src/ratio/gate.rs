//! Gates, which drop terms by bounds on a statistic, and the levels that gates and weights share.

use super::block::{Block, Work};
use super::exchange::Op;
use super::level::{Totals, prefix};
use super::limits::LOG_RATIO_LIMIT;
use super::plan::{Agg, Gate, Level, Over, Stat, When};
use super::real::{Real, Vector};
use super::segments::Local;
use super::stat::clamped;
use crate::error::Result;

/// What a level is of each segment, or of each term; NaN where nothing is counted.
pub(super) enum Found {
    Segments(Vec<f64>),
    Terms(Vec<f64>),
}

/// How many log-ratios are clamped before they are exponentiated.
pub(super) fn beyond(found: &Found) -> f64 {
    let (Found::Segments(levels) | Found::Terms(levels)) = found;
    levels.iter().filter(|level| level.abs() > LOG_RATIO_LIMIT).count() as f64
}

impl<F: Real> Block<'_, F> {
    /// Aggregates `work.values`, or the log-ratio where they are it; `work.factor` and the flags are overwritten.
    #[inline(always)]
    pub fn aggregate(&mut self, local: Local<'_>, level: Level, of_log_ratio: bool) -> Result<Found> {
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
            let op = if level.agg == Agg::Max { Op::Max } else { Op::Sum };
            self.context.exchange.all_reduce(&mut totals.value, op)?;
            self.context.exchange.all_reduce(&mut totals.count, Op::Sum)?;
        }
        Ok(Found::Segments(totals.finish(level.agg)))
    }

    /// Drops the terms that the gate fails.
    #[inline(always)]
    pub fn gate<V: Vector<Element = F>>(&mut self, gate: &Gate) -> Result<()> {
        self.take::<V>(gate.ratio);
        let [num, den] = self.logprobs(gate.ratio);
        let work = &mut *self.work;
        let of_log_ratio = matches!(gate.stat, Stat::Ratio | Stat::K1);
        if !of_log_ratio || gate.level.over == Over::Token {
            gate.stat.of(&work.log_ratio, num, den, &mut work.values);
        }
        match self.local(gate.level.over) {
            None => self.fail_tokens(gate),
            Some(local) => {
                let found = self.aggregate(local, gate.level, of_log_ratio)?;
                self.fail_levels(gate, local, found);
            }
        }
        if gate.when != When::Always {
            let holds = self.holds(gate.when);
            for (failed, holds) in self.work.flags.iter_mut().zip(holds) {
                *failed &= holds;
            }
        }
        if let Some(local) = self.local(gate.scope).filter(|_| gate.scope != gate.level.over) {
            self.widen(local);
        }
        for (keep, &failed) in self.keep.iter_mut().zip(&self.work.flags) {
            *keep &= !failed;
        }
        Ok(())
    }

    /// Flags the terms outside the bounds; NaN, which is not known, never is.
    #[inline(always)]
    fn fail_tokens(&mut self, gate: &Gate) {
        let (low, high) = (F::of(gate.low), F::of(gate.high));
        let work = &mut *self.work;
        if gate.stat == Stat::Ratio {
            for (value, &ratio) in work.values.iter_mut().zip(&work.ratio) {
                *value = if value.is_known() { ratio } else { F::NAN };
            }
        }
        for (failed, &value) in work.flags.iter_mut().zip(&work.values) {
            *failed = (value < low) | (value > high);
        }
    }

    /// Flags the terms whose turn, trace, group, batch or past lies outside; an unknown one falls with it.
    fn fail_levels(&mut self, gate: &Gate, local: Local<'_>, found: Found) {
        let is_log = gate.stat == Stat::Ratio;
        if is_log && gate.level.over != Over::Batch {
            self.sums.stats.clamped_levels += beyond(&found);
        }
        let fails = |level: f64| {
            let bounded = if is_log { clamped(level).exp() } else { level };
            !level.is_nan() && (bounded < gate.low || bounded > gate.high)
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

    /// A flag on one term becomes a flag on all of its segment.
    fn widen(&mut self, local: Local<'_>) {
        let flags = &mut self.work.flags;
        let mut fallen = vec![false; local.len];
        for (run, segment) in local.runs() {
            fallen[segment] |= flags[run].contains(&true);
        }
        for (run, segment) in local.runs() {
            flags[run].fill(fallen[segment]);
        }
    }
}
