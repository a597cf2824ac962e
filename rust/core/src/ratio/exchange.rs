//! The few numbers that ranks must agree on: statistics of the whole step.

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
