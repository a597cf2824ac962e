//! The fast backend, fastokens: which tokenizers it is given, and how.
//!
//! It runs a tokenizer.json without bounds of its own, so it is given only what needs none: patterns that it knows by
//! heart, or that are tame, for texts of some length; normalisers that make a text little longer. Called by `encoder`.

use super::config::ExtraToken;
use super::outline::values_under;
use super::pattern::KNOWN;
use crate::{Kind, caught, threads};
use fastokens::{TokenizerOptions, pre_tokenizers::Pcre2Limits};
use serde_json::Value;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes from which on fastokens spreads a text over threads.
const SPREAD_BYTES: usize = 64 << 10;
/// Bytes of the longest text that another pattern is run on.
const LONGEST: usize = 16 << 10;
/// How often another pattern goes back at one starting point.
const RETRIES: u32 = 10_000;
/// Repetitions without a small bound on one way through a tame pattern.
const REPETITIONS: usize = 2;
/// Times that a repetition with a small bound repeats.
const SMALL: u32 = 16;
/// How much longer replacing may make a text, and the bytes that may be put before it.
const GROWTH: (usize, usize) = (16, 64);

pub(super) struct Fast {
    inner: fastokens::Tokenizer,
    longest: usize,
    /// Whether it never panicked: what it has remembered is unknown then.
    sound: AtomicBool,
}

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fast")
    }
}

impl Fast {
    /// The backend for a file with the outline `frame` and further added tokens, or why there is none.
    pub fn build(json: &[u8], frame: &Value, extra: &[ExtraToken]) -> Result<Self, String> {
        let kind = frame.pointer("/model/type").and_then(Value::as_str).unwrap_or("BPE");
        if kind != "BPE" {
            return Err(format!("fastokens knows BPE alone, and this model is {kind}"));
        }
        if frame.pointer("/model/dropout").is_some_and(|dropout| dropout.as_f64().is_some_and(|p| p > 0.0)) {
            return Err("the model drops merges at random".to_owned());
        }
        if growth(frame.get("normalizer").unwrap_or(&Value::Null)).is_none_or(|growth| growth > GROWTH.0) {
            return Err("the normalizer replaces by a regular expression, or by far longer texts".to_owned());
        }
        let steps = values_under(frame.get("pre_tokenizer").unwrap_or(&Value::Null), "type");
        if steps.iter().filter(|step| matches!(step.as_str(), Some("ByteLevel" | "Metaspace"))).count() > 1 {
            return Err("the pre-tokenizer spells the text anew more than once".to_owned());
        }
        let patterns = values_under(frame.get("pre_tokenizer").unwrap_or(&Value::Null), "Regex");
        let patterns: Vec<&str> = patterns.into_iter().filter_map(Value::as_str).collect();
        let known = patterns.iter().all(|pattern| KNOWN.contains(pattern));
        if !known && !patterns.iter().all(|pattern| is_tame(pattern)) {
            return Err("a pattern of the pre-tokenizer can match in very many ways".to_owned());
        }
        let limits = Pcre2Limits { match_limit: (!known).then_some(RETRIES), ..Pcre2Limits::default() };
        let document = document(json, extra)?;
        let built = caught(Kind::Tokenizer, "loading fastokens", || {
            Ok(fastokens::Tokenizer::from_json_with_options(document, TokenizerOptions { pcre2_limits: limits }))
        });
        match built {
            Ok(Ok(inner)) => {
                let longest = if known { usize::MAX } else { LONGEST };
                Ok(Self { inner, longest, sound: AtomicBool::new(true) })
            }
            Ok(Err(error)) => Err(format!("fastokens does not take this tokenizer.json: {error}")),
            Err(error) => Err(error.what),
        }
    }

    /// Whether it is given such a text.
    pub fn takes(&self, text: &str) -> bool {
        text.len() <= self.longest && self.sound.load(Ordering::Relaxed)
    }

    /// Ids of a text, its added tokens seen or not; `None` where it fails.
    pub fn encode(&self, text: &str, added: bool) -> Option<Vec<u32>> {
        if !self.takes(text) {
            return None;
        }
        let encode = || {
            caught(Kind::Tokenizer, "fastokens", || {
                Ok(if added { self.inner.encode(text) } else { self.inner.encode_ordinary(text) })
            })
        };
        let ids = if text.len() < SPREAD_BYTES { encode() } else { threads::in_pool(encode) };
        if ids.is_err() {
            self.sound.store(false, Ordering::Relaxed);
        }
        ids.ok()?.ok()
    }
}

/// The document that fastokens is built from.
fn document(json: &[u8], extra: &[ExtraToken]) -> Result<Value, String> {
    let mut document: Value = serde_json::from_slice(json).map_err(|error| format!("it is not JSON: {error}"))?;
    for part in ["truncation", "padding"] {
        document[part] = Value::Null;
    }
    let listed = document["added_tokens"].take();
    let mut tokens = if let Value::Array(tokens) = listed { tokens } else { Vec::new() };
    tokens.extend(extra.iter().map(ExtraToken::stated));
    document["added_tokens"] = Value::from(tokens);
    Ok(document)
}

/// How many times longer a normaliser makes a text at most, `None` where it does not say.
fn growth(part: &Value) -> Option<usize> {
    match part.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let pattern = part.get("pattern")?;
            let pattern = pattern.as_str().or_else(|| pattern.get("String")?.as_str())?;
            // An empty pattern is between any two characters.
            let content = part.get("content")?.as_str()?.len();
            (!pattern.is_empty()).then(|| content.div_ceil(pattern.len()).max(1))
        }
        Some("Prepend") => (part.get("prepend")?.as_str()?.len() <= GROWTH.1).then_some(1),
        _ => {
            let parts = part.get("normalizers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            parts.iter().try_fold(1_usize, |product, part| product.checked_mul(growth(part)?))
        }
    }
}

/// What is open while a pattern is read: repetitions of the alternative at hand, and the most of any.
#[derive(Default, Clone, Copy)]
struct Open {
    here: usize,
    most: usize,
}

/// Whether a pattern repeats nothing that repeats, and little one after another: it then takes no more than cubic time.
/// What is not understood is not tame.
fn is_tame(pattern: &str) -> bool {
    let mut rest = pattern;
    let (mut open, mut last) = (vec![Open::default()], None);
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        let step = match c {
            '\\' => escape(&mut rest).then_some(Some(0)),
            '[' => class(&mut rest).then_some(Some(0)),
            '(' => group(&mut rest).then(|| open.push(Open::default())).map(|()| None),
            ')' if open.len() > 1 => open.pop().map(|inner| Some(inner.most.max(inner.here))),
            '|' => open.last_mut().map(|open| {
                open.most = open.most.max(open.here);
                open.here = 0;
                None
            }),
            '*' | '+' | '?' | '{' => repeated(c, last, &mut rest).map(|count| {
                if let (Some(open), Some(last)) = (open.last_mut(), last) {
                    open.here += count - last;
                }
                None
            }),
            ')' => None,
            _ => Some(Some(0)),
        };
        let Some(step) = step else { return false };
        if let (Some(count), Some(open)) = (step, open.last_mut()) {
            open.here += count;
        }
        last = step;
    }
    open.len() == 1 && open[0].most.max(open[0].here) <= REPETITIONS
}

/// Steps over an escape; back references, calls and what moves the match are none.
fn escape(rest: &mut &str) -> bool {
    let Some(c) = rest.chars().next() else { return false };
    *rest = &rest[c.len_utf8()..];
    if rest.starts_with('{') && matches!(c, 'p' | 'P' | 'x') {
        let Some(end) = rest.find('}') else { return false };
        *rest = &rest[end + 1..];
    }
    matches!(c, 'p' | 'P' | 'x' | 'd' | 'D' | 's' | 'S' | 'w' | 'W' | 'b' | 'B' | 'r' | 'n' | 't' | 'f' | 'v')
        || !c.is_ascii_alphanumeric()
}

/// Steps over a character class.
fn class(rest: &mut &str) -> bool {
    let mut depth = 1;
    *rest = rest.strip_prefix('^').unwrap_or(rest);
    if rest.starts_with(']') {
        return false;
    }
    while depth > 0 {
        let Some(c) = rest.chars().next() else { return false };
        *rest = &rest[c.len_utf8()..];
        match c {
            '\\' if !escape(rest) => return false,
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
    }
    true
}

/// Steps over what opens a group.
fn group(rest: &mut &str) -> bool {
    let Some(kind) = rest.strip_prefix('?') else { return true };
    let found = [":", "=", "!", "<=", "<!", "i:"].into_iter().find(|open| kind.starts_with(open));
    *rest = &kind[found.map_or(0, str::len)..];
    found.is_some()
}

/// The repetitions of what stood before together with a quantifier's own, `None` where that is not tame.
fn repeated(quantifier: char, last: Option<usize>, rest: &mut &str) -> Option<usize> {
    let within = last?;
    let small = match quantifier {
        '?' => true,
        '{' => {
            let (bounds, behind) = rest.split_once('}')?;
            *rest = behind;
            let most = bounds.split_once(',').map_or(bounds, |(_, most)| most);
            !most.is_empty() && most.parse::<u32>().ok()? <= SMALL
        }
        _ => false,
    };
    *rest = rest.strip_prefix(['?', '+']).unwrap_or(rest);
    match (small, within) {
        (true, _) if quantifier == '?' => Some(within),
        (small, 0) => Some(usize::from(!small)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastokens::tiktoken as known;
    use serde_json::json;

    #[test]
    fn published_patterns_are_tame_and_those_that_match_in_many_ways_are_not() {
        let tame = [known::CL100K_BASE_PATTERN, known::O200K_BASE_PATTERN, known::DEEPSEEK_SPLIT3_PATTERN];
        let more = [" ?[^(\\s|[.,!?…。，、।۔،])]+", "(?=(\\d{3})+(?!\\d))", "\\p{N}{1,3}", "'s|[a-z]++|a?", "(?:ab?)*"];
        for pattern in tame.iter().chain(&more) {
            assert!(is_tame(pattern), "{pattern}");
        }
        let wild = [
            r"(a+)+$ (a*)* (?:a|b+){2,} (a|b{3,}c)* a*a*a*b (?>a*)b (a)\1* (?R) \g<1> (?x)a",
            r"a** *a []a]+ (a a) (a{1,20}){3} (?<n>a)\k<n> \Ga",
        ];
        for pattern in wild.iter().flat_map(|line| line.split(' ')) {
            assert!(!is_tame(pattern), "{pattern}");
        }
    }

    #[test]
    fn normalisers_grow_by_the_product_of_their_steps() {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        assert_eq!(growth(&Value::Null), Some(1));
        assert_eq!(growth(&replace(" ", "▁")), Some(3));
        let twice = json!({"type": "Sequence", "normalizers": vec![replace("a", "aa"); 40]});
        assert_eq!(growth(&twice), Some(1 << 40));
        assert_eq!(growth(&replace("", "x")), None);
        assert_eq!(growth(&json!({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b"})), None);
    }
}
