//! The fast backend, fastokens: the tokenizers it supports, how it is built, and the probe texts on which it must
//! agree with the reference.
//!
//! fastokens runs a tokenizer.json without bounds. Therefore it only receives tokenizers that need none: known or tame
//! patterns (the latter for texts of limited length), and normalizers that make a text only little longer. The probe
//! is a fixed set: every piece that tokenizers are known to differ on, strings of two to eight pieces from a fixed
//! pseudo-random sequence, and the tokenizer's own added tokens.

use super::check::values_under;
use super::config::ExtraToken;
use super::pattern::KNOWN;
use crate::{Kind, catch_panic, pool};
use fastokens::TokenizerOptions;
use fastokens::pre_tokenizers::Pcre2Limits;
use serde_json::Value;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of bytes above which fastokens splits a text over threads.
const SPREAD_BYTES: usize = 64 << 10;
/// Bytes of the longest text for patterns that are not known.
const LONGEST: usize = 16 << 10;
/// Maximum backtracking steps of such a pattern at one starting point.
const RETRIES: u32 = 10_000;
/// Maximum number of repetitions without a small bound on one path through a tame pattern.
const REPETITIONS: usize = 2;
/// Largest bound of a repetition that counts as small.
const SMALL: u32 = 16;
/// Maximum factor by which replacing may lengthen a text, and maximum bytes of a prepended text.
const GROWTH: (usize, usize) = (16, 64);

pub(super) struct Fast {
    inner: fastokens::Tokenizer,
    longest: usize,
    /// True if it never panicked. After a panic the state of its caches is unknown.
    sound: AtomicBool,
}

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fast")
    }
}

impl Fast {
    /// Builds the backend for a file with the outline `frame` and further added tokens, or returns the reason why
    /// there is none.
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
        let all_known = patterns.iter().all(|pattern| KNOWN.contains(pattern));
        if !all_known && !patterns.iter().all(|pattern| is_tame(pattern)) {
            return Err("a pattern of the pre-tokenizer can match in very many ways".to_owned());
        }
        let limits = Pcre2Limits { match_limit: (!all_known).then_some(RETRIES), ..Pcre2Limits::default() };
        let document = document(json, extra)?;
        let loaded = catch_panic(Kind::Tokenizer, "loading fastokens", || {
            Ok(fastokens::Tokenizer::from_json_with_options(document, TokenizerOptions { pcre2_limits: limits }))
        });
        match loaded {
            Ok(Ok(inner)) => {
                let longest = if all_known { usize::MAX } else { LONGEST };
                Ok(Self { inner, longest, sound: AtomicBool::new(true) })
            }
            Ok(Err(error)) => Err(format!("fastokens does not take this tokenizer.json: {error}")),
            Err(error) => Err(error.what),
        }
    }

    /// Returns true if the backend accepts such a text.
    pub fn takes(&self, text: &str) -> bool {
        text.len() <= self.longest && self.sound.load(Ordering::Relaxed)
    }

    /// Returns the ids of a text, or `None` on failure. `added` specifies whether added tokens are recognized.
    pub fn encode(&self, text: &str, added: bool) -> Option<Vec<u32>> {
        if !self.takes(text) {
            return None;
        }
        let encode = || {
            catch_panic(Kind::Tokenizer, "fastokens", || {
                Ok(if added { self.inner.encode(text) } else { self.inner.encode_ordinary(text) })
            })
        };
        let ids = if text.len() < SPREAD_BYTES { encode() } else { pool::in_pool(encode) };
        if ids.is_err() {
            self.sound.store(false, Ordering::Relaxed);
        }
        ids.ok()?.ok()
    }
}

/// Returns the document that fastokens is built from.
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

/// Returns the maximum factor by which a normalizer lengthens a text, or `None` if it is unknown.
fn growth(part: &Value) -> Option<usize> {
    match part.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let pattern = part.get("pattern")?;
            let pattern = pattern.as_str().or_else(|| pattern.get("String")?.as_str())?;
            // An empty pattern matches between any two characters.
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

/// Repetitions in an open group: those of the current alternative, and the maximum of the earlier ones.
#[derive(Default, Clone, Copy)]
struct Open {
    here: usize,
    most: usize,
}

/// Returns true if a pattern has no nested repetitions and few in sequence. It then takes at most cubic time. Patterns
/// that are not understood are not tame.
fn is_tame(pattern: &str) -> bool {
    let mut remaining = pattern;
    let (mut open, mut last) = (vec![Open::default()], None);
    while let Some(c) = remaining.chars().next() {
        remaining = &remaining[c.len_utf8()..];
        let step = match c {
            '\\' => escape(&mut remaining).then_some(Some(0)),
            '[' => class(&mut remaining).then_some(Some(0)),
            '(' => group(&mut remaining).then(|| open.push(Open::default())).map(|()| None),
            ')' if open.len() > 1 => open.pop().map(|inner| Some(inner.most.max(inner.here))),
            '|' => open.last_mut().map(|open| {
                open.most = open.most.max(open.here);
                open.here = 0;
                None
            }),
            '*' | '+' | '?' | '{' => repeated(c, last, &mut remaining).map(|count| {
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

/// Skips an escape. Returns false for back references, calls, and escapes that move the match.
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

/// Skips a character class.
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

/// Skips the opening of a group.
fn group(rest: &mut &str) -> bool {
    let Some(kind) = rest.strip_prefix('?') else { return true };
    let opening = [":", "=", "!", "<=", "<!", "i:"].into_iter().find(|open| kind.starts_with(open));
    *rest = &kind[opening.map_or(0, str::len)..];
    opening.is_some()
}

/// Returns the repetitions of the preceding item, including the quantifier's own, or `None` if that is not tame.
fn repeated(quantifier: char, last: Option<usize>, rest: &mut &str) -> Option<usize> {
    let inner = last?;
    let small = match quantifier {
        '?' => true,
        '{' => {
            let (bounds, after) = rest.split_once('}')?;
            *rest = after;
            let maximum = bounds.split_once(',').map_or(bounds, |(_, maximum)| maximum);
            !maximum.is_empty() && maximum.parse::<u32>().ok()? <= SMALL
        }
        _ => false,
    };
    *rest = rest.strip_prefix(['?', '+']).unwrap_or(rest);
    match (small, inner) {
        (true, _) if quantifier == '?' => Some(inner),
        (small, 0) => Some(usize::from(!small)),
        _ => None,
    }
}

/// Number of strings made of random pieces.
const RANDOM: usize = 1600;
/// Number of added tokens in one string.
const TOGETHER: usize = 12;

/// Texts that implementations split, merge, normalize or match as added tokens differently.
const PIECES: [&[&str]; 7] = [
    // Words and their endings.
    &["the", " cat", " The", "'s", "'LL", "'re", "don't", " I'VE", "ſ's", "Kelvin"],
    // White space and control characters.
    &[
        "  ", "   ", " \n", "\n\n", "\r\n", "\t", "\t\t ", "\u{b}", "\u{c}", "\u{85}", "\u{a0}", "\u{2028}",
        "\u{3000}", "\u{1680}", "\u{1c}", "\0", "\u{7f}",
    ],
    // Numbers and signs.
    &[
        "1", "2345", "3.14", "１２", "٣٤", "½", "Ⅻ", "²", "{}", "\":", "//", "...", "!?", " (", "_", "-", "—", "…",
        "«", "``",
    ],
    // Combining marks, and letters that have several forms.
    &[
        "e\u{301}",
        "\u{301}",
        "\u{327}\u{301}",
        "a\u{30a}",
        "ﬁ",
        "ß",
        "İ",
        "ı",
        "Σς",
        "Å",
        "ñ",
        "각",
        "\u{1100}\u{1161}\u{11a8}",
    ],
    // Other scripts.
    &["日本", "語", "。", "你好，", "ไทย", "\u{e33}", "नमस्ते", "שלום", "\u{5bc}", "العربية", "\u{640}"],
    // Invisible characters, noncharacters, and sequences with them.
    &[
        "\u{200d}",
        "\u{200b}",
        "\u{feff}",
        "\u{fdd0}",
        "\u{fffd}",
        "👩\u{200d}🚀",
        "🇩🇪",
        "😊",
        "\u{fe0f}",
        "\u{1d518}",
        "\u{10ffff}",
    ],
    // Characters and strings used in vocabularies and added tokens.
    &["▁", "Ġ", "Ċ", "<", "|>", "<|im_", "end|>", "<｜", "</s>", "<0xE2>", "<unk>", "token_id:5", "function", "naïve"],
];

/// Returns the probe strings for a tokenizer with these added tokens.
pub(super) fn texts<'a>(added: impl Iterator<Item = &'a str>) -> Vec<String> {
    let pieces = PIECES.concat();
    let mut texts: Vec<String> = pieces.iter().map(|piece| (*piece).to_owned()).collect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = |below: usize| {
        // Knuth's MMIX generator; its high bits.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % below
    };
    for _ in 0..RANDOM {
        let count = 2 + next(7);
        texts.push((0..count).map(|_| pieces[next(pieces.len())]).collect());
    }
    for length in [16, 63, 64, 65, 300] {
        texts.extend(["a", "ab", " ", "\n", "=", "!", "1", "é", "日"].map(|piece| piece.repeat(length)));
    }
    let added: Vec<&str> = added.filter(|token| !token.is_empty()).collect();
    for tokens in added.chunks(TOGETHER) {
        let mut text = String::new();
        for token in tokens {
            text.push_str(token);
            text.push_str(pieces[next(pieces.len())]);
            text.push_str(&token[..token.char_indices().next_back().map_or(0, |(at, _)| at)]);
        }
        texts.push(text);
    }
    texts
}

/// Returns the first text for which `differs` is true.
pub(super) fn first_difference(texts: &[String], differs: impl Fn(&str) -> bool + Sync + Send) -> Option<&str> {
    let differences = pool::map(texts, || (), |(), text| differs(text));
    texts.iter().zip(differences).find(|(_, differs)| *differs).map(|(text, _)| text.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastokens::tiktoken as known;
    use serde_json::json;

    #[test]
    fn published_patterns_are_tame_and_those_that_match_in_many_ways_are_not() {
        let tame = [known::CL100K_BASE_PATTERN, known::O200K_BASE_PATTERN, known::DEEPSEEK_SPLIT3_PATTERN];
        let others =
            [" ?[^(\\s|[.,!?…。，、।۔،])]+", "(?=(\\d{3})+(?!\\d))", "\\p{N}{1,3}", "'s|[a-z]++|a?", "(?:ab?)*"];
        for pattern in tame.iter().chain(&others) {
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

#[cfg(test)]
mod probe_tests {
    use super::*;

    #[test]
    fn the_probe_is_fixed_and_holds_every_added_token() {
        let added: Vec<String> = (0..40).map(|n| format!("<é{n}é>")).collect();
        let make_texts = || texts(added.iter().map(String::as_str));
        let probes = make_texts();
        assert_eq!(probes, make_texts());
        assert!(added.iter().all(|token| probes.iter().any(|text| text.contains(token))));
        assert!(probes.len() > 1700);
    }

    #[test]
    fn the_first_difference_is_returned() {
        let texts = ["a", "bb", "cc"].map(str::to_owned);
        assert_eq!(first_difference(&texts, |text| text.len() == 2), Some("bb"));
        assert_eq!(first_difference(&texts, |_| false), None);
    }
}
