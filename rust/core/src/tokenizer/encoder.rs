//! Text to ids: the `tokenizers` crate, or a faster one that was found to agree with it.
//!
//! The fast backend is fastokens. It is used only after it gave the same ids for every text of the probe; what it cannot
//! encode goes to the reference. Called by `Tokenizer`.

use super::allowance::bounded;
use super::backends::Backends;
use super::context::{Anchors, PAIRS, STAND_INS, TRIED};
use super::cut::{Cutter, Part};
use super::kept::Facts;
use super::memo::Memo;
use super::pieces::Pieces;
use super::probe;
use crate::error::{Error, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
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
            let texts = probe::texts(facts.listed.iter().map(|(_, token)| token.content.as_str()));
            let until = Instant::now() + PROBE;
            let differs = |text: &str| {
                late.fetch_or(Instant::now() > until, Ordering::Relaxed);
                late.load(Ordering::Relaxed) || self.fast_ids(text) != self.referred(text).ok()
            };
            let difference = probe::first_difference(&texts, differs);
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
