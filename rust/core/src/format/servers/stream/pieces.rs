//! Chunks of servers that stream tokens with their numbers, and the parts that all streams are put together from.

use super::super::contract::{Decoded, Outline, Reason, Shape, note, reject};
use crate::drift;
use crate::trace::Note;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};

/// A note about a stream that lacks something.
pub(super) fn incomplete(detail: &str) -> Note {
    note(drift::Reason::StreamIncomplete, 1, detail)
}

/// A JSON object being written: keys with the JSON of their values.
#[derive(Default)]
pub(super) struct Draft(Vec<(String, String)>);

impl Draft {
    pub fn put(&mut self, key: &str, json: &str) {
        match self.0.iter_mut().find(|(known, _)| known == key) {
            Some((_, value)) => json.clone_into(value),
            None => self.0.push((key.to_owned(), json.to_owned())),
        }
    }

    /// Sets a key to a list of these values.
    pub fn put_all(&mut self, key: &str, items: &[String]) {
        self.put(key, &format!("[{}]", items.join(",")));
    }

    /// Sets a key to the text that grows under it, where any chunk has one.
    fn put_text(&mut self, chunks: &[Outline<'_>], key: &str) -> Decoded<()> {
        if chunks.iter().any(|chunk| chunk.has(key)) {
            self.put(key, &Value::from(text_of(chunks, key)?).to_string());
        }
        Ok(())
    }

    /// Sets a key to the list of all chunks' entries under it, where any chunk has one.
    fn put_list(&mut self, chunks: &[Outline<'_>], key: &str) -> Decoded<()> {
        list_of(chunks, key)?.iter().for_each(|list| self.put(key, list));
        Ok(())
    }

    /// Sets the keys of a chunk, but for some, to what it says that is not null.
    pub fn keep(&mut self, chunk: &Outline<'_>, dropped: &[&str]) {
        for key in chunk.keys().filter(|key| !dropped.contains(key)) {
            if let Some(raw) = chunk.get(key) {
                self.put(key, raw.get());
            }
        }
    }

    /// What the chunks say beside some keys, the last of each.
    fn of(chunks: &[Outline<'_>], dropped: &[&str]) -> Self {
        let mut draft = Self::default();
        for chunk in chunks {
            draft.keep(chunk, dropped);
        }
        draft
    }

    /// A note that lists of ids hold fewer tokens than the usage of this response counts, without any of reasoning.
    pub fn uncounted(&self, lists: &Lists) -> Option<Note> {
        let listed = lists.ids()?;
        let (_, usage) = self.0.iter().find(|(key, _)| key == "usage")?;
        let usage: Value = serde_json::from_str(usage).ok()?;
        let thought = usage.pointer("/completion_tokens_details/reasoning_tokens").and_then(Value::as_u64).unwrap_or(0);
        let counted = usage.get("completion_tokens")?.as_u64()?;
        let detail = format!("the listed tokens spell {listed} of the {counted} tokens that usage counts");
        let short = thought == 0 && drift::lists_fewer(listed as u64, counted);
        short.then(|| note(drift::Reason::StreamIncomplete, listed, detail))
    }

    pub fn render(&self) -> String {
        let fields = self.0.iter().map(|(key, json)| format!("{}:{json}", Value::from(key.as_str())));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    }
}

/// Lists that grow with every chunk, their entries as they stand.
#[derive(Default)]
pub(super) struct Lists {
    logprobs: Vec<(String, Vec<String>)>,
    beside: Vec<(String, Vec<String>)>,
}

/// Adds the entries of the list `raw` to the list of that name.
fn extend(lists: &mut Vec<(String, Vec<String>)>, key: &str, raw: &RawValue) -> Decoded<()> {
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| {
        reject(Reason::WrongType, format!("`{key}` is not a list"))
            .why("Every chunk adds to it")
            .cure("Record the chunks as they came")
    })?;
    let known = lists.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
        lists.push((key.to_owned(), Vec::new()));
        lists.len() - 1
    });
    lists[known].1.extend(items.into_iter().map(|item| item.get().to_owned()));
    Ok(())
}

impl Lists {
    /// Adds the logprobs of a part and the lists under `keys`.
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

    /// How many ids are listed, beside the logprobs or in the place of their texts; `None` where none is.
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

/// The list of all chunks' entries under a key, as JSON; `None` where no chunk has one.
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

/// The parts of the list under a key by their index, and what the chunks say beside it.
fn by_index<'a>(chunks: &[Outline<'a>], key: &str) -> Decoded<(BTreeMap<i32, Vec<Outline<'a>>>, Draft)> {
    let parts: Vec<Vec<Outline<'_>>> = chunks.iter().map(|chunk| chunk.objects(key)).collect::<Decoded<_>>()?;
    let mut found = BTreeMap::<i32, Vec<Outline<'_>>>::new();
    for part in parts.into_iter().flatten() {
        found.entry(part.count("index")?.unwrap_or(0)).or_default().push(part);
    }
    Ok((found, Draft::of(chunks, &[key])))
}

/// Legacy completions, and vLLM's `/inference/v1/generate`.
pub(super) fn completions(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let (parts, mut response) = by_index(chunks, "choices")?;
    let (alone, mut choices) = (parts.len() == 1, Vec::new());
    for (index, parts) in parts {
        let mut draft = Draft::of(&parts, &["text", "logprobs", "token_ids", "prompt_token_ids", "sampling_mask"]);
        let mut lists = Lists::default();
        for part in &parts {
            lists.take(part, &["token_ids", "prompt_token_ids", "sampling_mask"])?;
        }
        draft.put("index", &index.to_string());
        draft.put_text(&parts, "text")?;
        lists.write(&mut draft);
        notes.extend(response.uncounted(&lists).filter(|_| alone));
        if !parts.iter().any(|part| part.has("finish_reason")) {
            notes.push(incomplete("the stream ends without a finish reason"));
        }
        choices.push(draft.render());
    }
    response.put_all("choices", &choices);
    Ok(response.render())
}

/// SGLang: every chunk is the whole so far, unless the server streams increments, which `completion_tokens` shows.
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
    let wanted = choice.unwrap_or(0);
    let sample = samples.into_iter().nth(wanted as usize).ok_or_else(|| {
        reject(Reason::Incomplete, format!("sample {wanted} is asked for but the stream does not have it"))
            .why("There is no generation to read")
            .cure("Name an existing one")
    })?;
    let last = sample.last().copied().unwrap_or_default();
    let meta = chunks[last].object("meta_info")?.unwrap_or_default();
    let listed = |outline: &Outline<'_>, key: &str| outline.list(key).map(|list| list.map_or(0, |list| list.len()));
    let held = listed(&chunks[last], "output_ids")?.max(listed(&meta, "output_token_logprobs")?);
    let count = meta.count("completion_tokens")?.unwrap_or(0) as usize;
    if count <= held || sample.len() == 1 {
        return Ok(events[last].clone());
    }
    let parts: Vec<Outline<'_>> = sample.iter().map(|&at| chunks[at].clone()).collect();
    let metas = parts.iter().map(|part| part.object("meta_info").map(Option::unwrap_or_default));
    let metas: Vec<Outline<'_>> = metas.collect::<Decoded<_>>()?;
    let (mut draft, mut whole) = (Draft::of(&parts, &[]), Draft::of(&metas, &[]));
    for key in ["output_token_logprobs", "output_token_sampling_mask"] {
        whole.put_list(&metas, key)?;
    }
    draft.put_list(&parts, "output_ids")?;
    draft.put_text(&parts, "text")?;
    draft.put("meta_info", &whole.render());
    Ok(draft.render())
}

/// TGI: one token a chunk, the details and the whole text with the last.
pub(super) fn tgi(chunks: &[Outline<'_>], notes: &mut Vec<Note>) -> Decoded<String> {
    let tokens: Vec<_> = chunks.iter().filter_map(|chunk| Some(chunk.get("token")?.get().to_owned())).collect();
    let last = chunks.iter().rev().find(|chunk| chunk.has("generated_text"));
    if last.is_none() {
        notes.push(incomplete("the stream ends without its text"));
    }
    let mut details = Draft::default();
    if let Some(found) = last.map_or(Ok(None), |chunk| chunk.object("details"))? {
        details.keep(&found, &["tokens"]);
    }
    details.put_all("tokens", &tokens);
    let mut response = Draft::default();
    response.put("details", &details.render());
    response.put("generated_text", last.and_then(|chunk| chunk.get("generated_text")).map_or("null", RawValue::get));
    Ok(response.render())
}

/// llama.cpp: deltas of text, ids and probabilities; the last chunk says how it ended.
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

/// Ollama: deltas of `response`, or of `message`, and of `logprobs`.
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

/// Gemini: every chunk has parts and chosen tokens of its own.
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
