//! Statistics of a step's ratios as sums and maxima, so that blocks and ranks merge exactly.

use super::exchange::{Exchange, Op};
use crate::error::Result;

macro_rules! stats {
    (sums { $($(#[$sum_doc:meta])* $sum:ident,)* } maxima { $($(#[$max_doc:meta])* $max:ident,)* }) => {
        /// Sums over terms, then maxima, which are minus infinity without a term. All ratios are old/rollout.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct Stats {
            $($(#[$sum_doc])* pub $sum: f64,)*
            $($(#[$max_doc])* pub $max: f64,)*
        }

        impl Default for Stats {
            fn default() -> Self {
                Self { $($sum: 0.0,)* $($max: f64::NEG_INFINITY,)* }
            }
        }

        impl Stats {
            /// Names and values.
            pub fn named(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($sum), self.$sum),)* $((stringify!($max), self.$max),)*]
            }

            /// Adds the statistics of other terms.
            pub(super) fn merge(&mut self, other: &Self) {
                $(self.$sum += other.$sum;)*
                $(self.$max = self.$max.max(other.$max);)*
            }

            /// The same over all ranks.
            pub(super) fn exchange(&mut self, exchange: &dyn Exchange) -> Result<()> {
                let mut sums = [$(self.$sum,)*];
                let mut maxima = [$(self.$max,)*];
                exchange.all_reduce(&mut sums, Op::Sum)?;
                exchange.all_reduce(&mut maxima, Op::Max)?;
                [$(self.$sum,)*] = sums;
                [$(self.$max,)*] = maxima;
                Ok(())
            }
        }
    };
}

stats! {
    sums {
        /// Terms.
        terms,
        /// Terms whose rollout logprob is known.
        known,
        /// Terms with keep 1.
        kept,
        /// Terms that a gate dropped.
        gated,
        /// Terms whose log-ratio was clamped at [`super::limits::LOG_RATIO_LIMIT`].
        clamped,
        /// Aggregated log-ratios that were clamped, over all gates and weights.
        clamped_levels,
        /// Known terms where a bound changed a ratio on its way to a weight.
        truncated,
        /// Over known terms: log-ratio.
        log_ratio,
        /// Over known terms: its absolute value.
        log_ratio_abs,
        /// Over known terms: ratio, clamped.
        ratio,
        /// Over known terms: ratio - 1 - log-ratio.
        k3,
        /// Terms known and kept.
        weighted,
        /// Over them: weight.
        weight,
        /// Over them: its square.
        weight_squared,
    }
    maxima {
        /// Largest log-ratio.
        log_ratio_max,
        /// Largest of minus the log-ratio.
        minus_log_ratio_min,
    }
}
