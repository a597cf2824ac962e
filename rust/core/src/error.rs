//! The one error of the core: what was found, where, why it matters, what to do.
//!
//! Every room raises it; the binding crate maps it to Python exceptions in one place. No other error type leaves the
//! core.

use std::fmt;
use std::sync::Arc;

/// Result of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Which promise was broken; each maps to one Python exception class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Bytes that cannot be read: missing file, truncated stream, full disk.
    Io,
    /// A record that is not JSON or not a trace.
    Format,
    /// A chat template that does not compile, raises, or runs past its fuel.
    Template,
    /// A tokenizer that cannot be loaded or does not fit the ids.
    Tokenizer,
    /// Recorded tokens that cannot be brought together with the trainer's.
    Alignment,
    /// Arguments of a call that contradict one another.
    Argument,
    /// A fault in this library or in one that it uses; what it was given may be sound.
    Fault,
}

/// Where something was found. Unknown parts stay `None` and are left out of the message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// File as the user named it.
    pub file: Option<Arc<str>>,
    /// 1-based line (record) number.
    pub line: Option<u64>,
    /// Trace id.
    pub trace: Option<String>,
    /// 0-based index of the generation in its trace.
    pub turn: Option<usize>,
    /// 0-based token index within the turn.
    pub token: Option<usize>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gap = "";
        match (&self.file, self.line) {
            (Some(file), Some(line)) => {
                write!(f, "{file}:{line}")?;
                gap = " ";
            }
            (Some(file), None) => {
                write!(f, "{file}")?;
                gap = " ";
            }
            (None, Some(line)) => {
                write!(f, "line {line}")?;
                gap = " ";
            }
            (None, None) => {}
        }
        if let Some(trace) = &self.trace {
            write!(f, "{gap}trace '{trace}'")?;
            gap = " ";
        }
        if let Some(turn) = self.turn {
            write!(f, "{gap}turn {turn}")?;
            gap = " ";
        }
        if let Some(token) = self.token {
            write!(f, "{gap}token {token}")?;
        }
        Ok(())
    }
}

/// What, where, why, cure. `Display` gives one line: `where: what. why. cure.`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// Which promise was broken.
    pub kind: Kind,
    /// What was found, without a full stop.
    pub what: String,
    /// Where it was found.
    pub location: Box<Location>,
    /// Why it matters, without a full stop; may be empty.
    pub why: String,
    /// What to do, without a full stop; may be empty.
    pub cure: String,
}

impl Error {
    /// An error of `kind` that says what was found.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), location: Box::default(), why: String::new(), cure: String::new() }
    }

    /// Adds why it matters.
    #[must_use]
    pub fn why(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// Adds what to do.
    #[must_use]
    pub fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = cure.into();
        self
    }

    /// Fills the parts of the location that are still unknown.
    #[must_use]
    pub fn at(mut self, outer: &Location) -> Self {
        let here = &mut self.location;
        here.file = here.file.take().or_else(|| outer.file.clone());
        here.line = here.line.or(outer.line);
        here.trace = here.trace.take().or_else(|| outer.trace.clone());
        here.turn = here.turn.or(outer.turn);
        here.token = here.token.or(outer.token);
        self
    }

    /// Says which turn, if not yet said.
    #[must_use]
    pub fn in_turn(mut self, turn: usize) -> Self {
        self.location.turn = self.location.turn.or(Some(turn));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.location.to_string();
        if !place.is_empty() {
            write!(f, "{place}: ")?;
        }
        write!(f, "{}.", self.what)?;
        for part in [&self.why, &self.cure] {
            if !part.is_empty() {
                write!(f, " {part}.")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_where_what_why_and_cure() {
        let place = Location {
            file: Some("runs.jsonl".into()),
            line: Some(48),
            trace: Some("a17".into()),
            turn: Some(3),
            token: None,
        };
        let error = Error::new(Kind::Format, "412 ids but 411 logprobs")
            .why("The ratio of the last token is undefined")
            .cure("Record the stop token's logprob")
            .at(&place);
        assert_eq!(
            error.to_string(),
            "runs.jsonl:48 trace 'a17' turn 3: 412 ids but 411 logprobs. \
             The ratio of the last token is undefined. Record the stop token's logprob."
        );
    }
}
