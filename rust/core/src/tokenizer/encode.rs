//! Text to ids, by way of another thread where that takes long.
//!
//! How ids are made is `encoder`'s.

use super::encoder::Behind;
use super::loaded::Tokenizer;
use crate::error::{Error, Kind, Result};
use crate::threads;
use std::ops::Deref;
use std::sync::Arc;

impl Tokenizer {
    /// Ids of `text`. Added tokens in the text become their ids; none is put around it.
    ///
    /// # Errors
    /// `Kind::Tokenizer` where the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if self.is_long(text) { self.encode_shared(Arc::<str>::from(text)) } else { self.encoder.encode(text) }
    }

    /// Whether another thread encodes this text, which then must own it: [`Tokenizer::encode_shared`] takes it without a copy.
    pub fn is_long(&self, text: &str) -> bool {
        self.encoder.is_long(text)
    }

    /// As [`Tokenizer::encode`], of a text that another thread may hold meanwhile: a long one is not copied for it.
    pub fn encode_shared(&self, text: impl Deref<Target = str> + Send + 'static) -> Result<Vec<u32>> {
        if self.encoder.is_long(&text) {
            let encoder = Arc::clone(&self.encoder);
            return threads::apart(move || encoder.encode(&text));
        }
        self.encoder.encode(&text)
    }

    /// Ids of each text, the texts spread over threads.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`], for the first text that fails.
    pub fn encode_batch<T: Deref<Target = str> + Send + 'static>(&self, texts: Vec<T>) -> Result<Vec<Vec<u32>>> {
        threads::map(texts, || (), |(), text| self.encode_shared(text)).into_iter().collect()
    }

    /// Ids of `text`, and for each the byte of `text` behind it.
    ///
    /// Exact where tokens spell the text byte for byte. Where the tokenizer changes the text between two added tokens
    /// first (NFC, a prefix space), ends there are the crate's offsets: a token that is a part of a character then ends
    /// where the character ends.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; and `Kind::Argument` for a text of 4 GiB or more.
    pub fn encode_with_ends(&self, text: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        check_ends(text)?;
        if self.encoder.is_long(text) {
            return self.encode_held(Arc::<str>::from(text), 0);
        }
        self.encoder.encode_with_ends(text, &self.pieces)
    }

    /// As [`Tokenizer::encode_with_ends`], of `text` from byte `from` on, for a text that another thread may hold meanwhile.
    pub fn encode_held(
        &self,
        text: impl Deref<Target = str> + Send + 'static,
        from: usize,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        check_ends(&text[from..])?;
        if self.encoder.is_long(&text[from..]) {
            let (encoder, pieces) = (Arc::clone(&self.encoder), Arc::clone(&self.pieces));
            return threads::apart(move || encoder.encode_with_ends(&text[from..], &pieces));
        }
        self.encoder.encode_with_ends(&text[from..], &self.pieces)
    }
}

impl Tokenizer {
    /// Whether a piece of text behind `before` has the ids that it has alone.
    pub fn is_apart(&self, before: &str) -> bool {
        self.encoder.is_apart(before)
    }

    /// The ids of [`Tokenizer::encode_behind`] alone: at less cost where no end has to be known.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_with_ends`].
    pub fn ids_behind(&self, before: &str, piece: &str) -> Result<Vec<u32>> {
        if self.is_apart(before) { self.encode(piece) } else { Ok(self.encode_behind(before, piece)?.ids) }
    }

    /// Ids of `piece` as they are in a text in which it is behind `before`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_with_ends`].
    pub fn encode_behind(&self, before: &str, piece: &str) -> Result<Behind> {
        if self.is_apart(before) || piece.is_empty() {
            let (ids, ends) = self.encode_with_ends(piece)?;
            return Ok(Behind { ids, ends, exact: true });
        }
        let (text, at) = self.encoder.joined(before, piece);
        check_ends(&text)?;
        if self.encoder.is_long(&text) {
            let (encoder, pieces) = (Arc::clone(&self.encoder), Arc::clone(&self.pieces));
            return threads::apart(move || encoder.behind(&text, at, &pieces));
        }
        self.encoder.behind(&text, at, &self.pieces)
    }
}

/// Refuses a text whose ends no 32-bit number says.
fn check_ends(text: &str) -> Result<()> {
    if u32::try_from(text.len()).is_ok() {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, format!("the text has {} bytes", text.len()))
        .why("Byte ends are 32-bit numbers")
        .cure("Split the text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop;
    use crate::tokenizer::TokenizerConfig;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::{ThreadId, current};

    /// Says where it is dropped.
    struct Held(String, Sender<ThreadId>);

    impl Deref for Held {
        type Target = str;

        fn deref(&self) -> &str {
            &self.0
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.1.send(current().id());
        }
    }

    #[test]
    fn a_long_text_is_handed_to_the_other_thread_and_a_short_one_is_not() {
        let json = br#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}}"#;
        let tokenizer = Tokenizer::from_json(json, &TokenizerConfig::default()).unwrap();
        for (words, apart) in [(10, false), (1 << 18, true)] {
            let text = "a b ".repeat(words);
            let (sender, receiver) = channel();
            let held = |sender: &Sender<ThreadId>| Held(text.clone(), sender.clone());
            let shared = stop::watched(|| false, || tokenizer.encode_shared(held(&sender)).unwrap());
            let behind = stop::watched(|| false, || tokenizer.encode_held(held(&sender), 2).unwrap());
            for thread in receiver.try_iter() {
                assert_eq!(thread != current().id(), apart);
            }
            let alone = tokenizer.encoder.encode(&text).unwrap();
            assert_eq!((alone.len(), shared.as_ref()), (2 * words, Some(&alone)));
            assert_eq!(tokenizer.encode(&text).unwrap(), alone);
            let (ids, ends) = behind.unwrap();
            assert_eq!((&ids[..], ends[0]), (&alone[1..], 1));
        }
    }
}
