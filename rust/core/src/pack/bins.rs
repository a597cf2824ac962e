//! Bin packing of branches into rows: best fit from the leaves of the prefix tree to its root.

use crate::cancel::{check_every_16384, sort_by_key};
use std::cmp::Reverse;

/// A unit that must be in one row: a branch, or all branches of a trace.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// Number of its tokens by itself. Each prefix of its branches counts once if prefixes are shared.
    pub tokens: usize,
    /// Length of its common prefix with the previous unit; 0 if prefixes are not shared.
    pub shared: usize,
}

/// Units that will be in one row: a list linked through `next`.
#[derive(Debug, Clone, Copy)]
struct Bundle {
    tokens: usize,
    first: u32,
    last: u32,
}

/// A node of the prefix tree: the units below the tokens with which all of them start.
#[derive(Debug)]
struct Node {
    depth: usize,
    bundles: Vec<Bundle>,
}

/// Returns the row of each unit, and the number of rows.
///
/// Units come in lexicographic order (in any order if prefixes are not shared). Units with the longest common prefix
/// are combined first. A node of the prefix tree joins the bundles of its children by best fit, longest first, into as
/// few as the budget allows. Its own prefix counts once in each bundle. The root's bundles are the rows, so units that
/// share nothing are placed by best fit decreasing. The tokens of every unit must be at most `budget`.
pub fn rows_of(units: &[Unit], budget: usize, fit: &mut BestFit) -> (Vec<u32>, usize) {
    let mut next: Vec<Option<u32>> = vec![None; units.len()];
    let mut open = vec![Node { depth: 0, bundles: Vec::new() }];
    for (place, unit) in (0u32..).zip(units) {
        check_every_16384(place as usize);
        close(&mut open, unit.shared, budget, fit, &mut next);
        if let Some(node) = open.last_mut() {
            node.bundles.push(Bundle { tokens: unit.tokens, first: place, last: place });
        }
    }
    close(&mut open, 0, budget, fit, &mut next);
    let rows = open.pop().map_or_else(Vec::new, |root| join(root, budget, fit, &mut next));
    let mut row_of = vec![0; units.len()];
    for (row, bundle) in (0u32..).zip(&rows) {
        let mut member = Some(bundle.first);
        while let Some(unit) = member {
            row_of[unit as usize] = row;
            member = next[unit as usize];
        }
    }
    (row_of, rows.len())
}

/// Closes the nodes deeper than `depth` and leaves one of that depth open. It contains the previous unit.
fn close(open: &mut Vec<Node>, depth: usize, budget: usize, fit: &mut BestFit, next: &mut [Option<u32>]) {
    while let Some(node) = open.pop_if(|node| node.depth > depth) {
        let bundles = join(node, budget, fit, next);
        match open.last_mut() {
            Some(above) if above.depth >= depth => above.bundles.extend(bundles),
            _ => open.push(Node { depth, bundles }),
        }
    }
    if let Some(above) = open.last_mut().filter(|above| above.depth < depth) {
        let bundles = above.bundles.pop().into_iter().collect();
        open.push(Node { depth, bundles });
    }
}

/// Joins the bundles of a node to as few as best fit allows.
fn join(mut node: Node, budget: usize, fit: &mut BestFit, next: &mut [Option<u32>]) -> Vec<Bundle> {
    let depth = node.depth;
    let suffix_tokens: usize = node.bundles.iter().map(|bundle| bundle.tokens - depth).sum();
    let mut joined: Vec<Option<Bundle>> = Vec::new();
    if depth + suffix_tokens <= budget {
        for bundle in node.bundles {
            joined.resize(1, None);
            append(&mut joined[0], bundle, depth, next);
        }
    } else {
        sort_by_key(&mut node.bundles, |bundle| (Reverse(bundle.tokens), bundle.first));
        fit.reset_to(budget - depth);
        for (round, bundle) in node.bundles.into_iter().enumerate() {
            check_every_16384(round);
            let row = fit.place(bundle.tokens - depth) as usize;
            joined.resize(joined.len().max(row + 1), None);
            append(&mut joined[row], bundle, depth, next);
        }
    }
    joined.into_iter().flatten().collect()
}

fn append(to: &mut Option<Bundle>, bundle: Bundle, depth: usize, next: &mut [Option<u32>]) {
    match to {
        Some(to) => {
            next[to.last as usize] = Some(bundle.first);
            to.last = bundle.last;
            to.tokens += bundle.tokens - depth;
        }
        None => *to = Some(bundle),
    }
}

const NONE: u32 = u32::MAX;

/// Best fit: each length goes to the row with the least sufficient free space, or to a new row if no row has enough.
///
/// The free spaces are stored in a bitset of 64-ary levels. A placement therefore touches a few words, regardless of
/// the number of rows. Among rows of equal free space the most recently changed one is used, so the result depends
/// only on the order of calls.
///
/// ```
/// use tracegrad_core::pack::BestFit;
/// let mut rows = BestFit::new(10);
/// assert_eq!([7, 6, 4, 3].map(|length| rows.place(length)), [0, 1, 1, 0]);
/// ```
#[derive(Debug)]
pub struct BestFit {
    capacity: usize,
    /// `levels[0]` has a bit per free space. A bit of `levels[i + 1]` is set if the word of `levels[i]` is not zero.
    levels: Vec<Vec<u64>>,
    /// For each free space, the row changed last among those that have it.
    newest: Vec<u32>,
    /// For each row, the next older row of equal free space.
    older: Vec<u32>,
}

impl BestFit {
    /// Creates a placement without rows. Each row has room for `capacity`.
    pub fn new(capacity: usize) -> Self {
        let mut levels = vec![vec![0; capacity / 64 + 1]];
        while let Some(words) = levels.last().map(Vec::len).filter(|&words| words > 1) {
            levels.push(vec![0; words.div_ceil(64)]);
        }
        Self { capacity, levels, newest: vec![NONE; capacity + 1], older: Vec::new() }
    }

    /// Returns the row for `length`, which must be at most the capacity.
    pub fn place(&mut self, length: usize) -> u32 {
        debug_assert!(length <= self.capacity);
        if let Some(free) = self.least_room(length) {
            let row = self.newest[free];
            let older = self.older[row as usize];
            self.newest[free] = older;
            if older == NONE {
                self.clear(free);
            }
            self.push(row, free - length);
            return row;
        }
        let row = self.older.len() as u32;
        self.older.push(NONE);
        self.push(row, self.capacity - length);
        row
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.older.len()
    }

    /// Removes all rows and keeps the memory.
    pub fn reset(&mut self) {
        while let Some(free) = self.least_room(0) {
            self.clear(free);
            self.newest[free] = NONE;
        }
        self.older.clear();
    }

    /// Removes all rows. New rows have the capacity `capacity`, which is limited to that of `new`.
    pub fn reset_to(&mut self, capacity: usize) {
        self.reset();
        self.capacity = capacity.min(self.newest.len() - 1);
    }

    fn push(&mut self, row: u32, free: usize) {
        if self.newest[free] == NONE {
            let mut index = free;
            for level in &mut self.levels {
                level[index / 64] |= 1 << (index % 64);
                index /= 64;
            }
        }
        self.older[row as usize] = self.newest[free];
        self.newest[free] = row;
    }

    fn clear(&mut self, free: usize) {
        let mut index = free;
        for level in &mut self.levels {
            level[index / 64] &= !(1 << (index % 64));
            if level[index / 64] != 0 {
                break;
            }
            index /= 64;
        }
    }

    /// Returns the least free space of at least `length` that some row has.
    fn least_room(&self, length: usize) -> Option<usize> {
        let mut index = length;
        for height in 0..self.levels.len() {
            let word = index / 64;
            let candidates = self.levels[height].get(word)? & (u64::MAX << (index % 64));
            if candidates != 0 {
                return Some(self.descend(height, word * 64 + candidates.trailing_zeros() as usize));
            }
            index = word + 1;
        }
        None
    }

    fn descend(&self, height: usize, mut index: usize) -> usize {
        for level in self.levels[..height].iter().rev() {
            index = index * 64 + level[index].trailing_zeros() as usize;
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_with_the_longest_shared_prefix_are_joined_first() {
        let check = |units: &[(usize, usize)], budget: usize, expected: &[u32]| {
            let inputs: Vec<Unit> = units.iter().map(|&(tokens, shared)| Unit { tokens, shared }).collect();
            assert_eq!(rows_of(&inputs, budget, &mut BestFit::new(budget)).0, expected, "{units:?} in {budget}");
        };
        // Without shared tokens: 6 opens row 0, 5 row 1, 4 fits row 0 exactly (free space 4 < 5), 3 then 2 fill row 1.
        check(&[(3, 0), (6, 0), (4, 0), (5, 0), (2, 0)], 10, &[1, 0, 0, 1, 1]);
        // Two groups of two: 8 tokens each, 6 of them shared. A group needs 6 + 2 + 2 = 10, a row by itself.
        let groups = [(8, 0), (8, 6), (8, 1), (8, 6)];
        check(&groups, 10, &[0, 0, 1, 1]);
        // With rows of 19 both groups need 1 + 9 + 9 = 19, because they share one token.
        check(&groups, 19, &[0; 4]);
        check(&groups, 18, &[0, 0, 1, 1]);
        // A group beyond the budget is split: 4 + 4 * 3 = 16 tokens in rows of 11: 4 + 3 + 3 = 10 fit, a third makes
        // 13.
        check(&[(7, 0), (7, 4), (7, 4), (7, 4)], 11, &[0, 0, 1, 1]);
        // Equal units need no additional space.
        check(&[(5, 0), (5, 5), (5, 5)], 5, &[0, 0, 0]);
        // a: 4; b: 6 sharing 2 with a; c: 9 sharing 5 with b; d: 3 sharing 1. Tree: 4 + 4 + 4 + 2 = 14.
        let nested = [(4, 0), (6, 2), (9, 5), (3, 1)];
        check(&nested, 14, &[0; 4]);
        // In rows of 10: b and c need 10; a and d 4 + 2.
        check(&nested, 10, &[1, 0, 0, 1]);
    }
}

#[cfg(test)]
mod fit_tests {
    use super::*;
    use proptest::prelude::*;

    /// The same rule without a bitset: scan every row; among equals the latest change wins.
    fn plain(capacity: usize, lengths: &[usize]) -> Vec<u32> {
        let (mut rows, mut clock): (Vec<(usize, usize)>, usize) = (Vec::new(), 0);
        let mut out = Vec::new();
        for &length in lengths {
            clock += 1;
            let best = (0..rows.len())
                .filter(|&row| rows[row].0 >= length)
                .min_by_key(|&row| (rows[row].0, usize::MAX - rows[row].1));
            let row = best.unwrap_or_else(|| {
                rows.push((capacity, clock));
                rows.len() - 1
            });
            rows[row] = (rows[row].0 - length, clock);
            out.push(row as u32);
        }
        out
    }

    proptest! {
        #[test]
        fn the_bitset_places_as_a_scan_of_all_rows_does(
            (capacity, lengths) in (1usize..10_000).prop_flat_map(|c| (Just(c), prop::collection::vec(0..=c, 0..200)))
        ) {
            let mut rows = BestFit::new(capacity);
            let placed: Vec<u32> = lengths.iter().map(|&length| rows.place(length)).collect();
            prop_assert_eq!(&placed, &plain(capacity, &lengths));
            rows.reset();
            let again: Vec<u32> = lengths.iter().map(|&length| rows.place(length)).collect();
            prop_assert_eq!(placed, again);
        }
    }

    #[test]
    fn a_length_of_the_whole_capacity_fills_a_row() {
        let mut rows = BestFit::new(4096);
        assert_eq!([4096, 4096, 1, 4095].map(|length| rows.place(length)), [0, 1, 2, 2]);
        assert_eq!(rows.rows(), 3);
    }
}
