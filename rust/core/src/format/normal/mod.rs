//! The normal form, and what all formats share on the way to it.
//!
//! In come messages, calls and token lists as producers have them; out goes a `Body`. The files, each using those before it
//! alone: `body`, `finish`, `extras`, `coverage`, `history`; `strays`, `message`, `images`, `calls`.

pub(super) mod body;
pub(super) mod calls;
pub(super) mod coverage;
pub(super) mod extras;
pub(super) mod finish;
pub(super) mod history;
pub(super) mod images;
pub(super) mod message;
mod strays;
