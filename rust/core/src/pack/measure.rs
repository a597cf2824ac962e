//! Measures how much of each branch is laid out, and finds traces that are longer than a row.

use super::check::{check_budget, check_length};
use super::prefix::sorted;
use crate::{Error, Kind, Location, Result, cancel};

/// Branches of traces as flat slices.
#[derive(Debug, Clone, Copy)]
pub struct Branches<'a> {
    /// [N+1] branch n is tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: &'a [i64],
    /// [N] the trace of each branch, numbered from 0 without gaps. Branches of a trace are adjacent.
    pub trace: &'a [i32],
    /// [T] token ids.
    pub ids: &'a [i32],
    /// [T] true if the token is trained (a term).
    pub trainable: &'a [bool],
    /// [R] names of the traces for errors; may be empty.
    pub names: &'a [String],
}

/// The unit that must fit in one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUnit {
    /// Each branch.
    Branch,
    /// All branches of a trace, one after the other.
    Trace,
    /// All branches of a trace, with shared prefixes laid out once.
    Tree,
}

/// The handling of a trace that does not fit in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooLong {
    /// Return an error that names the longest trace and counts all such traces.
    Error,
    /// Leave out the complete trace and count it.
    Drop,
    /// Truncate the branch at the budget and count the terms beyond it.
    Truncate,
}

/// The measured part of each branch.
#[derive(Debug, Default)]
pub struct BranchLengths {
    /// [N] number of tokens laid out, up to the last term, because later tokens have no effect; 0 if nothing is laid
    /// out.
    pub length: Vec<i32>,
    /// [N] terms among them.
    pub terms: Vec<i32>,
    /// [R] terms lost because the trace was too long.
    pub lost: Vec<i64>,
    /// Traces that were too long, ascending.
    pub too_long: Vec<i32>,
}

/// Measures branches against rows of `tokens_per_row` tokens.
///
/// A trace that must fit in one row with all its branches cannot be truncated.
///
/// # Errors
/// Fails if a first token is a term (nothing predicts it), if a trace is too long under [`TooLong::Error`], or if
/// slices are inconsistent.
pub fn measure(
    branches: Branches<'_>,
    tokens_per_row: usize,
    whole: RowUnit,
    too_long: TooLong,
) -> Result<BranchLengths> {
    check(branches, tokens_per_row, whole, too_long)?;
    let mut out = BranchLengths::default();
    let mut first = 0;
    let mut refused = 0u64;
    let mut worst = (0, 0, 0);
    for run in branches.trace.chunk_by(|a, b| a == b) {
        cancel::check_every_16384(out.lost.len());
        let trace = run[0];
        let (mut total, mut longest, mut longest_branch, mut lost) = (0, 0, first, 0);
        for branch in first..first + run.len() {
            let (length, terms) = extent(branches, branch, usize::MAX)?;
            total += length;
            if length > longest {
                (longest, longest_branch) = (length, branch);
            }
            out.length.push(length as i32);
            out.terms.push(terms as i32);
        }
        let needed = match whole {
            RowUnit::Branch => longest,
            RowUnit::Trace => total,
            RowUnit::Tree if total <= tokens_per_row => total,
            RowUnit::Tree => tree_size(branches, first, &out.length[first..]),
        };
        if needed > tokens_per_row {
            refused += 1;
            if needed > worst.0 {
                worst = (needed, trace, longest_branch - first);
            }
            out.too_long.push(trace);
            lost = cut(branches, &mut out, first, tokens_per_row, too_long)?;
        }
        out.lost.push(lost);
        first += run.len();
    }
    if refused > 0 && too_long == TooLong::Error {
        return Err(refusal(branches, worst, refused, tokens_per_row, whole));
    }
    Ok(out)
}

fn check(branches: Branches<'_>, tokens_per_row: usize, whole: RowUnit, too_long: TooLong) -> Result<()> {
    check_budget(tokens_per_row)?;
    let cu = branches.cu_seqlens;
    check_length("ids", branches.ids.len(), branches.trainable.len())?;
    check_length("cu_seqlens", cu.len(), branches.trace.len() + 1)?;
    if cu[0] != 0 || cu[cu.len() - 1] != branches.trainable.len() as i64 || cu.windows(2).any(|w| w[1] < w[0]) {
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-512",
            "cu_seqlens does not rise from 0 to the number of tokens",
        )
        .why("It contains the start and end of each branch"));
    }
    if cu.windows(2).any(|w| i32::try_from(w[1] - w[0]).is_err()) {
        return Err(Error::new(Kind::Argument, "TG-PACK-513", "a branch has more than 2147483647 tokens"));
    }
    let first = branches.trace.first().copied().unwrap_or(0);
    if first != 0 || branches.trace.windows(2).any(|w| w[1] != w[0] && w[1] != w[0] + 1) {
        return Err(Error::new(Kind::Argument, "TG-PACK-514", "trace does not count up from 0 without gaps")
            .why("Branches of a trace must be adjacent"));
    }
    if whole != RowUnit::Branch && too_long == TooLong::Truncate {
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-515",
            "too_long is 'truncate' with an objective that needs complete traces",
        )
        .why("A ratio of a complete trace is not defined on part of it")
        .fix("Pass too_long='drop' or 'error'"));
    }
    Ok(())
}

/// Returns the number of tokens up to the last term among the first `limit` tokens, and the number of terms in them.
fn extent(branches: Branches<'_>, branch: usize, limit: usize) -> Result<(usize, usize)> {
    let (start, end) = (branches.cu_seqlens[branch] as usize, branches.cu_seqlens[branch + 1] as usize);
    let tokens = &branches.trainable[start..end.min(start.saturating_add(limit))];
    if tokens.first() == Some(&true) {
        let trace = branches.trace[branch];
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-516",
            format!("the first token of branch {branch} is trainable"),
        )
        .at(&named(branches, trace))
        .why("No token precedes it, so no hidden state predicts it")
        .fix("Mark it as not trainable, or begin the branch with the token that preceded it"));
    }
    let length = tokens.iter().rposition(|&term| term).map_or(0, |last| last + 1);
    Ok((length, tokens[..length].iter().filter(|&&term| term).count()))
}

/// Returns the number of tokens of the prefix tree of branches `first..first + length.len()`.
fn tree_size(branches: Branches<'_>, first: usize, length: &[i32]) -> usize {
    let text = |branch: u32| {
        let start = branches.cu_seqlens[first + branch as usize] as usize;
        &branches.ids[start..start + length[branch as usize] as usize]
    };
    let order = sorted(&(0..length.len() as u32).collect::<Vec<_>>(), text);
    order.iter().map(|entry| text(entry.branch).len() - entry.shared as usize).sum()
}

/// Leaves a trace out, or truncates its branches at the budget. Returns the number of lost terms.
fn cut(branches: Branches<'_>, out: &mut BranchLengths, first: usize, budget: usize, too_long: TooLong) -> Result<i64> {
    let mut lost = 0;
    for branch in first..out.length.len() {
        let previous_terms = out.terms[branch];
        let (length, terms) = match too_long {
            TooLong::Truncate => extent(branches, branch, budget)?,
            TooLong::Drop | TooLong::Error => (0, 0),
        };
        out.length[branch] = length as i32;
        out.terms[branch] = terms as i32;
        lost += i64::from(previous_terms - out.terms[branch]);
    }
    Ok(lost)
}

fn named(branches: Branches<'_>, trace: i32) -> Location {
    let name = branches.names.get(trace as usize).cloned().unwrap_or_else(|| trace.to_string());
    Location { trace: Some(name), ..Location::default() }
}

fn refusal(branches: Branches<'_>, worst: (usize, i32, usize), count: u64, budget: usize, whole: RowUnit) -> Error {
    let (tokens, trace, branch) = worst;
    let ratio = "The objective takes a ratio of the whole trace, so it must lie in one row";
    let (what, why, alternative) = match whole {
        RowUnit::Branch => {
            (format!("branch {branch} has"), "Attention does not reach from one row into another", " or 'truncate'")
        }
        RowUnit::Trace => ("all its branches together have".to_owned(), ratio, ""),
        RowUnit::Tree => ("all its branches together, shared prefixes counted once, have".to_owned(), ratio, ""),
    };
    Error::new(
        Kind::Argument,
        "TG-PACK-517", format!("{what} {tokens} tokens up to its last trained one, but tokens_per_row is {budget} ({count} traces are too long, this one most)"),
    )
    .at(&named(branches, trace))
    .why(why)
    .fix(format!("Raise tokens_per_row to {tokens}, or pass too_long='drop'{alternative}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [String; 0] = [];

    fn branches<'a>(cu: &'a [i64], trace: &'a [i32], trainable: &'a [bool]) -> Branches<'a> {
        Branches { cu_seqlens: cu, trace, ids: &IDS[..trainable.len()], trainable, names: &NAMES }
    }

    // trace 0: a branch of 4 tokens, terms at 1 and 2; trace 1: branches of 3 (term at 2) and 6 (terms at 1, 4, 5).
    // The branches of trace 1 have their first two tokens in common.
    const IDS: [i32; 13] = [1, 2, 3, 4, 5, 6, 7, 5, 6, 8, 9, 10, 11];
    const CU: [i64; 4] = [0, 4, 7, 13];
    const TRACE: [i32; 3] = [0, 1, 1];
    const TRAINABLE: [bool; 13] = [false, true, true, false, false, false, true, false, true, false, false, true, true];

    #[test]
    fn lengths_and_losses_follow_the_budget_and_the_row_unit() {
        let (fits, second): (&[i32], &[i32]) = (&[], &[1]);
        let cases = [
            ("up to its last term", 6, RowUnit::Branch, TooLong::Error, [3, 3, 6], [2, 1, 3], 0, fits),
            ("dropping takes the whole trace", 5, RowUnit::Branch, TooLong::Drop, [3, 0, 0], [2, 0, 0], 4, second),
            ("cut at the last term within", 4, RowUnit::Branch, TooLong::Truncate, [3, 3, 2], [2, 1, 1], 2, second),
            ("all branches count", 8, RowUnit::Trace, TooLong::Drop, [3, 0, 0], [2, 0, 0], 4, second),
            ("all branches fit", 9, RowUnit::Trace, TooLong::Drop, [3, 3, 6], [2, 1, 3], 0, fits),
            ("a shared prefix counts once", 7, RowUnit::Tree, TooLong::Drop, [3, 3, 6], [2, 1, 3], 0, fits),
            ("a tree that is too large", 6, RowUnit::Tree, TooLong::Drop, [3, 0, 0], [2, 0, 0], 4, second),
        ];
        for (case, budget, whole, too_long, length, terms, lost, long) in cases {
            let out = measure(branches(&CU, &TRACE, &TRAINABLE), budget, whole, too_long).unwrap();
            assert_eq!((&out.length[..], &out.terms[..]), (&length[..], &terms[..]), "{case}");
            assert_eq!((&out.lost[..], &out.too_long[..]), (&[0, lost][..], long), "{case}");
        }
    }

    #[test]
    fn a_complete_trace_is_never_truncated_and_counts_as_a_unit() {
        let error_of = |budget, whole, too_long| {
            measure(branches(&CU, &TRACE, &TRAINABLE), budget, whole, too_long).unwrap_err().to_string()
        };
        let text = error_of(9, RowUnit::Trace, TooLong::Truncate);
        assert!(text.contains("complete traces"), "{text}");
        let text = error_of(6, RowUnit::Tree, TooLong::Error);
        assert!(text.contains("shared prefixes counted once, have 7 tokens"), "{text}");
    }

    #[test]
    fn the_refusal_names_the_longest_trace_and_the_cure() {
        let names = ["a".to_owned(), "b".to_owned()];
        let long = Branches { names: &names, ..branches(&CU, &TRACE, &TRAINABLE) };
        let error = measure(long, 2, RowUnit::Branch, TooLong::Error).unwrap_err();
        assert_eq!(error.location.trace.as_deref(), Some("b"));
        let text = error.to_string();
        assert!(text.contains("branch 1 has 6 tokens") && text.contains("(2 traces"), "{text}");
        assert!(text.contains("Raise tokens_per_row to 6"), "{text}");
    }

    #[test]
    fn a_first_token_cannot_be_a_term() {
        let error = measure(branches(&[0, 2], &[0], &[true, false]), 8, RowUnit::Branch, TooLong::Error).unwrap_err();
        assert!(error.to_string().contains("first token of branch 0 is trainable"));
    }
}
