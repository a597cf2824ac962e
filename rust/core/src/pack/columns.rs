//! Columns of terms gathered from those of tokens and of branches, each entry written once.

use crate::stop;
use std::ops::Range;

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
        Self { tokens: runs(origin, 1), branches: runs(branch, 0) }
    }

    /// The values of the terms' tokens.
    pub fn of_tokens<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, first)) in self.tokens.iter().enumerate() {
            stop::now_and_then(round);
            out[terms.clone()].copy_from_slice(&values[*first..first + terms.len()]);
        }
    }

    /// The values of the terms' branches.
    pub fn of_branches<T: Copy>(&self, values: &[T], out: &mut [T]) {
        for (round, (terms, branch)) in self.branches.iter().enumerate() {
            stop::now_and_then(round);
            out[terms.clone()].fill(values[*branch]);
        }
    }
}

/// The longest runs in which each index is `step` above the one before.
fn runs<T: Copy + Into<i64>>(indices: &[T], step: i64) -> Vec<(Range<usize>, usize)> {
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

#[cfg(test)]
mod tests {
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
