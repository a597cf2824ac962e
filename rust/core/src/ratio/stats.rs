//! What a correction did to the terms of a step, as sums, so that blocks and ranks merge exactly.

use super::exchange::{Exchange, Op};
use crate::error::Result;

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
    /// Terms whose log-ratio old/rollout was clamped at [`super::limits::LOG_RATIO_LIMIT`].
    clamped,
    /// Aggregated log-ratios that were clamped, over all gates and weights.
    clamped_levels,
    /// Known terms where a bound changed a ratio on its way to a weight.
    truncated,
}
