//! Checks of arguments that all steps of packing share.

use crate::{Error, Kind, Result};

/// Refuses arrays whose lengths contradict one another.
pub(super) fn check_length(name: &str, found: usize, needed: usize) -> Result<()> {
    if found == needed {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, format!("{name} has {found} entries, but {needed} are needed"))
        .why("Each array has one entry per element")
        .cure("Pass arrays of equal length"))
}

/// Refuses branches that are longer than their tokens, or end behind all of them.
pub(super) fn check_inside(cu_seqlens: &[i64], length: &[i32], tokens: usize) -> Result<()> {
    let fits = |(ends, &length): (&[i64], &i32)| ends[0] >= 0 && i64::from(length) <= ends[1] - ends[0];
    let inside = cu_seqlens.windows(2).zip(length).all(fits);
    if inside && cu_seqlens.last().is_none_or(|&end| end <= tokens as i64) {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "a branch reaches beyond its tokens"))
}

/// Refuses a budget of no token.
pub(super) fn check_budget(token_budget: usize) -> Result<()> {
    if token_budget > 0 && i32::try_from(token_budget).is_ok() {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, format!("token_budget is {token_budget}"))
        .why("A row holds at least one token and is indexed by 32-bit integers")
        .cure("Pass a budget between 1 and 2147483647"))
}
