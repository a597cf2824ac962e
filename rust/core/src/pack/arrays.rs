//! The flat arrays that rows are written from and to.

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
