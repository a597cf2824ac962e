//! Assembles the chunks of each server's streams, with functions that all of them share.
//!
//! Chat completions: deltas of text, reasoning and tool calls, with logprobs and ids. Sources: openai
//! `types/chat/chat_completion_chunk.py`, vLLM and SGLang `chat_completion/serving.py`. Entries of `logprobs` are
//! copied unchanged, including those of a chunk with an empty delta: a server that hides channel tokens lists them
//! there.
//!
//! Typed events: OpenAI's Responses API and Anthropic's Messages API. Sources: openai `types/responses/`, anthropic
//! `types/raw_message_stream_event.py`. A Responses stream contains everything up to three times: as `.delta`, as
//! `.done` and in the complete response at the end. Each part is counted once.

use super::super::interface::{Decoded, Outline, Reason, Rejection, Shape, note, reject};
use crate::trace::Note;
use crate::{findings, json_number};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};

/// Creates a note about an incomplete stream.
pub(super) fn incomplete(detail: &str) -> Note {
    note(findings::Reason::StreamIncomplete, 1, detail)
}

/// A JSON object under construction: keys with the JSON of their values.
#[derive(Default)]
pub(super) struct Draft(Vec<(String, String)>);

impl Draft {
    pub fn put(&mut self, key: &str, json: &str) {
        match self.0.iter_mut().find(|(name, _)| name == key) {
            Some((_, value)) => json.clone_into(value),
            None => self.0.push((key.to_owned(), json.to_owned())),
        }
    }

    /// Sets a key to a list of these values.
    pub fn put_all(&mut self, key: &str, items: &[String]) {
        self.put(key, &format!("[{}]", items.join(",")));
    }

    /// Sets a key to the concatenated text of the chunks, if any chunk has the key.
    fn put_text(&mut self, chunks: &[Outline<'_>], key: &str) -> Decoded<()> {
        if chunks.iter().any(|chunk| chunk.has(key)) {
            self.put(key, &Value::from(text_of(chunks, key)?).to_string());
        }
        Ok(())
    }

    /// Sets a key to the concatenated list of the chunks, if any chunk has the key.
    fn put_list(&mut self, chunks: &[Outline<'_>], key: &str) -> Decoded<()> {
        list_of(chunks, key)?.iter().for_each(|list| self.put(key, list));
        Ok(())
    }

    /// Sets the keys of a chunk to its values that are not null, except for `dropped` keys.
    pub fn keep(&mut self, chunk: &Outline<'_>, dropped: &[&str]) {
        for key in chunk.keys().filter(|key| !dropped.contains(key)) {
            if let Some(raw) = chunk.get(key) {
                self.put(key, raw.get());
            }
        }
    }

    /// Returns the last value of each key in the chunks, except for `dropped` keys.
    fn of(chunks: &[Outline<'_>], dropped: &[&str]) -> Self {
        let mut draft = Self::default();
        for chunk in chunks {
            draft.keep(chunk, dropped);
        }
        draft
    }

    /// Returns a note if the id lists contain fewer tokens than the usage of this response counts, unless it counts
    /// reasoning tokens.
    pub fn uncounted(&self, lists: &Lists) -> Option<Note> {
        let listed = lists.ids()?;
        let (_, usage) = self.0.iter().find(|(key, _)| key == "usage")?;
        let usage: Value = serde_json::from_str(usage).ok()?;
        let reasoning_tokens =
            usage.pointer("/completion_tokens_details/reasoning_tokens").and_then(Value::as_u64).unwrap_or(0);
        let usage_tokens = usage.get("completion_tokens")?.as_u64()?;
        let detail = format!("the listed tokens spell {listed} of the {usage_tokens} tokens that usage counts");
        let short = reasoning_tokens == 0 && findings::lists_fewer(listed as u64, usage_tokens);
        short.then(|| note(findings::Reason::StreamIncomplete, listed, detail))
    }

    pub fn render(&self) -> String {
        let fields = self.0.iter().map(|(key, json)| format!("{}:{json}", Value::from(key.as_str())));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    }
}

/// Lists that grow with every chunk. Their entries stay unchanged.
#[derive(Default)]
pub(super) struct Lists {
    logprobs: Vec<(String, Vec<String>)>,
    beside: Vec<(String, Vec<String>)>,
}

/// Appends the entries of the list `raw` to the list with the name `key`.
fn extend(lists: &mut Vec<(String, Vec<String>)>, key: &str, raw: &RawValue) -> Decoded<()> {
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| {
        reject(Reason::WrongType, "TG-FORMAT-054", format!("`{key}` is not a list"))
            .why("Every chunk adds to it")
            .fix("Record the chunks as they came")
    })?;
    let index = lists.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
        lists.push((key.to_owned(), Vec::new()));
        lists.len() - 1
    });
    lists[index].1.extend(items.into_iter().map(|item| item.get().to_owned()));
    Ok(())
}

impl Lists {
    /// Appends the logprobs of a part and the lists under `keys`.
    pub fn take(&mut self, part: &Outline<'_>, keys: &[&str]) -> Decoded<()> {
        for key in keys {
            if let Some(raw) = part.get(key) {
                extend(&mut self.beside, key, raw)?;
            }
        }
        let Some(logprobs) = part.get("logprobs").filter(|raw| Shape::of(raw) == Shape::Object) else { return Ok(()) };
        let logprobs = Outline::of(logprobs, "logprobs")?;
        for key in logprobs.keys().filter(|key| logprobs.is(key, Shape::List)) {
            if let Some(raw) = logprobs.get(key) {
                extend(&mut self.logprobs, key, raw)?;
            }
        }
        Ok(())
    }

    /// Returns the number of listed ids, in `token_ids` or in the logprobs; `None` if there are none.
    fn ids(&self) -> Option<usize> {
        let is_id = |entry: &&String| entry.contains("\"token_id:") || entry.contains("\"token_id\"");
        let beside = self.beside.iter().find(|(key, _)| key == "token_ids").map_or(0, |(_, ids)| ids.len());
        let listed = self.logprobs.iter().find(|(key, _)| key == "content" || key == "tokens");
        let listed = listed.filter(|(_, items)| items.first().is_some_and(|entry| is_id(&entry)));
        Some(beside.max(listed.map_or(0, |(_, items)| items.len()))).filter(|&ids| ids > 0)
    }

    pub fn write(&self, draft: &mut Draft) {
        if !self.logprobs.is_empty() {
            let mut logprobs = Draft::default();
            self.logprobs.iter().for_each(|(key, items)| logprobs.put_all(key, items));
            draft.put("logprobs", &logprobs.render());
        }
        self.beside.iter().for_each(|(key, items)| draft.put_all(key, items));
    }
}

fn text_of(chunks: &[Outline<'_>], key: &str) -> Decoded<String> {
    chunks.iter().map(|chunk| chunk.text(key).map(Option::unwrap_or_default)).collect()
}

/// Returns the concatenated list of the chunks under a key as JSON, or `None` if no chunk has one.
fn list_of(chunks: &[Outline<'_>], key: &str) -> Decoded<Option<String>> {
    let mut lists = Vec::new();
    for raw in chunks.iter().filter_map(|chunk| chunk.get(key)) {
        extend(&mut lists, key, raw)?;
    }
    Ok(lists.first().map(|(_, items)| format!("[{}]", items.join(","))))
}

fn objects_of<'a>(chunks: &[Outline<'a>], key: &str) -> Decoded<Vec<Outline<'a>>> {
    chunks.iter().filter_map(|chunk| chunk.object(key).transpose()).collect()
}

/// Returns the parts of the list under a key by their index, and the last values of the chunks' other keys.
fn by_index<'a>(chunks: &[Outline<'a>], key: &str) -> Decoded<(BTreeMap<i32, Vec<Outline<'a>>>, Draft)> {
    let parts: Vec<Vec<Outline<'_>>> = chunks.iter().map(|chunk| chunk.objects(key)).collect::<Decoded<_>>()?;
    let mut parts_by_index = BTreeMap::<i32, Vec<Outline<'_>>>::new();
    for part in parts.into_iter().flatten() {
        parts_by_index.entry(part.count("index")?.unwrap_or(0)).or_default().push(part);
    }
    Ok((parts_by_index, Draft::of(chunks, &[key])))
}

/// Assembles legacy completions, and vLLM's `/inference/v1/generate`.
pub(super) fn completions(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let (parts, mut response) = by_index(chunks, "choices")?;
    let (is_single, mut choices) = (parts.len() == 1, Vec::new());
    for (index, parts) in parts {
        let mut draft = Draft::of(&parts, &["text", "logprobs", "token_ids", "prompt_token_ids", "sampling_mask"]);
        let mut lists = Lists::default();
        for part in &parts {
            lists.take(part, &["token_ids", "prompt_token_ids", "sampling_mask"])?;
        }
        draft.put("index", &index.to_string());
        draft.put_text(&parts, "text")?;
        lists.write(&mut draft);
        notes.extend(response.uncounted(&lists).filter(|_| is_single));
        if !parts.iter().any(|part| part.has("finish_reason")) {
            notes.push(incomplete("the stream ends without a finish reason"));
        }
        choices.push(draft.render());
    }
    response.put_all("choices", &choices);
    Ok(response.render())
}

/// Assembles SGLang's chunks. Each contains the complete text so far, unless the server streams increments: then the
/// chunk lists fewer tokens than `completion_tokens`.
pub(super) fn sglang(chunks: &[Outline<'_>], events: &[String], choice: Option<i32>) -> Decoded<String> {
    let id =
        |chunk: &Outline<'_>| chunk.object("meta_info").ok().flatten().and_then(|meta| meta.text("id").ok().flatten());
    let (mut samples, mut places) = (Vec::<Vec<usize>>::new(), HashMap::new());
    for (at, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| chunk.has("meta_info")) {
        let place = *places.entry(id(chunk)).or_insert_with(|| {
            samples.push(Vec::new());
            samples.len() - 1
        });
        samples[place].push(at);
    }
    let index = choice.unwrap_or(0);
    let sample = samples.into_iter().nth(index as usize).ok_or_else(|| {
        reject(
            Reason::Incomplete,
            "TG-FORMAT-055",
            format!("sample {index} is requested but the stream does not have it"),
        )
        .why("No generation can be read")
        .fix("Name an existing one")
    })?;
    let last = sample.last().copied().unwrap_or_default();
    let meta = chunks[last].object("meta_info")?.unwrap_or_default();
    let listed = |outline: &Outline<'_>, key: &str| outline.list(key).map(|list| list.map_or(0, |list| list.len()));
    let listed_count = listed(&chunks[last], "output_ids")?.max(listed(&meta, "output_token_logprobs")?);
    let count = meta.count("completion_tokens")?.unwrap_or(0) as usize;
    if count <= listed_count || sample.len() == 1 {
        return Ok(events[last].clone());
    }
    let parts: Vec<Outline<'_>> = sample.iter().map(|&at| chunks[at].clone()).collect();
    let metas = parts.iter().map(|part| part.object("meta_info").map(Option::unwrap_or_default));
    let metas: Vec<Outline<'_>> = metas.collect::<Decoded<_>>()?;
    let (mut draft, mut meta_draft) = (Draft::of(&parts, &[]), Draft::of(&metas, &[]));
    for key in ["output_token_logprobs", "output_token_sampling_mask"] {
        meta_draft.put_list(&metas, key)?;
    }
    draft.put_list(&parts, "output_ids")?;
    draft.put_text(&parts, "text")?;
    draft.put("meta_info", &meta_draft.render());
    Ok(draft.render())
}

/// Assembles TGI's chunks: one token per chunk; the last also contains the details and the complete text.
pub(super) fn tgi(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let tokens: Vec<_> = chunks.iter().filter_map(|chunk| Some(chunk.get("token")?.get().to_owned())).collect();
    let last = chunks.iter().rev().find(|chunk| chunk.has("generated_text"));
    if last.is_none() {
        notes.push(incomplete("the stream ends without its text"));
    }
    let mut details = Draft::default();
    if let Some(last_details) = last.map_or(Ok(None), |chunk| chunk.object("details"))? {
        details.keep(&last_details, &["tokens"]);
    }
    details.put_all("tokens", &tokens);
    let mut response = Draft::default();
    response.put("details", &details.render());
    response.put("generated_text", last.and_then(|chunk| chunk.get("generated_text")).map_or("null", RawValue::get));
    Ok(response.render())
}

/// Assembles llama.cpp's chunks: deltas of text, ids and probabilities. The last contains how the generation ended.
pub(super) fn llama_cpp(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let mut response = Draft::of(chunks, &["content", "tokens", "completion_probabilities", "probs"]);
    for key in ["tokens", "completion_probabilities", "probs"] {
        response.put_list(chunks, key)?;
    }
    response.put_text(chunks, "content")?;
    let ended = chunks.iter().any(|chunk| chunk.value("stop").ok().flatten() == Some(Value::Bool(true)));
    if !ended {
        notes.push(incomplete("the stream ends without its last chunk"));
        response.put("tokens_predicted", "0");
    }
    Ok(response.render())
}

/// Assembles Ollama's chunks: deltas of `response` or `message`, and of `logprobs`.
pub(super) fn ollama(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let mut response = Draft::of(chunks, &["response", "message", "logprobs", "thinking"]);
    response.put_list(chunks, "logprobs")?;
    for key in ["response", "thinking"] {
        response.put_text(chunks, key)?;
    }
    let messages = objects_of(chunks, "message")?;
    if !messages.is_empty() {
        let mut message = Draft::of(&messages, &["content", "thinking", "tool_calls"]);
        message.put("content", &Value::from(text_of(&messages, "content")?).to_string());
        let thinking = text_of(&messages, "thinking")?;
        if !thinking.is_empty() {
            message.put("thinking", &Value::from(thinking).to_string());
        }
        message.put_list(&messages, "tool_calls")?;
        response.put("message", &message.render());
    }
    if !chunks.iter().any(|chunk| chunk.value("done").ok().flatten() == Some(Value::Bool(true))) {
        notes.push(incomplete("the stream ends without `done`"));
    }
    Ok(response.render())
}

/// Assembles Gemini's chunks. Every chunk has separate parts and chosen tokens.
pub(super) fn gemini(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let (parts, mut response) = by_index(chunks, "candidates")?;
    let mut candidates = Vec::new();
    for (index, candidate) in parts {
        let mut draft = Draft::of(&candidate, &["content", "logprobsResult", "logprobs_result"]);
        let said = list_of(&objects_of(&candidate, "content")?, "parts")?.unwrap_or_else(|| "[]".to_owned());
        draft.put("content", &format!("{{\"role\":\"model\",\"parts\":{said}}}"));
        for (result, chosen) in [("logprobsResult", "chosenCandidates"), ("logprobs_result", "chosen_candidates")] {
            if let Some(list) = list_of(&objects_of(&candidate, result)?, chosen)? {
                draft.put(result, &format!("{{\"{chosen}\":{list}}}"));
            }
        }
        draft.put("index", &index.to_string());
        if !candidate.iter().any(|part| part.has("finishReason") || part.has("finish_reason")) {
            notes.push(incomplete("the stream ends without a finish reason"));
        }
        candidates.push(draft.render());
    }
    response.put_all("candidates", &candidates);
    Ok(response.render())
}

/// Keys of a delta whose texts are concatenated. Any other key has its last value.
const GROWING: [&str; 5] = ["content", "refusal", "reasoning_content", "reasoning", "thinking"];

/// One choice during the reading of its chunks.
#[derive(Default)]
struct Choice {
    message: Map<String, Value>,
    tool_calls: BTreeMap<usize, Map<String, Value>>,
    lists: Lists,
    /// Last value of every other key.
    last: Draft,
    finished: bool,
}

pub(super) fn chat(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
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

/// Merges a delta into a tool call (its function grows) or into a function (its arguments grow).
fn merge(target: &mut Map<String, Value>, delta: Map<String, Value>, is_function: bool) {
    for (key, value) in delta {
        match (target.get_mut(&key), value) {
            (_, Value::Null) => {}
            (Some(Value::Object(function)), Value::Object(delta)) if !is_function && key == "function" => {
                merge(function, delta, true);
            }
            (Some(Value::String(target)), Value::String(delta)) if is_function && key == "arguments" => {
                target.push_str(&delta);
            }
            // A server may repeat an id or send an empty one. That must not rename the call.
            (Some(Value::String(target)), Value::String(_)) if !target.is_empty() => {}
            (_, value) => {
                target.insert(key, value);
            }
        }
    }
}

/// The streamed values of one part of one item.
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
        Some(Value::String(text)) => text.push_str(more),
        Some(other) => *other = more.into(),
        None => {}
    }
}

/// Returns the final response of a stream of `response.*` events.
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

/// Puts the streamed values of a part into its item, unless the item contains them already.
fn fill(output: &mut Value, (item, place): (u64, u64), part: Part) {
    let Some(item) = output.get_mut(item as usize).and_then(Value::as_object_mut) else { return };
    let content = item.entry("content").or_insert_with(|| json!([]));
    let Some(content) = content.as_array_mut() else { return };
    let text = part.done.clone().unwrap_or_else(|| part.text.clone());
    if content.len() as u64 == place {
        content.push(json!({"type": "output_text", "text": text}));
    }
    let Some(target) = content.get_mut(place as usize).and_then(Value::as_object_mut) else { return };
    if target.get("text").and_then(Value::as_str).is_none_or(str::is_empty) {
        target.insert("text".into(), text.into());
    }
    if target.get("logprobs").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let logprobs = if part.listed.is_empty() { part.deltas } else { part.listed };
        target.insert("logprobs".into(), Value::Array(logprobs));
    }
}

/// Returns the message of a stream of Anthropic events.
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
            block.insert("input".into(), json_number::parse(&input).unwrap_or(Value::String(input)));
        }
    }
    message["content"] = Value::Array(blocks.into_values().collect());
    if !ended {
        notes.push(incomplete("the stream ends without message_stop"));
    }
    Ok(message.to_string())
}
