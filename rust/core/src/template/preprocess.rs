//! Rewrites the source of a template before the engine compiles it. One pass rewrites tags and collects string
//! literals.
//!
//! This module handles Jinja's delimiters, comments, raw blocks, string literals and whitespace marks. `rewrite`
//! handles the inside of tags. Length and nesting of a template are checked token by token before any recursion.
//! `rewrite` and the engine both recurse once for every operator of a chain, so every token that can nest is counted
//! as nested.

use super::content_format::{WantsParts, wants_parts};
use super::incremental::analyze::{Resumable, Tag, resumable};
use super::lexer::{Token, literal_end, tag_parts, token_at};
use super::limits::FREE_TEXT;
use super::rewrite::{expression, statement};
use crate::error::{Error, Kind, Result};
use std::borrow::Cow;
use std::ops::Range;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ScanResult {
    /// The source, in which every generation block is a filter block with its own scope, operators are filters, and
    /// long texts are printed strings, which are counted.
    pub source: String,
    pub has_generation: bool,
    /// String literals of the template's expressions, unescaped and without duplicates.
    pub literals: Vec<String>,
    /// Bytes of the longest text that remains outside tags.
    pub longest_text: usize,
    /// The servers that pass this template the parts of a content.
    pub wants_parts: WantsParts,
    /// Where a render may resume an earlier one.
    pub resumable: Option<Resumable>,
}

/// The filter that replaces a generation block.
pub(super) const GENERATION_FILTER: &str = "__generation";
/// Rewrites tags and collects string literals. Tags that never close are passed on, so that the compiler reports them.
/// Source that is beyond the bounds or not Jinja is rejected here, before the engine sees it.
pub(super) fn scan(source: &str) -> Result<ScanResult> {
    if let Some(why) = length(source) {
        return Err(beyond(&why, None));
    }
    let mut out = ScanResult { source: String::with_capacity(source.len() + 64), ..ScanResult::default() };
    let mut bounds = Bounds::default();
    let mut tags: Vec<Tag> = Vec::new();
    let mut remaining = source;
    while let Some(start) = remaining.find('{') {
        let (text, tag) = remaining.split_at(start);
        let (tag_text, after) = tag.split_at(tag_length(tag, &mut out.literals));
        let line = || source[..source.len() - tag.len()].matches('\n').count() + 1;
        out.text(text);
        remaining = after;
        let reason = match tag_text.get(..2) {
            Some("{{") => Bounds::expression(inside(tag_text)),
            Some("{%") => bounds.statement(inside(tag_text)),
            _ => None,
        };
        if let Some(why) = reason {
            return Err(beyond(&why, Some(line())));
        }
        let from = out.source.len();
        let mut tag = |source: &str| {
            let is_statement = tag_text.starts_with("{%");
            if is_statement || tag_text.starts_with("{{") {
                tags.push(Tag { at: from..source.len(), inside: inside(tag_text).to_owned(), is_statement });
            }
        };
        if let Some(rewritten) = rewrite_generation(tag_text) {
            out.source.push_str(&rewritten);
            out.has_generation = true;
            tag(&out.source);
            continue;
        }
        if let Some(rewritten) = rewrite_tag(tag_text) {
            out.source.push_str(&rewritten);
        } else if tag_text.starts_with("{%") || tag_text.starts_with("{{") {
            return Err(unread(tag_text, line()));
        } else {
            out.source.push_str(tag_text);
        }
        tag(&out.source);
        if tag_text.starts_with("{%") && block_name(tag_text) == "raw" {
            let (raw, after_raw) = after.split_at(raw_length(after));
            out.longest_text = out.longest_text.max(raw.len());
            out.source.push_str(raw);
            remaining = after_raw;
        }
    }
    out.text(remaining);
    out.literals.sort_unstable();
    out.literals.dedup();
    out.wants_parts = wants_parts(source, &tags);
    out.resumable = resumable(&mut out.source, &tags);
    Ok(out)
}

/// Returns the error for a template beyond the bounds.
fn beyond(why: &str, line: Option<usize>) -> Error {
    let place = line.map_or(String::new(), |line| format!(" (line {line})"));
    Error::new(Kind::Template, "TG-TEMPLATE-011", format!("the chat template does not compile: {why}{place}"))
        .why("A template is untrusted code, and its cost is limited before it runs")
        .fix("Take the chat_template that came with the model, or write it with less nesting")
}

/// Returns the error for a tag that transformers rejects.
fn unread(tag: &str, line: usize) -> Error {
    let shown: String = tag.chars().take(80).collect();
    Error::new(
        Kind::Template,
        "TG-TEMPLATE-012",
        format!("the chat template does not compile: syntax error: '{shown}' (line {line})"),
    )
    .why("Only a template that transformers accepts is rendered")
    .fix("Take the chat_template that came with the model")
}

impl ScanResult {
    /// Appends text outside tags. The inside of a long text becomes a printed string; its edges, which tags may trim,
    /// stay text.
    fn text(&mut self, text: &str) {
        let edge = |c: Option<char>| c.map_or(0, char::len_utf8);
        let inner = text.trim();
        let from = text.len() - text.trim_start().len() + edge(inner.chars().next());
        let to = text.trim_end().len().saturating_sub(edge(inner.chars().next_back()));
        if text.len() <= FREE_TEXT || to <= from {
            self.longest_text = self.longest_text.max(text.len());
            return self.source.push_str(text);
        }
        let quoted = text[from..to].replace('\\', "\\\\").replace('\'', "\\'");
        for part in [&text[..from], "{{ '", &quoted, "' }}", &text[to..]] {
            self.source.push_str(part);
        }
        self.longest_text = self.longest_text.max(from).max(text.len() - to);
    }
}

/// Returns the number of bytes of the tag that `tag` starts with, or 1 for a brace that opens no tag.
fn tag_length(tag: &str, literals: &mut Vec<String>) -> usize {
    match tag.as_bytes().get(1) {
        Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
        Some(b'{') => expression_length(tag, "}}", literals),
        Some(b'%') => expression_length(tag, "%}", literals),
        _ => 1,
    }
}

/// Returns the number of bytes from the opening delimiter to the end of `close`, skipping string literals and balanced
/// brackets.
fn expression_length(tag: &str, close: &str, literals: &mut Vec<String>) -> usize {
    let bytes = tag.as_bytes();
    let mut at = 2;
    let mut depth = 0_usize;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'\'' | b'"') => {
                let end = literal_end(bytes, at, quote);
                let inner = tag.get(at + 1..end.saturating_sub(1).max(at + 1)).unwrap_or("");
                literals.extend(unescape(inner));
                at = end;
            }
            _ if depth == 0 && bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            b'{' | b'[' | b'(' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' | b')' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Decodes a string literal as Jinja does, with the escapes of Python's strings. A backslash before another character
/// is kept. Returns `None` for a number that is not a character. `\N{...}` is not decoded.
fn unescape(literal: &str) -> Option<String> {
    let mut out = String::with_capacity(literal.len());
    let mut rest = literal;
    while let Some((text, escape)) = rest.split_once('\\') {
        out.push_str(text);
        let number = |range: Range<usize>, radix: u32| {
            let digits = escape.get(range).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
            char::from_u32(u32::from_str_radix(digits, radix).ok()?)
        };
        let octal = escape.bytes().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
        let (character, length) = match escape.chars().next()? {
            '\n' => (None, 1),
            'x' => (Some(number(1..3, 16)?), 3),
            'u' => (Some(number(1..5, 16)?), 5),
            'U' => (Some(number(1..9, 16)?), 9),
            '0'..='7' => (Some(number(0..octal, 8)?), octal),
            'a' => (Some('\x07'), 1),
            'b' => (Some('\x08'), 1),
            'f' => (Some('\x0c'), 1),
            'n' => (Some('\n'), 1),
            'r' => (Some('\r'), 1),
            't' => (Some('\t'), 1),
            'v' => (Some('\x0b'), 1),
            quoted @ ('\\' | '\'' | '"') => (Some(quoted), 1),
            _ => (Some('\\'), 0),
        };
        out.extend(character);
        rest = &escape[length..];
    }
    Some(out + rest)
}

/// Writes string literals so that the engine decodes them as Jinja does: it has fewer escapes, and drops the backslash of
/// `\/`. An invalid literal stays, and the engine rejects it.
fn portable_literals(code: &str) -> Cow<'_, str> {
    if !code.contains('\\') {
        return Cow::Borrowed(code);
    }
    let mut out = String::with_capacity(code.len());
    let mut at = 0;
    while let Some(start) = code[at..].find(['\'', '"']).map(|offset| at + offset) {
        let quote = code.as_bytes()[start];
        let end = literal_end(code.as_bytes(), start, quote);
        out.push_str(&code[at..start]);
        let literal = code.get(start + 1..end - 1).filter(|literal| literal.contains('\\')).and_then(unescape);
        if let Some(text) = literal {
            let quote = char::from(quote);
            out.push(quote);
            out.push_str(&text.replace('\\', "\\\\").replace(quote, &format!("\\{quote}")));
            out.push(quote);
        } else {
            out.push_str(&code[start..end]);
        }
        at = end;
    }
    Cow::Owned(out + &code[at..])
}

/// Returns the inside of a tag without its delimiters (the closing one may be missing) and whitespace marks.
fn inside(tag: &str) -> &str {
    let inside = tag.get(2..).unwrap_or("");
    let inside = inside.strip_suffix("%}").or_else(|| inside.strip_suffix("}}")).unwrap_or(inside);
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    inside.strip_suffix(['-', '+']).unwrap_or(inside).trim()
}

/// Returns the inside of a block tag, or an empty string for other text.
fn block_inside(block: &str) -> &str {
    if block.starts_with("{%") && block.ends_with("%}") { inside(block) } else { "" }
}

fn block_name(block: &str) -> &str {
    block_inside(block).split(char::is_whitespace).next().unwrap_or("")
}

/// Rewrites `{%- generation -%}` and its end tag to a scope and a filter block. Whitespace marks keep their places.
fn rewrite_generation(block: &str) -> Option<String> {
    let (word, inner) = match block_inside(block) {
        "generation" => ("generation", format!("with %}}{{% filter {GENERATION_FILTER}")),
        "endgeneration" => ("endgeneration", "endfilter %}{% endwith".to_owned()),
        _ => return None,
    };
    Some(block.replacen(word, &inner, 1))
}

/// Rewrites the inside of a tag, keeping the number of lines. Returns `None` for text that is not a tag or cannot be
/// parsed.
fn rewrite_tag(tag: &str) -> Option<String> {
    let (open, inside, close) = tag_parts(tag)?;
    let inside = portable_literals(inside.trim());
    let code = if open.starts_with("{{") { expression(&inside) } else { statement(&inside) }?;
    let lines = tag.matches('\n').count().saturating_sub(code.matches('\n').count());
    Some(format!("{open} {code}{} {close}", "\n".repeat(lines)))
}

/// Returns the number of bytes up to and including the `{% endraw %}` tag.
fn raw_length(after: &str) -> usize {
    let mut at = 0;
    while let Some(offset) = after[at..].find("{%") {
        let inside = at + offset + 2;
        let name = after[inside..].trim_start_matches(['-', '+']).trim_start();
        if let Some(tag_end) = name.strip_prefix("endraw") {
            let close = tag_end.trim_start().trim_start_matches(['-', '+']);
            if let Some(rest) = close.strip_prefix("%}") {
                return after.len() - rest.len();
            }
        }
        at = inside;
    }
    after.len()
}

/// Maximum bytes of a template: twenty-five times the longest known one.
const SOURCE_BYTES: usize = 512 << 10;
/// Maximum number of tokens between two commas, including those around them in open brackets: nine times the maximum
/// of known templates.
const CHAIN: usize = 500;
/// Maximum nesting of blocks, including their `elif`s: eight times the maximum of known templates.
const BLOCKS: usize = 100;
/// Maximum nesting of macros and calls with a body: their inside is analyzed once for each of them.
const MACROS: usize = 8;
const NAME_BYTES: usize = 256;
/// Blocks that a `break` may not leave: the engine would treat what they opened as part of the loop.
const SHUT: [&str; 5] = ["generation", "with", "filter", "set", "autoescape"];

/// The open blocks.
#[derive(Debug, Default)]
pub(super) struct Bounds<'a> {
    /// The first word of a block, and the number of its branches.
    open: Vec<(&'a str, usize)>,
}

/// Returns the reason why a template of this length is rejected.
pub(super) fn length(source: &str) -> Option<String> {
    (source.len() > SOURCE_BYTES)
        .then(|| format!("it has {} bytes, and {SOURCE_BYTES} are the most that are read", source.len()))
}

impl<'a> Bounds<'a> {
    /// Returns the reason why the template is rejected at `{{ inside }}`.
    pub fn expression(inside: &str) -> Option<String> {
        chain(inside)
    }

    /// Returns the reason why the template is rejected at `{% inside %}`.
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

    /// Returns the reason why a `break` or `continue` is rejected here.
    fn leaves(&self, word: &str) -> Option<String> {
        let inner = self.open.iter().rev().take_while(|(block, _)| *block != "for");
        let block = inner.map(|(block, _)| *block).find(|block| SHUT.contains(block))?;
        Some(format!("'{word}' leaves a '{block}' block that is open, and only 'if' may stand between it and its loop"))
    }
}

/// Returns true if a `set` has a value and is not a block.
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

/// Returns the reason why code with this chain of tokens or a long name is rejected.
fn chain(inside: &str) -> Option<String> {
    // Tokens since the last comma, for each open bracket.
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

    fn scanned(source: &str) -> ScanResult {
        scan(source).unwrap()
    }

    #[test]
    fn a_generation_block_keeps_its_whitespace_marks() {
        let result = scanned("a\n  {%- generation -%}\nb{% endgeneration %}");
        assert_eq!(result.source, "a\n  {%- with %}{% filter __generation -%}\nb{% endfilter %}{% endwith %}");
        assert!(result.has_generation);
    }

    #[test]
    fn generation_in_strings_comments_and_raw_blocks_is_text_and_so_is_what_never_closes() {
        let quoted = ["{{ '{% generation %}' }}", "{# {% generation %} #}", "{% if generation %}"];
        let raw = ["{% raw %}{% generation %}{{ 'x' {% endraw %}", "{% raw %} {%", "{", "{# x"];
        for source in quoted.into_iter().chain(raw) {
            let result = scanned(source);
            assert_eq!((result.source.as_str(), result.has_generation), (source, false));
        }
    }

    #[test]
    fn operators_become_filters_and_the_rest_stays() {
        let cases = [
            ("{%- set a = 'x' ~ (1 if c == 2 else 3) -%}", "{%- set a = ('x'|__concat((1 if c == 2 else 3))) -%}"),
            ("{{ a + b + 'c' - d * 2 }}", "{{ ((a|__add(b, 'c')) - (d|__multiply(2))) }}"),
            ("{{ a.b['c'](1, x=y)|f(z) is not t }}", "{{ (a.b['c'](1, x=y)|f(z) is not t) }}"),
            ("{% if a < b <= c and not d in e %}", "{% if (a|__compare('<', b, '<=', c)) and not (d|__in(e)) %}"),
            ("{% for k, v in x.items() if v %}", "{% for k , v in (x.items())|__each if v %}"),
            ("{{ x[1:][::-1] }}", "{{ ((x|__slice(1, none, none))|__slice(none, none, (-1))) }}"),
            ("{% set a, b = [c], [1, 2] %}", "{% set a , b = ((([c]|__sized), [1, 2])|__sized) %}"),
            ("{% set x | indent(width=4) %}", "{% set x |indent(width=4) %}"),
            ("{% macro f(a, b=c ~ d) %}", "{% macro f(a, b=(c|__concat(d))) %}"),
            ("{{ 1.5e-3 + x\n}}", "{{ (1.5e-3|__add(x))\n }}"),
        ];
        for (source, expected) in cases {
            assert_eq!(scanned(source).source, expected);
        }
    }

    #[test]
    fn long_texts_are_printed_so_that_they_are_counted() {
        let text = "\n  A system's prompt\nof more than thirty-two bytes \\ \n";
        let expected = "{% if a %}\n  A{{ ' system\\'s prompt\nof more than thirty-two bytes ' }}\\ \n";
        let result = scanned(&format!("{{% if a %}}{text}"));
        assert_eq!(result.source, expected);
        assert_eq!(result.longest_text, 4);
    }

    #[test]
    fn invalid_expressions_are_reported() {
        for source in ["{{ a b }}", "{% do x %}", "{% for x y %}", "{{ (a }}", "{{ x[1 2] }}", "{{ __begins() }}"] {
            let error = scan(&format!("\n{source}")).unwrap_err().what;
            assert!(error.contains(source) && error.ends_with("(line 2)"), "{error}");
        }
    }

    #[test]
    fn literals_are_unescaped_and_found_after_braces() {
        let result = scanned(r#"{{ {"a": {}}['\n<x>'] }}{% if x.split("it's\t") %}'no'{% endif %}"#);
        assert_eq!(result.literals, vec!["\n<x>", "a", "it's\t"]);
    }

    #[test]
    fn literals_are_decoded_as_python_strings() {
        // The results of "...".encode("ascii", "backslashreplace").decode("unicode-escape"), which Jinja uses.
        for (literal, decoded) in [
            (r"\d\.\/", r"\d\.\/"),
            (r#"\\n\'\""#, "\\n'\""),
            (r"\x41\101\u00e9\U0001F600", "AA\u{e9}\u{1F600}"),
            (r"\7\18", "\u{7}\u{1}8"),
            ("a\\\nb", "ab"),
            (r"\a\b\f\v", "\x07\x08\x0c\x0b"),
            ("é\\é", "é\\é"),
        ] {
            assert_eq!(unescape(literal).as_deref(), Some(decoded), "{literal}");
        }
        for literal in [r"\xe", r"\u12", r"\U00110000", "\\"] {
            assert_eq!(unescape(literal), None, "{literal}");
        }
    }

    #[test]
    fn the_engine_gets_literals_that_it_decodes_as_jinja_does() {
        assert_eq!(portable_literals(r#"a + '\/\'\a' ~ "x\"y" + '\xe'"#), "a + '\\\\/\\'\u{7}' ~ \"x\\\"y\" + '\\xe'");
    }

    #[test]
    fn tags_that_never_close_are_refused() {
        for source in ["{{ 'a", "{% if 'a\\", "{{", "{%", "{% raw"] {
            assert!(scan(source).is_err(), "{source}");
        }
    }

    #[test]
    fn a_raw_block_ends_where_the_engine_ends_it() {
        for raw in ["x{%endraw%}", "{% {%- endraw +%}", "{% endraws %}{{ '}}{%\n endraw\n-%}"] {
            assert_eq!(raw_length(&format!("{raw}{{{{ a }}}}")), raw.len(), "{raw}");
        }
    }
}

#[cfg(test)]
mod bounds_tests {
    use super::*;

    #[test]
    fn nested_tokens_count_and_separated_ones_do_not() {
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
        let is_rejected = |tags: &[&str], times: usize| {
            let mut bounds = Bounds::default();
            (0..times).any(|_| tags.iter().any(|tag| bounds.statement(tag).is_some()))
        };
        for (tags, limit) in [
            (&["if a"][..], 100),
            (&["for a in b"], 100),
            (&["set a"], 100),
            (&["set a | f(b=1)"], 100),
            (&["macro a()"], 8),
            (&["call a()"], 8),
        ] {
            assert!(!is_rejected(tags, limit), "{tags:?}");
            assert!(is_rejected(tags, limit + 1), "{tags:?}");
        }
        assert!(!is_rejected(&["if a", "else", "endif", "set a = 1", "set a.b = 1"], 9999));
        let mut bounds = Bounds::default();
        assert_eq!(bounds.statement("if a"), None);
        assert!((0..101).any(|_| bounds.statement("elif a").is_some()));
    }

    #[test]
    fn a_break_may_leave_ifs_alone() {
        let rejection = |tags: &[&'static str]| {
            let mut bounds = Bounds::default();
            tags.iter().find_map(|tag| bounds.statement(tag))
        };
        assert_eq!(rejection(&["generation", "for a in b", "if a", "break"]), None);
        for block in ["generation", "with a = 1", "filter f", "set a", "autoescape a"] {
            assert!(rejection(&["for a in b", block, "if a", "break"]).is_some(), "{block}");
            assert!(rejection(&["for a in b", block, "continue"]).is_some(), "{block}");
        }
    }
}
