//! Finds the loops over the messages in which a render may go on where an earlier one of the same conversation stands.
//!
//! A template is a program: what it wrote for the first messages of a longer conversation is what it writes for them in
//! the longer one as long as nothing it read depends on what follows. What its source says of that is read here: loops that
//! stand in no capture and ask for nothing but their place, and namespaces whose attributes can be put back. What can be
//! known only while it runs is watched by `messages`. Loops that qualify get calls around their bodies, which stand where
//! no text is, so that nothing is trimmed otherwise.

use crate::template::lexer::{Token, tag_parts, token_at};
use std::collections::BTreeSet;
use std::ops::Range;

/// What a render needs to know to go on in a loop of this template.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::template) struct Resumable {
    /// For each loop, by its number, whether it asks what the next item is, or whether there is one.
    pub looks_ahead: Vec<bool>,
    /// Attributes of namespaces that are assigned: what a loop leaves behind, beside its text.
    pub attributes: Vec<(String, String)>,
    pub namespaces: Vec<String>,
    /// Other variables that are set outside loops.
    pub variables: Vec<String>,
    /// Whether a macro may hold an earlier value of such a variable: it is set again, and a macro takes it from outside.
    pub holds_earlier: bool,
}

/// A tag of the source that the engine gets.
#[derive(Debug)]
pub(in crate::template) struct Tag {
    /// Where it stands there.
    pub at: Range<usize>,
    /// What stood between its delimiters.
    pub inside: String,
    /// `{% %}`, not `{{ }}`.
    pub is_statement: bool,
}

/// What is open at a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    If,
    Macro,
    Capture,
    /// A loop, and its place among those that may qualify.
    Loop(Option<usize>),
}

#[derive(Debug)]
struct Candidate {
    head: usize,
    end: usize,
    looks_ahead: bool,
    qualifies: bool,
}

/// What the tags say, read one by one.
#[derive(Debug, Default)]
struct Reading {
    open: Vec<Open>,
    loops: Vec<Candidate>,
    /// Names and attributes that are assigned: `namespace.attribute`.
    assigned: BTreeSet<(String, String)>,
    /// Names that are set outside loops and macros, and how often; whether to a namespace.
    outer: Vec<(String, bool)>,
    /// Names that are bound elsewhere: in loops, by macros, by `with`.
    inner: BTreeSet<String>,
    /// Namespaces of one item or call, which are gone with it, and how many blocks are open where they are made.
    local: Vec<(String, usize)>,
    /// Names of the macro that is open, and those that macros take from outside.
    parameters: Vec<String>,
    captured: BTreeSet<String>,
}

/// The names that make a loop depend on how many items it has.
const OF_LENGTH: [&str; 4] = ["length", "revindex", "revindex0", "changed"];
const OF_NEXT: [&str; 2] = ["last", "nextitem"];
const OF_PLACE: [&str; 7] = ["index", "index0", "first", "depth", "depth0", "previtem", "cycle"];

/// The template's loops, with the calls written into `source`; `None` where no render can go on in one.
pub(in crate::template) fn resumable(source: &mut String, tags: &[Tag]) -> Option<Resumable> {
    let mut reading = Reading::default();
    for (number, tag) in tags.iter().enumerate() {
        reading.tag(number, tag)?;
    }
    let mut found = reading.told()?;
    let loops: Vec<Candidate> = reading.loops.into_iter().filter(|each| each.qualifies && each.end > 0).collect();
    if loops.is_empty() {
        return None;
    }
    found.looks_ahead = loops.iter().map(|each| each.looks_ahead).collect();
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for (number, each) in loops.iter().enumerate() {
        let head = &source[tags[each.head].at.clone()];
        edits.push((tags[each.head].at.clone(), headed(head, number, &found.attributes)?));
        edits.push((tags[each.end].at.clone(), ended(&source[tags[each.end].at.clone()])?));
    }
    edits.sort_by_key(|(at, _)| std::cmp::Reverse(at.start));
    for (at, text) in edits {
        source.replace_range(at, &text);
    }
    Some(found)
}

/// The head of loop `number`, which skips items, and puts attributes back before the first that is not skipped.
fn headed(tag: &str, number: usize, attributes: &[(String, String)]) -> Option<String> {
    let (open, inside, close) = tag_parts(tag)?;
    let inside = inside.replacen("|__each", &format!("|__turns({number})"), 1);
    let begins = format!("{open}{inside}%}}{{% if __begins()");
    if attributes.is_empty() {
        return Some(format!("{begins} {close}"));
    }
    let put = |(at, (name, attribute)): (usize, &(String, String))| {
        format!("{{% if __has({at}) %}}{{% set {name}.{attribute} = __kept({at}) %}}{{% endif %}}")
    };
    let restored: String = attributes.iter().enumerate().map(put).collect();
    Some(format!("{begins} %}}{{% if __restores() %}}{restored}{{% endif {close}"))
}

/// The end of a loop.
fn ended(tag: &str) -> Option<String> {
    let (open, _, close) = tag_parts(tag)?;
    Some(format!("{open} endif %}}{{% endfor %}}{{% set __end = __ended() {close}"))
}

impl Reading {
    fn tag(&mut self, number: usize, tag: &Tag) -> Option<()> {
        let tokens = tokens(&tag.inside);
        if tokens.iter().any(|token| matches!(token, Token::Name(name) if name.starts_with("__"))) {
            return None;
        }
        self.loop_variables(&tokens)?;
        if self.depth().1 {
            let taken = names(&tokens).into_iter().filter(|name| !self.parameters.contains(name));
            self.captured.extend(taken);
        }
        if !tag.is_statement {
            return Some(());
        }
        let Token::Name(word) = tokens.first()? else { return None };
        self.statement(number, word, &tokens[1..])?;
        let open = self.open.len().saturating_sub(usize::from(matches!(*word, "else" | "elif")));
        self.local.retain(|(_, blocks)| *blocks <= open);
        Some(())
    }

    fn statement(&mut self, number: usize, word: &str, tokens: &[Token<'_>]) -> Option<()> {
        match word {
            "if" => self.open.push(Open::If),
            "for" => self.begin(number, tokens),
            "macro" => {
                self.inner.extend(names(tokens));
                self.parameters.extend(names(tokens));
                self.open.push(Open::Macro);
            }
            "with" | "call" => {
                self.inner.extend(names(tokens));
                self.open.push(Open::Capture);
            }
            "filter" | "autoescape" | "generation" => self.open.push(Open::Capture),
            "set" => self.assign(tokens),
            "else" | "elif" => {
                if let Some(Open::Loop(Some(at))) = self.open.last() {
                    self.loops[*at].qualifies = false;
                }
            }
            "endfor" => {
                let Some(Open::Loop(candidate)) = self.open.pop() else { return None };
                if let Some(at) = candidate {
                    self.loops[at].end = number;
                }
            }
            "endmacro" => {
                self.open.pop()?;
                if !self.depth().1 {
                    self.parameters.clear();
                }
            }
            "endif" | "endwith" | "endcall" | "endfilter" | "endautoescape" | "endgeneration" | "endset" => {
                self.open.pop()?;
            }
            "continue" | "raw" | "endraw" => {}
            // A loop that is left, another template: nothing that is known of.
            _ => return None,
        }
        Some(())
    }

    /// How many loops are open, and whether a macro is.
    fn depth(&self) -> (usize, bool) {
        let loops = self.open.iter().filter(|open| matches!(open, Open::Loop(_))).count();
        (loops, self.open.contains(&Open::Macro))
    }

    fn begin(&mut self, number: usize, tokens: &[Token<'_>]) {
        let at = tokens.iter().position(|token| *token == Token::Name("in")).unwrap_or(tokens.len());
        self.inner.extend(names(&tokens[..at]));
        let outside = self.open.iter().all(|open| *open == Open::If);
        let items = tokens.get(at + 1..).unwrap_or_default();
        let plain = match items {
            [Token::Name(_)] => true,
            [Token::Name(_), Token::Sign("["), rest @ ..] => rest.contains(&Token::Sign(":")),
            _ => false,
        };
        let words = items.iter().any(|token| matches!(token, Token::Name("if" | "recursive" | "else")));
        let candidate = (outside && plain && !words).then(|| {
            self.loops.push(Candidate { head: number, end: 0, looks_ahead: false, qualifies: true });
            self.loops.len() - 1
        });
        self.open.push(Open::Loop(candidate));
    }

    /// `loop.attribute` wherever it stands; `loop` for itself could be asked anything.
    fn loop_variables(&mut self, tokens: &[Token<'_>]) -> Option<()> {
        for (at, _) in tokens.iter().enumerate().filter(|(_, token)| **token == Token::Name("loop")) {
            let (Some(Token::Sign(".")), Some(Token::Name(attribute))) = (tokens.get(at + 1), tokens.get(at + 2))
            else {
                return None;
            };
            // The loop of a caller is none of a macro's.
            let inmost = self.open.iter().rev().find(|open| matches!(open, Open::Loop(_) | Open::Macro));
            let Some(Open::Loop(candidate)) = inmost else { return None };
            let Some(candidate) = candidate.filter(|_| self.depth() == (1, false)) else { continue };
            let candidate = &mut self.loops[candidate];
            candidate.looks_ahead |= OF_NEXT.contains(attribute);
            candidate.qualifies &= !OF_LENGTH.contains(attribute);
            if ![&OF_LENGTH[..], &OF_NEXT, &OF_PLACE].concat().contains(attribute) {
                return None;
            }
        }
        Some(())
    }

    fn assign(&mut self, tokens: &[Token<'_>]) {
        let end = tokens.iter().position(|token| matches!(token, Token::Sign("=" | "|"))).unwrap_or(tokens.len());
        let target = &tokens[..end];
        let (loops, within_macro) = self.depth();
        if tokens.get(end) != Some(&Token::Sign("=")) {
            self.open.push(Open::Capture);
        }
        if let [Token::Name(name), Token::Sign("."), Token::Name(attribute)] = target {
            if self.local.iter().all(|(local, _)| local != name) {
                self.assigned.insert(((*name).to_owned(), (*attribute).to_owned()));
            }
            return;
        }
        let value = tokens.get(end + 1..).unwrap_or_default();
        let is_namespace = matches!(value, [Token::Name("namespace"), Token::Sign("("), ..]);
        for name in names(target) {
            match (loops > 0 || within_macro, is_namespace) {
                (false, _) => self.outer.push((name, is_namespace)),
                (true, true) => self.local.push((name, self.open.len())),
                (true, false) => drop(self.inner.insert(name)),
            }
        }
    }

    /// What was read, if every attribute that is assigned is one of a namespace that has one name alone.
    fn told(&self) -> Option<Resumable> {
        let set_to = |namespace: bool| -> BTreeSet<String> {
            self.outer.iter().filter(|(_, is)| *is == namespace).map(|(name, _)| name.clone()).collect()
        };
        let (namespaces, variables) = (set_to(true), set_to(false));
        let has_others = namespaces.iter().any(|name| self.inner.contains(name));
        if has_others || self.assigned.iter().any(|(name, _)| !namespaces.contains(name)) {
            return None;
        }
        let attributes = self.assigned.iter().cloned().collect();
        let again = |name: &String| self.outer.iter().filter(|(outer, _)| outer == name).count() > 1;
        let holds_earlier = self.captured.iter().any(again);
        let (namespaces, variables) = (namespaces.into_iter().collect(), variables.into_iter().collect());
        Some(Resumable { looks_ahead: Vec::new(), attributes, namespaces, variables, holds_earlier })
    }
}

fn tokens(inside: &str) -> Vec<Token<'_>> {
    let mut all = Vec::new();
    let mut at = 0;
    loop {
        let (token, end) = token_at(inside, at);
        if token == Token::End {
            return all;
        }
        all.push(token);
        at = end;
    }
}

fn names(tokens: &[Token<'_>]) -> Vec<String> {
    let name = |token: &Token<'_>| if let Token::Name(name) = token { Some((*name).to_owned()) } else { None };
    tokens.iter().filter_map(name).collect()
}
