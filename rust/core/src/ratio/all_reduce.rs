//! Sums over ranks: what ranks exchange, and the statistics of a step, as sums that blocks and ranks merge exactly.

use crate::error::Result;

/// How the ranks' numbers become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Added.
    Sum,
    /// The largest.
    Max,
}

/// Where ranks meet. Each rank makes the same calls in the same order, which the plan alone decides.
pub trait Exchange {
    /// Replaces each value by its sum or maximum over all ranks.
    ///
    /// # Errors
    /// Whatever keeps the ranks from meeting.
    fn all_reduce(&self, values: &mut [f64], op: Op) -> Result<()>;

    /// Whether there is one rank only.
    fn is_alone(&self) -> bool {
        false
    }
}

/// One rank.
#[derive(Debug, Clone, Copy)]
pub struct Alone;

impl Exchange for Alone {
    fn all_reduce(&self, _: &mut [f64], _: Op) -> Result<()> {
        Ok(())
    }

    fn is_alone(&self) -> bool {
        true
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $sum:ident,)*) => {
        /// Counts of terms. What the ratios themselves are like is not told here.
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct Stats {
            $($(#[$doc])* pub $sum: f64,)*
        }

        impl Stats {
            /// Names and values.
            pub fn named(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($sum), self.$sum),)*]
            }

            /// Adds the statistics of other terms.
            pub(super) fn merge(&mut self, other: &Self) {
                $(self.$sum += other.$sum;)*
            }

            /// The same over all ranks.
            pub(super) fn exchange(&mut self, exchange: &dyn Exchange) -> Result<()> {
                let mut sums = [$(self.$sum,)*];
                exchange.all_reduce(&mut sums, Op::Sum)?;
                [$(self.$sum,)*] = sums;
                Ok(())
            }
        }
    };
}

stats! {
    /// Terms.
    terms,
    /// Terms whose rollout logprob is known.
    known,
    /// Terms with keep 1.
    kept,
    /// Terms that a gate dropped.
    gated,
    /// Terms whose log-ratio old/rollout was clamped at [`super::plan::LOG_RATIO_LIMIT`].
    clamped,
    /// Aggregated log-ratios that were clamped, over all gates and weights.
    clamped_levels,
    /// Known terms where a bound changed a ratio on its way to a weight.
    truncated,
}
