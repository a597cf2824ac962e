//! Reads the files next to a tokenizer.json: special tokens, chat template, end-of-sequence ids, ids of media.
//!
//! `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json` and
//! `config.json` of a model directory are read as transformers does. The model's weights are not read.

use crate::error::{Error, Kind, Location, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Special tokens that have names in templates and tokenizers.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// End-of-sequence tokens, by id, or by text if only the tokenizer can determine the id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Eos {
    /// Ids from `generation_config.json` or `config.json`.
    Ids(Vec<u32>),
    /// The `eos_token` of `tokenizer_config.json`.
    Token(String),
}

/// An added token that only `tokenizer_config.json` lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "the flags of an added token in tokenizer.json")]
pub struct ExtraToken {
    /// Its required id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// True if decoding with `skip_special_tokens` omits it.
    pub special: bool,
    /// True if it matches text after normalization.
    pub normalized: bool,
    /// True if it includes whitespace on its left.
    pub lstrip: bool,
    /// True if it includes whitespace on its right.
    pub rstrip: bool,
    /// True if it matches whole words only.
    pub single_word: bool,
}

impl ExtraToken {
    /// Returns the token in the form in which tokenizer.json lists an added token.
    pub(super) fn stated(&self) -> Value {
        json!({"id": self.id, "content": self.content, "special": self.special, "normalized": self.normalized,
            "lstrip": self.lstrip, "rstrip": self.rstrip, "single_word": self.single_word})
    }
}

/// The settings that decide which class transformers loads.
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
    /// True if the model has its own tokenizer class, whose code is unknown here.
    pub has_remote_code: bool,
}

impl Class {
    /// Reads the settings from the files of a model directory.
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
            has_remote_code: code.is_some_and(|code| !code.is_null()),
        }
    }
}

/// All facts about a tokenizer that tokenizer.json does not contain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerConfig {
    /// Name for messages and reports.
    pub name: String,
    /// Jinja source.
    pub chat_template: Option<String>,
    /// Jinja source for conversations with tools, if the model has a separate one.
    pub tool_template: Option<String>,
    /// `bos_token` and so on, for the template.
    pub special_tokens: Vec<(String, String)>,
    /// End-of-sequence tokens; `None` if no file specifies them.
    pub eos: Option<Eos>,
    /// Added tokens in addition to those of tokenizer.json.
    pub extra_tokens: Vec<ExtraToken>,
    /// Facts about ids from config.json.
    pub model: Model,
    /// The settings that decide which class transformers loads.
    #[serde(default)]
    pub class: Class,
}

impl TokenizerConfig {
    /// Reads the files that exist in a model directory.
    ///
    /// # Errors
    /// `Kind::Tokenizer` or `Kind::Io` if a file is not JSON or cannot be read.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let config = object(dir, "tokenizer_config.json")?.unwrap_or_default();
        let map = object(dir, "special_tokens_map.json")?.unwrap_or_default();
        let name =
            dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
        let mut result = Self { name, ..Self::default() };
        for token in NAMES {
            let text = config.get(token).and_then(token_text).or_else(|| map.get(token).and_then(token_text));
            result.special_tokens.extend(text.map(|text| (token.to_owned(), text)));
        }
        result.extra_tokens = extra_tokens(&config);
        let model = object(dir, "config.json")?;
        result.model = model.as_ref().map(Model::of).unwrap_or_default();
        result.class = Class::of(&config, model.as_ref());
        result.eos = eos(dir, &result.special_tokens)?;
        (result.chat_template, result.tool_template) = templates(dir, &config)?;
        Ok(result)
    }
}

/// Returns the text of a token written as a string or as an object with `content`.
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
                lstrip: flag("lstrip"),
                rstrip: flag("rstrip"),
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

/// Parses one id or a list of ids.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(values) => values.iter().map(id).collect(),
        single => id(single).map(|id| vec![id]),
    }
}

/// Returns the chat template and the one for tools: from chat_template.jinja, else from the config.
fn templates(dir: &Path, config: &Map<String, Value>) -> Result<(Option<String>, Option<String>)> {
    let tool_file = text(&dir.join("additional_chat_templates").join("tool_use.jinja"))?;
    if let Some(source) = text(&dir.join("chat_template.jinja"))? {
        return Ok((Some(source), tool_file));
    }
    Ok(match config.get("chat_template") {
        Some(Value::String(source)) => (Some(source.clone()), tool_file),
        Some(Value::Array(entries)) => {
            let find = |name: &str| {
                let entry = entries.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
                entry.get("template")?.as_str().map(str::to_owned)
            };
            (find("default"), find("tool_use").or(tool_file))
        }
        _ => (None, tool_file),
    })
}

/// Maximum bytes of a file next to a model.
const FILE_BYTES: u64 = 1 << 30;

/// Reads a file's bytes. A pipe or a device, which may never end, is rejected.
pub(super) fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES {
        return Err(std::io::Error::other("it is no regular file of at most 1 GiB"));
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    fs::File::open(path)?.take(FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a file's text, or returns `None` if the file does not exist.
fn text(path: &Path) -> Result<Option<String>> {
    let utf8 = |bytes| String::from_utf8(bytes).map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error));
    match read_file(path).and_then(utf8) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(located(Error::new(Kind::Io, "TG-TOKENIZER-005", format!("the file cannot be read: {error}")), path)
                .fix("Check its permissions, and that it is UTF-8 text"))
        }
    }
}

/// Reads a JSON object from `file`, or returns `None` if the file does not exist.
fn object(dir: &Path, file: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(file);
    let Some(text) = text(&path)? else { return Ok(None) };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        other => {
            let what = other
                .err()
                .map_or_else(|| "it holds no JSON object".to_owned(), |error| format!("it is not JSON: {error}"));
            Err(located(Error::new(Kind::Tokenizer, "TG-TOKENIZER-006", what), &path)
                .why("It defines special tokens, template and end-of-sequence ids")
                .fix("Copy the file again from where the model came from"))
        }
    }
}

/// Adds the file to the error.
pub(super) fn located(error: Error, path: &Path) -> Error {
    error.at(&Location { file: Some(path.display().to_string().into()), ..Location::default() })
}

/// Number of nesting levels of config.json that are searched.
const DEEPEST: usize = 4;
/// Beginnings of the words in a placeholder's text, or in its key in config.json.
const MEDIA: [&str; 9] = ["image", "img", "video", "vision", "audio", "speech", "sound", "picture", "media"];

/// Facts about the ids of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Number of rows of its embedding; `None` if unspecified.
    pub vocab_size: Option<u32>,
    /// Ids that represent images, audio and video, in order.
    pub placeholders: Vec<u32>,
    /// True if servers write its prompts in the harmony format, without its template.
    pub speaks_harmony: bool,
}

impl Model {
    /// Reads the facts from config.json. If the model has several parts, the one for text decides.
    pub fn of(config: &Map<String, Value>) -> Self {
        let size = |config: &Map<String, Value>| {
            let size = config.get("vocab_size")?.as_u64()?;
            u32::try_from(size).ok().filter(|size| *size > 0)
        };
        let text = config.get("text_config").and_then(Value::as_object).and_then(size);
        let mut placeholders = Vec::new();
        media_ids(config, DEEPEST, &mut placeholders);
        let speaks_harmony = config.get("model_type").is_some_and(|name| name == "gpt_oss");
        Self { vocab_size: text.or_else(|| size(config)), placeholders, speaks_harmony }
    }

    /// Adds the added tokens whose texts name media. Ids for which `is_word` is true are removed.
    pub(super) fn with_placeholders<'a>(
        &self,
        added: impl Iterator<Item = (&'a str, u32)>,
        is_word: impl Fn(u32) -> bool,
    ) -> Self {
        let by_text = added.filter(|(content, _)| says_media(content) || *content == "<|patch|>").map(|(_, id)| id);
        let by_config = self.placeholders.iter().copied().filter(|id| !is_word(*id));
        let mut placeholders: Vec<u32> = by_text.chain(by_config).collect();
        placeholders.sort_unstable();
        placeholders.dedup();
        Self { placeholders, ..self.clone() }
    }

    /// Returns the position of the first of `ids` that is a media placeholder.
    pub fn first_placeholder(&self, ids: &[u32]) -> Option<usize> {
        const BLOCK: usize = 64;
        let (first, last) = (*self.placeholders.first()?, *self.placeholders.last()?);
        let near = |id: u32| id.wrapping_sub(first) <= last - first;
        let is_placeholder = |id: &u32| near(*id) && self.placeholders.binary_search(id).is_ok();
        let mut blocks = ids.chunks(BLOCK).enumerate();
        blocks.find_map(|(index, block)| {
            // Avoids a branch for each id.
            let any_near = block.iter().fold(false, |any_near, &id| any_near | near(id));
            let at = if any_near { block.iter().position(is_placeholder) } else { None };
            at.map(|at| index * BLOCK + at)
        })
    }
}

/// Collects ids under keys such as `image_token_id`, `video_token_index`, `vision_start_token_id`.
fn media_ids(config: &Map<String, Value>, deepest: usize, ids: &mut Vec<u32>) {
    for (key, value) in config {
        match value {
            Value::Object(inner) if deepest > 0 => media_ids(inner, deepest - 1, ids),
            Value::Number(id) if (key.ends_with("_token_id") || key.ends_with("_token_index")) && says_media(key) => {
                ids.extend(id.as_u64().and_then(|id| u32::try_from(id).ok()));
            }
            _ => {}
        }
    }
}

/// Returns true if a word of the text starts with the name of a medium.
fn says_media(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    text.split(|sign: char| !sign.is_ascii_alphanumeric())
        .any(|word| MEDIA.iter().any(|medium| word.starts_with(medium)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(config: &Value) -> Model {
        Model::of(config.as_object().unwrap())
    }

    #[test]
    fn the_text_config_determines_the_vocabulary_size() {
        assert_eq!(model(&json!({"vocab_size": 70})).vocab_size, Some(70));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {"vocab_size": 90}})).vocab_size, Some(90));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {}})).vocab_size, Some(70));
        for wrong in [json!(0), json!(-1), json!("70"), json!(null), json!(1_u64 << 40)] {
            assert_eq!(model(&json!({"vocab_size": wrong})).vocab_size, None);
        }
    }

    #[test]
    fn placeholders_come_from_config_and_from_their_texts() {
        let config = json!({"image_token_id": 200, "eos_token_id": 7, "vision_config": {"video_token_index": 5}});
        let added = [("<|image_pad|>", 9), ("<|im_end|>", 8), ("<img>", 10), ("<|patch|>", 11), ("<imagine", 12)];
        // 5 is an ordinary word of the vocabulary, regardless of config.json.
        let result = model(&config).with_placeholders(added.into_iter(), |id| id == 5);
        assert_eq!(result.placeholders, [9, 10, 11, 200]);
    }

    #[test]
    fn the_first_placeholder_is_found_at_any_position() {
        let model = Model { vocab_size: None, placeholders: vec![50, 60], speaks_harmony: false };
        for at in [0, 1, 63, 64, 65, 199] {
            let mut ids: Vec<u32> = (0..200).map(|k| if k % 2 == 0 { 55 } else { 61 }).collect();
            assert_eq!(model.first_placeholder(&ids), None);
            ids[at] = 60;
            assert_eq!(model.first_placeholder(&ids), Some(at));
        }
        assert_eq!(Model::default().first_placeholder(&[0]), None);
    }
}
