//! Replays penalties and biases: which logits of a trained token they changed, and how.
//!
//! vLLM changes the logit x of an id, in this order: `x + bias`; then, if the id is in the prompt or in the answer so far,
//! `x / repetition` if x is positive and `x * repetition` otherwise; then `x - frequency * count - presence`, for an id
//! that occurs `count` times in the answer so far. Source: vllm 0.32, `model_executor/layers/utils.py`.

use super::check::check_length;
use crate::{Error, Kind, Result, cancel};
use std::collections::HashMap;

/// Arrays of sequences, and of the generations with penalties.
#[derive(Debug, Clone, Copy)]
pub struct Penalized<'a> {
    /// [T] token ids.
    pub ids: &'a [i32],
    /// [N+1] branch n is tokens `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: &'a [i64],
    /// [T] the generation of its trace that sampled a token; -1 if it was not sampled.
    pub turn: &'a [i32],
    /// [P] the three penalties.
    pub repetition: &'a [f32],
    /// As `repetition`.
    pub presence: &'a [f32],
    /// As `repetition`.
    pub frequency: &'a [f32],
    /// [P] the end of each list of biases.
    pub bias_ends: &'a [i64],
    /// All ids with a bias, ascending in each list.
    pub bias_ids: &'a [i32],
    /// Their biases.
    pub bias: &'a [f32],
}

/// The trained tokens whose logits are asked for.
#[derive(Debug, Clone, Copy)]
pub struct Targets<'a> {
    /// [M] tokens, in any order.
    pub tokens: &'a [i64],
    /// [M] the penalties of each; -1 for none.
    pub penalties: &'a [i32],
    /// [M+1] and ids: the support of each token, empty for the whole vocabulary.
    pub offsets: &'a [i64],
    /// The ids of all supports.
    pub support: &'a [i32],
}

/// Ids of each token and the change of their logits x: `(x + before)`, divided (or multiplied if not positive) by
/// `factor`, `+ after`.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Changes {
    /// [M+1] token m has the ids `offsets[m]..offsets[m + 1]`.
    pub offsets: Vec<i64>,
    /// The support of the token, or if it has none, the ids whose logits change.
    pub ids: Vec<i32>,
    /// As `ids`.
    pub before: Vec<f32>,
    /// As `ids`.
    pub factor: Vec<f32>,
    /// As `ids`.
    pub after: Vec<f32>,
}

/// Returns the changed logits of each token, and all ids of those with support.
///
/// # Errors
/// Fails if slices are inconsistent.
pub fn changes(of: Penalized<'_>, targets: Targets<'_>) -> Result<Changes> {
    check(of, targets)?;
    let mut order: Vec<usize> = (0..targets.tokens.len()).collect();
    order.sort_by_key(|&m| targets.tokens[m]);
    let mut found: Vec<Vec<Change>> = vec![Vec::new(); targets.tokens.len()];
    let mut context = Context::default();
    for (round, &m) in order.iter().enumerate() {
        cancel::check_every_16384(round);
        let token = targets.tokens[m] as usize;
        let support = &targets.support[targets.offsets[m] as usize..targets.offsets[m + 1] as usize];
        found[m] = match usize::try_from(targets.penalties[m]) {
            Ok(penalties) => {
                context.advance(of, token);
                context.changes(of, penalties, support)
            }
            Err(_) => support.iter().map(|&id| Change { id, before: 0.0, factor: 1.0, after: 0.0 }).collect(),
        };
    }
    let mut out = Changes { offsets: vec![0], ..Changes::default() };
    for changes in found {
        for Change { id, before, factor, after } in changes {
            out.ids.push(id);
            out.before.push(before);
            out.factor.push(factor);
            out.after.push(after);
        }
        out.offsets.push(out.ids.len() as i64);
    }
    Ok(out)
}

#[derive(Debug, Clone, Copy)]
struct Change {
    id: i32,
    before: f32,
    factor: f32,
    after: f32,
}

/// The ids before a token of a branch.
#[derive(Default)]
struct Context {
    /// The branch, and the next token to read.
    branch: Option<usize>,
    next: usize,
    /// Number of occurrences in the answer so far, of every id of the prompt and of the answer.
    counts: HashMap<i32, u32>,
    /// The ids of the answer so far, and its generation.
    answer: Vec<i32>,
    turn: i32,
}

impl Context {
    /// Reads on to all ids before `token`, whose answer is the current one.
    fn advance(&mut self, of: Penalized<'_>, token: usize) {
        let branch = of.cu_seqlens.partition_point(|&start| start as usize <= token) - 1;
        if self.branch != Some(branch) {
            *self = Self { branch: Some(branch), next: of.cu_seqlens[branch] as usize, turn: -1, ..Self::default() };
        }
        while self.next < token {
            let (id, turn) = (of.ids[self.next], of.turn[self.next]);
            self.start_answer(turn);
            *self.counts.entry(id).or_insert(0) += u32::from(turn >= 0);
            if turn >= 0 {
                self.answer.push(id);
            }
            self.next += 1;
        }
        self.start_answer(of.turn[token]);
    }

    /// Makes the answers before part of the prompt if another generation begins.
    fn start_answer(&mut self, turn: i32) {
        if turn >= 0 && turn != self.turn {
            for id in self.answer.drain(..) {
                self.counts.insert(id, 0);
            }
            self.turn = turn;
        }
    }

    fn changes(&self, of: Penalized<'_>, penalties: usize, support: &[i32]) -> Vec<Change> {
        let first = if penalties == 0 { 0 } else { of.bias_ends[penalties - 1] as usize };
        let biased = &of.bias_ids[first..of.bias_ends[penalties] as usize];
        let (repetition, presence) = (of.repetition[penalties], of.presence[penalties]);
        let frequency = of.frequency[penalties];
        let change = |id: i32| {
            let count = self.counts.get(&id).copied();
            let times = count.unwrap_or(0);
            Change {
                id,
                before: biased.binary_search(&id).map_or(0.0, |at| of.bias[first + at]),
                factor: if count.is_some() { repetition } else { 1.0 },
                after: if times > 0 { -(frequency * times as f32) - presence } else { 0.0 },
            }
        };
        if !support.is_empty() {
            return support.iter().map(|&id| change(id)).collect();
        }
        let mut ids: Vec<i32> = biased.to_vec();
        if repetition == 1.0 {
            ids.extend(&self.answer);
        } else {
            ids.extend(self.counts.keys());
        }
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().map(change).collect()
    }
}

fn check(of: Penalized<'_>, targets: Targets<'_>) -> Result<()> {
    let count = of.repetition.len();
    check_length("turn", of.turn.len(), of.ids.len())?;
    for (name, length) in
        [("presence", of.presence.len()), ("frequency", of.frequency.len()), ("bias_ends", of.bias_ends.len())]
    {
        check_length(name, length, count)?;
    }
    check_length("bias", of.bias.len(), of.bias_ids.len())?;
    check_length("penalties", targets.penalties.len(), targets.tokens.len())?;
    check_length("offsets", targets.offsets.len(), targets.tokens.len() + 1)?;
    let rises = |offsets: &[i64], end: usize| {
        offsets.is_sorted() && offsets.first().is_none_or(|&first| first >= 0) && offsets.last() == Some(&(end as i64))
    };
    let fits = (count == 0 || rises(of.bias_ends, of.bias.len()))
        && rises(targets.offsets, targets.support.len())
        && rises(of.cu_seqlens, of.ids.len())
        && of.cu_seqlens.first() == Some(&0)
        && targets.penalties.iter().all(|&penalties| penalties < count as i32)
        && targets.tokens.iter().all(|&token| usize::try_from(token).is_ok_and(|token| token < of.ids.len()));
    if fits {
        return Ok(());
    }
    Err(Error::new(Kind::Argument, "TG-PACK-518", "the penalties do not match the tokens")
        .why("Logits would change that the sampler left as they were")
        .fix("Pass the arrays of one Sequences"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A branch of prompt 5 6, answer 7 7, tool 8, answer 6 7; with one setting of penalties.
    const IDS: [i32; 7] = [5, 6, 7, 7, 8, 6, 7];
    const TURN: [i32; 7] = [-1, -1, 0, 0, -1, 1, 1];

    fn penalized<'a>(repetition: &'a [f32], bias: (&'a [i64], &'a [i32], &'a [f32])) -> Penalized<'a> {
        let (bias_ends, bias_ids, bias) = bias;
        Penalized {
            ids: &IDS,
            cu_seqlens: &[0, 7],
            turn: &TURN,
            repetition,
            presence: &[0.25],
            frequency: &[0.5],
            bias_ends,
            bias_ids,
            bias,
        }
    }

    fn rows(changes: &Changes) -> Vec<Vec<(i32, f32, f32, f32)>> {
        let row = |pair: &[i64]| {
            let entry = |at: usize| (changes.ids[at], changes.before[at], changes.factor[at], changes.after[at]);
            (pair[0] as usize..pair[1] as usize).map(entry).collect()
        };
        changes.offsets.windows(2).map(row).collect()
    }

    #[test]
    fn counts_are_of_the_answer_and_repetition_is_of_all_before() {
        let of = penalized(&[1.5], (&[0], &[], &[]));
        // Tokens 3 (after 5 6 7) and 6 (after all but the last), in any order; and one without penalties.
        let targets = Targets { tokens: &[6, 3, 2], penalties: &[0, 0, -1], offsets: &[0, 0, 0, 1], support: &[9] };
        let found = rows(&changes(of, targets).unwrap());
        assert_eq!(found[0], [(5, 0.0, 1.5, 0.0), (6, 0.0, 1.5, -0.75), (7, 0.0, 1.5, 0.0), (8, 0.0, 1.5, 0.0)]);
        assert_eq!(found[1], [(5, 0.0, 1.5, 0.0), (6, 0.0, 1.5, 0.0), (7, 0.0, 1.5, -0.75)]);
        assert_eq!(found[2], [(9, 0.0, 1.0, 0.0)]);
        // 7 twice in an answer counts twice.
        let of = Penalized { turn: &[-1, -1, 0, 0, 0, 0, 0], ..of };
        let last = Targets { tokens: &[4], penalties: &[0], offsets: &[0, 0], support: &[] };
        assert_eq!(rows(&changes(of, last).unwrap())[0][2], (7, 0.0, 1.5, -1.25));
    }

    #[test]
    fn without_repetition_only_ids_of_the_answer_and_of_the_bias_change() {
        let of = penalized(&[1.0], (&[2], &[6, 9], &[2.0, -3.0]));
        let targets = Targets { tokens: &[3], penalties: &[0], offsets: &[0, 0], support: &[] };
        let found = rows(&changes(of, targets).unwrap());
        assert_eq!(found[0], [(6, 2.0, 1.0, 0.0), (7, 0.0, 1.0, -0.75), (9, -3.0, 1.0, 0.0)]);
        let targets = Targets { offsets: &[0, 2], support: &[9, 4], ..targets };
        assert_eq!(rows(&changes(of, targets).unwrap())[0], [(9, -3.0, 1.0, 0.0), (4, 0.0, 1.0, 0.0)]);
    }

    #[test]
    fn arrays_that_do_not_match_are_refused() {
        let of = penalized(&[1.0], (&[0], &[], &[]));
        for (tokens, penalties) in [([7], [0]), ([-1], [0]), ([3], [1])] {
            let targets = Targets { tokens: &tokens, penalties: &penalties, offsets: &[0, 0], support: &[] };
            assert_eq!(changes(of, targets).unwrap_err().code, "TG-PACK-518");
        }
    }
}
