//! The rows of one rank, written out as flat arrays.

use super::check_length;
use crate::{Error, Kind, Result};

/// Per-token arrays of the branches.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// [T] token ids.
    pub ids: &'a [i32],
    /// [T] whether a token is a term.
    pub trainable: &'a [bool],
    /// [T] 1/temperature of sampling where the logprobs are of that distribution, else 1.
    pub inv_temperature: &'a [f32],
    /// [N+1] branch n is tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: &'a [i64],
}

/// All rows of one rank, step after step, row after row; indices within a row or a step begin at 0 there.
#[derive(Debug, Default)]
pub struct Layout {
    /// [T] token ids; 0 where a row is padded.
    pub ids: Vec<i32>,
    /// [T] depth in the tree, which in a plain pack is the position in the branch.
    pub positions: Vec<i32>,
    /// [T] a query q of the row sees key k iff `k <= q < tree_end[k]`.
    pub tree_end: Vec<i32>,
    /// [rows + 1] where each row's tokens begin.
    pub cu_tokens: Vec<i64>,
    /// [U] the position in the row whose hidden state predicts the token.
    pub read: Vec<i32>,
    /// [U] the token predicted.
    pub target: Vec<i32>,
    /// [U] as given, at the predicted token.
    pub inv_temperature: Vec<f32>,
    /// [m] head row of each term.
    pub row: Vec<i32>,
    /// [m] place of each term in its step.
    pub term: Vec<i32>,
    /// [rows + 1] where each row's head rows begin, and its terms too: in a plain pack they are one to one.
    pub cu_heads: Vec<i64>,
    /// [steps + 1] where each step's rows begin.
    pub cu_rows: Vec<i64>,
    /// [M] of each step's terms, ordered by branch and position: the token of the input it is.
    pub origin: Vec<i64>,
    /// [M] its branch.
    pub branch: Vec<i32>,
    /// [steps + 1] where each step's terms begin.
    pub cu_terms: Vec<i64>,
}

/// Writes the rows of one rank.
///
/// `length`, `step` and `row` are per branch, -1 in `step` for branches of other ranks; `rows` is the number of rows of
/// each step (more than the rank fills where another rank fills more: those rows are empty). Each row is padded with
/// tokens that see only themselves to a multiple of `multiple`, and an empty one has one such bucket.
///
/// # Errors
/// Slices that contradict one another.
pub fn lay(
    tokens: Tokens<'_>,
    length: &[i32],
    step: &[i32],
    row: &[i32],
    rows: &[i32],
    multiple: usize,
) -> Result<Layout> {
    check(tokens, length, step, row, multiple)?;
    let cu_rows = offsets(rows.iter().map(|&count| count.max(0) as i64));
    let mut out = Layout { cu_rows, ..Layout::default() };
    let terms = terms_of(tokens, length, step);
    let first_term = number_terms(&mut out, tokens, length, step, &terms, rows.len());
    let by_row = branches_by_row(&out.cu_rows, step, row)?;
    out.reserve(length, step, &terms);
    out.cu_tokens.push(0);
    out.cu_heads.push(0);
    for branches in &by_row {
        let start = out.ids.len();
        let heads = out.read.len();
        for &branch in branches {
            out.write(tokens, branch as usize, length[branch as usize] as usize, start, first_term[branch as usize]);
        }
        out.row.extend(0..(out.read.len() - heads) as i32);
        let filled = out.ids.len() - start;
        out.pad(filled, filled.max(1).next_multiple_of(multiple));
        out.cu_tokens.push(out.ids.len() as i64);
        out.cu_heads.push(out.read.len() as i64);
    }
    Ok(out)
}

fn check(tokens: Tokens<'_>, length: &[i32], step: &[i32], row: &[i32], multiple: usize) -> Result<()> {
    check_length("trainable", tokens.trainable.len(), tokens.ids.len())?;
    check_length("inv_temperature", tokens.inv_temperature.len(), tokens.ids.len())?;
    check_length("cu_seqlens", tokens.cu_seqlens.len(), length.len() + 1)?;
    check_length("step", step.len(), length.len())?;
    check_length("row", row.len(), length.len())?;
    let room = |n: usize| tokens.cu_seqlens[n + 1] - tokens.cu_seqlens[n];
    let fits = (0..length.len()).all(|n| tokens.cu_seqlens[n] >= 0 && i64::from(length[n]) <= room(n));
    if !fits || tokens.cu_seqlens.last().is_some_and(|&end| end > tokens.ids.len() as i64) {
        return Err(Error::new(Kind::Argument, "a branch reaches beyond its tokens"));
    }
    if multiple == 0 {
        return Err(Error::new(Kind::Argument, "pad_to_multiple_of is 0").cure("Pass 1 for no padding"));
    }
    Ok(())
}

fn offsets(counts: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut out = vec![0];
    let mut total = 0;
    out.extend(counts.map(|count| {
        total += count;
        total
    }));
    out
}

/// Terms of each branch that is laid out.
fn terms_of(tokens: Tokens<'_>, length: &[i32], step: &[i32]) -> Vec<i64> {
    let count = |n: usize| {
        let start = tokens.cu_seqlens[n] as usize;
        tokens.trainable[start..start + length[n].max(0) as usize].iter().filter(|&&term| term).count() as i64
    };
    (0..length.len()).map(|n| if step[n] < 0 { 0 } else { count(n) }).collect()
}

/// Fills `origin`, `branch` and `cu_terms`; returns where in its step each branch's terms begin.
fn number_terms(
    out: &mut Layout,
    tokens: Tokens<'_>,
    length: &[i32],
    step: &[i32],
    terms: &[i64],
    steps: usize,
) -> Vec<i32> {
    let mut per_step = vec![0; steps];
    let mut first = vec![0; length.len()];
    for n in (0..length.len()).filter(|&n| step[n] >= 0) {
        first[n] = per_step[step[n] as usize] as i32;
        per_step[step[n] as usize] += terms[n];
    }
    out.cu_terms = offsets(per_step.into_iter());
    let total = *out.cu_terms.last().unwrap_or(&0) as usize;
    out.origin = vec![0; total];
    out.branch = vec![0; total];
    for n in (0..length.len()).filter(|&n| step[n] >= 0) {
        let start = tokens.cu_seqlens[n];
        let mut place = out.cu_terms[step[n] as usize] as usize + first[n] as usize;
        for offset in 0..i64::from(length[n].max(0)) {
            if tokens.trainable[(start + offset) as usize] {
                out.origin[place] = start + offset;
                out.branch[place] = n as i32;
                place += 1;
            }
        }
    }
    first
}

/// Branches of each row, in order.
fn branches_by_row(cu_rows: &[i64], step: &[i32], row: &[i32]) -> Result<Vec<Vec<u32>>> {
    let mut by_row = vec![Vec::new(); cu_rows.last().map_or(0, |&rows| rows as usize)];
    for n in (0..step.len()).filter(|&n| step[n] >= 0) {
        let (first, end) = cu_rows.get(step[n] as usize).zip(cu_rows.get(step[n] as usize + 1)).unwrap_or((&0, &0));
        let place = first + i64::from(row[n]);
        if row[n] < 0 || place >= *end {
            return Err(Error::new(
                Kind::Argument,
                format!("branch {n} lies in row {} of step {}, which has {}", row[n], step[n], end - first),
            ));
        }
        by_row[place as usize].push(n as u32);
    }
    Ok(by_row)
}

impl Layout {
    fn reserve(&mut self, length: &[i32], step: &[i32], terms: &[i64]) {
        let tokens =
            length.iter().zip(step).filter(|&(_, &step)| step >= 0).map(|(&length, _)| length.max(0) as usize).sum();
        let heads = terms.iter().sum::<i64>() as usize;
        for column in [&mut self.ids, &mut self.positions, &mut self.tree_end] {
            column.reserve(tokens);
        }
        for column in [&mut self.read, &mut self.target, &mut self.row, &mut self.term] {
            column.reserve(heads);
        }
        self.inv_temperature.reserve(heads);
    }

    /// Appends a branch to the row that begins at token `start`.
    fn write(&mut self, tokens: Tokens<'_>, branch: usize, length: usize, start: usize, first_term: i32) {
        let from = tokens.cu_seqlens[branch] as usize;
        let here = (self.ids.len() - start) as i32;
        let ids = &tokens.ids[from..from + length];
        self.ids.extend_from_slice(ids);
        self.positions.extend(0..length as i32);
        self.tree_end.resize(self.tree_end.len() + length, here + length as i32);
        let places = tokens.trainable[from..from + length].iter().enumerate().filter(|&(_, &term)| term);
        for (term, (offset, _)) in (first_term..).zip(places) {
            self.read.push(here + offset as i32 - 1);
            self.target.push(ids[offset]);
            self.inv_temperature.push(tokens.inv_temperature[from + offset]);
            self.term.push(term);
        }
    }

    /// Appends tokens that see only themselves.
    fn pad(&mut self, filled: usize, to: usize) {
        self.ids.resize(self.ids.len() + to - filled, 0);
        self.positions.resize(self.ids.len(), 0);
        self.tree_end.extend((filled as i32..to as i32).map(|k| k + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Branch 0: ids 10 11 12, terms at 1, 2. Branch 1: ids 20 21, term at 1. Branch 2: 30 31 32 33, terms at 2, 3.
    const TOKENS: Tokens<'static> = Tokens {
        ids: &[10, 11, 12, 20, 21, 30, 31, 32, 33],
        trainable: &[false, true, true, false, true, false, false, true, true],
        inv_temperature: &[1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        cu_seqlens: &[0, 3, 5, 9],
    };

    #[test]
    fn a_row_reads_each_term_at_its_predecessor() {
        let out = lay(TOKENS, &[3, 2, 4], &[0, 0, 0], &[1, 0, 0], &[2], 1).unwrap();
        assert_eq!(out.ids, [20, 21, 30, 31, 32, 33, 10, 11, 12]);
        assert_eq!(out.positions, [0, 1, 0, 1, 2, 3, 0, 1, 2]);
        assert_eq!(out.tree_end, [2, 2, 6, 6, 6, 6, 3, 3, 3]);
        assert_eq!(out.cu_tokens, [0, 6, 9]);
        assert_eq!(out.read, [0, 3, 4, 0, 1]);
        assert_eq!(out.target, [21, 32, 33, 11, 12]);
        assert_eq!(out.inv_temperature, [1.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!(out.row, [0, 1, 2, 0, 1]);
        assert_eq!(out.term, [2, 3, 4, 0, 1]);
        assert_eq!(out.cu_heads, [0, 3, 5]);
        assert_eq!(out.origin, [1, 2, 4, 7, 8]);
        assert_eq!(out.branch, [0, 0, 1, 2, 2]);
        assert_eq!(out.cu_terms, [0, 5]);
    }

    #[test]
    fn steps_number_their_terms_from_zero_and_lengths_cut_branches() {
        let out = lay(TOKENS, &[2, 2, 4], &[1, -1, 0], &[0, 0, 0], &[1, 1], 1).unwrap();
        assert_eq!(out.ids, [30, 31, 32, 33, 10, 11]);
        assert_eq!(out.term, [0, 1, 0]);
        assert_eq!(out.origin, [7, 8, 1]);
        assert_eq!((out.cu_rows, out.cu_terms), (vec![0, 1, 2], vec![0, 2, 3]));
    }

    #[test]
    fn padding_and_empty_rows_see_only_themselves() {
        let out = lay(TOKENS, &[3, 0, 0], &[0, -1, -1], &[0, 0, 0], &[2], 4).unwrap();
        assert_eq!(out.ids, [10, 11, 12, 0, 0, 0, 0, 0]);
        assert_eq!(out.tree_end, [3, 3, 3, 4, 1, 2, 3, 4]);
        assert_eq!(out.positions, [0, 1, 2, 0, 0, 0, 0, 0]);
        assert_eq!((out.cu_tokens, out.cu_heads), (vec![0, 4, 8], vec![0, 2, 2]));
    }

    #[test]
    fn a_row_that_does_not_exist_is_refused() {
        assert!(lay(TOKENS, &[3, 2, 4], &[0, 0, 0], &[0, 0, 1], &[1], 1).is_err());
        assert!(lay(TOKENS, &[4, 2, 4], &[0, 0, 0], &[0, 0, 0], &[1], 1).is_err());
    }
}
