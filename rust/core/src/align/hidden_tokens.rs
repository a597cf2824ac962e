//! Infers ids that a record determines although some of its tokens do not show their bytes.
//!
//! A recorder decodes each token alone. One that is a part of a character shows nothing, or U+FFFD, or, if it completes
//! a character that earlier tokens began, all of their text at once. What these texts, the whole text and the number
//! of tokens still determine is found here by dynamic programming; every other id stays unknown.
//!
//! A path through the layers is one list of ids that shows what the record shows and decodes to its text. Forward, the
//! states that can be reached; backward, those from which the end can be; what stands on such paths only once is known.

use crate::tokenizer::Tokenizer;
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

/// The beginning of a character that earlier tokens left, as the recorder holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct View {
    pub pending: Pending,
    /// Bytes of text in the token that began it, before the character.
    pub before: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Its own text, which does not end in U+FFFD.
    Own,
    /// Nothing: its text ends in U+FFFD, and what stands before it does not mend that.
    Nothing,
    /// The text of `.0` bytes that it completes, from the token that began the character.
    Completed(usize),
}

impl View {
    /// What is shown of a token with `bytes`, and the view after it.
    pub fn show(self, bytes: &[u8]) -> (Shown, Self) {
        let mut joint = self.pending;
        // Whether what waits at the end began in an earlier token.
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
    /// Its text ends in U+FFFD.
    open: bool,
    /// Bytes of its text before what waits at its end.
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

/// What the record shows of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen<'a> {
    /// Its id, by bytes of its own.
    Id(u32),
    /// Nothing: its bytes end inside a character, or it is a special token that the recorder hides.
    Nothing,
    /// Text that is its own, perhaps with U+FFFD for what is no character, or its own behind that of the tokens before.
    Text(&'a str),
}

/// What is known of the recorder and the vocabulary.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether a special token may show nothing.
    pub hides_specials: bool,
}

/// The ids that one token may have, as far as it matters: none, one, or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// Nothing fits.
    #[default]
    None,
    /// Only this id fits.
    One(u32),
    /// At least two fit.
    Many,
}

impl Choice {
    fn add(&mut self, id: u32) {
        *self = match *self {
            Self::None => Self::One(id),
            Self::One(known) if known == id => Self::One(known),
            _ => Self::Many,
        };
    }

    /// The id, if there is only one.
    pub fn id(self) -> Option<u32> {
        if let Self::One(id) = self { Some(id) } else { None }
    }
}

/// Ids that a token which shows nothing may have, whatever stands around it.
fn hidden(setting: Setting<'_>) -> impl Iterator<Item = u32> {
    let specials = if setting.hides_specials { setting.tokenizer.special_ids() } else { &[] };
    setting.tokenizer.partial().open().iter().chain(specials).copied()
}

/// U+FFFD in UTF-8.
pub const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Up to three bytes that begin a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Pending {
    bytes: [u8; 3],
    length: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It waits with those before it.
    Waits,
    /// It completes a character of `.1` bytes.
    Character([u8; 4], usize),
    /// It is no part of a character.
    Broken,
}

impl Pending {
    /// The waiting bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length as usize]
    }

    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// The first of the beginnings that take the same bytes for as long. U+FFFD itself stays apart.
    pub fn class(self) -> Self {
        let (first, second) = match (self.bytes[0], self.length) {
            (0xC2..=0xDF, _) => (0xC2, 0),
            (0xEF, 2..) if self.bytes[1] == 0xBF => (0xEF, 0xBF),
            (0xE0..=0xEF, 2..) => (0xE1, 0x80),
            (0xE1..=0xEC | 0xEE, 1) => (0xE1, 0),
            (0xF0..=0xF4, 2..) => (0xF1, 0x80),
            (0xF1..=0xF3, 1) => (0xF1, 0),
            (first, _) => (first, 0),
        };
        let third = if self.length == 3 { 0x80 } else { 0 };
        Self { bytes: [first, second, third], length: self.length }
    }

    /// Takes one byte. True with the step: the bytes that waited before it were broken off first, as one U+FFFD.
    pub fn feed(&mut self, byte: u8) -> (bool, Step) {
        if self.length > 0 {
            if self.takes(byte) {
                let mut character = [0; 4];
                character[..self.length as usize].copy_from_slice(self.bytes());
                character[self.length as usize] = byte;
                let length = self.length as usize + 1;
                if length == width(self.bytes[0]) {
                    *self = Self::default();
                    return (false, Step::Character(character, length));
                }
                self.bytes[length - 1] = byte;
                self.length += 1;
                return (false, Step::Waits);
            }
            *self = Self::default();
            return (true, self.begin(byte));
        }
        (false, self.begin(byte))
    }

    fn begin(&mut self, byte: u8) -> Step {
        match width(byte) {
            1 => Step::Character([byte, 0, 0, 0], 1),
            0 => Step::Broken,
            _ => {
                self.bytes[0] = byte;
                self.length = 1;
                Step::Waits
            }
        }
    }

    /// Whether `byte` may follow: UTF-8 excludes overlong forms, surrogates, and what is past U+10FFFF.
    fn takes(self, byte: u8) -> bool {
        if self.length > 1 {
            return matches!(byte, 0x80..=0xBF);
        }
        match self.bytes[0] {
            0xE0 => matches!(byte, 0xA0..=0xBF),
            0xED => matches!(byte, 0x80..=0x9F),
            0xF0 => matches!(byte, 0x90..=0xBF),
            0xF4 => matches!(byte, 0x80..=0x8F),
            _ => matches!(byte, 0x80..=0xBF),
        }
    }
}

/// Bytes of the character that begins with `byte`, 0 where none does.
fn width(byte: u8) -> usize {
    match byte {
        0x00..=0x7F => 1,
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 0,
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

#[cfg(test)]
mod view_tests {
    use super::*;

    #[test]
    fn a_token_shows_its_own_text_nothing_or_the_text_of_a_character_that_it_completes() {
        use Shown::{Completed, Nothing, Own};
        let cases: [(&[&[u8]], &[Shown]); 6] = [
            // " " E3, 81, 95: the last shows " さ", four bytes.
            (&[b" \xE3", b"\x81", b"\x95"], &[Nothing, Nothing, Completed(4)]),
            // A stray part does not reach further.
            (&[b"\xC3", b"a"], &[Nothing, Own]),
            (&[b"\xC3", b"\xE3\x81", b"\x95"], &[Nothing, Nothing, Completed(3)]),
            (&[b"\x95", b"\xC3", b"\xA9\xC3"], &[Nothing; 3]),
            (&["\u{FFFD}".as_bytes()], &[Nothing]),
            // Text behind the rest of a character is its own.
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

#[cfg(test)]
mod utf8_tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(bytes: &[u8]) -> Vec<u8> {
        let mut pending = Pending::default();
        let mut text = Vec::new();
        for &byte in bytes {
            let (broken, step) = pending.feed(byte);
            if broken {
                text.extend_from_slice(REPLACEMENT);
            }
            match step {
                Step::Waits => {}
                Step::Character(character, length) => text.extend_from_slice(&character[..length]),
                Step::Broken => text.extend_from_slice(REPLACEMENT),
            }
        }
        if !pending.is_empty() {
            text.extend_from_slice(REPLACEMENT);
        }
        text
    }

    #[test]
    fn beginnings_are_of_one_class_where_the_same_bytes_end_them() {
        let class = |bytes: &[u8]| {
            let mut pending = Pending::default();
            for &byte in bytes {
                assert_eq!(pending.feed(byte), (false, Step::Waits));
            }
            pending.class().bytes().to_vec()
        };
        assert_eq!([class(&[0xE3, 0x81]), class(&[0xEF, 0xBC])], [[0xE1, 0x80]; 2]);
        assert_eq!(class(&[0xEF, 0xBF]), [0xEF, 0xBF]); // U+FFFD may come of it
    }

    proptest! {
        #[test]
        fn it_decodes_as_the_standard_library_does(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0xE3), Just(0x81), Just(0xF0), Just(0x9F), Just(0xED), Just(0xA0), Just(0xF4)], 0..24)
        ) {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            prop_assert_eq!(decoded(&bytes), text.into_bytes());
        }
    }
}
