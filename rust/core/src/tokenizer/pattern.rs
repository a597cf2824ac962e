//! Regular expressions of a tokenizer.json, by the engine that the `tokenizers` crate takes, within bounds.
//!
//! The engine goes back and tries again without an end where a pattern can match in many ways. Patterns as published are
//! searched for as the crate does; others are tried at one byte after the other. Between two of them the allowance of the
//! call is looked at, and how long one of them may take is bounded by `cost`. Called by `guard`.

use super::allowance::{in_time, refuse};
use super::cost::Cost;
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
    /// Its beginning, for errors.
    shown: String,
    /// What a match costs, `None` if a search takes linear time.
    cost: Option<Cost>,
}

/// Characters of an expression that an error shows.
const SHOWN: usize = 80;

impl Bounded {
    pub fn new(source: &str) -> Result<Self, String> {
        if source.contains("\\G") {
            return Err("a regular expression asks where its search begins (\\G)".to_owned());
        }
        let shown = format!("{:?}", source.chars().take(SHOWN).collect::<String>());
        let cost = if KNOWN.contains(&source) {
            None
        } else {
            let refused = |what| format!("how long the regular expression {shown} takes has no bound: it has {what}");
            Some(Cost::of(source).map_err(refused)?)
        };
        let regex = Regex::new(source).map_err(|error| error.to_string())?;
        Ok(Self { regex, shown, cost })
    }

    /// A pattern that matches `text` alone.
    pub fn literal(text: &str) -> Result<Self, String> {
        let special = |c: char| "\\.+*?()|[]{}^$#&-~".contains(c);
        let source: String = text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect();
        Ok(Self { cost: None, ..Self::new(&source)? })
    }

    /// The first match that begins at `from` or behind it.
    fn next(
        &self,
        text: &str,
        from: usize,
        region: &mut Region,
    ) -> Result<Option<Offsets>, Box<dyn Error + Send + Sync>> {
        let options = SearchOptions::SEARCH_OPTION_NONE;
        let Some(cost) = self.cost else {
            in_time(&self.named())?;
            region.clear();
            let found =
                self.regex.search_with_param(text, from, text.len(), options, Some(region), MatchParam::default());
            return match found {
                Ok(found) => Ok(found.and_then(|_| region.pos(0))),
                Err(error) => Err(self.gives_up(error.description())),
            };
        };
        let Some(retries) = cost.retries(text.len()) else {
            return Err(self.gives_up(&format!("one match could take too long for a text of {} bytes", text.len())));
        };
        let mut at = from;
        loop {
            in_time(&self.named())?;
            region.clear();
            let mut param = MatchParam::default();
            param.set_retry_limit_in_match(retries);
            match self.regex.match_with_param(text, at, options, Some(region), param) {
                Ok(Some(_)) => return Ok(region.pos(0)),
                Ok(None) => {}
                Err(error) => return Err(self.gives_up(error.description())),
            }
            let Some(c) = text[at..].chars().next() else { return Ok(None) };
            at += c.len_utf8();
        }
    }
}

impl Bounded {
    fn named(&self) -> String {
        format!("regular expression {}", self.shown)
    }

    fn gives_up(&self, why: &str) -> Box<dyn Error + Send + Sync> {
        refuse(&format!("the {} gives up: {why}", self.named()))
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
            let named = error.contains(&format!("the regular expression {source:?} "));
            assert!(named && (error.contains(" gives up") || error.contains(" takes too long")), "{error}");
        }
    }

    #[test]
    fn one_match_takes_time_in_proportion_to_the_text() {
        let a = "a".repeat(100_000);
        let texts = [a.clone() + "b", a.replace('a', "ab")];
        let sources = [
            "(?:a(?=.*))*c",
            "(?:a(?=(?:a(?=.*))*))*c",
            "(?:a(?!.*z))*c",
            "(?:a(?<=a*))*c",
            "a*(?>a*)c",
            "a*a*+c",
            "[ab]*a*c",
            "[ab]*(?:a*b)*c",
            r"(a*)(?:a\1?)*c",
            "(?:(?:(?:x?){1000}){1000}){1000}c",
            "(?:(?:(?:){1000}){1000}){1000}c",
            "(?:a|aa|aaa)*c",
            "(?:a?){500}(?:a?){500}(?:a?){500}c",
            "(?:a{0,1000}b?){0,1000}c",
            "a(?i)b|[ab]*(?>[ab]*)c",
            "(?=(?:[ab]*[ab]*)*c)d",
            "[]ab]*(?>[^]c]*)d",
            r"(\X*)*c",
            r"\w*\b\w*c",
        ];
        for source in sources {
            for text in &texts {
                let started = std::time::Instant::now();
                let pattern = Bounded::new(source).unwrap();
                let found = bounded(text.len(), "splitting", || (&pattern).find_matches(text));
                let taken = started.elapsed().as_secs_f64();
                assert!(taken < 20.0, "{source} takes {taken} s: {:?}", found.err());
                if let Err(error) = found {
                    assert!(error.to_string().contains(&format!("the regular expression {source:?} ")), "{error}");
                }
            }
        }
    }

    #[test]
    fn an_expression_whose_cost_has_no_bound_is_refused() {
        let sources = [
            r"(?<a>x\g<b>)(?<b>y)",
            "(?~a)",
            "(?(<a>)b|c)",
            "(?x)a # (",
            r"\c(a",
            "(*FAIL)",
            "[[:abcdefghijklmnopqrst:]",
        ];
        for source in sources {
            let error = Bounded::new(source).unwrap_err();
            assert!(error.contains("has no bound: it has") && error.contains(&format!("{source:?}")), "{error}");
        }
    }

    #[test]
    fn expressions_of_tokenizers_may_go_back_as_often_as_the_text_is_long() {
        let sources = [
            known::QWEN2_PATTERN,
            known::O200K_BASE_PATTERN,
            known::TEKKEN_PATTERN,
            known::KIMI_PATTERN,
            known::DEEPSEEK_SPLIT3_PATTERN,
            r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            r"\d{1,3}(?=(?:\d{3})*\b)",
            r"(?=(\d{3})+(?!\d))",
            r"[^\n]+|\n+",
            r" {2,}",
            r"(?<!\n)\n(?!\n)",
            r" ?[^(\s|[.,!?…。，、।۔،])]+",
        ];
        for source in sources {
            let retries = Cost::of(source).unwrap().retries(1 << 20);
            assert!(retries.is_some_and(|retries| retries >= 1 << 20), "{source} {retries:?}");
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
