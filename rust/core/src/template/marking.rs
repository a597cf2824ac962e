//! Marked renders beside the plain one: which to try, and when to believe them.
//!
//! A marked render counts only if it equals the plain one byte for byte once its marks are out. Called by
//! `Template::render`.

use super::conversation::Selection;
use super::environment::{self, failure};
use super::limits::{in_time, work};
use super::marks::{Alphabet, Marker, Tag, Used};
use super::provenance::{self, Found, disjoint};
use super::rendered::Rendered;
use super::schemas::Marked;
use super::session::{Earlier, Slots};
use super::{Call, Template, watch};
use crate::error::Result;
use minijinja::value::Value;
use std::collections::HashSet;
use std::sync::Arc;

/// Messages of a conversation that are marked one by one before searching takes over.
const SINGLE_TRIES: usize = 64;
/// Marks of one render that are read, beside eight for each that was put in; with more it is not believed.
const MARKS: usize = 500_000;
/// Bytes and seams that are gone over in the time of one unit of work.
const PASSED_PER_UNIT: usize = 4;

/// What the marked renders of one call share.
struct Marking {
    keep_null: bool,
    alphabet: Alphabet,
    schemas: Option<Marked>,
}

/// What became of a marked render.
#[derive(Default)]
struct Tried {
    /// Its text without marks, and what these say; `None` where it failed, or has more marks than are read.
    read: Option<(Arc<str>, Found)>,
    /// Whether it may have told a marked string from a plain one.
    noticed: bool,
    /// Whether it matters for any string that marks stand inside or outside whitespace.
    edges: bool,
}

impl Template {
    /// The text of a call, and where each message stands in it.
    ///
    /// # Errors
    /// `Kind::Template` where the template fails, or where the time of the call is over.
    pub(super) fn with_provenance(&self, call: &mut Call<'_, '_>, slots: &mut Slots) -> Result<Rendered> {
        let late = |error: minijinja::Error| failure(&error);
        let Some(marking) = self.marking(call) else {
            let text = self.plain(call, slots)?;
            return self.searched(call, text, Found::default()).map_err(late);
        };
        let first = self.all_marked(call, &marking, slots, Selection::Outside).map_err(late)?;
        #[cfg(any(debug_assertions, fuzzing))]
        if let Some((text, _)) = first.read.as_ref().filter(|_| !first.noticed) {
            let plain = self.plain(call, &mut Slots::default());
            let same = plain.as_ref().is_ok_and(|plain| **plain == **text);
            assert!(same || in_time().is_err(), "{text:?} was not noticed to be {plain:?}");
        }
        let text = match &first.read {
            // The run did what the run without marks does, so its text is that one's.
            Some((text, _)) if !first.noticed => Arc::clone(text),
            _ => self.plain(call, slots)?,
        };
        self.with_spans(call, &marking, slots, text, first).map_err(late)
    }

    /// The marks of a call's strings, or none where the input leaves no characters for them.
    fn marking(&self, call: &Call<'_, '_>) -> Option<Marking> {
        let strings = call.context.iter().filter_map(|(_, value)| value.as_str());
        let mut used = strings.fold(self.used, Used::and).with(call.conversation.used());
        used = call.tools.as_ref().map_or(used, |tools| used.with(tools.used));
        let alphabet = Alphabet::avoiding(used)?;
        // Remembered schemas carry the marks of an input without noncharacters.
        let schemas = call.tools.as_ref().map(|tools| {
            if used.is_empty() {
                tools.marked.clone()
            } else {
                Marked::new(tools.shown(), alphabet.clone(), &self.literals)
            }
        });
        Some(Marking { keep_null: call.keep_null, alphabet, schemas })
    }

    /// `text` with what its marked renders tell, `first` being the first of them.
    fn with_spans(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        slots: &mut Slots,
        text: Arc<str>,
        first: Tried,
    ) -> Result<Rendered, minijinja::Error> {
        // What failed without its null keys is marked with them.
        let mut first = Some(first).filter(|_| call.keep_null == marking.keep_null);
        for selection in [Selection::Outside, Selection::AssistantInside, Selection::Inside] {
            let tried = first.take().map_or_else(|| self.all_marked(call, marking, slots, selection), Ok)?;
            match tried.read.filter(|(plain, _)| Arc::ptr_eq(plain, &text) || *plain == text) {
                Some((_, Found { spans, generation, balanced: true })) => {
                    return Ok(Rendered { text, spans, generation, exact_provenance: true });
                }
                Some((_, found)) => return self.searched(call, text, found),
                None if !tried.edges => break,
                None => {}
            }
        }
        let found = self.one_by_one(call, marking, &text)?;
        self.searched(call, text, found)
    }

    /// A render with marks on all messages.
    fn all_marked(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        slots: &mut Slots,
        selection: Selection,
    ) -> Result<Tried, minijinja::Error> {
        let Some(slot) = slots.marked(selection) else { return Ok(Tried::default()) };
        let tags = marking.schemas.as_ref().map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let messages = (call.conversation, call.keep_null);
        let marked = slot.marked(messages, (&marking.alphabet, tags), self.seams.as_ref(), selection);
        work(marked.passed / PASSED_PER_UNIT)?;
        let tools = marking.schemas.as_ref().map(|schemas| schemas.value.clone());
        let mut tried = Tried { edges: marked.noted.edges, ..Tried::default() };
        tried.noticed = marked.noted.doubt || marking.schemas.as_ref().is_some_and(|schemas| schemas.doubt);
        let tags = std::mem::take(&mut slot.tags);
        match self.run_on(call, slot, marked.values, tools, Some(&marking.alphabet)) {
            Ok(run) => {
                tried.noticed |= run.noticed;
                tried.read = read(run, &marking.alphabet, &tags)?;
            }
            // What was only too slow must not give other spans than on a faster machine.
            Err(_) => in_time()?,
        }
        // The values of the slot hold the marks of these, whatever came of the run.
        slot.tags = tags;
        Ok(tried)
    }

    /// What a render with marks on some of them tells.
    fn some_marked(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        text: &str,
        selection: Selection,
    ) -> Result<Option<Found>, minijinja::Error> {
        let schemas = marking.schemas.as_ref().filter(|_| !matches!(selection, Selection::Only(_)));
        let tags = schemas.map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let mut marker = Marker::new(marking.alphabet.clone(), self.seams.as_ref(), tags);
        let value = |index| call.conversation.value(index, call.keep_null, Some((&mut marker, &selection)));
        let messages = Value::from((0..call.conversation.len()).map(value).collect::<Vec<_>>());
        work(marker.passed / PASSED_PER_UNIT)?;
        let tools = schemas.map(|schemas| schemas.value.clone());
        watch::begin(0);
        let context = call.variables(messages, tools, Some(&marking.alphabet));
        let Ok(text_with_marks) = environment::render(&self.env, context, call.size) else {
            return in_time().map(|()| None);
        };
        let mut run = Earlier { text: text_with_marks, ..Earlier::default() };
        let found = read(&mut run, &marking.alphabet, &marker.tags)?;
        Ok(found.filter(|(plain, _)| **plain == *text).map(|(_, found)| found))
    }

    /// Marks on the schemas alone and on one message at a time, for templates that some mark disturbs.
    fn one_by_one(&self, call: &Call<'_, '_>, marking: &Marking, text: &str) -> Result<Found, minijinja::Error> {
        let count = call.conversation.len();
        let single = (count <= SINGLE_TRIES).then_some(0..count).into_iter().flatten().map(Selection::Only);
        let mut all = Found::default();
        for selection in std::iter::once(Selection::Schemas).chain(single) {
            if all.spans.len() > MARKS {
                break;
            }
            if let Some(found) = self.some_marked(call, marking, text, selection)? {
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

/// The text of a marked render without its marks, and what these say; `None` where there are too many.
fn read(run: &mut Earlier, alphabet: &Alphabet, tags: &[Tag]) -> Result<Option<(Arc<str>, Found)>, minijinja::Error> {
    work(run.text.len() / PASSED_PER_UNIT)?;
    let most = tags.len().saturating_mul(8).saturating_add(MARKS);
    if !run.stripped.go_on(&run.text, run.kept, alphabet, most) {
        return Ok(None);
    }
    let found = provenance::read(&run.stripped.text, &run.stripped.events, tags)?;
    Ok(Some((Arc::from(run.stripped.text.as_str()), found)))
}
