//! Reads what stands beside a tokenizer.json: special tokens, chat template, end-of-sequence ids, ids of media.
//!
//! `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json` and `config.json`
//! of a model directory are read as transformers does. Nothing of the model's weights is read.

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

/// Levels of config.json that are looked through.
const DEEPEST: usize = 4;
/// What the words of a placeholder's text, or of its key in config.json, begin with.
const MEDIA: [&str; 9] = ["image", "img", "video", "vision", "audio", "speech", "sound", "picture", "media"];

/// What a model says of its ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Rows of its embedding; `None` where nothing says.
    pub vocab_size: Option<u32>,
    /// Ids that stand for pictures, sound and video, in order.
    pub placeholders: Vec<u32>,
    /// Whether servers write its prompts in the harmony format, without its template.
    pub speaks_harmony: bool,
}

impl Model {
    /// What config.json says. The part for text decides, where the model has several.
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

    /// With the added tokens whose texts say media; an id that `is_word` is none.
    pub(super) fn with_placeholders<'a>(
        &self,
        added: impl Iterator<Item = (&'a str, u32)>,
        is_word: impl Fn(u32) -> bool,
    ) -> Self {
        let named = added.filter(|(content, _)| says_media(content) || *content == "<|patch|>").map(|(_, id)| id);
        let stated = self.placeholders.iter().copied().filter(|id| !is_word(*id));
        let mut placeholders: Vec<u32> = named.chain(stated).collect();
        placeholders.sort_unstable();
        placeholders.dedup();
        Self { placeholders, ..self.clone() }
    }

    /// The first of `ids` that stands for media.
    pub fn first_placeholder(&self, ids: &[u32]) -> Option<usize> {
        const BLOCK: usize = 64;
        let (first, last) = (*self.placeholders.first()?, *self.placeholders.last()?);
        let near = |id: u32| id.wrapping_sub(first) <= last - first;
        let stands = |id: &u32| near(*id) && self.placeholders.binary_search(id).is_ok();
        let mut blocks = ids.chunks(BLOCK).enumerate();
        blocks.find_map(|(index, block)| {
            // Without a branch for each id.
            let any = block.iter().fold(false, |any, &id| any | near(id));
            let at = if any { block.iter().position(stands) } else { None };
            at.map(|at| index * BLOCK + at)
        })
    }
}

/// Ids under keys such as `image_token_id`, `video_token_index`, `vision_start_token_id`.
fn media_ids(config: &Map<String, Value>, deepest: usize, found: &mut Vec<u32>) {
    for (key, value) in config {
        match value {
            Value::Object(inner) if deepest > 0 => media_ids(inner, deepest - 1, found),
            Value::Number(id) if (key.ends_with("_token_id") || key.ends_with("_token_index")) && says_media(key) => {
                found.extend(id.as_u64().and_then(|id| u32::try_from(id).ok()));
            }
            _ => {}
        }
    }
}

/// Whether a word of the text begins with the name of a medium.
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
    fn the_part_for_text_says_how_many_rows_there_are() {
        assert_eq!(model(&json!({"vocab_size": 70})).vocab_size, Some(70));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {"vocab_size": 90}})).vocab_size, Some(90));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {}})).vocab_size, Some(70));
        for wrong in [json!(0), json!(-1), json!("70"), json!(null), json!(1_u64 << 40)] {
            assert_eq!(model(&json!({"vocab_size": wrong})).vocab_size, None);
        }
    }

    #[test]
    fn placeholders_are_told_by_config_and_by_their_texts() {
        let config = json!({"image_token_id": 200, "eos_token_id": 7, "vision_config": {"video_token_index": 5}});
        let added = [("<|image_pad|>", 9), ("<|im_end|>", 8), ("<img>", 10), ("<|patch|>", 11), ("<imagine", 12)];
        // 5 is a word of the vocabulary, whatever config.json says.
        let found = model(&config).with_placeholders(added.into_iter(), |id| id == 5);
        assert_eq!(found.placeholders, [9, 10, 11, 200]);
    }

    #[test]
    fn the_first_placeholder_is_found_wherever_it_stands() {
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
