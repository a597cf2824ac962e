//! Rows by the room they have left, and the row that fits a length best.

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
