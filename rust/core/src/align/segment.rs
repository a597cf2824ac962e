//! Which vocabulary pieces spell a byte string, when only some of the pieces are known.
//!
//! Recorders lose the bytes of tokens that are lone parts of a character. What text and count still determine
//! uniquely is recovered here by dynamic programming over (piece, byte position); everything else is refused.

use std::collections::HashMap;

/// What is known of one recorded piece.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Its bytes.
    Known(&'a [u8]),
    /// Its text with U+FFFD for what is no character: its bytes decode lossily to exactly this.
    Lossy(&'a str),
    /// It showed no text: its bytes end inside a character, or it is one of the tokens that show none (special ones).
    Silent,
    /// A token whose id is known and that shows no text.
    Special(u32),
    /// Nothing at all.
    Any,
}

/// Ids that spell `text` in exactly `pieces.len()` pieces, if there is exactly one way.
///
/// `lookup` gives the ordinary vocabulary id of a byte string; `longest` bounds a piece. At most `STATES` byte
/// positions are held per piece, past which the answer is "not unique".
pub fn unique(
    pieces: &[Piece<'_>],
    text: &[u8],
    longest: usize,
    lookup: &dyn Fn(&[u8]) -> Option<u32>,
) -> Option<Vec<u32>> {
    const STATES: usize = 1024;
    // ways[i]: byte position -> (number of ways to get there, saturating at 2, and one predecessor).
    let mut ways: Vec<HashMap<usize, Step>> = Vec::with_capacity(pieces.len() + 1);
    ways.push(HashMap::from([(0, Step { ways: 1, from: 0, id: 0 })]));
    for piece in pieces {
        let mut next: HashMap<usize, Step> = HashMap::new();
        for (&start, step) in ways.last()? {
            advance(*piece, text, start, longest, lookup, &mut |end, id, ways| {
                let ways = step.ways.max(ways);
                next.entry(end)
                    .and_modify(|known| known.ways = known.ways.saturating_add(ways).min(MANY))
                    .or_insert(Step { ways, from: start, id });
            });
        }
        if next.is_empty() || next.len() > STATES {
            return None;
        }
        ways.push(next);
    }
    let mut position = text.len();
    if ways.last()?.get(&position)?.ways != 1 {
        return None;
    }
    let mut ids = vec![0; pieces.len()];
    for index in (0..pieces.len()).rev() {
        let step = &ways[index + 1][&position];
        ids[index] = step.id;
        position = step.from;
    }
    Some(ids)
}

struct Step {
    ways: u8,
    from: usize,
    id: u32,
}

/// Ways saturate here: more than one is all that matters.
const MANY: u8 = 2;

fn advance(
    piece: Piece<'_>,
    text: &[u8],
    start: usize,
    longest: usize,
    lookup: &dyn Fn(&[u8]) -> Option<u32>,
    found: &mut dyn FnMut(usize, u32, u8),
) {
    match piece {
        Piece::Known(bytes) => {
            if text[start..].starts_with(bytes)
                && let Some(id) = lookup(bytes)
            {
                found(start + bytes.len(), id, 1);
            }
            return;
        }
        Piece::Special(id) => return found(start, id, 1),
        // Which special token it would be is not known: this way alone counts as many.
        Piece::Silent => found(start, 0, MANY),
        Piece::Lossy(_) | Piece::Any => {}
    }
    for end in start + 1..=text.len().min(start + longest) {
        let bytes = &text[start..end];
        let fits = match piece {
            Piece::Silent => !is_boundary(text, end),
            Piece::Lossy(expected) => String::from_utf8_lossy(bytes) == expected,
            _ => true,
        };
        if fits && let Some(id) = lookup(bytes) {
            found(end, id, 1);
        }
    }
}

/// Whether `at` stands between two characters of UTF-8 `text`.
fn is_boundary(text: &[u8], at: usize) -> bool {
    text.get(at).is_none_or(|byte| byte & 0xC0 != 0x80)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(pieces: &'static [&'static [u8]]) -> impl Fn(&[u8]) -> Option<u32> {
        move |bytes| pieces.iter().position(|piece| *piece == bytes).map(|index| index as u32)
    }

    #[test]
    fn a_character_cut_in_three_is_recovered_when_there_is_one_way() {
        // U+1F60A is F0 9F 98 8A.
        let lookup = vocabulary(&[b"\xF0\x9F", b"\x98", b"\x8A", b"\xF0", b"\x9F"]);
        let pieces = [Piece::Silent, Piece::Silent, Piece::Any];
        assert_eq!(unique(&pieces, "\u{1F60A}".as_bytes(), 4, &lookup), Some(vec![0, 1, 2]));
    }

    #[test]
    fn two_ways_are_refused() {
        let lookup = vocabulary(&[b"\xF0\x9F", b"\x98", b"\x8A", b"\xF0", b"\x9F\x98"]);
        let pieces = [Piece::Silent, Piece::Silent, Piece::Any];
        assert_eq!(unique(&pieces, "\u{1F60A}".as_bytes(), 4, &lookup), None);
    }

    #[test]
    fn a_token_without_text_may_be_special_and_then_nothing_is_known() {
        let lookup = vocabulary(&[b"\xC3", b"\xA9", b"\xC3\xA9"]);
        assert_eq!(unique(&[Piece::Silent, Piece::Any], "\u{e9}".as_bytes(), 2, &lookup), None);
        let lookup = vocabulary(&[b"\xC3", b"\xA9"]);
        assert_eq!(unique(&[Piece::Silent, Piece::Any], "\u{e9}".as_bytes(), 2, &lookup), Some(vec![0, 1]));
    }

    #[test]
    fn a_continuation_that_carries_text_is_found_by_what_it_decodes_to() {
        // U+00C5 is C3 85; the second token holds its last byte and two letters.
        let lookup = vocabulary(&[b"\xC3", b"\x85sa", b".", b"s", b"a", b"\x85"]);
        let pieces = [Piece::Silent, Piece::Lossy("\u{FFFD}sa"), Piece::Known(b"."), Piece::Special(9)];
        assert_eq!(unique(&pieces, "\u{c5}sa.".as_bytes(), 4, &lookup), Some(vec![0, 1, 2, 9]));
    }

    #[test]
    fn known_pieces_anchor_the_unknown_ones() {
        let lookup = vocabulary(&[b"a", b"b", b"\xC3", b"\xA9"]);
        let pieces = [Piece::Known(b"a"), Piece::Lossy("\u{FFFD}"), Piece::Lossy("\u{FFFD}"), Piece::Known(b"b")];
        assert_eq!(unique(&pieces, "a\u{e9}b".as_bytes(), 2, &lookup), Some(vec![0, 2, 3, 1]));
    }

    #[test]
    fn an_ambiguous_text_of_a_hundred_thousand_pieces_ends_soon() {
        let text = vec![b'a'; 100_000];
        let lookup = vocabulary(&[b"a", b"aa"]);
        let pieces = vec![Piece::Any; 60_000];
        assert_eq!(unique(&pieces, &text, 2, &lookup), None);
    }
}
