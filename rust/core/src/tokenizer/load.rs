//! From files to a [`Tokenizer`]: checks that what was stated is what was loaded.
//!
//! The `tokenizers` crate renumbers added tokens without a word where their ids leave gaps; that is refused here. Called
//! by `Tokenizer::from_dir` and `Tokenizer::from_json`.

use super::allowance::bounded;
use super::check::checked;
use super::config::{Eos, ExtraToken, TokenizerConfig, located, whole};
use super::encoder::Encoder;
use super::fast::Fast;
use super::loaded::{Source, Tokenizer};
use super::outline::{refused, values_under};
use super::pieces::{Pieces, Spelling};
use super::reference::{Reference, build, prefix};
use super::tiktoken;
use crate::error::{Error, Kind, Result};
use crate::template::Template;
use crate::threads;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use tokenizers::AddedToken;

/// Ids that may end a turn.
const EOS: usize = 1024;

impl Tokenizer {
    /// Loads a model directory: tokenizer.json, or a tiktoken file of a known family, and what stands beside it.
    ///
    /// # Errors
    /// `Kind::Io` where there is no tokenizer.json or a file cannot be read; `Kind::Tokenizer` where one is not what
    /// it should be; `Kind::Template` for a chat template that does not compile. Each with the file.
    pub fn from_dir(path: &Path) -> Result<Self> {
        Self::from_dir_of(path, None)
    }

    /// As [`Tokenizer::from_dir`], for a model whose embedding has `vocab_size` rows, whatever config.json says.
    pub fn from_dir_of(dir: &Path, vocab_size: Option<u32>) -> Result<Self> {
        let mut config = TokenizerConfig::from_dir(dir)?;
        config.model.vocab_size = vocab_size.or(config.model.vocab_size);
        let (file, loaded) = match (whole(&dir.join("tokenizer.json")), tiktoken_file(dir)) {
            (Err(error), Some(file)) if error.kind() == ErrorKind::NotFound => {
                let ranks = whole(&file).map_err(|error| missing(dir, &error))?;
                let loaded = tiktoken::document(&ranks, &mut config).and_then(|json| Self::from_json(&json, &config));
                (file, loaded)
            }
            (Err(error), _) => return Err(missing(dir, &error)),
            (Ok(json), _) => (dir.join("tokenizer.json"), Self::from_json(&json, &config)),
        };
        let mut loaded = loaded.map_err(|error| {
            let place = if error.kind == Kind::Template { dir } else { &file };
            located(error, place)
        })?;
        // Nobody else has it yet.
        if let Some(encoder) = Arc::get_mut(&mut loaded.encoder) {
            encoder.name(file.display().to_string());
        }
        Ok(loaded)
    }

    /// The same tokenizer again, from its [`Tokenizer::source`].
    ///
    /// # Errors
    /// As [`Tokenizer::from_json`], and `Kind::Tokenizer` for another configuration.
    pub fn from_source(json: &[u8], config: &[u8]) -> Result<Self> {
        let config = serde_json::from_slice(config).map_err(|error| refused(&error.to_string()))?;
        Self::from_json(json, &config)
    }

    /// Loads the bytes of a tokenizer.json.
    ///
    /// # Errors
    /// `Kind::Tokenizer` where it is not a tokenizer, or its added tokens would not get the ids it states.
    pub fn from_json(json: &[u8], config: &TokenizerConfig) -> Result<Self> {
        let document = checked(json, &config.extra_tokens)?;
        let extra = missing_tokens(&document, &config.extra_tokens);
        let fast = || Fast::build(json, &document, &extra);
        let (fast, built) = threads::join(fast, || build(json).map(|inner| (inner.vocabulary(), inner)));
        let (vocab, mut inner) = built?;
        let own = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let stated = own.iter().filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?.as_u64()?)));
        check_stated(&*inner, stated)?;
        add_extra(&mut *inner, &extra, &config.extra_tokens)?;
        let spelling = spelling(&document);
        let drops_first_space = document.get("decoder").is_some_and(drops_first_space);
        let mut listed = inner.added();
        listed.sort_unstable_by_key(|(id, _)| *id);
        let added: HashMap<u32, bool> = listed.iter().map(|(id, token)| (*id, token.special)).collect();
        let mut pieces = Pieces::new(&vocab, spelling, |id| added.contains_key(&id)).map_err(twice)?;
        for (id, token) in &listed {
            pieces.put_added(*id, &token.content);
        }
        if let Some((before, behind)) = document.get("decoder").and_then(mark) {
            pieces.share_marked(before, behind);
        }
        let added_ids = listed.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
        let compile = |source: &Option<String>| {
            source.as_ref().map(|source| Template::compile(source, &config.special_tokens)).transpose()
        };
        let eos_ids = eos_ids(config, &*inner, pieces.size())?;
        let named = config.special_tokens.iter().find(|(name, _)| name == "eos_token");
        let named = named.and_then(|(_, text)| inner.id(text)).filter(|id| eos_ids.contains(id));
        let prefix = prefix(&*inner)?;
        let contents = listed.iter().map(|(id, token)| (token.content.as_str(), *id));
        let model = config.model.with_placeholders(contents, |id| !added.contains_key(&id) && pieces.get(id).is_some());
        Ok(Self {
            gaps: model.vocab_size.is_none() && pieces.has_gaps(),
            model,
            prefix,
            special_ids: listed.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect(),
            partial: OnceLock::new(),
            stop_id: named.or(eos_ids.first().copied().filter(|_| eos_ids.len() == 1)),
            eos_ids,
            template: compile(&config.chat_template)?,
            tool_template: compile(&config.tool_template)?,
            name: config.name.clone(),
            encoder: Arc::new(Encoder::new(
                inner,
                &document,
                &listed,
                fast,
                format!("the tokenizer '{}'", config.name),
            )),
            spelling,
            drops_first_space,
            pieces: Arc::new(pieces),
            added,
            added_ids,
            source: Source { json: json.into(), config: Arc::new(config.clone()) },
        })
    }
}

/// The one tiktoken file of a directory.
fn tiktoken_file(dir: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_tiktoken = |path: &PathBuf| {
        path.extension().is_some_and(|end| end == "tiktoken") || path.file_name().is_some_and(|n| n == "tiktoken.model")
    };
    let mut found = files.filter(is_tiktoken);
    found.next().filter(|_| found.next().is_none())
}

/// Why tokenizer.json cannot be read, and what the directory holds instead.
fn missing(dir: &Path, error: &std::io::Error) -> Error {
    let other = ["tokenizer.model", "vocab.json", "tekken.json"].into_iter().find(|f| dir.join(f).exists());
    let what = match (dir.is_dir(), other) {
        (false, _) => "there is no such directory".to_owned(),
        (true, Some(other)) => format!("there is {other} but no tokenizer.json"),
        (true, None) => format!("tokenizer.json cannot be read: {error}"),
    };
    located(Error::new(Kind::Io, what), dir)
        .why("Ids are made by the fast tokenizer that tokenizer.json describes")
        .cure("Name the model's directory, or write the file with transformers' AutoTokenizer(...).save_pretrained")
}

/// An id with two entries.
fn twice(id: u32) -> Error {
    Error::new(Kind::Tokenizer, format!("two entries of the vocabulary have id {id}"))
        .why("Which bytes the id stands for cannot be known")
        .cure("Copy the file again from where the model came from")
}

/// Those of `extra` that the document does not list itself.
fn missing_tokens(document: &Value, extra: &[ExtraToken]) -> Vec<ExtraToken> {
    let listed = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let known: HashSet<&str> = listed.iter().filter_map(|token| token.get("content")?.as_str()).collect();
    extra.iter().filter(|token| !token.content.is_empty() && !known.contains(&*token.content)).cloned().collect()
}

/// Refuses tokens, by their texts and ids, that would get other ids than are stated.
fn check_stated<'a>(inner: &dyn Reference, tokens: impl Iterator<Item = (&'a str, u64)>) -> Result<()> {
    for (content, stated) in tokens.filter(|(content, _)| !content.is_empty()) {
        let loaded = inner.id(content);
        if loaded.map(u64::from) != Some(stated) {
            let loaded = loaded.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let what = format!("added token '{content}' has id {stated} but would be loaded with {loaded}");
            return Err(Error::new(Kind::Tokenizer, what)
                .why("The ids before it leave a gap, and the tokenizers library fills it by renumbering: prompts would not be what the model saw")
                .cure("Add the ids that are missing to added_tokens, as reserved tokens"));
        }
    }
    Ok(())
}

/// Adds the tokens that only tokenizer_config.json lists, and checks the ids of all that it lists.
fn add_extra(inner: &mut dyn Reference, missing: &[ExtraToken], all: &[ExtraToken]) -> Result<()> {
    let added = |token: &ExtraToken| {
        AddedToken::from(token.content.clone(), token.special)
            .normalized(token.normalized)
            .lstrip(token.strips.0)
            .rstrip(token.strips.1)
            .single_word(token.single_word)
    };
    if !missing.is_empty() {
        let tokens: Vec<AddedToken> = missing.iter().map(added).collect();
        bounded(missing.len(), "adding the tokens of tokenizer_config.json", || inner.add(tokens))?;
    }
    check_stated(inner, all.iter().map(|token| (token.content.as_str(), u64::from(token.id))))
}

/// How the vocabulary spells bytes, from decoder, pre-tokenizer and model.
fn spelling(document: &Value) -> Spelling {
    let has = |part: &str, kind: &str| {
        document.get(part).is_some_and(|part| values_under(part, "type").iter().any(|found| **found == kind))
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

/// Whether a decoder takes the space off the first token, which SentencePiece models write before every text.
fn drops_first_space(decoder: &Value) -> bool {
    let kind = decoder.get("type").and_then(Value::as_str);
    let strips = kind == Some("Strip") && decoder.get("start").and_then(Value::as_u64).is_some_and(|start| start > 0);
    let prepends = kind == Some("Metaspace") && decoder.get("prepend_scheme").is_none_or(|scheme| scheme != "never");
    let parts = decoder.get("decoders").and_then(Value::as_array);
    strips || prepends || parts.is_some_and(|parts| parts.iter().any(drops_first_space))
}

/// What a decoder takes off an entry, before it and behind it, where it writes words and not bytes.
fn mark(decoder: &Value) -> Option<(&str, &str)> {
    let text = |key: &str| decoder.get(key).and_then(Value::as_str);
    let parts = || decoder.get("decoders")?.as_array()?.iter().find_map(mark);
    let found = match text("type") {
        Some("WordPiece") => Some((text("prefix").unwrap_or("##"), "")),
        Some("BPEDecoder") => Some(("", text("suffix").unwrap_or("</w>"))),
        _ => parts(),
    };
    found.filter(|(before, behind)| !before.is_empty() || !behind.is_empty())
}

fn eos_ids(config: &TokenizerConfig, inner: &dyn Reference, size: u32) -> Result<Vec<u32>> {
    match &config.eos {
        None => Ok(Vec::new()),
        Some(Eos::Token(text)) => Ok(inner.id(text).into_iter().collect()),
        Some(Eos::Ids(ids)) if ids.len() > EOS => {
            Err(Error::new(Kind::Tokenizer, format!("eos_token_id lists {} ids, more than {EOS}", ids.len()))
                .why("Each token is compared with all of them")
                .cure("List only the ids that end a turn"))
        }
        Some(Eos::Ids(ids)) => match ids.iter().find(|id| **id >= size) {
            None => Ok(ids.clone()),
            Some(id) => {
                Err(Error::new(Kind::Tokenizer, format!("eos_token_id {id} is not in the vocabulary of {size}"))
                    .why("generation_config.json or config.json is of another model")
                    .cure("Put the files of one model together"))
            }
        },
    }
}
