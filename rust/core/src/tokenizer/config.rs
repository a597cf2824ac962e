//! What stands beside a tokenizer.json: special tokens, chat template, end-of-sequence ids.
//!
//! Reads `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json` and
//! `config.json` of a model directory as transformers does. Called by `Tokenizer::from_dir`.

use super::model::Model;
use crate::error::{Error, Kind, Location, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Special tokens that templates and tokenizers know by name.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// End-of-sequence tokens by id, or by text where only the tokenizer knows the id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Eos {
    /// Ids, as `generation_config.json` or `config.json` give them.
    Ids(Vec<u32>),
    /// The `eos_token` of `tokenizer_config.json`.
    Token(String),
}

/// An added token that only `tokenizer_config.json` lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtraToken {
    /// The id it must have.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Whether decoding for people leaves it out.
    pub special: bool,
    /// Whether it matches text after normalisation.
    pub normalized: bool,
    /// Whether it takes in whitespace on its left and on its right.
    pub strips: (bool, bool),
    /// Whether it matches whole words only.
    pub single_word: bool,
}

impl ExtraToken {
    /// As tokenizer.json lists an added token.
    pub(super) fn stated(&self) -> Value {
        json!({"id": self.id, "content": self.content, "special": self.special, "normalized": self.normalized,
            "lstrip": self.strips.0, "rstrip": self.strips.1, "single_word": self.single_word})
    }
}

/// What decides which class transformers loads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    /// `tokenizer_class` of tokenizer_config.json, else of config.json.
    pub name: Option<String>,
    /// `model_type` of config.json.
    pub model_type: Option<String>,
    /// `add_prefix_space` of tokenizer_config.json.
    pub add_prefix_space: Option<bool>,
    /// `legacy` of tokenizer_config.json.
    pub legacy: Option<bool>,
    /// `unk_token` of tokenizer_config.json.
    pub unk_token: Option<String>,
    /// Whether the model has a tokenizer class of its own, whose code is not known here.
    pub has_code: bool,
}

impl Class {
    /// What the files of a model directory say.
    fn of(tokenizer: &Map<String, Value>, model: Option<&Map<String, Value>>) -> Self {
        let text = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_str).map(str::to_owned);
        let flag = |key: &str| tokenizer.get(key).and_then(Value::as_bool);
        let code = tokenizer.get("auto_map").and_then(|map| map.get("AutoTokenizer").or_else(|| map.get(0)));
        let unk = tokenizer.get("unk_token");
        Self {
            name: text(tokenizer, "tokenizer_class").or_else(|| text(model?, "tokenizer_class")),
            model_type: model.and_then(|model| text(model, "model_type")),
            add_prefix_space: flag("add_prefix_space"),
            legacy: flag("legacy"),
            unk_token: unk.and_then(|unk| unk.as_str().or_else(|| unk.get("content")?.as_str())).map(str::to_owned),
            has_code: code.is_some_and(|code| !code.is_null()),
        }
    }
}

/// Everything about a tokenizer that tokenizer.json does not hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerConfig {
    /// Name for messages and reports.
    pub name: String,
    /// Jinja source.
    pub chat_template: Option<String>,
    /// Jinja source for conversations with tools, where the model has one of its own.
    pub tool_template: Option<String>,
    /// `bos_token` and so on, for the template.
    pub special_tokens: Vec<(String, String)>,
    /// End-of-sequence tokens; `None` where nothing says.
    pub eos: Option<Eos>,
    /// Added tokens beside those of tokenizer.json.
    pub extra_tokens: Vec<ExtraToken>,
    /// What config.json says of ids.
    pub model: Model,
    /// What decides which class transformers loads.
    #[serde(default)]
    pub class: Class,
}

impl TokenizerConfig {
    /// Reads the files of a model directory that are there.
    ///
    /// # Errors
    /// `Kind::Tokenizer` or `Kind::Io` for a file that is not JSON or cannot be read.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let config = object(dir, "tokenizer_config.json")?.unwrap_or_default();
        let map = object(dir, "special_tokens_map.json")?.unwrap_or_default();
        let name =
            dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
        let mut read = Self { name, ..Self::default() };
        for token in NAMES {
            let text = config.get(token).and_then(token_text).or_else(|| map.get(token).and_then(token_text));
            read.special_tokens.extend(text.map(|text| (token.to_owned(), text)));
        }
        read.extra_tokens = extra_tokens(&config);
        let model = object(dir, "config.json")?;
        read.model = model.as_ref().map(Model::of).unwrap_or_default();
        read.class = Class::of(&config, model.as_ref());
        read.eos = eos(dir, &read.special_tokens)?;
        (read.chat_template, read.tool_template) = templates(dir, &config)?;
        Ok(read)
    }
}

/// The text of a token given as a string or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

fn extra_tokens(config: &Map<String, Value>) -> Vec<ExtraToken> {
    let Some(Value::Object(tokens)) = config.get("added_tokens_decoder") else { return Vec::new() };
    let mut extra: Vec<ExtraToken> = tokens
        .iter()
        .filter_map(|(id, token)| {
            let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
            Some(ExtraToken {
                id: id.parse().ok()?,
                content: token_text(token)?,
                special: flag("special"),
                normalized: flag("normalized"),
                strips: (flag("lstrip"), flag("rstrip")),
                single_word: flag("single_word"),
            })
        })
        .collect();
    extra.sort_by_key(|token| token.id);
    extra
}

fn eos(dir: &Path, special_tokens: &[(String, String)]) -> Result<Option<Eos>> {
    for file in ["generation_config.json", "config.json"] {
        let Some(config) = object(dir, file)? else { continue };
        let nested = config.get("text_config").and_then(|text| text.get("eos_token_id"));
        if let Some(ids) = config.get("eos_token_id").or(nested).and_then(ids) {
            return Ok(Some(Eos::Ids(ids)));
        }
    }
    let token = special_tokens.iter().find(|(name, _)| name == "eos_token");
    Ok(token.map(|(_, text)| Eos::Token(text.clone())))
}

/// One id or a list of them.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(values) => values.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    }
}

/// The chat template and the one for tools: from chat_template.jinja, else from the config.
fn templates(dir: &Path, config: &Map<String, Value>) -> Result<(Option<String>, Option<String>)> {
    let tool_file = text(&dir.join("additional_chat_templates").join("tool_use.jinja"))?;
    if let Some(source) = text(&dir.join("chat_template.jinja"))? {
        return Ok((Some(source), tool_file));
    }
    Ok(match config.get("chat_template") {
        Some(Value::String(source)) => (Some(source.clone()), tool_file),
        Some(Value::Array(named)) => {
            let find = |wanted: &str| {
                let entry = named.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(wanted))?;
                entry.get("template")?.as_str().map(str::to_owned)
            };
            (find("default"), find("tool_use").or(tool_file))
        }
        _ => (None, tool_file),
    })
}

/// Bytes of a file beside a model that is read.
const FILE_BYTES: u64 = 1 << 30;

/// A file's bytes; a pipe or a device, which may never end, is refused.
pub(super) fn whole(path: &Path) -> std::io::Result<Vec<u8>> {
    let found = fs::metadata(path)?;
    if !found.is_file() || found.len() > FILE_BYTES {
        return Err(std::io::Error::other("it is no regular file of at most 1 GiB"));
    }
    let mut bytes = Vec::with_capacity(found.len() as usize);
    fs::File::open(path)?.take(FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file's text, `None` where there is no such file.
fn text(path: &Path) -> Result<Option<String>> {
    let utf8 = |bytes| String::from_utf8(bytes).map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error));
    match whole(path).and_then(utf8) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(located(Error::new(Kind::Io, format!("the file cannot be read: {error}")), path)
            .cure("Check its permissions, and that it is UTF-8 text")),
    }
}

/// A JSON object in `file`, `None` where there is no such file.
fn object(dir: &Path, file: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(file);
    let Some(text) = text(&path)? else { return Ok(None) };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        other => {
            let what = other
                .err()
                .map_or_else(|| "it holds no JSON object".to_owned(), |error| format!("it is not JSON: {error}"));
            Err(located(Error::new(Kind::Tokenizer, what), &path)
                .why("Special tokens, template and end-of-sequence ids come from it")
                .cure("Copy the file again from where the model came from"))
        }
    }
}

/// The error with its file.
pub(super) fn located(error: Error, path: &Path) -> Error {
    error.at(&Location { file: Some(path.display().to_string().into()), ..Location::default() })
}
