//! tokenizer.json to ids, bytes and byte ends.
//!
//! In come the files of a model's directory and texts; out go ids, and where in the text each ends. Ids come from the
//! `tokenizers` crate, or from a faster one that agrees with it; the bytes of each id and the way back from bytes are
//! ours. Chat templates are `template`'s. Called by `align` and the Python border.
//!
//! Its files, each using those before it alone: `allowance`, `outline`, `model`, `config`, `check` (what a
//! file may ask for); `pieces`, `tiktoken`, `partial` (bytes of ids); `cost`, `pattern`, `guard`, `reference`, `rebuilt` (what transformers makes of a file), `fast`, `backends` (two
//! encoders); `kept` (what an earlier load found out); `cut`,
//! `context` (pieces apart), `memo`, `probe`, `encoder`; `loaded`, and on it `load` and `encode`.

mod allowance;
mod backends;
mod check;
mod config;
mod context;
mod cost;
mod cut;
mod encode;
mod encoder;
mod fast;
mod guard;
mod kept;
mod load;
mod loaded;
mod memo;
mod model;
mod outline;
mod partial;
mod pattern;
mod pieces;
mod probe;
mod rebuilt;
mod reference;
mod tiktoken;

pub use config::{Class, Eos, ExtraToken, TokenizerConfig};
pub use encoder::{Behind, Report};
pub use loaded::Tokenizer;
pub use model::Model;
pub use partial::Partial;
pub use pieces::Spelling;
pub use rebuilt::Rebuilt;

use crate::error::Result;

/// The tokenizer of the quickstart's model.
#[cfg(test)]
pub(crate) fn example() -> Tokenizer {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart/model");
    Tokenizer::from_dir(folder.as_ref()).expect("the example is there")
}

/// Loads the bytes of a tokenizer.json and encodes a text with it, for fuzzers: whatever the two are, this ends, within
/// memory in proportion to them, and its laws hold.
///
/// # Errors
/// As [`Tokenizer::from_json`] and [`Tokenizer::encode`].
///
/// # Panics
/// Where a law does not hold.
pub fn tried(json: &[u8], text: &str) -> Result<Vec<u32>> {
    let tokenizer = Tokenizer::from_json(json, &TokenizerConfig::default())?;
    tokenizer.encode(text)?;
    let (ids, ends) = tokenizer.encode_with_ends(text)?;
    assert_eq!(ids.len(), ends.len(), "every id has an end");
    assert!(ends.is_sorted() && ends.last().is_none_or(|end| *end as usize == text.len()), "ends go up to the text's");
    assert!(ids.iter().all(|id| *id < tokenizer.vocab_size()), "ids are below the size");
    Ok(ids)
}
