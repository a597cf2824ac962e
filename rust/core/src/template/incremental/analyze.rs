//! Finds the loops over messages in which a render may resume where an earlier render of the same conversation ended.
//!
//! A template is a program. Its output for the first messages of a conversation also starts the output for a longer
//! conversation, as long as nothing it read depends on later messages. This module reads from the source what it
//! shows: loops that are in no capture and use only their position, and namespaces whose attributes can be
//! restored. `messages` tracks what is only known at run time. Loops that qualify get calls around their bodies. The
//! calls are placed where there is no text, so that trimming does not change.

use crate::template::lexer::{Token, tag_parts, token_at};
use std::collections::BTreeSet;
use std::ops::Range;

/// The facts that a render needs to resume in a loop of this template.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::template) struct Resumable {
    /// For each loop, by number: whether it reads the next item or whether there is one.
    pub looks_ahead: Vec<bool>,
    /// Namespace attributes that are assigned: the state that a loop produces in addition to its text.
    pub attributes: Vec<(String, String)>,
    pub namespaces: Vec<String>,
    /// Other variables that are set outside loops.
    pub variables: Vec<String>,
    /// True if a macro may capture an earlier value of such a variable: the variable is set again, and a macro reads
    /// it from outside.
    pub holds_earlier: bool,
}

/// A tag of the source that the engine compiles.
#[derive(Debug)]
pub(in crate::template) struct Tag {
    /// Its byte range in that source.
    pub at: Range<usize>,
    /// The text between its delimiters.
    pub inside: String,
    /// True for `{% %}`, false for `{{ }}`.
    pub is_statement: bool,
}

/// A block that is open at a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    If,
    Macro,
    Capture,
    /// A loop, and its index among the candidates.
    Loop(Option<usize>),
}

#[derive(Debug)]
struct Candidate {
    head: usize,
    end: usize,
    looks_ahead: bool,
    qualifies: bool,
}

/// State of the analysis, which reads the tags one by one.
#[derive(Debug, Default)]
struct Reading {
    open: Vec<Open>,
    loops: Vec<Candidate>,
    /// Names and attributes that are assigned: `namespace.attribute`.
    assigned: BTreeSet<(String, String)>,
    /// Names that are set outside loops and macros, once for each assignment, and whether the value is a namespace.
    outer: Vec<(String, bool)>,
    /// Names that are bound in loops, by macros or by `with`.
    inner: BTreeSet<String>,
    /// Namespaces that exist for one item or call only, and the number of open blocks at their creation.
    local: Vec<(String, usize)>,
    /// Parameter names of the open macro, and names that macros read from outside.
    parameters: Vec<String>,
    captured: BTreeSet<String>,
}

/// Attributes that make a loop depend on its number of items.
const OF_LENGTH: [&str; 4] = ["length", "revindex", "revindex0", "changed"];
const OF_NEXT: [&str; 2] = ["last", "nextitem"];
const OF_PLACE: [&str; 7] = ["index", "index0", "first", "depth", "depth0", "previtem", "cycle"];

/// Returns the template's loops and inserts the calls into `source`. Returns `None` if no render can resume in a loop.
pub(in crate::template) fn resumable(source: &mut String, tags: &[Tag]) -> Option<Resumable> {
    let mut reading = Reading::default();
    for (number, tag) in tags.iter().enumerate() {
        reading.tag(number, tag)?;
    }
    let mut resumable = reading.resumable()?;
    let loops: Vec<Candidate> =
        reading.loops.into_iter().filter(|candidate| candidate.qualifies && candidate.end > 0).collect();
    if loops.is_empty() {
        return None;
    }
    resumable.looks_ahead = loops.iter().map(|candidate| candidate.looks_ahead).collect();
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for (number, candidate) in loops.iter().enumerate() {
        let head = &source[tags[candidate.head].at.clone()];
        edits.push((tags[candidate.head].at.clone(), headed(head, number, &resumable.attributes)?));
        edits.push((tags[candidate.end].at.clone(), ended(&source[tags[candidate.end].at.clone()])?));
    }
    edits.sort_by_key(|(at, _)| std::cmp::Reverse(at.start));
    for (at, text) in edits {
        source.replace_range(at, &text);
    }
    Some(resumable)
}

/// Returns the head of loop `number`. The new head skips items and restores attributes before the first item that is
/// not skipped.
fn headed(tag: &str, number: usize, attributes: &[(String, String)]) -> Option<String> {
    let (open, inside, close) = tag_parts(tag)?;
    let inside = inside.replacen("|__each", &format!("|__turns({number})"), 1);
    let begins = format!("{open}{inside}%}}{{% if __begins()");
    if attributes.is_empty() {
        return Some(format!("{begins} {close}"));
    }
    let restore = |(at, (name, attribute)): (usize, &(String, String))| {
        format!("{{% if __has({at}) %}}{{% set {name}.{attribute} = __kept({at}) %}}{{% endif %}}")
    };
    let restored: String = attributes.iter().enumerate().map(restore).collect();
    Some(format!("{begins} %}}{{% if __restores() %}}{restored}{{% endif {close}"))
}

/// Returns the end of a loop.
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
            let outside_names = names(&tokens).into_iter().filter(|name| !self.parameters.contains(name));
            self.captured.extend(outside_names);
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
            // Leaving a loop early, or including another template, cannot be analyzed.
            _ => return None,
        }
        Some(())
    }

    /// Returns the number of open loops, and whether a macro is open.
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
            [Token::Name(_), Token::Sign("["), tail @ ..] => tail.contains(&Token::Sign(":")),
            _ => false,
        };
        let words = items.iter().any(|token| matches!(token, Token::Name("if" | "recursive" | "else")));
        let candidate = (outside && plain && !words).then(|| {
            self.loops.push(Candidate { head: number, end: 0, looks_ahead: false, qualifies: true });
            self.loops.len() - 1
        });
        self.open.push(Open::Loop(candidate));
    }

    /// Checks every use of `loop.attribute`. `loop` by itself could be used in any way and rules out resuming.
    fn loop_variables(&mut self, tokens: &[Token<'_>]) -> Option<()> {
        for (at, _) in tokens.iter().enumerate().filter(|(_, token)| **token == Token::Name("loop")) {
            let (Some(Token::Sign(".")), Some(Token::Name(attribute))) = (tokens.get(at + 1), tokens.get(at + 2))
            else {
                return None;
            };
            // The loop of a caller is not visible in a macro.
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

    /// Returns the result if every assigned attribute belongs to a namespace with a single name.
    fn resumable(&self) -> Option<Resumable> {
        let set_with = |namespace: bool| -> BTreeSet<String> {
            self.outer
                .iter()
                .filter(|(_, is_namespace)| *is_namespace == namespace)
                .map(|(name, _)| name.clone())
                .collect()
        };
        let (namespaces, variables) = (set_with(true), set_with(false));
        let is_rebound = namespaces.iter().any(|name| self.inner.contains(name));
        if is_rebound || self.assigned.iter().any(|(name, _)| !namespaces.contains(name)) {
            return None;
        }
        let attributes = self.assigned.iter().cloned().collect();
        let is_set_again = |name: &String| self.outer.iter().filter(|(outer, _)| outer == name).count() > 1;
        let holds_earlier = self.captured.iter().any(is_set_again);
        let (namespaces, variables) = (namespaces.into_iter().collect(), variables.into_iter().collect());
        Some(Resumable { looks_ahead: Vec::new(), attributes, namespaces, variables, holds_earlier })
    }
}

fn tokens(inside: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut at = 0;
    loop {
        let (token, end) = token_at(inside, at);
        if token == Token::End {
            return tokens;
        }
        tokens.push(token);
        at = end;
    }
}

fn names(tokens: &[Token<'_>]) -> Vec<String> {
    let name = |token: &Token<'_>| if let Token::Name(name) = token { Some((*name).to_owned()) } else { None };
    tokens.iter().filter_map(name).collect()
}
