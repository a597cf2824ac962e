//! Tokens that the record shows by bytes or text: their ids, as far as it determines them.
//!
//! A token that shows bytes of its own is looked up; what hidden and mangled ones were is asked of `segment`.

use super::lookup::Lookup;
use super::recorder::Recorder;
use super::resolved::{Resolved, Run};
use super::segment::{self, Choice, REPLACEMENT, Seen, Setting, Whole};
use super::spelling::{excerpt, spell};
use super::tier;
use crate::drift::Reason;
use crate::tokenizer::{Spelling, Tokenizer};
use crate::trace::{Generation, Pieces, Stop, Tokens};
use std::borrow::Cow;

/// What a byte begins with where it is written in hexadecimal.
const ESCAPE: &[u8] = br"\x";

/// A generation whose tokens are listed, and what tells which they are.
#[derive(Clone, Copy)]
pub struct Listing<'a, 'r> {
    pub generation: &'a Generation,
    /// What they spell, where the record says that.
    pub content: Option<&'r str>,
    pub tokenizer: &'r Tokenizer,
    /// Is asked what the trace shows of how tokens are written.
    pub recorder: &'r Recorder<'r>,
}

/// Resolves a list of tokens with texts or bytes.
pub fn from_pieces(listing: Listing<'_, '_>, lookup: &mut Lookup, resolved: &mut Resolved<'_>) {
    let Listing { generation, tokenizer, .. } = listing;
    let stop = stop_token(generation, tokenizer, generation.tokens.len());
    by_pieces(listing, stop, lookup, resolved);
    if resolved.foreign {
        return;
    }
    // The stop token is known by its id.
    let listed = resolved.ids.len() - usize::from(stop.is_some());
    doubt_spaces(listing, listed, resolved);
    if tokenizer.has_shared() {
        doubt_shared(tokenizer, listed, resolved);
    }
}

/// A token is not known where the recorder may have taken its space: `Hello` is spelled with one and without.
///
/// Servers that decode tokens one by one take the space of each, others that of the first alone.
fn doubt_spaces(listing: Listing<'_, '_>, listed: usize, resolved: &mut Resolved<'_>) {
    let Listing { generation, content, tokenizer, recorder } = listing;
    if !tokenizer.drops_first_space() {
        return;
    }
    let said =
        || resolved.all_known() && content.is_some_and(|text| spell(&resolved.ids, tokenizer) == text.as_bytes());
    let keeps = recorder.keeps_spaces() || (listed > 1 && said());
    let has_spaced = |bytes: &[u8]| tokenizer.id_of_bytes(&[b" ", bytes].concat()).is_some();
    let doubtful = |index: &usize| {
        let (index, id) = (*index, resolved.ids[*index]);
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match resolved.is_known(index) {
            true if keeps => index == 0 && !tokenizer.is_special(id) && !bytes.starts_with(b" ") && has_spaced(bytes),
            // A token that shows nothing may be a space alone.
            true if tokenizer.is_special(id) => shows_nothing(&generation.tokens, index) && has_spaced(b""),
            known => known && has_spaced(bytes),
        }
    };
    let found: Vec<usize> = (0..if keeps { listed.min(1) } else { listed }).filter(doubtful).collect();
    if let Some(&first) = found.first() {
        let bytes = excerpt(tokenizer.token_bytes(resolved.ids[first]).unwrap_or_default());
        let detail =
            format!("{bytes} is two tokens, with a space before it and without; so are {} in all", found.len());
        resolved.find(Reason::NormalizerChanged, first, found.len(), detail);
        resolved.doubt(&found, Reason::NormalizerChanged, tokenizer);
    }
}

/// A token is not known where another entry shows the same: `<0x20>` and `▁` are both a space.
fn doubt_shared(tokenizer: &Tokenizer, listed: usize, resolved: &mut Resolved<'_>) {
    let shared = |index: &usize| resolved.is_known(*index) && tokenizer.is_shared(resolved.ids[*index]);
    let found: Vec<usize> = (0..listed).filter(shared).collect();
    if let Some(&first) = found.first() {
        let bytes = excerpt(tokenizer.token_bytes(resolved.ids[first]).unwrap_or_default());
        let detail = format!("two entries of the vocabulary are {bytes}; so it is with {} tokens in all", found.len());
        resolved.find(Reason::SharedBytes, first, found.len(), detail);
        resolved.doubt(&found, Reason::SharedBytes, tokenizer);
    }
}

fn shows_nothing(tokens: &Tokens, index: usize) -> bool {
    let empty = |pieces: &Option<Pieces>| pieces.as_ref().and_then(|p| p.get(index)).is_none_or(<[u8]>::is_empty);
    empty(&tokens.bytes) && empty(&tokens.texts)
}

fn by_pieces(listing: Listing<'_, '_>, stop: Option<u32>, lookup: &mut Lookup, resolved: &mut Resolved<'_>) {
    let Listing { generation, content, tokenizer, recorder } = listing;
    let tokens = &generation.tokens;
    let count = tokens.len();
    let listed = count - usize::from(stop.is_some());
    let level = if tokens.bytes.is_some() { tier::BYTES } else { tier::TEXT };
    if let Some(mut ids) = all_by_own_bytes(tokens, listed, tokenizer, lookup) {
        ids.extend(stop);
        return resolved.take(Cow::Owned(ids), level);
    }
    let mut seen: Vec<Seen<'_>> = Vec::with_capacity(count);
    let mut glyphs = 0;
    for index in 0..listed {
        let after_hidden = matches!(seen.last(), Some(Seen::Nothing));
        match see(tokens, index, after_hidden, tokenizer, &mut glyphs) {
            Ok(piece) => seen.push(piece),
            Err(bytes) => {
                let shown = excerpt(&bytes);
                let detail = format!("token {index}, {shown}, is not in the vocabulary; {count} tokens are left out");
                resolved.find(Reason::TokenizerMismatch, 0, count, detail);
                resolved.foreign = true;
                return;
            }
        }
    }
    if glyphs > 0 {
        let detail = format!("{glyphs} tokens are written in the byte-level alphabet");
        resolved.find(Reason::GlyphText, 0, glyphs, detail);
    }
    seen.extend(stop.map(Seen::Id));
    let id = |piece: &Seen<'_>| if let Seen::Id(id) = piece { Some(*id) } else { None };
    if let Some(ids) = seen.iter().map(id).collect::<Option<Vec<u32>>>() {
        return ids.into_iter().for_each(|id| resolved.push(Some(id), level));
    }
    let setting = Setting { tokenizer, hides_specials: recorder.hides_specials() };
    if !by_whole(listing, &seen, setting, level, resolved) {
        let broken = content.is_some_and(|text| text.contains('\u{FFFD}'));
        by_runs(&seen, setting, level, broken, resolved);
    }
}

/// The ids of the first `listed` tokens, where each shows bytes of its own that an entry has; as [`see`] sees them.
fn all_by_own_bytes(tokens: &Tokens, listed: usize, tokenizer: &Tokenizer, lookup: &mut Lookup) -> Option<Vec<u32>> {
    let pieces = tokens.bytes.as_ref().or(tokens.texts.as_ref())?;
    let data = pieces.data.as_slice();
    let has = |what: &[u8]| memchr::memmem::find(data, what).is_some();
    let is_text = tokens.bytes.is_none();
    if has(REPLACEMENT) || (is_text && has(ESCAPE)) || pieces.known.get(..listed)?.contains(&false) {
        return None;
    }
    let mut ids = Vec::with_capacity(listed + 1);
    let mut start = 0;
    for end in pieces.ends.get(..listed)?.iter().map(|&end| end as usize) {
        let piece = data.get(start..end).filter(|piece| !piece.is_empty())?;
        let written = || std::str::from_utf8(piece).ok();
        let id = match lookup.id(data, (start, end), tokenizer) {
            Some(id) if !is_text || written().is_some() => id,
            // A text may also be written in the byte-level alphabet.
            None if !is_text || piece.is_ascii() => tokenizer.id_of_added(written()?)?,
            _ => return None,
        };
        ids.push(id);
        start = end;
    }
    Some(ids)
}

/// What the record shows of token `index`; its bytes where the vocabulary does not have them.
fn see<'a>(
    tokens: &'a Tokens,
    index: usize,
    after_hidden: bool,
    tokenizer: &Tokenizer,
    glyphs: &mut usize,
) -> Result<Seen<'a>, Vec<u8>> {
    // A recorder that writes glyphs hides nothing: behind a hidden token a text is what it says.
    let own = own_bytes(tokens, index, tokenizer).filter(|(_, written)| !after_hidden || *written != Written::Glyphs);
    let shown = |pieces: &'a Option<Pieces>| std::str::from_utf8(pieces.as_ref()?.get(index)?).ok();
    let Some((bytes, written)) = own else {
        let text = |pieces| shown(pieces).filter(|text| !text.is_empty());
        let shown = text(&tokens.texts).or_else(|| text(&tokens.bytes));
        return Ok(shown.map_or(Seen::Nothing, Seen::Text));
    };
    *glyphs += usize::from(written == Written::Glyphs);
    let text = || std::str::from_utf8(&bytes).ok();
    let id = tokenizer.id_of_bytes(&bytes).or_else(|| tokenizer.id_of_added(text()?));
    // Behind hidden tokens a text may be theirs too, if its last character is one that can be cut.
    let may_be_joint = after_hidden && text().is_some_and(|text| !text.ends_with(|last: char| last.is_ascii()));
    match id {
        Some(id) if !may_be_joint || tokenizer.is_special(id) => Ok(Seen::Id(id)),
        _ if !may_be_joint => Err(bytes.into_owned()),
        _ => {
            let same = |text: &&str| text.as_bytes() == &*bytes;
            let text = shown(&tokens.bytes).filter(same).or_else(|| shown(&tokens.texts).filter(same));
            text.map_or_else(|| id.map(Seen::Id).ok_or_else(|| bytes.into_owned()), |text| Ok(Seen::Text(text)))
        }
    }
}

/// The ids by the whole text of the generation. False where it is not that of these tokens.
fn by_whole(
    Listing { generation, content, .. }: Listing<'_, '_>,
    seen: &[Seen<'_>],
    setting: Setting<'_>,
    level: u8,
    resolved: &mut Resolved<'_>,
) -> bool {
    let Some(text) = content.filter(|text| !text.is_empty()) else { return false };
    let may_go_on = !matches!(generation.finish_reason.as_deref(), Some("length"));
    let with_stop = match &generation.stop {
        Stop::Text(string) => Some(format!("{text}{string}")),
        _ => None,
    };
    let texts = with_stop.iter().map(String::as_str).chain([text]);
    let wholes = texts.flat_map(|text| [false, true].map(|with_specials| Whole { text, may_go_on, with_specials }));
    for whole in wholes {
        let Some(found) = segment::whole(seen, whole, setting) else { continue };
        let broken = |index: usize| {
            let start = found.starts[..=index].iter().rev().find_map(|start| *start).unwrap_or(0) as usize;
            let end =
                found.starts[index + 1..].iter().find_map(|start| *start).map_or(whole.text.len(), |end| end as usize);
            whole.text.get(start..end).is_some_and(|text| text.contains('\u{FFFD}'))
        };
        push(seen, &found.choices, level, &broken, resolved);
        let mut at = 0;
        while let Some(first) = (at..seen.len()).find(|&index| !resolved.is_known(index)) {
            let end = (first..seen.len()).find(|&index| resolved.is_known(index)).unwrap_or(seen.len());
            if let (Some(start), Some(end_byte)) = (found.starts[first], found.starts[end]) {
                let text = whole.text.as_bytes()[start as usize..end_byte as usize].to_vec();
                resolved.runs.push(Run { first, end, bytes: text, entry: None });
            }
            at = end;
        }
        return true;
    }
    false
}

/// The ids run by run, where the whole text is not known: by what the token behind hidden ones shows.
fn by_runs(seen: &[Seen<'_>], setting: Setting<'_>, level: u8, broken: bool, resolved: &mut Resolved<'_>) {
    let mut choices = Vec::with_capacity(seen.len());
    let mut runs = Vec::new();
    while choices.len() < seen.len() {
        let at = choices.len();
        let hidden = seen[at..].iter().take_while(|piece| matches!(piece, Seen::Nothing)).count();
        match seen.get(at + hidden) {
            Some(Seen::Text(text)) => {
                choices.extend(segment::run(hidden, Some(text), setting));
                if !text.contains('\u{FFFD}') && choices[at].id().is_none() {
                    runs.push(Run { first: at, end: choices.len(), bytes: text.as_bytes().to_vec(), entry: None });
                }
            }
            Some(Seen::Id(id)) => {
                choices.extend(segment::run(hidden, None, setting));
                choices.push(Choice::One(*id));
            }
            Some(Seen::Nothing) | None => choices.extend(segment::run(hidden, None, setting)),
        }
    }
    push(seen, &choices, level, &|_| broken, resolved);
    resolved.runs.extend(runs);
}

/// Takes over what was found; a finding for each run of ids that are not known.
fn push(seen: &[Seen<'_>], choices: &[Choice], level: u8, broken: &dyn Fn(usize) -> bool, resolved: &mut Resolved<'_>) {
    for (piece, choice) in seen.iter().zip(choices) {
        resolved.push(choice.id(), if matches!(piece, Seen::Id(_)) { level } else { tier::TEXT });
    }
    let mut at = 0;
    while let Some(first) = (at..seen.len()).find(|&index| !resolved.is_known(index)) {
        let end = (first..seen.len()).find(|&index| resolved.is_known(index)).unwrap_or(seen.len());
        let lossy = |index: usize| matches!(seen[index], Seen::Text(text) if text.contains('\u{FFFD}'));
        let mangled = (first..end).any(|index| lossy(index) || broken(index));
        let reason = if mangled { Reason::LossyText } else { Reason::PartialUtf8 };
        let shown: Vec<&str> =
            (first..end).filter_map(|i| if let Seen::Text(t) = seen[i] { Some(t) } else { None }).collect();
        let shown = if shown.is_empty() { "nothing".to_owned() } else { excerpt(shown.concat().as_bytes()) };
        let ways = if choices[first..end].contains(&Choice::None) { "no" } else { "more than one" };
        let detail = format!("{} tokens show {shown}: {ways} way to spell it", end - first);
        resolved.find(reason, first, end - first, detail);
        resolved.unknown.push((first, reason));
        at = end;
    }
}

/// How the bytes of a token were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// As themselves.
    Plainly,
    /// As `\x` escapes.
    Escaped,
    /// In the byte-level alphabet.
    Glyphs,
}

/// The bytes of token `index` alone, or `None` where the record does not give them.
pub fn own_bytes<'a>(tokens: &'a Tokens, index: usize, tokenizer: &Tokenizer) -> Option<(Cow<'a, [u8]>, Written)> {
    let has = |bytes: &&[u8]| !bytes.is_empty() && memchr::memmem::find(bytes, REPLACEMENT).is_none();
    if let Some(bytes) = tokens.bytes.as_ref().and_then(|pieces| pieces.get(index)) {
        return Some((Cow::Borrowed(bytes), Written::Plainly)).filter(|(bytes, _)| has(&&**bytes));
    }
    let shown = tokens.texts.as_ref().and_then(|pieces| pieces.get(index)).filter(has)?;
    let text = std::str::from_utf8(shown).ok()?;
    let escaped = escaped_bytes(text).map(|bytes| (Cow::Owned(bytes), Written::Escaped));
    let glyphs = || glyph_bytes(text, tokenizer).map(|bytes| (Cow::Owned(bytes), Written::Glyphs));
    Some(escaped.or_else(glyphs).unwrap_or((Cow::Borrowed(shown), Written::Plainly)))
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
    let spells = tokenizer.spelling() == Spelling::ByteLevel;
    if !spells || text.is_ascii() || tokenizer.id_of_bytes(text.as_bytes()).is_some() {
        return None;
    }
    tokenizer.glyphs_to_bytes(text).filter(|bytes| tokenizer.id_of_bytes(bytes).is_some())
}

/// The stop token, where the last listed piece is empty and the record says what stopped it.
fn stop_token(generation: &Generation, tokenizer: &Tokenizer, count: usize) -> Option<u32> {
    let last = count.checked_sub(1)?;
    let tokens = &generation.tokens;
    if !shows_nothing(tokens, last) {
        return None;
    }
    if matches!(generation.finish_reason.as_deref(), None | Some("length" | "abort" | "content_filter")) {
        return None;
    }
    match generation.stop {
        Stop::Id(id) => Some(id).filter(|&id| tokenizer.first_outside(&[id]).is_none()),
        Stop::Unsaid => tokenizer.stop_id(),
        Stop::Text(_) => None,
    }
}

#[cfg(test)]
mod tests;
