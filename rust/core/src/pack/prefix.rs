//! Sorts branches by their ids and measures the common prefixes of neighbors.

use crate::cancel;

/// Chunk in which two branches are compared, each with one memory comparison.
const CHUNK: usize = 64;

/// Returns the length of the common prefix of two branches.
pub fn common(a: &[i32], b: &[i32]) -> usize {
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK));
    let equal = CHUNK * chunks.take_while(|(a, b)| a == b).count();
    equal + a[equal..].iter().zip(&b[equal..]).take_while(|(a, b)| a == b).count()
}

/// One entry of the sorted order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The branch at this position.
    pub branch: u32,
    /// Length of its common prefix with the previous branch; 0 for the first.
    pub shared: u32,
}

/// Sorts branches lexicographically by `text`. A prefix comes before its extensions, and equal branches keep their
/// order.
///
/// This is a merge sort that carries common prefixes along, so that no token is compared twice. It takes O(tokens + n
/// log n) time.
///
/// Source: Ng and Kakehi 2008, "Merging string sequences by longest common prefixes", IPSJ Digital Courier 4.
pub fn sorted<'a>(branches: &[u32], text: impl Fn(u32) -> &'a [i32]) -> Vec<Entry> {
    let mut from: Vec<Entry> = branches.iter().map(|&branch| Entry { branch, shared: 0 }).collect();
    let mut to = Vec::with_capacity(from.len());
    let mut width = 1;
    while width < from.len() {
        to.clear();
        for pair in from.chunks(2 * width) {
            let (a, b) = pair.split_at(width.min(pair.len()));
            merge(a, b, &mut to, &text);
        }
        std::mem::swap(&mut from, &mut to);
        width *= 2;
    }
    from
}

/// Merges two runs. `shared` of a run's head is the length of its common prefix with the last written entry.
fn merge<'a>(mut a: &[Entry], mut b: &[Entry], out: &mut Vec<Entry>, text: &impl Fn(u32) -> &'a [i32]) {
    let (mut shared_a, mut shared_b) = (0, 0);
    while let (Some(x), Some(y)) = (a.first(), b.first()) {
        cancel::check_every_16384(out.len());
        let mut first_is_a = shared_a > shared_b;
        let (written_a, written_b) = (shared_a, shared_b);
        if shared_a == shared_b {
            let (x, y) = (text(x.branch), text(y.branch));
            let start = shared_a as usize;
            let common_length = start + common(&x[start..], &y[start..]);
            first_is_a = common_length == x.len() || (common_length < y.len() && x[common_length] < y[common_length]);
            let loser = if first_is_a { &mut shared_b } else { &mut shared_a };
            *loser = common_length as u32;
        }
        if first_is_a {
            out.push(Entry { branch: x.branch, shared: written_a });
            a = &a[1..];
            shared_a = a.first().map_or(0, |next| next.shared);
        } else {
            out.push(Entry { branch: y.branch, shared: written_b });
            b = &b[1..];
            shared_b = b.first().map_or(0, |next| next.shared);
        }
    }
    for (remaining, shared) in [(a, shared_a), (b, shared_b)] {
        if let Some((first, others)) = remaining.split_first() {
            out.push(Entry { branch: first.branch, shared });
            out.extend_from_slice(others);
        }
    }
}

/// The minimum of a growing list from any position on: the common prefix of two entries that are not adjacent.
#[derive(Debug, Default)]
pub struct RunningMin {
    /// Positions and values, both ascending. A value with a smaller later one can never be the minimum again.
    lows: Vec<(usize, u32)>,
}

impl RunningMin {
    /// Adds the value at the next position.
    pub fn push(&mut self, place: usize, value: u32) {
        while self.lows.last().is_some_and(|&(_, low)| low >= value) {
            self.lows.pop();
        }
        self.lows.push((place, value));
    }

    /// Returns the minimum of the values after `place`.
    pub fn after(&self, place: usize) -> u32 {
        let first = self.lows.partition_point(|&(at, _)| at <= place);
        self.lows.get(first).map_or(0, |&(_, low)| low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Branches over few ids, so that long common prefixes and equal branches are frequent.
    fn texts() -> impl Strategy<Value = Vec<Vec<i32>>> {
        let branch = (0usize..4, prop::collection::vec(-1i32..2, 0..6)).prop_map(|(stem, tail)| {
            let mut ids = vec![7; stem * 50];
            ids.extend(tail);
            ids
        });
        prop::collection::vec(branch, 0..30)
    }

    fn plain_common(a: &[i32], b: &[i32]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    proptest! {
        #[test]
        fn the_order_is_that_of_a_stable_sort_and_neighbours_share_what_they_share(texts in texts()) {
            let branches: Vec<u32> = (0..texts.len() as u32).collect();
            let order = sorted(&branches, |branch| &texts[branch as usize]);
            let mut plain = branches;
            plain.sort_by(|&a, &b| texts[a as usize].cmp(&texts[b as usize]));
            prop_assert_eq!(order.iter().map(|entry| entry.branch).collect::<Vec<_>>(), plain);
            prop_assert!(order.first().is_none_or(|first| first.shared == 0));
            for pair in order.windows(2) {
                let (a, b) = (&texts[pair[0].branch as usize], &texts[pair[1].branch as usize]);
                prop_assert_eq!(pair[1].shared as usize, plain_common(a, b));
                prop_assert_eq!(common(a, b), plain_common(a, b));
            }
        }

        #[test]
        fn the_running_minimum_is_that_of_a_scan(values in prop::collection::vec(0u32..9, 1..40)) {
            let mut running = RunningMin::default();
            for (place, &value) in values.iter().enumerate() {
                running.push(place, value);
                for start in 0..place {
                    let least = values[start + 1..=place].iter().min().copied();
                    prop_assert_eq!(Some(running.after(start)), least);
                }
            }
        }
    }
}
