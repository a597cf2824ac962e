//! Pictures, sound and video in messages and records: which parts and keys hold them, and which of a record's no
//! message has.
//!
//! A reader of another producer's records takes the text that it knows. What it leaves out is found here in the record
//! itself, so that no form can drop a picture without a word.

use crate::images::{digests, is_handle};
use crate::trace::Message;
use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::sync::LazyLock;

/// Levels of parts within parts that are looked through; what lies deeper counts as no text.
const DEEPEST: usize = 8;

/// The keys under which a message, a part without a type, or a record holds what is no text.
const KEYS: [&str; 9] =
    ["images", "image", "image_url", "audio", "audios", "input_audio", "video", "videos", "multi_modal_data"];

/// Whether a key of a record holds what could be sent or was written by the policy, and shows nothing.
fn shows_nothing(key: &str) -> bool {
    matches!(key, "tools" | "functions" | "arguments" | "args" | "parameters" | "input_schema" | "properties")
        || matches!(key, "metadata" | "response_format")
}

/// Whether a message, a part without a type, or a record holds what is no text under this key.
pub fn is_key(key: &str) -> bool {
    KEYS.contains(&key)
}

/// What the first part of a message that is no text calls itself.
pub fn part_of(message: &Value) -> Option<&str> {
    message.as_object()?.iter().find_map(|(key, value)| match value {
        Value::Array(parts) if key == "content" => parts.iter().find_map(|part| no_text(part, DEEPEST)),
        value => Some(key.as_str()).filter(|key| is_key(key) && holds_something(value)),
    })
}

/// The first of a record's own columns that holds what is no text.
pub fn column_of(fields: &Map<String, Value>) -> Option<&str> {
    fields.iter().find(|(key, value)| is_key(key) && holds_something(value)).map(|(key, _)| key.as_str())
}

/// Whether a record has a word without which `left_out` finds nothing.
pub fn may_show(record: &[u8]) -> bool {
    const WORDS: [&str; 8] = ["image", "audio", "video", "inline", "\"document", "file\"", "\"file", "\"blob"];
    static FOUND: LazyLock<Option<AhoCorasick>> = LazyLock::new(|| AhoCorasick::new(WORDS).ok());
    FOUND.as_ref().is_none_or(|words| words.is_match(record))
}

/// A record's own list of pictures: its column `images`, or the one picture of its column `image`.
pub fn list_in(fields: &Map<String, Value>) -> Option<Value> {
    let one =
        || fields.get("image").filter(|image| holds_something(image)).map(|image| Value::from(vec![image.clone()]));
    fields.get("images").filter(|images| holds_something(images)).cloned().or_else(one)
}

/// The same of a whole record.
pub fn list_of(record: &Value) -> Option<Value> {
    list_in(record.as_object()?)
}

/// What a record holds that is no text and that none of its messages has, by what it calls itself.
pub fn left_out(record: &Value, messages: &[Message]) -> Option<String> {
    let (mut there, mut placed) = (Vec::new(), Vec::new());
    shown(record, &mut there);
    for message in messages {
        shown(&message.value, &mut placed);
    }
    let placed: HashSet<_> = placed.into_iter().collect();
    let pictures: HashSet<_> = messages.iter().flat_map(|message| &message.pictures).map(|each| each.digest).collect();
    let seen = |value: &Value| {
        let found = if pictures.is_empty() { Vec::new() } else { digests(value) };
        !found.is_empty() && found.iter().all(|digest| pictures.contains(digest))
    };
    there.into_iter().find(|found| !placed.contains(found) && !seen(&found.1)).map(|(name, _)| name)
}

/// What a part calls itself where it is no text, or holds a part that is none.
fn no_text(part: &Value, deepest: usize) -> Option<&str> {
    let fields = match part {
        _ if is_handle(part) => return None,
        Value::String(_) | Value::Null => return None,
        Value::Object(fields) if deepest > 0 => fields,
        _ => return Some("unknown"),
    };
    let inside = || {
        let lists = ["content", "output", "response"].into_iter().filter_map(|key| fields.get(key)?.as_array());
        lists.flatten().find_map(|part| no_text(part, deepest - 1))
    };
    match fields.get("type").and_then(Value::as_str) {
        Some(kind) if is_text(kind) => inside(),
        Some(kind) => Some(kind),
        // Qwen's agents write `{"text": ...}` and `{"image": ...}`.
        None if fields.get("text").is_some_and(Value::is_string) => {
            fields.keys().map(String::as_str).find(|key| is_key(key))
        }
        None => fields.keys().map(String::as_str).next().or(Some("unknown")),
    }
}

fn holds_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(parts) => !parts.is_empty(),
        _ => true,
    }
}

/// Adds each picture, sound and video below a value: what it calls itself, and its value.
fn shown(value: &Value, found: &mut Vec<(String, Value)>) {
    let fields = match value {
        Value::Array(items) => return items.iter().for_each(|item| shown(item, found)),
        Value::Object(fields) => fields,
        _ => return,
    };
    let kind = fields.get("type").and_then(Value::as_str).unwrap_or_default();
    if matches!(kind, "tool_use" | "function_call" | "tool_call") {
        return;
    }
    if shows(kind, fields) {
        return found.push((kind.to_owned(), value.clone()));
    }
    for (key, value) in fields {
        match value {
            _ if shows_nothing(key) => {}
            // Spans of OpenTelemetry hold their messages as JSON text.
            Value::String(text) if key == "stringValue" || key.starts_with("gen_ai.") => {
                if let Ok(inner) = serde_json::from_str::<Value>(text) {
                    shown(&inner, found);
                }
            }
            value if holds_data(key, value) => found.push((key.clone(), value.clone())),
            value => shown(value, found),
        }
    }
}

/// Whether an object is a picture, a sound, a video or a file by its type, its modality or its MIME type.
fn shows(kind: &str, fields: &Map<String, Value>) -> bool {
    const FILES: [&str; 4] = ["document", "file", "input_file", "blob"];
    const HELD_AS: [&str; 8] = ["source", "file", "file_id", "file_data", "file_url", "data", "content", "uri"];
    let said = |key: &str| fields.get(key).and_then(Value::as_str).is_some_and(says_media);
    says_media(kind)
        || FILES.contains(&kind) && HELD_AS.iter().any(|key| fields.contains_key(*key))
        || kind == "uri" && (said("modality") || said("mime_type"))
}

/// Whether a key holds the data of a picture, a sound or a video, or where it lies.
fn holds_data(key: &str, value: &Value) -> bool {
    match value {
        Value::Array(parts) => !parts.is_empty() && matches!(key, "images" | "videos" | "audios"),
        Value::Object(_) => matches!(key, "inlineData" | "inline_data" | "fileData" | "file_data" | "image_url"),
        Value::String(text) => is_key(key) && text.starts_with("data:"),
        _ => false,
    }
}

/// Whether a word of a kind names a medium: `image_url`, `input_audio`, `video`, `image/png`.
fn says_media(kind: &str) -> bool {
    kind.split(|sign: char| !sign.is_ascii_alphanumeric()).any(|word| matches!(word, "image" | "audio" | "video"))
}

/// The kinds of parts that say themselves in text: words, thoughts, calls of tools and their answers.
fn is_text(kind: &str) -> bool {
    let said = matches!(kind, "text" | "input_text" | "output_text" | "summary_text" | "refusal");
    let thought =
        matches!(kind, "thinking" | "redacted_thinking" | "think" | "thought" | "reasoning" | "reasoning_text");
    let called = matches!(kind, "tool_use" | "tool_call" | "function_call" | "function");
    said || thought || called || matches!(kind, "tool_result" | "function_call_output" | "tool_call_response")
}
