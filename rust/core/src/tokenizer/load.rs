//! Builds a [`Tokenizer`] from files, and checks that the listed ids are the loaded ones.
//!
//! The `tokenizers` crate silently renumbers added tokens if their ids leave gaps. Such files are rejected here.

use super::cache::{Facts, Place};
use super::check::{checked, refused, values_under};
use super::config::{Eos, TokenizerConfig, located, read_file};
use super::encoder::{Backends, Encoder, checked_reference, missing_tokens};
use super::fast_backend::Fast;
use super::hf_backend::{Reference, prefix};
use super::transformers::compared;
use super::vocab_bytes::{Pieces, Spelling};
use super::{Source, Tokenizer, tiktoken};
use crate::error::{Error, Kind, Result};
use crate::pool;
use crate::template::Template;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use tokenizers::AddedToken;

/// Maximum number of ids that may end a turn.
const EOS: usize = 1024;

impl Tokenizer {
    /// Loads a model directory: tokenizer.json, or a tiktoken file of a known family, and the files next to it.
    ///
    /// # Errors
    /// `Kind::Io` if there is no tokenizer.json or a file cannot be read. `Kind::Tokenizer` if a file has invalid
    /// content. `Kind::Template` if the chat template does not compile. Each error names the file.
    pub fn from_dir(path: &Path) -> Result<Self> {
        Self::from_dir_of(path, None, None)
    }

    /// Loads a directory like [`Tokenizer::from_dir`]. `vocab_size`, the number of rows of the model's embedding,
    /// overrides config.json. Facts about the files are stored in the folder `cache`, and the next load of the same
    /// bytes reads them.
    pub fn from_dir_of(dir: &Path, vocab_size: Option<u32>, cache: Option<&Path>) -> Result<Self> {
        let mut config = TokenizerConfig::from_dir(dir)?;
        config.model.vocab_size = vocab_size.or(config.model.vocab_size);
        let (file, loaded) = match (read_file(&dir.join("tokenizer.json")), tiktoken_file(dir)) {
            (Err(error), Some(file)) if error.kind() == ErrorKind::NotFound => {
                let ranks = read_file(&file).map_err(|error| missing(dir, &error))?;
                let loaded =
                    tiktoken::document(&ranks, &mut config).and_then(|json| Self::from_bytes(&json, &config, cache));
                (file, loaded)
            }
            (Err(error), _) => return Err(missing(dir, &error)),
            (Ok(json), _) => (dir.join("tokenizer.json"), Self::from_bytes(&json, &config, cache)),
        };
        let mut loaded = loaded.map_err(|error| {
            let place = if error.kind == Kind::Template { dir } else { &file };
            located(error, place)
        })?;
        // The encoder is not shared yet.
        if let Some(encoder) = Arc::get_mut(&mut loaded.encoder) {
            encoder.name(file.display().to_string());
        }
        Ok(loaded)
    }

    /// Loads the same tokenizer again, from its [`Tokenizer::source`].
    ///
    /// # Errors
    /// Same as [`Tokenizer::from_json`], and `Kind::Tokenizer` if the configuration is invalid.
    pub fn from_source(json: &[u8], config: &[u8]) -> Result<Self> {
        let config = serde_json::from_slice(config).map_err(|error| refused(&error.to_string()))?;
        Self::from_json(json, &config)
    }

    /// Loads the bytes of a tokenizer.json.
    ///
    /// # Errors
    /// `Kind::Tokenizer` if it is not a tokenizer, or if its added tokens would not get the ids it lists.
    pub fn from_json(json: &[u8], config: &TokenizerConfig) -> Result<Self> {
        Self::from_bytes(json, config, None)
    }

    /// Loads like [`Tokenizer::from_json`], using the facts that an earlier load of the same bytes stored in the
    /// folder `cache`.
    fn from_bytes(json: &[u8], config: &TokenizerConfig, cache: Option<&Path>) -> Result<Self> {
        let (json, config) = (Arc::<[u8]>::from(json), Arc::new(config.clone()));
        let place = cache.and_then(|folder| Place::of(folder, &json, &config));
        if let Some((facts, pieces)) = place.as_ref().and_then(Place::read) {
            let backends = Backends::new(Arc::clone(&json), Arc::clone(&config), facts.document.clone(), facts.fast);
            let encoder = Encoder::of(backends, &facts, named(&config));
            return Self::assembled(Source { json, config }, facts, pieces, encoder);
        }
        let document = checked(&json, &config.extra_tokens)?;
        let extra = missing_tokens(&document, &config.extra_tokens);
        let fast = || Fast::build(&json, &document, &extra);
        let reference = || {
            let inner = checked_reference(&json, &document, &config)?;
            let mut listed = inner.added();
            listed.sort_unstable_by_key(|(id, _)| *id);
            let pieces = spelled(&inner.vocabulary(), &document, &listed)?;
            Ok((inner, listed, pieces))
        };
        let (fast, built) = pool::join(fast, reference);
        let (inner, listed, pieces) = built?;
        let eos_ids = eos_ids(&config, &*inner, pieces.size())?;
        let stop_id = config.special_tokens.iter().find(|(name, _)| name == "eos_token");
        let stop_id = stop_id.and_then(|(_, text)| inner.id(text)).filter(|id| eos_ids.contains(id));
        let rebuilt = compared(&json, &document, &config.class, &*inner);
        let mut facts = Facts {
            prefix: prefix(&*inner)?,
            stop_id: stop_id.or(eos_ids.first().copied().filter(|_| eos_ids.len() == 1)),
            eos_ids,
            document,
            listed,
            fast: fast.is_ok(),
            reason: fast.as_ref().err().cloned().unwrap_or_default(),
            probes: 0,
            rebuilt,
            cuts: true,
            apart: false,
        };
        let backends = Backends::new(Arc::clone(&json), Arc::clone(&config), facts.document.clone(), false);
        let mut encoder = Encoder::of(backends.with(inner, fast.ok()), &facts, named(&config));
        let is_known = encoder.verify(&mut facts);
        encoder.probe_pieces(&mut facts);
        if let Some(place) = place.filter(|_| is_known) {
            place.write(&facts, &pieces);
        }
        Self::assembled(Source { json, config }, facts, pieces, encoder)
    }

    /// Assembles the tokenizer from the facts about it.
    fn assembled(source: Source, facts: Facts, pieces: Pieces, encoder: Encoder) -> Result<Self> {
        let (config, listed) = (&source.config, &facts.listed);
        let added: HashMap<u32, bool> = listed.iter().map(|(id, token)| (*id, token.special)).collect();
        let contents = listed.iter().map(|(id, token)| (token.content.as_str(), *id));
        let model = config.model.with_placeholders(contents, |id| !added.contains_key(&id) && pieces.get(id).is_some());
        let compile = |source: &Option<String>| {
            source.as_ref().map(|source| Template::compile(source, &config.special_tokens)).transpose()
        };
        Ok(Self {
            gaps: model.vocab_size.is_none() && pieces.has_gaps(),
            model,
            special_ids: listed.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect(),
            added_ids: listed.iter().map(|(id, token)| (token.content.clone(), *id)).collect(),
            added,
            partial: OnceLock::new(),
            template: compile(&config.chat_template)?,
            tool_template: compile(&config.tool_template)?,
            name: config.name.clone(),
            encoder: Arc::new(encoder),
            spelling: spelling(&facts.document),
            drops_first_space: facts.document.get("decoder").is_some_and(drops_first_space),
            pieces: Arc::new(pieces),
            prefix: facts.prefix,
            eos_ids: facts.eos_ids,
            stop_id: facts.stop_id,
            rebuilt: facts.rebuilt,
            source,
        })
    }
}

/// Returns the name in errors of a tokenizer without a file.
fn named(config: &TokenizerConfig) -> String {
    format!("the tokenizer '{}'", config.name)
}

/// Returns the bytes of all entries and added tokens.
fn spelled(vocab: &HashMap<String, u32>, document: &Value, listed: &[(u32, AddedToken)]) -> Result<Pieces> {
    let added: HashSet<u32> = listed.iter().map(|(id, _)| *id).collect();
    let mut pieces = Pieces::new(vocab, spelling(document), |id| added.contains(&id)).map_err(twice)?;
    for (id, token) in listed {
        pieces.put_added(*id, &token.content);
    }
    if let Some((prefix, suffix)) = document.get("decoder").and_then(mark) {
        pieces.share_marked(prefix, suffix);
    }
    Ok(pieces)
}

/// Returns the tiktoken file of a directory, if there is exactly one.
fn tiktoken_file(dir: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_tiktoken = |path: &PathBuf| {
        path.extension().is_some_and(|end| end == "tiktoken") || path.file_name().is_some_and(|n| n == "tiktoken.model")
    };
    let mut matches = files.filter(is_tiktoken);
    matches.next().filter(|_| matches.next().is_none())
}

/// Returns the error for an unreadable tokenizer.json, and names the file that the directory has instead.
fn missing(dir: &Path, error: &std::io::Error) -> Error {
    let other = ["tokenizer.model", "vocab.json", "tekken.json"].into_iter().find(|f| dir.join(f).exists());
    let what = match (dir.is_dir(), other) {
        (false, _) => "there is no such directory".to_owned(),
        (true, Some(other)) => format!("there is {other} but no tokenizer.json"),
        (true, None) => format!("tokenizer.json cannot be read: {error}"),
    };
    located(Error::new(Kind::Io, "TG-TOKENIZER-008", what), dir)
        .why("Ids are made by the fast tokenizer that tokenizer.json describes")
        .fix("Name the model's directory, or write the file with transformers' AutoTokenizer(...).save_pretrained")
}

/// Returns the error for an id with two entries.
fn twice(id: u32) -> Error {
    Error::new(Kind::Tokenizer, "TG-TOKENIZER-009", format!("two entries of the vocabulary have id {id}"))
        .why("The bytes of the id are ambiguous")
        .fix("Copy the file again from where the model came from")
}

/// Returns how the vocabulary represents bytes, according to decoder, pre-tokenizer and model.
fn spelling(document: &Value) -> Spelling {
    let has = |part: &str, kind: &str| {
        document.get(part).is_some_and(|part| values_under(part, "type").iter().any(|value| **value == kind))
    };
    let byte_fallback = document.pointer("/model/byte_fallback").and_then(Value::as_bool).unwrap_or(false);
    if has("decoder", "ByteLevel") || has("pre_tokenizer", "ByteLevel") || has("normalizer", "ByteLevel") {
        Spelling::ByteLevel
    } else if byte_fallback
        || has("decoder", "Metaspace")
        || has("decoder", "ByteFallback")
        || has("pre_tokenizer", "Metaspace")
    {
        Spelling::SentencePiece
    } else {
        Spelling::Other
    }
}

/// Returns true if a decoder removes the space before the first token, which SentencePiece models write before every
/// text.
fn drops_first_space(decoder: &Value) -> bool {
    let kind = decoder.get("type").and_then(Value::as_str);
    let strips = kind == Some("Strip") && decoder.get("start").and_then(Value::as_u64).is_some_and(|start| start > 0);
    let prepends = kind == Some("Metaspace") && decoder.get("prepend_scheme").is_none_or(|scheme| scheme != "never");
    let parts = decoder.get("decoders").and_then(Value::as_array);
    strips || prepends || parts.is_some_and(|parts| parts.iter().any(drops_first_space))
}

/// Returns the prefix and the suffix that a decoder removes from an entry, if it writes words instead of bytes.
fn mark(decoder: &Value) -> Option<(&str, &str)> {
    let text = |key: &str| decoder.get(key).and_then(Value::as_str);
    let parts = || decoder.get("decoders")?.as_array()?.iter().find_map(mark);
    let marks = match text("type") {
        Some("WordPiece") => Some((text("prefix").unwrap_or("##"), "")),
        Some("BPEDecoder") => Some(("", text("suffix").unwrap_or("</w>"))),
        _ => parts(),
    };
    marks.filter(|(prefix, suffix)| !prefix.is_empty() || !suffix.is_empty())
}

fn eos_ids(config: &TokenizerConfig, inner: &dyn Reference, size: u32) -> Result<Vec<u32>> {
    match &config.eos {
        None => Ok(Vec::new()),
        Some(Eos::Token(text)) => Ok(inner.id(text).into_iter().collect()),
        Some(Eos::Ids(ids)) if ids.len() > EOS => Err(Error::new(
            Kind::Tokenizer,
            "TG-TOKENIZER-010",
            format!("eos_token_id lists {} ids, more than {EOS}", ids.len()),
        )
        .why("Each token is compared with all of them")
        .fix("List only the ids that end a turn")),
        Some(Eos::Ids(ids)) => match ids.iter().find(|id| **id >= size) {
            None => Ok(ids.clone()),
            Some(id) => Err(Error::new(
                Kind::Tokenizer,
                "TG-TOKENIZER-011",
                format!("eos_token_id {id} is not in the vocabulary of {size}"),
            )
            .why("generation_config.json or config.json is of another model")
            .fix("Put the files of one model together")),
        },
    }
}
