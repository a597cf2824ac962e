//! Finds the equal bytes of two texts: common prefix and suffix first, then Myers' algorithm with a bound on the
//! edits.
//!
//! `similar` is not used: its Myers diff took 4 s for two unlike texts of 100 kB, and overflowed the stack of a test for 1
//! MB. These texts come from untrusted records.

/// Maximum number of edits. Beyond it, the middle parts of the two texts count as completely different.
const EDITS: usize = 1024;

/// A run of `length` equal bytes, at `left` in the first text and `right` in the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EqualRun {
    pub left: usize,
    pub right: usize,
    pub length: usize,
}

/// Returns the equal runs of `left` and `right`, in order. The time is linear in their lengths if they are similar.
pub fn equal_runs(left: &[u8], right: &[u8]) -> Vec<EqualRun> {
    let shorter = left.len().min(right.len());
    let prefix = left.iter().zip(right).take_while(|(a, b)| a == b).count();
    let suffix = left.iter().rev().zip(right.iter().rev()).take_while(|(a, b)| a == b).count().min(shorter - prefix);
    let mut runs = Vec::new();
    let mut add = |left, right, length| {
        if length > 0 {
            runs.push(EqualRun { left, right, length });
        }
    };
    add(0, 0, prefix);
    for run in myers(&left[prefix..left.len() - suffix], &right[prefix..right.len() - suffix]) {
        add(prefix + run.left, prefix + run.right, run.length);
    }
    add(left.len() - suffix, right.len() - suffix, suffix);
    runs
}

/// Runs the greedy forward algorithm of Myers (1986) with at most `EDITS` edits. Returns no runs if that is not
/// enough.
fn myers(left: &[u8], right: &[u8]) -> Vec<EqualRun> {
    let (n, m) = (left.len(), right.len());
    if n == 0 || m == 0 {
        return Vec::new();
    }
    let bound = EDITS.min(n + m);
    // furthest[k + bound + 1]: how far into `left` diagonal k (left - right) reaches.
    let mut furthest = vec![0_usize; 2 * bound + 3];
    let mut history: Vec<Vec<usize>> = Vec::new();
    for depth in 0..=bound {
        history.push(furthest[bound + 1 - depth..=bound + 1 + depth].to_vec());
        for k in (0..=2 * depth).step_by(2).map(|k| k as i64 - depth as i64) {
            let at = |k: i64| (k + bound as i64 + 1) as usize;
            let down = k == -(depth as i64) || (k != depth as i64 && furthest[at(k - 1)] < furthest[at(k + 1)]);
            let mut x = if down { furthest[at(k + 1)] } else { furthest[at(k - 1)] + 1 };
            let mut y = (x as i64 - k) as usize;
            while x < n && y < m && left[x] == right[y] {
                (x, y) = (x + 1, y + 1);
            }
            furthest[at(k)] = x;
            if x >= n && y >= m {
                return walk_back(&history, (n, m));
            }
        }
    }
    Vec::new()
}

/// Returns the diagonal runs of the path that ends at `end`.
fn walk_back(history: &[Vec<usize>], end: (usize, usize)) -> Vec<EqualRun> {
    let (mut x, mut y) = (end.0 as i64, end.1 as i64);
    let mut runs = Vec::new();
    for depth in (0..history.len() as i64).rev() {
        // history[depth] has diagonals -depth..=depth, with their values before this depth.
        let reach = |k: i64| history[depth as usize].get((k + depth) as usize).copied().unwrap_or(0) as i64;
        let k = x - y;
        let (from_x, from_y) = if depth == 0 {
            (0, 0)
        } else {
            let down = k == -depth || (k != depth && reach(k - 1) < reach(k + 1));
            let before = if down { k + 1 } else { k - 1 };
            (reach(before), reach(before) - before)
        };
        let step = i64::from(depth > 0);
        let start_x = if depth > 0 && x - y > from_x - from_y { from_x + step } else { from_x };
        let length = x - start_x;
        if length > 0 {
            runs.push(EqualRun { left: start_x as usize, right: (start_x - k) as usize, length: length as usize });
        }
        (x, y) = (from_x, from_y);
    }
    runs.reverse();
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_inserted_space_separates_two_equal_runs() {
        let runs = equal_runs(b"{\"a\":1}", b"{\"a\": 1}");
        assert_eq!(runs, [EqualRun { left: 0, right: 0, length: 5 }, EqualRun { left: 5, right: 6, length: 2 }]);
    }

    proptest! {
        #[test]
        fn stretches_are_equal_in_order_and_disjoint(left in "[ab]{0,24}", right in "[ab]{0,24}") {
            let (left, right) = (left.as_bytes(), right.as_bytes());
            let (mut x, mut y, mut total) = (0, 0, 0);
            for run in equal_runs(left, right) {
                prop_assert!(run.left >= x && run.right >= y);
                prop_assert_eq!(&left[run.left..run.left + run.length], &right[run.right..run.right + run.length]);
                (x, y, total) = (run.left + run.length, run.right + run.length, total + run.length);
            }
            prop_assert!(total <= left.len().min(right.len()));
            prop_assert!(left != right || total == left.len());
        }
    }
}
