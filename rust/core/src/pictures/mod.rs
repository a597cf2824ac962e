//! Pictures in messages: each that the record holds becomes its digest, and is found again in the record's bytes.
//!
//! A part of a message with a picture's bytes in it, in whichever API's words, becomes `{"type": "image", "image":
//! "blake3:<digest>"}`: what compares messages or renders them sees the picture and carries none of its bytes. The files,
//! each using those before it alone: `header`, `parts`, `again`.

mod again;
mod header;
mod parts;

pub use again::{digests, find};
pub use header::MEDIA_TYPES;
pub use parts::{Picture, digest, handles, holds, is_handle, take, why_not};
