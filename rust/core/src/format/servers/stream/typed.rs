//! Streams of typed events: OpenAI's Responses API and Anthropic's Messages API.
//!
//! Sources: openai `types/responses/`, anthropic `types/raw_message_stream_event.py`. A Responses stream says everything up to three times: as
//! `.delta`, as `.done` and in the whole response at the end; each part is counted once.

use super::super::contract::{Decoded, Outline};
use super::pieces::incomplete;
use crate::exact;
use crate::trace::Note;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What was streamed of one part of one item.
#[derive(Default)]
struct Part {
    text: String,
    done: Option<String>,
    deltas: Vec<Value>,
    listed: Vec<Value>,
}

fn string(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn list(value: &Value, key: &str) -> Vec<Value> {
    value.get(key).and_then(Value::as_array).cloned().unwrap_or_default()
}

fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn values(chunks: &[Outline<'_>]) -> Decoded<Vec<Value>> {
    chunks.iter().map(|chunk| chunk.fields_without(&[]).map(Value::Object)).collect()
}

fn grow(block: &mut Value, key: &str, more: &str) {
    match block.as_object_mut().map(|block| block.entry(key).or_insert_with(|| "".into())) {
        Some(Value::String(known)) => known.push_str(more),
        Some(other) => *other = more.into(),
        None => {}
    }
}

/// The response that a stream of `response.*` events ends in.
pub(super) fn responses(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let (mut last, mut ended) = (Value::Null, false);
    let mut items: BTreeMap<u64, Value> = BTreeMap::new();
    let mut parts: BTreeMap<(u64, u64), Part> = BTreeMap::new();
    for event in values(chunks)? {
        let kind = string(&event, "type");
        let (item, place) = (number(&event, "output_index"), number(&event, "content_index"));
        match kind.as_str() {
            "response.output_text.delta" => {
                let part = parts.entry((item, place)).or_default();
                part.text.push_str(&string(&event, "delta"));
                part.deltas.extend(list(&event, "logprobs"));
            }
            "response.output_text.done" => {
                let part = parts.entry((item, place)).or_default();
                part.done = event.get("text").and_then(Value::as_str).map(str::to_owned);
                part.listed = list(&event, "logprobs");
            }
            "response.output_item.added" | "response.output_item.done" => {
                items.insert(item, event.get("item").cloned().unwrap_or_default());
            }
            _ => {}
        }
        ended |= ["response.completed", "response.incomplete", "response.failed"].contains(&kind.as_str());
        if let Some(response) = event.get("response").filter(|response| response.is_object()) {
            last = response.clone();
        }
    }
    if !ended {
        notes.push(incomplete("the stream ends without response.completed"));
    }
    if !last.is_object() {
        last = json!({"object": "response"});
    }
    if list(&last, "output").is_empty() {
        for (item, _) in parts.keys() {
            let message = || json!({"type": "message", "role": "assistant", "content": []});
            items.entry(*item).or_insert_with(message);
        }
        last["output"] = Value::Array(items.into_values().collect());
    }
    for (place, part) in parts {
        fill(&mut last["output"], place, part);
    }
    Ok(last.to_string())
}

/// Puts what was streamed of a part into the item, where the item does not have it.
fn fill(output: &mut Value, (item, place): (u64, u64), part: Part) {
    let Some(item) = output.get_mut(item as usize).and_then(Value::as_object_mut) else { return };
    let content = item.entry("content").or_insert_with(|| json!([]));
    let Some(content) = content.as_array_mut() else { return };
    let text = part.done.clone().unwrap_or_else(|| part.text.clone());
    if content.len() as u64 == place {
        content.push(json!({"type": "output_text", "text": text}));
    }
    let Some(known) = content.get_mut(place as usize).and_then(Value::as_object_mut) else { return };
    if known.get("text").and_then(Value::as_str).is_none_or(str::is_empty) {
        known.insert("text".into(), text.into());
    }
    if known.get("logprobs").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let logprobs = if part.listed.is_empty() { part.deltas } else { part.listed };
        known.insert("logprobs".into(), Value::Array(logprobs));
    }
}

/// The message that a stream of Anthropic events builds.
pub(super) fn anthropic(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let mut message = json!({"type": "message", "role": "assistant", "content": [], "stop_reason": null});
    let mut blocks: BTreeMap<u64, Value> = BTreeMap::new();
    let mut inputs: BTreeMap<u64, String> = BTreeMap::new();
    let mut ended = false;
    for event in values(chunks)? {
        let index = number(&event, "index");
        match string(&event, "type").as_str() {
            "message_start" => {
                let start = event.get("message").and_then(Value::as_object).cloned().unwrap_or_default();
                start.into_iter().for_each(|(key, value)| message[key] = value);
            }
            "content_block_start" => {
                blocks.insert(index, event.get("content_block").cloned().unwrap_or_default());
            }
            "content_block_delta" => {
                let delta = event.get("delta").cloned().unwrap_or_default();
                let block = blocks.entry(index).or_insert_with(|| json!({"type": "text", "text": ""}));
                for key in ["text", "thinking"] {
                    if let Some(more) = delta.get(key).and_then(Value::as_str) {
                        grow(block, key, more);
                    }
                }
                inputs.entry(index).or_default().push_str(&string(&delta, "partial_json"));
            }
            "message_delta" => {
                let delta = event.get("delta").and_then(Value::as_object).cloned().unwrap_or_default();
                delta.into_iter().for_each(|(key, value)| message[key] = value);
                if let Some(usage) = event.get("usage") {
                    message["usage"] = usage.clone();
                }
            }
            "message_stop" => ended = true,
            _ => {}
        }
    }
    for (index, input) in inputs.into_iter().filter(|(_, input)| !input.is_empty()) {
        if let Some(Value::Object(block)) = blocks.get_mut(&index) {
            block.insert("input".into(), exact::parse(&input).unwrap_or(Value::String(input)));
        }
    }
    message["content"] = Value::Array(blocks.into_values().collect());
    if !ended {
        notes.push(incomplete("the stream ends without message_stop"));
    }
    Ok(message.to_string())
}
