//! Regular expressions of a tokenizer.json, by the engine that the `tokenizers` crate takes, within bounds.
//!
//! The engine goes back and tries again without an end where a pattern can match in many ways. Patterns as published are
//! searched for as the crate does; others are tried at one byte after the other, and between two of them the allowance
//! of the call is looked at. Called by `guard`.

use super::allowance::{in_time, refuse};
use fastokens::tiktoken as known;
use onig::{MatchParam, Regex, Region, SearchOptions};
use std::error::Error;
use tokenizers::tokenizer::Offsets;
use tokenizers::tokenizer::pattern::Pattern;

/// Patterns that fastokens scans without a regular expression, and DeepSeek's, which match in linear time.
pub(super) const KNOWN: [&str; 9] = [
    known::CL100K_BASE_PATTERN,
    known::QWEN2_PATTERN,
    known::QWEN35_PATTERN,
    known::TEKKEN_PATTERN,
    known::O200K_BASE_PATTERN,
    known::KIMI_PATTERN,
    known::DEEPSEEK_SPLIT1_PATTERN,
    known::DEEPSEEK_SPLIT2_PATTERN,
    known::DEEPSEEK_SPLIT3_PATTERN,
];

#[derive(Debug)]
pub(super) struct Bounded {
    regex: Regex,
    /// Whether a search takes linear time.
    plain: bool,
}

impl Bounded {
    pub fn new(source: &str) -> Result<Self, String> {
        if source.contains("\\G") {
            return Err("a regular expression asks where its search begins (\\G)".to_owned());
        }
        let regex = Regex::new(source).map_err(|error| error.to_string())?;
        Ok(Self { regex, plain: KNOWN.contains(&source) })
    }

    /// A pattern that matches `text` alone.
    pub fn literal(text: &str) -> Result<Self, String> {
        let special = |c: char| "\\.+*?()|[]{}^$#&-~".contains(c);
        let source: String = text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect();
        Ok(Self { plain: true, ..Self::new(&source)? })
    }

    /// The first match that begins at `from` or behind it.
    fn next(
        &self,
        text: &str,
        from: usize,
        region: &mut Region,
    ) -> Result<Option<Offsets>, Box<dyn Error + Send + Sync>> {
        let options = SearchOptions::SEARCH_OPTION_NONE;
        let mut at = from;
        loop {
            in_time()?;
            region.clear();
            let param = MatchParam::default();
            let found = if self.plain {
                self.regex.search_with_param(text, at, text.len(), options, Some(region), param)
            } else {
                self.regex.match_with_param(text, at, options, Some(region), param)
            };
            match found {
                Ok(Some(_)) => return Ok(region.pos(0)),
                Ok(None) if self.plain => return Ok(None),
                Ok(None) => {}
                Err(error) => return Err(refuse(&format!("a regular expression gives up: {}", error.description()))),
            }
            let Some(c) = text[at..].chars().next() else { return Ok(None) };
            at += c.len_utf8();
        }
    }
}

impl Pattern for &Bounded {
    /// As the crate's own: a match that is empty and stands right behind the last one is none.
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut region = Region::new();
        let mut parts = Vec::with_capacity(inside.len() / 4);
        let (mut from, mut last, mut open) = (0, None, 0);
        while from <= inside.len() {
            let Some((start, end)) = self.next(inside, from, &mut region)? else { break };
            if start == end && last == Some(end) {
                from += inside[from..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            (from, last) = (end, Some(end));
            if open != start {
                parts.push(((open, start), false));
            }
            parts.push(((start, end), true));
            open = end;
        }
        if open != inside.len() {
            parts.push(((open, inside.len()), false));
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::allowance::bounded;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    /// The crate's own parts of a text.
    fn theirs(source: &str, text: &str) -> Option<Vec<Offsets>> {
        let pattern = SplitPattern::Regex(source.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?;
        let mut parts = PreTokenizedString::from(text);
        split.pre_tokenize(&mut parts).ok()?;
        let parts = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        Some(parts.into_iter().map(|(_, offsets, _)| offsets).filter(|(start, end)| start < end).collect())
    }

    fn ours(source: &str, text: &str) -> Option<Vec<Offsets>> {
        let parts = (&Bounded::new(source).ok()?).find_matches(text).ok()?;
        Some(parts.into_iter().map(|(offsets, _)| offsets).filter(|(start, end)| start < end).collect())
    }

    #[test]
    fn the_parts_are_the_crates_for_patterns_of_all_kinds() {
        let long = format!("{}é日 end\n", "x".repeat(100));
        let sources =
            ["end", "(?<=日) ", "$", "^.", "é(?=日)", "x{30}", "\\z", "(?m).*\\n", "x*", "", "\\Ad", "e|\\b", "a\\Kb"];
        for source in sources {
            for text in [&*long, "x", "\n", "日日日日日日日日日日日日 end", "ab ab"] {
                assert_eq!(ours(source, text), theirs(source, text), "{source:?} on {text:?}");
            }
        }
    }

    #[test]
    fn where_a_search_begins_is_no_part_of_a_pattern() {
        assert!(Bounded::new("\\Gx").unwrap_err().contains("\\G"));
    }

    #[test]
    fn a_literal_is_found_as_it_is_written() {
        let text = "a.b*c(d)[e]{f}^$#&-~|\\+?";
        let found = (&Bounded::literal(text).unwrap()).find_matches(&format!("x{text}a")).unwrap();
        assert_eq!(found, [((0, 1), false), ((1, 1 + text.len()), true), ((1 + text.len(), 2 + text.len()), false)]);
    }

    #[test]
    fn a_pattern_that_matches_in_very_many_ways_is_stopped() {
        for (source, text) in [("(a+)+$", "a".repeat(40)), ("(?>a*)[cd]", "a".repeat(200_000))] {
            let pattern = Bounded::new(source).unwrap();
            let found = bounded(10, "splitting", || (&pattern).find_matches(&(text.clone() + "b")));
            let error = found.unwrap_err().to_string();
            assert!(error.contains("a regular expression gives up") || error.contains("take too long"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_parts_are_the_crates(
            source in "([ab日]|\\\\s|\\\\p\\{L\\}|\\\\b|\\^|\\$|\\(\\?=b\\)|\\(\\?!a\\)|\\(\\?<=a\\)|\\||[*+?]){1,6}",
            text in "[ab日 \n]{0,60}",
        ) {
            prop_assert_eq!(ours(&source, &text), theirs(&source, &text));
        }
    }
}
