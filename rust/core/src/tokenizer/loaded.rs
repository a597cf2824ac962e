//! A loaded tokenizer: what is known of its ids and bytes, and its chat templates.

use super::config::TokenizerConfig;
use super::encoder::{Encoder, Report};
use super::model::Model;
use super::outline::refused;
use super::partial::Partial;
use super::pieces::{Pieces, Spelling, glyphs_to_bytes};
use super::rebuilt::Rebuilt;
use crate::error::{Error, Kind, Result};
use crate::template::Template;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

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
    pub(super) encoder: Arc<Encoder>,
    pub(super) name: String,
    pub(super) spelling: Spelling,
    pub(super) drops_first_space: bool,
    pub(super) pieces: Arc<Pieces>,
    /// Added tokens: id to whether it is special.
    pub(super) added: HashMap<u32, bool>,
    pub(super) added_ids: HashMap<String, u32>,
    pub(super) special_ids: Vec<u32>,
    pub(super) partial: OnceLock<Partial>,
    pub(super) eos_ids: Vec<u32>,
    pub(super) stop_id: Option<u32>,
    pub(super) model: Model,
    /// Whether ids below the size may be none, as neither an entry nor the model's size says otherwise.
    pub(super) gaps: bool,
    /// What the post-processor puts before a text.
    pub(super) prefix: Vec<u32>,
    pub(super) template: Option<Template>,
    pub(super) tool_template: Option<Template>,
    pub(super) rebuilt: Option<Rebuilt>,
    pub(super) source: Source,
}

/// What a tokenizer was loaded from, from which another process loads the same.
#[derive(Debug)]
pub(super) struct Source {
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
