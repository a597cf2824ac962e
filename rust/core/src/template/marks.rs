//! Invisible marks around the strings of a conversation, and their positions after a render.
//!
//! Marks are Unicode noncharacters that do not occur in the input. They encode the number of a [`Tag`]. This module
//! inserts and reads them; `provenance` decides whether a marked render can be trusted.

use super::rendered::Field;
use super::watch::{FINDER, THIRD};
use crate::cancel;
use aho_corasick::packed::Searcher;
use aho_corasick::{AhoCorasick, Input};
use std::ops::Range;
use std::sync::Arc;

const FIRST: u32 = 0xFDD0;
const POOL: usize = 32;
const DIGITS: usize = 8;
/// Bytes of most marks: an edge and four digits.
const MARK_BYTES: usize = 15;

/// Twelve noncharacters that do not occur in the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Alphabet {
    open: char,
    close: char,
    generation_open: char,
    generation_close: char,
    digits: [char; DIGITS],
}

impl Alphabet {
    /// Returns the first twelve that are not `used`, or `None` if the input uses too many.
    pub fn avoiding(used: UsedCharacters) -> Option<Self> {
        let mut free = (0..POOL).filter(|&n| used.0 & (1 << n) == 0).filter_map(|n| char::from_u32(FIRST + n as u32));
        let mut next = || free.next();
        let alphabet = Self {
            open: next()?,
            close: next()?,
            generation_open: next()?,
            generation_close: next()?,
            digits: [next()?, next()?, next()?, next()?, next()?, next()?, next()?, next()?],
        };
        Some(alphabet)
    }

    /// Returns the two characters around a generation block.
    pub fn generation(&self) -> String {
        [self.generation_open, self.generation_close].iter().collect()
    }

    /// Returns one bit for each of the twelve characters, as in [`watch`](super::watch).
    pub fn bits(&self) -> u32 {
        let edges = [self.open, self.close, self.generation_open, self.generation_close];
        edges.iter().chain(&self.digits).fold(0, |bits, &c| bits | 1 << (c as u32 - FIRST))
    }

    /// Writes the octal digits of `tag`.
    fn number(&self, out: &mut String, tag: usize) {
        if tag >= DIGITS {
            self.number(out, tag / DIGITS);
        }
        out.push(self.digits[tag % DIGITS]);
    }

    /// Returns the opening and the closing mark of `tag`.
    pub fn pair(&self, tag: usize) -> (String, String) {
        let mark = |edge: char| {
            let mut mark = String::with_capacity(MARK_BYTES);
            mark.push(edge);
            self.number(&mut mark, tag);
            mark
        };
        (mark(self.open), mark(self.close))
    }
}

/// The noncharacters that occur in the input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct UsedCharacters(u32);

impl UsedCharacters {
    /// Adds the noncharacters of `text`.
    pub fn note(&mut self, text: &str) {
        cancel::check_before_bytes(text.len());
        for at in FINDER.find_iter(text.as_bytes()) {
            if let Some(last @ THIRD..=0xAF) = text.as_bytes().get(at + 2) {
                self.0 |= 1 << (last - THIRD);
            }
        }
    }

    /// Returns the union with the noncharacters of `text`.
    #[must_use]
    pub fn and(mut self, text: &str) -> Self {
        self.note(text);
        self
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A string of the conversation, part of which one mark encloses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Number of the string in its conversation.
    pub number: usize,
    /// The complete string.
    pub text: Arc<str>,
}

/// The origin that a mark stands for.
#[derive(Debug, Clone)]
pub(super) struct Tag {
    pub message: u32,
    pub field: Field,
    /// The string and the enclosed range of it; `None` for a container and for a string that is not tracked.
    pub leaf: Option<(Leaf, Range<usize>)>,
}

/// Facts about the strings marked so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MarkStats {
    /// Number of strings.
    pub leaves: usize,
    /// True if any segment starts or ends with whitespace.
    pub edges: bool,
    /// True if a marked string is the value of a key of [`UNMARKED`](super::rewrite::UNMARKED).
    pub doubt: bool,
}

/// Inserts marks into strings and maintains the table of tags.
#[derive(Debug)]
pub(super) struct Marker<'t> {
    pub alphabet: Alphabet,
    pub tags: Vec<Tag>,
    pub noted: MarkStats,
    /// Strings that the template may test for or split at. Marks are never inside them.
    seams: Option<&'t Seams>,
    /// True if marks of this message are inside the whitespace at the edges of a string.
    pub inside: bool,
    /// Number of bytes and seams that were processed.
    pub passed: usize,
}

impl<'t> Marker<'t> {
    /// Creates a marker that continues after `tags`.
    pub fn new(alphabet: Alphabet, seams: Option<&'t Seams>, tags: Vec<Tag>) -> Self {
        Self { alphabet, tags, noted: MarkStats::default(), seams, inside: true, passed: 0 }
    }

    /// Returns the marks of a container that belongs to `message`.
    pub fn container(&mut self, message: u32, field: Field) -> (String, String) {
        // The tags of a message are contiguous.
        let of_message = self.tags.iter().enumerate().rev().take_while(|(_, tag)| tag.message == message);
        let existing = of_message.filter(|(_, tag)| tag.field == field && tag.leaf.is_none()).map(|(at, _)| at).next();
        let tag = existing.unwrap_or_else(|| {
            self.tags.push(Tag { message, field, leaf: None });
            self.tags.len() - 1
        });
        self.alphabet.pair(tag)
    }

    /// Encloses a complete string once, without tracking how the template uses its parts.
    pub fn whole(&mut self, text: &str, message: u32, field: Field) -> String {
        if text.is_empty() {
            return String::new();
        }
        let (open, close) = self.container(message, field);
        format!("{open}{text}{close}")
    }

    /// Returns the string with every segment between seams enclosed.
    pub fn leaf(&mut self, text: &str, message: u32, field: Field) -> String {
        cancel::check_before_bytes(text.len());
        let leaf = Leaf { number: self.noted.leaves, text: text.into() };
        self.noted.leaves += 1;
        let mut out = String::with_capacity(text.len() + 32);
        let mut from = 0;
        let (seams, seam_count) = self.seams.map_or_else(Default::default, |seams| seams.united(text));
        self.passed += text.len() + seam_count;
        for seam in seams {
            self.segment(&mut out, &leaf, from..seam.start, message, field);
            out.push_str(&text[seam.clone()]);
            from = seam.end;
        }
        self.segment(&mut out, &leaf, from..text.len(), message, field);
        out
    }

    fn segment(&mut self, out: &mut String, leaf: &Leaf, segment: Range<usize>, message: u32, field: Field) {
        let core = trimmed(&leaf.text, segment.clone());
        self.noted.edges |= core != segment;
        let core = if self.inside { core } else { segment.clone() };
        out.push_str(&leaf.text[segment.start..core.start]);
        if !core.is_empty() {
            out.push(self.alphabet.open);
            self.alphabet.number(out, self.tags.len());
            out.push_str(&leaf.text[core.clone()]);
            out.push(self.alphabet.close);
            self.alphabet.number(out, self.tags.len());
            self.tags.push(Tag { message, field, leaf: Some((leaf.clone(), core.clone())) });
        }
        out.push_str(&leaf.text[core.end..segment.end]);
    }
}

/// Finds the strings that a template may test for or split at.
#[derive(Debug)]
pub(super) struct Seams {
    /// Finds the first seam fast; most texts have none. This searcher does not exist for very many strings.
    first: Option<Searcher>,
    all: AhoCorasick,
}

impl Seams {
    /// Returns `None` if there are no words, or too many.
    pub fn new(words: &[&String]) -> Option<Self> {
        (!words.is_empty()).then_some(Self { first: Searcher::new(words), all: AhoCorasick::new(words).ok()? })
    }

    /// Returns the ranges of seams in `text`, and the number of seams found. Overlapping ones (`</think>` and `>\n`)
    /// are merged.
    fn united(&self, text: &str) -> (Vec<Range<usize>>, usize) {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut count = 0;
        let first = self.first.as_ref().map_or(Some(0), |first| first.find(text).map(|seam| seam.start()));
        let Some(first) = first else { return (ranges, count) };
        for seam in self.all.find_overlapping_iter(Input::new(text).range(first..)) {
            count += 1;
            let mut range = seam.range();
            while let Some(last) = ranges.pop_if(|last| last.end > range.start) {
                range.start = range.start.min(last.start);
            }
            ranges.push(range);
        }
        (ranges, count)
    }
}

/// Returns `range` without the whitespace at its edges.
pub(super) fn trimmed(text: &str, range: Range<usize>) -> Range<usize> {
    let part = &text[range.clone()];
    let start = range.start + (part.len() - part.trim_start_matches(is_space).len());
    let length = text[start..range.end].trim_end_matches(is_space).len();
    start..start + length
}

/// Implements Python's `str.isspace`: Unicode white space and the four separators U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A mark in rendered text, with the number of its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Open(usize),
    Close(usize),
    GenerationOpen,
    GenerationClose,
}

/// A text without marks, and its marks. Both are reused for the next render.
#[derive(Debug, Default)]
pub(super) struct Stripped {
    pub text: String,
    /// Each mark, and its byte position in the text without marks.
    pub events: Vec<(usize, Event)>,
    /// For each mark, its end in the text with marks.
    ends: Vec<usize>,
}

impl Stripped {
    /// Updates this to `marked` without its marks. The first `kept` bytes of `marked` are unchanged from the previous
    /// text. Returns false if there are more than `max_events` marks.
    pub fn update(&mut self, marked: &str, kept: usize, alphabet: &Alphabet, max_events: usize) -> bool {
        let events = self.ends.partition_point(|&end| end <= kept);
        self.ends.truncate(events);
        self.events.truncate(events);
        // After the last mark, both texts are equal.
        let last = self.ends.last().zip(self.events.last());
        self.text.truncate(last.map_or(kept, |(end, (at, _))| at + (kept - end)));
        let tail = &marked[kept..];
        cancel::check_before_bytes(tail.len());
        self.text.reserve(tail.len());
        let mut from = 0;
        while let Some(offset) = FINDER.find(&tail.as_bytes()[from..]) {
            let at = from + offset;
            let Some(c) = tail.get(at..).and_then(|text| text.chars().next()) else { break };
            let next = at + c.len_utf8();
            let event = if c == alphabet.open || c == alphabet.close {
                let (tag, length) = read_number(&tail[next..], alphabet);
                let event = if c == alphabet.open { Event::Open(tag) } else { Event::Close(tag) };
                Some((event, next + length))
            } else if c == alphabet.generation_open {
                Some((Event::GenerationOpen, next))
            } else if c == alphabet.generation_close {
                Some((Event::GenerationClose, next))
            } else {
                None
            };
            self.text.push_str(&tail[from..at]);
            if let Some((event, end)) = event {
                if self.events.len() == max_events {
                    return false;
                }
                self.events.push((self.text.len(), event));
                self.ends.push(kept + end);
                from = end;
            } else {
                self.text.push(c);
                from = next;
            }
        }
        self.text.push_str(&tail[from..]);
        true
    }
}

/// Returns the number at the start of `text` and its length in bytes.
fn read_number(text: &str, alphabet: &Alphabet) -> (usize, usize) {
    let mut number = 0_usize;
    let mut length = 0;
    for c in text.chars() {
        let Some(digit) = alphabet.digits.iter().position(|&d| d == c) else { break };
        number = number.saturating_mul(DIGITS).saturating_add(digit);
        length += c.len_utf8();
    }
    (number, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_out_as_they_went_in_whatever_noncharacters_the_text_holds() {
        let mut used = UsedCharacters::default();
        let text = " a\u{fdd0}b\u{fdd3} <x> c ";
        used.note(text);
        let alphabet = Alphabet::avoiding(used).unwrap();
        let seams = Seams::new(&[&"<x>".to_owned()]).unwrap();
        let mut marker = Marker::new(alphabet.clone(), Some(&seams), Vec::new());
        let marked = marker.leaf(text, 0, Field::Content);
        let expected = [(1, Event::Open(0)), (9, Event::Close(0)), (14, Event::Open(1)), (15, Event::Close(1))];
        for kept in (0..marked.len()).filter(|&at| marked.is_char_boundary(at)) {
            let mut stripped = Stripped::default();
            let prefix = format!("{}<x>", &marked[..kept]);
            assert!(stripped.update(&prefix, 0, &alphabet, 9));
            let at_mark_boundary = stripped.ends.last().is_none_or(|end| kept >= *end)
                && !marked[kept..].starts_with(&alphabet.digits[..]);
            assert!(stripped.update(&marked, if at_mark_boundary { kept } else { 0 }, &alphabet, 4));
            assert_eq!((&*stripped.text, &*stripped.events), (text, &expected[..]), "{kept}");
            assert!(!Stripped::default().update(&marked, 0, &alphabet, 3));
        }
    }

    #[test]
    fn an_input_with_every_noncharacter_leaves_no_alphabet() {
        let mut used = UsedCharacters::default();
        let text: String = (0..32).filter_map(|n| char::from_u32(FIRST + n)).collect();
        used.note(&text);
        assert_eq!(Alphabet::avoiding(used), None);
    }
}
