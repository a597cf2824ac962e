//! Text to ids: the `tokenizers` crate, or a faster one that was found to agree with it.
//!
//! The fast backend is fastokens. It is used only after it gave the same ids for every text of the probe; what it cannot
//! encode goes to the reference. Called by `Tokenizer`.

use super::ExtraToken;
use super::cut::{Cutter, Part};
use super::memo::Memo;
use super::pieces::Pieces;
use super::probe;
use crate::error::{Error, Kind, Result};
use crate::{stop, threads};
use serde_json::{Value, json};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::AddedToken;

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

/// The backends of one tokenizer and what they share.
#[derive(Debug)]
pub(super) struct Encoder {
    reference: tokenizers::Tokenizer,
    fast: Option<Fast>,
    cutter: Option<Cutter>,
    memo: Memo,
    report: Report,
}

/// Bytes from which on fastokens spreads a text over threads.
const SPREAD_BYTES: usize = 64 << 10;

/// The fast backend.
pub(super) struct Fast(fastokens::Tokenizer);

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fast")
    }
}

impl Fast {
    /// The backend for `document`, or why there is none.
    fn build(mut document: Value) -> Result<Self, String> {
        if document.pointer("/model/dropout").is_some_and(|dropout| dropout.as_f64().is_some_and(|p| p > 0.0)) {
            return Err("the model drops merges at random".to_owned());
        }
        for part in ["truncation", "padding"] {
            document[part] = Value::Null;
        }
        let built = catch_unwind(AssertUnwindSafe(|| fastokens::Tokenizer::from_json(document)));
        match built {
            Ok(Ok(fast)) => Ok(Self(fast)),
            Ok(Err(error)) => Err(format!("fastokens does not take this tokenizer.json: {error}")),
            Err(_) => Err("fastokens failed on this tokenizer.json".to_owned()),
        }
    }

    /// Ids of a text, its added tokens seen or not; `None` where it fails.
    fn encode(&self, text: &str, added: bool) -> Option<Vec<u32>> {
        let encode = || if added { self.0.encode(text) } else { self.0.encode_ordinary(text) };
        let ids = catch_unwind(AssertUnwindSafe(|| match text.len() {
            SPREAD_BYTES.. => threads::in_pool(|| encode().ok()),
            _ => encode().ok(),
        }));
        ids.unwrap_or_else(stop::unless_stopped)
    }
}

impl Encoder {
    /// Both backends, compared; `fast` is what [`Encoder::prepare`] made of the same document.
    pub fn new(
        reference: tokenizers::Tokenizer,
        document: &Value,
        added: &[(u32, AddedToken)],
        fast: Result<Fast, String>,
    ) -> Self {
        let (cutter, no_memo) = match Cutter::new(document, added) {
            Ok(cutter) => (Some(cutter), None),
            Err(reason) => (None, Some(reason)),
        };
        let report = Report { backend: "tokenizers", reason: String::new(), probes: 0, no_memo };
        let mut encoder = Self { reference, fast: None, cutter, memo: Memo::new(), report };
        match fast {
            Ok(_) if added.iter().any(|(_, token)| token.single_word) => {
                "an added token matches whole words only".clone_into(&mut encoder.report.reason);
            }
            Ok(fast) => encoder.verify(fast, added),
            Err(reason) => encoder.report.reason = reason,
        }
        encoder
    }

    /// Takes `fast` where every probe gives what the reference gives.
    fn verify(&mut self, fast: Fast, added: &[(u32, AddedToken)]) {
        let texts = probe::texts(added.iter().map(|(_, token)| token.content.as_str()));
        self.fast = Some(fast);
        let whole = |text: &str| Some(self.reference.encode_fast(text, false).ok()?.get_ids().to_vec());
        let difference = probe::first_difference(&texts, |text| self.fast_ids(text), whole);
        self.report.probes = texts.len();
        match difference {
            None => {
                self.report.backend = "fastokens";
                self.report.reason = format!("same ids as tokenizers for {} of {0} probes", texts.len());
            }
            Some(text) => {
                self.report.reason = format!("fastokens gives other ids for {text:?}");
                self.fast = None;
            }
        }
    }

    /// Ids by the fast road alone, nothing remembered.
    fn fast_ids(&self, text: &str) -> Option<Vec<u32>> {
        let fast = self.fast.as_ref()?;
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

    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Ids of `text`.
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
        match self.fast.as_ref().and_then(|fast| fast.encode(text, true)) {
            Some(ids) => Ok(ids),
            None => self.referred(text),
        }
    }

    /// Ids by the reference.
    fn referred(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.reference.encode_fast(text, false).map_err(|error| failure(&*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Appends the ids of a part without added tokens.
    fn part(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        self.memo.encode(text, ids, |ids| {
            match self.fast.as_ref().and_then(|fast| fast.encode(text, false)) {
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
        let encoding = self.reference.encode(text, false).map_err(|error| failure(&*error))?;
        ids.extend_from_slice(encoding.get_ids());
        let mut last = start as u32;
        ends.extend(encoding.get_offsets().iter().map(|(_, end)| {
            last = last.max((start + end) as u32);
            last
        }));
        Ok(())
    }
}

/// Prepares the fast backend, where the model is one that it can be; takes a while.
pub(super) fn prepare(mut document: Value, extra: &[ExtraToken]) -> Result<Fast, String> {
    let kind = document.pointer("/model/type").and_then(Value::as_str).unwrap_or("BPE");
    if kind != "BPE" {
        return Err(format!("fastokens knows BPE alone, and this model is {kind}"));
    }
    if !document.is_object() {
        return Err("tokenizer.json holds no object".to_owned());
    }
    let mut tokens = document["added_tokens"].as_array().cloned().unwrap_or_default();
    let known = |tokens: &[Value], extra: &ExtraToken| tokens.iter().any(|token| token["content"] == extra.content);
    for token in extra.iter().filter(|token| !token.content.is_empty()) {
        if !known(&tokens, token) {
            tokens.push(json!({"id": token.id, "content": token.content, "special": token.special,
                "normalized": token.normalized, "lstrip": token.strips.0, "rstrip": token.strips.1,
                "single_word": token.single_word}));
        }
    }
    document["added_tokens"] = Value::from(tokens);
    Fast::build(document)
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

fn failure(error: &(dyn std::error::Error + Send + Sync)) -> Error {
    Error::new(Kind::Tokenizer, format!("the text cannot be encoded: {error}"))
        .why("The tokenizer knows no token for a part of it")
        .cure("Use a tokenizer with byte fallback or an unk_token")
}
