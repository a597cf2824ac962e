//! Chunks of a chat completion: deltas of text, reasoning and tool calls, with logprobs and ids beside them.
//!
//! Sources: openai `types/chat/chat_completion_chunk.py`, vLLM and SGLang `chat_completion/serving.py`. Entries of `logprobs` are copied as they
//! stand, also those on a chunk whose delta is empty (a server that hides channel tokens lists them there).

use super::super::contract::{Decoded, Outline, Rejection};
use super::pieces::{Draft, Lists, incomplete};
use crate::trace::Note;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Texts of a delta that grow; any other value is the last that was given.
const GROWING: [&str; 5] = ["content", "refusal", "reasoning_content", "reasoning", "thinking"];

/// One choice while its chunks are read.
#[derive(Default)]
struct Choice {
    message: Map<String, Value>,
    tool_calls: BTreeMap<usize, Map<String, Value>>,
    lists: Lists,
    /// The last value of every other key.
    last: Draft,
    finished: bool,
}

pub(super) fn assemble(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let (mut choices, mut response) = (BTreeMap::<i32, Choice>::new(), Draft::default());
    for (at, chunk) in chunks.iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("chunk {at}"));
        response.keep(chunk, &["choices"]);
        for part in chunk.objects("choices").map_err(place)? {
            let index = part.count("index").map_err(place)?.unwrap_or(0);
            choices.entry(index).or_default().take(&part).map_err(place)?;
        }
    }
    if choices.values().any(|choice| !choice.finished) {
        notes.push(incomplete("the stream ends without a finish reason"));
    }
    if choices.len() == 1 {
        notes.extend(choices.values().find_map(|choice| response.uncounted(&choice.lists)));
    }
    let choices: Vec<String> = choices.into_iter().map(|(index, choice)| choice.render(index)).collect();
    response.put_all("choices", &choices);
    Ok(response.render())
}

impl Choice {
    fn take(&mut self, part: &Outline<'_>) -> Decoded<()> {
        if let Some(delta) = part.object("delta")? {
            self.grow(&delta)?;
        }
        self.lists.take(part, &["token_ids", "prompt_token_ids"])?;
        self.last.keep(part, &["delta", "index", "logprobs", "token_ids", "prompt_token_ids"]);
        self.finished |= part.has("finish_reason");
        Ok(())
    }

    fn grow(&mut self, delta: &Outline<'_>) -> Decoded<()> {
        for (key, value) in delta.fields_without(&["tool_calls", "token_ids", "logprobs"])? {
            match (self.message.get_mut(&key), value) {
                (_, Value::Null) => {
                    self.message.entry(key).or_insert(Value::Null);
                }
                (Some(Value::String(known)), Value::String(more)) if GROWING.contains(&key.as_str()) => {
                    known.push_str(&more);
                }
                (Some(Value::Object(known)), Value::Object(more)) if key == "function_call" => {
                    merge(known, more, true);
                }
                (_, value) => {
                    self.message.insert(key, value);
                }
            }
        }
        self.lists.take(delta, &["token_ids"])?;
        for (at, call) in delta.objects("tool_calls")?.iter().enumerate() {
            let index = call.count("index")?.map_or(at, |index| index as usize);
            merge(self.tool_calls.entry(index).or_default(), call.fields_without(&["index"])?, false);
        }
        Ok(())
    }

    fn render(mut self, index: i32) -> String {
        self.message.entry("role").or_insert_with(|| "assistant".into());
        if self.message["role"].is_null() {
            self.message["role"] = "assistant".into();
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.into_values().map(Value::Object).collect();
            self.message.insert("tool_calls".into(), Value::Array(calls));
        }
        let mut draft = self.last;
        draft.put("index", &index.to_string());
        draft.put("message", &Value::Object(self.message).to_string());
        self.lists.write(&mut draft);
        draft.render()
    }
}

/// Adds to a tool call, of which its function grows, or to a function, of which its arguments do.
fn merge(known: &mut Map<String, Value>, more: Map<String, Value>, is_function: bool) {
    for (key, value) in more {
        match (known.get_mut(&key), value) {
            (_, Value::Null) => {}
            (Some(Value::Object(function)), Value::Object(more)) if !is_function && key == "function" => {
                merge(function, more, true);
            }
            (Some(Value::String(known)), Value::String(more)) if is_function && key == "arguments" => {
                known.push_str(&more);
            }
            // A server that repeats an id or gives an empty one does not rename the call.
            (Some(Value::String(known)), Value::String(_)) if !known.is_empty() => {}
            (_, value) => {
                known.insert(key, value);
            }
        }
    }
}
