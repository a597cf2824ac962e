//! Calls that were made again: of several with the same prompt, only the one that was continued belongs to the trace.
//!
//! Parallel samples (n > 1) that nobody continues are not duplicates, and all of them stay.

use crate::trace::{Generation, Prompt, Trace};
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};

/// For each generation whether it was made again and left: another with the same prompt was continued, and it not.
pub fn abandoned(trace: &Trace) -> Vec<bool> {
    let generations = &trace.generations;
    let mut left = vec![false; generations.len()];
    if generations.len() < 2 {
        return left;
    }
    let mut alike: HashMap<(&[u32], &Prompt), Vec<usize>, RandomState> = HashMap::default();
    for (turn, generation) in generations.iter().enumerate() {
        if !matches!(generation.prompt, Prompt::Unknown) {
            alike.entry((generation.context.as_slice(), &generation.prompt)).or_default().push(turn);
        }
    }
    let seen: HashSet<u32> = generations.iter().flat_map(|later| &later.context).copied().collect();
    for turns in alike.into_values().filter(|turns| turns.len() > 1) {
        let continued: Vec<bool> = turns.iter().map(|&turn| is_continued(generations, turn, &seen)).collect();
        if continued.contains(&true) {
            for (&turn, &continued) in turns.iter().zip(&continued) {
                left[turn] = !continued;
            }
        }
    }
    left
}

/// Whether another call was made after what `turn` produced; `seen` are the messages of all contexts.
fn is_continued(generations: &[Generation], turn: usize, seen: &HashSet<u32>) -> bool {
    let generation = &generations[turn];
    if seen.contains(&generation.message) {
        return true;
    }
    let with_ids = generation.prompt.ids().zip(generation.tokens.ids.as_deref());
    generations[turn + 1..].iter().any(|later| match &later.prompt {
        Prompt::Follows { turn: earlier, .. } => *earlier as usize == turn,
        Prompt::Ids(ids) if later.context.is_empty() => with_ids.is_some_and(|(prompt, sampled)| {
            ids.strip_prefix(prompt).is_some_and(|rest| !sampled.is_empty() && rest.starts_with(sampled))
        }),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Generations by (context, message they produced).
    fn trace(calls: &[(&[u32], u32)]) -> Trace {
        let generation = |&(context, message): &(&[u32], u32)| Generation {
            message,
            context: context.to_vec(),
            ..Generation::default()
        };
        Trace {
            id: String::new(),
            location: crate::error::Location::default(),
            group: None,
            reward: None,
            rewards: Vec::new(),
            messages: Vec::new(),
            generations: calls.iter().map(generation).collect(),
            conversation: Vec::new(),
            tools: None,
            template_kwargs: serde_json::Map::new(),
            model: None,
            media_left_out: None,
            raw: crate::raw::Raw::Held(Arc::from(&b""[..])),
        }
    }

    #[test]
    fn a_call_made_again_is_left_where_the_other_was_continued() {
        assert_eq!(abandoned(&trace(&[(&[0], 1), (&[0], 2), (&[0, 2, 3], 4)])), [true, false, false]);
    }

    #[test]
    fn parallel_samples_that_nobody_continues_all_stay() {
        assert_eq!(abandoned(&trace(&[(&[0], 1), (&[0], 2)])), [false, false]);
    }

    #[test]
    fn two_samples_that_are_both_continued_all_stay() {
        assert_eq!(abandoned(&trace(&[(&[0], 1), (&[0], 2), (&[0, 1, 3], 4), (&[0, 2, 3], 5)])), [false; 4]);
    }
}
