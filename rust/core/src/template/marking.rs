//! Marked renders beside the plain one: which to try, and when to believe them.
//!
//! A marked render counts only if it equals the plain one byte for byte once its marks are out. Called by
//! `Template::render`.

use super::conversation::Selection;
use super::marks::{self, Alphabet, Marker, Used};
use super::provenance::{self, Found, disjoint};
use super::schemas::Marked;
use super::{Call, Rendered, Template};

/// Messages of a conversation that are marked one by one before searching takes over.
const SINGLE_TRIES: usize = 64;

/// What the marked renders of one call share.
struct Marking<'a> {
    call: &'a Call<'a>,
    alphabet: Alphabet,
    schemas: Option<Marked>,
}

impl Template {
    /// Adds to `text` what marked renders tell of it.
    pub(super) fn with_provenance(&self, call: &Call<'_>, text: String) -> Rendered {
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
            let (found, edges) = self.marked(&marking, &text, selection);
            match found {
                Some(found) if found.balanced => {
                    let Found { spans, generation, .. } = found;
                    return Rendered { text, spans, generation, exact_provenance: true };
                }
                Some(found) => return self.searched(call, text, found),
                None if !edges => break,
                None => {}
            }
        }
        let found = self.one_by_one(&marking, &text);
        self.searched(call, text, found)
    }

    /// What one marked render tells, if taking its marks out gives `text`; and whether it matters for any string that
    /// marks stand inside or outside whitespace.
    fn marked(&self, marking: &Marking<'_>, text: &str, selection: Selection) -> (Option<Found>, bool) {
        let schemas = marking.schemas.as_ref().filter(|_| !matches!(selection, Selection::Only(_)));
        let tags = schemas.map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let mut marker = Marker::new(marking.alphabet.clone(), self.seams.as_ref(), tags);
        let messages = marking.call.conversation.values(marking.call.keep_null, Some((&mut marker, &selection)));
        let tools = schemas.map(|schemas| schemas.value.clone());
        let found = self.run(marking.call, messages, tools, Some(&marking.alphabet)).ok().and_then(|marked| {
            let (plain, events) = marks::strip(&marked, &marking.alphabet);
            (plain == text).then(|| provenance::read(text, &events, &marker.tags))
        });
        (found, marker.edges)
    }

    /// Marks on the schemas alone and on one message at a time, for templates that some mark disturbs.
    fn one_by_one(&self, marking: &Marking<'_>, text: &str) -> Found {
        let count = marking.call.conversation.len();
        let single = (count <= SINGLE_TRIES).then_some(0..count).into_iter().flatten().map(Selection::Only);
        let mut all = Found::default();
        for selection in std::iter::once(Selection::Schemas).chain(single) {
            if let Some(found) = self.marked(marking, text, selection).0 {
                all.spans.extend(found.spans);
                all.generation = found.generation;
            }
        }
        all.spans = disjoint(all.spans);
        all
    }

    /// Completes `found` by searching for every string of a message that has no span.
    fn searched(&self, call: &Call<'_>, text: String, mut found: Found) -> Rendered {
        let leaves = call.conversation.leaves();
        let missing: Vec<_> = leaves
            .into_iter()
            .filter(|(message, field, _)| {
                !found.spans.iter().any(|span| span.message == *message && span.field == *field)
            })
            .collect();
        let more = provenance::search(&text, &missing, &found.spans);
        found.spans.extend(more);
        let generation = if self.has_generation { found.generation } else { Vec::new() };
        Rendered { text, spans: disjoint(found.spans), generation, exact_provenance: false }
    }
}
