//! The budget of one call into a tokenizer's normalisers and patterns: time and bytes, in proportion to the text.
//!
//! `hf_backend` and `pattern` look at it.

use crate::error::{Error, Kind, Result};
use crate::{cancel, caught};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// What a call may take: so long, and so much more for each byte of text. Patterns as published take a hundredth.
const TIME: (Duration, Duration) = (Duration::from_secs(2), Duration::from_micros(5));
/// The bytes that normalisation may make of a text, and how many more for each byte of it. The longest that Unicode's own
/// forms make of a character are eleven times its bytes.
const BYTES: (usize, usize) = (1 << 16, 32);

struct Allowance {
    until: Instant,
    bytes: usize,
    refused: Option<String>,
}

thread_local! {
    static ALLOWANCE: RefCell<Option<Allowance>> = const { RefCell::new(None) };
}

/// What `work` gives within the allowance of `length` bytes; `what` was done, for the error.
pub(super) fn bounded<T>(length: usize, what: &str, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let until = Instant::now() + TIME.0 + TIME.1.saturating_mul(u32::try_from(length).unwrap_or(u32::MAX));
    let allowance = Allowance { until, bytes: BYTES.0 + BYTES.1.saturating_mul(length), refused: None };
    let outer = ALLOWANCE.replace(Some(allowance));
    let result = caught(Kind::Tokenizer, what, || {
        work().map_err(|error| Error::new(Kind::Tokenizer, format!("{what} failed: {error}")))
    });
    let refused = ALLOWANCE.replace(outer).and_then(|allowance| allowance.refused);
    // The crate goes on where a normaliser fails, so what it gives then is not looked at.
    match refused {
        None => result,
        Some(reason) => Err(Error::new(Kind::Tokenizer, format!("{what} was stopped: {reason}"))
            .why("tokenizer.json is a stranger's program, and what it may take is bounded by the text")
            .cure("Copy the file again from where the model came from")),
    }
}

/// Stops the call that [`bounded`] is around.
pub(super) fn refuse(reason: &str) -> Box<dyn std::error::Error + Send + Sync> {
    ALLOWANCE.with_borrow_mut(|allowance| {
        if let Some(allowance) = allowance {
            allowance.refused.get_or_insert_with(|| reason.to_owned());
        }
    });
    reason.into()
}

/// Whether the call has time left, and its caller still waits for it; `what` is run, for the error.
pub(super) fn in_time(what: &str) -> tokenizers::Result<()> {
    cancel::check();
    let over = ALLOWANCE.with_borrow(|allowance| allowance.as_ref().is_some_and(|it| Instant::now() > it.until));
    if over { Err(refuse(&format!("the {what} takes too long"))) } else { Ok(()) }
}

/// Whether the call may make a text of this many bytes by a part of the tokenizer.
pub(super) fn in_bytes(bytes: usize, part: &str) -> tokenizers::Result<()> {
    let over = ALLOWANCE.with_borrow(|allowance| allowance.as_ref().is_some_and(|it| bytes > it.bytes));
    if over { Err(refuse(&format!("its {part} makes the text far longer than it is"))) } else { Ok(()) }
}

/// Takes the bytes that a part of the text has become: the parts share the allowance.
pub(super) fn spend(bytes: usize) {
    ALLOWANCE.with_borrow_mut(|allowance| {
        if let Some(allowance) = allowance {
            allowance.bytes = allowance.bytes.saturating_sub(bytes);
        }
    });
}
