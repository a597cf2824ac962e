//! Detects whether a template iterates over the parts of a message's content, as vLLM and SGLang detect it from the
//! source.
//!
//! vLLM's `_detect_content_format` analyzes Jinja's syntax tree. It follows assignments of `messages`, finds the loops
//! over them, and checks whether some loop iterates over `content` of such an item. A macro's parameter that receives
//! such content counts too, as does, outside macros, a variable named `content`. This module reads the same from the
//! tokens of the tags.

use super::incremental::analyze::Tag;
use super::lexer::{Token, token_at};
use std::collections::{HashMap, HashSet};

/// The servers that pass the parts of a content to the template. Other servers join the parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct WantsParts {
    pub vllm: bool,
    pub sglang: bool,
}

/// Words by which SGLang recognizes a template for media.
const MEDIA: [&str; 4] = ["image", "audio", "video", "vision"];

/// Returns what the servers detect in a template.
pub(super) fn wants_parts(source: &str, tags: &[Tag]) -> WantsParts {
    let tags: Vec<(Vec<Token<'_>>, bool)> = tags.iter().map(|tag| (tokens(&tag.inside), tag.is_statement)).collect();
    let parsed = Source::read(&tags);
    let named = |(name, key): (&str, Option<&str>)| matches!(name, "message" | "msg" | "m") && key == Some("content");
    WantsParts {
        vllm: parsed.iterates().unwrap_or(false),
        sglang: MEDIA.iter().any(|word| source.contains(word))
            || parsed.loops.iter().any(|for_loop| access(for_loop.items).is_some_and(named)),
    }
}

/// A `for` tag.
struct Loop<'t> {
    /// The loop variable; `None` if there are several.
    target: Option<&'t str>,
    items: &'t [Token<'t>],
    /// The macros that contain the loop.
    macros: Vec<usize>,
}

/// A macro: its name and the names of its parameters.
struct Macro<'t> {
    name: &'t str,
    parameters: Vec<&'t str>,
}

/// The tags of a template that the detection needs.
#[derive(Default)]
struct Source<'t> {
    loops: Vec<Loop<'t>>,
    /// Name (`None` if it is not a plain name) and value of each assignment.
    assigned: Vec<(Option<&'t str>, &'t [Token<'t>])>,
    macros: Vec<Macro<'t>>,
    /// Calls by name: the tokens between the parentheses.
    calls: HashMap<&'t str, Vec<&'t [Token<'t>]>>,
}

/// Maximum number of (macro, call) pairs that are checked; many times the number in real templates.
const PAIRS: usize = 1 << 16;

/// The detection failed with an error. Such templates count as accepting strings.
struct Failed;

impl<'t> Source<'t> {
    fn read(tags: &'t [(Vec<Token<'t>>, bool)]) -> Self {
        let mut parsed = Self::default();
        let mut open: Vec<usize> = Vec::new();
        for (tokens, is_statement) in tags {
            let word = match tokens.first() {
                Some(Token::Name(word)) if *is_statement => *word,
                _ => "",
            };
            match word {
                "for" => parsed.loops.extend(loop_of(&tokens[1..], &open)),
                "set" => parsed.assigned.extend(assignment(&tokens[1..])),
                "macro" => {
                    open.push(parsed.macros.len());
                    parsed.macros.push(macro_of(&tokens[1..]));
                }
                "endmacro" => {
                    open.pop();
                }
                _ => {}
            }
            if word != "macro" {
                parsed.calls_in(tokens);
            }
        }
        parsed
    }

    fn calls_in(&mut self, tokens: &'t [Token<'t>]) {
        for (at, pair) in tokens.windows(2).enumerate() {
            let [Token::Name(name), Token::Sign("(")] = pair else { continue };
            let is_method = at > 0 && matches!(tokens[at - 1], Token::Sign("." | "|"));
            if let (false, Some(end)) = (is_method, closing(tokens, at + 1)) {
                self.calls.entry(name).or_default().push(&tokens[at + 2..end]);
            }
        }
    }

    /// Returns true if some loop iterates over a message's content.
    fn iterates(&self) -> Result<bool, Failed> {
        let lists = self.named_after("messages")?;
        let mut messages: HashSet<&str> = HashSet::new();
        for for_loop in &self.loops {
            if matches!(access(for_loop.items), Some((name, None)) if lists.contains(name)) {
                messages.insert(for_loop.target.ok_or(Failed)?);
            }
        }
        let is_content =
            |tokens: &[Token<'_>]| matches!(access(tokens), Some((name, Some("content"))) if messages.contains(name));
        let mut pairs = PAIRS;
        let content_parameters =
            self.macros.iter().map(|definition| self.given_content(definition, is_content, &mut pairs));
        let content_parameters: Vec<HashSet<&str>> = content_parameters.collect();
        for for_loop in &self.loops {
            let plain = if let [Token::Name(name)] = for_loop.items { Some(*name) } else { None };
            let is_macro_content =
                || plain.is_some_and(|name| for_loop.macros.iter().any(|at| content_parameters[*at].contains(name)));
            let is_content_name = || for_loop.macros.is_empty() && plain == Some("content");
            if is_content(for_loop.items) || is_macro_content() || is_content_name() {
                return for_loop.target.map(|_| true).ok_or(Failed);
            }
        }
        Ok(false)
    }

    /// Returns the variables that are assigned `name` or a part of its items.
    fn named_after(&self, name: &'t str) -> Result<HashSet<&'t str>, Failed> {
        let mut variables = HashSet::from([name]);
        let mut by_value: HashMap<&str, Vec<Option<&'t str>>> = HashMap::new();
        for (target, value) in &self.assigned {
            if let Some((source, None)) = access(value) {
                by_value.entry(source).or_default().push(*target);
            }
        }
        let mut next = vec![name];
        while let Some(name) = next.pop() {
            for target in by_value.get(name).into_iter().flatten() {
                let target = target.ok_or(Failed)?;
                if variables.insert(target) {
                    next.push(target);
                }
            }
        }
        Ok(variables)
    }

    /// Returns the parameters of a macro that receive the content of a message in some call.
    fn given_content(
        &self,
        definition: &Macro<'t>,
        is_content: impl Fn(&[Token<'_>]) -> bool,
        pairs: &mut usize,
    ) -> HashSet<&'t str> {
        let mut parameters = HashSet::new();
        for arguments in self.calls.get(definition.name).into_iter().flatten() {
            let Some(left) = pairs.checked_sub(1) else { break };
            *pairs = left;
            for (at, argument) in split(arguments).into_iter().enumerate() {
                let (parameter, value) = match argument {
                    [Token::Name(key), Token::Sign("="), value @ ..] => {
                        (definition.parameters.iter().find(|name| *name == key), value)
                    }
                    value => (definition.parameters.get(at), value),
                };
                if is_content(value) {
                    parameters.extend(parameter);
                }
            }
        }
        parameters
    }
}

fn loop_of<'t>(tokens: &'t [Token<'t>], open: &[usize]) -> Option<Loop<'t>> {
    let at = tokens.iter().position(|token| *token == Token::Name("in"))?;
    let items = &tokens[at + 1..];
    let end = outside_brackets(items, |token| matches!(token, Token::Name("if" | "recursive")));
    let target = if let [Token::Name(name)] = &tokens[..at] { Some(*name) } else { None };
    Some(Loop { target, items: &items[..end.unwrap_or(items.len())], macros: open.to_vec() })
}

fn assignment<'t>(tokens: &'t [Token<'t>]) -> Option<(Option<&'t str>, &'t [Token<'t>])> {
    let at = outside_brackets(tokens, |token| token == Token::Sign("="))?;
    let target = if let [Token::Name(name)] = &tokens[..at] { Some(*name) } else { None };
    Some((target, &tokens[at + 1..]))
}

fn macro_of<'t>(tokens: &'t [Token<'t>]) -> Macro<'t> {
    let [Token::Name(name), Token::Sign("("), inner @ ..] = tokens else {
        return Macro { name: "", parameters: Vec::new() };
    };
    let end = closing(tokens, 1).map_or(inner.len(), |end| end - 2);
    let name_of = |part: &[Token<'t>]| if let Some(Token::Name(name)) = part.first() { Some(*name) } else { None };
    Macro { name, parameters: split(&inner[..end]).into_iter().filter_map(name_of).collect() }
}

/// Returns the variable of an expression and the key that is read from it, optionally followed by filters, slices and
/// a test. Returns `None` for other expressions.
fn access<'t>(tokens: &[Token<'t>]) -> Option<(&'t str, Option<&'t str>)> {
    let (mut result, mut at) = match tokens {
        [Token::Name(name), ..] => ((*name, None), 1),
        [Token::Sign("("), ..] => {
            let end = closing(tokens, 0)?;
            (access(&tokens[1..end])?, end + 1)
        }
        _ => return None,
    };
    // The result of a filter or a slice is not a plain variable, and no key is read from it.
    let mut plain = result.1.is_none() && at == 1;
    while at < tokens.len() {
        match &tokens[at..] {
            [Token::Sign("."), Token::Name(key), ..] if plain => {
                (result.1, plain, at) = (Some(*key), false, at + 2);
            }
            [Token::Sign("["), ..] => {
                let end = closing(tokens, at)?;
                match &tokens[at + 1..end] {
                    [Token::Literal(key)] if plain && key.starts_with(['\'', '"']) => {
                        result.1 = Some(&key[1..key.len().max(2) - 1]);
                    }
                    inner if outside_brackets(inner, |token| token == Token::Sign(":")).is_some() => {}
                    _ => return None,
                }
                (plain, at) = (false, end + 1);
            }
            [Token::Sign("|"), Token::Name(_), Token::Sign("("), ..] => {
                (plain, at) = (false, closing(tokens, at + 2)? + 1);
            }
            [Token::Sign("|"), Token::Name(_), ..] => (plain, at) = (false, at + 2),
            [Token::Name("is"), Token::Name(test)] if *test != "not" => at = tokens.len(),
            _ => return None,
        }
    }
    Some(result)
}

fn tokens(inside: &str) -> Vec<Token<'_>> {
    let (mut tokens, mut at) = (Vec::new(), 0);
    loop {
        let (token, end) = token_at(inside, at);
        if token == Token::End {
            return tokens;
        }
        tokens.push(token);
        at = end;
    }
}

/// Returns the change in the number of open brackets at a token.
fn depth(token: Token<'_>) -> i32 {
    match token {
        Token::Sign("(" | "[" | "{") => 1,
        Token::Sign(")" | "]" | "}") => -1,
        _ => 0,
    }
}

/// Returns the position at which the bracket at `at` is closed.
fn closing(tokens: &[Token<'_>], at: usize) -> Option<usize> {
    let mut open = 0;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        open += depth(*token);
        if open == 0 {
            return Some(index);
        }
    }
    None
}

/// Returns the first token outside brackets for which `matches` is true.
fn outside_brackets<'t>(tokens: &[Token<'t>], is_match: impl Fn(Token<'t>) -> bool) -> Option<usize> {
    let mut open = 0;
    tokens.iter().position(|token| {
        let matches = open == 0 && is_match(*token);
        open += depth(*token);
        matches
    })
}

/// Splits tokens at the commas outside brackets.
fn split<'s, 't>(tokens: &'s [Token<'t>]) -> Vec<&'s [Token<'t>]> {
    let (mut parts, mut remaining) = (Vec::new(), tokens);
    while let Some(at) = outside_brackets(remaining, |token| token == Token::Sign(",")) {
        parts.push(&remaining[..at]);
        remaining = &remaining[at + 1..];
    }
    if !remaining.is_empty() {
        parts.push(remaining);
    }
    parts
}
