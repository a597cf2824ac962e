//! Tokenizers: text to ids, and ids to bytes, from the files of a model's directory.
//!
//! Ids come from the `tokenizers` crate, or from a faster one that agrees with it; the bytes of each id and the way back
//! from bytes are ours. A text that takes long is encoded by another thread. Chat templates are `template`'s.

mod budget;
mod cache;
mod check;
mod config;
mod encoder;
mod fast_backend;
mod hf_backend;
mod load;
mod pattern;
mod tiktoken;
mod transformers;
mod vocab_bytes;

pub use config::{Class, Eos, ExtraToken, Model, TokenizerConfig};
pub use encoder::{Behind, Report};
pub use transformers::Rebuilt;
pub use vocab_bytes::{Partial, Spelling};

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
    /// Whether ids below the size may be none, as neither an entry nor the model's size says otherwise.
    gaps: bool,
    /// What the post-processor puts before a text.
    prefix: Vec<u32>,
    template: Option<Template>,
    tool_template: Option<Template>,
    rebuilt: Option<Rebuilt>,
    source: Source,
}

/// What a tokenizer was loaded from, from which another process loads the same.
#[derive(Debug)]
struct Source {
    pub json: Arc<[u8]>,
    pub config: Arc<TokenizerConfig>,
}

impl Tokenizer {
    /// The tokenizer.json and, as JSON too, what stood beside it: what [`Tokenizer::from_source`] takes.
    ///
    /// # Errors
    /// `Kind::Tokenizer` where the configuration cannot be written.
    pub fn source(&self) -> Result<(&[u8], Vec<u8>)> {
        let config = serde_json::to_vec(&*self.source.config).map_err(|error| refused(&error.to_string()))?;
        Ok((&self.source.json, config))
    }

    /// The special tokens that the tokenizer puts before a text it is given without a chat template (BOS), none where
    /// the text begins with them already.
    pub fn prefix_ids(&self, text: &str) -> &[u32] {
        let written = self.decode_bytes(&self.prefix).unwrap_or_default();
        if !written.is_empty() && text.as_bytes().starts_with(&written) { &[] } else { &self.prefix }
    }

    /// A text of which transformers 5 would make other ids, as it builds the tokenizer anew.
    pub fn rebuilt(&self) -> Option<&Rebuilt> {
        self.rebuilt.as_ref()
    }

    /// Which code makes the ids, and why.
    pub fn report(&self) -> &Report {
        self.encoder.report()
    }

    /// The bytes of `id`: what it adds to a text. For an added token its content.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// The bytes of `ids`, end to end, added tokens included. Ids that only the model has spell nothing.
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
        let mut error = Error::new(Kind::Tokenizer, format!("id {id} is not in the vocabulary of '{}'", self.name))
            .why(format!("Its ids are below {}, some of them unused", self.vocab_size()))
            .cure("Use the tokenizer that the ids were made with");
        error.location.token = Some(index);
        error
    }

    /// Whether `id` is an added token marked special.
    pub fn is_special(&self, id: u32) -> bool {
        self.added.get(&id).copied().unwrap_or(false)
    }

    /// Ids of the added tokens marked special, in order.
    pub fn special_ids(&self) -> &[u32] {
        &self.special_ids
    }

    /// The ordinary entries that hold a part of a character.
    pub fn partial(&self) -> &Partial {
        self.partial.get_or_init(|| {
            let entries = (0..self.vocab_size()).filter(|&id| !self.is_added(id));
            Partial::new(entries.filter_map(|id| Some((id, self.pieces.get(id)?))))
        })
    }

    /// Whether `id` is an added token.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.contains_key(&id)
    }

    /// The ordinary vocabulary entry with exactly these bytes; added tokens are not looked at.
    pub fn id_of_bytes(&self, bytes: &[u8]) -> Option<u32> {
        self.pieces.id(bytes)
    }

    /// The added token with exactly this content.
    pub fn id_of_added(&self, text: &str) -> Option<u32> {
        self.added_ids.get(text).copied()
    }

    /// The bytes that byte-level glyphs spell (`Ġthat` is ` that`), `None` where a character is no glyph.
    pub fn glyphs_to_bytes(&self, text: &str) -> Option<Vec<u8>> {
        glyphs_to_bytes(text)
    }

    /// How the vocabulary spells bytes.
    pub fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// Whether decoding takes the space off the first token (SentencePiece's dummy prefix): its text does not tell whether
    /// it had one.
    pub fn drops_first_space(&self) -> bool {
        self.drops_first_space
    }

    /// Every id is below this; the model's embedding may be wider.
    pub fn vocab_size(&self) -> u32 {
        self.pieces.size()
    }

    /// Bytes of the longest token.
    pub fn max_piece_bytes(&self) -> usize {
        self.pieces.longest()
    }

    /// Ids that end a turn, as the model's configuration lists them.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The one id that ends a turn where a record says that the model stopped, but not by which token: the tokenizer's
    /// `eos_token` if it is among `eos_ids`, or the only one of them. Engines report every other stop token by its id.
    pub fn stop_id(&self) -> Option<u32> {
        self.stop_id
    }

    /// What the model beside the tokenizer says of its ids.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Every id that the model takes is below this: the rows of its embedding, or the tokenizer's own size where nothing
    /// says how many there are.
    pub fn model_vocab_size(&self) -> u32 {
        self.model.vocab_size.unwrap_or_else(|| self.vocab_size())
    }

    /// The first of `ids` that the model does not have.
    pub fn first_outside(&self, ids: &[u32]) -> Option<usize> {
        let bound = self.model_vocab_size();
        let outside = |id: u32| id >= bound;
        // Without a branch for each id.
        if ids.iter().fold(false, |any, &id| any | outside(id)) {
            return ids.iter().position(|&id| outside(id));
        }
        if self.gaps { ids.iter().position(|&id| self.pieces.get(id).is_none()) } else { None }
    }

    /// Whether what `id` shows may be shown by another id too: two entries have its bytes.
    pub fn is_shared(&self, id: u32) -> bool {
        self.pieces.is_shared(id)
    }

    /// Whether any two ids show the same.
    pub fn has_shared(&self) -> bool {
        self.pieces.has_shared()
    }

    /// The chat template.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// The chat template for a conversation with these tools: the model's own for tools where it has one.
    ///
    /// # Errors
    /// `Kind::Template` where the model has none.
    pub fn template_for(&self, tools: Option<&Arc<Value>>) -> Result<&Template> {
        let own = self.tool_template.as_ref().filter(|_| tools.is_some_and(|tools| !tools.is_null()));
        own.or(self.template.as_ref()).ok_or_else(|| {
            Error::new(Kind::Template, format!("the tokenizer '{}' has no chat template", self.name))
                .why("Messages become text through it")
                .cure("Put chat_template.jinja beside tokenizer.json, or chat_template into tokenizer_config.json")
        })
    }

    /// The directory's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

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
            return pool::apart(move || encoder.encode(&text));
        }
        self.encoder.encode(&text)
    }

    /// Ids of each text, the texts spread over threads.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`], for the first text that fails.
    pub fn encode_batch<T: Deref<Target = str> + Send + 'static>(&self, texts: Vec<T>) -> Result<Vec<Vec<u32>>> {
        pool::map(texts, || (), |(), text| self.encode_shared(text)).into_iter().collect()
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
            return pool::apart(move || encoder.encode_with_ends(&text[from..], &pieces));
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
            return pool::apart(move || encoder.behind(&text, at, &pieces));
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
    use crate::cancel;
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
            let shared = cancel::watched(|| false, || tokenizer.encode_shared(held(&sender)).unwrap());
            let behind = cancel::watched(|| false, || tokenizer.encode_held(held(&sender), 2).unwrap());
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
