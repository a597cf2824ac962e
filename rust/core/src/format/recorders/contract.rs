//! What a recorder's file says of itself.

use crate::format::form::Form;
use crate::format::json::fields::Header;
use crate::format::json::outline::Outline;
use crate::format::normal::body::Body;
use crate::format::rejection::Decoded;

/// How one recorder writes a trajectory.
pub struct Dump {
    pub form: Form,
    /// Keys of the record, any one of which makes `knows` worth asking.
    pub signs: &'static [&'static str],
    /// Whether this is a record of it.
    pub knows: fn(&Outline<'_>) -> bool,
    /// The record's header and body.
    pub decode: fn(&Outline<'_>) -> Decoded<(Header, Body)>,
}
