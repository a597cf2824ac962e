//! All tokens of a generation against its whole text.
//!
//! A path through the layers is one list of ids that shows what the record shows and decodes to its text. Forward, the
//! states that can be reached; backward, those from which the end can be; what stands on such paths only once is known.

use super::run::run;
use super::setting::{Choice, Seen, Setting, hidden};
use super::utf8::{Pending, REPLACEMENT, Step};
use super::view::{Shown, View};
use std::collections::HashMap;

/// States of one layer, and entries tried in all, past which the text is given up.
const STATES: usize = 4096;
const TRIES: usize = 1 << 21;

/// The text, as far as it is known.
#[derive(Debug, Clone, Copy)]
pub struct Whole<'a> {
    /// What the tokens decode to, with U+FFFD for what is no character; parts of a character at its end are left out.
    pub text: &'a str,
    /// Whether more tokens may stand behind it: those of a stop string or a stop token.
    pub may_go_on: bool,
    /// Whether special tokens are written in it.
    pub with_specials: bool,
}

/// What the text determines.
#[derive(Debug, Default)]
pub struct Found {
    /// One for each token.
    pub choices: Vec<Choice>,
    /// For each token and the end: the byte of the text it begins at, where that is certain and between characters.
    pub starts: Vec<Option<u32>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    /// Bytes of the text decoded; `PAST` behind its end.
    at: u32,
    /// What waits in the decoder of the whole text.
    pending: Pending,
    /// What waits in that of single tokens.
    view: View,
}

const PAST: u32 = u32::MAX;

struct Edge {
    from: u32,
    to: u32,
    id: u32,
}

struct Search<'a> {
    whole: Whole<'a>,
    setting: Setting<'a>,
    states: Vec<State>,
    /// First state of each layer, and the end.
    layers: Vec<usize>,
    edges: Vec<Edge>,
    /// First edge into each layer.
    into: Vec<usize>,
    next: HashMap<State, u32>,
    tries: usize,
}

/// The ids that `seen` and the text determine; `None` where nothing fits both, or too much does.
pub fn whole(seen: &[Seen<'_>], whole: Whole<'_>, setting: Setting<'_>) -> Option<Found> {
    let start = State { at: 0, pending: Pending::default(), view: View::default() };
    let mut search = Search {
        whole,
        setting,
        states: vec![start],
        layers: vec![0, 1],
        edges: Vec::new(),
        into: vec![0],
        next: HashMap::new(),
        tries: 0,
    };
    for (index, &one) in seen.iter().enumerate() {
        search.layer(one, index + 1 == seen.len())?;
    }
    search.finish(seen.len())
}

impl Search<'_> {
    /// The states behind one more token.
    fn layer(&mut self, seen: Seen<'_>, last: bool) -> Option<()> {
        let (start, end) = (self.layers[self.layers.len() - 2], self.layers[self.layers.len() - 1]);
        self.next.clear();
        self.into.push(self.edges.len());
        for from in start..end {
            match seen {
                Seen::Id(id) => self.known(from, id, last),
                Seen::Nothing => self.search(from, None),
                Seen::Text(text) => self.search(from, Some(text)),
            }
            if self.next.len() > STATES || self.tries > TRIES {
                return None;
            }
        }
        self.layers.push(self.states.len());
        (!self.next.is_empty()).then_some(())
    }

    /// States that differ only in which character cannot come to be are one: where the text has U+FFFD next, what waits
    /// will be broken, and only the bytes that may still join it matter.
    fn canonical(&self, state: State) -> State {
        let broken = state.at != PAST && !state.pending.is_empty() && {
            self.whole.text.as_bytes()[state.at as usize..].starts_with(REPLACEMENT)
        };
        if !broken {
            return state;
        }
        let pending = state.pending.class();
        let view = if state.view.pending == state.pending { View { pending, before: 0 } } else { state.view };
        State { pending, view, ..state }
    }

    fn edge(&mut self, from: usize, to: State, id: u32) {
        let to = self.canonical(to);
        let states = &mut self.states;
        let to = *self.next.entry(to).or_insert_with(|| {
            states.push(to);
            (states.len() - 1) as u32
        });
        self.edges.push(Edge { from: from as u32, to, id });
    }

    fn known(&mut self, from: usize, id: u32, last: bool) {
        let state = self.states[from];
        let bytes = self.setting.tokenizer.token_bytes(id).unwrap_or_default();
        if self.setting.tokenizer.is_special(id) {
            let to = State { view: View::default(), ..state };
            let written = if self.whole.with_specials { self.feed(state, bytes) } else { None };
            if let Some(to) = written {
                self.edge(from, State { view: View::default(), ..to }, id);
            } else if !self.whole.with_specials || last || state.at == PAST {
                self.edge(from, to, id);
            }
            return;
        }
        let view = state.view.show(bytes).1;
        if let Some(to) = self.feed(state, bytes) {
            self.edge(from, State { view, ..to }, id);
        } else if self.whole.may_go_on && self.passes(state, bytes, last) {
            self.edge(from, State { at: PAST, pending: Pending::default(), view }, id);
        }
    }

    /// Tokens whose id is not shown, by the bytes that the text has next.
    fn search(&mut self, from: usize, text: Option<&str>) {
        let state = self.states[from];
        let tokenizer = self.setting.tokenizer;
        if text.is_none() && self.setting.hides_specials {
            for &id in tokenizer.special_ids() {
                self.edge(from, state, id);
            }
        }
        if state.at == PAST || (state.at as usize == self.whole.text.len() && state.pending.is_empty()) {
            self.behind(from, text);
            if state.at == PAST {
                return;
            }
        }
        let (forced, broken) = self.forced(state);
        for end in 1..=forced.len().min(tokenizer.max_piece_bytes()) {
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
            // What waits may be the broken part, or a part of it: then any entry that is no text of its own may follow.
            let known: &[u8] = if state.pending.is_empty() { &forced } else { &[] };
            for (bytes, id) in tokenizer.partial().beginning_with(known) {
                self.consider(from, id, bytes, text);
            }
        }
    }

    /// Adds `id` where it shows what the record shows and the text goes on with its bytes.
    fn consider(&mut self, from: usize, id: u32, bytes: &[u8], text: Option<&str>) {
        self.tries += 1;
        let state = self.states[from];
        let (shown, view) = state.view.show(bytes);
        let alone = |text: &str| String::from_utf8_lossy(bytes) == text;
        let fits = match (text, shown) {
            (None, shown) => shown == Shown::Nothing,
            (Some(text), Shown::Completed(length)) => length == text.len() || alone(text),
            (Some(text), _) => alone(text),
        };
        if fits && let Some(to) = self.feed(state, bytes) {
            self.edge(from, State { view, ..to }, id);
        }
    }

    /// Tokens behind the end of the text: nothing there is decoded.
    fn behind(&mut self, from: usize, text: Option<&str>) {
        let view = View::default();
        let to = State { at: PAST, pending: Pending::default(), view };
        match text {
            // Two of them stand for all.
            None => hidden(self.setting).take(2).for_each(|id| self.edge(from, to, id)),
            Some(text) if self.whole.may_go_on => {
                let choices = run(0, Some(text), self.setting);
                if let Some(id) = choices[0].id() {
                    self.edge(from, to, id);
                }
            }
            Some(_) => {}
        }
    }

    /// Whether a known token may stand behind the text, or across its end.
    fn passes(&self, state: State, bytes: &[u8], last: bool) -> bool {
        let ends = |length: usize| {
            let end = self.feed(state, &bytes[..length]);
            end.is_some_and(|end| end.at as usize == self.whole.text.len() && end.pending.is_empty())
        };
        state.at == PAST || (usize::from(!last)..bytes.len()).any(ends)
    }

    /// The bytes that the text has next, up to what is no character, and whether that is within reach of one token.
    fn forced(&self, state: State) -> (Vec<u8>, bool) {
        let reach = self.setting.tokenizer.max_piece_bytes() + 4;
        let mut rest = &self.whole.text.as_bytes()[state.at as usize..];
        let waiting = state.pending.bytes();
        let mut broken = false;
        if rest.starts_with(waiting) {
            rest = &rest[waiting.len()..];
        } else if let Some(behind) = rest.strip_prefix(REPLACEMENT) {
            // What waits is broken off by the next token.
            (rest, broken) = (behind, true);
        }
        let near = &rest[..rest.len().min(reach)];
        match memchr::memmem::find(near, REPLACEMENT) {
            Some(end) => (near[..end].to_vec(), true),
            None => (near.to_vec(), broken),
        }
    }

    /// Decodes `bytes` along the text; `None` where it says something else.
    fn feed(&self, state: State, bytes: &[u8]) -> Option<State> {
        if state.at == PAST {
            return None;
        }
        let text = self.whole.text.as_bytes();
        let (mut at, mut pending) = (state.at as usize, state.pending);
        let take = |at: &mut usize, expected: &[u8]| {
            let here = text.get(*at..)?.starts_with(expected);
            *at += expected.len();
            here.then_some(())
        };
        for &byte in bytes {
            let (broken, step) = pending.feed(byte);
            if broken {
                take(&mut at, REPLACEMENT)?;
            }
            match step {
                Step::Waits => {}
                Step::Character(character, length) => take(&mut at, &character[..length])?,
                Step::Broken => take(&mut at, REPLACEMENT)?,
            }
        }
        let rest = &text[at..];
        let possible =
            pending.is_empty() || rest.is_empty() || rest.starts_with(pending.bytes()) || rest.starts_with(REPLACEMENT);
        possible.then_some(State { at: at as u32, pending, view: state.view })
    }

    /// Whether a generation may end here.
    fn ends(&self, state: State) -> bool {
        let rest = self.whole.text.as_bytes().get(state.at as usize..).unwrap_or_default();
        rest.is_empty() || (rest == REPLACEMENT && !state.pending.is_empty())
    }

    /// What stands on every path from the beginning to an end.
    fn finish(self, count: usize) -> Option<Found> {
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
            let mut found = (self.layers[layer]..self.layers[layer + 1]).filter(|&state| alive[state]);
            let first = self.states[found.next()?];
            let sure = first.at != PAST && first.pending.is_empty();
            let alike = |state: usize| self.states[state].at == first.at && self.states[state].pending.is_empty();
            (sure && found.all(alike)).then_some(first.at)
        };
        let starts = (0..=count).map(start_of).collect();
        alive[0].then_some(Found { choices, starts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_tokens_fit_a_text_that_hides_specials_and_no_other_text() {
        let tokenizer = crate::tokenizer::example();
        let (ids, special) = (tokenizer.encode("price of").unwrap(), tokenizer.special_ids()[0]);
        let setting = Setting { tokenizer: &tokenizer, hides_specials: true };
        let seen: Vec<Seen<'_>> = ids[..1].iter().chain(&[special]).chain(&ids[1..]).map(|&id| Seen::Id(id)).collect();
        for (text, may_go_on, fits) in
            [("price of", false, true), ("price o", true, true), ("price of two", true, false), ("rice", true, false)]
        {
            let found = whole(&seen, Whole { text, may_go_on, with_specials: false }, setting);
            assert_eq!(found.is_some(), fits, "{text}");
        }
    }
}
