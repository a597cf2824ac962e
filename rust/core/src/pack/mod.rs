//! Packing: branches of traces are measured, assigned to ranks and to rows of at most a token budget, and written as
//! flat arrays.
//!
//! Each step is a pure function of flat slices. [`measure`] determines how much of each branch is laid out, and what
//! is too long. [`place`] assigns a rank and a row to each branch (best fit decreasing, over the prefix tree if
//! prefixes are shared). [`write_rows`] writes the rows of one rank ([`write_rows_into`] reuses memory). [`Gather`] copies columns
//! to the terms. The caller assigns traces to optimizer steps. Advantages and logprobs are not used here.

mod assign;
mod bins;
mod check;
mod layout;
mod measure;
mod penalties;
mod prefix;

pub use assign::{Cost, Gain, PackRequest, Placement, place};
pub use bins::BestFit;
pub use layout::{Gather, Layout, Plan, Tokens, write_rows, write_rows_into};
pub use measure::{BranchLengths, Branches, RowUnit, TooLong, measure};
pub use penalties::{Changes, Penalized, Targets, changes};
