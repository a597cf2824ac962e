//! Token ids to bytes, and bytes as error messages print them.

use crate::tokenizer::Tokenizer;

/// Whether `text` is the bytes of `ids`, special tokens included.
pub fn spells(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    let mut goes_on = |bytes: &[u8]| rest.strip_prefix(bytes).map(|behind| rest = behind).is_some();
    ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).all(&mut goes_on) && rest.is_empty()
}

/// Whether `id` is a special token; two comparisons decide for most ids.
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

/// At most 40 characters of possibly broken text, quoted.
pub fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() || bytes.len() > 200 {
        short.push('…');
    }
    format!("{short:?}")
}
