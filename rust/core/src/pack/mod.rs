//! Branches of traces laid into rows of at most a token budget: measured, placed, written out as flat arrays.
//!
//! In come flat slices of ids and lengths; out go the rows as flat arrays. Its files, each using those before it alone:
//! `check`, `lexical` (order of branches), `measure`; `fit`, `rows`, `ranks`, `place`; `runs`, `arrays`, `layout`; `columns`.
//!
//! Three steps, each a pure function of flat slices: [`measure`] says how much of each branch is laid out and what is
//! too long, [`place`] gives each branch a rank and a row (best fit decreasing, over the prefix tree where prefixes are
//! shared), [`lay`] writes the rows of one rank ([`lay_into`] in memory used before). [`Gather`] copies columns to its terms. Which trace belongs to which
//! optimizer step is the caller's business; no advantages, no logprobs here.

mod arrays;
mod check;
mod columns;
mod fit;
mod layout;
mod lexical;
mod measure;
mod place;
mod ranks;
mod rows;
mod runs;

pub use arrays::{Layout, Plan, Tokens};
pub use columns::Gather;
pub use fit::BestFit;
pub use layout::{lay, lay_into};
pub use measure::{Branches, Measured, TooLong, Whole, measure};
pub use place::{Demand, Gain, Placed, place};
pub use ranks::Cost;
