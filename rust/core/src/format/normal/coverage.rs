//! Whether the tokens that a recorder kept spell what the policy said: recorders that keep only a stream's last chunk, or lose
//! some, leave a list that is shorter than the text.

use crate::drift::Reason;
use crate::trace::{Generation, Message, Note, Pieces};

/// Notes a token list that spells only a part of the message. `before` is the message before it, which the policy may
/// have been asked to continue.
pub fn check(generation: &mut Generation, message: &Message, before: Option<&Message>) {
    let tokens = &generation.tokens;
    let Some(pieces) = tokens.bytes.as_ref().or(tokens.texts.as_ref()).filter(|_| tokens.ids.is_none()) else { return };
    let Some(text) = message.value.get("content").and_then(|content| content.as_str()) else { return };
    let prefill =
        before.filter(|before| before.role() == "assistant").and_then(|before| before.value.get("content")?.as_str());
    let said = prefill.and_then(|prefill| text.strip_prefix(prefill)).unwrap_or(text);
    if spells_part(pieces, said) {
        let detail = format!("the listed tokens spell {} of the message's {} bytes", pieces.data.len(), said.len());
        generation.notes.push(Note { reason: Reason::StreamIncomplete, count: pieces.len() as u32, detail });
    }
}

/// Whether the pieces occur in the text in order and leave out more than whitespace.
fn spells_part(pieces: &Pieces, text: &str) -> bool {
    let missing = text.trim().len().saturating_sub(pieces.data.len());
    // A text with U+FFFD is not what the bytes say.
    if missing == 0 || pieces.known.contains(&false) || pieces.is_empty() || text.contains('\u{FFFD}') {
        return false;
    }
    let mut rest = text.as_bytes();
    (0..pieces.len()).filter_map(|index| pieces.get(index)).filter(|piece| !piece.is_empty()).all(|piece| {
        let found = memchr::memmem::find(rest, piece);
        rest = found.map_or(rest, |at| &rest[at + piece.len()..]);
        found.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_alone_or_a_gap_is_a_part_and_trimmed_space_is_not() {
        for (texts, said, is_part) in [
            (&[" dog"][..], "The quick brown dog", true),
            (&["The", " dog"], "The quick brown dog", true),
            (&["The", " dog"], "The dog\n", false),
            (&["The", " cat"], "The quick brown dog", false),
        ] {
            let mut pieces = Pieces::default();
            for text in texts {
                pieces.push(Some(text.as_bytes()));
            }
            assert_eq!(spells_part(&pieces, said), is_part, "{texts:?} {said}");
        }
    }
}
