//! The text that was not sampled: a rendered context, its ids, and which of them are content.
//!
//! `Text` is ids with sources; `Scaffold` renders with one tokenizer and caches what is constant for its template.
//! Sampled tokens are not handled here.

use super::types;
use crate::error::Result;
use crate::server::Server;
use crate::template::{Ask, Rendered, Session, Span, Template};
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Trace};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// Ids of unsampled text with the source of each.
#[derive(Debug, Clone, Default)]
pub struct Text {
    pub ids: Vec<u32>,
    /// GIVEN or TEMPLATE.
    pub sources: Vec<u8>,
    /// Whether the tokenizer would join its beginning with the text before it in one token.
    pub joined: bool,
}

impl Text {
    pub fn new(ids: Vec<u32>, sources: Vec<u8>) -> Self {
        Self { ids, sources, joined: false }
    }

    pub fn given(ids: &[u32]) -> Self {
        Self::new(ids.to_vec(), vec![types::GIVEN; ids.len()])
    }

    pub fn tail(&self, start: usize) -> Self {
        self.view().tail(start)
    }

    pub fn view(&self) -> View<'_> {
        View { ids: &self.ids, sources: &self.sources }
    }
}

/// What is said of a text that the tokenizer would join with the sampled text before it.
pub const JOINED: &str = "the tokenizer joins the end of the sampled text and the text behind it in one token";

/// A text that somebody else holds, so that only what is needed of it is copied.
#[derive(Debug, Clone, Copy)]
pub struct View<'t> {
    pub ids: &'t [u32],
    pub sources: &'t [u8],
}

impl View<'_> {
    /// What stands from token `start` on.
    pub fn tail(self, start: usize) -> Text {
        Text::new(self.ids[start..].to_vec(), self.sources[start..].to_vec())
    }
}

/// What a template writes after a turn.
#[derive(Debug, Default, Clone)]
pub struct Closing {
    /// The token that closes, where it is a special one.
    pub token: Option<u32>,
    /// The tokens behind it: the line break of ChatML.
    pub separator: Vec<u32>,
}

/// Renders contexts of one trace after another with one tokenizer.
pub struct Scaffold<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether the ids before an added token do not depend on what stands behind it.
    pub cuts: bool,
    /// What the template writes after an assistant's body: `<|im_end|>\n`. Empty where there is none.
    pub closer: String,
    /// The special token that opens the closer, with the bytes it takes, and the tokens behind it.
    pub closing: Closing,
    pub closing_bytes: usize,
    /// Whether the template prints the date of the day it is rendered on.
    pub prints_date: bool,
    /// Whether the template leaves out the text beside tool calls, once that was asked.
    pub drops: OnceLock<bool>,
    /// Who rendered the prompts, where the caller says so.
    pub server: Option<Server>,
}

/// The variable that says that the last message is the beginning of the answer (a prefill), and the one that says whether
/// the answer's head is written.
const PREFILL: &str = "continue_final_message";
const HEAD: &str = "add_generation_prompt";

impl<'a> Scaffold<'a> {
    /// Probes the template for its turn closer.
    pub fn new(tokenizer: &'a Tokenizer, server: Option<Server>) -> Result<Self> {
        let probed = |template| probe_closer(template, server.unwrap_or_default());
        let closer = tokenizer.template().and_then(probed).unwrap_or_default();
        let (ids, ends) = tokenizer.encode_with_ends(&closer)?;
        let token = ids.first().copied().filter(|&id| tokenizer.is_special(id));
        let closing_bytes = if token.is_some() { ends[0] as usize } else { 0 };
        let separator = if token.is_some() { ids[1..].to_vec() } else { Vec::new() };
        let prints_date = tokenizer.template().is_some_and(prints_date);
        let cuts = tokenizer.report().no_memo.is_none();
        Ok(Self {
            tokenizer,
            cuts,
            closer,
            closing: Closing { token, separator },
            closing_bytes,
            prints_date,
            drops: OnceLock::new(),
            server,
        })
    }

    /// Who rendered the prompt of a generation.
    pub fn server_of(&self, generation: &Generation) -> Server {
        self.server.or(generation.server).unwrap_or_default()
    }

    /// Renders the messages `context` of `trace` (indices) as the server of generation `turn` did, as its prompt or as
    /// finished text, on the day `date` (ISO) where the record pins none; `session` knows what was rendered before.
    pub fn render<'t>(
        &self,
        session: &mut Session<'t>,
        trace: &'t Trace,
        (turn, context): (usize, &[u32]),
        is_prompt: bool,
        date: Option<&str>,
    ) -> Result<Rendered> {
        let generation = trace.generations.get(turn);
        let server = generation.map_or(self.server.unwrap_or_default(), |generation| self.server_of(generation));
        let request = generation.and_then(|generation| generation.request.as_deref());
        let (kwargs, ask) = self.variables(trace, request, server, is_prompt, date);
        let messages: Vec<&Value> = context.iter().map(|&index| &trace.messages[index as usize].value).collect();
        let tools = trace.tools.as_ref();
        let template = self.tokenizer.template_for(tools)?;
        template.render_served(session, &messages, tools, ask, &kwargs)
    }

    /// Ids of `rendered.text[from..]` in its place, with their sources.
    pub fn encode(&self, rendered: &Rendered, from: usize) -> Result<Text> {
        let before = &rendered.text[..from];
        if self.tokenizer.is_apart(before) {
            let (ids, ends) = self.tokenizer.encode_held(Arc::clone(&rendered.text), from)?;
            let sources = sources(&ends, from, &rendered.spans);
            return Ok(Text::new(ids, sources));
        }
        let behind = self.tokenizer.encode_behind(before, &rendered.text[from..])?;
        let sources = sources(&behind.ends, from, &rendered.spans);
        Ok(Text { ids: behind.ids, sources, joined: !behind.exact })
    }

    /// The body the template gives the message of generation `turn` after its context: without prompt and closer.
    pub fn body<'t>(
        &self,
        session: &mut Session<'t>,
        trace: &'t Trace,
        turn: usize,
        prompt: &str,
    ) -> Result<Option<String>> {
        let generation = &trace.generations[turn];
        let begun = generation.context.last().and_then(|&last| self.begun(trace, turn, last));
        let finished = if let Some(whole) = begun {
            // The begun answer and what was sampled behind it are one message.
            let before = &generation.context[..generation.context.len() - 1];
            let mut messages: Vec<&Value> = before.iter().map(|&at| &trace.messages[at as usize].value).collect();
            messages.push(&whole);
            let request = generation.request.as_deref();
            let (kwargs, ask) = self.variables(trace, request, self.server_of(generation), false, None);
            let template = self.tokenizer.template_for(trace.tools.as_ref())?;
            template.render_served(&mut Session::default(), &messages, trace.tools.as_ref(), ask, &kwargs)?.text
        } else {
            let whole: Vec<u32> = generation.context.iter().copied().chain([generation.message]).collect();
            self.render(session, trace, (turn, &whole), false, None)?.text
        };
        let Some(rest) = finished.strip_prefix(prompt) else { return Ok(None) };
        let end = if self.closer.is_empty() { Some(rest.len()) } else { rest.rfind(&self.closer) };
        Ok(end.map(|end| rest[..end].to_owned()))
    }

    /// Variables of the template as `server` sets them for a request, on the day `date`, and how the text is asked for.
    fn variables<'t>(
        &self,
        trace: &'t Trace,
        request: Option<&Map<String, Value>>,
        server: Server,
        is_prompt: bool,
        date: Option<&str>,
    ) -> (Cow<'t, Map<String, Value>>, Ask) {
        let thinking = self.tokenizer.model().speaks_harmony;
        let mut kwargs = Cow::Borrowed(&trace.template_kwargs);
        let mut ask = Ask { server, prompt: is_prompt, continues: false, thinking };
        let asks = [PREFILL, HEAD].iter().any(|key| trace.template_kwargs.contains_key(*key));
        let fixed = matches!(server, Server::LlamaCpp | Server::Tgi);
        if request.is_some() || asks || fixed {
            set_variables(kwargs.to_mut(), request, &mut ask, is_prompt);
        }
        // vLLM takes these values for none.
        let unset = |value: &Value| value.is_null() || value == "auto";
        if server == Server::Vllm && kwargs.values().any(unset) {
            kwargs.to_mut().retain(|_, value| !unset(value));
        }
        if let Some(date) = date {
            kwargs.to_mut().insert("strftime_now".to_owned(), Value::from(date));
        }
        (kwargs, ask)
    }

    /// The answer of generation `turn` with its beginning, where message `last` is that.
    fn begun(&self, trace: &Trace, turn: usize, last: u32) -> Option<Value> {
        let generation = &trace.generations[turn];
        let server = self.server_of(generation);
        let (_, ask) = self.variables(trace, generation.request.as_deref(), server, true, None);
        let (begun, rest) = (&trace.messages[last as usize], &trace.messages[generation.message as usize].value);
        let is_answer = begun.role() == "assistant";
        if !(ask.continues || is_answer && matches!(server, Server::LlamaCpp | Server::Tgi)) {
            return None;
        }
        let text = |message: &Value| message.get("content").and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut whole = begun.value.clone();
        let fields = whole.as_object_mut()?;
        fields.extend(rest.as_object()?.clone());
        fields.insert("role".to_owned(), begun.role().into());
        fields.insert("content".to_owned(), (text(&begun.value) + &text(rest)).into());
        Some(whole)
    }
}

/// Sets the variables that a server takes from a request, and how it asks for the text.
fn set_variables(
    kwargs: &mut Map<String, Value>,
    request: Option<&Map<String, Value>>,
    ask: &mut Ask,
    is_prompt: bool,
) {
    let asked = |key: &str| request.and_then(|request| request.get(key)).filter(|value| !value.is_null());
    for (key, of_ask) in [(PREFILL, &mut ask.continues), (HEAD, &mut ask.prompt)] {
        let own = kwargs.remove(key);
        if let Some(value) = asked(key).or(own.as_ref()).and_then(Value::as_bool).filter(|_| is_prompt) {
            *of_ask = value;
        }
    }
    let effort = asked("reasoning_effort");
    let mut set = |key: &str, value: Option<Value>| kwargs.extend(value.map(|value| (key.to_owned(), value)));
    match ask.server {
        Server::Vllm | Server::OpenAi | Server::LlamaCpp => {
            set("reasoning_effort", effort.cloned());
            if ask.server == Server::OpenAi {
                set("enable_thinking", asked("enable_thinking").cloned());
            }
            if ask.server != Server::LlamaCpp {
                set("documents", asked("documents").cloned());
            }
            if let Some(effort) = effort {
                kwargs.entry("enable_thinking").or_insert((effort != "none").into());
            } else if ask.server == Server::LlamaCpp {
                kwargs.entry("enable_thinking").or_insert(true.into());
            }
        }
        Server::Sglang => {
            if let Some(effort) = effort {
                kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
            }
        }
        // It has no variables but those of its own.
        Server::Tgi => kwargs.retain(|key, _| key == "strftime_now"),
    }
}

/// Sources of the tokens of a text from byte `from` on, which end at `ends` behind that: given is what touches a span.
pub fn sources(ends: &[u32], from: usize, spans: &[Span]) -> Vec<u8> {
    let mut sources = vec![types::TEMPLATE; ends.len()];
    let end = |index: usize| from + ends[index] as usize;
    let mut at = 0;
    for span in &spans[spans.partition_point(|span| span.end <= from)..] {
        at += ends[at..].partition_point(|&end| from + end as usize <= span.start);
        // Up to the first token that reaches the end of the span.
        let inside = ends[at..].partition_point(|&end| from + (end as usize) < span.end);
        let behind = ends.len().min(at + inside + 1);
        let start = at.checked_sub(1).map_or(from, end);
        if start < span.end {
            sources[at..behind].fill(types::GIVEN);
        }
    }
    sources
}

/// The text between an assistant's body and the end of a rendered conversation.
fn probe_closer(template: &Template, server: Server) -> Option<String> {
    const BODY: &str = "tracegrad probes the closer";
    let messages = [json!({"role": "user", "content": "hello"}), json!({"role": "assistant", "content": BODY})];
    let ask = Ask { server, prompt: false, continues: false, thinking: false };
    let rendered =
        template.render_served(&mut Session::default(), &messages.each_ref(), None, ask, &Map::new()).ok()?;
    let at = rendered.text.rfind(BODY)?;
    Some(rendered.text[at + BODY.len()..].to_owned())
}

/// Whether a prompt differs between two days.
fn prints_date(template: &Template) -> bool {
    if !template.reads_clock() {
        return false;
    }
    let messages = [json!({"role": "user", "content": "hello"})];
    let on = |day: &str| {
        let kwargs = Map::from_iter([("strftime_now".to_owned(), Value::from(day))]);
        template.render_text(&messages.each_ref(), None, true, &kwargs).ok()
    };
    on("2001-02-03") != on("2004-05-06")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Field;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_token_that_touches_content_is_given(
            widths in proptest::collection::vec(0_u32..4, 0..12),
            marks in proptest::collection::vec(0_usize..30, 0..8),
            from in 0_usize..10,
        ) {
            let mut marks = marks;
            marks.sort_unstable();
            let span = |pair: &[usize]| Span { start: pair[0], end: pair[1], message: 0, field: Field::Content };
            let spans: Vec<Span> = marks.chunks_exact(2).map(span).collect();
            let ends: Vec<u32> = widths.iter().scan(0, |end, width| { *end += width; Some(*end) }).collect();
            let expected: Vec<u8> = (0..ends.len()).map(|index| {
                let before = if index == 0 { 0 } else { ends[index - 1] as usize };
                let (start, end) = (from + before, from + ends[index] as usize);
                let touched = spans.iter().any(|span| span.start < end && span.end > start);
                if touched { types::GIVEN } else { types::TEMPLATE }
            }).collect();
            prop_assert_eq!(sources(&ends, from, &spans), expected);
        }
    }
}
