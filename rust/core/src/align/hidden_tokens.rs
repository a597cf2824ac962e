//! Infers ids that a record determines although some of its tokens do not show their bytes.
//!
//! A recorder decodes every token separately. A token that is part of a character shows nothing or U+FFFD. If it
//! completes a character that earlier tokens began, it shows all of their text at once. This module finds by dynamic
//! programming which ids these texts, the complete text and the number of tokens still determine. Every other id stays
//! unknown.
//!
//! The search works on layers of states, one layer per token. A path through the layers is one id sequence that shows
//! what the record shows and decodes to its text. The forward pass finds the states that can be reached, the backward
//! pass those that lead to the end. An id is known if every surviving path uses it at its position.

use crate::tokenizer::{OpenGroup, Pending, REPLACEMENT, Step, Tokenizer};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// Bounds on the states of one layer and on the vocabulary entries tried in total. Beyond either, the search stops
/// on the text.
const STATES: usize = 4096;
const TRIES: usize = 1 << 21;

/// The complete text, as far as it is known.
#[derive(Debug, Clone, Copy)]
pub struct CompleteText<'a> {
    /// The decoded text of the tokens, with U+FFFD for invalid bytes. An incomplete character at its end is left out.
    pub text: &'a str,
    /// True if more tokens may follow the text: the tokens of a stop string or a stop token.
    pub may_continue: bool,
    /// True if the text includes special tokens.
    pub with_specials: bool,
}

/// The ids and positions that the text determines.
#[derive(Debug, Default)]
pub struct Solution {
    /// One per token.
    pub choices: Vec<Choice>,
    /// For each token and for the end: the byte of the text at which it starts, if that is certain and between two
    /// characters.
    pub starts: Vec<Option<u32>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    /// Number of bytes of the text decoded so far; `PAST` after its end.
    at: u32,
    /// Incomplete character in the decoder of the complete text.
    pending: Pending,
    /// State of the decoder that shows single tokens.
    view: View,
}

const PAST: u32 = u32::MAX;

struct Edge {
    from: u32,
    to: u32,
    id: u32,
}

/// A state of the next layer and the edges to it from one state.
struct Target {
    state: u32,
    from: u32,
    ids: Choice,
}

struct Search<'a> {
    complete: CompleteText<'a>,
    facts: RecorderFacts<'a>,
    states: Vec<State>,
    /// Index of the first state of each layer, then the end of the states.
    layers: Vec<usize>,
    edges: Vec<Edge>,
    /// Index of the first edge into each layer.
    into: Vec<usize>,
    next: HashMap<State, Target, RandomState>,
    tries: usize,
}

/// Returns the ids that `shown` and `complete` determine. Returns `None` if no id sequence fits both, or if the search
/// exceeds its bounds.
pub fn solve(shown: &[ShownToken<'_>], complete: CompleteText<'_>, facts: RecorderFacts<'_>) -> Option<Solution> {
    let start = State { at: 0, pending: Pending::default(), view: View::default() };
    let mut search = Search {
        complete,
        facts,
        states: vec![start],
        layers: vec![0, 1],
        edges: Vec::new(),
        into: vec![0],
        next: HashMap::default(),
        tries: 0,
    };
    for (index, &token) in shown.iter().enumerate() {
        search.layer(token, index + 1 == shown.len())?;
    }
    search.finish(shown.len())
}

impl<'a> Search<'a> {
    /// Computes the states after one more token.
    fn layer(&mut self, seen: ShownToken<'_>, last: bool) -> Option<()> {
        let (start, end) = (self.layers[self.layers.len() - 2], self.layers[self.layers.len() - 1]);
        self.next.clear();
        self.into.push(self.edges.len());
        for from in start..end {
            match seen {
                ShownToken::Id(id) => self.known(from, id, last),
                ShownToken::Nothing => self.search(from, None),
                ShownToken::Text(text) => self.search(from, Some(text)),
            }
            if self.next.len() > STATES || self.tries > TRIES {
                return None;
            }
        }
        self.layers.push(self.states.len());
        (!self.next.is_empty()).then_some(())
    }

    /// Merges states that differ only in an incomplete character that will be replaced. If the text has U+FFFD next,
    /// the pending bytes will be invalid, and only the bytes that may still join them matter.
    fn canonical(&self, state: State) -> State {
        let broken = state.at != PAST && !state.pending.is_empty() && {
            self.complete.text.as_bytes()[state.at as usize..].starts_with(REPLACEMENT)
        };
        if !broken {
            return state;
        }
        let pending = state.pending.class();
        let view = if state.view.pending == state.pending { View { pending, before: 0 } } else { state.view };
        State { pending, view, ..state }
    }

    /// Adds an edge. Two ids between two states already make the id ambiguous: further ones are left out.
    fn edge(&mut self, from: usize, to: State, id: u32) {
        let to = self.canonical(to);
        let (states, from) = (&mut self.states, from as u32);
        let target = self.next.entry(to).or_insert_with(|| {
            states.push(to);
            Target { state: (states.len() - 1) as u32, from, ids: Choice::None }
        });
        if target.from != from {
            (target.from, target.ids) = (from, Choice::None);
        }
        let before = target.ids;
        target.ids.add(id);
        if target.ids != before {
            self.edges.push(Edge { from, to: target.state, id });
        }
    }

    fn known(&mut self, from: usize, id: u32, last: bool) {
        let state = self.states[from];
        let bytes = self.facts.tokenizer.token_bytes(id).unwrap_or_default();
        if self.facts.tokenizer.is_special(id) {
            let to = State { view: View::default(), ..state };
            let written = if self.complete.with_specials { self.feed(state, bytes) } else { None };
            if let Some(to) = written {
                self.edge(from, State { view: View::default(), ..to }, id);
            } else if !self.complete.with_specials || last || state.at == PAST {
                self.edge(from, to, id);
            }
            return;
        }
        let view = state.view.show(bytes).1;
        if let Some(to) = self.feed(state, bytes) {
            self.edge(from, State { view, ..to }, id);
        } else if self.complete.may_continue && self.passes(state, bytes, last) {
            self.edge(from, State { at: PAST, pending: Pending::default(), view }, id);
        }
    }

    /// Adds edges for tokens whose id is not shown, guided by the next bytes of the text.
    fn search(&mut self, from: usize, text: Option<&str>) {
        let state = self.states[from];
        let tokenizer = self.facts.tokenizer;
        if text.is_none() && self.facts.hides_specials {
            for &id in tokenizer.special_ids() {
                self.edge(from, state, id);
            }
        }
        if state.at == PAST || (state.at as usize == self.complete.text.len() && state.pending.is_empty()) {
            self.after_text(from, text);
            if state.at == PAST {
                return;
            }
        }
        let (forced, broken) = self.forced(state);
        // A text is never shorter than the bytes that it shows.
        let longest = tokenizer.max_piece_bytes().min(text.map_or(usize::MAX, str::len));
        for end in 1..=forced.len().min(longest) {
            if !may_show(&forced[..end], text) {
                continue;
            }
            if let Some(id) = tokenizer.id_of_bytes(&forced[..end]) {
                self.consider(from, id, &forced[..end], text);
            }
            if let Some(text) = text.filter(|text| text.as_bytes() == &forced[..end])
                && let Some(id) = tokenizer.id_of_added(text)
            {
                self.consider(from, id, &forced[..end], Some(text));
            }
        }
        if broken {
            // The pending bytes may be the invalid part or belong to it. Then any entry that is not valid text by
            // itself may follow.
            let prefix: &[u8] = if state.pending.is_empty() { forced } else { &[] };
            let partial = tokenizer.partial();
            let Some(text) = text else {
                if prefix.is_empty() && self.breaks_next(state) {
                    partial.open_groups().iter().for_each(|group| self.consider_group(from, group));
                } else {
                    partial
                        .open_and_beginning_with(prefix)
                        .for_each(|(bytes, id)| self.consider(from, id, bytes, None));
                }
                return;
            };
            for (bytes, id) in partial.decoding_to(text).filter(|(bytes, _)| bytes.starts_with(prefix)) {
                self.consider(from, id, bytes, Some(text));
            }
            if !state.view.pending.is_empty() {
                // An entry that completes the character of earlier ones shows their text too.
                for (bytes, id) in partial.continuing().filter(|(bytes, _)| bytes.starts_with(prefix)) {
                    self.consider(from, id, bytes, Some(text));
                }
            }
        }
    }

    /// Returns true if the text has U+FFFD next, and it is not a character that the pending bytes begin.
    fn breaks_next(&self, state: State) -> bool {
        let begins = !state.pending.is_empty() && REPLACEMENT.starts_with(state.pending.bytes());
        !begins && self.complete.text.as_bytes()[state.at as usize..].starts_with(REPLACEMENT)
    }

    /// Adds the edges of a group, for a token that shows nothing and a state that [`Self::breaks_next`]. Two members
    /// represent all of them if they lead to the same states.
    fn consider_group(&mut self, from: usize, group: &OpenGroup) {
        let mut count = 2;
        if !group.starts_inside {
            let State { at, pending, .. } = self.states[from];
            let at = at as usize + if pending.is_empty() { 0 } else { REPLACEMENT.len() };
            let Some(rest) = self.complete.text.as_bytes()[at..].strip_prefix(&*group.text) else { return };
            if !group.is_complete && !rest.starts_with(REPLACEMENT) {
                count = usize::MAX;
            }
        }
        for (bytes, id) in group.members.iter().take(count) {
            self.consider(from, *id, bytes, None);
        }
    }

    /// Adds an edge for `id` if its text matches the recorded text and its bytes continue the text.
    fn consider(&mut self, from: usize, id: u32, bytes: &[u8], text: Option<&str>) {
        self.tries += 1;
        let state = self.states[from];
        let (shown, view) = state.view.show(bytes);
        let decodes_to = |text: &str| String::from_utf8_lossy(bytes) == text;
        let fits = match (text, shown) {
            (None, shown) => shown == Shown::Nothing,
            (Some(text), Shown::Completed(length)) => length == text.len() || decodes_to(text),
            (Some(text), _) => decodes_to(text),
        };
        if fits && let Some(to) = self.feed(state, bytes) {
            self.edge(from, State { view, ..to }, id);
        }
    }

    /// Adds edges for tokens after the end of the text, which are not decoded.
    fn after_text(&mut self, from: usize, text: Option<&str>) {
        let view = View::default();
        let to = State { at: PAST, pending: Pending::default(), view };
        match text {
            // Two of them represent all: they already make the id ambiguous.
            None => hidden(self.facts).take(2).for_each(|id| self.edge(from, to, id)),
            Some(text) if self.complete.may_continue => {
                let choices = solve_run(0, Some(text), self.facts);
                if let Some(id) = choices[0].id() {
                    self.edge(from, to, id);
                }
            }
            Some(_) => {}
        }
    }

    /// Returns true if a token with a known id may follow the text or extend across its end.
    fn passes(&self, state: State, bytes: &[u8], last: bool) -> bool {
        let ends = |length: usize| {
            let end = self.feed(state, &bytes[..length]);
            end.is_some_and(|end| end.at as usize == self.complete.text.len() && end.pending.is_empty())
        };
        state.at == PAST || (usize::from(!last)..bytes.len()).any(ends)
    }

    /// Returns the bytes that must come next in the text, up to the first invalid character. Also returns whether one
    /// token can reach that character.
    fn forced(&self, state: State) -> (&'a [u8], bool) {
        let reach = self.facts.tokenizer.max_piece_bytes() + 4;
        let mut rest = &self.complete.text.as_bytes()[state.at as usize..];
        let pending = state.pending.bytes();
        let mut broken = false;
        if rest.starts_with(pending) {
            rest = &rest[pending.len()..];
        } else if let Some(after) = rest.strip_prefix(REPLACEMENT) {
            // The next token makes the pending bytes invalid.
            (rest, broken) = (after, true);
        }
        let near = &rest[..rest.len().min(reach)];
        match memchr::memmem::find(near, REPLACEMENT) {
            Some(end) => (&near[..end], true),
            None => (near, broken),
        }
    }

    /// Decodes `bytes` against the text. Returns `None` if the text differs.
    fn feed(&self, state: State, bytes: &[u8]) -> Option<State> {
        if state.at == PAST {
            return None;
        }
        let text = self.complete.text.as_bytes();
        let (mut at, mut pending) = (state.at as usize, state.pending);
        if pending.is_empty() && std::str::from_utf8(bytes).is_ok() {
            let matches = text[at..].starts_with(bytes);
            return matches.then_some(State { at: (at + bytes.len()) as u32, ..state });
        }
        let advance = |at: &mut usize, expected: &[u8]| {
            let matches = text.get(*at..)?.starts_with(expected);
            *at += expected.len();
            matches.then_some(())
        };
        for &byte in bytes {
            let (broken, step) = pending.feed(byte);
            if broken {
                advance(&mut at, REPLACEMENT)?;
            }
            match step {
                Step::Waits => {}
                Step::Character(character, length) => advance(&mut at, &character[..length])?,
                Step::Broken => advance(&mut at, REPLACEMENT)?,
            }
        }
        let rest = &text[at..];
        let possible =
            pending.is_empty() || rest.is_empty() || rest.starts_with(pending.bytes()) || rest.starts_with(REPLACEMENT);
        possible.then_some(State { at: at as u32, pending, view: state.view })
    }

    /// Returns true if a generation may end in this state.
    fn ends(&self, state: State) -> bool {
        let rest = self.complete.text.as_bytes().get(state.at as usize..).unwrap_or_default();
        rest.is_empty() || (rest == REPLACEMENT && !state.pending.is_empty())
    }

    /// Collects the ids that all paths from the start to an end share.
    fn finish(self, count: usize) -> Option<Solution> {
        let mut alive = vec![false; self.states.len()];
        let (start, end) = (self.layers[count], self.layers[count + 1]);
        for (offset, alive) in alive[start..end].iter_mut().enumerate() {
            *alive = self.ends(self.states[start + offset]);
        }
        let mut choices = vec![Choice::None; count];
        for index in (0..count).rev() {
            let edges = self.into[index + 1]..self.into.get(index + 2).copied().unwrap_or(self.edges.len());
            for edge in &self.edges[edges] {
                if alive[edge.to as usize] {
                    choices[index].add(edge.id);
                    alive[edge.from as usize] = true;
                }
            }
        }
        let start_of = |layer: usize| {
            let mut reachable = (self.layers[layer]..self.layers[layer + 1]).filter(|&state| alive[state]);
            let first = self.states[reachable.next()?];
            let certain = first.at != PAST && first.pending.is_empty();
            let same_position =
                |state: usize| self.states[state].at == first.at && self.states[state].pending.is_empty();
            (certain && reachable.all(same_position)).then_some(first.at)
        };
        let starts = (0..=count).map(start_of).collect();
        alive[0].then_some(Solution { choices, starts })
    }
}

/// Returns false if the last of `bytes` shows that no decoder writes `text` for them. `None` is a token that shows
/// nothing.
fn may_show(bytes: &[u8], text: Option<&str>) -> bool {
    // A token that ends in an ASCII character shows its own text, which ends in that character.
    let last = bytes.last().filter(|last| last.is_ascii());
    last.is_none() || text.is_some_and(|text| text.as_bytes().last() == last)
}

/// Position at which a token ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum At {
    /// Before the token that starts the shown text: parts of characters that nothing completes.
    Stray,
    /// Inside the shown text, after this many of its bytes.
    Inside(usize),
}

/// Returns the ids of `count` hidden tokens and of the following token that shows `text`. If `text` is `None`, no
/// token follows them.
///
/// The text belongs to the tokens from the one in which its last character starts. Tokens before that one are strays:
/// any entry that ends inside a character. All choices are `Choice::None` if the vocabulary has no such tokens.
pub fn solve_run(count: usize, text: Option<&str>, facts: RecorderFacts<'_>) -> Vec<Choice> {
    let Some(text) = text else { return vec![any_hidden(facts); count] };
    let total = count + 1;
    let mut layers: Vec<HashMap<At, Vec<(At, u32)>>> = vec![HashMap::from([(At::Stray, Vec::new())])];
    for index in 0..total {
        let mut next: HashMap<At, Vec<(At, u32)>> = HashMap::new();
        for &from in layers[index].keys() {
            let mut edge = |to: At, id: u32| next.entry(to).or_default().push((from, id));
            if index + 1 < total {
                step_hidden(from, text, facts, &mut edge);
            } else {
                close(from, text, facts, &mut edge);
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

/// Returns the choice for a hidden token with nothing known around it.
fn any_hidden(facts: RecorderFacts<'_>) -> Choice {
    let mut choice = Choice::None;
    hidden(facts).take(2).for_each(|id| choice.add(id));
    choice
}

fn step_hidden(from: At, text: &str, facts: RecorderFacts<'_>, edge: &mut dyn FnMut(At, u32)) {
    let bytes = text.as_bytes();
    let last = text.char_indices().next_back().map_or(0, |(at, _)| at);
    let spelled = match from {
        At::Stray => {
            // Two of them represent all: they already make the id ambiguous.
            hidden(facts).take(2).for_each(|id| edge(At::Stray, id));
            if text[..last].contains('\u{FFFD}') {
                return begin_broken(text, last, facts, edge);
            }
            0
        }
        At::Inside(spelled) => {
            if facts.hides_specials {
                facts.tokenizer.special_ids().iter().take(2).for_each(|&id| edge(from, id));
            }
            spelled
        }
    };
    for end in last.max(spelled) + 1..bytes.len() {
        if let Some(id) = facts.tokenizer.id_of_bytes(&bytes[spelled..end]) {
            edge(At::Inside(end), id);
        }
    }
}

fn close(from: At, text: &str, facts: RecorderFacts<'_>, edge: &mut dyn FnMut(At, u32)) {
    let end = At::Inside(text.len());
    match from {
        At::Stray => {
            facts.tokenizer.id_of_bytes(text.as_bytes()).iter().for_each(|&id| edge(end, id));
            facts.tokenizer.id_of_added(text).iter().for_each(|&id| edge(end, id));
            facts.tokenizer.partial().decoding_to(text).take(2).for_each(|(_, id)| edge(end, id));
        }
        At::Inside(spelled) => {
            facts.tokenizer.id_of_bytes(&text.as_bytes()[spelled..]).iter().for_each(|&id| edge(end, id));
        }
    }
}

/// Adds edges for tokens that end in the beginning of the last character and have invalid bytes before it.
fn begin_broken(text: &str, last: usize, facts: RecorderFacts<'_>, edge: &mut dyn FnMut(At, u32)) {
    for &id in facts.tokenizer.partial().open() {
        let bytes = facts.tokenizer.token_bytes(id).unwrap_or_default();
        let overlap = (1..4.min(bytes.len())).find(|&overlap| {
            let (before, tail) = bytes.split_at(bytes.len() - overlap);
            text.as_bytes()[last..].starts_with(tail) && String::from_utf8_lossy(before) == text[..last]
        });
        if let Some(overlap) = overlap.filter(|overlap| last + overlap < text.len()) {
            edge(At::Inside(last + overlap), id);
        }
    }
}

/// The incomplete character that earlier tokens left, in the recorder's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct View {
    pub pending: Pending,
    /// Number of bytes of text before the character in the token that began it.
    pub before: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Its own text, which does not end in U+FFFD.
    Own,
    /// Nothing: its text ends in U+FFFD, and the bytes before it do not complete that character.
    Nothing,
    /// Text of `.0` bytes that the token completes, from the token that began the character.
    Completed(usize),
}

impl View {
    /// Returns the shown text of a token with `bytes`, and the view after it.
    pub fn show(self, bytes: &[u8]) -> (Shown, Self) {
        if bytes.last().is_some_and(u8::is_ascii) {
            return (Shown::Own, Self::default());
        }
        let mut joint = self.pending;
        // True if the pending bytes at the end began in an earlier token.
        let mut earlier = !joint.is_empty();
        let mut completed = None;
        for &byte in bytes {
            let (broken, step) = joint.feed(byte);
            completed = None;
            earlier &= !broken;
            match step {
                Step::Waits => {}
                Step::Character(character, length) => {
                    completed = Some((earlier, character, length));
                    earlier = false;
                }
                Step::Broken => earlier = false,
            }
        }
        let (text, own) = fresh(bytes);
        if !text.open {
            return (Shown::Own, Self::default());
        }
        match completed {
            Some((true, character, length)) if character[..length] != *REPLACEMENT => {
                (Shown::Completed(usize::from(self.before) + length), Self::default())
            }
            _ if joint.is_empty() => (Shown::Nothing, Self::default()),
            _ if earlier => (Shown::Nothing, Self { pending: joint, before: self.before }),
            _ => (Shown::Nothing, Self { pending: own, before: text.before }),
        }
    }
}

struct Alone {
    /// True if the text of the token ends in U+FFFD.
    open: bool,
    /// Number of bytes of its text before the pending bytes at its end.
    before: u16,
}

fn fresh(bytes: &[u8]) -> (Alone, Pending) {
    let mut pending = Pending::default();
    let (mut before, mut open) = (0, false);
    for &byte in bytes {
        let (broken, step) = pending.feed(byte);
        before += if broken { REPLACEMENT.len() } else { 0 };
        match step {
            Step::Waits => open = true,
            Step::Character(character, length) => {
                before += length;
                open = character[..length] == *REPLACEMENT;
            }
            Step::Broken => {
                before += REPLACEMENT.len();
                open = true;
            }
        }
    }
    (Alone { open, before: before.min(usize::from(u16::MAX)) as u16 }, pending)
}

/// The recorded text of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownToken<'a> {
    /// Its id, determined by its own bytes.
    Id(u32),
    /// Nothing: its bytes end inside a character, or it is a special token that the recorder hides.
    Nothing,
    /// Text: its own, with U+FFFD for invalid bytes, or its own after the text of the hidden tokens before it.
    Text(&'a str),
}

/// Facts about the recorder and the vocabulary.
#[derive(Clone, Copy)]
pub struct RecorderFacts<'a> {
    pub tokenizer: &'a Tokenizer,
    /// True if a special token may show nothing.
    pub hides_specials: bool,
}

/// The ids that one token may have, as far as it matters: none, one or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// No id fits.
    #[default]
    None,
    /// Only this id fits.
    One(u32),
    /// At least two ids fit.
    Many,
}

impl Choice {
    fn add(&mut self, id: u32) {
        *self = match *self {
            Self::None => Self::One(id),
            Self::One(first) if first == id => Self::One(first),
            _ => Self::Many,
        };
    }

    /// Returns the id if exactly one fits.
    pub fn id(self) -> Option<u32> {
        if let Self::One(id) = self { Some(id) } else { None }
    }
}

/// Returns the ids that a token which shows nothing may have in any context.
fn hidden(facts: RecorderFacts<'_>) -> impl Iterator<Item = u32> {
    let specials = if facts.hides_specials { facts.tokenizer.special_ids() } else { &[] };
    facts.tokenizer.partial().open().iter().chain(specials).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_tokens_fit_a_text_that_hides_specials_and_no_other_text() {
        let tokenizer = crate::tokenizer::example();
        let (ids, special) = (tokenizer.encode("price of").unwrap(), tokenizer.special_ids()[0]);
        let facts = RecorderFacts { tokenizer: &tokenizer, hides_specials: true };
        let seen: Vec<ShownToken<'_>> =
            ids[..1].iter().chain(&[special]).chain(&ids[1..]).map(|&id| ShownToken::Id(id)).collect();
        for (text, may_go_on, fits) in
            [("price of", false, true), ("price o", true, true), ("price of two", true, false), ("rice", true, false)]
        {
            let result = solve(&seen, CompleteText { text, may_continue: may_go_on, with_specials: false }, facts);
            assert_eq!(result.is_some(), fits, "{text}");
        }
    }
}

#[cfg(test)]
mod view_tests {
    use super::*;

    #[test]
    fn a_token_shows_its_own_text_nothing_or_the_text_of_a_character_that_it_completes() {
        use Shown::{Completed, Nothing, Own};
        let cases: [(&[&[u8]], &[Shown]); 6] = [
            // " " E3, 81, 95: the last token shows " さ", four bytes.
            (&[b" \xE3", b"\x81", b"\x95"], &[Nothing, Nothing, Completed(4)]),
            // A stray part does not extend further.
            (&[b"\xC3", b"a"], &[Nothing, Own]),
            (&[b"\xC3", b"\xE3\x81", b"\x95"], &[Nothing, Nothing, Completed(3)]),
            (&[b"\x95", b"\xC3", b"\xA9\xC3"], &[Nothing; 3]),
            (&["\u{FFFD}".as_bytes()], &[Nothing]),
            // Text after the end of a character is the token's own.
            (&[b"\xC3", b"\x85sa"], &[Nothing, Own]),
        ];
        for (tokens, expected) in cases {
            let mut view = View::default();
            let show = |bytes: &&[u8]| {
                let (shown, next) = view.show(bytes);
                view = next;
                shown
            };
            assert_eq!(tokens.iter().map(show).collect::<Vec<_>>(), expected, "{tokens:?}");
        }
    }
}
