//! A token list cut in two: the prompt's tokens and the sampled ones behind them.

use crate::trace::{Pieces, Tokens};

fn pieces_from(pieces: &Pieces, start: usize) -> Pieces {
    let mut rest = Pieces::default();
    (start..pieces.len()).for_each(|index| rest.push(pieces.get(index)));
    rest
}

/// The tokens from `start` on.
///
/// Numbers that are not known are counted as missing first: a list begins with null where nothing comes before it.
pub fn tokens_from(tokens: &Tokens, start: usize) -> Tokens {
    let logprobs = tokens.logprobs.as_deref().unwrap_or_default();
    let unknown = logprobs.iter().take(start).filter(|value| value.is_nan()).count() as u32;
    let missing = unknown.min(tokens.missing);
    Tokens {
        ids: tokens.ids.as_ref().map(|ids| ids.iter().skip(start).copied().collect()),
        bytes: tokens.bytes.as_ref().map(|pieces| pieces_from(pieces, start)),
        texts: tokens.texts.as_ref().map(|pieces| pieces_from(pieces, start)),
        logprobs: tokens.logprobs.as_ref().map(|_| logprobs.iter().skip(start).copied().collect()),
        missing: tokens.missing - missing,
        invalid: tokens.invalid - (unknown - missing).min(tokens.invalid),
    }
}
