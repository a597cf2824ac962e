//! Recorded tokens to ids: the tiers.
//!
//! T0 and T1 have ids, T2 has every token's own bytes, T3 has text or a run of bytes for several tokens. What a record
//! determines is recovered; an id that cannot be known stays unknown, with its reason. Nothing is rendered here.

use super::reason::{Finding, Reason};
use super::segment::{self, Piece};
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Pieces, Stop, Tokens};

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
    /// Logprobs without text: the count equals that of the canonical tokenization.
    pub const COUNT: u8 = 5;
    /// Text only.
    pub const TEXT_ONLY: u8 = 6;
    /// Not sampled.
    pub const NONE: u8 = 255;
}

/// The sampled tokens of one generation, as far as they can be known.
#[derive(Debug, Default)]
pub struct Resolved {
    /// Ids; 0 where `known` is false.
    pub ids: Vec<u32>,
    /// Whether the id is known.
    pub known: Vec<bool>,
    /// Logprobs, NaN where not known.
    pub logprobs: Vec<f32>,
    /// Tier of each token.
    pub tiers: Vec<u8>,
    /// What was found on the way.
    pub findings: Vec<Finding>,
    /// The ids are not this tokenizer's: the generation is text only.
    pub foreign: bool,
    /// Runs of unknown ids whose text is known: first token, one past the last, bytes.
    pub runs: Vec<(usize, usize, Vec<u8>)>,
}

impl Resolved {
    fn push(&mut self, id: Option<u32>, tier: u8) {
        self.ids.push(id.unwrap_or(0));
        self.known.push(id.is_some());
        self.tiers.push(tier);
    }

    fn find(&mut self, reason: Reason, token: usize, count: usize, detail: String) {
        let finding = Finding { reason, turn: 0, token: token as i32, count: count as i32, detail };
        self.findings.push(finding);
    }
}

/// Resolves the tokens that a generation lists. `Tokens` with logprobs alone, or with nothing, resolve to no token.
pub fn resolve(generation: &Generation, content: Option<&str>, tokenizer: &Tokenizer) -> Resolved {
    let tokens = &generation.tokens;
    let mut resolved = Resolved::default();
    if let Some(ids) = &tokens.ids {
        let level = if generation.prompt_ids.is_some() { tier::IDS_AND_PROMPT } else { tier::IDS };
        from_ids(ids, level, tokens, content, tokenizer, &mut resolved);
    } else if tokens.bytes.is_some() || tokens.texts.is_some() {
        from_pieces(generation, content, tokenizer, &mut resolved);
    }
    attach_logprobs(tokens, &mut resolved);
    resolved
}

fn from_ids(
    ids: &[u32],
    level: u8,
    tokens: &Tokens,
    content: Option<&str>,
    tokenizer: &Tokenizer,
    resolved: &mut Resolved,
) {
    if let Some(at) = ids.iter().position(|&id| tokenizer.token_bytes(id).is_none()) {
        let size = tokenizer.vocab_size();
        let detail = format!("id {} is not in the vocabulary of {size}", ids[at]);
        resolved.find(Reason::VocabOutOfRange, at, ids.len() - at, detail);
        resolved.foreign = true;
        return;
    }
    if let Some(detail) = contradiction(ids, tokens, content, tokenizer) {
        resolved.find(Reason::TokenizerMismatch, 0, ids.len(), detail);
        resolved.foreign = true;
        return;
    }
    for &id in ids {
        resolved.push(Some(id), level);
    }
}

/// What the record shows, where it cannot be what these ids say.
fn contradiction(ids: &[u32], tokens: &Tokens, content: Option<&str>, tokenizer: &Tokenizer) -> Option<String> {
    let mut after_silence = false;
    let mut shown = false;
    for (index, &id) in ids.iter().enumerate() {
        // vLLM writes the placeholder itself where it has no entry for the token.
        let own = own_bytes(tokens, index, tokenizer).filter(|own| !own.starts_with(b"token_id:"));
        shown |= own.is_some();
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if let Some(own) = own.as_deref().filter(|own| !after_silence && *own != bytes) {
            return Some(format!("id {id} spells {} where the record shows {}", excerpt(bytes), excerpt(own)));
        }
        after_silence = own.is_none();
    }
    let content = content.map(str::trim).filter(|text| !shown && !text.is_empty() && !text.contains('\u{FFFD}'))?;
    let (plain, whole) = (spell(ids, tokenizer), spell_all(ids, tokenizer));
    if contains(&plain, content.as_bytes()) || contains(&whole, content.as_bytes()) {
        return None;
    }
    Some(format!("the ids spell {} where the record says {}", excerpt(&plain), excerpt(content.as_bytes())))
}

/// Bytes of the ids without special tokens, as a server's text has them.
pub fn spell(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    let ordinary = ids.iter().filter(|&&id| !tokenizer.is_special(id));
    ordinary.filter_map(|&id| tokenizer.token_bytes(id)).flatten().copied().collect()
}

/// Bytes of the ids, special tokens included.
pub fn spell_all(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).flatten().copied().collect()
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

/// What the record shows of one listed token.
enum Seen<'a> {
    /// Its own bytes, and the id that has them.
    Own(u32),
    /// Nothing: a lone part of a character, or a special token.
    Silent,
    /// Text with U+FFFD.
    Lossy(&'a str),
    /// Text after silent tokens: the recorder corrects by context (vLLM), so it may hold their bytes too.
    Closing(Vec<u8>),
}

fn from_pieces(generation: &Generation, content: Option<&str>, tokenizer: &Tokenizer, resolved: &mut Resolved) {
    let tokens = &generation.tokens;
    let count = tokens.len();
    let stop = stop_token(generation, tokenizer, count);
    let listed = count - usize::from(stop.is_some());
    let level = if tokens.bytes.is_some() { tier::BYTES } else { tier::TEXT };
    let mut seen: Vec<Seen<'_>> = Vec::with_capacity(listed);
    for index in 0..listed {
        let after_silence = matches!(seen.last(), Some(Seen::Silent));
        match see(tokens, index, after_silence, tokenizer) {
            Ok(piece) => seen.push(piece),
            Err(bytes) => {
                let detail = format!("token {} is not in the vocabulary", excerpt(&bytes));
                resolved.find(Reason::TokenizerMismatch, index, 1, detail);
                resolved.foreign = true;
                return;
            }
        }
    }
    let whole = || whole_text(tokens, &seen, content?, tokenizer);
    if seen.iter().all(|piece| matches!(piece, Seen::Own(_))) {
        for piece in &seen {
            if let Seen::Own(id) = piece {
                resolved.push(Some(*id), level);
            }
        }
    } else if let Some(ids) = whole() {
        for (id, piece) in ids.into_iter().zip(&seen) {
            resolved.push(Some(id), if matches!(piece, Seen::Own(_)) { level } else { tier::TEXT });
        }
    } else {
        by_runs(&seen, level, tokenizer, resolved);
    }
    if let Some(id) = stop {
        resolved.push(Some(id), level);
    }
}

/// What the record shows of token `index`; its bytes where the vocabulary does not have them.
fn see<'a>(tokens: &'a Tokens, index: usize, after_silence: bool, tokenizer: &Tokenizer) -> Result<Seen<'a>, Vec<u8>> {
    if let Some(bytes) = own_bytes(tokens, index, tokenizer) {
        let added = || std::str::from_utf8(&bytes).ok().and_then(|text| tokenizer.id_of_added(text));
        return match tokenizer.id_of_bytes(&bytes).or_else(added) {
            Some(id) if !after_silence || tokenizer.is_special(id) => Ok(Seen::Own(id)),
            None if !after_silence => Err(bytes),
            _ => Ok(Seen::Closing(bytes)),
        };
    }
    let text = |pieces: &'a Option<Pieces>| std::str::from_utf8(pieces.as_ref()?.get(index)?).ok();
    let lossy = text(&tokens.texts).or_else(|| text(&tokens.bytes)).filter(|text| text.contains('\u{FFFD}'));
    Ok(lossy.map_or(Seen::Silent, Seen::Lossy))
}

/// The ids, where the whole text is known and only one segmentation of it fits what is seen.
fn whole_text(tokens: &Tokens, seen: &[Seen<'_>], text: &str, tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    if text.is_empty() || text.contains('\u{FFFD}') || tokens.is_empty() {
        return None;
    }
    let pieces: Vec<Piece<'_>> = seen
        .iter()
        .map(|piece| match piece {
            Seen::Own(id) if tokenizer.is_special(*id) => Piece::Special(*id),
            Seen::Own(id) => tokenizer.token_bytes(*id).map_or(Piece::Any, Piece::Known),
            Seen::Silent => Piece::Silent,
            Seen::Lossy(text) => Piece::Lossy(text),
            Seen::Closing(_) => Piece::Any,
        })
        .collect();
    segment::unique(&pieces, text.as_bytes(), tokenizer.max_piece_bytes(), &|bytes| tokenizer.id_of_bytes(bytes))
}

/// The ids run by run, where the whole text is not known or does not decide: what a closing piece spells.
fn by_runs(seen: &[Seen<'_>], level: u8, tokenizer: &Tokenizer, resolved: &mut Resolved) {
    let mut at = 0;
    while at < seen.len() {
        if let Seen::Own(id) = &seen[at] {
            resolved.push(Some(*id), level);
            at += 1;
            continue;
        }
        let silent = seen[at..].iter().take_while(|piece| matches!(piece, Seen::Silent)).count();
        let last = at + silent;
        let closing = if let Some(Seen::Closing(text)) = seen.get(last) { Some(text.as_slice()) } else { None };
        let end = (last + usize::from(matches!(seen.get(last), Some(Seen::Closing(_) | Seen::Lossy(_))))).max(at + 1);
        run(at, end, closing, tokenizer, resolved);
        at = end;
    }
}

/// Tokens `at..end` are silent but for the last, which shows `text`; `None` where that is not all of their bytes.
fn run(at: usize, end: usize, text: Option<&[u8]>, tokenizer: &Tokenizer, resolved: &mut Resolved) {
    let mut pieces = vec![Piece::Silent; end - at];
    let ids = text.and_then(|text| {
        *pieces.last_mut()? = Piece::Any;
        segment::unique(&pieces, text, tokenizer.max_piece_bytes(), &|bytes| tokenizer.id_of_bytes(bytes))
    });
    if let Some(ids) = ids {
        for id in ids {
            resolved.push(Some(id), tier::TEXT);
        }
        return;
    }
    for _ in at..end {
        resolved.push(None, tier::TEXT);
    }
    let shown = text.map_or_else(|| "no text".to_owned(), excerpt);
    let detail = format!("{} tokens show {shown}: more than one way to spell it, or none", end - at);
    resolved.find(Reason::PartialUtf8, at, end - at, detail);
    resolved.runs.extend(text.map(|text| (at, end, text.to_vec())));
}

/// The bytes of token `index` alone, or `None` where the record does not give them.
fn own_bytes(tokens: &Tokens, index: usize, tokenizer: &Tokenizer) -> Option<Vec<u8>> {
    const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();
    let has = |bytes: &&[u8]| !bytes.is_empty() && memchr::memmem::find(bytes, REPLACEMENT).is_none();
    if let Some(bytes) = tokens.bytes.as_ref().and_then(|pieces| pieces.get(index)) {
        return Some(bytes).filter(has).map(<[u8]>::to_vec);
    }
    let text = tokens.texts.as_ref().and_then(|pieces| pieces.get(index)).filter(has)?;
    let text = std::str::from_utf8(text).ok()?;
    Some(escaped_bytes(text).or_else(|| glyph_bytes(text, tokenizer)).unwrap_or_else(|| text.as_bytes().to_vec()))
}

/// `bytes:\xe2\x80` and a token that is nothing but `\x` escapes are bytes, not text.
fn escaped_bytes(text: &str) -> Option<Vec<u8>> {
    let escapes = text.strip_prefix("bytes:").unwrap_or(text);
    if escapes.is_empty() || !escapes.len().is_multiple_of(4) || !escapes.is_ascii() {
        return None;
    }
    let byte = |chunk: &[u8]| {
        let digits = std::str::from_utf8(chunk.strip_prefix(b"\\x")?).ok()?;
        u8::from_str_radix(digits, 16).ok()
    };
    escapes.as_bytes().chunks(4).map(byte).collect()
}

/// The byte-level alphabet (`Ġthat`), where the text as it stands is no vocabulary entry.
fn glyph_bytes(text: &str, tokenizer: &Tokenizer) -> Option<Vec<u8>> {
    if text.is_ascii() || tokenizer.id_of_bytes(text.as_bytes()).is_some() {
        return None;
    }
    tokenizer.glyphs_to_bytes(text).filter(|bytes| tokenizer.id_of_bytes(bytes).is_some())
}

/// The stop token, where the last listed piece is empty and the record says what stopped it.
fn stop_token(generation: &Generation, tokenizer: &Tokenizer, count: usize) -> Option<u32> {
    let last = count.checked_sub(1)?;
    let tokens = &generation.tokens;
    let piece = |pieces: &Option<Pieces>| pieces.as_ref().and_then(|p| p.get(last)).is_none_or(<[u8]>::is_empty);
    if !piece(&tokens.bytes) || !piece(&tokens.texts) {
        return None;
    }
    if matches!(generation.finish_reason.as_deref(), None | Some("length" | "abort" | "content_filter")) {
        return None;
    }
    match generation.stop {
        Stop::Id(id) => tokenizer.token_bytes(id).map(|_| id),
        Stop::Unsaid => tokenizer.stop_id(),
        Stop::Text(_) => None,
    }
}

fn attach_logprobs(tokens: &Tokens, resolved: &mut Resolved) {
    let count = resolved.ids.len();
    resolved.logprobs = vec![f32::NAN; count];
    let Some(logprobs) = &tokens.logprobs else {
        if count > 0 {
            resolved.find(Reason::MissingLogprob, 0, count, "the record has no logprobs".into());
        }
        return;
    };
    if resolved.foreign {
        return;
    }
    if logprobs.len() != count {
        let detail = format!("{count} tokens but {} logprobs", logprobs.len());
        resolved.find(Reason::CountMismatch, 0, count, detail);
        return;
    }
    resolved.logprobs.copy_from_slice(logprobs);
    if tokens.missing > 0 {
        let detail = format!("{} logprobs are null, NaN or -inf", tokens.missing);
        resolved.find(Reason::MissingLogprob, usize::MAX, tokens.missing as usize, detail);
    }
    if tokens.invalid > 0 {
        let detail = format!("{} logprobs are positive or the -9999 sentinel", tokens.invalid);
        resolved.find(Reason::InvalidLogprob, usize::MAX, tokens.invalid as usize, detail);
    }
}
