//! Images in messages: the bytes of an image are replaced by its digest, and are found again in the bytes of the
//! record.
//!
//! A part of a message that contains an image's bytes, in the format of any API, becomes `{"type": "image", "image":
//! "blake3:<digest>"}`. Code that compares or renders messages then identifies the image without carrying its bytes.

mod bytes;
mod header;
mod parts;

pub use bytes::{digests, find};
pub use header::MEDIA_TYPES;
pub use parts::{Image, digest, extract, handles, holds, is_handle, reason_unavailable};
