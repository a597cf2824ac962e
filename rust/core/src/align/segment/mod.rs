//! Which ids a record determines, where some of its tokens do not show their bytes.
//!
//! A recorder decodes each token alone. One that is a part of a character shows nothing, or U+FFFD, or, if it completes
//! a character that earlier tokens began, all of their text at once. What these texts, the whole text and the number
//! of tokens still determine is found here by dynamic programming; every other id stays unknown. The files, each using
//! those before it alone: `setting`, `utf8`, `view`, `run`, `whole`.

mod run;
mod setting;
mod utf8;
mod view;
mod whole;

pub use run::run;
pub use setting::{Choice, Seen, Setting};
pub use utf8::REPLACEMENT;
pub use whole::{Whole, whole};
