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
    // Room for all: a table that grows hashes whole prompts again.
    let room = generations.len();
    let mut alike: HashMap<(&[u32], &Prompt), Vec<usize>, RandomState> =
        HashMap::with_capacity_and_hasher(room, RandomState::default());
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
    use crate::trace::Tokens;

    #[test]
    fn a_call_made_again_is_left_where_only_another_was_continued() {
        /// Generations by (context, message they produced).
        type Calls<'a> = &'a [(&'a [u32], u32)];
        let cases: [(&str, Calls<'_>, &[bool]); 3] = [
            ("the other was continued", &[(&[0], 1), (&[0], 2), (&[0, 2, 3], 4)], &[true, false, false]),
            ("parallel samples that nobody continues", &[(&[0], 1), (&[0], 2)], &[false; 2]),
            ("both are continued", &[(&[0], 1), (&[0], 2), (&[0, 1, 3], 4), (&[0, 2, 3], 5)], &[false; 4]),
        ];
        for (case, calls, expected) in cases {
            let call = |&(context, message): &(&[u32], u32)| (context.to_vec(), message);
            let generation = |(context, message)| Generation { message, context, ..Generation::default() };
            let generations = calls.iter().map(call).map(generation).collect();
            assert_eq!(abandoned(&Trace { generations, ..Trace::default() }), expected, "{case}");
        }
    }

    #[test]
    fn a_prompt_that_goes_on_with_ids_or_names_the_turn_continues_it() {
        let call = |prompt, sampled: &[u32], message| {
            let tokens = Tokens { ids: Some(sampled.to_vec()), ..Tokens::default() };
            Generation { message, prompt, tokens, ..Generation::default() }
        };
        for (later, expected) in [
            (Prompt::Ids(vec![1, 2, 9]), [false, true, false]),
            (Prompt::Follows { turn: 1, ids: vec![9] }, [true, false, false]),
        ] {
            let ids = || Prompt::Ids(vec![1]);
            let generations = vec![call(ids(), &[2], 0), call(ids(), &[3], 1), call(later, &[4], 2)];
            assert_eq!(abandoned(&Trace { generations, ..Trace::default() }), expected);
        }
    }
}
