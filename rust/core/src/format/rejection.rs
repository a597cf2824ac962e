//! The rejection of a record: a located error, and the short reason under which it is counted.

use crate::error::{Error, Kind, Location};

/// Reason for the rejection of a record. Reports count records by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The bytes are not JSON.
    NotJson,
    /// The bytes are not UTF-8.
    NotUtf8,
    /// A string contains half of a surrogate pair.
    LoneSurrogate,
    /// Nested deeper than 128 levels.
    TooDeep,
    /// Longer than the limit.
    TooLong,
    /// JSON, but in none of the accepted forms.
    UnknownForm,
    /// A value of the wrong type.
    WrongType,
    /// A token id that is negative, fractional or larger than 2^31 - 1.
    IdOutOfRange,
    /// Parts that contradict one another.
    Contradiction,
    /// A part that the form requires is missing.
    Incomplete,
    /// The model call failed, so the record contains no response.
    FailedCall,
    /// The stream broke in the middle of the record.
    Stream,
    /// A panic or bug in the reader, not in the record.
    Fault,
}

impl Reason {
    /// Returns whether an adapter of the caller may recognise the record, so that it is not necessarily bad.
    pub(crate) fn is_maybe_convertible(self) -> bool {
        use Reason::{Contradiction, FailedCall, Incomplete, UnknownForm, WrongType};
        matches!(self, UnknownForm | WrongType | Contradiction | Incomplete | FailedCall)
    }

    /// Returns the name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotJson => "not_json",
            Self::NotUtf8 => "not_utf8",
            Self::LoneSurrogate => "lone_surrogate",
            Self::TooDeep => "too_deep",
            Self::TooLong => "too_long",
            Self::UnknownForm => "unknown_form",
            Self::WrongType => "wrong_type",
            Self::IdOutOfRange => "id_out_of_range",
            Self::Contradiction => "contradiction",
            Self::Incomplete => "incomplete",
            Self::FailedCall => "failed_call",
            Self::Stream => "stream",
            Self::Fault => "fault",
        }
    }
}

/// A rejected record.
#[derive(Debug, Clone)]
#[must_use]
pub struct Rejection {
    /// The reason under which it is counted.
    pub reason: Reason,
    /// The error: the problem, its place, why it matters, and the fix.
    pub error: Error,
}

/// Result of decoding one record.
pub type Decoded<T> = Result<T, Rejection>;

/// Returns the first value, or the result of `second` if there is none.
pub(crate) fn either<T>(first: Option<T>, second: impl FnOnce() -> Decoded<Option<T>>) -> Decoded<Option<T>> {
    first.map_or_else(second, |first| Ok(Some(first)))
}

/// Creates a rejection with the problem.
pub(crate) fn reject(reason: Reason, code: &'static str, what: impl Into<String>) -> Rejection {
    let kind = if reason == Reason::Stream { Kind::Io } else { Kind::Format };
    Rejection { reason, error: Error::new(kind, code, what) }
}

/// Creates a rejection for a record whose structure is not that of a trace.
pub(crate) fn not_a_trace(code: &'static str, what: impl Into<String>) -> Rejection {
    reject(Reason::WrongType, code, what)
        .why("The record is not a trace in any accepted form")
        .fix("See docs/reference/trace-format.md for the accepted forms")
}

impl Rejection {
    /// Adds why it matters.
    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { error: self.error.why(why), ..self }
    }

    /// Adds what to do.
    pub(crate) fn fix(self, cure: impl Into<String>) -> Self {
        Self { error: self.error.fix(cure), ..self }
    }

    /// Adds the part of the record in which the problem is.
    pub(crate) fn inside(mut self, part: impl AsRef<str>) -> Self {
        let gap = if self.error.what.starts_with('`') { ": " } else { ", " };
        self.error.what = format!("{}{gap}{}", part.as_ref(), self.error.what);
        self
    }

    /// Adds the generation of the trace in which the problem is.
    pub(crate) fn in_turn(self, turn: usize) -> Self {
        Self { error: self.error.in_turn(turn), ..self }
    }

    /// Fills the missing parts of the location.
    pub(crate) fn at(self, place: &Location) -> Self {
        Self { error: self.error.at(place), ..self }
    }
}
