//! Per-token integers other than ids (routed experts, sampling masks), as columns next to the ids.
//!
//! A branch records which rows of which generation belong to which of its tokens. The numbers are copied
//! once, into the column of the complete set.

use super::branch::{Branch, Rows};
use crate::trace::{Extra, ExtraStart, Generation, Trace};
use std::sync::Arc;

/// Value of a token without a row in a column of fixed shape.
pub const NO_VALUE: i32 = -1;

/// Records which rows of generation `turn` belong to which tokens of `branch`. Its sampled tokens start at `body`.
///
/// A token keeps the first row it gets, which is the row of the call that sampled it. If filled logprobs are used, the
/// masks of `Filled` replace the recorded ones, which they include.
pub fn note(branch: &mut Branch<'_>, turn: usize, generation: &Generation, is_filled: bool) {
    let kept = kept_of(generation).filter(|_| is_filled);
    let is_replaced = |recorded: &Extra| kept.is_some_and(|kept| kept.name == recorded.name);
    let recorded = generation.extras.iter().enumerate().filter(|(_, recorded)| !is_replaced(recorded));
    for (extra, recorded) in recorded.chain(kept.map(|kept| (generation.extras.len(), kept))) {
        // Rows over the complete prompt are counted in recorded ids. Prompt edits may have changed how many of these are
        // in the branch.
        let prompt = generation.prompt.ids().map_or(branch.body, <[u32]>::len);
        let first = match recorded.first {
            ExtraStart::Prompt => branch.body as i64 - prompt as i64,
            ExtraStart::Sampled => branch.body as i64,
        };
        let earlier = branch.extras.iter().filter(|rows| rows.name == recorded.name);
        let start = earlier.map(|rows| rows.start + rows.count).max().unwrap_or(0).max(first.max(0) as usize);
        let end = (first + recorded.ends.len() as i64).clamp(0, branch.len() as i64) as usize;
        if end > start {
            let row = (start as i64 - first) as usize;
            let rows =
                Rows { name: recorded.name, turn: turn as u32, extra: extra as u32, start, row, count: end - start };
            branch.extras.push(rows);
        }
    }
}

/// Returns the masks of the filled logprobs: the extra after the recorded ones.
fn kept_of(generation: &Generation) -> Option<&Extra> {
    generation.filled.as_ref()?.kept.as_ref()
}

/// One named column over all tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Column {
    /// `routed_experts` or `sampling_mask`.
    pub name: &'static str,
    /// Shape of each row; empty if rows differ in length.
    pub shape: Vec<u32>,
    /// [T+1] offsets if rows differ in length: token t has values `offsets[t]..offsets[t + 1]`.
    pub offsets: Vec<i64>,
    /// The values of all rows, concatenated. A token without a row has [`NO_VALUE`] in a fixed shape and no values in
    /// a ragged column.
    pub values: Vec<i32>,
}

/// Returns one empty column for each name that occurs in a generation of `traces`. A column is ragged if rows of the
/// same name differ in shape. `is_filled` tells whether filled logprobs of a trace and generation are used.
pub fn columns(traces: &[Arc<Trace>], is_filled: impl Fn(usize, usize) -> bool) -> Vec<Column> {
    let mut columns: Vec<Column> = Vec::new();
    let generations = traces
        .iter()
        .enumerate()
        .flat_map(|(row, trace)| trace.generations.iter().enumerate().map(move |(turn, g)| (row, turn, g)));
    let extras = generations.flat_map(|(row, turn, generation)| {
        generation.extras.iter().chain(kept_of(generation).filter(|_| is_filled(row, turn)))
    });
    for extra in extras {
        match columns.iter_mut().find(|column| column.name == extra.name) {
            Some(column) if column.shape != extra.shape => column.shape.clear(),
            Some(_) => {}
            None => columns.push(Column { name: extra.name, shape: extra.shape.clone(), ..Column::default() }),
        }
    }
    for column in columns.iter_mut().filter(|column| column.shape.is_empty()) {
        column.offsets.push(0);
    }
    columns
}

impl Column {
    /// Appends the rows of a branch.
    pub fn push(&mut self, branch: &Branch<'_>, generations: &[Generation]) {
        let (mut at, name) = (0, self.name);
        for rows in branch.extras.iter().filter(|rows| rows.name == name) {
            self.skip(rows.start - at);
            at = rows.start + rows.count;
            let generation = &generations[rows.turn as usize];
            let Some(extra) = generation.extras.get(rows.extra as usize).or_else(|| kept_of(generation)) else { break };
            for row in rows.row..rows.row + rows.count {
                self.values.extend_from_slice(row_of(extra, row));
                if self.shape.is_empty() {
                    self.offsets.push(self.values.len() as i64);
                }
            }
        }
        self.skip(branch.len() - at);
    }

    /// Appends `count` tokens without a row.
    fn skip(&mut self, count: usize) {
        if self.shape.is_empty() {
            self.offsets.extend(std::iter::repeat_n(self.values.len() as i64, count));
        } else {
            let width: usize = self.shape.iter().map(|&size| size as usize).product();
            self.values.extend(std::iter::repeat_n(NO_VALUE, count * width));
        }
    }
}

fn row_of(extra: &Extra, row: usize) -> &[i32] {
    let start = if row == 0 { 0 } else { extra.ends[row - 1] as usize };
    extra.values.get(start..extra.ends[row] as usize).unwrap_or_default()
}
