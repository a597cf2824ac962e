//! One pass over a template's source: `{% generation %}` and assignments rewritten, string literals collected.
//!
//! Knows Jinja's delimiters, comments, raw blocks, string literals and whitespace marks, and nothing of its grammar.
//! Called once per template by `Template::compile`.

/// What [`scan`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Scanned {
    /// The source with every generation block turned into a filter block of its own scope, and every assigned value
    /// passed through [`BOUND_FILTER`].
    pub source: String,
    /// Whether there was a generation block.
    pub has_generation: bool,
    /// String literals of the template's expressions, unescaped, each once.
    pub literals: Vec<String>,
    /// Bytes of the longest text outside tags.
    pub longest_text: usize,
}

/// The filter that a generation block becomes.
pub(super) const GENERATION_FILTER: &str = "__generation";
/// The filter that refuses values too large to be meant.
pub(super) const BOUND_FILTER: &str = "__bounded";

/// Rewrites `{% generation %}` and collects string literals. Broken syntax is passed on for the compiler to report.
pub(super) fn scan(source: &str) -> Scanned {
    let mut out = Scanned { source: String::with_capacity(source.len() + 64), ..Scanned::default() };
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (text, tag) = rest.split_at(start);
        let (kept, after) = tag.split_at(tag_length(tag, &mut out.literals));
        out.longest_text = out.longest_text.max(text.len());
        out.source.push_str(text);
        rest = after;
        if let Some(rewritten) = rewrite_generation(kept) {
            out.source.push_str(&rewritten);
            out.has_generation = true;
            continue;
        }
        match rewrite_assignment(kept) {
            Some(rewritten) => out.source.push_str(&rewritten),
            None => out.source.push_str(kept),
        }
        if kept.starts_with("{%") && block_name(kept) == "raw" {
            let (raw, behind) = after.split_at(raw_length(after));
            out.longest_text = out.longest_text.max(raw.len());
            out.source.push_str(raw);
            rest = behind;
        }
    }
    out.longest_text = out.longest_text.max(rest.len());
    out.source.push_str(rest);
    out.literals.sort_unstable();
    out.literals.dedup();
    out
}

/// Bytes of the tag that `tag` starts with; 1 for a brace that opens none.
fn tag_length(tag: &str, literals: &mut Vec<String>) -> usize {
    match tag.as_bytes().get(1) {
        Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
        Some(b'{') => expression_length(tag, "}}", literals),
        Some(b'%') => expression_length(tag, "%}", literals),
        _ => 1,
    }
}

/// Bytes from the opening delimiter to behind `close`, skipping string literals and balanced brackets.
fn expression_length(tag: &str, close: &str, literals: &mut Vec<String>) -> usize {
    let bytes = tag.as_bytes();
    let mut at = 2;
    let mut depth = 0_usize;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'\'' | b'"') => {
                let end = literal_end(bytes, at, quote);
                let inner = tag.get(at + 1..end.saturating_sub(1).max(at + 1)).unwrap_or("");
                literals.push(unescape(inner));
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

/// Position behind the closing quote of the literal that starts at `start`.
fn literal_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The usual escapes of a Jinja string literal; an unknown one stays as it is.
fn unescape(literal: &str) -> String {
    if !literal.contains('\\') {
        return literal.to_owned();
    }
    let mut out = String::with_capacity(literal.len());
    let mut chars = literal.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('r') => out.push('\r'),
            Some('u') => {
                let code: String = chars.by_ref().take(4).collect();
                out.extend(u32::from_str_radix(&code, 16).ok().and_then(char::from_u32));
            }
            Some(other) => out.push(other),
            None => out.push('\\'),
        }
    }
    out
}

/// The inside of a block tag without delimiters and whitespace marks.
fn block_inside(block: &str) -> &str {
    let inside = block.strip_prefix("{%").and_then(|b| b.strip_suffix("%}")).unwrap_or("");
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

fn block_name(block: &str) -> &str {
    block_inside(block).split(char::is_whitespace).next().unwrap_or("")
}

/// `{%- generation -%}` and its end as a scope and a filter block, whitespace marks where they were.
fn rewrite_generation(block: &str) -> Option<String> {
    let (word, inner) = match block_inside(block) {
        "generation" => ("generation", format!("with %}}{{% filter {GENERATION_FILTER}")),
        "endgeneration" => ("endgeneration", "endfilter %}{% endwith".to_owned()),
        _ => return None,
    };
    Some(block.replacen(word, &inner, 1))
}

/// `{% set x = value %}` as `{% set x = (value)|__bounded %}`; `None` for every other tag.
fn rewrite_assignment(block: &str) -> Option<String> {
    if block_name(block) != "set" {
        return None;
    }
    let inside = block.strip_suffix("%}")?;
    let inside = inside.strip_suffix(['-', '+']).unwrap_or(inside);
    let equals = assignment(inside)?;
    let (target, value) = inside.split_at(equals + 1);
    let end = &block[inside.len()..];
    (!value.trim().is_empty()).then(|| format!("{target} ({})|{BOUND_FILTER} {end}", value.trim()))
}

/// Where the first `=` outside strings and brackets is.
fn assignment(inside: &str) -> Option<usize> {
    let bytes = inside.as_bytes();
    let (mut at, mut depth) = (2, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'\'' | b'"') => at = literal_end(bytes, at, quote) - 1,
            b'{' | b'[' | b'(' => depth += 1,
            b'}' | b']' | b')' => depth = depth.saturating_sub(1),
            b'=' if depth == 0 => return Some(at),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Bytes up to and with the `{% endraw %}` tag.
fn raw_length(after: &str) -> usize {
    let mut at = 0;
    while let Some(found) = after[at..].find("{%") {
        let start = at + found;
        let Some(end) = after[start..].find("%}") else { break };
        if block_name(&after[start..start + end + 2]) == "endraw" {
            return start + end + 2;
        }
        at = start + 2;
    }
    after.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_block_keeps_its_whitespace_marks() {
        let got = scan("a\n  {%- generation -%}\nb{% endgeneration %}");
        assert_eq!(got.source, "a\n  {%- with %}{% filter __generation -%}\nb{% endfilter %}{% endwith %}");
        assert!(got.has_generation);
    }

    #[test]
    fn generation_in_strings_comments_and_raw_blocks_is_text() {
        for source in [
            "{{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{{ 'x' {% endraw %}",
            "{% if generation %}",
        ] {
            let got = scan(source);
            assert_eq!(got.source, source);
            assert!(!got.has_generation);
        }
    }

    #[test]
    fn assigned_values_are_bounded() {
        let cases = [
            (
                "{%- set a.b = 'x=' ~ (1 if c == 2 else 3) -%}",
                "{%- set a.b = ('x=' ~ (1 if c == 2 else 3))|__bounded -%}",
            ),
            ("{% set a, b = 1, 2 %}", "{% set a, b = (1, 2)|__bounded %}"),
            ("{% set x | indent(width=4) %}", "{% set x | indent(width=4) %}"),
            ("{% set x %}", "{% set x %}"),
            ("{% if a = b %}", "{% if a = b %}"),
        ];
        for (source, expected) in cases {
            assert_eq!(scan(source).source, expected);
        }
    }

    #[test]
    fn literals_are_unescaped_and_found_behind_braces() {
        let got = scan(r#"{{ {"a": {}}['\n<x>'] }}{% if x.split("it's\t") %}'no'{% endif %}"#);
        assert_eq!(got.literals, vec!["\n<x>", "a", "it's\t"]);
    }

    #[test]
    fn a_source_that_never_closes_is_passed_on() {
        for source in ["{{ 'a", "{% raw %} {%", "{", "{# x", "{% if 'a\\"] {
            assert_eq!(scan(source).source, source);
        }
    }
}
