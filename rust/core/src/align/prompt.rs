//! The text that was not sampled: a rendered context, its ids, and which of them are content.
//!
//! One `Prompt` is one call of the chat template; `Scaffold` holds what is probed once per template. Sampled tokens
//! are not handled here.

use crate::error::Result;
use crate::template::{Rendered, Template};
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
use serde_json::{Map, Value, json};

/// Source of a token that was not sampled, as `Sequences.source` has it.
pub mod source {
    /// User, tool, system text; text copied from elsewhere.
    pub const GIVEN: u8 = 0;
    /// Role headers, separators, closers.
    pub const TEMPLATE: u8 = 1;
    /// Drawn from the policy.
    pub const SAMPLED: u8 = 2;
}

/// Ids of unsampled text with the source of each.
#[derive(Debug, Clone, Default)]
pub struct Text {
    /// Ids.
    pub ids: Vec<u32>,
    /// GIVEN or TEMPLATE.
    pub sources: Vec<u8>,
}

/// Renders contexts of one trace after another with one tokenizer.
pub struct Scaffold<'a> {
    tokenizer: &'a Tokenizer,
    /// What the template writes after an assistant's body: `<|im_end|>\n`. Empty where there is none.
    pub closer: String,
}

impl<'a> Scaffold<'a> {
    /// Probes the template for its turn closer.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, closer: tokenizer.template().and_then(probe_closer).unwrap_or_default() }
    }

    /// Renders the messages `context` of `trace` (indices), as a prompt or as finished text.
    pub fn render(&self, trace: &Trace, context: &[u32], add_generation_prompt: bool) -> Result<Rendered> {
        let message = |&index: &u32| trace.messages[index as usize].value.clone();
        let messages: Vec<Value> = context.iter().map(message).collect();
        self.tokenizer.render(&messages, trace.tools.as_ref(), add_generation_prompt, &trace.template_kwargs)
    }

    /// Ids of `rendered.text[from..]` with their sources.
    pub fn encode(&self, rendered: &Rendered, from: usize) -> Result<Text> {
        let (ids, ends) = self.tokenizer.encode_with_ends(&rendered.text[from..])?;
        let mut spans = rendered.spans.iter().skip_while(|span| span.end <= from).peekable();
        let mut start = from;
        let mut sources = Vec::with_capacity(ids.len());
        for end in ends {
            let end = from + end as usize;
            while spans.peek().is_some_and(|span| span.end <= start) {
                spans.next();
            }
            let content = spans.peek().is_some_and(|span| span.start < end);
            sources.push(if content { source::GIVEN } else { source::TEMPLATE });
            start = end;
        }
        Ok(Text { ids, sources })
    }

    /// The body the template gives the message `index` after `context`: without prompt and closer.
    pub fn body(&self, trace: &Trace, context: &[u32], index: u32, prompt: &str) -> Result<Option<String>> {
        let mut whole = context.to_vec();
        whole.push(index);
        let finished = self.render(trace, &whole, false)?.text;
        let Some(rest) = finished.strip_prefix(prompt) else { return Ok(None) };
        let end = if self.closer.is_empty() { Some(rest.len()) } else { rest.rfind(&self.closer) };
        Ok(end.map(|end| rest[..end].to_owned()))
    }

    /// The special token that opens the closer, with its text.
    pub fn closing_token(&self) -> Result<Option<(u32, String)>> {
        let (ids, ends) = self.tokenizer.encode_with_ends(&self.closer)?;
        let first = ids.first().zip(ends.first()).filter(|&(&id, _)| self.tokenizer.is_special(id));
        Ok(first.map(|(&id, &end)| (id, self.closer[..end as usize].to_owned())))
    }
}

/// The text between an assistant's body and the end of a rendered conversation.
fn probe_closer(template: &Template) -> Option<String> {
    const BODY: &str = "tracegrad probes the closer";
    let messages = [json!({"role": "user", "content": "hello"}), json!({"role": "assistant", "content": BODY})];
    let rendered = template.render(&messages, None, false, &Map::new()).ok()?;
    let at = rendered.text.rfind(BODY)?;
    Some(rendered.text[at + BODY.len()..].to_owned())
}
