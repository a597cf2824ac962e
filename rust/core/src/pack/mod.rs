//! Branches of traces laid into rows of at most a token budget: measured, placed, written out as flat arrays.
//!
//! Three steps, each a pure function of flat slices: [`measure`] says how much of each branch is laid out and what is
//! too long, [`place`] gives each branch a rank and a row (best fit decreasing, over the prefix tree where prefixes are
//! shared), [`lay`] writes the rows of one rank ([`lay_into`] in memory used before). Which trace belongs to which
//! optimizer step is the caller's business; no advantages, no logprobs here.

mod fit;
mod layout;
mod lexical;
mod measure;
mod place;
mod ranks;
mod rows;
mod runs;

pub use fit::BestFit;
pub use layout::{Layout, Plan, Tokens, lay, lay_into};
pub use measure::{Branches, Measured, TooLong, Whole, measure};
pub use place::{Demand, Gain, Placed, place};
pub use ranks::Cost;

use crate::{Error, Kind, Result};

/// Refuses arrays whose lengths contradict one another.
fn check_length(name: &str, found: usize, needed: usize) -> Result<()> {
    if found == needed {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, format!("{name} has {found} entries, but {needed} are needed"))
        .why("Each array has one entry per element")
        .cure("Pass arrays of equal length"))
}

/// Refuses a budget of no token.
fn check_budget(token_budget: usize) -> Result<()> {
    if token_budget > 0 && i32::try_from(token_budget).is_ok() {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, format!("token_budget is {token_budget}"))
        .why("A row holds at least one token and is indexed by 32-bit integers")
        .cure("Pass a budget between 1 and 2147483647"))
}
