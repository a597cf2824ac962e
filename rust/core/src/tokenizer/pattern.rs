//! Regular expressions of a tokenizer.json, run by the engine of the `tokenizers` crate within bounds.
//!
//! The engine can backtrack practically forever if a pattern matches in many ways. Published patterns are searched for
//! as the crate does. Other patterns are tried at one start position after the other, and the budget of the call is
//! checked in between. The engine only counts its backtracking steps. Between two of these it can scan a whole text,
//! or, with a look-around in a repetition, the whole text for each byte. Therefore this module bounds the work between
//! two steps from the expression. The number of allowed steps follows from that bound and the length of the text.

use super::budget::{in_time, refuse};
use fastokens::tiktoken as known;
use onig::{MatchParam, Regex, Region, SearchOptions};
use std::error::Error;
use std::iter::Peekable;
use std::str::Chars;
use tokenizers::tokenizer::Offsets;
use tokenizers::tokenizer::pattern::Pattern;

/// Patterns that fastokens scans without a regular expression, and DeepSeek's. All of them match in linear time.
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
    /// Beginning of the expression, for errors.
    shown: String,
    /// The cost of a match; `None` if a search takes linear time.
    cost: Option<Cost>,
}

/// Number of characters of an expression that an error shows.
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
            let to_error = |what| format!("how long the regular expression {shown} takes has no bound: it has {what}");
            Some(Cost::of(source).map_err(to_error)?)
        };
        let regex = Regex::new(source).map_err(|error| error.to_string())?;
        Ok(Self { regex, shown, cost })
    }

    /// Creates a pattern that matches only `text`.
    pub fn literal(text: &str) -> Result<Self, String> {
        let is_special = |c: char| "\\.+*?()|[]{}^$#&-~".contains(c);
        let source: String = text.chars().flat_map(|c| is_special(c).then_some('\\').into_iter().chain([c])).collect();
        Ok(Self { cost: None, ..Self::new(&source)? })
    }

    /// Returns the first match that starts at or after `from`.
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
            let result =
                self.regex.search_with_param(text, from, text.len(), options, Some(region), MatchParam::default());
            return match result {
                Ok(result) => Ok(result.and_then(|_| region.pos(0))),
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
    /// Finds matches like the crate's own pattern. An empty match directly after the previous one is skipped.
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

/// Steps that a match may take: a constant, and a number per byte of text.
const STEPS: (f64, f64) = (1e8, 200.0);
/// Maximum number of backtracking steps, which the engine enforces.
const RETRIES: f64 = 1e7;
/// Maximum nesting of groups, because groups are parsed recursively.
const DEPTH: usize = 250;

/// The cost of one path through an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cost {
    /// Steps in addition to those that consume a byte of the text each.
    size: u64,
    /// Size of the longest body of an unbounded repetition.
    body: u64,
    /// Number of unbounded repetitions on one path that are followed by something that may fail.
    open: u64,
    /// True if there is an unbounded repetition.
    loops: bool,
    /// Cost of look-arounds, as the power of the text's length; `None` if there are none.
    aside: Option<i32>,
    can_fail: bool,
}

impl Cost {
    const NONE: Self = Self { size: 0, body: 1, open: 0, loops: false, aside: None, can_fail: false };
    const STEP: Self = Self { size: 1, can_fail: true, ..Self::NONE };

    /// Parses an expression in Ruby's syntax, which the `tokenizers` crate uses.
    ///
    /// # Errors
    /// Returns the construct whose cost has no bound, worded to follow "it has".
    pub fn of(source: &str) -> Result<Self, String> {
        let mut reader = Reader { rest: source.chars().peekable(), depth: 0 };
        let cost = reader.alternatives(false)?;
        if reader.rest.next().is_some() { Err("a bracket that is not opened".to_owned()) } else { Ok(cost) }
    }

    /// Returns the number of backtracking steps that one match of a text of `bytes` bytes may take, or `None` if not
    /// even one is allowed.
    pub fn retries(self, bytes: usize) -> Option<u32> {
        let length = bytes as f64 + 1.0;
        let max_steps = STEPS.0 + STEPS.1 * length;
        let step_cost = if self.open <= 1 && self.aside.is_none_or(|power| power <= 1) {
            // With one repetition, each backtracking step is followed by parts without repetition.
            self.size as f64
        } else {
            let power = self.aside.unwrap_or(0).max(1);
            self.size as f64 + self.body as f64 * length.powi(power)
        };
        let retries = (max_steps / step_cost.max(1.0)).min(RETRIES);
        (retries >= 1.0).then_some(retries as u32)
    }

    /// Returns the cost of a sequence.
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

    /// Returns the cost of an alternative.
    fn or(self, other: Self) -> Self {
        Self { open: self.open.max(other.open), can_fail: self.can_fail && other.can_fail, ..self.and(other) }
    }

    /// Returns the cost of a repetition, unbounded if `upper` is `None`. `tail_can_fail` is true if something after it may
    /// fail.
    fn times(self, lower: u64, upper: Option<u64>, tail_can_fail: bool) -> Self {
        let can_fail = self.can_fail && lower > 0;
        let count = upper.unwrap_or(lower).max(1);
        let size = self.size.saturating_mul(count);
        if upper.is_some() {
            return Self { size, open: self.open.saturating_mul(count), can_fail, ..self };
        }
        Self {
            size,
            body: self.body.max(self.size),
            // Nested repetitions match in many ways.
            open: if self.loops { 2 } else { self.open + u64::from(tail_can_fail) },
            loops: true,
            aside: self.aside.map(|power| power + 1),
            can_fail,
        }
    }

    /// Returns the cost of a look-around, from one position (lookahead) or from each position before it (lookbehind,
    /// `is_lookbehind`).
    fn looked(self, is_lookbehind: bool) -> Self {
        let tries = i32::from(is_lookbehind && self.loops);
        let power = self.aside.unwrap_or(0).max(i32::from(self.loops)) + tries;
        let size = if is_lookbehind { self.size.saturating_mul(self.size.max(1)) } else { self.size };
        Self { size, aside: Some(power), can_fail: true, ..self }
    }
}

struct Reader<'s> {
    rest: Peekable<Chars<'s>>,
    depth: usize,
}

/// A part that is parsed before the parts after it are known.
#[derive(Clone, Copy)]
enum Part {
    Plain(Cost),
    Repeated(Cost, u64, Option<u64>),
}

impl Reader<'_> {
    fn alternatives(&mut self, tail_can_fail: bool) -> Result<Cost, String> {
        let mut cost = self.sequence(tail_can_fail)?;
        while self.rest.next_if_eq(&'|').is_some() {
            cost = cost.or(self.sequence(tail_can_fail)?);
        }
        Ok(cost)
    }

    fn sequence(&mut self, tail_can_fail: bool) -> Result<Cost, String> {
        let mut parts: Vec<Part> = Vec::new();
        while let Some(next) = self.rest.next_if(|next| !matches!(next, '|' | ')')) {
            if let Some((least, most)) = self.quantifier(next) {
                let inner = parts.pop().map_or(Cost::NONE, |part| resolved(part, true));
                parts.push(Part::Repeated(inner, least, most));
                continue;
            }
            parts.push(Part::Plain(match next {
                '(' => self.group(tail_can_fail)?,
                '[' => self.class()?,
                '\\' => self.escape()?,
                _ => Cost::STEP,
            }));
        }
        let (mut cost, mut tail_can_fail) = (Cost::NONE, tail_can_fail);
        for part in parts.into_iter().rev() {
            let part = resolved(part, tail_can_fail);
            tail_can_fail |= part.can_fail;
            cost = part.and(cost);
        }
        Ok(cost)
    }

    /// Parses a quantifier, if this character starts one.
    fn quantifier(&mut self, next: char) -> Option<(u64, Option<u64>)> {
        let range = match next {
            '*' => (0, None),
            '+' => (1, None),
            '?' => (0, Some(1)),
            '{' => {
                let text: String = self.rest.clone().take_while(|c| *c != '}').collect();
                let (least, most) = text.split_once(',').map_or((&*text, None), |(least, most)| (least, Some(most)));
                let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
                let is_closed = self.rest.clone().nth(text.chars().count()) == Some('}');
                if !is_closed
                    || !digits(least)
                    || !most.is_none_or(digits)
                    || text.len() < 1 + usize::from(most.is_some())
                {
                    return None;
                }
                self.rest.nth(text.chars().count());
                let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
                let low = if least.is_empty() { 0 } else { number(least) };
                let high = match most {
                    None => Some(low),
                    Some("") => None,
                    // The engine accepts the numbers in either order.
                    Some(most) => Some(number(most).max(low)),
                };
                (low, high)
            }
            _ => return None,
        };
        // A lazy or possessive sign is skipped. After a number in braces, a plus repeats once more.
        let _ = self.rest.next_if(|sign| *sign == '?' || *sign == '+' && next != '{');
        Some(range)
    }

    fn group(&mut self, tail_can_fail: bool) -> Result<Cost, String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("groups in groups more than {DEPTH} deep"));
        }
        let cost = if self.rest.next_if_eq(&'?').is_some() {
            self.named()?
        } else if self.rest.peek() == Some(&'*') {
            return Err("a call of a function (*...)".to_owned());
        } else {
            // The part after it is not known yet, and may fail.
            Some(self.alternatives(true)?)
        };
        self.depth -= 1;
        let Some(cost) = cost else {
            // Flags apply up to the bracket that closes the enclosing group.
            return self.alternatives(tail_can_fail);
        };
        if self.rest.next() == Some(')') { Ok(cost) } else { Err("a bracket that is not closed".to_owned()) }
    }

    /// Parses a group that starts with `(?`. Returns `None` for flags, which apply to the rest of the enclosing group.
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

    /// Parses a character class after its opening bracket.
    fn class(&mut self) -> Result<Cost, String> {
        let (mut depth, mut first) = (1, true);
        let _ = self.rest.next_if_eq(&'^');
        while depth > 0 {
            let next = self.rest.next().ok_or("a set of characters that is not closed")?;
            match next {
                // A closing bracket at the beginning of a class is an ordinary character.
                ']' if !first => depth -= 1,
                '[' if self.rest.peek() == Some(&':') => {
                    let name: String = self.rest.clone().take_while(|c| *c != ']').take(20).collect();
                    let word = name.trim_start_matches([':', '^']).trim_end_matches(':');
                    let is_complete = name.len() > 2 && name.ends_with(':') && !word.is_empty();
                    if !is_complete || !word.bytes().all(|byte| byte.is_ascii_alphabetic()) {
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

    /// Parses an escape after its backslash.
    fn escape(&mut self) -> Result<Cost, String> {
        let next = self.rest.next().ok_or("a backslash at its end")?;
        if matches!(next, 'p' | 'P' | 'x' | 'o') && self.rest.next_if_eq(&'{').is_some() {
            while self.rest.next().ok_or("a name that does not end")? != '}' {}
        }
        match next {
            'g' => Err("a call of a group (\\g)".to_owned()),
            'c' | 'C' | 'M' => Err(format!("a control character (\\{next})")),
            // The text of a group, matched again.
            'k' | '1'..='9' => Ok(Cost { loops: true, ..Cost::STEP }.looked(false)),
            // A boundary or a character that is found by scanning the text before it.
            'X' | 'y' | 'Y' => Ok(Cost { loops: true, ..Cost::STEP }.looked(true)),
            _ => Ok(Cost::STEP),
        }
    }
}

fn resolved(part: Part, tail_can_fail: bool) -> Cost {
    match part {
        Part::Plain(cost) => cost,
        Part::Repeated(cost, least, most) => cost.times(least, most, tail_can_fail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::budget::bounded;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    /// Returns the parts into which the crate splits a text.
    fn crate_parts(source: &str, text: &str) -> Option<Vec<Offsets>> {
        let pattern = SplitPattern::Regex(source.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?;
        let mut parts = PreTokenizedString::from(text);
        split.pre_tokenize(&mut parts).ok()?;
        let parts = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        Some(parts.into_iter().map(|(_, offsets, _)| offsets).filter(|(start, end)| start < end).collect())
    }

    fn bounded_parts(source: &str, text: &str) -> Option<Vec<Offsets>> {
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
                assert_eq!(bounded_parts(source, text), crate_parts(source, text), "{source:?} on {text:?}");
            }
        }
    }

    #[test]
    fn a_pattern_may_not_refer_to_the_start_of_the_search() {
        assert!(Bounded::new("\\Gx").unwrap_err().contains("\\G"));
    }

    #[test]
    fn a_literal_is_found_as_it_is_written() {
        let text = "a.b*c(d)[e]{f}^$#&-~|\\+?";
        let matches = (&Bounded::literal(text).unwrap()).find_matches(&format!("x{text}a")).unwrap();
        assert_eq!(matches, [((0, 1), false), ((1, 1 + text.len()), true), ((1 + text.len(), 2 + text.len()), false)]);
    }

    #[test]
    fn a_pattern_that_matches_in_very_many_ways_is_stopped() {
        for (source, text) in [("(a+)+$", "a".repeat(40)), ("(?>a*)[cd]", "a".repeat(200_000))] {
            let pattern = Bounded::new(source).unwrap();
            let result = bounded(10, "splitting", || (&pattern).find_matches(&(text.clone() + "b")));
            let error = result.unwrap_err().to_string();
            let names_pattern = error.contains(&format!("the regular expression {source:?} "));
            assert!(names_pattern && (error.contains(" gives up") || error.contains(" takes too long")), "{error}");
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
                let result = bounded(text.len(), "splitting", || (&pattern).find_matches(text));
                let seconds = started.elapsed().as_secs_f64();
                assert!(seconds < 20.0, "{source} takes {seconds} s: {:?}", result.err());
                if let Err(error) = result {
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
            prop_assert_eq!(bounded_parts(&source, &text), crate_parts(&source, &text));
        }
    }
}
