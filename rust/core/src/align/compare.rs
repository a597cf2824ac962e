//! Recorded prompt ids beside the template's: which of them are content, and what the difference is called.
//!
//! Ids win over the render. Here the render is only asked for sources, and a difference gets the narrowest name that
//! fits it: a doubled BOS, an injected system prompt or date, an expanded image, or plainly another prompt.

use super::branch::{common_prefix, common_suffix};
use super::prompt::Text;
use super::source;
use crate::drift::Reason;
use crate::tokenizer::Tokenizer;

/// Sources of the recorded ids, and the difference, if there is one.
#[derive(Debug)]
pub struct Compared {
    /// The recorded ids with their sources.
    pub text: Text,
    /// Reason, tokens concerned, and what was found.
    pub difference: Option<(Reason, usize, String)>,
}

/// Compares `ids`, as the server reported them, with `rendered`, which may begin with a system or developer message.
pub fn compare(ids: &[u32], rendered: Text, has_system: bool, tokenizer: &Tokenizer) -> Compared {
    if rendered.ids == ids {
        return Compared { text: rendered, difference: None };
    }
    if let Some(found) = beginning(ids, &rendered, tokenizer).or_else(|| expanded(ids, &rendered, tokenizer)) {
        return found;
    }
    let first = common_prefix(&rendered.ids, ids);
    let last = common_suffix(&rendered.ids[first..], &ids[first..]);
    let theirs = ids.len() - first - last;
    let ours = rendered.ids.len() - first - last;
    let mut sources = rendered.sources[..first].to_vec();
    sources.resize(first + theirs, source::GIVEN);
    sources.extend_from_slice(&rendered.sources[rendered.sources.len() - last..]);
    let before_content = rendered.sources[..first].iter().all(|&source| source == source::TEMPLATE);
    let injected = !has_system && before_content && last > 0 && (ours == 0 || theirs == 0);
    let difference = if injected {
        let who = if theirs == 0 { "the template writes" } else { "the record has" };
        let detail = format!("{who} {} tokens before the first message, a default system prompt", ours.max(theirs));
        (Reason::SystemDefaultInjected, ours.max(theirs), detail)
    } else {
        let (recorded, template) = (ids.len(), rendered.ids.len());
        let detail =
            format!("the record has {recorded} prompt ids, the template gives {template}; they part at {first}");
        (Reason::PromptMismatch, theirs.max(ours), detail)
    };
    Compared { text: Text::new(ids.to_vec(), sources), difference: Some(difference) }
}

/// A special token more or less at the beginning, all else equal: BOS twice, or missing.
fn beginning(ids: &[u32], rendered: &Text, tokenizer: &Tokenizer) -> Option<Compared> {
    let special = |id: Option<&u32>| id.is_some_and(|&id| tokenizer.is_special(id));
    if ids.get(1..) == Some(&rendered.ids) && special(ids.first()) {
        let mut sources = vec![source::TEMPLATE];
        sources.extend_from_slice(&rendered.sources);
        let twice = if ids.get(1) == ids.first() { "twice" } else { "that the template does not write" };
        let detail = format!("the record's prompt begins with the special token {} {twice}", ids[0]);
        let text = Text::new(ids.to_vec(), sources);
        return Some(Compared { text, difference: Some((Reason::BosDuplicate, 1, detail)) });
    }
    if rendered.ids.get(1..) == Some(ids) && special(rendered.ids.first()) {
        let detail = format!("the template begins with the special token {}, the record does not", rendered.ids[0]);
        return Some(Compared { text: rendered.tail(1), difference: Some((Reason::BosDuplicate, 1, detail)) });
    }
    None
}

/// Placeholders of images repeated, all else equal.
fn expanded(ids: &[u32], rendered: &Text, tokenizer: &Tokenizer) -> Option<Compared> {
    let mut sources = Vec::with_capacity(ids.len());
    let mut at = 0;
    for (index, id) in ids.iter().enumerate() {
        if rendered.ids.get(at) == Some(id) {
            sources.push(rendered.sources[at]);
            at += 1;
        } else if index > 0 && ids[index - 1] == *id && tokenizer.is_added(*id) {
            sources.push(source::GIVEN);
        } else {
            return None;
        }
    }
    let pads = ids.len() - rendered.ids.len().min(ids.len());
    let text = Text::new(ids.to_vec(), sources);
    let detail = format!("{pads} placeholder tokens more than the template writes: an image was expanded");
    (at == rendered.ids.len())
        .then_some(Compared { text, difference: Some((Reason::MultimodalExpansion, pads, detail)) })
}
