//! The last complete prompt that was encoded. The next prompt is only encoded from the first difference on.
//!
//! Prompts of a group are similar, and each turn's prompt starts with the previous one. If the tokenizer splits texts
//! at added tokens, the ids up to such a token do not depend on the text after it. Each worker of `align` has its own
//! cache.

use super::branch::common_prefix;
use super::prompt::{Scaffold, View, sources};
use super::resolve::is_special;
use crate::error::Result;
use crate::template::{Rendered, Span};
use std::sync::Arc;

/// A rendered prompt with its ids, the byte at which each id ends, and their sources.
#[derive(Debug, Default)]
pub struct Prompts {
    text: Arc<str>,
    spans: Vec<Span>,
    ids: Vec<u32>,
    ends: Vec<u32>,
    sources: Vec<u8>,
}

impl Prompts {
    /// Returns ids and sources of a complete rendered text, equal to those of [`Scaffold::encode`] from its beginning.
    pub fn encode(&mut self, scaffold: &Scaffold<'_>, rendered: &Rendered) -> Result<View<'_>> {
        let can_reuse = scaffold.cuts && u32::try_from(rendered.text.len()).is_ok();
        let reused = if can_reuse { self.reusable_tokens(scaffold, rendered) } else { 0 };
        let from = if reused == 0 { 0 } else { self.ends[reused - 1] as usize };
        let tokenizer = scaffold.tokenizer;
        let (ids, ends) = tokenizer.encode_with_ends_shared(Arc::clone(&rendered.text), from)?;
        self.ids.truncate(reused);
        self.ids.extend_from_slice(&ids);
        self.ends.truncate(reused);
        self.ends.extend(ends.iter().map(|end| from as u32 + end));
        self.sources.truncate(reused);
        self.sources.extend(sources(&ends, from, &rendered.spans));
        self.text = Arc::clone(&rendered.text);
        self.spans.clone_from(&rendered.spans);
        Ok(self.view())
    }

    /// Returns the prompt that was encoded last.
    pub fn view(&self) -> View<'_> {
        View { ids: &self.ids, sources: &self.sources }
    }

    /// Returns how many tokens of the previous prompt can be reused: those before the texts differ, up to an added
    /// token.
    fn reusable_tokens(&self, scaffold: &Scaffold<'_>, rendered: &Rendered) -> usize {
        let tokenizer = scaffold.tokenizer;
        let shared = common_prefix(self.text.as_bytes(), rendered.text.as_bytes());
        // An added token is certain only if no longer added token could start with it.
        let certain = shared.saturating_sub(tokenizer.max_piece_bytes());
        let cuts = |index: &usize| {
            let (id, end) = (self.ids[*index], self.ends[*index] as usize);
            is_special(id, tokenizer)
                && tokenizer.token_bytes(id).is_some_and(|bytes| self.text.as_bytes()[..end].ends_with(bytes))
        };
        let within = self.ends.partition_point(|&end| end as usize <= certain);
        let Some(last) = (0..within).rev().find(cuts) else { return 0 };
        let end = self.ends[last] as usize;
        let same_spans = spans_before(&self.spans, end).eq(spans_before(&rendered.spans, end));
        if same_spans { last + 1 } else { 0 }
    }
}

/// Returns the starts and ends of spans before byte `end`.
fn spans_before(spans: &[Span], end: usize) -> impl Iterator<Item = (usize, usize)> {
    spans.iter().take_while(move |span| span.start < end).map(move |span| (span.start, span.end.min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Field;
    use crate::tokenizer::example;

    /// Renders texts with content between `{` and `}`.
    fn rendered(marked: &str) -> Rendered {
        let (mut result, mut text_without_marks) = (Rendered::default(), String::new());
        for part in marked.split_inclusive(['{', '}']) {
            let text = part.trim_end_matches(['{', '}']);
            let start = text_without_marks.len();
            text_without_marks.push_str(text);
            if part.ends_with('}') {
                result.spans.push(Span { start, end: text_without_marks.len(), message: 0, field: Field::Content });
            }
        }
        Rendered { text: text_without_marks.into(), ..result }
    }

    #[test]
    fn a_prompt_has_the_ids_and_sources_that_it_has_alone() {
        let tokenizer = example();
        let scaffold = Scaffold::new(&tokenizer, None).unwrap();
        let special = tokenizer.token_bytes(tokenizer.special_ids()[0]).unwrap();
        let special = std::str::from_utf8(special).unwrap();
        let long = "the price of two red lamps ".repeat(8);
        let opening = format!("{special}user\n{{{long}}}{special}");
        let texts = [
            opening.clone(),
            format!("{opening}\nassistant\n"),
            format!("{opening}\nassistant\n{{12 €}}{special}tool\n{{{long}}}{special}\n"),
            format!("{opening}\nassistant\n{{12 €}}{special}tool\n{{{long}}} and more"),
            // The same text with other content.
            format!("{opening}\nassistant\n12 €{special}tool\n{{{long}}} and more"),
            format!("{special}user\n{long}{special}\n{{{long}}}"),
            format!("{special}user\n{{{long}{special}\n{long}}}"),
            String::new(),
            format!("{{{long}}}"),
            opening,
        ];
        let mut prompts = Prompts::default();
        let mut kept = 0;
        for text in texts.iter().chain(texts.iter().rev()) {
            let rendered = rendered(text);
            kept += usize::from(prompts.reusable_tokens(&scaffold, &rendered) > 0);
            let (cached, uncached) =
                (prompts.encode(&scaffold, &rendered).unwrap(), scaffold.encode(&rendered, 0).unwrap());
            assert_eq!((cached.ids, cached.sources), (&*uncached.ids, &*uncached.sources), "{text}");
        }
        assert!(scaffold.cuts && kept > 8, "{kept}");
    }
}
