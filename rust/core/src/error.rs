//! The error type of the core: the problem, its place, why it matters, and the fix.
//!
//! All modules use it, and no other error type leaves the core. The binding crate converts it to Python exceptions in
//! one place.

use std::fmt::{self, Write as _};
use std::sync::Arc;

/// Result type of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of an error. Each maps to one Python exception class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Bytes that cannot be read: a missing file, a truncated stream, a full disk.
    Io,
    /// A record that is not JSON or not a trace.
    Format,
    /// A chat template that does not compile, raises, or exceeds its execution budget.
    Template,
    /// A tokenizer that cannot be loaded or does not fit the ids.
    Tokenizer,
    /// Recorded tokens that cannot be matched with the trainer's.
    Alignment,
    /// Invalid or contradicting arguments of a call.
    Argument,
    /// A fault in this library or in a dependency. The input may be valid.
    Fault,
}

/// Place of a problem. Unknown parts are `None` and are omitted from the message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// File as the user named it.
    pub file: Option<Arc<str>>,
    /// 1-based number of the line, or of the row of a table.
    pub line: Option<u64>,
    /// 1-based number of the record, if several may be on one line, as in a JSON array.
    pub record: Option<u64>,
    /// Trace id.
    pub trace: Option<String>,
    /// 0-based index of the generation in its trace.
    pub turn: Option<usize>,
    /// 0-based token index within the turn.
    pub token: Option<usize>,
}

/// Place in a file at which a record starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPlace {
    /// 1-based number of its line, or of its row in a table.
    pub line: u64,
    /// 1-based number of the record, if several may be on one line.
    pub record: Option<u64>,
}

impl RecordPlace {
    /// Returns the location in `file`.
    pub(crate) fn in_file(self, file: &Arc<str>) -> Location {
        Location { file: Some(Arc::clone(file)), line: Some(self.line), record: self.record, ..Location::default() }
    }

    /// Returns the place of the next record.
    #[must_use]
    pub fn next(self) -> Self {
        self.record.map_or(Self::from(self.line + 1), |record| Self { record: Some(record + 1), ..self })
    }
}

impl From<u64> for RecordPlace {
    fn from(line: u64) -> Self {
        Self { line, record: None }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gap = "";
        let mut part = |part: fmt::Arguments<'_>| write!(f, "{}{part}", std::mem::replace(&mut gap, " "));
        match (&self.file, self.line) {
            (Some(file), Some(line)) => part(format_args!("{file}:{line}"))?,
            (Some(file), None) => part(format_args!("{file}"))?,
            (None, Some(line)) => part(format_args!("line {line}"))?,
            (None, None) => {}
        }
        if let Some(record) = self.record {
            part(format_args!("record {record}"))?;
        }
        if let Some(trace) = &self.trace {
            part(format_args!("trace '{trace}'"))?;
        }
        if let Some(turn) = self.turn {
            part(format_args!("turn {turn}"))?;
        }
        if let Some(token) = self.token {
            part(format_args!("token {token}"))?;
        }
        Ok(())
    }
}

/// An error of the core. `Display` writes one line: `code: where: what. why. fix.`
///
/// The fields contain the text unchanged. The line is for terminals and logs, so it shows control characters and
/// similar ones as escapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// Kind of the error.
    pub kind: Kind,
    /// Stable code of the cause, such as `TG-READ-001`. It identifies the problem if the wording changes.
    pub code: &'static str,
    /// The problem, without a full stop.
    pub what: String,
    /// Place of the problem.
    pub location: Box<Location>,
    /// Why it matters, without a full stop; may be empty.
    pub why: String,
    /// What to do, without a full stop; may be empty.
    pub fix: String,
}

impl Error {
    /// Creates an error of `kind` with the code of its cause and the problem `what`.
    pub fn new(kind: Kind, code: &'static str, what: impl Into<String>) -> Self {
        Self { kind, code, what: what.into(), location: Box::default(), why: String::new(), fix: String::new() }
    }

    /// Adds why it matters.
    #[must_use]
    pub fn why(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// Adds what to do.
    #[must_use]
    pub fn fix(mut self, cure: impl Into<String>) -> Self {
        self.fix = cure.into();
        self
    }

    /// Fills the missing parts of the location.
    #[must_use]
    pub fn at(mut self, outer: &Location) -> Self {
        let here = &mut self.location;
        here.file = here.file.take().or_else(|| outer.file.clone());
        if here.line.is_none() {
            (here.line, here.record) = (outer.line, outer.record);
        }
        here.trace = here.trace.take().or_else(|| outer.trace.clone());
        here.turn = here.turn.or(outer.turn);
        here.token = here.token.or(outer.token);
        self
    }

    /// Sets the turn, unless it is set already.
    #[must_use]
    pub fn in_turn(mut self, turn: usize) -> Self {
        self.location.turn = self.location.turn.or(Some(turn));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = Escaped(f);
        write!(shown, "{}: ", self.code)?;
        let place = self.location.to_string();
        if !place.is_empty() {
            write!(shown, "{place}: ")?;
        }
        write!(shown, "{}.", self.what)?;
        for part in [&self.why, &self.fix] {
            if !part.is_empty() {
                write!(shown, " {part}.")?;
            }
        }
        Ok(())
    }
}

/// Formatter that makes third-party text safe for a terminal: one line, with control, direction and invisible
/// characters as escapes. `tracegrad.errors.shown` does the same for messages from Python.
struct Escaped<'a, 'f>(&'a mut fmt::Formatter<'f>);

impl fmt::Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((at, found)) = rest.char_indices().find(|&(_, found)| is_unsafe_for_terminal(found)) {
            self.0.write_str(&rest[..at])?;
            match found {
                '\n' => self.0.write_str("\\n")?,
                '\r' => self.0.write_str("\\r")?,
                '\t' => self.0.write_str("\\t")?,
                ..='\u{ff}' => write!(self.0, "\\x{:02x}", found as u32)?,
                ..='\u{ffff}' => write!(self.0, "\\u{:04x}", found as u32)?,
                _ => write!(self.0, "\\U{:08x}", found as u32)?,
            }
            rest = &rest[at + found.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

/// Returns whether a character is a control character, breaks a line, sets the text direction, or has no width.
fn is_unsafe_for_terminal(character: char) -> bool {
    matches!(
        character,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_that_steers_a_terminal_is_shown_wherever_it_stands(
            parts in prop::collection::vec(
                prop::collection::vec(prop_oneof![any::<char>(), prop::char::range('\u{0}', '\u{a0}'),
                    prop::char::range('\u{2000}', '\u{2070}'), Just('\u{feff}'), Just('\u{61c}')], 0..12)
                    .prop_map(|characters| characters.into_iter().collect::<String>()),
                5..6,
            ),
        ) {
            let (file, trace) = (Some(parts[0].as_str().into()), Some(parts[1].clone()));
            let place = Location { file, line: Some(1), trace, ..Location::default() };
            let error = Error::new(Kind::Format, "TG-TEST-000", &*parts[2]).why(&*parts[3]).fix(&*parts[4]).at(&place);
            let text = error.to_string();
            let unsafe_ones = |c: &char| {
                c.is_control() || matches!(*c as u32, 0x61c | 0x200b..=0x200f | 0x2028..=0x202e | 0x2066..=0x2069 | 0xfeff)
            };
            prop_assert_eq!(text.chars().find(unsafe_ones), None);
            // Other characters are unchanged.
            let plain: String = text.chars().filter(|c| !is_unsafe_for_terminal(*c)).collect();
            prop_assert_eq!(plain, text);
        }
    }

    #[test]
    fn controls_are_shown_as_escapes() {
        let error = Error::new(Kind::Format, "TG-TEST-000", "a\x1b[2J\nb\u{202e}\u{e0041}é");
        assert_eq!(error.to_string(), "TG-TEST-000: a\\x1b[2J\\nb\\u202e\\U000e0041é.");
    }

    #[test]
    fn an_error_says_where_what_why_and_cure() {
        let (file, trace) = (Some("runs.jsonl".into()), Some("a17".into()));
        let place = Location { file, line: Some(48), trace, turn: Some(3), ..Location::default() };
        let error = Error::new(Kind::Format, "TG-TEST-000", "412 ids but 411 logprobs")
            .why("The ratio of the last token is undefined")
            .fix("Record the stop token's logprob")
            .at(&place);
        assert_eq!(
            error.to_string(),
            "TG-TEST-000: runs.jsonl:48 trace 'a17' turn 3: 412 ids but 411 logprobs. \
             The ratio of the last token is undefined. Record the stop token's logprob."
        );
    }
}
