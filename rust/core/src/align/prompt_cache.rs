//! The last whole prompt that was encoded, so that the next one only has to be encoded from where it differs.
//!
//! Prompts of a group are alike, and each turn's prompt begins with the one before. Where the tokenizer cuts texts at added
//! tokens, the ids up to one do not depend on the text behind it. Each worker of `align` has one.

use super::branch::common_prefix;
use super::prompt::{Scaffold, View, sources};
use super::resolve::is_special;
use crate::error::Result;
use crate::template::{Rendered, Span};
use std::sync::Arc;

/// A rendered prompt with its ids, the byte behind each, and their sources.
#[derive(Debug, Default)]
pub struct Prompts {
    text: Arc<str>,
    spans: Vec<Span>,
    ids: Vec<u32>,
    ends: Vec<u32>,
    sources: Vec<u8>,
}

impl Prompts {
    /// Ids and sources of a whole rendered text: those of [`Scaffold::encode`] from its beginning.
    pub fn encode(&mut self, scaffold: &Scaffold<'_>, rendered: &Rendered) -> Result<View<'_>> {
        let within = scaffold.cuts && u32::try_from(rendered.text.len()).is_ok();
        let kept = if within { self.kept(scaffold, rendered) } else { 0 };
        let from = if kept == 0 { 0 } else { self.ends[kept - 1] as usize };
        let tokenizer = scaffold.tokenizer;
        let (ids, ends) = tokenizer.encode_held(Arc::clone(&rendered.text), from)?;
        self.ids.truncate(kept);
        self.ids.extend_from_slice(&ids);
        self.ends.truncate(kept);
        self.ends.extend(ends.iter().map(|end| from as u32 + end));
        self.sources.truncate(kept);
        self.sources.extend(sources(&ends, from, &rendered.spans));
        self.text = Arc::clone(&rendered.text);
        self.spans.clone_from(&rendered.spans);
        Ok(self.view())
    }

    /// The prompt that was encoded last.
    pub fn view(&self) -> View<'_> {
        View { ids: &self.ids, sources: &self.sources }
    }

    /// How many tokens the new text has in common with the one before, up to an added token.
    fn kept(&self, scaffold: &Scaffold<'_>, rendered: &Rendered) -> usize {
        let tokenizer = scaffold.tokenizer;
        let shared = common_prefix(self.text.as_bytes(), rendered.text.as_bytes());
        // An added token is only certain where a longer one could not begin with it.
        let sure = shared.saturating_sub(tokenizer.max_piece_bytes());
        let cuts = |index: &usize| {
            let (id, end) = (self.ids[*index], self.ends[*index] as usize);
            is_special(id, tokenizer)
                && tokenizer.token_bytes(id).is_some_and(|bytes| self.text.as_bytes()[..end].ends_with(bytes))
        };
        let within = self.ends.partition_point(|&end| end as usize <= sure);
        let Some(last) = (0..within).rev().find(cuts) else { return 0 };
        let end = self.ends[last] as usize;
        let alike = before(&self.spans, end).eq(before(&rendered.spans, end));
        if alike { last + 1 } else { 0 }
    }
}

/// Where spans begin and end before byte `end`.
fn before(spans: &[Span], end: usize) -> impl Iterator<Item = (usize, usize)> {
    spans.iter().take_while(move |span| span.start < end).map(move |span| (span.start, span.end.min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Field;
    use crate::tokenizer::example;

    /// Texts with content between `{` and `}`.
    fn rendered(marked: &str) -> Rendered {
        let (mut found, mut whole) = (Rendered::default(), String::new());
        for part in marked.split_inclusive(['{', '}']) {
            let text = part.trim_end_matches(['{', '}']);
            let start = whole.len();
            whole.push_str(text);
            if part.ends_with('}') {
                found.spans.push(Span { start, end: whole.len(), message: 0, field: Field::Content });
            }
        }
        Rendered { text: whole.into(), ..found }
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
            // The same text, other content.
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
            kept += usize::from(prompts.kept(&scaffold, &rendered) > 0);
            let (found, alone) =
                (prompts.encode(&scaffold, &rendered).unwrap(), scaffold.encode(&rendered, 0).unwrap());
            assert_eq!((found.ids, found.sources), (&*alone.ids, &*alone.sources), "{text}");
        }
        assert!(scaffold.cuts && kept > 8, "{kept}");
    }
}
