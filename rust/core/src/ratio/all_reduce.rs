//! Sums over ranks: the exchange between ranks, and the statistics of a step as sums that blocks and ranks merge
//! exactly.

use crate::error::Result;

/// The operation that combines the values of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
}

/// Communication between ranks. Each rank makes the same calls in the same order, which depends on the plan only.
pub trait Exchange {
    /// Replaces each value by its sum or maximum over all ranks.
    ///
    /// # Errors
    /// Fails if the ranks cannot communicate.
    fn all_reduce(&self, values: &mut [f64], op: Op) -> Result<()>;

    /// Returns true if there is only one rank.
    fn is_single_rank(&self) -> bool {
        false
    }
}

/// An exchange for a single rank.
#[derive(Debug, Clone, Copy)]
pub struct SingleRank;

impl Exchange for SingleRank {
    fn all_reduce(&self, _: &mut [f64], _: Op) -> Result<()> {
        Ok(())
    }

    fn is_single_rank(&self) -> bool {
        true
    }
}

macro_rules! stats {
    ($($(#[$doc:meta])* $sum:ident,)*) => {
        /// Counts of trained tokens (terms). Other modules compute statistics of the ratios.
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct Stats {
            $($(#[$doc])* pub $sum: f64,)*
        }

        impl Stats {
            /// Returns names and values.
            pub fn named(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($sum), self.$sum),)*]
            }

            /// Adds the statistics of other terms.
            pub(super) fn merge(&mut self, other: &Self) {
                $(self.$sum += other.$sum;)*
            }

            /// Sums the statistics over all ranks.
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
    /// Number of terms.
    terms,
    /// Terms with a known rollout logprob.
    known,
    /// Terms with keep 1.
    kept,
    /// Terms that a rejection rejected.
    gated,
    /// Terms whose log-ratio old/rollout was clamped at [`super::plan::LOG_RATIO_LIMIT`].
    clamped,
    /// Aggregated log-ratios that were clamped, over all rejections and weights.
    clamped_levels,
    /// Known terms for which a bound changed the ratio that a weight uses.
    truncated,
}
