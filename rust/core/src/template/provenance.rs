//! Which bytes of a render are content: what marks say once the marked render equals the plain one.
//!
//! Balanced marks give spans; a string the template cut apart, or one that marks would disturb, is searched for in
//! order, and the result says so. Called by `Template::render`.

use super::limits::work;
use super::marks::{Event, Leaf, Tag, trimmed};
use super::rendered::{Field, NO_MESSAGE, Span};
use minijinja::Error;
use std::ops::Range;

/// Bytes that are searched or compared in the time of one unit of work.
const BYTES_PER_UNIT: usize = 16;
/// Units that an event or a piece takes.
const EACH: usize = 4;

/// Spans read from one accepted render.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub spans: Vec<Span>,
    pub generation: Vec<(usize, usize)>,
    /// Whether every mark that opened also closed.
    pub balanced: bool,
}

/// A span with the part of the string it covers.
#[derive(Debug, Clone)]
struct Piece {
    range: Range<usize>,
    message: u32,
    field: Field,
    leaf: Option<(Leaf, Range<usize>)>,
}

/// Reads the marks of a render whose text, marks taken out, is `text`.
///
/// # Errors
/// Where there is no time for it.
pub(super) fn read(text: &str, events: &[(usize, Event)], tags: &[Tag]) -> Result<Found, Error> {
    let mut found = Found { balanced: true, ..Found::default() };
    let mut pieces = Vec::new();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut generations = Vec::new();
    for &(at, event) in events {
        work(EACH)?;
        match event {
            Event::Open(tag) => {
                // Strings hold no marks: one that is still open has lost its end.
                if let Some(cut) = open.pop_if(|(last, _)| tags.get(*last).is_none_or(|t| t.leaf.is_some())) {
                    found.balanced = false;
                    pieces.extend(cut_at_end(text, cut, tags)?);
                }
                open.push((tag, at));
            }
            Event::Close(tag) => {
                let found_at = open.iter().rposition(|(opened, _)| *opened == tag);
                work((open.len() - found_at.unwrap_or(0)) / BYTES_PER_UNIT)?;
                let Some(depth) = found_at else {
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
    for cut in open {
        pieces.extend(cut_at_end(text, cut, tags)?);
    }
    found.generation.sort_unstable();
    found.spans = joined(text, pieces)?;
    Ok(found)
}

fn piece(range: Range<usize>, tag: usize, tags: &[Tag]) -> Option<Piece> {
    let tag = tags.get(tag)?;
    Some(Piece { range, message: tag.message, field: tag.field, leaf: tag.leaf.clone() })
}

/// A string whose end the template dropped: it reaches as far as the text equals it.
fn cut_at_end(text: &str, (tag, start): (usize, usize), tags: &[Tag]) -> Result<Option<Piece>, Error> {
    let Some((leaf, part)) = tags.get(tag).and_then(|tag| tag.leaf.clone()) else { return Ok(None) };
    let wanted = &leaf.text[part.clone()];
    let same = text.as_bytes()[start..].iter().zip(wanted.as_bytes()).take_while(|(a, b)| a == b).count();
    work(same / BYTES_PER_UNIT)?;
    let range = start..start + floor(wanted, same);
    let leaf = (leaf, part.start..part.start + range.len());
    Ok(piece(range, tag, tags).map(|piece| Piece { leaf: Some(leaf), ..piece }))
}

/// A string whose start the template dropped.
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

/// The longest prefix of at most `length` bytes that ends between characters.
fn floor(text: &str, mut length: usize) -> usize {
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    length
}

/// Pieces in order, those of one string joined where the text between them is the string's own, none overlapping.
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

/// Takes in a seam at the edge of the string (`<think>` before its first mark), never whitespace alone.
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

/// Extends `last` over `next` where both are of one string and nothing else stands between.
fn join(text: &str, last: &mut Piece, next: &Piece) -> bool {
    let (Some((leaf, part)), Some((other, behind))) = (&mut last.leaf, &next.leaf) else { return false };
    if leaf.number != other.number || last.message != next.message || behind.end < part.end {
        return false;
    }
    let overlap = behind.start < part.end;
    let same = if overlap {
        next.range.end.checked_sub(last.range.start) == Some(behind.end - part.start)
    } else {
        text.get(last.range.end..next.range.start) == Some(&leaf.text[part.end..behind.start])
    };
    if same {
        last.range.end = next.range.end;
        part.end = behind.end;
    }
    same
}

/// Finds strings that no mark could tell, each behind the one before it and outside `taken`.
///
/// # Errors
/// Where there is no time for it.
pub(super) fn search(text: &str, leaves: &[(u32, Field, &str)], taken: &[Span]) -> Result<Vec<Span>, Error> {
    let mut found: Vec<Span> = Vec::new();
    for &(message, field, leaf) in leaves {
        work(EACH + (taken.len() + found.len() + leaf.len()) / BYTES_PER_UNIT)?;
        let wanted = &leaf[trimmed(leaf, 0..leaf.len())];
        if wanted.is_empty() {
            continue;
        }
        let earlier = taken.iter().chain(&found).filter(|span| span.message <= message).map(|span| span.end).max();
        let later = taken.iter().filter(|span| span.message > message && span.message != NO_MESSAGE);
        let start = earlier.unwrap_or(0);
        let end = later.map(|span| span.start).min().unwrap_or(text.len()).max(start);
        work((end - start) / BYTES_PER_UNIT)?;
        if let Some(at) = text[start..end].find(wanted) {
            found.push(Span { start: start + at, end: start + at + wanted.len(), message, field });
        }
    }
    Ok(found)
}

/// Spans in order, cut where they overlap.
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
