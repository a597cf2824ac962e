//! A record that cannot be read: the located error and the short reason it is counted under.

use crate::error::{Error, Kind, Location};

/// Why a record was rejected; the names are what reports count by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The bytes are not JSON.
    NotJson,
    /// The bytes are not UTF-8.
    NotUtf8,
    /// A string holds half of a surrogate pair.
    LoneSurrogate,
    /// Nested deeper than 128 levels.
    TooDeep,
    /// Longer than the limit.
    TooLong,
    /// JSON, but in none of the accepted forms.
    UnknownForm,
    /// A value of the wrong type.
    WrongType,
    /// A token id that is negative, fractional or beyond 2^31 - 1.
    IdOutOfRange,
    /// Parts that contradict one another.
    Contradiction,
    /// Something that the form needs is missing.
    Incomplete,
    /// The call of a model failed, so that there is no answer in the record.
    FailedCall,
    /// The stream broke in the middle of the record.
    Stream,
    /// A fault of the reader, not of the record.
    Fault,
}

impl Reason {
    /// Whether a caller may know the record's form, so that it is not bad.
    pub(crate) fn may_be_known(self) -> bool {
        use Reason::{Contradiction, FailedCall, Incomplete, UnknownForm, WrongType};
        matches!(self, UnknownForm | WrongType | Contradiction | Incomplete | FailedCall)
    }

    /// The name that reports use.
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
    /// What it is counted under.
    pub reason: Reason,
    /// What, where, why, cure.
    pub error: Error,
}

/// Result of decoding one record.
pub type Decoded<T> = Result<T, Rejection>;

/// What was found first, or what `second` finds where that is nothing.
pub(crate) fn either<T>(first: Option<T>, second: impl FnOnce() -> Decoded<Option<T>>) -> Decoded<Option<T>> {
    first.map_or_else(second, |first| Ok(Some(first)))
}

/// A rejection that says what was found.
pub(crate) fn reject(reason: Reason, what: impl Into<String>) -> Rejection {
    let kind = if reason == Reason::Stream { Kind::Io } else { Kind::Format };
    Rejection { reason, error: Error::new(kind, what) }
}

/// A rejection of a record whose structure is not that of a trace.
pub(crate) fn not_a_trace(what: impl Into<String>) -> Rejection {
    reject(Reason::WrongType, what)
        .why("The record is not a trace in any accepted form")
        .cure("See docs/trace-format.md for the accepted forms")
}

impl Rejection {
    /// Adds why it matters.
    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { error: self.error.why(why), ..self }
    }

    /// Adds what to do.
    pub(crate) fn cure(self, cure: impl Into<String>) -> Self {
        Self { error: self.error.cure(cure), ..self }
    }

    /// Says in which part of the record it was found.
    pub(crate) fn inside(mut self, part: impl AsRef<str>) -> Self {
        let gap = if self.error.what.starts_with('`') { ": " } else { ", " };
        self.error.what = format!("{}{gap}{}", part.as_ref(), self.error.what);
        self
    }

    /// Says in which generation of the trace it was found.
    pub(crate) fn in_turn(self, turn: usize) -> Self {
        Self { error: self.error.in_turn(turn), ..self }
    }

    /// Fills the parts of the location that are still unknown.
    pub(crate) fn at(self, place: &Location) -> Self {
        Self { error: self.error.at(place), ..self }
    }
}
