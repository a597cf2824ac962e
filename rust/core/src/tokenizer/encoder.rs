//! Encodes text with the `tokenizers` crate, or with a faster backend that was verified against it.
//!
//! The fast backend is fastokens. It is used only after it produced the same ids for every probe text. Text that it
//! cannot encode goes to the reference. Loading a tokenizer that was verified before builds neither backend, because
//! ids and bytes do not need them.
//!
//! A text is split at its added tokens if the ids of each part do not depend on its neighbors; otherwise it stays
//! whole. A tokenizer may write a space before every text (`Metaspace` with `prepend_scheme` "first", the `Prepend`
//! normalizer), strip one, or absorb the white space after an added token. A piece by itself then has other ids than
//! in its context. It is encoded together with the text before it, from the last added token on.

use super::budget::bounded;
use super::cache::{Facts, Memo};
use super::check::values_under;
use super::config::{ExtraToken, TokenizerConfig};
use super::fast_backend::{self, Fast};
use super::hf_backend::{Reference, build};
use super::vocab_bytes::Pieces;
use crate::error::{Error, Kind, Result};
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokenizers::{AddedToken, Encoding};

/// Maximum time of the probe, which normally takes a hundredth of it.
const PROBE: Duration = Duration::from_secs(20);
/// Bytes of a text for which the reference, and the fast backend, need some tenths of a second. Neither checks for
/// cancellation during that time.
const LONG: (usize, usize) = (256 << 10, 8 << 20);
/// Reason why a text is not split at added tokens although its file contains no obstacle.
const CUT: &str = "a text has other ids if it is cut at an added token";
/// Number of characters of a text that an error quotes.
const QUOTED: usize = 40;

/// The backend that produces the ids, and the reason for its choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// `fastokens` or `tokenizers`.
    pub backend: &'static str,
    /// The reason for the choice.
    pub reason: String,
    /// Number of texts that both backends encoded when the tokenizer was loaded.
    pub probes: usize,
    /// The reason why ids of text between added tokens are not cached; `None` if they are.
    pub cache_disabled_reason: Option<&'static str>,
}

/// Ids of a piece of text that follows another text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContinuationIds {
    /// Its ids.
    pub ids: Vec<u32>,
    /// The byte of the piece at which each id ends.
    pub ends: Vec<u32>,
    /// True if these are the ids of the piece in its context. If false, the tokenizer merges the two texts in one
    /// token.
    pub exact: bool,
}

/// The backends of one tokenizer and their shared state.
#[derive(Debug)]
pub(super) struct Encoder {
    backends: Backends,
    cutter: Option<Cutter>,
    memo: Memo,
    report: Report,
    /// True if pieces of a text have the same ids separately as in their context.
    apart: bool,
    added: Vec<(u32, AddedToken)>,
    anchors: OnceLock<Anchors>,
    /// The file that ids are made from, for errors.
    file: String,
}

impl Encoder {
    /// Creates an encoder from backends and the facts about them.
    pub fn of(backends: Backends, facts: &Facts, file: String) -> Self {
        let (cutter, no_memo) = match Cutter::new(&facts.document, &facts.listed) {
            Ok(cutter) if facts.cuts => (Some(cutter), None),
            Ok(_) => (None, Some(CUT)),
            Err(reason) => (None, Some(reason)),
        };
        let report = Report { backend: "", reason: String::new(), probes: 0, cache_disabled_reason: no_memo };
        let (added, anchors) = (facts.listed.clone(), OnceLock::new());
        let mut encoder =
            Self { backends, cutter, memo: Memo::new(), report, apart: facts.apart, added, anchors, file };
        encoder.tell(facts);
        encoder
    }

    /// Writes the backend and the reason for it to the report.
    fn tell(&mut self, facts: &Facts) {
        self.report.backend = if facts.fast { "fastokens" } else { "tokenizers" };
        self.report.reason.clone_from(&facts.reason);
        self.report.probes = facts.probes;
    }

    /// Keeps the fast backend only if every probe gives the same ids as the reference, and writes the result to
    /// `facts`. Returns false if the time ran out first; another load may then have another result.
    pub fn verify(&mut self, facts: &mut Facts) -> bool {
        if !facts.fast {
            return true;
        }
        let late = AtomicBool::new(false);
        facts.fast = false;
        if facts.listed.iter().any(|(_, token)| token.single_word) {
            "an added token matches whole words only".clone_into(&mut facts.reason);
        } else {
            let texts = fast_backend::texts(facts.listed.iter().map(|(_, token)| token.content.as_str()));
            let until = Instant::now() + PROBE;
            let differs = |text: &str| {
                late.fetch_or(Instant::now() > until, Ordering::Relaxed);
                late.load(Ordering::Relaxed) || self.fast_ids(text) != self.referred(text).ok()
            };
            let difference = fast_backend::first_difference(&texts, differs);
            facts.fast = difference.is_none();
            facts.probes = texts.len();
            facts.reason = match difference {
                None => format!("same ids as tokenizers for {} of {0} probes", texts.len()),
                Some(_) if late.load(Ordering::Relaxed) => {
                    format!("comparing fastokens with tokenizers took more than {PROBE:?}")
                }
                Some(text) => format!("fastokens gives other ids for {text:?}"),
            };
        }
        if !facts.fast {
            self.backends.distrust();
        }
        self.tell(facts);
        !late.into_inner()
    }

    /// Tests whether texts may be split at added tokens, and whether pieces of a text may be encoded separately.
    /// Writes the results to `facts`.
    pub fn probe_pieces(&mut self, facts: &mut Facts) {
        let same = |before: &str, suffix: &str| {
            let joined = [before, suffix].concat();
            // A text that cannot be encoded at all proves nothing.
            let Ok(expected) = self.referred(&joined) else { return true };
            let separate = self.encode(before).and_then(|ids| Ok([ids, self.encode(suffix)?].concat()));
            separate.is_ok_and(|separate| separate == expected)
        };
        let added = facts.listed.iter().map(|(_, token)| token.content.as_str()).take(TRIED);
        facts.cuts = added.zip(PAIRS.iter().cycle()).all(|(token, (_, suffix))| same(token, suffix));
        facts.apart = self.cutter.is_some() && facts.cuts && PAIRS.iter().all(|(before, suffix)| same(before, suffix));
        self.apart = facts.apart;
        if self.cutter.is_some() && !facts.cuts {
            (self.cutter, self.report.cache_disabled_reason) = (None, Some(CUT));
        }
    }

    /// Returns true if a piece after `before` has the same ids as by itself.
    pub fn is_apart(&self, before: &str) -> bool {
        self.apart || before.is_empty()
    }

    /// Returns the text before a piece, from its last added token on, joined with the piece. Also returns the length
    /// of the first part.
    pub fn joined(&self, before: &str, piece: &str) -> (String, usize) {
        let anchors = self.anchors.get_or_init(|| Anchors::new(&self.added));
        let context = &before[anchors.last(before)..];
        ([context, piece].concat(), context.len())
    }

    /// Returns the ids of `text[at..]` in the context of `text[..at]`.
    pub fn behind(&self, text: &str, at: usize, pieces: &Pieces) -> Result<ContinuationIds> {
        if let Some(result) = self.cut_off(text, at, pieces)? {
            return Ok(result);
        }
        for stand_in in STAND_INS {
            let text = [stand_in, &text[at..]].concat();
            if let Ok(Some(result)) = self.cut_off(&text, stand_in.len(), pieces) {
                return Ok(result);
            }
        }
        let (ids, ends) = self.encode_with_ends(&text[at..], pieces)?;
        Ok(ContinuationIds { ids, ends, exact: false })
    }

    /// Returns the ids of a text after its first `at` bytes, or `None` if a token crosses that byte.
    fn cut_off(&self, text: &str, at: usize, pieces: &Pieces) -> Result<Option<ContinuationIds>> {
        let (ids, ends) = self.encode_with_ends(text, pieces)?;
        let head = self.encode(&text[..at])?;
        let count = if ids.starts_with(&head) {
            head.len()
        } else {
            // The tokens before it may depend on the text after them.
            let count = ends.partition_point(|&end| end as usize <= at);
            let mut rest = &text.as_bytes()[at..];
            let strip = |id: &u32| pieces.get(*id).and_then(|piece| rest.strip_prefix(piece)).map(|tail| rest = tail);
            if ids[count..].iter().map(strip).any(|stripped| stripped.is_none()) || !rest.is_empty() {
                return Ok(None);
            }
            count
        };
        let ends = ends[count..].iter().map(|end| end.saturating_sub(at as u32)).collect();
        Ok(Some(ContinuationIds { ids: ids[count..].to_vec(), ends, exact: true }))
    }

    /// Returns the ids from the fast backend only, without caching.
    fn fast_ids(&self, text: &str) -> Option<Vec<u32>> {
        let fast = self.backends.fast()?;
        let Some(cutter) = &self.cutter else { return fast.encode(text, true) };
        let mut ids = Vec::new();
        for part in cutter.parts(text) {
            match part {
                Part::Added(id) => ids.push(id),
                Part::Text(text) => ids.extend(fast.encode(text, false)?),
            }
        }
        Some(ids)
    }

    /// Sets the file that errors name.
    pub fn name(&mut self, file: String) {
        self.file = file;
    }

    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns true if encoding may take so long that it runs on another thread.
    pub fn is_long(&self, text: &str) -> bool {
        let fast = self.backends.fast().is_some_and(|fast| fast.takes(text));
        text.len() > if fast { LONG.1 } else { LONG.0 }
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Some(cutter) = &self.cutter else { return self.whole(text) };
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        for part in cutter.parts(text) {
            match part {
                Part::Added(id) => ids.push(id),
                Part::Text(text) => self.part(text, &mut ids)?,
            }
        }
        Ok(ids)
    }

    /// Returns the ids of a text that may contain added tokens.
    fn whole(&self, text: &str) -> Result<Vec<u32>> {
        match self.backends.fast().and_then(|fast| fast.encode(text, true)) {
            Some(ids) => Ok(ids),
            None => self.referred(text),
        }
    }

    /// Returns the ids from the reference.
    fn referred(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.asked(text, false)?.get_ids().to_vec())
    }

    /// Encodes `text` with the reference.
    fn asked(&self, text: &str, offsets: bool) -> Result<Encoding> {
        let reference = self.backends.reference()?;
        let encoded = bounded(text.len(), "encoding", || reference.encode(text, false, offsets));
        encoded.map_err(|error| self.failure(text, error))
    }

    fn failure(&self, text: &str, mut error: Error) -> Error {
        let quoted: String = text.chars().take(QUOTED).collect();
        let (ellipsis, bytes) = (if quoted.len() < text.len() { "…" } else { "" }, text.len());
        error.what = format!("{} cannot encode {quoted:?}{ellipsis} ({bytes} bytes): {}", self.file, error.what);
        if error.why.is_empty() {
            "The tokenizer knows no token for a part of it".clone_into(&mut error.why);
            "Use a tokenizer with byte fallback or an unk_token".clone_into(&mut error.fix);
        }
        error
    }

    /// Appends the ids of a part without added tokens.
    fn part(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        self.memo.encode(text, ids, |ids| {
            match self.backends.fast().and_then(|fast| fast.encode(text, false)) {
                Some(new_ids) => ids.extend_from_slice(&new_ids),
                None => ids.extend(self.referred(text)?),
            }
            Ok(())
        })
    }

    /// Returns the ids of `text` and the byte at which each ends.
    pub fn encode_with_ends(&self, text: &str, pieces: &Pieces) -> Result<(Vec<u32>, Vec<u32>)> {
        let Some(cutter) = &self.cutter else {
            let mut ids = self.whole(text)?;
            let mut ends = Vec::with_capacity(ids.len());
            if !sum(text, 0, &ids, pieces, &mut ends) {
                ids.clear();
                self.offsets(text, 0, &mut ids, &mut ends)?;
            }
            return Ok((ids, closed(ends, text)));
        };
        let capacity = text.len() / 3 + 8;
        let (mut ids, mut ends) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        let mut at = 0;
        for part in cutter.parts(text) {
            match part {
                Part::Added(id) => {
                    at += pieces.get(id).map_or(0, <[u8]>::len);
                    ids.push(id);
                    ends.push(at as u32);
                }
                Part::Text(text) => {
                    let from = ids.len();
                    self.part(text, &mut ids)?;
                    if !sum(text, at, &ids[from..], pieces, &mut ends) {
                        ids.truncate(from);
                        self.offsets(text, at, &mut ids, &mut ends)?;
                    }
                    at += text.len();
                }
            }
        }
        Ok((ids, closed(ends, text)))
    }

    /// Appends the reference's ids of a text that starts at byte `start`, and its offsets.
    fn offsets(&self, text: &str, start: usize, ids: &mut Vec<u32>, ends: &mut Vec<u32>) -> Result<()> {
        let encoding = self.asked(text, true)?;
        ids.extend_from_slice(encoding.get_ids());
        let mut last = start as u32;
        ends.extend(encoding.get_offsets().iter().map(|(_, end)| {
            last = last.max((start + end) as u32);
            last
        }));
        Ok(())
    }
}

/// Appends the ends of `ids` by adding up their bytes, if these equal the text. Otherwise appends nothing.
fn sum(text: &str, start: usize, ids: &[u32], pieces: &Pieces, ends: &mut Vec<u32>) -> bool {
    let text = text.as_bytes();
    let from = ends.len();
    let mut at = 0;
    for &id in ids {
        match pieces.get(id) {
            Some(piece) if text[at..].starts_with(piece) => at += piece.len(),
            _ => break,
        }
        ends.push((start + at) as u32);
    }
    let complete = at == text.len() && ends.len() == from + ids.len();
    if !complete {
        ends.truncate(from);
    }
    complete
}

/// Sets the last end to the length of the text, because the last token ends there.
fn closed(mut ends: Vec<u32>, text: &str) -> Vec<u32> {
    if let Some(end) = ends.last_mut() {
        *end = text.len() as u32;
    }
    ends
}

/// The encoders, and the files they are built from.
#[derive(Debug)]
pub(super) struct Backends {
    json: Arc<[u8]>,
    config: Arc<TokenizerConfig>,
    /// The outline of `json`.
    document: Value,
    reference: OnceLock<Result<Box<dyn Reference>>>,
    fast: OnceLock<Option<Fast>>,
}

impl Backends {
    /// Creates backends of which none is built yet. `has_fast` enables the fast one.
    pub fn new(json: Arc<[u8]>, config: Arc<TokenizerConfig>, document: Value, has_fast: bool) -> Self {
        let fast = if has_fast { OnceLock::new() } else { OnceLock::from(None) };
        Self { json, config, document, reference: OnceLock::new(), fast }
    }

    /// Sets encoders that are already built.
    pub fn with(mut self, reference: Box<dyn Reference>, fast: Option<Fast>) -> Self {
        (self.reference, self.fast) = (OnceLock::from(Ok(reference)), OnceLock::from(fast));
        self
    }

    /// Removes the fast backend.
    pub fn distrust(&mut self) {
        self.fast = OnceLock::from(None);
    }

    /// Returns the reference for every id.
    pub fn reference(&self) -> Result<&dyn Reference> {
        let reference = self.reference.get_or_init(|| checked_reference(&self.json, &self.document, &self.config));
        reference.as_ref().map(AsRef::as_ref).map_err(Clone::clone)
    }

    /// Returns the faster backend, if there is one that agrees.
    pub fn fast(&self) -> Option<&Fast> {
        let extra = || missing_tokens(&self.document, &self.config.extra_tokens);
        self.fast.get_or_init(|| Fast::build(&self.json, &self.document, &extra()).ok()).as_ref()
    }
}

/// Builds the reference with all added tokens, and checks that each has the id that the file lists.
pub(super) fn checked_reference(json: &[u8], document: &Value, config: &TokenizerConfig) -> Result<Box<dyn Reference>> {
    let mut inner = build(json)?;
    let listed = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let listed_ids =
        listed.iter().filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?.as_u64()?)));
    check_stated(&*inner, listed_ids)?;
    add_extra(&mut *inner, &missing_tokens(document, &config.extra_tokens), &config.extra_tokens)?;
    Ok(inner)
}

/// Returns the tokens of `extra` that the document itself does not list.
pub(super) fn missing_tokens(document: &Value, extra: &[ExtraToken]) -> Vec<ExtraToken> {
    let listed = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let contents: HashSet<&str> = listed.iter().filter_map(|token| token.get("content")?.as_str()).collect();
    extra.iter().filter(|token| !token.content.is_empty() && !contents.contains(&*token.content)).cloned().collect()
}

/// Returns an error if a token would get another id than the listed one.
fn check_stated<'a>(inner: &dyn Reference, tokens: impl Iterator<Item = (&'a str, u64)>) -> Result<()> {
    for (content, listed_id) in tokens.filter(|(content, _)| !content.is_empty()) {
        let loaded = inner.id(content);
        if loaded.map(u64::from) != Some(listed_id) {
            let loaded = loaded.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let what = format!("added token '{content}' has id {listed_id} but would be loaded with {loaded}");
            return Err(Error::new(Kind::Tokenizer, "TG-TOKENIZER-007", what)
                .why("The ids before it leave a gap, and the tokenizers library fills it by renumbering: prompts would differ from the model's")
                .fix("Add the ids that are missing to added_tokens, as reserved tokens"));
        }
    }
    Ok(())
}

/// Adds the tokens that only tokenizer_config.json lists, and checks the ids of all that it lists.
fn add_extra(inner: &mut dyn Reference, missing: &[ExtraToken], all: &[ExtraToken]) -> Result<()> {
    let to_added_token = |token: &ExtraToken| {
        AddedToken::from(token.content.clone(), token.special)
            .normalized(token.normalized)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .single_word(token.single_word)
    };
    if !missing.is_empty() {
        let tokens: Vec<AddedToken> = missing.iter().map(to_added_token).collect();
        bounded(missing.len(), "adding the tokens of tokenizer_config.json", || inner.add(tokens))?;
    }
    check_stated(inner, all.iter().map(|token| (token.content.as_str(), u64::from(token.id))))
}

/// Maximum number of pairs of added tokens that are compared.
const MOST_PAIRS: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Added(u32),
    /// Text without an added token; never empty.
    Text(&'a str),
}

/// Added tokens with their ids.
type Listed<'t> = Vec<&'t (u32, AddedToken)>;

/// Finds added tokens in the same way as the `tokenizers` crate.
#[derive(Debug)]
pub(super) struct Cutter {
    /// Applied in order: first tokens that are not normalized, then, in the remaining text, those that are. There is
    /// one stage if the order makes no difference.
    stages: Vec<Stage>,
}

#[derive(Debug)]
struct Stage {
    tokens: AhoCorasick,
    ids: Vec<u32>,
}

impl Cutter {
    /// Creates a cutter for `added`, or returns the reason why texts must stay whole.
    pub fn new(document: &Value, added: &[(u32, AddedToken)]) -> Result<Self, &'static str> {
        if !position_free(document) {
            return Err("a part's ids depend on where in the text it stands");
        }
        let mut listed: Vec<&(u32, AddedToken)> = added.iter().filter(|(_, token)| !token.content.is_empty()).collect();
        listed.sort_by_key(|(id, _)| *id);
        if listed.iter().any(|(_, token)| token.lstrip || token.rstrip || token.single_word) {
            return Err("an added token looks at its neighbours (lstrip, rstrip or single_word)");
        }
        let (normalized, plain): (Listed<'_>, Listed<'_>) =
            listed.iter().copied().partition(|(_, token)| token.normalized);
        // A normalizer without steps changes nothing.
        let mut steps = kinds(document.get("normalizer").unwrap_or(&Value::Null));
        if !normalized.is_empty() && steps.any(|kind| kind != "Sequence") {
            return Err("an added token is looked for in normalised text");
        }
        // Two stages are right for any tokens, so very many pairs are not compared.
        let mut pairs = normalized.iter().flat_map(|(_, a)| plain.iter().map(move |(_, b)| (a, b)));
        let needs_order =
            normalized.len() * plain.len() > MOST_PAIRS || pairs.any(|(a, b)| overlap(&a.content, &b.content));
        let stages = if needs_order { vec![plain, normalized] } else { vec![listed] };
        let stages = stages.iter().filter(|tokens| !tokens.is_empty()).map(|tokens| Stage::new(tokens));
        Ok(Self { stages: stages.collect::<Result<_, _>>()? })
    }

    pub fn parts<'s>(&self, text: &'s str) -> Vec<Part<'s>> {
        let mut parts = Vec::new();
        cut(&self.stages, text, &mut parts);
        parts
    }
}

impl Stage {
    fn new(tokens: &[&(u32, AddedToken)]) -> Result<Self, &'static str> {
        let contents = tokens.iter().map(|(_, token)| token.content.as_str());
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents);
        let ids = tokens.iter().map(|(id, _)| *id).collect();
        Ok(Self { tokens: automaton.map_err(|_| "there are too many added tokens")?, ids })
    }
}

fn cut<'s>(stages: &[Stage], text: &'s str, parts: &mut Vec<Part<'s>>) {
    let Some((stage, later)) = stages.split_first() else {
        parts.extend((!text.is_empty()).then_some(Part::Text(text)));
        return;
    };
    let mut at = 0;
    for token in stage.tokens.find_iter(text) {
        cut(later, &text[at..token.start()], parts);
        parts.push(Part::Added(stage.ids[token.pattern().as_usize()]));
        at = token.end();
    }
    cut(later, &text[at..], parts);
}

/// Returns true if neither the normalizer nor the pre-tokenizer treats the beginning of a text specially.
fn position_free(document: &Value) -> bool {
    let parts = ["normalizer", "pre_tokenizer"].map(|name| document.get(name).unwrap_or(&Value::Null));
    let is_free = |part: &Value| kinds(part).all(|kind| FREE.contains(&kind));
    let adds_prefix = |part: &Value| values_under(part, "add_prefix_space").iter().any(|value| **value != false);
    parts.iter().all(|part| is_free(part) && !adds_prefix(part))
}

/// Components that depend on nothing but their input piece.
const FREE: [&str; 10] =
    ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Split", "Digits", "Punctuation"];

/// Returns the types of a component and of all components inside it.
fn kinds(part: &Value) -> impl Iterator<Item = &str> {
    values_under(part, "type").into_iter().filter_map(Value::as_str)
}

/// Returns true if occurrences of `a` and `b` in a text can overlap.
fn overlap(a: &str, b: &str) -> bool {
    let tail_meets_head = |a: &str, b: &str| a.char_indices().skip(1).any(|(at, _)| b.starts_with(&a[at..]));
    a.contains(b) || b.contains(a) || tail_meets_head(a, b) || tail_meets_head(b, a)
}

/// Texts and the texts after them, with a token boundary between both in every tokenizer that allows one.
pub(super) const PAIRS: [(&str, &str); 9] = [
    ("\n", "It"),
    ("\n", "é"),
    ("\n", "4"),
    ("\n", "<"),
    ("]", " It"),
    ("a", " It"),
    ("a", "\nIt"),
    ("a", "  It"),
    ("a", "<"),
];
/// Maximum number of added tokens that are tested before pieces.
pub(super) const TRIED: usize = 64;
/// Stand-in contexts for a piece whose first token would extend into the text before it.
pub(super) const STAND_INS: [&str; 4] = ["\n", "]", ".", "a"];

/// Finds the last added token of a text. Text after it does not depend on the text before it.
#[derive(Debug)]
pub(super) struct Anchors(Option<AhoCorasick>);

impl Anchors {
    /// Uses the tokens of `added` that are searched for in the unnormalized text.
    pub fn new(added: &[(u32, AddedToken)]) -> Self {
        let plain = |token: &&AddedToken| !token.normalized && !token.single_word && !token.content.is_empty();
        let tokens: Vec<&str> =
            added.iter().map(|(_, token)| token).filter(plain).map(|token| token.content.as_str()).collect();
        Self(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(tokens).ok())
    }

    /// Returns the byte at which the last added token of `text` starts, or 0 if there is none.
    pub fn last(&self, text: &str) -> usize {
        let last = self.0.as_ref().and_then(|tokens| tokens.find_iter(text).last());
        last.map_or(0, |last| last.start())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn token(content: &str, normalized: bool) -> AddedToken {
        AddedToken::from(content, !normalized).normalized(normalized)
    }

    fn cutter(document: &Value, tokens: Vec<AddedToken>) -> Result<Cutter, &'static str> {
        Cutter::new(document, &(7..).zip(tokens).collect::<Vec<_>>())
    }

    #[test]
    fn the_longest_added_token_that_begins_first_is_taken() {
        let cutter =
            cutter(&json!({}), vec![token("<a>", false), token("<a><b>", false), token("b>x", false)]).unwrap();
        let parts = cutter.parts("..<a><b>x<a>é");
        let expected = [Part::Text(".."), Part::Added(8), Part::Text("x"), Part::Added(7), Part::Text("é")];
        assert_eq!(parts, expected);
        assert_eq!(cutter.parts(""), []);
    }

    #[test]
    fn a_text_stays_whole_where_a_cut_could_show() {
        let prefix = json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true}});
        let metaspace = json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]}});
        let nfc = json!({"normalizer": {"type": "NFC"}});
        assert!(cutter(&prefix, vec![]).is_err());
        assert!(cutter(&metaspace, vec![]).is_err());
        assert!(cutter(&nfc, vec![token("<a>", true)]).is_err());
        assert!(cutter(&nfc, vec![token("<a>", false)]).is_ok());
        assert!(cutter(&json!({}), vec![token("<a>", false).lstrip(true)]).is_err());
    }

    #[test]
    fn tokens_that_are_not_normalised_are_taken_out_first() {
        let cutter = cutter(&json!({}), vec![token("b>c", false), token("<a><b>", true)]).unwrap();
        assert_eq!(cutter.parts("<a><b>c"), [Part::Text("<a><"), Part::Added(7)]);
        assert_eq!(cutter.parts("<a><b>"), [Part::Added(8)]);
    }
}

#[cfg(test)]
mod context_tests {
    use super::*;

    #[test]
    fn the_last_token_that_is_found_from_the_left_is_the_anchor() {
        let token = |text: &str, normalized: bool| AddedToken::from(text, true).normalized(normalized);
        let added = [token("<a>", false), token("<a><b>", false), token("<b>", false), token("n", true)];
        let anchors = Anchors::new(&(7..).zip(added).collect::<Vec<_>>());
        assert_eq!(anchors.last("x<a><b>n"), 1);
        assert_eq!(anchors.last("x<b>y<b>n"), 5);
        assert_eq!(anchors.last("nothing"), 0);
        assert_eq!(Anchors::new(&[]).last("<a>"), 0);
    }
}
