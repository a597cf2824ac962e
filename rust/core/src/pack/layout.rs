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
/// Each row is padded with tokens that see only themselves to a multiple of `multiple`, and an empty one has one such
/// bucket. What two neighbours of a shared row begin with alike is compared here again, id by id.
///
/// # Errors
/// Slices that contradict one another.
pub fn lay(tokens: Tokens<'_>, plan: Plan<'_>, multiple: usize) -> Result<Layout> {
    let mut out = Layout::default();
    lay_into(tokens, plan, multiple, &mut out)?;
    Ok(out)
}

/// [`lay`] into a layout whose memory is used again.
///
/// # Errors
/// As [`lay`]; then the layout is empty or has a part of the rows.
pub fn lay_into(tokens: Tokens<'_>, plan: Plan<'_>, multiple: usize, out: &mut Layout) -> Result<()> {
    out.clear();
    check(tokens, plan, multiple)?;
    out.cu_rows = offsets(plan.rows.iter().map(|&count| count.max(0) as i64));
    let terms = terms_of(tokens, plan);
    let first_term = number_terms(out, tokens, plan, &terms);
    let by_row = branches_by_row(&out.cu_rows, plan)?;
    out.reserve(plan, &terms);
    for offsets in [&mut out.cu_tokens, &mut out.cu_heads, &mut out.cu_row_terms] {
        offsets.push(0);
    }
    for branches in &by_row {
        cancel::check();
        let shares = branches.first().is_some_and(|&branch| plan.shared[plan.step[branch as usize] as usize]);
        let mut row = Row::begin(out, shares);
        let mut before: &[i32] = &[];
        for &branch in branches {
            let branch = branch as usize;
            let piece = tokens.piece(branch, plan.length[branch] as usize);
            let shared = if shares { common(before, piece.ids) } else { 0 };
            row.write(piece, shared, first_term[branch]);
            before = piece.ids;
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
        return Err(Error::new(Kind::Argument, format!("a branch lies in a step beyond the {}", plan.rows.len())));
    }
    let starts = |n: usize| tokens.trainable.get(tokens.cu_seqlens[n] as usize) == Some(&true);
    if let Some(n) = (0..count).find(|&n| plan.step[n] >= 0 && plan.length[n] > 0 && starts(n)) {
        return Err(Error::new(Kind::Argument, format!("the first token of branch {n} is trainable"))
            .why("Nothing stands before it, so no hidden state predicts it"));
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
fn terms_of(tokens: Tokens<'_>, plan: Plan<'_>) -> Vec<i64> {
    let count = |n: usize| {
        let start = tokens.cu_seqlens[n] as usize;
        tokens.trainable[start..start + plan.length[n].max(0) as usize].iter().filter(|&&term| term).count() as i64
    };
    (0..plan.length.len()).map(|n| if plan.step[n] < 0 { 0 } else { count(n) }).collect()
}

/// Fills `origin`, `branch` and `cu_terms`; returns where in its step each branch's terms begin.
fn number_terms(out: &mut Layout, tokens: Tokens<'_>, plan: Plan<'_>, terms: &[i64]) -> Vec<i32> {
    let mut per_step = vec![0; plan.rows.len()];
    let mut first = vec![0; plan.length.len()];
    let mine = |&n: &usize| plan.step[n] >= 0;
    for n in (0..plan.length.len()).filter(mine) {
        first[n] = per_step[plan.step[n] as usize] as i32;
        per_step[plan.step[n] as usize] += terms[n];
    }
    out.cu_terms = offsets(per_step.into_iter());
    let total = *out.cu_terms.last().unwrap_or(&0) as usize;
    let mut by_step: Vec<usize> = (0..plan.length.len()).filter(mine).collect();
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

/// Branches of each row, in order.
fn branches_by_row(cu_rows: &[i64], plan: Plan<'_>) -> Result<Vec<Vec<u32>>> {
    let mut by_row = vec![Vec::new(); cu_rows.last().map_or(0, |&rows| rows as usize)];
    for n in (0..plan.step.len()).filter(|&n| plan.step[n] >= 0) {
        let (step, row) = (plan.step[n], plan.row[n]);
        let (first, end) = (cu_rows[step as usize], cu_rows[step as usize + 1]);
        let place = first + i64::from(row);
        if row < 0 || place >= end {
            return Err(Error::new(
                Kind::Argument,
                format!("branch {n} lies in row {row} of step {step}, which has {}", end - first),
            ));
        }
        by_row[place as usize].push(n as u32);
    }
    for branches in &mut by_row {
        branches.sort_by_key(|&branch| plan.order[branch as usize]);
    }
    Ok(by_row)
}

/// A stretch of the path from the root to the token written last: depths from `depth` on lie from `place` on.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    depth: usize,
    place: usize,
}

/// One row while it is written, in pre-order.
#[derive(Debug)]
struct Row<'a> {
    out: &'a mut Layout,
    /// Where the row begins in the tokens, and in the head rows.
    start: usize,
    head: usize,
    /// The path, and how deep it is.
    path: Vec<Stretch>,
    depth: usize,
    /// Whether branches may begin alike.
    shares: bool,
    /// Per token of the row the head row that predicts it, -1 where none does yet; empty if nothing is shared.
    heads: Vec<i32>,
    /// Further head rows of a token, by the bits of their inverse temperature.
    others: HashMap<(usize, u32), i32>,
}

impl<'a> Row<'a> {
    fn begin(out: &'a mut Layout, shares: bool) -> Self {
        let (start, head) = (out.ids.len(), out.read.len());
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
            // Terms come by depth, so the stretch of a term's predecessor is that of the last one or a later one.
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
            // Right as it stands where nothing follows below; `climb` says it again where something does.
            self.out.tree_end.resize(self.out.ids.len(), self.filled() as i32);
            self.write_terms(piece, shared, here, above, term);
        }
    }

    /// Appends the terms of tokens that no branch before had, from depth `shared` on: each has a head row of its own.
    fn write_terms(&mut self, piece: Piece<'_>, shared: usize, here: usize, above: Option<usize>, first_term: i32) {
        if self.shares {
            self.heads.resize(self.filled(), -1);
        }
        let mut term = first_term;
        for run in runs(&piece.trainable[shared..]) {
            let (count, head) = (run.len() as i32, (self.out.read.len() - self.head) as i32);
            if self.shares {
                let heads = &mut self.heads[here + run.start..here + run.end];
                heads.iter_mut().zip(head..).for_each(|(slot, head)| *slot = head);
            }
            let mut first = (here + run.start) as i32 - 1;
            if run.start == 0 {
                // No first token of a branch is a term, so what stands above is there; the next is read where this lies.
                self.out.read.push(above.unwrap_or(here) as i32);
                first += 1;
            }
            self.out.read.extend(first..(here + run.end) as i32 - 1);
            let terms = shared + run.start..shared + run.end;
            self.out.target.extend_from_slice(&piece.ids[terms.clone()]);
            self.out.inv_temperature.extend_from_slice(&piece.inv_temperature[terms]);
            self.out.row.extend(head..head + count);
            self.out.term.extend(term..term + count);
            term += count;
        }
    }

    /// Leaves what is deeper than `depth`: its subtree ends here.
    fn climb(&mut self, depth: usize) {
        let end = self.filled();
        while let Some(last) = self.path.last().copied().filter(|_| self.depth > depth) {
            let left = last.depth.max(depth);
            let from = self.start + last.place + (left - last.depth);
            if self.shares {
                self.out.tree_end[from..from + (self.depth - left)].fill(end as i32);
            }
            self.depth = left;
            if left == last.depth {
                self.path.pop();
            }
        }
    }

    /// Where the token of the path at `depth` lies; `stretch` is where the search begins and ends.
    fn place(&self, depth: usize, stretch: &mut usize) -> usize {
        while self.path.get(*stretch + 1).is_some_and(|next| next.depth <= depth) {
            *stretch += 1;
        }
        self.path[*stretch].place + (depth - self.path[*stretch].depth)
    }

    /// The head row that predicts a token at a temperature: the one there is, or a new one.
    fn head_row(&mut self, token: usize, read: usize, target: i32, inv_temperature: f32) -> i32 {
        let new = (self.out.read.len() - self.head) as i32;
        let first = self.heads[token];
        let found = if first < 0 {
            self.heads[token] = new;
            new
        } else if self.out.inv_temperature[self.head + first as usize].to_bits() == inv_temperature.to_bits() {
            first
        } else {
            *self.others.entry((token, inv_temperature.to_bits())).or_insert(new)
        };
        if found == new {
            self.out.read.push(read as i32);
            self.out.target.push(target);
            self.out.inv_temperature.push(inv_temperature);
        }
        found
    }

    /// Ends every subtree, and pads with tokens that see only themselves.
    fn end(mut self, multiple: usize) {
        self.climb(0);
        let (filled, to) = (self.filled(), self.filled().max(1).next_multiple_of(multiple));
        let out = self.out;
        out.ids.resize(self.start + to, 0);
        out.positions.resize(self.start + to, 0);
        out.tree_end.extend((filled as i32..to as i32).map(|k| k + 1));
        out.cu_tokens.push(out.ids.len() as i64);
        out.cu_heads.push(out.read.len() as i64);
        out.cu_row_terms.push(out.row.len() as i64);
    }
}

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

/// Where the branches of one rank lie.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// [N] tokens laid out of each branch.
    pub length: &'a [i32],
    /// [N] its step, -1 for branches of other ranks.
    pub step: &'a [i32],
    /// [N] its row in the step.
    pub row: &'a [i32],
    /// [N] rows list their branches by this; in a step that shares prefixes, lexicographically.
    pub order: &'a [i32],
    /// [steps] rows of each (more than the rank fills where another rank fills more: those rows are empty).
    pub rows: &'a [i32],
    /// [steps] whether branches of a row that begin alike are laid out as a tree.
    pub shared: &'a [bool],
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
    /// [U] the position in the row whose hidden state predicts the token. Rows of the head differ in this, `target` or
    /// `inv_temperature`.
    pub read: Vec<i32>,
    /// [U] the token predicted.
    pub target: Vec<i32>,
    /// [U] as given, at the predicted token.
    pub inv_temperature: Vec<f32>,
    /// [m] head row of each term.
    pub row: Vec<i32>,
    /// [m] place of each term in its step.
    pub term: Vec<i32>,
    /// [rows + 1] where each row's head rows begin.
    pub cu_heads: Vec<i64>,
    /// [rows + 1] where each row's terms begin.
    pub cu_row_terms: Vec<i64>,
    /// [steps + 1] where each step's rows begin.
    pub cu_rows: Vec<i64>,
    /// [M] of each step's terms, ordered by branch and position: the token of the input it is.
    pub origin: Vec<i64>,
    /// [M] its branch.
    pub branch: Vec<i32>,
    /// [steps + 1] where each step's terms begin.
    pub cu_terms: Vec<i64>,
}

/// What is laid out of one branch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub ids: &'a [i32],
    pub trainable: &'a [bool],
    pub inv_temperature: &'a [f32],
}

impl<'a> Tokens<'a> {
    pub(super) fn piece(&self, branch: usize, length: usize) -> Piece<'a> {
        let start = self.cu_seqlens[branch] as usize;
        let here = start..start + length;
        Piece {
            ids: &self.ids[here.clone()],
            trainable: &self.trainable[here.clone()],
            inv_temperature: &self.inv_temperature[here],
        }
    }
}

impl Layout {
    pub(super) fn clear(&mut self) {
        let Self { ids, positions, tree_end, read, target, row, term, branch, .. } = self;
        for column in [ids, positions, tree_end, read, target, row, term, branch] {
            column.clear();
        }
        for column in [&mut self.cu_tokens, &mut self.cu_heads, &mut self.cu_row_terms, &mut self.origin] {
            column.clear();
        }
        self.inv_temperature.clear();
    }

    pub(super) fn reserve(&mut self, plan: Plan<'_>, terms: &[i64]) {
        let mine = plan.length.iter().zip(plan.step).filter(|&(_, &step)| step >= 0);
        let tokens = mine.map(|(&length, _)| length.max(0) as usize).sum();
        let heads = terms.iter().sum::<i64>() as usize;
        for column in [&mut self.ids, &mut self.positions, &mut self.tree_end] {
            column.reserve(tokens);
        }
        for column in [&mut self.read, &mut self.target, &mut self.row, &mut self.term] {
            column.reserve(heads);
        }
        self.inv_temperature.reserve(heads);
    }
}

/// The terms of a layout as runs of neighbours, which columns are copied by.
#[derive(Debug)]
pub struct Gather {
    /// Runs of terms whose tokens stand together, each with its first token.
    tokens: Vec<(Range<usize>, usize)>,
    /// Runs of terms of one branch, each with the branch.
    branches: Vec<(Range<usize>, usize)>,
}

impl Gather {
    /// Of terms with these tokens and branches (`origin` and `branch` of a [`super::Layout`]).
    pub fn of(origin: &[i64], branch: &[i32]) -> Self {
        Self { tokens: entry_runs(origin, 1), branches: entry_runs(branch, 0) }
    }

    /// The values of the terms' tokens.
    pub fn of_tokens<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, first)) in self.tokens.iter().enumerate() {
            cancel::now_and_then(round);
            out[terms.clone()].copy_from_slice(&values[*first..first + terms.len()]);
        }
    }

    /// The values of the terms' branches.
    pub fn of_branches<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, branch)) in self.branches.iter().enumerate() {
            cancel::now_and_then(round);
            out[terms.clone()].fill(values[*branch]);
        }
    }
}

/// The longest runs in which each index is `step` above the one before.
fn entry_runs<T: Copy + Into<i64>>(indices: &[T], step: i64) -> Vec<(Range<usize>, usize)> {
    const CHUNK: usize = 32;
    let (mut start, mut found) = (0, Vec::new());
    while let Some(&first) = indices.get(start) {
        let rest = &indices[start..];
        let goes_on = |(&index, place): (&T, usize)| index.into() == first.into() + step * place as i64;
        let whole = rest.as_chunks::<CHUNK>().0.iter().zip((0..).step_by(CHUNK));
        let whole = CHUNK
            * whole
                .take_while(|(chunk, from)| chunk.iter().zip(*from..).fold(true, |all, next| all & goes_on(next)))
                .count();
        let run = whole + rest[whole..].iter().zip(whole..).take_while(|&next| goes_on(next)).count();
        found.push((start..start + run, first.into() as usize));
        start += run;
    }
    found
}

/// Where flags are set, as the longest runs of them, ascending.
pub fn runs(flags: &[bool]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + alike(&flags[at..], false);
        at = start + alike(&flags[start..], true);
        (start < at).then_some(start..at)
    })
}

/// How many flags at the beginning are `which`.
fn alike(flags: &[bool], which: bool) -> usize {
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
        fn they_cover_what_is_set_and_nothing_else(lengths in prop::collection::vec(0usize..200, 0..8), first in any::<bool>()) {
            let flags: Vec<bool> = lengths.iter().enumerate().flat_map(|(n, &length)| vec![first ^ (n % 2 == 1); length]).collect();
            let set: Vec<usize> = (0..flags.len()).filter(|&at| flags[at]).collect();
            prop_assert_eq!(runs(&flags).flatten().collect::<Vec<_>>(), set);
            let ends: Vec<usize> = runs(&flags).map(|run| run.end).collect();
            prop_assert!(runs(&flags).skip(1).zip(ends).all(|(run, end)| run.start > end));
        }
    }
}
