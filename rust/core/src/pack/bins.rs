//! Bin packing of branches into rows: best fit from the leaves of the prefix tree to its root.

use crate::cancel::{now_and_then, sort_by_key};
use std::cmp::Reverse;

/// What must lie in one row: a branch, or all branches of a trace.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// Tokens it takes alone; each prefix of its branches once if prefixes are shared.
    pub tokens: usize,
    /// Tokens it begins with like the unit before it; 0 if prefixes are not shared.
    pub shared: usize,
}

/// Units that will lie in one row: a list through `next`.
#[derive(Debug, Clone, Copy)]
struct Bundle {
    tokens: usize,
    first: u32,
    last: u32,
}

/// A node of the prefix tree: what lies below the tokens that all of it begins with.
#[derive(Debug)]
struct Node {
    depth: usize,
    bundles: Vec<Bundle>,
}

/// The row of each unit, and how many rows there are.
///
/// Units come in lexicographic order (without shared prefixes: in any). What has the longest common prefix is
/// put together first: a node of the prefix tree joins the bundles of its children by best fit, longest first, into
/// as few as the budget allows, and its own prefix counts once in each. The root's bundles are the rows, so units that
/// share nothing are placed by best fit decreasing. Every unit's tokens must be at most `budget`.
pub fn rows_of(units: &[Unit], budget: usize, fit: &mut BestFit) -> (Vec<u32>, usize) {
    let mut next: Vec<Option<u32>> = vec![None; units.len()];
    let mut open = vec![Node { depth: 0, bundles: Vec::new() }];
    for (place, unit) in (0u32..).zip(units) {
        now_and_then(place as usize);
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

/// Closes the nodes deeper than `depth` and leaves one of that depth open, which holds the unit before.
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

/// The bundles of a node, as few as best fit makes of them.
fn join(mut node: Node, budget: usize, fit: &mut BestFit, next: &mut [Option<u32>]) -> Vec<Bundle> {
    let depth = node.depth;
    let beyond: usize = node.bundles.iter().map(|bundle| bundle.tokens - depth).sum();
    let mut joined: Vec<Option<Bundle>> = Vec::new();
    if depth + beyond <= budget {
        for bundle in node.bundles {
            joined.resize(1, None);
            append(&mut joined[0], bundle, depth, next);
        }
    } else {
        sort_by_key(&mut node.bundles, |bundle| (Reverse(bundle.tokens), bundle.first));
        fit.reset_to(budget - depth);
        for (round, bundle) in node.bundles.into_iter().enumerate() {
            now_and_then(round);
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

/// Best fit: each length goes to the row with the least sufficient room, a new row where none has enough.
///
/// Rooms are kept in a bitset of 64-ary levels, so a placement costs a few words whatever the number of rows. Among
/// rows of equal room the one changed last is taken, which makes the result a function of the order of calls alone.
///
/// ```
/// use tracegrad_core::pack::BestFit;
/// let mut rows = BestFit::new(10);
/// assert_eq!([7, 6, 4, 3].map(|length| rows.place(length)), [0, 1, 1, 0]);
/// ```
#[derive(Debug)]
pub struct BestFit {
    capacity: usize,
    /// `levels[0]` has a bit per room; a bit of `levels[i + 1]` says that a word of `levels[i]` is not zero.
    levels: Vec<Vec<u64>>,
    /// Per room, the row changed last among those that have it.
    newest: Vec<u32>,
    /// Per row, the next older row of equal room.
    older: Vec<u32>,
}

impl BestFit {
    /// No rows yet; each will hold `capacity`.
    pub fn new(capacity: usize) -> Self {
        let mut levels = vec![vec![0; capacity / 64 + 1]];
        while let Some(words) = levels.last().map(Vec::len).filter(|&words| words > 1) {
            levels.push(vec![0; words.div_ceil(64)]);
        }
        Self { capacity, levels, newest: vec![NONE; capacity + 1], older: Vec::new() }
    }

    /// The row for `length`, which must be at most the capacity.
    pub fn place(&mut self, length: usize) -> u32 {
        debug_assert!(length <= self.capacity);
        if let Some(room) = self.least_room(length) {
            let row = self.newest[room];
            let older = self.older[row as usize];
            self.newest[room] = older;
            if older == NONE {
                self.clear(room);
            }
            self.push(row, room - length);
            return row;
        }
        let row = self.older.len() as u32;
        self.older.push(NONE);
        self.push(row, self.capacity - length);
        row
    }

    /// How many rows were opened.
    pub fn rows(&self) -> usize {
        self.older.len()
    }

    /// Forgets the rows and keeps the memory.
    pub fn reset(&mut self) {
        while let Some(room) = self.least_room(0) {
            self.clear(room);
            self.newest[room] = NONE;
        }
        self.older.clear();
    }

    /// Forgets the rows; those to come hold `capacity`, at most that of `new`.
    pub fn reset_to(&mut self, capacity: usize) {
        self.reset();
        self.capacity = capacity.min(self.newest.len() - 1);
    }

    fn push(&mut self, row: u32, room: usize) {
        if self.newest[room] == NONE {
            let mut index = room;
            for level in &mut self.levels {
                level[index / 64] |= 1 << (index % 64);
                index /= 64;
            }
        }
        self.older[row as usize] = self.newest[room];
        self.newest[room] = row;
    }

    fn clear(&mut self, room: usize) {
        let mut index = room;
        for level in &mut self.levels {
            level[index / 64] &= !(1 << (index % 64));
            if level[index / 64] != 0 {
                break;
            }
            index /= 64;
        }
    }

    /// The least room of at least `length` that some row has.
    fn least_room(&self, length: usize) -> Option<usize> {
        let mut index = length;
        for height in 0..self.levels.len() {
            let word = index / 64;
            let here = self.levels[height].get(word)? & (u64::MAX << (index % 64));
            if here != 0 {
                return Some(self.descend(height, word * 64 + here.trailing_zeros() as usize));
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
    fn what_shares_most_is_put_together_first_and_closed_from_the_deepest() {
        let check = |units: &[(usize, usize)], budget: usize, expected: &[u32]| {
            let all: Vec<Unit> = units.iter().map(|&(tokens, shared)| Unit { tokens, shared }).collect();
            assert_eq!(rows_of(&all, budget, &mut BestFit::new(budget)).0, expected, "{units:?} in {budget}");
        };
        // Without shared tokens: 6 opens row 0, 5 row 1, 4 fits row 0 exactly (room 4 < 5), 3 then 2 fill row 1.
        check(&[(3, 0), (6, 0), (4, 0), (5, 0), (2, 0)], 10, &[1, 0, 0, 1, 1]);
        // Two groups of two: 8 tokens each, 6 of them shared. A group takes 6 + 2 + 2 = 10, a row alone.
        let groups = [(8, 0), (8, 6), (8, 1), (8, 6)];
        check(&groups, 10, &[0, 0, 1, 1]);
        // With room for 19 both groups take 1 + 9 + 9 = 19, as one token is theirs together.
        check(&groups, 19, &[0; 4]);
        check(&groups, 18, &[0, 0, 1, 1]);
        // A group beyond the budget is split: 4 + 4 * 3 = 16 tokens in rows of 11: 4 + 3 + 3 = 10 fit, a third 13.
        check(&[(7, 0), (7, 4), (7, 4), (7, 4)], 11, &[0, 0, 1, 1]);
        // Equal units take no room.
        check(&[(5, 0), (5, 5), (5, 5)], 5, &[0, 0, 0]);
        // a: 4; b: 6 sharing 2 with a; c: 9 sharing 5 with b; d: 3 sharing 1. Tree: 4 + 4 + 4 + 2 = 14.
        let nested = [(4, 0), (6, 2), (9, 5), (3, 1)];
        check(&nested, 14, &[0; 4]);
        // In rows of 10: b and c take 10; a and d 4 + 2.
        check(&nested, 10, &[1, 0, 0, 1]);
    }
}

#[cfg(test)]
mod fit_tests {
    use super::*;
    use proptest::prelude::*;

    /// The same rule in the plainest way: look at every row, latest change wins among equals.
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
