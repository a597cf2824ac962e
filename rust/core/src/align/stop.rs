//! What of a generation stands behind the stop string that ended it.
//!
//! Servers cut the stop string off the text, and keep its tokens in the lists: the text is then shorter than what the
//! tokens spell, and may end inside a token.

use super::resolved::Resolved;
use super::spelling::spell;
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Stop};

/// Where the turn ends before its tokens do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overrun {
    /// One past the last token that holds a byte of the text.
    pub end: usize,
    /// Whether that token also holds bytes of the stop string.
    pub partial: bool,
}

/// Tokens past the text, where the record says or shows that a stop string cut it.
pub fn overrun(
    generation: &Generation,
    content: Option<&str>,
    resolved: &Resolved<'_>,
    tokenizer: &Tokenizer,
) -> Option<Overrun> {
    let by_string = match &generation.stop {
        Stop::Text(string) => Some(string.as_str()),
        Stop::Unsaid => None,
        Stop::Id(_) => return None,
    };
    // Without the string's own word only text that is known to be all of the text can be short of the tokens.
    let text = generation.text.as_deref().or(content.filter(|_| by_string.is_some()))?;
    if generation.finish_reason.as_deref() != Some("stop") || !resolved.all_known() {
        return None;
    }
    let spelled = spell(&resolved.ids, tokenizer);
    let length = spelled_length(&spelled, text)?;
    let rest = String::from_utf8_lossy(&spelled[length..]);
    if rest.is_empty() || by_string.is_some_and(|string| !rest.contains(string)) {
        return None;
    }
    let (mut at, mut end) = (0, 0);
    for (index, &id) in resolved.ids.iter().enumerate() {
        if at >= length {
            break;
        }
        at += if tokenizer.is_special(id) { 0 } else { tokenizer.token_bytes(id).map_or(0, <[u8]>::len) };
        end = index + 1;
    }
    Some(Overrun { end, partial: at > length })
}

/// How many bytes of `spelled` decode to `text`, if it begins with that.
fn spelled_length(spelled: &[u8], text: &str) -> Option<usize> {
    if spelled.starts_with(text.as_bytes()) {
        return Some(text.len());
    }
    let mut rest = text;
    let mut length = 0;
    for chunk in spelled.utf8_chunks() {
        if let Some(inside) = chunk.valid().get(..rest.len()).filter(|inside| *inside == rest) {
            return Some(length + inside.len());
        }
        rest = rest.strip_prefix(chunk.valid())?;
        length += chunk.valid().len();
        if !chunk.invalid().is_empty() {
            if rest.is_empty() {
                return Some(length);
            }
            rest = rest.strip_prefix('\u{FFFD}')?;
            length += chunk.invalid().len();
        }
    }
    rest.is_empty().then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_text_counts_what_stands_for_broken_characters() {
        assert_eq!(spelled_length(b"ab}", "ab"), Some(2));
        assert_eq!(spelled_length(b"a\xE3\x81b}", "a\u{FFFD}b"), Some(4));
        assert_eq!(spelled_length(b"a\xE3\x81b}", "a"), Some(1));
        assert_eq!(spelled_length(b"abc", "abd"), None);
        assert_eq!(spelled_length(b"ab", "abc"), None);
        assert_eq!(spelled_length("é!".as_bytes(), "é"), Some(2));
    }
}
