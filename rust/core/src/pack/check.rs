//! Argument checks that all steps of packing share.

use crate::{Error, Kind, Result};

/// Returns an error if the length of an array is not the expected one.
pub(super) fn check_length(name: &str, actual: usize, expected: usize) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "TG-PACK-505", format!("{name} has {actual} entries, but {expected} are needed"))
        .why("Each array has one entry per element")
        .fix("Pass arrays of equal length"))
}

/// Returns an error if a branch is longer than its tokens, or ends after the last token.
pub(super) fn check_inside(cu_seqlens: &[i64], length: &[i32], tokens: usize) -> Result<()> {
    let is_inside = |(ends, &length): (&[i64], &i32)| ends[0] >= 0 && i64::from(length) <= ends[1] - ends[0];
    let all_inside = cu_seqlens.windows(2).zip(length).all(is_inside);
    if all_inside && cu_seqlens.last().is_none_or(|&end| end <= tokens as i64) {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "TG-PACK-506", "a branch reaches beyond its tokens"))
}

/// Returns an error for a budget of zero tokens or beyond 32 bits.
pub(super) fn check_budget(tokens_per_row: usize) -> Result<()> {
    if tokens_per_row > 0 && i32::try_from(tokens_per_row).is_ok() {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "TG-PACK-507", format!("tokens_per_row is {tokens_per_row}"))
        .why("A row has at least one token and is indexed by 32-bit integers")
        .fix("Pass a budget between 1 and 2147483647"))
}
