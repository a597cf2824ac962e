//! Legacy completions: `{"choices": [{"text", "logprobs": {"tokens", "token_logprobs", "text_offset"}}]}`.
//!
//! Source: openai `types/completion.py`, vLLM `completion/serving.py`, Together and Fireworks SDKs. With `echo` the
//! list starts with the prompt, whose first logprob is null; the reader removes that part. If a server stops at a stop
//! string, its list may continue after it; these tokens are kept and reported. vLLM adds `token_ids` and
//! `prompt_token_ids`.

use super::interface::{
    API_DEFAULTS, CallContext, Decoded, Entry, Form, Outline, Reason, Rejection, Request, Server, Shape, either,
    finish_under, note, reject, sampling_of, spoken, stop_under,
};
use crate::findings;
use crate::format::json::object::TokenLists;
use crate::format::token_list::{ListedLogprob, MAX_ID, placeholder};
use crate::trace::{Generation, LogprobKind, Pieces, Prompt, Stop, Tokens, TopLogprobs};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

pub(super) const SERVER: Server = Server {
    form: Form { name: "completions", reason: "its `choices` have `text`" },
    signs: &["choices"],
    recognizes: |response| {
        let first = response.first_of("choices");
        first.is_some_and(|choice| choice.has_key("text") && !choice.has("message") && !choice.has("delta"))
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (choice, unused) = context.pick(response.objects("choices")?, "choices")?;
    let mut generation = context.generation(LogprobKind::Unknown);
    let mut text = choice.text("text")?.unwrap_or_default();
    let listed = choice.logprobs("logprobs")?;
    let all = listed.as_ref().map_or(0, Tokens::len);
    let sent = sent_prompt(context, &choice)?;
    let reported = either(choice.ids("prompt_token_ids")?, || response.ids("prompt_token_ids"))?;
    generation.prompt = reported.map_or_else(|| sent.clone(), Prompt::Ids);
    let ids = choice.ids("token_ids")?;
    let tokens = match listed {
        Some(listed) if echoes(context, &listed)? => {
            let echo = Echo { listed: &listed, ids: ids.as_deref(), prompt: &generation.prompt };
            let start = echo.length(response, &choice)?;
            text = echo.completion(&text, &sent, start, &choice)?;
            Some(tokens_from(&listed, start))
        }
        listed => listed,
    };
    let skipped = all.saturating_sub(tokens.as_ref().map_or(0, Tokens::len));
    generation.tokens = TokenLists::listed(tokens, ids).into_tokens()?;
    if generation.tokens.ids.is_some() {
        generation.tokens.top = top_logprobs(&choice, skipped, generation.tokens.len())?;
    }
    generation.finish_reason = finish_under(&choice, "finish_reason")?;
    generation.stop = stop_under(&choice, "stop_reason")?;
    note_past_stop(&mut generation, &text, context)?;
    generation.text = Some(text.clone());
    Ok(Entry::sampled(spoken(&text), generation, unused))
}

/// The sent prompts: one or several, as text or ids.
#[derive(Deserialize)]
#[serde(untagged)]
enum Sent {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

/// Returns the prompt of a choice. Each prompt of a request has `n` choices.
fn sent_prompt(context: &CallContext<'_>, choice: &Outline<'_>) -> Decoded<Prompt> {
    let choices_per_prompt = context.request.map_or(Ok(None), |request| request.count("n"))?.unwrap_or(1).max(1);
    let prompts = context.request.map_or(Ok(None), |request| request.typed("prompt"))?;
    let at = (choice.count("index")?.unwrap_or(0) / choices_per_prompt) as usize;
    Ok(match prompts {
        Some(Sent::Text(text)) => Prompt::Text(text),
        Some(Sent::Ids(ids)) => Prompt::Ids(ids),
        Some(Sent::Texts(texts)) => texts.into_iter().nth(at).map_or(Prompt::Unknown, Prompt::Text),
        Some(Sent::IdLists(lists)) => lists.into_iter().nth(at).map_or(Prompt::Unknown, Prompt::Ids),
        None => Prompt::Unknown,
    })
}

/// Returns whether the list starts with the prompt: if the request contains `echo`, or, without a request, if only its
/// first logprob is null.
fn echoes(context: &CallContext<'_>, listed: &Tokens) -> Decoded<bool> {
    match context.request {
        Some(request) => Ok(request.value("echo")? == Some(Value::Bool(true))),
        None => Ok(listed.logprobs.as_ref().and_then(|values| values.first()).is_some_and(|value| value.is_nan())
            && listed.missing == 1),
    }
}

/// A token list that starts with the prompt.
struct Echo<'a> {
    listed: &'a Tokens,
    ids: Option<&'a [u32]>,
    prompt: &'a Prompt,
}

impl Echo<'_> {
    /// Returns how many of the listed tokens belong to the prompt.
    fn length(&self, response: &Outline<'_>, choice: &Outline<'_>) -> Decoded<usize> {
        let total = self.listed.len();
        if let Some(sampled) = self.ids.map(<[u32]>::len).filter(|sampled| *sampled < total) {
            return Ok(total - sampled);
        }
        if let Prompt::Ids(ids) = self.prompt {
            return if ids.len() <= total { Ok(ids.len()) } else { Err(unknown_echo()) };
        }
        if let (Prompt::Text(prompt), Some(offsets)) = (self.prompt, offsets(choice)?) {
            let end = prompt.chars().count() as u64;
            return Ok(offsets.iter().take_while(|offset| **offset < end).count().min(total));
        }
        let usage = response.object("usage")?.unwrap_or_default();
        match (usage.count("prompt_tokens")?, usage.count("completion_tokens")?) {
            (Some(prompt), Some(sampled)) if prompt as usize + sampled as usize == total => Ok(prompt as usize),
            _ => Err(unknown_echo()),
        }
    }

    /// Returns the text after the prompt. With `return_token_ids` vLLM lists the prompt's tokens but omits its text.
    fn completion(&self, text: &str, sent: &Prompt, start: usize, choice: &Outline<'_>) -> Decoded<String> {
        let sampled = self.listed.texts.as_ref().map(|texts| {
            let from = start.checked_sub(1).and_then(|last| texts.ends.get(last)).map_or(0, |end| *end as usize);
            texts.data.get(from..).unwrap_or_default()
        });
        if sampled == Some(text.as_bytes()) {
            return Ok(text.to_owned());
        }
        let prompt = if let Prompt::Text(prompt) = sent { prompt.as_str() } else { "" };
        if let Some(rest) = text.strip_prefix(prompt).filter(|_| !prompt.is_empty()) {
            return Ok(rest.to_owned());
        }
        let offsets = offsets(choice)?.unwrap_or_default();
        let holds_prompt = offsets.last().is_some_and(|last| text.chars().count() as u64 >= *last);
        Ok(match offsets.get(start).filter(|_| holds_prompt) {
            Some(offset) => text.chars().skip(usize::try_from(*offset).unwrap_or(usize::MAX)).collect(),
            None => text.to_owned(),
        })
    }
}

/// Returns the tokens from `start` on.
///
/// Unknown logprobs before `start` are subtracted from the missing ones first, because the first token of a list has no
/// logprob.
fn tokens_from(tokens: &Tokens, start: usize) -> Tokens {
    let rest = |pieces: &Pieces| {
        let mut rest = Pieces::default();
        (start..pieces.len()).for_each(|index| rest.push(pieces.get(index)));
        rest
    };
    let logprobs = tokens.logprobs.as_deref().unwrap_or_default();
    let unknown = logprobs.iter().take(start).filter(|value| value.is_nan()).count() as u32;
    let missing = unknown.min(tokens.missing);
    Tokens {
        ids: tokens.ids.as_ref().map(|ids| ids.iter().skip(start).copied().collect()),
        bytes: tokens.bytes.as_ref().map(rest),
        texts: tokens.texts.as_ref().map(rest),
        logprobs: tokens.logprobs.as_ref().map(|_| logprobs.iter().skip(start).copied().collect()),
        missing: tokens.missing - missing,
        invalid: tokens.invalid - (unknown - missing).min(tokens.invalid),
        top: None,
    }
}

/// Reads `top_logprobs`, a list of `{"token_id:5": -0.1}` (vLLM's `return_tokens_as_token_ids`). Names that are texts
/// are not read, because several ids can have the same text.
///
/// `skipped` tokens of the prompt come first. Returns `None` if the list does not have `count` further steps.
fn top_logprobs(choice: &Outline<'_>, skipped: usize, count: usize) -> Decoded<Option<Box<TopLogprobs>>> {
    if !choice.is("logprobs", Shape::Object) {
        return Ok(None);
    }
    let logprobs = choice.object("logprobs")?.unwrap_or_default();
    if !logprobs.is("top_logprobs", Shape::List) {
        return Ok(None);
    }
    let steps = logprobs.list("top_logprobs")?.unwrap_or_default();
    let mut top = TopLogprobs::default();
    for step in steps.iter().skip(skipped) {
        for (id, logprob) in named_ids(step).filter(|listed| listed.len() > 1).unwrap_or_default() {
            top.ids.push(id);
            top.logprobs.push(logprob);
        }
        top.ends.push(top.ids.len() as u32);
    }
    Ok(Some(Box::new(top)).filter(|top| top.ends.len() == count && !top.ids.is_empty()))
}

/// Returns the ids and logprobs of `{"token_id:5": -0.1}`; `None` if a key is no id or a logprob is unknown.
fn named_ids(step: &RawValue) -> Option<Vec<(u32, f32)>> {
    let entries: BTreeMap<String, ListedLogprob> = serde_json::from_str(step.get()).ok()?;
    let id = |name: &str| placeholder(name.as_bytes()).filter(|id| *id <= MAX_ID).map(|id| id as u32);
    entries.iter().map(|(name, entry)| Some((id(name)?, entry.listed?))).collect()
}

/// Returns the offset of each token, in characters of the text.
fn offsets(choice: &Outline<'_>) -> Decoded<Option<Vec<u64>>> {
    let Some(logprobs) = choice.object("logprobs")? else { return Ok(None) };
    Ok(if logprobs.is("text_offset", Shape::List) { logprobs.typed("text_offset")? } else { None })
}

fn unknown_echo() -> Rejection {
    reject(
        Reason::Incomplete,
        "TG-FORMAT-050",
        "the token list starts with the prompt, and the length of the prompt is unknown",
    )
    .why("Tokens of the prompt would be trained as if they were sampled")
    .fix("Record the request beside the response, or turn `echo` off")
}

/// Reports tokens after the text: a stop string, and tokens that the server sampled after it.
fn note_past_stop(generation: &mut Generation, text: &str, context: &CallContext<'_>) -> Decoded<()> {
    let tokens = &generation.tokens;
    let Some(texts) = tokens.texts.as_ref().filter(|_| tokens.ids.is_none()) else { return Ok(()) };
    if generation.finish_reason.as_deref() != Some("stop") || texts.known.contains(&false) {
        return Ok(());
    }
    let token_count = texts.ends.iter().filter(|end| (**end as usize) <= text.len()).count();
    let rest = texts.data.get(text.len()..).unwrap_or_default();
    if rest.is_empty() || !texts.data.starts_with(text.as_bytes()) {
        return Ok(());
    }
    let stops = stop_strings(context)?;
    let matched = stops.into_iter().find(|stop| rest.starts_with(stop.as_bytes()));
    let extra_tokens = texts.len() - token_count;
    if generation.stop == Stop::Unknown && (matched.is_some() || extra_tokens > 1) {
        let total = texts.len();
        let detail =
            format!("the text ends after {token_count} of {total} listed tokens; the others run past the stop");
        generation.notes.push(note(findings::Reason::StopStringTruncated, extra_tokens, detail));
        generation.stop = matched.map_or(Stop::Unknown, Stop::Text);
    }
    Ok(())
}

fn stop_strings(context: &CallContext<'_>) -> Decoded<Vec<String>> {
    let stop = context.request.map_or(Ok(None), |request| request.value("stop"))?;
    Ok(match stop {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => {
            list.into_iter().filter_map(|item| item.as_str().filter(|s| !s.is_empty()).map(str::to_owned)).collect()
        }
        _ => Vec::new(),
    })
}

/// Reads a request. The prompt depends on the choice that was used, so `answer` reads it.
pub(super) fn request(request: &Outline<'_>) -> Decoded<Request> {
    let sampling = sampling_of(request, "top_p")?;
    let model = request.text("model")?;
    Ok(Request { model, prompt: Prompt::Unknown, sampling, ..Request::default() })
}
