//! The text that was not sampled: a rendered context, its ids, and which of them are content.
//!
//! `Text` is ids with sources; `Scaffold` renders with one tokenizer and caches what is constant for its template.
//! Sampled tokens are not handled here.

use super::source;
use crate::error::Result;
use crate::template::{Rendered, Session, Span, Template};
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
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
        Self::new(ids.to_vec(), vec![source::GIVEN; ids.len()])
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
}

/// The variable that says that the last message is the beginning of the answer (a prefill).
const PREFILL: &str = "continue_final_message";

impl<'a> Scaffold<'a> {
    /// Probes the template for its turn closer.
    pub fn new(tokenizer: &'a Tokenizer) -> Result<Self> {
        let closer = tokenizer.template().and_then(probe_closer).unwrap_or_default();
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
        })
    }

    /// Renders the messages `context` of `trace` (indices), as a prompt or as finished text, on the day `date` (ISO) where
    /// the record pins none; `session` knows what was rendered before.
    pub fn render<'t>(
        &self,
        session: &mut Session<'t>,
        trace: &'t Trace,
        context: &[u32],
        add_generation_prompt: bool,
        date: Option<&str>,
    ) -> Result<Rendered> {
        let (kwargs, prefill) = kwargs(trace, add_generation_prompt, date);
        let messages: Vec<&Value> = context.iter().map(|&index| &trace.messages[index as usize].value).collect();
        let (tools, prompt) = (trace.tools.as_ref(), add_generation_prompt && !prefill);
        let template = self.tokenizer.template_for(tools)?;
        let mut rendered = template.render_next(session, &messages, tools, prompt, &kwargs)?;
        if prefill {
            // What stands behind the content of the last message, which the policy continued, is the template's.
            let end = rendered.spans.iter().map(|span| span.end).max().unwrap_or(rendered.text.len());
            rendered.text = rendered.text[..end].into();
        }
        Ok(rendered)
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

    /// The body the template gives the message `index` after `context`: without prompt and closer.
    pub fn body<'t>(
        &self,
        session: &mut Session<'t>,
        trace: &'t Trace,
        (context, index): (&[u32], u32),
        prompt: &str,
    ) -> Result<Option<String>> {
        let mut whole = context.to_vec();
        whole.push(index);
        let finished = self.render(session, trace, &whole, false, None)?.text;
        let Some(rest) = finished.strip_prefix(prompt) else { return Ok(None) };
        let end = if self.closer.is_empty() { Some(rest.len()) } else { rest.rfind(&self.closer) };
        Ok(end.map(|end| rest[..end].to_owned()))
    }
}

/// Variables of the template, on the day `date`; whether the last message of a prompt is the beginning of the answer.
fn kwargs<'t>(trace: &'t Trace, prompt: bool, date: Option<&str>) -> (Cow<'t, Map<String, Value>>, bool) {
    let prefill = prompt && trace.template_kwargs.get(PREFILL).is_some_and(|value| value == true);
    let mut kwargs = Cow::Borrowed(&trace.template_kwargs);
    if trace.template_kwargs.contains_key(PREFILL) || date.is_some() {
        let kwargs = kwargs.to_mut();
        kwargs.remove(PREFILL);
        kwargs.extend(date.map(|date| ("strftime_now".to_owned(), Value::from(date))));
    }
    (kwargs, prefill)
}

/// Sources of the tokens of a text from byte `from` on, which end at `ends` behind that: given is what touches a span.
pub fn sources(ends: &[u32], from: usize, spans: &[Span]) -> Vec<u8> {
    let mut sources = vec![source::TEMPLATE; ends.len()];
    let end = |index: usize| from + ends[index] as usize;
    let mut at = 0;
    for span in &spans[spans.partition_point(|span| span.end <= from)..] {
        at += ends[at..].partition_point(|&end| from + end as usize <= span.start);
        // Up to the first token that reaches the end of the span.
        let inside = ends[at..].partition_point(|&end| from + (end as usize) < span.end);
        let behind = ends.len().min(at + inside + 1);
        let start = at.checked_sub(1).map_or(from, end);
        if start < span.end {
            sources[at..behind].fill(source::GIVEN);
        }
    }
    sources
}

/// The text between an assistant's body and the end of a rendered conversation.
fn probe_closer(template: &Template) -> Option<String> {
    const BODY: &str = "tracegrad probes the closer";
    let messages = [json!({"role": "user", "content": "hello"}), json!({"role": "assistant", "content": BODY})];
    let rendered = template.render(&messages.each_ref(), None, false, &Map::new()).ok()?;
    let at = rendered.text.rfind(BODY)?;
    Some(rendered.text[at + BODY.len()..].to_owned())
}

/// Whether a prompt differs between two days.
fn prints_date(template: &Template) -> bool {
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
                if touched { source::GIVEN } else { source::TEMPLATE }
            }).collect();
            prop_assert_eq!(sources(&ends, from, &spans), expected);
        }
    }
}
