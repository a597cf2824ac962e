//! Encodes text by the `tokenizers` crate, or by a faster one that was found to agree with it.
//!
//! The fast backend is fastokens. It is used only after it gave the same ids for every text of the probe; what it cannot
//! encode goes to the reference. A tokenizer that was verified before builds neither when it is loaded: ids and bytes need
//! none of them.
//!
//! A text is cut at its added tokens where the ids of each part do not depend on its neighbours; where that is not certain
//! it stays whole. A tokenizer may write a space before every text (`Metaspace` with `prepend_scheme` "first", the
//! `Prepend` normalizer), strip one, or take the white space behind an added token: a piece alone then has other ids than
//! in its place, and is encoded together with the text before it, from the last added token on.

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

/// How long the probe may take; it takes a hundredth of that.
const PROBE: Duration = Duration::from_secs(20);
/// Bytes of a text that the reference, and the fast backend, takes some tenths of a second for: none looks meanwhile
/// whether it must stop.
const LONG: (usize, usize) = (256 << 10, 8 << 20);
/// Why a text is not cut at added tokens though nothing in its file speaks against it.
const CUT: &str = "a text has other ids if it is cut at an added token";
/// Characters of a text that an error quotes.
const QUOTED: usize = 40;

/// Which code makes the ids, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// `fastokens` or `tokenizers`.
    pub backend: &'static str,
    /// Why this one.
    pub reason: String,
    /// Texts that both encoded when the tokenizer was loaded.
    pub probes: usize,
    /// Why ids of a text between added tokens are not remembered; `None` where they are.
    pub no_memo: Option<&'static str>,
}

/// Ids of a piece of text behind another one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Behind {
    /// Its ids.
    pub ids: Vec<u32>,
    /// The byte of the piece behind each.
    pub ends: Vec<u32>,
    /// Whether they are the ids that it has in its place; if not, the tokenizer joins the two texts in one token.
    pub exact: bool,
}

/// The backends of one tokenizer and what they share.
#[derive(Debug)]
pub(super) struct Encoder {
    backends: Backends,
    cutter: Option<Cutter>,
    memo: Memo,
    report: Report,
    /// Whether pieces of a text have the ids alone that they have in their place.
    apart: bool,
    added: Vec<(u32, AddedToken)>,
    anchors: OnceLock<Anchors>,
    /// The file that ids are made from, for errors.
    file: String,
}

impl Encoder {
    /// Backends with what was found out about them.
    pub fn of(backends: Backends, facts: &Facts, file: String) -> Self {
        let (cutter, no_memo) = match Cutter::new(&facts.document, &facts.listed) {
            Ok(cutter) if facts.cuts => (Some(cutter), None),
            Ok(_) => (None, Some(CUT)),
            Err(reason) => (None, Some(reason)),
        };
        let report = Report { backend: "", reason: String::new(), probes: 0, no_memo };
        let (added, anchors) = (facts.listed.clone(), OnceLock::new());
        let mut encoder =
            Self { backends, cutter, memo: Memo::new(), report, apart: facts.apart, added, anchors, file };
        encoder.tell(facts);
        encoder
    }

    /// Says in the report which backend there is, and why.
    fn tell(&mut self, facts: &Facts) {
        self.report.backend = if facts.fast { "fastokens" } else { "tokenizers" };
        self.report.reason.clone_from(&facts.reason);
        self.report.probes = facts.probes;
    }

    /// Leaves the fast backend only where every probe gives what the reference gives; which it is stands in `facts`.
    /// False where the time was over before that was known: another load may say otherwise.
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

    /// Tries whether texts may be cut at added tokens, and whether pieces of a text may be encoded apart; the answers stand
    /// in `facts`.
    pub fn probe_pieces(&mut self, facts: &mut Facts) {
        let same = |before: &str, behind: &str| {
            let joined = [before, behind].concat();
            // A text that cannot be encoded at all says nothing.
            let Ok(whole) = self.referred(&joined) else { return true };
            let alone = self.encode(before).and_then(|ids| Ok([ids, self.encode(behind)?].concat()));
            alone.is_ok_and(|alone| alone == whole)
        };
        let added = facts.listed.iter().map(|(_, token)| token.content.as_str()).take(TRIED);
        facts.cuts = added.zip(PAIRS.iter().cycle()).all(|(token, (_, behind))| same(token, behind));
        facts.apart = self.cutter.is_some() && facts.cuts && PAIRS.iter().all(|(before, behind)| same(before, behind));
        self.apart = facts.apart;
        if self.cutter.is_some() && !facts.cuts {
            (self.cutter, self.report.no_memo) = (None, Some(CUT));
        }
    }

    /// Whether a piece behind `before` has the ids that it has alone.
    pub fn is_apart(&self, before: &str) -> bool {
        self.apart || before.is_empty()
    }

    /// The text before a piece from its last added token on, and the piece.
    pub fn joined(&self, before: &str, piece: &str) -> (String, usize) {
        let anchors = self.anchors.get_or_init(|| Anchors::new(&self.added));
        let context = &before[anchors.last(before)..];
        ([context, piece].concat(), context.len())
    }

    /// Ids of `text[at..]` as they are behind `text[..at]`.
    pub fn behind(&self, text: &str, at: usize, pieces: &Pieces) -> Result<Behind> {
        if let Some(found) = self.cut_off(text, at, pieces)? {
            return Ok(found);
        }
        for stand_in in STAND_INS {
            let text = [stand_in, &text[at..]].concat();
            if let Ok(Some(found)) = self.cut_off(&text, stand_in.len(), pieces) {
                return Ok(found);
            }
        }
        let (ids, ends) = self.encode_with_ends(&text[at..], pieces)?;
        Ok(Behind { ids, ends, exact: false })
    }

    /// The ids of a text behind its first `at` bytes, `None` if a token reaches over that byte.
    fn cut_off(&self, text: &str, at: usize, pieces: &Pieces) -> Result<Option<Behind>> {
        let (ids, ends) = self.encode_with_ends(text, pieces)?;
        let head = self.encode(&text[..at])?;
        let count = if ids.starts_with(&head) {
            head.len()
        } else {
            // The tokens before it may depend on what is behind them.
            let count = ends.partition_point(|&end| end as usize <= at);
            let mut rest = &text.as_bytes()[at..];
            let spells = |id: &u32| pieces.get(*id).and_then(|piece| rest.strip_prefix(piece)).map(|left| rest = left);
            if ids[count..].iter().map(spells).any(|left| left.is_none()) || !rest.is_empty() {
                return Ok(None);
            }
            count
        };
        let ends = ends[count..].iter().map(|end| end.saturating_sub(at as u32)).collect();
        Ok(Some(Behind { ids: ids[count..].to_vec(), ends, exact: true }))
    }

    /// Ids by the fast road alone, nothing remembered.
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

    /// Says in errors which file ids are made from.
    pub fn name(&mut self, file: String) {
        self.file = file;
    }

    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Whether encoding may take so long that it is done apart.
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

    /// Ids of a text that may hold added tokens.
    fn whole(&self, text: &str) -> Result<Vec<u32>> {
        match self.backends.fast().and_then(|fast| fast.encode(text, true)) {
            Some(ids) => Ok(ids),
            None => self.referred(text),
        }
    }

    /// Ids by the reference.
    fn referred(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.asked(text, false)?.get_ids().to_vec())
    }

    /// What the reference makes of `text`.
    fn asked(&self, text: &str, offsets: bool) -> Result<Encoding> {
        let reference = self.backends.reference()?;
        let encoded = bounded(text.len(), "encoding", || reference.encode(text, false, offsets));
        encoded.map_err(|error| self.failure(text, error))
    }

    fn failure(&self, text: &str, mut error: Error) -> Error {
        let quoted: String = text.chars().take(QUOTED).collect();
        let (more, bytes) = (if quoted.len() < text.len() { "…" } else { "" }, text.len());
        error.what = format!("{} cannot encode {quoted:?}{more} ({bytes} bytes): {}", self.file, error.what);
        if error.why.is_empty() {
            "The tokenizer knows no token for a part of it".clone_into(&mut error.why);
            "Use a tokenizer with byte fallback or an unk_token".clone_into(&mut error.cure);
        }
        error
    }

    /// Appends the ids of a part without added tokens.
    fn part(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        self.memo.encode(text, ids, |ids| {
            match self.backends.fast().and_then(|fast| fast.encode(text, false)) {
                Some(made) => ids.extend_from_slice(&made),
                None => ids.extend(self.referred(text)?),
            }
            Ok(())
        })
    }

    /// Ids of `text` and the byte behind each.
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

    /// Appends the reference's ids of a text that stands at byte `start`, and its offsets.
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

/// Appends the ends of `ids` by adding up their bytes, if these are the text; otherwise nothing.
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

/// The ends of a whole text: the last token ends with it.
fn closed(mut ends: Vec<u32>, text: &str) -> Vec<u32> {
    if let Some(end) = ends.last_mut() {
        *end = text.len() as u32;
    }
    ends
}

/// The encoders, and what they are built from.
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
    /// None built yet; `has_fast` says whether the fast one is to be asked at all.
    pub fn new(json: Arc<[u8]>, config: Arc<TokenizerConfig>, document: Value, has_fast: bool) -> Self {
        let fast = if has_fast { OnceLock::new() } else { OnceLock::from(None) };
        Self { json, config, document, reference: OnceLock::new(), fast }
    }

    /// With encoders that are built already.
    pub fn with(mut self, reference: Box<dyn Reference>, fast: Option<Fast>) -> Self {
        (self.reference, self.fast) = (OnceLock::from(Ok(reference)), OnceLock::from(fast));
        self
    }

    /// Takes the fast one away.
    pub fn distrust(&mut self) {
        self.fast = OnceLock::from(None);
    }

    /// What every id is measured by.
    pub fn reference(&self) -> Result<&dyn Reference> {
        let built = self.reference.get_or_init(|| checked_reference(&self.json, &self.document, &self.config));
        built.as_ref().map(AsRef::as_ref).map_err(Clone::clone)
    }

    /// The faster one, where there is one that agrees.
    pub fn fast(&self) -> Option<&Fast> {
        let extra = || missing_tokens(&self.document, &self.config.extra_tokens);
        self.fast.get_or_init(|| Fast::build(&self.json, &self.document, &extra()).ok()).as_ref()
    }
}

/// The reference with all added tokens, each with the id that is stated.
pub(super) fn checked_reference(json: &[u8], document: &Value, config: &TokenizerConfig) -> Result<Box<dyn Reference>> {
    let mut inner = build(json)?;
    let own = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let stated = own.iter().filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?.as_u64()?)));
    check_stated(&*inner, stated)?;
    add_extra(&mut *inner, &missing_tokens(document, &config.extra_tokens), &config.extra_tokens)?;
    Ok(inner)
}

/// Those of `extra` that the document does not list itself.
pub(super) fn missing_tokens(document: &Value, extra: &[ExtraToken]) -> Vec<ExtraToken> {
    let listed = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let known: HashSet<&str> = listed.iter().filter_map(|token| token.get("content")?.as_str()).collect();
    extra.iter().filter(|token| !token.content.is_empty() && !known.contains(&*token.content)).cloned().collect()
}

/// Refuses tokens, by their texts and ids, that would get other ids than are stated.
fn check_stated<'a>(inner: &dyn Reference, tokens: impl Iterator<Item = (&'a str, u64)>) -> Result<()> {
    for (content, stated) in tokens.filter(|(content, _)| !content.is_empty()) {
        let loaded = inner.id(content);
        if loaded.map(u64::from) != Some(stated) {
            let loaded = loaded.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let what = format!("added token '{content}' has id {stated} but would be loaded with {loaded}");
            return Err(Error::new(Kind::Tokenizer, what)
                .why("The ids before it leave a gap, and the tokenizers library fills it by renumbering: prompts would not be what the model saw")
                .cure("Add the ids that are missing to added_tokens, as reserved tokens"));
        }
    }
    Ok(())
}

/// Adds the tokens that only tokenizer_config.json lists, and checks the ids of all that it lists.
fn add_extra(inner: &mut dyn Reference, missing: &[ExtraToken], all: &[ExtraToken]) -> Result<()> {
    let added = |token: &ExtraToken| {
        AddedToken::from(token.content.clone(), token.special)
            .normalized(token.normalized)
            .lstrip(token.strips.0)
            .rstrip(token.strips.1)
            .single_word(token.single_word)
    };
    if !missing.is_empty() {
        let tokens: Vec<AddedToken> = missing.iter().map(added).collect();
        bounded(missing.len(), "adding the tokens of tokenizer_config.json", || inner.add(tokens))?;
    }
    check_stated(inner, all.iter().map(|token| (token.content.as_str(), u64::from(token.id))))
}

/// Pairs of added tokens that are compared.
const MOST_PAIRS: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Added(u32),
    /// Text without one, never empty.
    Text(&'a str),
}

/// Added tokens with their ids.
type Listed<'t> = Vec<&'t (u32, AddedToken)>;

/// Finds added tokens as the `tokenizers` crate finds them.
#[derive(Debug)]
pub(super) struct Cutter {
    /// Taken out one after another: tokens that are not normalised, then in what is left those that are. One stage
    /// where the order cannot show.
    stages: Vec<Stage>,
}

#[derive(Debug)]
struct Stage {
    tokens: AhoCorasick,
    ids: Vec<u32>,
}

impl Cutter {
    /// A cutter for `added`, or why texts must stay whole.
    pub fn new(document: &Value, added: &[(u32, AddedToken)]) -> Result<Self, &'static str> {
        if !position_free(document) {
            return Err("a part's ids depend on where in the text it stands");
        }
        let mut listed: Vec<&(u32, AddedToken)> = added.iter().filter(|(_, token)| !token.content.is_empty()).collect();
        listed.sort_by_key(|(id, _)| *id);
        if listed.iter().any(|(_, token)| token.lstrip || token.rstrip || token.single_word) {
            return Err("an added token looks at its neighbours (lstrip, rstrip or single_word)");
        }
        let (late, early): (Listed<'_>, Listed<'_>) = listed.iter().copied().partition(|(_, token)| token.normalized);
        // A normaliser without steps changes nothing.
        let mut steps = kinds(document.get("normalizer").unwrap_or(&Value::Null));
        if !late.is_empty() && steps.any(|kind| kind != "Sequence") {
            return Err("an added token is looked for in normalised text");
        }
        // Two stages are right for any tokens; very many pairs are not compared.
        let mut pairs = late.iter().flat_map(|(_, a)| early.iter().map(move |(_, b)| (a, b)));
        let apart = late.len() * early.len() > MOST_PAIRS || pairs.any(|(a, b)| overlap(&a.content, &b.content));
        let stages = if apart { vec![early, late] } else { vec![listed] };
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
        let found = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents);
        let ids = tokens.iter().map(|(id, _)| *id).collect();
        Ok(Self { tokens: found.map_err(|_| "there are too many added tokens")?, ids })
    }
}

fn cut<'s>(stages: &[Stage], text: &'s str, parts: &mut Vec<Part<'s>>) {
    let Some((stage, later)) = stages.split_first() else {
        parts.extend((!text.is_empty()).then_some(Part::Text(text)));
        return;
    };
    let mut at = 0;
    for found in stage.tokens.find_iter(text) {
        cut(later, &text[at..found.start()], parts);
        parts.push(Part::Added(stage.ids[found.pattern().as_usize()]));
        at = found.end();
    }
    cut(later, &text[at..], parts);
}

/// Whether neither normaliser nor pre-tokenizer treats the beginning of a text apart.
fn position_free(document: &Value) -> bool {
    let parts = ["normalizer", "pre_tokenizer"].map(|name| document.get(name).unwrap_or(&Value::Null));
    let free = |part: &Value| kinds(part).all(|kind| FREE.contains(&kind));
    let prefix = |part: &Value| values_under(part, "add_prefix_space").iter().any(|value| **value != false);
    parts.iter().all(|part| free(part) && !prefix(part))
}

/// Components that see nothing but the piece they are given.
const FREE: [&str; 10] =
    ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Split", "Digits", "Punctuation"];

/// The types of a component and of all below it.
fn kinds(part: &Value) -> impl Iterator<Item = &str> {
    values_under(part, "type").into_iter().filter_map(Value::as_str)
}

/// Whether `a` and `b` can share characters of a text.
fn overlap(a: &str, b: &str) -> bool {
    let tail_meets_head = |a: &str, b: &str| a.char_indices().skip(1).any(|(at, _)| b.starts_with(&a[at..]));
    a.contains(b) || b.contains(a) || tail_meets_head(a, b) || tail_meets_head(b, a)
}

/// A text and the text behind it, between which every tokenizer that allows it has a boundary.
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
/// Added tokens that are tried before pieces.
pub(super) const TRIED: usize = 64;
/// What is put before a piece whose first token reaches into the text before it.
pub(super) const STAND_INS: [&str; 4] = ["\n", "]", ".", "a"];

/// Finds the last added token of a text: what is behind one does not depend on what is before.
#[derive(Debug)]
pub(super) struct Anchors(Option<AhoCorasick>);

impl Anchors {
    /// The tokens of `added` that are found in the text as it is.
    pub fn new(added: &[(u32, AddedToken)]) -> Self {
        let plain = |token: &&AddedToken| !token.normalized && !token.single_word && !token.content.is_empty();
        let tokens: Vec<&str> =
            added.iter().map(|(_, token)| token).filter(plain).map(|token| token.content.as_str()).collect();
        Self(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(tokens).ok())
    }

    /// The byte at which the last added token of `text` begins; 0 if there is none.
    pub fn last(&self, text: &str) -> usize {
        let found = self.0.as_ref().and_then(|tokens| tokens.find_iter(text).last());
        found.map_or(0, |found| found.start())
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
