//! Images, sound and video in messages and records: which parts and keys contain them, and which of them no message
//! contains.
//!
//! The reader of another producer's format takes the text that it recognises. This module searches the complete record
//! for the media that the reader dropped, so that every dropped image is reported.

use crate::images::{digests, is_handle};
use crate::trace::Message;
use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::sync::LazyLock;

/// Largest nesting depth of parts that is searched. A deeper part counts as media.
const DEEPEST: usize = 8;

/// Keys under which a message, a part without a type, or a record stores media.
const KEYS: [&str; 9] =
    ["images", "image", "image_url", "audio", "audios", "input_audio", "video", "videos", "multi_modal_data"];

/// Returns whether a key of a record contains settings or text of the policy, and never media of the prompt.
fn shows_nothing(key: &str) -> bool {
    matches!(key, "tools" | "functions" | "arguments" | "args" | "parameters" | "input_schema" | "properties")
        || matches!(key, "metadata" | "response_format")
}

/// Returns whether a message, a part without a type, or a record stores media under this key.
pub fn is_key(key: &str) -> bool {
    KEYS.contains(&key)
}

/// Returns the type of the first part of a message that is not text.
pub fn media_part_type(message: &Value) -> Option<&str> {
    message.as_object()?.iter().find_map(|(key, value)| match value {
        Value::Array(parts) if key == "content" => parts.iter().find_map(|part| no_text(part, DEEPEST)),
        value => Some(key.as_str()).filter(|key| is_key(key) && is_not_empty(value)),
    })
}

/// Returns the first column of a record that contains media.
pub fn column_of(fields: &Map<String, Value>) -> Option<&str> {
    fields.iter().find(|(key, value)| is_key(key) && is_not_empty(value)).map(|(key, _)| key.as_str())
}

/// Returns whether a record contains a word without which `missing_media` finds nothing.
pub fn may_contain_media(record: &[u8]) -> bool {
    const WORDS: [&str; 8] = ["image", "audio", "video", "inline", "\"document", "file\"", "\"file", "\"blob"];
    static FOUND: LazyLock<Option<AhoCorasick>> = LazyLock::new(|| AhoCorasick::new(WORDS).ok());
    FOUND.as_ref().is_none_or(|words| words.is_match(record))
}

/// Returns the record's own list of images: its column `images`, or the one image of its column `image`.
pub fn list_in(fields: &Map<String, Value>) -> Option<Value> {
    let single =
        || fields.get("image").filter(|image| is_not_empty(image)).map(|image| Value::from(vec![image.clone()]));
    fields.get("images").filter(|images| is_not_empty(images)).cloned().or_else(single)
}

/// As [`list_in`], for a complete record.
pub fn list_of(record: &Value) -> Option<Value> {
    list_in(record.as_object()?)
}

/// Returns the name of the first image, sound or video in the record that no message contains.
pub fn missing_media(record: &Value, messages: &[Message]) -> Option<String> {
    let (mut record_media, mut message_media) = (Vec::new(), Vec::new());
    shown(record, &mut record_media);
    for message in messages {
        shown(&message.value, &mut message_media);
    }
    let message_media: HashSet<_> = message_media.into_iter().collect();
    let images: HashSet<_> =
        messages.iter().flat_map(|message| &message.images).map(|picture| picture.digest).collect();
    let is_in_message = |value: &Value| {
        let media = if images.is_empty() { Vec::new() } else { digests(value) };
        !media.is_empty() && media.iter().all(|digest| images.contains(digest))
    };
    record_media
        .into_iter()
        .find(|media| !message_media.contains(media) && !is_in_message(&media.1))
        .map(|(name, _)| name)
}

/// Returns the type of a part that is not text, or of such a part inside it.
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

/// Returns the type of a text part of a content whose text is an object.
pub fn object_as_text(part: &Value) -> Option<&str> {
    let fields = part.as_object().filter(|fields| fields.get("text").is_some_and(Value::is_object))?;
    fields.get("type").and_then(Value::as_str).filter(|kind| is_text(kind))
}

fn is_not_empty(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(parts) => !parts.is_empty(),
        _ => true,
    }
}

/// Adds each image, sound and video inside a value, with its name.
fn shown(value: &Value, media: &mut Vec<(String, Value)>) {
    let fields = match value {
        Value::Array(items) => return items.iter().for_each(|item| shown(item, media)),
        Value::Object(fields) => fields,
        _ => return,
    };
    let kind = fields.get("type").and_then(Value::as_str).unwrap_or_default();
    if matches!(kind, "tool_use" | "function_call" | "tool_call") {
        return;
    }
    if shows(kind, fields) {
        return media.push((kind.to_owned(), value.clone()));
    }
    for (key, value) in fields {
        match value {
            _ if shows_nothing(key) => {}
            // OpenTelemetry spans store their messages as JSON text.
            Value::String(text) if key == "stringValue" || key.starts_with("gen_ai.") => {
                if let Ok(inner) = serde_json::from_str::<Value>(text) {
                    shown(&inner, media);
                }
            }
            value if holds_data(key, value) => media.push((key.clone(), value.clone())),
            value => shown(value, media),
        }
    }
}

/// Returns whether an object is an image, a sound, a video or a file, according to its type, modality or MIME type.
fn shows(kind: &str, fields: &Map<String, Value>) -> bool {
    const FILES: [&str; 4] = ["document", "file", "input_file", "blob"];
    const HELD_AS: [&str; 8] = ["source", "file", "file_id", "file_data", "file_url", "data", "content", "uri"];
    let names_media = |key: &str| fields.get(key).and_then(Value::as_str).is_some_and(says_media);
    says_media(kind)
        || FILES.contains(&kind) && HELD_AS.iter().any(|key| fields.contains_key(*key))
        || kind == "uri" && (names_media("modality") || names_media("mime_type"))
}

/// Returns whether a key contains the data of an image, a sound or a video, or a reference to it.
fn holds_data(key: &str, value: &Value) -> bool {
    match value {
        Value::Array(parts) => !parts.is_empty() && matches!(key, "images" | "videos" | "audios"),
        Value::Object(_) => matches!(key, "inlineData" | "inline_data" | "fileData" | "file_data" | "image_url"),
        Value::String(text) => is_key(key) && text.starts_with("data:"),
        _ => false,
    }
}

/// Returns whether the name of a type contains a medium: `image_url`, `input_audio`, `video`, `image/png`.
fn says_media(kind: &str) -> bool {
    kind.split(|sign: char| !sign.is_ascii_alphanumeric()).any(|word| matches!(word, "image" | "audio" | "video"))
}

/// Returns whether a part of this type is text: content, reasoning, tool calls and their results.
fn is_text(kind: &str) -> bool {
    let is_content = matches!(kind, "text" | "input_text" | "output_text" | "summary_text" | "refusal");
    let is_reasoning =
        matches!(kind, "thinking" | "redacted_thinking" | "think" | "thought" | "reasoning" | "reasoning_text");
    let is_call = matches!(kind, "tool_use" | "tool_call" | "function_call" | "function");
    is_content
        || is_reasoning
        || is_call
        || matches!(kind, "tool_result" | "function_call_output" | "tool_call_response")
}
