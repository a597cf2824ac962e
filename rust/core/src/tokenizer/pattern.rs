//! Regular expressions of a tokenizer.json, by the engine that the `tokenizers` crate takes, within bounds.
//!
//! The engine goes back and tries again without an end where a pattern can match in many ways. Patterns as published are
//! searched for as the crate does; others are tried at one byte after the other, and between two of them the budget of the
//! call is looked at. The engine counts only how often it goes back. Between two of these it can go over a whole text, and
//! by a look-around in a repetition over the whole text for each byte of it. So the work between two is bounded here from
//! the expression, and how often the engine may go back follows from the bound and the length of the text.

use super::budget::{in_time, refuse};
use fastokens::tiktoken as known;
use onig::{MatchParam, Regex, Region, SearchOptions};
use std::error::Error;
use std::iter::Peekable;
use std::str::Chars;
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

/// Steps of a match, always and for each byte of text.
const STEPS: (f64, f64) = (1e8, 200.0);
/// How often the engine may go back at most: its own bound.
const RETRIES: f64 = 1e7;
/// Groups in groups, which are read by recursion.
const DEPTH: usize = 250;

/// What one way through an expression costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cost {
    /// Steps besides those that take a byte of the text each.
    size: u64,
    /// The longest body of a repetition without an end.
    body: u64,
    /// How many repetitions without an end stand on one way with something behind them that may fail.
    open: u64,
    /// Whether there is a repetition without an end.
    loops: bool,
    /// Of what looks at text without taking it, the power of the text's length; `None` if nothing does.
    aside: Option<i32>,
    can_fail: bool,
}

impl Cost {
    const NONE: Self = Self { size: 0, body: 1, open: 0, loops: false, aside: None, can_fail: false };
    const STEP: Self = Self { size: 1, can_fail: true, ..Self::NONE };

    /// Reads an expression in the syntax of Ruby, as the `tokenizers` crate does.
    ///
    /// # Errors
    /// What it has whose cost has no bound, in words that go on after "it has".
    pub fn of(source: &str) -> Result<Self, String> {
        let mut reader = Reader { rest: source.chars().peekable(), depth: 0 };
        let cost = reader.alternatives(false)?;
        if reader.rest.next().is_some() { Err("a bracket that is not opened".to_owned()) } else { Ok(cost) }
    }

    /// How often the engine may go back in one match of a text of so many bytes; `None` if not even once.
    pub fn retries(self, bytes: usize) -> Option<u32> {
        let length = bytes as f64 + 1.0;
        let most = STEPS.0 + STEPS.1 * length;
        let once = if self.open <= 1 && self.aside.is_none_or(|power| power <= 1) {
            // Of one repetition each step back is followed by what has no repetition.
            self.size as f64
        } else {
            let power = self.aside.unwrap_or(0).max(1);
            self.size as f64 + self.body as f64 * length.powi(power)
        };
        let retries = (most / once.max(1.0)).min(RETRIES);
        (retries >= 1.0).then_some(retries as u32)
    }

    /// One after the other.
    fn and(self, next: Self) -> Self {
        Self {
            size: self.size.saturating_add(next.size),
            body: self.body.max(next.body),
            open: self.open.saturating_add(next.open),
            loops: self.loops || next.loops,
            aside: self.aside.max(next.aside),
            can_fail: self.can_fail || next.can_fail,
        }
    }

    /// One or the other.
    fn or(self, other: Self) -> Self {
        Self { open: self.open.max(other.open), can_fail: self.can_fail && other.can_fail, ..self.and(other) }
    }

    /// So many times, without an end if `most` is `None`; `behind` tells whether something behind it may fail.
    fn times(self, least: u64, most: Option<u64>, behind: bool) -> Self {
        let can_fail = self.can_fail && least > 0;
        let count = most.unwrap_or(least).max(1);
        let size = self.size.saturating_mul(count);
        if most.is_some() {
            return Self { size, open: self.open.saturating_mul(count), can_fail, ..self };
        }
        Self {
            size,
            body: self.body.max(self.size),
            // What is repeated within a repetition is gone over in many ways.
            open: if self.loops { 2 } else { self.open + u64::from(behind) },
            loops: true,
            aside: self.aside.map(|power| power + 1),
            can_fail,
        }
    }

    /// Looked at from one place, or from each place before it (`behind`).
    fn looked(self, behind: bool) -> Self {
        let tries = i32::from(behind && self.loops);
        let power = self.aside.unwrap_or(0).max(i32::from(self.loops)) + tries;
        let size = if behind { self.size.saturating_mul(self.size.max(1)) } else { self.size };
        Self { size, aside: Some(power), can_fail: true, ..self }
    }
}

struct Reader<'s> {
    rest: Peekable<Chars<'s>>,
    depth: usize,
}

/// A part that is read before it is known what stands behind it.
#[derive(Clone, Copy)]
enum Part {
    Plain(Cost),
    Repeated(Cost, u64, Option<u64>),
}

impl Reader<'_> {
    fn alternatives(&mut self, behind: bool) -> Result<Cost, String> {
        let mut cost = self.sequence(behind)?;
        while self.rest.next_if_eq(&'|').is_some() {
            cost = cost.or(self.sequence(behind)?);
        }
        Ok(cost)
    }

    fn sequence(&mut self, behind: bool) -> Result<Cost, String> {
        let mut parts: Vec<Part> = Vec::new();
        while let Some(next) = self.rest.next_if(|next| !matches!(next, '|' | ')')) {
            if let Some((least, most)) = self.quantifier(next) {
                let inner = parts.pop().map_or(Cost::NONE, |part| resolved(part, true));
                parts.push(Part::Repeated(inner, least, most));
                continue;
            }
            parts.push(Part::Plain(match next {
                '(' => self.group(behind)?,
                '[' => self.class()?,
                '\\' => self.escape()?,
                _ => Cost::STEP,
            }));
        }
        let (mut cost, mut behind) = (Cost::NONE, behind);
        for part in parts.into_iter().rev() {
            let part = resolved(part, behind);
            behind |= part.can_fail;
            cost = part.and(cost);
        }
        Ok(cost)
    }

    /// How many times, if this character begins to say so.
    fn quantifier(&mut self, next: char) -> Option<(u64, Option<u64>)> {
        let found = match next {
            '*' => (0, None),
            '+' => (1, None),
            '?' => (0, Some(1)),
            '{' => {
                let text: String = self.rest.clone().take_while(|c| *c != '}').collect();
                let (least, most) = text.split_once(',').map_or((&*text, None), |(least, most)| (least, Some(most)));
                let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
                let whole = self.rest.clone().nth(text.chars().count()) == Some('}');
                if !whole || !digits(least) || !most.is_none_or(digits) || text.len() < 1 + usize::from(most.is_some())
                {
                    return None;
                }
                self.rest.nth(text.chars().count());
                let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
                let low = if least.is_empty() { 0 } else { number(least) };
                let high = match most {
                    None => Some(low),
                    Some("") => None,
                    // The engine takes numbers in either order.
                    Some(most) => Some(number(most).max(low)),
                };
                (low, high)
            }
            _ => return None,
        };
        // In another order, or without going back; behind a number a plus repeats once more.
        let _ = self.rest.next_if(|sign| *sign == '?' || *sign == '+' && next != '{');
        Some(found)
    }

    fn group(&mut self, behind: bool) -> Result<Cost, String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("groups in groups more than {DEPTH} deep"));
        }
        let cost = if self.rest.next_if_eq(&'?').is_some() {
            self.named()?
        } else if self.rest.peek() == Some(&'*') {
            return Err("a call of a function (*...)".to_owned());
        } else {
            // What follows is not known yet, and may fail.
            Some(self.alternatives(true)?)
        };
        self.depth -= 1;
        let Some(cost) = cost else {
            // Flags hold up to the bracket that closes the group around them.
            return self.alternatives(behind);
        };
        if self.rest.next() == Some(')') { Ok(cost) } else { Err("a bracket that is not closed".to_owned()) }
    }

    /// A group that begins with `(?`; `None` for flags, which hold for all that follows in the group around them.
    fn named(&mut self) -> Result<Option<Cost>, String> {
        let kind = self.rest.next();
        let second = self.rest.peek().copied();
        Ok(Some(match (kind, second) {
            (Some(':' | '>'), _) => self.alternatives(true)?,
            (Some('=' | '!'), _) => self.alternatives(true)?.looked(false),
            (Some('<'), Some('=' | '!')) => {
                self.rest.next();
                self.alternatives(true)?.looked(true)
            }
            (Some('<'), _) => self.after_name('>')?,
            (Some('\''), _) => self.after_name('\'')?,
            (Some(flag), _) => {
                let mut flags = flag.to_string();
                while let Some(flag) = self.rest.next_if(|flag| flag.is_ascii_alphabetic() || *flag == '-') {
                    flags.push(flag);
                }
                if !flags.bytes().all(|flag| b"imadu-".contains(&flag)) {
                    return Err(format!("a group (?{flags}"));
                }
                match self.rest.next() {
                    Some(':') => self.alternatives(true)?,
                    Some(')') => return Ok(None),
                    _ => return Err(format!("a group (?{flags}")),
                }
            }
            (None, _) => return Err("a bracket that is not closed".to_owned()),
        }))
    }

    fn after_name(&mut self, end: char) -> Result<Cost, String> {
        while self.rest.next().ok_or("a name that does not end")? != end {}
        self.alternatives(true)
    }

    /// A set of characters, behind its opening bracket.
    fn class(&mut self) -> Result<Cost, String> {
        let (mut depth, mut first) = (1, true);
        let _ = self.rest.next_if_eq(&'^');
        while depth > 0 {
            let next = self.rest.next().ok_or("a set of characters that is not closed")?;
            match next {
                // A bracket that closes is a character where a set begins.
                ']' if !first => depth -= 1,
                '[' if self.rest.peek() == Some(&':') => {
                    let name: String = self.rest.clone().take_while(|c| *c != ']').take(20).collect();
                    let word = name.trim_start_matches([':', '^']).trim_end_matches(':');
                    let whole = name.len() > 2 && name.ends_with(':') && !word.is_empty();
                    if !whole || !word.bytes().all(|byte| byte.is_ascii_alphabetic()) {
                        return Err("a set of characters with [: in it".to_owned());
                    }
                    self.rest.nth(name.chars().count());
                }
                '[' => {
                    (depth, first) = (depth + 1, true);
                    let _ = self.rest.next_if_eq(&'^');
                    continue;
                }
                '\\' => {
                    self.escape()?;
                }
                _ => {}
            }
            first = false;
        }
        Ok(Cost::STEP)
    }

    /// What stands behind a backslash.
    fn escape(&mut self) -> Result<Cost, String> {
        let next = self.rest.next().ok_or("a backslash at its end")?;
        if matches!(next, 'p' | 'P' | 'x' | 'o') && self.rest.next_if_eq(&'{').is_some() {
            while self.rest.next().ok_or("a name that does not end")? != '}' {}
        }
        match next {
            'g' => Err("a call of a group (\\g)".to_owned()),
            'c' | 'C' | 'M' => Err(format!("a control character (\\{next})")),
            // The text of a group again.
            'k' | '1'..='9' => Ok(Cost { loops: true, ..Cost::STEP }.looked(false)),
            // A border or a character that is found by going over the text before it.
            'X' | 'y' | 'Y' => Ok(Cost { loops: true, ..Cost::STEP }.looked(true)),
            _ => Ok(Cost::STEP),
        }
    }
}

fn resolved(part: Part, behind: bool) -> Cost {
    match part {
        Part::Plain(cost) => cost,
        Part::Repeated(cost, least, most) => cost.times(least, most, behind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::budget::bounded;
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
