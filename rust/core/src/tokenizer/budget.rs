//! The budget of one call into a tokenizer's normalizers and patterns: time and bytes, in proportion to the text.
//!
//! `hf_backend` and `pattern` check it.

use crate::error::{Error, Kind, Result};
use crate::{cancel, catch_panic};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Time limit of a call: a fixed part, and a part per byte of text. Published patterns need a hundredth of it.
const TIME: (Duration, Duration) = (Duration::from_secs(2), Duration::from_micros(5));
/// Limit of the bytes that normalization may produce: a fixed part, and a part per byte of text. Unicode's
/// normalization forms produce at most eleven times the bytes of a character.
const BYTES: (usize, usize) = (1 << 16, 32);

struct Allowance {
    until: Instant,
    bytes: usize,
    refused: Option<String>,
}

thread_local! {
    static ALLOWANCE: RefCell<Option<Allowance>> = const { RefCell::new(None) };
}

/// Returns the result of `work` within the allowance for `length` bytes. `what` describes the work in errors.
pub(super) fn bounded<T>(length: usize, what: &str, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let until = Instant::now() + TIME.0 + TIME.1.saturating_mul(u32::try_from(length).unwrap_or(u32::MAX));
    let allowance = Allowance { until, bytes: BYTES.0 + BYTES.1.saturating_mul(length), refused: None };
    let outer = ALLOWANCE.replace(Some(allowance));
    let result = catch_panic(Kind::Tokenizer, what, || {
        work().map_err(|error| Error::new(Kind::Tokenizer, "TG-TOKENIZER-001", format!("{what} failed: {error}")))
    });
    let stop_reason = ALLOWANCE.replace(outer).and_then(|allowance| allowance.refused);
    // The `tokenizers` crate continues after a normalizer fails, so its result is ignored then.
    match stop_reason {
        None => result,
        Some(reason) => Err(Error::new(Kind::Tokenizer, "TG-TOKENIZER-002", format!("{what} was stopped: {reason}"))
            .why("tokenizer.json is untrusted, so its time and memory are limited by the length of the text")
            .fix("Copy the file again from where the model came from")),
    }
}

/// Stops the enclosing call of [`bounded`].
pub(super) fn refuse(reason: &str) -> Box<dyn std::error::Error + Send + Sync> {
    ALLOWANCE.with_borrow_mut(|allowance| {
        if let Some(allowance) = allowance {
            allowance.refused.get_or_insert_with(|| reason.to_owned());
        }
    });
    reason.into()
}

/// Returns an error if the call has no time left. Also checks whether the caller canceled. `what` names the running
/// part in the error.
pub(super) fn in_time(what: &str) -> tokenizers::Result<()> {
    cancel::check();
    let over =
        ALLOWANCE.with_borrow(|allowance| allowance.as_ref().is_some_and(|limits| Instant::now() > limits.until));
    if over { Err(refuse(&format!("the {what} takes too long"))) } else { Ok(()) }
}

/// Returns an error if the call may not produce a text of this many bytes in a part of the tokenizer.
pub(super) fn in_bytes(bytes: usize, part: &str) -> tokenizers::Result<()> {
    let over = ALLOWANCE.with_borrow(|allowance| allowance.as_ref().is_some_and(|limits| bytes > limits.bytes));
    if over { Err(refuse(&format!("its {part} makes the text far longer than it is"))) } else { Ok(()) }
}

/// Charges the output bytes of a part of the text. All parts share the allowance.
pub(super) fn spend(bytes: usize) {
    ALLOWANCE.with_borrow_mut(|allowance| {
        if let Some(allowance) = allowance {
            allowance.bytes = allowance.bytes.saturating_sub(bytes);
        }
    });
}
