//! Whether a template iterates over the parts of a message's content, as vLLM and SGLang find it out from the source.
//!
//! vLLM's `_detect_content_format` walks Jinja's syntax tree: it follows assignments of `messages`, finds the loops
//! over them, and asks whether some loop goes over `content` of such an item, over a macro's parameter that is given
//! one, or, outside macros, over a variable that is called `content`. Here the same is read from the tokens of the
//! tags.

use super::incremental::analyze::Tag;
use super::lexer::{Token, token_at};
use std::collections::{HashMap, HashSet};

/// Which servers hand a template the parts of a content, where others join them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct WantsParts {
    pub vllm: bool,
    pub sglang: bool,
}

/// Words that are a sign of a template for media to SGLang.
const MEDIA: [&str; 4] = ["image", "audio", "video", "vision"];

/// What the servers find in a template.
pub(super) fn wants_parts(source: &str, tags: &[Tag]) -> WantsParts {
    let tags: Vec<(Vec<Token<'_>>, bool)> = tags.iter().map(|tag| (tokens(&tag.inside), tag.is_statement)).collect();
    let read = Source::read(&tags);
    let named = |(name, key): (&str, Option<&str>)| matches!(name, "message" | "msg" | "m") && key == Some("content");
    WantsParts {
        vllm: read.iterates().unwrap_or(false),
        sglang: MEDIA.iter().any(|word| source.contains(word))
            || read.loops.iter().any(|each| access(each.items).is_some_and(named)),
    }
}

/// A `for` tag.
struct Loop<'t> {
    /// The variable; `None` for several.
    target: Option<&'t str>,
    items: &'t [Token<'t>],
    /// Which macros it stands in.
    macros: Vec<usize>,
}

/// A macro: its name and the names of its parameters.
struct Macro<'t> {
    name: &'t str,
    parameters: Vec<&'t str>,
}

/// What counts of a template.
#[derive(Default)]
struct Source<'t> {
    loops: Vec<Loop<'t>>,
    /// Name (`None` for what is no plain name) and value of each assignment.
    assigned: Vec<(Option<&'t str>, &'t [Token<'t>])>,
    macros: Vec<Macro<'t>>,
    /// Calls by name: what stands between the brackets.
    calls: HashMap<&'t str, Vec<&'t [Token<'t>]>>,
}

/// Pairs of a macro and a call that are looked at: many times what templates have.
const PAIRS: usize = 1 << 16;

/// The detection ended with an error: such templates are taken to want strings.
struct Failed;

impl<'t> Source<'t> {
    fn read(tags: &'t [(Vec<Token<'t>>, bool)]) -> Self {
        let mut read = Self::default();
        let mut open: Vec<usize> = Vec::new();
        for (tokens, is_statement) in tags {
            let word = match tokens.first() {
                Some(Token::Name(word)) if *is_statement => *word,
                _ => "",
            };
            match word {
                "for" => read.loops.extend(loop_of(&tokens[1..], &open)),
                "set" => read.assigned.extend(assignment(&tokens[1..])),
                "macro" => {
                    open.push(read.macros.len());
                    read.macros.push(macro_of(&tokens[1..]));
                }
                "endmacro" => {
                    open.pop();
                }
                _ => {}
            }
            if word != "macro" {
                read.calls_in(tokens);
            }
        }
        read
    }

    fn calls_in(&mut self, tokens: &'t [Token<'t>]) {
        for (at, pair) in tokens.windows(2).enumerate() {
            let [Token::Name(name), Token::Sign("(")] = pair else { continue };
            let of_another = at > 0 && matches!(tokens[at - 1], Token::Sign("." | "|"));
            if let (false, Some(end)) = (of_another, closing(tokens, at + 1)) {
                self.calls.entry(name).or_default().push(&tokens[at + 2..end]);
            }
        }
    }

    /// Whether some loop goes over a message's content.
    fn iterates(&self) -> Result<bool, Failed> {
        let lists = self.named_after("messages")?;
        let mut messages: HashSet<&str> = HashSet::new();
        for each in &self.loops {
            if matches!(access(each.items), Some((name, None)) if lists.contains(name)) {
                messages.insert(each.target.ok_or(Failed)?);
            }
        }
        let is_content =
            |tokens: &[Token<'_>]| matches!(access(tokens), Some((name, Some("content"))) if messages.contains(name));
        let mut pairs = PAIRS;
        let given = self.macros.iter().map(|each| self.given_content(each, is_content, &mut pairs));
        let given: Vec<HashSet<&str>> = given.collect();
        for each in &self.loops {
            let plain = if let [Token::Name(name)] = each.items { Some(*name) } else { None };
            let of_macro = || plain.is_some_and(|name| each.macros.iter().any(|at| given[*at].contains(name)));
            let of_name = || each.macros.is_empty() && plain == Some("content");
            if is_content(each.items) || of_macro() || of_name() {
                return each.target.map(|_| true).ok_or(Failed);
            }
        }
        Ok(false)
    }

    /// The variables that hold `name` or a part of its items.
    fn named_after(&self, name: &'t str) -> Result<HashSet<&'t str>, Failed> {
        let mut found = HashSet::from([name]);
        let mut by_value: HashMap<&str, Vec<Option<&'t str>>> = HashMap::new();
        for (target, value) in &self.assigned {
            if let Some((of, None)) = access(value) {
                by_value.entry(of).or_default().push(*target);
            }
        }
        let mut next = vec![name];
        while let Some(name) = next.pop() {
            for target in by_value.get(name).into_iter().flatten() {
                let target = target.ok_or(Failed)?;
                if found.insert(target) {
                    next.push(target);
                }
            }
        }
        Ok(found)
    }

    /// The parameters of a macro that some call gives the content of a message.
    fn given_content(
        &self,
        each: &Macro<'t>,
        is_content: impl Fn(&[Token<'_>]) -> bool,
        pairs: &mut usize,
    ) -> HashSet<&'t str> {
        let mut found = HashSet::new();
        for arguments in self.calls.get(each.name).into_iter().flatten() {
            let Some(left) = pairs.checked_sub(1) else { break };
            *pairs = left;
            for (at, argument) in split(arguments).into_iter().enumerate() {
                let (parameter, value) = match argument {
                    [Token::Name(key), Token::Sign("="), value @ ..] => {
                        (each.parameters.iter().find(|known| *known == key), value)
                    }
                    value => (each.parameters.get(at), value),
                };
                if is_content(value) {
                    found.extend(parameter);
                }
            }
        }
        found
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
    let [Token::Name(name), Token::Sign("("), rest @ ..] = tokens else {
        return Macro { name: "", parameters: Vec::new() };
    };
    let end = closing(tokens, 1).map_or(rest.len(), |end| end - 2);
    let name_of = |part: &[Token<'t>]| if let Some(Token::Name(name)) = part.first() { Some(*name) } else { None };
    Macro { name, parameters: split(&rest[..end]).into_iter().filter_map(name_of).collect() }
}

/// The variable of an expression and the key that is read of it, where the expression is that, with filters, slices and a
/// test behind it.
fn access<'t>(tokens: &[Token<'t>]) -> Option<(&'t str, Option<&'t str>)> {
    let (mut found, mut at) = match tokens {
        [Token::Name(name), ..] => ((*name, None), 1),
        [Token::Sign("("), ..] => {
            let end = closing(tokens, 0)?;
            (access(&tokens[1..end])?, end + 1)
        }
        _ => return None,
    };
    // What is behind a filter or a slice is no plain variable, and no key is read of it.
    let mut plain = found.1.is_none() && at == 1;
    while at < tokens.len() {
        match &tokens[at..] {
            [Token::Sign("."), Token::Name(key), ..] if plain => {
                (found.1, plain, at) = (Some(*key), false, at + 2);
            }
            [Token::Sign("["), ..] => {
                let end = closing(tokens, at)?;
                match &tokens[at + 1..end] {
                    [Token::Literal(key)] if plain && key.starts_with(['\'', '"']) => {
                        found.1 = Some(&key[1..key.len().max(2) - 1]);
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
    Some(found)
}

fn tokens(inside: &str) -> Vec<Token<'_>> {
    let (mut all, mut at) = (Vec::new(), 0);
    loop {
        let (token, end) = token_at(inside, at);
        if token == Token::End {
            return all;
        }
        all.push(token);
        at = end;
    }
}

/// How a token changes the number of brackets that are open.
fn depth(token: Token<'_>) -> i32 {
    match token {
        Token::Sign("(" | "[" | "{") => 1,
        Token::Sign(")" | "]" | "}") => -1,
        _ => 0,
    }
}

/// Where the bracket at `at` is closed.
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

/// The first token outside brackets that is meant.
fn outside_brackets<'t>(tokens: &[Token<'t>], meant: impl Fn(Token<'t>) -> bool) -> Option<usize> {
    let mut open = 0;
    tokens.iter().position(|token| {
        let found = open == 0 && meant(*token);
        open += depth(*token);
        found
    })
}

/// What stands between the commas outside brackets.
fn split<'s, 't>(tokens: &'s [Token<'t>]) -> Vec<&'s [Token<'t>]> {
    let (mut parts, mut rest) = (Vec::new(), tokens);
    while let Some(at) = outside_brackets(rest, |token| token == Token::Sign(",")) {
        parts.push(&rest[..at]);
        rest = &rest[at + 1..];
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}
