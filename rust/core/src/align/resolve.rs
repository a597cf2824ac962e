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

/// The recorded text, where it cannot be what these ids say.
fn contradiction(ids: &[u32], tokens: &Tokens, content: Option<&str>, tokenizer: &Tokenizer) -> Option<String> {
    let spelled = spell(ids, tokenizer);
    let recorded = tokens.bytes.as_ref().or(tokens.texts.as_ref()).filter(|pieces| pieces.known.iter().all(|&k| k));
    let expected = match (recorded, content) {
        (Some(pieces), _) if !pieces.data.starts_with(b"token_id:") => &pieces.data,
        (_, Some(text)) => text.trim().as_bytes(),
        _ => return None,
    };
    let text = String::from_utf8_lossy(expected);
    if text.contains('\u{FFFD}') || contains(&spelled, expected) || contains(&spell_all(ids, tokenizer), expected) {
        return None;
    }
    let (said, meant) = (excerpt(&spelled), excerpt(expected));
    Some(format!("the ids spell {said} where the record says {meant}"))
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

fn from_pieces(generation: &Generation, content: Option<&str>, tokenizer: &Tokenizer, resolved: &mut Resolved) {
    let tokens = &generation.tokens;
    let count = tokens.len();
    let stop = stop_token(generation, tokenizer, count);
    let listed = if stop.is_some() { count - 1 } else { count };
    let bytes_recorded = tokens.bytes.is_some();
    let pieces: Vec<Option<Vec<u8>>> = (0..listed).map(|index| own_bytes(tokens, index, tokenizer)).collect();
    let mut at = 0;
    while at < listed && !resolved.foreign {
        let run = pieces[at..].iter().position(Option::is_some).unwrap_or(listed - at);
        if run == 0 {
            let bytes = pieces[at].as_deref().unwrap_or_default();
            single(at, bytes, if bytes_recorded { tier::BYTES } else { tier::TEXT }, tokenizer, resolved);
            at += 1;
        } else {
            let last = (at + run).min(listed);
            let closing = pieces.get(last).and_then(|piece| piece.as_deref());
            at = cut_run(at, last, closing, tokens, tokenizer, resolved);
        }
    }
    if resolved.known.contains(&false) && !resolved.foreign {
        recover_from_content(tokens, &pieces, content, tokenizer, resolved);
    }
    if let (Some(id), false) = (stop, resolved.foreign) {
        resolved.push(Some(id), if bytes_recorded { tier::BYTES } else { tier::TEXT });
    }
}

/// One token whose own bytes are recorded.
fn single(at: usize, bytes: &[u8], level: u8, tokenizer: &Tokenizer, resolved: &mut Resolved) {
    let added = || std::str::from_utf8(bytes).ok().and_then(|text| tokenizer.id_of_added(text));
    if let Some(id) = tokenizer.id_of_bytes(bytes).or_else(added) {
        resolved.push(Some(id), level);
        return;
    }
    let detail = format!("token {} is not in the vocabulary", excerpt(bytes));
    resolved.find(Reason::TokenizerMismatch, at, 1, detail);
    resolved.foreign = true;
}

/// Tokens `at..last` have no bytes of their own; `closing` is the piece after them, which carries the whole character
/// where the recorder corrects by context (vLLM). Returns the first token after the run.
fn cut_run(
    at: usize,
    last: usize,
    closing: Option<&[u8]>,
    tokens: &Tokens,
    tokenizer: &Tokenizer,
    resolved: &mut Resolved,
) -> usize {
    let Some(text) = closing else {
        for _ in at..last {
            resolved.push(None, tier::TEXT);
        }
        let detail = format!("the generation ends in {} token(s) without text", last - at);
        resolved.find(Reason::PartialUtf8, at, last - at, detail);
        return last;
    };
    let count = last + 1 - at;
    let lookup = |bytes: &[u8]| tokenizer.id_of_bytes(bytes);
    let longest = tokenizer.max_piece_bytes();
    let mut pieces: Vec<Piece<'_>> = (at..last).map(|index| lossy(tokens, index).unwrap_or(Piece::Cut)).collect();
    pieces.push(Piece::Any);
    // A token without text may also be a special token or a byte that belongs to no character. Where fewer pieces
    // spell the same text, that reading stands beside this one and neither is known.
    let alone = (1..count).any(|fewer| segment::possible(fewer, text, longest, &lookup));
    let ids = if alone { None } else { segment::unique(&pieces, text, longest, &lookup) };
    if let Some(ids) = ids {
        for id in ids {
            resolved.push(Some(id), tier::TEXT);
        }
        return last + 1;
    }
    for _ in at..=last {
        resolved.push(None, tier::TEXT);
    }
    resolved.runs.push((at, last + 1, text.to_vec()));
    let detail = format!("{count} tokens spell {} in more than one way, or in none", excerpt(text));
    resolved.find(Reason::PartialUtf8, at, count, detail);
    last + 1
}

/// Tries the whole text once more where single runs stayed open: the pieces that are known anchor the others.
fn recover_from_content(
    tokens: &Tokens,
    own: &[Option<Vec<u8>>],
    content: Option<&str>,
    tokenizer: &Tokenizer,
    resolved: &mut Resolved,
) {
    // Only per-token decodes say by themselves that a token was a lone part of a character.
    let lossy_only = (0..own.len()).all(|index| own[index].is_some() || lossy(tokens, index).is_some());
    let Some(text) = content.filter(|_| lossy_only) else { return };
    let pieces: Vec<Piece<'_>> = (0..own.len())
        .map(|index| match &own[index] {
            Some(bytes) => Piece::Known(bytes),
            None => lossy(tokens, index).unwrap_or(Piece::Any),
        })
        .collect();
    let lookup = |bytes: &[u8]| tokenizer.id_of_bytes(bytes);
    if let Some(ids) = segment::unique(&pieces, text.as_bytes(), tokenizer.max_piece_bytes(), &lookup) {
        let runs = resolved.known.iter().filter(|known| !**known).count();
        resolved.findings.retain(|finding| finding.reason != Reason::PartialUtf8);
        resolved.find(Reason::LossyText, 0, runs, format!("{runs} tokens without own bytes, resolved from the text"));
        resolved.known = vec![true; ids.len()];
        resolved.runs.clear();
        resolved.ids = ids;
    }
}

/// The text of token `index` where it holds U+FFFD: what its bytes decode to.
fn lossy(tokens: &Tokens, index: usize) -> Option<Piece<'_>> {
    let text = std::str::from_utf8(tokens.texts.as_ref()?.get(index)?).ok()?;
    text.contains('\u{FFFD}').then_some(Piece::Lossy(text))
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
