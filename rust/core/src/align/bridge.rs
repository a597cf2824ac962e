//! Whether recorded prompt ids go on where a branch ends, but for named differences at the ends of turns.
//!
//! Servers and templates disagree about what closes a turn: `<|return|>` in the history is `<|end|>`, a stop token that
//! is also the next header stands once or not at all, the line break behind it is there or not. Such a turn goes on
//! in its branch, each difference named; anything else is another history. Nothing is decided about sources here.

use super::branch::{Branch, common_prefix};
use super::prompt::Closing;
use super::source;
use crate::drift::Reason;

/// Where the recorded ids go on, and what was passed over.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Bridge {
    /// Index into the recorded ids.
    pub from: usize,
    /// Reason, position in the branch, and what was found.
    pub edits: Vec<(Reason, usize, String)>,
}

/// Follows `branch` and `ids` side by side; `None` where they part for another reason than the end of a turn.
///
/// A turn ends with a token for which `is_stop` holds; one that was cut ends with a part of its text, which no prompt
/// may leave out.
pub fn bridge(branch: &Branch<'_>, ids: &[u32], closing: &Closing, is_stop: impl Fn(u32) -> bool) -> Option<Bridge> {
    let mut bridge = Bridge::default();
    let (mut held, mut at) = (0, 0);
    while held < branch.len() {
        let shared = common_prefix(&branch.ids[held..], &ids[at..]);
        held += shared;
        at += shared;
        if held == branch.len() {
            break;
        }
        (held, at) = step_over(branch, ids, closing, &is_stop, (held, at), &mut bridge.edits)?;
    }
    bridge.from = at;
    Some(bridge)
}

/// Both positions behind one named difference.
fn step_over(
    branch: &Branch<'_>,
    ids: &[u32],
    closing: &Closing,
    is_stop: impl Fn(u32) -> bool,
    (held, at): (usize, usize),
    edits: &mut Vec<(Reason, usize, String)>,
) -> Option<(usize, usize)> {
    let goes_on = |held: usize, at: usize| held == branch.len() || branch.ids.get(held) == ids.get(at);
    let sampled = |at: usize| branch.source[at] == source::SAMPLED;
    let ends_turn = sampled(held) && branch.source.get(held + 1).is_none_or(|&next| next != source::SAMPLED);
    if ends_turn && is_stop(branch.ids[held]) {
        let stop = branch.ids[held];
        // Harmony closes the last message with `<|return|>` and every other with `<|end|>`.
        let closes = |id: u32| Some(id) == closing.token || (is_stop(id) && ids.get(at + 1) != closing.token.as_ref());
        if let Some(&other) = ids.get(at).filter(|&&id| closing.token.is_some() && closes(id))
            && goes_on(held + 1, at + 1)
        {
            edits.push((Reason::StopTokenDiffers, held, format!("sampled {stop}, the next prompt has {other}")));
            return Some((held + 1, at + 1));
        }
        // Where the template closes a turn with a token, anything before that token is still the turn's text.
        if closing.token.is_none() && goes_on(held + 1, at) && at < ids.len() {
            edits.push((Reason::StopTokenDiffers, held, format!("sampled {stop}, the next prompt leaves it out")));
            return Some((held + 1, at));
        }
    }
    let after_turn = held > 0 && sampled(held - 1) && !sampled(held);
    let separator = closing.separator.as_slice();
    if after_turn && !separator.is_empty() {
        if branch.ids[held..].starts_with(separator) && goes_on(held + separator.len(), at) && at < ids.len() {
            edits.push((Reason::TurnSeparatorMissing, held, "the next prompt lacks the template's separator".into()));
            return Some((held + separator.len(), at));
        }
        if ids[at..].starts_with(separator) && goes_on(held, at + separator.len()) {
            edits.push((
                Reason::TurnSeparatorMissing,
                held,
                "an earlier prompt lacked the template's separator".into(),
            ));
            return Some((held, at + separator.len()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::align::branch::{Sampling, Stretch};
    use crate::align::prompt::Text;

    const RETURN: u32 = 90;
    const END: u32 = 91;
    const LINE: u32 = 92;

    /// `[1, 2]` given, `[5, 6, stop]` sampled, then `after` given.
    fn branch(stop: u32, after: &[u32]) -> Branch<'static> {
        let mut branch = Branch::default();
        let give = |ids: &[u32]| Text::new(ids.to_vec(), vec![source::TEMPLATE; ids.len()]);
        branch.give(give(&[1, 2]));
        let sampling = Sampling { turn: 0, version: -1, inv_temperature: 1.0 };
        branch.sample(&[5, 6, stop], Stretch { sampling, tier: 0, trained: true, logprobs: None });
        branch.give(give(after));
        branch
    }

    fn is_stop(id: u32) -> bool {
        id == RETURN || id == END
    }

    #[test]
    fn a_prompt_goes_on_where_it_differs_at_the_ends_of_turns_alone() {
        let closing = Closing { token: Some(END), separator: vec![LINE] };
        let check = |case: &str, stop: u32, after: &[u32], ids: &[u32], closing: &Closing, expected| {
            let found = bridge(&branch(stop, after), ids, closing, is_stop);
            let edits = |found: Bridge| (found.from, found.edits.into_iter().map(|edit| edit.0).collect::<Vec<_>>());
            assert_eq!(found.map(edits), expected, "{case}");
        };
        let edited = |from: usize, reason: Reason| Some((from, vec![reason]));
        check("it holds the branch", END, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, Some((5, vec![])));
        let stop = Reason::StopTokenDiffers;
        check("a return became an end", RETURN, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, edited(5, stop));
        let harmony = Closing { token: Some(RETURN), separator: vec![] };
        check("an end for the last message's return", RETURN, &[], &[1, 2, 5, 6, END, 3], &harmony, edited(5, stop));
        let unclosed = Closing::default();
        check("the template writes no stop token", RETURN, &[], &[1, 2, 5, 6, 7, 8], &unclosed, edited(4, stop));
        let line = Reason::TurnSeparatorMissing;
        check("it lacks a separator", END, &[LINE, 3, 4], &[1, 2, 5, 6, END, 3, 4, 9], &closing, edited(7, line));
        check("the branch lacks one", END, &[3, 4], &[1, 2, 5, 6, END, LINE, 3, 4, 9], &closing, edited(8, line));
        check("another text", END, &[], &[1, 2, 5, 7, END, LINE], &closing, None);
        check("less text", END, &[], &[1, 2, 5], &closing, None);
        // A template that sets content and tool calls apart by a line that the policy did not sample.
        check("a line break within the turn", END, &[], &[1, 2, 5, LINE, 6, END, LINE, 3], &closing, None);
        // The text loses the part of a character, so the next prompt closes one token earlier.
        check("a turn cut inside a character", 7, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, None);
        check("a cut turn, and other text", 7, &[], &[1, 2, 5, 6, 8, 9], &closing, None);
        // A call was sampled without its closing tag; a parser takes it, and the template writes it with the tag.
        for stop in [END, RETURN] {
            let tagged = [1, 2, 5, 6, 7, END, LINE, 3];
            check("text before the closing token", stop, &[], &tagged, &closing, None);
            assert_eq!(bridge(&branch(stop, &[]), &tagged, &closing, |id| is_stop(id) || id == 7), None, "{stop}");
        }
    }
}
