//! What a recorder's file says of itself, and the names that it says it with.

pub(in crate::format) use crate::format::build::{Body, note};
pub(in crate::format) use crate::format::fields::{Header, Sampling};
pub(in crate::format) use crate::format::form::Form;
pub(in crate::format) use crate::format::json::outline::{Outline, Shape};
pub(in crate::format) use crate::format::rejection::{Decoded, Reason, Rejection, either, reject};

/// How one recorder writes a trajectory.
pub struct Dump {
    pub form: Form,
    /// Keys of the record, any one of which makes `knows` worth asking.
    pub signs: &'static [&'static str],
    pub knows: fn(&Outline<'_>) -> bool,
    pub decode: fn(&Outline<'_>) -> Decoded<(Header, Body)>,
}
