//! Tokenizers: text to ids, and ids to bytes, from the files of a model's directory.
//!
//! Ids come from the `tokenizers` crate, or from a faster backend that agrees with it. This module computes the bytes
//! of each id and the lookup from bytes to ids. Another thread encodes texts that take long. Chat templates are in
//! `template`.

mod budget;
mod cache;
mod check;
mod config;
mod encoder;
mod fast_backend;
mod hf_backend;
mod load;
mod partial;
mod pattern;
mod tiktoken;
mod transformers;
mod vocab_bytes;

pub use config::{Class, Eos, ExtraToken, Model, TokenizerConfig};
pub use encoder::{ContinuationIds, Report};
pub(crate) use partial::{OpenGroup, Partial, Pending, REPLACEMENT, Step};
pub use transformers::ClassMismatch;
pub use vocab_bytes::Spelling;

use crate::error::{Error, Kind, Result};
use crate::pool;
use crate::template::Template;
use check::refused;
use encoder::Encoder;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use vocab_bytes::{Pieces, glyphs_to_bytes};

/// Returns the tokenizer of the quickstart's model.
#[cfg(test)]
pub(crate) fn example() -> Tokenizer {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart/model");
    Tokenizer::from_dir(folder.as_ref()).expect("the example is there")
}

/// Loads the bytes of a tokenizer.json and encodes a text with it, for fuzzers. For any input this ends, uses memory
/// in proportion to the input, and satisfies the asserted invariants.
///
/// # Errors
/// Same as [`Tokenizer::from_json`] and [`Tokenizer::encode`].
///
/// # Panics
/// Panics if an invariant does not hold.
pub fn check_invariants(json: &[u8], text: &str) -> Result<Vec<u32>> {
    let tokenizer = Tokenizer::from_json(json, &TokenizerConfig::default())?;
    tokenizer.encode(text)?;
    let (ids, ends) = tokenizer.encode_with_ends(text)?;
    assert_eq!(ids.len(), ends.len(), "every id has an end");
    assert!(ends.is_sorted() && ends.last().is_none_or(|end| *end as usize == text.len()), "ends go up to the text's");
    assert!(ids.iter().all(|id| *id < tokenizer.vocab_size()), "ids are below the size");
    Ok(ids)
}

/// A tokenizer with the bytes of its vocabulary, its chat template and its end-of-sequence ids.
///
/// ```no_run
/// use tracegrad_core::tokenizer::Tokenizer;
///
/// let tokenizer = Tokenizer::from_dir("examples/quickstart/model".as_ref())?;
/// let (ids, ends) = tokenizer.encode_with_ends("Hello, 世界")?;
/// assert_eq!(ends.last(), Some(&13));
/// assert_eq!(tokenizer.decode_bytes(&ids)?, "Hello, 世界".as_bytes());
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Arc<Encoder>,
    name: String,
    spelling: Spelling,
    drops_first_space: bool,
    pieces: Arc<Pieces>,
    /// Added tokens: id to whether it is special.
    added: HashMap<u32, bool>,
    added_ids: HashMap<String, u32>,
    special_ids: Vec<u32>,
    partial: OnceLock<Partial>,
    eos_ids: Vec<u32>,
    stop_id: Option<u32>,
    model: Model,
    /// True if ids below the size may be unused: there are gaps between entries, and the model's size is unknown.
    gaps: bool,
    /// Ids that the post-processor puts before a text.
    prefix: Vec<u32>,
    template: Option<Template>,
    tool_template: Option<Template>,
    rebuilt: Option<ClassMismatch>,
    source: Source,
}

/// The files that a tokenizer was loaded from. Another process can load the same tokenizer from them.
#[derive(Debug)]
struct Source {
    pub json: Arc<[u8]>,
    pub config: Arc<TokenizerConfig>,
}

impl Tokenizer {
    /// Returns the tokenizer.json and the settings from the other files as JSON: the arguments of
    /// [`Tokenizer::from_source`].
    ///
    /// # Errors
    /// `Kind::Tokenizer` if the configuration cannot be serialized.
    pub fn source(&self) -> Result<(&[u8], Vec<u8>)> {
        let config = serde_json::to_vec(&*self.source.config).map_err(|error| refused(&error.to_string()))?;
        Ok((&self.source.json, config))
    }

    /// Returns the special tokens (BOS) that the tokenizer puts before a text without a chat template. Returns none if
    /// the text already starts with them.
    pub fn prefix_ids(&self, text: &str) -> &[u32] {
        let prefix_bytes = self.decode_bytes(&self.prefix).unwrap_or_default();
        if !prefix_bytes.is_empty() && text.as_bytes().starts_with(&prefix_bytes) { &[] } else { &self.prefix }
    }

    /// Returns a text for which transformers 5 would produce other ids, because it rebuilds the tokenizer.
    pub fn rebuilt(&self) -> Option<&ClassMismatch> {
        self.rebuilt.as_ref()
    }

    /// Returns the backend that produces the ids, and the reason for its choice.
    pub fn report(&self) -> &Report {
        self.encoder.report()
    }

    /// Returns the bytes that `id` adds to a text. For an added token this is its content.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// Returns the concatenated bytes of `ids`, including added tokens. Ids that only the model has add no bytes.
    ///
    /// # Errors
    /// `Kind::Tokenizer` for an id that is not in the vocabulary, with its index.
    pub fn decode_bytes(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for (index, &id) in ids.iter().enumerate() {
            match self.pieces.get(id) {
                Some(piece) => bytes.extend_from_slice(piece),
                None if self.first_outside(&[id]).is_none() => {}
                None => return Err(self.unknown(id, index)),
            }
        }
        Ok(bytes)
    }

    fn unknown(&self, id: u32, index: usize) -> Error {
        let mut error = Error::new(
            Kind::Tokenizer,
            "TG-TOKENIZER-012",
            format!("id {id} is not in the vocabulary of '{}'", self.name),
        )
        .why(format!("Its ids are below {}, some of them unused", self.vocab_size()))
        .fix("Use the tokenizer that the ids were made with");
        error.location.token = Some(index);
        error
    }

    /// Returns true if `id` is an added token marked as special.
    pub fn is_special(&self, id: u32) -> bool {
        self.added.get(&id).copied().unwrap_or(false)
    }

    /// Returns the ids of the added tokens marked as special, in order.
    pub fn special_ids(&self) -> &[u32] {
        &self.special_ids
    }

    /// Returns the ordinary entries that contain a part of a character.
    pub(crate) fn partial(&self) -> &Partial {
        self.partial.get_or_init(|| {
            let entries = (0..self.vocab_size()).filter(|&id| !self.is_added(id));
            Partial::new(entries.filter_map(|id| Some((id, self.pieces.get(id)?))))
        })
    }

    /// Returns true if `id` is an added token.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.contains_key(&id)
    }

    /// Returns the ordinary vocabulary entry with exactly these bytes. Added tokens are ignored.
    pub fn id_of_bytes(&self, bytes: &[u8]) -> Option<u32> {
        self.pieces.id(bytes)
    }

    /// Returns the added token with exactly this content.
    pub fn id_of_added(&self, text: &str) -> Option<u32> {
        self.added_ids.get(text).copied()
    }

    /// Decodes byte-level glyphs (`Ġthat` is ` that`). Returns `None` if a character is not a glyph.
    pub fn glyphs_to_bytes(&self, text: &str) -> Option<Vec<u8>> {
        glyphs_to_bytes(text)
    }

    /// Returns how the vocabulary represents bytes.
    pub fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// Returns true if decoding removes the space of the first token (SentencePiece's dummy prefix). The decoded text
    /// then does not show whether there was a space.
    pub fn drops_first_space(&self) -> bool {
        self.drops_first_space
    }

    /// Returns the size of the tokenizer's vocabulary. Every id is below it; the model's embedding may be wider.
    pub fn vocab_size(&self) -> u32 {
        self.pieces.size()
    }

    /// Returns the number of bytes of the longest token.
    pub fn max_piece_bytes(&self) -> usize {
        self.pieces.longest()
    }

    /// Returns the ids that end a turn according to the model's configuration.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Returns the id that ends a turn if a record says that the model stopped, but not by which token. It is the
    /// tokenizer's `eos_token` if that is among `eos_ids`, or else their only element. Engines report every other stop
    /// token by its id.
    pub fn stop_id(&self) -> Option<u32> {
        self.stop_id
    }

    /// Returns the facts about ids from the model's configuration.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the size of the model's vocabulary: the rows of its embedding, or the tokenizer's own size if these are
    /// unknown. Every valid id is below it.
    pub fn model_vocab_size(&self) -> u32 {
        self.model.vocab_size.unwrap_or_else(|| self.vocab_size())
    }

    /// Returns the index of the first of `ids` that the model does not have.
    pub fn first_outside(&self, ids: &[u32]) -> Option<usize> {
        let bound = self.model_vocab_size();
        let outside = |id: u32| id >= bound;
        // Avoids a branch for each id.
        if ids.iter().fold(false, |found, &id| found | outside(id)) {
            return ids.iter().position(|&id| outside(id));
        }
        if self.gaps { ids.iter().position(|&id| self.pieces.get(id).is_none()) } else { None }
    }

    /// Returns true if another id has the same bytes as `id`, so that its text is ambiguous.
    pub fn is_shared(&self, id: u32) -> bool {
        self.pieces.is_shared(id)
    }

    /// Returns true if any two ids have the same bytes.
    pub fn has_shared(&self) -> bool {
        self.pieces.has_shared()
    }

    /// Returns the chat template.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// Returns the chat template for a conversation with these tools: the model's tool template if it has one.
    ///
    /// # Errors
    /// `Kind::Template` if the model has no template.
    pub fn template_for(&self, tools: Option<&Arc<Value>>) -> Result<&Template> {
        let tool_template = self.tool_template.as_ref().filter(|_| tools.is_some_and(|tools| !tools.is_null()));
        tool_template.or(self.template.as_ref()).ok_or_else(|| {
            Error::new(
                Kind::Template,
                "TG-TOKENIZER-013",
                format!("the tokenizer '{}' has no chat template", self.name),
            )
            .why("Messages become text through it")
            .fix("Put chat_template.jinja beside tokenizer.json, or chat_template into tokenizer_config.json")
        })
    }

    /// Returns the name of the directory.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Tokenizer {
    /// Returns the ids of `text`. Added tokens in the text become their ids; no token is added around it.
    ///
    /// # Errors
    /// `Kind::Tokenizer` if the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if self.is_long(text) { self.encode_shared(Arc::<str>::from(text)) } else { self.encoder.encode(text) }
    }

    /// Returns true if another thread encodes this text. That thread must own it; [`Tokenizer::encode_shared`] passes
    /// it without a copy.
    pub fn is_long(&self, text: &str) -> bool {
        self.encoder.is_long(text)
    }

    /// Encodes like [`Tokenizer::encode`]. A long text moves to another thread without being copied.
    pub fn encode_shared(&self, text: impl Deref<Target = str> + Send + 'static) -> Result<Vec<u32>> {
        if self.encoder.is_long(&text) {
            let encoder = Arc::clone(&self.encoder);
            return pool::run_abandonable(move || encoder.encode(&text));
        }
        self.encoder.encode(&text)
    }

    /// Returns the ids of each text. The texts are encoded in parallel.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`], for the first text that fails.
    pub fn encode_batch<T: Deref<Target = str> + Send + 'static>(&self, texts: Vec<T>) -> Result<Vec<Vec<u32>>> {
        pool::map(texts, || (), |(), text| self.encode_shared(text)).into_iter().collect()
    }

    /// Returns the ids of `text`, and for each id the byte of `text` at which it ends.
    ///
    /// The ends are exact if the tokens decode to the text byte for byte. If the tokenizer changes the text between
    /// two added tokens first (NFC, a prefix space), the ends there are the crate's offsets. A token that is a part of
    /// a character then ends at the end of the character.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode`]. Also `Kind::Argument` for a text of 4 GiB or more.
    pub fn encode_with_ends(&self, text: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        check_ends(text)?;
        if self.encoder.is_long(text) {
            return self.encode_with_ends_shared(Arc::<str>::from(text), 0);
        }
        self.encoder.encode_with_ends(text, &self.pieces)
    }

    /// Encodes `text` from byte `from` on like [`Tokenizer::encode_with_ends`]. A long text moves to another thread
    /// without being copied.
    pub fn encode_with_ends_shared(
        &self,
        text: impl Deref<Target = str> + Send + 'static,
        from: usize,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        check_ends(&text[from..])?;
        if self.encoder.is_long(&text[from..]) {
            let (encoder, pieces) = (Arc::clone(&self.encoder), Arc::clone(&self.pieces));
            return pool::run_abandonable(move || encoder.encode_with_ends(&text[from..], &pieces));
        }
        self.encoder.encode_with_ends(&text[from..], &self.pieces)
    }
}

impl Tokenizer {
    /// Returns true if a piece of text after `before` has the same ids as by itself.
    pub fn is_context_free(&self, before: &str) -> bool {
        self.encoder.is_apart(before)
    }

    /// Returns only the ids of [`Tokenizer::encode_after`]. This is faster if the ends are not needed.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode_with_ends`].
    pub fn ids_after(&self, before: &str, piece: &str) -> Result<Vec<u32>> {
        if self.is_context_free(before) { self.encode(piece) } else { Ok(self.encode_after(before, piece)?.ids) }
    }

    /// Returns the ids of `piece` in a text in which it follows `before`.
    ///
    /// # Errors
    /// Same as [`Tokenizer::encode_with_ends`].
    pub fn encode_after(&self, before: &str, piece: &str) -> Result<ContinuationIds> {
        if self.is_context_free(before) || piece.is_empty() {
            let (ids, ends) = self.encode_with_ends(piece)?;
            return Ok(ContinuationIds { ids, ends, exact: true });
        }
        let (text, at) = self.encoder.joined(before, piece);
        check_ends(&text)?;
        if self.encoder.is_long(&text) {
            let (encoder, pieces) = (Arc::clone(&self.encoder), Arc::clone(&self.pieces));
            return pool::run_abandonable(move || encoder.behind(&text, at, &pieces));
        }
        self.encoder.behind(&text, at, &self.pieces)
    }
}

/// Returns an error for a text whose ends do not fit into 32 bits.
fn check_ends(text: &str) -> Result<()> {
    if u32::try_from(text.len()).is_ok() {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "TG-TOKENIZER-014", format!("the text has {} bytes", text.len()))
        .why("Byte ends are 32-bit numbers")
        .fix("Split the text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel;
    use crate::tokenizer::TokenizerConfig;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::{ThreadId, current};

    /// A text that reports the thread on which it is dropped.
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
        for (words, on_other_thread) in [(10, false), (1 << 18, true)] {
            let text = "a b ".repeat(words);
            let (sender, receiver) = channel();
            let make_text = |sender: &Sender<ThreadId>| Held(text.clone(), sender.clone());
            let shared = cancel::run_cancellable(|| false, || tokenizer.encode_shared(make_text(&sender)).unwrap());
            let with_ends =
                cancel::run_cancellable(|| false, || tokenizer.encode_with_ends_shared(make_text(&sender), 2).unwrap());
            for thread in receiver.try_iter() {
                assert_eq!(thread != current().id(), on_other_thread);
            }
            let expected = tokenizer.encoder.encode(&text).unwrap();
            assert_eq!((expected.len(), shared.as_ref()), (2 * words, Some(&expected)));
            assert_eq!(tokenizer.encode(&text).unwrap(), expected);
            let (ids, ends) = with_ends.unwrap();
            assert_eq!((&ids[..], ends[0]), (&expected[1..], 1));
        }
    }
}
