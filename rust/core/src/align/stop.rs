//! Where the text of a generation ends before its tokens do.
//!
//! Servers cut the stop string off the text, and keep its tokens in the lists: the text is then shorter than what the
//! tokens spell, and may end inside a token. Tokens behind a stop token, such as those of a second message, are cut too.

use super::called;
use super::resolved::Resolved;
use super::spelling::{is_special, spell};
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Pieces, Stop, value_in};
use memchr::memmem;
use serde_json::Value;

/// Where the turn ends before its tokens do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overrun {
    /// One past the last token that belongs to the turn.
    pub end: usize,
    /// Whether the last token that holds a byte of the text also holds some of what stands behind it.
    pub partial: bool,
}

const THOUGHT_END: &str = "</think>";

/// Tokens past the text: of the generation where that is recorded, else of `message`.
pub fn overrun(
    generation: &Generation,
    message: Option<&Value>,
    resolved: &Resolved<'_>,
    tokenizer: &Tokenizer,
) -> Option<Overrun> {
    if let Some(message) = message.filter(|message| calls(message)) {
        return behind_calls(message, &resolved.ids, tokenizer);
    }
    let content = message.and_then(|message| value_in(message, "content")?.as_str());
    let text = generation.text.as_deref().or(content).filter(|text| !text.is_empty())?;
    let ids = &resolved.ids;
    let stopped = ids.last().is_some_and(|&id| is_special(id, tokenizer));
    let whole = resolved.said.is_some_and(|said| said + usize::from(stopped) >= ids.len());
    let listed = generation.tokens.bytes.as_ref().or(generation.tokens.texts.as_ref());
    let whole = whole || listed.is_some_and(|pieces| are_text(pieces, text.as_bytes(), stopped));
    if whole || !resolved.all_known() || ends_with(ids, text.as_bytes(), tokenizer) {
        return None;
    }
    let spelled = spell(&resolved.ids, tokenizer);
    let thinks = message.is_some_and(thinks);
    let length = match &generation.text {
        Some(text) => spelled_length(&spelled, text)?,
        None => end_of_content(&spelled, text, thinks)?,
    };
    let rest = String::from_utf8_lossy(&spelled[length..]);
    let by_string = matches!(&generation.stop, Stop::Text(string) if rest.contains(string));
    // A server may trim white space, and holds back what may become a character.
    let trimmed = |part: char| part == '\u{FFFD}' || (part.is_whitespace() && generation.text.is_none());
    if rest.is_empty() || !by_string && rest.chars().all(trimmed) {
        return None;
    }
    let (mut at, mut end) = (0, 0);
    for (index, &id) in resolved.ids.iter().enumerate() {
        if at >= length {
            break;
        }
        at += if is_special(id, tokenizer) { 0 } else { tokenizer.token_bytes(id).map_or(0, <[u8]>::len) };
        end = index + 1;
    }
    let partial = at > length;
    let stops = !partial && resolved.ids.get(end).is_some_and(|&id| is_special(id, tokenizer));
    Some(Overrun { end: end + usize::from(stops), partial })
}

/// Tokens behind the first stop token of a turn that calls tools, where all of its calls stand before that.
fn behind_calls(message: &Value, ids: &[u32], tokenizer: &Tokenizer) -> Option<Overrun> {
    let stops = |&id: &u32| is_special(id, tokenizer) && tokenizer.eos_ids().contains(&id);
    let end = ids.iter().position(stops).map(|stop| stop + 1).filter(|&end| end < ids.len())?;
    called::unsaid(message, &ids[..end], tokenizer).is_none().then_some(Overrun { end, partial: false })
}

/// Whether a message calls a tool: its text is then no whole of what was sampled.
fn calls(message: &Value) -> bool {
    let listed = value_in(message, "tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    listed || value_in(message, "function_call").is_some_and(Value::is_object)
}

/// Whether a message has its reasoning apart from its text.
fn thinks(message: &Value) -> bool {
    let thought = |key: &&str| value_in(message, key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    ["reasoning_content", "reasoning", "thinking"].iter().any(thought)
}

/// Whether the pieces that a record lists are its text, or that and the one of the stop token.
fn are_text(pieces: &Pieces, text: &[u8], stopped: bool) -> bool {
    let last = pieces.ends.len().checked_sub(2).map_or(0, |before| pieces.ends[before] as usize);
    pieces.data.starts_with(text) && (pieces.data.len() == text.len() || stopped && last == text.len())
}

/// Whether the ids end in these bytes, or in these and one special token, and no special token stands before that where the
/// bytes end for the first time. Walks back over the bytes alone.
fn ends_with(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let ids = match ids.split_last() {
        Some((last, before)) if is_special(*last, tokenizer) => before,
        _ => ids,
    };
    let mut rest = text;
    for (index, id) in ids.iter().enumerate().rev() {
        let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
        match rest.strip_suffix(bytes) {
            Some(before) => rest = before,
            None => return bytes.ends_with(rest),
        }
        if rest.is_empty() {
            return index == 0
                || !ids[..index].iter().any(|&id| is_special(id, tokenizer))
                || !begins(ids, text, tokenizer);
        }
    }
    rest.is_empty()
}

/// Whether the ids begin with these bytes, with a special token behind them.
fn begins(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    for (index, id) in ids.iter().enumerate() {
        match rest.strip_prefix(tokenizer.token_bytes(*id).unwrap_or_default()) {
            Some(behind) => rest = behind,
            None => return false,
        }
        if rest.is_empty() {
            return ids.get(index + 1).is_some_and(|&id| is_special(id, tokenizer));
        }
    }
    false
}

/// How many bytes of `spelled` there are up to the end of the message's text: at the beginning, where no reasoning stands
/// before it, else behind the reasoning, else where it stands last.
fn end_of_content(spelled: &[u8], content: &str, thinks: bool) -> Option<usize> {
    let thought = Some(THOUGHT_END).filter(|end| !content.contains(end));
    let behind = thought.and_then(|end| Some(memmem::find(spelled, end.as_bytes())? + end.len()));
    if let Some(behind) = behind {
        let space = spelled[behind..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let content = content.trim_start();
        return spelled_length(&spelled[behind + space..], content).map(|length| behind + space + length);
    }
    let first = if thinks { None } else { spelled_length(spelled, content) };
    first.or_else(|| memmem::rfind(spelled, content.as_bytes()).map(|at| at + content.len()))
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
    fn pieces_are_a_text_with_and_without_that_of_a_stop_token() {
        let pieces = |texts: &[&str]| {
            let mut pieces = Pieces::default();
            for text in texts {
                pieces.push(Some(text.as_bytes()));
            }
            pieces
        };
        assert!(are_text(&pieces(&["a", "b"]), b"ab", false));
        assert!(are_text(&pieces(&["a", "b", "<end>"]), b"ab", true));
        assert!(!are_text(&pieces(&["a", "b", "c"]), b"ab", false));
        assert!(!are_text(&pieces(&["a", "b", "<end>", "c"]), b"ab", true));
        assert!(!are_text(&pieces(&["a", "bc"]), b"ab", true));
        assert!(!are_text(&pieces(&["a"]), b"ab", true));
    }

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
