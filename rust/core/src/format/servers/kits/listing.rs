//! Columns of a server's token list, entry by entry, and cutting one in two.

use crate::format::json::numbers::{ByteList, Reading, TokenText};
use crate::trace::{Pieces, Tokens};
use serde::de::{Deserialize, DeserializeSeed, Deserializer};

/// A token's text; `None` for null and for text that UTF-8 cannot say.
#[derive(Debug, Default)]
pub struct TextOf(pub Option<Vec<u8>>);

impl<'de> Deserialize<'de> for TextOf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut text = Vec::new();
        Ok(Self(TokenText(&mut text).deserialize(deserializer)?.then_some(text)))
    }
}

/// A token's bytes; `None` for null.
#[derive(Debug, Default)]
pub struct BytesOf(pub Option<Vec<u8>>);

impl<'de> Deserialize<'de> for BytesOf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut bytes = Vec::new();
        Ok(Self(ByteList(&mut bytes).deserialize(deserializer)?.then_some(bytes)))
    }
}

/// A token list while it is being read.
#[derive(Default)]
pub struct Listing {
    tokens: Tokens,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    texts: Pieces,
    bytes: Pieces,
    without_id: usize,
}

impl Listing {
    /// Appends one token.
    pub fn push(&mut self, id: Option<u32>, logprob: Reading, text: Option<&[u8]>, bytes: Option<&[u8]>) {
        match id {
            Some(id) => self.ids.push(id),
            None => self.without_id += 1,
        }
        let value = self.tokens.take(logprob);
        self.logprobs.push(value);
        self.texts.push(text);
        self.bytes.push(bytes);
    }

    /// The tokens; a column of ids with holes is none.
    pub fn finish(self) -> Tokens {
        let known = |pieces: &Pieces| pieces.known.contains(&true);
        Tokens {
            ids: (self.without_id == 0 && !self.ids.is_empty()).then_some(self.ids),
            logprobs: (!self.logprobs.is_empty()).then_some(self.logprobs),
            texts: Some(self.texts).filter(known),
            bytes: Some(self.bytes).filter(known),
            ..self.tokens
        }
    }
}

/// The pieces from `start` on.
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
