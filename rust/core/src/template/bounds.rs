//! How long a template may be and how deeply it may nest: looked at token by token, before anything recurses over it.
//!
//! What the tokens mean is left to `rewrite` and to the engine, which both go deeper with every operator of a chain, so
//! everything that can nest is counted as if it did. Called by `scan`.

use super::tokens::{Token, token_at};

/// Bytes of a template: twenty-five times the longest one that is known.
const SOURCE_BYTES: usize = 512 << 10;
/// Tokens between two commas, those around them in open brackets included: nine times what any template has.
const CHAIN: usize = 500;
/// Blocks inside one another, and their `elif`s: eight times what any template has.
const BLOCKS: usize = 100;
/// Macros and calls with a body inside one another: what is inside is looked at once for each of them.
const MACROS: usize = 8;
const NAME_BYTES: usize = 256;
/// Blocks that a `break` cannot leave: the engine would take what they opened for the loop's.
const SHUT: [&str; 5] = ["generation", "with", "filter", "set", "autoescape"];

/// The blocks that are open.
#[derive(Debug, Default)]
pub(super) struct Bounds<'a> {
    /// What a block began with, and how many branches it has.
    open: Vec<(&'a str, usize)>,
}

/// Why a template of this length is refused.
pub(super) fn length(source: &str) -> Option<String> {
    (source.len() > SOURCE_BYTES)
        .then(|| format!("it has {} bytes, and {SOURCE_BYTES} are the most that are read", source.len()))
}

impl<'a> Bounds<'a> {
    /// Why the template is refused at `{{ inside }}`.
    pub fn expression(inside: &str) -> Option<String> {
        chain(inside)
    }

    /// Why the template is refused at `{% inside %}`.
    pub fn statement(&mut self, inside: &'a str) -> Option<String> {
        let (Token::Name(word), _) = token_at(inside, 0) else { return None };
        match word {
            "if" | "for" | "with" | "filter" | "macro" | "call" | "block" | "autoescape" | "generation" => {
                self.open.push((word, 1));
            }
            "set" if !assigns(inside) => self.open.push((word, 1)),
            "elif" => self.open.iter_mut().rev().take(1).for_each(|(_, branches)| *branches += 1),
            "break" | "continue" => return self.leaves(word),
            _ if word.starts_with("end") => drop(self.open.pop()),
            _ => {}
        }
        let depth: usize = self.open.iter().map(|(_, branches)| branches).sum();
        let macros = self.open.iter().filter(|(word, _)| matches!(*word, "macro" | "call")).count();
        if depth > BLOCKS || macros > MACROS {
            return Some(format!(
                "'{word}' stands in too many blocks: {BLOCKS} inside one another, elifs included, and {MACROS} macros are \
                 the most that are read"
            ));
        }
        chain(inside)
    }

    /// Why a `break` or `continue` is refused here.
    fn leaves(&self, word: &str) -> Option<String> {
        let left = self.open.iter().rev().take_while(|(block, _)| *block != "for");
        let block = left.map(|(block, _)| *block).find(|block| SHUT.contains(block))?;
        Some(format!("'{word}' leaves a '{block}' block that is open, and only 'if' may stand between it and its loop"))
    }
}

/// Whether a `set` has a value, and is no block.
fn assigns(inside: &str) -> bool {
    let mut at = 0;
    loop {
        match token_at(inside, at) {
            (Token::Sign("="), _) => return true,
            (Token::Sign("|") | Token::End, _) => return false,
            (_, end) => at = end,
        }
    }
}

/// Why code with a chain of tokens or a name is refused.
fn chain(inside: &str) -> Option<String> {
    // Tokens since the last comma, for each bracket that is open.
    let mut open = vec![0_usize];
    let mut depth = 0;
    let mut at = 0;
    loop {
        let (token, end) = token_at(inside, at);
        at = end;
        match token {
            Token::End => return None,
            Token::Name(name) if name.len() > NAME_BYTES => {
                return Some(format!("a name has {} bytes, and {NAME_BYTES} are the most that are read", name.len()));
            }
            Token::Sign("," | ":") => depth -= open.last_mut().map_or(0, std::mem::take),
            Token::Sign(")" | "]" | "}") if open.len() > 1 => depth -= open.pop().unwrap_or(0),
            _ => {
                depth += 1;
                open.iter_mut().rev().take(1).for_each(|tokens| *tokens += 1);
                if matches!(token, Token::Sign("(" | "[" | "{")) {
                    open.push(0);
                }
            }
        }
        if depth > CHAIN {
            return Some(format!(
                "an expression nests too deeply: {CHAIN} tokens between two commas are the most read"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nests_is_counted_and_what_stands_side_by_side_is_not() {
        for (before, link, after) in [
            ("", "-", "1"),
            ("", "not ", "1"),
            ("a", " and a", ""),
            ("a", ".a", ""),
            ("a", "[0]", ""),
            ("a", "|string", ""),
            ("1", " is string", ""),
            ("1", " if 1 else 1", ""),
            ("a", "()", ""),
            ("", "(", ""),
            ("", "a(b, ", ""),
            ("", "'a' ", ""),
            ("", "{1: ", ""),
        ] {
            assert_eq!(chain(&format!("{before}{}{after}", link.repeat(99))), None, "{link}");
            assert!(chain(&format!("{before}{}{after}", link.repeat(501))).is_some(), "{link}");
        }
        assert_eq!(chain(&format!("[{}]", "a.b|c(d=[1]), ".repeat(9999))), None);
        assert!(chain(&"a".repeat(257)).is_some());
    }

    #[test]
    fn blocks_are_counted_where_they_are_inside_one_another() {
        let refused = |tags: &[&str], times: usize| {
            let mut bounds = Bounds::default();
            (0..times).any(|_| tags.iter().any(|tag| bounds.statement(tag).is_some()))
        };
        for (tags, most) in [
            (&["if a"][..], 100),
            (&["for a in b"], 100),
            (&["set a"], 100),
            (&["set a | f(b=1)"], 100),
            (&["macro a()"], 8),
            (&["call a()"], 8),
        ] {
            assert!(!refused(tags, most), "{tags:?}");
            assert!(refused(tags, most + 1), "{tags:?}");
        }
        assert!(!refused(&["if a", "else", "endif", "set a = 1", "set a.b = 1"], 9999));
        let mut bounds = Bounds::default();
        assert_eq!(bounds.statement("if a"), None);
        assert!((0..101).any(|_| bounds.statement("elif a").is_some()));
    }

    #[test]
    fn a_break_may_leave_ifs_alone() {
        let refused = |tags: &[&'static str]| {
            let mut bounds = Bounds::default();
            tags.iter().find_map(|tag| bounds.statement(tag))
        };
        assert_eq!(refused(&["generation", "for a in b", "if a", "break"]), None);
        for block in ["generation", "with a = 1", "filter f", "set a", "autoescape a"] {
            assert!(refused(&["for a in b", block, "if a", "break"]).is_some(), "{block}");
            assert!(refused(&["for a in b", block, "continue"]).is_some(), "{block}");
        }
    }
}
