//! Images in messages: the bytes of each become its digest, and are found again in the bytes of the record.
//!
//! A part of a message with an image's bytes in it, in whichever API's words, becomes `{"type": "image", "image":
//! "blake3:<digest>"}`: what compares messages or renders them sees the image and carries none of its bytes.

mod bytes;
mod header;
mod parts;

pub use bytes::{digests, find};
pub use header::MEDIA_TYPES;
pub use parts::{Picture, digest, handles, holds, is_handle, take, why_not};
