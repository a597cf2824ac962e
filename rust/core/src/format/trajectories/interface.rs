//! The interface between the files of the recorders and the reader, and the names that these files use.

pub(in crate::format) use crate::format::build::{Body, note};
pub(in crate::format) use crate::format::fields::{Header, Sampling};
pub(in crate::format) use crate::format::form::Form;
pub(in crate::format) use crate::format::json::outline::{Outline, Shape};
pub(in crate::format) use crate::format::rejection::{Decoded, Reason, Rejection, either, reject};

/// The trajectory format of one recorder.
pub struct TrajectoryFormat {
    pub form: Form,
    /// Keys of a record. `recognizes` is called only if one of them exists.
    pub signs: &'static [&'static str],
    pub recognizes: fn(&Outline<'_>) -> bool,
    pub decode: fn(&Outline<'_>) -> Decoded<(Header, Body)>,
}
