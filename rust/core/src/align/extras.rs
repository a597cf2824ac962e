//! Per-token integers other than ids (routed experts, sampling masks), as columns beside the ids.
//!
//! A branch keeps which rows of which generation belong to which of its tokens; the numbers themselves are copied once,
//! into the column of the whole set.

use super::branch::{Branch, Rows};
use crate::trace::{Extra, ExtraStart, Generation, Trace};
use std::sync::Arc;

/// What a token without a row has in a column of fixed shape.
pub const NO_VALUE: i32 = -1;

/// Notes which rows of generation `turn` belong to which tokens of `branch`, whose sampled tokens stand at `body..`.
/// A token keeps the row that it got first: that of the call that sampled it.
pub fn note(branch: &mut Branch<'_>, turn: usize, generation: &Generation) {
    for (extra, found) in generation.extras.iter().enumerate() {
        // Rows over the whole prompt count the recorded ids; named edits may have changed how many stand in the branch.
        let prompt = generation.prompt.ids().map_or(branch.body, <[u32]>::len);
        let first = match found.first {
            ExtraStart::Prompt => branch.body as i64 - prompt as i64,
            ExtraStart::Sampled => branch.body as i64,
        };
        let same = branch.extras.iter().filter(|rows| rows.name == found.name);
        let start = same.map(|rows| rows.start + rows.count).max().unwrap_or(0).max(first.max(0) as usize);
        let end = (first + found.ends.len() as i64).clamp(0, branch.len() as i64) as usize;
        if end > start {
            let row = (start as i64 - first) as usize;
            let rows =
                Rows { name: found.name, turn: turn as u32, extra: extra as u32, start, row, count: end - start };
            branch.extras.push(rows);
        }
    }
}

/// One named column over all tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Column {
    /// `routed_experts` or `sampling_mask`.
    pub name: &'static str,
    /// Trailing shape of every row; empty where rows differ in length.
    pub shape: Vec<u32>,
    /// Of rows that differ in length, [T+1]: token t has values `offsets[t]..offsets[t + 1]`.
    pub offsets: Vec<i64>,
    /// All rows, end to end. A token without one has [`NO_VALUE`] in a fixed shape, nothing in a ragged one.
    pub values: Vec<i32>,
}

/// The columns that any generation of `traces` has rows for. Rows of unlike shapes under one name make it ragged.
pub fn columns(traces: &[Arc<Trace>]) -> Vec<Column> {
    let mut columns: Vec<Column> = Vec::new();
    for extra in traces.iter().flat_map(|trace| &trace.generations).flat_map(|generation| &generation.extras) {
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
            let extra = &generations[rows.turn as usize].extras[rows.extra as usize];
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
