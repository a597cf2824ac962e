//! Branches to the flat columns of `Aligned`: each column is written once, from the stretches that branches hold.

use super::aligned::Aligned;
use super::branch::{Branch, Stretch};
use super::tier;
use crate::threads;

/// Writes the per-token columns of `branches`, end to end.
pub fn write(aligned: &mut Aligned, branches: &[Branch<'_>]) {
    let lay = Lay { branches, total: branches.iter().map(Branch::len).sum() };
    let Aligned { ids, source, trainable, rollout_logprobs, turn, version, tier, inv_temperature, .. } = aligned;
    threads::all(vec![
        Box::new(|| *ids = lay.whole(|branch, column| column.extend(branch.ids.iter().map(|&id| id as i32)))),
        Box::new(|| *rollout_logprobs = lay.by_stretch(f32::NAN, put_logprobs)),
        Box::new(|| *turn = lay.alike(-1, |stretch| stretch.sampling.turn)),
        Box::new(|| *version = lay.alike(-1, |stretch| stretch.sampling.version)),
        Box::new(|| *inv_temperature = lay.alike(1.0, |stretch| stretch.sampling.inv_temperature)),
        Box::new(|| *source = lay.whole(|branch, column| column.extend_from_slice(&branch.source))),
        Box::new(|| *trainable = lay.alike(false, |stretch| stretch.trained)),
        Box::new(|| *tier = lay.alike(tier::NONE, |stretch| stretch.tier)),
    ]);
}

struct Lay<'b, 'a> {
    branches: &'b [Branch<'a>],
    total: usize,
}

impl<'a> Lay<'_, 'a> {
    /// A column to which each branch appends itself.
    fn whole<T>(&self, put: impl Fn(&Branch<'a>, &mut Vec<T>)) -> Vec<T> {
        let mut column = Vec::with_capacity(self.total);
        self.branches.iter().for_each(|branch| put(branch, &mut column));
        column
    }

    /// A column that has `unsampled` outside of the stretches; `put` appends the tokens of one, so many.
    fn by_stretch<T: Copy>(&self, unsampled: T, put: impl Fn(&Stretch<'a>, usize, &mut Vec<T>)) -> Vec<T> {
        self.whole(|branch, column| {
            let before = column.len();
            for drawn in &branch.drawn {
                column.resize(before + drawn.start, unsampled);
                put(&drawn.stretch, drawn.end - drawn.start, column);
            }
            column.resize(before + branch.len(), unsampled);
        })
    }

    /// A column whose tokens have the same within a stretch.
    fn alike<T: Copy>(&self, unsampled: T, of: impl Fn(&Stretch<'a>) -> T) -> Vec<T> {
        self.by_stretch(unsampled, |stretch, count, column| column.resize(column.len() + count, of(stretch)))
    }
}

fn put_logprobs(stretch: &Stretch<'_>, count: usize, column: &mut Vec<f32>) {
    match &stretch.logprobs {
        Some(logprobs) => column.extend_from_slice(logprobs),
        None => column.resize(column.len() + count, f32::NAN),
    }
}
