//! Writes the rows of one rank as flat arrays, and gathers columns of tokens and branches for them.

#[cfg(test)]
mod tests;

use super::check::{check_inside, check_length};
use super::prefix::common;
use crate::{Error, Kind, Result, cancel};
use std::collections::HashMap;
use std::ops::Range;

/// Writes the rows of one rank.
///
/// Each row is padded to a multiple of `multiple` with tokens that attend only to themselves. An empty row consists of
/// `multiple` such tokens. The common prefix of two neighbors in a shared row is computed here again, id by id.
///
/// # Errors
/// Fails if slices are inconsistent.
pub fn write_rows(tokens: Tokens<'_>, plan: Plan<'_>, multiple: usize) -> Result<Layout> {
    let mut out = Layout::default();
    write_rows_into(tokens, plan, multiple, &mut out)?;
    Ok(out)
}

/// Runs [`write_rows`] into an existing layout and reuses its memory.
///
/// # Errors
/// Same as [`write_rows`]. The layout is then empty or contains some of the rows.
pub fn write_rows_into(tokens: Tokens<'_>, plan: Plan<'_>, multiple: usize, out: &mut Layout) -> Result<()> {
    out.clear();
    check(tokens, plan, multiple)?;
    out.cu_rows = offsets(plan.rows.iter().map(|&count| count.max(0) as i64));
    let terms = terms_of(tokens, plan);
    let first_term = number_terms(out, tokens, plan, &terms);
    let by_row = branches_by_row(&out.cu_rows, plan)?;
    out.reserve(plan, &terms);
    for offsets in [&mut out.cu_tokens, &mut out.cu_logit_rows, &mut out.cu_row_terms] {
        offsets.push(0);
    }
    for branches in &by_row {
        cancel::check();
        let shares = branches.first().is_some_and(|&branch| plan.shared[plan.step[branch as usize] as usize]);
        let mut row = Row::begin(out, shares);
        let mut previous: &[i32] = &[];
        for &branch in branches {
            let branch = branch as usize;
            let piece = tokens.piece(branch, plan.length[branch] as usize);
            let shared = if shares { common(previous, piece.ids) } else { 0 };
            row.write(piece, shared, first_term[branch]);
            previous = piece.ids;
        }
        row.end(multiple);
    }
    Ok(())
}

fn check(tokens: Tokens<'_>, plan: Plan<'_>, multiple: usize) -> Result<()> {
    let count = plan.length.len();
    check_length("trainable", tokens.trainable.len(), tokens.ids.len())?;
    check_length("inv_temperature", tokens.inv_temperature.len(), tokens.ids.len())?;
    check_length("cu_seqlens", tokens.cu_seqlens.len(), count + 1)?;
    for (name, column) in [("step", plan.step), ("row", plan.row), ("order", plan.order)] {
        check_length(name, column.len(), count)?;
    }
    check_length("shared", plan.shared.len(), plan.rows.len())?;
    check_inside(tokens.cu_seqlens, plan.length, tokens.ids.len())?;
    if plan.step.iter().any(|&step| step >= plan.rows.len() as i32) {
        return Err(Error::new(
            Kind::Argument,
            "TG-PACK-508",
            format!("a branch is in a step beyond the {}", plan.rows.len()),
        ));
    }
    let starts_with_term = |n: usize| tokens.trainable.get(tokens.cu_seqlens[n] as usize) == Some(&true);
    if let Some(n) = (0..count).find(|&n| plan.step[n] >= 0 && plan.length[n] > 0 && starts_with_term(n)) {
        return Err(Error::new(Kind::Argument, "TG-PACK-509", format!("the first token of branch {n} is trainable"))
            .why("No token precedes it, so no hidden state predicts it"));
    }
    if multiple == 0 {
        return Err(Error::new(Kind::Argument, "TG-PACK-510", "pad_to_multiple_of is 0").fix("Pass 1 for no padding"));
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

/// Returns the number of trained tokens (terms) of each branch that is laid out.
fn terms_of(tokens: Tokens<'_>, plan: Plan<'_>) -> Vec<i64> {
    let count = |n: usize| {
        let start = tokens.cu_seqlens[n] as usize;
        tokens.trainable[start..start + plan.length[n].max(0) as usize].iter().filter(|&&term| term).count() as i64
    };
    (0..plan.length.len()).map(|n| if plan.step[n] < 0 { 0 } else { count(n) }).collect()
}

/// Fills `origin`, `branch` and `cu_terms`. Returns the index, within its step, of each branch's first term.
fn number_terms(out: &mut Layout, tokens: Tokens<'_>, plan: Plan<'_>, terms: &[i64]) -> Vec<i32> {
    let mut per_step = vec![0; plan.rows.len()];
    let mut first = vec![0; plan.length.len()];
    let is_local = |&n: &usize| plan.step[n] >= 0;
    for n in (0..plan.length.len()).filter(is_local) {
        first[n] = per_step[plan.step[n] as usize] as i32;
        per_step[plan.step[n] as usize] += terms[n];
    }
    out.cu_terms = offsets(per_step.into_iter());
    let total = *out.cu_terms.last().unwrap_or(&0) as usize;
    let mut by_step: Vec<usize> = (0..plan.length.len()).filter(is_local).collect();
    by_step.sort_by_key(|&n| plan.step[n]);
    out.origin.reserve(total);
    out.branch.reserve(total);
    for n in by_step {
        let start = tokens.cu_seqlens[n];
        let piece = tokens.piece(n, plan.length[n].max(0) as usize);
        for run in runs(piece.trainable) {
            out.origin.extend(start + run.start as i64..start + run.end as i64);
        }
        out.branch.resize(out.origin.len(), n as i32);
    }
    first
}

/// Returns the branches of each row, in order.
fn branches_by_row(cu_rows: &[i64], plan: Plan<'_>) -> Result<Vec<Vec<u32>>> {
    let mut by_row = vec![Vec::new(); cu_rows.last().map_or(0, |&rows| rows as usize)];
    for n in (0..plan.step.len()).filter(|&n| plan.step[n] >= 0) {
        let (step, row) = (plan.step[n], plan.row[n]);
        let (first, end) = (cu_rows[step as usize], cu_rows[step as usize + 1]);
        let place = first + i64::from(row);
        if row < 0 || place >= end {
            return Err(Error::new(
                Kind::Argument,
                "TG-PACK-511",
                format!("branch {n} is in row {row} of step {step}, which has {}", end - first),
            ));
        }
        by_row[place as usize].push(n as u32);
    }
    for branches in &mut by_row {
        branches.sort_by_key(|&branch| plan.order[branch as usize]);
    }
    Ok(by_row)
}

/// A stretch of the path from the root to the last written token: depths from `depth` on are at positions from `place`
/// on.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    depth: usize,
    place: usize,
}

/// One row while it is written, in pre-order.
#[derive(Debug)]
struct Row<'a> {
    out: &'a mut Layout,
    /// Start of the row in the tokens, and in the logit rows (head rows).
    start: usize,
    head: usize,
    /// The path, and its depth.
    path: Vec<Stretch>,
    depth: usize,
    /// True if branches may share prefixes.
    shares: bool,
    /// For each token of the row, the head row that predicts it; -1 if there is none yet. Empty if nothing is shared.
    heads: Vec<i32>,
    /// Further head rows of a token, by the bits of their inverse temperature.
    others: HashMap<(usize, u32), i32>,
}

impl<'a> Row<'a> {
    fn begin(out: &'a mut Layout, shares: bool) -> Self {
        let (start, head) = (out.ids.len(), out.predictor.len());
        Self { out, start, head, path: Vec::new(), depth: 0, shares, heads: Vec::new(), others: HashMap::new() }
    }

    fn filled(&self) -> usize {
        self.out.ids.len() - self.start
    }

    /// Appends a branch whose first `shared` tokens are those of the path.
    fn write(&mut self, piece: Piece<'_>, shared: usize, first_term: i32) {
        self.climb(shared);
        let (mut term, mut stretch) = (first_term, 0);
        for depth in runs(&piece.trainable[..shared]).flatten() {
            // Terms come by depth, so the stretch of a term's predecessor is never before that of the previous term.
            let read = self.place(depth - 1, &mut stretch);
            let token = self.place(depth, &mut stretch.clone());
            let head = self.head_row(token, read, piece.ids[depth], piece.inv_temperature[depth]);
            self.out.row.push(head);
            self.out.term.push(term);
            term += 1;
        }
        let length = piece.ids.len();
        if shared < length {
            let above = shared.checked_sub(1).map(|depth| self.place(depth, &mut stretch));
            let here = self.filled();
            self.path.push(Stretch { depth: shared, place: here });
            self.depth = length;
            self.out.ids.extend_from_slice(&piece.ids[shared..]);
            self.out.positions.extend(shared as i32..length as i32);
            // Correct if nothing follows in the subtree; otherwise `climb` overwrites it.
            self.out.tree_end.resize(self.out.ids.len(), self.filled() as i32);
            self.write_terms(piece, shared, here, above, term);
        }
    }

    /// Appends the terms of tokens that no earlier branch had, from depth `shared` on. Each gets its own head row.
    fn write_terms(&mut self, piece: Piece<'_>, shared: usize, here: usize, above: Option<usize>, first_term: i32) {
        if self.shares {
            self.heads.resize(self.filled(), -1);
        }
        let mut term = first_term;
        for run in runs(&piece.trainable[shared..]) {
            let (count, head) = (run.len() as i32, (self.out.predictor.len() - self.head) as i32);
            if self.shares {
                let heads = &mut self.heads[here + run.start..here + run.end];
                heads.iter_mut().zip(head..).for_each(|(slot, head)| *slot = head);
            }
            let mut first = (here + run.start) as i32 - 1;
            if run.start == 0 {
                // The first token of a branch is never a term, so `above` exists. The next term is read at this token.
                self.out.predictor.push(above.unwrap_or(here) as i32);
                first += 1;
            }
            self.out.predictor.extend(first..(here + run.end) as i32 - 1);
            let terms = shared + run.start..shared + run.end;
            self.out.target.extend_from_slice(&piece.ids[terms.clone()]);
            self.out.inv_temperature.extend_from_slice(&piece.inv_temperature[terms]);
            self.out.row.extend(head..head + count);
            self.out.term.extend(term..term + count);
            term += count;
        }
    }

    /// Leaves all nodes deeper than `depth`: their subtrees end here.
    fn climb(&mut self, depth: usize) {
        let end = self.filled();
        while let Some(last) = self.path.last().copied().filter(|_| self.depth > depth) {
            let remaining = last.depth.max(depth);
            let from = self.start + last.place + (remaining - last.depth);
            if self.shares {
                self.out.tree_end[from..from + (self.depth - remaining)].fill(end as i32);
            }
            self.depth = remaining;
            if remaining == last.depth {
                self.path.pop();
            }
        }
    }

    /// Returns the position of the path's token at `depth`. The search starts at `stretch` and updates it.
    fn place(&self, depth: usize, stretch: &mut usize) -> usize {
        while self.path.get(*stretch + 1).is_some_and(|next| next.depth <= depth) {
            *stretch += 1;
        }
        self.path[*stretch].place + (depth - self.path[*stretch].depth)
    }

    /// Returns the head row that predicts a token at a temperature: the existing one, or a new one.
    fn head_row(&mut self, token: usize, read: usize, target: i32, inv_temperature: f32) -> i32 {
        let new = (self.out.predictor.len() - self.head) as i32;
        let first = self.heads[token];
        let head = if first < 0 {
            self.heads[token] = new;
            new
        } else if self.out.inv_temperature[self.head + first as usize].to_bits() == inv_temperature.to_bits() {
            first
        } else {
            *self.others.entry((token, inv_temperature.to_bits())).or_insert(new)
        };
        if head == new {
            self.out.predictor.push(read as i32);
            self.out.target.push(target);
            self.out.inv_temperature.push(inv_temperature);
        }
        head
    }

    /// Ends every subtree, and pads with tokens that attend only to themselves.
    fn end(mut self, multiple: usize) {
        self.climb(0);
        let (filled, padded) = (self.filled(), self.filled().max(1).next_multiple_of(multiple));
        let out = self.out;
        out.ids.resize(self.start + padded, 0);
        out.positions.resize(self.start + padded, 0);
        out.tree_end.extend((filled as i32..padded as i32).map(|k| k + 1));
        out.cu_tokens.push(out.ids.len() as i64);
        out.cu_logit_rows.push(out.predictor.len() as i64);
        out.cu_row_terms.push(out.row.len() as i64);
    }
}

/// Per-token arrays of the branches.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// [T] token ids.
    pub ids: &'a [i32],
    /// [T] true if the token is trained (a term).
    pub trainable: &'a [bool],
    /// [T] 1/temperature of sampling if the logprobs are of that distribution, else 1.
    pub inv_temperature: &'a [f32],
    /// [N+1] branch n is tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: &'a [i64],
}

/// The placement of the branches of one rank.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// [N] number of tokens laid out of each branch.
    pub length: &'a [i32],
    /// [N] its step; -1 for branches of other ranks.
    pub step: &'a [i32],
    /// [N] its row in the step.
    pub row: &'a [i32],
    /// [N] sort key of the branches in a row; in a step that shares prefixes, their lexicographic order.
    pub order: &'a [i32],
    /// [steps] number of rows of each step. If another rank fills more rows, the additional rows are empty.
    pub rows: &'a [i32],
    /// [steps] true if branches of a row with common prefixes are laid out as a tree.
    pub shared: &'a [bool],
}

/// All rows of one rank, step after step and row after row. Indices within a row or a step start at 0.
#[derive(Debug, Default)]
pub struct Layout {
    /// [T] token ids; 0 for padding.
    pub ids: Vec<i32>,
    /// [T] depth in the tree; without sharing, this is the position in the branch.
    pub positions: Vec<i32>,
    /// [T] a query q of the row attends to key k iff `k <= q < tree_end[k]`.
    pub tree_end: Vec<i32>,
    /// [rows + 1] start of each row's tokens.
    pub cu_tokens: Vec<i64>,
    /// [U] the position in the row whose hidden state predicts the token. Head rows differ in this, `target` or
    /// `inv_temperature`.
    pub predictor: Vec<i32>,
    /// [U] the predicted token.
    pub target: Vec<i32>,
    /// [U] the input's value at the predicted token.
    pub inv_temperature: Vec<f32>,
    /// [m] head row of each term.
    pub row: Vec<i32>,
    /// [m] index of each term in its step.
    pub term: Vec<i32>,
    /// [rows + 1] start of each row's head rows.
    pub cu_logit_rows: Vec<i64>,
    /// [rows + 1] start of each row's terms.
    pub cu_row_terms: Vec<i64>,
    /// [steps + 1] start of each step's rows.
    pub cu_rows: Vec<i64>,
    /// [M] for each step's terms, ordered by branch and position: the index of the term's token in the input.
    pub origin: Vec<i64>,
    /// [M] its branch.
    pub branch: Vec<i32>,
    /// [steps + 1] start of each step's terms.
    pub cu_terms: Vec<i64>,
}

/// The part of one branch that is laid out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub ids: &'a [i32],
    pub trainable: &'a [bool],
    pub inv_temperature: &'a [f32],
}

impl<'a> Tokens<'a> {
    pub(super) fn piece(&self, branch: usize, length: usize) -> Piece<'a> {
        let start = self.cu_seqlens[branch] as usize;
        let range = start..start + length;
        Piece {
            ids: &self.ids[range.clone()],
            trainable: &self.trainable[range.clone()],
            inv_temperature: &self.inv_temperature[range],
        }
    }
}

impl Layout {
    pub(super) fn clear(&mut self) {
        let Self { ids, positions, tree_end, predictor: read, target, row, term, branch, .. } = self;
        for column in [ids, positions, tree_end, read, target, row, term, branch] {
            column.clear();
        }
        for column in [&mut self.cu_tokens, &mut self.cu_logit_rows, &mut self.cu_row_terms, &mut self.origin] {
            column.clear();
        }
        self.inv_temperature.clear();
    }

    pub(super) fn reserve(&mut self, plan: Plan<'_>, terms: &[i64]) {
        let local = plan.length.iter().zip(plan.step).filter(|&(_, &step)| step >= 0);
        let tokens = local.map(|(&length, _)| length.max(0) as usize).sum();
        let heads = terms.iter().sum::<i64>() as usize;
        for column in [&mut self.ids, &mut self.positions, &mut self.tree_end] {
            column.reserve(tokens);
        }
        for column in [&mut self.predictor, &mut self.target, &mut self.row, &mut self.term] {
            column.reserve(heads);
        }
        self.inv_temperature.reserve(heads);
    }
}

/// The terms of a layout as runs of neighbors, used to copy columns.
#[derive(Debug)]
pub struct Gather {
    /// Runs of terms with consecutive tokens, each with its first token.
    tokens: Vec<(Range<usize>, usize)>,
    /// Runs of terms of one branch, each with the branch.
    branches: Vec<(Range<usize>, usize)>,
}

impl Gather {
    /// Builds the runs for terms with these tokens and branches (`origin` and `branch` of a [`super::Layout`]).
    pub fn of(origin: &[i64], branch: &[i32]) -> Self {
        Self { tokens: entry_runs(origin, 1), branches: entry_runs(branch, 0) }
    }

    /// Copies the values of the terms' tokens.
    pub fn of_tokens<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, first)) in self.tokens.iter().enumerate() {
            cancel::check_every_16384(round);
            out[terms.clone()].copy_from_slice(&values[*first..first + terms.len()]);
        }
    }

    /// Copies the values of the terms' branches.
    pub fn of_branches<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, branch)) in self.branches.iter().enumerate() {
            cancel::check_every_16384(round);
            out[terms.clone()].fill(values[*branch]);
        }
    }
}

/// Returns the longest runs in which each index is `step` above the previous one.
fn entry_runs<T: Copy + Into<i64>>(indices: &[T], step: i64) -> Vec<(Range<usize>, usize)> {
    const CHUNK: usize = 32;
    let (mut start, mut runs) = (0, Vec::new());
    while let Some(&first) = indices.get(start) {
        let tail = &indices[start..];
        let continues = |(&index, place): (&T, usize)| index.into() == first.into() + step * place as i64;
        let full_chunks = tail.as_chunks::<CHUNK>().0.iter().zip((0..).step_by(CHUNK));
        let full_chunks = CHUNK
            * full_chunks
                .take_while(|(chunk, from)| chunk.iter().zip(*from..).fold(true, |all, next| all & continues(next)))
                .count();
        let run =
            full_chunks + tail[full_chunks..].iter().zip(full_chunks..).take_while(|&next| continues(next)).count();
        runs.push((start..start + run, first.into() as usize));
        start += run;
    }
    runs
}

/// Returns the ranges in which flags are set, as maximal runs, ascending.
pub fn runs(flags: &[bool]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + count_leading(&flags[at..], false);
        at = start + count_leading(&flags[start..], true);
        (start < at).then_some(start..at)
    })
}

/// Counts the leading flags that are equal to `which`.
fn count_leading(flags: &[bool], which: bool) -> usize {
    const CHUNK: usize = 64;
    let differs = |chunk: &[bool]| chunk.iter().map(|&flag| flag ^ which).fold(false, |any, other| any | other);
    let same = CHUNK * flags.chunks_exact(CHUNK).take_while(|chunk| !differs(chunk)).count();
    same + flags[same..].iter().take_while(|&&flag| flag == which).count()
}

#[cfg(test)]
mod columns_tests {
    use super::*;

    #[test]
    fn columns_are_those_of_each_term_alone() {
        let origin: Vec<i64> = (3..80).chain(90..95).chain(2..4).collect();
        let branch: Vec<i32> = (0..84).map(|term| i32::from(term < 70)).collect();
        let (tokens, branches): (Vec<i32>, _) = ((0..100).map(|token| token * 7).collect(), [5_i64, 6]);
        let gather = Gather::of(&origin, &branch);
        let (mut by_token, mut by_branch) = (vec![0; 84], vec![0; 84]);
        gather.of_tokens(&tokens, &mut by_token);
        gather.of_branches(&branches, &mut by_branch);
        assert_eq!(by_token, origin.iter().map(|&token| token as i32 * 7).collect::<Vec<_>>());
        assert_eq!(by_branch, branch.iter().map(|&branch| branches[branch as usize]).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod runs_tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_cover_exactly_the_set_flags(lengths in prop::collection::vec(0usize..200, 0..8), first in any::<bool>()) {
            let flags: Vec<bool> = lengths.iter().enumerate().flat_map(|(n, &length)| vec![first ^ (n % 2 == 1); length]).collect();
            let set: Vec<usize> = (0..flags.len()).filter(|&at| flags[at]).collect();
            prop_assert_eq!(runs(&flags).flatten().collect::<Vec<_>>(), set);
            let ends: Vec<usize> = runs(&flags).map(|run| run.end).collect();
            prop_assert!(runs(&flags).skip(1).zip(ends).all(|(run, end)| run.start > end));
        }
    }
}
