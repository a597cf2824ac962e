//! One run of hidden tokens and the token behind them, by what that one shows alone.

use super::setting::{Choice, Setting, hidden};
use std::collections::HashMap;

/// Where a token ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum At {
    /// Before the token that begins the shown text: parts of characters that nothing completes.
    Stray,
    /// In the shown text, this many bytes of it spelled.
    Inside(usize),
}

/// The ids of `count` hidden tokens and the one behind them that shows `text`; `None` where nothing is behind them.
///
/// The text is that of the tokens from the one in which its last character begins. Those before it are strays: any
/// entry that ends inside a character. `Choice::None` for all of them if the vocabulary has no such tokens.
pub fn run(count: usize, text: Option<&str>, setting: Setting<'_>) -> Vec<Choice> {
    let Some(text) = text else { return vec![any_hidden(setting); count] };
    let total = count + 1;
    let mut layers: Vec<HashMap<At, Vec<(At, u32)>>> = vec![HashMap::from([(At::Stray, Vec::new())])];
    for index in 0..total {
        let mut next: HashMap<At, Vec<(At, u32)>> = HashMap::new();
        for &from in layers[index].keys() {
            let mut edge = |to: At, id: u32| next.entry(to).or_default().push((from, id));
            if index + 1 < total {
                step_hidden(from, text, setting, &mut edge);
            } else {
                close(from, text, setting, &mut edge);
            }
        }
        layers.push(next);
    }
    let mut choices = vec![Choice::None; total];
    let mut alive = vec![At::Inside(text.len())];
    for index in (0..total).rev() {
        let mut before: Vec<At> = Vec::new();
        for (from, id) in alive.iter().filter_map(|at| layers[index + 1].get(at)).flatten() {
            choices[index].add(*id);
            if !before.contains(from) {
                before.push(*from);
            }
        }
        alive = before;
    }
    choices
}

/// What a hidden token with nothing known around it may be.
fn any_hidden(setting: Setting<'_>) -> Choice {
    let mut choice = Choice::None;
    hidden(setting).take(2).for_each(|id| choice.add(id));
    choice
}

fn step_hidden(from: At, text: &str, setting: Setting<'_>, edge: &mut dyn FnMut(At, u32)) {
    let bytes = text.as_bytes();
    let last = text.char_indices().next_back().map_or(0, |(at, _)| at);
    let spelled = match from {
        At::Stray => {
            // Two of them stand for all.
            hidden(setting).take(2).for_each(|id| edge(At::Stray, id));
            if text[..last].contains('\u{FFFD}') {
                return begin_broken(text, last, setting, edge);
            }
            0
        }
        At::Inside(spelled) => {
            if setting.hides_specials {
                setting.tokenizer.special_ids().iter().take(2).for_each(|&id| edge(from, id));
            }
            spelled
        }
    };
    for end in last.max(spelled) + 1..bytes.len() {
        if let Some(id) = setting.tokenizer.id_of_bytes(&bytes[spelled..end]) {
            edge(At::Inside(end), id);
        }
    }
}

fn close(from: At, text: &str, setting: Setting<'_>, edge: &mut dyn FnMut(At, u32)) {
    let end = At::Inside(text.len());
    match from {
        At::Stray => {
            setting.tokenizer.id_of_bytes(text.as_bytes()).iter().for_each(|&id| edge(end, id));
            setting.tokenizer.id_of_added(text).iter().for_each(|&id| edge(end, id));
            setting.tokenizer.partial().decoding_to(text).iter().take(2).for_each(|&id| edge(end, id));
        }
        At::Inside(spelled) => {
            setting.tokenizer.id_of_bytes(&text.as_bytes()[spelled..]).iter().for_each(|&id| edge(end, id));
        }
    }
}

/// Tokens that spell what is no character before the last character, and begin that.
fn begin_broken(text: &str, last: usize, setting: Setting<'_>, edge: &mut dyn FnMut(At, u32)) {
    for &id in setting.tokenizer.partial().open() {
        let bytes = setting.tokenizer.token_bytes(id).unwrap_or_default();
        let begun = (1..4.min(bytes.len())).find(|&begun| {
            let (before, rest) = bytes.split_at(bytes.len() - begun);
            text.as_bytes()[last..].starts_with(rest) && String::from_utf8_lossy(before) == text[..last]
        });
        if let Some(begun) = begun.filter(|begun| last + begun < text.len()) {
            edge(At::Inside(last + begun), id);
        }
    }
}
