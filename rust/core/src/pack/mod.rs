//! Packing: branches of traces are measured, given to ranks and rows of at most a token budget, and written as flat arrays.
//!
//! Three steps, each a pure function of flat slices: [`measure`] says how much of each branch is laid out and what is
//! too long, [`place`] gives each branch a rank and a row (best fit decreasing, over the prefix tree where prefixes are
//! shared), [`lay`] writes the rows of one rank ([`lay_into`] in memory used before). [`Gather`] copies columns to its
//! terms. Which trace belongs to which optimizer step is the caller's business; no advantages, no logprobs here.

mod assign;
mod bins;
mod check;
mod layout;
mod measure;
mod prefix;

pub use assign::{Cost, Demand, Gain, Placed, place};
pub use bins::BestFit;
pub use layout::{Gather, Layout, Plan, Tokens, lay, lay_into};
pub use measure::{Branches, Measured, TooLong, Whole, measure};
