//! Marked renders beside the plain one: which to try, and when to believe them.
//!
//! A marked render counts only if it equals the plain one byte for byte once its marks are out. Called by
//! `Template::render`.

use super::conversation::Selection;
use super::environment::failure;
use super::limits::{in_time, work};
use super::marks::{self, Alphabet, Marker, Tag, Used};
use super::provenance::{self, Found, disjoint};
use super::rendered::Rendered;
use super::schemas::Marked;
use super::session::Slots;
use super::{Call, Template};
use crate::error::Result;
use std::collections::HashSet;
use std::sync::Arc;

/// Messages of a conversation that are marked one by one before searching takes over.
const SINGLE_TRIES: usize = 64;
/// Marks of one render that are read, beside eight for each that was put in; with more it is not believed.
const MARKS: usize = 500_000;
/// Bytes and seams that are gone over in the time of one unit of work.
const PASSED_PER_UNIT: usize = 4;

/// What the marked renders of one call share.
struct Marking<'a> {
    call: &'a Call<'a, 'a>,
    alphabet: Alphabet,
    schemas: Option<Marked>,
}

impl Template {
    /// Adds to `text` what marked renders tell of it.
    ///
    /// # Errors
    /// `Kind::Template` where the time of the call is over.
    pub(super) fn with_provenance(&self, call: &Call<'_, '_>, slots: &mut Slots, text: Arc<str>) -> Result<Rendered> {
        self.with_spans(call, slots, text).map_err(|error| failure(&error))
    }

    fn with_spans(&self, call: &Call<'_, '_>, slots: &mut Slots, text: Arc<str>) -> Result<Rendered, minijinja::Error> {
        let strings = call.context.iter().filter_map(|(_, value)| value.as_str());
        let mut used = strings.fold(self.used, Used::and).with(call.conversation.used());
        used = call.tools.as_ref().map_or(used, |tools| used.with(tools.used));
        let Some(alphabet) = Alphabet::avoiding(used) else {
            return self.searched(call, text, Found::default());
        };
        // Remembered schemas carry the marks of an input without noncharacters.
        let schemas = call.tools.as_ref().map(|tools| {
            if used.is_empty() {
                tools.marked.clone()
            } else {
                Marked::new(&tools.json, alphabet.clone(), &self.literals)
            }
        });
        let marking = Marking { call, alphabet, schemas };
        for selection in [Selection::Outside, Selection::AssistantInside, Selection::Inside] {
            let (found, edges) = self.all_marked(&marking, slots, &text, selection)?;
            match found {
                Some(found) if found.balanced => {
                    let Found { spans, generation, .. } = found;
                    return Ok(Rendered { text, spans, generation, exact_provenance: true });
                }
                Some(found) => return self.searched(call, text, found),
                None if !edges => break,
                None => {}
            }
        }
        let found = self.one_by_one(&marking, &text)?;
        self.searched(call, text, found)
    }

    /// What a render with marks on all messages tells, if taking its marks out gives `text`; and whether it matters for
    /// any string that marks stand inside or outside whitespace.
    fn all_marked(
        &self,
        marking: &Marking<'_>,
        slots: &mut Slots,
        text: &str,
        selection: Selection,
    ) -> Result<(Option<Found>, bool), minijinja::Error> {
        let Some(slot) = slots.marked(selection) else { return Ok((None, false)) };
        let tags = marking.schemas.as_ref().map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let messages = (marking.call.conversation, marking.call.keep_null);
        let (values, edges, passed) = slot.marked(messages, (&marking.alphabet, tags), self.seams.as_ref(), selection);
        work(passed / PASSED_PER_UNIT)?;
        let tools = marking.schemas.as_ref().map(|schemas| schemas.value.clone());
        let tags = std::mem::take(&mut slot.tags);
        let found = match self.run_on(marking.call, slot, values, tools, Some(&marking.alphabet)) {
            Ok(marked) => believed(marked, &marking.alphabet, text, &tags),
            // What was only too slow must not give other spans than on a faster machine.
            Err(_) => in_time().map(|()| None),
        };
        // The values of the slot hold the marks of these, whatever came of the run.
        slot.tags = tags;
        Ok((found?, edges))
    }

    /// What a render with marks on some of them tells.
    fn some_marked(
        &self,
        marking: &Marking<'_>,
        text: &str,
        selection: Selection,
    ) -> Result<Option<Found>, minijinja::Error> {
        let schemas = marking.schemas.as_ref().filter(|_| !matches!(selection, Selection::Only(_)));
        let tags = schemas.map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let mut marker = Marker::new(marking.alphabet.clone(), self.seams.as_ref(), tags);
        let messages = marking.call.conversation.values(marking.call.keep_null, Some((&mut marker, &selection)));
        work(marker.passed / PASSED_PER_UNIT)?;
        let tools = schemas.map(|schemas| schemas.value.clone());
        let Ok(marked) = self.run(marking.call, messages, tools, Some(&marking.alphabet)) else {
            return in_time().map(|()| None);
        };
        believed(&marked, &marking.alphabet, text, &marker.tags)
    }

    /// Marks on the schemas alone and on one message at a time, for templates that some mark disturbs.
    fn one_by_one(&self, marking: &Marking<'_>, text: &str) -> Result<Found, minijinja::Error> {
        let count = marking.call.conversation.len();
        let single = (count <= SINGLE_TRIES).then_some(0..count).into_iter().flatten().map(Selection::Only);
        let mut all = Found::default();
        for selection in std::iter::once(Selection::Schemas).chain(single) {
            if all.spans.len() > MARKS {
                break;
            }
            if let Some(found) = self.some_marked(marking, text, selection)? {
                all.spans.extend(found.spans);
                all.generation = found.generation;
            }
        }
        all.spans = disjoint(all.spans);
        Ok(all)
    }

    /// Completes `found` by searching for every string of a message that has no span.
    fn searched(&self, call: &Call<'_, '_>, text: Arc<str>, mut found: Found) -> Result<Rendered, minijinja::Error> {
        let known: HashSet<_> = found.spans.iter().map(|span| (span.message, span.field)).collect();
        let mut missing = call.conversation.leaves();
        missing.retain(|(message, field, _)| !known.contains(&(*message, *field)));
        let more = provenance::search(&text, &missing, &found.spans)?;
        found.spans.extend(more);
        let generation = if self.has_generation { found.generation } else { Vec::new() };
        Ok(Rendered { text, spans: disjoint(found.spans), generation, exact_provenance: false })
    }
}

/// What the marks of a render say, if the text without them is `text`.
fn believed(marked: &str, alphabet: &Alphabet, text: &str, tags: &[Tag]) -> Result<Option<Found>, minijinja::Error> {
    work(marked.len() / PASSED_PER_UNIT)?;
    let most = tags.len().saturating_mul(8).saturating_add(MARKS);
    let stripped = marks::strip(marked, alphabet, most).filter(|(plain, _)| plain == text);
    stripped.map(|(_, events)| provenance::read(text, &events, tags)).transpose()
}
