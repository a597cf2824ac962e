//! Recorded tokens to ids: the tiers.
//!
//! T0 and T1 have ids, T2 has every token's own bytes, T3 has text or a run of bytes for several tokens. What a record
//! determines is recovered; an id that cannot be known stays unknown, with its reason. Nothing is rendered here.

use super::lookup::Lookup;
use super::pieces::{Listing, from_pieces, own_bytes};
use super::recorder::Recorder;
use super::resolved::Resolved;
use super::segment::REPLACEMENT;
use super::spelling::{excerpt, is_special, spell, spell_all};
use super::tier;
use crate::drift::Reason;
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Pieces, Stop, Tokens};
use std::borrow::Cow;

/// How vLLM writes an id in the place of a text.
const PLACEHOLDER: &[u8] = b"token_id:";

/// Resolves the tokens that a generation lists. `Tokens` with logprobs alone, or with nothing, resolve to no token.
pub fn resolve<'a>(
    generation: &'a Generation,
    content: Option<&str>,
    recorder: &Recorder<'_>,
    lookup: &mut Lookup,
) -> Resolved<'a> {
    let (tokens, tokenizer) = (&generation.tokens, recorder.tokenizer);
    let listing = Listing { generation, content: generation.text.as_deref().or(content), tokenizer, recorder };
    let mut resolved = Resolved::default();
    if let Some(ids) = &tokens.ids {
        let level = if generation.prompt.ids().is_some() { tier::IDS_AND_PROMPT } else { tier::IDS };
        from_ids(listing, ids, level, &mut resolved);
    } else if tokens.bytes.is_some() || tokens.texts.is_some() {
        from_pieces(listing, lookup, &mut resolved);
        if tokenizer.vocab_size() > tokenizer.model_vocab_size()
            && let Some(at) = tokenizer.first_outside(&resolved.ids)
        {
            outside(at, &mut resolved, tokenizer);
        }
    }
    attach_logprobs(generation, &mut resolved);
    resolved
}

fn from_ids<'a>(listing: Listing<'a, '_>, ids: &'a [u32], level: u8, resolved: &mut Resolved<'a>) {
    let (tokens, content, tokenizer) = (&listing.generation.tokens, listing.content, listing.tokenizer);
    if let Some(at) = tokenizer.first_outside(ids) {
        resolved.take(Cow::Borrowed(ids), level);
        return outside(at, resolved, tokenizer);
    }
    let bare = content.filter(|_| tokens.bytes.is_none() && tokens.texts.is_none());
    let said = bare.and_then(|content| begin_with(ids.iter(), content.as_bytes(), tokenizer));
    resolved.said = said.and_then(|(count, ends)| ends.then_some(count));
    if said.is_none()
        && let Some(detail) = contradiction(ids, tokens, content, tokenizer)
    {
        resolved.find(Reason::TokenizerMismatch, 0, ids.len(), detail);
        resolved.foreign = true;
        return;
    }
    resolved.take(Cow::Borrowed(ids), level);
}

/// The record is of another vocabulary: all its tokens are lost, as nothing can stand behind the one at `at`.
fn outside(at: usize, resolved: &mut Resolved<'_>, tokenizer: &Tokenizer) {
    let ids = std::mem::take(&mut resolved.ids);
    let (id, size, count) = (ids[at], tokenizer.model_vocab_size(), ids.len());
    let detail =
        format!("id {id} of token {at} is not in the model's vocabulary of {size}; {count} tokens are left out");
    resolved.find(Reason::VocabOutOfRange, 0, ids.len(), detail);
    resolved.foreign = true;
}

/// What the record shows, where it cannot be what these ids say.
fn contradiction(ids: &[u32], tokens: &Tokens, content: Option<&str>, tokenizer: &Tokenizer) -> Option<String> {
    let mut after_silence = false;
    let plain = tokens.bytes.as_ref().filter(|pieces| is_plain(&pieces.data));
    // Without pieces nothing is shown.
    let listed = if tokens.bytes.is_some() || tokens.texts.is_some() { ids } else { &[] };
    let alike = plain.map_or(0, |pieces| alike(listed, pieces, tokenizer));
    let mut shown = alike > 0;
    for (index, &id) in listed.iter().enumerate().skip(alike) {
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
    let plain = ids.iter().filter(|&&id| !is_special(id, tokenizer));
    if begin_with(plain, content.as_bytes(), tokenizer).is_some() {
        return None;
    }
    unsaid(ids, content, tokenizer)
}

/// How many of the first ids have the bytes that are listed for them, and have some.
fn alike(ids: &[u32], pieces: &Pieces, tokenizer: &Tokenizer) -> usize {
    let (mut start, mut count) = (0, 0);
    for ((&id, &end), &known) in ids.iter().zip(&pieces.ends).zip(&pieces.known) {
        let piece = pieces.data.get(start..end as usize).filter(|piece| known && !piece.is_empty());
        if piece.is_none() || tokenizer.token_bytes(id) != piece {
            break;
        }
        (start, count) = (end as usize, count + 1);
    }
    count
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

/// How many of `ids` spell `text` where they begin with it, with those behind it that have no bytes, and whether it ends
/// where the last of these does; `None` where they do not begin with it.
fn begin_with<'i>(ids: impl Iterator<Item = &'i u32>, text: &[u8], tokenizer: &Tokenizer) -> Option<(usize, bool)> {
    let (mut rest, mut count) = (text, 0);
    for &id in ids {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match rest.strip_prefix(bytes) {
            Some(behind) => rest = behind,
            None if rest.is_empty() => break,
            None => return bytes.starts_with(rest).then_some((count + 1, false)),
        }
        count += 1;
    }
    rest.is_empty().then_some((count, true))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || memchr::memmem::find(text, part).is_some()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::example;

    #[test]
    fn ids_are_counted_as_far_as_they_spell_a_text_or_what_is_listed() {
        let tokenizer = example();
        let stop = tokenizer.special_ids()[0];
        let ids = [tokenizer.encode("the price is 42").unwrap(), vec![stop]].concat();
        let spelled = |count: usize| spell_all(&ids[..count], &tokenizer);
        let whole = ids.len() - 1;
        let begun = |text: &[u8]| begin_with(ids.iter(), text, &tokenizer);
        assert_eq!(begun(&spelled(whole)), Some((whole, true)));
        assert_eq!(begun(&spelled(2)), Some((2, true)));
        assert_eq!(begun(b""), Some((0, true)));
        let inside = ids[..whole].iter().position(|&id| spell_all(&[id], &tokenizer).len() > 1).unwrap();
        assert_eq!(begun(&spelled(whole)[..=spelled(inside).len()]), Some((inside + 1, false)));
        assert_eq!(begun(b"another text"), None);
        assert_eq!(begun(&[&spelled(whole + 1)[..], b"!"].concat()), None);

        let listed = |shown: &dyn Fn(usize) -> Option<Vec<u8>>| {
            let mut pieces = Pieces::default();
            (0..ids.len()).for_each(|at| pieces.push(shown(at).as_deref()));
            alike(&ids, &pieces, &tokenizer)
        };
        let own = |at: usize| Some(spell_all(&ids[at..=at], &tokenizer));
        assert_eq!(listed(&own), ids.len());
        assert_eq!(listed(&|at| own(at).filter(|_| at != 1)), 1);
        assert_eq!(listed(&|at| if at == whole { Some(Vec::new()) } else { own(at) }), whole);
        assert_eq!(listed(&|at| if at == 2 { Some(b"?".to_vec()) } else { own(at) }), 2);
        assert_eq!(listed(&|_| None), 0);
    }
}
