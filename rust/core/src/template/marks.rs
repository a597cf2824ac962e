//! Invisible marks around the strings of a conversation, and what they say after a render.
//!
//! Marks are Unicode noncharacters that occur nowhere in the input; they carry the number of a [`Tag`]. Here they are
//! put in and read out; `provenance` decides whether a marked render may be believed.

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

/// Twelve noncharacters that the input does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Alphabet {
    open: char,
    close: char,
    generation_open: char,
    generation_close: char,
    digits: [char; DIGITS],
}

impl Alphabet {
    /// The first twelve that are not `used`, or none where the input has eaten too many.
    pub fn avoiding(used: Used) -> Option<Self> {
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

    /// The two characters around a generation block.
    pub fn generation(&self) -> String {
        [self.generation_open, self.generation_close].iter().collect()
    }

    /// A bit for each of the twelve, as [`watch`](super::watch) has them.
    pub fn bits(&self) -> u32 {
        let edges = [self.open, self.close, self.generation_open, self.generation_close];
        edges.iter().chain(&self.digits).fold(0, |bits, &c| bits | 1 << (c as u32 - FIRST))
    }

    /// The octal digits of `tag`.
    fn number(&self, out: &mut String, tag: usize) {
        if tag >= DIGITS {
            self.number(out, tag / DIGITS);
        }
        out.push(self.digits[tag % DIGITS]);
    }

    /// The opening and the closing mark of `tag`.
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

/// Which noncharacters the input holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Used(u32);

impl Used {
    /// Adds those of `text`.
    pub fn note(&mut self, text: &str) {
        cancel::before(text.len());
        for at in FINDER.find_iter(text.as_bytes()) {
            if let Some(last @ THIRD..=0xAF) = text.as_bytes().get(at + 2) {
                self.0 |= 1 << (last - THIRD);
            }
        }
    }

    /// These and those of `text`.
    #[must_use]
    pub fn and(mut self, text: &str) -> Self {
        self.note(text);
        self
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those of either.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A string of the conversation, or the part of it that one mark encloses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Number of the string in its conversation.
    pub number: usize,
    /// The whole string.
    pub text: Arc<str>,
}

/// What a mark stands for.
#[derive(Debug, Clone)]
pub(super) struct Tag {
    pub message: u32,
    pub field: Field,
    /// The string and the enclosed range of it; `None` for a container and for what is not followed up.
    pub leaf: Option<(Leaf, Range<usize>)>,
}

/// What is known of the strings so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Noted {
    /// How many there were.
    pub leaves: usize,
    /// Whether any segment begins or ends with whitespace.
    pub edges: bool,
    /// Whether a marked string stands under a key of [`UNMARKED`](super::rewrite::UNMARKED).
    pub doubt: bool,
}

/// Puts marks into strings and keeps the table of tags.
#[derive(Debug)]
pub(super) struct Marker<'t> {
    pub alphabet: Alphabet,
    pub tags: Vec<Tag>,
    pub noted: Noted,
    /// Strings the template may test for or split at: marks stay out of them.
    seams: Option<&'t Seams>,
    /// Whether marks of this message stand inside the whitespace at the edges of a string.
    pub inside: bool,
    /// Bytes and seams that were gone over.
    pub passed: usize,
}

impl<'t> Marker<'t> {
    /// A marker that continues after `tags`.
    pub fn new(alphabet: Alphabet, seams: Option<&'t Seams>, tags: Vec<Tag>) -> Self {
        Self { alphabet, tags, noted: Noted::default(), seams, inside: true, passed: 0 }
    }

    /// The marks of a container that belongs to `message`.
    pub fn container(&mut self, message: u32, field: Field) -> (String, String) {
        // Those of a message stand together.
        let own = self.tags.iter().enumerate().rev().take_while(|(_, tag)| tag.message == message);
        let known = own.filter(|(_, tag)| tag.field == field && tag.leaf.is_none()).map(|(at, _)| at).next();
        let tag = known.unwrap_or_else(|| {
            self.tags.push(Tag { message, field, leaf: None });
            self.tags.len() - 1
        });
        self.alphabet.pair(tag)
    }

    /// A whole string enclosed once, without following up what the template does with its parts.
    pub fn whole(&mut self, text: &str, message: u32, field: Field) -> String {
        if text.is_empty() {
            return String::new();
        }
        let (open, close) = self.container(message, field);
        format!("{open}{text}{close}")
    }

    /// The string with every segment between seams enclosed.
    pub fn leaf(&mut self, text: &str, message: u32, field: Field) -> String {
        cancel::before(text.len());
        let leaf = Leaf { number: self.noted.leaves, text: text.into() };
        self.noted.leaves += 1;
        let mut out = String::with_capacity(text.len() + 32);
        let mut from = 0;
        let (seams, met) = self.seams.map_or_else(Default::default, |seams| seams.united(text));
        self.passed += text.len() + met;
        for seam in seams {
            self.segment(&mut out, &leaf, from..seam.start, message, field);
            out.push_str(&text[seam.clone()]);
            from = seam.end;
        }
        self.segment(&mut out, &leaf, from..text.len(), message, field);
        out
    }

    fn segment(&mut self, out: &mut String, leaf: &Leaf, whole: Range<usize>, message: u32, field: Field) {
        let core = trimmed(&leaf.text, whole.clone());
        self.noted.edges |= core != whole;
        let core = if self.inside { core } else { whole.clone() };
        out.push_str(&leaf.text[whole.start..core.start]);
        if !core.is_empty() {
            out.push(self.alphabet.open);
            self.alphabet.number(out, self.tags.len());
            out.push_str(&leaf.text[core.clone()]);
            out.push(self.alphabet.close);
            self.alphabet.number(out, self.tags.len());
            self.tags.push(Tag { message, field, leaf: Some((leaf.clone(), core.clone())) });
        }
        out.push_str(&leaf.text[core.end..whole.end]);
    }
}

/// Finds the strings that a template may test for or split at.
#[derive(Debug)]
pub(super) struct Seams {
    /// Finds the first one, fast: most texts have none. There is no such searcher for very many.
    first: Option<Searcher>,
    all: AhoCorasick,
}

impl Seams {
    /// `None` where there are none, or too many.
    pub fn new(words: &[&String]) -> Option<Self> {
        (!words.is_empty()).then_some(Self { first: Searcher::new(words), all: AhoCorasick::new(words).ok()? })
    }

    /// Where `text` holds a seam, and how many were met; overlapping ones (`</think>` and `>\n`) are one.
    fn united(&self, text: &str) -> (Vec<Range<usize>>, usize) {
        let mut found: Vec<Range<usize>> = Vec::new();
        let mut met = 0;
        let first = self.first.as_ref().map_or(Some(0), |first| first.find(text).map(|seam| seam.start()));
        let Some(first) = first else { return (found, met) };
        for seam in self.all.find_overlapping_iter(Input::new(text).range(first..)) {
            met += 1;
            let mut range = seam.range();
            while let Some(last) = found.pop_if(|last| last.end > range.start) {
                range.start = range.start.min(last.start);
            }
            found.push(range);
        }
        (found, met)
    }
}

/// `range` without the whitespace at its edges.
pub(super) fn trimmed(text: &str, range: Range<usize>) -> Range<usize> {
    let part = &text[range.clone()];
    let start = range.start + (part.len() - part.trim_start_matches(is_space).len());
    let length = text[start..range.end].trim_end_matches(is_space).len();
    start..start + length
}

/// Python's `str.isspace`: Unicode white space and the four separators U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A mark met in rendered text, at its byte position in the text without marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Open(usize),
    Close(usize),
    GenerationOpen,
    GenerationClose,
}

/// A text whose marks were taken out, and these: what is kept from one render to the next.
#[derive(Debug, Default)]
pub(super) struct Stripped {
    pub text: String,
    /// Each mark, and where it stood in the text without marks.
    pub events: Vec<(usize, Event)>,
    /// For each mark where it ends in the text with marks.
    ends: Vec<usize>,
}

impl Stripped {
    /// Becomes `marked` without its marks, of which the first `kept` bytes are those of the text before; false where there
    /// are more marks than `most`.
    pub fn go_on(&mut self, marked: &str, kept: usize, alphabet: &Alphabet, most: usize) -> bool {
        let events = self.ends.partition_point(|&end| end <= kept);
        self.ends.truncate(events);
        self.events.truncate(events);
        // Behind the last mark both texts are the same.
        let last = self.ends.last().zip(self.events.last());
        self.text.truncate(last.map_or(kept, |(end, (at, _))| at + (kept - end)));
        let behind = &marked[kept..];
        cancel::before(behind.len());
        self.text.reserve(behind.len());
        let mut from = 0;
        while let Some(found) = FINDER.find(&behind.as_bytes()[from..]) {
            let at = from + found;
            let Some(c) = behind.get(at..).and_then(|rest| rest.chars().next()) else { break };
            let next = at + c.len_utf8();
            let event = if c == alphabet.open || c == alphabet.close {
                let (tag, length) = read_number(&behind[next..], alphabet);
                let event = if c == alphabet.open { Event::Open(tag) } else { Event::Close(tag) };
                Some((event, next + length))
            } else if c == alphabet.generation_open {
                Some((Event::GenerationOpen, next))
            } else if c == alphabet.generation_close {
                Some((Event::GenerationClose, next))
            } else {
                None
            };
            self.text.push_str(&behind[from..at]);
            if let Some((event, end)) = event {
                if self.events.len() == most {
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
        self.text.push_str(&behind[from..]);
        true
    }
}

/// The number at the start of `text` and its length in bytes.
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
        let mut used = Used::default();
        let text = " a\u{fdd0}b\u{fdd3} <x> c ";
        used.note(text);
        let alphabet = Alphabet::avoiding(used).unwrap();
        let seams = Seams::new(&[&"<x>".to_owned()]).unwrap();
        let mut marker = Marker::new(alphabet.clone(), Some(&seams), Vec::new());
        let marked = marker.leaf(text, 0, Field::Content);
        let expected = [(1, Event::Open(0)), (9, Event::Close(0)), (14, Event::Open(1)), (15, Event::Close(1))];
        for kept in (0..marked.len()).filter(|&at| marked.is_char_boundary(at)) {
            let mut stripped = Stripped::default();
            let cut = format!("{}<x>", &marked[..kept]);
            assert!(stripped.go_on(&cut, 0, &alphabet, 9));
            let whole = stripped.ends.last().is_none_or(|end| kept >= *end)
                && !marked[kept..].starts_with(&alphabet.digits[..]);
            assert!(stripped.go_on(&marked, if whole { kept } else { 0 }, &alphabet, 4));
            assert_eq!((&*stripped.text, &*stripped.events), (text, &expected[..]), "{kept}");
            assert!(!Stripped::default().go_on(&marked, 0, &alphabet, 3));
        }
    }

    #[test]
    fn an_input_with_every_noncharacter_leaves_no_alphabet() {
        let mut used = Used::default();
        let all: String = (0..32).filter_map(|n| char::from_u32(FIRST + n)).collect();
        used.note(&all);
        assert_eq!(Alphabet::avoiding(used), None);
    }
}
