//! From files to a [`Tokenizer`]: checks that what was stated is what was loaded.
//!
//! The `tokenizers` crate renumbers added tokens without a word where their ids leave gaps; that is refused here. Called
//! by `Tokenizer::from_dir` and `Tokenizer::from_json`.

use super::config::{Eos, TokenizerConfig, located};
use super::encoder::{self, Encoder};
use super::pieces::{Pieces, Spelling};
use super::{ExtraToken, Tokenizer, tiktoken};
use crate::error::{Error, Kind, Result};
use crate::template::Template;
use crate::threads;
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

pub(super) fn from_dir(dir: &Path) -> Result<Tokenizer> {
    let mut config = TokenizerConfig::from_dir(dir)?;
    let (file, loaded) = match (fs::read(dir.join("tokenizer.json")), tiktoken_file(dir)) {
        (Err(error), Some(file)) if error.kind() == ErrorKind::NotFound => {
            let ranks = fs::read(&file).map_err(|error| missing(dir, &error))?;
            let loaded = tiktoken::document(&ranks, &mut config).and_then(|json| from_json(&json, &config));
            (file, loaded)
        }
        (Err(error), _) => return Err(missing(dir, &error)),
        (Ok(json), _) => (dir.join("tokenizer.json"), from_json(&json, &config)),
    };
    loaded.map_err(|error| match error.kind {
        Kind::Template => located(error, dir),
        _ => located(error, &file),
    })
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

pub(super) fn from_json(json: &[u8], config: &TokenizerConfig) -> Result<Tokenizer> {
    let fast = || {
        let document: Value =
            serde_json::from_slice(json).map_err(|error| refused(&format!("it is not JSON: {error}")))?;
        let frame = without_vocabulary(&document);
        Ok((frame, encoder::prepare(document, &config.extra_tokens)))
    };
    let (fast, built) = threads::join(fast, || build(json).map(|inner| (inner.get_vocab(false), inner)));
    let (document, fast) = fast?;
    let (vocab, mut inner) = built?;
    check_stated_ids(&document, &inner)?;
    add_extra(&mut inner, &config.extra_tokens)?;
    let spelling = spelling(&document);
    let drops_first_space = document.get("decoder").is_some_and(drops_first_space);
    let added: HashMap<u32, bool> =
        inner.get_added_tokens_decoder().iter().map(|(id, token)| (*id, token.special)).collect();
    let mut pieces = Pieces::new(&vocab, spelling, |id| added.contains_key(&id));
    let mut added_ids = HashMap::new();
    for (id, token) in inner.get_added_tokens_decoder() {
        pieces.put(id, token.content.as_bytes());
        added_ids.insert(token.content, id);
    }
    let compile = |source: &Option<String>| {
        source.as_ref().map(|source| Template::compile(source, &config.special_tokens)).transpose()
    };
    let eos_ids = eos_ids(config, &inner, pieces.size())?;
    let named = config.special_tokens.iter().find(|(name, _)| name == "eos_token");
    let named = named.and_then(|(_, text)| inner.token_to_id(text)).filter(|id| eos_ids.contains(id));
    let prefix = prefix(&inner);
    let contents = added_ids.iter().map(|(content, id)| (content.as_str(), *id));
    let model = config.model.with_placeholders(contents, |id| !added.contains_key(&id) && pieces.get(id).is_some());
    let mut special_ids: Vec<u32> = added.iter().filter(|(_, special)| **special).map(|(id, _)| *id).collect();
    special_ids.sort_unstable();
    let listed: Vec<(u32, AddedToken)> = inner.get_added_tokens_decoder().into_iter().collect();
    Ok(Tokenizer {
        model,
        prefix,
        special_ids,
        partial: OnceLock::new(),
        stop_id: named.or(eos_ids.first().copied().filter(|_| eos_ids.len() == 1)),
        eos_ids,
        template: compile(&config.chat_template)?,
        tool_template: compile(&config.tool_template)?,
        name: config.name.clone(),
        encoder: Encoder::new(inner, &document, &listed, fast),
        spelling,
        drops_first_space,
        pieces,
        added,
        added_ids,
    })
}

/// What the post-processor puts before a text: BOS, where there is one.
fn prefix(inner: &tokenizers::Tokenizer) -> Vec<u32> {
    const TEXT: &str = "a";
    let ids = |special| inner.encode_fast(TEXT, special).map(|encoding| encoding.get_ids().to_vec());
    let (Ok(plain), Ok(processed)) = (ids(false), ids(true)) else { return Vec::new() };
    let at = processed.windows(plain.len().max(1)).position(|window| window == plain);
    at.map(|at| processed[..at].to_vec()).unwrap_or_default()
}

/// The document but for its entries and merges.
fn without_vocabulary(document: &Value) -> Value {
    let Value::Object(parts) = document else { return Value::Null };
    let small = |(name, part): (&String, &Value)| match part {
        Value::Object(model) if name == "model" => {
            let kept = model.iter().filter(|(name, _)| !matches!(name.as_str(), "vocab" | "merges"));
            (name.clone(), kept.map(|(name, value)| (name.clone(), value.clone())).collect())
        }
        part => (name.clone(), part.clone()),
    };
    parts.iter().map(small).collect()
}

fn refused(what: &str) -> Error {
    Error::new(Kind::Tokenizer, what.to_owned())
        .why("Ids are made by the fast tokenizer that tokenizer.json describes")
        .cure("Copy the file again from where the model came from")
}

/// A tokenizer whose model is known, which is read in half the time.
type BpeTokenizer = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The crate's tokenizer; a panic of it on a malformed file is an error like any other.
fn build(json: &[u8]) -> Result<tokenizers::Tokenizer> {
    let read = || match serde_json::from_slice::<BpeTokenizer>(json) {
        Ok(tokenizer) => Ok(tokenizer.into()),
        Err(_) => tokenizers::Tokenizer::from_bytes(json),
    };
    let mut inner = match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(tokenizer)) => tokenizer,
        Ok(Err(error)) => return Err(refused(&format!("it is no tokenizer: {error}"))),
        Err(_) => return Err(refused("it is no tokenizer: its parts contradict one another")),
    };
    let _ = inner.with_truncation(None);
    inner.with_padding(None);
    Ok(inner)
}

/// Refuses a file whose added tokens would get other ids than it states.
fn check_stated_ids(document: &Value, inner: &tokenizers::Tokenizer) -> Result<()> {
    let Some(Value::Array(tokens)) = document.get("added_tokens") else { return Ok(()) };
    for token in tokens {
        let (Some(stated), Some(content)) =
            (token.get("id").and_then(Value::as_u64), token.get("content").and_then(Value::as_str))
        else {
            continue;
        };
        let loaded = inner.token_to_id(content);
        if loaded.map(u64::from) != Some(stated) && !content.is_empty() {
            return Err(renumbered(content, stated, loaded));
        }
    }
    Ok(())
}

fn renumbered(content: &str, stated: u64, loaded: Option<u32>) -> Error {
    let loaded = loaded.map_or_else(|| "none".to_owned(), |id| id.to_string());
    Error::new(Kind::Tokenizer, format!("added token '{content}' has id {stated} but would be loaded with {loaded}"))
        .why("The ids before it leave a gap, and the tokenizers library fills it by renumbering: prompts would not be what the model saw")
        .cure("Add the ids that are missing to added_tokens, as reserved tokens")
}

/// Adds the tokens that only tokenizer_config.json lists.
fn add_extra(inner: &mut tokenizers::Tokenizer, extra: &[ExtraToken]) -> Result<()> {
    for token in extra.iter().filter(|token| !token.content.is_empty()) {
        if !inner.get_added_vocabulary().get_vocab().contains_key(&token.content) {
            let added = AddedToken::from(token.content.clone(), token.special)
                .normalized(token.normalized)
                .lstrip(token.strips.0)
                .rstrip(token.strips.1)
                .single_word(token.single_word);
            inner.add_tokens([added]).map_err(|error| refused(&format!("an added token cannot be added: {error}")))?;
        }
        let loaded = inner.token_to_id(&token.content);
        if loaded != Some(token.id) {
            return Err(renumbered(&token.content, u64::from(token.id), loaded));
        }
    }
    Ok(())
}

/// How the vocabulary spells bytes, from decoder, pre-tokenizer and model.
fn spelling(document: &Value) -> Spelling {
    let has = |part: &str, kind: &str| document.get(part).is_some_and(|part| mentions(part, kind));
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

/// Whether a component or one of a sequence of them is of `kind`.
fn mentions(part: &Value, kind: &str) -> bool {
    match part {
        Value::Object(map) => {
            map.get("type").and_then(Value::as_str) == Some(kind) || map.values().any(|value| mentions(value, kind))
        }
        Value::Array(items) => items.iter().any(|item| mentions(item, kind)),
        _ => false,
    }
}

fn eos_ids(config: &TokenizerConfig, inner: &tokenizers::Tokenizer, size: u32) -> Result<Vec<u32>> {
    match &config.eos {
        None => Ok(Vec::new()),
        Some(Eos::Token(text)) => Ok(inner.token_to_id(text).into_iter().collect()),
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
