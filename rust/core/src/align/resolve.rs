//! Recorded tokens to ids: the tiers.
//!
//! T0 and T1 have ids, T2 has every token's own bytes, T3 has text or a run of bytes for several tokens. What a record
//! determines is recovered; an id that cannot be known stays unknown, with its reason. Nothing is rendered here.

use super::lookup::Lookup;
use super::pieces::{REPLACEMENT, from_pieces, own_bytes};
use super::recorder::Recorder;
use crate::drift::{Finding, Reason};
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Stop, Tokens};
use std::borrow::Cow;

/// How vLLM writes an id in the place of a text.
const PLACEHOLDER: &[u8] = b"token_id:";

/// Exactness of a token, as `Sequences.tier` has it.
pub mod tier {
    /// Prompt ids and completion ids recorded.
    pub const IDS_AND_PROMPT: u8 = 0;
    /// Completion ids recorded.
    pub const IDS: u8 = 1;
    /// The token's own bytes recorded, one vocabulary entry has them.
    pub const BYTES: u8 = 2;
    /// Text, or bytes shared by a run of tokens, that only one segmentation fits.
    pub const TEXT: u8 = 3;
    /// Text without tokens, canonical ids because the count fits: assumed, not known.
    pub const ASSUMED: u8 = 4;
    /// Logprobs without text: the count equals that of the canonical tokenization.
    pub const COUNT: u8 = 5;
    /// Text only.
    pub const TEXT_ONLY: u8 = 6;
    /// Not sampled.
    pub const NONE: u8 = 255;
}

/// The sampled tokens of one generation, as far as they can be known.
#[derive(Debug, Default)]
pub struct Resolved<'a> {
    /// Ids; 0 where one is not known.
    pub ids: Cow<'a, [u32]>,
    /// Whether each id is known; empty where all are.
    known: Vec<bool>,
    /// Tier of each token; empty where all have `level`.
    tiers: Vec<u8>,
    level: u8,
    /// Logprobs, NaN where not known; `None` where none is.
    pub logprobs: Option<&'a [f32]>,
    /// What was found on the way.
    pub findings: Vec<Finding>,
    /// The record is of another vocabulary: nothing of it can be used.
    pub foreign: bool,
    /// Runs of unknown ids whose text is known, in order.
    pub runs: Vec<Run>,
    /// Why ids are unknown: first token of each run of them, and the reason; in order.
    pub unknown: Vec<(usize, Reason)>,
}

/// Tokens `first..end`, whose ids are not known and whose bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// First token.
    pub first: usize,
    /// One past the last token.
    pub end: usize,
    /// What they spell together.
    pub bytes: Vec<u8>,
    /// The ordinary one of the entries that have these bytes, for a single token.
    pub entry: Option<u32>,
}

impl<'a> Resolved<'a> {
    /// Takes ids that are all known, all of one tier.
    pub(super) fn take(&mut self, ids: Cow<'a, [u32]>, level: u8) {
        (self.ids, self.level) = (ids, level);
    }

    /// Takes one id of its own tier; not to be mixed with [`Resolved::take`].
    pub(super) fn push(&mut self, id: Option<u32>, tier: u8) {
        self.ids.to_mut().push(id.unwrap_or(0));
        self.known.push(id.is_some());
        self.tiers.push(tier);
    }

    /// Takes back that the ids of these tokens are known: other entries may have been shown so too.
    pub(super) fn doubt(&mut self, tokens: &[usize], reason: Reason, tokenizer: &Tokenizer) {
        self.known.resize(self.ids.len(), true);
        for &first in tokens {
            let id = std::mem::take(&mut self.ids.to_mut()[first]);
            self.known[first] = false;
            self.unknown.push((first, reason));
            let bytes = tokenizer.token_bytes(id).unwrap_or_default().to_vec();
            let entry = tokenizer.id_of_bytes(&bytes).or(Some(id));
            self.runs.push(Run { first, end: first + 1, bytes, entry });
        }
        self.unknown.sort_by_key(|(first, _)| *first);
        self.runs.sort_by_key(|run| run.first);
    }

    /// The run that begins at token `first`.
    pub fn run_at(&self, first: usize) -> Option<&Run> {
        self.runs.binary_search_by_key(&first, |run| run.first).ok().map(|at| &self.runs[at])
    }

    /// Whether the id of token `index` is known.
    pub fn is_known(&self, index: usize) -> bool {
        self.known.get(index).copied().unwrap_or(index < self.ids.len())
    }

    /// Whether all ids are known.
    pub fn all_known(&self) -> bool {
        !self.known.contains(&false)
    }

    /// How many tokens stand before the first whose id is not known.
    pub fn known_first(&self) -> usize {
        self.known.iter().position(|known| !known).unwrap_or(self.ids.len())
    }

    /// Tier of token `index`.
    pub fn tier(&self, index: usize) -> u8 {
        self.tiers.get(index).copied().unwrap_or(self.level)
    }

    /// Logprob of token `index`, NaN where it is not known.
    pub fn logprob(&self, index: usize) -> f32 {
        self.logprobs.map_or(f32::NAN, |logprobs| logprobs[index])
    }

    /// One past the last of the known tokens from `start` on, before `end`, that have the tier of the first.
    pub fn alike(&self, start: usize, end: usize) -> usize {
        let level = self.tier(start);
        let known = self.known.get(start..end).map_or(end - start, |known| known.iter().take_while(|k| **k).count());
        let tiers = self.tiers.get(start..end);
        let same = tiers.map_or(end - start, |tiers| tiers.iter().take_while(|tier| **tier == level).count());
        start + known.min(same)
    }

    /// Why the id of token `index` is not known.
    pub fn why_unknown(&self, index: usize) -> Reason {
        let behind = self.unknown.partition_point(|(first, _)| *first <= index);
        self.unknown[..behind].last().map_or(Reason::PartialUtf8, |(_, reason)| *reason)
    }

    pub(super) fn find(&mut self, reason: Reason, token: usize, count: usize, detail: String) {
        let finding = Finding { reason, turn: 0, token: token as i32, count: count as i32, detail };
        self.findings.push(finding);
    }
}

/// Resolves the tokens that a generation lists. `Tokens` with logprobs alone, or with nothing, resolve to no token.
///
/// `recorder` is asked what the trace shows of how tokens are written.
pub fn resolve<'a>(
    generation: &'a Generation,
    content: Option<&str>,
    tokenizer: &Tokenizer,
    recorder: &Recorder<'_>,
    lookup: &mut Lookup,
) -> Resolved<'a> {
    let tokens = &generation.tokens;
    let content = generation.text.as_deref().or(content);
    let mut resolved = Resolved::default();
    if let Some(ids) = &tokens.ids {
        let level = if generation.prompt.ids().is_some() { tier::IDS_AND_PROMPT } else { tier::IDS };
        from_ids(ids, level, tokens, content, tokenizer, &mut resolved);
    } else if tokens.bytes.is_some() || tokens.texts.is_some() {
        from_pieces(generation, content, tokenizer, recorder, lookup, &mut resolved);
        if tokenizer.vocab_size() > tokenizer.model_vocab_size()
            && let Some(at) = tokenizer.first_outside(&resolved.ids)
        {
            outside(at, &mut resolved, tokenizer);
        }
    }
    attach_logprobs(generation, &mut resolved);
    resolved
}

fn from_ids<'a>(
    ids: &'a [u32],
    level: u8,
    tokens: &Tokens,
    content: Option<&str>,
    tokenizer: &Tokenizer,
    resolved: &mut Resolved<'a>,
) {
    if let Some(at) = tokenizer.first_outside(ids) {
        resolved.take(Cow::Borrowed(ids), level);
        return outside(at, resolved, tokenizer);
    }
    let bare = content.filter(|_| tokens.bytes.is_none() && tokens.texts.is_none());
    let said = bare.is_some_and(|content| agrees(ids, content.as_bytes(), tokenizer));
    if !said && let Some(detail) = contradiction(ids, tokens, content, tokenizer) {
        resolved.find(Reason::TokenizerMismatch, 0, ids.len(), detail);
        resolved.foreign = true;
        return;
    }
    resolved.take(Cow::Borrowed(ids), level);
}

/// The record is of another vocabulary: all its tokens are lost, as nothing can stand behind the one at `at`.
fn outside(at: usize, resolved: &mut Resolved<'_>, tokenizer: &Tokenizer) {
    let ids = std::mem::take(&mut resolved.ids);
    let detail = format!(
        "id {} of token {at} is not in the model's vocabulary of {}; {} tokens are left out",
        ids[at],
        tokenizer.model_vocab_size(),
        ids.len()
    );
    resolved.find(Reason::VocabOutOfRange, 0, ids.len(), detail);
    resolved.foreign = true;
}

/// What the record shows, where it cannot be what these ids say.
fn contradiction(ids: &[u32], tokens: &Tokens, content: Option<&str>, tokenizer: &Tokenizer) -> Option<String> {
    let mut after_silence = false;
    let mut shown = false;
    let plain = tokens.bytes.as_ref().filter(|pieces| is_plain(&pieces.data));
    // Without pieces nothing is shown.
    let listed = if tokens.bytes.is_some() || tokens.texts.is_some() { ids } else { &[] };
    for (index, &id) in listed.iter().enumerate() {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if !bytes.is_empty() && plain.and_then(|pieces| pieces.get(index)) == Some(bytes) {
            (shown, after_silence) = (true, false);
            continue;
        }
        // vLLM writes the placeholder itself where it has no entry for the token.
        let own = own_bytes(tokens, index, tokenizer).map(|(own, _)| own).filter(|own| !own.starts_with(PLACEHOLDER));
        shown |= own.is_some();
        if let Some(own) = own.as_deref().filter(|own| !after_silence && *own != bytes) {
            return Some(format!("id {id} spells {} where the record shows {}", excerpt(bytes), excerpt(own)));
        }
        after_silence = own.is_none();
    }
    let content = content.filter(|_| !shown)?;
    if begins_with(ids, content.as_bytes(), tokenizer) {
        return None;
    }
    unsaid(ids, content, tokenizer)
}

/// Whether every piece of these bytes is what it seems: no placeholder of an id, nothing that stands for broken text.
fn is_plain(data: &[u8]) -> bool {
    let has = |what: &[u8]| memchr::memmem::find(data, what).is_some();
    !has(REPLACEMENT) && !has(PLACEHOLDER)
}

/// What the content says, where the ids spell it neither with nor without their special tokens.
fn unsaid(ids: &[u32], content: &str, tokenizer: &Tokenizer) -> Option<String> {
    let content = Some(content.trim()).filter(|text| !text.is_empty() && !text.contains('\u{FFFD}'))?;
    let (plain, whole) = (spell(ids, tokenizer), spell_all(ids, tokenizer));
    // A server may have written the reasoning into the content, between tags of its own.
    let mut parts = content.split("<reasoning>").flat_map(|part| part.split("</reasoning>")).map(str::trim);
    if contains(&plain, content.as_bytes()) || parts.all(|part| contains(&whole, part.as_bytes())) {
        return None;
    }
    Some(format!("the ids spell {} where the record says {}", excerpt(&plain), excerpt(content.as_bytes())))
}

/// Whether the bytes of `ids` begin with `text`.
fn agrees(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    for &id in ids {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match rest.strip_prefix(bytes) {
            Some(behind) => rest = behind,
            None => return bytes.starts_with(rest),
        }
    }
    rest.is_empty()
}

/// Whether the bytes of `ids`, special tokens left out, begin with `text`.
fn begins_with(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    for &id in ids.iter().filter(|&&id| !is_special(id, tokenizer)) {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match rest.strip_prefix(bytes) {
            Some(behind) => rest = behind,
            None => return bytes.starts_with(rest),
        }
    }
    rest.is_empty()
}

/// Whether `text` is the bytes of `ids`, special tokens included.
pub fn spells(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    let mut goes_on = |bytes: &[u8]| rest.strip_prefix(bytes).map(|behind| rest = behind).is_some();
    ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).all(&mut goes_on) && rest.is_empty()
}

/// Whether `id` is a special token; most ids are told by two comparisons.
pub fn is_special(id: u32, tokenizer: &Tokenizer) -> bool {
    let special = tokenizer.special_ids();
    let within = special.first().is_some_and(|first| *first <= id) && special.last().is_some_and(|last| id <= *last);
    within && special.binary_search(&id).is_ok()
}

/// Bytes of the ids without special tokens, as a server's text has them.
pub fn spell(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    spelled(ids.iter().filter(|&&id| !is_special(id, tokenizer)), tokenizer)
}

/// Bytes of the ids, special tokens included.
pub fn spell_all(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    spelled(ids.iter(), tokenizer)
}

fn spelled<'i>(ids: impl Iterator<Item = &'i u32>, tokenizer: &Tokenizer) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ids.size_hint().1.unwrap_or(0) * 5);
    ids.filter_map(|&id| tokenizer.token_bytes(id)).for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || memchr::memmem::find(text, part).is_some()
}

/// At most 40 characters of possibly broken text, quoted.
pub fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() || bytes.len() > 200 {
        short.push('…');
    }
    format!("{short:?}")
}

fn attach_logprobs<'a>(generation: &'a Generation, resolved: &mut Resolved<'a>) {
    let tokens = &generation.tokens;
    let count = resolved.ids.len();
    let Some(logprobs) = &tokens.logprobs else {
        if count > 0 {
            resolved.find(Reason::MissingLogprob, 0, count, "the record has no logprobs".into());
        }
        return;
    };
    if resolved.foreign || count == 0 {
        return; // logprobs alone wait for a text
    }
    if logprobs.len() > count && count > 0 && matches!(generation.stop, Stop::Text(_)) {
        // TensorRT-LLM takes the stop string's tokens out of the ids and leaves their logprobs.
        let more = logprobs.len() - count;
        resolved.find(Reason::StopStringTruncated, count, more, format!("{more} logprobs belong to the stop string"));
    } else if logprobs.len() != count {
        let detail = format!("{count} tokens but {} logprobs", logprobs.len());
        resolved.find(Reason::CountMismatch, 0, count, detail);
        return;
    }
    resolved.logprobs = Some(&logprobs[..count]);
    if tokens.missing > 0 {
        let detail = format!("{} logprobs are null, NaN or -inf", tokens.missing);
        resolved.find(Reason::MissingLogprob, usize::MAX, tokens.missing as usize, detail);
    }
    if tokens.invalid > 0 {
        let detail = format!("{} logprobs are positive or the -9999 sentinel", tokens.invalid);
        resolved.find(Reason::InvalidLogprob, usize::MAX, tokens.invalid as usize, detail);
    }
}
