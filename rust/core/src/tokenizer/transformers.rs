//! Checks whether transformers 5 would load a tokenizer.json differently: some of its classes keep the vocabulary and
//! rebuild everything else.
//!
//! Such a class gives other ids if the file's normalizer or pre-tokenizer differs from the class's. A server that uses
//! it samples after other prompts. The choice of the class follows `AutoTokenizer` of transformers 5.24, with its
//! table of model types in `transformers.txt`. This module describes what the classes build.

use super::check::values_under;
use super::config::Class;
use super::hf_backend::{Reference, build};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Model types with the class that is registered for each, and whether that class overrides the one that a file names.
const TABLE: &str = include_str!("transformers.txt");
/// Classes that load the file unchanged.
const PLAIN: [&str; 4] = ["TokenizersBackend", "PythonBackend", "PreTrainedTokenizer", "MistralCommonBackend"];
/// Texts that reveal differences between two tokenizers.
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
/// A text to put after an added token. Some tokenizers treat it like the beginning of a text, others do not.
const BEHIND: &str = "Hello world";
/// Maximum number of added tokens that are tried.
const ADDED: usize = 8;
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A text for which transformers 5 gives other ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassMismatch {
    /// The class that it loads.
    pub class: String,
    /// The text.
    pub text: String,
    /// Its ids according to tokenizer.json.
    pub ids: Vec<u32>,
    /// Its ids according to the class.
    pub other: Vec<u32>,
}

impl Class {
    /// Returns the class that `AutoTokenizer` loads, if it is known.
    fn loaded(&self, byte_level: bool) -> Option<&str> {
        if self.has_remote_code {
            return None;
        }
        let mut rows = TABLE.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let row = self.model_type.as_deref().and_then(|model_type| rows.find(|row| row[0] == model_type));
        let registered = row.as_ref().and_then(|row| row.get(1).copied());
        let overrides = row.as_ref().is_some_and(|row| row.len() > 2);
        let class = self.name.as_deref().map(|name| name.strip_suffix("Fast").unwrap_or(name));
        let Some(class) = class else { return registered };
        // Files of Llama 3 name the class of Llama 2.
        if class == "LlamaTokenizer" && byte_level && !overrides {
            return None;
        }
        match registered.filter(|registered| *registered != class) {
            Some(plain) if PLAIN.contains(&plain) => None,
            Some(other) if overrides => Some(other),
            _ => Some(class),
        }
    }

    /// Returns the name of the class, and its `normalizer`, `pre_tokenizer` and flags of the model.
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

/// Returns a text that shows that transformers 5 would load the tokenizer with other ids. `frame` is the outline of
/// `json`.
pub(super) fn compared(json: &[u8], frame: &Value, class: &Class, inner: &dyn Reference) -> Option<ClassMismatch> {
    let has_byte_level = |part: &str| {
        frame.get(part).is_some_and(|part| values_under(part, "type").iter().any(|kind| **kind == "ByteLevel"))
    };
    let byte_level = has_byte_level("pre_tokenizer") || has_byte_level("decoder");
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
        (ids != other).then(|| ClassMismatch { class: class.to_owned(), text, ids, other })
    })
}

/// Removes everything from a part of a tokenizer.json that does not affect ids.
fn shape(part: Option<&Value>) -> Value {
    match part {
        None | Some(Value::Bool(false)) => Value::Null,
        Some(Value::String(text)) if text.is_empty() => Value::Null,
        Some(Value::Array(items)) => items.iter().map(|item| shape(Some(item))).collect(),
        Some(Value::Object(map)) => {
            let fields = map.iter().filter(|(key, _)| *key != "trim_offsets");
            let fields =
                fields.map(|(key, value)| (key.clone(), shape(Some(value)))).filter(|(_, value)| !value.is_null());
            Value::Object(fields.collect())
        }
        Some(other) => other.clone(),
    }
}
