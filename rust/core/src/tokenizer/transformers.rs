//! What transformers 5 makes of a tokenizer.json: some of its classes keep the vocabulary and build all else anew.
//!
//! Such a class gives other ids where the file has another normaliser or pre-tokenizer than the class, and a server
//! that uses it samples behind other prompts. Which class is loaded is decided as `AutoTokenizer` of transformers 5.24
//! does, with its table of model types in `transformers.txt`; what the classes build is said here.

use super::check::values_under;
use super::config::Class;
use super::hf_backend::{Reference, build};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Model types with the class that is registered for each, and whether that class counts over the one that a file names.
const TABLE: &str = include_str!("transformers.txt");
/// Classes that load the file as it is.
const PLAIN: [&str; 4] = ["TokenizersBackend", "PythonBackend", "PreTrainedTokenizer", "MistralCommonBackend"];
/// Texts of which one shows where two tokenizers differ.
const TEXTS: [&str; 12] = [
    "Hello world, it is 4",
    " Hello",
    "a  b\n\n c\t\td",
    "1234567 and 12,345.6",
    "don't I'VE",
    "cafe\u{301} ﬁ ①",
    "你好，世界。",
    "[INST] What is 2+2? [/INST]",
    "def f(x):\n        return x_1 != 0",
    "नमस्ते 😊",
    "x\r\ny ",
    "<|user|>\nHi",
];
/// A text behind an added token: some tokenizers begin it as they begin a text, others do not.
const BEHIND: &str = "Hello world";
/// Added tokens that it is tried behind.
const ADDED: usize = 8;
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A text of which transformers 5 makes other ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    /// The class that it loads.
    pub class: String,
    /// The text.
    pub text: String,
    /// Its ids by tokenizer.json.
    pub ids: Vec<u32>,
    /// Its ids by the class.
    pub other: Vec<u32>,
}

impl Class {
    /// The class that `AutoTokenizer` loads, as far as it is known.
    fn loaded(&self, byte_level: bool) -> Option<&str> {
        if self.has_code {
            return None;
        }
        let mut rows = TABLE.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let row = self.model_type.as_deref().and_then(|wanted| rows.find(|row| row[0] == wanted));
        let registered = row.as_ref().and_then(|row| row.get(1).copied());
        let counts = row.as_ref().is_some_and(|row| row.len() > 2);
        let named = self.name.as_deref().map(|name| name.strip_suffix("Fast").unwrap_or(name));
        let Some(named) = named else { return registered };
        // Files of Llama 3 name the class of Llama 2.
        if named == "LlamaTokenizer" && byte_level && !counts {
            return None;
        }
        match registered.filter(|registered| *registered != named) {
            Some(plain) if PLAIN.contains(&plain) => None,
            Some(other) if counts => Some(other),
            _ => Some(named),
        }
    }

    /// What the class puts in the place of `normalizer`, `pre_tokenizer`, and of the model's flags.
    fn parts(&self, byte_level: bool) -> Option<(&str, Value, Value, Value)> {
        let class = self.loaded(byte_level)?;
        let prefix = self.add_prefix_space;
        let flags = |fuse: bool, bytes: bool, unk: Option<&str>| {
            json!({"dropout": null, "unk_token": unk, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": fuse, "byte_fallback": bytes, "ignore_merges": false})
        };
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
        let bytes = |regex: bool| {
            json!({"type": "ByteLevel", "add_prefix_space": prefix.unwrap_or(false), "trim_offsets": true,
                "use_regex": regex})
        };
        let chain = |parts: Vec<Value>| json!({"type": "Sequence", "pretokenizers": parts});
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let nfc = json!({"type": "NFC"});
        let unk = self.unk_token.as_deref().unwrap_or("<unk>");
        let (normalizer, pre_tokenizer, model) = match class {
            "LlamaTokenizer" => {
                let scheme = match (prefix.unwrap_or(true), self.legacy.unwrap_or(false)) {
                    (false, _) => "never",
                    (true, true) => "always",
                    (true, false) => "first",
                };
                (Value::Null, metaspace(scheme), flags(true, true, None))
            }
            "CodeLlamaTokenizer" => {
                let scheme = if prefix.unwrap_or(true) { "first" } else { "never" };
                (Value::Null, metaspace(scheme), flags(true, true, Some(unk)))
            }
            "GemmaTokenizer" => {
                let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                    "invert": false});
                let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
                (replace, split, flags(true, true, Some(unk)))
            }
            "Qwen2Tokenizer" => (nfc, chain(vec![split(QWEN2), bytes(false)]), flags(false, false, None)),
            "Qwen3_5Tokenizer" => (nfc, chain(vec![split(QWEN3_5), bytes(false)]), flags(false, false, None)),
            "GPT2Tokenizer" => (Value::Null, bytes(true), flags(false, false, None)),
            "GPTNeoXTokenizer" => (nfc, bytes(true), flags(false, false, None)),
            "CohereTokenizer" => {
                let digits = json!({"type": "Digits", "individual_digits": true});
                (nfc, chain(vec![digits, bytes(true)]), flags(false, false, None))
            }
            _ => return None,
        };
        Some((class, normalizer, pre_tokenizer, model))
    }
}

/// Whether transformers 5 would load the tokenizer with other ids; `frame` is the outline of `json`.
pub(super) fn compared(json: &[u8], frame: &Value, class: &Class, inner: &dyn Reference) -> Option<Rebuilt> {
    let is_byte_level = |part: &str| {
        frame.get(part).is_some_and(|part| values_under(part, "type").iter().any(|kind| **kind == "ByteLevel"))
    };
    let byte_level = is_byte_level("pre_tokenizer") || is_byte_level("decoder");
    let (class, normalizer, pre_tokenizer, flags) = class.parts(byte_level)?;
    if frame.pointer("/model/type").is_some_and(|kind| kind != "BPE") {
        return None;
    }
    let model = frame.get("model")?;
    let same_model = flags.as_object()?.iter().all(|(key, flag)| shape(model.get(key)) == shape(Some(flag)));
    let part = |name: &str| shape(frame.get(name));
    if same_model
        && part("normalizer") == shape(Some(&normalizer))
        && part("pre_tokenizer") == shape(Some(&pre_tokenizer))
    {
        return None;
    }
    let mut document: Map<String, Value> = serde_json::from_slice(json).ok()?;
    document.insert("normalizer".to_owned(), normalizer);
    document.insert("pre_tokenizer".to_owned(), pre_tokenizer);
    document.get_mut("model")?.as_object_mut()?.extend(flags.as_object()?.clone());
    let other = build(&serde_json::to_vec(&document).ok()?).ok()?;
    let added = document.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added = added.filter_map(|token| token.get("content")?.as_str()).take(ADDED);
    let mut texts = TEXTS.iter().map(|text| (*text).to_owned()).chain(added.map(|token| [token, BEHIND].concat()));
    texts.find_map(|text| {
        let ids = inner.encode(&text, false, false).ok()?.get_ids().to_vec();
        let other = other.encode(&text, false, false).ok()?.get_ids().to_vec();
        (ids != other).then(|| Rebuilt { class: class.to_owned(), text, ids, other })
    })
}

/// A part of a tokenizer.json without what says nothing of ids.
fn shape(part: Option<&Value>) -> Value {
    match part {
        None | Some(Value::Bool(false)) => Value::Null,
        Some(Value::String(text)) if text.is_empty() => Value::Null,
        Some(Value::Array(items)) => items.iter().map(|item| shape(Some(item))).collect(),
        Some(Value::Object(map)) => {
            let kept = map.iter().filter(|(key, _)| *key != "trim_offsets");
            let kept = kept.map(|(key, value)| (key.clone(), shape(Some(value)))).filter(|(_, value)| !value.is_null());
            Value::Object(kept.collect())
        }
        Some(other) => other.clone(),
    }
}
