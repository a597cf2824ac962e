//! Text that was not sampled: a rendered context, its ids, and the ids among them that are content.
//!
//! `Text` is ids with sources. `Scaffold` renders with one tokenizer and caches the constant parts of its template.
//! Other files handle sampled tokens.

use super::types;
use crate::error::Result;
use crate::server::Server;
use crate::template::{RenderRequest, Rendered, Session, Span, Template};
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Trace};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// Ids of text that was not sampled, with the source of each.
#[derive(Debug, Clone, Default)]
pub struct Text {
    pub ids: Vec<u32>,
    /// One entry per id: PROMPT or TEMPLATE.
    pub sources: Vec<u8>,
    /// True if the tokenizer would merge the beginning of this text with the text before it into one token.
    pub joined: bool,
}

impl Text {
    pub fn new(ids: Vec<u32>, sources: Vec<u8>) -> Self {
        Self { ids, sources, joined: false }
    }

    pub fn given(ids: &[u32]) -> Self {
        Self::new(ids.to_vec(), vec![types::PROMPT; ids.len()])
    }

    pub fn tail(&self, start: usize) -> Self {
        self.view().tail(start)
    }

    pub fn view(&self) -> View<'_> {
        View { ids: &self.ids, sources: &self.sources }
    }
}

/// The detail of a finding about text that the tokenizer would merge with the sampled text before it.
pub const JOINED: &str = "the tokenizer joins the end of the sampled text and the text behind it in one token";

/// A borrowed text, so that only the needed part is copied.
#[derive(Debug, Clone, Copy)]
pub struct View<'t> {
    pub ids: &'t [u32],
    pub sources: &'t [u8],
}

impl View<'_> {
    /// Copies the text from token `start` on.
    pub fn tail(self, start: usize) -> Text {
        Text::new(self.ids[start..].to_vec(), self.sources[start..].to_vec())
    }
}

/// The text that a template writes after a turn.
#[derive(Debug, Default, Clone)]
pub struct Closing {
    /// The closing token, if it is a special one.
    pub token: Option<u32>,
    /// The tokens after it, for example the line break of ChatML.
    pub separator: Vec<u32>,
}

/// Renders contexts of successive traces with one tokenizer.
pub struct Scaffold<'a> {
    pub tokenizer: &'a Tokenizer,
    /// True if the ids before an added token do not depend on the text after it.
    pub cuts: bool,
    /// The text that the template writes after an assistant's body, for example `<|im_end|>\n`; empty if none.
    pub closer: String,
    /// The special token at the start of the closer, and the tokens after it.
    pub closing: Closing,
    pub closing_bytes: usize,
    /// True if the template prints the date on which it is rendered.
    pub prints_date: bool,
    /// True if the template drops the text of messages with tool calls. Computed on first use.
    pub drops: OnceLock<bool>,
    /// The server that rendered the prompts, if the caller specifies it.
    pub server: Option<Server>,
}

/// Template variables: the first marks the last message as a prefill of the answer, the second requests the header of
/// the answer.
const PREFILL: &str = "continue_final_message";
const HEAD: &str = "add_generation_prompt";

impl<'a> Scaffold<'a> {
    /// Probes the template for the text that closes a turn.
    pub fn new(tokenizer: &'a Tokenizer, server: Option<Server>) -> Result<Self> {
        let probed = |template| probe_closer(template, server.unwrap_or_default());
        let closer = tokenizer.template().and_then(probed).unwrap_or_default();
        let (ids, ends) = tokenizer.encode_with_ends(&closer)?;
        let token = ids.first().copied().filter(|&id| tokenizer.is_special(id));
        let closing_bytes = if token.is_some() { ends[0] as usize } else { 0 };
        let separator = if token.is_some() { ids[1..].to_vec() } else { Vec::new() };
        let prints_date = tokenizer.template().is_some_and(prints_date);
        let cuts = tokenizer.report().cache_disabled_reason.is_none();
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

    /// Returns the server that rendered the prompt of a generation.
    pub fn server_of(&self, generation: &Generation) -> Server {
        self.server.or(generation.server).unwrap_or_default()
    }

    /// Renders the messages `context` of `trace` (indices) as the server of generation `turn` did.
    ///
    /// The result is a prompt or, if `is_prompt` is false, a finished conversation. `date` (ISO) is the day to render
    /// on if the record does not specify one. `session` caches earlier renders.
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

    /// Returns the ids of `rendered.text[from..]` in its context, with their sources.
    pub fn encode(&self, rendered: &Rendered, from: usize) -> Result<Text> {
        let before = &rendered.text[..from];
        if self.tokenizer.is_context_free(before) {
            let (ids, ends) = self.tokenizer.encode_with_ends_shared(Arc::clone(&rendered.text), from)?;
            let sources = sources(&ends, from, &rendered.spans);
            return Ok(Text::new(ids, sources));
        }
        let encoded = self.tokenizer.encode_after(before, &rendered.text[from..])?;
        let sources = sources(&encoded.ends, from, &rendered.spans);
        Ok(Text { ids: encoded.ids, sources, joined: !encoded.exact })
    }

    /// Returns the text that the template writes for the message of generation `turn` after its context, without
    /// prompt and closer.
    pub fn body<'t>(
        &self,
        session: &mut Session<'t>,
        trace: &'t Trace,
        turn: usize,
        prompt: &str,
    ) -> Result<Option<String>> {
        let generation = &trace.generations[turn];
        let prefilled_answer = generation.context.last().and_then(|&last| self.begun(trace, turn, last));
        let finished = if let Some(answer) = prefilled_answer {
            // The prefill and the text sampled after it are one message.
            let before = &generation.context[..generation.context.len() - 1];
            let mut messages: Vec<&Value> = before.iter().map(|&at| &trace.messages[at as usize].value).collect();
            messages.push(&answer);
            let request = generation.request.as_deref();
            let (kwargs, ask) = self.variables(trace, request, self.server_of(generation), false, None);
            let template = self.tokenizer.template_for(trace.tools.as_ref())?;
            template.render_served(&mut Session::default(), &messages, trace.tools.as_ref(), ask, &kwargs)?.text
        } else {
            let messages: Vec<u32> = generation.context.iter().copied().chain([generation.message]).collect();
            self.render(session, trace, (turn, &messages), false, None)?.text
        };
        let Some(body) = finished.strip_prefix(prompt) else { return Ok(None) };
        let end = if self.closer.is_empty() { Some(body.len()) } else { body.rfind(&self.closer) };
        Ok(end.map(|end| body[..end].to_owned()))
    }

    /// Returns the template variables as `server` sets them for a request on the day `date`, and the rendering
    /// options.
    fn variables<'t>(
        &self,
        trace: &'t Trace,
        request: Option<&Map<String, Value>>,
        server: Server,
        is_prompt: bool,
        date: Option<&str>,
    ) -> (Cow<'t, Map<String, Value>>, RenderRequest) {
        let thinking = self.tokenizer.model().speaks_harmony;
        let mut kwargs = Cow::Borrowed(&trace.template_kwargs);
        let mut ask =
            RenderRequest { server, add_generation_prompt: is_prompt, continue_final_message: false, thinking };
        let sets_variables = [PREFILL, HEAD].iter().any(|key| trace.template_kwargs.contains_key(*key));
        let fixed = matches!(server, Server::LlamaCpp | Server::Tgi);
        if request.is_some() || sets_variables || fixed {
            set_variables(kwargs.to_mut(), request, &mut ask, is_prompt);
        }
        // vLLM treats these values as unset.
        let unset = |value: &Value| value.is_null() || value == "auto";
        if server == Server::Vllm && kwargs.values().any(unset) {
            kwargs.to_mut().retain(|_, value| !unset(value));
        }
        if let Some(date) = date {
            kwargs.to_mut().insert("strftime_now".to_owned(), Value::from(date));
        }
        (kwargs, ask)
    }

    /// Returns the answer of generation `turn` joined with its prefill, if message `last` is a prefill.
    fn begun(&self, trace: &Trace, turn: usize, last: u32) -> Option<Value> {
        let generation = &trace.generations[turn];
        let server = self.server_of(generation);
        let (_, ask) = self.variables(trace, generation.request.as_deref(), server, true, None);
        let (prefill, answer) = (&trace.messages[last as usize], &trace.messages[generation.message as usize].value);
        let is_answer = prefill.role() == "assistant";
        if !(ask.continue_final_message || is_answer && matches!(server, Server::LlamaCpp | Server::Tgi)) {
            return None;
        }
        let text = |message: &Value| message.get("content").and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut joined = prefill.value.clone();
        let fields = joined.as_object_mut()?;
        fields.extend(answer.as_object()?.clone());
        fields.insert("role".to_owned(), prefill.role().into());
        fields.insert("content".to_owned(), (text(&prefill.value) + &text(answer)).into());
        Some(joined)
    }
}

/// Sets the variables that a server copies from a request, and its rendering options.
fn set_variables(
    kwargs: &mut Map<String, Value>,
    request: Option<&Map<String, Value>>,
    ask: &mut RenderRequest,
    is_prompt: bool,
) {
    let from_request = |key: &str| request.and_then(|request| request.get(key)).filter(|value| !value.is_null());
    for (key, option) in [(PREFILL, &mut ask.continue_final_message), (HEAD, &mut ask.add_generation_prompt)] {
        let from_trace = kwargs.remove(key);
        if let Some(value) = from_request(key).or(from_trace.as_ref()).and_then(Value::as_bool).filter(|_| is_prompt) {
            *option = value;
        }
    }
    let effort = from_request("reasoning_effort");
    let mut set = |key: &str, value: Option<Value>| kwargs.extend(value.map(|value| (key.to_owned(), value)));
    match ask.server {
        Server::Vllm | Server::OpenAi | Server::LlamaCpp => {
            set("reasoning_effort", effort.cloned());
            if ask.server == Server::OpenAi {
                set("enable_thinking", from_request("enable_thinking").cloned());
            }
            if ask.server != Server::LlamaCpp {
                set("documents", from_request("documents").cloned());
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
        // TGI has no variables except its own.
        Server::Tgi => kwargs.retain(|key, _| key == "strftime_now"),
    }
}

/// Returns the sources of the tokens of a text from byte `from` on. `ends` are the ends of the tokens, relative to
/// `from`. A token that touches a span is PROMPT.
pub fn sources(ends: &[u32], from: usize, spans: &[Span]) -> Vec<u8> {
    let mut sources = vec![types::TEMPLATE; ends.len()];
    let end = |index: usize| from + ends[index] as usize;
    let mut at = 0;
    for span in &spans[spans.partition_point(|span| span.end <= from)..] {
        at += ends[at..].partition_point(|&end| from + end as usize <= span.start);
        // Count up to the first token that reaches the end of the span.
        let inside = ends[at..].partition_point(|&end| from + (end as usize) < span.end);
        let stop = ends.len().min(at + inside + 1);
        let start = at.checked_sub(1).map_or(from, end);
        if start < span.end {
            sources[at..stop].fill(types::PROMPT);
        }
    }
    sources
}

/// Returns the text between an assistant's body and the end of a rendered conversation.
fn probe_closer(template: &Template, server: Server) -> Option<String> {
    const BODY: &str = "tracegrad probes the closer";
    let messages = [json!({"role": "user", "content": "hello"}), json!({"role": "assistant", "content": BODY})];
    let ask = RenderRequest { server, add_generation_prompt: false, continue_final_message: false, thinking: false };
    let rendered =
        template.render_served(&mut Session::default(), &messages.each_ref(), None, ask, &Map::new()).ok()?;
    let at = rendered.text.rfind(BODY)?;
    Some(rendered.text[at + BODY.len()..].to_owned())
}

/// Returns true if a prompt differs between two days.
fn prints_date(template: &Template) -> bool {
    if !template.reads_clock() {
        return false;
    }
    let messages = [json!({"role": "user", "content": "hello"})];
    let render_on = |day: &str| {
        let kwargs = Map::from_iter([("strftime_now".to_owned(), Value::from(day))]);
        template.render_text(&messages.each_ref(), None, true, &kwargs).ok()
    };
    render_on("2001-02-03") != render_on("2004-05-06")
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
                if touched { types::PROMPT } else { types::TEMPLATE }
            }).collect();
            prop_assert_eq!(sources(&ends, from, &spans), expected);
        }
    }
}
