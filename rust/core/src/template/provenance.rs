//! Determines which bytes of a render are content: renders with marks, checks whether to trust them, and reads them.
//!
//! A marked render counts only if it equals the plain render byte for byte after its marks are removed. Balanced marks
//! give spans. Strings that the template split, or that marks would disturb, are searched for in order, and the result
//! is flagged.

use super::cache::Marked;
use super::conversation::Selection;
use super::environment::{self, failure};
use super::incremental::session::{LastRun, Slots};
use super::limits::{in_time, work};
use super::marks::{Alphabet, Event, Leaf, Marker, Tag, UsedCharacters, trimmed};
use super::rendered::{Field, NO_MESSAGE, Rendered, Span};
use super::{Call, Template, watch};
use crate::error::Result;
use minijinja::Error;
use minijinja::value::Value;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are searched or compared per unit of work.
const BYTES_PER_UNIT: usize = 16;
/// Units of work for an event or a piece.
const EACH: usize = 4;

/// Spans read from one accepted render.
#[derive(Debug, Default)]
pub(super) struct MarkedSpans {
    pub spans: Vec<Span>,
    pub generation: Vec<(usize, usize)>,
    /// True if every opening mark has a closing one.
    pub balanced: bool,
}

/// A span with the part of the string that it covers.
#[derive(Debug, Clone)]
struct Piece {
    range: Range<usize>,
    message: u32,
    field: Field,
    leaf: Option<(Leaf, Range<usize>)>,
}

/// Reads the marks of a render. `text` is its text without marks.
///
/// # Errors
/// Fails if the time of the call is over.
pub(super) fn read(text: &str, events: &[(usize, Event)], tags: &[Tag]) -> Result<MarkedSpans, Error> {
    let mut found = MarkedSpans { balanced: true, ..MarkedSpans::default() };
    let mut pieces = Vec::new();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut generations = Vec::new();
    for &(at, event) in events {
        work(EACH)?;
        match event {
            Event::Open(tag) => {
                // Strings contain no marks. A string that is still open has lost its end.
                if let Some(open_string) = open.pop_if(|(last, _)| tags.get(*last).is_none_or(|t| t.leaf.is_some())) {
                    found.balanced = false;
                    pieces.extend(cut_at_end(text, open_string, tags)?);
                }
                open.push((tag, at));
            }
            Event::Close(tag) => {
                let depth_of_tag = open.iter().rposition(|(open_tag, _)| *open_tag == tag);
                work((open.len() - depth_of_tag.unwrap_or(0)) / BYTES_PER_UNIT)?;
                let Some(depth) = depth_of_tag else {
                    found.balanced = false;
                    pieces.extend(cut_at_start(text, at, tag, tags)?);
                    continue;
                };
                found.balanced &= depth + 1 == open.len();
                let start = open[depth].1;
                open.truncate(depth);
                pieces.extend(piece(start..at, tag, tags).filter(|_| depth == 0));
            }
            Event::GenerationOpen => generations.push(at),
            Event::GenerationClose => found.generation.extend(generations.pop().map(|start| (start, at))),
        }
    }
    found.balanced &= open.is_empty();
    for open_string in open {
        pieces.extend(cut_at_end(text, open_string, tags)?);
    }
    found.generation.sort_unstable();
    found.spans = joined(text, pieces)?;
    Ok(found)
}

fn piece(range: Range<usize>, tag: usize, tags: &[Tag]) -> Option<Piece> {
    let tag = tags.get(tag)?;
    Some(Piece { range, message: tag.message, field: tag.field, leaf: tag.leaf.clone() })
}

/// Returns the piece of a string whose end the template dropped. It extends as far as the text equals the string.
fn cut_at_end(text: &str, (tag, start): (usize, usize), tags: &[Tag]) -> Result<Option<Piece>, Error> {
    let Some((leaf, part)) = tags.get(tag).and_then(|tag| tag.leaf.clone()) else { return Ok(None) };
    let wanted = &leaf.text[part.clone()];
    let same = text.as_bytes()[start..].iter().zip(wanted.as_bytes()).take_while(|(a, b)| a == b).count();
    work(same / BYTES_PER_UNIT)?;
    let range = start..start + floor(wanted, same);
    let leaf = (leaf, part.start..part.start + range.len());
    Ok(piece(range, tag, tags).map(|piece| Piece { leaf: Some(leaf), ..piece }))
}

/// Returns the piece of a string whose start the template dropped.
fn cut_at_start(text: &str, end: usize, tag: usize, tags: &[Tag]) -> Result<Option<Piece>, Error> {
    let Some((leaf, part)) = tags.get(tag).and_then(|tag| tag.leaf.clone()) else { return Ok(None) };
    let wanted = leaf.text.as_bytes()[part.clone()].iter().rev();
    let same = text.as_bytes()[..end].iter().rev().zip(wanted).take_while(|(a, b)| a == b).count();
    work(same / BYTES_PER_UNIT)?;
    let mut start = part.end - same;
    while !leaf.text.is_char_boundary(start) {
        start += 1;
    }
    let found = piece(end - (part.end - start)..end, tag, tags);
    Ok(found.map(|piece| Piece { leaf: Some((leaf, start..part.end)), ..piece }))
}

/// Returns the length of the longest prefix of at most `length` bytes that ends between characters.
fn floor(text: &str, mut length: usize) -> usize {
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    length
}

/// Sorts pieces and removes overlaps. Pieces of one string are joined if the text between them is the string's own.
fn joined(text: &str, mut pieces: Vec<Piece>) -> Result<Vec<Span>, Error> {
    for piece in &mut pieces {
        work(EACH + piece.leaf.as_ref().map_or(0, |(leaf, _)| leaf.text.len()) / BYTES_PER_UNIT)?;
        widen(text, piece);
    }
    pieces.sort_by_key(|piece| (piece.range.start, std::cmp::Reverse(piece.range.end)));
    let mut kept: Vec<Piece> = Vec::with_capacity(pieces.len());
    for mut next in pieces {
        if let Some(last) = kept.last_mut() {
            if join(text, last, &next) {
                continue;
            }
            next.range.start = next.range.start.max(last.range.end);
        }
        if next.range.start < next.range.end {
            kept.push(next);
        }
    }
    let span = |p: Piece| Span { start: p.range.start, end: p.range.end, message: p.message, field: p.field };
    Ok(kept.into_iter().map(span).collect())
}

/// Extends a piece over a seam at the edge of the string (`<think>` before its first mark), but not over whitespace
/// only.
fn widen(text: &str, piece: &mut Piece) {
    let Some((leaf, part)) = &mut piece.leaf else { return };
    let head = trimmed(&leaf.text, 0..part.start);
    let head = head.start..part.start;
    if !leaf.text[head.clone()].trim().is_empty() && text[..piece.range.start].ends_with(&leaf.text[head.clone()]) {
        piece.range.start -= head.len();
        part.start = head.start;
    }
    let tail = part.end..trimmed(&leaf.text, part.end..leaf.text.len()).end;
    if !leaf.text[tail.clone()].trim().is_empty() && text[piece.range.end..].starts_with(&leaf.text[tail.clone()]) {
        piece.range.end += tail.len();
        part.end = tail.end;
    }
}

/// Extends `last` over `next` if both belong to one string and nothing else is between them.
fn join(text: &str, last: &mut Piece, next: &Piece) -> bool {
    let (Some((leaf, part)), Some((next_leaf, next_part))) = (&mut last.leaf, &next.leaf) else { return false };
    if leaf.number != next_leaf.number || last.message != next.message || next_part.end < part.end {
        return false;
    }
    let overlap = next_part.start < part.end;
    let same = if overlap {
        next.range.end.checked_sub(last.range.start) == Some(next_part.end - part.start)
    } else {
        text.get(last.range.end..next.range.start) == Some(&leaf.text[part.end..next_part.start])
    };
    if same {
        last.range.end = next.range.end;
        part.end = next_part.end;
    }
    same
}

/// Searches for strings that marks could not locate. Each is searched for after the previous one and outside `taken`.
///
/// # Errors
/// Fails if the time of the call is over.
pub(super) fn search(text: &str, leaves: &[(u32, Field, &str)], taken: &[Span]) -> Result<Vec<Span>, Error> {
    let mut found: Vec<Span> = Vec::new();
    for &(message, field, leaf) in leaves {
        work(EACH + (taken.len() + found.len() + leaf.len()) / BYTES_PER_UNIT)?;
        let wanted = &leaf[trimmed(leaf, 0..leaf.len())];
        if wanted.is_empty() {
            continue;
        }
        let earlier_end = taken.iter().chain(&found).filter(|span| span.message <= message).map(|span| span.end).max();
        let later_spans = taken.iter().filter(|span| span.message > message && span.message != NO_MESSAGE);
        let start = earlier_end.unwrap_or(0);
        let end = later_spans.map(|span| span.start).min().unwrap_or(text.len()).max(start);
        work((end - start) / BYTES_PER_UNIT)?;
        if let Some(at) = text[start..end].find(wanted) {
            found.push(Span { start: start + at, end: start + at + wanted.len(), message, field });
        }
    }
    Ok(found)
}

/// Sorts spans and truncates them where they overlap.
pub(super) fn disjoint(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
    let mut end = 0;
    spans.retain_mut(|span| {
        span.start = span.start.max(end);
        end = end.max(span.end);
        span.start < span.end
    });
    spans
}

/// Maximum number of messages that are marked one by one. Longer conversations are searched.
const SINGLE_TRIES: usize = 64;
/// Maximum number of marks that are read from one render, plus eight for each inserted tag. A render with more is not
/// trusted.
const MARKS: usize = 500_000;
/// Bytes and seams that are processed per unit of work.
const PASSED_PER_UNIT: usize = 4;

/// Values that the marked renders of one call share.
struct Marking {
    keep_null: bool,
    alphabet: Alphabet,
    schemas: Option<Marked>,
}

/// The result of a marked render.
#[derive(Default)]
struct MarkedRender {
    /// Its text without marks, and the spans read from the marks; `None` if it failed or has too many marks.
    read: Option<(Arc<str>, MarkedSpans)>,
    /// True if the run may have distinguished a marked string from a plain one.
    noticed: bool,
    /// True if for some string it matters whether marks are inside or outside whitespace.
    edges: bool,
}

impl Template {
    /// Returns the text of a call, and the position of each message in it.
    ///
    /// # Errors
    /// `Kind::Template` if the template fails, or if the time of the call is over.
    pub(super) fn with_provenance(&self, call: &mut Call<'_, '_>, slots: &mut Slots) -> Result<Rendered> {
        let to_error = |error: Error| failure(&error);
        let Some(marking) = self.marking(call) else {
            let text = self.plain(call, slots)?;
            return self.searched(call, text, MarkedSpans::default()).map_err(to_error);
        };
        let first = self.all_marked(call, &marking, slots, Selection::Outside).map_err(to_error)?;
        #[cfg(any(debug_assertions, fuzzing))]
        if let Some((text, _)) = first.read.as_ref().filter(|_| !first.noticed) {
            let plain = self.plain(call, &mut Slots::default());
            let same = plain.as_ref().is_ok_and(|plain| **plain == **text);
            assert!(same || in_time().is_err(), "{text:?} was not noticed to be {plain:?}");
        }
        let text = match &first.read {
            // The run behaved like the run without marks, so its text is the same.
            Some((text, _)) if !first.noticed => Arc::clone(text),
            _ => self.plain(call, slots)?,
        };
        self.with_spans(call, &marking, slots, text, first).map_err(to_error)
    }

    /// Returns the marks of a call's strings, or `None` if the input leaves no characters for them.
    fn marking(&self, call: &Call<'_, '_>) -> Option<Marking> {
        let strings = call.context.iter().filter_map(|(_, value)| value.as_str());
        let mut used = strings.fold(self.used, UsedCharacters::and).with(call.conversation.used());
        used = call.tools.as_ref().map_or(used, |tools| used.with(tools.used));
        let alphabet = Alphabet::avoiding(used)?;
        // Cached schemas have the marks of an input without noncharacters.
        let schemas = call.tools.as_ref().map(|tools| {
            if used.is_empty() {
                tools.marked.clone()
            } else {
                Marked::new(tools.shown(), alphabet.clone(), &self.literals)
            }
        });
        Some(Marking { keep_null: call.keep_null, alphabet, schemas })
    }

    /// Adds the spans of marked renders to `text`. `first` is the first of these renders.
    fn with_spans(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        slots: &mut Slots,
        text: Arc<str>,
        first: MarkedRender,
    ) -> Result<Rendered, Error> {
        // A call that failed without its null keys is marked again with them.
        let mut first = Some(first).filter(|_| call.keep_null == marking.keep_null);
        for selection in [Selection::Outside, Selection::AssistantInside, Selection::Inside] {
            let tried = first.take().map_or_else(|| self.all_marked(call, marking, slots, selection), Ok)?;
            match tried.read.filter(|(plain, _)| Arc::ptr_eq(plain, &text) || *plain == text) {
                Some((_, MarkedSpans { spans, generation, balanced: true })) => {
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

    /// Renders with marks on all messages.
    fn all_marked(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        slots: &mut Slots,
        selection: Selection,
    ) -> Result<MarkedRender, Error> {
        let Some(slot) = slots.marked(selection) else { return Ok(MarkedRender::default()) };
        let tags = marking.schemas.as_ref().map_or_else(Vec::new, |schemas| schemas.tags.clone());
        let messages = (call.conversation, call.keep_null);
        let marked = slot.marked(messages, (&marking.alphabet, tags), self.seams.as_ref(), selection);
        work(marked.passed / PASSED_PER_UNIT)?;
        let tools = marking.schemas.as_ref().map(|schemas| schemas.value.clone());
        let mut tried = MarkedRender { edges: marked.noted.edges, ..MarkedRender::default() };
        tried.noticed = marked.noted.doubt || marking.schemas.as_ref().is_some_and(|schemas| schemas.doubt);
        let tags = std::mem::take(&mut slot.tags);
        match self.run_on(call, slot, marked.values, tools, Some(&marking.alphabet)) {
            Ok(run) => {
                tried.noticed |= run.noticed;
                tried.read = read_run(run, &marking.alphabet, &tags)?;
            }
            // A run that was merely too slow must not give other spans than on a faster machine.
            Err(_) => in_time()?,
        }
        // The values of the slot contain the marks of these tags, whether or not the run succeeded.
        slot.tags = tags;
        Ok(tried)
    }

    /// Renders with marks on some messages, and returns the spans if the text is unchanged.
    fn some_marked(
        &self,
        call: &Call<'_, '_>,
        marking: &Marking,
        text: &str,
        selection: Selection,
    ) -> Result<Option<MarkedSpans>, Error> {
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
        let mut run = LastRun { text: text_with_marks, ..LastRun::default() };
        let found = read_run(&mut run, &marking.alphabet, &marker.tags)?;
        Ok(found.filter(|(plain, _)| **plain == *text).map(|(_, found)| found))
    }

    /// Marks only the schemas, and then one message at a time, for templates that some mark disturbs.
    fn one_by_one(&self, call: &Call<'_, '_>, marking: &Marking, text: &str) -> Result<MarkedSpans, Error> {
        let count = call.conversation.len();
        let single = (count <= SINGLE_TRIES).then_some(0..count).into_iter().flatten().map(Selection::Only);
        let mut result = MarkedSpans::default();
        for selection in std::iter::once(Selection::Schemas).chain(single) {
            if result.spans.len() > MARKS {
                break;
            }
            if let Some(found) = self.some_marked(call, marking, text, selection)? {
                result.spans.extend(found.spans);
                result.generation = found.generation;
            }
        }
        result.spans = disjoint(result.spans);
        Ok(result)
    }

    /// Completes `found` by searching for every string of a message that has no span.
    fn searched(&self, call: &Call<'_, '_>, text: Arc<str>, mut found: MarkedSpans) -> Result<Rendered, Error> {
        let located: HashSet<_> = found.spans.iter().map(|span| (span.message, span.field)).collect();
        let mut missing = call.conversation.leaves();
        missing.retain(|(message, field, _)| !located.contains(&(*message, *field)));
        let searched_spans = search(&text, &missing, &found.spans)?;
        found.spans.extend(searched_spans);
        let generation = if self.has_generation { found.generation } else { Vec::new() };
        Ok(Rendered { text, spans: disjoint(found.spans), generation, exact_provenance: false })
    }
}

/// Returns the text of a marked render without its marks, and the spans of these. Returns `None` if there are too many
/// marks.
fn read_run(run: &mut LastRun, alphabet: &Alphabet, tags: &[Tag]) -> Result<Option<(Arc<str>, MarkedSpans)>, Error> {
    work(run.text.len() / PASSED_PER_UNIT)?;
    let max_marks = tags.len().saturating_mul(8).saturating_add(MARKS);
    if !run.stripped.update(&run.text, run.kept, alphabet, max_marks) {
        return Ok(None);
    }
    let found = read(&run.stripped.text, &run.stripped.events, tags)?;
    Ok(Some((Arc::from(run.stripped.text.as_str()), found)))
}
